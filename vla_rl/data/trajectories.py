"""Trajectories to train and judge reward models on: demonstrations, and rollouts that were
saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.data.demonstrations import DemonstrationDataset, DemonstrationEpisode
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.recording import load_whoever
from vla_rl.storage import load_state, save_state
from vla_rl.types import EmbodimentSpec, EpisodeSpec, Observation, Trajectory

ROLLOUTS = "rollouts"


# ----------------------------------------------------------------------------------- demonstrations
def trajectories_of_dataset(
    path: str | Path,
    embodiment: EmbodimentSpec | None = None,
    *,
    stride: int = 4,
    limit: int = 0,
    seed: int = 0,
) -> list[Trajectory]:
    """Demonstrations of a LeRobotDataset v3 folder as trajectories (`demonstration_trajectories`)
    to learn from: without those that the run which collected them keeps out of training
    (`DatasetError` where that leaves none). Of those beyond ``limit`` no picture is decoded."""
    choose = functools.partial(_draw, limit=limit, seed=seed, to_learn_from=path)
    dataset = load_demonstrations(path, embodiment, choose=choose)
    return demonstration_trajectories(dataset, stride=stride)


def _draw(
    episodes: Sequence[DemonstrationEpisode],
    _: torch.Tensor | None = None,
    *,
    limit: int,
    seed: int,
    to_learn_from: str | Path | None = None,
) -> list[torch.Tensor | None]:
    """``limit`` (0: all) of the episodes at random, as a reader of datasets chooses; of the dataset
    ``to_learn_from`` only what is not kept out."""
    free = [i for i, e in enumerate(episodes) if to_learn_from is None or not e.kept_out]
    if episodes and not free:
        raise DatasetError(
            f"all {len(episodes)} demonstrations of {to_learn_from} are among those which the run "
            "that collected them keeps out of training (meta/kept_out.json): name another dataset"
        )
    kept = set(free)
    if limit and limit < len(free):
        generator = torch.Generator().manual_seed(seed)
        kept = {free[i] for i in torch.randperm(len(free), generator=generator)[:limit].tolist()}
    return [
        torch.ones(e.length, dtype=torch.bool) if i in kept else None
        for i, e in enumerate(episodes)
    ]


def demonstration_trajectories(
    dataset: DemonstrationDataset, *, stride: int = 4, limit: int = 0, seed: int = 0
) -> list[Trajectory]:
    """One trajectory per episode with a decision every ``stride`` control steps, whose chunk is the
    actions until the next: what was sent, within the robot's bounds, and as ``proposed`` the
    labels, where the dataset has both; else the labels.

    The last recorded frame stands for the final observation (a dataset holds none after the last
    action). Episodes of other tools have no success flag: they count as successes, and their
    instruction as the task. ``limit`` (0: all) draws that many episodes. Demonstrations of a single
    frame are left out.
    """
    return list(each_trajectory(dataset, stride=stride, limit=limit, seed=seed))


def each_trajectory(
    dataset: DemonstrationDataset, *, stride: int = 4, limit: int = 0, seed: int = 0
) -> Iterator[Trajectory]:
    """`demonstration_trajectories`, one after the other: of pictures on the disk no more than
    one episode's are there."""
    order = [
        i
        for i, mask in enumerate(_draw(dataset.episodes, limit=limit, seed=seed))
        if mask is not None
    ]
    sent = dataset.actions if dataset.sent is None else dataset.as_sent().actions
    for i in order:
        e = dataset.episodes[i]
        if e.length < 2:
            continue
        rows = torch.arange(e.start, e.start + e.length - 1, stride)
        steps = rows[:, None] + torch.arange(stride)
        valid = steps < e.start + e.length
        steps = steps.clamp(max=e.start + e.length - 1)
        success = True if e.success is None else bool(e.success)
        rewards = torch.zeros(valid.shape)
        if success:
            rewards[-1, int(valid[-1].sum()) - 1] = 1.0
        spec = EpisodeSpec(
            task_id=e.task_id or e.instruction,
            init_state_id=-1 if e.init_state_id is None else e.init_state_id,
            group_id=i,
            rollout_id=f"demonstration-{i}",
        )
        yield Trajectory(
            episode=spec,
            observations=_rows(dataset, rows, e.instruction),
            final_observation=_rows(dataset, torch.tensor([e.start + e.length - 1]), e.instruction),
            actions=sent[steps],
            valid=valid,
            rewards=rewards,
            behavior_log_prob=torch.zeros(len(rows)),
            replay={},
            terminated=success,
            truncated=not success,
            success=success,
            is_human=valid if dataset.by_person is None else valid & dataset.by_person[steps],
            proposed=None if dataset.sent is None else dataset.actions[steps],
        )


def _rows(dataset: DemonstrationDataset, rows: torch.Tensor, instruction: str) -> Observation:
    return Observation(
        images={name: frames[rows] for name, frames in dataset.images.items()},
        proprio=dataset.proprio[rows],
        instruction=(instruction,) * len(rows),
    )


# ----------------------------------------------------------------------------------------- rollouts
def save_rollouts(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories (observations, outcomes; not what only the learner needs) to
    ``folder``."""
    slim = [
        dataclasses.replace(t, replay={}, value=None, behavior_log_prob=torch.zeros(len(t)))
        for t in trajectories
    ]
    save_state(folder, {"trajectories": [trajectory_state(t) for t in slim]})


def load_rollouts(folder: Path) -> list[Trajectory]:
    """Inverse of `save_rollouts`."""
    return [trajectory_from_state(t) for t in load_state(folder)["trajectories"]]


# ------------------------------------------------------------------------------------------- source
@dataclasses.dataclass(frozen=True)
class Source:
    """Trajectories of a folder, the robot they are of, and the config of the run they come from
    (None: no run)."""

    trajectories: list[Trajectory]
    embodiment: EmbodimentSpec | None
    run: Any
    what: str


def dataset_source(
    folder: Path, *, stride: int = 4, limit: int = 0, to_learn_from: bool = False
) -> Source:
    """The demonstrations of a LeRobotDataset v3 folder, ``to_learn_from`` as
    `trajectories_of_dataset` has them, else all."""
    choose = functools.partial(
        _draw, limit=limit, seed=0, to_learn_from=folder if to_learn_from else None
    )
    dataset = load_whoever(folder, choose)
    trajectories = demonstration_trajectories(dataset, stride=stride)
    only = ", without those that its run keeps out of training" if to_learn_from else ""
    what = "\n".join(
        [
            f"{len(trajectories)} demonstrations of {folder}{only}",
            *(f"warning: {n}" for n in dataset.notes),
        ]
    )
    return Source(trajectories, dataset.embodiment, None, what)


def rollouts_source(folder: Path) -> Source:
    """Rollouts that `save_rollouts` wrote."""
    trajectories = load_rollouts(folder)
    return Source(trajectories, None, None, f"{len(trajectories)} rollouts of {folder}")
