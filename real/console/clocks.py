"""What a page's clock says, on this machine's clock."""

from __future__ import annotations

from collections import deque

WINDOW_S = 20.0  # clocks of two machines drift apart by some 50 µs/s at most: 1 ms in the window
FASTEST_S = 2.0  # an answer that took longer says nothing


class PageClock:
    """The page's clock is this machine's plus ``offset``, taken from the fastest answers: they
    bound it most closely.

    A page answers a stamp of the server with its own time, and says how long it held the answer
    back.
    """

    def __init__(self) -> None:
        # received, round trip, offset
        self._answers: deque[tuple[float, float, float]] = deque(maxlen=512)
        self.offset: float | None = None
        self.round_trip = 0.0

    def answer(self, sent: float, seen_at: float, page: float, received: float) -> None:
        """The server sent ``sent``, the page saw it at ``seen_at`` and answered at ``page``; it
        came at ``received``."""
        held = page - seen_at
        trip = received - sent - held
        if held < 0 or not -0.001 <= trip <= FASTEST_S:
            return
        trip = max(trip, 0.0)
        self._answers.append((received, trip, seen_at - (sent + trip / 2)))
        while received - self._answers[0][0] > WINDOW_S:
            self._answers.popleft()
        _, self.round_trip, self.offset = min(self._answers, key=lambda entry: entry[1])

    def here(self, page: float, now: float) -> float | None:
        """``page`` on this machine's clock, never in the future; None while nothing is known of
        the page's clock."""
        return None if self.offset is None else min(page - self.offset, now)
