"""Ways to step the same episodes, measured in turns in one process: what `vla-rl bench sim` does
for suites on SAPIEN.

Seconds are this process's CPU time, all its threads together, so that other processes on the
machine do not count; what threads wait for each other does not either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.measuring import memory_mb, table
from benchmarks.simulator.pool import measure_pool
from sim.calls import Calls, check_machine
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec

ROUNDS = 2  # in turns; the fastest counts
SLOTS = 4  # that step together
FURTHER = 4  # times so many of ours, whose memory is measured
PARTS = 5  # of the resets over which memory is looked at
WANTED = {"steps": 3.0, "reset": 5.0, "mb_per_slot": 100.0}  # what is aimed at
OURS = "simulator"


class Way(Protocol):
    """Slots that start and step together; pictures uint8 [H W 3] are the first camera's."""

    def start(self, episodes: Sequence[EpisodeSpec]) -> list[np.ndarray]: ...

    def step(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def close(self) -> None: ...


class InTurn:
    """A simulator's slots from ``first`` on, one after the other: ours."""

    def __init__(self, simulator: Any, first: int = 0) -> None:
        self.simulator, self.first = simulator, first

    def start(self, episodes: Sequence[EpisodeSpec]) -> list[np.ndarray]:
        return [
            picture(self.simulator.start(slot, episode))
            for slot, episode in enumerate(episodes, self.first)
        ]

    def step(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [
            picture(self.simulator.step(slot, chunk).observation)
            for slot, chunk in enumerate(chunks, self.first)
        ]

    def close(self) -> None:
        """The simulator is its owner's."""


class Threads:
    """An env object per slot, made by ``make()`` for every episode, and a thread for each: how
    SimpleVLA-RL and RLinf do it.

    Such an object has ``start(episode)`` and ``step(chunk)``, which return a picture, and
    ``close()``.
    """

    def __init__(self, make: Callable[[], Any], anew: bool = True) -> None:
        self._make, self._anew = make, anew
        self._envs: list[Any] = []
        self._threads = ThreadPoolExecutor(max_workers=SLOTS)

    def start(self, episodes: Sequence[EpisodeSpec]) -> list[np.ndarray]:
        """One after the other: both hold a lock while they set a scene up."""
        if self._anew or not self._envs:
            self._drop()
            self._envs = [self._make() for _ in episodes]
        return [env.start(episode) for env, episode in zip(self._envs, episodes)]

    def step(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(self._threads.map(lambda pair: pair[0].step(pair[1]), zip(self._envs, chunks)))

    def close(self) -> None:
        self._drop()
        self._threads.shutdown()

    def _drop(self) -> None:
        while self._envs:
            self._envs.pop().close()


def picture(observation: Any) -> np.ndarray:
    return next(iter(observation.images.values()))


@dataclass(frozen=True)
class Asked:
    """What is measured: the env's config, control steps per decision and per slot, and resets
    for memory."""

    config: Any
    chunk: int
    steps: int
    resets: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.steps < self.chunk:
            raise ConfigError(
                "bench needs --chunk >= 1 and --steps of at least a chunk, got "
                f"{self.chunk} and {self.steps}"
            )

    @property
    def chunks(self) -> int:
        return self.steps // self.chunk


Plan = list[tuple[EpisodeSpec, np.ndarray]]  # for each slot the episode and actions [chunks h a]


def measure(ours: Way, others: dict[str, Callable[[], Way]], plan: Plan) -> dict[str, Any]:
    """Milliseconds per control step and per reset of each way, a picture with each chunk and reset;
    at how many decisions another way's pictures equal ours."""
    ways = {OURS: ours} | {name: build() for name, build in others.items()}
    best: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    seen: dict[str, list[np.ndarray]] = {}
    episodes, actions = (
        [episode for episode, _ in plan],
        np.stack([each for _, each in plan], axis=1),
    )
    for _ in range(ROUNDS):
        for name, way in ways.items():
            before = time.process_time()
            seen[name] = way.start(episodes)
            started = time.process_time()
            for chunks in actions:
                seen[name] += way.step(list(chunks))
            ended = time.process_time()
            best[name].append((ended - started, started - before))
    count = len(plan) * actions.shape[0] * actions.shape[2]
    for way in ways.values():
        way.close()
    same = {
        name: sum(np.array_equal(a, b) for a, b in zip(seen[OURS], pictures))
        for name, pictures in seen.items()
        if name != OURS
    }
    return {
        "ms_per_step": {
            name: 1e3 * min(step for step, _ in times) / count for name, times in best.items()
        },
        "ms_reset": {
            name: 1e3 * min(reset for _, reset in times) / len(plan) for name, times in best.items()
        },
        "decisions": len(seen[OURS]),
        "identical": same,
    }


def slot_memory(
    others: dict[str, Callable[[], Way]], plan: Plan, simulator: Any
) -> dict[str, float]:
    """MB that each further slot takes, of ours with ``simulator`` and of each other way. To be
    asked for first: what has been freed is taken again and does not count."""
    result = {}
    for name, build in {OURS: lambda: InTurn(simulator, first=SLOTS), **others}.items():
        way, more = build(), plan * (FURTHER if name == OURS else 1)
        before = memory_mb()
        way.start([episode for episode, _ in more])
        way.step([actions[0] for _, actions in more])
        result[name] = (memory_mb() - before) / len(more)
        way.close()
    return result


def memory_over_resets(plan: Plan, simulator: Any, resets: int) -> list[float]:
    """MB of the process after each fifth of ``resets`` of slot 0, each with a chunk and two
    pictures."""
    (first, actions), at = plan[0], []
    for part in range(PARTS):
        for i in range(part * resets // PARTS, (part + 1) * resets // PARTS):
            simulator.start(0, EpisodeSpec(first.task_id, i))
            simulator.step(0, actions[0])
        at.append(memory_mb())
    return at


def bench(
    factory: Any,
    asked: Asked,
    measured: Sequence[Callable[[Any, Asked], dict[str, Any]]],
    workers: Sequence[int] = (),
    python: str = "",
) -> dict[str, Any]:
    """Call each of ``measured`` in a process of its own, under ``python``; then the pool. The first
    one's figures have the ``plan``, of each ``more`` is shown below the table."""
    check_machine(asked.config, python)
    documents = []
    for function in measured:
        with Calls(
            dict, died="the process that measured died (out of memory?)", python=python
        ) as calls:
            documents.append(calls.one(function, asked))
    document = documents[0] | {
        "more": {name: value for each in documents for name, value in each["more"].items()}
    }
    plan = document.pop("plan")
    replays = [(episode, actions.reshape(-1, actions.shape[-1])) for episode, actions in plan]
    document |= {
        "conditions": asked.config.describe(),
        "tasks": sorted({episode.task_id for episode, _ in plan}),
        "chunk": asked.chunk,
        "steps": asked.chunks * asked.chunk,
        "slots": len(plan),
        "pool": {
            str(n): measure_pool(factory, replays, asked.chunk, n, 1, python) for n in workers
        },
    }
    document["ratios"] = {
        key: {
            name: value / document[key][OURS]
            for name, value in document[key].items()
            if name != OURS
        }
        for key in ("ms_per_step", "ms_reset")
    }
    return document


def text(document: Mapping[str, Any]) -> str:
    ratios = document["ratios"]
    rows = [("CPU time", "ms/step", "x ours", "ms/reset", "x ours", "MB/slot", "pictures as ours")]
    for name, ms in document["ms_per_step"].items():
        ours, size = name == OURS, document["mb_per_slot"].get(name)
        step, reset = (
            "" if ours else f"{ratios[key][name]:.2f}" for key in ("ms_per_step", "ms_reset")
        )
        same = "" if ours else f"{document['identical'][name]} of {document['decisions']}"
        shown = "" if size is None else f"{size:.1f}"
        rows.append(
            (name, f"{ms:.2f}", step, f"{document['ms_reset'][name]:.1f}", reset, shown, same)
        )
    wanted_steps, wanted_reset, most = WANTED.values()
    return "\n".join(
        [
            f"{', '.join(document['tasks'])} · chunk {document['chunk']} · {document['slots']} "
            f"slots · {document['conditions']}",
            table(rows),
            f"wanted: {wanted_steps:g} x the steps, {wanted_reset:g} x the resets, at most "
            f"{most:g} MB a slot",
            *(f"{name}: {value:.2f}" for name, value in document["more"].items()),
            f"MB over {document['resets']} resets: "
            f"{', '.join(f'{mb:.0f}' for mb in document['mb_over_resets'])}",
            *(
                f"pool of {n}, two slots each, resets included: {figures['steps_per_second']:.0f} "
                "steps/s"
                for n, figures in document["pool"].items()
            ),
        ]
    )
