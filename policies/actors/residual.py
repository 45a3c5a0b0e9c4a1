"""A correction per control step on top of a frozen policy that decides in chunks (ResFiT, arXiv 2509.19301).

a = clamp(a_base + scale · u, −1, 1) in half-ranges. The frozen policy's chunk is followed step by step, and the actor sees
every step, so what acts is closed-loop though the frozen policy is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.actors.base import FrozenBaseActor
from policies.actors.settings import ResidualConfig
from vla_rl.errors import ConfigError
from vla_rl.types import Observation, PolicyOutput, Trajectory

ACTION = "base_action"  # the frame that holds what the frozen policy would do, [b a] in half-ranges


class ResidualPolicy(FrozenBaseActor):
    """A `RememberingPolicy`: a row's memory is the frozen policy's chunk [h a] (half-ranges) and how far it was followed."""

    policy_type = "residual"
    config_class = ResidualConfig
    chunk_length = 1
    config: ResidualConfig
    corrected: Tensor

    def __init__(self, config: ResidualConfig, base: Any) -> None:
        """Raises ConfigError for dimensions that the robot has not, or more ``base_steps`` than the base decides on."""
        spec = base.embodiment
        self.latent_dim = spec.action_dim
        super().__init__(config, base, extra_inputs=spec.action_dim)
        unknown = [name for name in config.dimensions if name not in spec.action_names]
        if unknown:
            raise ConfigError(
                f"actor.dimensions has {unknown[0]!r}; the actions of {spec.name} are {', '.join(spec.action_names)}"
            )
        if config.base_steps > base.chunk_length:
            raise ConfigError(
                f"actor.base_steps={config.base_steps} is more than the {base.chunk_length} control steps that the frozen "
                f"policy decides on: use at most that, or 0"
            )
        self.base_steps = config.base_steps or base.chunk_length
        chosen = [float(not config.dimensions or name in config.dimensions) for name in spec.action_names]
        self.register_buffer("corrected", torch.tensor(chosen), persistent=False)

    def actor_inputs(self, encoded: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([encoded, frames[ACTION].to(encoded)], dim=1)

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """What is sent [b a], in half-ranges, with gradient to ``latent``."""
        return (frames[ACTION].to(latent) + self.config.scale * self.corrected * latent).clamp(-1.0, 1.0)

    @torch.no_grad()
    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Besides what it sees, what the frozen policy would do at each control step, if its chunks are followed."""
        frames = super().annotate(trajectory)
        t, k = len(trajectory), self.base_steps
        if ACTION in trajectory.replay:
            starts = [t // k * k]
        else:
            starts = list(range(0, t + 1, k))
        rows = [s for s in starts if s < t]
        seen = [trajectory.observations[rows]] if rows else []
        seen += [trajectory.final_observation] if t in starts else []
        unit = self._base_units(Observation.cat(seen)).cpu()
        actions = unit[:, :k].flatten(0, 1)[: t + 1 - starts[0]]
        if ACTION in trajectory.replay:
            actions = torch.cat([trajectory.replay[ACTION].to(actions), actions[-1:]])
        return {**frames, ACTION: actions}

    def _base_units(self, observation: Observation) -> Tensor:
        return self.to_unit(self.base.act(observation, deterministic=True).chunk.actions)

    # ---------------------------------------------------------------------------------------------------------- acting
    def initial_memory(self) -> Any:
        return None

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput:
        """One control step per row; the frozen policy takes its most likely action."""
        queues = [None] * len(observation) if memory is None else list(memory)
        ended = [i for i, queue in enumerate(queues) if queue is None or queue[1] >= self.base_steps]
        if ended:
            for i, chunk in zip(ended, self._base_units(observation[ended])):
                queues[i] = (chunk, 0)
        actions = torch.stack([chunk[step] for chunk, step in queues])
        frames = {**self.base.frame_features(observation), ACTION: actions}
        unit = self.realize(self.latents(frames, deterministic, seeds), frames)
        return PolicyOutput(
            chunk=self.to_chunk(unit),
            behavior_log_prob=unit.new_zeros(len(unit)),
            replay=frames,
            memory=[(chunk, step + 1) for chunk, step in queues],
        )
