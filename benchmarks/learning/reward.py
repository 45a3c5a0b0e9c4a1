"""`vla-rl bench reward`: how fast reward models score, and which share of a run's iterations
waits for scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import timed
from vla_rl.config import compose
from vla_rl.errors import UserError
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.options import RewardOptions, view
from vla_rl.rewards.build import build_reward
from vla_rl.rewards.handle import is_fitted
from vla_rl.types import EpisodeSpec, Observation, Trajectory

BENCHED = ("success", "srpo", "pairwise", "process", "classifier", "value_progress")


def measure(
    overrides: Sequence[str],
    episodes: int,
    decisions: int,
    size: int,
    run: Path | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """Frames/s of scoring ``episodes`` trajectories (best of ``repeats``; embeddings not cached) by
    each ``reward=`` among the overrides, and, of a ``run``, the share of its iterations that waited
    for scores."""
    named = [o for o in overrides if o.startswith("reward=")]
    options = [o for o in overrides if not o.startswith("reward=")]
    configs = [
        compose(["~run", choice, *options])
        for choice in named or [f"reward={name}" for name in BENCHED]
    ]
    frames = episodes * (decisions + 1)
    document: dict[str, Any] = {
        "episodes": episodes,
        "frames": frames,
        "pixels": size,
        "rewards": {},
    }
    if run is not None:
        document["run"] = {"folder": str(run), **scoring_share(run)}
    for config in configs:
        reward = _ready(config.reward_type, config.reward, decisions, size)
        best = min(
            timed(
                reward.score, synthetic_trajectories(episodes, decisions, size, seed=100 + i)
            ).wall
            for i in range(repeats)
        )
        other = None if run is None else document["run"]["iteration_seconds"]
        document["rewards"][config.reward_type] = {
            "seconds": best,
            "frames_per_second": frames / best,
            "share_of_iteration": None if other is None else best / (best + other),
        }
    return document


def text(document: Mapping[str, Any]) -> str:
    lines, run = [], document.get("run")
    for kind, row in document["rewards"].items():
        of = f"of an iteration of {run['folder']}, if not overlapped" if run else ""
        share = f", {row['share_of_iteration']:.1%} {of}" if run else ""
        lines.append(
            f"{kind:<16} {row['seconds'] * 1e3:>9.1f} ms for {document['episodes']} "
            f"episodes, {row['frames_per_second']:>9.0f} frames/s{share}"
        )
    if run:
        lines.append(
            f"{run['folder']}: {run['share']:.1%} of an iteration "
            f"({run['iteration_seconds']:.1f} s) waited for scores, "
            f"{run['overlapped_seconds']:.2f} s were scored meanwhile"
        )
    return "\n".join(lines)


def _ready(kind: str, config: Any, decisions: int, size: int) -> Any:
    """A reward that can score: what it learns of noise does not matter, how fast it scores does."""
    options = view(config, RewardOptions)
    if options.updates is not None:
        config = dataclasses.replace(config, updates=1)
    if options.milestones is not None:  # the synthetic robot's dimensions have no names
        named = dataclasses.replace(options.milestones, gripper=[3], position=[0, 1, 2])
        config = dataclasses.replace(config, milestones=named)
    reward = build_reward(kind, config)
    if reward.learned and not is_fitted(reward):
        reward.fit(synthetic_trajectories(8, decisions, size, seed=1))
    return reward


def synthetic_trajectories(
    count: int, decisions: int, size: int, seed: int = 0
) -> list[Trajectory]:
    """Trajectories of noise, half of them successes, with one camera of ``size`` pixels."""
    generator = torch.Generator().manual_seed(seed)

    def observation(n: int) -> Observation:
        images = torch.randint(0, 256, (n, size, size, 3), generator=generator, dtype=torch.uint8)
        return Observation(
            {"camera": images}, torch.rand(n, 4, generator=generator), ("move the thing",) * n
        )

    return [
        Trajectory(
            episode=EpisodeSpec("bench", i, group_id=i, rollout_id=f"bench-{seed}-{i}"),
            observations=observation(decisions),
            final_observation=observation(1),
            actions=torch.zeros(decisions, 8, 7),
            valid=torch.ones(decisions, 8, dtype=torch.bool),
            rewards=torch.zeros(decisions, 8),
            behavior_log_prob=torch.zeros(decisions),
            replay={},
            terminated=i % 2 == 0,
            truncated=i % 2 == 1,
            success=i % 2 == 0,
        )
        for i in range(count)
    ]


def scoring_share(run: Path) -> dict[str, float]:
    """Mean seconds of a run's iterations (rollout, scoring, update), and the share of scoring,
    from its metrics."""
    rows = [
        r
        for r in read_metrics(run / METRICS_FILE)
        if r["phase"] == "rl" and r.get("time/reward") is not None
    ]
    if not rows:
        raise UserError(
            f"{run} has no iterations of RL in its {METRICS_FILE}: name a run whose "
            "phase rl has begun"
        )
    mean = {
        k: float(np.mean([r.get(k) or 0.0 for r in rows]))
        for k in ("time/reward", "time/update", "engine/seconds")
    }
    overlapped = float(np.mean([r.get("time/reward_overlapped") or 0.0 for r in rows]))
    total = sum(mean.values())
    return {
        "iteration_seconds": total,
        "share": mean["time/reward"] / total,
        "overlapped_seconds": overlapped,
    }
