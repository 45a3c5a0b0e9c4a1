"""Choosing an OpenGL backend for off-screen rendering, before anything imports mujoco.

mujoco and robosuite read ``MUJOCO_GL`` once, when they are imported. `ensure_backend` sets it: the user's own choice is
kept, else the first backend that can render in a child process is taken. A child process tries each candidate because a
broken GL driver may end the process that loads it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

from vla_rl.errors import MissingDependency

CANDIDATES = ("egl", "osmesa")
PACKAGES = {"egl": "libegl1", "osmesa": "libosmesa6"}
_REMEMBERED = "VLA_RL_MUJOCO_GL"  # what a parent process found, so that its workers need not probe again

_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
assert renderer.render().shape == (16, 16, 3)
"""


def probe_backend(backend: str, timeout: float = 60.0) -> str | None:
    """Render one small picture with ``backend`` in a child process; None when it worked, else the last line it said."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        run = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {run.returncode}"


def choose_backend() -> str:
    """The backend to render with: ``MUJOCO_GL`` where the user set it, else the first of `CANDIDATES` that works.

    Raises `MissingDependency`, which names the Debian packages, where none of them works.
    """
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower() or os.environ.get(_REMEMBERED, "")
    if chosen:
        return chosen
    failures = {}
    for backend in CANDIDATES:
        problem = probe_backend(backend)
        if problem is None:
            return backend
        failures[backend] = problem
    detail = "; ".join(f"{backend}: {problem}" for backend, problem in failures.items())
    packages = " or ".join(PACKAGES[b] for b in CANDIDATES)
    raise MissingDependency(
        f"No OpenGL backend can render off-screen here ({detail}). Install {packages}: "
        f"apt-get install {PACKAGES['egl']} {PACKAGES['osmesa']}, or set MUJOCO_GL to a backend that works."
    )


@functools.lru_cache(maxsize=1)
def ensure_backend() -> str:
    """Fix the backend for this process and its children; call before importing mujoco or robosuite. Returns its name."""
    backend = choose_backend()
    os.environ["MUJOCO_GL"] = backend
    os.environ[_REMEMBERED] = backend
    if backend in CANDIDATES:
        os.environ.setdefault("PYOPENGL_PLATFORM", backend)
    return backend


def make_context(size: int) -> Any:
    """A GL context of the chosen backend, whatever backend mujoco itself settled on when it was imported."""
    backend = ensure_backend()
    if backend == "egl":
        from mujoco.egl import GLContext
    elif backend == "osmesa":
        from mujoco.osmesa import GLContext
    else:
        from mujoco import GLContext
    return GLContext(size, size)
