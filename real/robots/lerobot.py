"""Any robot that is registered with lerobot, third-party ones too, as a `Robot` that is commanded
by joints.

lerobot brings torch along and its calls block while a bus is read, so this runs in the arm's own
process (`real.robots.server` with ``driver``), never in the supervisor's. Units and ends of a joint
are what its motor is set to and calibrated for: degrees, or shares of the calibrated range (-100 …
100, or 0 … 100). Servos keep their last target, and their torque: lerobot would let go of it as a
robot is calibrated, configured, disconnected or forgotten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from real.lerobot_kinds import make
from real.limits import Limits
from real.robots.protocol import Capabilities, Measured, Reference, RobotLost
from real.robots.servos import Servos, arms
from real.robots.simulated import Picture
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.specs import CameraSpec, EmbodimentSpec

_RETRY_S = 0.1  # a read that failed sooner is tried once more: buses lose a packet now and then
# by lerobot's MotorNormMode
_SHARES = {"range_m100_100": (-100.0, 100.0), "range_0_100": (0.0, 100.0)}
_SPEEDS = {
    "joint_speed": 200.0,
    "joint_acceleration": 2000.0,
    "joint_jerk": 100_000.0,
    "joint_step": 20.0,
}


class LeRobotArm:
    """``type`` is lerobot's name for the robot, ``options`` its config, ``plugins`` modules that
    register further types.

    ``low`` and ``high`` {joint: number} narrow the ends that its motors have, and are needed of
    each joint whose motor does not tell its unit. ``speeds`` overrides what the robot can do at
    most: joint_speed, joint_acceleration, joint_jerk, joint_step, in units per second. What lerobot
    raises, whatever it is, comes out as `RobotLost`.
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
        self.device, self.clock = build(type, options or {}, plugins), clock
        self.name, self._id = f"lerobot_{type}", str((options or {}).get("id", ""))
        self.names, self._parts = tuple(self.device.action_features), arms(self.device)
        for part in self._parts.values():
            _keep_torque(part)
        units, *bounds = _ends(self.name, self.names, self._parts, low or {}, high or {})
        grippers = [name for name in self.names if "gripper" in name]
        self._gripper = self.names.index(grippers[0]) if grippers else -1
        tuples = {n: s for n, s in self.device.observation_features.items() if isinstance(s, tuple)}
        # (a depth map of lerobot 0.6 has one)
        shapes = {n: s for n, s in tuples.items() if len(s) == 3 and s[2] == 3}
        self.embodiment = EmbodimentSpec(
            name=self.name,
            action_names=self.names,
            action_units=units,
            action_low=bounds[0],
            action_high=bounds[1],
            frame="joints",
            rotation="none",
            gripper="none",
            control_hz=control_hz,
            cameras=tuple(CameraSpec(n, s[0], s[1]) for n, s in shapes.items()),
            proprio_names=self.names,
        )
        self.capabilities = Capabilities(kind="joints", max_hz=100.0)
        self.limits = dataclasses.replace(
            _fastest(speeds or {}), joint_low=bounds[0], joint_high=bounds[1]
        )
        self._servos = Servos(self._parts)
        self._last: Measured | None = None
        self._held: np.ndarray | None = None  # the pose of a hold that lasts
        self._images: dict[str, np.ndarray] = {}
        self._number = -1
        self._stopped = self._owes_stop = False

    def connect(self) -> None:
        """Raises `ConfigError`; before any motor is written to where the arm is not calibrated."""
        for part in self._parts.values():
            part.configure = _Configure(part, part.configure, uncalibrated(self.name, self._id))
        self._open()

    def watch(self) -> None:
        """Open it to be read alone: nothing is written to its motors, which a hand may move. Raises
        `ConfigError` for one that is not calibrated, holds, or cannot be reached."""
        for part in self._parts.values():
            part.configure = lambda: None
        self._open()
        for part in self._parts.values():
            require_limp(part, self.name)

    def _open(self) -> None:
        try:
            self.device.connect(calibrate=False)
        except UserError:
            raise
        except Exception as error:  # whatever a vendor's driver raises
            raise ConfigError(
                f"{self.name} cannot be connected: {first_line(error)}. Check its port, power and "
                "cable"
            ) from None
        if not self.device.is_calibrated:
            raise uncalibrated(self.name, self._id)

    def observe(self) -> Measured:
        """Blocks while the bus is read."""
        if self._owes_stop:
            self._pay()
        seen, joints = self._call(self._read)
        stamp = self.clock()
        self._images = {name: seen[name] for name in self.embodiment.camera_names if name in seen}
        before = self._last
        gap = stamp - before.stamp if before is not None else 0.0
        velocity = (
            (joints - before.joints) / gap
            if before is not None and gap > 1e-6
            else np.zeros(len(joints))
        )
        opening = 0.0
        if self._gripper >= 0:
            low, high = (
                self.limits.joint_low[self._gripper],
                self.limits.joint_high[self._gripper],
            )
            opening = float(np.clip((joints[self._gripper] - low) / (high - low), 0.0, 1.0))
        none = np.empty(0)
        errors = (("stopped",) if self._stopped else ()) + self._servos.trouble(stamp)
        self._last = Measured(
            stamp, none, none, joints, velocity, opening, none, joints, None, errors
        )
        return self._last

    def command(self, reference: Reference) -> None:
        if not self._stopped:
            self._held = None
            self._aim(reference.joints)

    def hold(self) -> None:
        """Its servos keep the pose that was measured as the hold began: an arm gives way a little
        under its weight, and would sink if that were its goal again and again."""
        if self._held is None and self._last is not None:
            self._held = self._last.joints
        if self._held is not None:
            self._aim(self._held)

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
        """What came with the last observation. lerobot tells neither frame numbers nor when a
        picture was taken."""
        self._number += bool(self._images)
        stamp = self._last.stamp if self._last is not None else self.clock()
        return [Picture(name, self._number, stamp, image) for name, image in self._images.items()]

    def close(self) -> None:
        """Its motors keep holding: only a person lets go of an arm, by its switch or lerobot's
        own tools."""
        with contextlib.suppress(RobotLost):
            self.hold()
        with contextlib.suppress(Exception):
            self.device.disconnect()

    def _aim(self, joints: np.ndarray) -> None:
        action = dict(zip(self.names, map(float, joints)))
        self._call(lambda: self.device.send_action(action))

    def _read(self) -> tuple[dict[str, Any], np.ndarray]:
        """All that the robot says, and its joints in it. A bus may lose a packet: asked once
        more where that was quick."""
        began = self.clock()
        try:
            seen = self.device.get_observation()
        except (ConnectionError, TimeoutError):
            if self.clock() - began > _RETRY_S:
                raise
            seen = self.device.get_observation()
        joints = np.array([float(seen[name]) for name in self.names])
        if not np.isfinite(joints).all():
            raise ValueError(f"its joints are {joints.tolist()}")
        return seen, joints

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # a corrupted packet is an IndexError of a vendor's SDK
            self._servos.mend(self.clock())
            raise RobotLost(
                f"{self.name} does not answer: {type(error).__name__}: {first_line(error)}"
            ) from None


def _fastest(speeds: Mapping[str, float]) -> Limits:
    """What the robot can do at most. Raises `ConfigError` for a key that is none of `_SPEEDS`."""
    if wrong := [name for name in speeds if name not in _SPEEDS]:
        raise ConfigError(f"robot.options.speeds has {wrong[0]!r}: use {', '.join(_SPEEDS)}")
    values: dict[str, Any] = {name: float(value) for name, value in {**_SPEEDS, **speeds}.items()}
    if wrong := [name for name, value in values.items() if not 0.0 < value < np.inf]:
        raise ConfigError(
            f"robot.options.speeds.{wrong[0]}={values[wrong[0]]}: give a number above 0"
        )
    return Limits(**values)


def build(kind: str, options: Mapping[str, Any], plugins: tuple[str, ...] = ()) -> Any:
    """lerobot's own object. Raises as `real.lerobot_kinds.make`."""
    makers = "lerobot.robots.config:RobotConfig", "lerobot.robots.utils:make_robot_from_config"
    return make("robot", kind, options, *makers, plugins)


def _ends(
    robot: str,
    names: tuple[str, ...],
    parts: Mapping[str, Any],
    low: Mapping[str, float],
    high: Mapping[str, float],
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Unit, low and high end of each joint: its motor's, narrowed by ``low`` and ``high``.
    Raises `ConfigError`."""
    told = {
        f"{prefix}{name}.pos": end
        for prefix, part in parts.items()
        for name, end in _motor_ends(part)
    }
    if unknown := [name for name in (*low, *high) if name not in names]:
        raise ConfigError(
            f"robot.options.low or high has {unknown[0]!r}, and {robot} takes {', '.join(names)}"
        )
    found = []
    for name in names:
        if name not in told and not (name in low and name in high):
            raise ConfigError(
                f"{robot} does not tell the unit of {name}: give both of its ends, "
                "robot.options.low and high, in that unit"
            )
        unit, least, most = told.get(name, ("lerobot", -np.inf, np.inf))
        ends = float(low.get(name, least)), float(high.get(name, most))
        if not (least <= ends[0] < ends[1] <= most and np.isfinite(ends).all()):
            raise ConfigError(
                f"robot.options.low and high of {name} are {ends[0]:g} and {ends[1]:g}, and its "
                f"motor goes from {least:g} to {most:g} {unit}: give finite ends within, the low "
                "one below the high"
            )
        found.append((unit, *ends))
    units, lows, highs = zip(*found)
    return units, lows, highs


def _motor_ends(part: Any) -> Iterator[tuple[str, tuple[str, float, float]]]:
    """(motor, (unit, low, high)) of an arm whose bus says what its motors count in.

    In degrees the ends are ± half of the calibrated range (lerobot's `MotorsBus._normalize`: 0 is
    its middle, 360° are resolution - 1 steps), or of a whole turn while there is no calibration:
    `connect` refuses such an arm.
    """
    bus = vars(part).get("bus")
    for name, motor in () if bus is None else bus.motors.items():
        mode = str(motor.norm_mode.value)
        if mode in _SHARES:
            yield name, ("percent", *_SHARES[mode])
        elif mode == "degrees":
            half = 180.0
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                calibrated = bus.calibration[name]
                steps = calibrated.range_max - calibrated.range_min
                half = 180.0 * steps / (bus.model_resolution_table[motor.model] - 1)
            yield name, ("deg", -half, half)


def _keep_torque(part: Any) -> None:
    """No end of it, not even the one that lerobot's ``__del__`` makes, lets go of the arm."""
    own = vars(part.config)
    if "disable_torque_on_disconnect" in own:
        own["disable_torque_on_disconnect"] = False
    else:
        part.disconnect = lambda: None


class _Configure:
    """An arm's ``configure``, which lets go of the torque while it writes: left out of an arm
    that holds already."""

    def __init__(self, part: Any, own: Callable[[], None], uncalibrated: ConfigError):
        self._part, self._own, self._uncalibrated = part, own, uncalibrated

    def __call__(self) -> None:
        if not self._part.is_calibrated:
            raise self._uncalibrated
        held = holding(self._part)
        if any(held) and not all(held):
            raise ConfigError(
                f"{sum(held)} of the arm's {len(held)} motors hold, the others are limp: "
                "support it, switch its power off and on again, and start anew"
            )
        if not any(held):
            self._own()


def uncalibrated(name: str, id: str) -> ConfigError:
    """That the arm ``name``, called ``id`` by lerobot, is not."""
    kind = name.removeprefix("lerobot_")
    return ConfigError(
        f"{name} is not calibrated, or by another file: support it by hand and run "
        f"`lerobot-calibrate --robot.type={kind} --robot.port=PORT "
        f"--robot.id={id or 'ID'}`, and give the same id here (robot.id)"
    )


def require_limp(part: Any, name: str) -> None:
    """Raise `ConfigError` unless a hand may move ``part``, an arm of ``name``."""
    if any(holding(part)):
        raise ConfigError(
            f"{name} holds: support it by hand and switch its power off and on, so that it can be "
            "moved"
        )


def holding(part: Any) -> list[bool]:
    """Whether each motor has torque; empty where the driver cannot be asked."""
    bus = vars(part).get("bus")
    try:
        return [bool(on) for on in bus.sync_read("Torque_Enable", normalize=False).values()]
    except NotImplementedError:  # a motor of Feetech's older protocol answers alone
        return [bool(bus.read("Torque_Enable", name, normalize=False)) for name in bus.motors]
    except (AttributeError, KeyError, TypeError):  # no bus, or one that knows no such register
        return []
