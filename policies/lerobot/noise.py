"""What makes the noise of a chain's steps besides its table: the network of Flow-Noise."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from torch import Tensor, nn

_HIDDEN = (128, 64)  # widths of πRL's network


class NoiseNet(nn.Module):
    """Standard deviations of Flow-Noise (πRL, Chen et al. 2025, arXiv 2510.25889) of what the
    expert makes of each control step: the log-variance lies between those of ``low`` and
    ``high``."""

    def __init__(self, width: int, actions: int, low: float, high: float):
        super().__init__()
        sizes, self.low, self.high = (width, *_HIDDEN), low, high
        hidden = (
            layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())
        )
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], actions))

    def forward(self, features: Tensor) -> Tensor:
        """[b T w] → [b T a]."""
        share = 0.5 * (self.layers(features.float()).tanh() + 1.0)
        return self.low * (self.high / self.low) ** share


@contextlib.contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """What ``module`` is called with in the block."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()
