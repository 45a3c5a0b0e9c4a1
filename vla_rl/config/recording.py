"""Options of ``env=dataset``: what a recording says of its robot, and what it leaves to be told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError


@dataclass
class RecordingConfig(Bounded, place="env"):
    """The robot, cameras, rate and tasks are read from ``dataset``, a LeRobotDataset v3; nothing is
    simulated.

    A dataset that this project wrote says which robot it is of, and so does ``embodiment``. Of
    others the bounds of actions are those of its own actions, wider by ``margin`` of their range on
    each side, and ``frame``, ``rotation`` and ``gripper`` (words of `vla_rl.specs`) stay "other: as
    recorded in NAME" where they are not told here.

    ``rename`` {key of the dataset: ours}: ours is observation.state, action, or a camera's name; or
    {its name of a number of state and action: ours}. Of several datasets it holds for each that has
    the key.
    ``control_hz`` takes every k-th row: its picture and state, and the last of the k actions, which
    is right where actions are goals, not moves or speeds. They are known to be goals where each is
    also a number of the state; ``goals`` says so where they are not named alike.

    ``actions`` delta: SFT learns of each goal how far it is from the state in which its chunk
    begins (openpi's convention), of those in ``keep`` the goal itself; what the policy acts are
    goals again.
    """

    finds_cameras: ClassVar[bool] = True

    # a dataset, a checkpoint or an embodiment.json that says which robot it is of; empty: the
    # dataset itself
    embodiment: str = ""
    # of the robot; empty: what the dataset calls it, else its folder's name
    name: str = ""
    # a word of vla_rl.specs.FRAMES; empty: as recorded
    frame: str = ""
    # a word of vla_rl.specs.ROTATIONS; empty: as recorded
    rotation: str = ""
    # a word of vla_rl.specs.GRIPPERS; empty: as recorded
    gripper: str = ""
    # of the action's numbers: one for all, or one for each; empty: as recorded
    units: list[str] = field(default_factory=list)
    # share of their range by which the bounds are wider than the actions that were recorded
    margin: float = bound(0.1, ge=0, le=10, hint="a share of the actions' range, such as 0.1")
    # {key of the dataset, or its name of a number: ours}
    rename: dict[str, str] = field(default_factory=dict)
    # which are used; empty: all
    cameras: list[str] = several([], once=True)
    # rows per second that are used; 0: all
    control_hz: float = bound(0.0, ge=0, lt=math.inf, hint="0: every row")
    # actions are goals, so that rows may be left out
    goals: bool = False
    # absolute: as recorded; delta: learned as moves from the state as a chunk begins
    actions: str = bound("absolute", choices=("absolute", "delta"))
    # actions that stay as they are with delta, such as a gripper's
    keep: list[str] = several([], once=True)
    # instruction of episodes that have none
    instruction: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if empty := [key for key, ours in self.rename.items() if not str(ours).strip()]:
            raise ConfigError(
                f"env.rename gives {empty[0]!r} an empty name: give it one, or leave it out"
            )


def as_datasets(told: Any, place: Callable[[str], str]) -> Any:
    """What ``dataset`` may be: one name, a list of names, or {name: weight}, each where ``place``
    puts it; a list or mapping of one is that one. Raises `ConfigError`."""
    names = told if isinstance(told, list | dict) else [told]
    if not names:
        raise ConfigError(f"dataset={told} names none: give a folder, or leave it out")
    for name in names:
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ConfigError(f"dataset has {name!r}, which is no name: give folders, or user/name")
    if isinstance(told, dict):
        for name, weight in told.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"dataset.{name}={weight!r} is no weight: give a number above 0")
            if not 0 < weight < math.inf:
                raise ConfigError(
                    f"dataset.{name}={weight:g} is out of range: a weight is above 0 and finite; "
                    "leave out what is not to be drawn from"
                )
    places = [place(str(name)) for name in names]
    if len(places) == 1:
        return places[0]
    if "" in (name.strip() for name in places):
        raise ConfigError(f"dataset={told} has an empty name: name folders, or user/name")
    real = [os.path.realpath(name) for name in places]
    if twice := [name for name, at in zip(places, real) if real.count(at) > 1]:
        raise ConfigError(
            f"dataset names {twice[0]} twice: name it once, and give it a weight, "
            f"'dataset={{{twice[0]}: 2, OTHER: 1}}', to draw from it more often"
        )
    if isinstance(told, dict):
        return dict(zip(places, map(float, told.values())))
    return places
