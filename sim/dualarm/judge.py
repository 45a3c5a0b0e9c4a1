"""What an episode has come to: success, the facts that `sim.failures` asks for, and the critics'
privileged state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.dualarm import kinematics
from sim.dualarm.kinematics import ARMS, JOINTS, above
from sim.dualarm.shapes import FINGER_TRAVEL, THINGS
from sim.dualarm.tasks import (
    GIVEN,
    LEVEL,
    LIFT_HEIGHT,
    MAX_THINGS,
    PRESSED,
    REACHED,
    TASKS,
    Task,
)
from sim.failures import AT_REST, FALL, FailureTracker

if TYPE_CHECKING:
    from sim.dualarm.physics import World

_NEAR = {"place": 0.025, "stack": 0.02}  # m across from the goal
_STANDS = 0.008  # m up or down from where it should rest
# m that a cap which is all the way down counts for, where failures are told by heights
_RISE = 0.05


class View:
    """A slot's state as scripted experts read it; metres and radians in the world, arms 0 (left) and
    1 (right)."""

    def __init__(self, world: World) -> None:
        self._world = world

    def joints(self, arm: int) -> np.ndarray:
        """Measured angles [6] (rad)."""
        return self._world.qpos(arm)[:JOINTS].astype(np.float64)

    def opening(self, arm: int) -> float:
        """Of a gripper, 0 ... 1."""
        return float(self._world.qpos(arm)[JOINTS:].mean() / FINGER_TRAVEL)

    def hand(self, arm: int) -> np.ndarray:
        """Position [3] of the grasp point."""
        return kinematics.hand(ARMS[arm], self.joints(arm))[0]

    def position(self, name: str) -> np.ndarray:
        return self._world.pose(name).p.astype(np.float64)

    def rotation(self, name: str) -> np.ndarray:
        """Matrix [3, 3]."""
        return self._world.pose(name).to_transformation_matrix()[:3, :3].astype(np.float64)

    def yaw(self, name: str) -> float:
        matrix = self.rotation(name)
        return float(np.arctan2(matrix[1, 0], matrix[0, 0]))


class Judge:
    """Knows how one episode of a task stands; `look` after every control step. It does not refer to
    its `tracker`: in a ring of references an episode's world would outlive it until Python next
    collects garbage."""

    def __init__(self, task: Task, world: World) -> None:
        self.task, self._world, self.view = task, world, View(world)
        self._touching = world.touching()

    def tracker(self) -> FailureTracker:
        """For the episode that starts now, which it goes on watching."""
        fall = FALL if self.task.kind in ("place", "stack") else None
        return FailureTracker(self, dict.fromkeys(self.task.targets, fall), self.task.others)

    def look(self) -> None:
        """Take in what presses against what after a control step."""
        self._touching = self._world.touching()

    def opening(self, command: np.ndarray) -> bool:
        """Whether ``command`` [2, 7] tells the hand that is nearest to the first target to open."""
        target = self.view.position(self.task.targets[0])
        distances = [float(np.linalg.norm(self.view.hand(arm) - target)) for arm in (0, 1)]
        return bool(command[int(np.argmin(distances)), JOINTS] > 0.5)

    # ----------------------------------------------------------------- facts (`sim.failures.Facts`)
    def height(self, name: str) -> float:
        """Of a thing's origin; a bell rises, so to speak, as its cap goes down."""
        if THINGS[name].kind == "button":
            return _RISE * self._world.pressed(name)
        return float(self._world.pose(name).p[2])

    def near(self, name: str) -> bool:
        thing, place = THINGS[name], self.view.position(name)
        grips = [place + above(thing.top if thing.kind == "button" else thing.grasp)]
        if thing.grips:
            grips = [place + self.view.rotation(name) @ [x, 0.0, 0.0] for x in thing.grips]
        hands = [self.view.hand(arm) for arm in (0, 1)]
        return any(float(np.linalg.norm(grip - hand)) < REACHED for grip in grips for hand in hands)

    def fingers(self, name: str) -> int:
        if THINGS[name].kind == "button":
            return 2 if self._world.pressed(name) >= PRESSED else 0
        return max(self.held_by(arm, name) for arm in ARMS)

    def settled(self, name: str) -> bool:
        return bool(np.abs(self._world.velocity(name)).max() < AT_REST)

    def at_goal(self, name: str) -> bool:
        """Whether a target is where the task wants it, at rest and let go of or not."""
        kind, where = self.task.kind, self._world.pose(name).p
        if kind == "ring":
            return self._world.pressed(name) >= PRESSED
        if kind in ("lift", "hand_over"):
            high = where[2] - THINGS[name].rest >= LIFT_HEIGHT
            if kind == "lift":
                return bool(high and (len(self.task.targets) > 1 or self.tilt(name) <= LEVEL))
            return bool(high and where[0] >= GIVEN and self.held_by("right", name) == 2)
        gap = np.abs(self.goal(name) - where)
        return bool(
            np.hypot(gap[0], gap[1]) <= _NEAR[kind]
            and gap[2] <= _STANDS
            and self.tilt(name) < 3 * LEVEL
        )

    # -------------------------------------------------------------------------------- other queries
    def held_by(self, arm: str, name: str) -> int:
        """How many fingers of an arm press against a thing."""
        return sum(
            (f"{arm}_{finger}", name) in self._touching for finger in ("finger_a", "finger_b")
        )

    def tilt(self, name: str) -> float:
        """Angle (rad) between a thing's own z axis and the vertical."""
        return float(np.arccos(np.clip(self.view.rotation(name)[2, 2], -1.0, 1.0)))

    def goal(self, name: str) -> np.ndarray:
        """Where a target's origin should come to rest (m)."""
        below = THINGS[self.task.goal]
        return self.view.position(self.task.goal) + above(below.top + THINGS[name].rest)

    def success(self) -> bool:
        """Everything in its place; what was put down is at rest and let go of, what was handed
        over is in one hand alone."""
        targets = self.task.targets
        if not all(self.at_goal(name) for name in targets):
            return False
        if self.task.kind == "hand_over":
            return self.held_by("left", targets[0]) == 0
        if self.task.kind in ("place", "stack"):
            return self.settled(targets[0]) and self.fingers(targets[0]) == 0
        return True

    def privileged(self, time_left: float) -> np.ndarray:
        """float32 [`sim.dualarm.tasks.PRIVILEGED_DIM`]; m, m/s, rad."""
        parts: list = []
        hands = []
        for arm, name in enumerate(ARMS):
            place, turned, jacobian = kinematics.hand(name, self.view.joints(arm))
            hands.append(place)
            parts += [
                place,
                turned[:, :2].ravel(),
                jacobian[:3] @ self._world.qvel(arm)[:JOINTS],
                [self.view.opening(arm)],
            ]
        target = self.task.targets[0]
        names = [
            *self.task.targets,
            *(name for name in self.task.zones if name not in self.task.targets),
        ]
        for name in names:
            place, yaw = self.view.position(name), self.view.yaw(name)
            parts += [[1.0], place, *(place - hand for hand in hands), self._world.velocity(name)]
            parts.append([np.cos(yaw), np.sin(yaw), self.tilt(name)])
        parts.append(np.zeros(16 * (MAX_THINGS - len(names))))
        parts.append(
            [*(self.goal(target) - self.view.position(target)), 1.0]
            if self.task.goal
            else np.zeros(4)
        )
        caps = [
            self._world.pressed(name) if THINGS[name].kind == "button" else 0.0 for name in names
        ]
        parts += [
            caps + [0.0] * (MAX_THINGS - len(caps)),
            [time_left],
            [name == self.task.task_id for name in TASKS],
        ]
        holds = [any(self.held_by(arm, name) == 2 for name in self.task.targets) for arm in ARMS]
        parts.append([*holds, self.at_goal(target), self.success()])
        return np.concatenate(parts).astype(np.float32)
