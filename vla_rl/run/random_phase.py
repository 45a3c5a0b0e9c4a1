"""The phase of a run that starts from nothing: a policy with random weights, made for what episodes
of random actions show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vla_rl import build
from vla_rl.assembly.context import Run
from vla_rl.checkpoint import save_checkpoint
from vla_rl.data.demonstrations import short_statistics
from vla_rl.data.lerobot_writer import feature_statistics
from vla_rl.interfaces import Policy
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.splits import stable_seed
from vla_rl.types import ActionChunk, EmbodimentSpec, EpisodeSpec, Observation, PolicyOutput

EPISODES = 8  # in all, or one of each task


class _RandomActions(Policy):
    """Acts at random within the bounds, whatever it sees."""

    chunk_length = 10  # few pictures

    def __init__(self, embodiment: EmbodimentSpec) -> None:
        self.embodiment = embodiment

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        low, high = self.embodiment.action_low, self.embodiment.action_high
        shape = (self.chunk_length, len(low))
        rows = [
            np.random.default_rng(seed).uniform(low, high, shape)
            for seed in (range(len(observation)) if seeds is None else seeds)
        ]
        actions = torch.as_tensor(np.stack(rows), dtype=torch.float32)
        chunk = ActionChunk(actions, torch.ones(actions.shape[:2], dtype=torch.bool))
        return PolicyOutput(chunk, torch.zeros(len(rows)), {})


def phase_random(run: Run) -> dict[str, Any]:
    c, env = run.config, run.env
    if c.checkpoint:
        return {"skipped": "a checkpoint was given"}
    each = -(-EPISODES // len(run.train_tasks))
    episodes = [
        EpisodeSpec(task.task_id, i, split="train", seed=stable_seed("random", c.seed, i))
        for task in run.train_tasks
        for i in range(each)
    ]
    seen = RolloutEngine(env, _RandomActions(env.embodiment)).collect(episodes).trajectories
    actions = torch.cat([t.actions[t.valid] for t in seen])
    proprio = torch.cat([t.observations.proprio for t in seen])
    torch.manual_seed(c.seed)
    policy = Policy.class_of(build.implementation("policy", c.policy_type)).from_statistics(
        c.policy, env.embodiment, statistics(actions), unmoved_alike(statistics(proprio))
    )
    save_checkpoint(run.dir / "checkpoints" / "random", policy, keep_last_good=False)
    return {"episodes": len(episodes), "control_steps": len(actions)}


def statistics(rows: torch.Tensor) -> dict[str, list[float]]:
    """Of ``rows`` [n d], as policies are made for."""
    return short_statistics(feature_statistics(rows.numpy()))


def unmoved_alike(stats: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same, with no standard deviation below the median: what random actions hardly move, such
    as objects, a policy that has learned will move."""
    floor = float(np.median(stats["std"] or [1.0]))
    return stats | {"std": [max(std, floor) for std in stats["std"]]}
