"""Who has the session's page open, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from real.console.viewers import Viewer


class Pages:
    """At most ``most``. ``counts`` are of messages: taken, too old and refused; and pictures."""

    def __init__(self, most: int, clock: Callable[[], float]):
        self._most, self._clock = most, clock
        self.viewers: list[Viewer] = []
        self.counts = {"inputs": 0, "stale": 0, "refused": 0, "pictures": 0}
        self._opened = 0

    def enter(self, watches: bool) -> Viewer | None:
        """A page was opened; None where there are too many."""
        if len(self.viewers) >= self._most:
            return None
        self._opened += 1
        viewer = Viewer(self._opened, self._clock, watches)
        self.viewers.append(viewer)
        return viewer

    def tell(self, viewer: Viewer, kind: str, **fields: Any) -> None:
        viewer.out.urgent(json.dumps({"k": kind, **fields}, separators=(",", ":")))

    def tell_all(self, kind: str, **fields: Any) -> None:
        for viewer in self.viewers:
            self.tell(viewer, kind, **fields)

    def refuse(self, viewer: Viewer, reason: str, stops: str = "") -> None:
        """One more message that was not taken: of the first twenty a page hears, and of each
        that was to stop the arm."""
        viewer.refuse()
        self.counts["refused"] += 1
        if viewer.refused <= 20 or stops:
            self.tell(viewer, "refused", name=stops, reason=reason)
