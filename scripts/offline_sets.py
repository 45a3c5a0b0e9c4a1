"""Sets for learning offline: what `replay.offline=[FOLDER]` names, from a scripted expert or from
the first episodes of a run.

    PYTHONPATH=. python scripts/offline_sets.py scripted FOLDER --decisions 8000 run=gym KEY=VALUE...
    PYTHONPATH=. python scripts/offline_sets.py first FOLDER --decisions 8000 --run outputs/NAME

``scripted``: episodes of ``env.expert``, disturbed by `NOISES` half-ranges in turn, and random ones
(`None`); one env, decisions of one control step. ``first``: those that the run acted itself, in
their order. Either set is closed with the episode that makes it ``--decisions`` long.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sim.stepped import expert_of
from vla_rl import config as configs
from vla_rl.assembly.env_and_policy import checked_env
from vla_rl.data.recorded import recorded
from vla_rl.data.replay import Replay
from vla_rl.files import replay_of
from vla_rl.interfaces import Env, Policy
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.splits import stable_seed
from vla_rl.types import (
    ActionChunk,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    PolicyOutput,
    Trajectory,
)

NOISES = (0.5, 1.0, 2.0, None)  # half-ranges; None: actions at random
_TOGETHER = 8  # episodes of one noise, before those of the next


class DisturbedExpert(Policy):
    """A scripted expert that reads the state alone, with Gaussian ``noise`` in half-ranges (None:
    actions at random)."""

    chunk_length = 1

    def __init__(self, embodiment: EmbodimentSpec, act: Any, noise: float | None) -> None:
        self.embodiment, self._act, self._noise = embodiment, act, noise

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        low, high = np.array(self.embodiment.action_low), np.array(self.embodiment.action_high)
        rows = []
        for row, seed in enumerate(range(len(observation)) if seeds is None else seeds):
            rng = np.random.default_rng(seed)
            if self._noise is None:
                rows.append(rng.uniform(low, high))
                continue
            label = np.clip(self._act(observation.proprio[row].double().numpy()), low, high)
            rows.append(label + self._noise * (high - low) / 2 * rng.standard_normal(label.shape))
        actions = torch.as_tensor(np.clip(rows, low, high), dtype=torch.float32)[:, None]
        return PolicyOutput(ActionChunk.whole(actions), torch.zeros(len(rows)), {})


def scripted(env: Env, act: Any, seed: int) -> Iterator[Trajectory]:
    """Episode after episode of the one task that ``env`` has, without end."""
    (task,) = env.tasks
    engines = [RolloutEngine(env, DisturbedExpert(env.embodiment, act, noise)) for noise in NOISES]
    for part, engine in enumerate(itertools.cycle(engines)):
        plan = [
            EpisodeSpec(task.task_id, i, seed=stable_seed("offline set", seed, i))
            for i in range(part * _TOGETHER, (part + 1) * _TOGETHER)
        ]
        yield from engine.collect(plan).trajectories


def write(replay: Replay, episodes: Iterator[Trajectory], decisions: int) -> int:
    """How many of the episodes that make it so long succeeded."""
    solved = 0
    for trajectory in episodes:
        replay.add(trajectory, trajectory.rewards.sum(1))
        solved += trajectory.success
        if len(replay) >= decisions:
            break
    return solved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("scripted", "first"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decisions", type=int, default=8000)
    parser.add_argument("--run", type=Path)
    args, overrides = parser.parse_known_args()
    with contextlib.ExitStack() as resources:
        if args.what == "scripted":
            config = configs.compose(overrides)
        else:
            config = configs.load(args.run / "config.yaml")
        env = checked_env(config, resources)
        if args.what == "scripted":
            act = expert_of(config.env, env.tasks[0].task_id)
            episodes = scripted(env, act, config.seed)
        else:
            episodes = recorded(replay_of(args.run), env.embodiment, 1, {})
        replay = Replay(args.folder, embodiment=env.embodiment)
        solved = write(replay, episodes, args.decisions)
    print(f"{len(replay)} decisions of {replay.episodes} episodes, {solved} of them solved")


if __name__ == "__main__":
    main()
