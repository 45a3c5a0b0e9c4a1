"""The small Llama: blocks, rotary positions, attention with a cache, and the layers around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from policies.settings import (
    TrunkConfig,
)
from policies.tokenizer import PAD_ID

LONGEST_PLAIN_ATTENTION = 256
MASKED = -1e9  # a logit that means probability exactly 0 in float32


def init_linear(linear: nn.Linear, std: float | None = None) -> nn.Linear:
    nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5 if std is None else std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, hidden: int, outputs: int, out_std: float | None = None) -> nn.Sequential:
    return nn.Sequential(init_linear(nn.Linear(inputs, hidden)), nn.GELU(), init_linear(nn.Linear(hidden, outputs), out_std))


# ----------------------------------------------------------------------------------------------------------- the Llama
class LlamaBlock(nn.Module):
    """Takes over the parts of one of transformers' Llama layers under their names; a subclass has the forward.

    It is called as a module, so that whatever hooks a module's call (FSDP2, profilers) sees every block.
    """

    self_attn: LlamaAttention
    mlp: LlamaMLP
    input_layernorm: LlamaRMSNorm
    post_attention_layernorm: LlamaRMSNorm

    def __init__(self, layer: nn.Module):
        super().__init__()
        assert isinstance(layer, LlamaDecoderLayer), f"its parts are those of a Llama layer, not of {type(layer).__name__}"
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

    rope_cos: Tensor
    rope_sin: Tensor

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
        blocks = [TrunkBlock(x, config.llm_heads, config.dropout) for x in self.llama.layers]
        self.llama.layers = nn.ModuleList(blocks)
        self.checkpointing = config.gradient_checkpointing
        half = config.llm_width // config.llm_heads // 2
        angles = torch.arange(max_length)[:, None] * config.rope_theta ** -(torch.arange(half) / half)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)  # [L head]
        self.register_buffer("rope_sin", angles.sin(), persistent=False)
        for block in blocks:
            attention, mlp = block.self_attn, block.mlp
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
    if q.device.type != "cpu" or max(q.shape[2], k.shape[2]) > LONGEST_PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        length = q.shape[2]
        scores = scores + torch.full((length, length), MASKED, dtype=scores.dtype, device=q.device).triu_(1)
    return scores.softmax(-1) @ v


def rms_norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


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
