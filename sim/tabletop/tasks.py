"""The suite's objects, scenes and tasks: what is asked for, where things start, and when it is
done (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_rl import splits
from vla_rl.errors import ConfigError
from vla_rl.specs import TaskSpec

TABLE_HEIGHT = 0.8  # metres, of the table top in the world frame
LIFT_HEIGHT = 0.04  # metres between a lifted object's underside and the table
REACHED = 0.03  # metres from the point between the fingers to where they should close
CELL = splits.DEFAULT_CELL
MAX_OBJECTS = 2  # of a scene
STAGES = ("reached", "grasped", "lifted", "success")  # flags at the end of the privileged state
_TRIES = 1000


@dataclass(frozen=True)
class ObjectSpec:
    """An object, sizes in metres. Its origin rests ``rest_height`` above the table, its top is
    ``top`` above it and the fingers close ``grasp_height`` above the origin."""

    name: str
    kind: str
    rest_height: float
    top: float
    grasp_height: float = 0.0
    color: tuple[float, float, float] = (0.5, 0.5, 0.5)
    texture: str = ""


@dataclass(frozen=True)
class SceneSpec:
    """What stands on the table. ``zone``: x, y and half-width (metres) of the marked square, or
    None."""

    name: str
    objects: tuple[str, ...]
    zone: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Task:
    """A task of ``kind`` "lift", "stack" or "place": ``target`` is moved; onto ``goal`` when
    stacking.

    Every object of the scene starts inside ``region`` (x low, y low, x high, y high; metres); two
    objects keep at least ``apart`` in x or in y. Yaws are uniform in ±``max_yaw`` (radians).
    """

    spec: TaskSpec
    scene: str
    kind: str
    target: str
    goal: str | None = None
    region: tuple[float, float, float, float] = (-0.10, -0.10, 0.10, 0.10)
    apart: tuple[float, float] = (0.085, 0.095)
    max_yaw: float = 0.35

    @property
    def task_id(self) -> str:
        return self.spec.task_id

    @property
    def others(self) -> tuple[str, ...]:
        """The scene's other objects."""
        return tuple(name for name in SCENES[self.scene].objects if name != self.target)


def _cube(color: str, rgb: tuple[float, float, float]) -> ObjectSpec:
    return ObjectSpec(
        f"{color}_cube", "cube", 0.021, 0.021, color=rgb, texture=f"Wood{color.capitalize()}"
    )


OBJECTS: dict[str, ObjectSpec] = {
    o.name: o
    for o in (
        _cube("red", (1.0, 0.0, 0.0)),
        _cube("green", (0.0, 1.0, 0.0)),
        ObjectSpec("can", "can", 0.0403, 0.040, grasp_height=0.015),
        ObjectSpec("bread", "bread", 0.0233, 0.025),
        ObjectSpec("milk", "milk", 0.061, 0.083, grasp_height=0.055),
        ObjectSpec("cereal", "cereal", 0.075, 0.075, grasp_height=0.047),
    )
}
_ZONE = (0.0, 0.19, 0.065)
SCENES: dict[str, SceneSpec] = {
    s.name: s
    for s in (
        SceneSpec("cube", ("red_cube",)),
        SceneSpec("cubes", ("red_cube", "green_cube")),
        SceneSpec("can_bread", ("can", "bread"), _ZONE),
        SceneSpec("milk_cereal", ("milk", "cereal"), _ZONE),
    )
}


def _lift(color: str) -> Task:
    return Task(
        TaskSpec(
            f"lift_{color}",
            (
                f"lift the {color} cube",
                f"pick up the {color} block",
                f"raise the {color} cube off the table",
            ),
            (f"grab the {color} block and lift it", f"take the {color} cube up"),
            horizon=80,
        ),
        scene="cubes",
        kind="lift",
        target=f"{color}_cube",
    )


def _place(name: str, noun: str, scene: str, max_yaw: float = 0.35) -> Task:
    return Task(
        TaskSpec(
            f"place_{name}",
            (
                f"put the {noun} on the blue square",
                f"place the {noun} on the blue area",
                f"move the {noun} to the blue square",
            ),
            (f"set the {noun} down in the blue zone", f"bring the {noun} over to the blue square"),
            horizon=140,
        ),
        scene=scene,
        kind="place",
        target=name,
        region=(-0.12, -0.20, 0.12, 0.04),
        apart=(0.105, 0.15),
        max_yaw=max_yaw,
    )


TASKS: dict[str, Task] = {
    t.task_id: t
    for t in (
        Task(
            TaskSpec(
                "lift_cube",
                ("lift the red cube", "pick up the red cube", "raise the cube off the table"),
                ("grab the red cube and lift it up", "take the red block off the table"),
                horizon=80,
            ),
            scene="cube",
            kind="lift",
            target="red_cube",
        ),
        _lift("red"),
        _lift("green"),
        Task(
            TaskSpec(
                "stack_cubes",
                (
                    "stack the red cube on the green cube",
                    "put the red block on the green block",
                    "place the red cube on top of the green one",
                ),
                (
                    "set the red cube down on the green block",
                    "build a tower with the red cube on the green cube",
                ),
                horizon=140,
            ),
            scene="cubes",
            kind="stack",
            target="red_cube",
            goal="green_cube",
        ),
        _place("can", "soda can", "can_bread"),
        _place("bread", "bread", "can_bread"),
        _place("milk", "milk carton", "milk_cereal", max_yaw=0.25),
        _place("cereal", "cereal box", "milk_cereal", max_yaw=0.25),
    )
}
# privileged state: hand position and velocity, gripper opening, time left · per object: position,
# position from the hand, velocity, height, cos and sin of the yaw · the target's way to its goal,
# whether there is one · task · stages
PRIVILEGED_DIM = 3 + 3 + 1 + 1 + 12 * MAX_OBJECTS + 4 + len(TASKS) + len(STAGES)


def place_objects(task: Task, init_state_id: int, split: str) -> dict[str, np.ndarray]:
    """Initial poses {object: [x, y, z, yaw]} (m, rad) of a task; the two splits' placements never
    share a lattice cell.

    A scene's tasks begin alike, so what is to be done is in the instruction and cannot be known
    from where things lie. Raises `ConfigError` where the region leaves no room.
    """
    first_task = next(name for name, other in TASKS.items() if other.scene == task.scene)
    rng = splits.rng(first_task, init_state_id, split)
    low, high = task.region[:2], task.region[2:]
    for _ in range(_TRIES):
        places = {
            name: splits.sample_xy(rng, low, high, split, CELL)
            for name in SCENES[task.scene].objects
        }
        first = places[task.target]
        if all(np.any(np.abs(first - places[name]) >= task.apart) for name in task.others):
            break
    else:
        raise ConfigError(
            f"task {task.task_id}: region {task.region} leaves no room for objects "
            f"{task.apart} apart"
        )
    poses = {}
    for name, xy in places.items():
        height = TABLE_HEIGHT + OBJECTS[name].rest_height + 0.0005
        poses[name] = np.array([*xy, height, rng.uniform(-task.max_yaw, task.max_yaw)])
    return poses
