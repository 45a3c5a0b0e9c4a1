"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et
al. 2017).

`vla-rl bench experts` measures how often they succeed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sim.recording import record_demonstration
from sim.tabletop.simulator import TabletopSimulator
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: TabletopSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is rendered at every control step.

    ``noise_std`` is the std of the Gaussian added to all executed action dimensions but the
    gripper, as a share of the action's half-range; ``rng`` draws it (default: from the episode's
    seed). ``speed`` scales the expert's motion (not the gripper). Row t of each array is what was
    seen at control step t, and the clean label for it. Returns ``images`` {camera: uint8 [T H W
    3]}, ``proprio`` float32 [T p], ``actions`` float32 [T a] (physical units), ``instruction``,
    ``success``, ``task_id``, ``init_state_id``.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    expert = simulator.demonstrator(episode.task_id)
    half_range = np.array(simulator.embodiment.action_high)
    spread = noise_std * half_range
    spread[-1] = 0.0
    observation = simulator.start(slot, episode)

    def act() -> np.ndarray:
        label = np.clip(expert.act(simulator.state(slot)), -half_range, half_range)
        label[:-1] *= speed
        return label

    def disturb(label: np.ndarray) -> np.ndarray:
        return label + spread * rng.standard_normal(len(label))

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )
