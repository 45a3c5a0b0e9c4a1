"""Students of lerobot's flow policies that decide in one step or a few, on the teacher's own
prefix."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from policies.denoising.chain import Chain
from policies.lerobot.families import FAMILIES
from policies.lerobot.flows import repeated
from policies.lora import merged
from vla_rl.errors import ConfigError
from vla_rl.types import Observation


class TeachingChain:
    """Teacher (`vla_rl.interfaces.Policy.make_student`) and student alike: that is the policy with
    fewer steps, whose denoising part learns to reach from each first noise what the teacher's plain
    path reaches. Exported, lerobot's own sampler takes as few steps."""

    head: Any
    chain: Chain

    def make_student(self: Any, steps: int, method: str) -> Any:
        """Raises `ConfigError` for a diffusion, and for other methods than "same_noise"."""
        setting = FAMILIES[self.stored.family].steps
        if not (self.guidable and setting):
            raise ConfigError(
                f"lerobot's {self.stored.family} makes no faster student here: that is for flows "
                f"({', '.join(name for name, family in FAMILIES.items() if family.steps)})"
            )
        if method != "same_noise":
            raise ConfigError(
                f"--method {method}: students of lerobot's policies learn by same_noise alone"
            )
        config = dataclasses.replace(
            self.config,
            denoising_steps=steps,
            trained_steps=0,
            sampler="flow_sde",
            stochastic_steps="all",
            noise_level=0.0,
            lora_rank=0,
        )
        stored = dataclasses.replace(self.stored, settings=self.stored.settings | {setting: steps})
        student = type(self).from_stored(config, self.embodiment, stored)
        student.model.load_state_dict(dict(merged(self.model)))
        _train_what_denoises(student.to(self.device), self)
        return student

    def plain_end(self: Any, condition: Any, first: Tensor) -> Tensor:
        """Where the path without noise ends [b T d] that begins at ``first``."""
        x = first
        for k in range(len(self.chain)):
            x = self._step(condition, x, k, None, first)[2]
        return x

    def distillation_loss(
        self: Any,
        observation: Observation,
        teacher: Any,
        generator: torch.Generator,
        noises: int = 8,
    ) -> tuple[Tensor, dict[str, float]]:
        """Squared error of the action that each of the student's steps aims at, on ``noises`` first
        noises per row, drawn from ``generator`` (on the CPU). Metrics: ``loss``;
        ``action_error``, mean distance per dimension to the teacher's chunks (physical units)."""
        rows = len(observation) * noises
        first = torch.randn(rows, *self.head.sample_shape, generator=generator).to(self.device)
        first = self.head.begins(first)
        self.model.eval()
        with torch.no_grad():  # the two have one prefix
            fixed = teacher.condition(observation)
            condition = repeated(fixed, noises)
            target = teacher.plain_end(condition, first)
        errors = []
        for k in range(len(self.chain)):
            x = self.chain.signal[k] * target + self.chain.noise[k] * first
            aim, _ = self._estimates(condition, x, k, None)
            errors.append((self._actions(aim) - self._actions(target)).square().mean())
        loss = torch.stack(errors).mean()
        with torch.no_grad():
            ends = (self.plain_end(condition, first), target)
            mine, theirs = (self._decided(x).actions for x in ends)
        gap = float((mine - theirs).abs().mean())
        return loss, {"loss": float(loss.detach()), "action_error": gap}

    def after_update(self) -> None:
        """Nothing is averaged."""

    def distillation_state(self) -> dict[str, Any]:
        return {}

    def load_distillation_state(self, state: dict[str, Any]) -> None:
        """Inverse of `distillation_state`."""


def _train_what_denoises(student: Any, teacher: Any) -> None:
    """Ask for a gradient of those parameters alone that a step from a fixed prefix reads."""
    student.requires_grad_(True)
    seen = Observation.blank(student.embodiment)
    said = dataclasses.replace(seen, instruction=("do",))
    loss, _ = student.distillation_loss(said, teacher, torch.Generator(), 1)
    loss.backward()
    for parameter in student.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
