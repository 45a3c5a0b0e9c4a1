"""Dynamic sampling: groups of episodes that say something are kept, the others are not learned
from.

Followed: DAPO (Yu et al. 2025 §3.2) in SimpleVLA-RL's form (keep a group when its success rate lies
in a range), here with the surplus kept for the next iteration instead of dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.types import Trajectory


class GroupBuffer:
    """Dynamic sampling: keeps the groups whose success rate says something, and hands them out in
    batches.

    A group in which all succeed or all fail gives no group-relative gradient. `add` sorts a
    rollout's trajectories into groups by ``episode.group_id`` and keeps those with a success rate
    in [``low``, ``high``] (SimpleVLA-RL: 0.1 … 0.9); `take` hands out the oldest ones and leaves
    the surplus for the next iteration. Group ids are renumbered from 0 on the way out, since two
    iterations may have used the same ids. Groups of one, and at `take` groups whose policy version
    is more than ``max_staleness`` behind, are dropped.
    """

    def __init__(self, low: float = 0.1, high: float = 0.9, max_staleness: int = 4):
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"success range [{low}, {high}] must lie inside [0, 1]")
        self.low, self.high, self.max_staleness = low, high, max_staleness
        self.groups: list[list[Trajectory]] = []
        self.seen = self.kept = 0

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self.groups)

    def add(
        self, trajectories: Iterable[Trajectory], scores: Mapping[str, float] | None = None
    ) -> int:
        """Take in complete groups of one rollout; returns how many groups were kept.

        With ``scores`` (by rollout id) a group is kept where its members' scores differ, whatever
        their success: a shaped reward may well tell the members of an all-fail group apart.
        """
        by_id: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            by_id.setdefault(trajectory.episode.group_id, []).append(trajectory)

        def tells_apart(group: list[Trajectory]) -> bool:
            if scores is None:
                return self.low <= success_rate(group) <= self.high
            values = [scores[t.rollout_id] for t in group]
            return max(values) - min(values) > 1e-6

        fresh = [g for g in by_id.values() if len(g) > 1 and tells_apart(g)]
        self.groups += fresh
        self.seen += len(by_id)
        self.kept += len(fresh)
        return len(fresh)

    def take(self, num_groups: int, policy_version: int | None = None) -> list[Trajectory]:
        """Trajectories of up to ``num_groups`` groups, oldest first, with group ids renumbered
        from 0."""
        if policy_version is not None:
            oldest = policy_version - self.max_staleness
            self.groups = [g for g in self.groups if min(t.policy_version for t in g) >= oldest]
        out, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        return [
            dataclasses.replace(t, episode=dataclasses.replace(t.episode, group_id=i))
            for i, g in enumerate(out)
            for t in g
        ]

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of tensors, numbers and strings only (nothing that needs
        unpickling)."""
        groups = [[trajectory_state(t) for t in g] for g in self.groups]
        return {"groups": groups, "seen": self.seen, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = [[trajectory_from_state(t) for t in g] for g in state["groups"]]
        self.seen, self.kept = int(state["seen"]), int(state["kept"])


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.success for t in trajectories) / len(trajectories)
