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

from policies.lerobot.needs import BACKBONES, OWN_BACKBONE, TOKENIZERS, require_family
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
    changed |= {key: vlm for key in OWN_BACKBONE if vlm and key in settings}
    if changed.get("adapt_to_pi_aloha"):
        raise ConfigError(
            "adapt_to_pi_aloha is true: the model would rewrite Aloha's joints inside, which is "
            "not supported here. Use a checkpoint that was trained without it"
        )
    family, weights = settings["type"], offline is not OFFLINE
    require_family(family)
    try:
        with quiet(), sized(family, changed.get(SIZES)), _backbone(family, vlm, weights):
            config = decode(changed)
            if not weights:  # some look at it to see whether a backbone is to be fetched
                config.pretrained_path = Path()
            return get_policy_class(family)(config)
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
def _backbone(family: str, vlm: str, weights: bool) -> Iterator[None]:
    """In the block lerobot builds its CLIP or InternVL from the folder ``vlm``, where that is
    given, and without reading ``weights`` where they come from a checkpoint."""
    path, names = _FETCHED.get(family, ("", ()))
    if not path:
        yield
        return
    module: Any = importlib.import_module(f"lerobot.policies.{path}")
    theirs = {name: vars(module)[name] for name in names}

    def maker(kind: Any) -> Any:
        def make(name: str, **given: Any) -> Any:
            name = vlm or name
            if weights:
                return kind.from_pretrained(name, **given)
            return _random(kind, name, given)

        return SimpleNamespace(from_pretrained=make)

    try:
        for name, kind in theirs.items():
            setattr(module, name, maker(kind))
        yield
    finally:
        for name, kind in theirs.items():
            setattr(module, name, kind)


# Where lerobot fetches a backbone whatever it is told, and by what: {family: (module, names)}.
_FETCHED = {
    "multi_task_dit": (
        "multi_task_dit.modeling_multi_task_dit",
        ("CLIPVisionModel", "CLIPTextModel"),
    ),
    "evo1": ("evo1.internvl3_embedder", ("AutoModel",)),
}


def _random(kind: Any, name: str, given: Mapping[str, Any]) -> Any:
    """A model of transformers' ``kind`` with random weights, sized as the config in ``name``."""
    from transformers import AutoConfig, AutoModel

    if kind is not AutoModel:
        return kind(kind.config_class.from_pretrained(name))
    known = {key: given[key] for key in ("attn_implementation",) if key in given}
    model = kind.from_config(AutoConfig.from_pretrained(name), **known)
    return model.to(given.get("torch_dtype"))


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
                step["config"][key]
                for step in stored.pipelines[PIPELINES[0]]["json"]["steps"]
                for key in TOKENIZERS
                if key in step.get("config", {})
            ]
            raise MissingDependency(
                f"the tokenizer {vlm or ', '.join(names)!r} of this {stored.family} policy is not "
                "on this machine. Give a folder that holds it (tokenizer.json, "
                "tokenizer_config.json) as policy.vlm=/path"
            ) from error
