"""A small random policy of each family that newer lerobots have, as `test_lerobot_families`
tries them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lerobot_helpers import CHUNK, SPEC, STATS, WORDS, write_tokenizer

from policies.lerobot.policy import LeRobotPolicy
from policies.settings import LeRobotConfig

_FLORENCE = {
    "vision_config": {
        "embed_dim": [8, 16],
        "depths": [1, 1],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "window_size": 4,
        "projection_dim": 16,
    },
    "text_config": {
        "model_type": "bart",
        "vocab_size": WORDS,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "image_token_id": 5,
}
_DIT = [
    "hidden_dim:16",
    "num_layers:1",
    "num_heads:2",
    "timestep_embed_dim:8",
    "image_crop_shape:null",
    "image_resize_shape:[16, 16]",
    "tokenizer_max_length:32",
    "dropout:0.0",
]
_DIFFUSION = ["num_train_timesteps:12", "num_inference_steps:4", "noise_scheduler_type:DDIM"]
# {name in the table: (family, options)}
TRIED = {
    "xvla": (
        "xvla",
        [
            "florence_config:" + json.dumps(_FLORENCE),
            "hidden_size:16",
            "depth:1",
            "num_heads:2",
            "len_soft_prompts:2",
            "num_domains:2",
            "dim_time:8",
            "max_len_seq:128",
            "max_action_dim:6",
            "max_state_dim:8",
            "num_denoising_steps:3",
            "tokenizer_max_length:32",
        ],
    ),
    "multi_task_dit (flow)": (
        "multi_task_dit",
        [*_DIT, "objective:flow_matching", "num_integration_steps:3"],
    ),
    "multi_task_dit (diffusion)": ("multi_task_dit", [*_DIT, *_DIFFUSION]),
}


def write_clip(folder: Path) -> None:
    """A CLIP of a few thousand random weights with its tokenizer, under a name that lerobot
    takes for one."""
    from transformers import CLIPConfig, CLIPModel

    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = small | {
        "vocab_size": WORDS,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 2,
    }
    vision = small | {"image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(
        CLIPConfig(text_config=text | {"eos_token_id": 3}, vision_config=vision)
    ).save_pretrained(folder)
    write_tokenizer(folder)


def new_policy(name: str, vlm: str, *more: str) -> LeRobotPolicy:
    family, options = TRIED[name]
    torch.manual_seed(0)
    config = LeRobotConfig(
        family=family, chunk_length=CHUNK, options=[*options, "n_action_steps:3", *more], vlm=vlm
    )
    policy = LeRobotPolicy.from_statistics(
        config, SPEC, STATS["action"], STATS["observation.state"]
    ).eval()
    with torch.no_grad():
        for parameter in policy.parameters():  # zeros of an untrained network would hide errors
            if not parameter.any():
                parameter.normal_(std=0.1)
    return policy
