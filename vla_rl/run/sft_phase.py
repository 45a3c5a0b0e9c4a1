"""The phases before RL: demonstrations are collected, and a policy learns to imitate them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import ROWS
from vla_rl.assembly.context import Run, imitated
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.demonstrations import DatasetSampler
from vla_rl.learning.sft import train_sft
from vla_rl.run.collect_policy import collect_with_policy


def phase_collect(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint or c.dataset:
        return {"skipped": "a checkpoint or dataset was given"}
    tasks = [t.task_id for t in run.train_tasks]
    # those that SFT keeps out of training come on top
    collect = dataclasses.replace(
        c.collect, episodes_per_task=c.collect.episodes_per_task + c.sft.validation_episodes
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
                folder=run.dir / "dataset",
                progress=bar.update,
            )
        return collect_demonstrations(
            c.env_type,
            c.env,
            tasks,
            collect,
            seed=c.seed,
            folder=run.dir / "dataset",
            progress=bar.update,
            python=c.slots.python,
        )


def phase_sft(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint:
        return {"skipped": "a checkpoint was given"}
    if isinstance(run.env, RecordedEnv):
        run.progress.say(run.env.recording.said())
    dataset, validation, filtered = imitated(run)
    torch.manual_seed(c.seed)
    policy = build.implementation("policy", c.policy_type).from_statistics(
        c.policy, run.env.embodiment, dataset.action_stats, dataset.proprio_stats
    )
    policy.to(run.device).train()
    sampler = DatasetSampler(dataset, c.sft.batch_size, c.seed, c.sft.first_share)
    counters = train_sft(
        Imitation(seeded(c.sft, c.seed), policy, sampler),
        folder=run.dir / "checkpoints" / "sft",
        logger=run.logger,
        progress=run.progress,
        validation=None if validation is None else validation.evenly(ROWS),
        first=None if validation is None else validation.first(ROWS),
        tasks=len({episode.task_id for episode in dataset.episodes}),
    )
    return {"updates": counters.iteration, "seconds": counters.seconds, **filtered}
