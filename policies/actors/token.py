"""The RL token (Xu et al. 2026, arXiv 2604.23073): what a frozen policy makes of its pictures,
compressed to a few numbers by reconstruction alone, on which a small actor and critics learn."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_HIDDEN = 512


class TokenBranch(nn.Module):
    """Frames [b d] → tokens [b w], without gradient from who reads them: what they keep is decided
    by `loss`. Upstream a transformer compresses the policy's last tokens with a learned query, and
    another reconstructs them in turn; here a perceptron does both on their coarse grid
    (`policies.trunk.features.coarse`)."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.compress = nn.Sequential(
            nn.Linear(size, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, width)
        )
        self.restore = nn.Sequential(nn.Linear(width, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, size))

    def _token(self, frame: Tensor) -> Tensor:
        token = self.compress(frame)
        return F.layer_norm(token, token.shape[-1:])

    def forward(self, frame: Tensor) -> Tensor:
        return self._token(frame).detach()

    def loss(self, frame: Tensor) -> Tensor:
        """Mean squared error of what is restored of ``frame`` [b d]."""
        return F.mse_loss(self.restore(self._token(frame)), frame)
