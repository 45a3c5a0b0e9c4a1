"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.specs import EpisodeSpec

if TYPE_CHECKING:
    from sim.tabletop.demonstrator import Demonstrator
    from sim.tabletop.simulator import TabletopSimulator


def collect_episode(
    simulator: TabletopSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
    demonstrator: Demonstrator | None = None,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is rendered at every control step.

    ``noise_std`` is the std of the Gaussian added to all executed action dimensions but the gripper, as a share of the
    action's half-range; ``rng`` draws it (default: from the episode's seed). Row t of each array is what was seen at
    control step t, and the clean label for it. Returns ``images`` {camera: uint8 [T H W 3]}, ``proprio`` float32 [T p],
    ``actions`` float32 [T a] (physical units), ``instruction``, ``success``, ``task_id``, ``init_state_id``.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    expert = simulator.demonstrator(episode.task_id) if demonstrator is None else demonstrator
    half_range = np.array(simulator.embodiment.action_high)
    spread = noise_std * half_range
    spread[-1] = 0.0
    observation = simulator.start(slot, episode)
    images: dict[str, list[np.ndarray]] = {name: [] for name in observation.images}
    proprio, actions = [], []
    while True:
        label = np.clip(expert.act(simulator.state(slot)), -half_range, half_range)
        for name, picture in observation.images.items():
            images[name].append(picture)
        proprio.append(observation.proprio)
        actions.append(label)
        step = simulator.step(slot, (label + spread * rng.standard_normal(len(label)))[None])
        if step.terminated or step.truncated:
            break
        observation = step.observation
    return {
        "images": {name: np.stack(pictures) for name, pictures in images.items()},
        "proprio": np.stack(proprio),
        "actions": np.stack(actions).astype(np.float32),
        "instruction": observation.instruction,
        "success": step.success,
        "task_id": episode.task_id,
        "init_state_id": episode.init_state_id,
    }
