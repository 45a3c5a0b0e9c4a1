"""Checkpoints: Hugging Face style folders, written atomically and loaded without unpickling.

A checkpoint folder holds ``config.json`` (policy type, its config and statistics, versions), ``model.safetensors`` (or
shards with ``model.safetensors.index.json``), ``embodiment.json``, the policy's own text files (a tokenizer), and, for
resuming, ``training_state/`` with ``state.json`` and ``state.safetensors``.

A save writes a hidden folder beside the target, flushes it to disk and swaps it in; whatever goes wrong on the way, the
checkpoint that was there stays whole. The one before is kept as ``<name>.last_good``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import vla_rl
from vla_rl.cluster.ranks import Ranks, full_state, load_full_state
from vla_rl.errors import CheckpointError, ConfigError, DiskFull, UserError
from vla_rl.files import (
    CONFIG,
    EMBODIMENT,
    TRAINING_STATE,
    WEIGHTS,
    WEIGHTS_INDEX,
    existing_checkpoint,
    last_good,
    read_embodiment,
    read_json,
    weight_files,
)
from vla_rl.metrics import write_json
from vla_rl.types import EmbodimentSpec

__all__ = [
    "CheckpointError", "Checkpointable", "DiskFull", "RunLock", "keep_numbered", "load_policy", "load_state",
    "load_training_state", "load_weights", "restore_rng_state", "rng_state", "save_checkpoint", "save_state", "write_json",
]  # fmt: skip

FORMAT = 1
_TENSOR_KEY = "__tensor__"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Checkpointable(Protocol):
    """What a policy provides to be saved. Its class also has ``from_config_dict(data, embodiment, files)``, and may say
    where in ``data`` its own config stands by ``config_path`` (default: ``("config",)``)."""

    policy_type: str
    embodiment: EmbodimentSpec

    def config_dict(self) -> dict[str, Any]:
        """JSON-ready: all that building the policy again needs besides embodiment, text files and weights."""
        ...

    def extra_files(self) -> dict[str, str]:
        """Text files by name, such as a tokenizer."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any: ...


# ------------------------------------------------------------------------------------------------------------- policies
def save_checkpoint(
    path: Path | str,
    policy: Checkpointable,
    training_state: Mapping[str, Any] | None = None,
    *,
    keep_last_good: bool = True,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``policy`` (and what resuming needs) to the folder ``path``, replacing a checkpoint there in one step.

    ``training_state`` is a nested dict as for `save_state`. With ``keep_last_good`` the replaced checkpoint stays
    beside the new one as ``<name>.last_good``. Raises `DiskFull` where the disk is full; the old
    checkpoint is untouched then.

    Where several ranks learn together all of them call this: what is spread over them is gathered, the main one writes an
    ordinary checkpoint, and if it cannot, all raise.
    """
    ranks, problem = Ranks.present(), None
    weights = full_state(policy, ranks)
    if ranks.is_main:
        try:
            _write_checkpoint(Path(path), policy, weights, training_state, keep_last_good, max_shard_bytes)
        except Exception as error:
            problem = error
    if not ranks.all(problem is None):
        raise problem or CheckpointError(f"the main rank could not write {path}; its own message says why")


def _write_checkpoint(
    path: Path,
    policy: Checkpointable,
    weights: dict[str, Tensor],
    training_state: Mapping[str, Any] | None,
    keep_last_good: bool,
    max_shard_bytes: int,
) -> None:
    header = {"policy_type": policy.policy_type, "format": FORMAT, "vla_rl_version": vla_rl.__version__}
    with _replacing(path, keep_last_good) as folder:
        _save_weights(folder, weights, max_shard_bytes)
        _write_text(folder / CONFIG, _to_json({**header, **policy.config_dict()}))
        _write_text(folder / EMBODIMENT, _to_json(policy.embodiment.to_dict()))
        for name, text in policy.extra_files().items():
            _write_text(folder / name, text)
        if training_state is not None:
            save_state(folder / TRAINING_STATE, training_state)


def keep_numbered(path: Path, number: int, keep: int) -> None:
    """Keep the policy of the checkpoint ``path`` as ``<name>_<number>`` beside it, and the latest ``keep`` such alone.

    Without training state. Files are shared with ``path`` (hard links) where the file system can, so that a copy takes
    room only once ``path`` holds something else.
    """
    source = existing_checkpoint(path)
    with _replacing(path.with_name(f"{path.name}_{number}"), keep_last_good=False) as folder:
        for file in source.iterdir():
            if file.is_file():
                try:
                    os.link(file, folder / file.name)
                except OSError:
                    shutil.copy2(file, folder / file.name)
    numbers = sorted(int(n) for p in path.parent.glob(f"{path.name}_*") if (n := p.name[len(path.name) + 1 :]).isdigit())
    for old in numbers[:-keep]:
        shutil.rmtree(path.with_name(f"{path.name}_{old}"), ignore_errors=True)


def load_policy(
    path: Path | str,
    factory: Callable[[str], Any],
    expected_embodiment: EmbodimentSpec | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """The policy of a checkpoint, on the CPU, in evaluation mode.

    ``factory`` maps the stored policy type to its class. ``expected_embodiment`` is that of the env or dataset in use;
    another one raises `EmbodimentMismatch`, which shows both. ``changes`` are keys of the policy's own config that get
    another value than the stored one; those that do not go with its weights raise `CheckpointError`.
    """
    path = existing_checkpoint(Path(path))
    config = _read_json(path / CONFIG)
    if not isinstance(config.get("format", 0), int) or config.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path / CONFIG} has checkpoint format {config['format']} (vla_rl {config.get('vla_rl_version')}), this is "
            f"vla_rl {vla_rl.__version__}, which reads up to format {FORMAT}: update vla_rl"
        )
    remedy = "use another checkpoint, such as *.last_good beside it"
    embodiment = read_embodiment(path / EMBODIMENT, remedy, CheckpointError)
    if expected_embodiment is not None:
        expected_embodiment.require(embodiment, "the env or dataset in use", f"the checkpoint {path}")
    try:
        policy = _build(path, config, embodiment, factory, changes or {})
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}: its {CONFIG} or its text files are incomplete") from error
    except UserError as error:
        if changes or type(error) not in (UserError, ConfigError):
            raise
        raise type(error)(f"{path / CONFIG}: {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {first}): its {CONFIG} or its text files do not describe a policy; "
            f"{remedy}"
        ) from error
    load_weights(path, policy)
    if isinstance(policy, torch.nn.Module):
        policy.eval()
    return policy


def _build(
    path: Path, config: dict[str, Any], embodiment: EmbodimentSpec, factory: Callable[[str], Any], changes: Mapping[str, Any]
) -> Any:
    """The policy that a checkpoint's text files describe, without its weights."""
    skip = (CONFIG, EMBODIMENT, WEIGHTS_INDEX)
    files = {
        p.name: p.read_text(encoding="utf-8")
        for p in sorted(path.iterdir())
        if p.is_file() and p.suffix in (".json", ".txt") and p.name not in skip
    }
    kind = factory(config["policy_type"])
    if changes:
        own = config
        for name in getattr(kind, "config_path", ("config",)):
            own = own[name]
        _change(own, changes, config["policy_type"], path)
    return kind.from_config_dict(config, embodiment, files)


@contextlib.contextmanager
def restoring(folder: Path, what: str = "a training state of this run") -> Iterator[None]:
    """What the block raises because ``folder`` holds something else becomes a `CheckpointError` that names it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{folder} does not hold {what} ({type(error).__name__}: {first}). Put {last_good(folder).name} in its place, "
            f"or remove it: what it holds is then made again"
        ) from error


def _change(own: dict[str, Any], changes: Mapping[str, Any], kind: str, path: Path) -> None:
    unknown = sorted(set(changes) - set(own))
    if unknown:
        raise ConfigError(
            f"policy.{unknown[0]}={changes[unknown[0]]!r} changes nothing: {path} holds a policy of type {kind!r}, whose "
            f"config has no such key. Its keys: {', '.join(sorted(own))}"
        )
    own.update(changes)


def load_weights(path: Path | str, policy: Any) -> None:
    """Copy the weights of a checkpoint into ``policy``.

    Raises `CheckpointError` that names every tensor that is missing, unexpected or misshapen, or where numbers are not
    finite, and changes nothing.
    """
    path = existing_checkpoint(Path(path))
    stored, own = _load_weights(path), policy.state_dict()
    wrong = [f"missing: {name} {list(own[name].shape)}" for name in own.keys() - stored.keys()]
    wrong += [f"unexpected: {name} {list(stored[name].shape)}" for name in stored.keys() - own.keys()]
    wrong += [
        f"misshapen: {name} is {list(stored[name].shape)} in the checkpoint, {list(own[name].shape)} in the policy"
        for name in own.keys() & stored.keys()
        if own[name].shape != stored[name].shape
    ]
    if wrong:
        shown = "\n  ".join(sorted(wrong)[:20]) + (f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise CheckpointError(
            f"the weights in {path} do not fit the policy:\n  {shown}\nBuild the policy from the checkpoint's own "
            f"{CONFIG}, or load a checkpoint of this policy."
        )
    broken = [name for name, x in stored.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]
    if broken:
        raise CheckpointError(
            f"{len(broken)} of the {len(stored)} tensors in {path} hold numbers that are not finite (the first: "
            f"{sorted(broken)[0]}): its training diverged. Use {last_good(path).name} beside it, or an earlier checkpoint."
        )
    load_full_state(policy, stored)


def load_training_state(path: Path | str) -> dict[str, Any]:
    """What `save_checkpoint` got as ``training_state``."""
    path = existing_checkpoint(Path(path))
    if not (path / TRAINING_STATE).is_dir():
        raise CheckpointError(
            f"{path} holds a policy but no {TRAINING_STATE}/, so training cannot resume from it: use it as a starting "
            f"point for a new run instead (checkpoint={path})"
        )
    return load_state(path / TRAINING_STATE)


def _save_weights(folder: Path, weights: dict[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _save_tensors(folder / WEIGHTS, shards[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _save_tensors(folder / name, shard)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in weights.values())
    _write_text(folder / WEIGHTS_INDEX, _to_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _load_weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(path) for name, tensor in _load_tensors(path / file).items()}


# --------------------------------------------------------------------------------------------------------- nested state
def save_state(folder: Path | str, state: Mapping[str, Any]) -> None:
    """Write nested dicts (string keys) and lists of tensors, numbers, strings, booleans and None; tuples become lists.

    ``state.json`` holds the structure and ``state.safetensors`` the tensors. Raises ``TypeError`` that names the place
    of anything else.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    structure = _split(state, "", tensors)
    _save_tensors(folder / "state.safetensors", tensors)
    _write_text(folder / "state.json", _to_json(structure))


def load_state(folder: Path | str) -> dict[str, Any]:
    """Inverse of `save_state`; tensors come back on the CPU."""
    folder = Path(folder)
    return _join(_read_json(folder / "state.json"), _load_tensors(folder / "state.safetensors"), folder)


def _split(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {_TENSOR_KEY: place}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == _TENSOR_KEY]
        if wrong:
            raise TypeError(
                f"state at '{place or '/'}' has the key {wrong[0]!r}: keys are strings, and not {_TENSOR_KEY}"
            )
        return {key: _split(item, f"{place}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(
        f"state at '{place or '/'}' is a {type(value).__name__}: use dicts, lists, tensors, numbers, strings and None"
    )


def _join(value: Any, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    if isinstance(value, dict):
        if _TENSOR_KEY in value:
            if value[_TENSOR_KEY] not in tensors:
                raise CheckpointError(f"{folder} is damaged: state.safetensors lacks '{value[_TENSOR_KEY]}'")
            return tensors[value[_TENSOR_KEY]]
        return {key: _join(item, tensors, folder) for key, item in value.items()}
    return [_join(item, tensors, folder) for item in value] if isinstance(value, list) else value


def rng_state() -> dict[str, Any]:
    """State of torch's global generators (CPU, and the present GPU where there is one), fit for `save_state`."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of `rng_state`; a GPU's state is ignored where there is no GPU."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ------------------------------------------------------------------------------------------------------------ run lock
class RunLock:
    """Holds a run folder for one process (``with RunLock(folder): ...``); a second one gets a `UserError`.

    The kernel drops the lock when the process ends, however it ends. ``FILE`` stays behind and is harmless; a folder that
    holds nothing else goes with it.
    """

    FILE = ".lock"

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._descriptor: int | None = None

    def acquire(self) -> RunLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / self.FILE
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(
                f"the run folder {self.folder} is in use by {owner}. Wait for that run to end, or give this one "
                "another folder (name=...)"
            ) from None
        if not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat()):
            os.close(descriptor)  # its owner took the folder away between our two calls
            return self.acquire()
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            if [path.name for path in self.folder.glob("*")] == [self.FILE]:
                (self.folder / self.FILE).unlink()
                self.folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


# ---------------------------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def _replacing(path: Path, keep_last_good: bool) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``path`` if the block succeeds and vanishes if it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.part-*"):  # of a process that was killed while saving
            shutil.rmtree(stale, ignore_errors=True)
        part = path.with_name(f".{path.name}.part-{os.getpid()}")
        part.mkdir()
        try:
            yield part
            for folder in (part, *(p for p in part.rglob("*") if p.is_dir())):
                _fsync(folder)
            _swap_in(part, path, keep_last_good)
            _fsync(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except Exception as error:
        # safetensors wraps the system's error and leaves its number in the text only.
        numbers = [f"os error {number})" for number in _DISK_FULL]
        if getattr(error, "errno", None) in _DISK_FULL or any(text in str(error) for text in numbers):
            raise DiskFull(
                f"the disk is full: {path} could not be written ({_free_megabytes(path.parent)} MB free). What was "
                f"there before is unchanged. Free some space, then run the same command again: it resumes."
            ) from error
        raise


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
    return function is not None and function(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if tensor.numel() and (storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes):
            tensor = tensor.clone()  # safetensors refuses views that share memory
        seen.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    save_file(ready, path, metadata={"format": "pt"})
    _fsync(path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: the checkpoint is incomplete, use another checkpoint, such as *.last_good beside it"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): use another checkpoint, such as *.last_good beside it"
        ) from error


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)


def _read_json(path: Path) -> dict[str, Any]:
    remedy = "the checkpoint is incomplete, use another one, such as *.last_good beside it"
    return read_json(path, remedy, CheckpointError)


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_megabytes(folder: Path) -> int:
    return math.floor(shutil.disk_usage(folder).free / 1e6)
