"""What a robot sees and does in a mirror that exchanges left and right (`vla_rl.specs.Mirror`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vla_rl.types import EmbodimentSpec, Observation


def mirrored(
    observation: Observation, actions: Tensor, embodiment: EmbodimentSpec, rows: Tensor
) -> tuple[Observation, Tensor]:
    """Observation [b] and actions [b h a] with ``rows`` bool [b] as the robot's `Mirror` shows them
    (GR-RL, arXiv 2512.01801, symmetry augmentation)."""
    return (
        mirrored_observation(observation, embodiment, rows),
        mirrored_actions(actions, embodiment, rows),
    )


def mirrored_observation(
    observation: Observation, embodiment: EmbodimentSpec, rows: Tensor | None = None
) -> Observation:
    """Observation [b] with ``rows`` bool [b] (None: all) as the mirror shows them."""
    mirror = embodiment.mirror
    assert mirror is not None
    rows = torch.ones(len(observation), dtype=torch.bool) if rows is None else rows
    flipped = {name: image.flip(2) for name, image in observation.images.items()}
    order, _ = mirror.of(tuple(observation.images))
    names = list(observation.images)
    images = {
        name: torch.where(
            rows.to(image.device)[:, None, None, None], flipped[names[partner]], image
        )
        for partner, (name, image) in zip(order, observation.images.items(), strict=True)
    }
    words = {a: b for pair in mirror.exchanged for a, b in (pair, pair[::-1])}
    spoken = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.I) if words else None
    told = tuple(
        spoken.sub(lambda found: words[found[0].lower()], text) if spoken and turned else text
        for text, turned in zip(observation.instruction, rows.tolist(), strict=True)
    )
    proprio = _exchanged(observation.proprio, *mirror.of(embodiment.proprio_names), rows)
    return replace(observation, images=images, proprio=proprio, instruction=told)


def mirrored_actions(
    actions: Tensor, embodiment: EmbodimentSpec, rows: Tensor | None = None
) -> Tensor:
    """Actions [b h a] with ``rows`` bool [b] (None: all) as the mirror shows them."""
    assert embodiment.mirror is not None
    rows = torch.ones(len(actions), dtype=torch.bool) if rows is None else rows
    return _exchanged(actions, *embodiment.mirror.of(embodiment.action_names), rows)


def averaged(
    observation: Observation,
    actions: Tensor,
    embodiment: EmbodimentSpec,
    decide: Callable[[Observation], Tensor],
) -> Tensor:
    """``actions`` [b h a] for an observation [b], averaged with what ``decide`` gives for what the
    mirror shows (frame averaging, Puny et al. 2022, arXiv 2110.03336): what ``decide`` learned
    differently on either side averages out. Grippers do one thing or the other, and keep theirs.
    Where both views would go to different things, the mean goes to neither.
    """
    there = decide(mirrored_observation(observation, embodiment))
    mean = (actions + mirrored_actions(there, embodiment)) / 2.0
    hands = list(embodiment.gripper_dims)
    mean[..., hands] = actions[..., hands]
    return mean


def _exchanged(values: Tensor, order: list[int], signs: list[float], rows: Tensor) -> Tensor:
    turned = values[..., order] * torch.tensor(signs, dtype=values.dtype, device=values.device)
    return torch.where(rows.to(values.device).view(-1, *[1] * (values.ndim - 1)), turned, values)
