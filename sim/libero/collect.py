"""Scripted demonstrations on LIBERO: noise goes into what is executed, the label stays clean (DART,
Laskey et al. 2017).

`vla-rl bench experts` measures how often they succeed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sim.libero.demonstrator import make_demonstrator
from sim.libero.simulator import LiberoSimulator
from sim.recording import record_demonstration
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: LiberoSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is rendered at every control step.

    ``noise_std`` is the std of the Gaussian added to the executed translation, as a share of its
    half-range (rotations would drift, since LIBERO's are relative to the present orientation);
    ``rng`` draws it (default: from the episode's seed). ``speed`` scales the expert's motion (not
    the gripper). Row t of each array is what was seen at control step t, and the clean label for
    it. Returns ``images`` {camera: uint8 [T H W 3]}, ``proprio`` float32 [T 8], ``actions`` float32
    [T 7] (LIBERO's commands), ``instruction``, ``success``, ``task_id``, ``init_state_id``.
    `ConfigError` for absolute control, and for a task whose goal is not pick-and-place.
    """
    if simulator.config.control_mode != "relative":
        raise ConfigError(
            f"env.control_mode={simulator.config.control_mode!r}: the scripted experts give "
            "relative commands, use relative"
        )
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    observation = simulator.start(slot, episode)
    expert = make_demonstrator(simulator.state(slot))

    def act() -> np.ndarray:
        label = np.clip(expert.act(simulator.state(slot)), -1.0, 1.0)
        label[:6] *= speed
        return label

    def disturb(label: np.ndarray) -> np.ndarray:
        executed = label.copy()
        executed[:3] += noise_std * rng.standard_normal(3)
        return executed

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )
