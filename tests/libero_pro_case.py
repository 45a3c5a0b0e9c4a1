"""A task of LIBERO-PRO beside its own environment: run in a process of its own, as LIBERO's package
has the same name (``python libero_pro_case.py libero_pro_spatial_swap/0``)."""

from __future__ import annotations

import sys

import numpy as np

from sim.libero.plain import WatchedEnv
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from vla_rl.specs import EpisodeSpec

SIZE = 48


def run(task: str) -> str:
    """Both start from the first initial state and take eight control steps."""
    suite, number = task.split("/")
    config = LiberoConfig(
        suite=suite, tasks=[number], camera_size=SIZE, init_states="official", rotate_images=False
    )
    simulator = LiberoSimulator(config)
    started = simulator.start(0, EpisodeSpec(task, 0, split="held_out"))
    plain = WatchedEnv(simulator.task(task), SIZE)
    seen = plain.reset(0, official=0)
    for observation, other in ((started, seen), (None, None)):
        if observation is None:
            actions = np.random.default_rng(0).uniform(-0.5, 0.5, (8, 7)).astype(np.float32)
            step = simulator.step(0, actions)
            observation, other = step.observation, plain.run(actions)
            assert step.success == bool(plain.success)
        data = simulator.physics(0)
        np.testing.assert_array_equal(data.qpos, plain.data.qpos)
        np.testing.assert_array_equal(data.qvel, plain.data.qvel)
        for name, picture in observation.images.items():
            np.testing.assert_array_equal(picture, other[f"{name}_image"])
    simulator.close()
    plain.close()
    return f"{task}: {len(data.qpos)} joint positions, {len(observation.images)} pictures equal"


if __name__ == "__main__":
    print(run(sys.argv[1]))
