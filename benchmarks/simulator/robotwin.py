"""`vla-rl bench sim --suite robotwin`: this project's stepping of a checkout against those that
step it otherwise.

On RLinf_support: "RLinf" is the checkout's own `SubEnv` (robotwin/envs/vector_env.py), one per slot
with a thread each, chunks as one path; "a new object an episode" makes such an object for every
episode, which sets its scene up twice; "an action a path" is the official evaluation's stepping,
whose dynamics are others.

On main: its own evaluation (scripts/eval_policy_xpolicylab.py), whose workers are processes with a
task object each that all their episodes share. An action is a path, after each action a picture is
drawn, and its expert solves an episode before the policy is asked; both are also left out. What
ours does with the other of `branches.PATHS` is shown as well.

All have the checkout's scenes with the same look and cameras.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import memory_mb
from benchmarks.simulator import ways
from benchmarks.simulator.ways import SLOTS, Asked, InTurn, Plan, Threads, Way
from sim.robotwin.branches import MAIN, PATHS, close, detect
from sim.robotwin.settings import RoboTwinConfig
from sim.robotwin.simulator import RoboTwinSimulator
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EpisodeSpec

ENV = Path("robotwin") / "envs" / "vector_env.py"
RESETS = 100
_WALK = 0.02  # rad, std of what an action adds
_NO_LIMIT = 10**9


class Upstream:
    """RLinf's env of one slot; ``single``: stepped one action at a time, each a path of its own."""

    def __init__(self, simulator: RoboTwinSimulator, single: bool = False) -> None:
        module = importlib.import_module("robotwin.envs.vector_env")
        self._simulator, self._single, (task,) = simulator, single, simulator.config.tasks
        options = {**simulator.scene_options("train"), "task_name": task, "step_lim": _NO_LIMIT}
        self._env = module.SubEnv(0, task, options, None, "seen", threading.Lock())

    def start(self, episode: EpisodeSpec) -> np.ndarray:
        seed = self._simulator.seed_of(episode)
        if self._env.instruction is None:
            self._env.env_seed = seed
            self._env.setup_task()
        self._env.reset(env_seed=seed)
        self._env.task.step_lim = _NO_LIMIT
        return self._env.get_obs()["full_image"]

    def step(self, chunk: np.ndarray) -> np.ndarray:
        if not self._single:
            return self._env.step(chunk)["obs"]["full_image"]
        for action in chunk:
            self._env.task.take_action(action)
        return self._env.get_obs()["full_image"]

    def close(self) -> None:
        self._env.close(clear_cache=False)


class Evaluated:
    """Slots as main's own evaluation has them, one after the other as each has its process there: a
    kept task object, an action a path. ``each``: a picture after every action, as there, else after
    a chunk; ``expert``: it acts before."""

    def __init__(
        self, simulator: RoboTwinSimulator, each: bool = True, expert: bool = False
    ) -> None:
        self._simulator, self._each, self._expert = simulator, each, expert
        self._kept = [
            simulator.checkout.task_class(simulator.config.tasks[0])() for _ in range(SLOTS)
        ]

    def start(self, episodes: Sequence[EpisodeSpec]) -> list[np.ndarray]:
        for task, episode in zip(self._kept, episodes):
            if self._expert:
                self._set_up(task, episode)
                # a seed that it does not solve is left out there
                with contextlib.suppress(Exception):
                    task.play_once()
                task.close_env()
            self._set_up(task, episode)
        return [self._picture(task) for task, _ in zip(self._kept, episodes)]

    def _set_up(self, task: Any, episode: EpisodeSpec) -> None:
        seed = self._simulator.seed_of(episode)
        options = self._simulator.scene_options(episode.split)
        task.setup_demo(
            now_ep_num=seed, seed=seed, is_test=True, task_name=episode.task_id, **options
        )
        task.step_lim = _NO_LIMIT

    def step(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
        seen = []
        for task, chunk in zip(self._kept, chunks):
            for number, action in enumerate(chunk, 1):
                task.take_action(action)
                if self._each or number == len(chunk):
                    shown = self._picture(task)
            seen.append(shown)
        return seen

    def _picture(self, task: Any) -> np.ndarray:
        return task.get_obs()["observation"][self._simulator.config.cameras[0]]["rgb"]

    def close(self) -> None:
        while self._kept:
            close(self._kept.pop())


class Otherwise(InTurn):
    """Ours with the other of `PATHS`, in the same slots."""

    def step(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.simulator.one_path ^= True
        try:
            return super().step(chunks)
        finally:
            self.simulator.one_path ^= True


def measure(
    config: RoboTwinConfig,
    chunk: int = 25,
    steps: int = 50,
    workers: Sequence[int] = (),
    resets: int = RESETS,
    python: str = "",
) -> dict[str, Any]:
    """``steps`` actions per slot and round, of the first task that is configured, with its time
    limit off. `UserError` for RLinf_support without RLinf's env."""
    if config.control != "qpos":
        raise ConfigError(
            "bench sim --suite robotwin steps with joint targets, not "
            f"env.control={config.control}: set qpos"
        )
    branch = detect(config.root).name
    if branch != MAIN and not (Path(config.root).expanduser() / ENV).is_file():
        raise UserError(
            f"vla-rl bench sim --suite robotwin compares with RLinf's env, {ENV}, which "
            f"{config.root}, laid out as branch {branch}, has not: take a whole checkout of branch "
            f"RLinf_support, or one of {MAIN}"
        )
    config = dataclasses.replace(
        config, tasks=config.tasks[:1], cameras=config.cameras[:1], horizon=_NO_LIMIT
    )
    factory = functools.partial(RoboTwinSimulator, config)
    functions = (measured, alone) if branch == MAIN else (measured,)
    return ways.bench(factory, Asked(config, chunk, steps, resets), functions, workers, python)


text = ways.text


def measured(_: Any, asked: Asked) -> dict[str, Any]:
    """All figures but the pool's, in this process."""
    with _silent():
        simulator = RoboTwinSimulator(asked.config)
        plan = planned(simulator, asked)
        more = {f"MB of the process with {SLOTS} slots": memory_mb()}
        main = simulator.checkout.branch.name == MAIN
        others = _ways_of_main(simulator) if main else _ways_of_rlinf(simulator)
        # a process a slot there, see `alone`
        sizes = ways.slot_memory({} if main else others, plan, simulator)
        document = ways.measure(InTurn(simulator), others, plan) | {
            "more": more,
            "plan": plan,
            "mb_per_slot": sizes,
        }
        return document | {
            "resets": asked.resets,
            "mb_over_resets": ways.memory_over_resets(plan, simulator, asked.resets),
        }


def alone(_: Any, asked: Asked) -> dict[str, Any]:
    """What a process of main's own evaluation takes."""
    with _silent():
        simulator = RoboTwinSimulator(asked.config)
        way, width = Evaluated(simulator), simulator.embodiment.action_dim
        way.start([EpisodeSpec(asked.config.tasks[0], 0)])
        way.step([np.zeros((asked.chunk, width))])
    return {"more": {"MB of a process of main's evaluation, with its one slot": memory_mb()}}


def _ways_of_rlinf(simulator: RoboTwinSimulator) -> dict[str, Callable[[], Way]]:
    kept, single = (
        functools.partial(Upstream, simulator),
        functools.partial(Upstream, simulator, single=True),
    )
    return {
        "RLinf: a kept object and a thread per slot": functools.partial(Threads, kept, anew=False),
        "a new object an episode, a thread per slot": functools.partial(Threads, kept),
        "an action a path (official evaluation)": functools.partial(Threads, single, anew=False),
    }


def _ways_of_main(simulator: RoboTwinSimulator) -> dict[str, Callable[[], Way]]:
    (path,) = set(PATHS) - {simulator.checkout.path}
    return {
        "main's evaluation": functools.partial(Evaluated, simulator, expert=True),
        "the same without the expert": functools.partial(Evaluated, simulator),
        "the same with a picture a chunk": functools.partial(Evaluated, simulator, each=False),
        f"simulator, env.path={path}": functools.partial(Otherwise, simulator),
    }


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        yield


def planned(simulator: RoboTwinSimulator, asked: Asked) -> Plan:
    """For each slot an episode and a random walk of both arms from where it starts; grippers
    stay."""
    low, high = (
        np.array(bound)
        for bound in (simulator.embodiment.action_low, simulator.embodiment.action_high)
    )
    arms = np.array([not name.endswith("gripper") for name in simulator.embodiment.action_names])
    plan = []
    for slot in range(SLOTS):
        episode, rng = EpisodeSpec(asked.config.tasks[0], slot), np.random.default_rng(slot)
        start = simulator.start(slot, episode).proprio.astype(np.float64)
        walk = np.cumsum(
            arms * rng.normal(0.0, _WALK, (asked.chunks * asked.chunk, len(start))), axis=0
        )
        plan.append(
            (episode, np.clip(start + walk, low, high).reshape(asked.chunks, asked.chunk, -1))
        )
    return plan
