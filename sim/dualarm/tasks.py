"""The suite's tasks: what is asked for, where things start, and what the privileged state holds
(numpy only)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.dualarm.shapes import THINGS
from vla_rl import splits
from vla_rl.specs import TaskSpec

Box = tuple[float, float, float, float]  # x low, y low, x high, y high (m)
LEFT: Box = (-0.36, 0.15, -0.16, 0.29)
RIGHT: Box = (0.16, 0.15, 0.36, 0.29)
MIDDLE: Box = (-0.05, 0.16, 0.05, 0.24)
BAR: Box = (-0.03, 0.17, 0.03, 0.27)
FAR_LEFT: Box = (-0.40, 0.16, -0.34, 0.26)  # out of the right arm's reach

LIFT_HEIGHT = 0.05  # m that a thing is to be above its place on the table
LEVEL = 0.12  # rad that a lifted bar may be tilted
PRESSED = 0.7  # of a cap's way down
GIVEN = 0.06  # x (m) from which on the stick counts as handed over
REACHED = 0.035  # m from the grasp point to where the fingers should close
_LOOSE = 0.0005  # m above its place, where a thing begins


@dataclass(frozen=True)
class Task:
    """A task of ``kind`` "ring", "place", "stack", "lift" or "hand_over": ``targets`` are to be
    moved, or pressed.

    ``zones`` {thing: where it starts}. At random the two things change places (``swap``), and what
    is on the left is on the right (``mirror``). Yaws are uniform in ±``max_yaw`` (rad). ``arms``:
    how many it needs. ``symmetric``: its scenes and what is asked for look alike in a mirror that
    exchanges left and right.
    """

    spec: TaskSpec
    kind: str
    targets: tuple[str, ...]
    zones: dict[str, Box]
    goal: str = ""
    swap: bool = False
    mirror: bool = False
    max_yaw: float = 0.35
    arms: int = 1
    symmetric: bool = True

    @property
    def task_id(self) -> str:
        return self.spec.task_id

    @property
    def others(self) -> tuple[str, ...]:
        """Things that can be taken by mistake."""
        return tuple(
            name for name in self.zones if name not in self.targets and THINGS[name].kind != "fixed"
        )


def _ring(color: str) -> Task:
    return Task(
        TaskSpec(
            f"ring_{color}",
            (f"ring the {color} bell", f"press the {color} bell", f"push the {color} bell down"),
            (f"give the {color} bell a push", f"tap the top of the {color} bell"),
            horizon=50,
        ),
        "ring",
        (f"{color}_bell",),
        {"red_bell": LEFT, "blue_bell": RIGHT},
        swap=True,
        max_yaw=0.0,
    )


def _stack(color: str, other: str) -> Task:
    return Task(
        TaskSpec(
            f"stack_{color}",
            (
                f"stack the {color} block on the {other} block",
                f"put the {color} block on the {other} one",
                f"place the {color} block on top of the {other} block",
            ),
            (
                f"build a tower with the {color} block on top",
                f"set the {color} block down on the {other} one",
            ),
            horizon=160,
        ),
        "stack",
        (f"{color}_block",),
        {"red_block": LEFT, "blue_block": MIDDLE},
        goal=f"{other}_block",
        swap=True,
        mirror=True,
    )


TASKS: dict[str, Task] = {
    t.task_id: t
    for t in (
        _ring("red"),
        _ring("blue"),
        Task(
            TaskSpec(
                "place_cup",
                (
                    "put the cup on the coaster",
                    "place the green cup on the coaster",
                    "move the cup onto the coaster",
                ),
                ("set the cup down on the round coaster", "bring the green cup to the coaster"),
                horizon=160,
            ),
            "place",
            ("cup",),
            {"cup": LEFT, "coaster": MIDDLE},
            goal="coaster",
            mirror=True,
            symmetric=False,  # handles point to the right
        ),
        _stack("red", "blue"),
        _stack("blue", "red"),
        Task(
            TaskSpec(
                "lift_both",
                ("lift both blocks", "pick up the two blocks", "raise the red and the blue block"),
                ("take both blocks off the table", "hold up the two blocks at once"),
                horizon=80,
            ),
            "lift",
            ("red_block", "blue_block"),
            {"red_block": LEFT, "blue_block": RIGHT},
            swap=True,
            arms=2,
        ),
        Task(
            TaskSpec(
                "lift_bar",
                (
                    "lift the bar with both hands",
                    "pick up the bar by its two grips",
                    "raise the bar and keep it level",
                ),
                ("take the bar off the table with two hands", "hold the bar up level"),
                horizon=90,
            ),
            "lift",
            ("bar",),
            {"bar": BAR},
            max_yaw=0.15,
            arms=2,
        ),
        Task(
            TaskSpec(
                "hand_over",
                (
                    "hand the stick over to the right arm",
                    "pass the stick from left to right",
                    "give the stick to the right hand",
                ),
                (
                    "let the right arm take the stick from the left one",
                    "move the stick into the right hand",
                ),
                horizon=200,
            ),
            "hand_over",
            ("stick",),
            {"stick": FAR_LEFT},
            max_yaw=0.25,
            arms=2,
            symmetric=False,
        ),
    )
}

MAX_THINGS = 2  # of a task
STAGES = ("left_holds", "right_holds", "at_goal", "success")
# privileged state: per arm hand position, two columns of its rotation, velocity, gripper opening ·
# per thing: there, position, from the left hand, from the right hand, velocity, yaw as cos and sin,
# tilt · the target's way to its goal, whether there is one · caps down · time left · task · stages
PRIVILEGED_DIM = 2 * 13 + MAX_THINGS * 16 + 4 + MAX_THINGS + 1 + len(TASKS) + len(STAGES)


def place_things(task: Task, init_state_id: int, split: str) -> dict[str, np.ndarray]:
    """Initial poses {thing: [x, y, z, yaw]} (m, rad); the two splits' placements never share a
    lattice cell. Tasks with the same things in the same zones begin alike, so what is to be done is
    in the instruction alone."""
    rng = splits.rng(
        next(name for name, other in TASKS.items() if other.zones == task.zones),
        init_state_id,
        split,
    )
    names = list(task.zones)
    zones = dict(task.zones)
    if task.swap and rng.random() < 0.5:
        zones = dict(zip(names, reversed([zones[name] for name in names])))
    if task.mirror and rng.random() < 0.5:
        zones = {name: RIGHT if zone == LEFT else zone for name, zone in zones.items()}
    poses = {}
    for name in names:
        low, high = zones[name][:2], zones[name][2:]
        x, y = splits.sample_xy(rng, low, high, split)
        yaw = 0.0 if THINGS[name].kind == "fixed" else rng.uniform(-task.max_yaw, task.max_yaw)
        loose = _LOOSE if THINGS[name].kind == "free" else 0.0
        poses[name] = np.array([x, y, THINGS[name].rest + loose, yaw])
    return poses
