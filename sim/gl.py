"""Choosing an OpenGL backend for off-screen rendering, before anything imports mujoco.

mujoco and robosuite read ``MUJOCO_GL`` once, when they are imported. `ensure_backend` sets it: the
user's own choice is kept, else the first backend that can render in a child process is taken. A
child process tries each candidate because a broken GL driver may end the process that loads it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from vla_rl.errors import MissingDependency

CANDIDATES = ("egl", "osmesa")
PACKAGES = {"egl": "libegl1", "osmesa": "libosmesa6"}
# words for backends that draw in a window
_WINDOWS = ("glfw", "glx", "1", "on", "true", "enable", "enabled")
_OFF = ("0", "off", "false", "disable", "disabled")
# what a parent process found, so that its workers need not probe again
_REMEMBERED = "VLA_RL_MUJOCO_GL"
_BOUND: set[Any] = set()  # classes of `draw_in_own_contexts`

# Standard library only (python -I -S): some tens of milliseconds. The steps are those of mujoco's
# own contexts.
_PROBES = {
    "egl": """
import ctypes as c
egl = c.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = c.c_void_p
def extension(name, restype, *argtypes):
    address = egl.eglGetProcAddress(name)
    assert address, name.decode() + " is missing"
    return c.CFUNCTYPE(restype, *argtypes)(address)
query = extension(b"eglQueryDevicesEXT", c.c_uint, c.c_int, c.c_void_p, c.c_void_p)
display_of = extension(b"eglGetPlatformDisplayEXT", c.c_void_p, c.c_uint, c.c_void_p, c.c_void_p)
devices, count = (c.c_void_p * 32)(), c.c_int()
assert query(32, devices, c.byref(count)) and count.value, "no EGL device"
for name in ("eglInitialize", "eglBindAPI", "eglChooseConfig", "eglCreateContext", "eglMakeCurrent"):
    getattr(egl, name).restype = c.c_void_p if name == "eglCreateContext" else c.c_uint
for device in devices[: count.value]:
    display = c.c_void_p(display_of(0x313F, device, None))
    if display and egl.eglInitialize(display, None, None):
        break
else:
    raise SystemExit("no EGL device can be initialised")
wanted = (c.c_int * 5)(0x3033, 0x0001, 0x3040, 0x0008, 0x3038)  # a pbuffer surface, desktop OpenGL
config, found = c.c_void_p(), c.c_int()
assert egl.eglBindAPI(0x30A2), "no desktop OpenGL"
assert egl.eglChooseConfig(display, wanted, c.byref(config), 1, c.byref(found)) and found.value, "no EGL configuration"
context = c.c_void_p(egl.eglCreateContext(display, config, None, None))
assert context and egl.eglMakeCurrent(display, None, None, context), "no OpenGL context"
""",
    "osmesa": """
import ctypes as c
for name in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
    try:
        mesa = c.CDLL(name)
        break
    except OSError as error:
        problem = error
else:
    raise problem
mesa.OSMesaCreateContextExt.restype = c.c_void_p
assert mesa.OSMesaCreateContextExt(0x1908, 24, 8, 0, None), "no OSMesa context"
""",
}


def probe_backend(backend: str, timeout: float = 60.0) -> str | None:
    """Make a context of ``backend`` ("egl" or "osmesa") in a child process; None where it works,
    else what it said."""
    command = [sys.executable, "-I", "-S", "-c", _PROBES[backend]]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {run.returncode}"


def choose_backend() -> str:
    """The backend to render with: ``MUJOCO_GL`` where the user set it, else the first of
    `CANDIDATES` that works.

    Raises `MissingDependency`, which names the Debian packages, where none of them works, or the
    user's own cannot.
    """
    chosen, known = os.environ.get("MUJOCO_GL", "").strip().lower(), os.environ.get(_REMEMBERED, "")
    if chosen and chosen != known:
        _require_backend(chosen)
    if chosen or known:
        return chosen or known
    failures = {}
    for backend in CANDIDATES:
        problem = probe_backend(backend)
        if problem is None:
            return backend
        failures[backend] = problem
    detail = "; ".join(f"{backend}: {problem}" for backend, problem in failures.items())
    packages = " or ".join(PACKAGES[b] for b in CANDIDATES)
    raise MissingDependency(
        f"No OpenGL backend can render off-screen here ({detail}). Install {packages}: apt-get "
        f"install {PACKAGES['egl']} {PACKAGES['osmesa']}, or set MUJOCO_GL to a backend that works."
    )


def _require_backend(chosen: str) -> None:
    """Raise `MissingDependency` where what the user set as ``MUJOCO_GL`` is no backend, or draws
    nothing here."""
    remedy = "Unset MUJOCO_GL to choose one automatically, or set it to egl or osmesa"
    if chosen in CANDIDATES:
        problem = probe_backend(chosen)
        if problem is not None:
            problem = (
                f"cannot render off-screen here ({problem}); it needs {PACKAGES[chosen]} (apt-get "
                "install)"
            )
    elif chosen in _WINDOWS:
        displays = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        problem = (
            None if displays else "draws in a window, and there is no display (DISPLAY is not set)"
        )
    else:
        problem = (
            "switches rendering off, and a policy needs pictures"
            if chosen in _OFF
            else "is no OpenGL backend"
        )
    if problem is not None:
        raise MissingDependency(f"MUJOCO_GL={chosen} {problem}. {remedy}.")


@functools.lru_cache(maxsize=1)
def ensure_backend() -> str:
    """Fix the backend for this process and its children, before mujoco or robosuite is imported;
    returns its name."""
    backend = choose_backend()
    os.environ["MUJOCO_GL"] = backend
    os.environ[_REMEMBERED] = backend
    if backend in CANDIDATES:
        os.environ.setdefault("PYOPENGL_PLATFORM", backend)
    return backend


def make_context(size: int) -> Any:
    """A GL context of the chosen backend, whatever backend mujoco itself settled on when it was
    imported.

    Raises `MissingDependency` where the backend (``MUJOCO_GL`` as the user set it, say) cannot make
    one.
    """
    backend = ensure_backend()
    _draw_alone()
    try:
        if backend == "egl":
            from mujoco.egl import GLContext
        elif backend == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            from mujoco import GLContext
        return GLContext(size, size)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise MissingDependency(
            f"The OpenGL backend {backend!r} cannot render off-screen here ({error}). Unset "
            "MUJOCO_GL to choose one automatically, or install "
            f"{PACKAGES.get(backend, PACKAGES['egl'])} (apt-get install)."
        ) from error


def let_others_draw() -> None:
    """Prepare for an env that may draw by MuJoCo itself; where nothing can, it says so itself."""
    with contextlib.suppress(MissingDependency):
        ensure_backend()
    _draw_alone()


def _draw_alone() -> None:
    """In a worker the cores belong to the workers, not to Mesa's threads."""
    if multiprocessing.parent_process() is not None:
        os.environ.setdefault("LP_NUM_THREADS", "0")


def free_context(context: Any) -> None:
    """Free a context; says nothing where the display is gone already, as it may be when the
    interpreter exits."""
    try:
        context.free()
    except (
        Exception
    ):  # PyOpenGL's error classes depend on the backend, and no harm is left to be done
        context._context = None  # else the context's destructor tries again


def draw_in_own_contexts() -> None:
    """Let what Gymnasium's MuJoCo envs and robosuite's draw with bind its own GL context before each
    picture, wherever it was imported.

    By themselves they draw into whichever is current: with several envs in a process that is
    another's, and none once one of them was closed (black pictures).
    """
    if module := sys.modules.get("gymnasium.envs.mujoco.mujoco_rendering"):
        _bind_first(module.OffScreenViewer, lambda viewer: viewer.make_context_current())
    if module := sys.modules.get("robosuite.utils.binding_utils"):
        _bind_first(module.MjRenderContext, _bind_offscreen)


def _bind_first(kind: Any, bind: Callable[[Any], None]) -> None:
    if kind in _BOUND:
        return
    render = kind.render

    def render_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        bind(self)
        return render(self, *args, **kwargs)

    kind.render = render_here
    _BOUND.add(kind)


def _bind_offscreen(context: Any) -> None:
    import mujoco

    context.gl_ctx.make_current()
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context.con)
