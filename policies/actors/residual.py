"""A correction on top of a frozen policy that decides in chunks (ResFiT, arXiv 2509.19301).

a = clamp(a_base + scale · u, −1, 1) in half-ranges. The frozen policy's chunk is followed a step
(or ``hold`` steps) at a time, and the actor sees each, so what acts is closed-loop though the
frozen policy is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.actors.gripper import GripperActor
from policies.actors.settings import ResidualConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import FRESH, Observation, PolicyOutput, Trajectory, Transitions

# the frame that holds what the frozen policy would do, [b hold·a] in half-ranges
ACTION = "base_action"


class ResidualPolicy(GripperActor):
    """A `RememberingPolicy`: a row's memory is the frozen policy's chunk [decisions hold·a]
    (half-ranges) and how many decisions it was followed for."""

    policy_type = "residual"
    config_class = ResidualConfig
    config: ResidualConfig
    bounds: Tensor
    practice: Tensor

    def __init__(self, config: ResidualConfig, base: Any) -> None:
        """Raises ConfigError for dimensions that the robot has not, or more ``base_steps`` than
        the base decides on."""
        spec, self.chunk_length = base.embodiment, config.hold
        self.latent_dim = self.continuous(config, spec)
        super().__init__(config, base, extra_inputs=config.hold * spec.action_dim)
        for key, names in {"dimensions": config.dimensions, "scales": config.scales}.items():
            if unknown := [name for name in names if name not in spec.action_names]:
                known = ", ".join(spec.action_names)
                raise ConfigError(
                    f"actor.{key} has {unknown[0]!r}; the actions of {spec.name} are {known}"
                )
        most = Policy.of(base).executed_steps
        if config.base_steps > most:
            raise ConfigError(
                f"actor.base_steps={config.base_steps} is more than the {most} control steps that "
                "the frozen policy decides on: use at most that, or 0"
            )
        steps = config.base_steps or most
        if steps % config.hold:
            raise ConfigError(
                f"actor.hold={config.hold} does not divide the {steps} control steps after which "
                "the frozen policy decides anew: choose a divisor, or another actor.base_steps"
            )
        self.base_decisions = steps // config.hold
        bounds = [
            config.scales.get(name, config.scale)
            if not config.dimensions or name in config.dimensions
            else 0.0
            for name in spec.action_names
        ]
        self.register_buffer(
            "bounds", self.without_gripper(torch.tensor([bounds]))[0], persistent=False
        )
        # updates of the actor so far
        self.register_buffer("practice", torch.zeros((), dtype=torch.int64))

    @property
    def reach(self) -> float:
        return min(1.0, float(self.practice) / self.config.ramp) if self.config.ramp else 1.0

    def practised(self) -> None:
        """See `vla_rl.interfaces.ActorPolicy`."""
        super().practised()
        self.practice += 1

    def actor_inputs(self, encoded: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([encoded, frames[ACTION].to(encoded)], dim=1)

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """What is sent [b hold·a], in half-ranges, with gradient to ``latent``; without a
        gripper that is decided apart."""
        return (
            self._followed(frames).to(latent) + (self.bounds * latent).repeat(1, self.config.hold)
        ).clamp(-1.0, 1.0)

    def _followed(self, frames: Mapping[str, Tensor]) -> Tensor:
        """The frozen policy's actions, without a gripper that is decided apart."""
        base = frames[ACTION]
        return base if self.choices is None else self.without_gripper(self._per_step(base))

    @property
    def trusts_choices(self) -> bool:
        """Once the actor learns too: until then values know little, and the frozen policy keeps
        its gripper."""
        return bool(self.practice)

    def _kept(self, frames: Mapping[str, Tensor]) -> Tensor:
        """The frozen policy's own commands."""
        return self._per_step(frames[ACTION].to(self.low))[..., self._at]

    def _per_step(self, unit: Tensor) -> Tensor:
        return unit.view(len(unit), self.config.hold, -1)

    def imitable(self, batch: Transitions, frames: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean correction of the control steps that were executed, as far as it could be
        chosen."""
        hold, valid = self.config.hold, batch.valid.to(self.low)[..., None]
        gap = (self.taken(batch.labels, frames) - self._followed(frames).to(self.low)).unflatten(
            1, (hold, -1)
        )
        latent = (gap * valid).sum(1) / valid.sum(1).clamp(min=1.0) / self.bounds.clamp(min=1e-6)
        return latent.clamp(-1.0, 1.0), (self.bounds > 0.0) * valid.amax(1)

    @torch.no_grad()
    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Besides what it sees, what the frozen policy would do in each decision, if its chunks
        are followed."""
        frames = super().annotate(trajectory)
        t, kept, begins = len(trajectory), trajectory.replay.get(ACTION), self._begins(trajectory)
        wanted = range(t + 1) if kept is None else [t]
        rows = sorted({begins[i] for i in wanted})
        seen = [trajectory.observations[[i for i in rows if i < t]]] if rows[0] < t else []
        seen += [trajectory.final_observation] if rows[-1] == t else []
        units = self._base_units(Observation.cat(seen)).cpu()
        actions = torch.stack([units[rows.index(begins[i]), i - begins[i]] for i in wanted])
        if kept is not None:
            actions = torch.cat([kept.to(actions), actions])
        return {**frames, ACTION: actions}

    def _begins(self, trajectory: Trajectory) -> list[int]:
        """For each of an episode's t + 1 frames, at which of them the frozen policy decided on
        what it follows there."""
        t, human = len(trajectory), trajectory.is_human
        fresh = trajectory.replay.get(FRESH, torch.zeros(t, dtype=torch.bool)).tolist()
        fresh.append(human is not None and bool(human[-1].any()))
        begins: list[int] = []
        for i, anew in enumerate(fresh):
            begins.append(
                i if not begins or anew or i - begins[-1] >= self.base_decisions else begins[-1]
            )
        return begins

    def _base_units(self, observation: Observation) -> Tensor:
        """The frozen policy's chunk [b decisions hold·a], as far as it is followed."""
        unit = self.to_unit(self.base.act(observation, deterministic=True).chunk.actions)
        k = self.base_decisions
        return unit[:, : k * self.config.hold].reshape(len(unit), k, -1)

    # --------------------------------------------------------------------------------------- acting
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
        """``hold`` control steps per row; the frozen policy takes its most likely action."""
        queues: list[Any] = [None] * len(observation) if memory is None else list(memory)
        ended = [
            i for i, queue in enumerate(queues) if queue is None or queue[1] >= self.base_decisions
        ]
        if ended:
            for i, chunk in zip(ended, self._base_units(observation[ended])):
                queues[i] = (chunk, 0)
        actions = torch.stack([chunk[step] for chunk, step in queues])
        out = self.decide(
            observation, {**self.features(observation), ACTION: actions}, deterministic, seeds
        )
        return dataclasses.replace(out, memory=[(chunk, step + 1) for chunk, step in queues])
