"""LIBERO's own environment, stepped as its users do: the reference of the tests and a baseline of the benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.gl import draw_in_own_context, ensure_backend
from sim.libero import package
from sim.libero.init_states import read_init_states
from sim.libero.tasks import Task

REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


class PlainEnv:
    """`OffScreenRenderEnv` of one task with both cameras. Every `reset` behaves as that of a fresh environment.

    (LIBERO's draws the openings of drawers once more with every reset, so a state that follows a seed depends on how
    many resets there have been.) Other simulators may draw in the same process: its own GL context is bound first.
    """

    def __init__(self, task: Task, size: int, assets: str = "") -> None:
        ensure_backend()
        envs = package.load(assets)
        self.task = task
        with package.quiet():
            self.env = envs.OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), camera_heights=size, camera_widths=size)
        self._draws = len(self.env.env.object_property_initializers)
        self.success = False

    def reset(self, seed: int, official: int | None, settle: int = 10) -> dict[str, np.ndarray]:
        """Seed, reset, set the official state (None: keep what was sampled) and settle; the observation after that."""
        del self.env.env.object_property_initializers[self._draws :]
        bind_context(self.env)
        self.env.seed(seed)
        with package.quiet():
            observation = self.env.reset()
        bind_context(self.env)
        if official is not None:
            observation = self.env.set_init_state(read_init_states(self.task.init_file)[official])
        for step in range(settle):
            self.before_settling(step, settle)
            observation = self.step(REST)
        return observation

    def before_settling(self, step: int, steps: int) -> None:
        """Called before each resting step of a reset."""

    def step(self, action: Any) -> dict[str, np.ndarray]:
        observation, _, self.success, _ = self.env.step(action)
        return observation

    @property
    def data(self) -> Any:
        """MuJoCo's state."""
        return self.env.sim.data._data

    def close(self) -> None:
        bind_context(self.env)
        self.env.close()


def bind_context(env: Any) -> None:
    """Let an `OffScreenRenderEnv` draw, and free, in its own GL context, not in whichever is current."""
    context = env.sim._render_context_offscreen
    context.gl_ctx.make_current()
    draw_in_own_context(context)
