"""Any robot that is registered with lerobot (0.4.4), third-party ones too, as a `Robot` that is commanded by joints.

lerobot brings torch along and its calls block while a bus is read, so this runs in the arm's own process
(`real.robots.server` with ``driver``), never in the supervisor's. Units are lerobot's own: degrees, or shares of the
calibrated range (-100 … 100, grippers 0 … 100), which ``low`` and ``high`` tell. Servos keep their last target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from real.limits import Limits
from real.robots.protocol import Capabilities, Measured, Reference, RobotLost
from real.robots.simulated import Picture
from vla_rl.errors import ConfigError, MissingPackage
from vla_rl.specs import CameraSpec, EmbodimentSpec

_UNPLUGGED = (ConnectionError, OSError, RuntimeError, TimeoutError)
_SPEEDS = {"joint_speed": 200.0, "joint_acceleration": 2000.0, "joint_jerk": 100_000.0, "joint_step": 20.0}


class LeRobotArm:
    """``type`` is lerobot's name for the robot, ``options`` its config, ``plugins`` modules that register further types.

    ``low`` and ``high`` {joint: number} are the joints' ends where they are not -100 … 100 (grippers 0 … 100). ``speeds``
    overrides what the robot can do at most: joint_speed, joint_acceleration, joint_jerk, joint_step, in units per second.
    """

    def __init__(
        self,
        type: str,
        options: Mapping[str, Any] | None = None,
        control_hz: float = 20.0,
        plugins: tuple[str, ...] = (),
        low: Mapping[str, float] | None = None,
        high: Mapping[str, float] | None = None,
        speeds: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.device, self.clock = make_device(type, dict(options or {}), plugins), clock
        self.name = f"lerobot_{type}"
        self.names = tuple(self.device.action_features)
        grippers = [name for name in self.names if "gripper" in name]
        ends = ({n: 0.0 if n in grippers else -100.0 for n in self.names} | dict(low or {}), dict(high or {}))
        bounds = [tuple(float(ends[0][n]) for n in self.names), tuple(float(ends[1].get(n, 100.0)) for n in self.names)]
        self._gripper = self.names.index(grippers[0]) if grippers else -1
        shapes = {n: s for n, s in self.device.observation_features.items() if isinstance(s, tuple)}
        self.embodiment = EmbodimentSpec(
            name=self.name, action_names=self.names, action_units=("lerobot",) * len(self.names), action_low=bounds[0],
            action_high=bounds[1], frame="joints", rotation="none", gripper="none", control_hz=control_hz,
            cameras=tuple(CameraSpec(n, s[0], s[1]) for n, s in shapes.items()), proprio_names=self.names,
        )  # fmt: skip
        self.capabilities = Capabilities(kind="joints", max_hz=100.0)
        self.limits = dataclasses.replace(_fastest(speeds or {}), joint_low=bounds[0], joint_high=bounds[1])
        self._last: Measured | None = None
        self._images: dict[str, np.ndarray] = {}
        self._number = -1
        self._stopped = self._owes_stop = False

    def connect(self) -> None:
        try:
            self.device.connect()
        except _UNPLUGGED as error:
            raise ConfigError(f"{self.name} cannot be connected: {error}. Check its port, power and cable") from None

    def observe(self) -> Measured:
        """Blocks while the bus is read."""
        if self._owes_stop:
            self._pay()
        seen = self._call(self.device.get_observation)
        stamp = self.clock()
        joints = np.array([float(seen[name]) for name in self.names])
        self._images = {name: seen[name] for name in self.embodiment.camera_names if name in seen}
        before = self._last
        gap = stamp - before.stamp if before is not None else 0.0
        velocity = (joints - before.joints) / gap if before is not None and gap > 1e-6 else np.zeros(len(joints))
        opening = 0.0
        if self._gripper >= 0:
            low, high = (self.limits.joint_low[self._gripper], self.limits.joint_high[self._gripper])
            opening = float(np.clip((joints[self._gripper] - low) / (high - low), 0.0, 1.0))
        none = np.empty(0)
        errors = ("stopped",) if self._stopped else ()
        self._last = Measured(stamp, none, none, joints, velocity, opening, none, joints, None, errors)
        return self._last

    def command(self, reference: Reference) -> None:
        if not self._stopped:
            self._aim(reference.joints)

    def hold(self) -> None:
        """Its servos keep the pose that was measured last."""
        if self._last is not None:
            self._aim(self._last.joints)

    def stop(self) -> bool:
        self._stopped = self._owes_stop = True
        self._pay()
        return not self._owes_stop

    def _pay(self) -> None:
        """Hold, as a stop asked for; a bus that lost it hears it again."""
        with contextlib.suppress(RobotLost):
            self.hold()
            self._owes_stop = False

    def clear(self) -> None:
        self._stopped = self._owes_stop = False

    def pictures(self) -> list[Picture]:
        """What came with the last observation. lerobot tells neither frame numbers nor when a picture was taken."""
        self._number += bool(self._images)
        stamp = self._last.stamp if self._last is not None else self.clock()
        return [Picture(name, self._number, stamp, image) for name, image in self._images.items()]

    def close(self) -> None:
        with contextlib.suppress(*_UNPLUGGED, RobotLost):
            self.hold()
            self.device.disconnect()

    def _aim(self, joints: np.ndarray) -> None:
        self._call(self.device.send_action, dict(zip(self.names, map(float, joints))))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except _UNPLUGGED as error:
            raise RobotLost(f"{self.name} does not answer: {str(error) or error.__class__.__name__}") from None


def _fastest(speeds: Mapping[str, float]) -> Limits:
    """What the robot can do at most. Raises `ConfigError` for a key that is none of `_SPEEDS`."""
    if wrong := [name for name in speeds if name not in _SPEEDS]:
        raise ConfigError(f"robot.options.speeds has {wrong[0]!r}: use {', '.join(_SPEEDS)}")
    values: dict[str, Any] = {**_SPEEDS, **speeds}
    return Limits(**values)


def make_device(kind: str, options: dict[str, Any], plugins: tuple[str, ...]) -> Any:
    """lerobot's own object. Raises `ConfigError` for a type that nobody registered, or options that it does not take."""
    try:
        from lerobot import robots
        from lerobot.robots.config import RobotConfig
        from lerobot.robots.utils import make_robot_from_config
    except ModuleNotFoundError as error:
        raise MissingPackage("lerobot", "lerobot", "A robot of lerobot") from error
    for plugin in plugins:
        importlib.import_module(plugin)
    if kind not in RobotConfig.get_known_choices():
        for module in pkgutil.iter_modules(robots.__path__):
            with contextlib.suppress(ImportError):  # that of a vendor whose SDK is not installed
                importlib.import_module(f"lerobot.robots.{module.name}")
    known = RobotConfig.get_known_choices()
    if kind not in known:
        raise ConfigError(
            f"lerobot knows no robot {kind!r}: it knows {', '.join(sorted(known))}; name a third-party package in plugins"
        )
    try:
        config = known[kind](**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the options of lerobot's {kind} are wrong: {error}") from None
    return make_robot_from_config(config)
