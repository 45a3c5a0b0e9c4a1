"""Ensembles of action values: the networks, what they predict (a number or a distribution), and the
targets they learn.

LayerNorm in every layer bounds what a critic makes of actions it never saw (RLPD, Ball et al. 2023,
§4.2). The target takes the smallest of a random subset of the ensemble (REDQ, Chen et al. 2021, eq.
1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, log_softmax

from vla_rl.config.replay_algorithms import CriticsConfig


class ValueHead(ABC):
    """What a critic's last layer stands for. ``outputs`` numbers per value."""

    outputs: int

    @abstractmethod
    def value(self, outputs: Tensor) -> Tensor:
        """[… ``outputs``] → [...]."""

    @abstractmethod
    def target(self, rewards: Tensor, discounts: Tensor, following: Tensor) -> Tensor:
        """What to learn, from rewards and discounts [b] and the outputs [s b ``outputs``] of the
        target critics at the next action; of the ``s`` the one with the smallest value counts, row
        by row."""

    @abstractmethod
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean over critics and rows; ``outputs`` [e b ``outputs``]."""


class _MeanHead(ValueHead):
    """One number, learned by squared error."""

    outputs = 1

    def value(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)

    def target(self, rewards: Tensor, discounts: Tensor, following: Tensor) -> Tensor:
        return rewards + discounts * self.value(following).amin(0)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (self.value(outputs) - target).square().mean()


class _Bins(ValueHead):
    """A distribution over ``count`` values between ``low`` and ``high``."""

    def __init__(self, low: float, high: float, count: int) -> None:
        self.outputs, self.width = count, (high - low) / (count - 1)
        self.centers = torch.linspace(low, high, count)

    def value(self, outputs: Tensor) -> Tensor:
        return (outputs.softmax(-1) * self.centers.to(outputs.device)).sum(-1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy with the target distribution [b ``outputs``]."""
        return -(target * log_softmax(outputs, -1)).sum(-1).mean()


class HLGaussHead(_Bins):
    """The target value as a Gaussian over the bins, learned by cross-entropy (Farebrother et al.
    2024, §3.1).

    The Gaussian's standard deviation is ``SIGMA`` bins. What of it lies outside of the range is
    lost to the other side, so that within ``REACH`` bins of an end the mean would be drawn inwards:
    as much goes to the outermost bin as makes the mean that of the value. (A reward of 1 under a
    range that ends there reads back as 1.)
    """

    SIGMA, REACH = 0.75, 4.0

    def target(self, rewards: Tensor, discounts: Tensor, following: Tensor) -> Tensor:
        return self.project(rewards + discounts * self.value(following).amin(0))

    def project(self, values: Tensor) -> Tensor:
        """[b] → [b ``outputs``]: the mass of the Gaussian around each value in each bin."""
        centers = self.centers.to(values.device)
        edges = torch.cat([centers - self.width / 2.0, centers[-1:] + self.width / 2.0])
        low, high = float(centers[0]), float(centers[-1])
        values = values.clamp(low, high)
        below = torch.erf((edges - values[:, None]) / (self.SIGMA * self.width * math.sqrt(2.0)))
        mass = below.diff(dim=1)
        mass = mass / mass.sum(1, keepdim=True)
        mean, upper = mass @ centers, values > (low + high) / 2.0
        cut = torch.minimum(values - low, high - values) < self.REACH * self.width
        outermost = torch.where(upper, high, low)
        share = torch.where(cut, (values - mean) / (outermost - mean), 0.0).clamp(0.0, 1.0)[:, None]
        at = nn.functional.one_hot(upper.long() * (self.outputs - 1), self.outputs)
        return (1.0 - share) * mass + share * at


class C51Head(_Bins):
    """The distribution of returns itself (Bellemare et al. 2017, algorithm 1)."""

    def target(self, rewards: Tensor, discounts: Tensor, following: Tensor) -> Tensor:
        smallest = self.value(following).argmin(0)
        share = following[smallest, torch.arange(len(rewards), device=rewards.device)].softmax(-1)
        centers = self.centers.to(rewards.device)
        at = (rewards[:, None] + discounts[:, None] * centers).clamp(
            float(centers[0]), float(centers[-1])
        )
        place = (at - centers[0]) / self.width
        lower = place.floor().long().clamp(max=self.outputs - 2)
        upper_share = share * (place - lower)
        target = torch.zeros_like(share).scatter_add_(1, lower, share - upper_share)
        return target.scatter_add_(1, lower + 1, upper_share)


def value_head(config: CriticsConfig) -> ValueHead:
    """As ``config.head`` says."""
    if config.head == "mean":
        return _MeanHead()
    bins = HLGaussHead if config.head == "hl_gauss" else C51Head
    return bins(config.low, config.high, config.bins)


class _Layer(nn.Module):
    """A linear layer per critic, [e b i] → [e b o], with LayerNorm and SiLU unless it is the
    ``last``."""

    def __init__(self, count: int, inputs: int, outputs: int, last: bool) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, outputs).uniform_(-bound, bound))
        self.last = last
        if not last:
            self.scale = nn.Parameter(torch.ones(count, 1, outputs))
            self.shift = nn.Parameter(torch.zeros(count, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.baddbmm(self.bias, x, self.weight)
        if self.last:
            return x
        return nn.functional.silu(layer_norm(x, x.shape[-1:]) * self.scale + self.shift)


class Critics(nn.Module):
    """``count`` values of (features [b f], action [b d]), evaluated as one batched product."""

    def __init__(
        self, features: int, actions: int, hidden: Sequence[int], count: int, outputs: int = 1
    ) -> None:
        super().__init__()
        self.count, self.inputs = count, features + actions
        widths = [self.inputs, *hidden, outputs]
        self.layers = nn.Sequential(
            *(
                _Layer(count, i, o, last=n == len(hidden))
                for n, (i, o) in enumerate(pairwise(widths))
            )
        )

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Outputs [critics b outputs]."""
        x = torch.cat([features, actions], dim=1)
        return self.layers(x.expand(self.count, *x.shape))


def random_subset(count: int, size: int, generator: torch.Generator) -> Tensor:
    """``size`` of ``count`` indices, without replacement; all of them in order where ``size`` is
    0 or not smaller."""
    if not size or size >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator)[:size]


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    """target ← (1 − tau)·target + tau·source, in place."""
    parameters: list[Tensor] = list(target.parameters())
    if parameters:
        torch._foreach_lerp_(parameters, [p.detach() for p in source.parameters()], tau)


def calibrated_gap(
    proposed: Tensor,
    data: Tensor,
    returns: Tensor | None,
    bounded: Tensor | None = None,
    log_density: Tensor | None = None,
) -> Tensor:
    """CQL's regulariser, scalar: how far a soft maximum of the values [e b k] of proposed actions
    exceeds the value [e b] of the data's, in the mean.

    With ``log_density`` [b k], of the distribution that each was drawn from, the maximum is log Σ
    exp(value − log density), an estimate of log ∫ exp(value) but for log k (Kumar et al. 2020,
    arXiv 2006.04779, appendix F); without, log-mean-exp.

    With ``returns`` [b], what the data's episode went on to earn, values of proposed actions are
    not pushed below them (Cal-QL, Nakamoto et al. 2023, eq. 5.1), where ``bounded`` bool [k] (None:
    all of them): the policy's own.
    """
    if returns is not None:
        spared = torch.maximum(proposed, returns[None, :, None])
        proposed = (
            spared
            if bounded is None
            else torch.where(bounded.to(proposed.device), spared, proposed)
        )
    if log_density is not None:
        return ((proposed - log_density).logsumexp(-1) - data).mean()
    return (proposed.logsumexp(-1) - math.log(proposed.shape[-1]) - data).mean()
