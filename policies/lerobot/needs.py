"""What a new language policy of lerobot reads besides its packages, looked for before anything is spent (no torch)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl.errors import MissingDependency

# Whose tokenizer lerobot's own processors name (0.4.4: policies/FAMILY/processor_FAMILY.py, configuration_smolvla.py).
TOKENIZERS = {
    "smolvla": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "pi0": "google/paligemma-3b-pt-224",
    "pi05": "google/paligemma-3b-pt-224",
}  # fmt: skip
PATCHED = ("pi0", "pi05")  # families that a patched transformers alone can run
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")  # one of them is there where a tokenizer is


def require_language(family: str, vlm: str, options: Mapping[str, Any]) -> None:
    """Raise `MissingDependency` where a new policy of ``family`` could not be built for want of its language backbone:
    ``vlm`` is a folder, empty: what ``options`` or lerobot name, in the Hugging Face cache."""
    if family not in TOKENIZERS:
        return
    if family in PATCHED and not _patched():
        raise unpatched(family)
    name = vlm or str(options.get("vlm_model_name") or TOKENIZERS[family])
    if Path(name).is_dir():
        found = any((Path(name) / file).is_file() for file in _FILES)
    else:
        found = not name.startswith(("/", ".", "~")) and _cached(name)
    if not found:
        raise MissingDependency(
            f"policy.family={family}: the tokenizer {name!r} of a new {family} policy is not on this machine (no "
            f"{' or '.join(_FILES)}). Give a folder that holds it as policy.vlm=/path, or put the model into the Hugging "
            f"Face cache once (hf download {TOKENIZERS[family]})"
        )


def unpatched(family: str) -> MissingDependency:
    """What to raise where transformers lacks what lerobot adds to it."""
    return MissingDependency(
        f"the installed transformers cannot run lerobot's {family}: it needs the patched version that brings the module "
        f"transformers.models.siglip.check and norms with a condition. Install it with: pip install 'lerobot[pi]'"
    )


def _patched() -> bool:
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "models" / "siglip" / "check.py").is_file() for place in places or ())


@contextlib.contextmanager
def tokenizer_of(family: str, vlm: str) -> Iterator[None]:
    """In the block lerobot's processors of a new policy read the tokenizer of ``vlm``, where that is given: those of the π0
    family have the hub's name of theirs written into them."""
    if not vlm or family not in PATCHED:
        yield
        return
    module: Any = importlib.import_module(f"lerobot.policies.{family}.processor_{family}")
    theirs = module.TokenizerProcessorStep
    module.TokenizerProcessorStep = lambda **given: theirs(**{**given, "tokenizer_name": vlm})
    try:
        yield
    finally:
        module.TokenizerProcessorStep = theirs


def _cached(name: str) -> bool:
    """Whether the hub's cache has it, or it may be fetched."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("0", "false", "no", "off"):  # asked for: what it names is fetched
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
    except HFValidationError:  # no name of the hub's
        return False
