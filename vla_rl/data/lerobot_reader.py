"""Reads a LeRobotDataset v3 folder."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.checks import Report, as_success
from vla_rl.data.demonstrations import DemonstrationDataset, DemonstrationEpisode
from vla_rl.data.frames import FrameCache, ImageReader, OnDisk, StoredFrames, VideoReader
from vla_rl.data.lerobot_format import (
    ACTION_KEY,
    AGAIN,
    IMAGE_PREFIX,
    SENT_KEY,
    STATE_KEY,
    DatasetError,
    image_key,
    is_depth,
    pyarrow_package,
)
from vla_rl.data.lerobot_pictures import inside, read_images, read_videos, require_file
from vla_rl.data.lerobot_rows import LeRobotRows, read_rows
from vla_rl.errors import EmbodimentMismatch, first_line
from vla_rl.files import read_embodiment as read_embodiment_file
from vla_rl.files import read_json, require_content
from vla_rl.types import CameraSpec, EmbodimentSpec

Choose = Callable[[Sequence[DemonstrationEpisode], Tensor], Sequence[Tensor | None]]
"""(episodes, actions [n a]) → for each episode the control steps to read, bool [length], or None
to leave it out."""


def read_embodiment(path: str | Path) -> EmbodimentSpec | None:
    """The embodiment a dataset was written with; None for a folder of another tool."""
    file = Path(path) / "meta" / "embodiment.json"
    return read_embodiment_file(file, AGAIN, DatasetError) if os.path.lexists(file) else None


def episode_lengths(path: str | Path) -> dict[str, list[int]]:
    """{task id: control steps of each episode that did not fail} of a LeRobotDataset v3 folder,
    from its metadata alone.

    The task is "" in datasets of other tools, which name none; empty where the folder is no such
    dataset.
    """
    files = sorted((Path(path) / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        return {}
    pa = pyarrow_package()
    lengths: dict[str, list[int]] = {}
    for file in files:
        require_content(file, DatasetError)
        try:
            for row in pa.parquet.read_table(file).to_pylist():
                if as_success(row.get("success")) is not False:
                    lengths.setdefault(row.get("task_id") or "", []).append(int(row["length"]))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"{file} is damaged: {_said(error)}. Write or fetch the dataset again."
            ) from error
    return lengths


def load_demonstrations(
    path: str | Path,
    expected_embodiment: EmbodimentSpec | None = None,
    chunk_length: int = 1,
    *,
    features: Mapping[str, str] | None = None,
    choose: Choose | None = None,
    texts: Collection[str] = (),
    disk: OnDisk | None = None,
) -> DemonstrationDataset:
    """Read a LeRobotDataset v3 folder, without the hub and without lerobot.

    Numbers are read and checked first (`vla_rl.data.checks`); of the pictures only those of rows
    that are kept are decoded.

    Args: path: The dataset's folder (the one that contains ``meta/``). expected_embodiment: The
        robot the data must fit: names of actions and proprio, cameras and their sizes, and
            control rate; with ``meta/embodiment.json`` also frame, units and bounds. Further
            cameras are ignored. None: the one the dataset was written with.
        chunk_length: Actions per decision, h. features: {camera: image feature} of a foreign
        dataset whose meaning is known; then sizes are compared, but
            neither names nor control rate.
        choose: Which episodes and control steps are read (None: all). What they are numbered by is
        their place among all. texts: What the run that would learn from them asks its tasks for
        with (none: any); not one of them is an error. disk: Where pictures stay that are more than
        may be held in memory (None: all are held).
    Raises: EmbodimentMismatch: the dataset is of another robot; the message shows both sides.
        DatasetError: the folder is missing, incomplete, damaged or of another version, or its
        contents are no
            demonstrations; the message names episode, row and key.
    """
    path = Path(path)
    info, spec, keys, rows, report = _checked(path, expected_embodiment, features, texts)
    report.require()
    with damage(path):
        whole = [torch.ones(e.length, dtype=torch.bool) for e in rows.episodes]
        actions = torch.from_numpy(rows.vectors[ACTION_KEY].astype(np.float32))
        keep = whole if choose is None else choose(rows.episodes, actions)
        dataset = assembled(path, info, spec, keys, rows, keep, chunk_length, disk)
    dataset.notes += tuple(finding.line() for finding in report.warnings)
    return dataset


def assembled(
    path: Path,
    info: Mapping[str, Any],
    spec: EmbodimentSpec,
    keys: Mapping[str, str],
    rows: LeRobotRows,
    keep: Sequence[Tensor | None],
    chunk_length: int,
    disk: OnDisk | None = None,
) -> DemonstrationDataset:
    """The control steps that ``keep`` marks (as `Choose`), with their pictures; ``keys`` {camera:
    feature}. ``disk`` as `pictures`."""
    actions = torch.from_numpy(rows.vectors[ACTION_KEY].astype(np.float32))
    dataset = _without_pictures(rows, spec, actions, chunk_length)
    if not all(mask is not None and bool(mask.all()) for mask in keep):
        dataset = dataset.subset(keep)
    if dataset.by_person is not None:
        dataset.notes = (
            f"{path}: of {len(dataset)} control steps the {int(dataset.by_person.sum())} that a "
            "person chose are imitated, those of the policy that was helped are not",
        )
    masks = [
        np.zeros(e.length, bool) if k is None else k.numpy()
        for k, e in zip(keep, rows.episodes, strict=True)
    ]
    dataset.images = pictures(
        path, info, spec.cameras, keys, rows, np.flatnonzero(np.concatenate(masks)), disk
    )
    return dataset


def successes(
    episodes: Sequence[DemonstrationEpisode], _: Tensor | None = None
) -> list[Tensor | None]:
    """A `Choose` that leaves out what is marked as failed. Raises `DatasetError` where nothing
    else is there."""
    if all(e.success is False for e in episodes):
        raise DatasetError(
            f"all {len(episodes)} demonstrations are marked as failures (success=false), which are "
            "not imitated: name others, or set sft.failures=true"
        )
    return [
        None if e.success is False else torch.ones(e.length, dtype=torch.bool) for e in episodes
    ]


def check_dataset(
    path: str | Path,
    embodiment: EmbodimentSpec,
    texts: Collection[str] = (),
    failures: bool = True,
) -> Report:
    """What is wrong with a dataset for a run whose tasks are asked for by ``texts``; no picture is
    decoded.

    Raises what `load_demonstrations` would raise, but for damaged pictures; also, unless the run
    learns from ``failures``, where nothing else is there.
    """
    path = Path(path)
    info, _, keys, rows, report = _checked(path, embodiment, None, texts)
    with damage(path):
        require_videos(path, info, keys.values(), rows)
    report.require()
    if not failures:
        successes(rows.episodes)
    return report


def require_videos(
    path: Path, info: Mapping[str, Any], keys: Iterable[str], rows: LeRobotRows
) -> None:
    """Raise `DatasetError` where the file of a video feature among ``keys`` is missing."""
    for key in keys:
        if info["features"][key]["dtype"] == "video":
            for file in {_video_file(path, info, row, key) for row in rows.meta}:
                require_file(file)


def _checked(
    path: Path,
    expected: EmbodimentSpec | None,
    features: Mapping[str, str] | None,
    texts: Collection[str],
) -> tuple[dict[str, Any], EmbodimentSpec, dict[str, str], LeRobotRows, Report]:
    """Metadata, robot, {camera: feature}, numbers and what is wrong with them."""
    info = read_info(path)
    stored = read_embodiment(path)
    spec = expected or stored
    if spec is None:
        raise DatasetError(
            f"{path} does not say which robot it is of (no meta/embodiment.json). Pass the "
            "embodiment it must fit."
        )
    keys = (
        dict(features)
        if features is not None
        else {c.name: image_key(c.name) for c in spec.cameras}
    )
    with damage(path):
        require_fit(path, info, stored, spec, keys, compare_names=features is None)
        rows = read_rows(path, info)
        return info, spec, keys, rows, rows.report(info, spec, texts)


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """What the block raises because the folder is not what its metadata promise becomes a
    `DatasetError`."""
    try:
        yield
    except UnicodeEncodeError as error:  # (Arrow takes no other name)
        raise DatasetError(
            f"{error.object!r} has bytes that are no UTF-8: give that folder or file a name in "
            "UTF-8"
        ) from error
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        pyarrow_package().ArrowException,
    ) as error:
        raise DatasetError(
            f"{path} is incomplete or damaged: {_said(error)}. Write or fetch the dataset again."
        ) from error


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else first_line(error)


def _without_pictures(
    rows: LeRobotRows, spec: EmbodimentSpec, actions: Tensor, chunk_length: int
) -> DemonstrationDataset:
    proprio = torch.from_numpy(rows.vectors[STATE_KEY].astype(np.float32))
    index = torch.from_numpy(rows.task_index)
    dataset = DemonstrationDataset(
        spec, {}, proprio, actions, index, rows.instructions, rows.episodes, chunk_length
    )
    if SENT_KEY in rows.vectors:
        dataset.sent = torch.from_numpy(rows.vectors[SENT_KEY].astype(np.float32))
    if rows.by_base is not None:
        dataset.by_base = torch.from_numpy(rows.by_base)
    if (imitated := rows.imitated) is not None:
        dataset.by_person = torch.from_numpy(imitated)
    return dataset


def pictures(
    path: Path,
    info: Mapping[str, Any],
    cameras: Sequence[CameraSpec],
    keys: Mapping[str, str],
    rows: LeRobotRows,
    kept: np.ndarray,
    disk: OnDisk | None = None,
) -> dict[str, Tensor | StoredFrames]:
    """{camera: uint8 [k H W 3]} of the rows ``kept`` int64 [k], in rising order; ``keys`` {camera:
    feature}. With ``disk`` they stay there where they are more than it lets be held."""

    def where(row: int) -> str:
        return rows.where(int(kept[row]))

    if (
        disk is not None
        and len(kept) * sum(c.height * c.width * 3 for c in cameras) <= disk.ram_bytes
    ):
        disk = None
    held = FrameCache(disk.ram_bytes if disk else 0)
    images: dict[str, Tensor | StoredFrames] = {}
    for camera in cameras:
        key, hz = keys[camera.name], float(info["fps"])
        if info["features"][key]["dtype"] != "video":
            stored = path, rows.files, key, camera, rows.places[kept], where
            images[camera.name] = (
                StoredFrames(ImageReader(*stored, disk.folder), np.arange(len(kept)), held)
                if disk is not None
                else read_images(*stored)
            )
            continue
        files, file_of, times = _in_videos(path, info, key, rows, kept)
        if disk is not None:
            reader = VideoReader(files, camera, file_of, times, hz, where)
            images[camera.name] = StoredFrames(reader, np.arange(len(kept)), held)
        else:
            wanted = {file: np.flatnonzero(file_of == i) for i, file in enumerate(files)}
            joined = {file: (mine, times[mine]) for file, mine in wanted.items()}
            images[camera.name] = read_videos(path, camera, joined, len(kept), hz, where)
    return images


def first_pictures(
    path: Path,
    info: Mapping[str, Any],
    cameras: Sequence[CameraSpec],
    keys: Mapping[str, str],
    rows: LeRobotRows,
    most: int,
) -> dict[str, np.ndarray]:
    """{camera: uint8 [k H W 3]}: what episodes begin with, of at most ``most`` that lie evenly;
    the rest as `pictures`."""
    episodes = rows.episodes
    chosen = np.unique(
        np.linspace(0, len(episodes) - 1, min(len(episodes), most)).round().astype(int)
    )
    kept = np.array([episodes[i].start for i in chosen], np.int64)
    found = pictures(path, info, cameras, keys, rows, kept)
    return {name: np.asarray(frames) for name, frames in found.items()}


def _in_videos(
    path: Path, info: Mapping[str, Any], key: str, rows: LeRobotRows, kept: np.ndarray
) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """(files of a video feature, which of them each row is in int32 [k], its time there [k] s).
    Raises `DatasetError` for a file that is missing."""
    files: dict[Path, int] = {}
    file_of, times = np.zeros(len(kept), np.int32), np.zeros(len(kept), np.float64)
    for e, meta in zip(rows.episodes, rows.meta, strict=True):
        first, last = np.searchsorted(kept, (e.start, e.start + e.length))
        if first < last:
            file_of[first:last] = files.setdefault(_video_file(path, info, meta, key), len(files))
            begin = float(meta[f"videos/{key}/from_timestamp"])
            times[first:last] = begin + rows.stamps[kept[first:last]].astype(np.float64)
    for file in files:
        require_file(file)
    return list(files), file_of, times


def _video_file(path: Path, info: Mapping[str, Any], meta: Mapping[str, Any], key: str) -> Path:
    chunk, index = (int(meta[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index"))
    return inside(
        path, str(info["video_path"]).format(video_key=key, chunk_index=chunk, file_index=index)
    )


def read_info(path: Path) -> dict[str, Any]:
    file = path / "meta" / "info.json"
    if not os.path.lexists(file):
        raise DatasetError(
            f"{path} is not a LeRobotDataset folder: it has no meta/info.json. Name the folder "
            "that contains meta/ and data/, or collect demonstrations with 'vla-rl collect'."
        )
    info = read_json(file, AGAIN, DatasetError)
    if not isinstance(info.get("codebase_version"), str) or not isinstance(
        info.get("features"), dict
    ):
        raise DatasetError(
            f"{file} is damaged (it names no codebase_version or no features): {AGAIN}"
        )
    if wrong := [name for name, told in info["features"].items() if not isinstance(told, dict)]:
        raise DatasetError(f"{file} is damaged (it says nothing of {wrong[0]}): {AGAIN}")
    version = info["codebase_version"]
    if not version.startswith("v3."):
        raise DatasetError(
            f"{path} is a LeRobotDataset of version {version}, and this reads v3. Convert it: vla-rl "
            f"data convert {shlex.quote(str(path))} NEW"
        )
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise DatasetError(f"{file} is incomplete or damaged (its fps is {fps!r}): {AGAIN}")
    return info


def flat_names(names: Any) -> tuple[str, ...] | None:
    """Feature names as lerobot stores them: a list, or a dict of lists such as {"motors":
    [...]}."""
    if isinstance(names, Mapping):
        parts = [flat_names(v) for v in names.values()]
        return tuple(n for p in parts if p for n in p)
    return tuple(str(n) for n in names) if isinstance(names, list | tuple) else None


def require_fit(
    path: Path,
    info: Mapping[str, Any],
    stored: EmbodimentSpec | None,
    spec: EmbodimentSpec,
    keys: Mapping[str, str],
    compare_names: bool,
) -> None:
    features = info["features"]
    cameras = sorted(
        k.removeprefix(IMAGE_PREFIX)
        for k, f in features.items()
        if f.get("dtype") in ("image", "video")
    )
    lines = []
    if not set(keys.values()) <= set(features):
        lines.append(f"cameras: expected {sorted(spec.camera_names)}, the dataset has {cameras}")
    for c in spec.cameras:
        feature = features.get(keys[c.name], {})
        shape = list(feature.get("shape", []))
        if is_depth(feature):
            lines.append(f"camera {c.name}: expected colours, the dataset has depth")
        if shape and sorted(shape) != sorted([c.height, c.width, 3]):
            lines.append(
                f"camera {c.name}: expected {[c.height, c.width, 3]}, the dataset has {shape}"
            )
    for key, names in ((ACTION_KEY, spec.action_names), (STATE_KEY, spec.proprio_names)):
        found = flat_names(features[key].get("names")) if key in features else None
        if key not in features:
            lines.append(
                f"{key}: expected {list(names)}, the dataset has no such feature, only "
                f"{sorted(features)}"
            )
        elif compare_names and found is not None and found != names:
            lines.append(f"{key} names: expected {list(names)}, the dataset has {list(found)}")
        elif (found is None or not compare_names) and list(features[key]["shape"]) != [len(names)]:
            lines.append(
                f"{key} shape: expected {[len(names)]}, the dataset has {features[key]['shape']}"
            )
    if compare_names and float(info["fps"]) != float(spec.control_hz):
        lines.append(f"control_hz: expected {spec.control_hz}, the dataset has {info['fps']}")
    # names fit; units, frame, bounds … are known too, so compare them as well
    if not lines and stored is not None:
        lines = [d for d in spec.differences(stored) if not d.startswith("cameras:")]
    if lines:
        detail = "\n  ".join(lines)
        raise EmbodimentMismatch(
            f"The dataset {path} does not fit the embodiment {spec.name}:\n  {detail}\nUse "
            "demonstrations of the same robot, cameras and actions, or a policy and env made for "
            "this dataset."
        )
