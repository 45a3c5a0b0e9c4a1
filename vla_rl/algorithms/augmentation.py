"""Random changes of what a policy is shown in SFT: pictures, proprioception hidden
(`vla_rl.mirror` exchanges left and right)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vla_rl.config.imitation import AugmentConfig
from vla_rl.ranks import Part, Ranks
from vla_rl.types import Observation


def _uniform(rows: int, spread: float, generator: torch.Generator) -> Tensor:
    return (2.0 * torch.rand(rows, generator=generator) - 1.0) * spread


def random_shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Shift uint8 images [b H W 3] by whole pixels ``offsets`` int64 [b 2] (down, right); edges
    repeat."""
    _, height, width, _ = images.shape
    margin = int(offsets.abs().max())
    if margin == 0:
        return images
    x = torch.cat(
        [
            images[:, :1].expand(-1, margin, -1, -1),
            images,
            images[:, -1:].expand(-1, margin, -1, -1),
        ],
        1,
    )
    x = torch.cat(
        [x[:, :, :1].expand(-1, -1, margin, -1), x, x[:, :, -1:].expand(-1, -1, margin, -1)], 2
    )
    # copying windows is many times faster than gathering three-byte pixels
    corners = (margin - offsets).tolist()
    return torch.stack(
        [x[i, top : top + height, left : left + width] for i, (top, left) in enumerate(corners)]
    )


def random_crop(images: Tensor, scale: Tensor, position: Tensor) -> Tensor:
    """Cut out a window of relative side ``scale`` [b] at relative ``position`` [b 2] and resize
    it back (bilinear)."""
    b, height, width, _ = images.shape
    centre = (2.0 * position - 1.0) * (1.0 - scale[:, None])
    theta = torch.zeros(b, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale
    theta[:, 0, 2], theta[:, 1, 2] = centre[:, 1], centre[:, 0]
    planes = images.permute(0, 3, 1, 2).float()
    grid = torch.nn.functional.affine_grid(
        theta.to(images.device), [b, 3, height, width], align_corners=False
    )
    out = torch.nn.functional.grid_sample(planes, grid, padding_mode="border", align_corners=False)
    return out.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def color_jitter(images: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """images · (1 + brightness) with the distance to their mean scaled by (1 + contrast);
    factors [b], uint8 out."""
    x = images.flatten(1).float()
    gain, mean = 1.0 + contrast.to(x), x.mean(1)
    scale = gain * (1.0 + brightness.to(x))
    # both changes are one affine map per image
    shift = mean * (1.0 - gain) * (1.0 + brightness.to(x))
    x = x.mul_(scale[:, None]).add_(shift[:, None]).round_().clamp_(0, 255)
    return x.to(torch.uint8).view_as(images)


def augment(
    observation: Observation,
    config: AugmentConfig,
    generator: torch.Generator,
    part: Part | None = None,
) -> Observation:
    """Augmented copy of an observation; each row, and of images each camera, draws its own change.
    ``part``: the batch that these rows are of, where other ranks have the others; a row then
    changes as it does where all of them are here.

    Rows whose proprioception is hidden get the batch's mean, so that they must be read from their
    images. Otherwise a policy learns to go on the way that the arm's own pose gives away, and has
    little to go by as an episode begins (causal confusion, de Haan et al. 2019, arXiv 1905.11979).
    """
    part = part or Ranks().part(len(observation))
    b, images = part.count, {}
    for name, x in observation.images.items():
        if config.crop > 0:
            scale = 1.0 - config.crop * torch.rand(b, generator=generator)
            x = random_crop(x, part.of(scale), part.of(torch.rand(b, 2, generator=generator)))
        if config.shift > 0:
            offsets = torch.randint(-config.shift, config.shift + 1, (b, 2), generator=generator)
            x = random_shift(x, part.of(offsets))
        if config.brightness > 0 or config.contrast > 0:
            x = color_jitter(
                x,
                part.of(_uniform(b, config.brightness, generator)),
                part.of(_uniform(b, config.contrast, generator)),
            )
        images[name] = x
    proprio = observation.proprio
    if config.proprio > 0:
        hidden = part.of(torch.rand(b, generator=generator)) < config.proprio
        proprio = torch.where(hidden.to(proprio.device)[:, None], part.mean(proprio), proprio)
    return replace(observation, images=images, proprio=proprio)
