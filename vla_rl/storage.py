"""Nested dicts of tensors, numbers and strings on disk without pickles, and folders that are
swapped in as a whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl.errors import CheckpointError, DiskFull
from vla_rl.files import WEIGHTS, WEIGHTS_INDEX, WEIGHTS_STEM, last_good, read_json

SHARD_BYTES = 5_000_000_000  # the most of a file of weights
_TENSOR_KEY = "__tensor__"
_PLAIN = frozenset({str, bool, int, float, type(None)})
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file may not become that large here (ulimit -f, or the file system)",
}


# ------------------------------------------------------------------------------------- nested state
def save_state(
    folder: Path | str, state: Mapping[str, Any], besides: Mapping[str, Any] | None = None
) -> None:
    """Write nested dicts (string keys) and lists of tensors, numbers, strings, booleans and None;
    tuples become lists.

    ``state.json`` holds the structure and ``state.safetensors`` the tensors. Raises ``TypeError``
    that names the place of anything else. ``besides``: the structure of what others write.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    structure = split_state(state, tensors)
    save_tensors(folder / "state.safetensors", tensors)
    write_text(folder / "state.json", to_json({**structure, **(besides or {})}))


def load_state(folder: Path | str, leave: Collection[str] = ()) -> dict[str, Any]:
    """Inverse of `save_state`; tensors come back on the CPU. Keys to ``leave`` are left out."""
    folder = Path(folder)
    structure = read_object(folder / "state.json")
    asked = {key: value for key, value in structure.items() if key not in leave}
    return join_state(asked, load_tensors(folder / "state.safetensors"), folder)


def split_state(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The structure of a state, JSON-ready; its tensors go into ``tensors``, by their places."""
    return _split(state, "", tensors)


def _split(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {_TENSOR_KEY: place}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == _TENSOR_KEY]
        if wrong:
            raise TypeError(
                f"state at '{place or '/'}' has the key {wrong[0]!r}: keys are strings, "
                f"and not {_TENSOR_KEY}"
            )
        return {key: _split(item, f"{place}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if _PLAIN.issuperset(map(type, value)):
            return list(value)
        return [_split(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(
        f"state at '{place or '/'}' is a {type(value).__name__}: use dicts, lists, tensors, "
        "numbers, strings and None"
    )


def join_state(value: Any, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    """Inverse of `split_state`; ``folder`` is where it was read, for messages."""
    if isinstance(value, dict):
        if _TENSOR_KEY in value:
            name = value[_TENSOR_KEY]
            if not isinstance(name, str) or name not in tensors:
                raise CheckpointError(
                    f"{folder} is damaged: state.safetensors lacks {str(name)[:80]!r}"
                )
            return tensors[name]
        return {key: join_state(item, tensors, folder) for key, item in value.items()}
    if not isinstance(value, list) or _PLAIN.issuperset(map(type, value)):
        return value
    return [join_state(item, tensors, folder) for item in value]


# -------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def replacing(path: Path, keep_last_good: bool) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``path`` if the block succeeds and vanishes
    if it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # of a process that was killed while saving
        for stale in path.parent.glob(f".{path.name}.part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        part = path.with_name(f".{path.name}.part-{os.getpid()}")
        part.mkdir()
        try:
            yield part
            for folder in (part, *(p for p in part.rglob("*") if p.is_dir())):
                fsync(folder)
            _swap_in(part, path, keep_last_good)
            fsync(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether the system refused for want of room."""
    return _refused(error) is not None


def _refused(error: BaseException) -> int | None:
    """The number of the system's error, if it is one of those."""
    # safetensors wraps the system's error and leaves its number in the text only.
    said, known = str(error), getattr(error, "errno", None)
    return next(
        (number for number in _NO_ROOM if number == known or f"os error {number})" in said), None
    )


def disk_full(path: Path, error: BaseException) -> DiskFull:
    """What to raise in place of ``error``, for which `is_disk_full` holds."""
    refused = _refused(error) or errno.ENOSPC
    remedy = "Raise that limit" if refused == errno.EFBIG else "Free some space"
    return DiskFull(
        f"{_NO_ROOM[refused]}: {path} could not be written ({_free_megabytes(path.parent)} MB "
        f"free). What was there before is unchanged. {remedy}, then run the same command again: it "
        "resumes."
    )


def _swap_in(part: Path, path: Path, keep_last_good: bool) -> None:
    if not path.exists():
        part.rename(path)
        return
    kept = last_good(path)
    if _exchange(part, path):  # `part` is the old checkpoint now
        if keep_last_good:
            shutil.rmtree(kept, ignore_errors=True)
            part.rename(kept)
        return
    # Without an atomic exchange there is a moment without `path`; loading falls back on last_good.
    shutil.rmtree(kept, ignore_errors=True)
    path.rename(kept)
    part.rename(path)
    if not keep_last_good:
        shutil.rmtree(kept, ignore_errors=True)


@functools.cache
def _renameat2() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (Linux); False where the system or the file system cannot."""
    at_cwd, exchange = -100, 2
    function = _renameat2()
    return (
        function is not None
        and function(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0
    )


def savable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, none in another's memory."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if tensor.numel() and (storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes):
            tensor = tensor.clone()  # safetensors refuses views that share memory
        seen.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    return ready


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(savable(tensors), path, metadata={"format": "pt"})
    fsync(path)


def place_weights(folder: Path, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Which weights of these ``sizes`` (bytes) belong into which file of a checkpoint; where there
    are several, ``folder`` gets their index."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if groups[-1] and size + nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    files = {
        f"{WEIGHTS_STEM}-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }
    weight_map = {name: file for file, group in files.items() for name in group}
    document = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_text(folder / WEIGHTS_INDEX, to_json(document))
    return files


def load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: the checkpoint is incomplete, use another checkpoint, such as "
            "*.last_good beside it"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): use another checkpoint, such as *.last_good beside it"
        ) from error


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    fsync(path)


def read_object(path: Path) -> dict[str, Any]:
    remedy = "the checkpoint is incomplete, use another one, such as *.last_good beside it"
    return read_json(path, remedy, CheckpointError)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_megabytes(folder: Path) -> int:
    return math.floor(shutil.disk_usage(folder).free / 1e6)
