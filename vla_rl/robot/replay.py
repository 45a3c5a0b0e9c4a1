"""``vla-rl robot replay SESSION``: does on the arm again what was asked of it in a recorded
episode, behind the same gate.

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
from vla_rl.robot.session import SessionRequest, private, run
from vla_rl.specs import EmbodimentSpec
from vla_rl.types import ActionChunk, Observation, PolicyOutput

_AFTER_S = 1.0  # that it holds still, so that a simulator can see the success
_LONGEST = 200  # control steps of a chunk: a message has room for no more


class Recorded(nn.Module, Policy):
    """``asked`` [T a] in chunks of ``lengths``, once, for ``shares`` [T] of a control step each;
    then it holds still: a replay that was interrupted is not taken up again. Its memory [1] is the
    next chunk's number."""

    asked: Tensor
    shares: Tensor
    lengths: Tensor

    def __init__(
        self, embodiment: EmbodimentSpec, asked: Tensor, shares: Tensor, lengths: Sequence[int]
    ):
        super().__init__()
        self.embodiment, self.chunk_length = embodiment, max(lengths)
        self.register_buffer("asked", asked.float())
        self.register_buffer("shares", shares.float())
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
        if over:
            rows, lasts = self._still(observation)[None], torch.ones(1)
        else:
            begin = int(self.lengths[:number].sum())
            here = slice(begin, begin + int(self.lengths[number]))
            rows, lasts = self.asked[here], self.shares[here]
        self._begun = self._begun or bool(observation.instruction[0])
        chunk = ActionChunk(rows[None], torch.ones(1, len(rows), dtype=torch.bool))
        memory = [torch.tensor([number + 1.0])]
        return PolicyOutput(chunk, torch.zeros(1), {"lasts": lasts[None]}, memory=memory)

    def lasts(self, output: PolicyOutput) -> Tensor:
        return output.replay["lasts"][0]

    def _still(self, observation: Observation) -> Tensor:
        """The action [a] that keeps the arm where it is, and the gripper as it was last."""
        if self.embodiment.frame == "joints":
            return observation.proprio[0, : self.embodiment.action_dim].to(self.asked)
        return torch.cat([torch.zeros_like(self.asked[-1, :-1]), self.asked[-1, -1:]])

    def config_dict(self) -> dict[str, Any]:
        return {"config": {"lengths": self.lengths.tolist()}}

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Recorded:
        lengths = data["config"]["lengths"]
        rows = sum(lengths)
        return cls(embodiment, torch.zeros(rows, embodiment.action_dim), torch.ones(rows), lengths)


@dataclass(frozen=True)
class _Strayed:
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
    if not recorded(episode):
        raise UserError(
            f"{paths[at]}: nothing was sent to the arm in it, choose another with --episode N"
        )
    return episode, at


@dataclass(frozen=True)
class Step:
    """A control step as it is to be done again: its ``action`` [a], the share of a control step
    that it ``lasts``, and its last ``tick``. ``follows``: nothing lay between it and the one
    before."""

    action: list[float]
    lasts: float
    tick: dict[str, Any]
    follows: bool


def recorded(episode: Any) -> list[Step]:
    """The control steps of an episode, also those that a takeover or a pause cut short.

    What was asked for goes through the gate again, which changes in every tick of a step what it
    changed then. Where the arm was slowed down after a fault, what was sent stands for it. Where
    nothing was sent, as between a takeover and the policy's next decision, the arm is to stay where
    it is: no longer than a control step, and a tick less, in which the next one is decided.
    """
    groups = [
        (n, list(ticks)) for n, ticks in itertools.groupby(episode.ticks, lambda t: t["step"])
    ]
    whole = max((len(ticks) for n, ticks in groups if n >= 0 and ticks[-1]["step_done"]), default=1)
    found: list[Step] = []
    follows = False
    for number, ticks in groups:
        sent = [tick["sent"] for tick in ticks if tick["sent"]]
        if number < 0:
            still = sum(not tick["reference"] for tick in ticks) - 1
            if found and still > 0:
                rest = _stay(episode.embodiment, ticks[0], found[-1].action)
                found.append(Step(rest, min(1.0, still / whole), ticks[still - 1], True))
            follows = False
            continue
        action = [*ticks[-1]["human" if ticks[-1]["is_human"] else "policy"]]
        if not sent:
            action = _stay(episode.embodiment, ticks[0], action)
        elif not action or any(tick["slow"] for tick in ticks):
            action = [*sent[-1]]
        found.append(Step(action, min(1.0, len(ticks) / whole), ticks[-1], follows))
        follows = True
    while found and not found[-1].tick["sent"]:  # the end; or nothing was sent at all
        found.pop()
    return found


def _stay(robot: EmbodimentSpec, tick: Mapping[str, Any], action: list[float]) -> list[float]:
    """The action that keeps the arm where it is; a gripper's word stays what it is."""
    moved = robot.action_dim - (robot.gripper != "none")
    here = tick["proprio"] if robot.frame == "joints" else [0.0] * moved
    return [*here[:moved], *action[moved : robot.action_dim]]


def _lengths(steps: Sequence[Step]) -> list[int]:
    """Of the chunks: one goes on until the arm was left to itself."""
    found: list[int] = []
    for step in steps:
        if step.follows and found[-1] < _LONGEST:
            found[-1] += 1
        else:
            found.append(1)
    return found


@private()
def replay(
    session: Path,
    number: int | None,
    settings: SessionSettings,
    request: SessionRequest,
    say: Callable[[str], None] = print,
) -> Path:
    """Returns the new session's folder. Raises `UserError`, for an arm other than the recorded
    one before anything moves."""
    episode, place = chosen(session, number)
    steps, embodiment = recorded(episode), episode.embodiment
    lengths = _lengths(steps)
    again = Recorded(
        embodiment,
        torch.tensor([step.action for step in steps]),
        torch.tensor([step.lasts for step in steps]),
        lengths,
    )
    folder = settings.folder
    policy = folder / "run" / "recorded"
    policy.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(policy, again)
    task = build.attribute("real.tasks:parse")(str(episode.header.get("task") or "teleoperated"))
    # a simulated world counts its starts, the first of which is as it was made
    start = (
        f"{task.name}/{task.number if task.number >= 0 else place + 1}"
        if settings.robot.world
        else task.instruction
    )
    horizon = len(steps) + round(_AFTER_S * embodiment.control_hz)
    robot = dataclasses.replace(
        settings.robot, tasks=[start], horizon=horizon, acting="synchronous", steps=0
    )
    name = folder.name
    settings = dataclasses.replace(
        settings, robot=robot, checkpoint=str(policy), name=name, deterministic=True
    )
    say(
        f"replaying episode {episode.header['episode']} of {session}: {len(steps)} control steps, "
        f"{task.text}"
    )
    run(settings, dataclasses.replace(request, episodes=1), say)
    last = build.attribute("real.journal:journals")(folder)[-1]
    told = build.attribute("real.journal:read")(last, pictures=False)
    say(str(strayed(steps, done(told, lengths))))
    return folder


def done(episode: Any, lengths: Sequence[int]) -> dict[int, dict[str, Any]]:
    """{which of the steps in chunks of ``lengths``: the last tick that it was followed in}, of what
    a replay did."""
    followed = [tick for tick in episode.ticks if tick["decision"] >= 0]
    first = min((tick["decision"] for tick in followed), default=0)
    begins = dict(enumerate(itertools.accumulate([0, *lengths[:-1]]), first))
    return {
        begins[tick["decision"]] + tick["index"]: tick
        for tick in followed
        if tick["decision"] in begins
    }


def strayed(steps: Sequence[Step], again: Mapping[int, Mapping[str, Any]]) -> _Strayed:
    """Of the steps of an episode, and the ticks that `done` them. Raises `UserError` where there
    are none."""
    both = [(step.tick, again[i]) for i, step in enumerate(steps) if i in again]
    by_pose = any(a["pose"] for a, _ in both)
    name, wide = ("pose", 3) if by_pose else ("joints", None)
    both = [(a, b) for a, b in both if a[name] and len(a[name]) == len(b[name])]
    if not both:
        raise UserError(
            "nothing was sent to the arm in the replay: see its session's record for why"
        )
    apart = np.array([np.subtract(a[name][:wide], b[name][:wide]) for a, b in both])
    if by_pose:
        return _Strayed(np.linalg.norm(apart, axis=1), "m")
    return _Strayed(np.abs(apart).max(axis=1), "joint")
