"""From a progress curve to rewards per decision. Φ is float32 [t+1]: before each decision, and
at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reward_models.settings import GAMMA_OF_ALGORITHM, ShapingConfig
from vla_rl.interfaces import RewardModel
from vla_rl.types import Trajectory


def potential_rewards(potential: Tensor, discounts: Tensor, keep_end: bool) -> Tensor:
    """γ·Φ(s′) − Φ(s) float32 [t] from Φ [t+1] and the discount of each decision [t].

    Without ``keep_end`` the last Φ counts as 0, so that the discounted sum is −Φ(s₀) whatever the
    policy does.
    """
    after = potential[1:].clone()
    if not keep_end:
        after[-1] = 0.0
    return discounts * after - potential[:-1]


def shaped_reward(trajectory: Trajectory, potential: Tensor, config: ShapingConfig) -> Tensor:
    """Reward per decision float32 [t]; a potential that is not finite pays nothing beside the
    success.

    A potential whose discount counts control steps is worth γ^k·Φ(s′) − Φ(s) as the decision is
    made, k steps before s′, and not at its end: [t h], it stands in the first control step and the
    success in the last.
    """
    reward, first = torch.zeros(len(trajectory)), None
    if bool(potential.isfinite().all()):
        if config.mode == "potential":
            gamma = 1.0 if config.gamma == GAMMA_OF_ALGORITHM else config.gamma
            steps = (
                trajectory.valid.sum(1)
                if config.gamma_per_control_step
                else torch.ones(len(trajectory))
            )
            keep = trajectory.truncated and config.truncated_end == "keep"
            reward = potential_rewards(potential.float(), gamma**steps, keep)
            if config.gamma_per_control_step:
                reward, first = torch.zeros(len(trajectory)), reward
        elif config.mode == "delta":
            reward = potential[1:].float() - potential[:-1].float()
        else:
            reward[-1] = float(potential[-1])
    reward = config.weight * reward
    reward[-1] += config.success_coefficient * float(trajectory.success)
    if first is None:
        return reward
    steps = trajectory.in_last_steps(reward)
    steps[:, 0] += config.weight * first
    return steps


class ShapedProgress(RewardModel):
    """Base of the rewards that pay along a progress curve: curves computed ahead, shaping, figures.

    A subclass gives `progress` (float32 [t+1] per trajectory) and may add to `score_figures`;
    ``config.shaping`` says what pays.
    """

    config: Any

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}
        # rollout id → progress curve, computed while others still simulated
        self._prepared: dict[str, Tensor] = {}

    def prepare(self, trajectory: Trajectory) -> None:
        """Compute the curve of a trajectory ahead of `score`."""
        self._prepared[trajectory.rollout_id] = self.progress([trajectory])[0]

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Rewards as ``shaping`` says (`shaped_reward`); an invalid curve pays nothing beside
        the success."""
        if not trajectories:
            return []
        todo = [t for t in trajectories if t.rollout_id not in self._prepared]
        found = self._prepared | {t.rollout_id: c for t, c in zip(todo, self.progress(todo))}
        self._prepared = {}
        curves = [found[t.rollout_id] for t in trajectories]
        self._metrics = self.score_figures(trajectories, curves)
        return [shaped_reward(t, c, self.config.shaping) for t, c in zip(trajectories, curves)]

    def score_figures(
        self, trajectories: Sequence[Trajectory], curves: Sequence[Tensor]
    ) -> dict[str, float]:
        """What a `score` logs."""
        return {
            "reward/progress_end": float(torch.stack([c[-1] for c in curves]).nanmean()),
            "reward/invalid_share": sum(not bool(c.isfinite().all()) for c in curves) / len(curves),
        }

    def metrics(self) -> dict[str, float]:
        """Figures of the last `score`."""
        return dict(self._metrics)
