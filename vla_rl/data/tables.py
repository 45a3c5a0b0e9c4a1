"""Rows of fixed size in an append-only file: mapped into memory, with a copy in RAM while there is
room for one.

Several small columns share a table, so that an episode costs few `fsync` calls; a large one (a
camera's images) has its own. Rows are written first and count once they are committed: what lies
behind the committed rows in the file is nothing.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.direct import BLOCK, aligned, read_rows
from vla_rl.plain import open_plain

# What the file holds of each; numpy knows no bfloat16, so its bits travel as integers.
_STORED = {
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.bool: "|b1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",
    torch.float32: "<f4",
    torch.float64: "<f8",
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED}
LARGE = 4096  # bytes per row: a page; smaller columns of one kind share a table
_MOST = 1 << 31  # bytes of a row; more is damage
_REMEDY = "restore that file, or leave its replay out"
_REUSED = 1 << 20  # bytes of a batch from which on its memory is used again


class Field(NamedTuple):
    """One column: its name, and a row's type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, rows: Tensor) -> Field:
        return cls(name, rows.dtype, tuple(rows.shape[1:]))

    @classmethod
    def from_json(cls, value: Any) -> Field:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what `to_json` did not write."""
        name, dtype, shape = value
        if type(name) is not str or not all(
            type(size) is int and 0 <= size < _MOST for size in shape
        ):
            raise ValueError(f"column {name!r} has the shape {shape!r}")
        field = cls(name, _NAMES[dtype], tuple(shape))
        if field.bytes > _MOST:
            raise ValueError(f"a row of column {name!r} has {field.bytes} bytes")
        return field

    def to_json(self) -> list[Any]:
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape)]

    @property
    def storable(self) -> bool:
        return self.dtype in _STORED

    @property
    def bytes(self) -> int:
        return np.dtype(_STORED[self.dtype]).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Growing:
    """An array [n …] in RAM to which rows are added; its room doubles when it is full."""

    def __init__(self, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self._room = np.empty((0, *shape), dtype)
        self._count = 0

    @property
    def rows(self) -> np.ndarray:
        return self._room[: self._count]

    def put(self, rows: Any, at: int | None = None) -> None:
        """Rows from row ``at`` on (default: behind the last); what came after is gone."""
        start = self._count if at is None else at
        rows = np.asarray(rows, self._room.dtype)
        end = start + len(rows)
        if end > len(self._room):
            room = np.empty(
                (max(end, 2 * len(self._room), 64), *self._room.shape[1:]), self._room.dtype
            )
            room[:start] = self._room[:start]
            self._room = room
        self._room[start:end] = rows
        self._count = end


class _Spare:
    """Room of earlier batches of rows of ``row_bytes``, used again: to have the system clear fresh
    memory takes as long as the copying."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._kept: list[tuple[np.ndarray, Any]] = []

    def room(self, n: int) -> np.ndarray:
        """For at least ``n`` rows: of a batch that nobody holds any more, where there is one."""
        for room, lent in self._kept:
            if len(room) >= n and (lent is None or lent() is None):
                return room
        return aligned(n, self._row_bytes)

    def keep(self, room: np.ndarray, array: np.ndarray | None) -> None:
        """For a later batch, once ``array`` in it is gone; a tensor that was made of it keeps it
        alive."""
        others = [(other, lent) for other, lent in self._kept if other is not room]
        self._kept = [(room, None if array is None else weakref.ref(array)), *others][:2]


class Table:
    """Rows of ``fields``, in a file (``path``) or in RAM alone."""

    def __init__(self, fields: list[Field], path: Path | None = None) -> None:
        self.fields, self.path, self.count = fields, path, 0
        columns = np.dtype([(f.name, _STORED[f.dtype], f.shape) for f in fields])
        padding = -columns.itemsize % BLOCK if columns.itemsize >= LARGE else 0
        self._dtype = np.dtype([*columns.descr, ("", f"|V{padding}")]) if padding else columns
        self.row_bytes = self._dtype.itemsize
        self._ram: Growing | None = Growing(np.uint8, (self.row_bytes,))
        self._map: np.ndarray | None = None
        self._spare = _Spare(self.row_bytes)
        self.direct = False
        """Whether rows that are on the disk alone are read past the system's cache."""

    # -------------------------------------------------------------------------------------- writing
    def pack(self, columns: Mapping[str, Tensor]) -> np.ndarray:
        """Rows uint8 [n, bytes of a row] as the file holds them."""
        n = len(columns[self.fields[0].name])
        packed = np.zeros(n, self._dtype)
        for f in self.fields:
            values = columns[f.name].detach().cpu()
            packed[f.name] = (
                values.view(torch.int16) if f.dtype is torch.bfloat16 else values
            ).numpy()
        return packed.view(np.uint8).reshape(n, self.row_bytes)

    def unpack(self, stored: bytes) -> dict[str, Tensor]:
        """{column: rows} of what `stored` read, as copies."""
        rows = np.frombuffer(stored, self._dtype)
        columns = {f: torch.from_numpy(rows[f.name].copy()) for f in self.fields}
        return {
            f.name: c.view(torch.bfloat16) if f.dtype is torch.bfloat16 else c
            for f, c in columns.items()
        }

    def write(self, rows: np.ndarray) -> None:
        """Put packed rows behind the first ``count``; a greater ``count`` makes them count.
        Raises OSError."""
        if self.path is not None:
            write_at(self.path, self.count * self.row_bytes, rows.data.cast("B"))
        if self._ram is not None:
            self._ram.put(rows, at=self.count)

    def cut(self, rows: int) -> None:
        """Keep the first ``rows``, and nothing behind them in the file."""
        self.count, self._map = rows, None
        if self.path is not None and self.path.exists():
            cut_at(self.path, rows * self.row_bytes)

    def rows_in_file(self) -> int:
        """Whole ones."""
        return (
            self.path.stat().st_size // self.row_bytes
            if self.path is not None and self.path.exists()
            else 0
        )

    def stored(self, start: int, count: int) -> bytes:
        """Rows as the file holds them; fewer where it ends before."""
        assert self.path is not None
        with open(open_plain(self.path, os.O_RDONLY, _REMEDY), "rb") as file:
            file.seek(start * self.row_bytes)
            return file.read(count * self.row_bytes)

    # ------------------------------------------------------------------------------------------ RAM
    @property
    def on_disk_alone(self) -> bool:
        return self._ram is None

    @property
    def _read_directly(self) -> bool:
        return self.on_disk_alone and self.direct and self.row_bytes % BLOCK == 0

    def leave_ram(self) -> None:
        """Drop the copy; rows are read from the file from now on."""
        self._ram = None

    def load(self) -> None:
        """Read the file into RAM."""
        assert self.path is not None and self._ram is not None
        rows = (
            np.fromfile(self.path, np.uint8, self.count * self.row_bytes)
            if self.count
            else np.empty(0, np.uint8)
        )
        self._ram.put(rows.reshape(self.count, self.row_bytes), at=0)

    # -------------------------------------------------------------------------------------- reading
    def prefetch(self, rows: np.ndarray) -> None:
        """Have the system fetch all of these rows (ascending) from the disk at once, not each
        when it is touched."""
        if not self.on_disk_alone or self._read_directly or not hasattr(os, "posix_fadvise"):
            return
        assert self.path is not None
        breaks = np.flatnonzero(np.diff(rows) > 1)
        starts, ends = (
            rows[np.r_[0, breaks + 1]] * self.row_bytes,
            (rows[np.r_[breaks, len(rows) - 1]] + 1) * self.row_bytes,
        )
        file = os.open(self.path, os.O_RDONLY)
        try:
            for start, end in zip(starts.tolist(), ends.tolist()):
                os.posix_fadvise(file, start, end - start, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)

    def take(self, index: np.ndarray) -> dict[str, Tensor]:
        """{column: rows ``index``}, as copies."""
        room = self._spare.room(len(index))
        out = room[: len(index)]
        if self._read_directly:
            assert self.path is not None
            read_rows(self.path, index, out)
        else:
            # ("raise" would gather into another buffer first)
            np.take(self._rows(), index, axis=0, out=out, mode="clip")
        values = out.view(self._dtype).reshape(len(index))
        columns = {}
        for f in self.fields:
            array = (
                np.ascontiguousarray(values[f.name])
                if len(self.fields) == 1
                else values[f.name].copy()
            )
            if out.nbytes >= _REUSED:
                self._spare.keep(room, array if np.may_share_memory(array, out) else None)
            tensor = torch.from_numpy(array)
            columns[f.name] = tensor.view(torch.bfloat16) if f.dtype is torch.bfloat16 else tensor
        return columns

    def _rows(self) -> np.ndarray:
        if self._ram is not None:
            return self._ram.rows
        if self._map is None or len(self._map) < self.count:
            assert self.path is not None
            with self.path.open("rb") as file:
                mapped = mmap.mmap(
                    file.fileno(), self.count * self.row_bytes, access=mmap.ACCESS_READ
                )
            self._map = np.frombuffer(mapped, np.uint8).reshape(self.count, self.row_bytes)
        return self._map


def write_at(path: Path, offset: int, data: memoryview) -> None:
    """Write ``data`` at ``offset``, cut the file behind it, and wait until the disk has it. Raises
    `UserError` for what is no plain file: a link would have another file written."""
    file = open_plain(path, os.O_WRONLY | os.O_CREAT, _REMEDY)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(file, data[written:], offset + written)
        os.ftruncate(file, offset + len(data))
        os.fsync(file)
    finally:
        os.close(file)


def cut_at(path: Path, size: int) -> None:
    """Cut a plain file to ``size`` bytes; errors as of `write_at`."""
    file = open_plain(path, os.O_WRONLY, _REMEDY)
    try:
        os.ftruncate(file, size)
    finally:
        os.close(file)
