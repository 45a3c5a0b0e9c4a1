"""A robot that is commanded by joints, driven by poses of its hand: for policies and people whose
actions are Cartesian.

Each command is one step of `real.robots.kinematics`: the joints go towards the pose as fast as they
may, within their range. Steps begin at the joints that were commanded last, so that an arm that
lags is not told to lag further.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real.limits import Limits
from real.named import named
from real.robots.kinematics import Kinematics
from real.robots.protocol import Capabilities, Measured, Reference
from real.robots.simulated import Picture
from vla_rl.errors import ConfigError
from vla_rl.specs import EmbodimentSpec

_SLACK = 0.1  # rad that a joint may be measured beyond its model's range
_LEASH = 0.3  # rad between the joints that are commanded and those that are measured
_LONGEST = 0.05  # s of motion in one command, however long ago the last one was
_FAST = Limits(speed=1.0, acceleration=30.0, jerk=10_000.0, step=0.1)
_TURNS = dataclasses.replace(
    _FAST,
    rotation_speed=3.5,
    rotation_acceleration=300.0,
    rotation_jerk=60_000.0,
    rotation_step=0.6,
)


@dataclass(frozen=True)
class _CartesianConfig:
    """``arm`` is "module:Class" of the robot beneath with its ``options``. ``model`` is a URDF or
    MJCF file of the arm, and ``hand`` the body or site in it whose pose is commanded, in the
    model's own base frame.

    ``joints`` {dimension of the robot's action: joint of the model}; the dimension that is left
    over, if any, is the gripper (its low end is closed). One unit of a joint is ``unit`` radians
    (degrees by default), counted from ``zeros`` {dimension: its number where the model's joint is
    at 0}. An action moves the hand by at most ``step`` metres and turns it by at most ``turn``
    radians (0: it has no turns, and the hand stays turned as it was, where it can). ``speed`` is
    the joints' fastest, in rad/s.
    """

    arm: str
    model: str
    hand: str
    joints: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    unit: float = math.pi / 180.0
    zeros: Mapping[str, float] = field(default_factory=dict)
    step: float = 0.05
    turn: float = 0.0
    speed: float = 2.0
    control_hz: float = 20.0

    def spare(self, names: tuple[str, ...]) -> str:
        """The gripper's dimension of a robot with these, or "". Raises `ConfigError` for joints
        that are not its."""
        if missing := [name for name in self.joints if name not in names]:
            raise ConfigError(
                f"robot.options.joints has {missing[0]!r}, and the robot takes {', '.join(names)}"
            )
        left = [name for name in names if name not in self.joints]
        if len(left) > 1:
            raise ConfigError(
                f"robot.options.joints leaves out {', '.join(left)}: only the gripper "
                "may be no joint"
            )
        return left[0] if left else ""


class CartesianArm:
    """A `Robot`; ``options`` are those of `_CartesianConfig`.

    Proprioception: position (m) and quaternion (w x y z) of the hand, the gripper's opening 0 … 1,
    the joints (rad).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, **options: Any):
        try:
            self.config = x = _CartesianConfig(**options)
        except TypeError as error:
            raise ConfigError(
                f"robot.options of {type(self).__name__} are wrong: {error}"
            ) from None
        self.clock, self.arm = clock, named(x.arm)(**x.options)
        names = self.arm.embodiment.action_names
        gripper = x.spare(names)
        self._at = [names.index(name) for name in x.joints]
        self._grip = names.index(gripper) if gripper else -1
        self._zero = np.array([float(x.zeros.get(name, 0.0)) for name in x.joints])
        self._kinematics = k = Kinematics(
            x.model, x.hand, list(x.joints.values()), x.turn > 0, x.speed
        )
        self.name = f"cartesian_{self.arm.name}"
        self.embodiment = _embodiment(self.name, x, bool(gripper), self.arm.embodiment)
        self.capabilities = Capabilities(kind="cartesian", max_hz=self.arm.capabilities.max_hz)
        own, low, high = (
            _TURNS if x.turn else _FAST,
            tuple(map(float, k.low)),
            tuple(map(float, k.high)),
        )
        self.limits = dataclasses.replace(own, joint_low=low, joint_high=high, joint_speed=x.speed)
        self._seen: Measured | None = None
        self._wanted: np.ndarray | None = None  # the joints that were commanded last (rad)
        self._kept: np.ndarray | None = None  # the hand's turn, where actions have none
        self._when = -math.inf
        self._closes = 0.0

    def connect(self) -> None:
        """Raises `ConfigError` where the model's range does not hold a joint: a wrong unit, zero
        or model."""
        self.arm.connect()
        self._require_in_range()

    def watch(self) -> None:
        """To be read alone: see `LeRobotArm.watch`. Raises as `connect`."""
        self.arm.watch()
        self._require_in_range()

    def _require_in_range(self) -> None:
        joints, k = self._radians(self.arm.observe()), self._kinematics
        for name, at, low, high in zip(self.config.joints, joints, k.low, k.high, strict=True):
            if not low - _SLACK <= at <= high + _SLACK:
                raise ConfigError(
                    f"{name} is measured at {at:.2f} rad, and the model's joint goes from "
                    f"{low:.2f} to {high:.2f}: set robot.options.unit (radians a unit) and zeros, "
                    "or mend the model"
                )

    def observe(self) -> Measured:
        m = self._seen = self.arm.observe()
        joints = self._radians(m)
        position, quaternion, jacobian = self._kinematics.pose(joints)
        return dataclasses.replace(
            m,
            position=position,
            quaternion=quaternion,
            joints=joints,
            jacobian=jacobian,
            joint_velocity=m.joint_velocity[self._at] * self.config.unit,
            proprio=np.concatenate([position, quaternion, [m.gripper], joints]),
        )

    def command(self, reference: Reference) -> None:
        measured, now = self._seen or self.arm.observe(), self.clock()
        joints = self._radians(measured)
        begin = (
            joints
            if self._wanted is None
            else np.clip(self._wanted, joints - _LEASH, joints + _LEASH)
        )
        turn = reference.quaternion
        if not self.config.turn:
            turn = self._kept = turn if self._kept is None else self._kept
        seconds = min(max(now - self._when, 1.0 / self.capabilities.max_hz), _LONGEST)
        self._wanted, self._when = (
            self._kinematics.towards(begin, reference.position, turn, seconds),
            now,
        )
        self._closes = reference.gripper or self._closes
        self.arm.command(Reference(0.0, joints=self._numbers(self._wanted, measured)))

    def _numbers(self, joints: np.ndarray, measured: Measured) -> np.ndarray:
        """The robot's own, [n]: its gripper stays where it is until it is asked for."""
        own = np.array(measured.joints, dtype=float)
        own[self._at] = joints / self.config.unit + self._zero
        if self._grip >= 0 and self._closes:
            low, high = (
                self.arm.limits.joint_low[self._grip],
                self.arm.limits.joint_high[self._grip],
            )
            own[self._grip] = low + 0.5 * (1.0 - self._closes) * (high - low)
        return own

    def _radians(self, measured: Measured) -> np.ndarray:
        return (measured.joints[self._at] - self._zero) * self.config.unit

    def hold(self) -> None:
        self._wanted = self._kept = None
        self.arm.hold()

    def stop(self) -> bool:
        self._wanted = self._kept = None
        return self.arm.stop() is not False

    def clear(self) -> None:
        self.arm.clear()

    def pictures(self) -> list[Picture]:
        """Of the robot beneath."""
        return self.arm.pictures()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.arm.close()


def _embodiment(
    name: str, config: _CartesianConfig, gripper: bool, beneath: EmbodimentSpec
) -> EmbodimentSpec:
    """What an action and the proprioception of the arm mean."""
    turns, grip = ("rx", "ry", "rz") if config.turn else (), ("gripper",) if gripper else ()
    most = (config.step,) * 3 + (config.turn,) * len(turns) + (1.0,) * len(grip)
    return EmbodimentSpec(
        name=name,
        action_names=("dx", "dy", "dz", *turns, *grip),
        action_low=tuple(-x for x in most),
        action_high=most,
        action_units=("m",) * 3 + ("rad",) * len(turns) + ("command",) * len(grip),
        frame="base",
        rotation="axis_angle_delta" if turns else "none",
        gripper="-1 open, +1 close" if grip else "none",
        control_hz=config.control_hz,
        cameras=beneath.cameras,
        proprio_names=("x", "y", "z", "qw", "qx", "qy", "qz", "gripper_open", *config.joints),
    )
