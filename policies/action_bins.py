"""Action tokens as bins of each action dimension: the way to them and back, and labels over
them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.normalization import VectorStats, bin_centers, decode_actions, encode_actions
from policies.settings import NanoVLAConfig
from policies.trunk.llama import MASKED
from vla_rl.errors import ConfigError
from vla_rl.types import EmbodimentSpec


class ActionBins(nn.Module):
    """Buffers of no weight: ``centers`` float32 [a bins], ``unused`` bool [a bins], and
    ``label_sigma`` [a]."""

    centers: Tensor
    unused: Tensor
    label_sigma: Tensor

    def __init__(self, config: NanoVLAConfig, embodiment: EmbodimentSpec, stats: VectorStats):
        super().__init__()
        centers, counts = bin_centers(
            embodiment,
            stats,
            config.action_bins,
            config.bin_range,
            config.bin_spacing,
            config.bin_power,
            config.binary_gripper,
        )
        self.register_buffer("centers", centers, persistent=False)
        unused = torch.arange(config.action_bins, device=counts.device)[None] >= counts[:, None]
        self.any_unused = config.binary_gripper
        self.register_buffer("unused", unused, persistent=False)
        sigma = self._label_sigma(stats, config.soft_label_sigma)
        self.register_buffer("label_sigma", sigma, persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        """Action tokens int64 [b h a] of physical actions."""
        return encode_actions(actions.to(self.centers.device), self.centers)

    def decode(self, tokens: Tensor) -> Tensor:
        """Physical actions float32 [b h a] of action tokens."""
        return decode_actions(tokens, self.centers)

    def mean(self, probs: Tensor) -> Tensor:
        """Physical actions [b h a] in the mean over ``probs`` [b h a bins]."""
        return (probs * self._finite_centers()).sum(-1)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [... a bins] that rule out the bins which a dimension does not use."""
        return logits.masked_fill(self.unused, MASKED) if self.any_unused else logits

    def turned(self, numbers: Tensor, embodiment: EmbodimentSpec) -> Tensor:
        """Of numbers [... a bins] in the robot's mirror, those of what the mirror shows."""
        assert embodiment.mirror is not None
        order, signs = embodiment.mirror.of(embodiment.action_names)
        exchanged = numbers[..., order, :]
        negated = torch.tensor(signs, device=numbers.device)[:, None] < 0
        return torch.where(negated, exchanged.flip(-1), exchanged)

    def require_symmetric(self, embodiment: EmbodimentSpec) -> None:
        """Raise `ConfigError` where the mirror does not take each bin to a bin."""
        assert embodiment.mirror is not None
        _, signs = embodiment.mirror.of(embodiment.action_names)
        back = self.turned(self.centers, embodiment) * torch.tensor(signs)[:, None]
        wrong = (~torch.isclose(back, self.centers, rtol=1e-4, atol=1e-7)).any(-1)
        if wrong.any():
            name = embodiment.action_names[int(wrong.float().argmax())]
            raise ConfigError(
                f"policy.symmetric=true, and the bins of {name!r} are not those of its mirror "
                "image: set policy.bin_range=bounds, or policy.symmetric=false"
            )

    def _finite_centers(self) -> Tensor:
        return self.centers.masked_fill(self.unused, 0.0)

    def _label_sigma(self, stats: VectorStats, most: float) -> Tensor:
        """Widths [a] of soft labels in bins: ``most``, but no wider than the data's own standard
        deviation. Where demonstrations hardly turn the hand, wider ones would teach it to turn at
        random."""
        centers = self._finite_centers()
        mean, std = (torch.tensor(row)[:, None] for row in (stats.mean, stats.std))
        nearest = (centers - mean).abs().masked_fill(self.unused, math.inf).argmin(-1, keepdim=True)
        lower = nearest.clamp(max=centers.shape[1] - 2)
        gap = (centers.gather(1, lower + 1) - centers.gather(1, lower)).abs()
        return (std / gap.clamp(min=1e-12)).clamp(1e-3, most)[:, 0]

    def soft_labels(self, actions: Tensor, tokens: Tensor) -> Tensor:
        """Gaussian weights [b h a bins] around the action, ``label_sigma`` bins wide; they sum to
        one.

        Distance is counted in bins, between neighbours interpolated: an action half-way between two
        centres weighs both alike. Dimensions with two bins get hard labels.
        """
        centers = self._finite_centers()
        count = centers.shape[1]
        dims = torch.arange(centers.shape[0], device=centers.device)
        nearest = centers[dims, tokens]
        upper = centers[dims, (tokens + 1).clamp(max=count - 1)]
        lower = centers[dims, (tokens - 1).clamp(min=0)]
        offset = actions - nearest
        gap = torch.where(offset >= 0, upper - nearest, nearest - lower)
        position = tokens + torch.where(
            gap > 0, offset / gap.clamp(min=1e-12), torch.zeros_like(gap)
        ).clamp(-0.5, 0.5)
        bins = torch.arange(count, device=centers.device)
        soft = -0.5 * ((bins - position[..., None]) / self.label_sigma[:, None]) ** 2
        soft = soft.masked_fill(self.unused, -math.inf).softmax(-1)
        if not self.any_unused:
            return soft
        hard = F.one_hot(tokens, count).float()
        return torch.where(self.unused.any(-1)[:, None], hard, soft)
