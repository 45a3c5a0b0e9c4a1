"""What a device of an operator is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from real.messages import State
from vla_rl.errors import UserError

STILL = (0.0,) * 6


class DeviceLost(UserError):
    """The device does not answer any more; the operator lets go, by definition."""


@dataclass(frozen=True)
class Sample:
    """The complete state of a device at ``stamp`` (seconds, this machine's clock): the fields of
    `real.messages.Input`.

    ``axes`` are translation and rotation about x y z of the robot's base (x forward, y left, z up),
    each in [-1, 1], as is ``gripper`` (1 closes, -1 opens, 0 leaves it). ``target`` is an absolute
    device's own, in the robot's action space. ``problem`` says to the operator why the device is
    not engaged, where that is not plain.
    """

    stamp: float
    dead_man: bool = False
    axes: tuple[float, ...] = STILL
    gripper: float = 0.0
    keys: tuple[str, ...] = ()
    target: tuple[float, ...] = ()
    problem: str = ""


class Device(Protocol):
    """One input device. All calls return at once."""

    name: str

    def connect(self) -> None:
        """Raises `UserError` that says what is missing."""
        ...

    def read(self, now: float, state: State | None) -> Sample:
        """What the operator does now; ``state`` is the newest of the robot, None before the
        first. Raises `DeviceLost`."""
        ...

    def release(self) -> None:
        """Forget that it was engaged: control was lost, or the mode changed. It has to be
        engaged anew."""
        ...

    def close(self) -> None:
        """May be called again; never raises."""
        ...
