"""What a reward says of success at equal times, and what can be said of it without looking: from
the clock, from the arm.

A task's own end makes ends unlike: successes stop early and failures at the limit, so that the
length of an episode alone tells them apart (`clock_auc`). Here a success is compared with a failure
at the decision at which the first of the two ended, and the other is cut there (`cut_at`), so that
a model cannot know how long it went on; how they ended it is not told either. A clock says the same
of both, which is an AUC of 1/2.

`proprio_auc` is that of a ridge regression of success on the proprioception at those times and its
squares, standardised, each episode judged by a fit on the others of its task (five folds). What a
reward says beyond it, it saw in the pictures.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vla_rl.interfaces import RewardModel
from vla_rl.types import Trajectory

TIMES = 8  # at which progress is asked for at most, those with most pairs
FOLDS = 5
RIDGE = 1.0  # in rows of standardised features


@dataclass(frozen=True)
class Pair:
    """A success and a failure of one task (places among the trajectories), and the decision
    where the first one ended."""

    won: int
    lost: int
    time: int


def pairs_of(trajectories: Sequence[Trajectory]) -> list[Pair]:
    """Every success with every failure of its task, at the `TIMES` decisions that have most of
    them."""
    found = list(_all_pairs(trajectories))
    counts = Counter(pair.time for pair in found)
    kept = sorted(counts, key=lambda time: (-counts[time], time))[:TIMES]
    return [pair for pair in found if pair.time in kept]


def cut_at(trajectory: Trajectory, time: int) -> Trajectory:
    """The episode as if time had run out before decision ``time``: no success then, and another
    rollout id."""
    if len(trajectory) <= time:
        return trajectory
    t, rows = trajectory, list(range(time))
    rows_before: Any = {name: None if (x := vars(t)[name]) is None else x[:time] for name in _ROWS}
    return dataclasses.replace(
        t,
        episode=dataclasses.replace(t.episode, rollout_id=f"{t.rollout_id}~{time}"),
        observations=t.observations[rows],
        final_observation=t.observations[[time]],
        replay={name: values[:time] for name, values in t.replay.items()},
        terminated=False,
        truncated=True,
        success=False,
        failure="",
        instead=None,
        **rows_before,
    )


_ROWS = (
    "actions",
    "valid",
    "rewards",
    "behavior_log_prob",
    "value",
    "is_human",
    "proposed",
    "decision_version",
)

Ends = Mapping[tuple[int, int], float]  # (trajectory, time) → what is said of it


def progress_ends(
    reward: RewardModel, trajectories: Sequence[Trajectory], pairs: Sequence[Pair]
) -> dict[tuple[int, int], float]:
    """The end of progress of every episode at every time that it has in ``pairs``; NaN of a
    curve that is not finite."""
    found: dict[tuple[int, int], float] = {}
    for time in sorted({pair.time for pair in pairs}):
        seen = [cut_at(t, time) for t in trajectories]
        ends = _ends(reward, [_untold(t) for t in seen])
        # it compares with the successes of the others, and needs to know them
        if np.isnan(ends).any():
            ends = _ends(reward, seen)
        found |= {(i, time): float(end) for i, end in enumerate(ends)}
    return found


def _ends(reward: RewardModel, trajectories: Sequence[Trajectory]) -> np.ndarray:
    curves = reward.progress(trajectories)
    return np.array(
        [float(c[-1]) if bool(c.isfinite().all()) else float("nan") for c in curves], np.float64
    )


def _untold(trajectory: Trajectory) -> Trajectory:
    """The same, without a word of how it ended."""
    return dataclasses.replace(
        trajectory,
        terminated=False,
        truncated=True,
        success=False,
        failure="",
        rewards=torch.zeros(trajectory.valid.shape),
    )


def pair_auc(pairs: Sequence[Pair], ends: Ends) -> float:
    """Share of pairs in which the success is ahead, ties half; NaN without any of which both are
    known."""
    gaps = np.array(
        [ends[pair.won, pair.time] - ends[pair.lost, pair.time] for pair in pairs], np.float64
    )
    gaps = gaps[np.isfinite(gaps)]
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean()) if len(gaps) else float("nan")


def proprio_ends(
    trajectories: Sequence[Trajectory], pairs: Sequence[Pair]
) -> dict[tuple[int, int], float]:
    """What proprioception alone says of success at those times (see the module); NaN where a
    task has too few episodes."""
    found: dict[tuple[int, int], float] = {}
    for task in dict.fromkeys(t.episode.task_id for t in trajectories):
        own = [pair for pair in pairs if trajectories[pair.won].episode.task_id == task]
        rows = sorted(
            {(pair.won, pair.time) for pair in own} | {(pair.lost, pair.time) for pair in own}
        )
        if not rows:
            continue
        x = np.stack([_proprio(trajectories[i], time) for i, time in rows])
        x = np.concatenate([x, np.square(x - x.mean(0))], 1)
        y = np.array([trajectories[i].success for i, _ in rows], np.float64)
        fold = np.array([_folds([i for i, _ in rows], trajectories)[i] for i, _ in rows])
        for k in range(FOLDS):
            train, test = fold != k, fold == k
            if not test.any():
                continue
            known = 0.0 < y[train].mean() < 1.0 if train.any() else False
            said = (
                _ridge(x[train], y[train], x[test]) if known else np.full(int(test.sum()), np.nan)
            )
            found |= dict(zip([row for row, inside in zip(rows, test) if inside], said.tolist()))
    return found


def _proprio(trajectory: Trajectory, time: int) -> np.ndarray:
    seen = torch.cat([trajectory.observations.proprio, trajectory.final_observation.proprio])
    return seen[min(time, len(trajectory))].double().numpy()


def _folds(members: Sequence[int], trajectories: Sequence[Trajectory]) -> dict[int, int]:
    """A fold of each episode, successes and failures dealt out in turn."""
    order = sorted(set(members), key=lambda i: (not trajectories[i].success, i))
    return {i: place % FOLDS for place, i in enumerate(order)}


def _ridge(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """What a ridge regression on rows ``x`` says of ``asked``, both outcomes weighing alike."""
    mean, scale = x.mean(0), x.std(0)
    scale[scale < 1e-9] = np.inf  # what never changes says nothing
    weights = np.where(y > 0, 0.5 / y.sum(), 0.5 / (1.0 - y).sum()) * len(y)
    z, centre = (x - mean) / scale, float((weights * y).sum() / weights.sum())
    lever = (z * weights[:, None]).T
    coefficients = np.linalg.solve(lever @ z + RIDGE * np.eye(z.shape[1]), lever @ (y - centre))
    return (asked - mean) / scale @ coefficients


def clock_auc(trajectories: Sequence[Trajectory]) -> float:
    """The AUC of success that the length of an episode has alone, for whichever of short and
    long means success."""
    pairs = [
        (len(trajectories[pair.won]), len(trajectories[pair.lost]))
        for pair in _all_pairs(trajectories)
    ]
    shorter = [float(won < lost) + 0.5 * (won == lost) for won, lost in pairs]
    value = float(np.mean(shorter)) if shorter else float("nan")
    return max(value, 1.0 - value)


def _all_pairs(trajectories: Sequence[Trajectory]) -> Iterator[Pair]:
    for i, a in enumerate(trajectories):
        for j, b in enumerate(trajectories):
            if a.success and not b.success and a.episode.task_id == b.episode.task_id:
                yield Pair(i, j, min(len(a), len(b)))


@dataclass(frozen=True)
class Compared:
    """Successes and failures at equal times: what progress and proprioception say then."""

    trajectories: Sequence[Trajectory]
    lasted: Sequence[Trajectory]  # of the task, or of all
    pairs: list[Pair]
    progress: Ends
    proprioception: Ends

    @classmethod
    def of(cls, reward: RewardModel, trajectories: Sequence[Trajectory]) -> Compared:
        pairs = pairs_of(trajectories)
        said = progress_ends(reward, trajectories, pairs)
        return cls(trajectories, trajectories, pairs, said, proprio_ends(trajectories, pairs))

    def of_task(self, task: str) -> Compared:
        own = [t for t in self.trajectories if t.episode.task_id == task]
        pairs = [pair for pair in self.pairs if self.trajectories[pair.won].episode.task_id == task]
        return dataclasses.replace(self, pairs=pairs, lasted=own)

    @property
    def reward(self) -> float:
        return pair_auc(self.pairs, self.progress)

    @property
    def proprio(self) -> float:
        return pair_auc(self.pairs, self.proprioception)

    @property
    def clock(self) -> float:
        return clock_auc(self.lasted)

    @property
    def counts(self) -> tuple[int, int]:
        """Successes and failures that were compared."""
        return len({pair.won for pair in self.pairs}), len({pair.lost for pair in self.pairs})
