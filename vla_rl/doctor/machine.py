"""``vla-rl doctor``: what works on this machine, and how to fix what does not.

Runs where nothing optional is installed. Whatever may crash, hang or ask a question (a GL driver, a
simulator's first import, a camera SDK) is tried in a child process with a time limit and nothing on
its standard input.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from dataclasses import dataclass, replace
from pathlib import Path

from vla_rl import build
from vla_rl.devices import free_memory_bytes
from vla_rl.errors import install_command
from vla_rl.monitoring.machine import available_cores, cpu_name, total_memory_bytes

OK, FAIL, MISSING = "ok", "fail", "missing"
GL_BACKENDS = ("egl", "osmesa", "glfw")
CORE = ("python", "packages", "torch", "gl", "robosuite")
# Finding → the packages that it stands on, whose versions must be such as vla-rl asks for.
_STANDS_ON = {
    "torch": ("torch",),
    "robosuite": ("robosuite", "mujoco", "numba", "termcolor"),
    "libero": ("lerobot", "h5py"),
    "dualarm": ("sapien",),
    "realsense": ("pyrealsense2",),
}
_GL_FIX = {
    "egl": "apt-get install -y libegl1 libgl1 (and, without a GPU, libgl1-mesa-dri)",
    "osmesa": "apt-get install -y libosmesa6",
    "glfw": "needs a display (DISPLAY) and: apt-get install -y libglfw3; not needed where egl or "
    "osmesa works",
}
_SCENE = (
    "<mujoco><visual><global offwidth='84' offheight='84'/></visual><worldbody><light pos='0 0 3'/>"
    "<geom type='plane' size='1 1 .1'/>"
    "<body pos='0 0 .3'><freejoint/><geom type='box' size='.1 .1 .1' rgba='1 0 0 1'/></body>"
    "<camera name='c' pos='0 -2 1' xyaxes='1 0 0 0 .5 1'/></worldbody></mujoco>"
)
_RENDER = f"""
import json, time
import mujoco
model = mujoco.MjModel.from_xml_string({_SCENE!r})
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 84, 84)
def draw():
    renderer.update_scene(data, 'c')
    return renderer.render()
image = draw()
started = time.perf_counter()
for _ in range(5):
    image = draw()
seconds = (time.perf_counter() - started) / 5
print(json.dumps({{"ms": seconds * 1e3, "spread": int(image.max()) - int(image.min())}}))
renderer.close()
"""
_ROBOSUITE = """
import json, pathlib, robosuite
root = pathlib.Path(robosuite.__file__).parent
from robosuite.models.arenas import TableArena
from robosuite.models.robots import Panda
TableArena(); Panda()
print(json.dumps({"version": robosuite.__version__, "assets": (root / "models" / "assets").is_dir()}))
"""
_REALSENSE = """
import json, pyrealsense2
devices = pyrealsense2.context().query_devices()
print(json.dumps({"cameras": [d.get_info(pyrealsense2.camera_info.name) for d in devices]}))
"""


@dataclass(frozen=True)
class Check:
    """One finding. ``status``: "ok", "fail" (broken, or needed and absent) or "missing" (optional
    and absent).

    ``fix`` says what to do about it; empty where there is nothing to do. ``core`` marks what the
    main job needs.
    """

    name: str
    status: str
    detail: str
    fix: str = ""
    core: bool = False


def doctor(timeout_s: float = 120.0) -> list[Check]:
    """All checks, in a fixed order. ``timeout_s`` limits each child process."""
    with ThreadPoolExecutor(3) as pool:  # the slow ones wait for child processes
        gl = [pool.submit(check_gl_backend, name, timeout_s) for name in GL_BACKENDS]
        others = [
            pool.submit(check_robosuite, timeout_s),
            *(
                pool.submit(check_env, name)
                for name in build.names("env")
                if build.env_entry(name).check
            ),
            pool.submit(check_realsense, timeout_s),
        ]
        first = [check_python(), check_packages(), check_torch(), check_gpu()]
        backends = [f.result() for f in gl]
        robosuite, *envs, realsense = (f.result() for f in others)
    packages = [
        check_package("lerobot", "lerobot", "LIBERO, policies and robots of lerobot"),
        check_package("ray", "ray", "training on several machines"),
        check_package("wandb", "wandb", "logging to Weights & Biases"),
    ]
    found = [
        *first,
        *backends,
        check_gl(backends),
        robosuite,
        *envs,
        *packages,
        realsense,
        check_memory(),
        check_disk(Path.cwd()),
    ]
    return [in_range(check, _STANDS_ON.get(check.name, ())) for check in found]


def exit_status(checks: Sequence[Check]) -> int:
    """0 where the main job can run (Python, torch, one GL backend, robosuite), else 1."""
    by_name = {c.name: c.status for c in checks}
    return int(any(by_name.get(name) != OK for name in CORE))


def listed(checks: Sequence[Check], width: int = 0) -> list[str]:
    """A line for each check, with the fix below what does not work; names take ``width``
    characters, or as many as the longest."""
    marks = {OK: "✓", FAIL: "✗", MISSING: "–"}
    width = width or max(len(c.name) for c in checks)
    lines = []
    for c in checks:
        lines.append(f"{marks[c.status]} {c.name.ljust(width)}  {c.detail}")
        if c.fix and c.status != OK:
            lines.append(f"  {' ' * width}  → {c.fix}")
    return lines


def render(checks: Sequence[Check]) -> str:
    """The checks as text, and what they come to."""
    lines = listed(checks)
    broken = [c.name for c in checks if c.name in CORE and c.status != OK]
    lines.append("")
    lines.append(
        f"The main job cannot run yet: {', '.join(broken)} {'is' if len(broken) == 1 else 'are'} "
        "not in order."
        if broken
        else "The main job can run here: vla-rl quickstart"
    )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- checks
def check_python() -> Check:
    version = platform.python_version()
    detail = (
        f"{version} on {platform.system()} {platform.machine()}, {available_cores()} cores, "
        f"{cpu_name()}"
    )
    return Check("python", OK, detail, core=True)


def check_packages() -> Check:
    """Whether all that vla-rl always needs is there, in versions that it asks for."""
    needed = [name for name, wanted in _wanted().items() if not wanted.extra]
    if missing := [name for name in needed if _version(name) is None]:
        install = (
            "pip install "
            f"{' '.join(shlex.quote(f'{name}{_wanted()[name].range}') for name in missing)}"
        )
        return Check("packages", FAIL, f"not installed: {', '.join(missing)}", install, core=True)
    detail = f"{len(needed)} that it always needs, in the versions that it asks for"
    if not needed:
        detail = "vla-rl itself is not installed as a package, so versions are not compared"
    return in_range(Check("packages", OK, detail, core=True), needed)


def check_torch() -> Check:
    try:
        import torch
    except Exception as error:  # a broken install raises whatever it likes
        return Check(
            "torch", FAIL, f"import failed: {_first_line(error)}", "pip install torch", core=True
        )
    return Check("torch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads", core=True)


def check_gpu() -> Check:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count:
            free, total = torch.cuda.mem_get_info()
            name = torch.cuda.get_device_name(0)
            return Check(
                "gpu",
                OK,
                f"{count} × {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free "
                "on the first",
            )
    except Exception as error:
        return Check(
            "gpu",
            FAIL,
            _first_line(error),
            "check the driver with nvidia-smi, and that torch is a CUDA build",
        )
    if shutil.which("nvidia-smi"):
        fix = "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)"
        return Check("gpu", FAIL, "nvidia-smi is there, but torch sees no GPU", fix)
    return Check("gpu", MISSING, "none; everything runs on the CPU, at small scale")


def check_gl_backend(backend: str, timeout_s: float = 120.0) -> Check:
    """Render a tiny MuJoCo scene with ``MUJOCO_GL=backend`` in a child process and time it."""
    name = f"gl:{backend}"
    if importlib.util.find_spec("mujoco") is None:
        return Check(name, MISSING, "mujoco is not installed", install_command("sim", "mujoco"))
    environment = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend if backend != "glfw" else ""}
    if backend == "glfw" and not os.environ.get("DISPLAY"):
        return Check(name, MISSING, "no display", _GL_FIX["glfw"])
    if backend == "osmesa" and find_library("OSMesa") is None:
        fix = f"{_GL_FIX['osmesa']}; not needed where egl works"
        return Check(name, MISSING, "libOSMesa is not installed", fix)
    result, error = run_child(_RENDER, timeout_s, environment)
    if result is None:
        return Check(name, FAIL, error, _GL_FIX[backend])
    if result["spread"] == 0:
        return Check(name, FAIL, "it renders an empty picture", _GL_FIX[backend])
    return Check(name, OK, f"{result['ms']:.1f} ms for a small scene at 84 × 84")


def check_gl(backends: Sequence[Check]) -> Check:
    """Whether any backend works; names the one to use."""
    working = [c.name.removeprefix("gl:") for c in backends if c.status == OK]
    chosen = os.environ.get("MUJOCO_GL")
    if not working:
        return Check(
            "gl",
            FAIL,
            "no GL backend renders",
            f"{_GL_FIX['egl']}; or {_GL_FIX['osmesa']}",
            core=True,
        )
    if chosen and chosen not in working:
        detail = f"MUJOCO_GL={chosen} is set, and does not work; {', '.join(working)} does"
        return Check("gl", FAIL, detail, f"export MUJOCO_GL={working[0]}", core=True)
    return Check("gl", OK, f"rendering works with {', '.join(working)}", core=True)


def check_robosuite(timeout_s: float = 120.0) -> Check:
    if importlib.util.find_spec("robosuite") is None:
        return Check(
            "robosuite", FAIL, "not installed", install_command("sim", "robosuite"), core=True
        )
    result, error = run_child(_ROBOSUITE, timeout_s)
    if result is None:
        return Check("robosuite", FAIL, error, "pip install --force-reinstall robosuite", core=True)
    if not result["assets"]:
        return Check(
            "robosuite",
            FAIL,
            "its assets are missing",
            "pip install --force-reinstall robosuite",
            core=True,
        )
    return Check("robosuite", OK, f"{result['version']}, with its assets", core=True)


def check_env(name: str) -> Check:
    """What an env says of itself (`EnvEntry.check`), without starting it."""
    status, detail, fix = build.attribute(build.env_entry(name).check)()
    return Check(name, status, detail, fix)


def check_realsense(timeout_s: float = 60.0) -> Check:
    if importlib.util.find_spec("pyrealsense2") is None:
        return Check(
            "realsense",
            MISSING,
            "pyrealsense2 is not installed (real-robot cameras)",
            install_command("real", "pyrealsense2"),
        )
    result, error = run_child(_REALSENSE, timeout_s)
    if result is None:
        library = "cannot open shared object" in error
        fix = (
            "apt-get install -y libusb-1.0-0"
            if library
            else "check the udev rules of librealsense and the USB cable"
        )
        return Check("realsense", FAIL, error, fix)
    cameras = result["cameras"]
    if not cameras:
        return Check(
            "realsense",
            MISSING,
            "the SDK works; no camera is connected",
            "connect a camera by USB 3",
        )
    return Check("realsense", OK, f"{len(cameras)}: {', '.join(cameras)}")


def check_package(package: str, extra: str, purpose: str) -> Check:
    version = _version(package)
    if version is None:
        return Check(
            package, MISSING, f"not installed ({purpose})", install_command(extra, package)
        )
    return in_range(Check(package, OK, version), [package])


def check_memory(need_gib: float = 6.0) -> Check:
    total, free = total_memory_bytes() / 2**30, free_memory_bytes() / 2**30
    detail = f"{free:.1f} of {total:.1f} GiB available"
    if 0 < free < need_gib:
        fix = (
            f"the quickstart takes up to {need_gib:.0f} GiB: close programs, or lower "
            "slots.slots_per_worker"
        )
        return Check("memory", FAIL, detail, fix)
    return Check("memory", OK, detail)


def check_disk(folder: Path, need_gib: float = 5.0) -> Check:
    free = shutil.disk_usage(folder).free / 2**30
    if free < need_gib:
        return Check(
            "disk",
            FAIL,
            f"{free:.1f} GiB free here",
            f"make room: a run keeps up to {need_gib:.0f} GiB of data",
        )
    return Check("disk", OK, f"{free:.0f} GiB free here")


# ----------------------------------------------------------------------------------------- versions
@dataclass(frozen=True)
class Wanted:
    """The versions of a package that vla-rl asks for (``>=0.4.4,<0.5``), and with which of its
    extras (empty: always)."""

    range: str
    extra: str


def in_range(check: Check, packages: Sequence[str]) -> Check:
    """``check``, or a failure where it is good and one of the installed ``packages`` has a version
    that vla-rl does not ask for. Packages that are not installed, and those that it names no
    versions of, change nothing."""
    from packaging.specifiers import SpecifierSet

    outside = []
    for name in packages:
        wanted, version = _wanted().get(name), _version(name)
        if (
            wanted
            and version
            and not SpecifierSet(wanted.range).contains(version, prereleases=True)
        ):
            outside.append((name, version, wanted))
    if check.status != OK or not outside:
        return check
    said = "; ".join(
        f"{name} {version} is outside of {wanted.range}" for name, version, wanted in outside
    )
    extras = dict.fromkeys(wanted.extra for _, _, wanted in outside)
    ways = [
        f"pip install {shlex.quote(f'{name}{wanted.range}')}"
        for name, _, wanted in outside
        if not wanted.extra
    ]
    ways += [install_command(extra, outside[0][0]) for extra in extras if extra]
    return replace(
        check, status=FAIL, detail=f"{said}, which is what vla-rl is made for", fix="; ".join(ways)
    )


@functools.cache
def _wanted() -> dict[str, Wanted]:
    """By the package's name, for this machine; those of development and docs aside."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires("vla-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, Wanted] = {}
    for requirement in map(Requirement, texts):
        extra = re.search(r'extra == "([\w-]+)"', str(requirement.marker or ""))
        name = extra[1] if extra else ""
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": name})
        if applies and name not in ("dev", "docs", "all") and str(requirement.specifier):
            found.setdefault(requirement.name.lower(), Wanted(str(requirement.specifier), name))
    return found


# ------------------------------------------------------------------------------------------ helpers
def run_child(
    code: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[dict | None, str]:
    """Run Python code in a child process; its last line of output as JSON, or None and why not
    in one line. A library for matrices starts no threads in it."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})}
    env = {k: v for k, v in env.items() if v != "" or k not in (environment or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return None, _first_line(error)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]), ""
    except (IndexError, json.JSONDecodeError):
        pass
    if done.returncode < 0:
        return None, f"crashed with signal {-done.returncode}"
    errors = [
        line.strip()
        for line in done.stderr.splitlines()
        if line.strip() and not line.startswith((" ", "Exception ignored"))
    ]
    return None, errors[-1][:200] if errors else f"ended with status {done.returncode}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
