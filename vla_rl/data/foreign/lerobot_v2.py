"""LeRobotDataset 2.0 and 2.1: an episode a Parquet file, a video an episode and camera."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.foreign.takes import Options, Take, colours, matrix
from vla_rl.data.lerobot_format import DatasetError, av_package, pyarrow_package
from vla_rl.data.lerobot_reader import flat_names
from vla_rl.errors import first_line
from vla_rl.files import read_json

VERSIONS = ("v2.0", "v2.1")


class LeRobotV2:
    """See `Source`."""

    def __init__(self, path: Path, options: Options):
        self.path, self.options = path, options
        self.info = read_json(path / "meta" / "info.json", "fetch the dataset again", DatasetError)
        self.robot = str(self.info.get("robot_type") or "")
        self.fps = float(self.info["fps"])
        features = self.info["features"]
        kinds = ("image", "video")
        vectors = [key for key, f in features.items() if f["dtype"] not in kinds]
        self._state = options.theirs("observation.state", vectors, ["observation.state"], path)
        self._action = options.theirs("action", vectors, ["action"], path)
        self.state_names = self._names(self._state)
        self.action_names = self._names(self._action)
        pictures = {k: f["dtype"] for k, f in features.items() if f["dtype"] in kinds}
        names = {key: options.ours(key).removeprefix("observation.images.") for key in pictures}
        kept = {key: name for key, name in names.items() if options.keeps(name)}
        self._cameras = {name: (key, pictures[key]) for key, name in kept.items()}
        lines = _text(path / "meta" / "tasks.jsonl").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        self._tasks = {int(row["task_index"]): str(row["task"]) for row in rows}

    def _names(self, key: str) -> tuple[str, ...]:
        feature = self.info["features"][key]
        size = int(np.prod(feature["shape"]))
        found = flat_names(feature.get("names")) or ()
        if len(found) == size == len(set(found)):
            return tuple(found)
        return tuple(f"{key.rpartition('.')[2]}_{i}" for i in range(size))

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        lines = _text(self.path / "meta" / "episodes.jsonl").splitlines()
        for line in lines:
            if line.strip():
                row = json.loads(line)
                yield self._take(int(row["episode_index"]), int(row["length"]), pictures)

    def _place(self, template: str, number: int, **more: str) -> Path:
        chunk = number // int(self.info.get("chunks_size", 1000))
        return self.path / template.format(episode_chunk=chunk, episode_index=number, **more)

    def _take(self, number: int, length: int, pictures: bool) -> Take:
        file = self._place(self.info["data_path"], number)
        try:
            table = pyarrow_package().parquet.read_table(file)
        except Exception as error:  # of pyarrow, of many kinds
            raise DatasetError(f"{file} cannot be read: {first_line(error)}") from None
        if table.num_rows != length:
            raise DatasetError(
                f"{file} has {table.num_rows} rows, and episodes.jsonl says {length}: fetch it "
                "again"
            )
        state, actions = (
            matrix(np.array(table[key].to_pylist()), f"{key} of {file}")
            for key in (self._state, self._action)
        )
        shown = self._cameras if pictures else {}
        images = {
            camera: self._video(key, number, length)
            if kind == "video"
            else _pictures(table[key].to_pylist(), f"{key} of {file}")
            for camera, (key, kind) in shown.items()
        }
        text = self._tasks.get(int(table["task_index"][0].as_py()), "")
        return Take(f"episode {number}", images, state, actions, text or self.options.instruction)

    def _video(self, key: str, number: int, length: int) -> np.ndarray:
        """The frames in order, one a row: their stamps are those of the rows."""
        file, av = self._place(self.info["video_path"], number, video_key=key), av_package()
        frames: list[np.ndarray] = []
        try:
            with av.open(str(file)) as video:
                first = None
                for frame in video.decode(video=0):
                    at = float(frame.pts * frame.time_base)
                    first = at if first is None else first
                    if abs((at - first) * self.fps - len(frames)) > 0.5:
                        raise DatasetError(
                            f"{file}: frame {len(frames)} is of {at - first:.3f} s, and the rows "
                            f"come at {self.fps:g} Hz: it was cut"
                        )
                    frames.append(frame.to_ndarray(format="rgb24"))
        except (OSError, ValueError) as error:
            raise DatasetError(f"{file} cannot be decoded: {first_line(error)}") from None
        if len(frames) != length:
            raise DatasetError(f"{file} has {len(frames)} frames for {length} rows: fetch it again")
        return np.stack(frames)


def _pictures(rows: list[Any], what: str) -> np.ndarray:
    from PIL import Image

    frames = []
    for i, row in enumerate(rows):
        try:
            frames.append(np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")))
        except Exception as error:
            raise DatasetError(f"{what}: row {i} is no picture: {first_line(error)}") from None
    return colours(np.stack(frames), what)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror}") from None
