"""``vla-rl data``: what is recorded in a folder, and what is wrong with it."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from vla_rl.commands.shared import Add, add_overrides, write_result
from vla_rl.errors import ConfigError


def add(command: Add) -> None:
    """``vla-rl data check``."""
    data = command("data", None, "look at recorded episodes")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "what is wrong with a dataset, demonstrations, journals or a replay; exit status 1 for what training would refuse"
    check = actions.add_parser("check", help=text, description=text)
    check.set_defaults(function=run_check)
    check.add_argument(
        "source", metavar="FOLDER",
        help="a LeRobotDataset v3, LIBERO's or RoboTwin's HDF5, a session, a replay, or a run that has some",
    )  # fmt: skip
    check.add_argument(
        "--json", type=Path, nargs="?", const=True, metavar="FILE", help="as JSON, into a file or in place of the table"
    )
    add_overrides(check, "the run that would learn from it, for its robot and tasks: env=NAME tasks=[...]")


def run_check(arguments: argparse.Namespace) -> int:
    from vla_rl.data.sources import check_folder
    from vla_rl.files import fetch_hint

    if not arguments.source:
        raise ConfigError("the FOLDER to check is an empty text: name a folder, '.' for this one")
    if not Path(arguments.source).exists():
        raise ConfigError(f"{arguments.source}: there is no such file or folder{fetch_hint(arguments.source)}")
    reports = check_folder(arguments.source, *_learner(arguments.overrides))
    document = {"sound": not any(r.errors for r in reports), "sources": [r.to_dict() for r in reports]}
    if arguments.json is True:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(r.text() for r in reports))
        write_result(arguments.json, document)
    return int(not document["sound"])


def _learner(overrides: list[str]) -> tuple[Any, list[str]]:
    """Robot and instructions of the run that ``overrides`` describe; nothing without them."""
    if not overrides:
        return None, []
    from vla_rl.config import compose, with_run
    from vla_rl.run.opening import open_env, select_tasks

    config = compose(with_run(overrides, ["~run"]))
    with contextlib.closing(open_env(config)) as env:
        tasks = select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        return env.embodiment, [text for task in tasks for text in task.instructions]
