"""lerobot's policies that are told whether what they imitate is an improvement, and act as if it
were (RECAP, π*0.6: Amin et al. 2025, arXiv 2511.14759)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from vla_rl.errors import ConfigError
from vla_rl.types import Observation

WORDS = {True: "positive", False: "negative"}
TOLD, UNTOLD = "told", "untold"


def advised(observation: Observation, improved: Tensor, told: Tensor) -> Observation:
    """Each instruction with the word for ``improved`` [b] after it, where the row is ``told``
    [b]."""
    texts = (
        f"{text}\nAdvantage: {WORDS[good]}" if tell else text
        for text, good, tell in zip(
            observation.instruction, improved.tolist(), told.tolist(), strict=True
        )
    )
    return dataclasses.replace(observation, instruction=tuple(texts))


class AdvisedPolicy:
    """A `vla_rl.interfaces.Policy` whose ``config.improvement`` is w. An action follows the
    velocity (1 − w) · v + w · v_told: 1 is what it learned of improvements, more goes beyond."""

    config: Any
    head: Any

    def require_words(self, family: str, told: bool) -> None:
        """Raises ConfigError where a family that is told nothing is to be told."""
        if self.config.improvement and not told:
            raise ConfigError(
                f"policy.improvement={self.config.improvement:g} tells a policy by words which "
                f"actions are improvements, and lerobot's {family} reads none: set it to 0, or use "
                "a family that reads an instruction (pi0, smolvla)"
            )

    @property
    def told_improvement(self) -> bool:
        """See `vla_rl.interfaces.Policy`."""
        return bool(self.config.improvement)

    def _advice(self, observation: Observation, improved: Tensor | None) -> Observation:
        """What is imitated with, ``improved`` None being all of it; ``improvement_dropout`` of the
        rows are told nothing, by torch's global generator."""
        if not self.told_improvement:
            return observation
        rows = len(observation)
        improved = torch.ones(rows, dtype=torch.bool) if improved is None else improved
        return advised(observation, improved, torch.rand(rows) >= self.config.improvement_dropout)

    def condition(self: Any, observation: Observation, check: bool = True) -> Any:
        """What is fixed along a chain: the head's own, that of an improvement, or both."""
        weight, plain = self.config.improvement, observation
        if weight:
            every = torch.ones(len(plain), dtype=torch.bool)
            observation = advised(plain, every, every)
        first = self.head.condition(self._batch(observation, check=check))
        if weight in (0, 1):
            return first
        return {UNTOLD: self.head.condition(self._batch(plain, check=check)), TOLD: first}

    def estimates(
        self: Any, condition: Any, x: Tensor, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """x̂0 and ε̂ [b T d] of step ``index``. Both are affine in the velocity, so mixing them is
        mixing that."""
        weight = self.config.improvement
        if weight in (0, 1):
            return self.head.estimates(condition, x, self.chain, index)
        untold, told = (
            self.head.estimates(condition[name], x, self.chain, index) for name in (UNTOLD, TOLD)
        )
        action, noise = ((1.0 - weight) * a + weight * b for a, b in zip(untold, told, strict=True))
        return action, noise
