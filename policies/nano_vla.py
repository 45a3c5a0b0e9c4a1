"""A vision-language-action model in miniature: timm ViT → projector → Llama → discrete action tokens.

The parts and their order are those of OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645), so that a recipe
that works here carries over; one config scales it from about a million parameters to the 7B layout (`PRESETS`).

Sequence: image tokens of each camera | instruction tokens | proprio token | action positions. An action position stands
for one action dimension of one control step, or (``tokens_per_step``) for a whole control step whose dimensions are
read by a head each. Decoding is "parallel" (a learned query per action position, bidirectional attention, one forward,
as in OFT) or "autoregressive" (causal attention, each action position reads the tokens of the one before, KV cache).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from policies.normalization import BIN_RANGES, BIN_SPACINGS, VectorStats, bin_centers, decode_actions, encode_actions
from policies.tokenizer import PAD_ID, WordTokenizer
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput

_CHOICES = {
    "decoding": ("parallel", "autoregressive"),
    "bin_range": BIN_RANGES,
    "bin_spacing": BIN_SPACINGS,
    "deterministic_mode": ("argmax", "mean"),
    "precision": ("auto", "float32", "bfloat16"),
    "stem_norm": ("layer", "none"),
}
_LONGEST_PLAIN_ATTENTION = 256
_MASKED = -1e9  # logit of a bin that an action dimension does not use: probability exactly 0 in float32


@dataclass
class NanoVLAConfig:
    """Sizes and choices of a `NanoVLA`. Lengths are counts; nothing here depends on the robot."""

    chunk_length: int = 8
    action_bins: int = 33
    bin_range: str = "bounds"  # bounds | minmax | quantile: what the end bins stand for
    bin_spacing: str = "uniform"  # uniform | power: power is finer around the middle
    bin_power: float = 2.0
    binary_gripper: bool = False  # gripper dimensions get two bins, the ends of their range
    decoding: str = "parallel"  # parallel | autoregressive
    tokens_per_step: bool = True  # one action position per control step instead of one per action dimension
    cameras: list[str] = field(default_factory=list)  # which of the embodiment's cameras to read; empty: all
    use_proprio: bool = True
    # vision
    stem_channels: list[int] = field(default_factory=lambda: [32, 64])  # convs before the one to vit_width; empty: patches
    stem_kernels: list[int] = field(default_factory=lambda: [8, 3, 3])
    stem_strides: list[int] = field(default_factory=lambda: [4, 2, 2])
    stem_norm: str = "layer"  # layer | none: over channels, after each conv
    patch_size: int = 14  # used where stem_channels is empty
    vit_width: int = 128
    vit_depth: int = 1
    vit_heads: int = 4
    vit_mlp_ratio: float = 2.0
    merge: int = 2  # merge x merge neighbouring image tokens become one
    share_vision: bool = True  # one vision tower for all cameras
    # language model
    instruction_length: int = 16  # words read of an instruction
    instruction_tokens: int = 4  # tokens that the words are pooled into; 0: one per word, padding included
    hash_buckets: int = 128  # for words outside the vocabulary
    llm_width: int = 128
    llm_depth: int = 3
    llm_heads: int = 4
    llm_mlp: int = 352
    rope_theta: float = 10000.0
    dropout: float = 0.0
    # heads
    value_head: bool = True
    value_gradient: bool = True  # the value loss reaches the trunk
    # loss and sampling
    label_smoothing: float = 0.0
    soft_label_sigma: float = 0.0  # Gaussian soft labels over neighbouring bins; in bins
    temperature: float = 1.0  # of sampling and of every reported log-prob
    deterministic_mode: str = "argmax"  # argmax | mean (of the bin distribution)
    precision: str = "auto"  # auto: bfloat16 autocast where the hardware multiplies it natively, else float32
    compile: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"policy.{name} is {getattr(self, name)!r}, choose one of {', '.join(choices)}")
        for name in (
            "chunk_length",
            "patch_size",
            "vit_width",
            "vit_heads",
            "merge",
            "instruction_length",
            "hash_buckets",
            "llm_width",
            "llm_depth",
            "llm_heads",
            "llm_mlp",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy.{name} is {getattr(self, name)}, it must be at least 1")
        if self.action_bins < 2:
            raise ConfigError(f"policy.action_bins is {self.action_bins}, it must be at least 2")
        if not self.temperature > 0:
            raise ConfigError(
                f"policy.temperature is {self.temperature}, it must be above 0 (for no sampling act with deterministic=True)"
            )
        for width, heads in (("vit_width", "vit_heads"), ("llm_width", "llm_heads")):
            if getattr(self, width) % getattr(self, heads):
                raise ConfigError(
                    f"policy.{width} {getattr(self, width)} is not divisible by {heads} {getattr(self, heads)}"
                )
        if (self.llm_width // self.llm_heads) % 2:
            raise ConfigError(
                f"policy.llm_width / llm_heads is {self.llm_width // self.llm_heads}, rotary embeddings need it even"
            )
        convs = len(self.stem_channels) + 1
        if self.stem_channels and not len(self.stem_kernels) == len(self.stem_strides) == convs:
            raise ConfigError(
                f"policy.stem_channels has {len(self.stem_channels)} entries, so stem_kernels and "
                f"stem_strides need {convs} each (the last conv leads to vit_width), got {len(self.stem_kernels)} and "
                f"{len(self.stem_strides)}"
            )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens before merging for an image of that size (pixels)."""
        if not self.stem_channels:
            return height // self.patch_size, width // self.patch_size
        for k, s in zip(self.stem_kernels, self.stem_strides, strict=True):
            height, width = ((x + 2 * _padding(k, s) - k) // s + 1 for x in (height, width))
        return height, width


def _padding(kernel: int, stride: int) -> int:
    return (kernel - stride + 1) // 2


PRESETS: dict[str, dict[str, Any]] = {
    "nano": {},
    "small": {
        "stem_channels": [48, 96, 192],
        "stem_kernels": [4, 3, 3, 3],
        "stem_strides": [2, 2, 2, 2],
        "vit_width": 256,
        "vit_depth": 4,
        "vit_heads": 8,
        "vit_mlp_ratio": 4.0,
        "llm_width": 384,
        "llm_depth": 6,
        "llm_heads": 6,
        "llm_mlp": 1024,
        "instruction_tokens": 0,
    },
    "7b": {
        "stem_channels": [],
        "patch_size": 14,
        "vit_width": 1152,
        "vit_depth": 27,
        "vit_heads": 16,
        "vit_mlp_ratio": 4304 / 1152,
        "merge": 1,
        "action_bins": 256,
        "tokens_per_step": False,
        "instruction_length": 32,
        "instruction_tokens": 0,
        "llm_width": 4096,
        "llm_depth": 32,
        "llm_heads": 32,
        "llm_mlp": 11008,
        "gradient_checkpointing": True,
    },
}


def preset(name: str, **changes: Any) -> NanoVLAConfig:
    """The config called ``name`` ("nano", "small", "7b") with ``changes`` applied."""
    if name not in PRESETS:
        raise ConfigError(f"unknown policy preset {name!r}, choose one of {', '.join(PRESETS)}")
    return NanoVLAConfig(**{**PRESETS[name], **changes})


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a channels-last image [b C H W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvStem(nn.Module):
    """Strided convolutions in place of patch embedding: [b 3 H W] → [b N width]. A drop-in ``embed_layer`` of timm."""

    def __init__(self, config: NanoVLAConfig, height: int, width: int, embed_dim: int):
        super().__init__()
        channels = [3, *config.stem_channels, embed_dim]
        layers: list[nn.Module] = []
        for i, (k, s) in enumerate(zip(config.stem_kernels, config.stem_strides, strict=True)):
            layers.append(nn.Conv2d(channels[i], channels[i + 1], k, s, _padding(k, s)))
            if i + 1 < len(config.stem_kernels):
                if config.stem_norm == "layer":
                    layers.append(ChannelNorm(channels[i + 1], eps=1e-6))
                layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)
        self.grid_size = config.grid(height, width)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        for module in self.layers:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).transpose(1, 2)


def _vision_tower(config: NanoVLAConfig, height: int, width: int) -> VisionTransformer:
    def stem(embed_dim: int, **_: Any) -> ConvStem:
        return ConvStem(config, height, width, embed_dim)

    extra = {"embed_layer": stem} if config.stem_channels else {"patch_size": config.patch_size}
    tower = VisionTransformer(
        img_size=(height, width),
        embed_dim=config.vit_width,
        depth=config.vit_depth,
        num_heads=config.vit_heads,
        mlp_ratio=config.vit_mlp_ratio,
        num_classes=0,
        global_pool="",
        class_token=False,
        weight_init="skip",
        proj_drop_rate=config.dropout,
        **extra,
    )
    nn.init.trunc_normal_(tower.pos_embed, std=0.02)
    for block in tower.blocks:
        for linear in (block.attn.qkv, block.mlp.fc1):
            _init_linear(linear)
        for linear in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
    return tower


def _init_linear(linear: nn.Linear, std: float | None = None) -> nn.Linear:
    nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5 if std is None else std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def _mlp(inputs: int, hidden: int, outputs: int, out_std: float | None = None) -> nn.Sequential:
    return nn.Sequential(
        _init_linear(nn.Linear(inputs, hidden)), nn.GELU(), _init_linear(nn.Linear(hidden, outputs), out_std)
    )


def merge_tokens(x: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """Pixel-unshuffle of a token grid: [b R·C w] → [b (R/m)·(C/m) m²·w], spatial layout kept."""
    if merge == 1:
        return x
    b, _, w = x.shape
    rows, cols = grid[0] // merge, grid[1] // merge
    x = x.reshape(b, rows, merge, cols, merge, w).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, rows * cols, merge * merge * w)


# ----------------------------------------------------------------------------------------------------------- the Llama
class LlamaTrunk(nn.Module):
    """A transformers `LlamaModel` with a lean forward: same weights, same result, none of the generic code per call."""

    def __init__(self, config: NanoVLAConfig, vocab_size: int, max_length: int):
        super().__init__()
        self.llama = LlamaModel(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=config.llm_width,
                intermediate_size=config.llm_mlp,
                num_hidden_layers=config.llm_depth,
                num_attention_heads=config.llm_heads,
                num_key_value_heads=config.llm_heads,
                rope_theta=config.rope_theta,
                pad_token_id=PAD_ID,
                bos_token_id=None,
                eos_token_id=None,
                max_position_embeddings=max(max_length, 16),
                attention_dropout=0.0,
            )
        )
        self.heads = config.llm_heads
        self.checkpointing = config.gradient_checkpointing
        self.dropout = config.dropout
        half = config.llm_width // config.llm_heads // 2
        angles = torch.arange(max_length)[:, None] * config.rope_theta ** -(torch.arange(half) / half)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)  # [L head]
        self.register_buffer("rope_sin", angles.sin(), persistent=False)
        for layer in self.llama.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                _init_linear(linear)
            for linear in (attention.o_proj, mlp.down_proj):
                nn.init.zeros_(linear.weight)

    def forward(
        self, x: Tensor, causal: bool, start: int = 0, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states after the final norm [b L d], and keys and values per layer.

        Positions are ``start`` … ``start`` + L − 1. ``past`` holds the keys and values of the positions before (one new
        position at a time). Without ``causal`` every position sees every other.
        """
        cos, sin = self.rope_cos[start : start + x.shape[1]], self.rope_sin[start : start + x.shape[1]]
        present = []
        for i, layer in enumerate(self.llama.layers):
            kv = None if past is None else past[i]
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x, k, v = torch.utils.checkpoint.checkpoint(self._layer, layer, x, cos, sin, causal, kv, use_reentrant=False)
            else:
                x, k, v = self._layer(layer, x, cos, sin, causal, kv)
            present.append((k, v))
        return _rms_norm(self.llama.norm, x), present

    def _layer(
        self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, causal: bool, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, length, width = x.shape
        attention, mlp = layer.self_attn, layer.mlp
        y = _rms_norm(layer.input_layernorm, x)
        q, k, v = (
            proj(y).view(b, length, self.heads, width // self.heads).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # One new position sees everything before it, so a cached step needs no mask either.
        y = attend(q, k, v, causal and length > 1)
        y = attention.o_proj(y.transpose(1, 2).reshape(b, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = _rms_norm(layer.post_attention_layernorm, x)
        y = mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        return x + F.dropout(y, self.dropout, self.training), k, v


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention [b heads L head].

    On CPUs the plain products: the fused kernel's bfloat16 backward is ten times slower at the lengths met here (36
    tokens, 128 images, one core, torch 2.10: 58 ms against 5 ms).
    """
    if q.device.type != "cpu" or max(q.shape[2], k.shape[2]) > _LONGEST_PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        length = q.shape[2]
        scores = scores + torch.full((length, length), _MASKED, dtype=scores.dtype, device=q.device).triu_(1)
    return scores.softmax(-1) @ v


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of transformers."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


# -------------------------------------------------------------------------------------------------------------- noise
def counter_uniforms(seeds: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers float32 [b count] in (0, 1) that depend on each row's seed and the index alone.

    SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) on a counter: no generator state, so a row
    draws the same noise whatever it is batched with.
    """
    keys = np.array([int(seed) & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = _mix64(keys)[:, None] + np.arange(1, count + 1, dtype=np.uint64)[None] * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix64(x) >> np.uint64(41)  # 23 bits: the midpoints below are exact in float32 and never 0 or 1
    return ((bits.astype(np.float64) + 0.5) * 2.0**-23).astype(np.float32)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index int64 [...] sampled from ``log_probs`` [... bins] by inverting the CDF at ``uniforms`` [...]."""
    cdf = log_probs.exp().cumsum(-1)
    index = (cdf < uniforms[..., None] * cdf[..., -1:]).sum(-1)
    return index.clamp_(max=log_probs.shape[-1] - 1)


# ---------------------------------------------------------------------------------------------------------- the policy
class NanoVLA(nn.Module):
    """Token VLA policy; a `LikelihoodPolicy` and an `ImitationPolicy` of `vla_rl.interfaces`.

    ``action_stats`` and ``proprio_stats`` come from the training data (`policies.normalization.VectorStats`); without
    them the embodiment's bounds and the identity are used. ``temperature`` can be set at any time: sampling and all
    log-probs follow it. `replay` holds ``action_tokens`` int16 [b h a].
    """

    log_prob_axes: tuple[str, ...] = ("control_step", "action_dim")
    policy_type = "nano_vla"

    def __init__(
        self,
        config: NanoVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
    ):
        super().__init__()
        self.config = config
        self.embodiment = embodiment
        self.chunk_length = config.chunk_length
        self.temperature = config.temperature
        self.action_stats = action_stats or VectorStats.from_bounds(embodiment.action_low, embodiment.action_high)
        self.proprio_stats = proprio_stats or VectorStats.identity(embodiment.proprio_dim)
        if len(self.proprio_stats) != embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the proprio statistics have {len(self.proprio_stats)} dimensions but embodiment {embodiment.name} "
                f"has {embodiment.proprio_dim} ({', '.join(embodiment.proprio_names)}): compute them on data of this "
                "embodiment"
            )
        self.tokenizer = tokenizer or WordTokenizer(hash_buckets=config.hash_buckets)
        self._encoded: dict[str, list[int]] = {}
        self._compiled: Any = None

        d, h, a = config.llm_width, config.chunk_length, embodiment.action_dim
        self.cameras = self._chosen_cameras()
        self.slots = h if config.tokens_per_step else h * a  # action positions
        self.group = a if config.tokens_per_step else 1  # action tokens read at each
        self._build_vision(d)
        text = config.instruction_tokens or config.instruction_length
        self.prefix_length = sum(self.camera_tokens) + text + int(config.use_proprio)
        self.sequence_length = self.prefix_length + self.slots

        self.trunk = LlamaTrunk(config, self.tokenizer.vocab_size, self.sequence_length)
        nn.init.trunc_normal_(self.trunk.llama.embed_tokens.weight, std=0.5)
        self.text_positions = _parameter(config.instruction_length, d)
        if config.instruction_tokens:
            self.text_queries = _parameter(config.instruction_tokens, d, std=1.0)
            self.text_mlp = _mlp(d, d, d)
        if config.use_proprio:
            self.proprio_mlp = _mlp(embodiment.proprio_dim, d, d)
        self.action_queries = _parameter(self.slots, d, std=0.5)
        if config.decoding == "autoregressive":
            self.action_embedding = nn.Embedding(self.group * config.action_bins, d)
            nn.init.trunc_normal_(self.action_embedding.weight, std=0.5 / math.sqrt(self.group))
        # Small logits at the start: the first loss is log(bins), and no bin is favoured before there is evidence.
        self.action_head = _init_linear(nn.Linear(d, self.group * config.action_bins), 0.02)
        if config.value_head:
            self.value_mlp = _mlp(d, d, 1, out_std=0.01)

        centers, counts = bin_centers(
            embodiment,
            self.action_stats,
            config.action_bins,
            config.bin_range,
            config.bin_spacing,
            config.bin_power,
            config.binary_gripper,
        )
        self.register_buffer("bin_centers", centers, persistent=False)
        unused = torch.arange(config.action_bins, device=counts.device)[None] >= counts[:, None]
        self.has_unused_bins = config.binary_gripper
        self.register_buffer("unused_bins", unused, persistent=False)  # [a bins]
        mean, std = self.proprio_stats.mean_std()
        self.register_buffer("proprio_mean", mean, persistent=False)
        self.register_buffer("proprio_std", std, persistent=False)
        if config.stem_channels:
            self.vision.to(memory_format=torch.channels_last)

    def _chosen_cameras(self) -> tuple[Any, ...]:
        known = {camera.name: camera for camera in self.embodiment.cameras}
        missing = [name for name in self.config.cameras if name not in known]
        if missing or not known:
            raise EmbodimentMismatch(
                f"policy.cameras asks for {missing or 'cameras'} but embodiment {self.embodiment.name} has "
                f"{list(known)}: name cameras of this embodiment"
            )
        return tuple(known[name] for name in self.config.cameras) or tuple(known.values())

    def _build_vision(self, d: int) -> None:
        config = self.config
        sizes = [(camera.height, camera.width) for camera in self.cameras]
        self.shared_vision = config.share_vision and len(set(sizes)) == 1
        self.vision = nn.ModuleList(_vision_tower(config, *size) for size in (sizes[:1] if self.shared_vision else sizes))
        self.grids = [config.grid(*size) for size in sizes]
        for camera, grid in zip(self.cameras, self.grids, strict=True):
            if min(grid) < 1 or grid[0] % config.merge or grid[1] % config.merge:
                raise ConfigError(
                    f"camera {camera.name} ({camera.height}x{camera.width} px) yields {grid[0]}x{grid[1]} image "
                    f"tokens, which policy.merge={config.merge} does not divide: change merge, the stem strides or the "
                    "image size"
                )
        self.camera_tokens = [g[0] * g[1] // config.merge**2 for g in self.grids]
        features = config.vit_width * config.merge**2
        self.projector = nn.ModuleList(_mlp(features, d, d) for _ in self.vision)
        self.image_positions = _parameter(sum(self.camera_tokens), d, std=0.1)

    # -------------------------------------------------------------------------------------------------------- inputs
    @property
    def device(self) -> torch.device:
        return self.bin_centers.device

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.uses_bfloat16())

    def uses_bfloat16(self) -> bool:
        """Whether forwards run in bfloat16 autocast on the present device (parameters and losses stay float32)."""
        if self.config.precision != "auto":
            return self.config.precision == "bfloat16"
        return native_bfloat16(self.device.type)

    def _images(self, observation: Observation) -> list[Tensor]:
        """The chosen cameras' images uint8 [b 3 H W] (channels-last in memory) on the policy's device."""
        images = []
        for camera in self.cameras:
            image = observation.images.get(camera.name)
            if image is None or tuple(image.shape[1:]) != (camera.height, camera.width, 3):
                got = {name: tuple(value.shape[1:]) for name, value in observation.images.items()}
                raise EmbodimentMismatch(
                    f"the policy reads camera {camera.name} at {camera.height}x{camera.width}x3, but the observation "
                    f"has {got}: use an env with the cameras of embodiment {self.embodiment.name}, or make the policy "
                    "for the cameras of this env"
                )
            images.append(image.to(self.device, non_blocking=True).permute(0, 3, 1, 2))
        if observation.proprio.shape[1] != self.embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the policy reads {self.embodiment.proprio_dim} proprio dimensions "
                f"({', '.join(self.embodiment.proprio_names)}), the observation has {observation.proprio.shape[1]}"
            )
        return images

    def _text_ids(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids int64 [u T] of the distinct instructions, and which of them each row has [b]."""
        distinct = {text: i for i, text in enumerate(dict.fromkeys(instructions))}
        for text in distinct:
            if text not in self._encoded:
                self._encoded[text] = self.tokenizer.encode(text, self.config.instruction_length)
        ids = torch.tensor([self._encoded[text] for text in distinct])
        rows = torch.tensor([distinct[text] for text in instructions])
        return ids.to(self.device), rows.to(self.device)

    def _vision_tokens(self, images: list[Tensor]) -> Tensor:
        groups = [torch.cat(images)] if self.shared_vision else images
        outputs = []
        for tower, projector, pixels, grid in zip(self.vision, self.projector, groups, self.grids, strict=False):
            plain = pixels.device.type == "cpu" and grid[0] * grid[1] <= _LONGEST_PLAIN_ATTENTION
            for block in tower.blocks:
                block.attn.fused_attn = not plain  # see `attend`
            x = tower.forward_features(self._normalized_pixels(pixels))
            outputs.append(projector(merge_tokens(x, grid, self.config.merge)))
        if self.shared_vision:
            outputs = list(outputs[0].chunk(len(images)))
        return torch.cat(outputs, dim=1) + self.image_positions

    def _normalized_pixels(self, pixels: Tensor) -> Tensor:
        """uint8 → [-1, 1]. Integers up to 255 and their distance to 127.5 are exact in bfloat16."""
        dtype = torch.bfloat16 if self.uses_bfloat16() else torch.float32
        return pixels.to(dtype).sub_(127.5).mul_(1 / 127.5)

    def _text_tokens(self, ids: Tensor) -> Tensor:
        """Instruction tokens [u T d], or pooled by learned queries into [u ``instruction_tokens`` d]."""
        x = self.trunk.llama.embed_tokens(ids) + self.text_positions
        if not self.config.instruction_tokens:
            return x
        scores = (self.text_queries @ x.transpose(1, 2)) * x.shape[-1] ** -0.5
        scores = scores.masked_fill((ids == PAD_ID)[:, None], _MASKED)
        pooled = scores.softmax(-1) @ x
        return pooled + self.text_mlp(pooled)

    def _prefix(self, images: list[Tensor], text_ids: Tensor, text_rows: Tensor, proprio: Tensor) -> Tensor:
        parts = [self._vision_tokens(images), self._text_tokens(text_ids)[text_rows]]
        if self.config.use_proprio:
            normalized = ((proprio - self.proprio_mean) / self.proprio_std).clamp(-5.0, 5.0)
            parts.append(self.proprio_mlp(normalized)[:, None])
        return torch.cat([part.float() for part in parts], dim=1)

    def _inputs(self, observation: Observation) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        ids, rows = self._text_ids(observation.instruction)
        return self._images(observation), ids, rows, observation.proprio.to(self.device)

    # ------------------------------------------------------------------------------------------------------- forward
    def _slot_inputs(self, tokens: Tensor | None, b: int) -> Tensor:
        """Input [b S d] of the action positions; in autoregressive decoding each also reads the tokens before it."""
        queries = self.action_queries.expand(b, -1, -1)
        if tokens is None:
            return queries
        before = self._embed_tokens(tokens.reshape(b, self.slots, self.group))[:, :-1]
        return queries + F.pad(before, (0, 0, 1, 0))

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        """Sum of the embeddings of each position's tokens: [b s g] → [b s d]."""
        offsets = torch.arange(self.group, device=tokens.device) * self.config.action_bins
        return self.action_embedding(tokens.long() + offsets).sum(-2)

    def _forward(
        self, images: list[Tensor], text_ids: Tensor, text_rows: Tensor, proprio: Tensor, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Raw logits float32 [b h a bins] and value [b]; ``tokens`` [b h a] feed autoregressive decoding."""
        with self._autocast():
            prefix = self._prefix(images, text_ids, text_rows, proprio)
            x = torch.cat([prefix, self._slot_inputs(tokens, len(prefix))], dim=1)
            x, _ = self.trunk(x, causal=tokens is not None)
            logits = self._logits(x[:, self.prefix_length :])
        return logits, self._value(x)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[b s d] → raw logits float32 [b s·g/a a bins] (one position of a token-wise model: [b 1 1 bins])."""
        b, s, _ = hidden.shape
        logits = self.action_head(hidden).float()
        if s == self.slots:
            logits = logits.view(b, self.chunk_length, -1, self.config.action_bins)
            return logits.masked_fill(self.unused_bins, _MASKED) if self.has_unused_bins else logits
        return logits.view(b, s, self.group, self.config.action_bins)

    def _value(self, hidden: Tensor) -> Tensor | None:
        """Value from the last prefix position, which sees all inputs and no action in either decoding."""
        if not self.config.value_head:
            return None
        pooled = hidden[:, self.prefix_length - 1].float()
        return self.value_mlp(pooled if self.config.value_gradient else pooled.detach()).squeeze(-1)

    def logits_and_value(self, observation: Observation, tokens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [b h a bins] at temperature 1, and value [b] or None, with gradient."""
        if self.config.decoding == "autoregressive" and tokens is None:
            raise ValueError("autoregressive decoding needs the action tokens to compute logits")
        if self.config.decoding == "parallel":
            tokens = None
        forward = self._forward
        if self.config.compile:
            self._compiled = self._compiled or torch.compile(self._forward, dynamic=True)
            forward = self._compiled
        return forward(*self._inputs(observation), None if tokens is None else tokens.to(self.device))

    def _log_probs(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits / self.temperature, dim=-1)

    def _choose(self, log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
        return log_probs.argmax(-1) if uniforms is None else sample_inverse_cdf(log_probs, uniforms)

    def _decode(self, observation: Observation, uniforms: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Autoregressive decoding with a KV cache: tokens [b h a], log-probs [b h a bins], value [b]."""
        unused = self.unused_bins.view(-1, self.group, self.config.action_bins)  # by position within a control step
        chosen, all_log_probs = [], []
        with self._autocast():
            prefix = self._prefix(*self._inputs(observation))
            x = torch.cat([prefix, self.action_queries[:1].expand(len(prefix), 1, -1)], dim=1)
            hidden, past = self.trunk(x, causal=True)
            value = self._value(hidden)
            for s in range(self.slots):
                logits = self._logits(hidden[:, -1:])[:, 0].masked_fill(unused[s % len(unused)], _MASKED)
                log_probs = self._log_probs(logits)  # [b g bins]
                tokens = self._choose(log_probs, None if uniforms is None else uniforms[:, s])
                chosen.append(tokens)
                all_log_probs.append(log_probs)
                if s + 1 < self.slots:
                    x = self._embed_tokens(tokens[:, None]) + self.action_queries[s + 1]
                    hidden, past = self.trunk(x, True, self.prefix_length + s + 1, past)
        shape = (len(prefix), self.chunk_length, self.embodiment.action_dim)
        return torch.stack(chosen, 1).view(shape), torch.stack(all_log_probs, 1).view(*shape, -1), value

    # ---------------------------------------------------------------------------------------------------- interfaces
    @torch.no_grad()
    def act(
        self, observation: Observation, *, deterministic: bool = False, seeds: Sequence[int] | None = None
    ) -> PolicyOutput:
        """One chunk per row, in physical units; see `vla_rl.interfaces.Policy`.

        ``seeds`` [b] need to differ between decisions as well as between rows. Without them torch's global generator
        draws them. The reported log-prob is that of the chosen tokens at the sampling temperature.
        """
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        uniforms = None
        if not deterministic:
            if seeds is None:
                seeds = torch.randint(2**62, (b,)).tolist()
            if len(seeds) != b:
                raise ValueError(f"act got {len(seeds)} seeds for {b} observations")
            uniforms = torch.from_numpy(counter_uniforms(seeds, h * a)).to(self.device).view(b, h, a)
        if self.config.decoding == "autoregressive":
            flat = None if uniforms is None else uniforms.view(b, self.slots, self.group)
            tokens, log_probs, value = self._decode(observation, flat)
        else:
            logits, value = self.logits_and_value(observation)
            log_probs = self._log_probs(logits)
            tokens = self._choose(log_probs, uniforms)
        actions = decode_actions(tokens, self.bin_centers)
        if deterministic and self.config.deterministic_mode == "mean":
            actions = (log_probs.exp() * self._finite_centers()).sum(-1)
        return PolicyOutput(
            chunk=ActionChunk(actions=actions, valid=torch.ones(b, h, dtype=torch.bool, device=self.device)),
            behavior_log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            replay={"action_tokens": tokens.to(torch.int16)},
            value=value,
        )

    def _finite_centers(self) -> Tensor:
        return self.bin_centers.masked_fill(self.unused_bins, 0.0)

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b h a] of stored ``action_tokens`` at the sampling temperature, with gradient."""
        tokens = replay["action_tokens"].to(self.device).long()
        logits, value = self.logits_and_value(observation, tokens)
        log_probs = self._log_probs(logits)
        return PolicyEvaluation(
            log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            value=value,
        )

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Action tokens int64 [b h a] of physical actions; `replay` for actions that came from elsewhere."""
        return encode_actions(actions.to(self.device), self.bin_centers)

    def imitation_loss(self, observation: Observation, actions: Tensor, valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy per token over valid control steps (temperature 1).

        Metrics: ``nll`` (nats per token against hard labels), ``accuracy`` (argmax equals the label), ``mae`` (argmax
        against the true action, mean over dimensions, physical units), ``entropy`` (nats per token).
        """
        if tuple(actions.shape[1:]) != (self.chunk_length, self.embodiment.action_dim):
            raise EmbodimentMismatch(
                f"imitation_loss got actions {tuple(actions.shape)}, this policy predicts chunks of "
                f"{self.chunk_length} x {self.embodiment.action_dim}: set policy.chunk_length to the data's"
            )
        actions = actions.to(self.device)
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(actions)
        weight = weight / weight.sum().clamp(min=1.0)
        tokens = self.encode_actions(actions)
        logits, _ = self.logits_and_value(observation, tokens)
        log_probs = F.log_softmax(logits, dim=-1)
        nll = -log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        loss = (nll * weight).sum()
        metrics_loss = loss.detach()
        if self.config.soft_label_sigma > 0:
            loss = -((self._soft_labels(actions, tokens) * log_probs).sum(-1) * weight).sum()
        if self.config.label_smoothing > 0:
            used = (~self.unused_bins).float()
            uniform = -(log_probs * used / used.sum(-1, keepdim=True)).sum(-1)
            loss = (1 - self.config.label_smoothing) * loss + self.config.label_smoothing * (uniform * weight).sum()
        with torch.no_grad():
            best = log_probs.argmax(-1)
            metrics = torch.stack(
                [
                    metrics_loss,
                    ((best == tokens) * weight).sum(),
                    ((decode_actions(best, self.bin_centers) - actions).abs() * weight).sum(),
                    (-(log_probs.exp() * log_probs).sum(-1) * weight).sum(),
                ]
            ).tolist()
        return loss, dict(zip(("nll", "accuracy", "mae", "entropy"), metrics, strict=True))

    def _soft_labels(self, actions: Tensor, tokens: Tensor) -> Tensor:
        """Gaussian weights [b h a bins] around the action, ``soft_label_sigma`` bins wide; they sum to one.

        Distance is counted in bins, between neighbours interpolated: an action half-way between two centres weighs
        both alike. Dimensions with two bins get hard labels.
        """
        centers = self._finite_centers()
        dims = torch.arange(centers.shape[0], device=centers.device)
        nearest = centers[dims, tokens]
        upper = centers[dims, (tokens + 1).clamp(max=self.config.action_bins - 1)]
        lower = centers[dims, (tokens - 1).clamp(min=0)]
        offset = actions - nearest
        gap = torch.where(offset >= 0, upper - nearest, nearest - lower)
        position = tokens + torch.where(gap > 0, offset / gap.clamp(min=1e-12), torch.zeros_like(gap)).clamp(-0.5, 0.5)
        bins = torch.arange(self.config.action_bins, device=centers.device)
        soft = -0.5 * ((bins - position[..., None]) / self.config.soft_label_sigma) ** 2
        soft = soft.masked_fill(self.unused_bins, -math.inf).softmax(-1)
        if not self.has_unused_bins:
            return soft
        hard = F.one_hot(tokens, self.config.action_bins).float()
        return torch.where(self.unused_bins.any(-1)[:, None], hard, soft)

    # --------------------------------------------------------------------------------------------------- checkpoints
    def config_dict(self) -> dict[str, Any]:
        """What `config.json` holds: enough, with the embodiment and the tokenizer, to build this policy again."""
        return {
            "config": dataclasses.asdict(self.config),
            "action_stats": self.action_stats.to_dict(),
            "proprio_stats": self.proprio_stats.to_dict(),
        }

    def extra_files(self) -> dict[str, str]:
        """Text files of a checkpoint beside the weights."""
        return {"tokenizer.json": self.tokenizer.to_json()}

    @classmethod
    def from_statistics(
        cls,
        config: NanoVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
        *,
        seed: int | None = None,
    ) -> NanoVLA:
        """A new policy for a dataset's statistics (dicts as of `VectorStats.to_dict`).

        ``seed`` fixes its weights; without one they are drawn from torch's generator as it stands (a run seeds it).
        """
        with contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return cls(config, embodiment, VectorStats.from_dict(action_stats), VectorStats.from_dict(proprio_stats))

    @classmethod
    def from_config_dict(cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]) -> NanoVLA:
        """Inverse of `config_dict` and `extra_files` (weights are loaded afterwards)."""
        known = {f.name for f in dataclasses.fields(NanoVLAConfig)}
        unknown = sorted(set(data["config"]) - known)
        if unknown:
            raise ConfigError(f"the checkpoint's policy config has unknown keys {unknown}: it needs a newer vla_rl")
        return cls(
            NanoVLAConfig(**data["config"]),
            embodiment,
            VectorStats.from_dict(data["action_stats"]),
            VectorStats.from_dict(data["proprio_stats"]),
            WordTokenizer.from_json(files["tokenizer.json"]),
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def _parameter(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=std))


def native_bfloat16(device_type: str) -> bool:
    """Whether the device multiplies bfloat16 in hardware, so that autocast pays."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device_type == "cpu" and check is not None and bool(check())
