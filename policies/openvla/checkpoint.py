"""Reading and writing checkpoint folders in the format of OpenVLA and OpenVLA-OFT.

``config.json``, ``model*.safetensors`` (with an index when sharded), ``preprocessor_config.json``,
``tokenizer.json``, ``dataset_statistics.json`` (fine-tuned checkpoints; it replaces ``norm_stats``,
or adds to it in RLinf's dialect), and OFT's extra parts as ``<part>--<step>_checkpoint.pt``.
Nothing is unpickled but plain tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.errors import ConfigError, UserError

CONFIG, STATISTICS, PREPROCESSOR, TOKENIZER = (
    "config.json",
    "dataset_statistics.json",
    "preprocessor_config.json",
    "tokenizer.json",
)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTS = ("proprio_projector", "action_head", "value_head")
_UNSUPPORTED_PARTS = {
    "vision_backbone": "FiLM (vision features that depend on the instruction)",
    "noisy_action_projector": "OFT's diffusion head",
}
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SHARD_BYTES = 7 * 10**9
_LISTED = 20


@dataclass(frozen=True)
class Source:
    """All of a checkpoint but its weights. ``statistics`` is upstream's ``norm_stats``, read from
    ``statistics_from``; ``folder`` None: random weights."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    statistics: dict[str, Any]
    tokenizer_json: str
    companions: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    statistics_from: str = STATISTICS

    @property
    def where(self) -> str:
        return self.beside(CONFIG)

    def beside(self, name: str) -> str:
        """A file of the folder, for messages."""
        return str(self.folder / name) if self.folder else name

    def choose_statistics(self, key: str) -> tuple[str, dict[str, Any]]:
        """The entry ``key`` (or ``key``_no_noops, as LIBERO's evaluation allows); the only one
        for an empty key."""
        names = sorted(self.statistics)
        if not key and len(names) == 1:
            key = names[0]
        for name in (key, f"{key}_no_noops"):
            if name in self.statistics:
                entry = self.statistics[name]
                if not isinstance(entry, dict) or not isinstance(entry.get("action"), dict):
                    raise UserError(
                        f"{self.statistics_from} has no object 'action' under {name!r}: copy the "
                        "file again from the published checkpoint"
                    )
                return name, entry
        listing = ", ".join(names) or "none"
        problem = (
            f"policy.unnorm_key={key!r} is not among"
            if key
            else "policy.unnorm_key is empty and does not choose among"
        )
        raise ConfigError(
            f"{problem} the statistics of {self.statistics_from}: {listing}. Set it to one of these"
        )


def read_source(folder: Path | str, dialect: str = "official") -> Source:
    """Everything but the weights of a checkpoint folder.

    `UserError` for what is missing or unreadable, and for parts that this policy would otherwise
    leave out in silence.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"policy.checkpoint={folder} holds no {CONFIG}: give the folder of an OpenVLA or "
            "OpenVLA-OFT checkpoint"
        )
    missing = [name for name in (PREPROCESSOR, TOKENIZER) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {' and '.join(missing)}: copy them from the published checkpoint"
        )
    for path in sorted(folder.glob("*--*.pt")):
        if (part := path.name.partition("--")[0]) not in PARTS:
            what = _UNSUPPORTED_PARTS.get(part, "a part that this policy does not know")
            raise UserError(
                f"{path} holds {what}, which is not supported; without it the model is another"
            )
    config = _json(folder / CONFIG)
    statistics, origin = _statistics(folder, config, dialect)
    companions = {name: _text(folder / name) for name in _COMPANIONS if (folder / name).is_file()}
    tokenizer = _text(folder / TOKENIZER)
    return Source(
        config, _json(folder / PREPROCESSOR), statistics, tokenizer, companions, folder, origin
    )


def _statistics(
    folder: Path, config: Mapping[str, Any], dialect: str
) -> tuple[dict[str, Any], str]:
    """All statistics and where they are from. openvla-oft lets the file replace ``norm_stats``,
    RLinf adds it to them."""
    stored = config.get("norm_stats") or {}
    if not isinstance(stored, dict):
        raise UserError(
            f"{folder / CONFIG} has norm_stats of type {type(stored).__name__}, it should be an "
            "object: use the config.json that the checkpoint was published with"
        )
    path = folder / STATISTICS
    if not path.is_file():
        return stored, f"{folder / CONFIG} (norm_stats)"
    if dialect != "rlinf" or not stored:
        return _json(path), str(path)
    return {**stored, **_json(path)}, f"{path} and {CONFIG} (norm_stats)"


def read_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the shards and of the extra parts, in ``dtype``, under the policy's names."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors = _tensors(path)
        whole = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
        if whole:
            raise UserError(
                f"{path} has weights that are no floating-point numbers "
                f"({_shortened(whole)}): quantised checkpoints are not supported"
            )
        weights |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for part in PARTS:
        if (file := part_file(folder, part)) is not None:
            weights |= {f"{part}.{name}": tensor.to(dtype) for name, tensor in _part(file).items()}
    broken = sorted(name for name, tensor in weights.items() if not torch.isfinite(tensor).all())
    if broken:
        raise UserError(
            f"the weights in {folder} are not finite (NaN or infinite) in {_shortened(broken)}: "
            "the checkpoint is broken, use an earlier one of its training"
        )
    return weights


def weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file. `UserError` for those that are not
    there."""
    names = _indexed(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    others = sorted(
        {p.name for pattern in _OTHER_FORMATS for p in folder.glob(pattern) if "--" not in p.name}
    )
    if others and len(missing) == len(names):
        raise UserError(
            f"{folder} has its weights in {_shortened(others)}; only safetensors are read. Save "
            "the model again in the project that made it, with save_pretrained(folder, "
            "safe_serialization=True)"
        )
    if (folder / "lora_adapter").is_dir():
        raise UserError(
            f"{folder} has a lora_adapter but not the weights that it belongs to "
            f"({_shortened(missing)} not found): merge it first, with openvla-oft's "
            "merge_lora_weights_and_save.py"
        )
    raise UserError(
        f"{folder} lacks weights: {_shortened(missing)} not found. Download the missing files again"
    )


def _indexed(path: Path) -> list[str]:
    """Names of the shards in an index."""
    files = _json(path).get("weight_map")
    names = (
        set(files.values())
        if isinstance(files, dict) and all(isinstance(f, str) for f in files.values())
        else set()
    )
    if not names or any(Path(name).name != name for name in names):
        raise UserError(
            f"{path} has no weight_map that gives a file name for each tensor: download this file "
            "again, with the shards"
        )
    return sorted(names)


def part_file(folder: Path, part: str) -> Path | None:
    """The file of an extra part. `UserError` where there are several, as none says which belongs
    to the shards."""
    found = sorted(folder.glob(f"{part}--*_checkpoint.pt"))
    if len(found) > 1:
        raise UserError(
            f"{folder} has {len(found)} files of {part} "
            f"({', '.join(p.name for p in found)}): leave one of them"
        )
    return found[0] if found else None


def check_weights(
    stored: Mapping[str, Tensor], own: Mapping[str, Tensor], optional: Iterable[str], folder: Path
) -> None:
    """Raise `UserError` that lists what ``stored`` lacks, has too much of, or has in another
    shape than ``own``."""
    may_miss = set(optional)
    wrong = [
        f"missing: {name} {list(own[name].shape)}" for name in own.keys() - stored.keys() - may_miss
    ]
    wrong += [
        f"unexpected: {name} {list(stored[name].shape)}" for name in stored.keys() - own.keys()
    ]
    wrong += [
        f"misshapen: {name} is {list(stored[name].shape)} in the checkpoint, "
        f"{list(own[name].shape)} by its {CONFIG}"
        for name in own.keys() & stored.keys()
        if stored[name].shape != own[name].shape
    ]
    if wrong:
        lines = "\n  ".join(sorted(wrong)[:_LISTED]) + (
            f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        )
        raise UserError(
            f"the weights in {folder} do not fit the policy:\n  {lines}\nDownload the checkpoint "
            f"again, or check policy.type, policy.use_proprio and the checkpoint's {CONFIG}."
        )


def write_checkpoint(
    folder: Path | str,
    source: Source,
    statistics: Mapping[str, Any],
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    step: int,
) -> None:
    """Write a folder that upstream's own code loads.

    ``auto_map`` is left out: it would point at modelling files that are not copied; openvla and
    openvla-oft register or add their own when they load a folder. Extra parts go into ``.pt`` files
    of plain tensors, as upstream saves them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, Tensor]] = {}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    total = 0
    for name, tensor in weights:
        tensor = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        part, _, rest = name.partition(".")
        if part in PARTS:
            parts.setdefault(part, {})[rest] = tensor
            continue
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    _write_shards(folder, shards, total)
    for part, tensors in parts.items():
        torch.save(tensors, folder / f"{part}--{step}_checkpoint.pt")
    config = {
        key: value for key, value in source.config.items() if key not in ("auto_map", "norm_stats")
    }
    config["text_config"] = {
        **config["text_config"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / CONFIG, {**config, "norm_stats": statistics})
    _write_json(folder / STATISTICS, statistics)
    _write_json(
        folder / PREPROCESSOR, {k: v for k, v in source.preprocessor.items() if k != "auto_map"}
    )
    for name, text in {TOKENIZER: source.tokenizer_json, **source.companions}.items():
        (folder / name).write_text(text, "utf-8")
    if source.folder is not None and (source.folder / "tokenizer.model").is_file():
        shutil.copyfile(source.folder / "tokenizer.model", folder / "tokenizer.model")


def _write_shards(folder: Path, shards: list[dict[str, Tensor]], total: int) -> None:
    from safetensors.torch import save_file

    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged or cut off ({error}): download this file again"
        ) from error


def _part(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # a damaged file fails in many ways: as an archive, a pickle, or a tensor
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is not a file of plain tensors ({first}): download it again from its publisher"
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    ):
        raise UserError(
            f"{path} does not hold a state dict of tensors: use the part that was saved "
            "with the checkpoint"
        )
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The object in ``text``. `UserError` that names ``where`` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is damaged ({error}): download this file again") from error
    if not isinstance(value, dict):
        raise UserError(
            f"{where} holds a {type(value).__name__}, it should hold an object: "
            "download this file again"
        )
    return value


def _json(path: Path) -> dict[str, Any]:
    return parse_json(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged ({error}): download this file again") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}): check its permissions"
        ) from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (
        f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    )
