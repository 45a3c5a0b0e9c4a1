"""A policy of a few thousand weights for low-resolution tasks: an MLP over pooled pixels,
proprioception and words.

For learning from replay, where actions are a differentiable function of the observation (TD3), or a
Gaussian around it (SAC). It is no VLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policies.actors.base import Actor, network
from policies.inputs import flat_inputs, flat_size, squared_error
from policies.settings import SmallConfig
from vla_rl.types import EmbodimentSpec, Observation, PolicyOutput, Trajectory

FEATURES = "features"


class _Features(nn.Module):
    """What a frame holds already."""

    def forward(self, frames: Mapping[str, Tensor]) -> Tensor:
        return frames[FEATURES].float()


class SmallPolicy(Actor):
    """An `ActorPolicy` that imitates too, whose latent action is the action; its encoder has no
    weights."""

    policy_type = "small"
    Config = SmallConfig
    config: SmallConfig
    stochastic: bool
    mean: Tensor
    std: Tensor

    def __init__(self, config: SmallConfig, embodiment: EmbodimentSpec) -> None:
        super().__init__(embodiment)
        self.config, self.chunk_length = config, config.chunk_length
        self.latent_dim = config.chunk_length * embodiment.action_dim
        self.stochastic = config.distribution == "gaussian"
        inputs, outputs = flat_size(embodiment, config.pixels), self.latent_dim
        self.actor = network(inputs, config.hidden, outputs * (1 + self.stochastic))
        self.encoder = _Features()
        self.register_buffer("mean", torch.zeros(embodiment.proprio_dim))
        self.register_buffer("std", torch.ones(embodiment.proprio_dim))

    def features(self, observation: Observation) -> Tensor:
        """Pooled pixels (0 … 1), standardised proprio and hashed words, float32 [b f]; without
        weights of its own."""
        seen = observation.to(self.mean.device)
        seen = dataclasses.replace(seen, proprio=(seen.proprio - self.mean) / self.std)
        return flat_inputs(seen, self.embodiment, self.config.pixels)

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        seen = Observation.cat([trajectory.observations, trajectory.final_observation])
        return {FEATURES: self.features(seen).cpu()}

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """The chunk, with Gaussian noise unless ``deterministic``, inside the bounds."""
        latent = self.latents(self.features(observation), {}, deterministic, seeds)
        return self.decided(latent, latent, {})

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error over the control steps that count, in half-ranges."""
        half = (self.high - self.low) / 2.0
        mine = self.to_chunk(self.propose(self.features(observation), {}, None)[0]).actions
        return squared_error(mine, actions, valid, unit=half)

    # ----------------------------------------------------------------------------------- checkpoint
    @classmethod
    def from_statistics(
        cls,
        config: SmallConfig,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
    ) -> SmallPolicy:
        """A new policy that standardises proprio by the statistics of the demonstrations."""
        policy = cls(config, embodiment)
        policy.mean.copy_(torch.as_tensor(proprio_stats["mean"], dtype=torch.float32))
        policy.std.copy_(torch.as_tensor(proprio_stats["std"], dtype=torch.float32).clamp(min=1e-3))
        return policy
