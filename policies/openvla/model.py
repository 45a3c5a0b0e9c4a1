"""The network of OpenVLA: two vision transformers → projector → Llama-2, with OpenVLA-OFT's extra
parts.

Modules carry the names of the published checkpoints, so that a state dict is in their format as it
is. timm and transformers provide the layers and hold the weights; the forward passes are written
out here, with every mask explicit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.openvla.config import Architecture, TowerSpec
from policies.trunk.llama import rotate
from vla_rl.errors import UserError

if TYPE_CHECKING:  # their import takes seconds: it waits for a model that is made
    from timm.models.vision_transformer import VisionTransformer
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaForCausalLM,
        LlamaModel,
        LlamaRMSNorm,
    )


# ------------------------------------------------------------------------------------------- vision
class _LayerScale(nn.Module):
    """timm's LayerScale under the parameter name of the checkpoints, which dodges transformers'
    renaming of gamma."""

    def __init__(self, width: int, value: float = 1e-5):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


def _tower(spec: TowerSpec, where: str) -> VisionTransformer:
    """timm's vision transformer. `UserError` for what timm does not know, cannot build so, or is
    no such transformer."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    options: dict[str, Any] = {"img_size": spec.image_size, "num_classes": 0, **spec.arguments}
    if spec.act_layer is not None:
        options["act_layer"] = spec.act_layer
    tower: nn.Module | None = None
    problem = "timm knows no such model"
    # a colon would make timm look elsewhere, even online
    if ":" not in spec.timm_name and timm.is_model(spec.timm_name):
        try:
            tower = timm.create_model(spec.timm_name, pretrained=False, **options)
        except Exception as error:  # timm passes sizes on to many constructors
            problem = f"timm cannot build it with {options}: {error}"
        else:
            problem = f"it is a {type(tower).__name__}, no VisionTransformer"
    if not isinstance(tower, VisionTransformer):
        raise UserError(
            f"{where} names the vision tower {spec.timm_name!r} (timm_model_ids): {problem}. Use "
            "the config.json that the checkpoint was published with, or another version of timm"
        )
    for block in tower.blocks:
        for name in ("ls1", "ls2"):
            if isinstance(gamma := getattr(getattr(block, name), "gamma", None), Tensor):
                setattr(block, name, _LayerScale(len(gamma)))
    return tower


class VisionBackbone(nn.Module):
    """Patch features of the second-to-last block of each tower, without its final norm, joined
    by channels."""

    def __init__(self, architecture: Architecture):
        super().__init__()
        self.featurizer = _tower(architecture.towers[0], architecture.where)
        self.fused_featurizer = (
            _tower(architecture.towers[1], architecture.where) if architecture.fused else None
        )
        counts = [tower.patch_embed.num_patches for tower in self.towers]
        if len(set(counts)) > 1:
            raise UserError(
                f"{architecture.where} names two vision towers (timm_model_ids) with {counts[0]} "
                f"and {counts[1]} patches an image, which cannot be joined: use the config.json "
                "that the checkpoint was published with"
            )
        self.checkpointing = False

    @property
    def towers(self) -> list[VisionTransformer]:
        return [
            self.featurizer,
            *([] if self.fused_featurizer is None else [self.fused_featurizer]),
        ]

    @property
    def width(self) -> int:
        return sum(tower.embed_dim for tower in self.towers)

    @property
    def patches(self) -> int:
        return self.featurizer.patch_embed.num_patches

    def unused_parameters(self) -> list[nn.Parameter]:
        """What lies behind the second-to-last block: in the checkpoint, but never computed."""
        unused = []
        for tower in self.towers:
            later = [
                tower.blocks[-1],
                tower.norm,
                getattr(tower, "attn_pool", None),
                getattr(tower, "fc_norm", None),
            ]
            unused += [p for module in later if module is not None for p in module.parameters()]
        return unused

    def forward(self, pixels: list[Tensor]) -> Tensor:
        """Normalised images [n 3 S S] per tower → features [n patches width]."""
        return torch.cat(
            [self._features(t, x) for t, x in zip(self.towers, pixels, strict=True)], dim=-1
        )

    def _features(self, tower: Any, pixels: Tensor) -> Tensor:
        x = tower.norm_pre(tower._pos_embed(tower.patch_embed(pixels)))
        for block in tower.blocks[:-1]:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.checkpointing and torch.is_grad_enabled()
                else block(x)
            )
        return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """Vision features → Llama width; three layers for two towers, two for one."""

    def __init__(self, vision_width: int, width: int, fused: bool):
        super().__init__()
        hidden = 4 * vision_width if fused else width
        self.fc1 = nn.Linear(vision_width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.fc3 = nn.Linear(width, width) if fused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.fc1(x)))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


class ProprioProjector(nn.Module):
    """Normalised proprio [b p] → one token [b width]."""

    def __init__(self, proprio_dim: int, width: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(proprio)))


# -------------------------------------------------------------------------------------------- heads
class _ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _ResidualMLP(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, blocks: int = 2):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """OFT's regression head: the hidden states of a control step's action tokens, joined, →
    normalised actions."""

    def __init__(self, width: int, action_dim: int):
        super().__init__()
        self.model = _ResidualMLP(width * action_dim, width, action_dim)

    def forward(self, hidden: Tensor, chunk_length: int) -> Tensor:
        """[b h·a d] → [b h a]."""
        return self.model(hidden.reshape(hidden.shape[0], chunk_length, -1))


class ValueHead(nn.Module):
    """width → 512 → 128 → 1 with GELU, the last layer without bias (RLinf `value_head.py`)."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 512),
            nn.GELU(),
            nn.Linear(512, 128),
            nn.GELU(),
            nn.Linear(128, 1, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden).squeeze(-1)


# -------------------------------------------------------------------------------------------- Llama
def make_llama(architecture: Architecture) -> LlamaForCausalLM:
    """transformers' Llama with every size stated: an absent key of the checkpoint means the values
    of `Architecture`.

    Its layers are `_OpenVLABlock`s, which `run_llama` calls; for transformers' own forward see
    `stock_llama`.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    keys: dict[str, Any] = architecture.text | {
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
    }
    config = LlamaConfig(**keys)
    config._attn_implementation = "sdpa"
    llama = LlamaForCausalLM(config)
    heads: Any = (config.num_attention_heads, config.num_key_value_heads)
    llama.model.layers = nn.ModuleList(_OpenVLABlock(layer, *heads) for layer in llama.model.layers)
    return llama


def stock_llama(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """transformers' own model, with its forward and ``generate``, on the very weights of
    ``llama`` (without adapters)."""
    with torch.device("meta"):
        stock = type(llama)(llama.config)
    stock.load_state_dict(llama.state_dict(), assign=True)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(llama.config).to(
        llama.lm_head.weight.device
    )
    return stock.eval()


@dataclass
class KVCache:
    """Keys and values of all layers, allocated once: [layer] of [b kv_heads capacity head];
    ``length`` are in use."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    @classmethod
    def empty(
        cls, layers: int, shape: tuple[int, int, int, int], like: Tensor, dtype: torch.dtype
    ) -> KVCache:
        def make() -> list[Tensor]:
            return [torch.empty(shape, device=like.device, dtype=dtype) for _ in range(layers)]

        return cls(make(), make())


def rms_norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


class _OpenVLABlock(nn.Module):
    """Takes over the parts of one of transformers' Llama layers under their names; for its
    arguments see `run_llama`.

    It is called as a module, so that whatever hooks a module's call (FSDP2, profilers) sees every
    block.
    """

    def __init__(self, layer: LlamaDecoderLayer, heads: int, kv_heads: int):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.heads, self.kv_heads = heads, kv_heads

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        causal: bool,
        cache: KVCache | None = None,
        index: int = 0,
    ) -> Tensor:
        b, length, _ = x.shape
        attention = self.self_attn
        y = rms_norm(self.input_layernorm, x)
        q = attention.q_proj(y).view(b, length, self.heads, -1).transpose(1, 2)
        k, v = (
            proj(y).view(b, length, self.kv_heads, -1).transpose(1, 2)
            for proj in (attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            end = cache.length + length
            cache.keys[index][:, :, cache.length : end] = k
            cache.values[index][:, :, cache.length : end] = v
            if cache.length:
                k, v = cache.keys[index][:, :, :end], cache.values[index][:, :, :end]
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None and length > 1
        )
        x = x + attention.o_proj(y.transpose(1, 2).reshape(b, length, -1))
        y = rms_norm(self.post_attention_layernorm, x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class Rope(nn.Module):
    """Cosines and sines [max_length head] of rotary embeddings in transformers' half-split
    layout."""

    cos: Tensor
    sin: Tensor

    def __init__(self, architecture: Architecture):
        super().__init__()
        head = architecture.width // architecture.text["num_attention_heads"]
        frequencies = architecture.text["rope_theta"] ** -(
            torch.arange(0, head, 2, dtype=torch.float32) / head
        )
        angles = torch.arange(architecture.max_length, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


def run_llama(
    llama: LlamaModel,
    rope: Rope,
    x: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    causal: bool,
    cache: KVCache | None = None,
    checkpointing: bool = False,
) -> Tensor:
    """Hidden states [b L d] after the final norm.

    ``positions`` int64 [b L]. ``mask`` bool, broadcast to [b 1 L K], marks the keys that a query
    sees; None: all of them, or with ``causal`` those up to itself. ``cache`` takes this call's keys
    and values behind those it has, and attention runs over all of them (K = cache.length
    afterwards).
    """
    cos, sin = (table[positions].unsqueeze(1) for table in (rope.cos, rope.sin))
    for i, layer in enumerate(llama.layers):
        if checkpointing and torch.is_grad_enabled():
            x = checkpoint(layer, x, cos, sin, mask, causal, use_reentrant=False)
        else:
            x = layer(x, cos, sin, mask, causal, cache, i)
    if cache is not None:
        cache.length += x.shape[1]
    return rms_norm(llama.norm, x)


# --------------------------------------------------------------------------------------- parameters
def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Random weights for a module that was built without any: normal matrices, norms at one,
    biases at zero."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if isinstance(child, nn.LayerNorm) or type(child).__name__.endswith("RMSNorm"):
                nn.init.constant_(parameter, float(name == "weight"))
            elif isinstance(child, _LayerScale):
                nn.init.constant_(parameter, 1.0)
            elif name == "bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)
