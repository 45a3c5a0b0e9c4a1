"""The reward of a run, as it is configured and as the run has trained it, and what it learns
from."""

from __future__ import annotations

import copy
from typing import Any

from vla_rl.assembly.context import REWARD_FOLDER, Run, split_demonstrations
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.data.trajectories import demonstration_trajectories
from vla_rl.rewards.build import RewardContext, build_reward, load_reward, reads_policy
from vla_rl.types import Trajectory


def start_reward(run: Run, policy: Any) -> Any:
    """The configured reward, with the run's demonstrations where it wants some."""
    c = run.config
    reward = build_reward(c.reward_type, seeded(c.reward, c.seed), reward_context(run, policy))
    if reward.wants_demonstrations:
        reward.set_demonstrations(reward_demonstrations(run))
    return reward


def trained_reward(run: Run, policy: Any) -> Any:
    """The configured reward as phase reward trained it."""
    reward = start_reward(run, policy)
    if reward.learned and (run.dir / REWARD_FOLDER).is_dir():
        load_reward(run.dir / REWARD_FOLDER, run.config.reward_type, reward)
    return reward


def reward_demonstrations(run: Run) -> list[Trajectory]:
    """The run's demonstrations as trajectories; none where it starts from a checkpoint without a
    dataset."""
    c = run.config
    if not c.reward_check.demonstrations or not run.has_dataset:
        return []
    dataset, _ = split_demonstrations(run, failures=True)
    check = c.reward_check
    return demonstration_trajectories(
        dataset, stride=check.stride, limit=check.demonstrations, seed=c.seed
    )


def reward_context(run: Run, policy: Any) -> RewardContext:
    """A copy of the policy serves image features: those of the policy itself would drift while
    it learns."""
    frozen = copy.deepcopy(policy) if reads_policy(run.config.reward) else None
    return RewardContext(
        run.config.algorithm, run.env.embodiment, frozen, run.config.reward_check.stride
    )
