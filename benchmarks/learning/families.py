"""`vla-rl bench families`: a small random policy of each of lerobot's families that have a
likelihood on the toy task, one after the other: SFT, then PPO, with one recipe for all. The same
call resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning import backbones
from benchmarks.learning.runs import rl_records
from benchmarks.measuring import say, table
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.run.pipeline import run_pipeline

WIDTH = 64  # of every network
SIDE, PATCH = 32, 8  # pixels that the toy's 16 are enlarged to, and those of a patch
RECIPE = (
    "run=toy_pi0",
    "policy=lerobot",
    "policy.chunk_length=4",
    "policy.action_range=bounds",
    "policy.denoising_steps=3",
    "policy.noise_level=0.5",
    "policy.noise_correlation=0.8",
    "policy.min_std=0.02",
    "evaluate.sampled_too=false",
    "evaluate.video_episodes=0",
    "sft.validation_episodes=0",
    "rl.iterations=28",
    "algorithm.epochs=2",
    # which decision counted: the critic's next value tells with less noise than how it all ended
    "algorithm.gae_lambda=0.5",
    "algorithm.critic_warmup_iterations=3",
    "algorithm.critic_epochs=16",
    "algorithm.critic_minibatch_size=64",
    "algorithm.target_kl=0.02",
    # the rate begins low and follows the KL: what moves one family a little throws another far
    "algorithm.warmup_iterations=0",
    "algorithm.adaptive_learning_rate=true",
    "algorithm.learning_rate=5e-5",
)


@dataclass(frozen=True)
class Small:
    """``options`` are lerobot's own; ``backbone`` writes what the family reads, in place of a hub;
    ``more``: overrides that it takes besides the recipe."""

    options: Sequence[str] = ()
    backbone: Callable[[Path, int, int, int], None] = backbones.write_words
    more: Sequence[str] = ()


def _slowly(updates: int) -> tuple[str, ...]:
    """SFT of a family whose features of pictures collapse at the recipe's rate."""
    return "sft.learning_rate=1e-3", f"sft.updates={updates}"


def _write_qwen(folder: Path, width: int, side: int, patch: int) -> None:
    """Of larger patches: four make one of its tokens, which have no places but by rotation, and so
    a picture is one token."""
    backbones.write_qwen(folder, width, side, 2 * patch)


_ROBOT = ("max_action_dim:2", "max_state_dim:2")
_GEMMA = {"width": WIDTH, "mlp": 2 * WIDTH, "depth": 2, "head_dim": 8, "vocabulary": 544}
_EXPERT = {"expert_width": WIDTH, "expert_mlp": 2 * WIDTH}
_SIGLIP = {"vision_width": WIDTH, "vision_mlp": 2 * WIDTH, "vision_depth": 1, "vision_heads": 2}
_PI = (
    "policy.noise_samples=4",
    f"policy.sizes={json.dumps({**_GEMMA, **_EXPERT, **_SIGLIP}).replace(chr(34), '')}",
)
_PIXELS = "image_resolution:[28, 28]"  # a multiple of SigLIP's patches of 14
_DIT = (
    f"hidden_dim:{WIDTH}",
    "num_layers:2",
    "num_heads:2",
    "timestep_embed_dim:32",
    "image_crop_shape:null",
    f"image_resize_shape:[{SIDE}, {SIDE}]",
    "tokenizer_max_length:16",
    "dropout:0.0",
)
SMALL = {
    "pi0": Small((*_ROBOT, _PIXELS, "tokenizer_max_length:12"), more=_PI),
    "pi05": Small((*_ROBOT, _PIXELS, "tokenizer_max_length:20"), more=(*_PI, *_slowly(150))),
    "smolvla": Small(
        (
            *_ROBOT,
            f"resize_imgs_with_padding:[{SIDE}, {SIDE}]",
            "num_vlm_layers:2",
            "tokenizer_max_length:16",
            "self_attn_every_n_layers:2",
            "train_expert_only:false",
            "freeze_vision_encoder:false",
        ),
        backbones.write_smolvlm,
        ("policy.noise_samples=4", "sft.updates=40"),
    ),
    "xvla": Small(
        (
            *_ROBOT,
            f"resize_imgs_with_padding:[{SIDE}, {SIDE}]",
            "florence_config:" + json.dumps(backbones.florence(WIDTH)),
            f"hidden_size:{WIDTH}",
            "depth:2",
            "num_heads:2",
            "len_soft_prompts:2",
            "num_domains:1",
            "dim_time:32",
            "max_len_seq:128",
            "tokenizer_max_length:12",
        ),
        more=_slowly(60),
    ),
    "multi_task_dit": Small(
        (*_DIT, "objective:flow_matching", "num_integration_steps:5"),
        backbones.write_clip,
        _slowly(160),
    ),
    "evo1": Small(
        (
            *_ROBOT,
            f"image_resolution:[{SIDE}, {SIDE}]",
            "vlm_num_layers:1",
            "vlm_dtype:float32",
            "use_flash_attn:false",
            f"embed_dim:{WIDTH}",
            f"hidden_dim:{WIDTH}",
            f"state_hidden_dim:{WIDTH}",
            "num_heads:2",
            "num_layers:2",
            "max_views:1",
            "training_stage:stage2",
            "enable_gradient_checkpointing:false",
        ),
        backbones.write_internvl,
    ),
    "eo1": Small(
        (
            *_ROBOT,
            "dtype:float32",
            "attn_implementation:eager",
            f"image_min_pixels:{SIDE**2}",
            f"image_max_pixels:{SIDE**2}",
        ),
        _write_qwen,
        _slowly(80),
    ),
    "diffusion": Small(
        (
            f"down_dims:[{WIDTH}]",
            "n_groups:4",
            "diffusion_step_embed_dim:32",
            "spatial_softmax_num_keypoints:8",
            "num_train_timesteps:50",
            "noise_scheduler_type:DDIM",
            "use_group_norm:true",
            "use_separate_rgb_encoder_per_camera:false",
        ),
        # (of less its ResNet makes one cell, whose keypoints are constants)
        more=("env.image_size=34", *_slowly(60)),
    ),
}


def told(name: str, out: Path) -> list[str]:
    """What `vla-rl train` would be told of family ``name``; its backbone is written into ``out``
    where that is not done."""
    small = SMALL[name]
    # (lerobot asks for "clip" in the name of one)
    words = (out / "backbones" / f"clip_{WIDTH}_{name}").resolve()
    if not (words / "tokenizer.json").exists():
        words.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        small.backbone(words, WIDTH, SIDE, PATCH)
    own = (f"policy.family={name}", f"policy.options={json.dumps(list(small.options))}")
    return [*RECIPE, *small.more, *own, f"policy.vlm={words}"]


def measure(overrides: Sequence[str], families: str | None, seed: int, out: Path) -> dict[str, Any]:
    """Held-out success after SFT and after PPO of each of the ``families`` (a,b; None: all), the
    success of its own training episodes by iteration, and CPU seconds of what was not done
    before."""
    names = list(SMALL) if families is None else [name for name in families.split(",") if name]
    if unknown := [name for name in names if name not in SMALL]:
        raise ConfigError(f"--families has {unknown[0]!r}: choose from {','.join(SMALL)}")
    fixed = [f"seed={seed}", f"output_dir={out / str(seed)}", "threads=1"]
    rows = []
    for name in names:
        say(f"{name}, seed {seed}")
        given = [*told(name, out), *overrides, *fixed, f"name={name}"]
        began = time.process_time()
        run = run_pipeline(compose(given))
        rows.append({"family": name, **_found(run), "cpu_s": time.process_time() - began})
    return {"seed": seed, "rows": rows, "recipe": [*RECIPE, *overrides]}


def _found(run: Path) -> dict[str, Any]:
    before, after = (EvaluationResult.load(run / f"eval_{name}.json") for name in ("sft", "rl"))
    return {
        "episodes": before.episodes,
        "before": before.success_rate,
        "after": after.success_rate,
        "by_iteration": [row["rollout/success"] for row in rl_records(run)],
    }


def text(document: Mapping[str, Any]) -> str:
    rows = [("family", "after SFT", "after PPO", "points", "episodes", "CPU s")]
    for row in document["rows"]:
        gained = 100 * (row["after"] - row["before"])
        rates = (f"{row[when]:.1%}" for when in ("before", "after"))
        rows.append(
            (row["family"], *rates, f"{gained:+.1f}", str(row["episodes"]), f"{row['cpu_s']:.0f}")
        )
    return f"seed {document['seed']}\n{table(rows)}"
