"""The published LIBERO demonstrations: HDF5 files (Liu et al. 2023, arXiv 2306.03310) and their
LeRobot conversions.

HDF5, one file ``<task>_demo.hdf5`` per task, robomimic's layout: ``data/demo_<i>/actions`` float [T
7] as sent to the env (−1 opens, +1 closes the gripper), ``data/demo_<i>/obs/{agentview_rgb,
eye_in_hand_rgb}`` uint8 [T H W 3], ``obs/ee_states`` [T 6] (position, rotation vector),
``obs/gripper_states`` [T 2]. Two kinds exist:

- as LIBERO published them (128 pixels; the group ``data`` has the attribute
  ``macros_image_convention``): row t shows what was seen *after* action t (LIBERO's
  ``create_dataset.py`` records after each step), so action t + 1 goes with row t;
- replayed at 256 pixels with OpenVLA's ``regenerate_libero_dataset.py`` (no such attribute): row t
  was seen before action t.

Images are stored as the simulator renders them, upside down and mirrored; here they are turned by
180°, as every published evaluation and this project's LIBERO env do. LeRobot conversions hold them
turned already, under several names, and note 10 Hz although the demonstrations ran at 20 Hz. Needs
h5py for HDF5; `vla_rl.data` reads LeRobot folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sim.libero.tasks import instruction_of
from vla_rl.errors import EmbodimentMismatch, MissingPackage, UserError
from vla_rl.specs import EmbodimentSpec

# Camera of the env: its dataset in the HDF5 files, and the names of its feature in LeRobot
# conversions.
CAMERAS = {
    "agentview": ("agentview_rgb", ("observation.images.agentview", "observation.images.image")),
    "robot0_eye_in_hand": (
        "eye_in_hand_rgb",
        (
            "observation.images.robot0_eye_in_hand",
            "observation.images.image2",
            "observation.images.wrist_image",
        ),
    ),
}
NOOP_THRESHOLD = 1e-4


def moving_steps(actions: np.ndarray) -> np.ndarray:
    """bool [T]: the control steps that are no no-ops, by OpenVLA's rule
    (``regenerate_libero_dataset.py``).

    A no-op moves nothing (Euclidean norm of all but the gripper below 1e-4) and commands the
    gripper as the last step that was kept; the first step only has to move nothing.
    """
    keep, gripper = np.zeros(len(actions), bool), None
    still = np.linalg.norm(actions[:, :-1], axis=1) < NOOP_THRESHOLD
    for t, action in enumerate(actions):
        keep[t] = not still[t] or (gripper is not None and action[-1] != gripper)
        if keep[t]:
            gripper = action[-1]
    return keep


class LiberoDemonstrations:
    """What `vla_rl.data.published.load_published` needs to know about the published files."""

    moving_steps = staticmethod(moving_steps)

    @staticmethod
    def files(path: Path) -> list[Path]:
        """The HDF5 files that ``path`` names or contains (at any depth), in order; none for a
        LeRobot folder."""
        if path.is_file():
            return [path]
        return [] if (path / "meta").is_dir() else sorted(path.rglob("*.hdf5"))

    @staticmethod
    def task_name(file: Path) -> str:
        """The task's BDDL name."""
        return file.stem.removesuffix("_demo")

    @classmethod
    def instruction(cls, file: Path) -> str:
        """The instruction that the env gives for this task."""
        return instruction_of(cls.task_name(file))

    @staticmethod
    def features(features: Mapping[str, Any], embodiment: EmbodimentSpec) -> dict[str, str]:
        """{camera: the feature of a LeRobot conversion that shows it}; `EmbodimentMismatch`
        where one is missing."""
        found = {}
        for camera in embodiment.camera_names:
            names = CAMERAS.get(camera, ("", ()))[1]
            present = [name for name in names if name in features]
            if not present:
                images = sorted(name for name in features if "image" in name)
                raise EmbodimentMismatch(
                    f"the dataset has no image of camera {camera!r} "
                    f"({', '.join(names) or 'not a published camera'}), only {images}. Leave the "
                    "camera out with env.cameras=[...]"
                )
            found[camera] = present[0]
        return found

    @classmethod
    def episodes(
        cls, file: Path, embodiment: EmbodimentSpec, limit: int = 0
    ) -> Iterator[dict[str, Any]]:
        """The demonstrations of one HDF5 file in their order, the first ``limit`` of them (0: all).

        Each is what a collector returns: ``images`` {camera: uint8 [T H W 3]}, ``proprio`` float32
        [T 8], ``actions`` float32 [T 7], ``instruction``, ``success``, ``task_id`` (the BDDL name),
        ``init_state_id`` (its number). Raises `EmbodimentMismatch` (another camera size, absolute
        actions) and `UserError` (a damaged file).
        """
        try:
            import h5py
        except ImportError:
            raise MissingPackage("h5py", "libero", "Reading LIBERO's HDF5 demonstrations") from None
        if set(embodiment.action_low) != {-1.0} or set(embodiment.action_high) != {1.0}:
            raise EmbodimentMismatch(
                f"{file} holds relative actions in −1 … 1, the robot {embodiment.name} takes "
                f"{embodiment.action_low} … {embodiment.action_high}: use env.control_mode=relative"
            )
        try:
            with h5py.File(file, "r") as opened:
                data = opened["data"]
                published = "macros_image_convention" in data.attrs
                upright = str(data.attrs.get("macros_image_convention", "opengl")) == "opencv"
                for name in demo_names(data)[: limit or None]:
                    yield cls._episode(file, name, data[name], embodiment, published, upright)
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{file} is not a LIBERO demonstration file, or it is damaged ({error}): fetch it "
                "again"
            ) from error

    @classmethod
    def contents(cls, file: Path) -> Iterator[dict[str, Any]]:
        """What can be checked of each demonstration without a robot, pictures unread: ``name``,
        ``actions`` [T a], ``proprio`` [T p], ``instruction``, ``success``, ``pictures`` {camera:
        (dtype, how many)}."""
        try:
            import h5py
        except ImportError:
            raise MissingPackage("h5py", "libero", "Reading LIBERO's HDF5 demonstrations") from None
        with h5py.File(file, "r") as opened:
            for name in demo_names(opened["data"]):
                demo = opened["data"][name]
                actions, state = numbers(demo)
                shown = {key: values for key, values in demo["obs"].items() if values.ndim == 4}
                yield {
                    "name": name,
                    "actions": actions,
                    "proprio": state,
                    "instruction": cls.instruction(file),
                    "success": succeeded(demo),
                    "pictures": {
                        key: (str(values.dtype), len(values)) for key, values in shown.items()
                    },
                }

    @classmethod
    def _episode(
        cls,
        file: Path,
        name: str,
        demo: Any,
        embodiment: EmbodimentSpec,
        published: bool,
        upright: bool,
    ) -> dict[str, Any]:
        observed = demo["obs"]
        actions, state = numbers(demo)
        steps = slice(0, max(len(actions) - 1, 0)) if published else slice(None)
        images = {}
        for camera in embodiment.cameras:
            if camera.name not in CAMERAS:
                raise EmbodimentMismatch(
                    f"{file} has no camera {camera.name!r}, only {', '.join(CAMERAS)}"
                )
            if CAMERAS[camera.name][0] not in observed:
                raise EmbodimentMismatch(
                    f"{file}: {name} has no pictures of camera {camera.name} "
                    f"({CAMERAS[camera.name][0]}), only {', '.join(sorted(observed))}: leave the "
                    "camera out with env.cameras=[...]"
                )
            frames = observed[CAMERAS[camera.name][0]]
            if frames.dtype != np.uint8:
                raise EmbodimentMismatch(
                    f"{file}: {name} has pictures of camera {camera.name} as {frames.dtype}: "
                    "colours of 8 bits are needed, depth is no camera picture. Leave the camera "
                    "out with env.cameras=[...]"
                )
            if frames.shape != (len(actions), camera.height, camera.width, 3):
                raise EmbodimentMismatch(
                    f"{file}: {name} has images {frames.shape} of camera {camera.name}, expected "
                    f"{(len(actions), camera.height, camera.width, 3)}: set "
                    f"env.camera_size={frames.shape[1]}"
                )
            pixels = frames[steps]
            images[camera.name] = np.ascontiguousarray(
                pixels[:, :, ::-1] if upright else pixels[:, ::-1, ::-1]
            )
        if state.shape != (len(actions), embodiment.proprio_dim):
            raise EmbodimentMismatch(
                f"{file}: {name} has states {state.shape}, expected "
                f"{(len(actions), embodiment.proprio_dim)}"
            )
        return {
            "images": images,
            "proprio": state[steps],
            "actions": actions[1:] if published else actions,
            "instruction": cls.instruction(file),
            "success": succeeded(demo),
            "task_id": cls.task_name(file),
            "init_state_id": int(name.removeprefix("demo_")),
            "name": name,
            "file": str(file),
        }


def demo_names(data: Any) -> list[str]:
    """The demonstrations in an HDF5 group, by number."""
    return sorted(
        (n for n in data if n.startswith("demo_")), key=lambda n: int(n.removeprefix("demo_"))
    )


def numbers(demo: Any) -> tuple[np.ndarray, np.ndarray]:
    """Actions [T 7] and state [T 8] of a demonstration, as stored."""
    missing = [n for n in ("actions", "obs/ee_states", "obs/gripper_states") if n not in demo]
    if missing:
        raise EmbodimentMismatch(
            f"{demo.file.filename}: {demo.name.rpartition('/')[2]} has no {missing[0]}, so it is "
            "none of LIBERO's own (robomimic names its states otherwise): convert it to a "
            "LeRobotDataset v3"
        )
    parts = [np.asarray(demo[name]) for name in ("obs/ee_states", "obs/gripper_states")]
    if len({len(part) for part in parts}) > 1 or any(part.ndim != 2 for part in parts):
        raise EmbodimentMismatch(
            f"{demo.file.filename}: {demo.name.rpartition('/')[2]} has ee_states "
            f"{list(parts[0].shape)} and gripper_states {list(parts[1].shape)}: one row of each "
            "per action is needed. Fetch the file again"
        )
    return np.asarray(demo["actions"], np.float32), np.concatenate(parts, axis=1).astype(np.float32)


def succeeded(demo: Any) -> Any:
    """Whether a demonstration succeeded: its attribute ``success`` as it is, else whether any of
    its ``rewards`` is above 0; only successes were published, so True where it says neither."""
    if "success" in demo.attrs:
        return demo.attrs["success"]
    rewards = np.asarray(demo["rewards"]) if "rewards" in demo else np.zeros(0)
    return bool((rewards > 0).any()) if rewards.size else True
