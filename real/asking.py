"""What a conductor asks of the supervisor, and as what: control first, and nothing too often."""

from __future__ import annotations

import math
from typing import Any

from real.messages import Event, Grant, Lease, Message, State
from real.practice import LEADER

AGAIN_S = 0.5  # until a request that has had no effect is made again
Requests = list[tuple[str, type[Message], dict[str, Any]]]  # (source, kind, fields)


class Asking:
    """``token`` is that of the lease, "" while control is not held; ``at`` when each thing was
    asked for last."""

    def __init__(self) -> None:
        self.token = ""
        self.at: dict[str, float] = {}

    def hear(self, message: State | Grant) -> None:
        if isinstance(message, Grant):
            self.token = message.token if message.granted else ""
        elif message.holder != LEADER:
            self.token = ""

    def since(self, name: str, now: float) -> float:
        """Seconds since it was asked for; endless where it was not."""
        return now - self.at.get(name, -math.inf)

    def forget(self, name: str) -> None:
        """It may be asked for at once."""
        self.at.pop(name, None)

    def may(self, name: str, now: float, again_s: float = AGAIN_S) -> bool:
        if self.since(name, now) < again_s:
            return False
        self.at[name] = now
        return True

    def lead(self, name: str, now: float, value: str = "") -> Requests:
        """Ask for ``name``, for control first where it is not held."""
        if not self.token:
            if not self.may("lease", now):
                return []
            return [(LEADER, Lease, {"ask": "request", "token": "", "force": False})]
        return self.event(LEADER, name, now, value) if self.may(name, now) else []

    def let_go(self) -> Requests:
        if not self.token:
            return []
        token, self.token = self.token, ""
        return [(LEADER, Lease, {"ask": "release", "token": token, "force": False})]

    def event(self, source: str, name: str, now: float, value: str = "") -> Requests:
        lease = self.token if source == LEADER else ""
        return [(source, Event, {"name": name, "value": value, "at": now, "lease": lease})]
