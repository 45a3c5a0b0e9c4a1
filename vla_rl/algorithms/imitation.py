"""Supervised fine-tuning (behaviour cloning) of any policy with an imitation loss, with augmentation;
filtered BC.

Filtered BC keeps the successful episodes of a rollout and clones them (Chen et al. 2020, "BAIL";
also called rejection fine-tuning). Learning rate: linear warm-up, then a cosine to a floor
(Loshchilov & Hutter 2017, eq. 5, one cycle).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from vla_rl.algorithms.augmentation import augment
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.config.imitation import ImitationConfig
from vla_rl.data.demonstrations import DatasetSampler
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.mirror import mirrored
from vla_rl.ranks import Part, Ranks
from vla_rl.types import Observation

Batch: TypeAlias = tuple[Observation, Tensor, Tensor] | tuple[Observation, Tensor, Tensor, Tensor]


@runtime_checkable
class Sampler(Protocol):
    """Yields demonstration chunks for ever."""

    def next_batch(self) -> Batch:
        """Observation [b], actions float32 [b h a] in physical units, valid bool [b h]; and bool
        [b] which of them the policy sampled itself, where some are (`Policy.imitates_itself`)."""
        ...


# ----------------------------------------------------------------------------------------- schedule
def learning_rate_factor(update: int, warmup: int, total: int, floor: float) -> float:
    """Factor for 0-based ``update``: linear to 1 over ``warmup`` updates, then a cosine down to
    ``floor``."""
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


# ----------------------------------------------------------------------------------------- training
class Imitation:
    """Trains a policy by its imitation loss from a `Sampler`, one `update` at a time.

    Several ``ranks`` (by default those of this process's group) make one update together: each
    draws the same batch, and reads and augments its share of it and runs the policy on that.
    """

    def __init__(
        self, config: ImitationConfig, policy: Policy, sampler: Sampler, ranks: Ranks | None = None
    ):
        """Raises ConfigError where the policy cannot imitate, has nothing to train, or is to
        mirror what has no mirror."""
        if "imitation" not in Policy.of(policy).can:
            raise ConfigError(
                f"SFT needs a policy with imitation_loss; {type(policy).__name__} has none"
            )
        if config.augment.mirror:
            policy.embodiment.require_mirror("augment.mirror is set", "augment.mirror=0")
        self.config, self.policy, self.sampler = config, policy, sampler
        self.parameters = [p for p in policy.parameters() if p.requires_grad]  # type: ignore[attr-defined]
        self.optimizer = make_adamw(
            [(self.parameters, config.learning_rate)],
            config.betas,
            config.weight_decay,
            offload=config.offload_optimizer,
        )
        self.ranks = ranks or Ranks.present()
        self.guard = GuardedStep(config.max_bad_updates, config.grad_clip, self.ranks)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.updates = 0

    def update(self) -> dict[str, float]:
        """One optimiser step. Returns metrics ``sft/…`` (``docs/reference/metrics.md``). Raises
        `TrainingDiverged`."""
        config, device = self.config, self.parameters[0].device
        factor = learning_rate_factor(
            self.updates, config.warmup_updates, config.updates, config.min_learning_rate_fraction
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        observation, actions, valid, own, rank = self._drawn()
        if config.augment.mirror:
            turned = rank.of(torch.rand(rank.count, generator=self.generator))
            turned = turned < config.augment.mirror
            observation, actions = mirrored(observation, actions, self.policy.embodiment, turned)
            own = None if own is None else own & ~turned
        actions = self.policy.targets(observation, actions)
        observation = augment(observation, config.augment, self.generator, rank)
        sums: dict[str, float] = defaultdict(float)
        total = torch.zeros((), device=device)
        weight_sum = self.ranks.sum(valid.sum()).clamp(min=1)
        autocast = config.autocast and device.type == "cuda"
        for rows in torch.arange(len(observation)).split(
            config.micro_batch_size or len(observation)
        ):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            with (
                torch.autocast("cuda", dtype=torch.bfloat16)
                if autocast
                else contextlib.nullcontext()
            ):
                loss, metrics = self.policy.imitation_loss(
                    observation[part].to(device),
                    actions[part].to(device),
                    valid[part].to(device),
                    **({} if own is None else {"own": own[part].to(device)}),
                )
            # a policy's loss is a mean over valid control steps
            share = valid[part].sum() / weight_sum
            (loss * share.to(device)).backward()
            total = total + loss.detach() * share.to(device)
            for name, x in metrics.items():
                sums[name] += x * float(share)
        total = self.ranks.sum(total)
        norm = self.guard.step(self.optimizer, total)
        self.updates += 1
        if self.ranks.size > 1:
            parts = torch.tensor(list(sums.values()), dtype=torch.float64)
            sums = dict(zip(sums, self.ranks.sum(parts).tolist(), strict=True))
        out = {f"sft/{k}": v for k, v in sums.items()}
        out |= {"sft/loss": float(total), "sft/learning_rate": config.learning_rate * factor}
        out["sft/skipped_updates"] = float(self.guard.skipped)
        out["sft/zero_gradients"] = float(self.guard.zero_gradients)
        return out if norm is None else out | {"sft/grad_norm": norm}

    def _drawn(self) -> tuple[Observation, Tensor, Tensor, Tensor | None, Part]:
        """This rank's rows of the next batch, which of them the policy sampled itself (None: not
        asked for), and their `Part`; what only fills up is not valid."""
        own = None
        if self.ranks.size > 1 and isinstance(self.sampler, DatasetSampler):
            drawn, (observation, actions, valid) = self.sampler.next_part(self.ranks)
            self.ranks.require_same("draws", len(drawn), float(drawn.double().sum()))
            part = self.ranks.part(len(drawn))
        else:
            observation, actions, valid, *rest = self.sampler.next_batch()
            part = self.ranks.part(len(observation))
            own = rest[0] if rest and self.policy.imitates_itself else None
            if self.ranks.size > 1:
                self.ranks.require_same("demonstrations", part.count, float(actions.double().sum()))
                observation, actions, valid = (
                    observation[part.rows],
                    actions[part.rows],
                    valid[part.rows],
                )
                own = None if own is None else own[part.rows]
        return observation.without_privileged(), actions, valid & part.real[:, None], own, part

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights and the sampler's position. Needs no pickle."""
        return {
            "updates": self.updates,
            "optimizer": optimizer_state(self.optimizer),
            "guard": self.guard.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ConfigError where the parameters differ from those
        saved."""
        self.updates = int(state["updates"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self.generator.set_state(state["generator"].cpu())


# -------------------------------------------------------------------------------------- filtered BC
@dataclass(frozen=True)
class DecisionSamples:
    """Decisions to imitate: observations [n], actions float32 [n h a], valid bool [n h], own
    bool [n] (see `Sampler`)."""

    observations: Observation
    actions: Tensor
    valid: Tensor
    own: Tensor

    def __len__(self) -> int:
        return self.actions.shape[0]


class DecisionSampler:
    """A `Sampler` over decisions in memory: a fresh permutation each epoch, ``batch_size`` (or
    all) at a time."""

    def __init__(self, samples: DecisionSamples, batch_size: int, seed: int = 0):
        self.samples, self.batch_size = samples, min(batch_size, len(samples))
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.position = torch.randperm(len(samples), generator=self.generator), 0

    def next_batch(self) -> Batch:
        if self.position + self.batch_size > len(self.samples):
            self.order, self.position = (
                torch.randperm(len(self.samples), generator=self.generator),
                0,
            )
        rows = self.order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return (
            self.samples.observations[rows],
            self.samples.actions[rows],
            self.samples.valid[rows],
            self.samples.own[rows],
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self.order.clone(),
            "position": self.position,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["order"]) != len(self.samples):
            raise ConfigError(
                f"the sampler state is for {len(state['order'])} decisions, there are "
                f"{len(self.samples)} now"
            )
        self.order, self.position = state["order"].cpu().clone(), int(state["position"])
        self.generator.set_state(state["generator"].cpu())
