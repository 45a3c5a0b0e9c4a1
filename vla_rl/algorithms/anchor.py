"""What holds an actor near what it did, while critics learn what other actions are worth (a policy
constraint that is let go, as in PROTO, arXiv 2305.15669)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from vla_rl.config.replay_algorithms import ActorCriticConfig
from vla_rl.interfaces import ActorPolicy


class Anchor:
    """The actor of ``policy`` as it is now, and the encoder that it shares with the critics: they
    move it, and an actor that stood still would act otherwise."""

    def __init__(self, policy: ActorPolicy):
        self.policy = policy
        self.then = copy.deepcopy(nn.ModuleList([policy.encoder, policy.actor]))
        self.then.requires_grad_(False)

    @staticmethod
    def weight(config: ActorCriticConfig, updates: int) -> float:
        """What is left of ``anchor_coef`` after ``updates``; it falls from where the actor begins
        to learn, to ``anchor_floor`` of it."""
        begun = max(config.offline_updates, config.critic_warmup)
        past = updates - begun
        left = 1.0 - past / config.anchor_updates if config.anchor_updates else 1.0
        return config.anchor_coef * min(1.0, max(config.anchor_floor, left))

    def drift(self, latent: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None) -> Tensor:
        """Mean squared distance of the latent action to what it was with the same noise, with
        gradient to ``latent``."""
        policy = self.policy
        now = policy.encoder, policy.actor
        policy.encoder, policy.actor = cast(nn.ModuleList, self.then)
        try:
            with torch.no_grad():
                then, _ = policy.propose(policy.encode(frames), frames, noise)
        finally:
            policy.encoder, policy.actor = now
        return (latent - then).square().mean()
