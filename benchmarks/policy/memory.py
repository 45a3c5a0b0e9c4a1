"""How much memory an OpenVLA policy needs, counted on a model without weights: nothing large is
allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from policies.normalization import VectorStats
from policies.openvla.checkpoint import read_source
from policies.openvla.config import OpenVLAConfig
from policies.openvla.policy import OpenVLA, OpenVLABase, OpenVLAL1
from policies.openvla.statistics import random_source, statistics_of
from policies.openvla.weights import prepare
from vla_rl.types import EmbodimentSpec

PROMPT_TOKENS = 32  # a usual instruction with its frame
_GB = 1e9


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose. ``device`` and ``host`` are the sums where training runs and in main
    memory (offloaded state)."""

    parameters: int
    trained: int
    sequence: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    acting: int
    device: int
    host: int


def skeleton(
    config: OpenVLAConfig, embodiment: EmbodimentSpec, kind: type[OpenVLABase] = OpenVLA
) -> OpenVLABase:
    """The policy without memory for its weights, frozen and adapted as ``config`` says."""
    source = (
        read_source(config.checkpoint, config.dialect)
        if config.checkpoint
        else random_source(config)
    )
    stats = VectorStats.from_bounds(embodiment.action_low, embodiment.action_high)
    proprio = VectorStats.identity(embodiment.proprio_dim)
    statistics = statistics_of(config, embodiment, stats, proprio)
    return prepare(kind(config, embodiment, source, ("", statistics)))


def estimate(
    config: OpenVLAConfig,
    embodiment: EmbodimentSpec,
    *,
    policy_type: str = "openvla",
    micro_batch: int = 8,
    acting_batch: int = 32,
    offload_optimizer: bool = False,
) -> MemoryEstimate:
    """Memory of a training step and of acting, by count and by these rules
    (docs/how_to/openvla.md):

    A trained parameter costs its gradient in its own type and 8 bytes of moments, 12 where it is
    kept in bfloat16. A transformer layer of width d, key-value width k and MLP width m keeps 7 d +
    3 k + 4 m values a token for the backward pass; with gradient checkpointing d, plus one whole
    layer at a time. A vision block keeps 8 d + 2 m. Kernels' work space and fragmentation are not
    counted: leave a tenth free.
    """
    policy = skeleton(config, embodiment, OpenVLAL1 if policy_type == "openvla_l1" else OpenVLA)
    parameters = list(policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    size = 2 if config.weights == "bfloat16" or config.precision == "bfloat16" else 4
    text, vision = policy.architecture.text, policy.vision_backbone
    d, mlp, layers = text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]
    kv = d // text["num_attention_heads"] * text["num_key_value_heads"]
    cameras = len(policy.cameras)
    sequence = (
        cameras * vision.patches
        + PROMPT_TOKENS
        + int(config.use_proprio)
        + policy.action_tokens
        + 1
    )
    layer = (7 * d + 3 * kv + 4 * mlp) * sequence
    language = d * sequence * layers + layer if config.gradient_checkpointing else layer * layers
    towers = 0
    for tower in () if config.freeze_vision else vision.towers:
        first: Any = tower.blocks[0]  # timm's, in which peft may have replaced the layers
        width, hidden, depth = tower.embed_dim, first.mlp.fc1.out_features, len(tower.blocks) - 1
        tokens = cameras * (vision.patches + tower.num_prefix_tokens)
        block = (8 * width + 2 * hidden) * tokens
        towers += width * tokens * depth + block if config.gradient_checkpointing else block * depth
    logits = 3 * 4 * policy.action_tokens * policy.architecture.action_bins
    weights = sum(p.numel() * p.element_size() for p in parameters)
    gradients = sum(p.numel() * p.element_size() for p in trained)
    optimizer = sum(
        p.numel() * (8 if p.dtype == torch.float32 and not offload_optimizer else 12)
        for p in trained
    )
    activations = micro_batch * ((language + towers) * size + logits)
    cache = 2 * layers * kv * sequence if config.decoding == "autoregressive" else 0
    acting = acting_batch * (cache + layer) * size
    device = (
        weights + gradients + max(activations, acting) + (0 if offload_optimizer else optimizer)
    )
    return MemoryEstimate(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        sequence=sequence,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        acting=acting,
        device=device,
        host=optimizer if offload_optimizer else 0,
    )


def text(found: Mapping[str, Any]) -> str:
    """One line a purpose, in GB (1e9 bytes); and what the GPU here has."""
    rows = (
        ("weights", "weights", f"{found['parameters'] / 1e6:,.0f} M parameters"),
        ("gradients", "gradients", f"{found['trained'] / 1e6:,.1f} M parameters are trained"),
        ("optimiser", "optimizer", "float32 moments, and float32 copies of low-precision weights"),
        (
            "activations",
            "activations",
            f"one micro batch of sequences of {found['sequence']} tokens",
        ),
        ("acting", "acting", "keys, values and one layer; not at the same time as activations"),
        ("on the device", "device", "training step"),
        ("in main memory", "host", "besides what the process itself needs"),
        ("the GPU here", "device_memory", "in all"),
    )
    return "\n".join(
        f"{name:>15} {found[key] / _GB:>9.2f} GB  {remark}"
        for name, key, remark in rows
        if key in found
    )
