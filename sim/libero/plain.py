"""LIBERO's own environment, stepped as its users do: the reference of the tests and a baseline
of the benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.gl import draw_in_own_contexts, ensure_backend
from sim.libero import package
from sim.libero.init_states import read_init_states
from sim.libero.tasks import Task

REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


class PlainEnv:
    """`OffScreenRenderEnv` of one task with both cameras. Every seeded `reset` behaves as that of a
    fresh environment.

    (LIBERO's draws the openings of drawers once more with every reset, so a state that follows a
    seed depends on how many resets there have been.) Other simulators may draw in the same process:
    its own GL context is bound first, and numpy's global generator, which LIBERO draws from, is the
    environment's own while it resets. ``size`` 0: no pictures.
    """

    def __init__(self, task: Task, size: int) -> None:
        ensure_backend()
        envs: Any = package.load(folder=task.package)
        self.task = task
        with package.quiet():
            if size:
                pixels = {"camera_heights": size, "camera_widths": size}
                self.env = envs.OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), **pixels)
            else:
                blind = envs.env_wrapper.ControlEnv
                self.env = blind(
                    str(task.bddl_file), use_camera_obs=False, has_offscreen_renderer=False
                )
        self._draws = len(self.env.env.object_property_initializers)
        self._generator: Any = None
        self.success = False

    def reset(
        self, seed: int | None, official: int | None, settle: int = 10
    ) -> dict[str, np.ndarray]:
        """Seed, reset, set the official state (None: keep what was sampled) and settle; the
        observation after that.

        Without a seed it is the next reset of a loop that seeded once, as published evaluations
        reset between episodes.
        """
        bind_context(self.env)
        if seed is None:
            np.random.set_state(self._generator)
        else:
            del self.env.env.object_property_initializers[self._draws :]
            self.env.seed(seed)
        with package.quiet():
            observation = self.env.reset()
        self._generator = np.random.get_state()
        bind_context(self.env)
        if official is not None:
            observation = self.env.set_init_state(read_init_states(self.task.init_file)[official])
        for step in range(settle):
            self.before_settling(step, settle)
            observation = self.step(REST)
        return observation

    def before_settling(self, step: int, steps: int) -> None:
        """Called before each resting step of a reset."""

    def look_away(self, away: bool) -> None:
        """Whether the cameras' sensors return nothing instead of rendering; when they look is
        not touched."""
        for name, observable in self.env.env._observables.items():
            if name.endswith("_image"):
                if observable._sensor is not _blind:
                    observable.seeing = observable._sensor  # each reset makes a new one
                observable._sensor = _blind if away else observable.seeing

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


class WatchedEnv(PlainEnv):
    """Its cameras render nothing but what an episode starts from, and the end of `run`."""

    def reset(
        self, seed: int | None, official: int | None, settle: int = 10
    ) -> dict[str, np.ndarray]:
        self.look_away(settle > 0)
        return super().reset(seed, official, settle)

    def before_settling(self, step: int, steps: int) -> None:
        self.look_away(step < steps - 1)

    def run(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """All of ``actions`` [h 7], looking at the last step alone; stops where the goal is
        reached."""
        for index, action in enumerate(actions):
            self.look_away(index < len(actions) - 1)
            observation = self.step(action)
            if self.success:
                break
        return observation


def _blind(_: object) -> np.ndarray:
    return np.zeros((1, 1, 3), dtype=np.uint8)


_blind.__modality__ = "image"  # type: ignore[attr-defined]


def bind_context(env: Any) -> None:
    """Let an `OffScreenRenderEnv` draw, and free, in its own GL context, not in whichever is
    current."""
    if (context := env.sim._render_context_offscreen) is not None:
        context.gl_ctx.make_current()
        draw_in_own_contexts()
