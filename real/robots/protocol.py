"""What the supervisor needs of an arm.

Positions are in metres, quaternions w x y z, both in the robot's base frame; a robot that is
commanded by joints uses its own units. Every call returns at once: `command` sets a target that the
robot's own controller tracks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from real.limits import Limits
from vla_rl.errors import UserError
from vla_rl.specs import EmbodimentSpec


class RobotLost(UserError):
    """The robot does not answer any more: unplugged, without power, its process dead."""


@dataclass(frozen=True)
class Measured:
    """What the robot says of itself. ``stamp`` is when it was measured, on this machine's clock.

    ``position`` [3] and ``quaternion`` [4] of the hand (empty where it has no kinematics),
    ``joints`` [n] and ``joint_velocity`` [n] (empty: not told), ``gripper`` its opening 0 … 1,
    ``wrench`` [6] force and torque *on* the hand (empty: no sensor), ``proprio`` [p] what a policy
    reads, ``jacobian`` [6 n] of the hand, or None. ``errors`` are what stops it until somebody
    clears them: a reflex, an e-stop, power.
    """

    stamp: float
    position: np.ndarray
    quaternion: np.ndarray
    joints: np.ndarray
    joint_velocity: np.ndarray
    gripper: float
    wrench: np.ndarray
    proprio: np.ndarray
    jacobian: np.ndarray | None = None
    errors: tuple[str, ...] = ()


_FAR = 100.0  # m from its base, where no arm's hand is
_ABSURD = 1e6  # no arm's radians, degrees or newtons
MOST = {
    "position": _FAR,
    "quaternion": _ABSURD,
    "joints": _ABSURD,
    "joint_velocity": _ABSURD,
    "wrench": _ABSURD,
    "proprio": 1e9,
    "jacobian": _ABSURD,
    "gripper": _ABSURD,
    "stamp": math.inf,
}
"""What no number of a `Measured` reaches, by its field."""
UNIT = 0.01  # by which a quaternion's length may differ from 1


@dataclass(frozen=True)
class Reference:
    """One target: a pose (``position`` [3], ``quaternion`` [4]) or ``joints`` [n]; ``gripper``
    in [-1, 1], 1 closes."""

    gripper: float
    position: np.ndarray = field(default_factory=lambda: np.empty(0))
    quaternion: np.ndarray = field(default_factory=lambda: np.empty(0))
    joints: np.ndarray = field(default_factory=lambda: np.empty(0))

    def vector(self) -> tuple[float, ...]:
        """position, quaternion, joints, gripper: what there is of them, as `State.reference` and
        the robot's log hold it."""
        return (
            *self.position.tolist(),
            *self.quaternion.tolist(),
            *self.joints.tolist(),
            float(self.gripper),
        )


@dataclass(frozen=True)
class Capabilities:
    """``kind`` of command: "cartesian" or "joints".

    ``gain`` (1/s): an arm under impedance control moves at about ``gain`` times the distance to its
    target, which therefore lies ahead of it; 0 is an arm that follows its target closely.
    ``holds``: `hold` brakes and keeps the pose by itself; where it does not, the supervisor ramps
    the target down. ``watchdog_s``: it stops by itself after that silence (0: never, so a guard is
    needed). ``force``: it measures forces. ``resets``: `Resettable` works. ``stopper`` is how a
    guard in another process stops it: "module:function" and a text for that function, or empty
    where nothing but the supervisor can.
    """

    kind: str = "cartesian"
    gain: float = 0.0
    holds: bool = False
    watchdog_s: float = 0.0
    force: bool = False
    resets: bool = False
    max_hz: float = 100.0
    stopper: tuple[str, str] = ("", "")


class Robot(Protocol):
    """An arm. ``embodiment`` says what a policy's actions and observations mean, ``limits`` are
    the robot's own."""

    name: str
    embodiment: EmbodimentSpec
    capabilities: Capabilities
    limits: Limits

    def connect(self) -> None:
        """Raises `UserError` that says what is missing."""
        ...

    def observe(self) -> Measured:
        """The newest measurement. Raises `RobotLost`."""
        ...

    def command(self, reference: Reference) -> None:
        """Track this target from now on. An arm with ``errors`` ignores it. Raises `RobotLost`."""
        ...

    def hold(self) -> None:
        """Brake, then keep the pose. Harmless when repeated. Raises `RobotLost`."""
        ...

    def stop(self) -> bool:
        """Stop at once, whatever it costs; what comes later is ignored until `clear`. False where
        the arm did not take it: then every `observe` tries again. Never raises."""
        ...

    def clear(self) -> None:
        """Clear ``errors`` after a person asked for it; never called by itself. Raises
        `RobotLost`."""
        ...

    def close(self) -> None:
        """Hold, then let go of the device. May be called again; never raises."""
        ...


@runtime_checkable
class Resettable(Protocol):
    """A robot that can put itself and its surroundings into a start state: a simulator."""

    def begin(self, episode: dict[str, Any]) -> None: ...
