"""What has become of a task: where its things are, whether it is done, how it fails.

This module imports mujoco; `sim.tabletop.backend` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mujoco
import numpy as np

from sim.failures import AT_REST, FALL, FailureTracker
from sim.tabletop.tasks import (
    LIFT_HEIGHT,
    MAX_OBJECTS,
    OBJECTS,
    REACHED,
    TABLE_HEIGHT,
    TASKS,
    Task,
)

if TYPE_CHECKING:
    from sim.tabletop.backend import CompiledScene


class Fingers(NamedTuple):
    """Numbers of the gripper's geoms: both pads, and the fingers whole."""

    left_pad: set[int]
    right_pad: set[int]
    fingers: set[int]


class _TaskFacts:
    """What `sim.failures.FailureTracker` asks about one slot's episode of a task."""

    def __init__(self, judge: Judge, task: Task, data: mujoco.MjData) -> None:
        self._judge, self._task, self._data = judge, task, data
        scene = judge.scene
        # views, live
        self._position = {name: data.xpos[scene.body[name]] for name in (task.target, *task.others)}
        self._hand = data.site_xpos[scene.controller.site]

    def height(self, name: str) -> float:
        return float(self._position[name][2])

    def near(self, name: str) -> bool:
        """Within `REACHED` of the point where the fingers close on it."""
        (x, y, z), (a, b, c) = self._position[name].tolist(), self._hand.tolist()
        return (x - a) ** 2 + (y - b) ** 2 + (z + OBJECTS[name].grasp_height - c) ** 2 < REACHED**2

    def fingers(self, name: str) -> int:
        left, right, any_finger = self._judge.touches(self._data, name)
        return 2 if left and right else int(any_finger)

    def settled(self, name: str) -> bool:
        return self._judge.at_rest(self._data, name)

    def at_goal(self, name: str) -> bool:
        return self._judge.at_goal(self._task, self._data)


class Judge:
    """Of one compiled scene; methods take the MjData of the slot they look at."""

    def __init__(self, scene: CompiledScene, fingers: Fingers) -> None:
        self.scene, self._touching = scene, fingers
        self._geoms = {
            name: set(np.flatnonzero(scene.model.geom_bodyid == body).tolist())
            for name, body in scene.body.items()
        }

    def touches(self, data: mujoco.MjData, name: str) -> tuple[bool, bool, bool]:
        """Whether the left pad, the right pad, and any part of a finger touch the object."""
        geoms, left, right, any_finger = self._geoms[name], False, False, False
        for a, b in data.contact.geom.tolist():
            if a in geoms or b in geoms:
                other = b if a in geoms else a
                left |= other in self._touching.left_pad
                right |= other in self._touching.right_pad
                any_finger |= other in self._touching.fingers
        return left, right, any_finger

    def height(self, data: mujoco.MjData, name: str) -> float:
        """How far (m) the object's origin is above its place when it stands on the table."""
        return float(data.xpos[self.scene.body[name], 2]) - TABLE_HEIGHT - OBJECTS[name].rest_height

    @property
    def zone(self) -> tuple[float, float, float]:
        """x, y and half-width (m) of the square that things are placed in."""
        if self.scene.spec.zone is None:
            raise ValueError(
                f"scene {self.scene.spec.name} has no zone: nothing can be placed there"
            )
        return self.scene.spec.zone

    def goal(self, task: Task, data: mujoco.MjData) -> np.ndarray | None:
        """Where the target's origin should come to rest (m), or None for lifting tasks."""
        rest = OBJECTS[task.target].rest_height
        if task.goal is not None:
            return data.xpos[self.scene.body[task.goal]] + np.array(
                [0.0, 0.0, OBJECTS[task.goal].top + rest]
            )
        if task.kind == "place":
            x, y, _ = self.zone
            return np.array([x, y, TABLE_HEIGHT + rest])
        return None

    def success(self, task: Task, data: mujoco.MjData) -> bool:
        """Lifted high enough; or at rest within reach of its goal and let go of."""
        if not self.at_goal(task, data):
            return False
        return task.kind == "lift" or (
            self.at_rest(data, task.target) and not self.touches(data, task.target)[2]
        )

    def at_goal(self, task: Task, data: mujoco.MjData) -> bool:
        """Whether the target is high enough, or within reach of its goal."""
        goal = self.goal(task, data)
        if goal is None:
            return self.height(data, task.target) >= LIFT_HEIGHT
        offset = np.abs(goal - data.xpos[self.scene.body[task.target]])
        reach = self.zone[2] if task.kind == "place" else 0.025
        return bool(max(offset[0], offset[1]) <= reach and offset[2] <= 0.008)

    def at_rest(self, data: mujoco.MjData, name: str) -> bool:
        v = self.scene.qvel[name]
        return bool(np.max(np.abs(data.qvel[v : v + 3])) < AT_REST)

    def tracker(self, task: Task, data: mujoco.MjData) -> FailureTracker:
        """For the episode that starts in ``data``, which it goes on watching."""
        fall = None if task.kind == "lift" else FALL
        return FailureTracker(_TaskFacts(self, task, data), {task.target: fall}, task.others)

    def privileged(self, task: Task, data: mujoco.MjData, time_left: float) -> np.ndarray:
        """float32 [`PRIVILEGED_DIM`]: see `sim.tabletop.tasks`; lengths in m, heights above the
        table, target first."""
        table = np.array([0.0, 0.0, TABLE_HEIGHT])
        eef = data.site_xpos[self.scene.controller.site].copy()
        velocity = np.empty(6)
        mujoco.mj_objectVelocity(
            self.scene.model,
            data,
            mujoco.mjtObj.mjOBJ_SITE,
            self.scene.controller.site,
            velocity,
            0,
        )
        parts = [eef - table, velocity[3:], [self.scene.gripper_open(data), time_left]]
        for name in (task.target, *task.others):
            body, v = self.scene.body[name], self.scene.qvel[name]
            position, rotation = data.xpos[body], data.xmat[body]
            yaw = np.arctan2(rotation[3], rotation[0])
            parts += [position - table, position - eef, data.qvel[v : v + 3]]
            parts.append([self.height(data, name), np.cos(yaw), np.sin(yaw)])
        parts.append(np.zeros(12 * (MAX_OBJECTS - 1 - len(task.others))))
        target, goal = data.xpos[self.scene.body[task.target]], self.goal(task, data)
        parts += [np.zeros(4)] if goal is None else [goal - target, [1.0]]
        grasp = target + np.array([0.0, 0.0, OBJECTS[task.target].grasp_height])
        left, right, _ = self.touches(data, task.target)
        reached, lifted = (
            np.linalg.norm(grasp - eef) < REACHED,
            self.height(data, task.target) > 0.01,
        )
        parts.append([float(name == task.task_id) for name in TASKS])
        parts.append(
            [float(f) for f in (reached, left and right, lifted, self.success(task, data))]
        )
        return np.concatenate(parts).astype(np.float32)
