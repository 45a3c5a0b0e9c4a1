"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et
al. 2017).

`vla-rl bench experts` measures how often they succeed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sim.dualarm.kinematics import JOINTS
from sim.dualarm.simulator import MAX_STEP, DualArmSimulator
from sim.recording import record_demonstration
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: DualArmSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is drawn at every control step.

    ``noise_std`` is the std of the Gaussian added to what each joint is told, as a share of the
    most that it may move in a control step (`sim.dualarm.simulator.MAX_STEP`); grippers get none.
    ``rng`` draws it (default: from the episode's seed). ``speed`` scales the expert's motion. The
    result is `sim.recording.record_demonstration`'s.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    spread = noise_std * MAX_STEP * np.tile([*[1.0] * JOINTS, 0.0], 2)
    observation = simulator.start(slot, episode)
    expert = simulator.demonstrator(slot, speed)

    def act() -> np.ndarray:
        return simulator.action(slot, expert.act(simulator.state(slot)))

    def disturb(label: np.ndarray) -> np.ndarray:
        return label + spread * rng.standard_normal(len(label))

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )
