"""The form of an OpenVLA policy in a checkpoint of this platform: upstream's files, with our
options under a key of their own in ``config.json``, so that the folder stays in upstream's
format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.inputs import require_known
from policies.openvla.checkpoint import PREPROCESSOR, STATISTICS, TOKENIZER, Source, parse_json
from policies.openvla.config import OpenVLAConfig
from vla_rl.errors import ConfigError

OWN = "vla_rl_policy"  # the key of a config.json that holds this platform's options


def recorded(config: OpenVLAConfig, cameras: int) -> dict[str, Any]:
    """What a checkpoint of ours says of itself, which published ones do not all."""
    own = {"chunk_length": config.chunk_length, "use_proprio": config.use_proprio}
    return {**own, "num_images_in_input": cameras}


def check_recorded(config: OpenVLAConfig, source: Source, cameras: int) -> None:
    """What some checkpoints record about themselves must agree with the options."""
    known = source.config
    options = {
        "chunk_length": ("chunk_length", config.chunk_length),
        "num_actions_chunk": ("chunk_length", config.chunk_length),
        "use_proprio": ("use_proprio", config.use_proprio),
    }
    for key, (option, mine) in options.items():
        if known.get(key) is not None and known[key] != mine:
            raise ConfigError(
                f"policy.{option} is {mine}, but {source.where} records {key} = "
                f"{known[key]}: set policy.{option}={str(known[key]).lower()}"
            )
    pictures = known.get("num_images_in_input")
    if pictures is not None and pictures != cameras:
        raise ConfigError(
            f"policy.cameras has {cameras} of the env's cameras, but "
            f"{source.where} records num_images_in_input = {pictures}: name as many, in "
            "the order that the checkpoint was trained with"
        )


def config_json(
    config: OpenVLAConfig, source: Source, cameras: int, statistics: tuple[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Upstream's ``config.json`` with this platform's options under one key."""
    key, values = statistics
    upstream = {k: v for k, v in source.config.items() if k not in ("auto_map", "norm_stats")}
    return {
        **upstream,
        **recorded(config, cameras),
        "norm_stats": {key: values},
        OWN: {"config": dataclasses.asdict(config), "unnorm_key": key},
    }


def text_files(source: Source, statistics: tuple[str, Mapping[str, Any]]) -> dict[str, str]:
    """Tokenizer, preprocessor, statistics."""
    key, values = statistics
    return {
        **source.companions,
        TOKENIZER: source.tokenizer_json,
        PREPROCESSOR: json.dumps(source.preprocessor, indent=2) + "\n",
        STATISTICS: json.dumps({key: values}, indent=2) + "\n",
    }


def read(data: Mapping[str, Any], files: Mapping[str, str]) -> tuple[OpenVLAConfig, Source, str]:
    """The inverse of `config_json` and `text_files`: options, source, the key of the statistics."""
    own = data[OWN]
    config = _options(own)
    upstream = {
        k: v for k, v in data.items() if k not in (OWN, "policy_type", "format", "vla_rl_version")
    }
    statistics = parse_json(files[STATISTICS], f"the checkpoint's {STATISTICS}")
    preprocessor = parse_json(files[PREPROCESSOR], f"the checkpoint's {PREPROCESSOR}")
    companions = {k: v for k, v in files.items() if k not in (STATISTICS, PREPROCESSOR, TOKENIZER)}
    source = Source(
        upstream,
        preprocessor,
        statistics,
        files[TOKENIZER],
        companions,
        Path(config.checkpoint) if config.checkpoint else None,
        f"the checkpoint's {STATISTICS}",
    )
    return config, source, own["unnorm_key"]


def _options(own: Any) -> OpenVLAConfig:
    if not isinstance(own, Mapping) or not isinstance(own["config"], Mapping):
        raise ConfigError(
            f"the checkpoint's config.json has no object {OWN}.config: it is "
            "damaged, use an earlier one"
        )
    require_known(own["config"], OpenVLAConfig)
    try:
        return OpenVLAConfig(**own["config"])
    except TypeError as error:
        raise ConfigError(
            f"the checkpoint's config.json has {OWN}.config of wrong types: {error}"
        ) from error
