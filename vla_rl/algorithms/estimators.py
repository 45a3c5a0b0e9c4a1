"""Advantage estimators of PPO: each turns the rewards of a batch into one advantage per decision.

Adding one: a class as below, and a row in `settings.ADVANTAGES` (or
``algorithm.advantage=package.module:Class``, whose class has ``needs_value`` and ``grouped`` as
attributes). The mathematics stand in `vla_rl.algorithms.advantages`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import advantages as adv
from vla_rl.config.algorithms import PPOConfig, advantage_entry
from vla_rl.errors import ConfigError
from vla_rl.types import RolloutBatch


@dataclass(frozen=True)
class Scored:
    """A batch and its rewards per decision: ``named`` {name: [n]}, their weighted sum ``total``
    [n], ``discounts`` [n].

    ``values`` [n] and ``final_values`` [m] (of what was seen after each trajectory; 0 where nothing
    is bootstrapped) are None for an estimator that needs none. ``log_weights`` [n]: log π_p/μ of
    each decision, the policy at the start of the update against the one that acted, the mean over
    its log-prob entries; None where the policy is not asked.
    """

    batch: RolloutBatch
    named: dict[str, Tensor]
    weights: dict[str, float]
    total: Tensor
    discounts: Tensor
    values: Tensor | None = None
    final_values: Tensor | None = None
    log_weights: Tensor | None = None

    def score(self, rewards: Tensor) -> Tensor:
        """Sum [m] of rewards [n] over each trajectory."""
        return adv.trajectory_sums(
            rewards, self.batch.trajectory_index, self.batch.num_trajectories
        )


@dataclass(frozen=True)
class Estimate:
    """``advantages`` [n] before normalisation, ``returns`` [n] that a critic is to learn (None:
    there is no critic)."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Estimator:
    """Made from the algorithm's config; ``state_dict`` holds what it keeps from one batch to the
    next."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def estimate(self, scored: Scored) -> Estimate:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to load."""


class GAE(Estimator):
    """Generalised advantage estimation over decisions."""

    def estimate(self, scored: Scored) -> Estimate:
        batch, values, final = scored.batch, scored.values, scored.final_values
        assert values is not None and final is not None
        advantages, returns = adv.gae(
            scored.total,
            values,
            final,
            batch.terminated,
            scored.discounts,
            self.config.gae_lambda,
            batch.lengths,
        )
        return Estimate(advantages, returns)


class VTrace(Estimator):
    """V-trace: values of the policy that learns, from episodes that an older one played.

    A decision's weight is the geometric mean over its log-prob entries: the product of the many
    entries of a chunk would be at one of its bounds nearly always. ρ weighs the advantage here only
    where the loss does not weigh its entries itself (``behavior_weight``, decoupled PPO), so that
    no weight counts twice.
    """

    def estimate(self, scored: Scored) -> Estimate:
        config, batch, values, final = self.config, scored.batch, scored.values, scored.final_values
        assert values is not None and final is not None
        logs = (
            torch.zeros_like(values)
            if scored.log_weights is None
            else scored.log_weights.to(values)
        )
        ratio = logs.exp()
        weights = adv.Truncated(
            ratio.clamp(max=config.vtrace_rho_cap), ratio.clamp(max=config.vtrace_c_cap)
        )
        advantages, targets = adv.vtrace(
            scored.total,
            values,
            final,
            batch.terminated,
            scored.discounts,
            config.gae_lambda,
            batch.lengths,
            weights,
        )
        if config.behavior_weight == "none":
            advantages = weights.rho * advantages
        truncated = float((ratio > config.vtrace_rho_cap).float().mean())
        figures = {
            "ppo/vtrace_rho_mean": float(weights.rho.mean()),
            "ppo/vtrace_truncated": truncated,
        }
        return Estimate(advantages, targets, figures)


class Given(Estimator):
    """What is given as rewards are the advantages already: for decisions that critics of their
    own have judged."""

    def estimate(self, scored: Scored) -> Estimate:
        return Estimate(scored.total)


class ReinforcePlusPlus(Estimator):
    """Reward-to-go, normalised once over the decisions of the batch that the policy chose."""

    def estimate(self, scored: Scored) -> Estimate:
        batch = scored.batch
        learns = (batch.valid & ~batch.is_human).any(1)
        return Estimate(
            adv.reinforce_plus_plus_advantages(
                scored.total, scored.discounts, batch.lengths, learns
            )
        )


def _spread(per_trajectory: Tensor, batch: RolloutBatch) -> Estimate:
    """One advantage per trajectory, given to each of its decisions."""
    zero = float((per_trajectory == 0).float().mean())
    return Estimate(
        per_trajectory[batch.trajectory_index], metrics={"ppo/zero_advantage_fraction": zero}
    )


class RLOO(Estimator):
    """Each episode against the mean of the others of its group."""

    def estimate(self, scored: Scored) -> Estimate:
        return _spread(
            adv.rloo_advantages(scored.score(scored.total), scored.batch.group_index), scored.batch
        )


class GRPO(Estimator):
    """Each episode against its group; with ``decouple_rewards`` (GDPO) each of several rewards
    on its own."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.running_scale = adv.RunningScale()

    def estimate(self, scored: Scored) -> Estimate:
        config, batch = self.config, scored.batch
        grouped = functools.partial(
            adv.grpo_advantages,
            group_index=batch.group_index,
            center=config.group_center,
            scale=config.group_scale,
            virtual_best=config.virtual_best,
            best_score=config.best_score,
            success=batch.success,
            running=self.running_scale,
        )
        if config.decouple_rewards and len(scored.named) > 1:
            scores = {name: scored.score(rewards) for name, rewards in scored.named.items()}
            return _spread(adv.gdpo_advantages(scores, scored.weights, grouped), batch)
        return _spread(grouped(scored.score(scored.total)), batch)

    def state_dict(self) -> dict[str, Any]:
        return self.running_scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.running_scale.load_state_dict(state)


def named_rewards(
    batch: RolloutBatch, config: PPOConfig, rewards: Tensor | Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Named rewards per decision [n], discounted inside their chunks where that is how time counts
    (``gamma_per_control_step`` and no group-relative advantage); a single one is called
    "reward"."""
    inside = (
        config.gamma
        if config.gamma_per_control_step and not advantage_entry(config.advantage).grouped
        else 1.0
    )
    if rewards is None:
        rewards = batch.rewards
    several = isinstance(rewards, Mapping)
    given = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
    named = {k: v.float().cpu() for k, v in given.items()}
    if several and set(named) != set(config.reward_names):
        raise ConfigError(
            f"rewards {sorted(named)} were given, algorithm.reward_names lists "
            f"{sorted(config.reward_names)}; name each reward there, with its weight in "
            "reward_weights"
        )
    n, h = batch.valid.shape
    for name, x in named.items():
        if x.shape not in ((n,), (n, h)):
            raise ValueError(
                f"reward {name!r} has shape {tuple(x.shape)}, expected ({n},) or ({n}, {h}): one "
                "per decision, or per control step"
            )
        if not torch.isfinite(x).all():
            raise ValueError(f"reward {name!r} has values that are not finite")
    return {name: adv.decision_rewards(x, batch.valid.cpu(), inside) for name, x in named.items()}


def scored(
    batch: RolloutBatch,
    config: PPOConfig,
    rewards: Tensor | Mapping[str, Tensor] | None,
    metrics: dict[str, float],
) -> Scored:
    """The rewards of a batch, summed with the config's weights; their means per episode go into
    ``metrics``."""
    named = named_rewards(batch, config, rewards)
    several = isinstance(rewards, Mapping)
    weights = (
        dict(zip(config.reward_names, config.reward_weights, strict=True))
        if several
        else {"reward": 1.0}
    )
    total = torch.stack([weights[name] * x for name, x in named.items()]).sum(0)
    discounts = adv.decision_discounts(batch.valid, config.gamma, config.gamma_per_control_step)
    result = Scored(batch, named, weights, total, discounts)
    metrics["ppo/score_mean"] = float(result.score(total).mean())
    if len(named) > 1:
        metrics |= {
            f"ppo/score_mean/{name}": float(result.score(x).mean()) for name, x in named.items()
        }
    return result
