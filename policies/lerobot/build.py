"""lerobot's own objects: the model, its pre- and postprocessing, and their weights.

lerobot is imported when the first policy is built.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.lerobot.needs import PATCHED, unpatched
from policies.lerobot.package import quiet
from policies.lerobot.stored import CONFIG, PIPELINES, Stored, decode
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage, UserError

LANGUAGE, RESIZING = ("smolvla", "pi0", "pi05"), ("smolvla", "pi0", "pi05")
# Settings that only tell lerobot where to fetch or compile something while it builds; the weights come from the file.
OFFLINE = {"device": "cpu", "compile_model": False, "load_vlm_weights": False, "pretrained_backbone_weights": None}


def build_policy(settings: Mapping[str, Any], vlm: str, offline: Mapping[str, Any]) -> Any:
    """lerobot's policy with random weights. ``offline`` overrides settings that would fetch something."""
    from lerobot.policies.factory import get_policy_class

    changed = {**settings, **{k: v for k, v in offline.items() if k in settings}}
    if vlm and "vlm_model_name" in settings:
        changed["vlm_model_name"] = vlm
    if changed.get("adapt_to_pi_aloha"):
        raise ConfigError(
            "adapt_to_pi_aloha is true: the model would rewrite Aloha's joints inside, which is not supported here. Use a "
            "checkpoint that was trained without it"
        )
    family = settings["type"]
    if family in PATCHED:
        require_patched_transformers(family)
    try:
        with quiet():
            return get_policy_class(family)(decode(changed))
    except ImportError as error:
        package = error.name or ("num2words" if "num2words" in str(error) else "transformers")
        raise MissingPackage(package, "lerobot", f"Building lerobot's {family} policy") from error
    except OSError as error:
        if "vlm_model_name" not in changed:
            raise MissingDependency(
                f"the pretrained parts of lerobot's {family} policy cannot be fetched ({error}): leave "
                f"pretrained_backbone_weights out of policy.options, or put the file into torch's cache once"
            ) from error
        raise MissingDependency(
            f"lerobot's {family} policy reads config and tokenizer of its backbone {changed['vlm_model_name']!r}, which are "
            f"not on this machine. Give a folder that holds them (config.json, tokenizer.json, tokenizer_config.json, "
            f"preprocessor_config.json) as policy.vlm=/path, or put the model into the Hugging Face cache once"
        ) from error
    except ValueError as error:
        raise ConfigError(f"lerobot refuses to build this {family} policy: {error}") from error


def require_patched_transformers(family: str) -> None:
    """lerobot makes the same check, but only once the whole model is in memory."""
    try:
        from transformers.models.siglip import check  # type: ignore[attr-defined]  # the patched version has it

        patched = check.check_whether_transformers_replace_is_installed_correctly()
    except ImportError:
        patched = False
    if not patched:
        raise unpatched(family)


def build_pipelines(stored: Stored, vlm: str) -> tuple[Any, Any]:
    """lerobot's pre- and postprocessor, on the CPU."""
    from lerobot.policies.factory import make_pre_post_processors

    with tempfile.TemporaryDirectory() as folder:
        stored.write(Path(folder), vlm=vlm, device="cpu")
        try:
            with quiet():
                return make_pre_post_processors(decode({**stored.settings, "device": "cpu"}), pretrained_path=folder)
        except OSError as error:
            names = [
                step["config"]["tokenizer_name"]
                for step in stored.pipelines[PIPELINES[0]]["json"]["steps"]
                if "tokenizer_name" in step.get("config", {})
            ]
            raise MissingDependency(
                f"the tokenizer {vlm or ', '.join(names)!r} of this {stored.family} policy is not on this machine. Give a "
                f"folder that holds it (tokenizer.json, tokenizer_config.json) as policy.vlm=/path"
            ) from error


def load_weights(model: Any, file: Path) -> None:
    """Copy a safetensors file into ``model``; each parameter takes the half precision it has there, if any."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is missing or damaged ({error}): fetch the checkpoint again") from error
    if hasattr(model, "_fix_pytorch_state_dict_keys"):  # π0: files in openpi's naming exist, lerobot renames them so
        stored = model._fix_pytorch_state_dict_keys(stored, model.config)
        stored = {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in stored.items()}
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong = []
    for name, tensor in stored.items():
        if name in own and tensor.shape != own[name].shape:
            wrong.append(f"misshapen: {name} is {list(tensor.shape)} there, {list(own[name].shape)} by its {CONFIG}")
        elif name in own and tensor.dtype in (torch.bfloat16, torch.float16):
            own[name].data = own[name].data.to(tensor.dtype)
    broken = [name for name, x in stored.items() if x.is_floating_point() and not torch.isfinite(x).all()]
    if not wrong:
        missing, unexpected = model.load_state_dict(stored, strict=False)
        everything = model.state_dict()
        filled = {everything[name].data_ptr() for name in stored if name in everything}  # shared tensors are stored once
        wrong = [f"missing: {name}" for name in missing if everything[name].data_ptr() not in filled]
        wrong += [f"unexpected: {name}" for name in unexpected]
    if wrong:
        shown = "\n  ".join(sorted(wrong)[:20]) + (f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise UserError(
            f"the weights in {file} do not fit the policy that its {CONFIG} describes:\n  {shown}\nFetch the checkpoint "
            f"again, or undo the policy.options that change the model's size."
        )
    if broken:
        raise UserError(
            f"{file} has values that are not finite, first in {broken[0]}: the training that wrote it diverged, use an "
            f"earlier checkpoint"
        )
