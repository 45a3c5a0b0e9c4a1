"""The pictures of a LeRobotDataset v3 folder: those rows that are asked for, and no others, are
decoded."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.lerobot_format import DatasetError, av_package, pyarrow_package
from vla_rl.errors import EmbodimentMismatch, first_line
from vla_rl.files import require_content
from vla_rl.specs import CameraSpec

# Pillow's, of 8 bits
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
_DEPTH = "Depth is no camera picture: leave this camera out, or name the one with colours"
_TOLERANCE = 0.1  # share of a control period by which a frame may be earlier or later than its row
_TOGETHER, _WAITING = 64, 16  # pictures that a thread decodes at a time; such parts that wait
_ALIKE = 0.02  # share of a control period by which two times are rounded differently
_PACKETS, _KEYS = 600, 4  # of a video, from which the distance of its key frames is told
# control periods between two frames that are wanted which are decoded rather than jumped over
_SKIPPED = 3

Where = Callable[[int], str]
"""Row → its episode and number there, in words."""


def inside(path: Path, name: str) -> Path:
    """A file that a dataset names, which has to lie in its folder."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise DatasetError(
            f"{path} names the file {name!r}, which lies outside of it. Write or "
            "fetch the dataset again."
        )
    return path / name


def require_file(file: Path) -> None:
    """Raise `DatasetError` for a file that is missing, or git-lfs's pointer to it."""
    if not file.is_file():
        raise DatasetError(f"{file} is missing. Write or fetch the dataset again.")
    require_content(file, DatasetError)


# ------------------------------------------------------------------------------------------- images
def read_images(
    path: Path,
    files: Sequence[Path],
    key: str,
    camera: CameraSpec,
    places: np.ndarray,
    where: Where,
) -> Tensor:
    """uint8 [k H W 3] of the rows ``places`` int64 [k], counted through the data ``files``; row
    groups without one of them are not read."""
    out = np.empty((len(places), camera.height, camera.width, 3), np.uint8)

    def decode(cells: Sequence[tuple[int, Any]]) -> None:
        for i, cell in cells:
            out[i] = image_of(path, cell, camera, i, where)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        cells, waiting = stored_images(files, key, places), deque[Future[None]]()
        while some := list(itertools.islice(cells, _TOGETHER)):
            waiting.append(pool.submit(decode, some))
            if len(waiting) > _WAITING:
                waiting.popleft().result()
        for each in waiting:
            each.result()
    return torch.from_numpy(out)


def stored_images(files: Sequence[Path], key: str, places: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(i, what is stored at ``places[i]``), place by place; row groups without one of them are
    not read."""
    pq = pyarrow_package().parquet
    order = np.argsort(places, kind="stable")
    rising, before = places[order], 0
    for file in files:
        opened = pq.ParquetFile(file)
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            first, last = np.searchsorted(rising, (before, before + rows))
            if first < last:
                # (joined they might pass Arrow's 2 GiB)
                chunks = opened.read_row_group(group, columns=[key])[key].chunks
                ends = np.cumsum([len(c) for c in chunks])
                for i in order[first:last].tolist():
                    place = int(places[i]) - before
                    n = int(np.searchsorted(ends, place, "right"))
                    yield i, chunks[n][place - int(ends[n]) + len(chunks[n])].as_py()
            before += rows


def image_of(path: Path, cell: Any, camera: CameraSpec, row: int, where: Where) -> np.ndarray:
    from PIL import Image

    place = f"{path}: {where(row)}, the picture of camera {camera.name}"
    if not isinstance(cell, Mapping) or (cell.get("bytes") is None and not cell.get("path")):
        raise DatasetError(f"{place} is missing. Write or fetch the dataset again.")
    raw = cell.get("bytes")
    try:
        if raw is None:
            require_content(inside(path, cell["path"]), DatasetError)
        with Image.open(
            io.BytesIO(raw) if raw is not None else inside(path, cell["path"])
        ) as image:
            if image.mode not in _MODES:
                raise DatasetError(
                    f"{place} has more than 8 bits a pixel (Pillow's mode {image.mode}). {_DEPTH}."
                )
            return sized(np.asarray(image.convert("RGB")), camera, place)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(
            f"{place} cannot be read ({first_line(error)}). Fetch it again."
        ) from error


def sized(image: np.ndarray, camera: CameraSpec, place: str) -> np.ndarray:
    if image.shape != (camera.height, camera.width, 3):
        raise EmbodimentMismatch(
            f"{place} is {image.shape[:2]}, expected {(camera.height, camera.width)}."
        )
    return image


# ------------------------------------------------------------------------------------------- videos
def read_videos(
    path: Path,
    camera: CameraSpec,
    wanted: Mapping[Path, tuple[np.ndarray, np.ndarray]],
    count: int,
    hz: float,
    where: Where,
) -> Tensor:
    """uint8 [count H W 3]. ``wanted`` {file: (rows of the result [k], times in the file [k], s)}:
    each row takes the frame whose presentation time is nearest, as lerobot does, whatever the
    video's rate. Raises `DatasetError` where the nearest is further than a tenth of a control
    period (1 / ``hz``) off."""
    out = np.empty((count, camera.height, camera.width, 3), np.uint8)
    av = av_package()
    for file, (rows, times) in wanted.items():
        order = np.argsort(times, kind="stable")
        rows, times = rows[order], times[order]

        def place(i: int, file: Path = file, rows: np.ndarray = rows) -> str:
            return f"{file}: {where(int(rows[i]))}, the picture of camera {camera.name}"

        require_file(file)
        with opened_video(file, lambda name: av.open(str(name))) as (container, stream), container:
            apart = keys_apart(container, stream)
            for i, frame in enumerate(frames_at(container, stream, apart, times, hz, place)):
                out[rows[i]] = sized(frame, camera, place(i))
    return torch.from_numpy(out)


@contextlib.contextmanager
def opened_video(file: Path, opener: Callable[[Path], Any]) -> Iterator[tuple[Any, Any]]:
    """(container, its stream of colours). What the block cannot decode is a `DatasetError`."""
    av = av_package()
    try:
        container = opener(file)
        if not container.streams.video:
            raise DatasetError(f"{file} has no video in it. Fetch the dataset again.")
        stream = container.streams.video[0]
        _require_colours(stream, file)
        yield container, stream
    except (OSError, av.FFmpegError, ValueError) as error:
        raise DatasetError(
            f"{file} cannot be decoded ({first_line(error)}). Fetch the dataset again."
        ) from error


def keys_apart(container: Any, stream: Any) -> float:
    """Seconds between key frames, as the video begins; decodes nothing, and leaves the reading
    somewhere behind."""
    container.seek(0, stream=stream)
    packets = itertools.islice(container.demux(stream), _PACKETS)
    known = ((float(p.pts * p.time_base), p.is_keyframe) for p in packets if p.pts is not None)
    times, keys = [0.0], list[float]()
    for time, is_key in known:
        times.append(time)
        keys += [time] if is_key else []
        if len(keys) == _KEYS:
            break
    return (
        max(b - a for a, b in itertools.pairwise(keys))
        if len(keys) > 1
        else max(times) - min(times)
    )


def frames_at(
    container: Any, stream: Any, apart: float, times: np.ndarray, hz: float, place: Where
) -> Iterator[np.ndarray]:
    """uint8 [H W 3] of the frame that is nearest to each of ``times`` (rising, s), of a video whose
    key frames are ``apart`` s from each other. Raises `DatasetError` where that is further than a
    tenth of a control period (1 / ``hz``) off; ``place`` tells where number i is."""
    cuts = np.flatnonzero(np.diff(times) > max(apart, _SKIPPED / hz)) + 1
    done = 0
    for chosen in np.split(times, cuts):
        # to the key frame before, or that of this very moment
        begin = max(float(chosen[0]) + _ALIKE / hz, 0.0)
        container.seek(int(begin / stream.time_base), stream=stream)
        for time, (stamp, frame) in zip(
            chosen, _nearest(container.decode(stream), chosen, _ALIKE / hz)
        ):
            if abs(stamp - time) > _TOLERANCE / hz + 1e-4:
                raise DatasetError(
                    f"{place(done)} should be at {time:.4g} s, and the nearest frame is at "
                    f"{stamp:.4g} s. Fetch the dataset again, or write its time stamps anew."
                )
            done += 1
            yield frame.to_ndarray(format="rgb24")


def _nearest(frames: Iterator[Any], times: np.ndarray, alike: float) -> Iterator[tuple[float, Any]]:
    """(time, frame) nearest to each of ``times`` (rising); fewer where there is no frame at all.
    One that is no further off than ``alike`` s is near enough, and none is decoded after it."""
    before: tuple[float, Any] | None = None
    after: tuple[float, Any] | None = None
    for time in times:
        while after is None or after[0] < time - alike:
            frame = next(frames, None)
            if frame is None:
                break
            if frame.pts is None:
                raise ValueError("a frame has no presentation time")
            before, after = after, (float(frame.pts * frame.time_base), frame)
        known = [each for each in (before, after) if each is not None]
        if not known:
            raise ValueError("it has no frame")
        yield min(known, key=lambda each: abs(each[0] - time))


def _require_colours(stream: Any, file: Path) -> None:
    name = stream.codec_context.pix_fmt or ""
    if name.startswith("gray") and name not in ("gray", "gray8"):
        raise DatasetError(
            f"{file} has more than 8 bits a pixel (the pixel format {name}). {_DEPTH}."
        )
