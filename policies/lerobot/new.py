"""New policies of lerobot's families, for a robot and the statistics of its data."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.lerobot.families import FAMILIES
from policies.lerobot.heads import ACTION, STATE
from policies.lerobot.needs import OWN_BACKBONE, require_family, tokenizer_of
from policies.lerobot.package import quiet
from policies.lerobot.sizes import SIZES
from policies.lerobot.stored import IMAGENET, IMAGES, PIPELINES, STATISTICS, Stored, decode
from policies.settings import LeRobotConfig
from vla_rl.errors import ConfigError, MissingDependency
from vla_rl.types import EmbodimentSpec


def new_policy(
    config: LeRobotConfig,
    embodiment: EmbodimentSpec,
    action: Mapping[str, Any],
    proprio: Mapping[str, Any],
) -> Stored:
    """Settings and processors of a new policy of ``config.family``: its features are the robot's,
    images are normalised with ImageNet's constants (as lerobot's training does), state and action
    with the given statistics."""
    from lerobot.configs.policies import PreTrainedConfig

    require_family(config.family)
    h = config.chunk_length
    known = {f.name for f in dataclasses.fields(PreTrainedConfig.get_choice_class(config.family))}
    shape: dict[str, Any] = (
        {"horizon": h, "n_obs_steps": 1} if "horizon" in known else {"chunk_size": h}
    )
    if config.family == "xvla":
        # the robot's own dimensions; lerobot's default is a pair of hands
        shape["action_mode"] = "auto"
    settings = {
        "type": config.family,
        "input_features": {
            IMAGES + c.name: {"type": "VISUAL", "shape": [3, c.height, c.width]}
            for c in embodiment.cameras
        }
        | {STATE: {"type": "STATE", "shape": [embodiment.proprio_dim]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [embodiment.action_dim]}},
        "device": "cpu",
        "n_action_steps": h,
        **shape,
    }
    if config.action_range == "bounds":
        settings["normalization_mapping"] = _in_bounds(config.family)
        action = {
            **action,
            "low": list(embodiment.action_low),
            "high": list(embodiment.action_high),
        }
    options = config.option_values()
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"policy.options has {unknown[0]!r}, which lerobot's {config.family} "
            "policy does not know"
        )
    if "pretrained_backbone_weights" in known:
        settings["pretrained_backbone_weights"] = None  # the default would be fetched from the net
    settings |= {key: config.words for key in OWN_BACKBONE if config.words and key in known}
    return with_processors(settings | options, config, action, proprio)


def _in_bounds(family: str) -> dict[str, str]:
    """The family's normalisation, with actions between the limits that its statistics have."""
    from lerobot.configs.policies import PreTrainedConfig

    fields = dataclasses.fields(PreTrainedConfig.get_choice_class(family))
    factory: Any = next(f.default_factory for f in fields if f.name == "normalization_mapping")
    return {kind: mode.value for kind, mode in factory().items()} | {"ACTION": "MIN_MAX"}


def with_processors(
    settings: Mapping[str, Any],
    config: LeRobotConfig,
    action: Mapping[str, Any],
    proprio: Mapping[str, Any],
) -> Stored:
    """``settings`` completed by lerobot, with its processors for these statistics. Raises
    `MissingDependency` without the tokenizer."""
    from lerobot.policies.factory import make_pre_post_processors

    decoded, family = decode(settings), settings["type"]
    statistics = {
        key: {k: torch.tensor(values[own]) for k, own in STATISTICS.items()}
        for key, values in ((ACTION, action), (STATE, proprio))
    }
    imagenet = {k: torch.tensor(v).view(3, 1, 1) for k, v in IMAGENET.items()}
    statistics |= {
        key: imagenet for key, f in settings["input_features"].items() if f["type"] == "VISUAL"
    }
    own_size = {SIZES: dict(config.sizes)} if config.sizes else {}
    with tempfile.TemporaryDirectory() as name:
        decoded._save_pretrained(folder := Path(name))
        try:
            with quiet(), tokenizer_of(family, config.words):
                processors = make_pre_post_processors(decoded, dataset_stats=statistics)
        except OSError as error:
            raise MissingDependency(
                f"the tokenizer of a new {family} policy (lerobot's own is "
                f"{FAMILIES[family].tokenizer!r}) is not on this machine. Give a folder that holds "
                "it as policy.vlm=/path"
            ) from error
        for pipeline, file in zip(processors, PIPELINES, strict=True):
            pipeline.save_pretrained(folder, config_filename=f"{file}.json")
        stored = Stored.read(folder)
        return dataclasses.replace(stored, settings=stored.settings | own_size)
