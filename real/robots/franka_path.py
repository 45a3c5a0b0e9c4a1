"""What a Franka Research 3 may be commanded, and the way to a target at 1 kHz that keeps it.

The figures are Franka's own: of libfranka 0.21 (``include/franka/rate_limiting.h``), which names
Franka's "Control Interface Specification and Robot Limits" as their source; ranges and torques those
of the URDF that the robot itself serves. Radians, metres, seconds, newton metres. A command beyond
any of them is a reflex: the robot aborts the motion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from real.pacing import paced, shorten, towards
from real.rotations import difference, from_matrix, from_vector, matrix, multiply, normalised

DT = 1e-3
LOW = np.array([-2.7501, -1.7918, -2.9065, -3.0481, -2.8101, 0.54092, -3.0196])
HIGH = np.array([2.7501, 1.7918, 2.9065, -0.1458, 2.8101, 4.5205, 3.0196])
SPEED = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])
# near its ends a joint may move at most at -offset + sqrt(2 deceleration way)
OFFSET = np.array([0.30, 0.20, 0.20, 0.30, 0.35, 0.35, 0.35])
DECELERATION = np.array([6.0, 2.585, 3.5, 4.0, 17.0, 5.5, 17.0])
ACCELERATION, JERK = 10.0, 5000.0  # of each joint
TORQUE = np.array([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0])
# of the hand: its place, its turn
HAND_SPEED, HAND_ACCELERATION, HAND_JERK = (3.0, 2.5), (9.0, 17.0), (4500.0, 8500.0)

MARGIN = 0.05  # rad from a joint's end that no target goes beyond
_NEAR_END = 0.9  # of the speed that is allowed near an end
# of a joint's own limits, for what the hand's move and its turn ask of it, each (the hand's way
# bends them too)
_OF_JOINTS = 0.3
_STOPPING = 0.9  # of acceleration and jerk, for a stop that somebody asked for
_SOON_S = 0.01  # in which a small rest of the way is gone
_SPREAD_S = (0.005, 0.1)  # over which a new target takes the place of the one before
_REST = 1e-4


class _Path:
    """The commands of one motion, a millisecond each. ``speed``, ``acceleration`` and ``jerk``
    [groups] are Franka's, of which ``share`` is used.

    `aim` gives it targets at a slow and uneven rate: one takes the place of the other gradually, in
    about the time between them. `hold` brakes, and keeps where that ends.
    """

    def __init__(self, width: int, limits: tuple[np.ndarray, np.ndarray, np.ndarray], share: float):
        speed, acceleration, jerk = limits
        self._speed, self._most = share * speed, (share * acceleration, share * jerk)
        hard = max(share, _STOPPING)
        self._hardest = hard * acceleration, hard * jerk
        self._width, self._spread = width, _Spread()
        self._rest()
        self.holds, self._at_once = True, False

    def _rest(self) -> None:
        self.velocity = np.zeros((len(self._speed), self._width))
        self.change = np.zeros_like(self.velocity)

    def _resume(self, speed: Sequence[float], change: Sequence[float]) -> None:
        shape = self.velocity.shape
        self.velocity, self.change = (np.reshape(x, shape).astype(float) for x in (speed, change))

    @property
    def at_rest(self) -> bool:
        return bool(np.abs(self.velocity).max() < _REST)

    def hold(self, at_once: bool = False) -> None:
        """Brake, as hard as Franka lets a motion brake where it is ``at_once``."""
        self.holds, self._at_once = True, self._at_once or at_once

    def step(self) -> None:
        """On by `DT`."""
        goal = np.zeros_like(self.velocity) if self.holds else self._wanted()
        most = self._hardest if self._at_once else self._most
        self.velocity, self.change = paced(goal, self.velocity, self.change, most, DT)
        self._move(self.velocity * DT)

    def _follow(self) -> None:
        """From now on for a target."""
        self.holds = self._at_once = False

    def _wanted(self) -> np.ndarray:
        raise NotImplementedError

    def _move(self, by: np.ndarray) -> None:
        raise NotImplementedError


class _Spread:
    """How far a new target has taken the place of the one before."""

    left = 1

    def begin(self, seconds: float) -> None:
        low, high = _SPREAD_S
        self.left = round(min(max(seconds, low), high) / DT)

    def share(self) -> float:
        """Of the way that is left, what is gone in this step."""
        share, self.left = 1.0 / max(self.left, 1), max(self.left - 1, 1)
        return share


class JointPath(_Path):
    """Of the seven joints (rad)."""

    def __init__(self, share: float):
        every = np.ones(len(SPEED))
        super().__init__(1, (SPEED, ACCELERATION * every, JERK * every), share)
        self.joints: np.ndarray = np.zeros(len(SPEED))
        self._input: np.ndarray = self.joints
        self._target: np.ndarray = self.joints

    def begin(self, joints: np.ndarray) -> None:
        """At rest, where the robot's own motion generator says that it is."""
        self._rest()
        self.joints = np.array(joints, dtype=float)
        self.hold()

    def resume(self, joints: np.ndarray, speed: Sequence[float], change: Sequence[float]) -> None:
        """From what the robot says that it was commanded, and how fast."""
        self.joints = np.array(joints, dtype=float)
        self._resume(speed, change)

    def aim(self, target: np.ndarray, seconds: float) -> None:
        """``seconds`` since the last."""
        if self.holds:
            self._input = self.joints
        self._follow()
        self._target = np.clip(target, LOW + MARGIN, HIGH - MARGIN)
        self._spread.begin(seconds)

    def _wanted(self) -> np.ndarray:
        self._input = self._input + self._spread.share() * (self._target - self._input)
        wanted = towards((self._input - self.joints)[:, None], self._most[0], _SOON_S)
        return shorten(np.clip(wanted, -self._room(-1.0), self._room(1.0)), self._speed)

    def _room(self, sign: float) -> np.ndarray:
        """How fast each joint may move that way [7 1]."""
        way = np.maximum(HIGH - self.joints if sign > 0 else self.joints - LOW, 0.0)
        fastest = np.maximum(np.sqrt(2.0 * DECELERATION * way) - OFFSET, 0.0)
        return np.asarray(_NEAR_END * fastest)[:, None]

    def _move(self, by: np.ndarray) -> None:
        self.joints = self.joints + by[:, 0]

    def numbers(self) -> list[float]:
        return list(self.joints.tolist())


class PosePath(_Path):
    """Of the hand (m, quaternion w x y z) in the robot's base frame."""

    def __init__(self, share: float):
        speed, acceleration, jerk = map(np.array, (HAND_SPEED, HAND_ACCELERATION, HAND_JERK))
        super().__init__(3, (speed, acceleration, jerk), share)
        self._own = self._speed, self._most, self._hardest

    def begin(self, pose: Sequence[float]) -> None:
        """``pose`` [16]: a transformation, column by column."""
        self._rest()
        self.position, self.quaternion = placed(pose)
        self.hold()

    def resume(self, pose: np.ndarray, speed: Sequence[float], change: Sequence[float]) -> None:
        """As `JointPath.resume`; the hand's speed and change [6] each."""
        self.position, self.quaternion = placed(pose)
        self._resume(speed, change)

    def within(self, jacobian: np.ndarray) -> None:
        """Slower from now on where the arm's joints, by the hand's ``jacobian`` [6 7], would have
        to be too fast: the robot asks of them what it asks of joints that are commanded."""
        ways = np.abs(np.linalg.pinv(jacobian, rcond=1e-3)).reshape(7, 2, 3)
        needs = np.linalg.norm(ways, axis=2) + 1e-9  # of each joint, for a unit of move and of turn
        speed, (acceleration, jerk), (hardest, sudden) = self._own
        least = _OF_JOINTS * ACCELERATION / needs.max(axis=0)
        self._speed = np.minimum(speed, _OF_JOINTS / (needs / SPEED[:, None]).max(axis=0))
        self._most = np.minimum(acceleration, least), jerk
        self._hardest = np.minimum(hardest, least), sudden

    def aim(self, target: np.ndarray, seconds: float) -> None:
        """Position [3] and quaternion [4]; ``seconds`` since the last."""
        if self.holds:
            self._input = self.position, self.quaternion
        self._follow()
        self._target = target[:3], normalised(target[3:])
        self._spread.begin(seconds)

    def _wanted(self) -> np.ndarray:
        (place, turned), share = self._input, self._spread.share()
        turned = multiply(from_vector(share * difference(self._target[1], turned)), turned)
        self._input = place + share * (self._target[0] - place), normalised(turned)
        ahead = [self._input[0] - self.position, difference(self._input[1], self.quaternion)]
        return shorten(towards(np.stack(ahead), self._most[0], _SOON_S), self._speed)

    def _move(self, by: np.ndarray) -> None:
        self.position = self.position + by[0]
        self.quaternion = normalised(multiply(from_vector(by[1]), self.quaternion))

    def numbers(self) -> list[float]:
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = matrix(self.quaternion), self.position
        return list(pose.ravel(order="F").tolist())


def placed(pose: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position [3] and quaternion [4] of a transformation [16], column by column."""
    whole = np.reshape(pose, (4, 4), order="F")
    return whole[:3, 3].copy(), from_matrix(whole[:3, :3])
