"""RoboTwin's published demonstrations, as its own ``script/collect_data.py`` writes them: HDF5 and JSON, no pickle.

A folder per task and setting: ``data/episode<i>.hdf5`` with ``joint_action/vector`` float64 [T a], the commanded state (left
arm, its gripper, right arm, its gripper), and ``observation/<camera>/rgb`` [T], JPEG files padded with zero bytes to one
length; ``instructions/episode<i>.json`` with lists of texts, "seen" and "unseen". RoboTwin hands RGB to OpenCV's encoder,
which takes it for BGR, so a JPEG of it shows red as blue until it is turned back. An action is the next frame's commanded
state.
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
from vla_rl.specs import EmbodimentSpec

_NUMBER = re.compile(r"episode(\d+)\.hdf5")


def files(folder: Path) -> dict[int, Path]:
    """{number: HDF5 file} of a task's folder, in order. `UserError` where there is none."""
    found = {int(match[1]): file for file in (folder / "data").glob("*.hdf5") if (match := _NUMBER.fullmatch(file.name))}
    if not found:
        raise UserError(
            f"{folder} has no data/episode0.hdf5: name the folder of one task and setting of RoboTwin's data, which has the "
            "folders data and instructions in it"
        )
    return dict(sorted(found.items()))


def episodes(folder: Path, embodiment: EmbodimentSpec, task: str, limit: int = 0) -> Iterator[dict[str, Any]]:
    """The demonstrations in ``folder``, the first ``limit`` of them (0: all), each as a collector returns it.

    The one of number i is told with the i-th of its seen instructions, around again after the last; ``init_state_id`` is i.
    Raises `EmbodimentMismatch` for another robot, camera or size, `UserError` for a damaged file.
    """
    try:
        import h5py
    except ImportError:
        raise MissingPackage("h5py", "libero", "Reading RoboTwin's HDF5 demonstrations") from None
    if embodiment.name.endswith("_measured"):
        raise EmbodimentMismatch(f"{folder} holds the commanded state of the joints: use env.state=commanded")
    if embodiment.frame != "joints":
        raise EmbodimentMismatch(f"{folder} is read as joint targets, and {embodiment.name} takes others: env.control=qpos")
    for number, file in list(files(folder).items())[: limit or None]:
        told = folder / "instructions" / f"episode{number}.json"
        try:
            texts = json.loads(told.read_text(encoding="utf-8"))["seen"]
            with h5py.File(file, "r") as opened:
                commanded = np.asarray(opened["joint_action/vector"], np.float32)
                _check(file, commanded, set(opened["observation"]), embodiment)
                images = {
                    camera.name: _pictures(opened[f"observation/{camera.name}/rgb"][:-1], (camera.height, camera.width))
                    for camera in embodiment.cameras
                }
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{file} or {told} is not RoboTwin's, or it is damaged ({error}): fetch it again") from error
        if not texts:
            raise UserError(f"{told} has no seen instruction: write them with the checkout's gen_episode_instructions.sh")
        yield {
            "images": images,
            "proprio": commanded[:-1],
            "actions": commanded[1:],
            "instruction": texts[number % len(texts)],
            "success": True,  # RoboTwin keeps no other
            "task_id": task,
            "init_state_id": number,
        }


def _check(file: Path, commanded: np.ndarray, cameras: set[str], embodiment: EmbodimentSpec) -> None:
    width = embodiment.action_dim
    if commanded.ndim != 2 or commanded.shape[1] != width:
        raise EmbodimentMismatch(
            f"{file} holds {list(commanded.shape)} commanded states, and {embodiment.name} has {width} numbers: "
            f"{', '.join(embodiment.action_names)}. Choose the robot that it was made with: env.embodiment=..."
        )
    if len(commanded) < 2:
        raise ValueError(f"it has {len(commanded)} frames")
    missing = set(embodiment.camera_names) - cameras
    if missing:
        raise EmbodimentMismatch(
            f"{file} has the cameras {', '.join(sorted(cameras))}, and the env shows {', '.join(embodiment.camera_names)}: "
            "set env.cameras=[...]"
        )


def _pictures(encoded: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 RGB [T H W 3] of JPEG files."""
    from PIL import Image

    pictures = [np.asarray(Image.open(io.BytesIO(bytes(each))).convert("RGB"))[..., ::-1] for each in encoded]
    if pictures[0].shape[:2] != size:
        raise EmbodimentMismatch(
            f"RoboTwin's data has pictures of {pictures[0].shape[1]}x{pictures[0].shape[0]} px, and the env shows "
            f"{size[1]}x{size[0]}: set env.camera_type=..."
        )
    return np.stack(pictures)
