"""LIBERO's own environment as the reference of the tests: looked at only where a test compares,
so that it stays fast."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from sim.libero import package
from sim.libero.plain import WatchedEnv
from sim.libero.tasks import find_tasks
from vla_rl.errors import UserError

# an offline copy beside the checkout
_INSTALLER = Path(__file__).resolve().parents[2] / "shared" / "libero" / "install"


@functools.cache
def libero_problem() -> str | None:
    """Why LIBERO's scenes cannot be built here, or None.

    Where the offline copy is at hand, all tests of this process take it: its textures are small, so
    that a scene is built in half the time that the published assets take.
    """
    try:
        root = package.root()
        if _INSTALLER.is_file():
            subprocess.run([str(_INSTALLER)], check=True, capture_output=True)
            _prefer(root, Path("~/.cache/libero/assets").expanduser())
        package.find_assets()
    except (UserError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


def _prefer(root: Path, assets: Path) -> None:
    """Have LIBERO's own config file, which goes before the packages of assets, name this copy."""
    folder = Path(tempfile.mkdtemp(prefix="libero_config_"))
    places = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
    }
    places |= {"datasets": root.parent / "datasets", "assets": assets}
    (folder / "config.yaml").write_text(
        "".join(f'{name}: "{place}"\n' for name, place in places.items())
    )
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)


class Reference(WatchedEnv):
    """By the suite's name and the task's number."""

    def __init__(self, suite: str, task: int, size: int) -> None:
        super().__init__(find_tasks(suite, [str(task)])[0], size)
