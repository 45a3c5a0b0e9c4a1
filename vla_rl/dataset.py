"""Demonstrations on disk: LeRobotDataset v3 folders, written and read without the hub.

`DemonstrationWriter` writes what lerobot's own class loads (a test checks it), about ten times faster than lerobot's
recorder, which first saves every frame as a file: here a frame becomes PNG bytes in memory and goes straight into the
parquet file. `load_demonstrations` reads any v3 folder, whoever wrote it, into memory.

Layout (v3.0): ``meta/info.json`` (features), ``meta/stats.json``, ``meta/tasks.parquet`` (instructions),
``meta/episodes/chunk-*/file-*.parquet`` (one row an episode), ``data/chunk-*/file-*.parquet`` (one row a control step)
and, where cameras are stored as video, ``videos/<camera>/chunk-*/file-*.mp4``. Ours adds ``meta/embodiment.json`` and,
per episode, the columns ``success``, ``task_id`` and ``init_state_id``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import ConfigError, EmbodimentMismatch, MissingPackage, UserError
from vla_rl.files import read_embodiment as read_embodiment_file
from vla_rl.files import read_json
from vla_rl.types import EmbodimentSpec, Observation

STATE_KEY, ACTION_KEY, IMAGE_PREFIX = "observation.state", "action", "observation.images."
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
_AGAIN = "write or fetch the dataset again"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_CHUNK_FILES, _DATA_FILE_BYTES = 1000, 100 * 2**20
_DEFAULT_FEATURES = {
    "timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"
}  # fmt: skip


class DatasetError(UserError):
    """A dataset folder that cannot be written or read. The message names the folder and the remedy."""


def image_key(camera: str) -> str:
    return IMAGE_PREFIX + camera


# ------------------------------------------------------------------------------------------------------ small functions
def encode_png(image: np.ndarray) -> bytes:
    """A uint8 RGB image [H W 3] as PNG bytes, losslessly.

    The fixed filter "sub" and zlib level 1 make it some four times faster than Pillow, which tries every filter on
    every row, at the same size.
    """
    height, width, _ = image.shape
    rows = np.ascontiguousarray(image).reshape(height, width * 3)
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = 1
    filtered[:, 1:4] = rows[:, :3]
    np.subtract(rows[:, 3:], rows[:, :-3], out=filtered[:, 4:])

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(filtered.data, 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", body) + part(b"IEND", b"")


def feature_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Over rows of ``values`` [n d]: min, max, mean, std, q01, q10, q50, q90, q99 (each [d]) and count [1]."""
    values = np.asarray(values, np.float64).reshape(len(values), -1)
    quantiles = np.quantile(values, QUANTILES, axis=0)
    return {
        "min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0),
        "count": np.array([len(values)]),
    } | {f"q{round(q * 100):02d}": row for q, row in zip(QUANTILES, quantiles, strict=True)}  # fmt: skip


def image_statistics(histogram: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Statistics [3 1 1] of pixels scaled to 0 … 1, from a histogram [3 256] of ``count`` images."""
    levels = np.arange(256) / 255.0
    share = histogram / histogram.sum(1, keepdims=True)
    cumulative = share.cumsum(1)
    mean = share @ levels
    present = histogram > 0
    out = {
        "min": levels[present.argmax(1)],
        "max": levels[255 - present[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(share @ levels**2 - mean**2, 0)),
    } | {f"q{round(q * 100):02d}": levels[(cumulative >= q - 1e-12).argmax(1)] for q in QUANTILES}
    return {k: v.reshape(3, 1, 1) for k, v in out.items()} | {"count": np.array([count])}


def _pixel_histogram(images: np.ndarray) -> tuple[np.ndarray, int]:
    """Counts [3 256] over at most 16 frames spread over the episode (all pixels of all frames tell no more)."""
    some = images[np.unique(np.linspace(0, len(images) - 1, 16).round().astype(int))]
    return np.stack([np.bincount(some[..., c].ravel(), minlength=256) for c in range(3)]), len(some)


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackage("pyarrow", "lerobot", "Reading and writing demonstration datasets") from None
    return pyarrow


def _av():
    try:
        import av
    except ImportError:
        raise MissingPackage("av", "lerobot", "A dataset that stores its cameras as video") from None
    return av


def _lists(stats: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, list]]:
    return {name: {k: np.asarray(v).tolist() for k, v in s.items()} for name, s in stats.items()}


# -------------------------------------------------------------------------------------------------------------- writing
class DemonstrationWriter:
    """Writes episodes as a LeRobotDataset v3 folder; use it as a context manager.

    The folder appears under its name only when all is written: until `close` the files lie in a hidden sibling, which
    an exception inside the ``with`` block removes. Images are PNG inside parquet (exact), or H.264 files with ``video``
    (lossy, smaller). Raises `DatasetError` where ``path`` exists already or the disk is full.
    """

    def __init__(
        self, path: str | Path, embodiment: EmbodimentSpec, *, video: bool = False, workers: int | None = None
    ):
        self.path, self.embodiment, self.video = Path(path), embodiment, video
        if self.path.exists():
            raise DatasetError(
                f"{self.path} exists already, and a dataset is never added to or overwritten. "
                f"Delete the folder, or choose another name."
            )
        self._pa = _pyarrow()
        if video:
            _av()
            odd = [c for c in embodiment.cameras if c.height % 2 or c.width % 2]
            if odd:
                raise ConfigError(
                    f"H.264 needs even image sizes, got {odd}; store images instead, or use even camera sizes"
                )
        self._folder = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        shutil.rmtree(self._folder, ignore_errors=True)
        fps = embodiment.control_hz
        self._fps: int | float = int(fps) if float(fps).is_integer() else fps
        self._features = lerobot_features(embodiment, video)
        self._pool = ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1), thread_name_prefix="png")
        self._pending: deque[dict[str, Any]] = deque()
        self._episodes: list[dict[str, Any]] = []
        self._instructions: dict[str, int] = {}
        self._frames = 0
        self._vectors: dict[str, list[np.ndarray]] = {STATE_KEY: [], ACTION_KEY: []}
        self._histograms = {c: np.zeros((3, 256), np.int64) for c in embodiment.camera_names}
        self._histogram_frames = dict.fromkeys(embodiment.camera_names, 0)
        self._parquet: Any = None
        self._file_index, self._file_bytes = 0, 0
        self._videos: dict[str, _VideoFile] = {}
        self._closed = False
        with self._disk_errors():
            (self._folder / "meta").mkdir(parents=True)

    def __enter__(self) -> DemonstrationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __len__(self) -> int:
        """Episodes added so far."""
        return len(self._episodes)

    def add_episode(
        self,
        images: Mapping[str, np.ndarray],
        proprio: np.ndarray,
        actions: np.ndarray,
        instruction: str,
        *,
        success: bool,
        task_id: str,
        init_state_id: int,
    ) -> None:
        """Add one episode of T control steps; row t of each array is what was seen and (clean label) done at step t.

        Args:
            images: {camera: uint8 [T H W 3]} for every camera of the embodiment.
            proprio: float32 [T p], physical units. actions: float32 [T a], physical units.
        Raises:
            EmbodimentMismatch: cameras, sizes or dimensions differ from the embodiment's.
            DatasetError: no control step, or values that are not finite.
        """
        if self._closed:
            raise DatasetError(f"The dataset {self.path} is closed; open a new DemonstrationWriter with another name.")
        proprio, actions = np.asarray(proprio, np.float32), np.asarray(actions, np.float32)
        self._check(images, proprio, actions, instruction)
        steps, first = len(actions), self._frames
        encoded: dict[str, Future] = {}
        for camera, frames in images.items():
            if self.video:
                with self._disk_errors():
                    self._video_file(camera).add(frames)
            else:
                encoded[camera] = self._pool.submit(_encode_frames, frames)
        task_index = self._instructions.setdefault(instruction, len(self._instructions))
        self._vectors[STATE_KEY].append(proprio)
        self._vectors[ACTION_KEY].append(actions)
        self._frames += steps
        number = len(self._episodes)
        row = {
            "episode_index": number, "tasks": [instruction], "length": steps, "dataset_from_index": first,
            "dataset_to_index": first + steps, "success": bool(success), "task_id": task_id,
            "init_state_id": int(init_state_id), "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0,
        }  # fmt: skip
        self._episodes.append(row)
        columns = {
            "timestamp": np.arange(steps, dtype=np.float32) / np.float32(self._fps),
            "frame_index": np.arange(steps), "episode_index": np.full(steps, number),
            "index": np.arange(first, first + steps), "task_index": np.full(steps, task_index),
        }  # fmt: skip
        stats = {STATE_KEY: feature_statistics(proprio), ACTION_KEY: feature_statistics(actions)}
        stats |= {k: feature_statistics(v[:, None]) for k, v in columns.items()}
        self._pending.append(
            {"row": row, "columns": columns, "stats": stats, STATE_KEY: proprio, ACTION_KEY: actions, "png": encoded}
            | {"histograms": {c: self._pool.submit(_pixel_histogram, f) for c, f in images.items()}}
        )
        while len(self._pending) > 4:  # bounds the memory, and lets the caller simulate while the threads encode
            self._write_oldest()

    def close(self) -> Path:
        """Write what is left and the metadata, and give the folder its name. Returns the path."""
        if self._closed:
            return self.path
        if not self._episodes:
            self.abort()
            raise DatasetError(f"No episode was added to {self.path}, so no dataset was written.")
        try:
            while self._pending:
                self._write_oldest()
            with self._disk_errors():
                self._close_files()
                self._write_metadata()
                if self.path.exists():
                    raise DatasetError(f"{self.path} was created by someone else meanwhile; choose another name.")
                self._folder.rename(self.path)
        except BaseException:
            self.abort()
            raise
        self._closed = True
        self._pool.shutdown()
        return self.path

    def abort(self) -> None:
        """Drop everything written so far. Harmless after `close`."""
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        with contextlib.suppress(Exception):  # the disk may be full; what counts here is that the folder goes
            self._close_files()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inner parts
    def _disk_errors(self) -> _DiskErrors:
        return _DiskErrors(self.path)

    def _check(self, images: Mapping[str, np.ndarray], proprio: np.ndarray, actions: np.ndarray, text: str) -> None:
        spec, steps = self.embodiment, len(actions)
        expected = {c.name: (steps, c.height, c.width, 3) for c in spec.cameras}
        found = {name: tuple(np.shape(value)) for name, value in images.items()}
        shapes = {"proprio": (steps, spec.proprio_dim), "actions": (steps, spec.action_dim)}
        got = {"proprio": proprio.shape, "actions": actions.shape}
        if expected != found or shapes != got:
            raise EmbodimentMismatch(
                f"Episode {len(self)} for {self.path} does not fit the embodiment {spec.name}:\n"
                f"  expected images {expected}, {shapes}\n  got      images {found}, {got}\n"
                f"Record with the cameras, proprio and action names of that embodiment."
            )
        wrong = {name: str(value.dtype) for name, value in images.items() if value.dtype != np.uint8}
        if wrong:
            raise DatasetError(f"Episode {len(self)} for {self.path}: images must be uint8 RGB, got {wrong}.")
        if steps == 0:
            raise DatasetError(f"Episode {len(self)} for {self.path} has no control step; leave it out.")
        for name, values, names in (
            ("proprio", proprio, spec.proprio_names), ("actions", actions, spec.action_names)
        ):  # fmt: skip
            bad = np.argwhere(~np.isfinite(values))
            if len(bad):
                t, d = bad[0]
                raise DatasetError(
                    f"Episode {len(self)} for {self.path} ({text!r}): {name}[{names[d]}] is {values[t, d]} at control "
                    f"step {t}. Leave the episode out, or repair what produced it."
                )

    def _write_oldest(self) -> None:
        item = self._pending.popleft()
        pa, row = self._pa, item["row"]
        arrays, names = [], []
        for camera, future in item["png"].items():
            images = future.result()
            paths = [f"frame-{i:06d}.png" for i in range(len(images))]
            struct_array = pa.StructArray.from_arrays(
                [pa.array(images, pa.binary()), pa.array(paths)], ["bytes", "path"]
            )
            arrays.append(struct_array)
            names.append(image_key(camera))
        for key in (STATE_KEY, ACTION_KEY):
            flat = pa.array(item[key].ravel())
            wide = item[key].shape[1] > 1  # lerobot stores a feature of shape (1,) as a plain column
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, item[key].shape[1]) if wide else flat)
            names.append(key)
        for key, values in item["columns"].items():
            arrays.append(pa.array(values))
            names.append(key)
        table = pa.table(arrays, names=names)
        with self._disk_errors():
            if self._parquet is None or self._file_bytes > _DATA_FILE_BYTES:
                self._next_data_file(table.schema)
            self._parquet.write_table(table)
        self._file_bytes += table.nbytes
        row["data/chunk_index"], row["data/file_index"] = divmod(self._file_index, _CHUNK_FILES)
        for camera, future in item["histograms"].items():
            histogram, count = future.result()
            self._histograms[camera] += histogram
            self._histogram_frames[camera] += count
            item["stats"][image_key(camera)] = image_statistics(histogram, count)
            if self.video:
                start = row["dataset_from_index"] / self._fps
                prefix = f"videos/{image_key(camera)}/"
                row |= {f"{prefix}chunk_index": 0, f"{prefix}file_index": 0}
                row |= {f"{prefix}from_timestamp": start, f"{prefix}to_timestamp": start + row["length"] / self._fps}
        for name, stats in _lists(item["stats"]).items():
            row |= {f"stats/{name}/{k}": v for k, v in stats.items()}

    def _next_data_file(self, schema: Any) -> None:
        if self._parquet is not None:
            self._parquet.close()
            self._file_index += 1
        chunk, file = divmod(self._file_index, _CHUNK_FILES)
        target = self._folder / f"data/{_FILE.format(chunk_index=chunk, file_index=file)}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._parquet = self._pa.parquet.ParquetWriter(target, schema, compression="snappy")
        self._file_bytes = 0

    def _video_file(self, camera: str) -> _VideoFile:
        if camera not in self._videos:
            target = self._folder / f"videos/{image_key(camera)}/{_FILE.format(chunk_index=0, file_index=0)}.mp4"
            self._videos[camera] = _VideoFile(target, self._fps)
        return self._videos[camera]

    def _close_files(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
            self._parquet = None
        for video in self._videos.values():
            video.close()
        self._videos = {}

    def _write_metadata(self) -> None:
        pa, meta = self._pa, self._folder / "meta"
        episodes = meta / f"episodes/{_FILE.format(chunk_index=0, file_index=0)}.parquet"
        episodes.parent.mkdir(parents=True)
        pa.parquet.write_table(pa.Table.from_pylist(self._episodes), episodes)
        tasks = pa.table({"task_index": pa.array(list(self._instructions.values())), "task": list(self._instructions)})
        kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
        pandas_index = {  # lerobot looks instructions up in the frame's index; this note makes pandas restore it
            "index_columns": ["task"], "column_indexes": [], "pandas_version": "2.0.0",
            "columns": [
                {"name": n, "field_name": n, "pandas_type": p, "numpy_type": q, "metadata": None}
                for n, (p, q) in kinds.items()
            ],
        }  # fmt: skip
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(pandas_index)})
        pa.parquet.write_table(tasks, meta / "tasks.parquet")
        counters = np.arange(self._frames)
        lengths = [row["length"] for row in self._episodes]
        task_of = [self._instructions[row["tasks"][0]] for row in self._episodes]
        frame_index = np.concatenate([np.arange(n) for n in lengths])
        whole = {
            **{k: np.concatenate(v) for k, v in self._vectors.items()},
            "timestamp": frame_index[:, None] / self._fps, "frame_index": frame_index[:, None],
            "episode_index": np.repeat(np.arange(len(lengths)), lengths)[:, None], "index": counters[:, None],
            "task_index": np.repeat(task_of, lengths)[:, None],
        }  # fmt: skip
        stats = {k: feature_statistics(v) for k, v in whole.items()}
        stats |= {image_key(c): image_statistics(h, self._histogram_frames[c]) for c, h in self._histograms.items()}
        info = {
            "codebase_version": "v3.0", "robot_type": self.embodiment.name, "total_episodes": len(self._episodes),
            "total_frames": self._frames, "total_tasks": len(self._instructions), "chunks_size": _CHUNK_FILES,
            "data_files_size_in_mb": _DATA_FILE_BYTES >> 20, "video_files_size_in_mb": 200, "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"}, "data_path": f"data/{_FILE}.parquet",
            "video_path": f"videos/{{video_key}}/{_FILE}.mp4" if self.video else None,
            "features": self._features,
        }  # fmt: skip
        for name, value in (
            ("info", info), ("stats", _lists(stats)), ("embodiment", self.embodiment.to_dict())
        ):  # fmt: skip
            (meta / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class _DiskErrors:
    """Turns an ``OSError`` of a write into a `DatasetError` that names the folder."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            free = _free_gib(self.path)
            raise DatasetError(
                f"Could not write the dataset {self.path}: {error}. The disk has {free:.2f} GiB free there; make "
                f"room or choose a folder on another disk."
            ) from error


def _free_gib(path: Path) -> float:
    for folder in (path, *path.absolute().parents):
        if folder.exists():
            return shutil.disk_usage(folder).free / 2**30
    return float("nan")


def _encode_frames(frames: np.ndarray) -> list[bytes]:
    return [encode_png(frame) for frame in frames]


class _VideoFile:
    """One H.264 file per camera that holds every episode one after the other (v3 layout)."""

    def __init__(self, path: Path, fps: float):
        from fractions import Fraction

        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = _av().open(str(path), "w")
        self._rate = Fraction(fps).limit_denominator(1000)
        self._stream: Any = None
        self._count = 0

    def add(self, frames: np.ndarray) -> None:
        if self._stream is None:
            self._stream = self._container.add_stream(
                "libx264", rate=self._rate, options={"crf": "15", "preset": "veryfast", "g": "2", "bf": "0"}
            )
            self._stream.height, self._stream.width = frames.shape[1:3]
            self._stream.pix_fmt = "yuv420p"
        for image in frames:
            frame = _av().VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = self._count, 1 / self._rate
            self._container.mux(self._stream.encode(frame))
            self._count += 1

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode())
        self._container.close()


def lerobot_features(embodiment: EmbodimentSpec, video: bool = False) -> dict[str, dict[str, Any]]:
    """The ``features`` table of ``meta/info.json`` for an embodiment."""
    kind = "video" if video else "image"
    features: dict[str, dict[str, Any]] = {}
    for c in embodiment.cameras:
        shape = [c.height, c.width, 3]
        features[image_key(c.name)] = {"dtype": kind, "shape": shape, "names": ["height", "width", "channels"]}
        if kind == "video":
            features[image_key(c.name)]["info"] = {
                "video.height": c.height, "video.width": c.width, "video.codec": "h264", "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False, "video.fps": embodiment.control_hz, "video.channels": 3,
                "has_audio": False,
            }  # fmt: skip
    for key, names in ((STATE_KEY, embodiment.proprio_names), (ACTION_KEY, embodiment.action_names)):
        features[key] = {"dtype": "float32", "shape": [len(names)], "names": list(names)}
    return features | {k: {"dtype": v, "shape": [1], "names": None} for k, v in _DEFAULT_FEATURES.items()}


# -------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class DemonstrationEpisode:
    """What is known of one episode. ``success``, ``task_id`` and ``init_state_id`` are None in foreign datasets."""

    start: int
    length: int
    instruction: str
    success: bool | None = None
    task_id: str | None = None
    init_state_id: int | None = None


class DemonstrationDataset:
    """Demonstrations in memory: a decision at every control step, with the chunk of actions that followed.

    ``images`` {camera: uint8 [n H W 3]}, ``proprio`` float32 [n p], ``actions`` float32 [n a] (physical units) hold all
    n control steps of all episodes; ``statistics`` {"action" | "observation.state": {"min", "max", "mean", "std",
    "q01", "q99", …: float32 [d]}} are computed from them.
    """

    def __init__(
        self,
        embodiment: EmbodimentSpec,
        images: dict[str, Tensor],
        proprio: Tensor,
        actions: Tensor,
        instruction_index: Tensor,
        instructions: Sequence[str],
        episodes: Sequence[DemonstrationEpisode],
        chunk_length: int,
    ):
        if chunk_length < 1:
            raise ConfigError(f"chunk_length={chunk_length} must be at least 1")
        self.embodiment, self.chunk_length = embodiment, chunk_length
        self.images, self.proprio, self.actions = images, proprio, actions
        self.instructions, self.episodes = tuple(instructions), tuple(episodes)
        self._instruction_index = instruction_index
        self._end = torch.empty(len(actions), dtype=torch.long)
        for e in episodes:
            self._end[e.start : e.start + e.length] = e.start + e.length
        self.statistics = {
            key: {k: v.astype(np.float32) for k, v in feature_statistics(values.numpy()).items() if k != "count"}
            for key, values in ((STATE_KEY, proprio), (ACTION_KEY, actions))
        }

    def __len__(self) -> int:
        """Control steps."""
        return len(self.actions)

    @property
    def action_stats(self) -> dict[str, list[float]]:
        """``low, high, mean, std, q01, q99`` per action dimension, in physical units: what normalisation needs."""
        return _short_stats(self.statistics[ACTION_KEY])

    @property
    def proprio_stats(self) -> dict[str, list[float]]:
        """``low, high, mean, std, q01, q99`` per proprio dimension, in physical units."""
        return _short_stats(self.statistics[STATE_KEY])

    def at(self, index: Tensor) -> tuple[Observation, Tensor, Tensor]:
        """Rows ``index`` int64 [b] → (Observation [b], actions float32 [b h a], valid bool [b h]).

        Chunk t is the actions of control steps t … t+h−1; past the episode's end the last action repeats and
        ``valid`` is False.
        """
        index = torch.as_tensor(index, dtype=torch.long)
        steps = index[:, None] + torch.arange(self.chunk_length)
        valid = steps < self._end[index][:, None]
        steps = torch.minimum(steps, self._end[index][:, None] - 1)
        observation = Observation(
            images={name: frames[index] for name, frames in self.images.items()},
            proprio=self.proprio[index],
            instruction=tuple(self.instructions[i] for i in self._instruction_index[index].tolist()),
        )
        return observation, self.actions[steps], valid

    def subset(self, keep: Sequence[Tensor | None]) -> DemonstrationDataset:
        """Only the control steps that ``keep`` marks: bool [length] per episode, or None to leave the episode out.

        Raises `DatasetError` where nothing remains.
        """
        rows, episodes, start = [], [], 0
        for episode, mask in zip(self.episodes, keep, strict=True):
            if mask is None or not mask.any():
                continue
            rows.append(episode.start + torch.nonzero(mask).flatten())
            episodes.append(dataclasses.replace(episode, start=start, length=len(rows[-1])))
            start += len(rows[-1])
        if not rows:
            raise DatasetError("No demonstration remains after filtering; ask for other tasks, or keep more of the data.")
        index = torch.cat(rows)
        return DemonstrationDataset(
            self.embodiment, {k: v[index] for k, v in self.images.items()}, self.proprio[index], self.actions[index],
            self._instruction_index[index], self.instructions, episodes, self.chunk_length,
        )  # fmt: skip

    def split(
        self, validation_episodes: int, largest_share: float = 0.2
    ) -> tuple[DemonstrationDataset, DemonstrationDataset | None]:
        """What to train on, and the last ``validation_episodes`` of each task, which are kept out (at most ``largest_share``
        of the task's; None where that leaves none). Tasks are told apart by ``task_id``, else by instruction."""
        by_task: dict[str, list[int]] = {}
        for i, e in enumerate(self.episodes):
            by_task.setdefault(e.task_id or e.instruction, []).append(i)
        kept_out: set[int] = set()
        for rows in by_task.values():
            kept_out |= set(rows[len(rows) - min(validation_episodes, int(largest_share * len(rows))) :])
        if not kept_out:
            return self, None
        whole = [torch.ones(e.length, dtype=torch.bool) for e in self.episodes]
        train = self.subset([None if i in kept_out else mask for i, mask in enumerate(whole)])
        return train, self.subset([mask if i in kept_out else None for i, mask in enumerate(whole)])

    def evenly(self, rows: int) -> tuple[Observation, Tensor, Tensor]:
        """At most ``rows`` control steps spread evenly over all episodes; returns what `at` returns."""
        return self.at(torch.linspace(0, len(self) - 1, min(rows, len(self))).round().long())

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> tuple[Observation, Tensor, Tensor]:
        """``batch_size`` control steps drawn uniformly with replacement; returns what `at` returns."""
        return self.at(torch.randint(len(self), (batch_size,), generator=generator))

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Observation, Tensor, Tensor]]:
        """One epoch in random order; the last batch may be smaller."""
        for index in torch.randperm(len(self), generator=generator).split(batch_size):
            yield self.at(index)


class DatasetSampler:
    """Draws batches of ``batch_size`` decisions from a `DemonstrationDataset` for ever (a `Sampler` for `Imitation`)."""

    def __init__(self, dataset: DemonstrationDataset, batch_size: int, seed: int = 0):
        self.dataset, self.batch_size = dataset, batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> tuple[Observation, Tensor, Tensor]:
        """Observation [b], actions float32 [b h a] in physical units, valid bool [b h]."""
        return self.dataset.sample(self.batch_size, self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"].cpu())


def _short_stats(stats: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    names = {"low": "min", "high": "max", "mean": "mean", "std": "std", "q01": "q01", "q99": "q99"}
    return {short: stats[name].tolist() for short, name in names.items()}


def read_embodiment(path: str | Path) -> EmbodimentSpec | None:
    """The embodiment a dataset was written with; None for a folder of another tool."""
    file = Path(path) / "meta" / "embodiment.json"
    return read_embodiment_file(file, _AGAIN, DatasetError) if os.path.lexists(file) else None


def episode_lengths(path: str | Path) -> dict[str, list[int]]:
    """{task id: control steps of each episode that did not fail} of a LeRobotDataset v3 folder, from its metadata alone.

    The task is "" in datasets of other tools, which name none; empty where the folder is no such dataset.
    """
    files = sorted((Path(path) / "meta" / "episodes").glob("*/*.parquet"))
    pa = _pyarrow() if files else None
    lengths: dict[str, list[int]] = {}
    for file in files:
        try:
            for row in pa.parquet.read_table(file).to_pylist():
                if row.get("success") is not False:
                    lengths.setdefault(row.get("task_id") or "", []).append(int(row["length"]))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"{file} is damaged: {_said(error)}. Write or fetch the dataset again.") from error
    return lengths


def dataset_of_episodes(
    episodes: Iterable[Mapping[str, Any]], embodiment: EmbodimentSpec, chunk_length: int = 1
) -> DemonstrationDataset:
    """A dataset of episodes as a collector returns them (see `DemonstrationWriter.add_episode`); takes their images away,
    so that they are in memory once. Raises `DatasetError` where there is no episode.
    """
    kept, known, start = list(episodes), [], 0
    if not kept:
        raise DatasetError("There is no demonstration to read; ask for other tasks or another folder.")
    instructions = list(dict.fromkeys(e["instruction"] for e in kept))
    for e in kept:
        fields = {name: e[name] for name in ("instruction", "success", "task_id", "init_state_id")}
        known.append(DemonstrationEpisode(start, len(e["actions"]), **fields))
        start += len(e["actions"])
    proprio, actions = (
        torch.from_numpy(np.concatenate([e[name] for e in kept]).astype(np.float32)) for name in ("proprio", "actions")
    )
    images = {}
    for camera in embodiment.camera_names:
        frames = np.empty((start, *kept[0]["images"][camera].shape[1:]), np.uint8)
        for e, episode in zip(kept, known, strict=True):
            frames[episode.start : episode.start + episode.length] = e["images"].pop(camera)
        images[camera] = torch.from_numpy(frames)
    index = torch.tensor([instructions.index(e.instruction) for e in known for _ in range(e.length)])
    return DemonstrationDataset(embodiment, images, proprio, actions, index, instructions, known, chunk_length)


def load_published(
    form: Any,
    path: str | Path,
    embodiment: EmbodimentSpec,
    chunk_length: int,
    *,
    instructions: Sequence[str],
    episodes_per_task: int,
    keep_noops: bool = False,
) -> DemonstrationDataset:
    """Demonstrations that a benchmark published, in a form that ``form`` knows (``build.py``, group "demonstrations").

    Only tasks with one of ``instructions`` are read, at most ``episodes_per_task`` demonstrations each (in the files'
    order). Control steps that do nothing are dropped unless ``keep_noops``. A folder that this project wrote is read by
    `load_demonstrations` as it is. Raises `DatasetError` where no demonstration of these tasks is found.
    """
    path = Path(path)
    wanted = {" ".join(text.lower().split()) for text in instructions}
    files = form.files(path)
    if files:
        chosen = [file for file in files if " ".join(form.instruction(file).lower().split()) in wanted]
        if not chosen:
            raise DatasetError(
                f"{path} has demonstrations of {sorted(form.instruction(f) for f in files)[:3]} … ({len(files)} files), "
                f"none of the tasks asked for: {sorted(instructions)[:3]} …. Name the folder of the same suite, or other "
                f"tasks."
            )
        episodes = (e for file in chosen for e in form.episodes(file, embodiment, episodes_per_task))
        return dataset_of_episodes(
            episodes if keep_noops else map(functools.partial(_without_noops, form), episodes), embodiment, chunk_length
        )
    if read_embodiment(path) is not None:
        return load_demonstrations(path, embodiment, chunk_length)
    dataset = load_demonstrations(
        path, embodiment, chunk_length, features=form.features(_read_info(path)["features"], embodiment)
    )
    counts: Counter[str] = Counter()
    keep: list[Tensor | None] = []
    for e in dataset.episodes:
        text = " ".join(e.instruction.lower().split())
        counts[text] += text in wanted
        if text not in wanted or counts[text] > episodes_per_task:
            keep.append(None)
            continue
        actions = dataset.actions[e.start : e.start + e.length].numpy()
        keep.append(torch.ones(e.length, dtype=torch.bool) if keep_noops else torch.from_numpy(form.moving_steps(actions)))
    if not any(counts.values()):
        raise DatasetError(
            f"{path} has demonstrations of {sorted(dataset.instructions)[:3]} … ({len(dataset.instructions)} tasks), none "
            f"of the tasks asked for: {sorted(instructions)[:3]} …. Name the dataset of the same suite, or other tasks."
        )
    return dataset.subset(keep)


def _without_noops(form: Any, episode: Mapping[str, Any]) -> dict[str, Any]:
    keep = form.moving_steps(episode["actions"])
    images = {name: frames[keep] for name, frames in episode["images"].items()}
    return {**episode, "images": images, "proprio": episode["proprio"][keep], "actions": episode["actions"][keep]}


def load_demonstrations(
    path: str | Path,
    expected_embodiment: EmbodimentSpec | None = None,
    chunk_length: int = 1,
    *,
    features: Mapping[str, str] | None = None,
) -> DemonstrationDataset:
    """Read a LeRobotDataset v3 folder into memory, without the hub and without lerobot.

    Args:
        path: The dataset's folder (the one that contains ``meta/``).
        expected_embodiment: The robot the data must fit: names of actions and proprio, cameras and their sizes, and
            control rate; with ``meta/embodiment.json`` also frame, units and bounds. Further cameras are ignored. None:
            the one the dataset was written with.
        chunk_length: Actions per decision, h.
        features: {camera: image feature} of a foreign dataset whose meaning is known; then sizes are compared, but
            neither names nor control rate.
    Raises:
        EmbodimentMismatch: the dataset is of another robot; the message shows both sides.
        DatasetError: the folder is missing, incomplete, damaged or of another version.
    """
    path = Path(path)
    pa = _pyarrow()
    info = _read_info(path)
    stored = read_embodiment(path)
    spec = expected_embodiment or stored
    if spec is None:
        raise DatasetError(
            f"{path} does not say which robot it is of (no meta/embodiment.json). Pass the embodiment it must fit."
        )
    keys = dict(features) if features is not None else {c.name: image_key(c.name) for c in spec.cameras}
    with _damage(path):
        _require_fit(path, info, stored, spec, keys, compare_names=features is None)
        return _read_demonstrations(path, info, spec, keys, chunk_length, pa)


def check_dataset(path: str | Path, embodiment: EmbodimentSpec) -> None:
    """What `load_demonstrations` would raise, as far as metadata and the ends of the data files tell; reads no frame."""
    path = Path(path)
    pa = _pyarrow()
    info = _read_info(path)
    with _damage(path):
        keys = {c.name: image_key(c.name) for c in embodiment.cameras}
        _require_fit(path, info, read_embodiment(path), embodiment, keys, compare_names=True)
        _read_instructions(path, pa)
        for folder in ("data", "meta/episodes"):
            files = sorted((path / folder).glob("*/*.parquet"))
            rows = sum(pa.parquet.read_metadata(file).num_rows for file in files)
            if not rows:
                raise DatasetError(f"{path} holds no demonstration ({folder} has no row). Name another dataset")


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What the block raises because the folder is not what its metadata promise becomes a `DatasetError`."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, _pyarrow().ArrowException) as error:
        raise DatasetError(f"{path} is incomplete or damaged: {_said(error)}. Write or fetch the dataset again.") from error


def _said(error: Exception) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return f"it has no {text}" if isinstance(error, KeyError) else text


def _read_demonstrations(
    path: Path, info: Mapping[str, Any], spec: EmbodimentSpec, keys: Mapping[str, str], chunk_length: int, pa: Any
) -> DemonstrationDataset:
    videos = [c for c, key in keys.items() if info["features"][key]["dtype"] == "video"]
    files = sorted((path / "data").glob("*/*.parquet"))
    columns = [STATE_KEY, ACTION_KEY, "episode_index", "task_index"] + [k for c, k in keys.items() if c not in videos]
    if not files:
        raise FileNotFoundError(f"no parquet file under {path / 'data'}")
    table = pa.concat_tables(pa.parquet.read_table(f, columns=columns) for f in files)
    rows = pa.concat_tables(
        pa.parquet.read_table(f) for f in sorted((path / "meta/episodes").glob("*/*.parquet"))
    ).to_pylist()
    instructions = _read_instructions(path, pa)
    rows.sort(key=lambda r: r["episode_index"])
    if len(table) != sum(r["length"] for r in rows):
        raise DatasetError(
            f"{path} is incomplete: its episodes count {sum(r['length'] for r in rows)} control steps, its data files "
            f"hold {len(table)}. Write or fetch the dataset again."
        )
    if not rows:
        raise DatasetError(f"{path} holds no demonstration. Collect some with 'vla-rl collect', or name another folder.")
    vectors = {key: _vector_column(table, key, pa) for key in (STATE_KEY, ACTION_KEY)}
    broken = [key for key, values in vectors.items() if not np.isfinite(values).all()]
    if broken:
        raise DatasetError(f"{path} has numbers that are not finite in {broken[0]}. Write or fetch the dataset again.")
    task_index = torch.from_numpy(table["task_index"].to_numpy().astype(np.int64))
    episodes, start = [], 0
    for r in rows:
        known = {k: r.get(k) for k in ("success", "task_id", "init_state_id")}
        episodes.append(DemonstrationEpisode(start, r["length"], instructions[int(task_index[start])], **known))
        start += r["length"]
    images = {
        camera: _decode_videos(path, info, rows, key, len(table), float(info["fps"]))
        if camera in videos
        else _decode_images(table[key].chunks, path, camera)
        for camera, key in keys.items()
    }
    for c in spec.cameras:
        if images[c.name].shape[1:] != (c.height, c.width, 3):
            size = tuple(images[c.name].shape[1:3])
            raise EmbodimentMismatch(f"{path}: camera {c.name} has images of {size}, expected {(c.height, c.width)}.")
    tensors = {key: torch.from_numpy(value) for key, value in vectors.items()}
    return DemonstrationDataset(
        spec, images, tensors[STATE_KEY], tensors[ACTION_KEY], task_index, instructions, episodes, chunk_length
    )


def _read_info(path: Path) -> dict[str, Any]:
    file = path / "meta" / "info.json"
    if not os.path.lexists(file):
        raise DatasetError(
            f"{path} is not a LeRobotDataset folder: it has no meta/info.json. Name the folder that contains meta/ and "
            f"data/, or collect demonstrations with 'vla-rl collect'."
        )
    info = read_json(file, _AGAIN, DatasetError)
    if not isinstance(info.get("codebase_version"), str) or not isinstance(info.get("features"), dict):
        raise DatasetError(f"{file} is damaged (it names no codebase_version or no features): {_AGAIN}")
    version = info["codebase_version"]
    if not version.startswith("v3."):
        raise DatasetError(
            f"{path} is a LeRobotDataset of version {version}, and this reads v3. Convert it with lerobot's "
            f"'python -m lerobot.datasets.v30.convert_dataset_v21_to_v30'."
        )
    return info


def _flat_names(names: Any) -> tuple[str, ...] | None:
    """Feature names as lerobot stores them: a list, or a dict of lists such as {"motors": [...]}."""
    if isinstance(names, Mapping):
        parts = [_flat_names(v) for v in names.values()]
        return tuple(n for p in parts if p for n in p)
    return tuple(str(n) for n in names) if isinstance(names, list | tuple) else None


def _require_fit(
    path: Path,
    info: Mapping[str, Any],
    stored: EmbodimentSpec | None,
    spec: EmbodimentSpec,
    keys: Mapping[str, str],
    compare_names: bool,
) -> None:
    features = info["features"]
    cameras = sorted(k.removeprefix(IMAGE_PREFIX) for k in features if k.startswith(IMAGE_PREFIX))
    lines = []
    if not set(keys.values()) <= set(features):
        lines.append(f"cameras: expected {sorted(spec.camera_names)}, the dataset has {cameras}")
    for c in spec.cameras:
        shape = list(features.get(keys[c.name], {}).get("shape", []))
        if shape and sorted(shape) != sorted([c.height, c.width, 3]):
            lines.append(f"camera {c.name}: expected {[c.height, c.width, 3]}, the dataset has {shape}")
    for key, names in ((ACTION_KEY, spec.action_names), (STATE_KEY, spec.proprio_names)):
        found = _flat_names(features[key].get("names")) if key in features else None
        if key not in features:
            lines.append(f"{key}: expected {list(names)}, the dataset has no such feature, only {sorted(features)}")
        elif compare_names and found is not None and found != names:
            lines.append(f"{key} names: expected {list(names)}, the dataset has {list(found)}")
        elif (found is None or not compare_names) and list(features[key]["shape"]) != [len(names)]:
            lines.append(f"{key} shape: expected {[len(names)]}, the dataset has {features[key]['shape']}")
    if compare_names and float(info["fps"]) != float(spec.control_hz):
        lines.append(f"control_hz: expected {spec.control_hz}, the dataset has {info['fps']}")
    if not lines and stored is not None:  # names fit; units, frame, bounds … are known too, so compare them as well
        lines = [d for d in spec.differences(stored) if not d.startswith("cameras:")]
    if lines:
        detail = "\n  ".join(lines)
        raise EmbodimentMismatch(
            f"The dataset {path} does not fit the embodiment {spec.name}:\n  {detail}\n"
            f"Use demonstrations of the same robot, cameras and actions, or a policy and env made for this dataset."
        )


def _read_instructions(path: Path, pa: Any) -> list[str]:
    """Instruction texts by task_index; the text is the frame's index, whatever pandas named that column."""
    table = pa.parquet.read_table(path / "meta/tasks.parquet")
    text = next(name for name in table.column_names if name != "task_index")
    pairs = sorted(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))
    return [t for _, t in pairs]


def _vector_column(table: Any, key: str, pa: Any) -> np.ndarray:
    column = table[key].combine_chunks()
    flat = column.flatten() if pa.types.is_nested(column.type) else column
    values = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    return values.reshape(len(table), -1)


def _decode_images(chunks: Sequence[Any], path: Path, camera: str) -> Tensor:
    """Images [n H W 3] of a column's chunks (taken one by one: joined, they might pass Arrow's 2 GiB limit)."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackage("pillow", "lerobot", "Reading images from a demonstration dataset") from None

    def decode(chunk: Any, row: int) -> np.ndarray:
        raw = chunk.field("bytes")[row].as_py()
        source = io.BytesIO(raw) if raw is not None else path / chunk.field("path")[row].as_py()
        with Image.open(source) as image:
            return np.asarray(image.convert("RGB"))

    chunks = [c for c in chunks if len(c)]
    try:
        out = np.empty((sum(len(c) for c in chunks), *decode(chunks[0], 0).shape), np.uint8)

        def fill(chunk: Any, offset: int, rows: range) -> None:
            for row in rows:
                out[offset + row] = decode(chunk, row)

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            offset, pending = 0, []
            for chunk in chunks:
                for start in range(0, len(chunk), 64):
                    pending.append(pool.submit(fill, chunk, offset, range(start, min(start + 64, len(chunk)))))
                offset += len(chunk)
            for future in pending:
                future.result()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: an image of camera {camera} cannot be read ({error}). Fetch it again.") from error
    return torch.from_numpy(out)


def _decode_videos(
    path: Path, info: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], key: str, total: int, fps: float
) -> Tensor:
    """Frames [n H W 3] of all episodes of a camera that is stored as video; each file is decoded once, in order."""
    av = _av()
    chunk, index, start = (f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp"))
    out: np.ndarray | None = None
    offset, wanted = 0, {}
    for r in rows:
        file = info["video_path"].format(video_key=key, chunk_index=r[chunk], file_index=r[index])
        first = round(r[start] * fps)
        wanted.setdefault(file, []).append((first, r["length"], offset))
        offset += r["length"]
    for file, parts in wanted.items():
        target = {first + i: at + i for first, length, at in parts for i in range(length)}
        try:
            with av.open(str(path / file)) as container:
                for n, frame in enumerate(container.decode(video=0)):
                    if n not in target:
                        continue
                    image = frame.to_ndarray(format="rgb24")
                    if out is None:
                        out = np.empty((total, *image.shape), np.uint8)
                    out[target.pop(n)] = image
        except (OSError, av.FFmpegError) as error:
            raise DatasetError(f"{path / file} cannot be decoded ({error}). Fetch the dataset again.") from error
        if target:
            raise DatasetError(f"{path / file} ends early: {len(target)} frames are missing. Fetch the dataset again.")
    if out is None:
        raise DatasetError(f"{path} holds no frame of {key}.")
    return torch.from_numpy(out)
