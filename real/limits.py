"""What the arm may do: a YAML file per set-up, never wider than what the robot says of itself.

Lengths in metres, angles in radians, seconds, newtons; for a robot that is commanded by joints,
``joint_*`` are in its own units (lerobot's arms use degrees or shares of the range). A key that the
robot needs and the file lacks is refused, so that nothing is limited by accident only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.errors import UserError

if TYPE_CHECKING:
    from real.robots.protocol import Robot

Vector = tuple[float, ...]


@dataclass(frozen=True)
class Box:
    """Axis-aligned, in the robot's base frame (m)."""

    low: Vector
    high: Vector


@dataclass(frozen=True)
class Limits:
    """``step`` is how far ahead of the measured pose a request may lie; speeds are of what is
    commanded.

    ``box`` is where the hand may be, ``keep_out`` where it may not. ``joint_low`` and
    ``joint_high`` are the range, ``joint_margin`` what stays free at both ends. ``force`` and
    ``torque`` are measured at the hand: above them nothing pushes further, above twice as much the
    session pauses. ``observation_age`` is how old what a policy saw may be. The gripper changes its
    mind where the request is above ``gripper_threshold``, and not again for ``gripper_lockout`` s.
    ``joint_speed`` is one number for all joints, or one for each. ``slow`` is the share of the
    speeds that is left after a fault.
    """

    speed: float = math.inf
    acceleration: float = math.inf
    jerk: float = math.inf
    step: float = math.inf
    rotation_speed: float = math.inf
    rotation_acceleration: float = math.inf
    rotation_jerk: float = math.inf
    rotation_step: float = math.inf
    box: Box | None = None
    keep_out: tuple[Box, ...] = ()
    joint_low: Vector = ()
    joint_high: Vector = ()
    joint_margin: float = 0.0
    joint_speed: float | Vector = math.inf
    joint_acceleration: float = math.inf
    joint_jerk: float = math.inf
    joint_step: float = math.inf
    force: float = math.inf
    torque: float = math.inf
    observation_age: float = 0.2
    gripper_threshold: float = 0.5
    gripper_lockout: float = 0.6
    slow: float = 0.3


_MOTION = ("speed", "acceleration", "jerk", "step")
_TURN = ("rotation_speed", "rotation_acceleration", "rotation_jerk", "rotation_step")
_JOINT = ("joint_speed", "joint_acceleration", "joint_jerk", "joint_step")
# s, s, a share: beyond it nothing is limited
_MOST = {"observation_age": 5.0, "gripper_lockout": 60.0, "slow": 1.0}
_MAY_BE_ZERO = ("joint_margin", "gripper_threshold", "gripper_lockout")


def needed(kind: str, turns: bool, force: bool) -> tuple[str, ...]:
    """Keys that a file must have for a robot that is commanded by ``kind`` ("cartesian" or
    "joints")."""
    if kind == "joints":
        return (*_JOINT, "observation_age", *(("force",) if force else ()))
    return (
        *_MOTION,
        *(_TURN if turns else ()),
        "box",
        "observation_age",
        *(("force",) if force else ()),
    )


def load_for(robot: Robot, path: str | Path) -> Limits:
    """As `load`, for ``robot``."""
    known, turns = robot.capabilities, robot.embodiment.rotation != "none"
    return load(path, robot.limits, needed(known.kind, turns, known.force))


def load(path: str | Path, own: Limits, keys: tuple[str, ...]) -> Limits:
    """The limits of a file, filled up with the robot's own. ``keys`` must stand in it. Raises
    `UserError`."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the limits file {path} cannot be read ({error.strerror}): no robot moves without "
            "one. Copy one of configs/limits and set it for your table"
        ) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the limits file {path} is no YAML: {error}") from None
    return parse(data, own, keys, str(path))


def parse(data: Any, own: Limits, keys: tuple[str, ...], place: str) -> Limits:
    """As `load`, from what the file holds."""
    known = {f.name for f in dataclasses.fields(Limits)}
    if not isinstance(data, dict):
        raise UserError(f"{place} holds no keys: it needs {', '.join(keys)}")
    if unknown := sorted(map(str, set(data) - known)):
        raise UserError(
            f"{place} has unknown keys {', '.join(unknown)}: known are {', '.join(sorted(known))}"
        )
    if missing := [key for key in keys if key not in data]:
        raise UserError(f"{place} lacks {', '.join(missing)}: this robot needs {', '.join(keys)}")
    values = {key: _value(key, value, place) for key, value in data.items()}
    found = dataclasses.replace(own, **values)
    if isinstance(found.joint_speed, tuple) and len(found.joint_speed) != (
        count := len(own.joint_low)
    ):
        said = (
            f"the robot has {count} joints"
            if count
            else "the robot does not say how many joints it has"
        )
        raise UserError(
            f"{place}: joint_speed has {len(found.joint_speed)} numbers, and {said}: give one for "
            "each, or one for all"
        )
    if problems := wider(found, own):
        raise UserError(f"{place} is wider than the robot's own limits: {'; '.join(problems)}")
    return found


def _value(key: str, value: Any, place: str) -> Any:
    if key == "box":
        return _box(key, value, place)
    if key == "keep_out":
        if not isinstance(value, list):
            raise UserError(f"{place}: keep_out is no list of boxes")
        return tuple(_box(f"keep_out[{i}]", box, place) for i, box in enumerate(value))
    if key in ("joint_low", "joint_high"):
        return _numbers(key, value, place)
    if key == "joint_speed" and isinstance(value, list):
        return tuple(_above_zero(f"{key}[{i}]", number, place) for i, number in enumerate(value))
    return _above_zero(key, value, place)


def _above_zero(key: str, value: Any, place: str) -> float:
    number = _numbers(key, [value], place)[0]
    most = _MOST.get(key, math.inf)
    if number < 0 or (number == 0 and key not in _MAY_BE_ZERO) or number > most:
        allowed = f" and at most {most:g}" if key in _MOST else ""
        raise UserError(f"{place}: {key} is {number:g}, which must be above 0{allowed}")
    return number


def _numbers(key: str, value: Any, place: str) -> Vector:
    good = isinstance(value, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in value
    )
    if not good or not all(math.isfinite(x) for x in value):
        raise UserError(f"{place}: {key} is {value!r}, and finite numbers are meant")
    return tuple(float(x) for x in value)


def _box(key: str, value: Any, place: str) -> Box:
    if not isinstance(value, dict) or set(value) != {"low", "high"}:
        raise UserError(f"{place}: {key} needs 'low' and 'high', each x, y, z in metres")
    low, high = (_numbers(f"{key}.{end}", value[end], place) for end in ("low", "high"))
    if len(low) != 3 or len(high) != 3 or any(a >= b for a, b in zip(low, high)):
        raise UserError(
            f"{place}: {key} needs three numbers each, 'low' below 'high', got {low} and {high}"
        )
    return Box(low, high)


def wider(found: Limits, own: Limits) -> list[str]:
    """In what ``found`` allows more than ``own``: one line each."""
    lines = []
    for name in (*_MOTION, *_TURN, *_JOINT, "force", "torque"):
        mine, theirs = np.broadcast_arrays(getattr(found, name), getattr(own, name))
        over = np.flatnonzero(mine > theirs * (1 + 1e-9))
        if len(over):
            which = f" of joint {over[0] + 1}" if mine.size > 1 else ""
            lines.append(f"{name}{which} {mine.flat[over[0]]:g}, robot {theirs.flat[over[0]]:g}")
    if found.joint_margin < own.joint_margin:
        lines.append(f"joint_margin {found.joint_margin:g}, robot {own.joint_margin:g}")
    if own.box and found.box:
        low = any(a < b for a, b in zip(found.box.low, own.box.low))
        if low or any(a > b for a, b in zip(found.box.high, own.box.high)):
            lines.append(
                f"box {found.box.low} to {found.box.high}, robot {own.box.low} to {own.box.high}"
            )
    room = [high - low for low, high in zip(found.joint_low, found.joint_high)]
    if room and 2.0 * found.joint_margin >= min(room):
        lines.append(
            f"joint_margin {found.joint_margin:g} leaves nothing of a range of {min(room):g}"
        )
    for name, sign in (("joint_low", 1.0), ("joint_high", -1.0)):
        mine, theirs = getattr(found, name), getattr(own, name)
        if len(mine) != len(theirs) or any(sign * a < sign * b for a, b in zip(mine, theirs)):
            lines.append(f"{name} {mine}, robot {theirs}")
    return lines
