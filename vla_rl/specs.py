"""What describes a robot, a task and one env slot (numpy only, so that a simulator's worker process
needs no torch).

Letters in shapes: h control steps in a chunk, p proprio dimensions, s privileged dimensions.
Importing torch costs a process about 3 s and 270 MB of its own memory; workers of `sim.pool` do
without it as long as the simulator imports these names from here. `vla_rl.types` re-exports all of
them.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_rl.errors import ConfigError, EmbodimentMismatch

# What a robot's actions mean, in words that can be compared. What none of them says goes behind
# `OTHER`.
FRAMES: dict[str, str] = {
    "world": "axes that are fixed in the scene, z upwards",
    "base": "axes of the robot's base",
    "tool": "axes of the hand, as it is when the action is taken",
    "joints": "no axes: the action moves joints",
}
ROTATIONS: dict[str, str] = {
    "none": "no number of the action is an orientation: the hand keeps its own, or joints are "
    "moved",
    "axis_angle": "3 numbers: the orientation in `frame`, as its axis times its angle (rad)",
    "axis_angle_delta": "3 numbers: the turn from the present orientation, about an axis in "
    "`frame`, times its angle",
    "euler_xyz": "3 angles: the orientation, as turns about x, y, z of `frame`, which stay fixed "
    "(roll, pitch, yaw)",
    "euler_xyz_delta": "3 angles: the turn from the present orientation, about x, y, z of `frame`, "
    "which stay fixed",
    "quaternion_xyzw": "4 numbers: the orientation in `frame` as a unit quaternion, the real part "
    "last",
    "quaternion_wxyz": "4 numbers: the orientation in `frame` as a unit quaternion, the real part "
    "first",
    "rotation_6d": "6 numbers: the first two columns of the orientation's matrix in `frame`",
}
GRIPPERS: dict[str, str] = {
    "none": "there is no gripper",
    "-1 open, +1 close": "a command whose sign says where to go",
    "-1 close, +1 open": "a command whose sign says where to go",
    "0 open, 1 close": "how far closed",
    "0 close, 1 open": "how far open",
    "0 close, 1 stay, 2 open": "one of three commands",
    "width": "the distance of the fingers, in the unit of that dimension",
}
OTHER = "other: "
_WORDS = {"frame": FRAMES, "rotation": ROTATIONS, "gripper": GRIPPERS}
# What this project's robots said in files from before there were such words.
_FORMER_WORDS = {
    ("rotation", "fixed, hand down"): "none",
    ("rotation", "rotation vector, world frame"): "axis_angle",
    ("rotation", "rotation vector, relative to the present orientation"): "axis_angle_delta",
    (
        "rotation",
        "rotation vector, relative to the present orientation, world frame",
    ): "axis_angle_delta",
    ("gripper", "-1 opens, +1 closes"): "-1 open, +1 close",
}


def _present_word(name: str, text: Any) -> str:
    """The word for what a file says of ``name``; unknown text of a file from before is kept
    behind `OTHER`."""
    if not isinstance(text, str):
        raise ValueError(f"its {name} is {text!r}, and a text is needed")
    known = text in _WORDS[name] or text.startswith(OTHER)
    return text if known else _FORMER_WORDS.get((name, text), f"{OTHER}{text}")


@dataclass(frozen=True)
class CameraSpec:
    """One camera: its name and the size (pixels) of the uint8 RGB image it yields."""

    name: str
    height: int
    width: int


@dataclass(frozen=True)
class Mirror:
    """How a robot and its cameras look in a mirror that exchanges left and right, where its scenes
    are symmetric.

    Pictures are flipped. ``negated`` names the numbers of actions and proprioception that change
    their sign there, and ``exchanged`` pairs that change places: action numbers, proprioceptive
    ones, cameras, and words of an instruction. Numbers in neither stay as they are.
    """

    negated: tuple[str, ...] = ()
    exchanged: tuple[tuple[str, str], ...] = ()

    def of(self, names: tuple[str, ...]) -> tuple[list[int], list[float]]:
        """For each of ``names``, which one it is in the mirror, and with which sign."""
        partner = {a: b for pair in self.exchanged for a, b in (pair, pair[::-1])}
        order = [
            names.index(partner[name]) if partner.get(name) in names else i
            for i, name in enumerate(names)
        ]
        return order, [-1.0 if name in self.negated else 1.0 for name in names]


@dataclass(frozen=True)
class EmbodimentSpec:
    """What a robot's actions and observations mean. Travels with env, policy, dataset and
    checkpoint.

    ``action_low``/``action_high`` are the physical bounds per action dimension, in
    ``action_units``. ``frame``, ``rotation`` and ``gripper`` are words of `FRAMES`, `ROTATIONS` and
    `GRIPPERS`, or "other: " and own ones; else ConfigError is raised. ``mirror`` is declared where
    scenes are symmetric; it is no part of what tells two robots apart.
    """

    name: str
    action_names: tuple[str, ...]
    action_units: tuple[str, ...]
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    frame: str
    rotation: str
    gripper: str
    control_hz: float
    cameras: tuple[CameraSpec, ...]
    proprio_names: tuple[str, ...]
    mirror: Mirror | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            text = getattr(self, name)
            if text not in words and not (
                text.startswith(OTHER) and text.removeprefix(OTHER).strip()
            ):
                raise ConfigError(
                    f"the embodiment {self.name!r} has {name}={text!r}; use one of: "
                    f"{', '.join(map(repr, words))} (`vla_rl.specs.{name.upper()}S` says what they "
                    f"mean), or {OTHER!r} and your own words"
                )
        if self.mirror is not None:
            self._check_mirror(self.mirror)

    def _check_mirror(self, mirror: Mirror) -> None:
        """Raise `ConfigError` where what the mirror turns around is not symmetric itself."""
        ranges = dict(zip(self.action_names, zip(self.action_low, self.action_high)))
        sizes = {camera.name: (camera.height, camera.width) for camera in self.cameras}
        for name in mirror.negated:
            low, high = ranges.get(name, (-1.0, 1.0))
            if low != -high or name not in (*self.action_names, *self.proprio_names):
                raise ConfigError(
                    f"the embodiment {self.name!r} mirrors {name!r}, which is no "
                    "number around 0 that it has"
                )
        for a, b in mirror.exchanged:
            groups = [
                names
                for names in (self.action_names, self.proprio_names, self.camera_names)
                if a in names or b in names
            ]
            one_sided = any(a not in names or b not in names for names in groups)
            if one_sided or ranges.get(a) != ranges.get(b) or sizes.get(a) != sizes.get(b):
                raise ConfigError(
                    f"the embodiment {self.name!r} mirrors {a!r} and {b!r}, which do "
                    "not match each other"
                )

    def require_mirror(self, asked: str, remedy: str) -> None:
        """Raise `ConfigError` where the mirror is ``asked`` for and none is declared."""
        if self.mirror is None:
            raise ConfigError(
                f"{asked}, and {self.name} declares no mirror (`vla_rl.specs.Mirror`): its scenes "
                "are not symmetric, its actions are others than the env's own, or its file is from "
                f"before there was one. Set {remedy}"
            )

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    @property
    def gripper_dims(self) -> tuple[int, ...]:
        """The action dimensions whose name says gripper."""
        names = enumerate(self.action_names)
        return tuple(i for i, name in names if "gripper" in name.lower())

    @property
    def proprio_dim(self) -> int:
        return len(self.proprio_names)

    @property
    def camera_names(self) -> tuple[str, ...]:
        return tuple(camera.name for camera in self.cameras)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` inverts it."""
        values = dataclasses.asdict(self)
        return (
            values
            if self.mirror
            else {name: value for name, value in values.items() if name != "mirror"}
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EmbodimentSpec:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what `to_dict` did not write.

        Files from before `FRAMES` and its like hold prose: it becomes the word for it, or stands
        behind "other: ".
        """
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list | tuple) else v for k, v in data.items()
        }
        values["cameras"] = tuple(CameraSpec(**c) for c in data["cameras"])
        values |= {name: _present_word(name, data[name]) for name in _WORDS}
        if mirror := data.get("mirror"):
            pairs = tuple((str(a), str(b)) for a, b in mirror["exchanged"])
            values["mirror"] = Mirror(tuple(map(str, mirror["negated"])), pairs)
        spec = cls(**values)
        sizes = {
            len(x)
            for x in (spec.action_names, spec.action_units, spec.action_low, spec.action_high)
        }
        positive = [spec.control_hz, *(size for c in spec.cameras for size in (c.height, c.width))]
        numbers = [*spec.action_low, *spec.action_high, *positive]
        names = [*spec.action_names, *spec.proprio_names, *spec.camera_names]
        if len(sizes) != 1 or not all(isinstance(n, str) for n in names):
            raise ValueError(
                "names, units and bounds of its actions differ in number, or a name is no text"
            )
        if (
            not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
            or min(positive) <= 0
        ):
            raise ValueError(
                "its bounds, its control rate and its cameras' sizes must be numbers, "
                "the latter two above 0"
            )
        for name, low, high in zip(spec.action_names, spec.action_low, spec.action_high):
            if low > high:
                raise ValueError(
                    f"the bounds of {name} are {low:g} … {high:g}, the lower one above "
                    "the upper one"
                )
        return spec

    def differences(self, other: EmbodimentSpec) -> list[str]:
        """One line per field that differs; empty when the two describe the same robot."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} != {getattr(other, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.compare and getattr(self, f.name) != getattr(other, f.name)
        ]

    def require(self, other: EmbodimentSpec, mine: str, theirs: str) -> None:
        """Raise `EmbodimentMismatch` that shows both sides unless ``other`` equals this spec."""
        lines = self.differences(other)
        if lines:
            detail = "\n  ".join(lines)
            raise EmbodimentMismatch(
                f"The embodiment of {mine} ({self.name}) differs from that of {theirs} "
                f"({other.name}):\n  {detail}\nUse an env, policy, checkpoint and dataset that "
                "were made for the same robot, cameras and actions."
            )


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite: how it is asked for, and how long an episode may last (control
    steps)."""

    task_id: str
    instructions: tuple[str, ...]
    held_out_instructions: tuple[str, ...]
    horizon: int


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to run: the outcome depends on this and on the actions, on nothing else.

    ``split`` is "train" or "held_out"; together with ``task_id`` and ``init_state_id`` it fixes the
    initial state. ``instruction_index`` picks a paraphrase of that split. ``group_id`` ties
    together rollouts that are compared with each other (GRPO); ``seed`` drives the policy's
    sampling (and any env noise). ``perturbation`` is "name:level" of one that the simulator's class
    declares (see `Perturbation`), or empty. ``lead`` [n a] (physical units) is sent before the
    policy decides for the first time: so an episode can begin in the middle of an earlier one, in
    any simulator that comes to the same state by the same actions. It takes its part of the time
    limit, and none of the trajectory.
    """

    task_id: str
    init_state_id: int
    split: str = "train"
    seed: int = 0
    group_id: int = 0
    instruction_index: int = 0
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    perturbation: str = ""
    lead: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lead", tuple(map(tuple, self.lead)))  # (files hold lists)

    @property
    def perturbed(self) -> tuple[str, int]:
        """Name and level of ``perturbation``; ("", 0) for none."""
        name, _, level = self.perturbation.partition(":")
        return name, int(level or 0)


@dataclass(frozen=True)
class Perturbation:
    """One way in which a simulator can change an episode, and its ``levels`` from mild to strong.

    A simulator class lists its own in a class attribute ``perturbations`` {name: Perturbation}. A
    ``control`` shows what an evaluation measures at all, and is not a factor that a policy ought to
    withstand; it runs only where it is named.
    """

    text: str
    levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    control: bool = False


# How an episode can fail, from the first thing that may go wrong to the last; what users read about
# each.
FAILURE_KINDS: dict[str, str] = {
    "never_reached": "the hand never came to the object",
    "missed_grasp": "the hand came to the object but never lifted it",
    "dropped": "the object was lifted, then slipped or fell",
    "wrong_place": "the object was put down elsewhere than asked for",
    "wrong_object": "another object was taken instead",
    "out_of_time": "time ran out while nothing had gone wrong yet: the object was carried, or lay "
    "in place but not at rest",
}


# ------------------------------------------------------------------------ one slot, numpy, no batch
@dataclass(frozen=True)
class SlotObservation:
    """What one env slot shows at a decision: images uint8 [H W 3], proprio float32 [p] in physical
    units.

    ``privileged`` float32 [s] is simulator state that only a critic may read; None where there is
    none.
    """

    images: dict[str, np.ndarray]
    proprio: np.ndarray
    instruction: str
    privileged: np.ndarray | None = None


@dataclass(frozen=True)
class Instead:
    """Another task of the same env that an episode solved on its way: its id, the instruction that
    asks for it, and after how many decisions of the episode (0: not counted yet)."""

    task_id: str
    instruction: str
    decisions: int = 0


@dataclass(frozen=True)
class SlotStep:
    """Result of one executed chunk in one slot.

    ``rewards`` float32 [h] per control step (0 past ``executed``); ``executed`` control steps were
    run before the episode ended, the chunk was over, or somebody cut it short. ``failure`` is one
    of `FAILURE_KINDS` where an episode ends without success in a simulator that can tell how; else
    "".

    Where a person or a safety gate may step in: ``sent`` float32 [h a] is what went to the robot
    (None: what was asked, clipped to the embodiment's bounds), ``human`` bool [h] which of it a
    person chose (None: nothing). A takeover in mid-chunk ends the chunk: the policy is asked again
    when it has the robot back. ``label_source`` says who judged how the episode ended: "env", or
    for example "operator".

    ``instead`` is another task that was solved in this chunk, in a simulator that can tell.
    """

    observation: SlotObservation
    rewards: np.ndarray
    executed: int
    terminated: bool
    truncated: bool
    success: bool
    failure: str = ""
    sent: np.ndarray | None = None
    human: np.ndarray | None = None
    label_source: str = "env"
    instead: Instead | None = None


@dataclass(frozen=True)
class SlotEvent:
    """Something a slot reports: the first observation (``step`` None), a chunk's result, or a loss
    (``error``).

    ``blameless`` marks a loss that what another slot did has caused, in the worker that both share.
    ``seconds`` is what the simulator worked for it (0: not known).
    """

    slot: int
    episode: EpisodeSpec
    observation: SlotObservation | None
    step: SlotStep | None = None
    error: str | None = None
    blameless: bool = False
    seconds: float = 0.0
