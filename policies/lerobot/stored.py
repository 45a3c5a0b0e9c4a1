"""What lerobot's policy folders hold, read and written without building the policy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policies.lerobot.families import FAMILIES, LEFT_OUT
from policies.lerobot.heads import ACTION, STATE
from policies.lerobot.needs import TOKENIZERS
from policies.lerobot.package import quiet, version
from policies.lerobot.sizes import SIZES
from vla_rl.errors import ConfigError, UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PIPELINES = ("policy_preprocessor", "policy_postprocessor")
IMAGES, EMPTY_CAMERA, NO_CAMERA = "observation.images.", "observation.images.empty_camera", "none"
# what lerobot's training puts in by default
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# Of settings that one version of lerobot knows and another does not, by name:
_ORIGINS = ("pretrained_revision",)  # where it came from, which nobody computes with
_BELONGS_TO = {
    "relative_exclude_joints": "use_relative_actions",
    "action_feature_names": "use_relative_actions",
}
_DEFAULTS = {"vision_attn_implementation": "auto", "rtc_training_max_delay": 0}
STATISTICS = {"min": "low", "max": "high", "mean": "mean", "std": "std", "q01": "q01", "q99": "q99"}


@dataclass(frozen=True)
class Stored:
    """A policy as JSON: lerobot's ``config.json``, and per pipeline its JSON and the tensors of
    its steps (as lists)."""

    settings: dict[str, Any]
    pipelines: dict[str, dict[str, Any]]

    @property
    def family(self) -> str:
        return self.settings["type"]

    @property
    def image_keys(self) -> list[str]:
        features = self.settings["input_features"] or {}
        return [
            k
            for k, f in features.items()
            if f["type"] == "VISUAL" and not k.startswith(EMPTY_CAMERA)
        ]

    def shape(self, key: str) -> tuple[int, ...] | None:
        features = {
            **(self.settings["input_features"] or {}),
            **(self.settings["output_features"] or {}),
        }
        return tuple(features[key]["shape"]) if key in features else None

    def with_statistics(self, action: Mapping[str, Any], proprio: Mapping[str, Any]) -> Stored:
        """The same with the dataset's statistics of state and action in every (un)normaliser, as
        lerobot fine-tunes."""
        new = {f"{ACTION}.{k}": action[own] for k, own in STATISTICS.items()}
        new |= {f"{STATE}.{k}": proprio[own] for k, own in STATISTICS.items()}
        pipelines = json.loads(json.dumps(self.pipelines))
        for pipeline in pipelines.values():
            for step in pipeline["json"]["steps"]:
                if step.get("registry_name") in ("normalizer_processor", "unnormalizer_processor"):
                    file = step.setdefault("state_file", f"{step['registry_name']}.safetensors")
                    pipeline["state"][file] = {**pipeline["state"].get(file, {}), **new}
        return dataclasses.replace(self, pipelines=pipelines)

    def write(self, folder: Path, *, vlm: str = "", device: str = "") -> None:
        """Everything but the weights, as lerobot's ``save_pretrained`` writes it. ``vlm`` and
        ``device`` replace the tokenizer's name and the device of the steps that move tensors."""
        from safetensors.torch import save_file

        (folder / CONFIG).write_text(json.dumps(self.settings, indent=4), encoding="utf-8")
        for name, pipeline in self.pipelines.items():
            document = json.loads(json.dumps(pipeline["json"]))
            for step in document["steps"]:
                for key in TOKENIZERS if vlm else ():
                    if key in step.get("config", {}):
                        step["config"][key] = vlm
                if device and step.get("registry_name") == "device_processor":
                    step["config"]["device"] = device
            (folder / f"{name}.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
            for file, tensors in pipeline["state"].items():
                save_file(
                    {k: torch.tensor(v, dtype=torch.float32) for k, v in tensors.items()},
                    folder / file,
                )

    @classmethod
    def read(cls, folder: Path) -> Stored:
        """Raises `UserError` where the folder is not what lerobot writes since 0.4."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(
                f"policy.checkpoint={folder} has no readable {CONFIG} ({error}): name the folder "
                "that lerobot's save_pretrained wrote (pretrained_model/ of a lerobot training "
                "run)"
            ) from error
        family = settings.get("type")
        if family not in FAMILIES:
            why = f" ({LEFT_OUT[family]})" if family in LEFT_OUT else ""
            raise ConfigError(
                f"policy.checkpoint={folder} holds a policy of type {family!r}{why}; supported are "
                f"{', '.join(FAMILIES)}"
            )
        pipelines = {}
        for name in PIPELINES:
            file = folder / f"{name}.json"
            if not file.is_file():
                raise UserError(
                    f"{folder} has no {file.name}: the checkpoint is older than lerobot's "
                    "processors. Convert it with 'python -m "
                    f"lerobot.processor.migrate_policy_normalization --pretrained-path {folder}'"
                )
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
                files = [step["state_file"] for step in document["steps"] if "state_file" in step]
                foreign = [
                    s["class"]
                    for s in document["steps"]
                    if not s.get("class", "lerobot.").startswith("lerobot.")
                ]
                if any(Path(name).name != name for name in files):
                    raise ValueError(f"state_file must be a plain name, got {files}")
                state = {
                    f: {k: v.tolist() for k, v in load_file(folder / f).items()} for f in files
                }
            except (OSError, KeyError, ValueError, SafetensorError) as error:
                raise UserError(
                    f"{file} or a tensor file it names is missing or damaged: {error!r}"
                ) from error
            if foreign:
                raise UserError(
                    f"{file} names the processor class {foreign[0]!r}, which would run code from "
                    "outside of lerobot: remove that step if the policy does not need it"
                )
            pipelines[name] = {"json": document, "state": state}
        return cls(settings, pipelines)


def decode(settings: Mapping[str, Any]) -> Any:
    """lerobot's config object of ``settings`` (its ``config.json``); its own reader builds an
    argument parser each time.

    What another version of lerobot wrote and the installed one does not know is left out where it
    changes nothing. Raises `ConfigError` that names what would, and what does not fit the family.
    """
    import draccus
    from lerobot.configs.policies import PreTrainedConfig

    values = {key: value for key, value in settings.items() if key != SIZES}
    family = values.pop("type")
    if family not in PreTrainedConfig.get_known_choices():
        raise ConfigError(
            f"the installed lerobot {version()} has no {family} policy: it came with 0.6, which "
            "needs Python 3.12 or newer"
        )
    kind = PreTrainedConfig.get_choice_class(family)
    foreign = {
        key: value
        for key, value in values.items()
        if key not in {f.name for f in dataclasses.fields(kind)}
    }
    if wrong := [
        key for key, value in foreign.items() if not _changes_nothing(key, value, foreign)
    ]:
        raise ConfigError(
            f"the installed lerobot {version()} does not know {wrong[0]}={foreign[wrong[0]]!r} of "
            f"this {family} policy, which another version wrote: use that one (0.6 needs Python "
            f"3.12 or newer), or take it out of {CONFIG} if the policy does without it"
        )
    try:
        with quiet():
            return draccus.decode(
                kind, {key: value for key, value in values.items() if key not in foreign}
            )
    except (draccus.utils.DraccusException, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"lerobot's settings of a {family} policy do not fit the installed lerobot "
            f"{version()}: {error}. Mend policy.options, or install the lerobot version that wrote "
            "the checkpoint"
        ) from error


def _changes_nothing(key: str, value: Any, foreign: Mapping[str, Any]) -> bool:
    """Whether a setting that the installed lerobot lacks can be left out: it is off, tells an
    origin, or belongs to another that is off."""
    if key in _BELONGS_TO:
        return not foreign.get(_BELONGS_TO[key])
    return (
        key in _ORIGINS
        or value is None
        or value is False
        or value in ("", [], {})
        or _DEFAULTS.get(key) == value
    )


def encode(config: Any) -> dict[str, Any]:
    """What lerobot writes into ``config.json``."""
    import draccus

    return {"type": config.type, **json.loads(json.dumps(draccus.encode(config)))}
