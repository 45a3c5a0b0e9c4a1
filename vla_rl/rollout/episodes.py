"""Episodes on initial states that a policy may be trained on, and their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec, Trajectory


def rollout_episodes(
    tasks: Sequence[TaskSpec], episodes: int, seed: int, name: str = "reward"
) -> list[EpisodeSpec]:
    """Episodes on initial states of the train split, spread over the tasks; their ids are unique
    per name and seed."""
    out = []
    for i in range(episodes):
        task = tasks[i % len(tasks)]
        state = stable_seed(name, seed, i) % 1_000_000
        text = stable_seed(name, "text", seed, i) % max(1, len(task.instructions))
        rollout_id = f"{name}-{seed}-{i}"
        out.append(
            EpisodeSpec(
                task.task_id,
                state,
                "train",
                stable_seed(name, "seed", seed, i),
                i,
                text,
                rollout_id,
            )
        )
    return out


def roll_out(
    engine: Any,
    tasks: Sequence[TaskSpec],
    episodes: int,
    seed: int,
    progress: Any = None,
    name: str = "reward",
) -> tuple[list[Trajectory], int]:
    """(trajectories, control steps) of sampled actions on training initial states."""
    result = engine.collect(rollout_episodes(tasks, episodes, seed, name), progress=progress)
    return result.trajectories, int(result.stats["control_steps"])
