"""Intervals and tests for success rates, in plain Python.

A success rate of 90 out of 100 is not 90 %: these say how far off it may be, and whether two
policies that ran on the same initial states differ by more than luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any


def _check_counts(successes: int, trials: int, confidence: float) -> None:
    if not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes <= trials, got {successes} of {trials}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927, JASA 22). (0, 1) for no trials.

    Unlike mean ± 1.96 standard errors it stays inside 0 … 1 and is honest at 0 % and 100 %.
    """
    _check_counts(successes, trials, confidence)
    if trials == 0:
        return 0.0, 1.0
    z, p = _z(confidence), successes / trials
    scale = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True)
class PairedComparison:
    """Two policies on the same episodes. Rates and ``difference`` (b − a) lie in 0 … 1 and −1 … 1.

    ``only_a``/``only_b`` count the episodes that one of the two solved alone; ``p_value`` is
    two-sided. ``fallen_tasks`` are those of several tasks that b solves less often by more than
    chance explains; None where nobody asked.
    """

    trials: int
    successes_a: int
    successes_b: int
    both: int
    only_a: int
    only_b: int
    neither: int
    difference: float
    difference_low: float
    difference_high: float
    p_value: float
    confidence: float = 0.95
    fallen_tasks: dict[str, PairedComparison] | None = None

    @property
    def significant(self) -> bool:
        return self.p_value < 1 - self.confidence

    def to_dict(self) -> dict[str, Any]:
        """The fields; of ``fallen_tasks`` the names, where they are known."""
        figures = asdict(self)
        del figures["fallen_tasks"]
        return (
            figures
            if self.fallen_tasks is None
            else figures | {"fallen_tasks": list(self.fallen_tasks)}
        )


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar test: p-value that the two rates are equal (McNemar 1947; binomial
    form).

    Only pairs that disagree carry evidence: under equality each of them is a fair coin.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts must not be negative, got {only_a} and {only_b}")
    n, k = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, float(2 * tail / 2**n))


def paired_difference_interval(
    both: int, only_b: int, only_a: int, neither: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of rate(b) − rate(a) on paired trials: Newcombe 1998 (Statistics in Medicine
    17:2635), method 10.

    Combines the two Wilson intervals by squaring and adding, with the pairs' correlation φ
    (continuity-corrected).
    """
    n = both + only_b + only_a + neither
    if n == 0:
        return -1.0, 1.0
    rate_b, rate_a = (both + only_b) / n, (both + only_a) / n
    low_b, high_b = wilson_interval(both + only_b, n, confidence)
    low_a, high_a = wilson_interval(both + only_a, n, confidence)
    cross = float(both * neither - only_b * only_a)
    margins = (both + only_b) * (only_a + neither) * (both + only_a) * (only_b + neither)
    if cross > 0:
        cross = max(cross - n / 2, 0.0)
    phi = cross / math.sqrt(margins) if margins else 0.0

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = rate_b - rate_a
    low = difference - combine(rate_b - low_b, high_a - rate_a)
    high = difference + combine(high_b - rate_b, rate_a - low_a)
    return max(-1.0, low), min(1.0, high)


def difference_interval(
    successes_a: int, trials_a: int, successes_b: int, trials_b: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of rate(a) − rate(b) on independent trials: Newcombe 1998 (Statistics in Medicine
    17:873), method 10.

    (-1, 1) where either has no trials.
    """
    low_a, high_a = wilson_interval(successes_a, trials_a, confidence)
    low_b, high_b = wilson_interval(successes_b, trials_b, confidence)
    if not trials_a or not trials_b:
        return -1.0, 1.0
    a, b = successes_a / trials_a, successes_b / trials_b
    return a - b - math.hypot(a - low_a, high_b - b), a - b + math.hypot(high_a - a, b - low_b)


def student_inside(t: float, degrees: int) -> float:
    """P(|T| <= t) for Student's t of ``degrees`` (whole, >= 1) degrees of freedom: the finite
    series for whole degrees (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    if degrees < 1:
        raise ValueError(f"need degrees >= 1, got {degrees}")
    angle, odd = math.atan(abs(t) / math.sqrt(degrees)), degrees % 2
    cos = math.cos(angle)
    term, total = (cos if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def student_quantile(degrees: int, confidence: float = 0.95) -> float:
    """t with P(|T| <= t) = ``confidence`` for Student's t of ``degrees`` (whole, >= 1) degrees of
    freedom (`student_inside`, inverted by halving the angle whose tangent is t / √degrees)."""
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"need degrees >= 1 and a confidence between 0 and 1, got {degrees} and {confidence}"
        )
    low, high, root = 0.0, math.pi / 2, math.sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if student_inside(root * math.tan(middle), degrees) < confidence
            else (low, middle)
        )
    return root * math.tan((low + high) / 2)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean of independent values, such as a figure of several seeds;
    None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_quantile(n - 1, confidence) * deviation / math.sqrt(n)
    return mean - half, mean + half


def paired_mean_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p-value of Student's paired t test that ``b`` and ``a`` have one mean, a pair for
    each seed, say.

    1 where all differences are 0, and 0 where they are all the same otherwise. Raises
    ``ValueError`` for unlike lengths, or fewer than two."""
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(
            f"a paired test needs two values each and as many, got {len(a)} and {len(b)}"
        )
    differences = [y - x for x, y in zip(a, b, strict=True)]
    mean = math.fsum(differences) / len(a)
    spread = math.fsum((d - mean) ** 2 for d in differences) / (len(a) - 1)
    if spread <= 1e-24:
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    return 1.0 - student_inside(mean / math.sqrt(spread / len(a)), len(a) - 1)


def compare_paired(
    a: Sequence[bool], b: Sequence[bool], confidence: float = 0.95
) -> PairedComparison:
    """Compare outcomes ``a[i]`` and ``b[i]`` of the same episode i.

    Raises ``ValueError`` where the two have different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"paired outcomes need one length, got {len(a)} and {len(b)}")
    both = sum(1 for x, y in zip(a, b, strict=True) if x and y)
    only_a = sum(1 for x, y in zip(a, b, strict=True) if x and not y)
    only_b = sum(1 for x, y in zip(a, b, strict=True) if y and not x)
    n = len(a)
    neither = n - both - only_a - only_b
    low, high = paired_difference_interval(both, only_b, only_a, neither, confidence)
    return PairedComparison(
        n,
        both + only_a,
        both + only_b,
        both,
        only_a,
        only_b,
        neither,
        (only_b - only_a) / n if n else 0.0,
        low,
        high,
        mcnemar_exact(only_a, only_b),
        confidence,
    )
