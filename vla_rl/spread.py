"""Checkpoints of a policy that is spread over ranks: each rank writes its own part of weights and
training state, and reads the rows that it needs, so that nobody has all of it in memory.

Such a folder is an ordinary one but for its tensors: `vla_rl.shards` in place of
``model.safetensors``, and in ``training_state/`` beside the ``state.safetensors`` of what one process
holds. It is whole or not there, as any other. `merge` makes the ordinary one of it, and `reshard` one
of another number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl.errors import CheckpointError, TrainingDiverged, UserError
from vla_rl.files import (
    SHARDS,
    STATE_STEM,
    TRAINING_STATE,
    WEIGHTS_INDEX,
    WEIGHTS_STEM,
    existing_checkpoint,
    is_spread,
)
from vla_rl.ranks import Ranks, not_finite, spread_part
from vla_rl.shards import (
    Piece,
    Shards,
    TensorFile,
    fill,
    layout_of,
    parts_of,
    room_for,
    shard_name,
    write_index,
    write_shard,
    write_tensors,
)
from vla_rl.storage import join_state, place_weights, read_object, replacing, split_state

_SETS = (("", WEIGHTS_STEM), (TRAINING_STATE, STATE_STEM))  # folder and stem


# ------------------------------------------------------------------------------------------ writing
class Snapshot:
    """A rank's own copy of what it has of the policy's weights and of ``state``, on the CPU. It is
    made in a thread of its own: until `copied` returns, nothing may change what it is made of, and
    after that what learns may go on while it is written. The ``structure`` of the state is the same
    on every rank."""

    def __init__(self, policy: Any, state: Mapping[str, Any], ranks: Ranks) -> None:
        tensors: dict[str, Tensor] = {}
        self.structure = split_state(state, tensors)
        self._ranks = ranks
        sources = (dict(policy.state_dict()), tensors)
        # (of a thread of its own, room would be none that this one has given up)
        both = [room_for(x, ranks.is_main) for x in sources]

        def copy() -> list[dict[str, Piece]]:
            for pieces, source in zip(both, sources, strict=True):
                fill(pieces, source)
            return both

        thread = ThreadPoolExecutor(1, "snapshot")
        self._pieces = thread.submit(copy)
        thread.shutdown(wait=False)

    def copied(self) -> list[dict[str, Piece]]:
        """Wait for the copy: parts of weights and of state, by their names. Raises what went wrong
        with it."""
        return self._pieces.result()

    def write(self, folder: Path, save: str) -> list[dict[str, Any]]:
        """This rank's files of the save ``save``; returns what `Unfinished.finish` asks for.
        Raises `DiskFull`, and `TrainingDiverged` where weights of this rank are not finite."""
        both = self.copied()
        require_finite({name: x.data for name, x in both[0].items()})
        index, size, told = self._ranks.index, self._ranks.size, []
        for (place, stem), pieces in zip(_SETS, both, strict=True):
            (folder / place).mkdir(exist_ok=True)
            shard = write_shard(folder / place, stem, pieces, index, size, save)
            tensors = {name: piece.layout.told() for name, piece in pieces.items()}
            told.append({"shard": shard, "tensors": tensors if index == 0 else {}})
        return told


def require_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise `TrainingDiverged` where a checkpoint of ``weights`` could not be gone on from."""
    if broken := not_finite(weights):
        raise TrainingDiverged(
            f"{len(broken)} of the weights are not finite (the first: {broken[0]}), so no "
            "checkpoint is made of them. The last one is good: lower the learning rate"
        )


class Unfinished:
    """A checkpoint without what ranks write: a hidden ``folder`` beside ``path``, of the save
    ``save``. ``fill`` puts the rest into it; ``then`` is called once it is in its place."""

    def __init__(
        self,
        path: Path,
        fill: Callable[[Path], None],
        keep_last_good: bool = True,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.save, self._then = path, secrets.token_hex(8), then
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(replacing(path, keep_last_good))
        with self._stack.pop_all() as stack:
            fill(self.folder)
            self._stack = stack.pop_all()

    def finish(self, told: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Put it in the place of ``path``: every rank has written, and said what it did."""
        with self._stack:
            for i, (place, stem) in enumerate(_SETS):
                table = {name: layout_of(x) for name, x in told[0][i]["tensors"].items()}
                shards = [rank[i]["shard"] for rank in told]
                write_index(self.folder / place, stem, self.save, table, shards)
        self._then()

    def abandon(self) -> None:
        """Leave the checkpoint that is at ``path`` as it is."""
        with contextlib.suppress(_Abandoned), self._stack:
            raise _Abandoned


class _Abandoned(Exception):
    pass


@dataclass(frozen=True)
class Spread:
    """What stands in a training state for what ranks hold of it, under the keys of ``structure``:
    they write it, and the weights with it, once ``begin`` is called."""

    structure: Mapping[str, Any]
    begin: Callable[[Unfinished], None]


# ------------------------------------------------------------------------------------------ reading
class Parts(Mapping[str, Tensor]):
    """Tensors of a set, read as they are asked for: spread over ``mesh`` where ``over`` says so,
    else whole."""

    def __init__(
        self, shards: Shards, mesh: Any = None, over: Callable[[str], bool] = lambda name: True
    ) -> None:
        self._shards, self._mesh, self._over = shards, mesh, over

    def __getitem__(self, name: str) -> Tensor:
        layout = self._shards.tensors[name]
        if self._mesh is None or not (layout.spread and self._over(name)):
            return self._shards.read(name)
        part = self._shards.read(name, self._mesh.get_local_rank(), self._mesh.size())
        return spread_part(part, self._mesh, layout.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards.tensors)

    def __len__(self) -> int:
        return len(self._shards.tensors)


class SpreadState(Mapping[str, Any]):
    """A part of the training state of the checkpoint ``folder``, which ranks wrote. It is read, and
    whole, once somebody looks into it."""

    def __init__(self, folder: Path, shards: Shards, structure: Any) -> None:
        self.folder, self._shards, self._structure = folder, shards, structure

    def on(self, mesh: Any) -> dict[str, Any]:
        """What one of the ranks of ``mesh`` needs of it (None: all)."""
        return join_state(self._structure, Parts(self._shards, mesh), self.folder / TRAINING_STATE)

    @functools.cached_property
    def _whole(self) -> dict[str, Any]:
        return self.on(None)

    def __getitem__(self, key: str) -> Any:
        return self._whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._structure)

    def __len__(self) -> int:
        return len(self._structure)


def spread_states(folder: Path) -> dict[str, SpreadState]:
    """Those parts of a checkpoint's training state, by their keys, that ranks wrote."""
    if not is_spread(folder / TRAINING_STATE, STATE_STEM):
        return {}
    structure = read_object(folder / TRAINING_STATE / "state.json")
    shards = Shards(folder / TRAINING_STATE, STATE_STEM)
    keys = {name.split("/")[1] for name in shards.tensors}
    return {key: SpreadState(folder, shards, structure[key]) for key in keys & structure.keys()}


# ------------------------------------------------------------------------------------- other forms
def require_spread(folder: Path) -> Path:
    """The checkpoint folder. Raises `UserError` where it is an ordinary one."""
    folder = existing_checkpoint(folder)
    if not is_spread(folder, WEIGHTS_STEM):
        raise UserError(
            f"{folder} is an ordinary checkpoint already: every command reads it as it is, and any "
            "number of ranks goes on from it"
        )
    return folder


def merge(folder: Path, out: Path) -> None:
    """The ordinary checkpoint of one that ranks wrote, at ``out`` (``folder`` itself: in its
    place). In memory is no more than a block of a file at a time."""
    source = require_spread(folder)
    with _remade(source, out) as made:
        weights = Shards(source, WEIGHTS_STEM)
        sizes = {name: layout.nbytes for name, layout in weights.tensors.items()}
        for file, names in place_weights(made, sizes).items():
            table = {name: weights.tensors[name].whole() for name in names}
            write_tensors(made / file, table, weights.blocks, {})
        if is_spread(source / TRAINING_STATE, STATE_STEM):
            _merge_state(source / TRAINING_STATE, made / TRAINING_STATE)


def _merge_state(source: Path, made: Path) -> None:
    state, own = Shards(source, STATE_STEM), TensorFile(source / f"{STATE_STEM}.safetensors")
    table = own.tensors | {name: layout.whole() for name, layout in state.tensors.items()}

    def blocks(name: str) -> Iterator[bytes]:
        return (state if name in state.tensors else own).blocks(name)

    write_tensors(made / f"{STATE_STEM}.safetensors", table, blocks, {})


def reshard(folder: Path, size: int, out: Path) -> None:
    """The same checkpoint as ``size`` ranks would have written it, at ``out``; memory as of
    `merge`."""
    source, save = require_spread(folder), secrets.token_hex(8)
    with _remade(source, out) as made:
        for place, stem in _SETS:
            if not is_spread(source / place, stem):
                continue
            if place and (source / place / f"{stem}.safetensors").exists():
                shutil.copy2(source / place / f"{stem}.safetensors", made / place)
            shards = Shards(source / place, stem)
            written = [_resharded(shards, made / place, stem, i, size, save) for i in range(size)]
            write_index(made / place, stem, save, shards.tensors, written)


def _resharded(
    shards: Shards, folder: Path, stem: str, index: int, size: int, save: str
) -> dict[str, Any]:
    return write_tensors(
        folder / shard_name(stem, index, size),
        parts_of(shards.tensors, index, size),
        lambda name: shards.blocks(name, index, size),
        {"save": save, "rank": str(index)},
    )


@contextlib.contextmanager
def _remade(source: Path, out: Path) -> Iterator[Path]:
    """A copy of a checkpoint without its tensors, to be filled, which comes to ``out``."""
    if os.path.lexists(out) and not (out.is_dir() and os.path.samefile(source, out)):
        raise CheckpointError(f"{out} exists already: name another place, or move it away")
    with replacing(out, keep_last_good=False) as made:
        for place, _ in _SETS:
            if (source / place).is_dir():
                (made / place).mkdir(exist_ok=True)
                for file in (source / place).iterdir():
                    if file.is_file() and not _holds_tensors(file):
                        shutil.copy2(file, made / place)
        yield made


def _holds_tensors(file: Path) -> bool:
    return file.name.endswith((".safetensors", SHARDS, WEIGHTS_INDEX))
