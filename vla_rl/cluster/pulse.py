"""Signs of life of actors, whatever else they do meanwhile; and the clock that they are waited for
by."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

_STEP_S = 10.0


class Awake:
    """A clock that stands still while this process does (stopped, or its machine asleep): whoever is
    waited for is not heard then. Of more than ten seconds between two looks ten count."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()
        self._looks = threading.Lock()

    def now(self) -> float:
        with self._looks:
            last, self._last = self._last, time.monotonic()
            self._seconds += min(max(self._last - last, 0.0), _STEP_S)
            return self._seconds


now = Awake().now


class Pulse:
    """Each of ``actors`` is asked for the next `beat` as it gave the last, which it gives from a
    thread of its own (concurrency group "alive"): also while it works, and not as a process that
    stands still. One that is ``starting`` may be silent for so many seconds until its first."""

    def __init__(
        self, ray: Any, actors: Sequence[Any], limit: float, starting: float | None = None
    ) -> None:
        self._ray, self._limit, self._actors = ray, limit, list(actors)
        self._starting = limit if starting is None else starting
        self._asked = [self._ask(actor) for actor in actors]
        self._heard = [now()] * len(actors)
        self._began = [False] * len(actors)

    @staticmethod
    def _ask(actor: Any) -> Any:
        return actor.beat.options(concurrency_group="alive").remote()

    def instead(self, i: int, actor: Any) -> None:
        """Another one has the place of number ``i``."""
        self._actors[i], self._began[i] = actor, False
        self._asked[i], self._heard[i] = self._ask(actor), now()

    def silence(self, i: int) -> float:
        """Seconds since number ``i`` was heard; 0 while it may still be starting."""
        if self._ray.wait([self._asked[i]], timeout=0)[0]:
            self._heard[i], self._asked[i] = now(), self._ask(self._actors[i])
            self._began[i] = True
        silent = now() - self._heard[i]
        return silent if self._began[i] or silent > self._starting else 0.0

    def silent(self, numbers: Iterable[int]) -> int | None:
        """The first of these that has been silent for too long; all are listened to."""
        found = [i for i in numbers if self.silence(i) > self._limit]
        return found[0] if found else None
