"""Pictures that stay on the disk: those rows that are asked for are decoded, by threads, and as
many kept as may be."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.lerobot_format import av_package
from vla_rl.data.lerobot_pictures import (
    Where,
    frames_at,
    image_of,
    keys_apart,
    opened_video,
    sized,
    stored_images,
)
from vla_rl.errors import DiskFull
from vla_rl.specs import CameraSpec

_THREADS = max(1, min(8, os.cpu_count() or 1))
_OPEN_VIDEOS = 8  # of each thread
_SPARE = 1 << 28  # bytes that stay free on the disk


@dataclass(frozen=True)
class OnDisk:
    """Where pictures may be put aside, and how many ``ram_bytes`` of decoded ones are held at most;
    datasets that are no larger are decoded at once, and held whole."""

    folder: Path
    ram_bytes: int


class Reader(Protocol):
    """One camera's pictures [n H W 3]."""

    camera: CameraSpec

    def order(self, rows: np.ndarray) -> np.ndarray:
        """The places of ``rows`` int64 [k] in the order in which they are read fastest."""
        ...

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode ``rows``, in that order, into ``out`` uint8 [k H W 3]; called from several
        threads."""
        ...


class StoredFrames:
    """Pictures uint8 [n H W 3] that are decoded when they are indexed, as
    `DemonstrationDataset.images` may hold them."""

    dtype = torch.uint8

    def __init__(self, reader: Reader, rows: np.ndarray, kept: FrameCache) -> None:
        self._reader, self._rows, self._kept = reader, rows, kept

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self._reader.camera.height, self._reader.camera.width, 3))

    def subset(self, index: Tensor) -> StoredFrames:
        """Rows ``index`` int64 [k], still on the disk."""
        return StoredFrames(self._reader, self._rows[index.numpy()], self._kept)

    def __getitem__(self, index: Tensor) -> Tensor:
        """uint8 [k H W 3] of rows ``index`` int64 [k]."""
        wanted, places = np.unique(
            self._rows[np.asarray(index, np.int64).reshape(-1)], return_inverse=True
        )
        name = self._reader.camera.name
        out = np.empty((len(wanted), *self.shape[1:]), np.uint8)
        missing = []
        for i, row in enumerate(wanted.tolist()):
            known = self._kept.get((name, row))
            if known is None:
                missing.append(i)
            else:
                out[i] = known
        if missing:
            self._decode(wanted, np.array(missing), out)
            for i in missing:
                self._kept.keep((name, int(wanted[i])), out[i])
        return torch.from_numpy(
            out if len(places) == len(wanted) and (np.diff(places) > 0).all() else out[places]
        )

    def _decode(self, wanted: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        missing = missing[self._reader.order(wanted[missing])]

        def part(chosen: np.ndarray) -> None:
            frames = np.empty((len(chosen), *out.shape[1:]), np.uint8)
            self._reader.read(wanted[chosen], frames)
            out[chosen] = frames

        for done in [
            _pool().submit(part, some)
            for some in np.array_split(missing, min(_THREADS, len(missing)))
        ]:
            done.result()


class JoinedFrames:
    """Pictures uint8 [n H W 3] of several ``parts``, each in memory or on the disk, as one: row i is
    row ``row_of[i]`` of part ``part_of[i]`` (int64 [n])."""

    dtype = torch.uint8

    def __init__(self, parts: Sequence[Frames], part_of: Tensor, row_of: Tensor) -> None:
        self.parts, self._part_of, self._row_of = tuple(parts), part_of, row_of

    @classmethod
    def of(cls, parts: Sequence[Frames]) -> JoinedFrames:
        """One part after the other."""
        sizes = torch.tensor([len(part) for part in parts])
        rows = [torch.arange(size) for size in sizes.tolist()]
        return cls(parts, torch.arange(len(parts)).repeat_interleave(sizes), torch.cat(rows))

    def __len__(self) -> int:
        return len(self._part_of)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.parts[0].shape[1:]))

    def subset(self, index: Tensor) -> JoinedFrames:
        """Rows ``index`` int64 [k], where they are."""
        return JoinedFrames(self.parts, self._part_of[index], self._row_of[index])

    def __getitem__(self, index: Tensor) -> Tensor:
        """uint8 [k H W 3] of rows ``index`` int64 [k]."""
        part_of, row_of = self._part_of[index], self._row_of[index]
        out = torch.empty((len(part_of), *self.shape[1:]), dtype=torch.uint8)
        for number in part_of.unique().tolist():
            mine = part_of == number
            out[mine] = self.parts[number][row_of[mine]]
        return out


Frames = Tensor | StoredFrames | JoinedFrames


def on_disk(frames: Frames) -> bool:
    """Whether pictures are decoded as they are asked for."""
    if isinstance(frames, JoinedFrames):
        return any(on_disk(part) for part in frames.parts)
    return isinstance(frames, StoredFrames)


@dataclass
class FrameCache:
    """Decoded pictures, until they fill ``most`` bytes. The first stay: rows are drawn at
    random, so none is worth more."""

    most: int
    _frames: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    _bytes: int = 0

    def get(self, key: tuple[str, int]) -> np.ndarray | None:
        return self._frames.get(key)

    def keep(self, key: tuple[str, int], frame: np.ndarray) -> None:
        if self._bytes + frame.nbytes <= self.most and key not in self._frames:
            self._bytes += frame.nbytes
            self._frames[key] = frame.copy()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that decode; one pool for all, so that batches ahead do not multiply them."""
    return ThreadPoolExecutor(_THREADS, "frames")


# ------------------------------------------------------------------------------------------- images
class ImageReader:
    """Pictures as Parquet files hold them. Those have no way to a single row, so their bytes, as
    they are compressed, are put aside once, into a file without a name in ``folder``, which goes
    with this object. Pictures in files of their own are read where they are. Raises `DiskFull`
    where the disk has no room for it.
    """

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        key: str,
        camera: CameraSpec,
        places: np.ndarray,
        where: Where,
        folder: Path,
    ) -> None:
        self.camera, self._path, self._where = camera, path, where
        size = sum(file.stat().st_size for file in files)
        free = shutil.disk_usage(folder).free
        if size + _SPARE > free:
            raise DiskFull(
                f"{folder} has {free / 1e9:.1f} GB free, and the pictures of {path} take up to "
                f"{size / 1e9:.1f} GB there while it is read: make room, name another place with "
                "output_dir=FOLDER, or store the pictures as video"
            )
        self._bytes = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it ends with this object)
        weakref.finalize(self, self._bytes.close)
        self._begins = np.zeros(len(places), np.int64)
        self._sizes = np.zeros(len(places), np.int64)
        self._paths: dict[int, str] = {}
        end = 0
        for row, cell in stored_images(files, key, places):
            raw = cell.get("bytes") if isinstance(cell, Mapping) else None
            if raw is not None:
                self._bytes.write(raw)
                self._begins[row], self._sizes[row] = end, len(raw)
                end += len(raw)
            elif isinstance(cell, Mapping) and cell.get("path"):
                self._paths[row] = str(cell["path"])
        self._bytes.flush()

    def order(self, rows: np.ndarray) -> np.ndarray:
        return np.argsort(self._begins[rows], kind="stable")

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        for i, row in enumerate(rows.tolist()):
            size = int(self._sizes[row])
            raw = os.pread(self._bytes.fileno(), size, int(self._begins[row])) if size else None
            out[i] = image_of(
                self._path,
                {"bytes": raw, "path": self._paths.get(row)},
                self.camera,
                row,
                self._where,
            )


# ------------------------------------------------------------------------------------------- videos
class VideoReader:
    """Frames of video ``files`` by time stamp: row i is in file ``file_of[i]`` at ``times[i]`` s.
    Each thread keeps a few files open. A frame costs what lies between it and the key frame before:
    little in lerobot's own videos, where every second one is such."""

    def __init__(
        self,
        files: Sequence[Path],
        camera: CameraSpec,
        file_of: np.ndarray,
        times: np.ndarray,
        hz: float,
        where: Where,
    ) -> None:
        self.camera, self._files, self._file_of, self._times = camera, list(files), file_of, times
        self._hz, self._where = hz, where
        self._open = threading.local()
        self._apart: dict[int, float] = {}  # seconds between the key frames of a file

    def order(self, rows: np.ndarray) -> np.ndarray:
        return np.lexsort((self._times[rows], self._file_of[rows]))

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        at = 0
        for number, group in itertools.groupby(self._file_of[rows].tolist()):
            mine = rows[at : at + len(list(group))]
            with opened_video(self._files[number], self._container) as (container, stream):
                apart = self._apart.get(number)
                if apart is None:
                    apart = self._apart[number] = keys_apart(container, stream)
                found = frames_at(
                    container, stream, apart, self._times[mine], self._hz, self._place(number, mine)
                )
                for i, frame in enumerate(found):
                    out[at + i] = sized(frame, self.camera, self._place(number, mine)(i))
            at += len(mine)

    def _place(self, number: int, rows: np.ndarray) -> Where:
        return lambda i: (
            f"{self._files[number]}: {self._where(int(rows[i]))}, the picture of camera "
            f"{self.camera.name}"
        )

    def _container(self, file: Path) -> Any:
        """Opened before by this thread, or now; the one that was used longest ago is closed."""
        known: OrderedDict[Path, Any] = self._open.__dict__.setdefault("videos", OrderedDict())
        if file not in known:
            known[file] = av_package().open(str(file))
            for stream in known[file].streams.video:
                # (those ahead decode frames that nobody asked for)
                stream.codec_context.thread_count = 1
            if len(known) > _OPEN_VIDEOS:
                known.popitem(last=False)[1].close()
        known.move_to_end(file)
        return known[file]
