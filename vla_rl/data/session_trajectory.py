"""A closed episode of a robot session as a `Trajectory`: what a learner from a replay takes from
the journal.

A row per decision. What the policy decided is a row of the steps that it really got; what a person
did is cut into rows of the policy's chunk length, and so are means of several decisions
(`robot.acting=ensemble`), so no row mixes the two. A step that a takeover cut short is in the
journal, not here. Rows show the newest picture from before they began, with the state that was
measured nearest to it, as a policy sees them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl import build
from vla_rl.data.session_export import control_rows, until_mark
from vla_rl.errors import UserError
from vla_rl.types import (
    FRESH,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    SlotObservation,
    Trajectory,
)

VERSION = "learned-"  # how a session's record names the versions of a learner
Step = tuple[dict[str, Any], dict[str, Any]]  # the ticks in which a control step began and ended


@dataclass
class _Row:
    """``key``: whose decision it is. ``fresh``: it does not go on with the chunk before."""

    key: tuple[Any, ...]
    human: bool
    fresh: bool
    steps: list[Step] = field(default_factory=list)


def version_name(version: int) -> str:
    return f"{VERSION}{version}"


def version_number(name: str) -> int:
    """Of a record's ``policy_version``; 0 for a policy that no learner made."""
    number = name.removeprefix(VERSION)
    return int(number) if number != name and number.isascii() and number.isdigit() else 0


def session_trajectory(episode: Any, chunk_length: int) -> tuple[Trajectory | None, str]:
    """``episode`` as of `real.journal.read`, of a policy that decides on ``chunk_length`` control
    steps; or why it is none.

    It ends with the control step in which the moment lies that its verdict means: what comes after
    a mark that was moved is in the journal, not here. ``rewards`` are 1 in the last step of a
    success, else 0. An episode that somebody labelled terminated, but for time that ran out; one
    without a label was cut, so values bootstrap behind it. Rows of a person are their own
    proposals. ``replay[FRESH]`` [t] marks decisions that do not go on with the chunk before: the
    first of all, the first after a person, and a person's.
    """
    steps, why = control_rows(episode, discarded=False)
    if not why and not all(end["is_human"] or end["policy"] for _, end in steps):
        why = "control steps of the policy without what it asked for"
    if why:
        return None, why
    ended = until_mark(episode, steps)
    spec: EmbodimentSpec = episode.embodiment
    averaged = {(c["epoch"], c["decision"]) for c in episode.chunks if c["acting"] == "ensemble"}
    rows = _rows(steps[:ended], chunk_length, averaged)
    success, terminated, source = _verdict(episode)
    show, after = _Eyes(episode, spec), np.inf if ended == len(steps) else steps[ended][0]["stamp"]
    t, h = len(rows), chunk_length
    actions, proposed = (torch.zeros(t, h, spec.action_dim) for _ in range(2))
    valid = torch.zeros(t, h, dtype=torch.bool)
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    for i, row in enumerate(rows):
        # the gate's rounding may leave the bounds
        sent = np.clip([end["sent"] for _, end in row.steps], low, high)
        wished = sent if row.human else np.array([end["policy"] for _, end in row.steps])
        actions[i], proposed[i] = _filled(sent, h), _filled(wished, h)
        valid[i, : len(sent)] = True
    rewards = torch.zeros(t, h)
    rewards[-1, len(rows[-1].steps) - 1] = float(success)
    human = torch.tensor([row.human for row in rows])
    task = build.attribute("real.tasks:parse")(str(episode.header.get("task") or "teleoperated"))
    number = task.number if task.number >= 0 else int(episode.header["episode"])
    return Trajectory(
        episode=EpisodeSpec(
            task.name, number, rollout_id=f"{episode.header.get('session', '')}/{episode.path.name}"
        ),
        observations=Observation.from_slots(
            [show(row.steps[0][0]["stamp"], task.instruction) for row in rows]
        ),
        final_observation=Observation.from_slots([show(after, task.instruction)]),
        actions=actions,
        valid=valid,
        rewards=rewards,
        behavior_log_prob=torch.zeros(t),
        replay={FRESH: torch.tensor([row.fresh for row in rows])},
        terminated=terminated,
        truncated=not terminated,
        success=success,
        policy_version=_version(rows, episode.path.name),
        is_human=valid & human[:, None],
        proposed=proposed,
        label_source=source or "none",
    ), ""


def _rows(
    steps: Sequence[Step], chunk_length: int, averaged: Set[tuple[int, int]] = frozenset()
) -> list[_Row]:
    """Of each decision the control steps that it got; a person's in rows of ``chunk_length``, and
    those of decisions (epoch, number) that were ``averaged`` with others."""
    rows: list[_Row] = []
    epoch, decision = None, 0  # of the policy's last row
    for step in steps:
        end = step[1]
        human = bool(end["is_human"])
        mixed = (end["epoch"], end["decision"]) in averaged
        key = ("human",) if human else ("policy", end["epoch"], -1 if mixed else end["decision"])
        if not rows or rows[-1].key != key or len(rows[-1].steps) == chunk_length:
            # one between was refused, or got lost
            gap = not human and not mixed and end["decision"] not in (decision, decision + 1)
            rows.append(_Row(key, human, fresh=human or end["epoch"] != epoch or gap))
            epoch, decision = (None, 0) if human else (end["epoch"], end["decision"])
        rows[-1].steps.append(step)
    return rows


def _filled(executed: np.ndarray, h: int) -> Tensor:
    """``executed`` [n a] as [h a]; the rest, which never was, repeats the last."""
    return torch.from_numpy(
        np.concatenate([executed, np.repeat(executed[-1:], h - len(executed), axis=0)])
    ).float()


def _verdict(episode: Any) -> tuple[bool, bool, str]:
    """(success, terminated, who labelled it)."""
    if episode.verdict is None:
        return False, False, ""
    success, source = episode.succeeded, episode.verdict["source"].partition(".")[0]
    late = episode.end is not None and episode.end["reason"] == "out of time"
    cut = late or source == "simulator"  # which calls nothing a failure but what ran out of time
    return success, success or not cut, source


def _version(rows: Sequence[_Row], name: str) -> int:
    """Raises `UserError` for an episode in which weights were swapped."""
    found = {end["policy_version"] for row in rows if not row.human for _, end in row.steps}
    if len(found) > 1:
        raise UserError(
            f"{name} was played by several versions of the policy "
            f"({', '.join(sorted(found))}): leave it out"
        )
    return version_number(found.pop()) if found else 0


class _Eyes:
    """What was seen at a moment of an episode."""

    def __init__(self, episode: Any, spec: EmbodimentSpec) -> None:
        self._captures = {
            name: [frame[2] for frame in episode.frames[name]] for name in spec.camera_names
        }
        self._ticks = [tick for tick in episode.ticks if tick["proprio"]]
        self._measured = [tick["measured"] for tick in self._ticks]
        self._picture = episode.picture

    def __call__(self, stamp: float, instruction: str) -> SlotObservation:
        """The newest pictures from before ``stamp`` (else the first), and the state nearest to
        them."""
        chosen = {
            n: max(bisect.bisect_right(taken, stamp) - 1, 0) for n, taken in self._captures.items()
        }
        captured = min(self._captures[name][i] for name, i in chosen.items())
        after = bisect.bisect_left(self._measured, captured)
        near = min(
            range(max(after - 1, 0), min(after + 1, len(self._ticks))),
            key=lambda i: self._gap(i, captured),
        )
        images = {name: self._picture(name, i) for name, i in chosen.items()}
        return SlotObservation(
            images, np.array(self._ticks[near]["proprio"], np.float32), instruction
        )

    def _gap(self, i: int, captured: float) -> float:
        return abs(self._measured[i] - captured)
