"""LIBERO's own environment as the reference of the tests: looked at only where a test compares, so that it stays fast."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from sim.libero import package
from sim.libero.plain import WatchedEnv
from sim.libero.tasks import find_tasks
from vla_rl.errors import UserError

_INSTALLER = Path(__file__).resolve().parents[2] / "shared" / "libero" / "install"  # an offline copy beside the checkout


@functools.cache
def libero_problem() -> str | None:
    """Why LIBERO's scenes cannot be built here, or None."""
    try:
        package.root()
        try:
            package.find_assets()
        except UserError:
            if not _INSTALLER.is_file():
                raise
            subprocess.run([str(_INSTALLER)], check=True, capture_output=True)
            package.find_assets()
    except (UserError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


class Reference(WatchedEnv):
    """By the suite's name and the task's number."""

    def __init__(self, suite: str, task: int, size: int) -> None:
        super().__init__(find_tasks(suite, [str(task)])[0], size)
