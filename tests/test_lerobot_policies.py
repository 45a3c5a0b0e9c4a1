"""lerobot's policies behind the project's protocols, on tiny random checkpoints that lerobot's own code writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts import check_policy, random_observation

from policies.lerobot import FAMILIES, LeRobotChainPolicy, LeRobotConfig, LeRobotPolicy, Stored
from policies.lerobot_heads import ChainSettings, DiffusionHead, block_mask, flow_sde_coefficients
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.errors import ConfigError, EmbodimentMismatch, MissingDependency, MissingPackage, UserError
from vla_rl.types import CameraSpec, EmbodimentSpec, EpisodeSpec, Observation, RolloutBatch, Trajectory

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")

SIZE, PROPRIO, ACTIONS, CHUNK = 32, 5, 3, 4
SPEC = EmbodimentSpec(
    name="arm",
    action_names=("x", "y", "grip"),
    action_units=("m", "m", "1"),
    action_low=(-1.0,) * 3,
    action_high=(1.0,) * 3,
    frame="base",
    rotation="none",
    gripper="0 closed, 1 open",
    control_hz=10.0,
    cameras=(CameraSpec("front", SIZE, SIZE), CameraSpec("wrist", SIZE, SIZE)),
    proprio_names=tuple("abcde"),
)
STATS = {
    "action": {"low": [-0.5, -0.4, 0.0], "high": [0.5, 0.6, 1.0], "mean": [0.1, 0.0, 0.5], "std": [0.2, 0.3, 0.4]},
    "observation.state": {"low": [-2.0] * 5, "high": [2.0] * 5, "mean": [0.1] * 5, "std": [1.5] * 5},
}
for _values in STATS.values():
    _values |= {"q01": _values["low"], "q99": _values["high"]}
TINY = {
    "act": ["dim_model=16", "n_heads=2", "dim_feedforward=32", "n_encoder_layers=1", "n_vae_encoder_layers=1", "latent_dim=4"],
    "diffusion": [
        "down_dims=[16]", "n_groups=4", "diffusion_step_embed_dim=8", "spatial_softmax_num_keypoints=4",
        "num_train_timesteps=12", "num_inference_steps=4",
    ],
    "smolvla": [
        "resize_imgs_with_padding=[32, 32]", "max_action_dim=6", "max_state_dim=8", "num_steps=3", "num_vlm_layers=2",
        "tokenizer_max_length=24", "self_attn_every_n_layers=2",
    ],
}  # fmt: skip
EXECUTED = "n_action_steps=3"


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SmolVLM of a few thousand parameters: its config, tokenizer (one token a character) and processors."""
    pytest.importorskip("num2words", reason="SmolVLA needs num2words: pip install 'vla-rl[lerobot]'")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    special = {"fake_image_token": "<fake>", "image_token": "<image>", "global_image_token": "<global>"}
    special["end_of_utterance_token"] = "<end>"
    words = ["<pad>", "<unk>", "<s>", "</s>", *special.values(), "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=special
    )
    folder = tmp_path_factory.mktemp("vlm")
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    SmolVLMConfig(
        vision_config=layers | {"hidden_size": 16, "image_size": SIZE, "patch_size": 8, "num_hidden_layers": 1},
        text_config=layers
        | {"model_type": "llama", "vocab_size": len(words), "hidden_size": 32, "num_key_value_heads": 1, "head_dim": 16},
        scale_factor=2,
        image_token_id=words.index("<image>"),
        pad_token_id=0,
    ).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), fast, SmolVLMVideoProcessor()).save_pretrained(folder)
    return str(folder)


def new_policy(family: str, vlm: str, *more: str, seed: int = 0, **config: Any) -> LeRobotPolicy:
    torch.manual_seed(seed)
    return LeRobotPolicy.from_statistics(
        LeRobotConfig(
            family=family, chunk_length=CHUNK, options=[*TINY[family], EXECUTED, *more],
            vlm=vlm if family == "smolvla" else "", **config,
        ),
        SPEC, STATS["action"], STATS["observation.state"],
    ).eval()  # fmt: skip


@pytest.fixture(scope="session")
def folders(vlm: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family, written by lerobot: `save_pretrained` of its policy and of its processors."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    from policies.lerobot import _decode

    out = {}
    for family in TINY:
        settings = new_policy(family, vlm).stored.settings
        config = _decode(settings)
        torch.manual_seed(1)
        folder = out[family] = tmp_path_factory.mktemp(family)
        get_policy_class(family)(config).save_pretrained(folder)
        short = {"min": "low", "max": "high"}
        stats = {
            key: {k: torch.tensor(values[short.get(k, k)]) for k in ("min", "max", "mean", "std")}
            for key, values in STATS.items()
        }
        for pipeline in make_pre_post_processors(config, dataset_stats=stats):
            pipeline.save_pretrained(folder)
    return out


def load(folder: Path, **config: Any) -> LeRobotPolicy:
    return LeRobotPolicy.from_pretrained(LeRobotConfig(checkpoint=str(folder), chunk_length=CHUNK, **config), SPEC)


def observation(b: int = 3, seed: int = 0) -> Observation:
    base = random_observation(SPEC, b, seed)
    texts = ("pick it up", "open the drawer", "go")
    return Observation(base.images, base.proprio, tuple(texts[i % 3] for i in range(b)))


def lerobots_own(folder: Path) -> tuple[Any, Any, Any]:
    """Policy and processors as lerobot's evaluation loads them."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    return policy, *make_pre_post_processors(config, pretrained_path=str(folder))


def lerobot_batch(obs: Observation) -> dict[str, Any]:
    images = {f"observation.images.{k}": v.permute(0, 3, 1, 2).float() / 255 for k, v in obs.images.items()}
    return {**images, "observation.state": obs.proprio, "task": list(obs.instruction)}


def lerobots_actions(folder: Path, obs: Observation, noise: torch.Tensor | None) -> torch.Tensor:
    """Physical actions [b h a] by lerobot's code alone, from the given initial noise."""
    policy, before, after = lerobots_own(folder)
    batch = before(lerobot_batch(obs))
    with torch.no_grad():
        if policy.config.type == "diffusion":
            images = torch.stack([batch[k] for k in policy.config.image_features], dim=1)[:, None]
            inputs = {"observation.state": batch["observation.state"][:, None], "observation.images": images}
            condition = policy.diffusion._prepare_global_conditioning(inputs)
            actions = policy.diffusion.conditional_sample(len(obs), global_cond=condition, noise=noise)
        elif policy.config.type == "act":
            actions = policy.predict_action_chunk(batch)
        else:
            actions = policy.predict_action_chunk(batch, noise=noise)
    return after(actions)


@pytest.mark.parametrize("family", TINY)
def test_contract(family: str, folders: dict[str, Path]) -> None:
    policy = load(folders[family])
    assert isinstance(policy, LeRobotChainPolicy) == (family != "act")
    check_policy(policy, observation(4))
    chunk = policy.act(observation(2), seeds=[1, 2]).chunk
    assert chunk.valid.tolist() == [[True, True, True, False]] * 2  # n_action_steps of the checkpoint


@pytest.mark.parametrize("family", TINY)
def test_acts_as_lerobot_does(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[family]
    policy = load(folder, options=["noise_scheduler_type=DDIM"] if family == "diffusion" else [])
    if family == "diffusion":  # what lerobot then runs is the deterministic sampler
        policy.save_pretrained(tmp_path)
        folder = tmp_path
    output = policy.act(observation(), deterministic=True, seeds=[5, 6, 7])
    noise = output.replay["chain"][:, 0] if output.replay else None
    torch.testing.assert_close(output.chunk.actions, lerobots_actions(folder, observation(), noise), rtol=0, atol=1e-5)
