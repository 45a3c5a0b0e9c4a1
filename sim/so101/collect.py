"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et
al. 2017).

`vla-rl bench experts` measures how often they succeed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sim.recording import record_demonstration
from sim.so101.simulator import SO101Simulator
from vla_rl.specs import EpisodeSpec

NOISE = 10.0  # degrees: of a joint at ``noise_std`` 1


def collect_episode(
    simulator: SO101Simulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is drawn at every control step.

    ``noise_std`` is the std of the Gaussian added to what each joint is told, in `NOISE`; the
    gripper gets none. ``rng`` draws it (default: from the episode's seed). ``speed`` scales the
    expert's motion. The result is `sim.recording.record_demonstration`'s.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    spread = noise_std * NOISE * np.array([1.0] * 5 + [0.0])
    observation = simulator.start(slot, episode)
    expert = simulator.demonstrator(slot, speed)
    bounds = simulator.embodiment.action_low, simulator.embodiment.action_high

    def disturb(label: np.ndarray) -> np.ndarray:
        return label + spread * rng.standard_normal(len(label))

    return record_demonstration(
        episode,
        observation,
        lambda: np.clip(expert.act(), *bounds),
        disturb,
        functools.partial(simulator.step, slot),
    )
