"""Tiny OpenVLA checkpoint folders in the upstream format, written key by key from its
description (not by the policy)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.types import CameraSpec, EmbodimentSpec

WIDTH, MLP, LAYERS, VOCABULARY = 32, 64, 2, 32064
TOWER, DEPTH, PATCHES, IMAGE = 16, 3, 4, 28  # width, blocks, patches an image, pixels
ACTION, PROPRIO = 7, 8
MASK = [True] * 6 + [False]
STATISTICS = {
    "libero_spatial_no_noops": {
        "action": {
            "mean": [0.0] * 7,
            "std": [0.3] * 7,
            "min": [-1.0] * 6 + [0.0],
            "max": [1.0] * 7,
            "q01": [-0.8, -0.6, -0.4, -0.2, -0.1, -0.3, 0.0],
            "q99": [0.9, 0.7, 0.5, 0.2, 0.1, 0.3, 1.0],
            "mask": MASK,
        },
        "proprio": {
            "mean": [0.0] * 8,
            "std": [1.0] * 8,
            "min": [-3.0] * 8,
            "max": [3.0] * 8,
            "q01": [-2.0] * 8,
            "q99": [2.0] * 8,
        },
        "num_transitions": 52970,
        "num_trajectories": 432,
    }
}


def libero_like(
    size: int = 32, action_names: tuple[str, ...] | None = None, proprio: int = PROPRIO
) -> EmbodimentSpec:
    """An embodiment of LIBERO's shape: two cameras, seven actions in ±1, eight proprio
    dimensions."""
    names = action_names or ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")
    return EmbodimentSpec(
        name="libero_like",
        action_names=names,
        action_units=("share",) * len(names),
        action_low=(-1.0,) * len(names),
        action_high=(1.0,) * len(names),
        frame="world",
        rotation="axis_angle_delta",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=(CameraSpec("agentview", size, size), CameraSpec("wrist", size, size)),
        proprio_names=tuple(f"p{i}" for i in range(proprio)),
    )


def config_json() -> dict[str, Any]:
    sizes = {"embed_dim": TOWER, "depth": DEPTH, "num_heads": 2}
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "use_fused_vision_backbone": True,
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "timm_override_act_layers": [None, None],
        "timm_model_args": [sizes, sizes],
        "image_sizes": [IMAGE, IMAGE],
        "image_resize_strategy": "resize-naive",
        "llm_max_length": 2048,
        "pad_token_id": 32000,
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
        "norm_stats": {},
        "chunk_length": 2,
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "pad_token_id": 32000,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of a fused OpenVLA checkpoint and its shape."""
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (TOWER,)

    for tower, mlp in (("featurizer", 4 * TOWER), ("fused_featurizer", int(TOWER * 3.7362))):
        prefix = f"vision_backbone.{tower}"
        found[f"{prefix}.patch_embed.proj.weight"] = (TOWER, 3, 14, 14)
        found[f"{prefix}.patch_embed.proj.bias"] = (TOWER,)
        found[f"{prefix}.pos_embed"] = (1, PATCHES, TOWER)
        for i in range(DEPTH):
            block = f"{prefix}.blocks.{i}"
            norm(f"{block}.norm1")
            norm(f"{block}.norm2")
            linear(f"{block}.attn.qkv", TOWER, 3 * TOWER)
            linear(f"{block}.attn.proj", TOWER, TOWER)
            linear(f"{block}.mlp.fc1", TOWER, mlp)
            linear(f"{block}.mlp.fc2", mlp, TOWER)
            if tower == "featurizer":
                found[f"{block}.ls1.scale_factor"] = found[f"{block}.ls2.scale_factor"] = (TOWER,)
        norm(f"{prefix}.norm")
        if tower == "featurizer":
            found[f"{prefix}.cls_token"] = (1, 1, TOWER)
            found[f"{prefix}.reg_token"] = (1, 4, TOWER)
        else:
            found[f"{prefix}.attn_pool.latent"] = (1, 1, TOWER)
            linear(f"{prefix}.attn_pool.q", TOWER, TOWER)
            linear(f"{prefix}.attn_pool.kv", TOWER, 2 * TOWER)
            linear(f"{prefix}.attn_pool.proj", TOWER, TOWER)
            norm(f"{prefix}.attn_pool.norm")
            linear(f"{prefix}.attn_pool.mlp.fc1", TOWER, mlp)
            linear(f"{prefix}.attn_pool.mlp.fc2", mlp, TOWER)
    linear("projector.fc1", 2 * TOWER, 8 * TOWER)
    linear("projector.fc2", 8 * TOWER, WIDTH)
    linear("projector.fc3", WIDTH, WIDTH)
    found["language_model.model.embed_tokens.weight"] = found["language_model.lm_head.weight"] = (
        VOCABULARY,
        WIDTH,
    )
    for i in range(LAYERS):
        layer = f"language_model.model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear(f"{layer}.self_attn.{name}", WIDTH, WIDTH, bias=False)
        linear(f"{layer}.mlp.gate_proj", WIDTH, MLP, bias=False)
        linear(f"{layer}.mlp.up_proj", WIDTH, MLP, bias=False)
        linear(f"{layer}.mlp.down_proj", MLP, WIDTH, bias=False)
        found[f"{layer}.input_layernorm.weight"] = found[
            f"{layer}.post_attention_layernorm.weight"
        ] = (WIDTH,)
    found["language_model.model.norm.weight"] = (WIDTH,)
    return found


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes().items()
    }
    return {n: 1 + t if "norm" in n and n.endswith("weight") else t for n, t in weights.items()}


def random_part(part: str, seed: int = 1) -> dict[str, Tensor]:
    """State dict of an OFT extra as upstream's DDP training saves it, names prefixed by
    ``module.``"""
    if part == "proprio_projector":
        rows = {
            "fc1.weight": (WIDTH, PROPRIO),
            "fc1.bias": (WIDTH,),
            "fc2.weight": (WIDTH, WIDTH),
            "fc2.bias": (WIDTH,),
        }
    else:
        joined = WIDTH * ACTION
        rows = {"model.layer_norm1.weight": (joined,), "model.layer_norm1.bias": (joined,)}
        rows |= {"model.fc1.weight": (WIDTH, joined), "model.fc1.bias": (WIDTH,)}
        for i in range(2):
            block = f"model.mlp_resnet_blocks.{i}.ffn"
            rows |= {f"{block}.0.weight": (WIDTH,), f"{block}.0.bias": (WIDTH,)}
            rows |= {f"{block}.1.weight": (WIDTH, WIDTH), f"{block}.1.bias": (WIDTH,)}
        rows |= {"model.layer_norm2.weight": (WIDTH,), "model.layer_norm2.bias": (WIDTH,)}
        rows |= {"model.fc2.weight": (ACTION, WIDTH), "model.fc2.bias": (ACTION,)}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"module.{name}": torch.randn(shape, generator=generator) * 0.2
        for name, shape in rows.items()
    }


def preprocessor_json() -> dict[str, Any]:
    """The published constants, and other ones under the keys that they override."""
    dino = {
        "inplace": False,
        "mean": [0.484375, 0.455078125, 0.40625],
        "std": [0.228515625, 0.2236328125, 0.224609375],
    }
    siglip = {"inplace": False, "mean": [0.5] * 3, "std": [0.5] * 3}
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, IMAGE, IMAGE]] * 2,
        "means": [[0.485, 0.456, 0.406], [0.5] * 3],
        "stds": [[0.229, 0.224, 0.225], [0.5] * 3],
        "tvf_normalize_params": [dino, siglip],
    }


def tokenizer_json() -> str:
    """One token a character, with Llama's ids for BOS and the lone space, and a post-processor
    that puts BOS first."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 29871, "\n": 13} | {
        chr(c): 500 + c for c in range(33, 127)
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": 1,
                    "content": "<s>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"Sequence": {"id": "B", "type_id": 0}},
                ],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            },
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
        }
    )


def write_checkpoint(
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    parts: tuple[str, ...] = (),
    shards: int = 2,
    **config: Any,
) -> Path:
    """A folder as the OFT authors publish it, but for a recorded chunk length and, with an L1 head,
    one picture.

    ``config`` overrides keys of config.json.
    """
    if "action_head" in parts:
        config = {"num_images_in_input": 1, **config}
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights() if weights is None else weights
    names = list(weights)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(
            {name: weights[name].contiguous() for name in part},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**config_json(), **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_json()))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    for part in parts:
        torch.save(random_part(part), folder / f"{part}--150000_checkpoint.pt")
    return folder
