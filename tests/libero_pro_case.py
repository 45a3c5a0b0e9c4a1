"""Tasks of LIBERO-PRO beside their own environment: run in a process of its own, as LIBERO's package
has the same name (``python libero_pro_case.py libero_pro_spatial_swap/0``); ``--alone``: ours
without it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from libero_recorded import Trace

from sim.libero.plain import WatchedEnv
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from vla_rl.specs import EpisodeSpec
from vla_rl.types import Observation

SIZE = 48


def run(task: str, beside: bool = True) -> str:
    """Both start from the first initial state and take eight control steps; ours alone unless
    ``beside``. What is said ends with two traces: of the joints at the end, and of both looks."""
    suite, number = task.split("/")
    config = LiberoConfig(
        suite=suite, tasks=[number], camera_size=SIZE, init_states="official", rotate_images=False
    )
    simulator = LiberoSimulator(config)
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (8, 7)).astype(np.float32)
    started, trace = simulator.start(0, EpisodeSpec(task, 0, split="held_out")), Trace()
    trace.look(simulator.slot(0).data, started)
    if beside:
        plain = WatchedEnv(simulator.task(task), SIZE)
        equal(simulator, plain, started, plain.reset(0, official=0))
    step = simulator.step(0, actions)
    if beside:
        equal(simulator, plain, step.observation, plain.run(actions))
        assert step.success == bool(plain.success)
        plain.close()
    data = simulator.slot(0).data
    trace.look(data, step.observation)
    joints = Trace()
    joints.add(data.qpos, data.qvel)
    simulator.close()
    about = f"{len(data.qpos)} joints, {len(started.images)} pictures"
    return f"{task}: {about}, {joints.text} {trace.text}"


def equal(simulator: LiberoSimulator, plain: WatchedEnv, ours: Observation, theirs: Any) -> None:
    data = simulator.slot(0).data
    np.testing.assert_array_equal(data.qpos, plain.data.qpos)
    np.testing.assert_array_equal(data.qvel, plain.data.qvel)
    for name, picture in ours.images.items():
        np.testing.assert_array_equal(picture, theirs[f"{name}_image"])


if __name__ == "__main__":
    alone, *names = sys.argv[1:] if sys.argv[1] == "--alone" else ["", *sys.argv[1:]]
    for name in names:
        print(run(name, beside=not alone))
