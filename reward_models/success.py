"""Rewards that are in the episodes already: sparse task success, with which every run starts, and
what the env itself gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reward_models.settings import EnvRewardConfig, TaskSuccessConfig
from vla_rl.interfaces import RewardModel
from vla_rl.types import Trajectory


class TaskSuccess(RewardModel):
    """Reward on the last decision of a successful trajectory, 0 elsewhere."""

    reads_frames = False

    def __init__(self, config: TaskSuccessConfig):
        self.config = config

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t] per trajectory."""
        rewards = []
        for trajectory in trajectories:
            reward = torch.zeros(len(trajectory))
            if trajectory.success:
                discount = self.config.time_discount ** (
                    trajectory.num_control_steps + len(trajectory.episode.lead)
                )
                reward[-1] = self.config.coefficient * discount
            rewards.append(reward)
        return rewards


class EnvReward(RewardModel):
    """What the env gave at each control step."""

    reads_frames = False

    def __init__(self, config: EnvRewardConfig):
        self.config = config

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t h] per trajectory."""
        return [self.config.coefficient * trajectory.rewards for trajectory in trajectories]
