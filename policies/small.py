"""A policy of a few thousand weights for low-resolution tasks: an MLP over pooled pixels,
proprioception and words.

For learning from replay, where actions are a differentiable function of the observation (TD3, SAC's
mean). It is no VLA.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from policies.actors.base import Actor, network
from policies.settings import SmallConfig
from vla_rl.types import EmbodimentSpec, Observation, PolicyOutput, Trajectory

WORDS = 32  # bins that the instruction's words are hashed into
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
    mean: Tensor
    std: Tensor

    def __init__(self, config: SmallConfig, embodiment: EmbodimentSpec) -> None:
        super().__init__(embodiment)
        self.config, self.chunk_length = config, config.chunk_length
        pixels = 3 * config.pixels**2 * len(embodiment.cameras)
        self.latent_dim = config.chunk_length * embodiment.action_dim
        self.actor = network(
            pixels + embodiment.proprio_dim + WORDS, config.hidden, self.latent_dim
        )
        self.encoder = _Features()
        self.register_buffer("mean", torch.zeros(embodiment.proprio_dim))
        self.register_buffer("std", torch.ones(embodiment.proprio_dim))

    def features(self, observation: Observation) -> Tensor:
        """Pooled pixels (0 … 1), standardised proprio and hashed words, float32 [b f]; without
        weights of its own."""
        side, device = self.config.pixels, self.mean.device
        images = [
            observation.images[name].to(device).permute(0, 3, 1, 2) / 255.0
            for name in self.embodiment.camera_names
        ]
        pooled = [adaptive_avg_pool2d(image, side).flatten(1) for image in images]
        proprio = (observation.proprio.to(device) - self.mean) / self.std
        return torch.cat([*pooled, proprio, self._words(observation.instruction).to(device)], dim=1)

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
        actions, valid = actions.to(mine.device), valid.to(mine.device)
        error = ((mine - actions) / half).square().mean(-1)
        loss = (error * valid).sum() / valid.sum().clamp(min=1)
        return loss, {"mse": float(loss.detach())}

    @staticmethod
    def _words(instructions: Sequence[str]) -> Tensor:
        words = torch.zeros(len(instructions), WORDS)
        for row, text in zip(words, instructions):
            for word in text.split():
                row[zlib.crc32(word.encode()) % WORDS] = 1.0
        return words

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
