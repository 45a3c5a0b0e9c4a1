"""Writes demonstrations as what lerobot's own class loads (a test checks it).

About ten times faster than lerobot's recorder, which first saves every frame as a file: here a
frame becomes PNG bytes in memory and goes straight into the parquet file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from vla_rl.data.checks import DataCheck, Rows
from vla_rl.data.lerobot_format import (
    _FILE,
    ACTION_KEY,
    KEPT_OUT,
    LAST,
    QUANTILES,
    STATE_KEY,
    DatasetError,
    av_package,
    image_key,
    lerobot_features,
    pyarrow_package,
)
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.files import reason
from vla_rl.types import EmbodimentSpec

_CHUNK_FILES, _DATA_FILE_BYTES = 1000, 100 * 2**20


# ---------------------------------------------------------------------------------- small functions
def encode_png(image: np.ndarray) -> bytes:
    """A uint8 RGB image [H W 3] as PNG bytes, losslessly.

    The fixed filter "sub" and zlib level 1 make it some four times faster than Pillow, which tries
    every filter on every row, at the same size.
    """
    height, width, _ = image.shape
    rows = np.ascontiguousarray(image).reshape(height, width * 3)
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = 1
    filtered[:, 1:4] = rows[:, :3]
    np.subtract(rows[:, 3:], rows[:, :-3], out=filtered[:, 4:])

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(filtered.data, 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", body) + part(b"IEND", b"")


def feature_statistics(values: np.ndarray, mass: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Over rows of ``values`` [n d]: min, max, mean, std, q01, q10, q50, q90, q99 (each [d]) and
    count [1]. ``mass`` [n]: how often each row is drawn, for mean, std and quantiles (then the
    least value that so large a part of what is drawn does not exceed); None: all alike."""
    values = np.asarray(values, np.float64).reshape(len(values), -1)
    if mass is None:
        quantiles, mean, std = np.quantile(values, QUANTILES, axis=0), values.mean(0), values.std(0)
    else:
        share = (mass / mass.sum())[:, None]
        mean = (share * values).sum(0)
        std = np.sqrt((share * (values - mean) ** 2).sum(0))
        quantiles = _weighted_quantiles(values, share[:, 0])
    return {
        "min": values.min(0),
        "max": values.max(0),
        "mean": mean,
        "std": std,
        "count": np.array([len(values)]),
    } | {f"q{round(q * 100):02d}": row for q, row in zip(QUANTILES, quantiles, strict=True)}


def _weighted_quantiles(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    """[QUANTILES d] of ``values`` [n d], of whose rows each is ``share`` [n] of all."""
    found = np.empty((len(QUANTILES), values.shape[1]))
    for i, column in enumerate(values.T):
        order = np.argsort(column, kind="stable")
        up_to = share[order].cumsum()
        at = np.searchsorted(up_to, np.array(QUANTILES) - 1e-12)
        found[:, i] = column[order[np.minimum(at, len(order) - 1)]]
    return found


def image_statistics(histogram: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Statistics [3 1 1] of pixels scaled to 0 … 1, from a histogram [3 256] of ``count``
    images."""
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
    """Counts [3 256] over at most 16 frames spread over the episode (all pixels of all frames
    tell no more)."""
    some = images[np.unique(np.linspace(0, len(images) - 1, 16).round().astype(int))]
    return np.stack([np.bincount(some[..., c].ravel(), minlength=256) for c in range(3)]), len(some)


def _lists(stats: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, list]]:
    return {name: {k: np.asarray(v).tolist() for k, v in s.items()} for name, s in stats.items()}


# ------------------------------------------------------------------------------------------ writing
class DemonstrationWriter:
    """Writes episodes as a LeRobotDataset v3 folder; use it as a context manager.

    The folder appears under its name only when all is written: until `close` the files lie in a
    hidden sibling, which an exception inside the ``with`` block removes. Images are PNG inside
    parquet (exact), or H.264 files with ``video`` (lossy, smaller). ``extra`` {key: names} are
    further float32 vectors of every control step. ``kept_out``: how many of each task's last episodes
    are to check a policy on, and not to train it. Raises `DatasetError` where ``path`` exists
    already or the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        embodiment: EmbodimentSpec,
        *,
        video: bool = False,
        extra: Mapping[str, Sequence[str]] | None = None,
        kept_out: int = 0,
    ):
        self.path, self.embodiment, self.video = Path(path), embodiment, video
        self._kept_out = kept_out
        if self.path.exists():
            raise DatasetError(
                f"{self.path} exists already, and a dataset is never added to or overwritten. "
                f"Delete the folder, or choose another name."
            )
        self._pa = pyarrow_package()
        if video:
            av_package()
            odd = [c for c in embodiment.cameras if c.height % 2 or c.width % 2]
            if odd:
                raise ConfigError(
                    f"H.264 needs even image sizes, got {odd}; store images instead, or use even "
                    "camera sizes"
                )
        self._folder = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        shutil.rmtree(self._folder, ignore_errors=True)
        fps = embodiment.control_hz
        self._fps: int | float = int(fps) if float(fps).is_integer() else fps
        self._features = lerobot_features(embodiment, video, extra)
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="png")
        self._pending: deque[dict[str, Any]] = deque()
        self._episodes: list[dict[str, Any]] = []
        self._instructions: dict[str, int] = {}
        self._frames = 0
        self._extra = dict(extra or {})
        self._vectors: dict[str, list[np.ndarray]] = {
            key: [] for key in (STATE_KEY, ACTION_KEY, *(extra or ()))
        }
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Add one episode of T control steps; row t of each array is what was seen and (clean
        label) done at step t.

        Args: images: {camera: uint8 [T H W 3]} for every camera of the embodiment. proprio: float32
            [T p], physical units. actions: float32 [T a], physical units. extra: {key: float32 [T
            k]}.
        Raises: EmbodimentMismatch: cameras, sizes or dimensions differ from the embodiment's.
            DatasetError: no control step, or what `vla_rl.data.checks` calls an error: values that
            are not finite, or far
                beyond the robot's bounds.
        """
        if self._closed:
            raise DatasetError(
                f"The dataset {self.path} is closed; open a new DemonstrationWriter "
                "with another name."
            )
        proprio, actions = np.asarray(proprio, np.float32), np.asarray(actions, np.float32)
        further = {key: np.asarray((extra or {}).get(key, ()), np.float32) for key in self._extra}
        self._check(images, {"proprio": proprio, "actions": actions, **further}, instruction)
        steps, first = len(actions), self._frames
        encoded: dict[str, Future] = {}
        for camera, frames in images.items():
            if self.video:
                with self._disk_errors():
                    self._video_file(camera).add(frames)
            else:
                encoded[camera] = self._pool.submit(_encode_frames, frames)
        task_index = self._instructions.setdefault(instruction, len(self._instructions))
        vectors = {STATE_KEY: proprio, ACTION_KEY: actions, **further}
        for key, kept in self._vectors.items():
            kept.append(np.asarray(vectors[key], np.float32))
        self._frames += steps
        number = len(self._episodes)
        row = {
            "episode_index": number,
            "tasks": [instruction],
            "length": steps,
            "dataset_from_index": first,
            "dataset_to_index": first + steps,
            "success": bool(success),
            "task_id": task_id,
            "init_state_id": int(init_state_id),
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        self._episodes.append(row)
        columns = {
            "timestamp": np.arange(steps, dtype=np.float32) / np.float32(self._fps),
            "frame_index": np.arange(steps),
            "episode_index": np.full(steps, number),
            "index": np.arange(first, first + steps),
            "task_index": np.full(steps, task_index),
        }
        stats = {key: feature_statistics(values) for key, values in vectors.items()}
        stats |= {k: feature_statistics(v[:, None]) for k, v in columns.items()}
        self._pending.append(
            {"row": row, "columns": columns, "stats": stats, "png": encoded, **vectors}
            | {"histograms": {c: self._pool.submit(_pixel_histogram, f) for c, f in images.items()}}
        )
        # bounds the memory, and lets the caller simulate while the threads encode
        while len(self._pending) > 4:
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
                    raise DatasetError(
                        f"{self.path} was created by someone else meanwhile; choose another name."
                    )
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
        # the disk may be full; what counts here is that the folder goes
        with contextlib.suppress(Exception):
            self._close_files()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inner parts
    def _disk_errors(self) -> _DiskErrors:
        return _DiskErrors(self.path)

    def _check(
        self, images: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], text: str
    ) -> None:
        spec, steps = self.embodiment, len(got["actions"])
        names = {"proprio": spec.proprio_names, "actions": spec.action_names, **self._extra}
        keys = {"proprio": STATE_KEY, "actions": ACTION_KEY}
        expected = {c.name: (steps, c.height, c.width, 3) for c in spec.cameras}
        found = {name: tuple(np.shape(value)) for name, value in images.items()}
        shapes = {name: (steps, len(columns)) for name, columns in names.items()}
        given = {name: values.shape for name, values in got.items()}
        if expected != found or shapes != given:
            raise EmbodimentMismatch(
                f"Episode {len(self)} for {self.path} does not fit the embodiment {spec.name}:\n"
                f"  expected images {expected}, {shapes}\n  got      images {found}, {given}\n"
                f"Record with the cameras, proprio and action names of that embodiment."
            )
        wrong = {
            name: str(value.dtype) for name, value in images.items() if value.dtype != np.uint8
        }
        if wrong:
            raise DatasetError(
                f"Episode {len(self)} for {self.path}: images must be uint8 RGB, got {wrong}."
            )
        if steps == 0:
            raise DatasetError(
                f"Episode {len(self)} for {self.path} has no control step; leave it out."
            )
        vectors = {keys.get(name, name): values for name, values in got.items()}
        check = DataCheck(str(self.path), "episode to write", spec, names=self._extra)
        check.add(Rows(f"episode {len(self)}", str(self.path), vectors, text))
        check.report().require()

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
        for key in self._vectors:
            flat = pa.array(item[key].ravel())
            # lerobot stores a feature of shape (1,) as a plain column
            wide = item[key].shape[1] > 1
            arrays.append(
                pa.FixedSizeListArray.from_arrays(flat, item[key].shape[1]) if wide else flat
            )
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
                row |= {
                    f"{prefix}from_timestamp": start,
                    f"{prefix}to_timestamp": start + row["length"] / self._fps,
                }
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
            target = (
                self._folder
                / f"videos/{image_key(camera)}/{_FILE.format(chunk_index=0, file_index=0)}.mp4"
            )
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
        tasks = pa.table(
            {
                "task_index": pa.array(list(self._instructions.values())),
                "task": list(self._instructions),
            }
        )
        kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
        # lerobot looks instructions up in the frame's index; this note makes pandas restore it
        pandas_index = {
            "index_columns": ["task"],
            "column_indexes": [],
            "pandas_version": "2.0.0",
            "columns": [
                {"name": n, "field_name": n, "pandas_type": p, "numpy_type": q, "metadata": None}
                for n, (p, q) in kinds.items()
            ],
        }
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(pandas_index)})
        pa.parquet.write_table(tasks, meta / "tasks.parquet")
        counters = np.arange(self._frames)
        lengths = [row["length"] for row in self._episodes]
        task_of = [self._instructions[row["tasks"][0]] for row in self._episodes]
        frame_index = np.concatenate([np.arange(n) for n in lengths])
        whole = {
            **{k: np.concatenate(v) for k, v in self._vectors.items()},
            "timestamp": frame_index[:, None] / self._fps,
            "frame_index": frame_index[:, None],
            "episode_index": np.repeat(np.arange(len(lengths)), lengths)[:, None],
            "index": counters[:, None],
            "task_index": np.repeat(task_of, lengths)[:, None],
        }
        stats = {k: feature_statistics(v) for k, v in whole.items()}
        stats |= {
            image_key(c): image_statistics(h, self._histogram_frames[c])
            for c, h in self._histograms.items()
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": self.embodiment.name,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._instructions),
            "chunks_size": _CHUNK_FILES,
            "data_files_size_in_mb": _DATA_FILE_BYTES >> 20,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": f"data/{_FILE}.parquet",
            "video_path": f"videos/{{video_key}}/{_FILE}.mp4" if self.video else None,
            "features": self._features,
        }
        for name, value in (
            ("info", info),
            ("stats", _lists(stats)),
            ("embodiment", self.embodiment.to_dict()),
            *([(KEPT_OUT, {LAST: self._kept_out})] if self._kept_out else []),
        ):
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
                f"Could not write the dataset {self.path}: {reason(error)}. The disk has "
                f"{free:.2f} GiB free there"
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
        self._container = av_package().open(str(path), "w")
        self._rate = Fraction(fps).limit_denominator(1000)
        self._stream: Any = None
        self._count = 0

    def add(self, frames: np.ndarray) -> None:
        if self._stream is None:
            self._stream = self._container.add_stream(
                "libx264",
                rate=self._rate,
                options={"crf": "15", "preset": "veryfast", "g": "2", "bf": "0"},
            )
            self._stream.height, self._stream.width = frames.shape[1:3]
            self._stream.pix_fmt = "yuv420p"
        for image in frames:
            frame = av_package().VideoFrame.from_ndarray(
                np.ascontiguousarray(image), format="rgb24"
            )
            frame.pts, frame.time_base = self._count, 1 / self._rate
            self._container.mux(self._stream.encode(frame))
            self._count += 1

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode())
        self._container.close()
