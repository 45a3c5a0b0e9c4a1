"""A small random policy of each family that newer lerobots have, as `test_lerobot_families`
tries them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lerobot_helpers import CHUNK, SIZE, SPEC, STATS

from benchmarks.learning import backbones
from policies.lerobot.policy import LeRobotPolicy
from policies.settings import LeRobotConfig

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
_QWEN = [
    "dtype:float32",
    "attn_implementation:eager",
    "image_min_pixels:256",
    "image_max_pixels:1024",
    "num_denoise_steps:3",
    "max_action_dim:6",
    "max_state_dim:8",
]
_EVO = [
    f"image_resolution:[{SIZE}, {SIZE}]",
    "vlm_num_layers:1",
    "vlm_dtype:float32",
    "use_flash_attn:false",
    "embed_dim:16",
    "hidden_dim:16",
    "state_hidden_dim:16",
    "num_heads:2",
    "num_layers:1",
    "num_inference_timesteps:3",
    "max_action_dim:6",
    "max_state_dim:8",
    "max_views:2",
    "training_stage:stage2",
    "enable_gradient_checkpointing:false",
]
# {name in the table: (family, options)}
TRIED = {
    "xvla": (
        "xvla",
        [
            "florence_config:" + json.dumps(backbones.florence(16)),
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
    "evo1": ("evo1", _EVO),
    "eo1": ("eo1", _QWEN),
    "multi_task_dit (diffusion)": ("multi_task_dit", [*_DIT, *_DIFFUSION]),
}


# What writes a family's language backbone into a folder.
BACKBONES: dict[str, Callable[[Path], None]] = {
    "multi_task_dit": partial(backbones.write_clip, width=16, side=16, patch=8),
    "xvla": partial(backbones.write_words, width=16, side=SIZE, patch=8),
    "evo1": partial(backbones.write_internvl, width=16, side=SIZE, patch=8),
    "eo1": partial(backbones.write_qwen, width=32, side=SIZE, patch=8),
}


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
