"""Losses against hand-computed numbers, limits and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms import losses

torch.set_num_threads(1)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ------------------------------------------------------------------------------------------- levels
LOG_PROB = torch.arange(12.0).view(2, 3, 2)  # n=2, h=3, a=2
VALID = torch.tensor([[True, True, False], [True, True, True]])
AXES = ("control_step", "action_dim")


def test_token_level_keeps_axes_and_masks_what_was_not_executed():
    x, mask = losses.reduce_log_prob(LOG_PROB, AXES, VALID, "token")
    assert x.tolist() == [[0, 1, 2, 3, 0, 0], [6, 7, 8, 9, 10, 11]]
    assert mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]


def test_step_and_chunk_levels_sum():
    x, mask = losses.reduce_log_prob(LOG_PROB, AXES, VALID, "step")
    assert x.tolist() == [[1, 5, 0], [13, 17, 21]] and torch.equal(mask, VALID)
    x, mask = losses.reduce_log_prob(LOG_PROB, AXES, VALID, "chunk")
    assert x.tolist() == [[6], [51]] and mask.tolist() == [[True], [True]]
    _, mask = losses.reduce_log_prob(LOG_PROB, AXES, torch.zeros_like(VALID), "chunk")
    assert mask.tolist() == [[False], [False]]


def test_any_order_and_number_of_axes():
    x = torch.randn(2, 4, 3, 2)  # denoising, control step, action
    moved, mask = losses.reduce_log_prob(
        x, ("denoising_step", "control_step", "action_dim"), VALID, "step"
    )
    torch.testing.assert_close(moved, (x * VALID[:, None, :, None]).sum((1, 3)))
    assert torch.equal(mask, VALID)
    flat, mask = losses.reduce_log_prob(x[..., 0, 0], ("token",), VALID, "token")
    assert torch.equal(flat, x[..., 0, 0]) and mask.all()
    whole, mask = losses.reduce_log_prob(x[:, 0, 0, 0], (), VALID, "token")
    assert torch.equal(whole, x[:, 0, 0, :1]) and mask.shape == (2, 1)
    alone, _ = losses.reduce_log_prob(x[:, 0, :, 0], ("control_step",), VALID, "step")
    torch.testing.assert_close(alone, x[:, 0, :, 0] * VALID)


def test_denoising_step_level_and_means():
    x, axes = torch.randn(2, 4, 3, 2), ("denoising_step", "control_step", "action_dim")
    total, mask = losses.reduce_log_prob(x, axes, VALID, "denoising_step")
    torch.testing.assert_close(total, (x * VALID[:, None, :, None]).sum((2, 3)))
    assert mask.shape == (2, 4) and mask.all()
    mean, _ = losses.reduce_log_prob(x, axes, VALID, "denoising_step", "mean")
    # executed steps times dimensions
    torch.testing.assert_close(mean, total / torch.tensor([[4.0], [6.0]]))
    whole, _ = losses.reduce_log_prob(x, axes, VALID, "chunk", "mean")
    torch.testing.assert_close(whole, total.sum(1, keepdim=True) / torch.tensor([[16.0], [24.0]]))
    assert not losses.reduce_log_prob(x, axes, torch.zeros_like(VALID), "denoising_step")[1].any()
    with pytest.raises(ValueError, match="median"):
        losses.reduce_log_prob(x, axes, VALID, "chunk", "median")


def test_clip_ranges_per_entry():
    log_ratio = torch.tensor([[1.0, 1.0]]).log1p()  # ratio 2
    loss, active = losses.policy_loss(
        log_ratio, torch.ones(1, 2), torch.tensor([[0.1, 2.0]]), torch.tensor([[0.1, 2.0]])
    )
    torch.testing.assert_close(loss, torch.tensor([[-1.1, -2.0]]))
    assert active.tolist() == [[True, False]]


def test_unexecuted_steps_may_hold_infinities():
    x = LOG_PROB.clone()
    x[0, 2] = -torch.inf
    for level in losses.LEVELS:
        entries, axes = (
            (x[:, None], ("denoising_step", *AXES)) if level == "denoising_step" else (x, AXES)
        )
        assert torch.isfinite(losses.reduce_log_prob(entries, axes, VALID, level)[0]).all()


def test_levels_report_what_does_not_fit():
    with pytest.raises(ValueError, match="log_prob_axes"):
        losses.reduce_log_prob(LOG_PROB, ("control_step",), VALID, "token")
    with pytest.raises(ValueError, match="'control_step' axis"):
        losses.reduce_log_prob(LOG_PROB[..., 0], ("token",), VALID, "step")
    with pytest.raises(ValueError, match="control steps"):
        losses.reduce_log_prob(LOG_PROB, ("action_dim", "control_step"), VALID, "token")
    with pytest.raises(ValueError, match="token, step, chunk"):
        losses.reduce_log_prob(LOG_PROB, AXES, VALID, "word")


# -------------------------------------------------------------------------------------- aggregation
def aggregate(values, mask, index, trajectories, mode):
    """The loss [] of entries [n e] of a whole batch."""
    weights = losses.entry_weights(mask, index, trajectories, mode)
    return (values * weights).sum() / losses.weight_norm(weights, mode, mask.shape[0], trajectories)


def test_aggregations_by_hand():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 50.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    index = torch.tensor([0, 0, 1])  # trajectory 0: 1 2 3 4, trajectory 1: 10
    assert float(aggregate(values, mask, index, 2, "token")) == pytest.approx(20 / 5)
    assert float(aggregate(values, mask, index, 2, "trajectory")) == pytest.approx((2.5 + 10) / 2)
    assert float(aggregate(values, mask, index, 2, "step_count")) == pytest.approx((2.5 + 10) / 2)
    with pytest.raises(ValueError, match="step_count"):
        aggregate(values, mask, index, 2, "sum")


def test_step_count_is_rlinfs_mean_over_a_padded_array():
    g = torch.Generator().manual_seed(0)
    lengths, longest, k = [2, 5, 1], 7, 3
    padded, mask = torch.zeros(3, longest, k), torch.zeros(3, longest, k, dtype=torch.bool)
    for j, length in enumerate(lengths):
        padded[j, :length] = torch.randn(length, k, generator=g)
        mask[j, :length] = True
    share = mask[..., 0].sum(1) / longest  # valid steps ÷ max steps
    reference = (padded * mask / share[:, None, None]).mean()
    flat, index = (
        padded[mask].view(-1, k),
        torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
    )
    ours = aggregate(flat, torch.ones_like(flat, dtype=torch.bool), index, 3, "step_count")
    torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_aggregation_of_a_constant_is_that_constant(mode):
    mask = torch.rand(10, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0] = True
    index = torch.tensor([0] * 4 + [1] * 5 + [2])
    assert float(aggregate(torch.full((10, 4), 2.5), mask, index, 3, mode)) == pytest.approx(2.5)


def test_step_count_minibatches_average_to_the_batch_and_token_weights_follow_length():
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    mask, index = torch.ones(6, 2, dtype=torch.bool), torch.tensor([0, 0, 0, 0, 1, 1])
    weights = losses.entry_weights(mask, index, 2, "step_count")
    halves = [
        (values[s] * weights[s]).sum() / losses.weight_norm(weights[s], "step_count", 6, 2)
        for s in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(halves) / 2, aggregate(values, mask, index, 2, "step_count"))
    assert float(aggregate(values, torch.zeros_like(mask), index, 2, "token")) == 0.0


# ------------------------------------------------------------------------------------------- policy
def test_clipped_surrogate_by_hand():
    ratio = t(1.0, 1.5, 0.5, 1.5, 0.5)
    a = t(2.0, 1.0, 1.0, -1.0, -1.0)
    loss, active = losses.policy_loss(ratio.log(), a, 0.2, 0.28)
    torch.testing.assert_close(loss, t(-2.0, -1.28, -0.5, 1.5, 0.8))
    assert active.tolist() == [False, True, False, False, True]


def test_dual_clip_bounds_the_loss_of_bad_actions_only():
    log_ratio = t(10.0, 10.0).log()
    loss, active = losses.policy_loss(log_ratio, t(-1.0, 1.0), 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, t(3.0, -1.2))
    assert active.tolist() == [True, True]
    plain, _ = losses.policy_loss(log_ratio, t(-1.0, 1.0), 0.2, 0.2)
    assert plain.tolist() == pytest.approx([10.0, -1.2])


def test_surrogate_gradient_vanishes_beyond_the_clip_and_is_reinforce_at_ratio_one():
    x = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5], requires_grad=True)
    a = t(2.0, 1.0, 1.0, -1.0, -1.0)
    losses.policy_loss(x, a, 0.2, 0.2)[0].sum().backward()
    e = math.exp
    torch.testing.assert_close(x.grad, t(-2.0, 0.0, -e(-0.5), e(0.5), 0.0))


@settings(max_examples=50)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_surrogate_never_promises_more_than_the_plain_one(log_ratio, advantage, low, high):
    loss, _active = losses.policy_loss(t(log_ratio), t(advantage), low, high)
    plain = -advantage * math.exp(log_ratio)
    assert float(loss) >= plain - 1e-5 * (1 + abs(plain))
    wide, never = losses.policy_loss(t(log_ratio), t(advantage), 1.0, 1e9)
    assert float(wide) == pytest.approx(plain, rel=1e-5, abs=1e-6) and not never.any()


def test_log_ratio_stays_finite():
    assert losses.log_ratio(t(1000.0, -1000.0), t(0.0, 0.0)).tolist() == [20.0, -20.0]


# -------------------------------------------------------------------------------------------- value
def test_value_loss_by_hand():
    value, returns, old = t(2.0, 0.5), t(0.0, 0.0), t(0.0, 0.4)
    torch.testing.assert_close(losses.value_loss(value, returns), t(2.0, 0.125))
    torch.testing.assert_close(losses.value_loss(value, returns, huber_delta=1.0), t(1.5, 0.125))
    # moved 2 away, allowed 0.2: clipped loss 0.02 < 2, the larger counts
    torch.testing.assert_close(losses.value_loss(value, returns, old, clip=0.2), t(2.0, 0.125))
    # ½·0.8²
    torch.testing.assert_close(losses.value_loss(t(1.0), t(1.0), t(0.0), clip=0.2), t(0.32))
    torch.testing.assert_close(losses.value_loss(value, returns, None, clip=0.2), t(2.0, 0.125))


# ----------------------------------------------------------------------------------------------- KL
def test_kl_estimators_by_hand():
    log_prob, other = t(0.0, -1.0), t(-0.5, -0.5)
    assert losses.kl_estimate(log_prob, other, "k1").tolist() == pytest.approx([0.5, -0.5])
    assert losses.kl_estimate(log_prob, other, "k2").tolist() == pytest.approx([0.125, 0.125])
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(0.5) - 1 - 0.5]
    assert losses.kl_estimate(log_prob, other, "k3").tolist() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        losses.kl_estimate(log_prob, other, "k4")


def test_k1_and_k3_are_unbiased_and_k2s_gradient_is_the_kls():
    logits, other = (
        torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64, requires_grad=True),
        torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64),
    )
    log_p, log_q = torch.log_softmax(logits, 0), torch.log_softmax(other, 0)
    p = log_p.exp().detach()
    true = (log_p.exp() * (log_p - log_q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * losses.kl_estimate(log_p, log_q, kind)).sum(), true)
    (gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    (k2,) = torch.autograd.grad(
        (p * losses.kl_estimate(log_p, log_q, "k2")).sum(), logits, retain_graph=True
    )
    (k1,) = torch.autograd.grad((p * losses.kl_estimate(log_p, log_q, "k1")).sum(), logits)
    torch.testing.assert_close(k2, gradient)
    torch.testing.assert_close(k1, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)


# --------------------------------------------------------------------------------------- statistics
def test_ratio_statistics_by_hand():
    ratio = torch.tensor([[1.0, 2.0], [0.5, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    active = torch.tensor([[False, True], [False, True]])
    s = {k: float(v) for k, v in losses.ratio_statistics(ratio.log(), active, mask).items()}
    assert s["ratio_mean"] == pytest.approx(3.5 / 3) and (
        s["ratio_min"],
        s["ratio_max"],
    ) == pytest.approx((0.5, 2.0))
    assert s["clip_fraction"] == pytest.approx(1 / 3)
    assert s["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert s["ratio_std"] == pytest.approx((5.25 / 3 - (3.5 / 3) ** 2) ** 0.5)
    k3 = [0.0, 1.0 - math.log(2.0), -0.5 - math.log(0.5)]
    assert s["approx_kl"] == pytest.approx(sum(k3) / 3, rel=1e-5)


def test_statistics_of_an_unchanged_policy():
    mask = torch.ones(4, 3, dtype=torch.bool)
    s = {k: float(v) for k, v in losses.ratio_statistics(torch.zeros(4, 3), ~mask, mask).items()}
    assert s == {
        "ratio_mean": 1,
        "ratio_std": 0,
        "ratio_max": 1,
        "ratio_min": 1,
        "clip_fraction": 0,
        "approx_kl": 0,
        "ess": 1,
    }


def test_explained_variance():
    target = t(0.0, 1.0, 2.0)
    assert losses.explained_variance(target, target) == pytest.approx(1.0)
    assert losses.explained_variance(target + 5, target) == pytest.approx(1.0)
    assert losses.explained_variance(torch.zeros(3), target) == pytest.approx(0.0)
    assert losses.explained_variance(-target, target) == pytest.approx(-3.0)
    assert losses.explained_variance(target, torch.ones(3)) == 0.0


def test_masked_mean_ignores_what_is_masked_even_nan():
    assert float(
        losses.masked_mean(t(1.0, float("nan"), 3.0), torch.tensor([True, False, True]))
    ) == pytest.approx(2.0)
    assert float(losses.masked_mean(t(1.0), torch.tensor([False]))) == 0.0
