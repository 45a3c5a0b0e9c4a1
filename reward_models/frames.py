"""What reward models read of a trajectory: the frames of one camera, and the text of its
instruction."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.errors import UserError
from vla_rl.types import Trajectory


def camera_of(trajectory: Trajectory, wanted: str, owner: str = "reward.camera") -> str:
    """The camera to read: ``wanted``, or the trajectory's first one for "". Raises
    `UserError` without it."""
    cameras = list(trajectory.observations.images)
    if not cameras or (wanted and wanted not in cameras):
        raise UserError(
            f"{owner}={wanted!r}: rollout {trajectory.rollout_id} of task "
            f"{trajectory.episode.task_id!r} has the cameras {', '.join(cameras) or 'none'}. Name "
            "one of them, or let the env render the camera the reward model wants."
        )
    return wanted or cameras[0]


def frames_of(trajectory: Trajectory, camera: str = "", owner: str = "reward.camera") -> Tensor:
    """What one camera saw at each decision and at the end: uint8 [t+1 H W 3]."""
    name = camera_of(trajectory, camera, owner)
    return torch.cat(
        [trajectory.observations.images[name], trajectory.final_observation.images[name]]
    )


def instruction_of(trajectory: Trajectory) -> str:
    return trajectory.observations.instruction[0]


def reward_at_end(trajectory: Trajectory, value: float) -> Tensor:
    """``value`` on the last decision, 0 before: float32 [t]."""
    reward = torch.zeros(len(trajectory))
    reward[-1] = value
    return reward
