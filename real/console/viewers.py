"""One open page: what it may still send, and what waits to be sent to it.

Nothing is queued for a page that reads slowly: of the state and of every camera's picture only the
newest waits, and a picture is sent only while fewer than `WINDOW` are unacknowledged.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

from real.console.clocks import PageClock
from real.console.security import FLOOD, Rate

WINDOW = 4  # pictures on the way to one page
LOST_S = 1.0  # a picture that is not acknowledged after this counts as lost
_URGENT = 64  # answers that wait; a page that does not read that many is gone anyway


class Outbox:
    """Urgent texts in order, then the newest state, then the newest picture of each camera,
    least recently sent first."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._urgent: deque[str] = deque(maxlen=_URGENT)
        self._state = ""
        self._pictures: dict[int, tuple[int, bytes]] = {}
        self._on_the_way: dict[tuple[int, int], float] = {}
        self._more = asyncio.Event()
        self.dropped = 0

    @property
    def waiting(self) -> int:
        return len(self._pictures)

    @property
    def on_the_way(self) -> int:
        return len(self._on_the_way)

    def urgent(self, text: str) -> None:
        self._urgent.append(text)
        self._more.set()

    def state(self, text: str) -> None:
        self._state = text
        self._more.set()

    def picture(self, camera: int, number: int, data: bytes) -> None:
        self.dropped += camera in self._pictures
        self._pictures.pop(camera, None)
        self._pictures[camera] = (number, data)
        self._more.set()

    def seen(self, camera: int, number: int) -> None:
        self._on_the_way.pop((camera, number), None)
        self._more.set()

    def take(self) -> str | bytes | None:
        """What to send next, or None for now."""
        if self._urgent:
            return self._urgent.popleft()
        if self._state:
            text, self._state = self._state, ""
            return text
        now = self._clock()
        for key in [key for key, sent in self._on_the_way.items() if now - sent > LOST_S]:
            del self._on_the_way[key]
        if not self._pictures or len(self._on_the_way) >= WINDOW:
            return None
        camera = next(iter(self._pictures))
        number, data = self._pictures.pop(camera)
        self._on_the_way[camera, number] = now
        return data

    async def next(self) -> str | bytes:
        while (found := self.take()) is None:
            self._more.clear()
            await self._more.wait()
        return found


class Viewer:
    """``name`` is what others are told of this page, ``nonce`` what its messages must repeat; it
    may do nothing but watch where it ``watches``."""

    def __init__(self, number: int, clock: Callable[[], float], watches: bool = False):
        self.name, self.watches = f"page {number}", watches
        self.nonce = secrets.token_urlsafe(9)
        self.out = Outbox(clock)
        self.clock = PageClock()
        self.heard = clock()
        self.refused = 0  # messages that were malformed, replayed, too many or too old
        self.flooding = False
        self._n = -1
        self._patience = Rate(FLOOD[1], FLOOD[0], clock)
        # a page says 30 inputs, 30 acknowledgements for each of a few cameras and some beats a
        # second
        self._all = Rate(300, 150, clock)
        self._inputs, self._events = Rate(70, 35, clock), Rate(12, 12, clock)
        self._stop = Rate(20, 5, clock)

    def refuse(self) -> None:
        self.refused += 1
        self.flooding = self.flooding or not self._patience.allow()

    def newer(self, n: int) -> bool:
        """True where ``n`` is above all before: no replay of this connection's own messages
        either."""
        if n <= self._n:
            return False
        self._n = n
        return True

    def may(self, kind: str) -> bool:
        """Within the rates? What stops the arm has its own, which other messages cannot use up."""
        rate = {"input": self._inputs, "event": self._events, "control": self._events}.get(kind)
        if kind == "stop":
            return self._stop.allow()
        return self._all.allow() and (rate is None or rate.allow())
