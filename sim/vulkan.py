"""Choosing a Vulkan driver for SAPIEN's renderer, before anything imports sapien (standard library
only).

SAPIEN's wheel brings the Vulkan loader and no driver. A user's own choice (``VK_DRIVER_FILES``,
``VK_ICD_FILENAMES``) is kept, then what the system has, then Mesa's lavapipe, which draws on the
CPU, in a folder of this Python's own: ``scripts/vulkan.sh`` puts it there, apart from the system's
Mesa, which other simulators draw with. A child process tries, because a driver may end the process
that loads it. Physics needs none of this as long as nothing is to be drawn.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from vla_rl.errors import MissingDependency, install_command, require_packages

_PLACE = Path("share") / "vla-rl" / "vulkan" / "lvp_icd.json"
# Where `scripts/vulkan.sh` puts it; a simulator under another Python (``slots.python``) takes the
# checkout's.
OWN_DRIVERS = (Path(sys.prefix) / _PLACE, Path(__file__).resolve().parent.parent / ".venv" / _PLACE)
CHOICES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
LEAST_MESA = "23.2"  # the first lavapipe that has what SAPIEN asks of a device
FIX = (
    "scripts/vulkan.sh, which takes Mesa's software driver from Debian into .venv; or install "
    f"mesa-vulkan-drivers {LEAST_MESA} or newer (Debian 12: the one in bookworm-backports)"
)
_REMEMBERED = "VLA_RL_VULKAN"  # what a parent process found, so that its workers need not try again
_ABSENT = "there is no Vulkan driver"

_PROBE = """
import sys, warnings
warnings.simplefilter("ignore")
import sapien
from sapien import render
scene = sapien.Scene([render.RenderSystem()])
if "draw" in sys.argv:
    render.set_camera_shader_dir(str(__import__("pathlib").Path(sapien.__file__).parent / "vulkan_shader" / "trivial"))
    body = render.RenderBodyComponent()
    body.attach(render.RenderShapeBox([1, 1, 1], render.RenderMaterial(base_color=[1, 0, 0, 1])))
    for component in (body, render.RenderCameraComponent(16, 16)):
        entity = sapien.Entity()
        entity.add_component(component)
        scene.add_entity(entity)
    entity.set_pose(sapien.Pose([-4, 0, 0]))
    scene.render_system.ambient_light = [1, 1, 1]
    scene.render_system.step()
    component.take_picture()
    picture = component.get_picture("Color")[..., :3]
    assert picture.max() > picture.min(), "it draws an empty picture"
"""


def require_sapien(purpose: str) -> None:
    """Raise `MissingPackage` where sapien is not installed; imports nothing."""
    require_packages("sapien", extra="dualarm", purpose=purpose)


def quiet_import(purpose: str) -> Any:
    """The sapien package, without its warning that it uses the Vulkan loader it brings.
    `MissingPackage` without it."""
    require_sapien(purpose)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("sapien")


def probe(driver: str = "", *, draw: bool = False, timeout: float = 180.0) -> str | None:
    """Open SAPIEN's renderer in a child process, and ``draw`` with it; None where it works, else
    what it said.

    ``driver``: a manifest (an ICD's JSON file) to use; empty takes what there is.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    if driver:
        environment |= dict.fromkeys(CHOICES, driver)
    command = [sys.executable, "-c", _PROBE, *(["draw"] if draw else [])]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
    last = lines[-1].removeprefix("RuntimeError: ") if lines else f"exit status {run.returncode}"
    return _ABSENT if "rendering device" in last or "ErrorIncompatibleDriver" in last else last


def own_driver() -> str:
    """The manifest of a driver that this project installed, or nothing."""
    return next((str(place) for place in OWN_DRIVERS if place.is_file()), "")


def choose_driver(instead: str = "") -> str:
    """The manifest to use, empty for what the loader finds by itself. Raises `MissingDependency`
    where nothing can draw; ``instead`` says what else can be done.
    """
    known = os.environ.get(_REMEMBERED)
    if known is not None:
        return known
    chosen = next((name for name in CHOICES if os.environ.get(name)), "")
    problem = probe()
    if problem is None:
        return ""
    if chosen:
        raise MissingDependency(
            f"SAPIEN cannot draw with {chosen}={os.environ[chosen]} ({problem}). Unset {chosen} to "
            f"choose a driver automatically.{instead}"
        )
    if driver := own_driver():
        own = probe(driver)
        if own is None:
            return driver
        problem = f"{problem}; {driver}: {own}"
    raise MissingDependency(
        f"SAPIEN cannot draw here ({problem}). Get a driver with {FIX}.{instead}"
    )


@functools.lru_cache(maxsize=1)
def ensure_driver(instead: str = "") -> str:
    """Fix the driver for this process and its children, before a renderer is made; returns its
    manifest, or nothing."""
    driver = choose_driver(instead)
    os.environ[_REMEMBERED] = driver
    if driver:
        os.environ.update(dict.fromkeys(CHOICES, driver))
    # a worker: the cores belong to the workers, not to Mesa's threads
    if multiprocessing.parent_process() is not None:
        os.environ.setdefault("LP_NUM_THREADS", "0")
    return driver


def check() -> tuple[str, str, str]:
    """For ``vla-rl doctor``: (status, detail, fix) of SAPIEN and of a picture drawn with it."""
    if importlib.util.find_spec("sapien") is None:
        return (
            "missing",
            "sapien is not installed (the dual-arm suite, RoboTwin)",
            install_command("dualarm", "sapien"),
        )
    problem, with_driver = probe(draw=True), ""
    if problem is not None and not any(os.environ.get(name) for name in CHOICES) and own_driver():
        problem, with_driver = probe(own_driver(), draw=True), " with a software driver of its own"
    if problem is None:
        return "ok", f"SAPIEN draws{with_driver}", ""
    return "fail", f"SAPIEN runs physics and cannot draw: {problem}", FIX
