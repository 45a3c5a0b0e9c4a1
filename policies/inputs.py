"""What policies ask of an embodiment, an observation, demonstrations and a stored config, in the
same words."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.types import CameraSpec, EmbodimentSpec, Observation

WORDS = 32  # bins that the instruction's words are hashed into


def flat_size(embodiment: EmbodimentSpec, pixels: int) -> int:
    """How many numbers `flat_inputs` makes of an observation."""
    return 3 * pixels**2 * len(embodiment.cameras) + embodiment.proprio_dim + WORDS


def flat_inputs(observation: Observation, embodiment: EmbodimentSpec, pixels: int) -> Tensor:
    """All of an observation for a network that reads a vector, float32 [b f]: pictures of
    ``pixels`` a side (0 … 1), proprio as it stands there, hashed words."""
    images = [
        observation.images[name].permute(0, 3, 1, 2) / 255.0 for name in embodiment.camera_names
    ]
    pooled = [adaptive_avg_pool2d(image, pixels).flatten(1) for image in images]
    words = _hashed_words(observation.instruction).to(observation.proprio)
    return torch.cat([*pooled, observation.proprio, words], dim=1)


def squared_error(
    mine: Tensor, actions: Tensor, valid: Tensor, unit: Tensor | float = 1.0
) -> tuple[Tensor, dict[str, float]]:
    """`imitation_loss` of a policy that says one chunk [b h a]: the mean over the control steps
    that count, in units of ``unit``."""
    actions, valid = actions.to(mine.device), valid.to(mine.device)
    error = ((mine - actions) / unit).square().mean(-1)
    loss = (error * valid).sum() / valid.sum().clamp(min=1)
    return loss, {"mse": float(loss.detach())}


def _hashed_words(instructions: Sequence[str]) -> Tensor:
    words = torch.zeros(len(instructions), WORDS)
    for row, text in zip(words, instructions):
        for word in text.split():
            row[zlib.crc32(word.encode()) % WORDS] = 1.0
    return words


def chosen_cameras(names: Sequence[str], embodiment: EmbodimentSpec) -> tuple[CameraSpec, ...]:
    """Those of ``policy.cameras`` in its order, none where it is empty. `EmbodimentMismatch` for
    one that the embodiment lacks, or where it has none."""
    known = {camera.name: camera for camera in embodiment.cameras}
    if not known:
        raise EmbodimentMismatch(
            f"{embodiment.name} has no camera, and this policy looks at pictures: use policy=small, "
            "or data and a robot with a camera that shows colours"
        )
    if missing := [name for name in names if name not in known]:
        raise EmbodimentMismatch(
            f"policy.cameras asks for {missing} but embodiment {embodiment.name} has {list(known)}: "
            "name cameras of this embodiment"
        )
    return tuple(known[name] for name in names)


def require_proprio(observation: Observation, embodiment: EmbodimentSpec) -> None:
    """`EmbodimentMismatch` for another number of dimensions than the robot's."""
    if observation.proprio.shape[1] != embodiment.proprio_dim:
        raise EmbodimentMismatch(
            f"the policy reads {embodiment.proprio_dim} proprio dimensions "
            f"({', '.join(embodiment.proprio_names)}), the observation has "
            f"{observation.proprio.shape[1]}"
        )


def require_chunk(actions: Tensor, chunk_length: int, embodiment: EmbodimentSpec) -> None:
    """`EmbodimentMismatch` for demonstrations [b h a] of another length than a decision's."""
    if tuple(actions.shape[1:]) != (chunk_length, embodiment.action_dim):
        raise EmbodimentMismatch(
            f"imitation_loss got actions {tuple(actions.shape)}, this policy predicts chunks "
            f"of {chunk_length} x {embodiment.action_dim}: set policy.chunk_length to the data's"
        )


def require_known(keys: Iterable[str], config_class: type) -> None:
    """`ConfigError` for what a checkpoint's policy config has and ``config_class`` lacks."""
    unknown = sorted(set(keys) - {f.name for f in fields(config_class)})
    if unknown:
        raise ConfigError(
            f"the checkpoint's policy config has unknown keys {unknown}: it needs a newer vla_rl"
        )
