"""Supervised fine-tuning of a run: the new policy, and what trains it on the demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import ROWS
from vla_rl.assembly.context import Run, imitated
from vla_rl.assembly.env_and_policy import acting_policy, seeded
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset
from vla_rl.data.recording import bounds
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy


def imitating(
    run: Run,
) -> tuple[Any, DemonstrationDataset, DemonstrationDataset | None, dict[str, Any]]:
    """The policy that SFT begins with, and, in its chunks, what `imitated` says."""
    moved = run.env.moved if isinstance(run.env, RecordedEnv) else ()
    if not run.config.sft.start:
        dataset, validation, filtered = imitated(run)
        return _new_policy(run, dataset, moved), dataset, validation, filtered
    policy = _started(run, moved)
    return policy, *imitated(run, policy)


def _started(run: Run, moved: Sequence[str]) -> Any:
    """That of ``sft.start``. Raises `ConfigError` for one that imitates nothing, or whose actions
    count from elsewhere than those that it would be shown."""
    c = run.config
    torch.manual_seed(c.seed)
    policy = acting_policy(c, Path(c.sft.start), run.env.embodiment)
    place = f"sft.start={c.sft.start} holds a {policy.policy_type} policy"
    if "imitation" not in policy.can:
        raise ConfigError(f"{place}, which cannot be trained by imitation")
    its = tuple(policy.names) if policy.policy_type == "relative" else ()
    if its != tuple(moved):
        raise ConfigError(
            f"{place} that moves {', '.join(its) or 'nothing'} from where the robot is, and the "
            f"data are read as moves of {', '.join(moved) or 'nothing'}: env.actions=delta or "
            "absolute, and env.keep, as it was trained"
        )
    return policy.to(run.device).train()


def _new_policy(run: Run, dataset: DemonstrationDataset, moved: Sequence[str]) -> Any:
    """The same each time, normalised by what it will learn."""
    c, spec = run.config, run.env.embodiment
    torch.manual_seed(c.seed)
    kind = Policy.class_of(build.implementation("policy", c.policy_type))
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
