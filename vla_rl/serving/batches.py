"""Several clients, one policy: what waits while it acts is its next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vla_rl.serving.packing import WireError
from vla_rl.types import Observation


@dataclass(frozen=True)
class Answer:
    """Rows [n …] of a decision, on the CPU; and what is ``told`` of the whole batch, of ``batch``
    rows, that they were in."""

    rows: dict[str, Tensor]
    told: Any
    batch: int


# (observation, deterministic, a seed for each row) → rows of a decision, and what to tell of it
Act = Callable[[Observation, bool, list[int]], tuple[Mapping[str, Tensor], Any]]


@dataclass(frozen=True, eq=False)
class _Request:
    observation: Observation
    deterministic: bool
    seeds: list[int]
    answer: Future[Answer] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.observation)


class Batches:
    """A thread that asks ``act``, once it is ``ready`` (`wake` where that may have changed), for at
    most ``rows`` at once. `close` ends it; who waits then gets `WireError`."""

    def __init__(
        self,
        act: Act,
        rows: float = float("inf"),
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._act, self._rows, self._ready = act, rows, ready
        self._waiting: list[_Request] = []
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="acting", daemon=True)
        self._thread.start()

    def ask(
        self, observation: Observation, deterministic: bool, seeds: Sequence[int]
    ) -> Future[Answer]:
        """``seeds``: of the rows' sampling noise."""
        request = _Request(observation, deterministic, list(seeds))
        with self._changed:
            if self._closed:
                raise WireError("the server is going down")
            self._waiting.append(request)
            self._changed.notify()
        return request.answer

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _take(self) -> list[_Request]:
        """The next batch: what waits and is of one kind, the oldest first; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: (self._waiting and self._ready()) or self._closed)
            if self._closed:
                for request in self._waiting:
                    request.answer.set_exception(WireError("the server is going down"))
                return []
            batch: list[_Request] = []
            for request in list(self._waiting):
                fits = sum(map(len, batch)) + len(request) <= self._rows
                if request.deterministic == self._waiting[0].deterministic and (fits or not batch):
                    batch.append(request)
            self._waiting = [request for request in self._waiting if request not in batch]
            return batch

    def _work(self) -> None:
        while batch := self._take():
            try:
                answers = self._answers(batch)
            except BaseException as error:  # theirs to hear
                for request in batch:
                    request.answer.set_exception(error)
                continue
            for request, answer in zip(batch, answers, strict=True):
                request.answer.set_result(answer)

    def _answers(self, batch: Sequence[_Request]) -> list[Answer]:
        seen = Observation.cat([request.observation for request in batch])
        seeds = [seed for request in batch for seed in request.seeds]
        rows, told = self._act(seen, batch[0].deterministic, seeds)
        sizes = [len(request) for request in batch]
        parts = {name: x.cpu().split(sizes) for name, x in rows.items()}
        return [
            Answer({name: x[i] for name, x in parts.items()}, told, len(seen))
            for i in range(len(batch))
        ]
