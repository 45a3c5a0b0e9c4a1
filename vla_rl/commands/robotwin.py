"""``vla-rl robotwin``: what a user's own RoboTwin checkout needs before it can be trained on."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl import build
from vla_rl.commands.shared import Add, add_overrides


def add(command: Add) -> None:
    """``vla-rl robotwin seeds`` and ``convert``."""
    robotwin = command(
        "robotwin", None, "prepare a RoboTwin checkout of your own (env.root=FOLDER)"
    )
    actions = robotwin.add_subparsers(title="actions", metavar="ACTION", required=True)
    seeds = actions.add_parser(
        "seeds", help="find seeds that the scripted expert solves, for env.seeds=FILE"
    )
    seeds.set_defaults(function=run_seeds)
    seeds.add_argument(
        "--task",
        required=True,
        help="the name of one of RoboTwin's tasks, such as stack_blocks_two",
    )
    seeds.add_argument(
        "--episodes", type=int, default=100, metavar="N", help="solved seeds to find for training"
    )
    seeds.add_argument(
        "--held-out",
        type=int,
        default=100,
        metavar="N",
        help="and for evaluation, from another range",
    )
    seeds.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that try seeds"
    )
    seeds.add_argument(
        "--file", type=Path, required=True, help="what is there of other tasks is kept"
    )
    add_overrides(seeds, "env.root=FOLDER env.setting=demo_randomized ...")
    convert = actions.add_parser(
        "convert", help="make a dataset of RoboTwin's own HDF5 demonstrations, for dataset=FOLDER"
    )
    convert.set_defaults(function=run_convert)
    convert.add_argument(
        "source",
        type=Path,
        help="the folder of one task and setting, with data and instructions in it",
    )
    convert.add_argument("dataset", type=Path, metavar="DATASET", help="a new folder")
    convert.add_argument(
        "--task",
        required=True,
        help="the name of one of RoboTwin's tasks, such as stack_blocks_two",
    )
    convert.add_argument(
        "--limit", type=int, default=0, metavar="N", help="demonstrations (0: all)"
    )
    convert.add_argument("--video", action="store_true", help="pictures as H.264 instead of PNG")
    add_overrides(convert, "env.root=FOLDER env.embodiment=... ...")


def run_seeds(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose
    from vla_rl.files import require_file_target

    require_file_target(arguments.file, f"--file {arguments.file}")
    config = compose(
        [
            "~run",
            "env=robotwin",
            f"env.tasks=[{arguments.task}]",
            *arguments.overrides,
            "env.seeds=''",
        ]
    )
    wanted = {"train": arguments.episodes, "held_out": arguments.held_out}
    find = build.attribute("sim.robotwin.collect:find_seeds")
    for line in find(
        config.env, wanted, arguments.file, workers=arguments.workers, python=config.slots.python
    ):
        print(line, flush=True)


def run_convert(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose
    from vla_rl.data.lerobot_writer import DemonstrationWriter
    from vla_rl.files import require_new
    from vla_rl.specs import EmbodimentSpec

    require_new(arguments.dataset)
    build.attribute("sim.robotwin.published:files")(arguments.source)  # before a process is started
    config = compose(
        ["~run", "env=robotwin", f"env.tasks=[{arguments.task}]", *arguments.overrides]
    )
    read = build.attribute("sim.robotwin.published:episodes")
    described = build.attribute("sim.robotwin.collect:robot_of")(
        config.env, python=config.slots.python
    )
    embodiment = EmbodimentSpec.from_dict(described)
    with DemonstrationWriter(arguments.dataset, embodiment, video=arguments.video) as writer:
        for episode in read(arguments.source, embodiment, arguments.task, arguments.limit):
            writer.add_episode(**episode)
    print(f"wrote {len(writer)} demonstrations of {arguments.task} to {arguments.dataset}")
