"""Episodes of an earlier run's replay as trajectories, for another run to learn from.

What its learner kept of each frame (features, the frozen policy's action) is left behind: it belongs to that run's policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.data.replay import observation_of
from vla_rl.data.replay_folder import DECISIONS, read_folder
from vla_rl.errors import ConfigError
from vla_rl.types import FRESH, EmbodimentSpec, EpisodeSpec, Trajectory

_EXTRA = "extra:"


def recorded(path: Path, embodiment: EmbodimentSpec | None, chunk_length: int) -> Iterator[Trajectory]:
    """Every closed episode of the replay ``path``, demonstrations aside; a run that still writes there is not disturbed.

    ``rewards`` [t h] holds what that run gave each decision in its first control step. The task is the instruction, as
    replays name none. Raises `ConfigError` where decisions there are not of ``chunk_length`` control steps, `UserError` for
    a replay of another robot or a damaged one.
    """
    tables, records = read_folder(path, embodiment)
    frames = [table for name, table in tables.items() if not name.startswith(_EXTRA) and name != DECISIONS]
    texts: list[str] = []
    row = 0
    for number, record in enumerate(records):
        t, texts = int(record["decisions"]), [*texts, *record["texts"]]
        if record["source"] != "demonstrations":
            decisions = tables[DECISIONS].take(np.arange(row, row + t))
            if (length := decisions["actions"].shape[1]) != chunk_length:
                raise ConfigError(
                    f"replay.offline: decisions in {path} last {length} control steps and this run's {chunk_length}, so "
                    f"they cannot be drawn together: give this run that one's actor (actor.hold or actor.chunk_length), "
                    f"or leave the replay out"
                )
            seen = np.arange(row + number, row + number + t + 1)
            yield _episode(record, decisions, {k: v for table in frames for k, v in table.take(seen).items()}, texts)
        row += t


def _episode(
    record: Mapping[str, Any], decisions: Mapping[str, Any], seen: Mapping[str, Any], texts: Sequence[str]
) -> Trajectory:
    observations = observation_of(seen, texts)
    t, valid = len(decisions["actions"]), decisions["valid"]
    human = decisions["human"]
    by_person = human.any(1)
    rewards = torch.zeros(valid.shape)
    rewards[:, 0] = decisions["rewards"]
    return Trajectory(
        episode=EpisodeSpec(observations.instruction[0], -1, rollout_id=f"offline/{record['rollout_id']}"),
        observations=observations[list(range(t))],
        final_observation=observations[[t]],
        actions=decisions["actions"],
        valid=valid,
        rewards=rewards,
        behavior_log_prob=torch.zeros(t),
        replay={FRESH: by_person | torch.cat([torch.ones(1, dtype=torch.bool), by_person[:-1]])},
        terminated=bool(record["terminated"]),
        truncated=not record["terminated"],
        success=bool(record["success"]),
        policy_version=int(record["version"]),
        is_human=human,
        proposed=decisions["proposed"] if record["proposed"] else None,
    )
