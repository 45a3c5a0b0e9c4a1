"""Which (task, initial state) to practise next.

Followed: VLA-RL (Lu et al. 2025) in both of its forms, the paper's exp((0.5 − s)/τ) and the
released code's (1 − s)^(1/T), which both favour what fails; a true frontier exp(−|s − 0.5|/τ),
which peaks at a success rate s of 50 %; and VADE (Hu et al. 2025): Thompson sampling on a Beta
posterior of each item's success with a prior decay on two scales. Departure from VADE: a draw p is
ranked by its variance p(1 − p), to which a group's expected gradient signal is proportional. Every
strategy keeps a probability floor, so that no item is forgotten for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.config.algorithms import CurriculumConfig
from vla_rl.errors import ConfigError

Item = tuple[str, int]


def strategy_weights(success: Tensor, strategy: str, temperature: float) -> Tensor:
    """Unnormalised weights float64 [items] from success rates [items]; uniform for strategies
    that do not use them."""
    s = success.double()
    if strategy == "vla_rl":
        return torch.exp((0.5 - s) / temperature)
    if strategy == "vla_rl_power":
        return (1.0 - s + 1e-9) ** (1.0 / temperature)
    if strategy == "frontier":
        return torch.exp(-(s - 0.5).abs() / temperature)
    return torch.ones_like(s)


def with_floor(weights: Tensor, floor: float) -> Tensor:
    """Probabilities [items]: weights normalised to share 1 − ``floor``, the rest spread evenly."""
    return (1.0 - floor) * weights / weights.sum() + floor / weights.shape[0]


def systematic_sample(probabilities: Tensor, n: int, generator: torch.Generator) -> list[int]:
    """``n`` indices, each item expected n·p times and drawn ⌊n·p⌋ or ⌈n·p⌉ times, in random order.

    Fewer repeats than independent draws, and the same expectation.
    """
    order = torch.randperm(probabilities.shape[0], generator=generator)
    edges = torch.cumsum(probabilities[order].double(), 0)
    points = (
        torch.arange(n, dtype=torch.float64)
        + torch.rand((), generator=generator, dtype=torch.float64)
    ) / n
    picked = order[torch.searchsorted(edges, points * edges[-1]).clamp_(max=order.shape[0] - 1)]
    return picked[torch.randperm(n, generator=generator)].tolist()


class Curriculum:
    """Samples items and learns from their outcomes."""

    def __init__(self, config: CurriculumConfig, items: Sequence[Item]):
        """Raises ConfigError without items or with an item given twice."""
        self.config, self.items = config, [(str(task), int(state)) for task, state in items]
        self._index = {item: i for i, item in enumerate(self.items)}
        if not self.items or len(self._index) != len(self.items):
            raise ConfigError(
                f"a curriculum needs distinct (task, initial state) items, got {len(self.items)}: "
                f"{self.items[:5]}"
            )
        # (successes, trials), newest last
        self.recent: list[list[tuple[int, int]]] = [[] for _ in self.items]
        self.successes: np.ndarray = np.zeros(len(self.items))  # decayed counts
        self.failures: np.ndarray = np.zeros(len(self.items))

    def success_rates(self) -> Tensor:
        """Success rate float64 [items] over the last ``window`` trials.

        An item never tried counts as 0 for VLA-RL's strategies, as in its code, and as 0.5 for the
        others.
        """
        unseen = 0.0 if self.config.strategy.startswith("vla_rl") else 0.5
        rates = [sum(s for s, _ in r) / sum(t for _, t in r) if r else unseen for r in self.recent]
        return torch.tensor(rates, dtype=torch.float64)

    def probabilities(self) -> Tensor:
        """Sampling probability float64 [items] (thompson: only its floor is known beforehand, so
        uniform)."""
        weights = strategy_weights(
            self.success_rates(), self.config.strategy, self.config.temperature
        )
        return with_floor(weights, self.config.floor)

    def propose(self, n: int, generator: torch.Generator) -> list[Item]:
        """``n`` items to practise; repeats only where they are due. ``generator`` is a CPU
        generator."""
        if self.config.strategy == "thompson":
            return [self.items[i] for i in self._thompson(n, generator)]
        return [self.items[i] for i in systematic_sample(self.probabilities(), n, generator)]

    def _thompson(self, n: int, generator: torch.Generator) -> list[int]:
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        chosen: list[int] = []
        even = rng.random(n) < self.config.floor
        while len(chosen) < n:  # a fresh draw each time all items have been handed out
            p = rng.beta(1.0 + self.successes, 1.0 + self.failures)
            ranked = np.argsort(-p * (1.0 - p), kind="stable")[: n - len(chosen)]
            chosen += ranked.tolist()
        return [
            int(rng.integers(len(self.items))) if is_even else i
            for i, is_even in zip(chosen, even, strict=True)
        ]

    def record(self, item: Item, successes: int, trials: int) -> None:
        """Take in the outcome of ``trials`` episodes of ``item``. ValueError for an unknown item
        or bad counts."""
        if item not in self._index:
            raise ValueError(f"{item!r} is not an item of this curriculum of {len(self.items)}")
        if not 0 <= successes <= trials:
            raise ValueError(f"{successes} successes of {trials} trials for {item!r}")
        if trials == 0:
            return
        i, recent = self._index[item], self.recent[self._index[item]]
        recent.append((int(successes), int(trials)))
        while sum(t for _, t in recent[1:]) >= self.config.window:
            recent.pop(0)
        self.successes[i] = self.config.visited_decay * self.successes[i] + successes
        self.failures[i] = self.config.visited_decay * self.failures[i] + trials - successes

    def __contains__(self, item: Item) -> bool:
        return item in self._index

    def tick(self) -> None:
        """Call once per iteration: the policy moved, so every item's evidence ages by ``decay``."""
        self.successes *= self.config.decay
        self.failures *= self.config.decay

    def metrics(self) -> dict[str, float]:
        """``curriculum/…`` figures (``docs/reference/metrics.md``)."""
        p = self.probabilities()
        seen = [i for i, r in enumerate(self.recent) if r]
        rates = self.success_rates()[seen] if seen else torch.zeros(1)
        return {
            "curriculum/seen_fraction": len(seen) / len(self.items),
            "curriculum/success_mean": float(rates.mean()),
            "curriculum/frontier_fraction": float(((rates > 0.1) & (rates < 0.9)).double().mean()),
            "curriculum/effective_items": float(torch.exp(-(p * p.clamp(min=1e-12).log()).sum())),
        }

    def state_dict(self) -> dict[str, Any]:
        """Lists, numbers and strings only."""
        return {
            "items": [[task, state] for task, state in self.items],
            "recent": [[list(pair) for pair in r] for r in self.recent],
            "successes": self.successes.tolist(),
            "failures": self.failures.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ConfigError where the items differ."""
        items = [(str(task), int(init)) for task, init in state["items"]]
        if items != self.items:
            raise ConfigError(
                f"the saved curriculum has {len(items)} items and this run {len(self.items)}, or "
                "in another order; resume with the same tasks and initial states"
            )
        self.recent = [[(int(s), int(t)) for s, t in r] for r in state["recent"]]
        self.successes = np.array(state["successes"], dtype=float)
        self.failures = np.array(state["failures"], dtype=float)
