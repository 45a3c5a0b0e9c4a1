"""Sparse task success, the reward every run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.errors import ConfigError
from vla_rl.types import Trajectory


@dataclass
class TaskSuccessConfig:
    """``coefficient`` is the reward of a success (SimpleVLA-RL: 5). ``time_discount`` < 1 multiplies it by
    ``time_discount ** control_steps``, so that faster successes earn more."""

    coefficient: float = 1.0
    time_discount: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.time_discount <= 1.0:
            raise ConfigError(f"reward.time_discount must be in (0, 1], got {self.time_discount}")


class TaskSuccess:
    """Reward on the last decision of a successful trajectory, 0 elsewhere."""

    def __init__(self, config: TaskSuccessConfig):
        self.config = config

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t] per trajectory."""
        rewards = []
        for trajectory in trajectories:
            reward = torch.zeros(len(trajectory))
            if trajectory.success:
                discount = self.config.time_discount**trajectory.num_control_steps
                reward[-1] = self.config.coefficient * discount
            rewards.append(reward)
        return rewards
