"""Several clients, one policy: what waits while it acts is its next batch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vla_rl.interfaces import Policy
from vla_rl.serving.packing import WireError
from vla_rl.types import Observation

MOST_ROWS = 256  # of a batch


@dataclass(frozen=True)
class Answer:
    """Rows of a decision, on the CPU: actions float32 [n h a] (physical units), valid bool [n h],
    log-probs [n *k]; and the seconds that the batch took which they were in, of ``batch`` rows."""

    actions: Tensor
    valid: Tensor
    log_prob: Tensor
    seconds: float
    batch: int


@dataclass(frozen=True, eq=False)
class _Request:
    observation: Observation
    sample: bool
    seeds: list[int]
    answer: Future[Answer] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.observation)


class Batches:
    """A thread that asks the policy. `close` ends it; who waits then gets `WireError`."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._waiting: list[_Request] = []
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="acting", daemon=True)
        self._thread.start()

    def ask(
        self, observation: Observation, sample: bool, seeds: Sequence[int | None]
    ) -> Future[Answer]:
        """``seeds``: of the rows' sampling noise; None: any when sampling, the same each time when
        not."""
        chosen = [(random.getrandbits(62) if sample else 0) if s is None else s for s in seeds]
        request = _Request(observation, sample, chosen)
        with self._changed:
            if self._closed:
                raise WireError("the server is going down")
            self._waiting.append(request)
            self._changed.notify()
        return request.answer

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _take(self) -> list[_Request]:
        """The next batch: what waits and is of one kind, the oldest first; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                for request in self._waiting:
                    request.answer.set_exception(WireError("the server is going down"))
                return []
            batch: list[_Request] = []
            for request in list(self._waiting):
                fits = sum(map(len, batch)) + len(request) <= MOST_ROWS
                if request.sample == self._waiting[0].sample and (fits or not batch):
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
        started = time.perf_counter()
        seen = Observation.cat([request.observation for request in batch]).to(self._device)
        with torch.inference_mode():
            out = self._policy.act(
                seen, deterministic=not batch[0].sample, seeds=[s for r in batch for s in r.seeds]
            )
        sizes = [len(request) for request in batch]
        rows = (out.chunk.actions.float(), out.chunk.valid, out.behavior_log_prob.float())
        parts = zip(*(tensor.cpu().split(sizes) for tensor in rows), strict=True)
        seconds = time.perf_counter() - started
        return [Answer(a, valid, log, seconds, sum(sizes)) for a, valid, log in parts]
