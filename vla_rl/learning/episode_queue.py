"""The folder between an actor and a learner that run at the same time: episodes one way, weights
and figures the other.

Whatever is in it appears in one step and is read without unpickling, so either side may be killed
at any moment, and the two may run on machines that share a disk.

    inbox/<first>-<last>/   episodes with their rewards, by tickets: numbers from 1, one per episode, never used again
    weights.safetensors     the newest version of what is learned, and how many updates made it
    figures.json            what the learner has done; its process writes it anew every few moments
    state/                  what the learner goes on from
    job.json, failure.json  what the learner is to do; why it gave up
    beat                    touched as its loop turns: a learner that hangs touches it no more
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.checkpoint import restoring
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.errors import CheckpointError
from vla_rl.files import last_good, replacing_file
from vla_rl.storage import load_state, load_tensors, replacing, save_state, save_tensors
from vla_rl.types import Trajectory

INBOX, WEIGHTS, FIGURES, STATE, JOB, FAILURE, BEAT = (
    "inbox",
    "weights.safetensors",
    "figures.json",
    "state",
    "job.json",
    "failure.json",
    "beat",
)
_VERSION, _UPDATES, _WEIGHT = "version", "updates", "weight:"


@dataclass(frozen=True)
class Entry:
    """Episodes that were sent together, with the tickets ``first`` … ``last``."""

    path: Path
    first: int
    last: int


class EpisodeQueue:
    """Closed episodes on their way to the learner. The actor puts, the learner reads and
    removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, first: int, episodes: Sequence[tuple[Trajectory, Tensor]]) -> Entry:
        """Episodes with their rewards, under the tickets from ``first`` on; on the disk, as a
        whole, when it returns."""
        last = first + len(episodes) - 1
        entry = Entry(self.folder / f"{first:09d}-{last:09d}", first, last)
        states = [
            {**trajectory_state(trajectory), "scores": rewards} for trajectory, rewards in episodes
        ]
        with replacing(entry.path, keep_last_good=False) as part:
            save_state(part, {"episodes": states})
        return entry

    def entries(self) -> list[Entry]:
        """What waits, the oldest first."""
        found = []
        for path in self.folder.glob("[0-9]*-[0-9]*") if self.folder.is_dir() else ():
            first, _, last = path.name.partition("-")
            found.append(Entry(path, int(first), int(last)))
        return sorted(found, key=lambda entry: entry.first)

    def read(self, entry: Entry, after: int) -> Iterator[tuple[int, Trajectory, Tensor]]:
        """Ticket, episode and rewards of those with a ticket above ``after``. Raises
        `CheckpointError` for damage."""
        if entry.last <= after:
            return
        states = load_state(entry.path)
        with restoring(entry.path, "episodes of an actor"):
            for ticket, state in enumerate(states["episodes"], entry.first):
                if ticket > after:
                    rewards = state.pop("scores")
                    yield ticket, trajectory_from_state(state), rewards

    def remove(self, entry: Entry) -> None:
        # (what a kill leaves of it is below the last ticket, and goes later)
        shutil.rmtree(entry.path, ignore_errors=True)


# ------------------------------------------------------------------------------------------ weights
@dataclass(frozen=True)
class Weights:
    """A version of what is learned, after so many updates since the first episode."""

    version: int
    updates: int
    tensors: dict[str, Tensor]


def learned_weights(policy: Any) -> dict[str, Tensor]:
    """What of a policy's weights training changes: all but frozen parameters."""
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    return {name: x for name, x in policy.state_dict().items() if name not in frozen}


@torch.no_grad()
def take_weights(policy: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy `learned_weights` of such a policy into this one. Raises `CheckpointError` where they
    are of another one."""
    own = policy.state_dict()
    wrong = [name for name, x in tensors.items() if name not in own or own[name].shape != x.shape]
    if wrong:
        raise CheckpointError(
            "the learner's weights are of another policy than the actor's: they "
            f"differ in {wrong[0]}"
        )
    for name, x in tensors.items():
        own[name].copy_(x)


def publish_weights(folder: Path, weights: Weights) -> None:
    """Put a version in the place of the one before, in one step."""
    tensors = {f"{_WEIGHT}{name}": x for name, x in weights.tensors.items()}
    counts = {_VERSION: torch.tensor(weights.version), _UPDATES: torch.tensor(weights.updates)}
    with replacing_file(folder / WEIGHTS) as part:
        save_tensors(part, tensors | counts)


def published_weights(folder: Path) -> Weights | None:
    """The newest version; None before the first."""
    if not (folder / WEIGHTS).exists():
        return None
    stored = load_tensors(folder / WEIGHTS)
    version, updates = int(stored.pop(_VERSION)), int(stored.pop(_UPDATES))
    return Weights(version, updates, {name.removeprefix(_WEIGHT): x for name, x in stored.items()})


class NewestWeights:
    """Asks for the newest version: None where it is the one that was asked for last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None  # which file was read last

    def __call__(self) -> Weights | None:
        path = self._folder / WEIGHTS
        if not path.exists():
            return None
        stat = path.stat()
        seen = (stat.st_ino, stat.st_mtime_ns)
        if seen == self._seen:
            return None
        self._seen = seen
        return published_weights(self._folder)


# ------------------------------------------------------------------------------- states and figures
def save_learner(folder: Path, state: Mapping[str, Any]) -> None:
    with replacing(folder / STATE, keep_last_good=True) as part:
        save_state(part, state)


def stored_learner(folder: Path) -> dict[str, Any] | None:
    """What `save_learner` wrote last; None where it never did."""
    path = folder / STATE if (folder / STATE).exists() else last_good(folder / STATE)
    return load_state(path) if path.exists() else None


def read_figures(path: Path) -> dict[str, Any]:
    """A small JSON file that its writer replaces as a whole; {} where there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
