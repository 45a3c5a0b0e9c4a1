"""What small networks beside a large policy see of its images: its tokens on a coarse grid,
which a replay can keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, layer_norm

GRID = 4  # cells along each side of an image: where things are stays known


def coarse(tokens: Tensor) -> Tensor:
    """Tokens [b n d] of an image, row by row of a square, → [b cells·d] in half precision, about
    unit scale: the mean token of each of `GRID`² cells, standardised. Fewer tokens stay as they
    are; where they form no square, neighbours in their order are averaged."""
    b, n, d = tokens.shape
    side = math.isqrt(n)
    planes = tokens.float().transpose(1, 2)
    if n > GRID**2 and side * side == n:
        planes = adaptive_avg_pool2d(planes.reshape(b, d, side, side), GRID).flatten(2)
    elif n > GRID**2:
        planes = torch.nn.functional.adaptive_avg_pool1d(planes, GRID**2)
    return layer_norm(planes.transpose(1, 2), (d,)).flatten(1).half()


def mean_word(embedded: Tensor, said: Tensor) -> Tensor:
    """The mean [b d] of word embeddings [b T d] where ``said`` [b T], standardised."""
    weight = said.to(embedded.device)[..., None].float()
    mean = (embedded.float() * weight).sum(1) / weight.sum(1).clamp(min=1.0)
    return layer_norm(mean, mean.shape[-1:])


def spread(features: Tensor) -> float:
    """What differs between the rows of ``features`` [b ...] as a share of all there is: the root of
    (variance over the rows / mean square)."""
    apart = features.var(0, unbiased=False).mean()
    return float((apart / features.square().mean().clamp(min=1e-12)).sqrt())
