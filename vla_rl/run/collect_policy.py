"""Demonstrations by a trained policy: its successes, of which the smoothest are kept, as a
LeRobotDataset v3.

What RL learned becomes data for SFT: of the policy beneath a residual (PLD, arXiv 2511.00091), or
of any other. In hybrid rollouts that policy acts first, and the data say who chose which control
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.config.run import CollectConfig
from vla_rl.data.lerobot_format import BY_BASE, SENT_KEY
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import mean_jerk
from vla_rl.interfaces import Env, Policy, RememberingPolicy
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.rollout.handover import Handover
from vla_rl.rollout.stepwise import ASKED, Disturbed, Stepwise
from vla_rl.splits import stable_seed
from vla_rl.types import EmbodimentSpec, EpisodeSpec, TaskSpec, Trajectory

_FEWEST = 0.1  # of the attempts that must succeed


def collect_with_policy(
    env: Env,
    policy: Policy,
    tasks: Sequence[TaskSpec],
    config: CollectConfig,
    *,
    seed: int,
    dataset: Callable[..., DemonstrationWriter],
    progress: Callable[..., None],
) -> dict[str, Any]:
    """Write ``episodes_per_task`` successes of ``policy`` for each task; initial states are 0, 1, 2
    … of the train split, into what ``dataset(robot, extra=...)`` opens.

    There are ``oversample`` times as many to choose from, and those of the smallest jerk are kept.
    Which ones depends on the seed, not on the number of slots. Returns counts. Raises `UserError`
    where fewer than one attempt in ten succeeds, or where ``base_share`` asks for a policy beneath
    and there is none.
    """
    if config.base_share and Policy.of(policy).beneath() is None:
        raise UserError(
            f"collect.base_share={config.base_share} lets the frozen policy beneath act first, and "
            f"the checkpoint collect.policy={config.policy} has none beneath it: name one that RL "
            "trained with actor=residual, or leave base_share at 0"
        )
    counts = {"episodes": 0, "attempts": 0, "control_steps": 0}
    extra = {SENT_KEY: env.embodiment.action_names} | (
        {BY_BASE: [BY_BASE]} if config.base_share else {}
    )
    with dataset(env.embodiment, extra=extra) as writer:
        for task in tasks:
            wanted = config.episodes_per_task
            engine = RolloutEngine(env, _acting(policy, config, task))
            found, tried = _successes(engine, task, config, seed, round(wanted * config.oversample))
            counts["attempts"] += tried
            for trajectory in sorted(
                _smoothest(found, wanted, env.embodiment), key=lambda t: t.episode.init_state_id
            ):
                _write(writer, trajectory, _labels(trajectory, env.embodiment))
                counts["episodes"] += 1
                counts["control_steps"] += len(trajectory)
                progress(counts["episodes"], success=f"{len(found)}/{tried}")
    return counts


def _acting(policy: Any, config: CollectConfig, task: TaskSpec) -> Policy:
    """The policy one control step at a time; with ``base_share`` after the one beneath it, with
    ``policy_noise`` disturbed."""
    steps: RememberingPolicy = (
        Handover(policy.beneath(), policy, round(config.base_share * task.horizon))
        if config.base_share
        else Stepwise(policy)
    )
    return Disturbed(steps, config.policy_noise) if config.policy_noise else steps


def _labels(trajectory: Trajectory, spec: EmbodimentSpec) -> Tensor:
    """What the policy asked for in each control step [t a], within the bounds."""
    asked = trajectory.replay.get(ASKED)
    if asked is None:
        return trajectory.actions[:, 0]
    return asked[:, 0].clamp(torch.tensor(spec.action_low), torch.tensor(spec.action_high))


def _successes(
    engine: RolloutEngine, task: TaskSpec, config: CollectConfig, seed: int, count: int
) -> tuple[list[Trajectory], int]:
    """``count`` successes, and the number of attempts."""
    found: list[Trajectory] = []
    tried = 0
    while len(found) < count:
        size = max(engine.env.num_slots, count - len(found))
        episodes = [_episode(task, seed, tried + i) for i in range(size)]
        result = engine.collect(episodes, deterministic=not config.sample)
        found += [t for t in result.trajectories if t.success]
        tried += size
        if tried >= 20 and len(found) < _FEWEST * tried:
            raise UserError(
                f"the policy solved only {len(found)} of {tried} episodes of task "
                f"{task.task_id!r}: it is no demonstrator. Train it further, or leave the task out "
                "of tasks=[…]"
            )
    return found[:count], tried


def _episode(task: TaskSpec, seed: int, index: int) -> EpisodeSpec:
    return EpisodeSpec(
        task.task_id,
        index,
        "train",
        stable_seed("collect", seed, task.task_id, index),
        instruction_index=index % max(1, len(task.instructions)),
        rollout_id=f"collect-{task.task_id}-{index}",
    )


def _smoothest(found: Sequence[Trajectory], count: int, spec: EmbodimentSpec) -> list[Trajectory]:
    """The ``count`` of smallest mean jerk."""
    return sorted(found, key=lambda t: mean_jerk(_labels(t, spec).numpy(), spec) or 0.0)[:count]


def _write(writer: DemonstrationWriter, trajectory: Trajectory, labels: Tensor) -> None:
    seen = trajectory.observations
    extra = {SENT_KEY: trajectory.actions[:, 0].numpy()}
    if BY_BASE in trajectory.replay:
        extra[BY_BASE] = trajectory.replay[BY_BASE][:, None].float().numpy()
    writer.add_episode(
        {name: images.numpy() for name, images in seen.images.items()},
        seen.proprio.numpy(),
        labels.numpy(),
        seen.instruction[0],
        success=trajectory.success,
        task_id=trajectory.episode.task_id,
        init_state_id=trajectory.episode.init_state_id,
        extra=extra,
    )
