"""A small random policy of each family that newer lerobots have, as `test_lerobot_families`
tries them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lerobot_helpers import CHUNK, SIZE, SPEC, STATS, WORDS, write_tokenizer

from policies.lerobot.policy import LeRobotPolicy
from policies.lerobot.words import write
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
    "evo1": ("evo1", _EVO),
    "eo1": ("eo1", _QWEN),
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


def write_internvl(folder: Path) -> None:
    """An InternVL of a few thousand random weights with its tokenizer."""
    from transformers import InternVLConfig, InternVLModel

    words = write_tokenizer(folder)
    words.add_tokens(["<IMG_CONTEXT>", "<img>", "</img>"], special_tokens=True)
    words.save_pretrained(folder)
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = small | {"model_type": "qwen2", "vocab_size": len(words), "num_key_value_heads": 1}
    config = InternVLConfig(
        vision_config=small | {"image_size": [SIZE, SIZE], "patch_size": [8, 8]},
        text_config=text | {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIZE // 16) ** 2,
    )
    torch.manual_seed(0)
    InternVLModel(config).save_pretrained(folder)


_TALK = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}"
)


def write_qwen(folder: Path) -> None:
    """A Qwen2.5-VL of a few thousand random weights with its processor."""
    from transformers import (
        AutoTokenizer,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    write(folder)
    words = AutoTokenizer.from_pretrained(folder)
    marks = {"vision_start": "vision_start", "vision_end": "vision_end"}
    marks |= {"image": "image_pad", "video": "video_pad"}
    names = ["im_start", "im_end", *marks.values()]
    words.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    ids = {
        f"{mark}_token_id": words.convert_tokens_to_ids(f"<|{name}|>")
        for mark, name in marks.items()
    }
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        text_config=layers
        | {"hidden_size": 32, "intermediate_size": 48, "rope_parameters": rope}
        | {"vocab_size": len(words) + 8, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
        **ids,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    pictures = {"patch_size": 8, "merge_size": 2}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**pictures),
        words,
        Qwen2VLVideoProcessor(**pictures),
        chat_template=_TALK,
    ).save_pretrained(folder)


# What writes a family's language backbone into a folder.
BACKBONES = {
    "multi_task_dit": write_clip,
    "xvla": write_tokenizer,
    "evo1": write_internvl,
    "eo1": write_qwen,
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
