"""A robot of common shape and what it sees: what policies are measured on."""

from __future__ import annotations

import numpy as np
import torch

from vla_rl.types import CameraSpec, EmbodimentSpec, Observation


def bench_embodiment(
    camera_size: int = 84, cameras: int = 2, action_dim: int = 7, proprio_dim: int = 8
) -> EmbodimentSpec:
    """An arm of common shape to measure with: ``cameras`` square views, position and rotation
    deltas, a gripper."""
    names = (*(f"delta_{i}" for i in range(action_dim - 1)), "gripper")
    return EmbodimentSpec(
        name="bench_arm",
        action_names=names,
        action_units=("m",) * action_dim,
        action_low=(-1.0,) * action_dim,
        action_high=(1.0,) * action_dim,
        frame="base",
        rotation="axis_angle_delta",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=tuple(CameraSpec(f"camera_{i}", camera_size, camera_size) for i in range(cameras)),
        proprio_names=tuple(f"joint_{i}" for i in range(proprio_dim)),
    )


def bench_observation(embodiment: EmbodimentSpec, batch: int, seed: int = 0) -> Observation:
    """Random pixels and proprioception for ``batch`` rows."""
    rng = np.random.default_rng(seed)
    return Observation(
        images={
            c.name: torch.from_numpy(
                rng.integers(0, 256, (batch, c.height, c.width, 3), dtype=np.uint8)
            )
            for c in embodiment.cameras
        },
        proprio=torch.from_numpy(
            rng.normal(size=(batch, embodiment.proprio_dim)).astype(np.float32)
        ),
        instruction=("pick up the red cube and put it into the bowl",) * batch,
    )
