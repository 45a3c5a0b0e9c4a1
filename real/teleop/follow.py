"""A leader that goes where its arm goes until a hand pulls at it: then it is limp, stands where the
arm does, and may lead at once.

Its motors are weak, slow and given up at the first pull, because a leader that pulls at the hand
that holds it is a hazard (lerobot #3385, #3506).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from real.robots.servos import knows
from vla_rl.errors import UserError

_AGAIN_S = 1.0  # that a leader rests after it was let go of, before it follows again
_PULLED_S = 0.1  # that it has to be away from where it was told to be


class Follower:
    """``bus`` is the leader's, of Feetech servos; ``names`` its joints in order. ``torque`` is the
    share of their most that they may use, ``speed`` (units/s) how fast they go at most, ``pull``
    (units) how far off a hand has to bring a joint."""

    def __init__(
        self,
        bus: Any,
        names: Sequence[str],
        torque: float,
        speed: float,
        pull: float,
    ):
        self.bus, self.names = bus, tuple(names)
        self.torque, self.speed, self.pull = torque, speed, pull
        self._goal: np.ndarray | None = None
        self._pulled_since: float | None = None
        self._rests_until = self._before = time.monotonic()

    @property
    def follows(self) -> bool:
        return self._goal is not None

    def connect(self) -> None:
        """Raises `UserError` for a leader whose motors are of another kind."""
        if not knows(self.bus, "Torque_Limit"):
            raise UserError(
                "this leader's motors take no limit of their torque, and so it cannot follow the "
                "arm: leave out teleop.follows"
            )

    def update(self, leader: Sequence[float], follower: Sequence[float], may: bool) -> None:
        """Once a period: ``leader`` is where it stands, ``follower`` where the arm does; it
        follows while it ``may``. Raises whatever its bus does."""
        now, place = time.monotonic(), np.asarray(leader, dtype=float)
        seconds, self._before = min(now - self._before, 0.2), now
        if not may:
            return self.let_go()
        if self._goal is None:
            if now < self._rests_until:
                return None
            self._hold(place)
        assert self._goal is not None
        gap = float(np.abs(place - self._goal).max())
        if gap > self.pull:
            self._pulled_since = self._pulled_since or now
            if now - self._pulled_since >= _PULLED_S:
                return self.let_go()
        else:
            self._pulled_since = None
        if gap <= self.pull / 2:  # else it has not caught up yet, or is held
            step = min(self.speed * seconds, self.pull / 2)
            self._goal = self._goal + np.clip(np.asarray(follower) - self._goal, -step, step)
        self.bus.sync_write("Goal_Position", self._targets(self._goal))
        return None

    def let_go(self) -> None:
        """Limp from now on."""
        if self._goal is not None:
            self._goal = self._pulled_since = None
            self._rests_until = time.monotonic() + _AGAIN_S
            self.bus.disable_torque(num_retry=3)

    def _hold(self, place: np.ndarray) -> None:
        for name in self.names:
            self.bus.write("Torque_Limit", name, round(1000 * self.torque))
        self.bus.sync_write("Goal_Position", self._targets(place))
        self.bus.enable_torque()
        self._goal, self._pulled_since = place, None

    def _targets(self, place: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, map(float, place)))
