"""A policy of a few thousand weights for low-resolution tasks: an MLP over pooled pixels, proprioception and words.

For learning from replay, where actions are a differentiable function of the observation (TD3, SAC's mean). It is no VLA.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from policies.settings import SmallConfig
from policies.trunk.noise import counter_normals
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyOutput, Trajectory

WORDS = 32  # bins that the instruction's words are hashed into
FEATURES = "features"


class _Features(nn.Module):
    """What a frame holds already."""

    def forward(self, frames: Mapping[str, Tensor]) -> Tensor:
        return frames[FEATURES].float()


class SmallPolicy(nn.Module):
    """An `ActorPolicy` and `ImitationPolicy` whose latent action is the action; its encoder has no weights."""

    policy_type = "small"
    stochastic = False
    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, config: SmallConfig, embodiment: EmbodimentSpec) -> None:
        super().__init__()
        self.config, self.embodiment, self.chunk_length = config, embodiment, config.chunk_length
        pixels = 3 * config.pixels**2 * len(embodiment.cameras)
        self.feature_dim = width = pixels + embodiment.proprio_dim + WORDS
        layers: list[nn.Module] = []
        for hidden in config.hidden:
            layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU()]
            width = hidden
        self.latent_dim = config.chunk_length * embodiment.action_dim
        self.actor = nn.Sequential(*layers, nn.Linear(width, self.latent_dim))
        self.encoder = _Features()
        self.register_buffer("mean", torch.zeros(embodiment.proprio_dim))
        self.register_buffer("std", torch.ones(embodiment.proprio_dim))
        self.register_buffer("low", torch.tensor(embodiment.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(embodiment.action_high), persistent=False)

    def features(self, observation: Observation) -> Tensor:
        """Pooled pixels (0 … 1), standardised proprio and hashed words, float32 [b f]; without weights of its own."""
        side, device = self.config.pixels, self.mean.device
        images = [observation.images[name].to(device).permute(0, 3, 1, 2) / 255.0 for name in self.embodiment.camera_names]
        pooled = [adaptive_avg_pool2d(image, side).flatten(1) for image in images]
        proprio = (observation.proprio.to(device) - self.mean) / self.std
        return torch.cat([*pooled, proprio, self._words(observation.instruction).to(device)], dim=1)

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        seen = Observation.cat([trajectory.observations, trajectory.final_observation])
        return {FEATURES: self.features(seen).cpu()}

    def encode(self, frames: Mapping[str, Tensor]) -> Tensor:
        return self.encoder(frames)

    def propose(self, encoded: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None) -> tuple[Tensor, Tensor]:
        latent = self.actor(encoded).tanh()
        if noise is not None:
            latent = (latent + self.config.noise * noise.to(latent)).clamp(-1.0, 1.0)
        return latent, latent.new_zeros(len(latent))

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        return latent

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        return (2.0 * (actions.to(self.low) - self.low) / (self.high - self.low) - 1.0).flatten(1)

    def _physical(self, latent: Tensor) -> Tensor:
        """[b h·a] in half-ranges → float32 [b h a] in physical units."""
        unit = latent.view(-1, self.chunk_length, self.embodiment.action_dim)
        return self.low + (self.high - self.low) * (unit + 1.0) / 2.0

    def act(
        self, observation: Observation, *, deterministic: bool = False, seeds: Sequence[int] | None = None
    ) -> PolicyOutput:
        """The chunk, with Gaussian noise unless ``deterministic``, inside the bounds."""
        noise = None
        if not deterministic:
            seeds = torch.randint(2**62, (len(observation),)).tolist() if seeds is None else seeds
            noise = counter_normals(seeds, self.latent_dim)
        actions = self._physical(self.propose(self.features(observation), {}, noise)[0])
        valid = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        return PolicyOutput(ActionChunk(actions, valid), actions.new_zeros(len(actions)), replay={})

    def imitation_loss(self, observation: Observation, actions: Tensor, valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error over the control steps that count, in half-ranges."""
        half = (self.high - self.low) / 2.0
        mine = self._physical(self.propose(self.features(observation), {}, None)[0])
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

    # ---------------------------------------------------------------------------------------------------------- checkpoint
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

    def config_dict(self) -> dict[str, Any]:
        return {"config": asdict(self.config)}

    def extra_files(self) -> dict[str, str]:
        return {}

    @classmethod
    def from_config_dict(cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]) -> SmallPolicy:
        return cls(SmallConfig(**data["config"]), embodiment)
