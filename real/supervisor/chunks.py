"""What the policy wants, as rows of (epoch, tick): rows of a dead epoch, a past tick or an old
message never run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from real.messages import Chunk, Command

AT_ONCE = 0  # a chunk's ``start``: from the next tick on


@dataclass(frozen=True)
class Row:
    """One control step: ``action`` [a] is to run in ticks ``due`` … ``until`` - 1, unless it
    ``dies`` (seconds) before."""

    due: int
    until: int
    dies: float
    decision: int
    index: int
    policy_version: str
    obs_stamp: float
    action: np.ndarray


class Chunks:
    """The queue. ``ticks`` is how long a control step lasts, ``width`` an action's size, ``hz``
    the ticks per second."""

    def __init__(self, hz: float, ticks: int, width: int, observation_age: float):
        self.hz, self.ticks, self.width, self.observation_age = hz, ticks, width, observation_age
        self._rows: list[Row] = []
        self._decision = -1

    def clear(self) -> None:
        """What was inferred until now is void."""
        self._rows = []

    def forget(self) -> None:
        """Another policy process counts its decisions from 0."""
        self._rows, self._decision = [], -1

    def accept(self, message: Chunk | Command, epoch: int, tick: int, now: float) -> str:
        """Queue what the message holds; or say why not. ``tick`` is the last one that ran."""
        rows = message.actions if isinstance(message, Chunk) else (message.action,)
        if message.epoch != epoch:
            return f"it was made for epoch {message.epoch}, this is {epoch}"
        if now > message.expiry:
            return f"it expired {now - message.expiry:.3f} s ago"
        if message.stamp > now + 0.05:
            return "it was made in the future"
        if isinstance(message, Chunk) and message.decision <= self._decision:
            return f"decision {message.decision} came before {self._decision}, or is the same"
        if any(len(row) != self.width for row in rows):
            return f"its actions have {len(rows[0])} numbers, the robot's have {self.width}"
        if not all(math.isfinite(x) for row in rows for x in row):
            return "it holds numbers that are not finite"
        lasts = message.lasts if isinstance(message, Chunk) else ()
        if lasts and (len(lasts) != len(rows) or any(not 0 < share <= 1 for (share, *_) in lasts)):
            return f"its {len(rows)} actions do not last 0 to 1 control steps each: {lasts}"
        if (age := now - message.obs_stamp) > self.observation_age:
            return f"its observation is {age:.3f} s old, {self.observation_age:g} are allowed"
        if age < -0.05:
            return "its observation is from the future"
        self._queue(message, rows, tick)
        return "" if self._rows else "all of its rows are late"

    def _queue(
        self, message: Chunk | Command, rows: tuple[tuple[float, ...], ...], tick: int
    ) -> None:
        chunk = isinstance(message, Chunk)
        first = (
            message.start if isinstance(message, Chunk) and message.start != AT_ONCE else tick + 1
        )
        per_row = self.hz / message.hz if isinstance(message, Chunk) else float(self.ticks)
        if isinstance(message, Chunk) and message.lasts:
            ticks = (max(1, round(share * per_row)) for (share, *_) in message.lasts)
            dues = list(itertools.accumulate(ticks, initial=first))
        else:
            dues = [first + round(i * per_row) for i in range(len(rows) + 1)]
        fresh = []
        for i, action in enumerate(rows):
            if dues[i] <= tick:
                continue  # late: skipped, never hurried
            index = i if chunk else message.index  # type: ignore[union-attr]
            dies = message.expiry + (dues[i] - first) / self.hz
            place = (
                dues[i],
                dues[i + 1],
                dies,
                message.decision,
                index,
                message.policy_version,
                message.obs_stamp,
            )
            fresh.append(Row(*place, np.array(action, dtype=np.float64)))
        if fresh:
            self._rows = [row for row in self._rows if row.due < fresh[0].due] + fresh
            self._decision = max(self._decision, message.decision)

    def row(self, tick: int, now: float) -> Row | None:
        """The row of this tick. Rows that are over, and rows that died, are dropped."""
        while self._rows and (
            self._rows[0].until <= tick or (len(self._rows) > 1 and self._rows[1].due <= tick)
        ):
            self._rows.pop(0)
        if not self._rows or self._rows[0].due > tick:
            return None
        return self._rows[0] if now <= self._rows[0].dies else None

    @property
    def left(self) -> int:
        return len(self._rows)
