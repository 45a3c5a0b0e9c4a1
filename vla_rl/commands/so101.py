"""``vla-rl robot so101``: an SO-101 and its leader, from the ports to a policy that gets better."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ARM = Path("outputs") / "so101"
_Adds = Callable[[Any], argparse.ArgumentParser]


def add(kinds: Any, run: _Adds, teach: _Adds, learn: _Adds, describe: _Adds) -> None:
    """``setup``, ``doctor``, ``limits``, ``sim``; and what ``run``, ``teach``, ``learn`` and ``describe`` add
    to `kinds`, with the arm's own overrides in front."""
    text = "an SO-101 and its leader: set-up, limits, demonstrations, policy, corrections"
    so101 = kinds.add_parser("so101", help=text, description=text)
    steps = so101.add_subparsers(title="what to do", metavar="WHAT", required=True)
    _add_setup(steps)
    for name, function, said in (
        ("doctor", run_doctor, "what this arm lacks, and how to get it"),
        ("limits", run_limits, "its limits, from a sweep by hand"),
    ):
        step = steps.add_parser(name, help=said, description=said)
        step.set_defaults(function=function)
        _add_arm(step)
        if name == "limits":
            step.add_argument(
                "--seconds",
                type=float,
                default=0.0,
                metavar="S",
                help="default: until Enter is pressed",
            )
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
    for add_step in (run, teach, learn, describe):
        step = add_step(steps)
        _add_arm(step)
        step.set_defaults(function=_with_arm(step.get_default("function")))


def _add_arm(step: argparse.ArgumentParser) -> None:
    step.add_argument(
        "--arm", type=Path, default=_ARM, metavar="FOLDER", help=f"its files; default: {_ARM}"
    )


def _add_setup(steps: Any) -> None:
    text = "ports, numbers of the motors, calibration (lerobot's), first limits"
    setup = steps.add_parser("setup", help=text, description=text)
    setup.set_defaults(function=run_setup)
    _add_arm(setup)
    setup.add_argument("--port", required=True, help="of the follower; lerobot-find-port finds it")
    setup.add_argument("--leader-port", default="", metavar="PORT", help="of the leader")
    setup.add_argument(
        "--motors", action="store_true", help="give new motors their numbers first, one by one"
    )
    setup.add_argument("--again", action="store_true", help="calibrate anew")


def _overrides(arm: Path) -> list[str]:
    from vla_rl import build

    return list(build.attribute("real.so101:Kit")(arm).overrides())


def _with_arm(function: Callable[[argparse.Namespace], Any]) -> Callable[..., Any]:
    """The command, with the arm's overrides before the person's."""

    def command(arguments: argparse.Namespace) -> Any:
        own = _overrides(arguments.arm)
        if "robot" in arguments:  # of learn
            arguments.robot, own = own[0].removeprefix("robot="), own[1:]
        arguments.overrides = [*own, *arguments.overrides]
        return function(arguments)

    return command


def run_setup(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    a = arguments
    kit = build.attribute("real.so101:setup")(
        a.arm, a.port, a.leader_port, a.motors, a.again, lambda text: print(text, flush=True)
    )
    print(f"wrote {kit.folder}; what it lacks says: vla-rl robot so101 doctor --arm {kit.folder}")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Exit status 1 where the arm cannot be driven yet."""
    from vla_rl import build
    from vla_rl.doctor.machine import FAIL, MISSING, OK, Check, listed

    rows = build.attribute("real.so101:examine")(arguments.arm)
    spare = ("cameras",)  # a session goes without
    checks = [
        Check(what, OK if good else MISSING if what in spare else FAIL, said, "" if good else fix)
        for what, good, said, fix in rows
    ]
    print("\n".join(listed(checks)))
    return int(any(check.status == FAIL for check in checks))


def run_limits(arguments: argparse.Namespace) -> None:
    from vla_rl import build
    from vla_rl.config.robot import compose
    from vla_rl.robot.limits import find

    own = [o for o in _overrides(arguments.arm) if not o.startswith("teleop")]
    file = build.attribute("real.so101:Kit")(arguments.arm).limits
    find(compose(own, moves=False), file, arguments.seconds, print)


def run_sim(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    build.attribute("sim.so101.serve:serve")(
        arguments.folder, sys.stdin, lambda text: print(text, flush=True)
    )
