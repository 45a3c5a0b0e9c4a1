"""What runs in a collecting worker, perhaps under another Python (``slots.python``): no torch
and no dataset here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from vla_rl import build
from vla_rl.specs import EmbodimentSpec, EpisodeSpec


class Demonstrator(NamedTuple):
    simulator: Any
    collect: Any  # `EnvEntry.collect`


def open_demonstrator(env_type: str, env_config: Any) -> Demonstrator:
    simulator = build.implementation("env", env_type)(env_config)
    return Demonstrator(simulator, build.attribute(build.env_entry(env_type).collect))


def embodiment(worker: Demonstrator, _: None) -> EmbodimentSpec:
    return worker.simulator.embodiment


def collect_one(
    worker: Demonstrator, asked: tuple[EpisodeSpec, dict[str, float]]
) -> dict[str, Any]:
    """One demonstration of an episode, with the collector's options."""
    episode, options = asked
    texts = next(t.instructions for t in worker.simulator.tasks if t.task_id == episode.task_id)
    episode = dataclasses.replace(
        episode, instruction_index=episode.init_state_id % max(1, len(texts))
    )
    return worker.collect(
        worker.simulator, episode, rng=np.random.default_rng(episode.seed), **options
    )
