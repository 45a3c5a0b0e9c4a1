"""Where an episode's images and what its decisions are evaluated again from lie: in Ray's object
store, on the node where they were made, until the one process that uses them fetches them.

An actor hands out a list of packed episodes per object; the driver owns the objects and knows of
each episode all but images and replay (`Trajectory.light`). An object is gone with the node that
holds it: its episodes run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.cluster.packing import apart, packed, together, unpacked
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.learning.learners import EpisodesLost
from vla_rl.types import Trajectory


@dataclass(frozen=True)
class Payload:
    """The episode ``rollout_id``, the ``place``-th of the object behind ``reference``."""

    ray: Any
    rollout_id: str
    reference: Any
    place: int

    def fetch(self) -> Trajectory:
        """The whole episode. Raises `EpisodesLost`."""
        try:
            return fetched(self.ray.get(self.reference)[self.place])
        except self.ray.exceptions.ObjectLostError:  # its node is gone, and so is what it held
            raise EpisodesLost([self.rollout_id]) from None


def handed_out(episodes: Sequence[Trajectory]) -> list[np.ndarray]:
    """What one object holds of these episodes."""
    return [packed(trajectory_state(episode)) for episode in episodes]


def fetched(data: np.ndarray) -> Trajectory:
    """The episode of an entry of `handed_out`."""
    return trajectory_from_state(unpacked(data))


def light_state(episodes: Iterable[Trajectory]) -> dict[str, Any]:
    """What driver and ranks are told of one or more episodes, for `packed`; `light_trajectories`
    inverts it."""
    return {"episodes": together([trajectory_state(episode.light()) for episode in episodes])}


def light_trajectories(state: Mapping[str, Any]) -> list[Trajectory]:
    """Inverse of `light_state`. Their tensors are new ones: nothing of ``state`` is held."""
    return [trajectory_from_state(one) for one in apart(state["episodes"])]


def split(sizes: Sequence[int], parts: int) -> list[int]:
    """Which of ``parts`` each item goes to, so that their sums differ little: the largest first, to
    whoever has least (Graham 1969)."""
    sums, chosen = [0] * parts, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(parts), key=lambda part: (sums[part], part))
        sums[chosen[i]] += sizes[i]
    return chosen


def owners(episodes: Sequence[Trajectory], ranks: int) -> list[int]:
    """The rank that each episode goes to. Those of one object go to one rank, as an object is
    fetched whole; every rank gets some, if there are objects enough."""
    objects: dict[Any, list[int]] = {}
    for i, episode in enumerate(episodes):
        objects.setdefault(episode.payload.reference, []).append(i)
    kept = list(objects.values())
    while len(kept) < ranks and max(map(len, kept)) > 1:  # an object that two ranks fetch
        largest = max(kept, key=len)
        kept.remove(largest)
        kept += [largest[::2], largest[1::2]]
    chosen = split([sum(len(episodes[i]) for i in rows) for rows in kept], ranks)
    of = {i: rank for rows, rank in zip(kept, chosen, strict=True) for i in rows}
    return [of[i] for i in range(len(episodes))]


def stored(ray: Any, put: Callable[[Any], Any], episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """``episodes``, each with a payload: those that this process has whole are handed out by it
    (``put``)."""
    return [
        episode
        if episode.payload is not None
        else dataclasses.replace(
            episode.light(),
            payload=Payload(ray, episode.rollout_id, put(handed_out([episode])), 0),
        )
        for episode in episodes
    ]


def places(episodes: Sequence[Trajectory]) -> list[tuple[Any, int]]:
    """(reference, place) of each episode, for a process that fetches its own."""
    return [(episode.payload.reference, episode.payload.place) for episode in episodes]
