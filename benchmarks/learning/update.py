"""`vla-rl bench update`: what one update from a replay takes, with the features it keeps, with
images encoded anew, and with eyes of the actor's own (``actor.eyes=pictures``)."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.learning.replay import Sizes, robot, synthetic_episodes
from benchmarks.measuring import take_turns
from vla_rl import build
from vla_rl.config import RunConfig, compose, with_run
from vla_rl.data.demonstrations import short_statistics
from vla_rl.data.lerobot_writer import feature_statistics
from vla_rl.data.replay import ONLINE, Replay
from vla_rl.errors import ConfigError
from vla_rl.interfaces import AlgorithmContext
from vla_rl.options import ActorOptions, view
from vla_rl.types import Transitions

DEFAULT = "run=residual_quickstart"
# Features from the replay; images of both observations of each row encoded for the update, by the
# frozen policy or by a trunk that learns.
WAYS = KEPT, ENCODED, PICTURES = ("kept", "encoded", "pictures")


def measure(
    overrides: Sequence[str],
    batch: int,
    size: int,
    rounds: int = 3,
    updates: int = 10,
    decisions: int = 2000,
) -> dict[str, Any]:
    """Milliseconds of an update of critics and actor at ``batch`` decisions, drawing included.

    The policy is the config's, untrained, the replay holds synthetic episodes of ``decisions`` (two
    cameras of ``size`` pixels). All `WAYS` make ``rounds`` turns of ``updates``; medians count.
    Raises `ConfigError` where the config's actor reads no kept features; where it cannot read
    pictures that way is left out.
    """
    config = compose([*with_run(overrides, (DEFAULT,)), f"algorithm.batch_size={batch}"])
    if config.actor_type in ("none", "own"):
        raise ConfigError(
            f"actor={config.actor_type} reads no kept features: name a run with "
            "residual, direct or steered"
        )
    algorithm, replay, base = learner_on_noise(config, size, decisions)
    learners = {KEPT: algorithm, ENCODED: algorithm}
    if PICTURES in view(config.actor, ActorOptions).can_see:
        learners[PICTURES] = _learner(config, base, PICTURES)
    generator = torch.Generator().manual_seed(0)
    calls = {
        way: functools.partial(learner.update, drawing(replay, base, way, generator))
        for way, learner in learners.items()
    }
    took = take_turns(calls, rounds, updates)
    milliseconds = {
        way: 1e3 * statistics.median(each.wall for each in found) for way, found in took.items()
    }
    return {
        "threads": torch.get_num_threads(),
        "overrides": list(overrides),
        "batch": batch,
        "pixels": size,
        "milliseconds": milliseconds,
        "ratio": milliseconds[ENCODED] / milliseconds[KEPT],
    }


def text(document: Mapping[str, Any]) -> str:
    kept, encoded, pictures = (document["milliseconds"].get(way) for way in WAYS)
    own = "" if pictures is None else f", {pictures:.0f} ms with eyes of its own"
    return (
        f"an update at batch {document['batch']}, two cameras of {document['pixels']} px, "
        f"{document['threads']} thread(s): {kept:.0f} ms with kept features, {encoded:.0f} ms with "
        f"images encoded anew ({document['ratio']:.1f} times){own}"
    )


def learner_on_noise(config: RunConfig, size: int, decisions: int) -> tuple[Any, Replay, Any]:
    """The algorithm on an untrained policy by its features, its replay filled, and the frozen
    policy; warm-ups are over."""
    sizes = Sizes(size=size)
    spec, rng = robot(sizes), np.random.default_rng(0)
    stats = [
        short_statistics(feature_statistics(rng.random((64, n))))
        for n in (spec.action_dim, spec.proprio_dim)
    ]
    base = (
        build.implementation("policy", config.policy_type)
        .from_statistics(config.policy, spec, *stats, seed=0)
        .eval()
    )
    algorithm = _learner(config, base, "features")
    replay, sizes = Replay(), dataclasses.replace(sizes, chunk=algorithm.policy.chunk_length)
    for trajectory in synthetic_episodes(sizes, decisions):
        rewards = trajectory.rewards.sum(1)
        replay.add(trajectory, rewards, ONLINE, algorithm.annotate(trajectory, rewards))
    return algorithm, replay, base


def _learner(config: RunConfig, base: Any, eyes: str) -> Any:
    options = dataclasses.replace(config.actor, eyes=eyes)
    actor = build.implementation("actor", config.actor_type).from_base(options, base)
    return build.implementation("algorithm", config.algorithm_type).from_context(
        dataclasses.replace(config.algorithm, critic_warmup=0, offline_updates=0),
        actor,
        AlgorithmContext(_none, _none),
    )


def _none() -> Any:
    """No critic and no reference beside what the algorithm makes itself."""


def drawing(
    replay: Replay, base: Any, way: str, generator: torch.Generator
) -> Callable[..., Transitions]:
    """What an algorithm's ``update`` draws with, in one of the `WAYS`."""

    def draw(count: int, **options: Any) -> Transitions:
        if way != ENCODED:
            return replay.draw(count, generator, **options)
        found = replay.draw(count, generator, **{**options, "images": True})
        now, later = (
            base.frame_features(seen) for seen in (found.observations, found.next_observations)
        )
        return dataclasses.replace(
            found, extra=found.extra | now, next_extra=found.next_extra | later
        )

    return draw
