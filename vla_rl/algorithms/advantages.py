"""Advantages as pure functions of tensors.

Letters: n decisions of a batch in trajectory order, m trajectories, h control steps in a chunk. A
decision is the unit of time here: it earns a reward [n] (`decision_rewards`) and discounts the next
decision's value by its own factor [n]. Trajectories lie one after another in the flat arrays
(`RolloutBatch`), so nothing is padded at the borders of this module.

Followed: GAE (Schulman et al. 2016, eq. 16), V-trace (Espeholt et al. 2018, IMPALA §4.1), GRPO
(Shao et al. 2024, DeepSeekMath §4.1), Dr. GRPO (Liu et al. 2025: no division by the standard
deviation), MC-GRPO (Kim 2026: median centre), NGRPO (Nan et al. 2025: a virtual best sample), RLOO
(Ahmadian et al. 2024), REINFORCE++ (Hu 2025: one normalisation over the whole batch), GDPO (Liu et
al. 2026: normalise each reward on its own).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.config.algorithms import CENTERS, SCALES, VIRTUAL_BEST


# ----------------------------------------------------------------------------- rewards of decisions
def chunk_rewards(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """Reward of each decision [n] from rewards per control step [n h]: Σ_j gamma**j · rewards[:,
    j].

    With gamma 1 (discounting per decision, or no discounting) it is the plain sum over the chunk.
    """
    if gamma == 1.0:
        return rewards.sum(1)
    return rewards @ (gamma ** torch.arange(rewards.shape[1], device=rewards.device)).to(
        rewards.dtype
    )


def decision_rewards(rewards: Tensor, valid: Tensor, gamma: float = 1.0) -> Tensor:
    """Reward of each decision [n], discounted inside its chunk to the time at which it was made
    (the reward of a semi-Markov decision, Sutton, Precup and Singh 1999, §3), from rewards of
    control steps [n h] (`chunk_rewards`), or of decisions [n], each paid in the last control step
    that was executed: Σ_j gamma**j · r_j = gamma**(executed − 1) · r.

    ``valid`` bool [n h] marks the executed control steps. Between decisions goes
    `decision_discounts`.
    """
    if rewards.ndim == 2:
        return chunk_rewards(rewards, gamma)
    return rewards * torch.pow(
        torch.full_like(rewards, gamma), (valid.sum(1) - 1).clamp(min=0).to(rewards)
    )


def decision_discounts(valid: Tensor, gamma: float, per_control_step: bool) -> Tensor:
    """Discount [n] between a decision and its successor: gamma**(executed control steps), or gamma
    per decision.

    ``valid`` bool [n h] marks the executed control steps.
    """
    executed = valid.sum(1) if per_control_step else torch.ones(valid.shape[0], device=valid.device)
    return torch.pow(torch.full_like(executed, gamma, dtype=torch.float32), executed)


def trajectory_sums(values: Tensor, trajectory_index: Tensor, num_trajectories: int) -> Tensor:
    """Sum [m] over the decisions of each trajectory of values [n]."""
    return values.new_zeros(num_trajectories).index_add_(0, trajectory_index, values)


def _reverse_scan(inputs: Tensor, factors: Tensor, lengths: Tensor) -> Tensor:
    """y[i] = inputs[i] + factors[i]·y[i+1] inside each trajectory (y past the end is 0), for flat
    arrays [n].

    Trajectories are laid side by side, so the Python loop runs over the longest trajectory and not
    over all decisions.
    """
    longest = int(lengths.max())
    starts = torch.cumsum(lengths, 0) - lengths
    steps = torch.arange(longest, device=lengths.device)
    inside = steps[:, None] < lengths[None, :]  # [t m]
    columns = (starts[None, :] + steps[:, None]).clamp_(max=inputs.shape[0] - 1)
    x = torch.where(inside, inputs[columns], 0.0)
    f = torch.where(inside, factors[columns], 0.0)
    for t in range(longest - 2, -1, -1):
        x[t].addcmul_(f[t], x[t + 1])
    flat = torch.empty_like(inputs)
    flat[columns[inside]] = x[inside]
    return flat


def gae(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    discounts: Tensor,
    lam: float,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over decisions (Schulman et al. 2016, eq. 16). Returns
    (advantages, returns) [n].

    ``rewards``, ``values``, ``discounts`` [n] per decision; ``final_values`` [m] is the value of
    the observation after the last decision, ``terminated`` bool [m], ``lengths`` int64 [m]
    decisions per trajectory. A terminated trajectory ends with value 0 (whatever ``final_values``
    says); a truncated one bootstraps from ``final_values``.
    """
    deltas = rewards + discounts * _following(values, final_values, terminated, lengths) - values
    advantages = _reverse_scan(deltas, discounts * lam, lengths)
    return advantages, advantages + values


def _following(values: Tensor, final_values: Tensor, terminated: Tensor, lengths: Tensor) -> Tensor:
    """What comes after each decision [n]: the next one's of ``values`` [n], or at a trajectory's
    end ``final_values`` [m], or 0 where it terminated."""
    following = torch.empty_like(values)
    following[:-1] = values[1:]
    last = torch.cumsum(lengths, 0) - 1
    following[last] = torch.where(terminated, torch.zeros_like(final_values), final_values).to(
        values.dtype
    )
    return following


@dataclasses.dataclass(frozen=True)
class Truncated:
    """How much likelier the policy that learns makes each decision than the one that acted, w =
    π_p/μ [n], truncated: ``rho`` = min(w, ρ̄) bounds the value that is learned, ``c`` = min(w, c̄)
    how far back what is seen is believed."""

    rho: Tensor
    c: Tensor


def vtrace(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    discounts: Tensor,
    lam: float,
    lengths: Tensor,
    weights: Truncated,
) -> tuple[Tensor, Tensor]:
    """V-trace over decisions (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and remark 2);
    arguments as of `gae`. Returns (advantages, targets of the values) [n].

    The target is v_s = V_s + ρ_s·(r_s + γ_s·V_{s+1} − V_s) + γ_s·λ·c_s·(v_{s+1} − V_{s+1}). The
    advantage, before it is weighed by ρ_s, is r_s + γ_s·(V_{s+1} + λ·(v_{s+1} − V_{s+1})) − V_s:
    with λ = 1 that is the paper's, and where all weights are 1 it is `gae`'s for every λ.
    """
    following = _following(values, final_values, terminated, lengths)
    deltas = rewards + discounts * following - values
    beyond = _reverse_scan(weights.rho * deltas, discounts * lam * weights.c, lengths)  # v − V
    nothing = torch.zeros_like(final_values)
    return deltas + discounts * lam * _following(
        beyond, nothing, terminated, lengths
    ), values + beyond


def discounted_returns(rewards: Tensor, discounts: Tensor, lengths: Tensor) -> Tensor:
    """Reward-to-go [n] of each decision inside its trajectory, without bootstrap."""
    return _reverse_scan(rewards, discounts, lengths)


# --------------------------------------------------------------------------- group-relative methods
@dataclasses.dataclass
class RunningScale:
    """Exponentially averaged standard deviation of centred scores, for ``scale="running_std"``.

    A group of eight estimates its own spread badly and divides by nearly 0 when seven of eight
    agree; the spread over past iterations does not have that trouble.
    """

    decay: float = 0.9
    variance: float = 0.0
    count: int = 0

    def update(self, centred: Tensor) -> float:
        """Take in the centred scores of one iteration and return the standard deviation to
        divide by."""
        batch = float(centred.double().square().mean())
        self.variance = (
            batch if self.count == 0 else self.decay * self.variance + (1.0 - self.decay) * batch
        )
        self.count += 1
        return self.variance**0.5

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.decay, self.variance, self.count = (
            float(state["decay"]),
            float(state["variance"]),
            int(state["count"]),
        )


def _group_mean(x: Tensor, group_index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    counts = torch.bincount(group_index, minlength=groups).to(x.dtype)
    sums = x.new_zeros(groups).index_add_(0, group_index, x)
    return sums / counts.clamp(min=1.0), counts


def _group_median(x: Tensor, group_index: Tensor, groups: int) -> Tensor:
    """Median per group; the mean of the two middle values where the group is even."""
    order = torch.argsort(x, stable=True)
    order = order[torch.argsort(group_index[order], stable=True)]
    counts = torch.bincount(group_index, minlength=groups)
    starts = torch.cumsum(counts, 0) - counts
    top = x.shape[0] - 1
    low = x[order[(starts + (counts - 1).clamp(min=0) // 2).clamp(max=top)]]
    high = x[order[(starts + counts // 2).clamp(max=top)]]
    return 0.5 * (low + high)


def grpo_advantages(
    scores: Tensor,
    group_index: Tensor,
    *,
    center: str = "mean",
    scale: str = "std",
    eps: float = 1e-6,
    virtual_best: str = "none",
    best_score: float = 1.0,
    success: Tensor | None = None,
    running: RunningScale | None = None,
) -> Tensor:
    """Group-relative advantages float32 [m]: (score − centre of its group) / (spread of its group +
    eps).

    ``scores`` [m] one per trajectory, ``group_index`` int64 [m]. ``center``: "mean" (GRPO) or
    "median" (MC-GRPO). ``scale``: "std" (unbiased), "none" (Dr. GRPO), "mad" (median of the
    absolute distances to the centre) or "running_std" (``running`` keeps it between calls). A group
    whose MAD is 0 (binary rewards often are) is centred only: dividing by eps would give advantages
    of 10⁶. ``virtual_best`` adds one imagined sample of score ``best_score`` to the statistics of
    groups in which every trajectory failed ("all_fail", needs ``success`` bool [m]) or of every
    group ("always", as NGRPO does); such a group then pushes away from what failed instead of
    giving no gradient. A group of one has nothing to be compared with: its advantage is 0 (unless a
    virtual sample joins it). Raises ValueError for an unknown choice.
    """
    options = (
        ("center", center, CENTERS),
        ("scale", scale, SCALES),
        ("virtual_best", virtual_best, VIRTUAL_BEST),
    )
    for name, value, choices in options:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    m, groups = scores.shape[0], int(group_index.max()) + 1
    # double: equal scores must centre to exactly nothing before ÷ eps
    x, index = scores.double(), group_index
    if virtual_best != "none":
        joins = torch.ones(groups, dtype=torch.bool, device=x.device)
        if virtual_best == "all_fail":
            if success is None:
                raise ValueError("virtual_best='all_fail' needs the success of each trajectory")
            joins = _group_mean(success.double(), index, groups)[0] == 0
        extra = torch.nonzero(joins).flatten()
        x = torch.cat([x, x.new_full((extra.shape[0],), best_score)])
        index = torch.cat([index, extra])
    mean, counts = _group_mean(x, index, groups)
    middle = mean if center == "mean" else _group_median(x, index, groups)
    centred = x - middle[index]
    if scale == "std":
        squares = (x - mean[index]).square()
        variance = x.new_zeros(groups).index_add_(0, index, squares) / (counts - 1.0).clamp(min=1.0)
        centred = centred / (variance.sqrt()[index] + eps)
    elif scale == "mad":
        mad = _group_median(centred.abs(), index, groups)[index]
        centred = torch.where(mad > eps, centred / (mad + eps), centred)
    elif scale == "running_std":
        centred = centred / ((running or RunningScale()).update(centred[:m]) + eps)
    return centred[:m].float()


def rloo_advantages(scores: Tensor, group_index: Tensor) -> Tensor:
    """REINFORCE leave-one-out [m]: score − mean score of the others in the group (0 for a group
    of one)."""
    x, groups = scores.double(), int(group_index.max()) + 1
    mean, counts = _group_mean(x, group_index, groups)
    return ((x - mean[group_index]) * (counts / (counts - 1.0).clamp(min=1.0))[group_index]).float()


def whiten(values: Tensor, mask: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(values − mean) / (unbiased std + eps) over the entries where ``mask`` holds; the same shape,
    float32.

    Entries outside the mask are shifted and scaled alike but do not count. Fewer than two entries
    are only centred.
    """
    x = values.double()
    inside = x if mask is None else x[mask]
    if inside.numel() == 0:
        return values.float()
    spread = inside.std() + eps if inside.numel() > 1 else 1.0
    return ((x - inside.mean()) / spread).float()


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    discounts: Tensor,
    lengths: Tensor,
    mask: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """REINFORCE++ [n]: reward-to-go of each decision, normalised once over the whole batch and
    not per group."""
    return whiten(discounted_returns(rewards, discounts, lengths), mask, eps)


def gdpo_advantages(
    scores: Mapping[str, Tensor],
    weights: Mapping[str, float],
    advantage: Callable[[Tensor], Tensor],
    eps: float = 1e-6,
) -> Tensor:
    """GDPO [m] for several rewards: each gets its own group-relative advantages, these are summed
    with ``weights``, and the sum is normalised over the batch, so that one reward's large spread
    cannot drown another's.

    ``scores`` {name: [m]}; ``advantage`` maps one reward's scores to group-relative advantages
    (`grpo_advantages`).
    """
    total = torch.stack([weights[name] * advantage(x) for name, x in scores.items()]).sum(0)
    return whiten(total, eps=eps)
