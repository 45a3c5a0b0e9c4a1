"""LIBERO's own environment as the reference of the tests: looked at only where a test compares, so that it stays fast."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from sim.libero import package
from sim.libero.init_states import read_init_states
from sim.libero.tasks import find_tasks
from vla_rl.errors import UserError

REST = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
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


class Reference:
    """LIBERO's `OffScreenRenderEnv` of one task, seeded and reset once as a fresh environment of the benchmark is."""

    def __init__(self, suite: str, task: int, size: int) -> None:
        envs = package.load()
        self.task = find_tasks(suite, [str(task)])[0]
        os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
        with package.quiet():
            self.env = envs.OffScreenRenderEnv(
                bddl_file_name=str(self.task.bddl_file), camera_heights=size, camera_widths=size
            )
        self._draws = len(self.env.env.object_property_initializers)

    def reset(self, seed: int, official: int | None, settle: int = 10) -> dict[str, np.ndarray]:
        """Seed, reset, set the official state (None: keep what was sampled) and settle; the observation after that."""
        base = self.env.env
        # A fresh environment, whatever was reset before: it would otherwise draw drawers once more with every reset.
        del base.object_property_initializers[self._draws :]
        self.look_away(True)
        self.env.seed(seed)
        self.env.sim._render_context_offscreen.gl_ctx.make_current()  # the reset frees its objects in the current context
        with package.quiet():
            observation = self.env.reset()
        self._own_context()
        if official is not None:
            observation = self.env.set_init_state(read_init_states(self.task.init_file)[official])
        for step in range(settle):
            self.look_away(step < settle - 1)
            observation = self.step(REST)
        return observation

    def step(self, action: Any) -> dict[str, np.ndarray]:
        observation, _, self.success, _ = self.env.step(action)
        return observation

    def run(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """All of ``actions`` [h 7], looking at the last step alone; stops where the goal is reached."""
        for index, action in enumerate(actions):
            self.look_away(index < len(actions) - 1)
            observation = self.step(action)
            if self.success:
                break
        return observation

    def look_away(self, away: bool) -> None:
        """Whether the cameras' sensors return nothing instead of rendering. Their timing is not touched."""
        for name, observable in self.env.env._observables.items():
            if name.endswith("_image"):
                if not hasattr(observable, "seeing"):
                    observable.seeing = observable._sensor
                elif getattr(observable._sensor, "blind", False) is False:
                    observable.seeing = observable._sensor  # a reset has made a new one
                observable._sensor = _blind if away else observable.seeing

    @property
    def data(self) -> Any:
        return self.env.sim.data._data

    def _own_context(self) -> None:
        """robosuite draws into whichever GL context is current; with another simulator around, bind its own first."""
        from sim.tabletop.scene import _render_in_own_context

        _render_in_own_context(self.env.sim._render_context_offscreen)

    def close(self) -> None:
        self.env.close()


def _blind(_: Any) -> np.ndarray:
    return np.zeros((1, 1, 3), dtype=np.uint8)


_blind.blind = True
_blind.__modality__ = "image"
