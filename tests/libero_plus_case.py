"""A variant of LIBERO-plus beside its own environment: run in a process of its own, as its package
registers LIBERO's robots and objects anew (``python libero_plus_case.py
libero_plus_spatial_camera/0``)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from sim.libero import package, plus
from sim.libero.plain import WatchedEnv
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from sim.libero.tasks import Task
from vla_rl.specs import EpisodeSpec

SIZE = 48


def plus_envs(folder: Path) -> Any:
    """LIBERO-plus' own ``envs``, with LIBERO's published assets, and without the packages that only
    its noise and its vector envs use."""
    inside = folder / "liberoplus" / "liberoplus"
    inside.mkdir(parents=True)
    for path in plus.root().iterdir():
        if path.name == "envs":  # which looks for the assets beside its real place
            shutil.copytree(path, inside / "envs")
        else:
            (inside / path.name).symlink_to(path)
    (inside.parent / "__init__.py").touch()
    (inside / "assets").symlink_to(package.find_assets())
    for name in ("gym", "wand", "wand.api", "wand.image", "skimage", "skimage.filters"):
        sys.modules[name] = mock.MagicMock()
    sys.modules["wand.image"].Image = type("Image", (), {})
    sys.modules["gym"].Env = type("Env", (), {})
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    sys.path.insert(0, str(folder))
    with package.quiet():
        from liberoplus.liberoplus import envs
    assert isinstance(envs, types.ModuleType)
    return envs


def own_env(task: Task, folder: Path) -> WatchedEnv:
    """Its files say what is changed by the name under which they are asked for."""
    envs = plus_envs(folder)
    with mock.patch.object(package, "load", lambda *_: envs):
        asked = task.bddl_file.with_name(f"{task.name}.bddl")
        return WatchedEnv(dataclasses.replace(task, bddl_file=asked), SIZE)


def run(task: str, folder: Path) -> str:
    """Both start from the first initial state and take eight control steps."""
    suite, number = task.split("/")
    config = LiberoConfig(
        suite=suite, tasks=[number], camera_size=SIZE, init_states="official", rotate_images=False
    )
    simulator = LiberoSimulator(config)
    seen = [simulator.start(0, EpisodeSpec(task, 0, split="held_out")).images]
    states = [np.r_[simulator.slot(0).data.qpos, simulator.slot(0).data.qvel]]
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (8, 7)).astype(np.float32)
    seen.append(simulator.step(0, actions).observation.images)
    states.append(np.r_[simulator.slot(0).data.qpos, simulator.slot(0).data.qvel])
    plain = own_env(simulator.task(task), folder)
    simulator.close()
    for images, state, look in zip(
        seen, states, (lambda: plain.reset(0, official=0), lambda: plain.run(actions)), strict=True
    ):
        other = look()
        np.testing.assert_array_equal(state, np.r_[plain.data.qpos, plain.data.qvel])
        for name, picture in images.items():
            np.testing.assert_array_equal(picture, other[f"{name}_image"])
    plain.close()
    return f"{task}: {len(states[0])} numbers of the state, {len(images)} pictures equal"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(run(sys.argv[1], Path(made)))
