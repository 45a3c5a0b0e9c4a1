"""What is in a run's replay before its first episode: demonstrations, and episodes of other
runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_rl.assembly.context import Run, split_demonstrations
from vla_rl.assembly.reward import trained_reward
from vla_rl.data.recorded import recorded
from vla_rl.data.replay import DEMONSTRATIONS, OFFLINE
from vla_rl.data.trajectories import each_trajectory
from vla_rl.files import replay_of
from vla_rl.learning.learners import Given
from vla_rl.rewards.handle import is_fitted
from vla_rl.types import Trajectory

_SCORED = 64  # episodes at a time


def given(run: Run, policy: Any) -> Iterator[Given]:
    """Demonstrations in the policy's own chunks, then the episodes of ``replay.offline``; they have
    what the run's reward gives them, as the others in there."""
    if not (run.has_dataset or run.config.replay.offline):
        return
    reward = trained_reward(run, policy)
    if run.has_dataset:
        dataset = split_demonstrations(run)[0]
        found = each_trajectory(dataset, stride=policy.chunk_length)
        while part := list(itertools.islice(found, _SCORED if dataset.stays_on_disk else None)):
            yield from _scored(DEMONSTRATIONS, reward, part)
    tasks = {text: task.task_id for task in run.env.tasks for text in task.instructions}
    for path in run.config.replay.offline:
        episodes = recorded(replay_of(Path(path)), policy.embodiment, policy.chunk_length, tasks)
        while part := list(itertools.islice(episodes, _SCORED)):
            yield from _scored(OFFLINE, reward, part)


def _scored(source: str, reward: Any, episodes: list[Trajectory]) -> Iterator[Given]:
    """With a robot a reward may learn on the way; until then what was labelled counts
    (`vla_rl.robot.labels`)."""
    if reward.learned and not is_fitted(reward):
        yield from ((source, trajectory) for trajectory in episodes)
        return
    for trajectory, amounts in zip(episodes, reward.score(episodes), strict=True):
        rewards = amounts if amounts.ndim == 2 else trajectory.in_last_steps(amounts)
        yield source, dataclasses.replace(trajectory, rewards=rewards)
