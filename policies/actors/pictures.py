"""Eyes of an actor's own: a few convolutions over a camera's pictures, trained by the
critics (DrQ-v2, arXiv 2107.09645)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class PictureTrunk(nn.Module):
    """Pictures [b H W 3] of 0 … 255 → [b ``width``]: a convolution of ``stride`` pixels (twice as
    wide), then of 3×3 that halve what is left, one for each further of ``channels``; a linear
    layer, LayerNorm and tanh (DrQ's).

    DrQ-v2 keeps half of the resolution up to the linear layer.
    """

    def __init__(
        self, height: int, width_px: int, channels: Sequence[int], stride: int, width: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels[0], 2 * stride, stride, (stride + 1) // 2),
            nn.ReLU(),
        ]
        for inputs, outputs in pairwise(channels):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        with torch.no_grad():
            size = self.convolutions(torch.zeros(1, 3, height, width_px)).numel()
        self.read = nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width), nn.Tanh())

    def forward(self, pictures: Tensor) -> Tensor:
        x = pictures.permute(0, 3, 1, 2).mul(1.0 / 255.0).sub_(0.5)
        return self.read(self.convolutions(x).flatten(1))
