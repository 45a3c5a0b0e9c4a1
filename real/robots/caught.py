"""A driver whose calls may raise anything, as a `Robot` that raises `RobotLost` alone and reports finite numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from real.named import named
from real.robots.protocol import Measured, Reference, Robot, RobotLost
from real.robots.simulated import Picture
from vla_rl.errors import ConfigError, UserError, first_line


class Caught:
    """``robot`` behind this. `stop` answers False where the driver raised, so that who asked asks again."""

    def __init__(self, robot: Robot):
        self.robot = robot
        self.name, self.embodiment = robot.name, robot.embodiment
        self.capabilities, self.limits = robot.capabilities, robot.limits

    def connect(self) -> None:
        """Raises `UserError` alone."""
        _opened(self.name, self.robot.connect)

    def observe(self) -> Measured:
        measured = self._call(self.robot.observe)
        numbers = (measured.position, measured.quaternion, measured.joints, measured.joint_velocity, measured.proprio)
        if not all(np.isfinite(x).all() for x in (*numbers, measured.stamp, measured.gripper)):
            raise RobotLost(f"{self.name} reports numbers that are not finite")
        return measured  # type: ignore[no-any-return]

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
        return self._call(self.robot.pictures)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.robot.close()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RobotLost:
            raise
        except Exception as error:
            raise RobotLost(f"the driver of {self.name} failed: {type(error).__name__}: {first_line(error)}") from error


def driven(driver: str, options: dict[str, Any]) -> Caught:
    """The connected robot of the driver "module:Class". Raises `UserError` alone."""
    kind = named(driver)
    robot = Caught(_opened(driver, lambda: kind(**options)))
    robot.connect()
    return robot


def _opened(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be opened: {type(error).__name__}: {first_line(error)}. Check robot.options, its port and power"
        ) from error
