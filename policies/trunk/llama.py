"""The small Llama: blocks, rotary positions, attention with a cache, and the layers around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from policies.settings import (
    TrunkConfig,
)
from policies.tokenizer import PAD_ID
from policies.trunk.modules import Modules

LONGEST_PLAIN_ATTENTION = 256
_EPSILON = 1e-6  # of the norms, as in Llama
MASKED = -1e9  # a logit that means probability exactly 0 in float32


def init_linear(linear: nn.Linear, std: float | None = None) -> nn.Linear:
    nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5 if std is None else std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, hidden: int, outputs: int, out_std: float | None = None) -> nn.Sequential:
    return nn.Sequential(
        init_linear(nn.Linear(inputs, hidden)),
        nn.GELU(),
        init_linear(nn.Linear(hidden, outputs), out_std),
    )


# ---------------------------------------------------------------------------------------- the Llama
class _Linears(nn.Module):
    """Linear layers without bias under their names, {name: (inputs, outputs)}."""

    def __init__(self, **shapes: tuple[int, int]):
        super().__init__()
        for name, shape in shapes.items():
            self.add_module(name, nn.Linear(*shape, bias=False))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nn.Linear: ...


class _TrunkBlock(nn.Module):
    """Attention and gated MLP of one layer of the `LlamaTrunk`; its parts have the names that
    transformers gives them.

    It is called as a module, so that whatever hooks a module's call (FSDP2, profilers) sees every
    block.
    """

    def __init__(self, config: TrunkConfig):
        super().__init__()
        width, hidden = config.llm_width, config.llm_mlp
        self.heads, self.dropout = config.llm_heads, config.dropout
        square, up = (width, width), (width, hidden)
        self.self_attn = _Linears(q_proj=square, k_proj=square, v_proj=square, o_proj=square)
        self.mlp = _Linears(gate_proj=up, up_proj=up, down_proj=(hidden, width))
        self.input_layernorm = nn.RMSNorm(width, eps=_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=_EPSILON)

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
        """Hidden states after the layer (with ``cache_only`` those before it), keys and values;
        see `LlamaTrunk.forward`."""
        attention, mlp = self.self_attn, self.mlp
        y = self.input_layernorm(x)
        k, v = rotate(self._split(attention.k_proj(y)), cos, sin), self._split(attention.v_proj(y))
        if cache_only:
            return x, k, v
        # (-0: all of them)
        x, y, cos, sin = x[:, -wanted:], y[:, -wanted:], cos[-wanted:], sin[-wanted:]
        b, length, width = x.shape
        q = rotate(self._split(attention.q_proj(y)), cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # One new position sees everything before it, so a cached step needs no mask either.
        y = attend(q, k, v, causal and length > 1)
        y = attention.o_proj(y.transpose(1, 2).reshape(b, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.post_attention_layernorm(x)
        y = mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        return x + F.dropout(y, self.dropout, self.training), k, v

    def _split(self, y: Tensor) -> Tensor:
        """[b L d] → [b heads L head]."""
        return y.view(*y.shape[:2], self.heads, y.shape[2] // self.heads).transpose(1, 2)


class _LlamaWeights(nn.Module):
    """What transformers' `LlamaModel` holds, under its names, so that either reads the other's
    checkpoints."""

    def __init__(self, config: TrunkConfig, vocab_size: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.llm_width, PAD_ID)
        self.layers = Modules(_TrunkBlock(config) for _ in range(config.llm_depth))
        self.norm = nn.RMSNorm(config.llm_width, eps=_EPSILON)
        # `LlamaModel` draws them twice: a seed is to give the weights that it always gave
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
        with torch.no_grad():
            self.embed_tokens.weight[PAD_ID].zero_()


class LlamaTrunk(nn.Module):
    """A Llama: the result of transformers' `LlamaModel`, without the generic code per call and
    the seconds of its import."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: TrunkConfig, vocab_size: int, max_length: int):
        super().__init__()
        self.llama = _LlamaWeights(config, vocab_size)
        self.checkpointing = config.gradient_checkpointing
        half = config.llm_width // config.llm_heads // 2
        angles = torch.arange(max_length)[:, None] * config.rope_theta ** -(
            torch.arange(half) / half
        )
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)  # [L head]
        self.register_buffer("rope_sin", angles.sin(), persistent=False)
        for block in self.llama.layers:
            attention, mlp = block.self_attn, block.mlp
            for linear in (
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                mlp.gate_proj,
                mlp.up_proj,
            ):
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

        ``wanted`` asks for the hidden states of the last so many positions alone (not with
        ``causal``): the last layer then spares the others everything but their keys and values.
        Positions are ``start`` … ``start`` + L − 1. ``past`` holds the keys and values of the
        positions before (one new position at a time). Without ``causal`` every position sees every
        other. ``cache_only`` spares what the last layer does after its keys and values; the hidden
        states are then those before it.
        """
        cos, sin = (
            self.rope_cos[start : start + x.shape[1]],
            self.rope_sin[start : start + x.shape[1]],
        )
        present = []
        for i, layer in enumerate(self.llama.layers):
            last = i + 1 == len(self.llama.layers)
            options = (
                causal,
                None if past is None else past[i],
                wanted if last else 0,
                cache_only and last,
            )
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x, k, v = checkpoint.checkpoint(layer, x, cos, sin, *options, use_reentrant=False)
            else:
                x, k, v = layer(x, cos, sin, *options)
            present.append((k, v))
        return (x if cache_only else self.llama.norm(x)), present


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention [b heads L head].

    On CPUs the plain products: the fused kernel's bfloat16 backward is ten times slower at the
    lengths met here (36 tokens, 128 images, one core, torch 2.10: 58 ms against 5 ms).
    """
    if q.device.type != "cpu" or max(q.shape[2], k.shape[2]) > LONGEST_PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        length = q.shape[2]
        scores = scores + torch.full(
            (length, length), MASKED, dtype=scores.dtype, device=q.device
        ).triu_(1)
    return scores.softmax(-1) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of transformers."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def parameter(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=std))


def native_bfloat16(device_type: str) -> bool:
    """Whether the device multiplies bfloat16 in hardware, so that autocast pays."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device_type == "cpu" and check is not None and bool(check())
