"""Episodes of an earlier run's replay as trajectories, for another run to learn from.

What its learner kept of each frame (features, the frozen policy's action) is left behind: it
belongs to that run's policy. So are its rewards, and what it had from elsewhere itself:
demonstrations, and episodes of other runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.data.checks import DataCheck, Rows
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY
from vla_rl.data.replay import ONLINE, observation_of
from vla_rl.data.replay_checks import NO_PREFIX, SENT, begins_each_decision
from vla_rl.data.replay_folder import DECISIONS, read_folder, stored_episode
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.files import replay_of
from vla_rl.types import FRESH, EmbodimentSpec, EpisodeSpec, Trajectory

_NOT_OURS = "restore that folder, or leave it out"
# what is checked of the columns
_NUMBERS = {"actions", "proposed", "valid", "rewards", "proprio", "text"}


def check_recorded(named: Sequence[str], own: Path, embodiment: EmbodimentSpec | None) -> None:
    """Raise `UserError` for a replay of ``named`` runs that is none, empty, damaged, of another
    robot (None: any), named twice, or the run's ``own``."""
    folders = [replay_of(Path(path)).resolve() for path in named]
    for path, folder in zip(named, folders):
        if folder == own.resolve() or folders.count(folder) > 1:
            why = "is this run's own" if folder == own.resolve() else "is named more than once"
            raise ConfigError(f"replay.offline: {path} {why}: name each other run once")
        if not any(record["source"] == ONLINE for record in read_folder(folder, embodiment)[1]):
            raise ConfigError(
                f"replay.offline: {path} holds no episode of that run itself: let it "
                "act first, or omit it"
            )
        check = DataCheck(str(folder), "replay", embodiment, leeway=SENT)
        for rows in recorded_rows(folder, embodiment):
            check.add(rows)
        check.report().require()


def recorded_rows(path: Path, embodiment: EmbodimentSpec | None) -> Iterator[Rows]:
    """The numbers of every closed episode of a replay, whoever acted, as the check of data takes
    them; no picture is read. Raises as `recorded`."""
    tables, records = read_folder(path, embodiment)
    small = {
        name: table for name, table in tables.items() if _NUMBERS & {f.name for f in table.fields}
    }
    texts: list[str] = []
    row = 0
    for number, record in enumerate(records):
        try:
            t, texts = int(record["decisions"]), [*texts, *record["texts"]]
            found: dict[str, Tensor] = {}
            for name, table in small.items():
                found |= table.unpack(
                    table.stored(row, t) if name == DECISIONS else table.stored(row + number, t + 1)
                )
            vectors = {
                ACTION_KEY: found["actions"][found["valid"]].numpy(),
                STATE_KEY: found["proprio"].numpy(),
                "proposed": found["proposed"].flatten(0, 1).numpy(),
                "rewards": found["rewards"][:, None].numpy(),
            }
            if not begins_each_decision(found["valid"]):
                raise ValueError(f"it has a decision {NO_PREFIX}")
            said, success = texts[int(found["text"][0])], record["success"]
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"replay: episode {number} of {path} is no episode ({first_line(error)}): "
                f"{_NOT_OURS}"
            ) from error
        yield Rows(f"episode {number}", str(path), vectors, said, success, aligned=False)
        row += t


def recorded(
    path: Path, embodiment: EmbodimentSpec | None, chunk_length: int, tasks: Mapping[str, str]
) -> Iterator[Trajectory]:
    """Every closed episode that the run of the replay ``path`` acted itself; it may still write
    there.

    ``rewards`` [t h] are 1 in the last control step of a success, else 0. ``tasks`` {instruction:
    task id}, as replays name no task (an instruction that is not there is its own). Raises
    `ConfigError` where decisions there are not of ``chunk_length`` control steps, `UserError` for a
    replay of another robot, or one that is damaged or was cut meanwhile.
    """
    tables, records = read_folder(path, embodiment)
    texts: list[str] = []
    row = 0
    for number, record in enumerate(records):
        t, texts = int(record["decisions"]), [*texts, *record["texts"]]
        if record["source"] == ONLINE:
            if (stored := stored_episode(tables, record, number, row)) is None:
                raise UserError(
                    f"replay.offline: episode {number} of {path} is not as it was written; perhaps "
                    "its run went back to a checkpoint just now. Start again, restore that folder, "
                    "or leave it out"
                )
            found = {
                key: rows
                for name, part in stored.items()
                for key, rows in tables[name].unpack(part).items()
            }
            if (length := found["actions"].shape[1]) != chunk_length:
                raise ConfigError(
                    f"replay.offline: decisions in {path} last {length} control steps and this "
                    f"run's {chunk_length}, so they cannot be drawn together: give this run that "
                    "one's actor (actor.hold or actor.chunk_length), or leave the replay out"
                )
            yield _episode(record, found, texts, tasks)
        row += t


def _episode(
    record: Mapping[str, Any],
    found: Mapping[str, Tensor],
    texts: Sequence[str],
    tasks: Mapping[str, str],
) -> Trajectory:
    seen, valid, human = observation_of(found, texts), found["valid"], found["human"]
    t, by_person = len(valid), human.any(1)
    rewards = torch.zeros(valid.shape)
    rewards[-1, int(valid[-1].sum()) - 1] = float(record["success"])
    said = seen.instruction[0]
    return Trajectory(
        episode=EpisodeSpec(
            tasks.get(said, said), -1, rollout_id=f"offline/{record['rollout_id']}"
        ),
        observations=seen[list(range(t))],
        final_observation=seen[[t]],
        actions=found["actions"],
        valid=valid,
        rewards=rewards,
        behavior_log_prob=torch.zeros(t),
        replay={FRESH: by_person | torch.cat([torch.ones(1, dtype=torch.bool), by_person[:-1]])},
        terminated=bool(record["terminated"]),
        truncated=not record["terminated"],
        success=bool(record["success"]),
        policy_version=int(record["version"]),
        is_human=human,
        proposed=found["proposed"] if record["proposed"] else None,
    )
