"""`vla-rl bench sim --suite dualarm`: this suite's simulator against the ways in which others step
one like it.

"objects in threads" makes an env object for every episode (its scene to draw, its cameras) and
steps each in a thread, chunk by chunk, as SimpleVLA-RL and RLinf step RoboTwin; "a picture an
action" does so one action at a time, as a gym env is stepped. All take the same actions and draw
the same pictures.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.measuring import memory_mb
from benchmarks.simulator import ways
from benchmarks.simulator.ways import SLOTS, Asked, InTurn, Plan, Threads, Way, picture
from sim import shaders
from sim.dualarm.settings import DualArmConfig
from sim.dualarm.simulator import MAX_STEP, DualArmSimulator
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec

RESETS = 500
_SPREAD = 0.3  # of the most that a joint may move in a control step


class Env:
    """A simulator for one slot, stepped ``stride`` actions at a time (0: a whole chunk)."""

    def __init__(self, config: DualArmConfig, stride: int = 0) -> None:
        self._simulator, self._stride = DualArmSimulator(config), stride

    def start(self, episode: EpisodeSpec) -> np.ndarray:
        return picture(self._simulator.start(0, episode))

    def step(self, chunk: np.ndarray) -> np.ndarray:
        for at in range(0, len(chunk), self._stride or len(chunk)):
            step = self._simulator.step(0, chunk[at : at + (self._stride or len(chunk))])
        return picture(step.observation)

    def close(self) -> None:
        self._simulator.close()


def measure(
    config: DualArmConfig,
    chunk: int = 25,
    steps: int = 50,
    workers: Sequence[int] = (),
    resets: int = RESETS,
    python: str = "",
) -> dict[str, Any]:
    """``steps`` control steps per slot and round."""
    if not config.pictured:
        raise ConfigError(
            "env.observe=state shows no pictures, and the benchmark compares them: "
            "set env.observe=pictures"
        )
    factory = functools.partial(DualArmSimulator, config)
    return ways.bench(
        factory, Asked(config, chunk, steps, resets), (measured, own_packs), workers, python
    )


text = ways.text


def measured(_: Any, asked: Asked) -> dict[str, Any]:
    """All figures but the pool's, in this process."""
    plan = planned(asked)
    more = {"MB of the process without a slot": memory_mb()}
    simulator, more["s CPU to the first picture of a process"] = _first_picture(asked.config)
    more["MB of the process with its first slot"] = memory_mb()
    others: dict[str, Callable[[], Way]] = {
        name: functools.partial(Threads, functools.partial(Env, asked.config, stride))
        for name, stride in (
            ("objects in threads, a picture a chunk", 0),
            ("objects in threads, a picture an action", 1),
        )
    }
    sizes = ways.slot_memory(others, plan, simulator)
    document = ways.measure(InTurn(simulator), others, plan) | {
        "more": more,
        "plan": plan,
        "mb_per_slot": sizes,
    }
    return document | {
        "resets": asked.resets,
        "mb_over_resets": ways.memory_over_resets(plan, simulator, asked.resets),
    }


def planned(asked: Asked) -> Plan:
    """For each slot an episode of the configured tasks in turn, and smooth random actions that
    end none of them."""
    plan = []
    for slot in range(SLOTS):
        rng = np.random.default_rng(slot)
        actions = (
            np.clip(_SPREAD * rng.standard_normal((asked.chunks, asked.chunk, 14)), -1.0, 1.0)
            * MAX_STEP
        )
        actions[..., [6, 13]] = 1.0
        plan.append(
            (
                EpisodeSpec(asked.config.tasks[slot % len(asked.config.tasks)], slot),
                actions.astype(np.float32),
            )
        )
    return plan


def own_packs(_: Any, asked: Asked) -> dict[str, Any]:
    """The first picture of this process where SAPIEN's shader packs are taken as they are."""
    shaders.without_table = _as_it_is
    return {"more": {"s CPU to it with SAPIEN's own shader packs": _first_picture(asked.config)[1]}}


def _as_it_is(text: str) -> str:
    return text


def _first_picture(config: DualArmConfig) -> tuple[DualArmSimulator, float]:
    simulator = DualArmSimulator(config)
    before = time.process_time()
    simulator.start(0, EpisodeSpec(config.tasks[0], 0))
    return simulator, time.process_time() - before
