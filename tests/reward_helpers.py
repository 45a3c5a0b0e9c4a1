"""Trajectories with pictures, made by hand: a bright square that moves to the right shows
progress."""

from __future__ import annotations

import torch

from vla_rl.types import EpisodeSpec, Observation, Trajectory


def picture(position: float, size: int = 24, noise: float = 0.0) -> torch.Tensor:
    """uint8 [size size 3] with a white bar whose column says how far things are (0 … 1)."""
    image = torch.full((size, size, 3), 20, dtype=torch.uint8)
    column = round(position * (size - 5))
    image[4:-4, column : column + 5] = 230
    if noise:
        image = (image.float() + noise * torch.randn(size, size, 3)).clamp(0, 255).to(torch.uint8)
    return image


def trajectory(
    positions: list[float],
    success: bool = True,
    *,
    rollout_id: str | None = None,
    task: str = "slide",
    group: int = 0,
    camera: str = "front",
    instruction: str = "slide the bar",
    noise: float = 0.0,
    truncated: bool | None = None,
    felt: bool = True,
) -> Trajectory:
    """An episode whose frames (decisions and the end) show these positions; proprio [3] is gripper,
    x, y; 0 where the arm does not feel them (``felt``)."""
    frames = torch.stack([picture(p, noise=noise) for p in positions])
    t = len(positions) - 1
    proprio = torch.tensor([[float(p > 0.5), p, 0.0] for p in positions]) * float(felt)
    spec = {} if rollout_id is None else {"rollout_id": rollout_id}
    truncated = (not success) if truncated is None else truncated

    def observe(rows: slice) -> Observation:
        return Observation(
            {camera: frames[rows]}, proprio[rows], (instruction,) * len(frames[rows])
        )

    return Trajectory(
        episode=EpisodeSpec(task, 0, group_id=group, **spec),
        observations=observe(slice(0, t)),
        final_observation=observe(slice(t, t + 1)),
        actions=torch.zeros(t, 2, 3),
        valid=torch.ones(t, 2, dtype=torch.bool),
        rewards=torch.zeros(t, 2),
        behavior_log_prob=torch.zeros(t),
        replay={},
        terminated=not truncated,
        truncated=truncated,
        success=success,
    )


def episodes(
    count: int = 20, length: int = 8, seed: int = 0, noise: float = 4.0, felt: bool = True
) -> list[Trajectory]:
    """Half successes that go all the way at differing speeds, half failures that turn back."""
    shown = {"noise": noise, "felt": felt}
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        n = length + int(torch.randint(0, 4, (1,), generator=generator))
        steps = torch.linspace(0, 1, n)
        if i % 2 == 0:
            out.append(
                trajectory(
                    steps.tolist(), True, rollout_id=f"win-{seed}-{i}", **shown, group=i // 4
                )
            )
        else:
            peak = 0.3 + 0.4 * float(torch.rand(1, generator=generator))
            path = peak * (1 - (2 * steps - 1).abs())
            out.append(
                trajectory(
                    path.tolist(), False, rollout_id=f"loss-{seed}-{i}", **shown, group=i // 4
                )
            )
    return out
