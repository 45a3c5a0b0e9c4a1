"""Tensors that several ranks write and read in parts: a safetensors file for each rank, and an index
that is written last.

A set of the name STEM in a folder is ``STEM-00000-of-00002.safetensors`` and its like, one per rank,
with ``STEM.shards.json``: which save all of it is of, each file's size and sha256, each tensor's
dtype and whole shape. A tensor that is spread is cut along its first dimension as torch cuts it
(`rows_of`), so its bytes are those of the parts one behind the other; any other lies in the first
file. Nothing is read whole to be cut otherwise: a rank among another number reads its rows alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.files import SHARDS, check_tensors, shard_index
from vla_rl.ranks import is_sharded, own_part
from vla_rl.storage import disk_full, fsync, is_disk_full, to_json, write_text

FORMAT = 1
_BLOCK = 1 << 24  # bytes that are in memory at once where files are copied
# (those of the safetensors format that torch has, too)
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_REMEDY = "use another checkpoint, such as *.last_good beside it"

Blocks = Iterable[Any]  # of bytes, one behind the other


@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor of a set; ``spread``: each rank has some of its rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    spread: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def part(self, index: int, size: int) -> TensorLayout:
        """What rank ``index`` of ``size`` has of it."""
        if not self.spread:
            return self
        begin, end = rows_of(self.shape[0], index, size)
        return TensorLayout(self.dtype, (end - begin, *self.shape[1:]))

    def whole(self) -> TensorLayout:
        """It where one file holds all of it."""
        return TensorLayout(self.dtype, self.shape)

    def told(self) -> dict[str, Any]:
        """JSON-ready; `layout_of` inverts it."""
        return {
            "dtype": _NAMES[self.dtype],
            "shape": list(self.shape),
            "spread": self.spread,
        }


def layout_of(told: Mapping[str, Any]) -> TensorLayout:
    return TensorLayout(
        _DTYPES[told["dtype"]], tuple(map(int, told["shape"])), bool(told["spread"])
    )


def rows_of(count: int, index: int, size: int) -> tuple[int, int]:
    """Begin and end of a rank's rows, as `torch.chunk` cuts ``count`` of them."""
    each = -(-count // size)
    return min(index * each, count), min((index + 1) * each, count)


def parts_of(tensors: Mapping[str, TensorLayout], index: int, size: int) -> dict[str, TensorLayout]:
    """What the file of rank ``index`` of ``size`` holds of a set."""
    return {
        name: layout.part(index, size)
        for name, layout in tensors.items()
        if layout.spread or index == 0
    }


# ------------------------------------------------------------------------------------------ writing
@dataclass(frozen=True)
class Piece:
    """What one rank writes of a tensor: ``data``, on the CPU, in memory of its own."""

    layout: TensorLayout
    data: Tensor


def room_for(tensors: Mapping[str, Tensor], main: bool) -> dict[str, Piece]:
    """Room for copies of this rank's parts of ``tensors``, which `fill` makes; those that are not
    spread only on the ``main`` rank."""
    found = {}
    for name, x in tensors.items():
        spread = is_sharded(x)
        if not (spread or main):
            continue
        local = own_part(x.detach())
        layout = TensorLayout(x.dtype, tuple(x.shape), spread)
        if spread and tuple(x.placements) != _placements():  # type: ignore[attr-defined]
            raise TypeError(f"{name} is not spread by rows: {x.placements}")  # type: ignore[attr-defined]
        found[name] = Piece(layout, torch.empty(local.shape, dtype=local.dtype))
    return found


def fill(pieces: Mapping[str, Piece], tensors: Mapping[str, Tensor]) -> None:
    for name, piece in pieces.items():
        piece.data.copy_(own_part(tensors[name].detach()))


def _placements() -> tuple[Any, ...]:
    from torch.distributed.tensor import Shard

    return (Shard(0),)


def shard_name(stem: str, index: int, size: int) -> str:
    return f"{stem}-{index:05d}-of-{size:05d}.safetensors"


def write_shard(
    folder: Path, stem: str, pieces: Mapping[str, Piece], index: int, size: int, save: str
) -> dict[str, Any]:
    """One rank's file of the save ``save``; returns what the index says of it. Raises `DiskFull`."""
    path = folder / shard_name(stem, index, size)
    table = {name: piece.layout.part(index, size) for name, piece in pieces.items()}
    for name, piece in pieces.items():
        if tuple(piece.data.shape) != table[name].shape:
            raise TypeError(
                f"rank {index} of {size} has rows {tuple(piece.data.shape)} of {name}, which is "
                f"{piece.layout.shape}: it is cut in another way"
            )
    return write_tensors(
        path, table, lambda name: [bytes_of(pieces[name].data)], {"save": save, "rank": str(index)}
    )


def write_index(
    folder: Path,
    stem: str,
    save: str,
    tensors: Mapping[str, TensorLayout],
    shards: Iterable[Mapping[str, Any]],
) -> None:
    """Last of all, once every rank's file is on the disk."""
    told = {name: layout.told() for name, layout in tensors.items()}
    document = {"format": FORMAT, "save": save, "shards": list(shards), "tensors": told}
    write_text(folder / f"{stem}{SHARDS}", to_json(document))


def write_tensors(
    path: Path,
    table: Mapping[str, TensorLayout],
    data: Callable[[str], Blocks],
    told: Mapping[str, str],
) -> dict[str, Any]:
    """A safetensors file of the tensors of ``table``, whose bytes ``data`` yields by their names:
    never more than a block of it is in memory. Returns its name, size and sha256. Raises
    `DiskFull`."""
    begin, names = header_of(table, told)
    size = len(begin) + sum(layout.nbytes for layout in table.values())
    digest = hashlib.sha256()
    try:
        with open(path, "wb") as file:
            for block in itertools.chain([begin], *map(data, names)):
                digest.update(block)
                file.write(block)
        fsync(path)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest()}


def header_of(
    table: Mapping[str, TensorLayout], told: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """How a safetensors file of these tensors begins, and the order in which they follow."""
    names = sorted(table, key=lambda name: (-table[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(told or {})}}
    at = 0
    for name in names:
        layout = table[name]
        header[name] = {
            "dtype": _NAMES[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [at, at := at + layout.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def places_in(begin: bytes) -> tuple[dict[str, tuple[TensorLayout, int]], dict[str, str]]:
    """Each tensor of a file that begins so, and where it begins; and what the file tells besides.
    The inverse of `header_of`. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for another
    header."""
    length = int.from_bytes(begin[:8], "little")
    header: dict[str, Any] = json.loads(begin[8 : 8 + length])
    told: dict[str, str] = header.pop("__metadata__", {})
    places = {}
    for name, x in header.items():
        layout, (first, last) = (
            TensorLayout(_DTYPES[x["dtype"]], tuple(x["shape"])),
            x["data_offsets"],
        )
        if last - first != layout.nbytes:
            raise ValueError(f"{name} has {last - first} bytes, and its shape {layout.nbytes}")
        places[name] = layout, 8 + length + first
    return places, told


def bytes_of(x: Tensor) -> memoryview:
    """Those of a contiguous tensor, not copied."""
    if not x.numel():
        return memoryview(b"")
    data: Any = x.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


# ------------------------------------------------------------------------------------------ reading
class TensorFile:
    """A safetensors file whose tensors are read in parts."""

    def __init__(self, path: Path) -> None:
        check_tensors(path)
        with open(path, "rb") as file:
            length = file.read(8)
            begin = length + file.read(int.from_bytes(length, "little"))
        self.path = path
        try:
            found, self.told = places_in(begin)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}): {_REMEDY}") from error
        self.tensors = {name: layout for name, (layout, _) in found.items()}
        self._begins = {name: at for name, (_, at) in found.items()}

    def blocks(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes ``begin`` to ``end`` of a tensor."""
        end = self.tensors[name].nbytes if end is None else end
        with open(self.path, "rb") as file:
            file.seek(self._begins[name] + begin)
            while begin < end:
                block = file.read(min(_BLOCK, end - begin))
                begin += len(block)
                yield block


class Shards:
    """A set as it lies on the disk. Raises `CheckpointError` for one whose files are missing,
    altered, cut short or of another save; their contents are compared with their hashes as they are
    first read (`verified`)."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self._stem = folder, stem
        place = folder / f"{stem}{SHARDS}"
        found = shard_index(place)
        if found["format"] > FORMAT:
            raise CheckpointError(
                f"{place} has format {found['format']}, and this vla_rl reads up to {FORMAT}: "
                "update vla_rl"
            )
        self._listed: list[dict[str, Any]] = found["shards"]
        self.size = len(self._listed)
        try:
            self.tensors = {name: layout_of(x) for name, x in found["tensors"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{place} is damaged ({error!r}): {_REMEDY}") from error
        self._files = [
            self._file(i, listed, found["save"]) for i, listed in enumerate(self._listed)
        ]
        self._sound: set[int] = set()

    def _file(self, index: int, listed: Mapping[str, Any], save: str) -> TensorFile:
        path = self.folder / shard_name(self._stem, index, self.size)
        if listed["file"] != path.name:
            raise CheckpointError(
                f"{self.folder / (self._stem + SHARDS)} is damaged (it names {listed['file']!r} as "
                f"the file of rank {index}): {_REMEDY}"
            )
        file = TensorFile(path)
        if file.told.get("save") != save:
            raise CheckpointError(
                f"{path} is of another save than the index beside it ({file.told.get('save')}, not "
                f"{save}): another iteration, run or model. Put its own file back, or {_REMEDY}"
            )
        own = parts_of(self.tensors, index, self.size)
        if file.tensors != own or path.stat().st_size != listed["bytes"]:
            raise CheckpointError(
                f"{path} was altered: it does not hold what the index beside it says. Put its own "
                f"file back, or {_REMEDY}"
            )
        return file

    def verified(self, index: int) -> TensorFile:
        """The file of a rank, once its contents have their hash."""
        file = self._files[index]
        if index not in self._sound:
            with open(file.path, "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != self._listed[index]["sha256"]:
                raise CheckpointError(
                    f"{file.path} was altered: its contents have not the hash of the index beside "
                    f"it. Put its own file back, or {_REMEDY}"
                )
            self._sound.add(index)
        return file

    def read(self, name: str, index: int = 0, size: int = 1) -> Tensor:
        """What rank ``index`` of ``size`` has of a tensor: all of it where it is not spread."""
        part = self.tensors[name].part(index, size)
        x = torch.empty(part.shape, dtype=part.dtype)
        into, at = bytes_of(x), 0
        for block in self.blocks(name, index, size):
            into[at : at + len(block)] = block
            at += len(block)
        return x

    def blocks(self, name: str, index: int = 0, size: int = 1) -> Iterator[bytes]:
        """The bytes of `read`."""
        layout = self.tensors[name]
        if not layout.spread:
            yield from self.verified(0).blocks(name)
            return
        begin, end = rows_of(layout.shape[0], index, size)
        for i in range(self.size):
            first, last = rows_of(layout.shape[0], i, self.size)
            if max(begin, first) < min(end, last):
                rows = max(begin, first) - first, min(end, last) - first
                yield from self.verified(i).blocks(name, rows[0] * layout.row, rows[1] * layout.row)
