"""A person's Franka Research 3: what a session needs to know of it, in a folder, and what that
folder, this machine and the robot lack."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real.kit import ArmKit, Row, cameras_row
from real.robots.franka import FrankaArm
from real.robots.franka_loop import connected, library_named
from real.sweep import as_file, downwards, upwards
from vla_rl.errors import ConfigError, UserError, install_command

_PORTS = {"robot": 1337, "hand": 1338}  # of libfranka's protocol
# of a hand before somebody has found better ones: ahead of the base, 5 cm above it
_BOX = {"low": [0.28, -0.40, 0.05], "high": [0.70, 0.40, 0.70]}
# limits before that (m, rad, s, N): walking pace is six times as fast
_HAND = {
    "speed": 0.25,
    "acceleration": 1.5,
    "jerk": 150.0,
    "step": 0.08,
    "rotation_speed": 0.7,
    "rotation_acceleration": 4.0,
    "rotation_jerk": 400.0,
    "rotation_step": 0.3,
    "box": _BOX,
    "joint_margin": 0.1,
    "joint_speed": 0.7,
    "torque": 5.0,
}
_JOINTS = {
    "joint_speed": 0.5,
    "joint_acceleration": 2.5,
    "joint_jerk": 250.0,
    "joint_step": 0.2,
    "joint_margin": 0.1,
}
_BOTH = {"force": 15.0, "observation_age": 0.3}
_REALTIME = Path("/sys/kernel/realtime")


class Kit(ArmKit):
    what, setup = "Franka", "vla-rl robot franka setup --address ADDRESS"

    def robot(self) -> FrankaArm:
        """Unconnected. Raises `ConfigError`."""
        return FrankaArm(**self.read(self.arm).get("options", {}))


def setup(folder: Path, options: dict[str, Any], home: bool) -> Kit:
    """Write the kit; ``home`` moves the hand's fingers. Raises `UserError`."""
    kit, robot = Kit(folder), FrankaArm(**options)
    if home:
        _home(robot)
    arm = {
        "driver": "real.robots.franka:FrankaArm",
        "options": options,
        "short": {"address": "options.address"},
        "limits": str(kit.limits.resolve()),
        "supervisor": {"required": ["guard", "recorder", "console", "launcher"]},
    }
    kit.write(kit.arm, arm)
    if not kit.limits.exists():
        kit.write(kit.limits, _first(robot))
    return kit


def _first(robot: FrankaArm) -> str:
    first: dict[str, Any] = {**_BOTH}
    if robot.joints:
        first |= {**_JOINTS, "joint_speed": [_JOINTS["joint_speed"]] * 7}
        if robot.config.hand:  # (the hand's opening is one of its joints)
            first["joint_speed"].append(5.0)
            first["joint_margin"] = 0.05
    else:
        first |= {k: v for k, v in _HAND.items() if robot.config.turn or "rotation" not in k}
    first["joint_low"] = upwards(robot.limits.joint_low)
    first["joint_high"] = downwards(robot.limits.joint_high)
    about = "first limits of this Franka, well below its own; look at the box: is that your table?"
    return as_file(first, robot.embodiment.action_units, (), about)


def _home(robot: FrankaArm) -> None:
    told = {"address": robot.config.address, "library": robot.config.library}

    def homed(library: Any) -> None:
        if not library.Gripper(robot.config.address).homing():
            raise ConfigError("the hand found no end: free its fingers and try again")

    connected(homed, told)


# ------------------------------------------------------------------------------------------- doctor
def examine(folder: Path) -> list[Row]:
    """What this arm lacks for a session. It is connected to and read; nothing moves."""
    kit, rows = Kit(folder), []
    there = kit.arm.is_file()
    rows.append(("set-up", there, str(kit.arm), f"{kit.setup} --arm {folder}"))
    if not there:
        return rows
    try:
        robot = kit.robot()
        library_named(robot.config.library)
    except UserError as error:
        fix = install_command("franka", "pylibfranka")
        return [*rows, ("pylibfranka", False, str(error), fix)]
    rows.append(("pylibfranka", True, "installed", ""))
    rows += [_real_time(robot), *_network(robot)]
    if all(good for what, good, *_ in rows if what != "real time"):
        rows += _robot(robot)
    return [*rows, kit.limits_row(robot), cameras_row(())]


def _real_time(robot: FrankaArm) -> Row:
    """What libfranka asks for; Franka's documentation says how to get it."""
    said = _REALTIME.read_text(encoding="ascii").strip() if _REALTIME.is_file() else "0"
    found = "a real-time kernel" if said == "1" else "no real-time kernel (PREEMPT_RT)"
    if not robot.config.realtime:
        found += (
            ", and none is asked for: the robot may stop by communication_constraints_violation"
        )
    fix = "install one, with rtprio 99 for you, or set the arm up with --no-realtime to try it"
    return "real time", said == "1", found, fix


def _network(robot: FrankaArm) -> Iterator[Row]:
    address = robot.config.address
    for what, port in _PORTS.items():
        if what == "hand" and not robot.config.hand:
            continue
        try:
            socket.create_connection((address, port), 2.0).close()
        except OSError as error:
            fix = "activate FCI in Desk; check address and cable"
            if what == "hand":
                fix = "activate the hand in Desk; without one: --no-hand"
            yield f"{what}'s port", False, f"{address}:{port}: {error.strerror or error}", fix
        else:
            yield f"{what}'s port", True, f"{address}:{port}", ""


def _robot(robot: FrankaArm) -> Iterator[Row]:
    """Its own word, read alone."""
    try:
        robot.watch()
        measured = robot.observe()
    except UserError as error:
        yield "robot", False, str(error), "see there"
        return
    finally:
        robot.close()
    wrong, fix = ", ".join(measured.errors), "acknowledge in a session, or in Desk"
    yield "robot", not wrong, wrong or f"joints {measured.joints.round(2).tolist()}", fix
