"""A driver that may raise and report anything, as a `Robot` that raises `RobotLost` alone and
reports what can be."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from real.named import named
from real.robots.protocol import MOST, UNIT, Measured, Reference, Robot, RobotLost
from real.robots.simulated import Picture
from vla_rl.errors import ConfigError, UserError, first_line


class Guarded:
    """``robot`` behind this. `stop` answers False where the driver raised, so that who asked
    asks again."""

    def __init__(self, robot: Robot):
        self.robot = robot
        self._widths: dict[str, int] = {}  # of what it has reported
        self._sizes: dict[str, tuple[int, ...]] = {}  # of its cameras' pictures
        self.name, self.embodiment = robot.name, robot.embodiment
        self.capabilities, self.limits = robot.capabilities, robot.limits

    def connect(self) -> None:
        """Raises `UserError` alone."""
        self._widths, self._sizes = {}, {}
        _opened(self.name, self.robot.connect)

    def observe(self) -> Measured:
        """In arrays of its own. Raises `RobotLost` for whatever the gate, a policy or the record
        could not use."""
        return self._call(lambda: self._checked(self.robot.observe()))  # type: ignore[no-any-return]

    def _checked(self, measured: Any) -> Measured:
        if not isinstance(measured, Measured):
            raise RobotLost(f"{self.name} reports {_short(measured)} instead of a Measured")
        x = {name: self._numbers(name, getattr(measured, name)) for name in MOST}
        hand = self.capabilities.kind == "cartesian" or x["position"].size or x["quaternion"].size
        joints = x["joints"].size
        shapes: dict[str, list[tuple[int, ...]]] = {
            "position": [(3,)] if hand else [(0,)],
            "quaternion": [(4,)] if hand else [(0,)],
            "joints": [(self._joints(joints),)],
            "joint_velocity": [(joints,), (0,)],
            "wrench": [(6,), (0,)],
            "proprio": [(self._widths.get("proprio", x["proprio"].size),)],
            "jacobian": [(6, joints)],
            "gripper": [()],
            "stamp": [()],
        }
        for name, allowed in shapes.items():
            if x[name] is not None and x[name].shape not in allowed:
                raise RobotLost(
                    f"{self.name} reports {name} of shape {list(x[name].shape)} instead "
                    f"of {list(allowed[0])}"
                )
        if hand and abs(float(np.linalg.norm(x["quaternion"])) - 1.0) > UNIT:
            raise RobotLost(
                f"{self.name} reports the quaternion {x['quaternion'].tolist()}, whose "
                "length is not 1"
            )
        errors: Any = measured.errors
        if not isinstance(errors, tuple | list) or not all(
            isinstance(error, str) for error in errors
        ):
            raise RobotLost(
                f"{self.name} reports errors={_short(errors)}, and a tuple of names is meant"
            )
        self._widths = {"joints": joints, "proprio": x["proprio"].size}
        x |= {name: float(x[name]) for name in ("gripper", "stamp")}
        return dataclasses.replace(measured, **x, errors=tuple(errors))

    def _numbers(self, name: str, value: Any) -> Any:
        """A copy, which the driver does not write into."""
        if value is None and name == "jacobian":
            return None
        found = np.array(value)
        if found.dtype.kind not in "fiu" and found.size:
            raise RobotLost(f"{self.name} reports {name}={_short(value)}, and numbers are meant")
        # (NaN is not below it either)
        if not (np.abs(found := found.astype(float)) < MOST[name]).all():
            worst = (
                "numbers that are not finite"
                if not np.isfinite(found).all()
                else f"more than {MOST[name]:g}"
            )
            raise RobotLost(f"{self.name} reports {name}={_short(value)}: {worst}")
        return found

    def _joints(self, found: int) -> int:
        """How many joints it has to report: as many as it is limited in, or commanded by, or had
        before."""
        if self.limits.joint_low:
            return len(self.limits.joint_low)
        if self.capabilities.kind == "joints":
            return len(self.embodiment.action_names)
        return self._widths.get("joints", found)

    def command(self, reference: Reference) -> None:
        self._call(self.robot.command, reference)

    def hold(self) -> None:
        self._call(self.robot.hold)

    def stop(self) -> bool:
        with contextlib.suppress(Exception):
            return self.robot.stop() is not False  # a driver of one's own may say nothing
        return False

    def clear(self) -> None:
        self._call(self.robot.clear)

    def begin(self, episode: dict[str, Any]) -> None:
        """Of a `Resettable` robot."""
        self._call(self.robot.begin, episode)  # type: ignore[attr-defined]

    def pictures(self) -> list[Picture]:
        """Of one size for each camera."""
        return self._call(lambda: self._seen(self.robot.pictures()))  # type: ignore[attr-defined, no-any-return]

    def _seen(self, pictures: Any) -> list[Picture]:
        if not isinstance(pictures, tuple | list) or not all(
            isinstance(p, Picture) for p in pictures
        ):
            raise RobotLost(f"{self.name} reports {_short(pictures)} instead of a list of pictures")
        for p in pictures:
            image: Any = p.image
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
                raise RobotLost(
                    f"{self.name} reports a picture of {p.camera} that is no uint8 [H W 3]"
                )
            if image.shape != (size := self._sizes.setdefault(p.camera, image.shape)):
                raise RobotLost(
                    f"{self.name} reports a picture of {p.camera} of {image.shape}, and "
                    f"it had {size}"
                )
        return list(pictures)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.robot.close()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RobotLost:
            raise
        except Exception as error:
            raise RobotLost(
                f"the driver of {self.name} failed: {type(error).__name__}: {first_line(error)}"
            ) from error


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def driven(driver: str, options: dict[str, Any]) -> Guarded:
    """The connected robot of the driver "module:Class". Raises `UserError` alone."""
    kind = named(driver)
    robot = Guarded(_opened(driver, lambda: kind(**options)))
    robot.connect()
    return robot


def _opened(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be opened: {type(error).__name__}: {first_line(error)}. Check "
            "robot.options, its port and power"
        ) from error
