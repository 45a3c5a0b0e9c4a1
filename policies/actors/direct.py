"""An actor with actions of its own, on what a frozen policy sees: RLPD's and HIL-SERL's learner,
with a VLA for its eyes, or with pictures before its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.actors.gripper import GripperActor
from policies.actors.settings import DirectConfig
from vla_rl.errors import ConfigError
from vla_rl.types import EmbodimentSpec, Observation, PolicyOutput, Transitions

# the frame that holds where the joints are, [b a] in half-ranges, with ``within``
JOINTS = "joints"


class DirectActor(GripperActor):
    """The latent action is the action, in half-ranges (but for a gripper that is decided apart), or
    the way to it from where the joints are, in ``within`` half-ranges."""

    policy_type = "direct"
    config_class = DirectConfig
    config: DirectConfig

    def __init__(self, config: DirectConfig, base: Any) -> None:
        """Raises ConfigError for ``within`` where actions are not joints that are measured."""
        self.chunk_length = config.chunk_length
        self._measured = _measured(base.embodiment) if config.within else []
        self.latent_dim = config.chunk_length * self.continuous(config, base.embodiment)
        super().__init__(config, base)
        self._own_keep()

    def features(self, observation: Observation) -> dict[str, Tensor]:
        frames = super().features(observation)
        if self._measured:
            frames[JOINTS] = self.to_unit(observation.proprio[:, self._measured])
        return frames

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        if not self._measured:
            return latent
        return (self._from(frames) + self.config.within * latent).clamp(-1.0, 1.0)

    def imitable(self, batch: Transitions, frames: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As far as it could be chosen."""
        latent, counts = super().imitable(batch, frames)
        if self._measured:
            latent = ((latent - self._from(frames)) / self.config.within).clamp(-1.0, 1.0)
        return latent, counts

    def _from(self, frames: Mapping[str, Tensor]) -> Tensor:
        return frames[JOINTS].to(self.low).repeat(1, self.chunk_length)

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        return self.decide(observation, self.features(observation), deterministic, seeds)


def _measured(spec: EmbodimentSpec) -> list[int]:
    """Where in the state what each action asks for is measured."""
    if spec.frame != "joints" or set(spec.action_names) - set(spec.proprio_names):
        raise ConfigError(
            "actor.within counts from where joints are, and the actions of "
            f"{spec.name} are {', '.join(spec.action_names)} (frame: {spec.frame}; state: "
            f"{', '.join(spec.proprio_names)}): set actor.within=0"
        )
    return [spec.proprio_names.index(name) for name in spec.action_names]
