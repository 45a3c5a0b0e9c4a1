"""Statistics of actions and proprioception, and the map between physical actions and action
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.settings import BIN_RANGES, BIN_SPACINGS
from vla_rl.errors import ConfigError, UserError
from vla_rl.shapes import Float32, Int64
from vla_rl.types import EmbodimentSpec

_STD_FLOOR = 1e-6


@dataclass(frozen=True)
class VectorStats:
    """Per-dimension statistics of a data set, in physical units. All fields have one length.

    ``low``/``high`` are the smallest and largest value seen; ``q01``/``q99`` the 1 % and 99 %
    quantiles.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    q01: tuple[float, ...]
    q99: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in asdict(self).items()}
        if len(set(sizes.values())) != 1:
            raise UserError(
                f"statistics need one length for every field, got {sizes}: recompute "
                "them from the dataset"
            )

    def __len__(self) -> int:
        return len(self.low)

    def to_dict(self) -> dict[str, list[float]]:
        """A JSON-ready dict; `from_dict` inverts it."""
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VectorStats:
        return cls(**{name: tuple(float(v) for v in values) for name, values in data.items()})

    @classmethod
    def from_bounds(cls, low: Sequence[float], high: Sequence[float]) -> VectorStats:
        """Statistics of a uniform distribution on the bounds, for use before there is data."""
        lo, hi = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        rows = (
            lo,
            hi,
            (lo + hi) / 2,
            (hi - lo) / np.sqrt(12.0),
            lo + 0.01 * (hi - lo),
            hi - 0.01 * (hi - lo),
        )
        return cls(*(tuple(float(v) for v in row) for row in rows))

    @classmethod
    def identity(cls, size: int) -> VectorStats:
        """Mean 0 and standard deviation 1: normalisation that changes nothing."""
        row = (0.0,) * size
        return cls((-1.0,) * size, (1.0,) * size, row, (1.0,) * size, (-1.0,) * size, (1.0,) * size)

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float32 [d]; constant dimensions get standard deviation
        1."""
        std = torch.tensor(self.std, dtype=torch.float32)
        return torch.tensor(self.mean, dtype=torch.float32), torch.where(
            std < _STD_FLOOR, torch.ones_like(std), std
        )


def bin_centers(
    embodiment: EmbodimentSpec,
    stats: VectorStats,
    num_bins: int,
    bin_range: str,
    spacing: str = "uniform",
    power: float = 2.0,
    binary_gripper: bool = False,
) -> tuple[Float32[Tensor, "a bins"], Int64[Tensor, "a"]]:  # noqa: F821
    """Centres of the action bins per dimension (physical units, ascending) and how many of them
    each dimension uses.

    The first and the last centre lie ON the ends of the range, so that a gripper command of exactly
    -1 or +1 survives the round trip; an odd number of bins has a centre in the middle.
    ``bin_range``: "bounds" (the embodiment's), "minmax" or "quantile" (of ``stats``; the gripper
    always uses the bounds). ``spacing`` "power" sets centre = mid + half · sign(u)|u|^power for u
    uniform on [-1, 1]: finer in the middle. ``binary_gripper`` gives action dimensions whose name
    contains "gripper" the two end values only; their unused centres are +inf.
    """
    if bin_range not in BIN_RANGES:
        raise ConfigError(f"bin_range is {bin_range!r}, choose one of {', '.join(BIN_RANGES)}")
    if spacing not in BIN_SPACINGS:
        raise ConfigError(f"bin_spacing is {spacing!r}, choose one of {', '.join(BIN_SPACINGS)}")
    if len(stats) != embodiment.action_dim:
        raise UserError(
            f"the action statistics have {len(stats)} dimensions but embodiment {embodiment.name} "
            f"has {embodiment.action_dim} ({', '.join(embodiment.action_names)}): compute them on "
            "data of this embodiment"
        )
    lows = {"bounds": embodiment.action_low, "minmax": stats.low, "quantile": stats.q01}[bin_range]
    highs = {"bounds": embodiment.action_high, "minmax": stats.high, "quantile": stats.q99}[
        bin_range
    ]
    u = np.linspace(-1.0, 1.0, num_bins)
    if spacing == "power":
        u = np.sign(u) * np.abs(u) ** power
    rows, counts = [], []
    for i in range(embodiment.action_dim):
        gripper = i in embodiment.gripper_dims
        low, high = (
            (embodiment.action_low[i], embodiment.action_high[i])
            if gripper
            else (lows[i], highs[i])
        )
        # a constant dimension in the data: fall back on what the robot can do
        if not high - low > 1e-9:
            low, high = embodiment.action_low[i], embodiment.action_high[i]
        if gripper and binary_gripper:
            rows.append(np.array([low, high] + [np.inf] * (num_bins - 2)))
            counts.append(2)
        else:
            rows.append((low + high) / 2 + (high - low) / 2 * u)
            counts.append(num_bins)
    return torch.tensor(np.stack(rows), dtype=torch.float32), torch.tensor(counts)


def encode_actions(
    actions: Float32[Tensor, "*l a"], centers: Float32[Tensor, "a bins"]
) -> Int64[Tensor, "*l a"]:
    """Index of the nearest centre per action dimension (values outside the range take the end
    bins)."""
    edges = (centers[:, 1:] + centers[:, :-1]) / 2  # [a bins-1]; +inf where a bin is unused
    # searchsorted wants the searched axis last
    flat = actions.reshape(-1, actions.shape[-1]).T.contiguous()
    return torch.searchsorted(edges.contiguous(), flat, right=True).T.reshape(actions.shape)


def decode_actions(
    tokens: Int64[Tensor, "*l a"], centers: Float32[Tensor, "a bins"]
) -> Float32[Tensor, "*l a"]:
    """Physical value of each action token."""
    dims = torch.arange(centers.shape[0], device=tokens.device)
    return centers[dims, tokens.long()]
