"""``vla-rl robot``: what can be done with a session's record."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.shared import Add
from vla_rl.errors import UserError


def add(command: Add) -> None:
    """``vla-rl robot verify`` and ``export``."""
    robot = command("robot", None, "sessions with a real or simulated arm")
    kinds = robot.add_subparsers(title="what to do", metavar="WHAT", required=True)

    verify = kinds.add_parser("verify", help="name every gap of a session's journals")
    verify.set_defaults(function=run_verify)
    verify.add_argument("session", type=Path, metavar="SESSION")
    verify.add_argument("--recover", action="store_true", help="close what a kill left open, at its last good record")

    export = kinds.add_parser("export", help="write a session as a LeRobotDataset")
    export.set_defaults(function=run_export)
    export.add_argument("session", type=Path, metavar="SESSION")
    export.add_argument("dataset", type=Path, metavar="DATASET", help="a new folder")
    export.add_argument("--video", action="store_true", help="H.264 files instead of exact pictures")
    export.add_argument("--discarded", action="store_true", help="with the episodes that the operator discarded")


def run_verify(arguments: argparse.Namespace) -> int:
    """Exit status 1 where something is missing or contradicts itself."""
    from vla_rl import build

    if arguments.recover:
        for path in build.attribute("real.journal:journals")(arguments.session):
            closed = build.attribute("real.journal:recover")(path)
            if closed != path:
                print(f"closed {closed.name}")
    problems, lines = build.attribute("real.verify:verify")(arguments.session)
    for line in lines:
        print(line)
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(lines)} episodes, {len(problems)} problems")
    return 1 if problems else 0


def run_export(arguments: argparse.Namespace) -> None:
    from vla_rl.data.session_export import export_session

    if arguments.dataset.exists():
        raise UserError(f"{arguments.dataset} exists already: choose another name for the dataset")
    done = export_session(arguments.session, arguments.dataset, video=arguments.video, discarded=arguments.discarded)
    print(f"{done.path}: {done.episodes} episodes, {done.steps} control steps")
    for line in done.left_out:
        print(f"left out: {line}")
