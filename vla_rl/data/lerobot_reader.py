"""Reads a LeRobotDataset v3 folder."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.demonstrations import DemonstrationDataset, DemonstrationEpisode
from vla_rl.data.lerobot_format import (
    ACTION_KEY,
    AGAIN,
    IMAGE_PREFIX,
    SENT_KEY,
    STATE_KEY,
    DatasetError,
    av_package,
    image_key,
    pyarrow_package,
)
from vla_rl.errors import EmbodimentMismatch, first_line
from vla_rl.files import read_embodiment as read_embodiment_file
from vla_rl.files import read_json
from vla_rl.rollout.handover import BY_BASE
from vla_rl.types import EmbodimentSpec


def read_embodiment(path: str | Path) -> EmbodimentSpec | None:
    """The embodiment a dataset was written with; None for a folder of another tool."""
    file = Path(path) / "meta" / "embodiment.json"
    return read_embodiment_file(file, AGAIN, DatasetError) if os.path.lexists(file) else None


def episode_lengths(path: str | Path) -> dict[str, list[int]]:
    """{task id: control steps of each episode that did not fail} of a LeRobotDataset v3 folder, from its metadata alone.

    The task is "" in datasets of other tools, which name none; empty where the folder is no such dataset.
    """
    files = sorted((Path(path) / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        return {}
    pa = pyarrow_package()
    lengths: dict[str, list[int]] = {}
    for file in files:
        try:
            for row in pa.parquet.read_table(file).to_pylist():
                if row.get("success") is not False:
                    lengths.setdefault(row.get("task_id") or "", []).append(int(row["length"]))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"{file} is damaged: {_said(error)}. Write or fetch the dataset again.") from error
    return lengths


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
    pa = pyarrow_package()
    info = read_info(path)
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
    pa = pyarrow_package()
    info = read_info(path)
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
    except (OSError, LookupError, TypeError, ValueError, AttributeError, pyarrow_package().ArrowException) as error:
        raise DatasetError(f"{path} is incomplete or damaged: {_said(error)}. Write or fetch the dataset again.") from error


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else first_line(error)


def _read_demonstrations(
    path: Path, info: Mapping[str, Any], spec: EmbodimentSpec, keys: Mapping[str, str], chunk_length: int, pa: Any
) -> DemonstrationDataset:
    videos = [c for c, key in keys.items() if info["features"][key]["dtype"] == "video"]
    files = sorted((path / "data").glob("*/*.parquet"))
    columns = [STATE_KEY, ACTION_KEY, "episode_index", "task_index"] + [k for c, k in keys.items() if c not in videos]
    columns += [BY_BASE] if BY_BASE in info["features"] else []
    if info["features"].get(SENT_KEY, {}).get("shape") == [spec.action_dim]:  # (else it is somebody's own)
        columns.append(SENT_KEY)
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
    sent = [SENT_KEY] if SENT_KEY in columns else []
    vectors = {key: _vector_column(table, key, pa) for key in (STATE_KEY, ACTION_KEY, *sent)}
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
    dataset = DemonstrationDataset(
        spec, images, tensors[STATE_KEY], tensors[ACTION_KEY], task_index, instructions, episodes, chunk_length
    )
    if SENT_KEY in columns:
        dataset.sent = torch.from_numpy(vectors[SENT_KEY])
    if BY_BASE in columns:
        dataset.by_base = torch.from_numpy(table[BY_BASE].to_numpy().astype(bool))
    return dataset


def read_info(path: Path) -> dict[str, Any]:
    file = path / "meta" / "info.json"
    if not os.path.lexists(file):
        raise DatasetError(
            f"{path} is not a LeRobotDataset folder: it has no meta/info.json. Name the folder that contains meta/ and "
            f"data/, or collect demonstrations with 'vla-rl collect'."
        )
    info = read_json(file, AGAIN, DatasetError)
    if not isinstance(info.get("codebase_version"), str) or not isinstance(info.get("features"), dict):
        raise DatasetError(f"{file} is damaged (it names no codebase_version or no features): {AGAIN}")
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
    from PIL import Image

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
    av = av_package()
    chunk, index, start = (f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp"))
    out: np.ndarray | None = None
    offset = 0
    wanted: dict[str, Any] = {}
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
