"""An arm's limits from a sweep by hand: the arm is limp and read alone, a person moves it through
all that it is to do, and what was seen becomes a limits file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real.limits import Limits
from real.robots.protocol import Measured
from vla_rl.errors import ConfigError

_WINDOW_S = 0.1  # over which a speed is measured: an encoder's single step is none
_FEWEST = 20
_RISE_S, _JERK_S, _AHEAD_S = 0.1, 0.02, 0.15  # to full speed, to full acceleration, of a request


@dataclass
class Sweep:
    """Positions of the joints, in their own units, and of the hand (m) where the robot says it."""

    names: Sequence[str]
    stamps: list[float] = field(default_factory=list)
    joints: list[np.ndarray] = field(default_factory=list)
    hand: list[np.ndarray] = field(default_factory=list)

    def add(self, measured: Measured) -> None:
        self.stamps.append(measured.stamp)
        self.joints.append(np.array(measured.joints, dtype=float))
        if measured.position.size == 3:
            self.hand.append(np.array(measured.position, dtype=float))

    def speeds(self) -> np.ndarray:
        """The fastest of each joint [n] (units/s), over `_WINDOW_S`."""
        return np.abs(self._rates(np.stack(self.joints))).max(axis=0, initial=0.0)

    def _rates(self, places: np.ndarray) -> np.ndarray:
        """How fast ``places`` [m n] changed over `_WINDOW_S`, [k n] a second."""
        stamps = np.array(self.stamps)
        later = np.searchsorted(stamps, stamps + _WINDOW_S)
        first = np.flatnonzero(later < len(stamps))
        gaps = stamps[later[first]] - stamps[first]
        return np.asarray((places[later[first]] - places[first]) / gaps[:, None])

    def limits(self, own: Limits, by_joints: bool) -> tuple[dict[str, Any], list[str]]:
        """What a limits file needs, never wider than the robot's ``own``, and the joints that
        hardly moved, which keep their own ends and the slowest speed. Raises `ConfigError` for a
        sweep in which nothing was seen."""
        if len(self.stamps) < _FEWEST:
            raise ConfigError(
                f"the sweep has {len(self.stamps)} measurements, and {_FEWEST} are needed: move "
                "the arm for longer"
            )
        joints = np.stack(self.joints)
        low, high = joints.min(axis=0), joints.max(axis=0)
        lowest, highest = np.array(own.joint_low), np.array(own.joint_high)
        still = high - low < 0.05 * (highest - lowest)
        if still.all():
            raise ConfigError("no joint moved by a twentieth of its range: move the arm by hand")
        speeds = self.speeds()
        speeds = np.minimum(np.where(still, speeds[~still].min(), speeds), own.joint_speed)
        fastest = float(speeds.max())
        found: dict[str, Any] = {
            "joint_low": upwards(np.where(still, lowest, np.maximum(low, lowest))),
            "joint_high": downwards(np.where(still, highest, np.minimum(high, highest))),
            "joint_speed": downwards(speeds),
        }
        if by_joints:
            found |= {
                "joint_acceleration": _least(fastest / _RISE_S, own.joint_acceleration),
                "joint_jerk": _least(fastest / _RISE_S / _JERK_S, own.joint_jerk),
                "joint_step": _least(fastest * _AHEAD_S, own.joint_step),
            }
        if self.hand:
            found |= self._of_the_hand(own)
        found["observation_age"] = 0.3
        return found, [name for name, is_still in zip(self.names, still) if is_still]

    def _of_the_hand(self, own: Limits) -> dict[str, Any]:
        hand = np.stack(self.hand)
        fastest = float(np.linalg.norm(self._rates(hand), axis=1).max(initial=1e-3))
        return {
            "speed": _least(fastest, own.speed),
            "acceleration": _least(fastest / _RISE_S, own.acceleration),
            "jerk": _least(fastest / _RISE_S / _JERK_S, own.jerk),
            "step": _least(fastest * _AHEAD_S, own.step),
            "box": {"low": upwards(hand.min(axis=0)), "high": downwards(hand.max(axis=0))},
        }


def upwards(values: Any) -> list[float]:
    """To three digits, never below."""
    return [math.ceil(round(1e3 * float(x), 6)) / 1e3 for x in values]


def downwards(values: Any) -> list[float]:
    """To three digits, never above."""
    return [-x for x in upwards(-np.asarray(values))]


def _least(value: float, own: float | tuple[float, ...]) -> float:
    return round(float(np.minimum(value, np.min(own))), 4)


def record(robot: Any, ended: Callable[[], bool], wait: Callable[[], None]) -> Sweep:
    """From the robot's ``watch`` on, which reads alone, until ``ended``. Raises `UserError`."""
    try:
        watch = robot.watch
    except AttributeError:
        raise ConfigError(
            f"{robot.name} cannot be read alone: a sweep is of an arm of lerobot's that is limp "
            "(robot=lerobot or robot=lerobot_cartesian)"
        ) from None
    watch()
    sweep = Sweep(robot.embodiment.action_names)
    while not ended():
        sweep.add(robot.observe())
        wait()
    return sweep


def as_file(found: dict[str, Any], units: Sequence[str], still: Sequence[str], about: str) -> str:
    """The YAML of a limits file, which says where it comes from."""
    import yaml

    lines = [f"# {about}"]
    lines += [f"# joints in {', '.join(units)}; lengths in m; seconds"]
    if still:
        lines += [f"# not moved, so with their own ends and the slowest speed: {', '.join(still)}"]
    return "\n".join(lines) + "\n" + yaml.safe_dump(found, sort_keys=False)
