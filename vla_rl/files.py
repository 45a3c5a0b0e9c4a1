"""Reading a run's small files, and saying in one line what the system refused (without torch).

Whatever is wrong with a file becomes one `UserError` that names it: it is missing, a folder, no
UTF-8, no JSON, or JSON of another shape.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_rl.errors import CheckpointError, ConfigError, UserError, first_line
from vla_rl.hub import fetch_hint
from vla_rl.plain import open_plain, read_plain
from vla_rl.specs import EmbodimentSpec

CONFIG, EMBODIMENT, TRAINING_STATE = "config.json", "embodiment.json", "training_state"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ".shards.json"  # ends the name of what says which rank wrote what (`vla_rl.shards`)
WEIGHTS_STEM, STATE_STEM = "model", "state"
REPLAY_FILES = "header.json", "journal.jsonl"  # beside a replay's rows
_INCOMPLETE = "use another checkpoint, such as *.last_good beside it"
# What a user can do about what the system refuses. An error that is not listed is a bug, and shows
# its traceback.
_REMEDIES = {
    errno.ENOSPC: "the disk is full. Free some space, or choose another place",
    errno.EDQUOT: "your quota is used up. Free some space, or choose another place",
    errno.EFBIG: "a file may not become that large. Raise the limit (ulimit -f), or choose another "
    "file system",
    errno.EROFS: "this file system is read-only. Choose another place",
    errno.EACCES: "permission denied. Change its permissions, or choose another place",
    errno.EPERM: "the system does not permit it. Change its permissions, or choose another place",
    errno.ENOTDIR: "a part of this path is a file, not a folder. Move that file away, or choose "
    "another place",
    errno.EISDIR: "this is a folder, and a file is needed. Name a file, or move the folder away",
    errno.EEXIST: "something else of that name is there already. Move it away, or choose another "
    "name",
    errno.ENOENT: "there is no such file or folder. Look for a mistake in the path",
    errno.ELOOP: "its symbolic links lead in a circle. Mend the link, or name another path",
    errno.ENAMETOOLONG: "the name is too long. Choose a shorter one",
    errno.ENOTEMPTY: "the folder is not empty. Move it away, or choose another name",
    errno.EIO: "the disk failed. Try again, or choose another place",
    errno.ESTALE: "the network file system lost it. Try again",
    errno.EMFILE: "too many files are open. Raise the limit (ulimit -n), or set slots.workers "
    "lower",
    errno.ENFILE: "the system has too many files open. Close other programs, or set slots.workers "
    "lower",
    errno.ENOMEM: "there is not enough memory. Close other programs, or set slots.slots_per_worker "
    "lower",
}


def explained(error: OSError) -> str | None:
    """What the system refused, where, and what helps; None for an error that no user can have
    caused."""
    place = error.filename if error.filename is not None else error.filename2
    # (`tempfile`'s, which tried to write)
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):
        return (
            f"{error.strerror}: set TMPDIR to a folder that can be written, and look for room, and "
            "at ulimit -f"
        )
    if error.errno not in _REMEDIES or (
        place is None and error.errno in (errno.ENOENT, errno.EEXIST)
    ):
        return None
    shown = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else place
    return reason(error) if shown is None else f"{shown}: {reason(error)}"


def reason(error: OSError) -> str:
    """What the system refused and what helps, without the place."""
    said = error.strerror or str(error)
    return f"{_REMEDIES[error.errno]} ({said})" if error.errno in _REMEDIES else said


_POINTER = b"version https://git-lfs.github.com/spec/"


def require_content(path: Path, error: type[UserError] = UserError) -> None:
    """Raise ``error`` for a git-lfs pointer, and for a pipe or a device, which its reader would
    wait for."""
    try:
        with open(
            open_plain(path, os.O_RDONLY, "put the file itself there", error, follow=True), "rb"
        ) as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:  # (which its reader meets too)
        return
    if pointer:
        raise error(
            f"{path} is a git-lfs pointer, the file itself was not fetched: run 'git lfs pull' in "
            "its repository, or fetch it with 'hf download'"
        )


def read_json(path: Path, remedy: str, error: type[UserError] = UserError) -> dict[str, Any]:
    """The object in a JSON file. Anything else raises ``error``, whose message ends with
    ``remedy``."""
    try:
        data = read_plain(path, remedy, error, follow=True)
    except FileNotFoundError:
        raise error(f"{path} is missing: {remedy}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}): {remedy}") from problem
    return json_object(data, path, remedy, error)


def json_object(
    data: bytes, path: Path, remedy: str, error: type[UserError] = UserError
) -> dict[str, Any]:
    """The object in the ``data`` of the JSON file ``path``; errors as in `read_json`."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as problem:  # (what is no UTF-8 is a ValueError too)
        require_content(path, error)
        raise error(f"{path} is damaged ({first_line(problem)}): {remedy}") from problem
    if not isinstance(value, dict):
        raise error(
            f"{path} is damaged (it holds a {type(value).__name__}, not an object): {remedy}"
        )
    return value


def read_embodiment(path: Path, remedy: str, error: type[UserError] = UserError) -> EmbodimentSpec:
    """The robot that an ``embodiment.json`` describes; errors as in `read_json`."""
    try:
        return EmbodimentSpec.from_dict(read_json(path, remedy, error))
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as problem:
        raise error(f"{path} describes no robot ({_first(problem)}): {remedy}") from problem


def _first(problem: Exception) -> str:
    return f"it lacks {problem}" if isinstance(problem, KeyError) else first_line(problem)


# -------------------------------------------------------------------------------------- checkpoints
def last_good(path: Path) -> Path:
    """Where the checkpoint before the one at ``path`` is kept."""
    return path.with_name(f"{path.name}.last_good")


def existing_checkpoint(path: Path) -> Path:
    """The checkpoint folder ``path``, or what a crash between two renames left of it."""
    if (path / CONFIG).is_file():
        return path
    if not os.path.lexists(path):
        kept = last_good(path)
        if (kept / CONFIG).is_file():
            return kept
        hint = fetch_hint(str(path)) or f": give the folder that holds {CONFIG} and {WEIGHTS}"
        raise CheckpointError(f"there is no checkpoint at {path}{hint}")
    inner = [p for name in ("rl", "sft") if ((p := path / "checkpoints" / name) / CONFIG).is_file()]
    hint = (
        f". Did you mean {inner[0]}?"
        if inner
        else f": give the folder that holds {CONFIG} and {WEIGHTS}"
    )
    raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG}{hint}")


def check_checkpoint(path: Path) -> EmbodimentSpec:
    """Whether every file of a checkpoint of this project is there, readable and whole; returns the
    robot it is of.

    Of the weights only the headers are read. Raises `CheckpointError` that names the file.
    """
    path = existing_checkpoint(path)
    kind = read_json(path / CONFIG, _INCOMPLETE, CheckpointError).get("policy_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path / CONFIG} names no policy_type: {_INCOMPLETE}")
    embodiment = read_embodiment(path / EMBODIMENT, _INCOMPLETE, CheckpointError)
    for name in weight_files(path):
        check_tensors(path / name)
    return embodiment


def replay_of(path: Path) -> Path:
    """The replay of a run's folder, or ``path`` itself where it is one. Raises `ConfigError` for
    any other folder."""
    for folder in (path / "replay", path):
        if all((folder / name).is_file() for name in REPLAY_FILES):
            return folder
    raise ConfigError(
        f"replay.offline: {path} has no replay: name the folder of a run whose algorithm learns "
        "from one (rlpd, residual, td3, sac, iql, parl, dsrl), or its folder replay"
    )


def weight_files(path: Path) -> list[str]:
    """Names of the files that hold a checkpoint's weights."""
    if is_spread(path, WEIGHTS_STEM):
        return [shard["file"] for shard in shard_index(path / f"{WEIGHTS_STEM}{SHARDS}")["shards"]]
    if not (path / WEIGHTS_INDEX).exists():
        return [WEIGHTS]
    files = read_json(path / WEIGHTS_INDEX, _INCOMPLETE, CheckpointError).get("weight_map")
    names = list(files.values()) if isinstance(files, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(
            f"{path / WEIGHTS_INDEX} has no weight_map that gives each tensor's file: {_INCOMPLETE}"
        )
    return sorted(set(names))


def is_spread(folder: Path, stem: str) -> bool:
    """Whether a set of `vla_rl.shards` of that name is in the folder."""
    return (folder / f"{stem}{SHARDS}").is_file()


def shard_index(path: Path) -> dict[str, Any]:
    """What an index of `vla_rl.shards` says: ``format``, ``save``, ``shards`` (a ``file`` of this
    folder, its ``bytes`` and ``sha256``) and ``tensors``. Raises `CheckpointError`."""
    found = read_json(path, _INCOMPLETE, CheckpointError)
    shards = found.get("shards")
    sound = (
        isinstance(found.get("format"), int)
        and isinstance(found.get("save"), str)
        and isinstance(found.get("tensors"), dict)
        and isinstance(shards, list)
        and bool(shards)
        and all(isinstance(x, dict) and {"file", "bytes", "sha256"} <= x.keys() for x in shards)
        and all(isinstance(x["file"], str) and Path(x["file"]).name == x["file"] for x in shards)
    )
    if not sound:
        raise CheckpointError(f"{path} does not say which files hold which tensors: {_INCOMPLETE}")
    return found


def check_tensors(path: Path) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file begin and end (bytes). Raises `CheckpointError`
    unless it is one of the length that its header tells."""
    try:
        with open(
            open_plain(path, os.O_RDONLY, _INCOMPLETE, CheckpointError, follow=True), "rb"
        ) as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = json.loads(file.read(length)) if 8 + length <= size else None
        offsets = [
            x["data_offsets"] for name, x in (header or {}).items() if name != "__metadata__"
        ]
        places = sorted((8 + length + begin, 8 + length + end) for begin, end in offsets)
        complete = bool(header) and size == max([8 + length, *(end for _, end in places)])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the checkpoint is incomplete, {_INCOMPLETE}"
        ) from None
    except OSError as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem.strerror or problem}): {_INCOMPLETE}"
        ) from problem
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError) as problem:
        require_content(path, CheckpointError)
        raise CheckpointError(
            f"{path} is damaged (its header is no safetensors header): {_INCOMPLETE}"
        ) from problem
    if not complete:
        require_content(path, CheckpointError)
        raise CheckpointError(
            f"{path} is damaged (it is cut short, or longer than its header says): {_INCOMPLETE}"
        )
    return places


# ------------------------------------------------------------------------------------------ writing
@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, which takes its place if the block succeeds and vanishes
    if it fails: a reader sees the old file or the new one, never half of it. An ``OSError`` on the
    way names ``path``."""
    if not path.name:
        raise UserError(f"{str(path)!r} names no file: give its name")
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Text in UTF-8, by `replacing_file`."""
    with replacing_file(path) as part:
        part.write_text(text, encoding="utf-8")


def nearest_folder(path: Path) -> Path:
    """``path`` itself or the nearest thing above it that exists."""
    for place in (path, *path.absolute().parents):
        if os.path.lexists(place):
            return place
    return Path("/")


def require_writable(path: Path, key: str) -> None:
    """Raise `UserError` unless the folder ``path`` is there or could be made, and could be
    written; creates nothing."""
    place = nearest_folder(path)
    try:
        place.stat()
    except OSError as problem:
        raise UserError(f"{key}: {place}: {reason(problem)}") from problem
    if not place.is_dir():
        raise UserError(
            f"{key}: {place} is a file, and a folder is needed there. Move it away, or "
            "choose another place"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        why = (
            "is on a read-only file system"
            if os.statvfs(place).f_flag & os.ST_RDONLY
            else "may not be written by you"
        )
        raise UserError(
            f"{key}: the folder {place} {why}. Choose another place, or change its permissions"
        )
    limit = os.pathconf(place, "PC_NAME_MAX")
    long = [part for part in path.parts if len(os.fsencode(part)) > limit]
    if long:
        raise UserError(
            f"{key}: the name {long[0][:40]}… has {len(long[0])} characters, of at most "
            f"{limit}. Shorten it"
        )


def require_new(path: Path) -> None:
    """Raise `UserError` where something is at ``path``: what nobody can make again is never
    written over."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: choose another name, or move it away")


def require_file_target(path: Path, key: str) -> None:
    """Raise `UserError` unless a file could be written at ``path``; creates nothing."""
    if path.is_dir():
        raise UserError(
            f"{key}: {path} is a folder, and a file is written. Name a file in it, such "
            f"as {path / 'result'}"
        )
    if path.exists() and not path.is_file():  # (what is written takes the name's place)
        raise UserError(f"{key}: {path} is a device or a pipe. Name a file")
    require_writable(path.parent, key)
