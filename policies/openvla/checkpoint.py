"""Reading and writing checkpoint folders in the format of OpenVLA and OpenVLA-OFT.

``config.json``, ``model*.safetensors`` (with an index when sharded), ``preprocessor_config.json``, ``tokenizer.json``,
``dataset_statistics.json`` (fine-tuned checkpoints; it replaces ``norm_stats``), and OFT's extra parts as
``<part>--<step>_checkpoint.pt``. Nothing is unpickled but plain tensors.
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
    "config.json", "dataset_statistics.json", "preprocessor_config.json", "tokenizer.json",
)  # fmt: skip
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTS = ("proprio_projector", "action_head", "value_head")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SHARD_BYTES = 7 * 10**9
_LISTED = 20


@dataclass(frozen=True)
class Source:
    """All of a checkpoint but its weights. ``statistics`` is upstream's ``norm_stats``; ``folder`` None: random weights."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    statistics: dict[str, Any]
    tokenizer_json: str
    companions: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def where(self) -> str:
        return str(self.folder / CONFIG) if self.folder else CONFIG

    def choose_statistics(self, key: str) -> tuple[str, dict[str, Any]]:
        """The entry ``key`` (or ``key``_no_noops, as LIBERO's evaluation allows); the only one for an empty key."""
        names = sorted(self.statistics)
        if not key and len(names) == 1:
            key = names[0]
        for name in (key, f"{key}_no_noops"):
            if name in self.statistics and "action" in self.statistics[name]:
                return name, self.statistics[name]
        listing = ", ".join(names) or "none"
        problem = (
            f"policy.unnorm_key={key!r} is not among" if key else "policy.unnorm_key is empty and does not choose among"
        )
        raise ConfigError(f"{problem} the statistics of {self.where}: {listing}. Set it to one of these")


def read_source(folder: Path | str) -> Source:
    """Everything but the weights of a checkpoint folder. `UserError` for what is missing or unreadable."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"policy.checkpoint={folder} holds no {CONFIG}: give the folder of an OpenVLA or OpenVLA-OFT checkpoint"
        )
    missing = [name for name in (PREPROCESSOR, TOKENIZER) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {' and '.join(missing)}: copy them from the published checkpoint")
    config = _json(folder / CONFIG)
    statistics = _json(folder / STATISTICS) if (folder / STATISTICS).is_file() else config.get("norm_stats") or {}
    companions = {name: (folder / name).read_text("utf-8") for name in _COMPANIONS if (folder / name).is_file()}
    tokenizer = (folder / TOKENIZER).read_text("utf-8")
    return Source(config, _json(folder / PREPROCESSOR), statistics, tokenizer, companions, folder)


def read_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the shards and of the extra parts, in ``dtype``, under the policy's names."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        weights |= {name: tensor.to(dtype) for name, tensor in _tensors(path).items()}
    for part in PARTS:
        if (path := part_file(folder, part)) is not None:
            weights |= {f"{part}.{name}": tensor.to(dtype) for name, tensor in _part(path).items()}
    broken = sorted(name for name, tensor in weights.items() if not torch.isfinite(tensor).all())
    if broken:
        raise UserError(
            f"the weights in {folder} are not finite (NaN or infinite) in {_shortened(broken)}: the checkpoint is broken, "
            "use an earlier one of its training"
        )
    return weights


def weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file. `UserError` for those that are not there."""
    names = sorted(set(_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).is_file() else [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks weights: {_shortened(missing)} not found. Download the missing files again")
    return [folder / name for name in names]


def part_file(folder: Path, part: str) -> Path | None:
    """The file of an extra part. `UserError` where there are several, as none says which belongs to the shards."""
    found = sorted(folder.glob(f"{part}--*_checkpoint.pt"))
    if len(found) > 1:
        raise UserError(f"{folder} has {len(found)} files of {part} ({', '.join(p.name for p in found)}): leave one of them")
    return found[0] if found else None


def check_weights(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], optional: Iterable[str], folder: Path) -> None:
    """Raise `UserError` that lists what ``stored`` lacks, has too much of, or has in another shape than ``own``."""
    may_miss = set(optional)
    wrong = [f"missing: {name} {list(own[name].shape)}" for name in own.keys() - stored.keys() - may_miss]
    wrong += [f"unexpected: {name} {list(stored[name].shape)}" for name in stored.keys() - own.keys()]
    wrong += [
        f"misshapen: {name} is {list(stored[name].shape)} in the checkpoint, {list(own[name].shape)} by its {CONFIG}"
        for name in own.keys() & stored.keys()
        if stored[name].shape != own[name].shape
    ]
    if wrong:
        lines = "\n  ".join(sorted(wrong)[:_LISTED]) + (
            f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        )
        raise UserError(
            f"the weights in {folder} do not fit the policy:\n  {lines}\nDownload the checkpoint again, or check "
            f"policy.type, policy.use_proprio and the checkpoint's {CONFIG}."
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

    ``auto_map`` is left out: it would point at modelling files that are not copied; openvla and openvla-oft register or
    add their own when they load a folder. Extra parts go into ``.pt`` files of plain tensors, as upstream saves them.
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
    config = {key: value for key, value in source.config.items() if key not in ("auto_map", "norm_stats")}
    config["text_config"] = {**config["text_config"], "torch_dtype": str(dtype).removeprefix("torch.")}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / CONFIG, {**config, "norm_stats": statistics})
    _write_json(folder / STATISTICS, statistics)
    _write_json(folder / PREPROCESSOR, {k: v for k, v in source.preprocessor.items() if k != "auto_map"})
    for name, text in {TOKENIZER: source.tokenizer_json, **source.companions}.items():
        (folder / name).write_text(text, "utf-8")
    if source.folder is not None and (source.folder / "tokenizer.model").is_file():
        shutil.copyfile(source.folder / "tokenizer.model", folder / "tokenizer.model")


def _write_shards(folder: Path, shards: list[dict[str, Tensor]], total: int) -> None:
    from safetensors.torch import save_file

    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
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
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or cut off ({error}): download this file again") from error


def _part(path: Path) -> dict[str, Tensor]:
    import pickle

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a file of plain tensors ({first}): download it again from its publisher") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} does not hold a state dict of tensors: use the part that was saved with the checkpoint")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}): download this file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, it should hold an object: download this file again")
    return value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
