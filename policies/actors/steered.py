"""Steering a frozen policy that denoises by its first noise (DSRL, arXiv 2506.15799): its
weights stay untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.actors.base import FrozenBaseActor
from policies.actors.settings import SteeredConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import Observation, PolicyOutput, Trajectory

# the frame that holds the latent action that was taken; 0 where another acted, or nobody
LATENT = "latent"


class SteeredPolicy(FrozenBaseActor):
    """The latent action is the first noise, in units of ``bound`` standard deviations; critics read
    it as the action.

    Until its actor has learned it explores with the noise that the frozen policy was trained on, so
    that critics first see what that policy does by itself (DSRL's initial rollouts).
    """

    policy_type = "steered"
    can = frozenset({"actor", "steering"})  # not weighted: what was executed has no noise
    config_class = SteeredConfig
    config: SteeredConfig
    practice: Tensor

    def __init__(self, config: SteeredConfig, base: Any) -> None:
        """Raises ConfigError for a base that does not turn a noise into one chunk."""
        if "noise" not in Policy.of(base).can:
            raise ConfigError(
                "actor steered chooses the noise that a policy denoises, and "
                f"{type(base).__name__} has no decode(observation, noise) "
                "(`vla_rl.interfaces.Policy`): start from a denoising_vla checkpoint "
                "(policy=nano_flow), or use actor=residual"
            )
        self.chunk_length = base.chunk_length
        self.latent_dim = base.embodiment.action_dim * (1 if config.repeat else base.chunk_length)
        super().__init__(config, base)
        # updates of the actor so far
        self.register_buffer("practice", torch.zeros((), dtype=torch.int64))

    @classmethod
    def from_base(cls, config: Any, base: Any) -> Any:
        """As of any actor. Raises ConfigError for a base that makes two chunks of one noise."""
        actor = super().from_base(config, base)
        seen = Observation.blank(base.embodiment)
        frames, noise = (
            base.frame_features(seen),
            actor.noise(torch.zeros(1, actor.latent_dim).to(actor.low)),
        )
        first, again = (actor.decoded(noise, seen, frames) for _ in range(2))
        if not torch.allclose(first, again, rtol=0, atol=1e-3):
            raise ConfigError(
                "actor steered chooses the noise that a policy denoises, and "
                f"{type(base).__name__}.decode made two chunks of one noise "
                f"({float((first - again).abs().max()):.2g} half-ranges apart): decode without own "
                "noise (a deterministic sampler, no dropout), or use actor=residual"
            )
        return actor

    @property
    def decodes_pictures(self) -> bool:
        """See `vla_rl.interfaces.Policy`."""
        return self.base.decodes_pictures

    def practised(self) -> None:
        """See `vla_rl.interfaces.ActorPolicy`."""
        self.practice += 1

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: older checkpoints do not say that their actor
        has learned."""
        return {"practice": torch.ones_like(self.practice), **weights}

    def noise(self, latent: Tensor) -> Tensor:
        """[b l] → the first noise [b h a]."""
        steps = 1 if self.config.repeat else self.chunk_length
        shape = (len(latent), steps, self.embodiment.action_dim)
        return (self.config.bound * latent.view(shape)).expand(-1, self.chunk_length, -1)

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        return extra[LATENT].to(self.low)

    @torch.no_grad()
    def decoded(
        self, noise: Tensor, observation: Observation, frames: Mapping[str, Tensor]
    ) -> Tensor:
        """See `vla_rl.interfaces.ActorPolicy`."""
        return self.to_unit(self.base.decode(observation, noise, frames)).flatten(1)

    def latent_of(self, noise: Tensor) -> Tensor:
        """Inverse of `noise`."""
        return noise[:, : 1 if self.config.repeat else None].flatten(1) / self.config.bound

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        frames = super().annotate(trajectory)
        latents = torch.zeros(len(trajectory) + 1, self.latent_dim)
        if LATENT in trajectory.replay:
            latents[:-1] = trajectory.replay[LATENT]
        return {**frames, LATENT: latents}

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        frames = self.base.frame_features(observation)
        if deterministic or self.practice:
            latent = self.latents(self.encode(frames), frames, deterministic, seeds)
        else:
            latent = (self.normals(len(observation), seeds).to(self.low) / self.config.bound).clamp(
                -1.0, 1.0
            )
        return self.decided(
            latent,
            self.decoded(self.noise(latent), observation, frames),
            {**frames, LATENT: latent},
        )
