"""``vla-rl robot replay SESSION``: does on the arm again what was sent to it in a recorded episode,
behind the same gate.

The episode becomes a policy (`Recorded`) that decides what was decided then, so that a session
plays it as any other: a person watches, takes over, stops. What the arm did then is compared with
what it did in the record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl import build
from vla_rl.checkpoint import save_checkpoint
from vla_rl.config.robot import SessionSettings
from vla_rl.errors import UserError
from vla_rl.interfaces import Policy
from vla_rl.robot.session import Asked, private, run
from vla_rl.specs import EmbodimentSpec
from vla_rl.types import ActionChunk, Observation, PolicyOutput

_AFTER_S = 1.0  # that it holds still, so that a simulator can see the success


class Recorded(nn.Module, Policy):
    """``sent`` [T a] in chunks of ``lengths``, once; then it holds still: a replay that was
    interrupted is not taken up again. Its memory [1] is the next chunk's number."""

    policy_type = "vla_rl.robot.replay:Recorded"
    sent: Tensor
    lengths: Tensor

    def __init__(self, embodiment: EmbodimentSpec, sent: Tensor, lengths: Sequence[int]):
        super().__init__()
        self.embodiment, self.chunk_length = embodiment, max(lengths)
        self.register_buffer("sent", sent.float())
        self.register_buffer("lengths", torch.tensor(lengths))
        self._begun = False

    def initial_memory(self) -> Tensor:
        return torch.zeros(1)

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Tensor] | None = None,
    ) -> PolicyOutput:
        """Of one row. Without an instruction (a session's first, blank question) nothing has
        begun."""
        number = int(memory[0]) if memory is not None else 0
        over = number >= len(self.lengths) or (number == 0 and self._begun)
        begin = int(self.lengths[:number].sum())
        rows = (
            self._still(observation)[None]
            if over
            else self.sent[begin : begin + int(self.lengths[number])]
        )
        self._begun = self._begun or bool(observation.instruction[0])
        chunk = ActionChunk(rows[None], torch.ones(1, len(rows), dtype=torch.bool))
        return PolicyOutput(chunk, torch.zeros(1), {}, memory=[torch.tensor([number + 1.0])])

    def _still(self, observation: Observation) -> Tensor:
        """The action [a] that keeps the arm where it is, and the gripper as it was last."""
        if self.embodiment.frame == "joints":
            return observation.proprio[0, : self.embodiment.action_dim].to(self.sent)
        return torch.cat([torch.zeros_like(self.sent[-1, :-1]), self.sent[-1, -1:]])

    def config_dict(self) -> dict[str, Any]:
        return {"config": {"lengths": self.lengths.tolist()}}

    def extra_files(self) -> dict[str, str]:
        return {}

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Recorded:
        lengths = data["config"]["lengths"]
        return cls(embodiment, torch.zeros(sum(lengths), embodiment.action_dim), lengths)


@dataclass(frozen=True)
class Strayed:
    """How far the arm was from the record, by control step [T]: of the hand (``unit`` m), or the
    joint that was farthest."""

    distance: np.ndarray
    unit: str

    def __str__(self) -> str:
        scale, unit = (1000.0, "mm") if self.unit == "m" else (1.0, "units of a joint")
        at = self.distance * scale
        return (
            f"away from the record by {at.mean():.1f} {unit} in the mean, {at.max():.1f} at most; "
            f"{at[0]:.1f} as it began, {at[-1]:.1f} as it ended ({len(at)} control steps)"
        )


def chosen(session: Path, number: int | None) -> tuple[Any, int]:
    """An episode of a session (`real.journal.Episode`; None: the last that succeeded, else the
    last) and its place among those. Raises `UserError` where there is none, or nothing was sent in
    it."""
    paths = build.attribute("real.journal:journals")(session)
    read = functools.partial(build.attribute("real.journal:read"), pictures=False)
    # a long session is not read as a whole
    newest_first = ((read(paths[at]), at) for at in reversed(range(len(paths))))
    wanted = (
        e
        for e in newest_first
        if (e[0].succeeded if number is None else e[0].header["episode"] == number)
    )
    found = next(wanted, None)
    if found is None and number is not None:
        held = ", ".join(str(read(path).header["episode"]) for path in paths)
        raise UserError(f"--episode {number}: {session} holds the episodes {held}")
    episode, at = found or (read(paths[-1]), len(paths) - 1)
    if episode.damage or episode.embodiment is None:
        raise UserError(
            f"{paths[at]}: {episode.damage or 'its header names no robot'}: choose "
            "another with --episode N"
        )
    if not _sent(episode):
        raise UserError(
            f"{paths[at]}: nothing was sent to the arm in it, choose another with --episode N"
        )
    return episode, at


def _sent(episode: Any) -> list[dict[str, Any]]:
    """The last tick of every control step in which something was sent. Of one that a takeover or a
    pause cut short, ``sent`` is the share of its way that it had time for: a delta's, or of the way
    to a target of joints. (One that the episode's end cut short is left out: nothing came after
    it.)"""
    steps = [
        list(ticks)
        for step, ticks in itertools.groupby(episode.ticks, key=lambda tick: tick["step"])
        if step >= 0
    ]
    whole = [len(ticks) for ticks in steps if ticks[-1]["step_done"]]
    while steps and not steps[-1][-1]["step_done"]:
        steps.pop()
    found = []
    for ticks in steps:
        last, followed = ticks[-1], sum(bool(tick["reference"]) for tick in ticks)
        if last["sent"] and not last["step_done"] and followed:
            last = {
                **last,
                "sent": _part(
                    episode.embodiment, ticks, min(1.0, followed / max(whole, default=followed))
                ),
            }
        if last["sent"] and (last["step_done"] or followed):
            found.append(last)
    return found


def _part(robot: EmbodimentSpec, ticks: Sequence[Mapping[str, Any]], share: float) -> list[float]:
    """``share`` of the way of a control step's action; a gripper's word stays what it is."""
    action = list(ticks[-1]["sent"])
    moved = len(action) - (robot.gripper != "none")
    origin = ticks[0]["proprio"] if robot.frame == "joints" else [0.0] * len(action)
    return [begin + share * (a - begin) for a, begin in zip(action[:moved], origin)] + action[
        moved:
    ]


@private()
def replay(
    session: Path,
    number: int | None,
    settings: SessionSettings,
    asked: Asked,
    say: Callable[[str], None] = print,
) -> Path:
    """Returns the new session's folder. Raises `UserError`, for an arm other than the recorded
    one before anything moves."""
    episode, place = chosen(session, number)
    steps, embodiment = _sent(episode), episode.embodiment
    sent = torch.tensor([tick["sent"] for tick in steps])
    lengths = [
        len(list(group))
        for _, group in itertools.groupby(steps, key=lambda tick: (tick["epoch"], tick["decision"]))
    ]
    folder = settings.folder
    policy = folder / "run" / "recorded"
    policy.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(policy, Recorded(embodiment, sent, lengths))
    task = build.attribute("real.tasks:parse")(str(episode.header.get("task") or "teleoperated"))
    # a simulated world counts its starts, the first of which is as it was made
    start = (
        f"{task.name}/{task.number if task.number >= 0 else place + 1}"
        if settings.robot.world
        else task.instruction
    )
    horizon = len(sent) + round(_AFTER_S * embodiment.control_hz)
    robot = dataclasses.replace(
        settings.robot, tasks=[start], horizon=horizon, acting="synchronous", steps=0
    )
    name = folder.name
    settings = dataclasses.replace(
        settings, robot=robot, checkpoint=str(policy), name=name, deterministic=True
    )
    say(
        f"replaying episode {episode.header['episode']} of {session}: {len(sent)} control steps, "
        f"{task.text}"
    )
    run(settings, dataclasses.replace(asked, episodes=1), say)
    again = build.attribute("real.journal:read")(
        build.attribute("real.journal:journals")(folder)[-1], pictures=False
    )
    say(str(strayed(steps, _sent(again))))
    return folder


def strayed(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Strayed:
    """Of two episodes' control steps. Raises `UserError` where the second has none."""
    if not after:
        raise UserError(
            "nothing was sent to the arm in the replay: see its session's record for why"
        )
    count, by_pose = min(len(before), len(after)), bool(before[0]["pose"])
    name, wide = ("pose", 3) if by_pose else ("joints", None)
    places = [np.array([tick[name][:wide] for tick in ticks[:count]]) for ticks in (before, after)]
    apart = np.abs(places[0] - places[1])
    return (
        Strayed(np.linalg.norm(apart, axis=1), "m")
        if by_pose
        else Strayed(apart.max(axis=1), "joint")
    )
