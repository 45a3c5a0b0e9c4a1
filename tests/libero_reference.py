"""LIBERO's own environment as the reference of the tests: looked at only where a test compares, so that it stays fast."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import numpy as np

from sim.libero import package
from sim.libero.plain import PlainEnv
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


class Reference(PlainEnv):
    """Its cameras return nothing but where a test looks; the timing of its sensors is not touched."""

    def __init__(self, suite: str, task: int, size: int) -> None:
        super().__init__(find_tasks(suite, [str(task)])[0], size)

    def reset(self, seed: int, official: int | None, settle: int = 10) -> dict[str, np.ndarray]:
        self.look_away(settle > 0)
        return super().reset(seed, official, settle)

    def before_settling(self, step: int, steps: int) -> None:
        self.look_away(step < steps - 1)

    def run(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """All of ``actions`` [h 7], looking at the last step alone; stops where the goal is reached."""
        for index, action in enumerate(actions):
            self.look_away(index < len(actions) - 1)
            observation = self.step(action)
            if self.success:
                break
        return observation

    def look_away(self, away: bool) -> None:
        """Whether the cameras' sensors return nothing instead of rendering."""
        for name, observable in self.env.env._observables.items():
            if name.endswith("_image"):
                if observable._sensor is not _blind:
                    observable.seeing = observable._sensor  # each reset makes a new one
                observable._sensor = _blind if away else observable.seeing


def _blind(_: object) -> np.ndarray:
    return np.zeros((1, 1, 3), dtype=np.uint8)


_blind.__modality__ = "image"
