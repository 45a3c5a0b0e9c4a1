"""An actor with actions of its own, on what a frozen policy sees: RLPD's and HIL-SERL's learner,
with a VLA for its eyes, or with pictures before its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from policies.actors.gripper import GripperActor
from policies.actors.settings import DirectConfig
from vla_rl.types import Observation, PolicyOutput


class DirectActor(GripperActor):
    """The latent action is the action, in half-ranges (but for a gripper that is decided apart)."""

    policy_type = "direct"
    config_class = DirectConfig

    def __init__(self, config: DirectConfig, base: Any) -> None:
        self.chunk_length = config.chunk_length
        self.latent_dim = config.chunk_length * self.continuous(config, base.embodiment)
        super().__init__(config, base)
        self._own_keep()

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        return self.decide(observation, self.features(observation), deterministic, seeds)
