"""The process pool on recorded actions: what all suites measure of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sim.pool import ProcessPool


def measure_pool(
    factory: Callable[[], Any],
    episodes: Sequence,
    chunk: int,
    workers: int,
    rounds: int = 3,
    python: str = "",
) -> dict[str, float]:
    """The pool with ``workers`` workers of two slots each, the fastest of ``rounds``; every slot
    replays every episode (spec, actions [t a]), resets included.

    Transport is the time in which workers waited for a request, per control step.
    """
    with ProcessPool(factory, workers, 2, python=python) as pool:
        _replay(pool, episodes[:1], chunk)  # warm up: compile scenes and functions
        timings = []
        for _ in range(rounds):
            busy, start = pool.busy_seconds, time.perf_counter()
            count = _replay(pool, episodes, chunk)
            seconds = time.perf_counter() - start
            timings.append((seconds, max(0.0, seconds * workers - (pool.busy_seconds - busy))))
    seconds, transport = min(timings)
    return {
        "steps_per_second": count / seconds,
        "ms_per_step": 1e3 * seconds / count,
        "ms_transport": 1e3 * transport / count,
    }


def _replay(pool: Any, episodes: Sequence, chunk: int) -> int:
    """Run all episodes in every slot (resets included); returns the control steps executed."""
    position = dict.fromkeys(range(pool.num_slots), (0, 0))
    executed = 0
    for slot in position:
        pool.start(slot, episodes[0][0])
    while position:
        for event in pool.poll():
            if event.error is not None:
                raise RuntimeError(event.error)
            index, at = position[event.slot]
            if event.step is not None:
                executed += event.step.executed
                at += event.step.executed
                if event.step.terminated or event.step.truncated or at >= len(episodes[index][1]):
                    index, at = index + 1, 0
                    if index == len(episodes):
                        del position[event.slot]
                        continue
                    position[event.slot] = (index, 0)
                    pool.start(event.slot, episodes[index][0])
                    continue
            position[event.slot] = (index, at)
            pool.step(event.slot, episodes[index][1][at : at + chunk])
    return executed
