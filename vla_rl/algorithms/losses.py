"""PPO's losses and statistics as pure functions of tensors.

Letters: n decisions, h control steps in a chunk, ``*k`` the policy's log-prob axes, e entries per
decision at the chosen ratio level (all tokens, or h, or 1). A mask [n e] marks entries that count:
control steps that were executed.

Followed: PPO (Schulman et al. 2017, eq. 7), asymmetric clip range (DAPO, Yu et al. 2025 §3.1), dual
clip (Ye et al. 2020, eq. 5), KL estimators k1, k2, k3 (Schulman 2020, "Approximating KL
divergence").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_rl.config.algorithms import AGGREGATIONS, KEPT_AXIS, KL_KINDS, LEVELS, REDUCTIONS

MAX_LOG_RATIO = 20.0


# ------------------------------------------------------------------------------ levels of log-probs
def reduce_log_prob(
    log_prob: Tensor, axes: Sequence[str], valid: Tensor, level: str, reduction: str = "sum"
) -> tuple[Tensor, Tensor]:
    """Log-probs at a ratio level: (entries float32 [n e], mask bool [n e]).

    ``log_prob`` [n *k] with one name in ``axes`` per axis of ``*k``; ``valid`` bool [n h] marks
    executed control steps. "token" keeps every axis, "step" sums all but "control_step",
    "denoising_step" all but that axis, "chunk" sums all. What was not executed counts 0 in a sum
    and is masked out where its axis stays; without a "control_step" axis a decision counts when any
    step ran. ``reduction`` "mean" divides each sum by its executed entries (as DPPO does; the clip
    range then means something else). Raises ValueError for an unknown level or reduction, for a
    level whose axis is missing, and for shapes that do not fit.
    """
    n, k = log_prob.shape[0], log_prob.ndim - 1
    if len(axes) != k:
        raise ValueError(
            f"log_prob of shape {tuple(log_prob.shape)} has {k} axes after the batch, "
            f"log_prob_axes names {tuple(axes)}"
        )
    if level not in LEVELS or reduction not in REDUCTIONS:
        raise ValueError(
            f"ratio level {level!r} is not one of {', '.join(LEVELS)}, or reduction {reduction!r} "
            f"not one of {', '.join(REDUCTIONS)}"
        )
    kept = KEPT_AXIS.get(level)
    if kept is not None and kept not in axes:
        raise ValueError(
            f"a {level}-level ratio needs a {kept!r} axis; the policy's log_prob_axes "
            f"are {tuple(axes)}"
        )
    where = axes.index("control_step") + 1 if "control_step" in axes else None
    if where is None:
        mask = valid.any(1).view(n, *[1] * k)
    else:
        if log_prob.shape[where] != valid.shape[1]:
            raise ValueError(
                f"log_prob has {log_prob.shape[where]} control steps, valid has {valid.shape[1]}"
            )
        mask = valid.view(n, *[valid.shape[1] if i == where else 1 for i in range(1, k + 1)])
    x = log_prob.float().masked_fill(~mask, 0.0)
    if level == "token":
        return x.reshape(n, -1), mask.expand_as(x).reshape(n, -1)
    stays = None if kept is None else axes.index(kept) + 1
    others = [i for i in range(1, k + 1) if i != stays]
    total = x.sum(others) if others else x
    if reduction == "mean" and others:
        total = total / mask.expand_as(x).sum(others).clamp(min=1)
    if stays is None:
        return total.view(n, 1), valid.any(1, keepdim=True)
    return total, (valid if stays == where else valid.any(1, keepdim=True).expand_as(total))


# -------------------------------------------------------------------------------------- aggregation
def entry_weights(
    mask: Tensor, trajectory_index: Tensor, num_trajectories: int, aggregation: str
) -> Tensor:
    """Weight float32 [n e] of each entry: 1 for "token", 1 ÷ (counting entries of its
    trajectory) for the others."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"loss aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}"
        )
    weights = mask.float()
    if aggregation == "token":
        return weights
    per_trajectory = weights.new_zeros(num_trajectories).index_add_(
        0, trajectory_index, weights.sum(1)
    )
    return weights / per_trajectory.clamp(min=1.0)[trajectory_index, None]


def weight_norm(
    weights: Tensor, aggregation: str, num_decisions: int, num_trajectories: int
) -> Tensor:
    """The number that Σ entry × weight over a minibatch is divided by. ``weights`` [b e] are the
    minibatch's rows.

    - "token": counting entries, so the loss is their mean.
    - "trajectory": the weights' sum, so over whole trajectories the loss is the mean of token means
      (SimpleVLA-RL).
    - "step_count": the minibatch's share of the trajectories, b/n·m, fixed whatever rows were
      drawn. Over a full batch that is RLinf's mean of value × mask ÷ (valid steps / max steps) over
      an array padded to max steps: max steps cancels and each trajectory weighs the same.

    ``num_decisions`` n and ``num_trajectories`` m are those of the whole batch.
    """
    if aggregation == "step_count":
        return weights.new_tensor(weights.shape[0] / num_decisions * num_trajectories)
    return weights.sum().clamp(min=1e-8)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries where ``mask`` holds (0 when there are none)."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


# ------------------------------------------------------------------------------------------- policy
def log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log π − log π_old, clamped to ±20 so that its exponential stays finite."""
    return (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per entry, to be minimised: (loss, whether the clip is active), both
    [n e].

    loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A). With ``dual_clip`` c > 1 it is at most
    c·|A| where A < 0, so that one action that became far more likely cannot dominate.
    ``advantages`` and clip ranges broadcast against ``log_ratio``.
    """
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    low, high = (
        torch.as_tensor(x, dtype=ratio.dtype, device=ratio.device)
        for x in (1.0 - clip_low, 1.0 + clip_high)
    )
    clipped = -advantages * ratio.clamp(low, high)
    loss, active = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss, active = torch.where(capped, ceiling, loss), active | capped
    return loss, active


def _value_distance(value: Tensor, returns: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (value - returns).square()
    return torch.nn.functional.huber_loss(value, returns, reduction="none", delta=huber_delta)


def value_loss(
    value: Tensor,
    returns: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Value loss per decision [n]: ½·error², or Huber's with ``huber_delta``.

    ``clip`` limits how far the value may move from ``old_value`` and takes the larger of both
    losses (PPO2's form).
    """
    loss = _value_distance(value, returns, huber_delta)
    if clip is None or old_value is None:
        return loss
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, _value_distance(near, returns, huber_delta))


def kl_estimate(log_prob: Tensor, other_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate per entry of KL(π ‖ other) from samples of π (Schulman 2020), with d = log π_other −
    log π.

    k1 = −d (unbiased, can be negative), k2 = ½d² (biased, low variance), k3 = exp(d) − 1 − d
    (unbiased, not negative). As a loss, k2 is the one whose gradient is that of the true KL; k1's
    is 0 on average.
    """
    d = (other_log_prob - log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(KL_KINDS)}")


# --------------------------------------------------------------------------------------- statistics
def ratio_statistics(log_ratio: Tensor, active: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Scalars about the ratios of a minibatch, as tensors (no synchronisation with the device).

    ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``ratio_std``; ``clip_fraction`` entries at the
    clip; ``approx_kl`` k3 of KL(π_old ‖ π); ``ess`` (Σr)²/(N·Σr²), the share of the samples that
    the importance weights leave effective.
    """
    ratio = log_ratio.exp()
    count = mask.sum().clamp(min=1)
    kept = torch.where(mask, ratio, 0.0)
    total, squares = kept.sum(), kept.square().sum()
    mean = total / count
    return {
        "ratio_mean": mean,
        "ratio_std": (squares / count - mean.square()).clamp(min=0.0).sqrt(),
        "ratio_max": torch.where(mask, ratio, -torch.inf).amax(),
        "ratio_min": torch.where(mask, ratio, torch.inf).amin(),
        "clip_fraction": (active & mask).sum() / count,
        "approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
        "ess": total.square() / (count * squares).clamp(min=1e-12),
    }


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """1 − Var(target − prediction) / Var(target); 1 is perfect, 0 is a constant; 0 when target
    is constant."""
    spread = float(target.var(unbiased=False))
    return (
        0.0 if spread < 1e-12 else 1.0 - float((target - prediction).var(unbiased=False)) / spread
    )
