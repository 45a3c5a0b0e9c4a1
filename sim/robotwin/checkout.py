"""A user's own RoboTwin checkout, handled from outside: what it lacks, what it needs on import, and
its hash.

Nothing of it is copied or changed. Its code reads assets below the folder ``ASSETS_PATH`` and the
working directory, reads two lists of objects as it is imported, imports packages that only point
clouds need, and chooses ray tracing for every camera. So worker processes work in a folder of their
own, which links to the assets that are there and has empty lists where there are none, and find a
stand-in where such a package is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import shaders
from sim.robotwin import branches, primitive_arm
from sim.robotwin.tasks import BOXES_ONLY
from sim.vulkan import quiet_import
from vla_rl.errors import ConfigError, MissingDependency, UserError

if TYPE_CHECKING:
    from sim.robotwin.settings import RoboTwinConfig

SHADERS = {"fast": "minimal", "default": "default", "paper": "rt"}  # by look
# Downloads of the checkout's own scripts, by the folder that they unpack into: name and size of the
# archive.
ARCHIVES = {
    "embodiments": ("embodiments.zip", "0.2 GB"),
    "objects": ("objects.zip", "3.7 GB"),
    "background_texture": ("background_texture.zip", "11 GB"),
}
_NEEDED = (
    "sapien",
    "mplib",
    "toppra",
    "torch",
    "transforms3d",
    "gymnasium",
    "trimesh",
    "yaml",
    "cv2",
    "h5py",
    "imageio",
)
_STAND_INS = ("open3d",)  # imported at the top of its camera module, used for point clouds alone
_NO_OBJECTS: dict[str, Any] = {
    "item_names": [],
    "list_of_items": {},
    "z_max": {},
    "radius": {},
    "z_offset": {},
}


class Checkout:
    """The checkout and the assets that a config names."""

    def __init__(self, config: RoboTwinConfig) -> None:
        self.config = config
        self.root = Path(config.root).expanduser().resolve() if config.root else Path()
        self.assets = (
            Path(config.assets).expanduser().resolve() if config.assets else self.root
        ) / "assets"
        self._folder: tempfile.TemporaryDirectory | None = None

    @functools.cached_property
    def branch(self) -> branches.Branch:
        return branches.detect(self.config.root)

    @property
    def path(self) -> str:
        """What of joint targets is one path from rest to rest, see `branches.PATHS`."""
        return self.config.path or self.branch.path

    def settings(self, name: str) -> Any:
        """The content of one of its setting files."""
        import yaml

        return yaml.safe_load(
            (self.root / self.branch.settings / f"{name}.yml").read_text(encoding="utf-8")
        )

    # --------------------------------------------------------------------------------------- checks
    def check(self) -> None:
        """Raise `UserError` for what is missing, with the remedy; imports neither the checkout
        nor its packages."""
        branches.detect(self.config.root)
        _check_tasks(self.config, self.root)
        _check_packages()
        self._check_assets()

    def _check_assets(self) -> None:
        c = self.config
        if c.embodiment != primitive_arm.NAME:
            known = self._embodiments()
            if c.embodiment not in known:
                names = ", ".join([*known, primitive_arm.NAME])
                raise UserError(
                    f"env.embodiment={c.embodiment!r} is unknown to the checkout: use "
                    f"one of {names}"
                )
            if not (self._robot_folder() / "config.yml").is_file():
                raise _missing(
                    self.assets / "embodiments",
                    f"env.embodiment={c.embodiment}",
                    f"env.embodiment={primitive_arm.NAME}",
                )
        if [task for task in c.tasks if task not in BOXES_ONLY] and not _filled(
            self.assets / "objects"
        ):
            needs = next(task for task in c.tasks if task not in BOXES_ONLY)
            raise _missing(
                self.assets / "objects",
                f"The task {needs}",
                f"one of the tasks of boxes alone ({', '.join(BOXES_ONLY)})",
            )
        if c.setting == "demo_randomized":
            for folder in ("background_texture", "objects"):
                if not _filled(self.assets / folder):
                    raise _missing(
                        self.assets / folder,
                        "env.setting=demo_randomized",
                        "env.setting=demo_clean",
                    )

    def _embodiments(self) -> dict[str, str]:
        """{name: folder, as the checkout names it}."""
        return {
            name: entry["file_path"] for name, entry in self.settings("_embodiment_config").items()
        }

    def _robot_folder(self) -> Path:
        if self.config.embodiment == primitive_arm.NAME:
            return Path("assets") / "embodiments" / primitive_arm.NAME  # in the workplace
        named = self._embodiments()[self.config.embodiment].removeprefix("./").rstrip("/")
        return self.assets.parent / named

    # -------------------------------------------------------------------------------------- loading
    def load(self) -> dict[str, Any]:
        """Make this process one that can import the checkout; returns the options that its tasks
        are set up with.

        Changes the working directory, so it is for worker processes. Checks everything first.
        """
        self.check()
        quiet_import("RoboTwin")
        workplace = self._workplace()
        os.chdir(workplace)
        os.environ["ASSETS_PATH"] = f"{workplace}{os.sep}"
        for name in _STAND_INS:
            if importlib.util.find_spec(name) is None:
                sys.modules[name] = types.ModuleType(name)
        _fix_look(self.config.look)
        sys.dont_write_bytecode = True  # not even a cache goes into the checkout
        sys.path.insert(0, str(self.root))
        self.branch.prepare()
        with _silent():
            base = importlib.import_module("envs._base_task").Base_Task
        self.branch.fix()
        if self.config.look == "fast":
            set_up = base.setup_scene
            base.setup_scene = lambda task, **options: set_up(task, **{"shadow": False, **options})
        return self._options()

    def task_class(self, task: str) -> type:
        with _silent():
            return getattr(importlib.import_module(f"envs.{task}"), task)

    def _workplace(self) -> Path:
        """A folder with ``assets`` in it: links to what there is, empty lists and the primitive
        arm for the rest."""
        self._folder = tempfile.TemporaryDirectory(prefix="vla-rl-robotwin-")
        assets = Path(self._folder.name) / "assets"
        assets.mkdir()
        for entry in sorted(self.assets.iterdir()) if self.assets.is_dir() else ():
            if entry.name not in ("embodiments", "objects"):
                (assets / entry.name).symlink_to(entry)
        for name in ("embodiments", "objects"):
            (assets / name).mkdir()
            for entry in (
                sorted((self.assets / name).iterdir()) if (self.assets / name).is_dir() else ()
            ):
                (assets / name / entry.name).symlink_to(entry)
        primitive_arm.write(assets / "embodiments" / primitive_arm.NAME)
        lists = {"objects/objaverse/list.json": _NO_OBJECTS, "objects/same.json": {}}
        for place, content in lists.items():
            if not (assets / place).exists():
                (assets / place).parent.mkdir(exist_ok=True)
                (assets / place).write_text(json.dumps(content), encoding="utf-8")
        return Path(self._folder.name)

    def _options(self) -> dict[str, Any]:
        """What ``setup_demo`` takes besides task and seed: the setting's file, robot and
        cameras."""
        import yaml

        c = self.config
        options = self.settings(c.setting)
        robot = self._robot_folder()
        described = yaml.safe_load((robot / "config.yml").read_text(encoding="utf-8"))
        heads = [
            camera for camera in described["static_camera_list"] if camera["name"] in c.cameras
        ]
        described["static_camera_list"] = heads  # the others would be drawn as well
        types_ = self.settings("_camera_config")
        if c.camera_type not in types_:
            known = ", ".join(types_)
            raise ConfigError(
                f"env.camera_type={c.camera_type!r} is unknown to the checkout: use one of {known}"
            )
        self.camera_size = (int(types_[c.camera_type]["h"]), int(types_[c.camera_type]["w"]))
        options["camera"] = {
            "head_camera_type": c.camera_type,
            "wrist_camera_type": c.camera_type,
            "collect_head_camera": "head_camera" in c.cameras,
            "collect_wrist_camera": bool({"left_camera", "right_camera"} & set(c.cameras)),
        }
        options["data_type"] = {"rgb": True, "qpos": True}
        return options | {
            "left_robot_file": str(robot),
            "right_robot_file": str(robot),
            "left_embodiment_config": described,
            "right_embodiment_config": described,
            "dual_arm_embodied": not c.distance,
            "embodiment_dis": c.distance,
            "embodiment_name": c.embodiment,
            "planner_backend": "mplib",
            "render_freq": 0,
        }

    def official_limits(self) -> dict[str, int]:
        return self.settings("_eval_step_limit")

    def fingerprint(self, task: str) -> str:
        """What a seed's fate depends on: the code of the task and beneath it, setting, robot and
        distance."""
        c, digest = self.config, hashlib.blake2b(digest_size=12)
        files = [self.root / "envs" / f"{task}.py", self.root / "envs" / "_base_task.py"]
        files += sorted((self.root / "envs" / "utils").glob("*.py")) + sorted(
            (self.root / "envs" / "robot").glob("*.py")
        )
        files.append(self.root / self.branch.settings / f"{c.setting}.yml")
        for file in files:
            digest.update(file.read_bytes())
        robot = (
            primitive_arm.urdf() + primitive_arm.config()
            if c.embodiment == primitive_arm.NAME
            else ""
        )
        if not robot:
            robot = (self._robot_folder() / "config.yml").read_text(encoding="utf-8")
        digest.update(f"{c.embodiment} {c.distance} {robot}".encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Remove the workplace; the working directory is the checkout then. May be called again."""
        if self._folder is not None:
            os.chdir(self.root)
            shutil.rmtree(self._folder.name, ignore_errors=True)
            self._folder = None


def _check_tasks(config: RoboTwinConfig, root: Path) -> None:
    for task in config.tasks:
        if not (root / "envs" / f"{task}.py").is_file():
            raise UserError(
                f"env.tasks: the checkout {config.root} has no task {task!r} (envs/{task}.py)"
            )


def _check_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    numpy = importlib.metadata.version("numpy")
    if not missing and not numpy.startswith("1."):
        missing = [f"numpy 1, as mplib, its planner, crashes with numpy {numpy}"]
    if missing:
        planner = " (mplib is its planner)" if "mplib" in missing else ""
        raise MissingDependency(
            f"RoboTwin needs {', '.join(missing)}{planner}, in the Python that simulates "
            f"({sys.executable}). mplib wants numpy 1, which does not go with the packages "
            "here: make a venv with sapien==3.0.3, mplib==0.2.1, numpy<2 and the others, and "
            "name its Python with slots.python=/path/to/venv/bin/python"
        )


def _filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _missing(folder: Path, who: str, instead: str) -> MissingDependency:
    archive, size = ARCHIVES[folder.name]
    return MissingDependency(
        f"{who} needs {folder}, which {archive} ({size}) of the data set "
        "TianxingChen/RoboTwin2.0 brings: the checkout's own script downloads it. Name a copy "
        f"with env.assets=FOLDER, or use {instead}."
    )


def _fix_look(look: str) -> None:
    """RoboTwin asks for its ray tracer whenever it makes a scene; it gets what the config
    says."""
    from sapien import render

    chosen, choose = shaders.pack(SHADERS[look]), render.set_camera_shader_dir
    render.set_camera_shader_dir = lambda _: choose(chosen)
    if look != "paper":
        render.set_ray_tracing_denoiser = lambda _: None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """RoboTwin prints what it could not import; what matters of that is checked before."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield
