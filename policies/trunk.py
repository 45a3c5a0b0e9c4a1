"""The vision-language trunk that the small VLA policies share: cameras, instruction and proprioception become a prefix.

Parts and order are those of OpenVLA (arXiv 2406.09246): timm ViT → projector → Llama. A policy puts its own head on top:
action tokens (`policies.nano_vla`) or an action expert that reads the prefix's keys and values (`policies.denoising`).

Prefix: image tokens of each camera | instruction tokens | proprio token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from typing_extensions import Self

from policies.normalization import VectorStats
from policies.settings import (
    TrunkConfig,
    conv_padding,
)
from policies.tokenizer import PAD_ID, WordTokenizer
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.types import EmbodimentSpec, Observation

_LONGEST_PLAIN_ATTENTION = 256
IMAGE_TOKENS = "image_tokens"  # in a decision's replay
MASKED = -1e9  # a logit that means probability exactly 0 in float32


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a channels-last image [b C H W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvStem(nn.Module):
    """Strided convolutions in place of patch embedding: [b 3 H W] → [b N width]. A drop-in ``embed_layer`` of timm."""

    def __init__(self, config: TrunkConfig, height: int, width: int, embed_dim: int):
        super().__init__()
        channels = [3, *config.stem_channels, embed_dim]
        layers: list[nn.Module] = []
        for i, (k, s) in enumerate(zip(config.stem_kernels, config.stem_strides, strict=True)):
            layers.append(nn.Conv2d(channels[i], channels[i + 1], k, s, conv_padding(k, s)))
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


def _vision_tower(config: TrunkConfig, height: int, width: int) -> VisionTransformer:
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
            init_linear(linear)
        for linear in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
    return tower


def init_linear(linear: nn.Linear, std: float | None = None) -> nn.Linear:
    nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5 if std is None else std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, hidden: int, outputs: int, out_std: float | None = None) -> nn.Sequential:
    return nn.Sequential(init_linear(nn.Linear(inputs, hidden)), nn.GELU(), init_linear(nn.Linear(hidden, outputs), out_std))


class FeatureNorm(nn.Module):
    """Standardises one camera's image tokens [b N d] over the data, without parameters of its own.

    Batch normalisation without its affine part (Ioffe & Szegedy 2015, arXiv 1502.03167). Without it the projector can become
    a constant: early in SFT the mean image token serves as a bias that lowers the loss faster than anything an image shows,
    it grows, and what differs between images drowns. Here what all images share is subtracted, so it cannot be learned.

    ``kind`` "position" subtracts the mean of each token over the batch, "batch" that of all tokens together; both
    divide each channel by its standard deviation over batch and tokens. Only while ``learning`` is on (SFT) are these the
    statistics of the batch itself; acting, evaluation and RL use the running ones, so that a decision never depends on what
    it is batched with and the ratio of RL is 1 at unchanged weights.

    Where several ranks learn together, ``total`` adds up over them and the batch is that of all ranks; ``counted`` bool [b]
    then says which of this rank's rows belong to it.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, tokens: int, width: int, kind: str, momentum: float = 0.05, eps: float = 1e-5):
        super().__init__()
        self.over = (0,) if kind == "position" else (0, 1)
        self.momentum, self.eps, self.learning = momentum, eps, False
        self.total: Callable[[Tensor], Tensor] | None = None
        self.counted: Tensor | None = None
        self.register_buffer("mean", torch.zeros(tokens if kind == "position" else 1, width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if not self.learning:
            return (x - self.mean) * (self.var + self.eps).rsqrt()
        x, mean, var = self._centred(x)
        with torch.no_grad():  # early on, average over what there is
            self.count += 1
            share = max(self.momentum, 1.0 / float(self.count))
            self.mean.lerp_(mean, share)
            self.var.lerp_(var, share)
        return x * (var + self.eps).rsqrt()

    def _centred(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` without the batch's mean, that mean, and the variance [d]."""
        if self.total is None:
            mean = x.mean(self.over, keepdim=True)[0]
            x = x - mean
            return x, mean, x.square().mean((0, 1))
        weight = x.new_ones(len(x)) if self.counted is None else self.counted.to(x)
        rows, weight = self.total(weight.sum()), weight[:, None, None]
        mean = self.total((x * weight).sum(self.over, keepdim=True))[0]
        mean = mean / (rows if self.over == (0,) else rows * x.shape[1])
        x = x - mean
        return x, mean, self.total((x.square() * weight).sum((0, 1))) / (rows * x.shape[1])


def merge_tokens(x: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """Pixel-unshuffle of a token grid: [b R·C w] → [b (R/m)·(C/m) m²·w], spatial layout kept."""
    if merge == 1:
        return x
    b, _, w = x.shape
    rows, cols = grid[0] // merge, grid[1] // merge
    x = x.reshape(b, rows, merge, cols, merge, w).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, rows * cols, merge * merge * w)


# ----------------------------------------------------------------------------------------------------------- the Llama
class LlamaBlock(nn.Module):
    """Takes over the parts of one of transformers' Llama layers under their names; a subclass has the forward.

    It is called as a module, so that whatever hooks a module's call (FSDP2, profilers) sees every block.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm


class TrunkBlock(LlamaBlock):
    """Attention and gated MLP of one layer of the `LlamaTrunk`."""

    def __init__(self, layer: nn.Module, heads: int, dropout: float):
        super().__init__(layer)
        self.heads, self.dropout = heads, dropout

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        causal: bool,
        past: tuple[Tensor, Tensor] | None = None,
        wanted: int = 0,
        cache_only: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states after the layer (with ``cache_only`` those before it), keys and values; see `LlamaTrunk.forward`."""
        attention, mlp = self.self_attn, self.mlp
        y = rms_norm(self.input_layernorm, x)
        k, v = rotate(self._split(attention.k_proj(y)), cos, sin), self._split(attention.v_proj(y))
        if cache_only:
            return x, k, v
        x, y, cos, sin = x[:, -wanted:], y[:, -wanted:], cos[-wanted:], sin[-wanted:]  # (-0: all of them)
        b, length, width = x.shape
        q = rotate(self._split(attention.q_proj(y)), cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # One new position sees everything before it, so a cached step needs no mask either.
        y = attend(q, k, v, causal and length > 1)
        y = attention.o_proj(y.transpose(1, 2).reshape(b, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = rms_norm(self.post_attention_layernorm, x)
        y = mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        return x + F.dropout(y, self.dropout, self.training), k, v

    def _split(self, y: Tensor) -> Tensor:
        """[b L d] → [b heads L head]."""
        return y.view(*y.shape[:2], self.heads, y.shape[2] // self.heads).transpose(1, 2)


class LlamaTrunk(nn.Module):
    """The weights of a transformers `LlamaModel` with a lean forward: same result, none of the generic code per call."""

    def __init__(self, config: TrunkConfig, vocab_size: int, max_length: int):
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
        self.llama.layers = nn.ModuleList(TrunkBlock(x, config.llm_heads, config.dropout) for x in self.llama.layers)
        self.checkpointing = config.gradient_checkpointing
        half = config.llm_width // config.llm_heads // 2
        angles = torch.arange(max_length)[:, None] * config.rope_theta ** -(torch.arange(half) / half)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)  # [L head]
        self.register_buffer("rope_sin", angles.sin(), persistent=False)
        for layer in self.llama.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                init_linear(linear)
            for linear in (attention.o_proj, mlp.down_proj):
                nn.init.zeros_(linear.weight)

    def forward(
        self,
        x: Tensor,
        causal: bool,
        start: int = 0,
        past: list[tuple[Tensor, Tensor]] | None = None,
        cache_only: bool = False,
        wanted: int = 0,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states after the final norm [b L d], and keys and values per layer.

        ``wanted`` asks for the hidden states of the last so many positions alone (not with ``causal``): the last layer then
        spares the others everything but their keys and values.
        Positions are ``start`` … ``start`` + L − 1. ``past`` holds the keys and values of the positions before (one new
        position at a time). Without ``causal`` every position sees every other. ``cache_only`` spares what the last
        layer does after its keys and values; the hidden states are then those before it.
        """
        cos, sin = self.rope_cos[start : start + x.shape[1]], self.rope_sin[start : start + x.shape[1]]
        present = []
        for i, layer in enumerate(self.llama.layers):
            last = i + 1 == len(self.llama.layers)
            options = (causal, None if past is None else past[i], wanted if last else 0, cache_only and last)
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x, k, v = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, *options, use_reentrant=False)
            else:
                x, k, v = layer(x, cos, sin, *options)
            present.append((k, v))
        return (x if cache_only else rms_norm(self.llama.norm, x)), present


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
        scores = scores + torch.full((length, length), MASKED, dtype=scores.dtype, device=q.device).triu_(1)
    return scores.softmax(-1) @ v


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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


def share_noise(own: Tensor, shared: Tensor, correlation: float) -> Tensor:
    """Standard normal numbers of which any two correlate by ``correlation``, from independent ones and a common one."""
    return correlation**0.5 * shared + (1.0 - correlation) ** 0.5 * own


def chunk_uniforms(seeds: Sequence[int], h: int, a: int, correlation: float = 0.0) -> Tensor:
    """Sampling noise float32 [b h a], uniform in (0, 1), of which the control steps of a chunk share a part.

    The normal scores of two control steps of one action dimension correlate by ``correlation``: exploration then moves
    a whole chunk one way instead of averaging out over it, as coloured noise does (Hollenstein et al. 2024,
    arXiv 2312.11091). Each number by itself stays uniform: tokens drawn in parallel keep their own distributions, but
    their joint one is no longer the product of these. Of no use where a token is drawn given the ones before it.
    """
    if not correlation:
        return torch.from_numpy(counter_uniforms(seeds, h * a)).view(-1, h, a)
    scores = torch.special.ndtri(torch.from_numpy(counter_uniforms(seeds, (h + 1) * a)).double()).view(-1, h + 1, a)
    mixed = share_noise(scores[:, :h], scores[:, h:], correlation)
    return torch.special.ndtr(mixed).float().clamp_(2.0**-24, 1.0 - 2.0**-24)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index int64 [...] sampled from ``log_probs`` [... bins] by inverting the CDF at ``uniforms`` [...]."""
    cdf = log_probs.exp().cumsum(-1)
    index = (cdf < uniforms[..., None] * cdf[..., -1:]).sum(-1)
    return index.clamp_(max=log_probs.shape[-1] - 1)


# ----------------------------------------------------------------------------------------------------------- the trunk
class VisionLanguageTrunk(nn.Module):
    """Everything of a policy up to its head: inputs, prefix, Llama, value head, statistics, checkpoints.

    ``action_stats`` and ``proprio_stats`` come from the training data (`policies.normalization.VectorStats`); without
    them the embodiment's bounds and the identity are used. ``positions`` is how many sequence positions the head takes
    after the prefix. A subclass sets ``policy_type`` and ``config_class``.
    """

    policy_type: ClassVar[str]
    config_class: ClassVar[type]

    def __init__(
        self,
        config: Any,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
        *,
        positions: int,
    ):
        super().__init__()
        self.config = config
        self.embodiment = embodiment
        self.chunk_length = config.chunk_length
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
        self.keeps_image_tokens = False
        self.rank, self.ranks = 0, 1  # of those that learn together

        d = config.llm_width
        self.cameras = self._chosen_cameras()
        self._build_vision(d)
        text = config.instruction_tokens or config.instruction_length
        self.prefix_length = sum(self.camera_tokens) + text + int(config.use_proprio)
        self.sequence_length = self.prefix_length + positions

        self.trunk = LlamaTrunk(config, self.tokenizer.vocab_size, self.sequence_length)
        nn.init.trunc_normal_(self.trunk.llama.embed_tokens.weight, std=0.5)
        self.text_positions = parameter(config.instruction_length, d)
        if config.instruction_tokens:
            self.text_queries = parameter(config.instruction_tokens, d, std=1.0)
            self.text_mlp = mlp(d, d, d)
        if config.use_proprio:
            self.proprio_mlp = mlp(embodiment.proprio_dim, d, d)
        mean, std = self.proprio_stats.mean_std()
        self.register_buffer("proprio_mean", mean, persistent=False)
        self.register_buffer("proprio_std", std, persistent=False)
        if config.stem_channels:
            self.vision.to(memory_format=torch.channels_last)

    def _build_value_head(self) -> None:
        if self.config.value_head:
            self.value_mlp = mlp(self.config.llm_width, self.config.llm_width, 1, out_std=0.01)

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
        for camera in self.cameras:
            config.check_camera(camera.name, camera.height, camera.width)
        self.camera_tokens = [g[0] * g[1] // config.merge**2 for g in self.grids]
        features = config.vit_width * config.merge**2
        self.projector = nn.ModuleList(mlp(features, d, d) for _ in self.vision)
        self.image_positions = parameter(sum(self.camera_tokens), d, std=0.1)
        self.feature_norms = nn.ModuleList()
        if config.feature_norm != "none":
            self.feature_norms.extend(FeatureNorm(n, d, config.feature_norm) for n in self.camera_tokens)

    # -------------------------------------------------------------------------------------------------------- inputs
    @property
    def device(self) -> torch.device:
        return self.proprio_mean.device

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

    @contextlib.contextmanager
    def learning_features(self, valid: Tensor) -> Iterator[None]:
        """Within the block a policy in training mode standardises image tokens by the batch and keeps the statistics.

        ``valid`` bool [b h]: where several ranks learn together, a row without any control step only fills up a share.
        """
        for norm in self.feature_norms:
            norm.learning, norm.counted = self.training, valid.any(1)
        try:
            yield
        finally:
            for norm in self.feature_norms:
                norm.learning, norm.counted = False, None

    def _projected(self, images: list[Tensor]) -> list[Tensor]:
        """Each camera's image tokens [b N d] as the projector gives them."""
        groups = [torch.cat(images)] if self.shared_vision else images
        outputs = []
        for tower, projector, pixels, grid in zip(self.vision, self.projector, groups, self.grids, strict=False):
            plain = pixels.device.type == "cpu" and grid[0] * grid[1] <= _LONGEST_PLAIN_ATTENTION
            for block in tower.blocks:
                block.attn.fused_attn = not plain  # see `attend`
            x = tower.forward_features(self._normalized_pixels(pixels))
            outputs.append(projector(merge_tokens(x, grid, self.config.merge)))
        return list(outputs[0].chunk(len(images))) if self.shared_vision else outputs

    def image_tokens(self, observation: Observation, replay: Mapping[str, Tensor] | None = None) -> Tensor:
        """Standardised image tokens float32 [b N d] of all cameras: those that ``replay`` kept, where it did."""
        if replay is not None and IMAGE_TOKENS in replay:
            return replay[IMAGE_TOKENS].to(self.device)
        with self._autocast():
            outputs = self._projected(self._images(observation))
        if self.feature_norms:
            outputs = [norm(x) for norm, x in zip(self.feature_norms, outputs, strict=True)]
        return torch.cat(outputs, dim=1).float()

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, for `vla_rl.cluster.ranks.shard`."""
        return [*(block for tower in self.vision for block in tower.blocks), *self.trunk.llama.layers]

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """See `vla_rl.interfaces.ShardablePolicy`: image tokens are standardised over the rows of all ranks."""
        self.rank, self.ranks = index, size
        for norm in self.feature_norms:
            norm.total = total

    def prepare_for_rl(self) -> None:
        """Called before RL: with ``freeze_vision_in_rl`` the vision tower and the projector stay as SFT left them.

        Their output then belongs to the decision: `act` keeps it in the replay, and no update encodes an image again.
        """
        self.keeps_image_tokens = self.config.freeze_vision_in_rl
        if self.keeps_image_tokens:
            self.vision.requires_grad_(False)
            self.projector.requires_grad_(False)

    def _kept(self, image_tokens: Tensor) -> dict[str, Tensor]:
        """What a decision's replay holds of its images."""
        return {IMAGE_TOKENS: image_tokens} if self.keeps_image_tokens else {}

    @torch.no_grad()
    def image_token_spread(self, observation: Observation) -> float:
        """What differs between the rows' projected images as a share of all there is: near 0 the images are constants.

        The root of (variance over the rows / mean square), over tokens and channels, before any standardising.
        """
        with self._autocast():
            x = torch.cat([part.float() for part in self._projected(self._images(observation))], dim=1)
        return float((x.var(0, unbiased=False).mean() / x.square().mean().clamp(min=1e-12)).sqrt())

    @torch.inference_mode()
    def image_features(self, frames: Tensor) -> Tensor:
        """The vision tower's mean token float32 [n vit_width] for frames uint8 [n H W 3] of the first camera."""
        camera = self.cameras[0]
        if tuple(frames.shape[1:]) != (camera.height, camera.width, 3):
            raise EmbodimentMismatch(
                f"the policy reads images of {camera.height}x{camera.width}x3, got {tuple(frames.shape[1:])}: encode frames "
                f"of camera {camera.name}"
            )
        with self._autocast():
            pixels = self._normalized_pixels(frames.to(self.device).permute(0, 3, 1, 2))
            return self.vision[0].forward_features(pixels).float().mean(1)

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
        scores = scores.masked_fill((ids == PAD_ID)[:, None], MASKED)
        pooled = scores.softmax(-1) @ x
        return pooled + self.text_mlp(pooled)

    def _prefix(self, image_tokens: Tensor, text_ids: Tensor, text_rows: Tensor, proprio: Tensor) -> Tensor:
        parts = [image_tokens + self.image_positions, self._text_tokens(text_ids)[text_rows]]
        if self.config.use_proprio:
            normalized = ((proprio - self.proprio_mean) / self.proprio_std).clamp(-5.0, 5.0)
            parts.append(self.proprio_mlp(normalized)[:, None])
        return torch.cat([part.float() for part in parts], dim=1)

    def _inputs(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `_prefix` takes: image tokens, distinct instructions, which of them each row has, proprio."""
        ids, rows = self._text_ids(observation.instruction)
        self._require_proprio(observation)
        return self.image_tokens(observation, replay), ids, rows, observation.proprio.to(self.device)

    def _require_proprio(self, observation: Observation) -> None:
        if observation.proprio.shape[1] != self.embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the policy reads {self.embodiment.proprio_dim} proprio dimensions "
                f"({', '.join(self.embodiment.proprio_names)}), the observation has {observation.proprio.shape[1]}"
            )

    def _value(self, prefix: Tensor) -> Tensor | None:
        """Value from the last hidden state of the prefix: it sees all inputs and no action, in either decoding."""
        if not self.config.value_head:
            return None
        pooled = prefix[:, -1].float()
        return self.value_mlp(pooled if self.config.value_gradient else pooled.detach()).squeeze(-1)

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
        config: Any,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
        *,
        seed: int | None = None,
    ) -> Self:
        """A new policy for a dataset's statistics (dicts as of `VectorStats.to_dict`).

        ``seed`` fixes its weights; without one they are drawn from torch's generator as it stands (a run seeds it).
        """
        with contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return cls(config, embodiment, VectorStats.from_dict(action_stats), VectorStats.from_dict(proprio_stats))

    @classmethod
    def from_config_dict(cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]) -> Self:
        """Inverse of `config_dict` and `extra_files` (weights are loaded afterwards)."""
        known = {f.name for f in dataclasses.fields(cls.config_class)}
        values = dict(data["config"])
        if "feature_norm" not in values:  # made before there was one: it acts, and learns, as it did
            values |= {"feature_norm": "none", "freeze_vision_in_rl": False}
            warnings.warn(
                "this checkpoint's policy has no feature_norm: it was trained before image features were standardised, and "
                "may hardly look at its images. It acts as before; SFT anew gives one that sees.",
                stacklevel=2,
            )
        if values.get("decoding") == "autoregressive" and values.get("noise_correlation"):
            values["noise_correlation"] = None  # older ones say 0.8 there, which is refused now: it biased RL
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"the checkpoint's policy config has unknown keys {unknown}: it needs a newer vla_rl")
        return cls(
            cls.config_class(**values),
            embodiment,
            VectorStats.from_dict(data["action_stats"]),
            VectorStats.from_dict(data["proprio_stats"]),
            WordTokenizer.from_json(files["tokenizer.json"]),
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def parameter(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=std))


def native_bfloat16(device_type: str) -> bool:
    """Whether the device multiplies bfloat16 in hardware, so that autocast pays."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device_type == "cpu" and check is not None and bool(check())
