"""Supervised fine-tuning of a run: the new policy, and what trains it on the demonstrations."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import ROWS
from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset
from vla_rl.data.recording import bounds
from vla_rl.interfaces import Policy


def new_policy(run: Run, dataset: DemonstrationDataset) -> Any:
    """The policy that SFT begins with, the same each time, normalised by what it will learn."""
    c, spec = run.config, run.env.embodiment
    torch.manual_seed(c.seed)
    kind = Policy.class_of(build.implementation("policy", c.policy_type))
    moved = run.env.moved if isinstance(run.env, RecordedEnv) else ()
    if not moved:
        policy = kind.from_statistics(c.policy, spec, dataset.action_stats, dataset.proprio_stats)
        return _looked(policy.to(run.device), dataset)
    found = dataset.moves(moved)
    low, high = bounds(np.array([found["low"], found["high"]]), c.env.margin)
    own = dataclasses.replace(spec, action_low=low, action_high=high, mirror=None)
    base = kind.from_statistics(c.policy, own, found, dataset.proprio_stats)
    policy = build.implementation("around", "relative")(
        _looked(base.to(run.device), dataset), spec, moved
    )
    return policy.to(run.device).train()


def _looked(policy: Any, dataset: DemonstrationDataset) -> Any:
    Policy.of(policy).first_look(lambda: dataset.evenly(ROWS)[0])
    return policy.train()


def imitation_of(run: Run, policy: Any, dataset: DemonstrationDataset) -> Imitation:
    """The training of ``policy`` on the run's own batches."""
    c = run.config
    sampler = DatasetSampler(dataset, c.sft.batch_size, c.seed, c.sft.first_share)
    return Imitation(seeded(c.sft, c.seed), policy, sampler)
