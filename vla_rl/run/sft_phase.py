"""The phases before RL: demonstrations are collected, and a policy learns to imitate them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from vla_rl.algorithms.validation import ROWS
from vla_rl.assembly.context import Run
from vla_rl.assembly.imitation import imitating, imitation_of
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.learning.sft import OwnSFT, SFTLearner, train_sft
from vla_rl.run.collect_policy import collect_with_policy


def phase_collect(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint or c.dataset:
        return {"skipped": "as checkpoint= or dataset= is given"}
    tasks = [t.task_id for t in run.train_tasks]
    # those that SFT keeps out of training come on top
    collect = dataclasses.replace(
        c.collect, episodes_per_task=c.collect.episodes_per_task + c.sft.validation_episodes
    )
    dataset = functools.partial(
        DemonstrationWriter,
        run.dir / "dataset",
        video=c.collect.video,
        kept_out=c.sft.validation_episodes,
    )
    with run.progress.task("collect", len(tasks) * collect.episodes_per_task) as bar:
        if collect.policy:
            policy = run.acting(collect.policy)
            return collect_with_policy(
                run.env,
                policy,
                run.train_tasks,
                collect,
                seed=c.seed,
                dataset=dataset,
                progress=bar.update,
            )
        return collect_demonstrations(
            c.env_type,
            c.env,
            tasks,
            collect,
            seed=c.seed,
            dataset=dataset,
            progress=bar.update,
            python=c.slots.python,
        )


def phase_sft(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint:
        return {"skipped": "as checkpoint= is given; sft.start=FOLDER goes on training one"}
    if isinstance(run.env, RecordedEnv):
        run.progress.say(run.env.recording.said())
    policy, dataset, validation, filtered = imitating(run)
    tasks = len({e.task_id for e in dataset.episodes})
    held = None if validation is None else (validation.evenly(ROWS), validation.first(ROWS))
    learning = _learner(run, policy, dataset)
    del dataset, validation  # where ranks elsewhere learn from them, they go
    with learning as learner:
        counters = train_sft(
            learner,
            folder=run.dir / "checkpoints" / "sft",
            logger=run.logger,
            progress=run.progress,
            validation=None if held is None else held[0],
            first=None if held is None else held[1],
            tasks=tasks,
        )
    return {"updates": counters.iteration, "seconds": counters.seconds, **filtered}


@contextlib.contextmanager
def _learner(run: Run, policy: Any, dataset: DemonstrationDataset) -> Iterator[SFTLearner]:
    """Who makes the updates: this process, or the ranks of a cluster, which end with the block."""
    if run.config.cluster_type != "ray" or not run.config.cluster.has_ranks:
        yield OwnSFT(imitation_of(run, policy, dataset))
        return
    from vla_rl.cluster.imitation import ranks_for_sft

    del dataset  # each rank reads its own
    with ranks_for_sft(run, policy) as learner:
        yield learner
