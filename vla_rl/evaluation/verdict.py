"""What several seeds say of several methods: means, paired differences with intervals, and which of
them are more than luck.

A method has one figure for each seed (the success after RL on the same held-out episodes), and
methods are compared seed by seed: what a seed shares (its demonstrations, its start) cancels.
Intervals are bootstrapped over seeds and means are interquartile, as Agarwal et al. 2021 (arXiv
2108.13264) recommend; tests are exact, by the signs of the differences (Fisher 1935; Pitman 1937),
and corrected for how many there are (Holm 1979). rliable does the first half of this and needs
seaborn and arch for it; these are the few lines that are used here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vla_rl.evaluation.statistics import mean_interval, student_quantile

RESAMPLES = 10_000
_EXACT = 16  # seeds up to which every pattern of signs is tried
_EPSILON = 1e-12


@dataclass(frozen=True)
class Pair:
    """Method ``b`` against ``a`` on the same ``seeds``: mean of b − a with its ``low`` and ``high``
    (95 %), ``p_value`` as it is and ``corrected`` for all pairs, ``better``: the share of (seed,
    seed) pairs in which b is above a, a tie counting half. ``least_p``: the smallest p-value that
    so many seeds can yield after correction."""

    a: str
    b: str
    seeds: int
    difference: float
    low: float
    high: float
    p_value: float
    corrected: float
    better: float
    least_p: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.least_p > 0.05:
            return "not enough seeds"
        if self.corrected > 0.05:
            return "not told apart"
        return f"{self.b if self.difference > 0 else self.a} is better"


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half, values at its ends counting by the share that lies in it."""
    ordered = sorted(values)
    n, total, weight = len(ordered), 0.0, 0.0
    for i, value in enumerate(ordered):
        share = max(0.0, min(i + 1, 0.75 * n) - max(i, 0.25 * n))
        total, weight = total + share * value, weight + share
    return total / weight


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over resampled seeds; the same for the same values."""
    array = np.asarray(values, dtype=float)
    rows = np.random.default_rng(seed).integers(0, len(array), (RESAMPLES, len(array)))
    means = array[rows].mean(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def sign_test(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value that the mean difference is 0: the share of all ways of giving them signs
    whose mean is as far from 0 (of more than 16 differences: of 100,000 drawn ways)."""
    array = np.asarray(differences, dtype=float)
    n = len(array)
    if n <= _EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice((-1.0, 1.0), (100_000, n))
    return float((np.abs(signs @ array) >= abs(array.sum()) - _EPSILON).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979), in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = most
    return corrected


def pairs(figures: Mapping[str, Mapping[int, float]]) -> list[Pair]:
    """Every two methods of {method: {seed: figure}} on the seeds that both have; those without two
    such seeds are left out."""
    found = []
    for a, b in itertools.combinations(figures, 2):
        shared = sorted(figures[a].keys() & figures[b].keys())
        if len(shared) < 2:
            continue
        x, y = ([figures[name][seed] for seed in shared] for name in (a, b))
        differences = [q - p for p, q in zip(x, y, strict=True)]
        wins = [(q > p) + 0.5 * (q == p) for p in x for q in y]
        found.append((a, b, differences, sum(wins) / len(wins)))
    p_values = [sign_test(differences) for _, _, differences, _ in found]
    return [
        Pair(
            a,
            b,
            len(differences),
            math.fsum(differences) / len(differences),
            *bootstrap_interval(differences),
            p,
            corrected,
            better,
            min(1.0, len(found) * 2.0 / 2 ** len(differences)),
        )
        for (a, b, differences, better), p, corrected in zip(
            found, p_values, holm(p_values), strict=True
        )
    ]


def methods(figures: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Of each method its seeds, mean, interquartile mean, worst and the mean's t interval."""
    rows = []
    for name, of in figures.items():
        values = list(of.values())
        if not values:
            continue
        low, high = mean_interval(values) or (math.nan, math.nan)
        rows.append(
            {
                "method": name,
                "seeds": len(values),
                "mean": math.fsum(values) / len(values),
                "low": low,
                "high": high,
                "interquartile_mean": interquartile_mean(values),
                "worst": min(values),
            }
        )
    return rows


def power(difference: float, spread: float, seeds: int) -> float:
    """The chance that a paired t test of 5 % finds a true ``difference`` between methods whose
    differences spread by ``spread`` (standard deviation) from seed to seed: by simulation, 4,000
    studies, of ``seeds`` seeds each. Raises ``ValueError`` for fewer than two."""
    if seeds < 2:
        raise ValueError(f"need two seeds or more, got {seeds}")
    drawn = np.random.default_rng(0).normal(difference, spread, (4000, seeds))
    error = drawn.std(1, ddof=1) / math.sqrt(seeds)
    return float((np.abs(drawn.mean(1)) > student_quantile(seeds - 1) * error).mean())


def to_dict(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """JSON-ready, with the verdicts."""
    return [asdict(pair) | {"verdict": pair.verdict} for pair in found]
