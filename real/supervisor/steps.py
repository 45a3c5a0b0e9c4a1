"""Control steps: what was asked for and what was done, over the ticks that one action lasts."""

from __future__ import annotations

from typing import Any

import numpy as np

from real.gate import STAGES, Passed
from real.messages import Input
from real.robots.protocol import Measured
from real.supervisor.chunks import Row
from real.supervisor.motion import Actions


class Steps:
    """Counts the steps of an episode. A step begins with another row of the policy, or with a
    person's action, which is latched for a step's time; whatever ends it early leaves it without
    its last tick."""

    def __init__(self, actions: Actions):
        self.actions = actions
        self.step = -1
        self.device: Input | None = None  # latched for the present step
        self.asked: np.ndarray = np.zeros(0)  # what the person asks for
        self._key: Any = None
        self._origin: Measured | None = None
        self._begun, self._ticks = 0, 1
        self._clipped = [0] * len(STAGES)

    def begin(self) -> None:
        """An episode."""
        self.step = -1
        self._clipped = [0] * len(STAGES)
        self.close()

    def close(self) -> None:
        """Nothing is followed any more."""
        self._key = self._origin = self.device = None

    def origin(self, key: Any, measured: Measured) -> Measured:
        """What was measured when the step ``key`` began, which is now where it is another one."""
        if key != self._key or self._origin is None:
            self._key, self._origin = key, measured
            self.step += 1
        return self._origin

    def human(self, tick: int, ticks: int, device: Input) -> tuple[int, Input]:
        """The tick in which the present step of a person began, and what it latched: a new one
        latches ``device``."""
        if self.device is None or tick - self._begun >= ticks:
            self.device, self._begun, self._ticks = device, tick, ticks
        return self._begun, self.device

    def report(
        self, passed: Passed, row: Row | None, device: Input | None, tick: int
    ) -> dict[str, Any]:
        """The fields of a `State` that say what was asked for and done in ``tick``."""
        for i in range(len(STAGES)):
            self._clipped[i] += passed.mask >> i & 1
        sent: tuple[float, ...] = ()
        followed = row is not None or device is not None
        if passed.reference is not None and followed and self._origin is not None:
            sent = tuple(self.actions.sent(passed.reference, self._origin).tolist())
        last = row.until - 1 if row is not None else self._begun + self._ticks - 1
        return {
            "step": self.step if followed else -1,
            "step_done": followed and tick >= last,
            "policy": tuple(row.action.tolist()) if row is not None else (),
            "human": tuple(self.asked.tolist()) if device is not None else (),
            "sent": sent,
            "reference": passed.reference.vector() if passed.reference is not None else (),
            "is_human": device is not None,
            "holding": not followed,
            "decision": row.decision if row is not None else -1,
            "index": row.index if row is not None else -1,
            "policy_version": row.policy_version if row is not None else "",
            "gate": passed.mask,
            "clipped": tuple(self._clipped),
        }
