"""LeRobotDataset v3, without the hub: what its reader and its writer share.

Layout (v3.0): ``meta/info.json`` (features), ``meta/stats.json``, ``meta/tasks.parquet``
(instructions), ``meta/episodes/chunk-*/file-*.parquet`` (one row an episode),
``data/chunk-*/file-*.parquet`` (one row a control step) and, where cameras are stored as video,
``videos/<camera>/chunk-*/file-*.mp4``. Ours adds ``meta/embodiment.json``, ``meta/kept_out.json``
(how many of each task's last episodes the run that collected them keeps out of training) and, per
episode, the columns ``success``, ``task_id`` and ``init_state_id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.errors import UserError
from vla_rl.types import EmbodimentSpec

STATE_KEY, ACTION_KEY, IMAGE_PREFIX = "observation.state", "action", "observation.images."
SENT_KEY = "sent"  # what the robot was told, where the label stayed clean
BY_BASE = "by_base"  # of each control step of hybrid rollouts: whether the frozen policy chose it
# of each control step of a session, and the number in it that says whether a person chose it
CONTROL, BY_PERSON = "control", "is_human"
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
KEPT_OUT = "kept_out"  # the file meta/kept_out.json
LAST = "last_episodes_of_each_task"  # its one key
AGAIN = "write or fetch the dataset again"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DEFAULT_FEATURES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


class DatasetError(UserError):
    """A dataset folder that cannot be written or read. The message names the folder and the
    remedy."""


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether a feature of ``meta/info.json`` holds distances in place of colours, as any
    lerobot marks it."""
    info = feature.get("info") or {}
    return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))


def image_key(camera: str) -> str:
    return IMAGE_PREFIX + camera


def pyarrow_package() -> Any:
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def av_package() -> Any:
    import av

    return av


def lerobot_features(
    embodiment: EmbodimentSpec,
    video: bool = False,
    extra: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """The ``features`` table of ``meta/info.json`` for an embodiment, with ``extra`` vectors
    {key: names}."""
    kind = "video" if video else "image"
    features: dict[str, dict[str, Any]] = {}
    for c in embodiment.cameras:
        shape = [c.height, c.width, 3]
        features[image_key(c.name)] = {
            "dtype": kind,
            "shape": shape,
            "names": ["height", "width", "channels"],
        }
        if kind == "video":
            features[image_key(c.name)]["info"] = {
                "video.height": c.height,
                "video.width": c.width,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": embodiment.control_hz,
                "video.channels": 3,
                "has_audio": False,
            }
    vectors = {
        STATE_KEY: embodiment.proprio_names,
        ACTION_KEY: embodiment.action_names,
        **(extra or {}),
    }
    for key, names in vectors.items():
        features[key] = {"dtype": "float32", "shape": [len(names)], "names": list(names)}
    return features | {
        k: {"dtype": v, "shape": [1], "names": None} for k, v in _DEFAULT_FEATURES.items()
    }
