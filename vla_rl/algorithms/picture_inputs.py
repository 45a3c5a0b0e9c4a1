"""Pictures for actors whose encoder reads them (`ActorPolicy.reads_pictures`), shifted at random
while they learn.

DrQ (Kostrikov et al. 2020, arXiv 2004.13649) and DrQ-v2 (Yarats et al. 2021, arXiv 2107.09645):
edges are repeated and a window is cut out at random, anew for s and for s', one draw of each per
update. Acting shows pictures as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from vla_rl.algorithms.augmentation import augment
from vla_rl.config.imitation import AugmentConfig
from vla_rl.interfaces import ActorPolicy
from vla_rl.types import Observation


def on_device(frames: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: frame.to(device, non_blocking=True) for name, frame in frames.items()}


class PictureInputs:
    """What ``policy`` reads besides the frames that a replay keeps for it. ``open``: whether that
    is pictures, for its encoder or for a frozen policy beneath that decodes them anew."""

    def __init__(self, policy: ActorPolicy) -> None:
        self._actor = policy if policy.reads_pictures else None
        self.open = self._actor is not None or policy.decodes_pictures

    def seen(
        self, frames: Mapping[str, Tensor], observation: Observation, generator: Generator
    ) -> dict[str, Tensor]:
        """``frames``, and each camera's pictures; their shifts come from ``generator``, row by
        row and camera by camera."""
        if self._actor is None:
            return dict(frames)
        shifted = augment(
            observation, AugmentConfig(self._actor.shift, brightness=0.0, contrast=0.0), generator
        )
        return {**frames, **self._actor.pictures(shifted)}
