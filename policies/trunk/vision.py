"""Images to tokens: a convolutional stem, a ViT, merging, and standardised features."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.settings import (
    TrunkConfig,
    conv_padding,
)
from policies.trunk.llama import attend, init_linear

_EPSILON = 1e-6  # of the norms, as in timm's ViT


class _ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a channels-last image [b C H W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FiLM(nn.Module):
    """Scales and shifts the channels of [b C H W] by what a condition [b z] says (Perez et al.
    2018, arXiv 1709.07871).

    Without a condition, and where it is 0, nothing is changed.
    """

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.linear = init_linear(nn.Linear(width, 2 * channels, bias=False))
        self.condition: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.condition is None:
            return x
        scale, shift = self.linear(self.condition)[:, :, None, None].chunk(2, 1)
        return x * (1.0 + scale) + shift


@contextlib.contextmanager
def conditioned(tower: nn.Module, condition: Tensor | None) -> Iterator[None]:
    """Within the block the `FiLM` layers of ``tower`` follow ``condition`` [b z]."""
    layers = [module for module in tower.modules() if isinstance(module, FiLM)]
    try:
        for layer in layers:
            layer.condition = condition
        yield
    finally:
        for layer in layers:
            # holds no graph, and images without an instruction are seen as they are
            layer.condition = None


class _ConvStem(nn.Module):
    """Strided convolutions in place of patch embedding: [b 3 H W] → [b N width].

    With ``config.film`` every convolution but the last is followed by a `FiLM`.
    """

    def __init__(self, config: TrunkConfig, height: int, width: int, embed_dim: int):
        super().__init__()
        channels = [3, *config.stem_channels, embed_dim]
        layers: list[nn.Module] = []
        for i, (k, s) in enumerate(zip(config.stem_kernels, config.stem_strides, strict=True)):
            layers.append(nn.Conv2d(channels[i], channels[i + 1], k, s, conv_padding(k, s)))
            if i + 1 < len(config.stem_kernels):
                if config.stem_norm == "layer":
                    layers.append(_ChannelNorm(channels[i + 1], eps=1e-6))
                if config.film:
                    layers.append(FiLM(config.llm_width, channels[i + 1]))
                layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)
        self.grid_size = config.grid(height, width)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        for module in self.layers:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).transpose(1, 2)


class _PatchEmbed(nn.Module):
    """Square patches: [b 3 H W] → [b N width]."""

    def __init__(self, patch: int, height: int, width: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, patch, patch)
        self.num_patches = (height // patch) * (width // patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(b, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = attend(q, k, v, causal=False).transpose(1, 2).reshape(b, length, width)
        return F.dropout(self.proj(x), self.dropout, self.training)


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.fc1(x)), self.dropout, self.training)
        return F.dropout(self.fc2(x), self.dropout, self.training)


class _VisionBlock(nn.Module):
    def __init__(self, config: TrunkConfig):
        super().__init__()
        width = config.vit_width
        self.norm1 = nn.LayerNorm(width, eps=_EPSILON)
        self.attn = _Attention(width, config.vit_heads, config.dropout)
        self.norm2 = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = _FeedForward(width, int(width * config.vit_mlp_ratio), config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """A ViT (Dosovitskiy et al. 2020, arXiv 2010.11929) without a class token: pictures of one
    camera [b 3 H W] → tokens [b N width]. Its parts have the names that timm gives them, whose
    import takes seconds."""

    def __init__(self, config: TrunkConfig, height: int, width: int):
        super().__init__()
        size = (height, width, config.vit_width)
        embed = (
            _ConvStem(config, *size)
            if config.stem_channels
            else _PatchEmbed(config.patch_size, *size)
        )
        self.patch_embed = embed
        self.pos_embed = nn.Parameter(torch.empty(1, embed.num_patches, config.vit_width))
        blocks = [_VisionBlock(config) for _ in range(config.vit_depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(config.vit_width, eps=_EPSILON)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for block in blocks:
            for linear in (block.attn.qkv, block.mlp.fc1):
                init_linear(linear)
            for linear in (block.attn.proj, block.mlp.fc2):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.norm(self.blocks(self.patch_embed(pixels) + self.pos_embed))


class FeatureNorm(nn.Module):
    """Standardises one camera's image tokens [b N d] over the data, without parameters of its own.

    Batch normalisation without its affine part (Ioffe & Szegedy 2015, arXiv 1502.03167). Without it
    the projector can become a constant: early in SFT the mean image token serves as a bias that
    lowers the loss faster than anything an image shows, it grows, and what differs between images
    drowns. Here what all images share is subtracted, so it cannot be learned.

    ``kind`` "position" subtracts the mean of each token over the batch, "batch" that of all tokens
    together; both divide each channel by its standard deviation over batch and tokens. Only while
    ``learning`` is on (SFT) are these the statistics of the batch itself; acting, evaluation and RL
    use the running ones, so that a decision never depends on what it is batched with and the ratio
    of RL is 1 at unchanged weights.

    Where several ranks learn together, ``total`` adds up over them and the batch is that of all
    ranks; ``counted`` bool [b] then says which of this rank's rows belong to it.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(
        self, tokens: int, width: int, kind: str, momentum: float = 0.05, eps: float = 1e-5
    ):
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
