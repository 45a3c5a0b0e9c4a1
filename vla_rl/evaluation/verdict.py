"""What several seeds say of several methods: means, paired differences with intervals, which of them
are more than luck, and how far each was after the same effort.

A method has scores for each seed: the success on each task, of the same held-out episodes. Methods
are compared seed by seed, by the mean over tasks: what a seed shares (its demonstrations, its
start) cancels. Tests are exact, by the signs of the differences (Fisher 1935; Pitman 1937), and
corrected for how many there are (Holm 1979). Interquartile means, the probability of improvement
and their stratified bootstrap are those of Agarwal et al. 2021 (arXiv 2108.13264), with the
formulas of their library rliable 1.2; it is not used itself, since arch, which it needs, cannot be
imported beside the pandas that is pinned here.
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
    (95 %), ``p_value`` as it is and ``corrected`` for all pairs, ``better``: the probability that b
    is above a in a run of each, a tie counting half, mean over tasks, with its 95 % interval.
    ``least_p``: the smallest p-value that so many seeds can yield after correction."""

    a: str
    b: str
    seeds: int
    difference: float
    low: float
    high: float
    p_value: float
    corrected: float
    better: float
    better_low: float
    better_high: float
    least_p: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.least_p > 0.05:
            return "not enough seeds"
        if self.corrected > 0.05:
            return "not told apart"
        return f"{self.b if self.difference > 0 else self.a} is better"


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean along the last axis without the lowest and the highest quarter, of ``n // 4``
    values each (the 25 % trimmed mean)."""
    n = scores.shape[-1]
    return np.sort(scores)[..., n // 4 : n - n // 4].mean(-1)


def resampled(scores: np.ndarray) -> np.ndarray:
    """Stratified bootstrap: [RESAMPLES n m] of ``scores`` [n m], the n runs of each of the m tasks
    drawn anew with replacement, apart from the other tasks'."""
    rows = np.random.default_rng(0).integers(0, len(scores), (RESAMPLES, *scores.shape))
    return np.take_along_axis(scores[None], rows, 1)


def middle(values: np.ndarray) -> tuple[float, float]:
    """Percentile interval (95 %) of resampled ``values``."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def aggregate(scores: np.ndarray) -> tuple[float, float, float]:
    """The interquartile mean of ``scores`` [n runs, m tasks], over both, with its 95 % interval."""
    drawn = resampled(scores).reshape(RESAMPLES, -1)
    return float(interquartile_mean(scores.ravel())), *middle(interquartile_mean(drawn))


def improvement(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """P(a run of ``x`` [n m] scores above one of ``y`` [k m]), ties counting half, mean over the m
    tasks, with its 95 % interval: what Mann and Whitney's U is of n·k."""
    wins = (x[:, None] > y[None]) + 0.5 * (x[:, None] == y[None])  # [n k m]
    draw, total = np.random.default_rng(0), np.zeros(RESAMPLES)
    for won in np.moveaxis(wins, 2, 0):
        rows, columns = (draw.integers(0, n, (RESAMPLES, n)) for n in won.shape)
        total += won[rows[:, :, None], columns[:, None]].mean((1, 2))
    return float(wins.mean()), *middle(total / wins.shape[2])


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of the mean over resampled seeds; the same for the same values."""
    return middle(resampled(np.array(values, dtype=float)[:, None]).mean((1, 2)))


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p-value that the mean difference is 0: the share of all ways of giving them signs
    whose mean is as far from 0 (of more than 16 differences: of 100,000 drawn ways)."""
    n = len(differences)
    if n <= _EXACT:
        signs = _every_sign(n)
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (100_000, n))
    return float(_by_signs(np.array([differences], dtype=float), signs)[0])


def _every_sign(n: int) -> np.ndarray:
    """[2^n n]: every way of giving n numbers signs."""
    return np.array(list(itertools.product((-1.0, 1.0), repeat=n)))


def _by_signs(differences: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """[k]: the share of ``signs`` [s n] with which the sum of each of ``differences`` [k n] is as
    far from 0 as it is."""
    sums = np.abs(differences.sum(1, keepdims=True))
    return (np.abs(differences @ signs.T) >= sums - _EPSILON).mean(1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979), in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = most
    return corrected


Scores = Mapping[str, Mapping[int, Sequence[float]]]
"""{method: {seed: success on each task}}."""


def matrix(of: Mapping[int, Sequence[float]], seeds: Sequence[int] | None = None) -> np.ndarray:
    """[n seeds, m tasks]."""
    return np.array([of[seed] for seed in (sorted(of) if seeds is None else seeds)], dtype=float)


def pairs(scores: Scores, new: str | None = None) -> list[Pair]:
    """Every two methods on the seeds that both have, or ``new`` against each of the others; those
    without two such seeds are left out."""
    both = (
        itertools.combinations(scores, 2)
        if new is None
        else ((name, new) for name in scores if name != new)
    )
    found = []
    for a, b in both:
        shared = sorted(scores[a].keys() & scores[b].keys())
        if len(shared) >= 2:
            x, y = (matrix(scores[name], shared) for name in (a, b))
            found.append((a, b, (y.mean(1) - x.mean(1)).tolist(), improvement(y, x)))
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
            *better,
            min(1.0, len(found) * 2.0 / 2 ** len(differences)),
        )
        for (a, b, differences, better), p, corrected in zip(
            found, p_values, holm(p_values), strict=True
        )
    ]


def methods(scores: Scores) -> list[dict[str, Any]]:
    """Of each method its seeds, mean with Student's t interval, interquartile mean with that of the
    stratified bootstrap, and the worst seed."""
    rows = []
    for name, of in scores.items():
        if not of:
            continue
        table = matrix(of)
        values = table.mean(1).tolist()
        low, high = mean_interval(values) or (None, None)
        middle_half, *around = aggregate(table)
        rows.append(
            {
                "method": name,
                "seeds": len(values),
                "mean": math.fsum(values) / len(values),
                "low": low,
                "high": high,
                "interquartile_mean": middle_half,
                "interquartile_interval": around,
                "worst": min(values),
            }
        )
    return rows


Curves = Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
"""{method: {seed: (spent so far, success) as often as it was looked at}}."""


def on_a_grid(curves: Curves, points: int = 8) -> dict[str, Any]:
    """Interquartile means of all methods where each has spent the same, from nothing to what every
    run has spent, in ``points`` equal steps; straight between two looks of a run. ``looks``: at how
    many places the runs of a method were looked at. Empty where no method has a curve."""
    ends = [curve[-1][0] for of in curves.values() for curve in of.values()]
    if not ends or min(ends) <= 0:
        return {}
    grid = np.linspace(0.0, min(ends), points + 1)
    found: dict[str, Any] = {}
    for name, of in curves.items():
        if not of:
            continue
        heights = np.array([np.interp(grid, *np.transpose(of[seed])) for seed in sorted(of)])
        columns = [aggregate(heights[:, i : i + 1]) for i in range(len(grid))]
        middles, lows, highs = (list(column) for column in zip(*columns, strict=True))
        looks = min(len(curve) for curve in of.values())
        found[name] = {"looks": looks, "success": middles, "low": lows, "high": highs}
    return {"grid": grid.tolist(), "methods": found}


def power(difference: float, spread: float, seeds: int, pairs: int = 1) -> float:
    """The chance that the test of `pairs` finds a true ``difference`` in one of so many ``pairs`` of
    methods whose differences spread by ``spread`` (standard deviation) from seed to seed: by
    simulation, 4,000 studies of ``seeds`` seeds each, at 5 % over the number of pairs, which is what
    Holm asks of the clearest. 0 where no outcome would do. The exact test by signs, of more than 12
    seeds Student's, which is near to it. Raises ``ValueError`` for fewer than two seeds."""
    if seeds < 2:
        raise ValueError(f"need two seeds or more, got {seeds}")
    drawn = np.random.default_rng(0).normal(difference, spread, (4000, seeds))
    if seeds > 12:
        error = drawn.std(1, ddof=1) / math.sqrt(seeds)
        found = np.abs(drawn.mean(1)) > student_quantile(seeds - 1, 1 - 0.05 / pairs) * error
    else:
        found = _by_signs(drawn, _every_sign(seeds)) <= 0.05 / pairs
    return float(found.mean())


def to_dict(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """JSON-ready, with the verdicts."""
    return [asdict(pair) | {"verdict": pair.verdict} for pair in found]
