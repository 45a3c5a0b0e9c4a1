"""What every shipped learning run promises: there is time for skill, so that RL cannot win by speed alone."""

from __future__ import annotations

import dataclasses
from statistics import mean

import numpy as np
import pytest

from vla_rl import build
from vla_rl.config import RunConfig, compose
from vla_rl.paths import config_dir
from vla_rl.types import EpisodeSpec

RUNS = sorted(path.stem for path in (config_dir() / "run").glob("*.yaml"))
SCRIPTED = [name for name in RUNS if "collect" in compose([f"run={name}"]).phases]
PER_TASK = 3


def lengths(config: RunConfig) -> dict[str, tuple[float, int]]:
    """Per task: mean control steps of successful demonstrations as the run collects them, and the run's limit."""
    limits = {t.task_id: t.horizon for t in build.implementation("env", config.env_type)(config.env).tasks}
    env = dataclasses.replace(config.env, horizon=config.collect.horizon) if config.collect.horizon else config.env
    simulator = build.implementation("env", config.env_type)(env)
    collect = build.attribute(build.env_entry(config.env_type).collect)
    options = {"noise_std": config.collect.action_noise}
    if config.collect.speed != 1.0:
        options["speed"] = config.collect.speed
    found = {}
    for task in config.tasks or list(limits):
        taken: list[int] = []
        for i in range(4 * PER_TASK):
            episode = EpisodeSpec(task_id=task, init_state_id=i, split="train", seed=i)
            result = collect(simulator, episode, rng=np.random.default_rng(i), **options)
            taken += [len(result["actions"])] if result["success"] else []
            if len(taken) == PER_TASK:
                break
        found[task] = (mean(taken), limits[task])
    simulator.close()
    return found


@pytest.mark.parametrize("name", [n for n in SCRIPTED if compose([f"run={n}"]).env_type == "toy"])
def test_a_toy_run_leaves_time_for_skill(name: str):
    for task, (demonstrated, limit) in lengths(compose([f"run={name}"])).items():
        assert limit >= 1.5 * demonstrated, (name, task)


@pytest.mark.real_sim
@pytest.mark.parametrize("name", [n for n in SCRIPTED if compose([f"run={n}"]).env_type == "tabletop"])
def test_a_tabletop_run_leaves_time_for_skill(name: str):
    for task, (demonstrated, limit) in lengths(compose([f"run={name}"])).items():
        assert limit >= 1.5 * demonstrated, (name, task)
