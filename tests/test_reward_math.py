"""Formulas of reward models and of their quality: the fact sheet's vectors, and scipy as a
second opinion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_helpers import trajectory

from reward_models import milestones as ms
from reward_models import progress_math as pm
from reward_models.shaping import ShapingConfig, potential_rewards, shaped_reward
from reward_models.value_progress import two_hot
from vla_rl.errors import ConfigError
from vla_rl.rewards import quality as q

CRITICS = [20, 15, -10, 60, -30, 40]


# ------------------------------------------------------------------------------------- value curves
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("always", [0, 20, 32, 25.2, 70.08, 61.104, 76.6624]),
        ("mixed", [0, 20, 32, 28.8, 71.52, 59.3143, 75.5886]),
        ("exact", [0, 20, 32, 24.4444, 69.7778, 56.8254, 74.0952]),
    ],
)
def test_value_curves_of_the_fact_sheet(mode, expected):
    assert pm.accumulate(CRITICS, mode) == pytest.approx(expected, abs=1e-4)


def test_voc_and_nr_of_the_fact_sheet():
    assert q.spearman(pm.accumulate(CRITICS)) == pytest.approx(0.9286, abs=1e-4)
    assert q.negative_rate(CRITICS) == pytest.approx(0.3333, abs=1e-4)
    assert q.voc_f1(0.8, 0.6) == pytest.approx(2 * 0.48 / 1.4) and q.voc_f1(0.5, -0.5) == 0.0


@given(st.lists(st.floats(-100, 100), max_size=30), st.sampled_from(pm.VALUE_MODES))
@settings(max_examples=60)
def test_value_curves_stay_finite_and_never_pass_100(critics, mode):
    values = pm.accumulate(critics, mode)
    assert len(values) == len(critics) + 1 and values[0] == 0.0
    assert all(math.isfinite(v) and v <= 100.0 + 1e-9 for v in values)
    if mode == "mixed":
        assert min(values) >= 0.0


def test_value_mode_is_checked():
    with pytest.raises(ValueError, match="always, mixed, exact"):
        pm.accumulate([1.0], "mix")


def test_pair_labels_are_shares_of_what_is_left():
    assert pm.pair_label(50, 75, 100) == 0.5
    assert pm.pair_label(90, 100, 100) == 1.0
    assert pm.pair_label(50, 25, 100) == -0.5
    assert pm.pair_label(100, 20, 100) == -1.0  # nothing is left: bounded


def test_done_windows():
    assert [pm.done_label(i, 100) for i in (0, 79, 80, 95, 96, 100)] == [0, 0, None, None, 1, 1]


def test_changed_share_and_dead_zone():
    a = torch.zeros(2, 10, 10, 3, dtype=torch.uint8)
    b = a.clone()
    b[0, 0, :5, 1] = 200
    b[1] += 5
    assert pm.changed_share(a, b).tolist() == pytest.approx([0.05, 0.0])
    assert pm.dead_zone([3, -3, 5, -5], 4, 2) == [0.0, -3, 5, -5]


def test_reference_frames():
    assert pm.reference_indices(10, 4) == [0, 3, 6, 9] and pm.reference_indices(5, 1) == [0]
    assert pm.reference_indices(2, 4) == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="at least one"):
        pm.reference_indices(0, 3)


def test_filters_of_demonstrations():
    values = torch.tensor([0.1, 0.4, 0.1, 0.3, 0.6])
    assert pm.drop_filter(values, 2, 0.2).tolist() == [True, False, True, True]
    assert pm.drop_filter(values, 2, 0.5).all()


# ------------------------------------------------------------------------------------------ shaping
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_potential_shaping_adds_the_same_to_every_policy(gamma):
    """The discounted sum is −Φ(s₀), whatever happens in between (Ng et al. 1999)."""
    for potential in (torch.tensor([0.2, 0.9, 0.1, 0.7]), torch.tensor([0.2, 0.3])):
        rewards = potential_rewards(
            potential, torch.full((len(potential) - 1,), gamma), keep_end=False
        )
        discounts = gamma ** torch.arange(len(rewards))
        assert float((discounts * rewards).sum()) == pytest.approx(-0.2, abs=1e-6)
    kept = potential_rewards(torch.tensor([0.2, 0.9]), torch.tensor([0.5]), keep_end=True)
    assert kept.tolist() == pytest.approx([0.25])


def test_shaped_rewards_by_mode():
    t, potential = trajectory([0, 0.5, 1.0]), torch.tensor([0.1, 0.4, 0.9])
    base = {"gamma": 1.0}
    got = {
        m: shaped_reward(t, potential, ShapingConfig(mode=m, **base)).tolist()
        for m in ("potential", "delta", "final")
    }
    assert got["potential"] == pytest.approx([0.3, -0.4 + 1.0])
    assert got["delta"] == pytest.approx([0.3, 0.5 + 1.0]) and got["final"] == pytest.approx(
        [0.0, 0.9 + 1.0]
    )
    half = ShapingConfig(mode="delta", weight=0.5, success_coefficient=0.0)
    assert shaped_reward(t, potential, half).tolist() == pytest.approx([0.15, 0.25])
    assert shaped_reward(t, torch.tensor([0.1, math.nan, 0.9]), half).tolist() == [0.0, 0.0]


def test_end_of_time_and_discount_per_control_step():
    t = trajectory([0, 0.5, 0.6], success=False)
    potential = torch.tensor([0.1, 0.4, 0.8])
    keep = ShapingConfig(gamma=0.9, truncated_end="keep", gamma_per_control_step=True)
    # per control step: it is worth that as the decision is made
    paid = shaped_reward(t, potential, keep)
    assert (
        paid[:, 0].tolist() == pytest.approx([0.81 * 0.4 - 0.1, 0.81 * 0.8 - 0.4])
        and not paid[:, 1:].any()
    )
    zero = ShapingConfig(gamma=0.9, truncated_end="zero")
    assert shaped_reward(t, potential, zero).tolist() == pytest.approx([0.9 * 0.4 - 0.1, -0.4])
    with pytest.raises(ConfigError, match="potential, delta, final"):
        ShapingConfig(mode="dense")
    with pytest.raises(ConfigError, match="auto, zero, keep"):
        ShapingConfig(truncated_end="yes")


def test_two_hot_keeps_the_mean():
    weights = two_hot(torch.tensor([0.0, 0.33, 1.0, 1.7]), 11)
    assert torch.allclose(weights.sum(1), torch.ones(4)) and (weights > 0).sum(1).max() <= 2
    torch.testing.assert_close(
        weights @ torch.linspace(0, 1, 11), torch.tensor([0.0, 0.33, 1.0, 1.0])
    )


# --------------------------------------------------------------------------------------- milestones
def test_gripper_changes_need_to_cross_both_thresholds():
    openness = np.array([1.0, 0.9, 0.6, 0.45, 0.6, 0.2, 0.1, 0.5, 0.6, 0.95])
    assert ms.gripper_changes(openness, 0.3, 0.7) == [5, 9]
    assert ms.gripper_changes(np.full(5, 0.5), 0.3, 0.7) == []


def test_rests_are_the_slowest_inner_moments():
    speed = np.array([0.0, 1.0, 1.0, 0.1, 0.05, 0.2, 1.0, 1.0, 1.0, 0.0])
    position = np.concatenate([[0.0], speed.cumsum()])[:, None]
    assert ms.rests(position, 1.0, 0.4) == [5]
    assert ms.rests(position[:2], 1.0, 0.4) == []


def test_milestones_merge_and_end_with_the_success():
    config = ms.MilestoneConfig(merge_s=0.5)
    openness = np.array([1.0] * 5 + [0.0] * 10)
    assert ms.milestones(openness, None, 0.2, config) == [5, 14]
    assert ms.milestones(openness, None, 0.2, config, success=False) == [5]
    # too near to the end to count apart
    assert ms.milestones(openness[:7], None, 0.2, config) == [6]
    assert ms.merge([9, 3, 4, 3], 2) == [3, 9]


def test_labels_lead_to_milestones_and_shares_rise():
    assert np.flatnonzero(ms.leading_labels([3, 8], 10, 1.5)).tolist() == [2, 3, 7, 8]
    np.testing.assert_allclose(ms.passed_share([2, 4], 6), [0, 0.25, 0.5, 0.75, 1, 1])
    assert ms.passed_share([], 3).tolist() == [0, 0, 0]


def test_channels_are_found_by_name():
    names = ("eef_x", "eef_y", "eef_z", "gripper_open", "quat_x", "quat_y")
    assert ms.find_channels(names) == ([3], [0, 1, 2])
    assert ms.find_channels(("x", "y")) == ([], [0, 1])
    with pytest.raises(ConfigError, match="hysteresis"):
        ms.MilestoneConfig(hysteresis=0.7)


# ------------------------------------------------------------------------------------------ quality
@given(st.lists(st.integers(0, 6), min_size=3, max_size=20))
@settings(max_examples=40)
def test_spearman_agrees_with_scipy(values):
    from scipy.stats import spearmanr

    if len(set(values)) == 1:
        assert math.isnan(q.spearman(values))
    else:
        assert q.spearman(values) == pytest.approx(
            spearmanr(values, range(len(values))).statistic, abs=1e-9
        )


def test_auc_counts_pairs_with_ties_half():
    assert q.auc([3, 4], [1, 2]) == 1.0 and q.auc([1], [1]) == 0.5 and q.auc([1, 3], [2]) == 0.5
    assert math.isnan(q.auc([], [1.0]))
    low, high = q.auc_interval(0.8, 20, 20)
    assert 0.6 < low < 0.7 and 0.9 < high < 1.0
    assert q.auc_interval(1.0, 5, 5)[0] < 1.0 and q.auc_interval(math.nan, 0, 3) == (0.0, 1.0)


def test_separations():
    a, b = [0.9, 0.92, 0.88], [0.1, 0.12, 0.08]
    assert q.jensen_shannon(a, b) == pytest.approx(1.0) and q.jensen_shannon(a, a) == 0.0
    assert q.standardised_difference(a, b) == pytest.approx(0.8 / 0.02)
    assert (
        q.standardised_difference([1, 1], [0, 0]) == math.inf
        and q.standardised_difference([1, 1], [1, 1]) == 0.0
    )
    assert q.mmd(a, a) == pytest.approx(0.0, abs=1e-6) and q.mmd(a, b) > 0.5
    assert all(math.isnan(f([], a)) for f in (q.mmd, q.jensen_shannon, q.standardised_difference))


def test_calibration():
    error, brier, rows = q.calibration([0.05, 0.05, 0.95, 0.95], [False, False, True, False])
    assert error == pytest.approx((2 * 0.05 + 2 * 0.45) / 4)
    assert brier == pytest.approx((3 * 0.05**2 + 0.95**2) / 4)
    assert [(r["low"], r["rate"], r["count"]) for r in rows] == [(0.0, 0.0, 2), (0.9, 0.5, 2)]
    assert q.calibration([1.0], [True])[0] == 0.0
