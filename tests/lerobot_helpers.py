"""A robot, its observations and a language backbone of a few thousand parameters, for tests of
lerobot's policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import random_observation

from benchmarks.learning.backbones import write_smolvlm
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.types import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    RolloutBatch,
    Trajectory,
)

SIZE, PROPRIO, ACTIONS, CHUNK = 32, 5, 3, 4
PI0_SIZES = {
    "width": 32,
    "mlp": 48,
    "depth": 2,
    "head_dim": 4,
    "expert_width": 16,
    "expert_mlp": 24,
    "vision_width": 16,
    "vision_mlp": 24,
    "vision_depth": 1,
    "vision_heads": 2,
    "vocabulary": 544,
}
SPEC = EmbodimentSpec(
    name="arm",
    action_names=("x", "y", "grip"),
    action_units=("m", "m", "1"),
    action_low=(-1.0,) * 3,
    action_high=(1.0,) * 3,
    frame="base",
    rotation="none",
    gripper="0 close, 1 open",
    control_hz=10.0,
    cameras=(CameraSpec("front", SIZE, SIZE), CameraSpec("wrist", SIZE, SIZE)),
    proprio_names=tuple("abcde"),
)
STATS = {
    "action": {
        "low": [-0.5, -0.4, 0.0],
        "high": [0.5, 0.6, 1.0],
        "mean": [0.1, 0.0, 0.5],
        "std": [0.2, 0.3, 0.4],
    },
    "observation.state": {
        "low": [-2.0] * 5,
        "high": [2.0] * 5,
        "mean": [0.1] * 5,
        "std": [1.5] * 5,
    },
}
for _values in STATS.values():
    _values |= {"q01": _values["low"], "q99": _values["high"]}


def write_vlm(folder: Path) -> None:
    write_smolvlm(folder, width=32, side=SIZE, patch=8)


def observation(b: int = 3, seed: int = 0) -> Observation:
    base = random_observation(SPEC, b, seed)
    texts = ("pick it up", "open the drawer", "go")
    return Observation(base.images, base.proprio, tuple(texts[i % 3] for i in range(b)))


def lerobot_batch(obs: Observation) -> dict[str, Any]:
    images = {
        f"observation.images.{k}": v.permute(0, 3, 1, 2).float() / 255
        for k, v in obs.images.items()
    }
    return {**images, "observation.state": obs.proprio, "task": list(obs.instruction)}


def copy_of(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with some of its settings changed."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(settings))
    return target


def four_rollouts(policy: Any) -> list[Trajectory]:
    """Of one decision each from one start; the first two succeed."""
    obs = Observation.cat([observation(1)] * 4)
    with torch.inference_mode():
        output = policy.act(obs, seeds=[1, 2, 3, 4])
    return [
        Trajectory(
            episode=EpisodeSpec("t", 0, seed=i, group_id=0),
            observations=obs[i : i + 1],
            final_observation=obs[i : i + 1],
            actions=output.chunk.actions[i : i + 1].clone(),
            valid=output.chunk.valid[i : i + 1].clone(),
            rewards=torch.zeros(1, CHUNK),
            behavior_log_prob=output.behavior_log_prob[i : i + 1].clone(),
            replay={k: v[i : i + 1].clone() for k, v in output.replay.items()},
            terminated=True,
            truncated=False,
            success=i < 2,
        )
        for i in range(4)
    ]


def grpo_makes_the_better_likelier(policy: Any) -> None:
    """Four rollouts of one start: before the first step ratios are 1, after it the better
    actions are likelier."""
    batch = RolloutBatch.from_trajectories(four_rollouts(policy))
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    config = PPOConfig(
        advantage="grpo",
        ratio_level="chunk",
        epochs=1,
        minibatch_size=4,
        learning_rate=1e-5,
        grad_clip=None,
    )
    metrics = PPO(config, policy).update(batch, rewards)
    assert metrics["ppo/behavior_gap_max"] < 1e-3 and metrics["ppo/ratio_max"] == pytest.approx(
        1.0, abs=1e-4
    )
    with torch.no_grad():
        now = policy.evaluate(Observation.cat([observation(1)] * 4), batch.replay).log_prob
        change = (now - batch.behavior_log_prob)[:, :, :3].sum((1, 2, 3))
    assert change[:2].sum() > change[2:].sum()
