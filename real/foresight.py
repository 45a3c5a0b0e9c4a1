"""How fast an arm under impedance control will be in a tick's time: its hand (m/s, rad/s) and each
joint.

Its joints move as what all of them do to each other wants it, which no target of the hand says.
Foreseen is what its own momentum makes of the change in the tick before; what a sudden turn adds to
that is bounded before it is commanded. A critically damped arm accelerates by 4 gain (u - v)
towards the velocity u.
"""

from __future__ import annotations

import math

import numpy as np

from real.limits import Limits
from real.robots.protocol import Measured

_TINY, _HUGE = 1e-9, 1e9
_DAMPING = 1e-4  # squared, of the joint velocities that a hand's velocity needs
_LEAST = 1e-8  # the same of a controller that does not damp
# of a joint's limit, in a tick: by how much more the hand's way may throw the joints; and less
# where less than so many metres come of a radian
_SUDDEN, _WEAK = 0.2, 0.2
# of a joint's speed, that a brake may leave it while it takes it from all others: gravity leaves a
# shoulder little torque
_UNEVEN = 0.15
# m: by what a turn of the hand can push it along (0.25 from the wrist, twice that where the arm is
# stretched)
_LEVER = 0.5
# of the limits: who was too fast brakes until it is that slow, or brake and target would drive it
# on by turns
_CALM = 0.8
_NEARLY = 0.95  # of the hand's limit, for what new targets add: nothing is foreseen exactly
_LIGHTER = 1.5  # by what an arm may prefer its light joints to those with the least motion


class Foresight:
    """Of an arm that tells its Jacobian and joint velocities; of others, and without ``gain``,
    nothing is foreseen."""

    def __init__(self, limits: Limits, gain: float, dt: float):
        self.limits, self.gain, self.dt = limits, gain, dt
        self.hand = self.angular = 0.0  # the largest of what is and what will be: m/s, rad/s
        self.joints = np.zeros(0)  # of each joint [n]; empty: nothing is foreseen
        self._hand_ahead = np.zeros(3)  # m/s, where nothing new is commanded
        self._braked = 0.0  # m/s, of the hand where one joint brakes less than the others
        self._allowed = 1.0  # of the limits
        # when, and how fast each joint was
        self._before: tuple[float, np.ndarray] = (-math.inf, np.zeros(0))
        self.rest()

    def rest(self) -> None:
        """Nothing is commanded."""
        self._pull = np.zeros(3)  # by what the last target turned faster than the arm did, rad/s
        self._pushed = np.zeros(3)  # the velocity of the hand that it asked for, m/s

    def see(self, measured: Measured) -> None:
        """Once a tick. Where it slows down, the speed that it has counts: a brake may end."""
        self.hand, self.angular, self.joints = 0.0, 0.0, np.zeros(0)
        self._braked = 0.0
        told = (
            measured.joint_velocity,
            *([] if measured.jacobian is None else [measured.jacobian]),
        )
        if not all(np.isfinite(x).all() for x in told):
            self.hand = self.angular = math.nan
            return
        if not self.gain or motion_of(measured) is None or measured.jacobian is None:
            return
        now, (stamp, before) = measured.joint_velocity, self._before
        self._before = (measured.stamp, now)
        gap = measured.stamp - stamp
        ahead = (
            now + (now - before) * (self.dt / gap) if self.dt < 1.5 * gap < 6.0 * self.dt else now
        )
        both = np.stack([now, ahead])
        motion = both @ measured.jacobian.T
        self.hand, self.angular = (
            float(np.max(np.linalg.norm(part, axis=1))) for part in (motion[:, :3], motion[:, 3:])
        )
        self._hand_ahead = motion[1, :3]
        parts = measured.jacobian[:3] * now
        uneven = (1.0 - _UNEVEN) * motion[0, :3, None] + _UNEVEN * parts
        self._braked = float(np.max(np.linalg.norm(uneven, axis=0)))
        self.joints = np.max(np.abs(both), axis=0)

    def excess(self) -> tuple[float, float]:
        """By how much the hand (m/s or rad/s, the larger) and a joint will be too fast: then the
        arm has to brake. Whose speed is no number is too fast."""
        x, share = self.limits, self._allowed
        hand, angular = (
            _over(max(self.hand, self._braked), share * x.speed),
            _over(self.angular, share * x.rotation_speed),
        )
        beyond = (
            float(np.max(self.joints - share * np.asarray(x.joint_speed)))
            if self.joints.size
            else 0.0
        )
        found = max(hand, angular), _over(beyond, 0.0)
        self._allowed = _CALM if max(found) > 0.0 else 1.0
        return found

    def eased(self, velocity: np.ndarray, measured: Measured, swing: float) -> np.ndarray:
        """What may be commanded of ``velocity`` [2 3] (m/s, rad/s): of a sudden change only so much
        at once as leaves hand and joints their limits. What the hand's own new target adds to both
        comes first, then what the turn adds to that; with the turn it becomes no faster than
        ``swing`` (m/s)."""
        x, jacobian = self.limits, measured.jacobian
        if not self.joints.size or jacobian is None:
            return velocity
        push = 4.0 * self.gain * self.dt
        spare = np.maximum(np.array(x.joint_speed) - self.joints, 0.0)  # rad/s, of each joint
        change = velocity[0] - self._pushed
        # (the controller leads the place apart from the turn, and gives way nowhere)
        along = _LIGHTER * push * np.abs(of_joints(jacobian[:3], change, _LEAST))
        straight = _within(self._hand_ahead, push * change, _NEARLY * x.speed)
        straight = min(straight, _share(along, spare))
        self._pushed = hand = velocity[0] if straight >= 1.0 else self._pushed + straight * change
        fastest = max(self.hand, float(np.linalg.norm(self._hand_ahead + push * straight * change)))
        turning = turning_of(measured)
        change = velocity[1] - turning - self._pull  # what the tick before does not tell of
        joints = np.abs(of_joints(jacobian, np.concatenate([np.zeros(3), change])))
        pushed = np.array([_LEVER * float(np.linalg.norm(change)), *(_LIGHTER * joints)]) * push
        swung = max(min(swing, _NEARLY * x.speed) - fastest, 0.0)
        share = _share(pushed, np.array([swung, *(spare - straight * along)]))
        self._pull = self._pull + share * change
        led = self._led(hand, measured)
        if led is hand and straight >= 1.0 and share >= 1.0:
            return velocity
        return np.stack([led, velocity[1] if share >= 1.0 else turning + self._pull])

    def _led(self, hand: np.ndarray, measured: Measured) -> np.ndarray:
        """The hand's velocity [3] without what would throw the joints: in a direction in which they
        turn far for little of it (a stretched arm's way in or out) it stays near the arm's own.

        Measured there: a controller that was asked for 3 cm/s spent all torque that a wrist and an
        elbow have, by turns in both directions, and nothing was left to brake with."""
        assert measured.jacobian is not None
        motion = measured.jacobian[:3] @ measured.joint_velocity
        across, size, _ = np.linalg.svd(measured.jacobian[:3], full_matrices=False)
        asked = across.T @ (hand - motion)
        sudden = _SUDDEN * min(float(np.min(self.limits.joint_speed)), _HUGE)
        most = sudden / (4.0 * self.gain * self.dt) * size * np.minimum(size / _WEAK, 1.0)
        if (np.abs(asked) <= most).all():
            return hand
        return motion + across @ np.clip(asked, -most, most)


def _share(added: np.ndarray, room: np.ndarray) -> float:
    """Of what is ``added`` to speeds, the share that has ``room`` in all of them."""
    room = np.maximum(room, 0.0)
    return float(np.min(np.where(added > room, room / np.maximum(added, _TINY), 1.0)))


def _within(start: np.ndarray, change: np.ndarray, most: float) -> float:
    """Of ``change``, the share that leaves ``start + share * change`` no longer than ``most``
    (or than ``start``)."""
    square, along = float(change @ change), float(start @ change)
    if square < _TINY**2:
        return 1.0
    room = max(most**2 - float(start @ start), 0.0)
    return min(1.0, max(0.0, (math.sqrt(along**2 + square * room) - along) / square))


def _over(speed: float, limit: float) -> float:
    return min(speed - limit, _HUGE) if speed > limit else 0.0 if speed <= limit else _HUGE


def motion_of(measured: Measured) -> np.ndarray | None:
    """The hand's velocity [3] (m/s); None where the arm does not tell it."""
    if measured.jacobian is None or len(measured.joint_velocity) != measured.jacobian.shape[1]:
        return None
    return np.asarray(measured.jacobian[:3] @ measured.joint_velocity)


def turning_of(measured: Measured) -> np.ndarray:
    """How fast the hand of an arm that tells its Jacobian turns [3] (rad/s)."""
    assert measured.jacobian is not None
    return np.asarray(measured.jacobian[3:] @ measured.joint_velocity)


def of_joints(jacobian: np.ndarray, motion: np.ndarray, damping: float = _DAMPING) -> np.ndarray:
    """The velocities [n] of the joints that move the hand by ``motion`` [rows of the Jacobian] with
    the least of them."""
    square = jacobian @ jacobian.T + damping * np.eye(len(jacobian))
    return np.asarray(jacobian.T @ np.linalg.solve(square, motion))
