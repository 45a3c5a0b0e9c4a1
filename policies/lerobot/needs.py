"""What a new language policy of lerobot reads besides its packages, looked for before anything
is spent (no torch)."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.lerobot.families import FAMILIES
from policies.lerobot.package import since, version
from vla_rl.errors import MissingDependency

# lerobot's settings that name one
BACKBONES = ("vlm_model_name", "vlm_base", "tokenizer_name", "text_encoder_name")
OWN_BACKBONE = BACKBONES[:2]  # of them those that `policy.vlm` takes the place of
TOKENIZERS = ("tokenizer_name", "processor_name")  # what a step of its processors calls it
# one of them is there where a tokenizer is
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def require_family(family: str) -> None:
    """Raise `MissingDependency` where the installed lerobot is too old for ``family``."""
    needed = FAMILIES[family].since
    if not since(needed):
        raise MissingDependency(
            f"lerobot's {family} needs lerobot {needed} or newer, and {version()} is installed: "
            "newer ones need Python 3.12, so make the environment anew with it (make clean, then "
            "PYTHON=python3.12 make setup)"
        )


def require_language(family: str, vlm: str, options: Mapping[str, Any]) -> None:
    """Raise `MissingDependency` where a new policy of ``family`` could not be built for want of its
    language backbone: ``vlm`` is a folder, empty: what ``options`` or lerobot name, in the Hugging
    Face cache."""
    tokenizer = FAMILIES[family].tokenizer
    if tokenizer:
        named = vlm or str(next((options[key] for key in BACKBONES if key in options), tokenizer))
        _require_tokenizer(f"policy.family={family}", named, tokenizer)


def require_checkpoint(folder: str, vlm: str) -> None:
    """Raise `MissingDependency` where the policy in ``folder`` needs a newer lerobot, or a
    tokenizer that is not on this machine; what is wrong with the folder itself is found as it is
    read."""
    try:
        family = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["type"]
        steps = json.loads((Path(folder) / "policy_preprocessor.json").read_text(encoding="utf-8"))[
            "steps"
        ]
        names = [
            str(step["config"][key])
            for step in steps
            for key in TOKENIZERS
            if key in step.get("config", {})
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if family not in FAMILIES:
        return
    require_family(family)
    for name in names:
        _require_tokenizer(f"policy.checkpoint={folder} ({family})", vlm or name, name)


def _require_tokenizer(whose: str, name: str, published: str) -> None:
    if Path(name).is_dir():
        found = any((Path(name) / file).is_file() for file in _FILES)
    else:
        found = not name.startswith(("/", ".", "~")) and _cached(name)
    if not found:
        gated = ", after accepting its licence there" if published.startswith("google/") else ""
        raise MissingDependency(
            f"{whose}: its tokenizer {name!r} is not on this machine (no {' or '.join(_FILES)}). "
            "Give a folder that holds it as policy.vlm=/path, or put the model into the Hugging "
            f"Face cache once (hf download {published}{gated})"
        )


@contextlib.contextmanager
def tokenizer_of(family: str, vlm: str) -> Iterator[None]:
    """In the block lerobot's processors of a new policy read the tokenizer of ``vlm``, where that
    is given: those of the π0 family have the hub's name of theirs written into them."""
    module: Any = importlib.import_module(f"lerobot.policies.{family}.processor_{family}")
    theirs = vars(module).get("TokenizerProcessorStep")
    if not vlm or theirs is None:
        yield
        return
    module.TokenizerProcessorStep = lambda **given: theirs(**{**given, "tokenizer_name": vlm})
    try:
        yield
    finally:
        module.TokenizerProcessorStep = theirs


def _cached(name: str) -> bool:
    """Whether the hub's cache has it, or it may be fetched."""
    # asked for: what it names is fetched
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("0", "false", "no", "off"):
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
    except HFValidationError:  # no name of the hub's
        return False
