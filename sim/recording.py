"""Recording a demonstration: what a scripted expert sees and says, while something else may be
executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vla_rl.specs import EpisodeSpec, SlotObservation, SlotStep


def record_demonstration(
    episode: EpisodeSpec,
    observation: SlotObservation,
    act: Callable[[], np.ndarray],
    disturb: Callable[[np.ndarray], np.ndarray],
    execute: Callable[[np.ndarray], SlotStep],
) -> dict[str, Any]:
    """Run one episode from its first ``observation`` to its end and return it as
    `vla_rl.data.collect` writes it.

    ``act`` gives the label [a] of the present state, ``disturb`` what is done in its place (the
    label stays clean: DART, Laskey et al. 2017, arXiv 1703.09327), ``execute`` does it, a chunk [1
    a]. Arrays of the result have one row per control step; ``extra`` ``sent`` is what was asked of
    the simulator.
    """
    images: dict[str, list[np.ndarray]] = {name: [] for name in observation.images}
    proprio, actions, sent = [], [], []
    while True:
        label = act()
        for name, picture in observation.images.items():
            images[name].append(picture)
        proprio.append(observation.proprio)
        actions.append(label)
        sent.append(disturb(label))
        step = execute(sent[-1][None])
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
        "extra": {"sent": np.stack(sent).astype(np.float32)},
    }
