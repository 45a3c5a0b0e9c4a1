"""Which episodes an iteration runs, and what the curriculum hears of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.config.run import RLConfig
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec, Trajectory

UNLIMITED = -1  # the curriculum item that stands for fresh initial states of a task
UNLIMITED_INIT_STATES = 1_000_000


def propose_episodes(
    config: RLConfig,
    curriculum: Curriculum,
    tasks: Sequence[TaskSpec],
    iteration: int,
    sampling_round: int,
    seed: int,
) -> list[EpisodeSpec]:
    """One round of episodes: ``group_size`` rollouts of each (task, initial state) the
    curriculum picks."""
    generator = torch.Generator().manual_seed(
        stable_seed("episodes", seed, iteration, sampling_round)
    )
    by_id = {task.task_id: task for task in tasks}
    episodes = []
    items = curriculum.propose(config.episodes_per_iteration // config.group_size, generator)
    for group, (task_id, init_state_id) in enumerate(items):
        if init_state_id == UNLIMITED:
            init_state_id = int(torch.randint(UNLIMITED_INIT_STATES, (1,), generator=generator))
        instruction = int(
            torch.randint(len(by_id[task_id].instructions), (1,), generator=generator)
        )
        for member in range(config.group_size):
            episodes.append(
                EpisodeSpec(
                    task_id=task_id,
                    init_state_id=init_state_id,
                    split="train",
                    seed=stable_seed("rollout", seed, iteration, sampling_round, group, member),
                    # batches may hold episodes of several iterations
                    group_id=iteration * len(items) + group,
                    instruction_index=instruction,
                    rollout_id=f"{seed}-{iteration}-{sampling_round}-{group}-{member}",
                )
            )
    return episodes


def record_outcomes(curriculum: Curriculum, trajectories: Sequence[Trajectory]) -> None:
    """Tell the curriculum each group's successes."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.episode.group_id, []).append(trajectory)
    for members in groups.values():
        episode = members[0].episode
        item = (episode.task_id, episode.init_state_id)
        if item not in curriculum:  # unlimited initial states: one item per task
            item = (episode.task_id, UNLIMITED)
        curriculum.record(item, sum(t.success for t in members), len(members))
