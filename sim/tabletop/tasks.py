"""The suite's objects, scenes and tasks: what is asked for, where things start, and when it is done (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.types import TaskSpec

TABLE_HEIGHT = 0.8  # metres, of the table top in the world frame


@dataclass(frozen=True)
class ObjectSpec:
    """An object: its kind, colour, and sizes in metres. ``rest_height`` is its origin's height above what it stands on;
    ``grasp_height`` is where the fingers should close, relative to the origin."""

    name: str
    kind: str
    half_width: float
    rest_height: float
    grasp_height: float = 0.0
    color: tuple[float, float, float] = (0.5, 0.5, 0.5)
    texture: str = ""


@dataclass(frozen=True)
class SceneSpec:
    """What stands on the table. ``zone``: x, y and half-width (metres) of the marked square, or None."""

    name: str
    objects: tuple[str, ...]
    zone: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Task:
    """A task: ``kind`` is "lift", "stack" or "place"; ``target`` is the object to move, ``goal`` the object to stack on.

    ``regions`` maps each object to the box (x low, y low, x high, y high; metres) that it starts in.
    """

    spec: TaskSpec
    scene: str
    kind: str
    target: str
    goal: str | None = None
    regions: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    min_distance: float = 0.09
    max_yaw: float = 0.35

    @property
    def task_id(self) -> str:
        return self.spec.task_id


OBJECTS = {
    o.name: o
    for o in (
        ObjectSpec("red_cube", "cube", 0.021, 0.021, color=(1.0, 0.0, 0.0), texture="WoodRed"),
        ObjectSpec("green_cube", "cube", 0.021, 0.021, color=(0.0, 1.0, 0.0), texture="WoodGreen"),
    )
}
SCENES = {
    s.name: s
    for s in (
        SceneSpec("cube", ("red_cube",)),
        SceneSpec("cubes", ("red_cube", "green_cube")),
    )
}

_LIFT_REGION = (-0.10, -0.10, 0.10, 0.10)

TASKS = {
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
            regions={"red_cube": _LIFT_REGION},
        ),
    )
}
LIFT_HEIGHT = 0.04  # metres: a lifted object's lowest rest position must rise by this much
