"""Scripted demonstrations, collected in parallel processes, into a LeRobotDataset v3."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vla_rl import build
from vla_rl.config.run import CollectConfig
from vla_rl.data.collect_worker import collect_one, embodiment, open_demonstrator
from vla_rl.data.lerobot_format import SENT_KEY
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError, UserError
from vla_rl.monitoring.machine import available_cores
from vla_rl.options import EnvOptions, view
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec

MAX_FAILURE_SHARE = 0.5
_DIED = "a collecting worker process died (out of memory?). Run again with collect.workers=1"


def collect_demonstrations(
    env_type: str,
    env_config: Any,
    tasks: Sequence[str],
    config: CollectConfig,
    *,
    seed: int,
    dataset: Callable[..., DemonstrationWriter],
    progress: Callable[..., None],
    python: str = "",
) -> dict[str, Any]:
    """Collect ``episodes_per_task`` demonstrations of each task (successes only, unless the config
    says otherwise) into what ``dataset(robot, extra=...)`` opens.

    Initial states are 0, 1, 2 … of the train split, with its paraphrases in turn; the result
    depends on the seed, not on the number of workers. These run under the executable ``python``
    (empty: this one). Returns counts. Raises `UserError` when more than half of the attempts at a
    task fail.
    """
    if config.horizon:
        if view(env_config, EnvOptions).horizon is None:
            raise ConfigError(
                f"collect.horizon={config.horizon}: env {env_type!r} has no key 'horizon' to change"
            )
        env_config = dataclasses.replace(env_config, horizon=config.horizon)
    frames = attempts = 0
    setup = functools.partial(open_demonstrator, env_type, env_config)
    calls = build.attribute("sim.calls:Calls")(
        setup, min(config.workers, available_cores()), died=_DIED, python=python
    )
    with calls, contextlib.ExitStack() as stack:
        kept_in_all, robot, writer = 0, calls.one(embodiment), None
        for task in tasks:
            kept = tried = 0
            for episode in calls.ordered(collect_one, _asked_for(task, config, seed)):
                tried += 1
                if writer is None:
                    extra = (
                        {SENT_KEY: robot.action_names}
                        if SENT_KEY in episode.get("extra", ())
                        else None
                    )
                    writer = stack.enter_context(dataset(robot, extra=extra))
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
                        f"the demonstrator solved only {kept} of {tried} episodes of task {task!r} "
                        f"at collect.action_noise={config.action_noise}. Lower the noise or leave "
                        "the task out."
                    )
            attempts += tried
    return {"episodes": kept_in_all, "attempts": attempts, "control_steps": frames}


def _asked_for(
    task: str, config: CollectConfig, seed: int
) -> Iterator[tuple[EpisodeSpec, dict[str, float]]]:
    """Episode after episode of a task, with the options of its demonstration."""
    options = {"noise_std": config.action_noise}
    if config.speed != 1.0:  # a collector without that option can still collect at full speed
        options["speed"] = config.speed
    for i in itertools.count():
        yield (
            EpisodeSpec(
                task_id=task,
                init_state_id=i,
                split="train",
                seed=stable_seed("collect", seed, task, i),
            ),
            options,
        )
