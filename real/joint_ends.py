"""The ends of an arm's joints, and how fast they may turn."""

from __future__ import annotations

import numpy as np

from real.limits import Limits
from real.robots.protocol import Measured

_TINY, _HUGE = 1e-9, 1e9
CREEP = 0.02  # rad/s, m/s: what is this slow is at rest


class JointEnds:
    """What ``limits`` allow the joints of an arm that is commanded every ``dt`` seconds; ``gain``
    as of `real.gate.Gate`."""

    def __init__(self, limits: Limits, gain: float, dt: float):
        self.limits, self.gain, self.dt = limits, gain, dt
        self.speed = np.atleast_1d(limits.joint_speed)  # [1], or of each joint

    def room(self, u: np.ndarray, joints: np.ndarray) -> np.ndarray:
        """How fast each joint may go on in the direction of ``u``."""
        x = self.limits
        end = np.where(u > 0, np.array(x.joint_high) - joints, joints - np.array(x.joint_low))
        room = np.maximum(end - x.joint_margin, 0.0)
        hardest = min(x.joint_acceleration, _HUGE)
        return np.minimum(
            np.sqrt(hardest * room), (2.0 * self.gain if self.gain else 0.5 / self.dt) * room
        )

    def leaving(self, measured: Measured) -> float:
        """By how much (rad/s) a joint runs too fast towards its end, whatever the hand was asked to
        do: what an arm's own controller makes of a pose is not known here. The arm's brake has the
        margin to stop in."""
        if not self.limits.joint_low or not len(measured.joint_velocity):
            return 0.0
        speed = measured.joint_velocity
        over = np.abs(speed) - self.room(speed, measured.joints) - CREEP
        return max(0.0, float(np.max(over)))

    def share(self, u: np.ndarray, joints: np.ndarray) -> tuple[float, float, float]:
        """The share of joint velocities ``u`` that comes neither to an end nor above a joint's
        speed; what the ends take (rad/s), and what the speeds take of the rest (a share)."""
        share, ends = 1.0, 0.0
        if self.limits.joint_low:
            room = self.room(u, joints)
            allowed = np.where(np.abs(u) > room, room / np.maximum(np.abs(u), _TINY), 1.0)
            share = float(np.min(allowed))
            ends = (1.0 - share) * float(np.max(np.abs(u)))
        # times its limit, of the joint nearest to it
        faster = share * float(np.max(np.abs(u) / self.speed))
        if faster > 1.0:
            return share / faster, ends, 1.0 - 1.0 / faster
        return share, ends, 0.0
