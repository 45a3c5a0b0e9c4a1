"""Folders that openpi's PyTorch training and its converter write: π0 and π0.5 with their
normalisation, by openpi's names.

``config.json`` (action_dim, action_horizon, paligemma_variant, action_expert_variant, precision),
``model.safetensors``, and ``assets/<asset>/norm_stats.json``. What such a folder does not say must
be told: which picture is which camera (``policy.cameras``), how many control steps are executed
(``policy.options=[n_action_steps:5]``), and whether actions are relative to the state
(``use_relative_actions:true``, ``relative_exclude_joints``), as openpi's config of the robot has
it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policies.lerobot.heads import ACTION, STATE
from policies.lerobot.needs import require_family
from policies.lerobot.new import with_processors
from policies.lerobot.stored import CONFIG, IMAGES, STATISTICS, WEIGHTS, Stored
from policies.lerobot.weights import save_openpi_weights, tensor_names
from policies.settings import LeRobotConfig
from vla_rl.errors import EmbodimentMismatch, UserError
from vla_rl.types import EmbodimentSpec

# in the order that the model has them
_PICTURES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
FAMILIES = {"pi0": 48, "pi05": 200}  # that it has, and the tokens of a prompt
_KEYS = ("mean", "std", "q01", "q99")


def is_openpi(folder: Path) -> bool:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(settings, dict)
        and "type" not in settings
        and {"action_dim", "action_horizon"} <= set(settings)
    )


def read_openpi(config: LeRobotConfig, embodiment: EmbodimentSpec) -> Stored:
    """The policy in ``config.checkpoint`` as lerobot would store it, for a robot of as many
    dimensions. Raises `UserError` and `EmbodimentMismatch`."""
    folder = Path(config.checkpoint)
    said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    family = "pi05" if "time_mlp_in.weight" in tensor_names(folder / WEIGHTS) else "pi0"
    require_family(family)
    pictures = {f"{IMAGES}{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in _PICTURES}
    settings = {
        "type": family,
        "device": "cpu",
        "input_features": pictures | {STATE: {"type": "STATE", "shape": [embodiment.proprio_dim]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [embodiment.action_dim]}},
        "chunk_size": said["action_horizon"],
        "n_action_steps": said["action_horizon"],
        "max_action_dim": said["action_dim"],
        "max_state_dim": said["action_dim"],
        "tokenizer_max_length": FAMILIES[family],
        **{key: said[key] for key in ("paligemma_variant", "action_expert_variant") if key in said},
        **config.option_values(),
    }
    statistics = _statistics(folder)
    sized = {"state": embodiment.proprio_dim, "actions": embodiment.action_dim}
    return with_processors(
        settings,
        config,
        *(_cut(folder, statistics, name, sized[name]) for name in ("actions", "state")),
    )


def _statistics(folder: Path) -> dict[str, Any]:
    found = sorted((folder / "assets").rglob("norm_stats.json"))
    if len(found) != 1:
        those = (
            f"{len(found)} ({', '.join(str(file.parent.relative_to(folder)) for file in found)})"
            if found
            else "none"
        )
        raise UserError(
            f"{folder} must hold one assets/<asset>/norm_stats.json, by which its policy was "
            f"trained, and has {those}: copy the assets folder that lies beside the checkpoint it "
            "was converted from, and leave the robot's own in it"
        )
    try:
        return json.loads(found[0].read_text(encoding="utf-8"))["norm_stats"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{found[0]} is damaged ({error!r}): fetch the checkpoint again") from error


def _cut(folder: Path, statistics: dict[str, Any], name: str, size: int) -> dict[str, list[float]]:
    """{as `new_policy` takes them: [size]}; openpi pads them at times. What lerobot does not
    normalise by is filled in."""
    try:
        own = {key: [float(x) for x in statistics[name][key]] for key in _KEYS}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the norm_stats.json of {folder} has no {name}.{error}: fetch the checkpoint again"
        ) from error
    if short := [key for key, values in own.items() if len(values) < size]:
        raise EmbodimentMismatch(
            f"{folder} was trained with {len(own[short[0]])} numbers of {name} (norm_stats.json), "
            f"and the robot has {size}"
        )
    own = {key: values[:size] for key, values in own.items()}
    return {
        key: own.get(key, own["q99" if key == "high" else "q01"]) for key in STATISTICS.values()
    }


def write_openpi(stored: Stored, model: nn.Module, asset: str, folder: Path) -> None:
    """The inverse of `read_openpi`, into the empty ``folder``: what openpi's
    ``create_trained_policy`` reads, beside its own config of the robot. Raises `UserError` where
    the policy is normalised by what openpi does not know."""
    settings, dtypes = stored.settings, {p.dtype for p in model.parameters()}
    said: dict[str, Any] = {
        "action_dim": settings["max_action_dim"],
        "action_horizon": settings["chunk_size"],
        **{k: settings[k] for k in ("paligemma_variant", "action_expert_variant") if k in settings},
        "precision": "bfloat16" if torch.bfloat16 in dtypes else "float32",
    }
    names = {"state": STATE, "actions": ACTION}
    norms = {ours: _norms(stored, theirs) for ours, theirs in names.items()}
    place = folder / "assets" / re.sub(r"[^\w.-]", "_", asset) / "norm_stats.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"norm_stats": norms}, indent=2), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(said, indent=2), encoding="utf-8")
    save_openpi_weights(model, folder / WEIGHTS)


def _norms(stored: Stored, feature: str) -> dict[str, list[float]]:
    """What the policy normalises ``feature`` by."""
    found: dict[str, list[float]] = {}
    for pipeline in stored.pipelines.values():
        for state in pipeline["state"].values():
            found |= {k: state[f"{feature}.{k}"] for k in _KEYS if f"{feature}.{k}" in state}
    if missing := [key for key in _KEYS if key not in found]:
        raise UserError(
            f"the policy has no {missing[0]} of {feature}, which openpi's norm_stats.json holds: "
            "fine-tune it on a dataset, whose statistics it then has"
        )
    return found
