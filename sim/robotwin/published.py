"""RoboTwin's published demonstrations and those that its own scripts collect: HDF5 and JSON, no
pickle.

A folder per task and setting, in one of two layouts, which is found out for each file:

- the older one, of ``script/collect_data.py``: ``data/episode<i>.hdf5`` with
  ``joint_action/vector`` float64 [T a], the commanded state (left arm, its gripper, right arm, its
  gripper), and ``observation/<camera>/rgb`` [T]; beside it ``instructions/episode<i>.json`` with
  lists of texts, "seen" and "unseen"
- that of main's ``scripts/collect_data.py`` since August 2026 (XPolicyLab's): ``data/episode_<i, 7
  digits>.hdf5`` with the same state in four parts, float32 [T - 1, n] each, in ``state`` for the
  frames but the last and in ``action`` for those but the first, ``vision/<camera>/colors`` [T - 1],
  cameras under other names, and the seen texts in ``instructions``

Pictures are JPEG files padded with zero bytes to one length. RoboTwin hands RGB to OpenCV's
encoder, which takes it for BGR, so a JPEG of it shows red as blue until it is turned back, in both
layouts. An action is the next frame's commanded state.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.errors import EmbodimentMismatch, MissingPackage, UserError
from vla_rl.specs import CameraSpec, EmbodimentSpec

_NUMBER = re.compile(r"episode_?(\d+)\.hdf5")
# arm, gripper
_PARTS = (
    "left_arm_joint_states",
    "left_ee_joint_states",
    "right_arm_joint_states",
    "right_ee_joint_states",
)
# of main
_CAMERAS = {
    "cam_head": "head_camera",
    "cam_left_wrist": "left_camera",
    "cam_right_wrist": "right_camera",
}


def files(folder: Path) -> dict[int, Path]:
    """{number: HDF5 file} of a task's folder, in order. `UserError` where there is none."""
    found = {
        int(match[1]): file
        for file in (folder / "data").glob("*.hdf5")
        if (match := _NUMBER.fullmatch(file.name))
    }
    if not found:
        raise UserError(
            f"{folder} has no data/episode0.hdf5 or data/episode_0000000.hdf5: name the folder of "
            "one task and setting of RoboTwin's data, which has the folder data in it"
        )
    return dict(sorted(found.items()))


def episodes(
    folder: Path, embodiment: EmbodimentSpec, task: str, limit: int = 0
) -> Iterator[dict[str, Any]]:
    """The demonstrations in ``folder``, the first ``limit`` of them (0: all), each as a collector
    returns it.

    The one of number i is told with the i-th of its seen instructions, around again after the last;
    ``init_state_id`` is i. Raises `EmbodimentMismatch` for another robot, camera or size,
    `UserError` for a damaged file.
    """
    try:
        import h5py
    except ImportError:
        raise MissingPackage("h5py", "libero", "Reading RoboTwin's HDF5 demonstrations") from None
    if embodiment.name.endswith("_measured"):
        raise EmbodimentMismatch(
            f"{folder} holds the commanded state of the joints: use env.state=commanded"
        )
    if embodiment.frame != "joints":
        raise EmbodimentMismatch(
            f"{folder} is read as joint targets, and {embodiment.name} takes "
            "others: env.control=qpos"
        )
    for number, file in list(files(folder).items())[: limit or None]:
        told = folder / "instructions" / f"episode{number}.json"
        try:
            with h5py.File(file, "r") as opened:
                told = file if "vision" in opened else told
                commanded, encoded, texts = (
                    _of_main(opened) if told == file else _older(opened, told)
                )
                _check(file, commanded, set(encoded), embodiment)
                images = {
                    camera.name: _pictures(
                        opened[encoded[camera.name]][: len(commanded) - 1],
                        camera,
                        len(commanded) - 1,
                    )
                    for camera in embodiment.cameras
                }
        except (OSError, KeyError, ValueError, TypeError) as error:
            either = f"{file} or {told}" if told != file and told.exists() else file
            raise UserError(
                f"{either} is not RoboTwin's, or it is damaged ({error}): fetch it again"
            ) from error
        if not (texts := [text for text in texts if text]):
            raise UserError(
                f"{told} has no seen instruction: write them with the checkout's "
                "gen_episode_instructions.sh"
            )
        yield {
            "images": images,
            "proprio": commanded[:-1],
            "actions": commanded[1:],
            "instruction": texts[number % len(texts)],
            "success": True,  # RoboTwin keeps no other
            "task_id": task,
            "init_state_id": number,
        }


def contents(file: Path) -> Iterator[dict[str, Any]]:
    """What can be checked of one file without a robot: ``name``, ``actions`` and ``proprio`` [T a],
    ``instruction`` (its first), ``success``, ``pictures`` {camera: (dtype, how many)}; no picture
    is decoded."""
    try:
        import h5py
    except ImportError:
        raise MissingPackage("h5py", "libero", "Reading RoboTwin's HDF5 demonstrations") from None
    match = _NUMBER.fullmatch(file.name)
    told = file.parent.parent / "instructions" / f"episode{int(match[1]) if match else 0}.json"
    with h5py.File(file, "r") as opened:
        commanded, encoded, texts = _of_main(opened) if "vision" in opened else _older(opened, told)
        steps = max(len(commanded) - 1, 0)
        yield {
            "name": file.stem,
            "actions": commanded[1:],
            "proprio": commanded[:-1],
            "instruction": next((text for text in texts if text), ""),
            "success": True,
            "pictures": {
                name: ("uint8", min(len(opened[place]), steps)) for name, place in encoded.items()
            },
        }


def _older(opened: Any, told: Path) -> tuple[np.ndarray, dict[str, str], list[str]]:
    """The commanded states [T a] of all frames, {camera: where its pictures are}, and the seen
    texts."""
    texts = json.loads(told.read_text(encoding="utf-8"))["seen"]
    commanded = np.asarray(opened["joint_action/vector"], np.float32)
    return commanded, {name: f"observation/{name}/rgb" for name in opened["observation"]}, texts


def _of_main(opened: Any) -> tuple[np.ndarray, dict[str, str], list[str]]:
    """The same of a file in main's layout. Its texts are a JSON list, or an array where a script
    converted an older file."""
    told = opened["instructions"].asstr()[()]
    texts = json.loads(told) if isinstance(told, str) else list(told)
    state, action = (
        np.concatenate([opened[f"{group}/{part}"] for part in _PARTS], axis=1)
        for group in ("state", "action")
    )
    if not np.array_equal(state[1:], action[:-1]):
        raise UserError(
            f"{opened.filename} has actions that are not the next frames' states, as "
            "process_data_xpolicylab.py makes them with --same-index-action: read the older files "
            "themselves"
        )
    commanded = np.concatenate([state, action[-1:]]).astype(np.float32)
    return (
        commanded,
        {_CAMERAS.get(name, name): f"vision/{name}/colors" for name in opened["vision"]},
        texts,
    )


def _check(
    file: Path, commanded: np.ndarray, cameras: set[str], embodiment: EmbodimentSpec
) -> None:
    width = embodiment.action_dim
    if commanded.ndim != 2 or commanded.shape[1] != width:
        raise EmbodimentMismatch(
            f"{file} holds {list(commanded.shape)} commanded states, and {embodiment.name} has "
            f"{width} numbers: {', '.join(embodiment.action_names)}. Choose the robot that it was "
            "made with: env.embodiment=..."
        )
    if len(commanded) < 2:
        raise ValueError(f"it has {len(commanded)} frames")
    missing = set(embodiment.camera_names) - cameras
    if missing:
        raise EmbodimentMismatch(
            f"{file} has the cameras {', '.join(sorted(cameras))}, and the env shows "
            f"{', '.join(embodiment.camera_names)}: set env.cameras=[...]"
        )


def _pictures(encoded: np.ndarray, camera: CameraSpec, frames: int) -> np.ndarray:
    """uint8 RGB [frames H W 3] of JPEG files."""
    from PIL import Image

    if len(encoded) < frames:
        raise ValueError(f"it has {len(encoded)} pictures of {camera.name} for {frames} states")
    opened = [Image.open(io.BytesIO(bytes(each))) for each in encoded]
    if odd := next((image.mode for image in opened if image.mode not in ("L", "RGB", "CMYK")), ""):
        raise EmbodimentMismatch(
            f"RoboTwin's data has pictures of {camera.name} that are no JPEG of 8 bits (Pillow's "
            f"mode {odd}): depth is no camera picture; set env.cameras=[...] to those with colours"
        )
    pictures = [np.asarray(image.convert("RGB"))[..., ::-1] for image in opened]
    if pictures[0].shape[:2] != (camera.height, camera.width):
        raise EmbodimentMismatch(
            f"RoboTwin's data has pictures of {pictures[0].shape[1]}x{pictures[0].shape[0]} px, "
            f"and the env shows {camera.width}x{camera.height}: set env.camera_type=..."
        )
    return np.stack(pictures)
