"""Language backbones of some ten thousand random weights, in the form in which lerobot's families
read theirs: for `benchmarks.learning.families`, and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.lerobot.words import vocabulary, write


def _words(folder: Path, **marks: str) -> Any:
    """The tokenizer of `policies.lerobot.words` with more special tokens, which is written."""
    from transformers import AutoTokenizer

    write(folder)
    words = AutoTokenizer.from_pretrained(folder, extra_special_tokens=marks)
    words.add_tokens(list(marks.values()), special_tokens=True)
    words.save_pretrained(folder)
    return words


def _layers(width: int, number: int = 1) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": number,
        "num_attention_heads": 2,
    }


_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def write_clip(folder: Path, width: int, side: int, patch: int) -> None:
    """A CLIP for pictures of ``side`` pixels; lerobot wants "clip" in the folder's name."""
    from transformers import CLIPConfig, CLIPModel

    words = _words(folder)
    text = {**_layers(width), **_IDS, "vocab_size": len(words), "max_position_embeddings": 32}
    vision = {**_layers(width), "image_size": side, "patch_size": patch}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(folder)


def write_internvl(folder: Path, width: int, side: int, patch: int) -> None:
    """An InternVL, of Evo-1."""
    from transformers import InternVLConfig, InternVLModel

    words = _words(folder, context="<IMG_CONTEXT>", start="<img>", end="</img>")
    text = {**_layers(width), **_IDS, "model_type": "qwen2", "num_key_value_heads": 1}
    config = InternVLConfig(
        vision_config={**_layers(width), "image_size": [side] * 2, "patch_size": [patch] * 2},
        text_config={**text, "vocab_size": len(words)},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(side // patch // 2) ** 2,
    )
    InternVLModel(config).save_pretrained(folder)


_TALK = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}"
)


def write_qwen(folder: Path, width: int, side: int, patch: int) -> None:
    """A Qwen2.5-VL with its processor, of EO-1; its pictures have any size."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    words = _words(folder, **{name: f"<|{name}|>" for name in names})
    ids = {
        f"{mark}_token_id": words.convert_tokens_to_ids(f"<|{name}|>")
        for mark, name in zip(("vision_start", "vision_end", "image", "video"), names[2:])
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope |= {"mrope_section": [width // 16, *[width // 32 * 3] * 2]}
    text = {**_layers(width, 2), **_IDS, "num_key_value_heads": 1, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 1,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "patch_size": patch,
            "window_size": 4 * patch,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        text_config={**text, "vocab_size": len(words) + 8},
        **ids,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    pictures = {"patch_size": patch, "merge_size": 2}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**pictures),
        words,
        Qwen2VLVideoProcessor(**pictures),
        chat_template=_TALK,
    ).save_pretrained(folder)


def write_smolvlm(folder: Path, width: int, side: int, patch: int) -> None:
    """A SmolVLM's config, tokenizer and processors, of SmolVLA, which makes random weights."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    marks = {
        "fake_image_token": "<fake>",
        "image_token": "<image>",
        "global_image_token": "<global>",
        "end_of_utterance_token": "<end>",
    }
    words = _words(folder, **marks)
    text = {**_layers(width, 2), "model_type": "llama", "num_key_value_heads": 1}
    SmolVLMConfig(
        vision_config={**_layers(width), "image_size": side, "patch_size": patch},
        text_config={**text, "vocab_size": len(words), "head_dim": width // 2},
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    ).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), words, SmolVLMVideoProcessor()).save_pretrained(
        folder
    )


def write_words(folder: Path, width: int, side: int, patch: int) -> None:
    """The tokenizer alone."""
    write(folder)


def florence(width: int) -> dict[str, Any]:
    """lerobot's ``florence_config`` of X-VLA."""
    vision = {
        "embed_dim": [width // 2, width],
        "depths": [1, 1],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "window_size": 4,
        "projection_dim": width,
    }
    sides = ("encoder", "decoder")
    text = {
        "model_type": "bart",
        "vocab_size": len(vocabulary()),
        "d_model": width,
        "max_position_embeddings": 128,
        **{f"{side}_layers": 1 for side in sides},
        **{f"{side}_attention_heads": 2 for side in sides},
        **{f"{side}_ffn_dim": 2 * width for side in sides},
        **_IDS,
    }
    return {"vision_config": vision, "text_config": text, **_IDS, "image_token_id": 5}
