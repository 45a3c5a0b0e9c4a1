"""A type of env of lerobot's that a plug-in brings: `gym_dot`'s env."""

from __future__ import annotations

from dataclasses import dataclass, field

import gym_dot  # noqa: F401 - registers the env
from lerobot.configs.types import PolicyFeature
from lerobot.envs.configs import EnvConfig


@EnvConfig.register_subclass("dot")
@dataclass
class DotEnv(EnvConfig):
    task: str | None = "Dot-v0"
    fps: int = 10
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)
    goal: str = "middle"

    @property
    def gym_id(self) -> str:
        return f"dot/{self.task}"

    @property
    def gym_kwargs(self) -> dict:
        return {"render_mode": "rgb_array", "goal": self.goal}
