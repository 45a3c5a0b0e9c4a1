"""Implicit Q-learning: values of what the data did, and a policy that imitates what did better than
that.

Kostrikov et al. 2021 (arXiv 2110.06169): V is the expectile of Q over the data's actions (eq. 5), Q
bootstraps from V, so no action is ever asked about that nobody took (eq. 6), and the policy is
drawn out by advantage-weighted regression (eq. 7; Peng et al. 2019). It learns from demonstrations
alone and goes on with the episodes that come; or SAC does (WSRL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import critics
from vla_rl.algorithms.actor_critic import ADAM_BETAS, SAC, ActorCritic
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.config.replay_algorithms import IQLConfig, IQLThenSACConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Draw, Policy
from vla_rl.types import Transitions


def expectile_loss(gap: Tensor, expectile: float) -> Tensor:
    """Mean of |expectile − 1(gap < 0)| · gap², scalar; ``gap`` is what the estimate falls short
    by."""
    return (torch.where(gap < 0, 1.0 - expectile, expectile) * gap.square()).mean()


def advantage_weights(advantages: Tensor, beta: float, limit: float) -> Tensor:
    """exp(beta · advantage), at most ``limit``."""
    return (beta * advantages).exp().clamp(max=limit)


class IQL(ActorCritic):
    """A `Replayed` algorithm for an `ActorPolicy` with a weighted loss. Besides what `ActorCritic`
    owns: V and its optimiser.

    Q's target copies judge what was done, both for V and for the weights.
    """

    config: IQLConfig
    name = "iql"

    def __init__(self, config: IQLConfig, policy: Policy) -> None:
        """Raises ConfigError for a policy that cannot imitate decisions by weight."""
        able = ActorPolicy.can_of(policy)
        if "weighted_imitation" not in able or able & {"steering", "ranked_candidates"}:
            raise ConfigError(
                "algorithm iql imitates what was done by its advantage, which "
                f"{type(policy).__name__} cannot: set actor=own (the policy itself), actor=direct "
                "or actor=residual, or use policy=small"
            )
        super().__init__(config, policy)
        c = config.critics
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + 1)
            self.value = critics.Critics(self.features, 0, c.hidden, 1).to(self.device)
        self.value_optimizer = make_adamw(
            [(self.value.parameters(), c.learning_rate)], ADAM_BETAS, 0.0
        )
        self._value_guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self._advantages = torch.zeros(0)  # of the present draw's decisions

    def state_values(self, encoded: Tensor) -> Tensor:
        """V [b], with gradient."""
        return self.value(encoded, encoded[:, :0])[0, :, 0]

    def action_values(self, frames: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """The smallest of the target critics' values [b] of ``actions`` [b d] (as
        `ActorPolicy.taken`)."""
        encoder, target = self._target
        return self.head.value(target(encoder(frames), actions)).amin(0)

    @torch.no_grad()
    def advantages(self, frames: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """Q − V [b] of ``actions`` [b d]."""
        return self.action_values(frames, actions) - self.state_values(self.policy.encode(frames))

    def _targets(self, batch: Transitions, next_frames: Mapping[str, Tensor]) -> Tensor:
        """rewards + discounts · V(next): no action enters."""
        following = self.state_values(self.policy.encode(next_frames))
        known = batch.rewards.to(self.device) + batch.discounts.to(self.device) * following
        nothing = torch.zeros(1, len(known), self.head.outputs, device=self.device)
        return self.head.target(known, torch.zeros_like(known), nothing)

    def _learn_besides(
        self, encoded: Tensor, taken: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        with torch.no_grad():
            done = self.action_values(frames, taken)
        gap = done - self.state_values(encoded)
        loss = expectile_loss(gap, self.config.expectile)
        loss.backward()
        self._value_guard.step(self.value_optimizer, loss.detach())
        self._advantages = gap.detach()
        return {
            f"{self.name}/value_loss": float(loss.detach()),
            f"{self.name}/advantage_mean": float(gap.detach().mean()),
        }

    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """One step of the actor towards what was done, each decision by its weight."""
        c = self.config
        weights = advantage_weights(self._advantages, c.beta, c.weight_limit)
        loss, figures = self.policy.weighted_loss(batch, encoded, frames, weights, self.generator)
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        self.policy.practised()
        own = {
            "policy_loss": float(loss.detach()),
            "weight_mean": float(weights.mean()),
            "weight_max": float(weights.max()),
        }
        return {f"{self.name}/{name}": value for name, value in (own | figures).items()}

    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        raise AssertionError("IQL's targets ask for no action")

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Besides, the encoder: the checkpoint of a policy that is its own actor is that of the
        policy alone."""
        return super().state_dict() | {
            "value": dict(self.value.state_dict()),
            "value_optimizer": optimizer_state(self.value_optimizer),
            "value_guard": self._value_guard.state_dict(),
            "encoder": dict(self.policy.encoder.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.value.load_state_dict(state["value"])
        load_optimizer_state(self.value_optimizer, state["value_optimizer"])
        self._value_guard.load_state_dict(state["value_guard"])
        self.policy.encoder.load_state_dict(state["encoder"])


class IQLThenSAC(IQL, SAC):
    """IQL before the first episode, SAC from then on with the same critics and actor: WSRL with
    IQL as its offline stage."""

    config: IQLThenSACConfig
    name = "iql_sac"

    def update(self, draw: Draw) -> dict[str, float]:
        """One of IQL or of SAC."""
        self._kind: type[ActorCritic] = IQL if self.updates < self.config.offline_updates else SAC
        return super().update(draw)

    def _targets(self, batch: Transitions, next_frames: Mapping[str, Tensor]) -> Tensor:
        return self._kind._targets(self, batch, next_frames)

    def _learn_besides(
        self, encoded: Tensor, taken: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        return self._kind._learn_besides(self, encoded, taken, frames)

    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        return self._kind._improve(self, batch, encoded, frames)

    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        return SAC._next_latent(self, encoded, frames)
