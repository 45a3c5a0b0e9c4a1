"""Intervals and tests against published values, against scipy, and by their defining properties."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.evaluation.statistics import (
    compare_paired,
    difference_interval,
    mcnemar_exact,
    mean_interval,
    paired_difference_interval,
    paired_mean_test,
    student_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    "k, n, low, high",
    # Newcombe 1998, Statistics in Medicine 17:857, table I (score method without continuity
    # correction)
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published(k, n, low, high):
    assert wilson_interval(k, n) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=40)
@given(st.integers(0, 300), st.integers(1, 300), st.sampled_from([0.8, 0.95, 0.99]))
def test_intervals_hold_the_estimate_and_mirror(k, n, confidence):
    k = min(k, n)
    low, high = wilson_interval(k, n, confidence)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = wilson_interval(n - k, n, confidence)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)
    wider = wilson_interval(k, n, 0.999)
    assert wider[0] <= low and high <= wider[1]


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for k, n in ((0, 7), (3, 10), (41, 100), (93, 100), (100, 100), (499, 1000)):
        expected = stats.binomtest(k, n).proportion_ci(0.95, "wilson")
        assert wilson_interval(k, n) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for a, b in ((0, 5), (3, 12), (10, 10), (2, 54)):
        assert mcnemar_exact(a, b) == pytest.approx(stats.binomtest(a, a + b, 0.5).pvalue, rel=1e-9)


def test_mcnemar_by_hand():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 5) == pytest.approx(2 / 32)
    assert mcnemar_exact(1, 5) == mcnemar_exact(5, 1) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar_exact(4, 4) == 1.0
    assert 0 <= mcnemar_exact(3, 3000) < 1e-300


def test_newcombe_published():
    """Newcombe 1998, Statistics in Medicine 17:2635, table III, method 10, first example (36,
    12, 2, 0)."""
    assert paired_difference_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_paired_interval_covers():
    """The 95 % interval holds the true difference in about 95 % of many simulated experiments."""
    rng = random.Random(0)
    held, runs = 0, 1500
    for _ in range(runs):
        counts = [0, 0, 0, 0]
        for _ in range(60):  # both, only b, only a, neither: rates 0.8 and 0.5
            counts[rng.choices(range(4), (0.45, 0.35, 0.05, 0.15))[0]] += 1
        low, high = paired_difference_interval(*counts)
        held += low <= 0.3 <= high
    assert 0.93 < held / runs < 0.98


def test_paired_interval_is_antisymmetric_and_bounded():
    low, high = paired_difference_interval(10, 7, 3, 5)
    assert paired_difference_interval(10, 3, 7, 5) == pytest.approx((-high, -low))
    assert paired_difference_interval(0, 20, 0, 0)[1] == 1.0
    assert paired_difference_interval(0, 0, 0, 0) == (-1.0, 1.0)


def test_compare_paired():
    a = [True, True, False, False, False, False, False, False, False]
    b = [True, False, True, True, True, True, True, True, False]
    c = compare_paired(a, b)
    assert (c.trials, c.successes_a, c.successes_b) == (9, 2, 7)
    assert (c.both, c.only_a, c.only_b, c.neither) == (1, 1, 6, 1)
    assert (
        c.difference == pytest.approx(5 / 9) and c.difference_low < c.difference < c.difference_high
    )
    assert c.p_value == mcnemar_exact(1, 6) and not c.significant
    assert compare_paired([False] * 9, [True] * 9).significant
    assert c.to_dict()["only_b"] == 6
    with pytest.raises(ValueError, match="9 and 8"):
        compare_paired(a, b[:-1])


@pytest.mark.parametrize("successes, trials", [(3, 2), (-1, 2)])
def test_bad_counts(successes, trials):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, trials)
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 2, 1.0)
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 2)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_difference_of_independent_rates_is_newcombes():
    """Table II of Newcombe 1998: 56 of 70 against 48 of 80, method 10."""
    low, high = difference_interval(56, 70, 48, 80)
    assert (low, high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))
    assert difference_interval(0, 0, 3, 5) == (-1.0, 1.0)
    assert difference_interval(48, 80, 56, 70) == (pytest.approx(-high), pytest.approx(-low))


@pytest.mark.parametrize(
    "degrees, confidence, t",
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.99, 5.841),
        (9, 0.95, 2.262),
        (10, 0.9, 1.812),
        (30, 0.95, 2.042),
    ],
)
def test_student_published(degrees, confidence, t):  # the usual two-sided table
    assert student_quantile(degrees, confidence) == pytest.approx(t, abs=5e-4)


def test_mean_interval_by_hand():
    # mean 5, standard deviation 2, n = 4: 5 ± 3.1824 · 2 / 2
    assert mean_interval([5 - 3**0.5, 5 - 3**0.5, 5 + 3**0.5, 5 + 3**0.5]) == pytest.approx(
        (1.8176, 8.1824), abs=1e-4
    )
    assert mean_interval([0.4]) is None and mean_interval([]) is None
    with pytest.raises(ValueError, match="degrees >= 1"):
        student_quantile(0)


def test_a_paired_t_test_by_hand():
    """Differences 1, 2, 3: t = 2 / (1/√3) = 2√3 of two degrees; P(|T| <= t) = t/√(2 + t²) there."""
    t = 2 * 3**0.5
    assert paired_mean_test([5, 5, 5], [6, 7, 8]) == pytest.approx(1 - t / (2 + t * t) ** 0.5)
    assert paired_mean_test([6, 7, 8], [5, 5, 5]) == paired_mean_test([5, 5, 5], [6, 7, 8])
    assert paired_mean_test([1, 2], [1, 2]) == 1.0 and paired_mean_test([1, 2], [2, 3]) == 0.0
    one = paired_mean_test([0, 0], [1, 3])  # t = 2 of one degree: 1 − (2/π)·arctan 2
    assert one == pytest.approx(1 - 2 / math.pi * math.atan(2))
    for a, b in (([1], [2]), ([1, 2], [1])):
        with pytest.raises(ValueError, match="paired test"):
            paired_mean_test(a, b)
