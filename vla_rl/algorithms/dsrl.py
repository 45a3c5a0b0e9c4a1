"""DSRL with noise aliasing: steer a frozen policy by its first noise, and learn from actions that
anybody chose.

Wagenmaker et al. 2025 (arXiv 2506.15799), algorithm 1: a critic of actions learns by temporal
differences from what was executed; a critic of noises is regressed to it through the frozen policy;
the actor climbs the least of those. The support penalty is GR-RL's (arXiv 2512.01801, online
stage). Plain SAC on a steered actor is the paper's DSRL-SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import critics
from vla_rl.algorithms.actor_critic import ADAM_BETAS, SAC
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.config.replay_algorithms import DSRLConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Policy
from vla_rl.types import Observation, Transitions


class DSRL(SAC):
    """A `Replayed` algorithm for an `ActorPolicy` that steers. Besides what SAC owns: the critics
    of noises and their optimiser."""

    config: DSRLConfig
    policy: ActorPolicy
    name = "dsrl"
    needs_latents = False

    def __init__(self, config: DSRLConfig, policy: Policy) -> None:
        """Raises ConfigError for a policy that chooses no noise."""
        if "steering" not in ActorPolicy.can_of(policy):
            raise ConfigError(
                f"algorithm dsrl steers a policy by its noise, and {type(policy).__name__} chooses "
                "none: set actor=steered on a flow or diffusion policy"
            )
        super().__init__(config, policy)
        policy = self.policy
        c = config.critics
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + 1)
            width = self.critics.inputs - policy.chunk_length * policy.embodiment.action_dim
            self.noise_critics = critics.Critics(width, policy.latent_dim, c.hidden, c.count).to(
                self.device
            )
        self.noise_optimizer = make_adamw(
            [(self.noise_critics.parameters(), c.learning_rate)], ADAM_BETAS, 0.0
        )
        self._noise_guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        limit = config.support_limit
        self._support_limit = policy.latent_dim / 2.0 if limit is None else limit

    def _action_width(self, frames: Mapping[str, Tensor]) -> int:
        return self.policy.chunk_length * self.policy.embodiment.action_dim

    def _taken(self, batch: Transitions, frames: Mapping[str, Tensor]) -> Tensor:
        return self.policy.to_unit(batch.actions).flatten(1)

    def _target_outputs(
        self, latent: Tensor, seen: Observation, frames: Mapping[str, Tensor]
    ) -> Tensor:
        encoder, target = self._target
        return target(encoder(frames), self.policy.decoded(self.policy.noise(latent), seen, frames))

    def _value(self, encoded: Tensor, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        self.noise_critics.requires_grad_(False)
        value = self.noise_critics(encoded, latent).squeeze(-1)
        self.noise_critics.requires_grad_(True)
        return value.amin(0, keepdim=True)

    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        losses = [
            self._learn_noise(batch.observations, encoded, frames)
            for _ in range(self.config.noise_updates)
        ]
        return super()._improve(batch, encoded, frames) | {
            "dsrl/noise_critic_loss": sum(losses) / len(losses)
        }

    def _learn_noise(
        self, seen: Observation, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> float:
        """One step of the critics of noises towards the smallest value of the actions that the
        noises turn into."""
        spec = self.policy.embodiment
        shape = (len(encoded), self.policy.chunk_length, spec.action_dim)
        with torch.no_grad():
            noise = torch.randn(shape, generator=self.generator).to(encoded)
            # one for all control steps, where that is the choice
            noise = self.policy.noise(self.policy.latent_of(noise))
            if self.config.own_share:
                own = self.policy.noise(
                    self.policy.propose(encoded, frames, self._noise(len(encoded)))[0]
                )
                mine = torch.rand(len(encoded), generator=self.generator) < self.config.own_share
                noise = torch.where(mine.to(noise.device)[:, None, None], own, noise)
            actions = self.policy.decoded(noise, seen, frames)
            target = self.head.value(self.critics(encoded, actions)).amin(0)
        values = self.noise_critics(encoded, self.policy.latent_of(noise)).squeeze(-1)
        loss = (values - target).square().mean()
        loss.backward()
        self._noise_guard.step(self.noise_optimizer, loss.detach())
        return float(loss.detach())

    def _penalty(self, latent: Tensor) -> Tensor:
        """c · max(½‖noise‖² − β, 0), which keeps the noise among those that the frozen policy was
        trained on; what control steps share counts once."""
        own = super()._penalty(latent)
        if not self.config.support_coef:
            return own
        size = 0.5 * self.policy.latent_dim * self.policy.noise(latent).flatten(1).square().mean(1)
        return own + self.config.support_coef * (size - self._support_limit).clamp(min=0.0).mean()

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        own = {
            "noise_critics": dict(self.noise_critics.state_dict()),
            "noise_guard": self._noise_guard.state_dict(),
        }
        return (
            super().state_dict() | own | {"noise_optimizer": optimizer_state(self.noise_optimizer)}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.noise_critics.load_state_dict(state["noise_critics"])
        self._noise_guard.load_state_dict(state["noise_guard"])
        load_optimizer_state(self.noise_optimizer, state["noise_optimizer"])
