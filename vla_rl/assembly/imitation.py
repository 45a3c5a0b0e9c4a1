"""Supervised fine-tuning of a run: the new policy, and what trains it on the demonstrations."""

from __future__ import annotations

from typing import Any

import torch

from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset


def new_policy(run: Run, dataset: DemonstrationDataset) -> Any:
    """The policy that SFT begins with, the same each time."""
    c = run.config
    torch.manual_seed(c.seed)
    policy = build.implementation("policy", c.policy_type).from_statistics(
        c.policy, run.env.embodiment, dataset.action_stats, dataset.proprio_stats
    )
    return policy.to(run.device).train()


def imitation_of(run: Run, policy: Any, dataset: DemonstrationDataset) -> Imitation:
    """The training of ``policy`` on the run's own batches."""
    c = run.config
    sampler = DatasetSampler(dataset, c.sft.batch_size, c.seed, c.sft.first_share)
    return Imitation(seeded(c.sft, c.seed), policy, sampler)
