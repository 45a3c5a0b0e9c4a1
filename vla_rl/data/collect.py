"""Scripted demonstrations, collected in parallel processes, into a LeRobotDataset v3."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.asked import TimeLimit
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError, UserError
from vla_rl.reporting.machine import available_cores
from vla_rl.run.settings import CollectConfig
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec

MAX_FAILURE_SHARE = 0.5


def collect_demonstrations(
    env_type: str,
    env_config: Any,
    tasks: Sequence[str],
    config: CollectConfig,
    *,
    seed: int,
    folder: Path,
    progress: Callable[..., None],
) -> dict[str, Any]:
    """Collect ``episodes_per_task`` demonstrations of each task (successes only, unless the config says otherwise).

    Initial states are 0, 1, 2 … of the train split, with its paraphrases in turn; the result depends on the seed,
    not on the number of workers. The dataset appears in ``folder`` at once when it is complete. Returns counts. Raises
    `UserError` when more than half of the attempts at a task fail.
    """
    if config.horizon:
        has_limit = isinstance(env_config, TimeLimit)
        if not has_limit:
            raise ConfigError(f"collect.horizon={config.horizon}: env {env_type!r} has no key 'horizon' to change")
        env_config = dataclasses.replace(env_config, horizon=config.horizon)
    frames = attempts = 0
    context = multiprocessing.get_context("spawn")
    workers = min(config.workers, available_cores())
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_open, initargs=(env_type, env_config))
    with _deaths_as_user_errors(), executor as pool:
        embodiment = pool.submit(_embodiment).result()
        kept_in_all = 0
        with DemonstrationWriter(folder, embodiment, video=config.video) as writer:
            for task in tasks:
                kept = tried = 0
                submit = functools.partial(_submit, pool, task, config, seed)
                for episode in _in_order(submit, ahead=2 * workers):
                    tried += 1
                    if episode["success"] or not config.only_success:
                        writer.add_episode(**episode)
                        frames += len(episode["actions"])
                        kept += 1
                        kept_in_all += 1
                        progress(kept_in_all, success=f"{kept}/{tried}")
                    if kept == config.episodes_per_task:
                        break
                    if tried >= 20 and kept < (1 - MAX_FAILURE_SHARE) * tried:
                        raise UserError(
                            f"the demonstrator solved only {kept} of {tried} episodes of task {task!r} at "
                            f"collect.action_noise={config.action_noise}. Lower the noise or leave the task out."
                        )
                attempts += tried
    return {"episodes": kept_in_all, "attempts": attempts, "control_steps": frames}


def _in_order(submit: Callable[[int], Future], ahead: int) -> Iterator[dict[str, Any]]:
    """Results for 0, 1, 2 … in order, with ``ahead`` of them under way; pending ones are cancelled at the end."""
    pending: deque[Future] = deque(submit(i) for i in range(ahead))
    following = ahead
    try:
        while True:
            yield pending.popleft().result()
            pending.append(submit(following))
            following += 1
    finally:
        for future in pending:
            future.cancel()


@contextlib.contextmanager
def _deaths_as_user_errors() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise UserError("a collecting worker process died (out of memory?). Run again with collect.workers=1") from error


def _submit(pool: ProcessPoolExecutor, task: str, config: CollectConfig, seed: int, index: int) -> Future:
    episode = EpisodeSpec(task_id=task, init_state_id=index, split="train", seed=stable_seed("collect", seed, task, index))
    options = {"noise_std": config.action_noise}
    if config.speed != 1.0:  # a collector without that option can still collect at full speed
        options["speed"] = config.speed
    return pool.submit(_collect_one, episode, options)


# ------------------------------------------------------------------------------------------------- in the worker process
_worker: dict[str, Any] = {}


def _open(env_type: str, env_config: Any) -> None:
    try:
        _worker["simulator"] = build.implementation("env", env_type)(env_config)
        _worker["collect"] = build.attribute(build.env_entry(env_type).collect)
    except Exception as error:  # an initialiser that raises breaks the pool without a word: the first task says it
        _worker["failed"] = error


def _simulator() -> Any:
    if "failed" in _worker:
        raise _worker["failed"]
    return _worker["simulator"]


def _embodiment() -> Any:
    return _simulator().embodiment


def _collect_one(episode: EpisodeSpec, options: dict[str, float]) -> dict[str, Any]:
    simulator = _simulator()
    texts = next(t.instructions for t in simulator.tasks if t.task_id == episode.task_id)
    episode = dataclasses.replace(episode, instruction_index=episode.init_state_id % max(1, len(texts)))
    return _worker["collect"](simulator, episode, rng=np.random.default_rng(episode.seed), **options)
