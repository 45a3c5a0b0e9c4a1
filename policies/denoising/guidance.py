"""Denoising a chunk towards one that is wanted: the guidance of real-time chunking (Black et al.
2025, arXiv 2506.07339)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Guidance(NamedTuple):
    """``wanted`` Y (normalised) and ``weight`` W, which broadcast against the chunks; the factor
    is at most ``most`` (β)."""

    wanted: Tensor
    weight: Tensor
    most: float


def guided(
    estimate: Callable[[Tensor], tuple[Tensor, ...]],
    x: Tensor,
    signal: Tensor,
    noise: Tensor,
    guidance: Guidance | None,
) -> tuple[Tensor, ...]:
    """What ``estimate`` says of ``x``, (x̂0, ε̂, …), as the guided velocity would have it (eqs. 2
    to 4); as it is without guidance.

    In the paper's time τ = ``signal`` = 1 − ``noise`` the velocity is v = x̂0 − ε̂, and x̂0 = x +
    (1 − τ) v. The guided one is v + min(β, (τ² + (1 − τ)²) / (τ (1 − τ))) Jᵀ[W (Y − x̂0)] with J =
    ∂x̂0/∂x, through the network, not only x.
    """
    if guidance is None:
        return estimate(x)
    with torch.enable_grad():
        start = x.detach().requires_grad_()
        action, epsilon, *others = estimate(start)
    with torch.no_grad():
        gap = guidance.weight * (guidance.wanted - action)
    (pull,) = torch.autograd.grad(action, start, gap)
    factor = ((signal.square() + noise.square()) / (signal * noise)).clamp(max=guidance.most)
    moved = action.detach() + noise * factor * pull, epsilon.detach() - signal * factor * pull
    return *moved, *(other.detach() for other in others)
