"""``env=dataset``: what a run knows of a robot from its recordings alone. No episode can be run
in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_rl.config import RunConfig
from vla_rl.config.recording import RecordingConfig
from vla_rl.data.mixture import Mixture, open_mixture
from vla_rl.data.recording import moved
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Env
from vla_rl.specs import EpisodeSpec, SlotEvent

NO_EPISODES = (
    "env=dataset is a recording, in which no episode can be run: judge by action errors "
    "(phases=[eval_actions,report]), on the robot (vla-rl robot run checkpoint=CKPT), or name a "
    "simulator with env=NAME"
)


class RecordedEnv(Env):
    """`vla_rl.interfaces.Env` in as far as a recording is one: robot and tasks. To run an
    episode raises ConfigError."""

    Config = RecordingConfig
    num_slots = num_workers = 1
    privileged_dim = 0
    repeatable = True
    busy_seconds = 0.0

    def __init__(self, recording: Mixture, moved: tuple[str, ...] = ()) -> None:
        self.recording, self.moved = recording, moved  # the actions that are learned as moves
        self.embodiment, self.tasks = recording.embodiment, recording.tasks

    def start(self, slot: int, episode: EpisodeSpec) -> None:
        raise ConfigError(NO_EPISODES)

    def step(self, slot: int, actions: np.ndarray) -> None:
        raise ConfigError(NO_EPISODES)

    def poll(self, timeout: float | None = None) -> Sequence[SlotEvent]:
        raise ConfigError(NO_EPISODES)

    def close(self) -> None: ...


def open_recorded(config: RunConfig) -> RecordedEnv:
    """What ``dataset`` names; raises what `open_mixture` does."""
    if not config.dataset:
        raise ConfigError(
            "env=dataset is read from a recording, and none is named: give dataset=FOLDER"
        )
    weights = config.dataset.values() if isinstance(config.dataset, dict) else ()
    recording = open_mixture(config.datasets, tuple(weights), config.env)
    return RecordedEnv(recording, moved(recording.embodiment, config.env))
