"""robomimic's HDF5 (``data/demo_N`` with ``obs``, ``actions``), and LIBERO's, whose pictures and
rows are as its own env shows them (`sim.libero_demos`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.data.foreign.takes import Options, Take, colours, matrix, numbered
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.errors import MissingPackage, first_line
from vla_rl.specs import CameraSpec, EmbodimentSpec

# of robomimic's low-dimensional observations, in the order of its own default configs
_STATE = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_LIBERO = "sim.libero_demos:LiberoDemonstrations"


def h5py_package() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingPackage("h5py", "libero", "Reading HDF5 recordings") from None
    return h5py


def opened(path: Path) -> Any:
    """The file, to be read. Raises `DatasetError` for one that is no HDF5."""
    try:
        return h5py_package().File(path, "r")
    except OSError as error:
        raise DatasetError(f"{path} is no HDF5 file: {first_line(error)}") from None


def is_libero(path: Path) -> bool:
    with opened(path) as file:
        attributes = file["data"].attrs if "data" in file else {}
        return "bddl_file_name" in attributes or "macros_image_convention" in attributes


class Robomimic:
    """See `Source`. State is the observations that ``--rename KEY=observation.state`` names (joined
    by ``+``), else end effector and gripper of ``robot0``; all pictures are cameras, ``_image``
    left out of their names."""

    robot: str = ""

    def __init__(self, path: Path, options: Options):
        self.path, self.options = path, options
        with opened(path) as file:
            if "data" not in file or not _demos(file["data"]):
                raise DatasetError(f"{path} has no data/demo_N: it is none of robomimic's")
            data = file["data"]
            said = json.loads(str(data.attrs.get("env_args", "{}")))
            self.fps = options.fps or float(said.get("env_kwargs", {}).get("control_freq", 0))
            first = data[_demos(data)[0]]
            observed = list(first.get("obs", {}))
            named = [key for key, word in options.rename.items() if word == "observation.state"]
            self._state = named[0].split("+") if named else [k for k in _STATE if k in observed]
            if missing := [key for key in self._state or _STATE if key not in observed]:
                raise DatasetError(
                    f"{path} has no obs/{missing[0]}, it has {', '.join(observed)}: say what its "
                    "state is with --rename KEY+KEY=observation.state"
                )
            state = [matrix(first["obs"][key], key) for key in self._state]
            self.state_names = tuple(
                name for key, values in zip(self._state, state) for name in numbered(key, values)
            )
            self.action_names = numbered("action", matrix(first["actions"], "actions"))
            shown = [key for key in observed if first["obs"][key].ndim == 4]
            names = {key: options.ours(key).removesuffix("_image") for key in shown}
            self._cameras = {names[key]: key for key in shown if options.keeps(names[key])}

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        with opened(self.path) as file:
            for name in _demos(file["data"]):
                demo = file["data"][name]
                try:
                    yield self._take(name, demo, pictures)
                except (KeyError, OSError) as error:
                    raise DatasetError(f"{self.path}: {name}: {first_line(error)}") from None

    def _take(self, name: str, demo: Any, pictures: bool) -> Take:
        where = f"{self.path}: {name}"
        parts = [matrix(demo["obs"][key], f"{where}: obs/{key}") for key in self._state]
        shown = self._cameras if pictures else {}
        images = {
            camera: colours(np.asarray(demo["obs"][key]), f"{where}: obs/{key}")
            for camera, key in shown.items()
        }
        rewards = np.asarray(demo["rewards"]) if "rewards" in demo else np.zeros(0)
        success = bool((rewards > 0).any()) if rewards.size else None
        return Take(
            name,
            images,
            np.concatenate(parts, axis=1),
            matrix(demo["actions"], f"{where}: actions"),
            self.options.instruction,
            success,
        )


class Libero:
    """See `Source`: as ``env=libero`` reads these files."""

    robot: str = "libero_panda"
    fps: float = 20.0

    def __init__(self, path: Path, options: Options):
        self.path, self.options = path, options
        self._form = build.attribute(_LIBERO)
        known = build.attribute("sim.libero_demos:CAMERAS")
        with opened(path) as file:
            observed = file["data"][_demos(file["data"])[0]]["obs"]
            cameras = tuple(
                CameraSpec(name, *observed[key].shape[1:3])
                for name, (key, _) in known.items()
                if key in observed and options.keeps(options.ours(name))
            )
        self.state_names: tuple[str, ...] = (
            "x",
            "y",
            "z",
            "rx",
            "ry",
            "rz",
            "finger_0",
            "finger_1",
        )
        self.action_names: tuple[str, ...] = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")
        self._spec = EmbodimentSpec(
            name=self.robot,
            action_names=self.action_names,
            action_units=("as recorded",) * 7,
            action_low=(-1.0,) * 7,
            action_high=(1.0,) * 7,
            frame="other: as recorded",
            rotation="other: as recorded",
            gripper="other: as recorded",
            control_hz=self.fps,
            cameras=cameras,
            proprio_names=self.state_names,
        )

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        spec = self._spec if pictures else dataclasses.replace(self._spec, cameras=())
        for found in self._form.episodes(self.path, spec):
            ours = {self.options.ours(name): frames for name, frames in found["images"].items()}
            yield Take(
                found["name"],
                ours,
                found["proprio"],
                found["actions"],
                found["instruction"] or self.options.instruction,
                bool(found["success"]),
            )


def _demos(data: Any) -> Sequence[str]:
    names = [name for name in data if name.rpartition("_")[2].isdigit()]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))
