"""A small env for `sim.gym`, registered by its import: go to the middle (or, by ``goal``, to the
right)."""

from __future__ import annotations

from typing import ClassVar

import gymnasium
import numpy as np

GOALS = {"middle": np.zeros(2), "right": np.array([0.8, 0.0])}


class Dot(gymnasium.Env):
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(
        self, render_mode=None, goal="middle", observe="dict", tells="is_success", spoils=None
    ):
        self.spoils = spoils
        self.render_mode, self.goal, self.observe, self.tells = (
            render_mode,
            GOALS[goal],
            observe,
            tells,
        )

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self._seen(), {}

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * np.asarray(action, float), -1, 1)
        done = bool(np.linalg.norm(self.place - self.goal) < 0.15)
        if self.spoils:
            return (
                {**self._seen(), **self.spoils.get("seen", {})},
                self.spoils.get("reward", 0.0),
                False,
                False,
                {"is_success": self.spoils.get("success", False)},
            )
        return (
            self._seen(),
            -float(np.linalg.norm(self.place - self.goal)),
            done,
            False,
            {self.tells: done},
        )

    def render(self):
        at = np.linspace(-1.1, 1.1, 16)
        row, column = (np.exp(-0.5 * ((at - x) / 0.15) ** 2) for x in self.place)
        return np.repeat((255 * np.outer(row, column)).astype(np.uint8)[..., None], 3, 2)

    def _seen(self):
        state = self.place.astype(np.float32)
        return (
            state
            if self.observe == "vector"
            else {"pixels": {"top": self.render()}, "agent_pos": state}
        )


class Forgetful(Dot):
    """Heeds the seed of its maker alone."""

    def __init__(self, render_mode=None, seed=0):
        super().__init__(render_mode)
        self.rng = np.random.default_rng(seed)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.rng.uniform(-1, 1, 2)
        return self._seen(), {}


class Restless(Forgetful):
    """Heeds no seed."""

    def __init__(self, render_mode=None, seed=0):
        super().__init__(render_mode, seed=None)


class Drawn(Dot):
    """Forgets the seed of its reset, and draws from its own generator all the same; its goal is
    drawn by its maker."""

    def __init__(self, render_mode=None, observe="dict", seed=None):
        super().__init__(render_mode, observe=observe)
        self.goal = np.random.default_rng(seed).uniform(-0.5, 0.5, 2)

    def reset(self, seed=None, options=None):
        self.place = self.np_random.uniform(-1, 1, 2)
        return self._seen(), {}

    def _seen(self):
        seen = super()._seen()
        goal = self.goal.astype(np.float32)
        return np.r_[seen, goal] if self.observe == "vector" else seen | {"goal": goal}


class Discrete(Dot):
    action_space = gymnasium.spaces.Discrete(4)


class Unbounded(Dot):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


gymnasium.register("dot/Dot-v0", entry_point=Dot, max_episode_steps=20)
gymnasium.register("dot/Forgetful-v0", entry_point=Forgetful, max_episode_steps=20)
gymnasium.register("dot/Restless-v0", entry_point=Restless, max_episode_steps=20)
gymnasium.register("dot/Drawn-v0", entry_point=Drawn, max_episode_steps=20)
gymnasium.register("dot/Endless-v0", entry_point=Dot)
gymnasium.register("dot/Discrete-v0", entry_point=Discrete, max_episode_steps=20)
gymnasium.register("dot/Unbounded-v0", entry_point=Unbounded, max_episode_steps=20)


def expert(task):
    goal = GOALS.get(task, GOALS["middle"])
    return lambda seen: np.clip((goal - seen["agent_pos"]) / 0.2, -1, 1)
