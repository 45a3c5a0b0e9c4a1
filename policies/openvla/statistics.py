"""Statistics of a checkpoint that is new, and the scale of proprioception that statistics give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.normalization import VectorStats
from policies.openvla.checkpoint import Source
from policies.openvla.config import OpenVLAConfig, random_config, random_preprocessor
from policies.openvla.tokens import gripper_dims, read_range, stand_in_tokenizer
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.types import EmbodimentSpec

OWN_STATISTICS = "vla_rl"  # their name where a run computed the statistics itself


def random_source(config: OpenVLAConfig) -> Source:
    """What stands in for a checkpoint's files where ``config.architecture`` asks for random
    weights."""
    if not config.architecture:
        raise ConfigError(
            "policy.checkpoint is empty: give the folder of an OpenVLA checkpoint, or "
            "policy.architecture=nano (or 7b) for random weights"
        )
    upstream = random_config(config.architecture)
    return Source(upstream, random_preprocessor(upstream), {}, stand_in_tokenizer())


def statistics_of(
    config: OpenVLAConfig, embodiment: EmbodimentSpec, actions: VectorStats, proprio: VectorStats
) -> dict[str, Any]:
    """An entry of ``norm_stats`` from a dataset's statistics (physical units), in the model's
    convention of actions."""
    rows = {
        name: np.asarray(getattr(actions, name), dtype=np.float64)
        for name in ("low", "high", "mean", "std", "q01", "q99")
    }
    if config.action_space == "unit":
        low, high = np.asarray(embodiment.action_low), np.asarray(embodiment.action_high)
        rows = {
            n: 2 * v / (high - low) if n == "std" else 2 * (v - low) / (high - low) - 1
            for n, v in rows.items()
        }
    mask = np.ones(embodiment.action_dim, dtype=bool)
    if config.gripper == "libero":
        dims = gripper_dims(embodiment)
        mask[dims] = False
        turned = {n: v[dims] / 2 if n == "std" else (1 - v[dims]) / 2 for n, v in rows.items()}
        for name, other in (
            ("low", "high"),
            ("high", "low"),
            ("q01", "q99"),
            ("q99", "q01"),
            ("mean", "mean"),
            ("std", "std"),
        ):
            rows[name][dims] = turned[other]
    return {
        "action": {**_upstream_names(rows), "mask": mask.tolist()},
        "proprio": _upstream_names(vars(proprio)),
    }


def _upstream_names(rows: Mapping[str, Any]) -> dict[str, list[float]]:
    names = {"low": "min", "high": "max"}
    return {names.get(name, name): [float(x) for x in values] for name, values in rows.items()}


def described(part: str, key: str, source: Source) -> str:
    """The statistics of ``part`` in words, with the file that they were read from."""
    return f"the {part} statistics {key!r} of {source.statistics_from}"


def proprio_range(
    statistics: tuple[str, Mapping[str, Any]],
    config: OpenVLAConfig,
    embodiment: EmbodimentSpec,
    source: Source,
) -> tuple[Tensor, Tensor, Tensor]:
    """Low, high (float32) and mask (bool) [p] for `policies.openvla.tokens.normalize_proprio`."""
    key, values = statistics[0], statistics[1].get("proprio")
    ends = ("q01", "q99") if config.normalization == "q99" else ("min", "max")
    if not isinstance(values, Mapping) or any(end not in values for end in ends):
        raise UserError(
            "policy.use_proprio=true needs statistics of the proprioception, "
            f"{source.statistics_from} has none with {' and '.join(ends)} under "
            f"{key!r}: use another policy.unnorm_key, or use_proprio=false"
        )
    where = described("proprio", key, source)
    low, high, mask = read_range(values, ends, where)
    if len(low) != embodiment.proprio_dim:
        raise EmbodimentMismatch(
            f"{where} have {len(low)} dimensions, embodiment "
            f"{embodiment.name} has {embodiment.proprio_dim} "
            f"({', '.join(embodiment.proprio_names)}): use an env of its robot"
        )
    return torch.from_numpy(low).float(), torch.from_numpy(high).float(), torch.from_numpy(mask)
