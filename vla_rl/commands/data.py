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
    """``vla-rl data check`` and ``show``."""
    data = command("data", None, "look at recorded episodes")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = (
        "what is wrong with a dataset, demonstrations, journals or a replay; exit status 1 for "
        "what training would refuse"
    )
    check = actions.add_parser("check", help=text, description=text)
    check.set_defaults(function=run_check)
    check.add_argument(
        "source",
        metavar="FOLDER",
        help="a LeRobotDataset v3, LIBERO's or RoboTwin's HDF5, a session, a replay, or a run that "
        "has some",
    )
    check.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="as JSON, into a file or in place of the table",
    )
    add_overrides(
        check, "the run that would learn from it, for its robot and tasks: env=NAME tasks=[...]"
    )

    text = (
        "what is in a LeRobotDataset v3: robot, cameras, rate, tasks, episodes, ranges and first "
        "pictures"
    )
    show = actions.add_parser("show", help=text, description=text)
    show.set_defaults(function=run_show)
    show.add_argument(
        "source", metavar="FOLDER", help="a LeRobotDataset v3: one's own, lerobot's, another tool's"
    )
    show.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="first pictures as FILE.png, or all of it as FILE.html",
    )
    show.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="as JSON, into a file or in place of the text",
    )
    add_overrides(
        show, "as the run that would learn from it reads it: env.KEY=VALUE of env=dataset"
    )


def run_check(arguments: argparse.Namespace) -> int:
    from vla_rl.data.sources import check_folder

    _require_there(arguments.source)
    reports = check_folder(arguments.source, *_learner(arguments.overrides, arguments.source))
    document = {
        "sound": not any(r.errors for r in reports),
        "sources": [r.to_dict() for r in reports],
    }
    if arguments.json is True:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(r.text() for r in reports))
        write_result(arguments.json, document)
    return int(not document["sound"])


def run_show(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose, with_run

    _require_there(arguments.source)
    out = arguments.figure
    if out is not None and out.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--figure {out} has to end in .png (pictures) or .html (all of it)")
    config = compose(with_run(["env=dataset", *arguments.overrides], ["~run"]))
    from vla_rl.data.recording import open_recording
    from vla_rl.data.show import facts, first_pictures, page, sheet, text
    from vla_rl.files import replacing_file

    recording = open_recording(arguments.source, config.env)
    found = facts(recording)
    if arguments.json is True:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print(text(found))
        write_result(arguments.json, found)
    if out is not None:
        shown = first_pictures(recording)
        made = sheet(shown) if out.suffix.lower() == ".png" else page(found, shown).encode()
        with replacing_file(out) as part:
            part.write_bytes(made)
        print(f"wrote {out}")


def _require_there(source: str) -> None:
    from vla_rl.hub import DATASET, fetch_hint

    if not source:
        raise ConfigError("the FOLDER to look at is an empty text: name a folder, '.' for this one")
    if not Path(source).exists():
        raise ConfigError(f"{source}: there is no such file or folder{fetch_hint(source, DATASET)}")


def _learner(overrides: list[str], source: str) -> tuple[Any, list[str]]:
    """Robot and instructions of the run that ``overrides`` describe, which would learn from
    ``source``; nothing without them."""
    if not overrides:
        return None, []
    from vla_rl.assembly.env_and_policy import open_env, select_tasks
    from vla_rl.config import compose, with_run

    config = compose(with_run(overrides, ["~run"]))
    config.dataset = config.dataset or source
    with contextlib.closing(open_env(config)) as env:
        tasks = select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        return env.embodiment, [text for task in tasks for text in task.instructions]
