"""``vla-rl robot so101``: an SO-101 and its leader, from the ports to a policy that gets better."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vla_rl.commands.arms import Adds, OwnArm

_ARM = OwnArm("so101", "real.so101", spare=("cameras",))


def add(kinds: Any, adds: Adds) -> None:
    """``setup``, ``sim``, and what `OwnArm.add` adds."""
    text = "an SO-101 and its leader: set-up, limits, demonstrations, policy, corrections"
    steps = _ARM.add(kinds, text, adds)
    _add_setup(steps)
    said = "a simulated one and its leader, behind two serial ports; until Ctrl-C"
    sim = steps.add_parser("sim", help=said, description=said)
    sim.set_defaults(function=run_sim)
    sim.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("outputs") / "so101_sim",
        metavar="FOLDER",
        help="where the ports' names lie",
    )


def _add_setup(steps: Any) -> None:
    text = "ports, numbers of the motors, calibration (lerobot's), first limits"
    setup = _ARM.step(steps, "setup", run_setup, text)
    setup.add_argument("--port", required=True, help="of the follower; lerobot-find-port finds it")
    setup.add_argument("--leader-port", default="", metavar="PORT", help="of the leader")
    setup.add_argument(
        "--motors", action="store_true", help="give new motors their numbers first, one by one"
    )
    setup.add_argument("--again", action="store_true", help="calibrate anew")


def run_setup(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    a = arguments
    kit = build.attribute("real.so101:setup")(
        a.arm, a.port, a.leader_port, a.motors, a.again, lambda text: print(text, flush=True)
    )
    print(f"wrote {kit.folder}; what it lacks says: vla-rl robot so101 doctor --arm {kit.folder}")


def run_sim(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    build.attribute("sim.so101.serve:serve")(
        arguments.folder, sys.stdin, lambda text: print(text, flush=True)
    )
