"""``vla-rl robot franka``: a Franka Research 3, from its address to a policy that gets better."""

from __future__ import annotations

import argparse
from typing import Any

from vla_rl.commands.arms import Adds, OwnArm

_ARM = OwnArm("franka", "real.franka", spare=("cameras", "real time"))


def add(kinds: Any, adds: Adds) -> None:
    """``setup``, and what `OwnArm.add` adds."""
    text = "a Franka Research 3: set-up, limits, demonstrations, policy, corrections"
    said = "write its files: address, how it is commanded, first limits"
    setup = _ARM.step(_ARM.add(kinds, text, adds), "setup", run_setup, said)
    setup.add_argument("--address", required=True, help="of the robot, such as 172.16.0.2")
    setup.add_argument(
        "--control",
        choices=("cartesian", "joints"),
        default="cartesian",
        help="poses of the hand (default), or joints",
    )
    setup.add_argument("--no-hand", action="store_true", help="there is no Franka Hand")
    setup.add_argument(
        "--home", action="store_true", help="find the hand's widest opening: its fingers move"
    )
    setup.add_argument(
        "--no-realtime", action="store_true", help="this machine has no real-time kernel"
    )


def run_setup(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    a = arguments
    options = {
        "address": a.address,
        "control": a.control,
        "hand": not a.no_hand,
        "realtime": not a.no_realtime,
    }
    kit = build.attribute("real.franka:setup")(a.arm, options, a.home)
    print(f"wrote {kit.folder}; what it lacks says: vla-rl robot franka doctor --arm {kit.folder}")
