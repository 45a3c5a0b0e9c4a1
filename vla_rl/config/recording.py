"""Options of ``env=dataset``: what a recording says of its robot, and what it leaves to be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

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

    ``rename`` {key of the dataset: ours}: ours is observation.state, action, or a camera's name.
    ``control_hz`` takes every k-th row: its picture and state, and the last of the k actions, which
    is right where actions are goals, not moves or speeds. They are known to be goals where each is
    also a number of the state; ``goals`` says so where they are not named alike.
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
    # {key of the dataset: ours}
    rename: dict[str, str] = field(default_factory=dict)
    # which are used; empty: all
    cameras: list[str] = several([], once=True)
    # rows per second that are used; 0: all
    control_hz: float = bound(0.0, ge=0, lt=math.inf, hint="0: every row")
    # actions are goals, so that rows may be left out
    goals: bool = False
    # instruction of episodes that have none
    instruction: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        ours = list(self.rename.values())
        if twice := [name for name in ours if ours.count(name) > 1]:
            raise ConfigError(
                f"env.rename={self.rename} gives two keys of the dataset the name {twice[0]!r}: "
                "give each its own"
            )
