"""The walls of the gate: the box that the hand stays in, and the boxes that it stays out of.

A hand may come as fast towards a wall as leaves room to stop, and slides along it. For an arm under
impedance control (``gain``) all walls begin one and a half braking distances earlier: it is not
quite where its target is.
"""

from __future__ import annotations

import math

import numpy as np

from real.limits import Box, Limits
from vla_rl.errors import ConfigError

_TINY = 1e-9
# braking distances, that walls begin before where they are, for an arm under impedance control
_EARLIER = 1.5
_SWING = 0.04  # m/s: of a hand at a wall that turns
_ROUNDS = 4  # of the box and the keep-outs against each other


class Walls:
    """What ``limits`` allow a hand that is commanded every ``dt`` seconds. Raises `ConfigError`
    for a box without room."""

    def __init__(self, limits: Limits, gain: float, dt: float):
        self.limits, self.gain, self.dt = limits, gain, dt
        self.any = limits.box is not None or bool(limits.keep_out)
        self.braking = limits.speed**2 / (2.0 * limits.acceleration)  # metres
        if self.gain and limits.box is not None:
            room = float(np.min(np.array(limits.box.high) - np.array(limits.box.low)))
            if room <= 2.0 * _EARLIER * self.braking:
                raise ConfigError(
                    f"limits.box is {room:g} m wide in one direction, and an arm under impedance "
                    f"control needs {_EARLIER:g} braking distances (speed² / (2 · acceleration), "
                    f"{self.braking:.3g} m) before each wall: make it wider than "
                    f"{2.0 * _EARLIER * self.braking:.3g} m, lower the speed or raise the "
                    "acceleration"
                )

    def kept(self, u: np.ndarray, places: tuple[np.ndarray, ...]) -> np.ndarray:
        """The hand's velocity [3] without what leads too fast towards a wall from any of
        ``places`` [3]."""
        if not self.any:
            return u
        for _ in range(_ROUNDS):
            before = u
            for place in places:
                u = self._inside(u, place)
                for box in self.limits.keep_out:
                    u = self._outside(u, place, box)
            if np.array_equal(u, before):
                return u
        return np.zeros(3)  # a corner that walls make together

    def share(self, place: np.ndarray) -> float:
        """Of its speeds, what an arm under impedance control has where it comes through the room
        that its walls begin earlier: all of them a braking distance before a wall, none half of one
        beyond it. Whoever slides along a wall while the wrist turns is pushed through it by what
        braking the joints makes of both."""
        return float(
            np.clip((0.5 * self.braking - self.beyond(place)) / (1.5 * self.braking), 0.0, 1.0)
        )

    def swing(self, place: np.ndarray) -> float:
        """How fast (m/s) the hand of an arm under impedance control may be while its turn goes on
        to change, in whatever direction: so that no turn, and none that begins anew again and
        again, swings it through a wall."""
        return float(
            np.clip(
                -2.0 * self.gain * self.beyond(place),
                min(_SWING, self.limits.speed),
                self.limits.speed,
            )
        )

    def beyond(self, place: np.ndarray) -> float:
        """How far (m) beyond the wall that is passed furthest; below 0 the distance to the
        nearest; -inf without walls."""
        x, most = self.limits, -math.inf
        if x.box is not None:
            most = max(
                most,
                float(np.max(np.array(x.box.low) - place)),
                float(np.max(place - np.array(x.box.high))),
            )
        for box in x.keep_out:
            depth = float(
                min(np.min(place - np.array(box.low)), np.min(np.array(box.high) - place))
            )
            outside = float(np.linalg.norm(place - np.clip(place, box.low, box.high)))
            most = max(most, depth if depth > 0.0 else -outside)
        return most

    def _approach(self, distance: np.ndarray) -> np.ndarray:
        """How fast (m/s) a wall that is ``distance`` metres away may come nearer: so that there is
        room to stop.

        Below 0 where the arm is beyond it: then it has to come back, gently. An arm under impedance
        control that is only kept from going on would drift through a wall along which it slides, as
        what its joints do to each other pushes it. Four times its stiffness and, from where it
        would come to rest, twice its damping: critically damped again.
        """
        x = self.limits
        distance = distance - (_EARLIER * self.braking if self.gain else 0.0)
        room, beyond = np.maximum(distance, 0.0), np.maximum(-distance, 0.0)
        share = self.gain if self.gain else 0.5 / self.dt
        # half of the acceleration that it has
        nearer = np.minimum(np.sqrt(x.acceleration * room), share * room)
        most = min(x.slow * x.speed, x.acceleration * self.dt)
        back = np.minimum((4.0 if self.gain else 1.0) * share * beyond, most)
        return np.where(beyond > 0.0, np.where(beyond < x.step, -back, 0.0), nearer)

    def _inside(self, u: np.ndarray, place: np.ndarray) -> np.ndarray:
        box = self.limits.box
        if box is None:
            return u
        return np.clip(
            u,
            -self._approach(place - np.array(box.low)),
            self._approach(np.array(box.high) - place),
        )

    def _outside(self, u: np.ndarray, place: np.ndarray, box: Box) -> np.ndarray:
        low, high = np.array(box.low), np.array(box.high)
        away = place - np.clip(place, low, high)
        distance = float(np.linalg.norm(away))
        if distance > _TINY:
            normal = away / distance
        else:  # inside: the nearest face is the way out
            depth = np.concatenate([place - low, high - place])
            face = int(np.argmin(depth))
            normal = np.zeros(3)
            normal[face % 3] = -1.0 if face < 3 else 1.0
            distance = -float(depth[face])
        towards = -float(u @ normal)
        allowed = float(self._approach(np.array(distance)))
        return u + (towards - allowed) * normal if towards > allowed + _TINY else u
