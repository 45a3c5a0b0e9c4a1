"""Checkpoints: Hugging Face style folders, written atomically and loaded without unpickling.

A checkpoint folder holds ``config.json`` (policy type, its config and statistics, versions),
``model.safetensors`` (or shards with ``model.safetensors.index.json``), ``embodiment.json``, the
policy's own text files (a tokenizer), and, for resuming, ``training_state/`` with ``state.json``
and ``state.safetensors``. A policy that only adds to frozen weights
(`vla_rl.interfaces.Policy.base_folder`) stores its own alone, and under `BASE` in ``config.json``
where the others lie. What ranks write themselves has the form of `vla_rl.spread`.

A save writes a hidden folder beside the target, flushes it to disk and swaps it in; whatever goes
wrong on the way, the checkpoint that was there stays whole. The one before is kept as
``<name>.last_good``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vla_rl
from vla_rl.errors import CheckpointError, ConfigError, UserError, first_line
from vla_rl.files import (
    CONFIG,
    EMBODIMENT,
    SHARDS,
    TRAINING_STATE,
    WEIGHTS_INDEX,
    WEIGHTS_STEM,
    check_tensors,
    existing_checkpoint,
    is_spread,
    last_good,
    read_embodiment,
    weight_files,
)
from vla_rl.interfaces import Policy
from vla_rl.options import PolicyClass, view
from vla_rl.ranks import (
    Ranks,
    full_state,
    gathered_state,
    is_sharded,
    load_full_state,
    mesh_of,
    not_finite,
)
from vla_rl.shards import Shards
from vla_rl.spread import Parts, Spread, Unfinished, require_finite, spread_states
from vla_rl.storage import (
    load_state,
    load_tensors,
    place_weights,
    read_object,
    replacing,
    save_state,
    save_tensors,
    to_json,
    write_text,
)
from vla_rl.types import EmbodimentSpec

FORMAT = 1
BASE = "frozen_base"  # the key of a config.json that holds a `BaseReference`
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_PIECE = 4096  # bytes


@dataclass(frozen=True)
class _Refers:
    base_key: str = ""  # of a class that may leave weights to another folder (`Policy.base_folder`)


# ----------------------------------------------------------------------------------------- policies
def save_checkpoint(
    path: Path | str,
    policy: Any,
    training_state: Mapping[str, Any] | None = None,
    *,
    keep_last_good: bool = True,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write ``policy`` (and what resuming needs) to the folder ``path``, replacing a checkpoint
    there in one step.

    ``training_state`` is a nested dict as for `save_state`. With ``keep_last_good`` the replaced
    checkpoint stays beside the new one as ``<name>.last_good``. Raises `DiskFull` where the disk is
    full, and `TrainingDiverged` where weights are not finite; the old checkpoint is untouched then.

    Where several ranks learn together all of them call this: what is spread over them is gathered,
    the main one writes an ordinary checkpoint, and if it cannot, all raise.

    Where ``training_state`` holds a `Spread`, ranks elsewhere write weights and their part of the
    state, and this returns before they have. ``then`` is called once the checkpoint is in its place.
    """
    state, path, policy = training_state or {}, Path(path), Policy.of(policy)
    spread = next((x for x in state.values() if isinstance(x, Spread)), None)
    if spread is not None:

        def fill(folder: Path) -> None:
            _write_texts(folder, path, policy)
            own = {key: x for key, x in state.items() if not isinstance(x, Spread)}
            save_state(folder / TRAINING_STATE, own, spread.structure)

        spread.begin(Unfinished(path, fill, keep_last_good, then))
        return
    ranks, problem = Ranks.present(), None
    weights = full_state(policy, ranks)
    training_state = gathered_state(training_state)
    if ranks.is_main:
        try:
            require_finite(weights)
            with replacing(path, keep_last_good) as folder:
                _save_weights(folder, weights)
                _write_texts(folder, path, policy)
                if training_state is not None:
                    save_state(folder / TRAINING_STATE, training_state)
            then()
        except Exception as error:
            problem = error
    if not ranks.all(problem is None):
        raise problem or CheckpointError(
            f"the main rank could not write {path}; its own message says why"
        )


def _write_texts(folder: Path, path: Path, policy: Policy) -> None:
    """All that a checkpoint at ``path`` says of the policy, into ``folder``."""
    header: dict[str, Any] = {
        "policy_type": policy.policy_type,
        "format": FORMAT,
        "vla_rl_version": vla_rl.__version__,
    }
    if (base := policy.base_folder()) is not None:
        header[BASE] = dataclasses.asdict(base_reference(base, path))
    write_text(folder / CONFIG, to_json({**header, **policy.config_dict()}))
    write_text(folder / EMBODIMENT, to_json(policy.embodiment.to_dict()))
    for name, text in policy.extra_files().items():
        write_text(folder / name, text)


def keep_numbered(path: Path, number: int, keep: int) -> None:
    """Keep the policy of the checkpoint ``path`` as ``<name>_<number>`` beside it, and the latest
    ``keep`` such alone.

    Without training state. Files are shared with ``path`` (hard links) where the file system can,
    so that a copy takes room only once ``path`` holds something else.
    """
    source = existing_checkpoint(path)
    with replacing(path.with_name(f"{path.name}_{number}"), keep_last_good=False) as folder:
        for file in source.iterdir():
            if file.is_file():
                try:
                    os.link(file, folder / file.name)
                except OSError:
                    shutil.copy2(file, folder / file.name)
    numbers = sorted(
        int(n)
        for p in path.parent.glob(f"{path.name}_*")
        if (n := p.name[len(path.name) + 1 :]).isdigit()
    )
    for old in numbers[:-keep]:
        shutil.rmtree(path.with_name(f"{path.name}_{old}"), ignore_errors=True)


def load_policy(
    path: Path | str,
    factory: Callable[[str], Any],
    expected_embodiment: EmbodimentSpec | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """The policy of a checkpoint, on the CPU, in evaluation mode.

    ``factory`` maps the stored policy type to its class. ``expected_embodiment`` is that of the env
    or dataset in use; another one raises `EmbodimentMismatch`, which shows both. ``changes`` are
    keys of the policy's own config that get another value than the stored one; those that do not go
    with its weights raise `CheckpointError`.
    """
    path = existing_checkpoint(Path(path))
    config = read_object(path / CONFIG)
    if not isinstance(config.get("format", 0), int) or config.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path / CONFIG} has checkpoint format {config['format']} (vla_rl "
            f"{config.get('vla_rl_version')}), this is vla_rl {vla_rl.__version__}, which reads up "
            f"to format {FORMAT}: update vla_rl"
        )
    remedy = "use another checkpoint, such as *.last_good beside it"
    if config.get("format", 0) < 0 or not isinstance(config.get("policy_type"), str):
        raise CheckpointError(
            f"{path / CONFIG} is damaged (its format, or no policy_type): {remedy}"
        )
    embodiment = read_embodiment(path / EMBODIMENT, remedy, CheckpointError)
    if expected_embodiment is not None:
        expected_embodiment.require(
            embodiment, "the env or dataset in use", f"the checkpoint {path}"
        )
        # whether scenes are symmetric is theirs to say
        embodiment = dataclasses.replace(embodiment, mirror=expected_embodiment.mirror)
    try:
        policy = _build(path, config, embodiment, factory, changes or {})
    except KeyError as error:
        raise CheckpointError(
            f"{path} lacks {error}: its {CONFIG} or its text files are incomplete"
        ) from error
    except UserError as error:
        if changes or type(error) not in (UserError, ConfigError):
            raise
        raise type(error)(f"{path / CONFIG}: {error}") from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {first_line(error)}): its {CONFIG} or its "
            f"text files do not describe a policy; {remedy}"
        ) from error
    load_weights(path, policy)
    if isinstance(policy, torch.nn.Module):
        policy.eval()
    return Policy.of(policy)


def _build(
    path: Path,
    config: dict[str, Any],
    embodiment: EmbodimentSpec,
    factory: Callable[[str], Any],
    changes: Mapping[str, Any],
) -> Any:
    """The policy that a checkpoint's text files describe, without its weights."""
    skip = (CONFIG, EMBODIMENT, WEIGHTS_INDEX, f"{WEIGHTS_STEM}{SHARDS}")
    files = {
        p.name: _text(p)
        for p in sorted(path.iterdir())
        if p.is_file() and p.suffix in (".json", ".txt") and p.name not in skip
    }
    kind, own = factory(config["policy_type"]), config
    stacked = isinstance(config.get("base"), dict)
    if changes or BASE in config:  # those of a policy on top of another are about that one
        own = config["base"] if stacked else config
        for name in view(factory(own["policy_type"]), PolicyClass).config_path:
            own = own[name]
    if changes:
        _change(own, changes, config["policy_type"], path)
    if BASE in config:
        reference = BaseReference(**config.pop(BASE))
        if not stacked and kind.base_key in changes:
            reference = dataclasses.replace(reference, path=os.path.abspath(changes[kind.base_key]))
        (config if stacked else own)[kind.base_key] = str(resolve(reference, path))
    return _from_config(kind, config, embodiment, files, factory)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        remedy = "use another checkpoint, such as *.last_good beside it"
        raise CheckpointError(f"{path} is damaged ({error}): {remedy}") from error


def _from_config(
    kind: Any,
    config: dict[str, Any],
    embodiment: EmbodimentSpec,
    files: dict[str, str],
    factory: Callable[[str], Any],
) -> Any:
    """A policy on top of another (``base``) gets that one, built; its text files have names that
    begin with "base.". Where its checkpoint leaves that one's weights to another, they are read
    from there."""
    make = Policy.class_of(kind).from_config_dict
    if not isinstance(config.get("base"), dict):
        return make(config, embodiment, files)
    own = {name: text for name, text in files.items() if not name.startswith("base.")}
    beneath = {
        name.removeprefix("base."): text for name, text in files.items() if name.startswith("base.")
    }
    below = config["base"]
    spec = EmbodimentSpec.from_dict(below["embodiment"]) if "embodiment" in below else embodiment
    base = _from_config(factory(below["policy_type"]), below, spec, beneath, factory)
    if view(kind, _Refers).base_key in config:
        load_weights(config[kind.base_key], base)
    return make(config, embodiment, own, base)


# ------------------------------------------------------------------------------ frozen base weights
@dataclass(frozen=True)
class BaseReference:
    """Another folder whose weights a checkpoint builds on. ``path`` is absolute, or relative to
    the checkpoint's folder."""

    path: str
    fingerprint: str


def base_reference(folder: Path | str, checkpoint: Path | str) -> BaseReference:
    """What the checkpoint at ``checkpoint`` is to say of ``folder``.

    A folder beside the checkpoint (or inside of one beside it) is named relative to it, so that
    both can be moved and copied together, as with their run. Raises `CheckpointError` where the
    folder is missing, holds no weights, or damaged ones.
    """
    place, own = Path(os.path.abspath(folder)), Path(os.path.abspath(checkpoint))
    relative = place.is_relative_to(own.parent)
    return BaseReference(
        os.path.relpath(place, own) if relative else str(place), fingerprint(place)
    )


def resolve(reference: BaseReference, checkpoint: Path | str) -> Path:
    """The folder that the checkpoint at ``checkpoint`` refers to. `CheckpointError` unless it is
    there, and unchanged."""
    place = Path(os.path.abspath(Path(checkpoint) / reference.path))
    remedy = (
        f"put it back, or write the place where it lies now into {Path(checkpoint) / CONFIG} "
        f"({BASE}.path)"
    )
    if not place.is_dir():
        raise CheckpointError(
            f"{checkpoint} builds on frozen weights, which are not at {place}: {remedy}"
        )
    if (found := fingerprint(place)) != reference.fingerprint:
        raise CheckpointError(
            f"{place} holds other weights than those that {checkpoint} was trained on (fingerprint "
            f"{found[:12]}…, it should be {reference.fingerprint[:12]}…): {remedy}"
        )
    return place


def fingerprint(folder: Path | str) -> str:
    """A hash of a folder's weights: names and sizes of their files, their headers, and of every
    tensor some bytes.

    A tensor that was trained differs nearly everywhere, so its beginning, middle and end tell, and
    14 GB need not be read. Files that are no safetensors count by evenly spread pieces. Raises
    `CheckpointError` where there are no weights, or damaged ones.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: the frozen weights of a policy are to be there. Put them back"
        )
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not files:
        raise CheckpointError(
            f"{folder} holds no weights ({', '.join(_WEIGHT_SUFFIXES)}): name the folder of a model"
        )
    return _fingerprint(tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in files))


@functools.lru_cache(maxsize=16)
def _fingerprint(files: tuple[tuple[str, int, int], ...]) -> str:
    """Of files (path, size, time of change): worked out once for each state of theirs."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{os.path.basename(path)} {size}\n".encode())
        spans = [(size * i // 64, size * (i + 1) // 64) for i in range(64)]
        pieces: list[tuple[int, int]] = []
        if path.endswith(".safetensors"):
            spans = check_tensors(Path(path))
            # the header: names, types and shapes
            pieces.append((0, spans[0][0] if spans else size))
        for begin, end in spans:
            whole, middle = end - begin <= 3 * _PIECE, (begin + end - _PIECE) // 2
            pieces += (
                [(begin, end)]
                if whole
                else [(at, at + _PIECE) for at in (begin, middle, end - _PIECE)]
            )
        with open(path, "rb") as file:
            for begin, end in pieces:
                file.seek(begin)
                digest.update(file.read(end - begin))
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------- resuming
@contextlib.contextmanager
def restoring(folder: Path, what: str = "a training state of this run") -> Iterator[None]:
    """What the block raises because ``folder`` holds something else becomes a `CheckpointError`
    that names it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} does not hold {what} ({type(error).__name__}: {first_line(error)}). Put "
            f"{last_good(folder).name} in its place, or remove it: what it holds is then made again"
        ) from error


def _change(own: dict[str, Any], changes: Mapping[str, Any], kind: str, path: Path) -> None:
    unknown = sorted(set(changes) - set(own))
    if unknown:
        raise ConfigError(
            f"policy.{unknown[0]}={changes[unknown[0]]!r} changes nothing: {path} holds a policy "
            f"of type {kind!r}, whose config has no such key. Its keys: {', '.join(sorted(own))}"
        )
    own.update(changes)


def load_weights(path: Path | str, policy: Any) -> None:
    """Copy the weights of a checkpoint into ``policy``.

    Raises `CheckpointError` that names every tensor that is missing, unexpected or misshapen, or
    where numbers are not finite, and changes nothing.
    """
    path = existing_checkpoint(Path(path))
    reference = read_object(path / CONFIG).get(BASE)
    if reference and (base := Policy.of(policy).base_folder()) is not None:
        resolve(BaseReference(os.path.abspath(base), reference["fingerprint"]), path)
    own = policy.state_dict()
    stored = _load_weights(path, policy, own)
    stored = Policy.of(policy).completed(stored)
    wrong = [f"missing: {name} {list(own[name].shape)}" for name in own.keys() - stored.keys()]
    wrong += [
        f"unexpected: {name} {list(stored[name].shape)}" for name in stored.keys() - own.keys()
    ]
    wrong += [
        f"misshapen: {name} is {list(stored[name].shape)} in the checkpoint, "
        f"{list(own[name].shape)} in the policy"
        for name in own.keys() & stored.keys()
        if own[name].shape != stored[name].shape
    ]
    if wrong:
        shown = "\n  ".join(sorted(wrong)[:20]) + (
            f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        )
        raise CheckpointError(
            f"the weights in {path} do not fit the policy:\n  {shown}\nBuild the policy from the "
            f"checkpoint's own {CONFIG}, or load a checkpoint of this policy."
        )
    broken = not_finite(stored)
    if broken:
        raise CheckpointError(
            f"{len(broken)} of the {len(stored)} tensors in {path} hold numbers that are not "
            f"finite (the first: {broken[0]}): its training diverged. Use "
            f"{last_good(path).name} beside it, or an earlier checkpoint."
        )
    load_full_state(policy, stored)


def load_training_state(path: Path | str) -> dict[str, Any]:
    """What `save_checkpoint` got as ``training_state``; what ranks wrote of it is a
    `SpreadState`."""
    path = existing_checkpoint(Path(path))
    if not (path / TRAINING_STATE).is_dir():
        raise CheckpointError(
            f"{path} holds a policy but no {TRAINING_STATE}/, so training cannot resume from it: "
            f"use it as a starting point for a new run instead (checkpoint={path})"
        )
    spread = spread_states(path)
    return {**load_state(path / TRAINING_STATE, leave=spread.keys()), **spread}


def _save_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    sizes = {name: tensor.nbytes for name, tensor in weights.items()}
    for file, names in place_weights(folder, sizes).items():
        save_tensors(folder / file, {name: weights[name] for name in names})


def _load_weights(path: Path, policy: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint; of what ranks wrote, each rank reads the rows that it has itself."""
    if is_spread(path, WEIGHTS_STEM):
        mesh = mesh_of(policy) if isinstance(policy, torch.nn.Module) else None
        over = {name for name, x in own.items() if is_sharded(x)}
        return dict(Parts(Shards(path, WEIGHTS_STEM), mesh, over.__contains__))
    return {
        name: tensor
        for file in weight_files(path)
        for name, tensor in load_tensors(path / file).items()
    }
