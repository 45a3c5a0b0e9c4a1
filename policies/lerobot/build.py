"""lerobot's own objects: the model, its pre- and postprocessing, and their weights.

lerobot is imported when the first policy is built.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from policies.lerobot.needs import BACKBONES, require_family
from policies.lerobot.package import quiet
from policies.lerobot.sizes import SIZES, sized
from policies.lerobot.stored import PIPELINES, Stored, decode
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage

# Settings that only tell lerobot where to fetch or compile something while it builds; the weights
# come from the file.
OFFLINE = {
    "device": "cpu",
    "compile_model": False,
    "load_vlm_weights": False,
    "pretrained_backbone_weights": None,
}


def build_policy(settings: Mapping[str, Any], vlm: str, offline: Mapping[str, Any]) -> Any:
    """lerobot's policy with random weights. ``offline`` overrides settings that would fetch
    something."""
    from lerobot.policies.factory import get_policy_class

    changed = {**settings, **{k: v for k, v in offline.items() if k in settings}}
    if vlm and "vlm_model_name" in settings:
        changed["vlm_model_name"] = vlm
    if changed.get("adapt_to_pi_aloha"):
        raise ConfigError(
            "adapt_to_pi_aloha is true: the model would rewrite Aloha's joints inside, which is "
            "not supported here. Use a checkpoint that was trained without it"
        )
    family = settings["type"]
    require_family(family)
    try:
        with quiet(), sized(family, changed.get(SIZES)), _clip(family, vlm, offline is not OFFLINE):
            return get_policy_class(family)(decode(changed))
    except ImportError as error:
        package = error.name or ("num2words" if "num2words" in str(error) else "transformers")
        raise MissingPackage(package, "lerobot", f"Building lerobot's {family} policy") from error
    except OSError as error:
        backbone = next((changed[key] for key in BACKBONES if key in changed), "")
        if not backbone:
            raise MissingDependency(
                f"the pretrained parts of lerobot's {family} policy cannot be fetched ({error}): "
                "leave pretrained_backbone_weights out of policy.options, or put the file into "
                "torch's cache once"
            ) from error
        raise MissingDependency(
            f"lerobot's {family} policy reads config and tokenizer of its backbone {backbone!r}, "
            "which are not on this machine. Give a folder that holds them (config.json, "
            "tokenizer.json, tokenizer_config.json, preprocessor_config.json) as policy.vlm=/path, "
            "or put the model into the Hugging Face cache once"
        ) from error
    except ValueError as error:
        raise ConfigError(f"lerobot refuses to build this {family} policy: {error}") from error


@contextlib.contextmanager
def _clip(family: str, vlm: str, weights: bool) -> Iterator[None]:
    """In the block lerobot's multi-task transformer builds its CLIP from the folder ``vlm``, where
    that is given, and without reading ``weights`` where they come from a checkpoint."""
    if family != "multi_task_dit":
        yield
        return
    module: Any = importlib.import_module("lerobot.policies.multi_task_dit.modeling_multi_task_dit")
    theirs = {name: vars(module)[name] for name in ("CLIPVisionModel", "CLIPTextModel")}

    def maker(kind: Any) -> Any:
        def make(name: str) -> Any:
            name = vlm or name
            return (
                kind.from_pretrained(name)
                if weights
                else kind(kind.config_class.from_pretrained(name))
            )

        return SimpleNamespace(from_pretrained=make)

    try:
        for name, kind in theirs.items():
            setattr(module, name, maker(kind))
        yield
    finally:
        for name, kind in theirs.items():
            setattr(module, name, kind)


def build_pipelines(stored: Stored, vlm: str) -> tuple[Any, Any]:
    """lerobot's pre- and postprocessor, on the CPU."""
    from lerobot.policies.factory import make_pre_post_processors

    with tempfile.TemporaryDirectory() as folder:
        stored.write(Path(folder), vlm=vlm, device="cpu")
        try:
            with quiet():
                return make_pre_post_processors(
                    decode({**stored.settings, "device": "cpu"}), pretrained_path=folder
                )
        except OSError as error:
            names = [
                step["config"]["tokenizer_name"]
                for step in stored.pipelines[PIPELINES[0]]["json"]["steps"]
                if "tokenizer_name" in step.get("config", {})
            ]
            raise MissingDependency(
                f"the tokenizer {vlm or ', '.join(names)!r} of this {stored.family} policy is not "
                "on this machine. Give a folder that holds it (tokenizer.json, "
                "tokenizer_config.json) as policy.vlm=/path"
            ) from error
