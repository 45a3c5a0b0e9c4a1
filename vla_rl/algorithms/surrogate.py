"""The loss of a minibatch's rows, term by term: clipped surrogate, entropy, reference KL,
imitation, value.

With stale data three policies differ: the one that acted (behaviour μ), the one at the start of the
update (proximal π_p) and the one that is trained (π_θ). The ratio is π_θ/π_p, so that the clip
range stays centred, and π_p/μ, truncated, weighs each entry: decoupled PPO (Hilton et al. 2021,
arXiv 2110.00641, eq. 7; AReaL, Fu et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import losses
from vla_rl.config.algorithms import PPOConfig
from vla_rl.types import PolicyEvaluation, RolloutBatch


@dataclass(frozen=True)
class Rows:
    """What the epochs know of some decisions [b], beside what the policy says now. ``e`` entries of
    the ratio.

    ``learn`` bool [b h]: control steps that the policy chose and that were executed. ``weights`` [b
    e]: what entries weigh in the loss, and where data are stale ``correction`` besides. ``counts``
    bool [b]: False for rows that only fill up.
    """

    learn: Tensor
    old_log_prob: Tensor  # [b *k]
    advantages: Tensor  # [b]
    weights: Tensor
    imitate: Tensor  # bool [b], of successful episodes
    counts: Tensor
    correction: Tensor | None = None  # [b e]
    reference_log_prob: Tensor | None = None  # [b *k]
    returns: Tensor | None = None  # [b]
    old_value: Tensor | None = None  # [b], of the policy's own head

    def share(self, at: Tensor, advantages: Tensor, counts: Tensor, norm: Tensor) -> Rows:
        """The rows ``at`` of a minibatch whose sums are divided by ``norm``, with its own
        ``advantages`` and ``counts``."""
        picked: dict[str, Any] = {
            name: None if x is None else x[at] for name, x in vars(self).items()
        }
        rows = Rows(**picked)
        weights = rows.weights / norm * counts[:, None]
        weights = weights if rows.correction is None else weights * rows.correction
        return replace(
            rows,
            learn=rows.learn & counts[:, None],
            advantages=advantages,
            weights=weights,
            counts=counts,
        )


@dataclass(frozen=True)
class Totals:
    """What sums over a whole minibatch are divided by, known before any forward pass:
    accumulation is exact."""

    rows: int
    tokens: Tensor
    imitated_tokens: Tensor


@dataclass(frozen=True)
class Losses:
    """``loss`` with gradient, its ``terms`` (each of them scalar), and what the ratio's
    statistics are made of [b e]."""

    loss: Tensor
    terms: dict[str, Tensor]
    log_ratio: Tensor
    active: Tensor
    mask: Tensor


def behavior_weights(
    config: PPOConfig, old: Tensor, behavior: Tensor, mask: Tensor
) -> Tensor | None:
    """Weight float32 [n e] of each entry, π_p/μ truncated at ``behavior_cap`` or masked beyond it;
    None where it is off.

    The mean over the entries that count is 1 before masking, so that the step does not shrink with
    staleness and masked entries do not make the others count more.
    """
    if config.behavior_weight == "none":
        return None
    ratio = losses.log_ratio(old, behavior).exp()
    weight = ratio.clamp(max=config.behavior_cap)
    weight = weight / losses.masked_mean(weight, mask).clamp(min=1e-8)
    if config.behavior_weight == "mask":
        inside = (ratio <= config.behavior_cap) & (ratio >= 1.0 / config.behavior_cap)
        weight = torch.where(inside, weight, 0.0)
    return weight


class Surrogate:
    """Computes `Losses`. ``axes`` are the policy's log-prob axes."""

    def __init__(self, config: PPOConfig, axes: tuple[str, ...]) -> None:
        self.config, self.axes = config, axes

    def at_level(
        self, log_prob: Tensor, learn: Tensor, reduction: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [b *k] as the ratio takes them: ([b e], mask [b e])."""
        c = self.config
        return losses.reduce_log_prob(
            log_prob, self.axes, learn, c.ratio_level, reduction or c.ratio_reduction
        )

    def log_weights(self, log_prob: Tensor | None, batch: RolloutBatch) -> Tensor | None:
        """log π/μ [n] on the CPU of each decision, π having these log-probs [n *k] (None: not
        asked) and μ having acted: the mean over its entries (0 for a decision without any, such as
        a person's)."""
        if log_prob is None:
            return None
        learn = (batch.valid & ~batch.is_human).to(log_prob.device)
        now, mask = losses.reduce_log_prob(log_prob, self.axes, learn, "token", "sum")
        acted = losses.reduce_log_prob(
            batch.behavior_log_prob.to(log_prob), self.axes, learn, "token", "sum"
        )[0]
        return (torch.where(mask, now - acted, 0.0).sum(1) / mask.sum(1).clamp(min=1)).float().cpu()

    def losses(
        self, out: PolicyEvaluation, rows: Rows, totals: Totals, *, value_only: bool
    ) -> Losses:
        """All terms of these rows' share of the minibatch's loss; ``value_only`` leaves the
        value's alone."""
        config = self.config
        log_prob, mask = self.at_level(out.log_prob, rows.learn)
        log_ratio = losses.log_ratio(log_prob, self.at_level(rows.old_log_prob, rows.learn)[0])
        surrogate, active = self._clipped(out, rows, log_ratio)
        entropy, token_mask = losses.reduce_log_prob(out.entropy, self.axes, rows.learn, "token")
        terms = {
            "policy_loss": (surrogate * rows.weights).sum(),
            "entropy": (entropy * token_mask).sum() / totals.tokens,
        }
        loss = terms["policy_loss"] - config.entropy_coef * terms["entropy"]
        if rows.reference_log_prob is not None:
            reference, _ = self.at_level(rows.reference_log_prob, rows.learn)
            terms["reference_kl"] = (
                losses.kl_estimate(log_prob, reference, config.kl_kind) * rows.weights
            ).sum()
            loss = loss + config.kl_coef * terms["reference_kl"]
        if config.success_imitation_coef > 0:
            tokens, _ = losses.reduce_log_prob(
                out.log_prob, self.axes, rows.learn & rows.imitate[:, None], "token"
            )
            terms["success_imitation_loss"] = -tokens.sum() / totals.imitated_tokens
            loss = loss + config.success_imitation_coef * terms["success_imitation_loss"]
        if out.auxiliary_loss is not None:
            terms["auxiliary_loss"] = (out.auxiliary_loss * rows.counts).sum() / totals.rows
            loss = loss + terms["auxiliary_loss"]
        if value_only:
            loss = torch.zeros_like(loss)
        if rows.returns is not None and rows.old_value is not None and out.value is not None:
            value, clip, delta = out.value.float(), config.value_clip, config.value_huber_delta
            value_losses = losses.value_loss(value, rows.returns, rows.old_value, clip, delta)
            terms["value_loss"] = (value_losses * rows.counts).sum() / totals.rows
            loss = loss + config.value_coef * terms["value_loss"]
        return Losses(loss, terms | {"loss": loss}, log_ratio, active, mask)

    def _clipped(
        self, out: PolicyEvaluation, rows: Rows, log_ratio: Tensor
    ) -> tuple[Tensor, Tensor]:
        """PPO's surrogate per entry, with what the policy says of its entries' advantage and
        clip range."""
        config, advantages = self.config, rows.advantages[:, None]
        clip_low: float | Tensor = config.clip_low
        clip_high: float | Tensor = config.clip_high
        if out.advantage_weight is not None:
            advantages = advantages * self.at_level(out.advantage_weight, rows.learn, "mean")[0]
        if out.clip_scale is not None:
            scale = self.at_level(out.clip_scale, rows.learn, "mean")[0]
            clip_low, clip_high = clip_low * scale, clip_high * scale
        return losses.policy_loss(log_ratio, advantages, clip_low, clip_high, config.dual_clip)
