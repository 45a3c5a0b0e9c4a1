"""Filtered behaviour cloning as an online algorithm: clone the successful episodes of every batch,
drop the rest.

The simplest baseline for RL fine-tuning (rejection fine-tuning; BAIL, Chen et al. 2020, keeps the
best actions by a learned bound instead of by success). It needs no likelihoods, so any policy with
an imitation loss will do. The update is that of `vla_rl.algorithms.imitation` at a constant
learning rate; the optimiser lives on from batch to batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.imitation import DecisionSampler, DecisionSamples, Imitation, ImitationConfig
from vla_rl.config.imitation import FilteredBCConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import OnPolicy, Policy
from vla_rl.types import RolloutBatch


def kept_decisions(batch: RolloutBatch, max_control_steps: int | None = None) -> Tensor:
    """Indices int64 [k] of the decisions of successful episodes no longer than
    ``max_control_steps``, leads included."""
    steps = torch.tensor([len(episode.lead) for episode in batch.episodes])
    steps.index_add_(0, batch.trajectory_index, batch.valid.sum(1))
    keep = (
        batch.success if max_control_steps is None else batch.success & (steps <= max_control_steps)
    )
    return torch.nonzero(keep[batch.trajectory_index]).flatten()


class FilteredBC(OnPolicy):
    """It clones what succeeded."""

    reads_rewards = False

    def __init__(
        self,
        config: FilteredBCConfig,
        policy: Policy,
    ):
        """Raises ConfigError where the policy has no ``imitation_loss``."""
        if "imitation" not in Policy.of(policy).can:
            raise ConfigError(
                f"filtered BC needs a policy with imitation_loss; {type(policy).__name__} has none"
            )
        self.config, self.iteration = config, 0
        policy.prepare_for_rl()  # which may freeze parts
        settings = ImitationConfig(
            batch_size=config.minibatch_size,
            learning_rate=config.learning_rate,
            # constant: the number of updates is not known beforehand
            min_learning_rate_fraction=1.0,
            warmup_updates=0,
            betas=list(config.betas),
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
            micro_batch_size=config.micro_batch_size,
            autocast=config.autocast,
            max_bad_updates=config.max_bad_updates,
            seed=config.seed,
            augment=config.augment,
        )
        self._imitation = Imitation(settings, policy, _Nothing())

    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Clone the successes of ``batch``; ``rewards`` are ignored. Returns metrics
        ``filtered_bc/…``.

        A batch without a success changes nothing and says so (``filtered_bc/nothing_to_clone`` 1).
        Raises `TrainingDiverged`.
        """
        config, rows = self.config, kept_decisions(batch, self.config.max_control_steps)
        metrics = {
            "filtered_bc/episodes": float(batch.trajectory_index[rows].unique().numel()),
            "filtered_bc/decisions": float(len(rows)),
            "filtered_bc/nothing_to_clone": float(len(rows) == 0),
            "filtered_bc/learning_rate": config.learning_rate,
        }
        updates = 0
        if len(rows):
            samples = DecisionSamples(
                batch.observations[rows].without_privileged(),
                batch.actions[rows],
                batch.valid[rows],
                ~batch.is_human[rows].any(1),
            )
            self._imitation.sampler = DecisionSampler(
                samples, config.minibatch_size, config.seed + self.iteration
            )
            updates = config.epochs * -(-len(rows) // config.minibatch_size)
            sums: dict[str, list[float]] = defaultdict(list)
            for _ in range(updates):
                for name, x in self._imitation.update().items():
                    sums[name.removeprefix("sft/")].append(x)
            sums.pop("learning_rate")
            sums.pop("skipped_updates")
            sums.pop("zero_gradients")
            metrics |= {f"filtered_bc/{name}": sum(xs) / len(xs) for name, xs in sums.items()}
            self._imitation.sampler = _Nothing()  # the batch's images need not stay
        self.iteration += 1
        guard = self._imitation.guard
        totals = {"skipped_updates": guard.skipped, "zero_gradients": guard.zero_gradients}
        return metrics | {
            f"filtered_bc/{name}": float(x) for name, x in {"updates": updates, **totals}.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights. Needs no pickle."""
        return {"iteration": self.iteration, "imitation": self._imitation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ConfigError where the parameters differ from those
        saved."""
        self.iteration = int(state["iteration"])
        self._imitation.load_state_dict(state["imitation"])


class _Nothing:
    """The sampler between batches."""

    def next_batch(self) -> Any:
        raise RuntimeError("filtered BC has no batch to learn from outside of update()")
