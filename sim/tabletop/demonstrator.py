"""Scripted experts that read simulator state: closed-loop, near full speed, one action per control
step (numpy only).

An expert looks at where things are now, never at how they should have moved, so it recovers from
noise in the executed actions: a missed or dropped object is approached again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.tabletop.tasks import LIFT_HEIGHT, OBJECTS, SCENES, TABLE_HEIGHT, Task

if TYPE_CHECKING:
    from sim.tabletop.backend import SceneView

GAIN = 2.6  # a commanded offset moves the hand by about a third of itself per control step
REACH = 0.05  # metres: the largest command per dimension
OPEN, CLOSE = -1.0, 1.0
FINGERTIP = 0.011  # metres that the fingers reach below the point between the pads
SIDE = 0.11  # metres: half-width of the corridor that hand and load need


def toward(position: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Command [3] that moves the hand straight towards ``goal``, at most `REACH` per dimension."""
    offset = GAIN * (goal - position)
    largest = float(np.max(np.abs(offset)))
    return offset * (REACH / largest) if largest > REACH else offset


def distance_to_path(point: np.ndarray, start: np.ndarray, end: np.ndarray) -> float:
    """Horizontal distance (m) of ``point`` from the segment ``start`` - ``end``."""
    a, b, p = start[:2], end[:2], point[:2]
    length = float(np.dot(b - a, b - a))
    t = 0.0 if length == 0.0 else min(max(float(np.dot(p - a, b - a)) / length, 0.0), 1.0)
    return float(np.linalg.norm(p - (a + t * (b - a))))


class Demonstrator:
    """A scripted expert for one episode: reach over the target, close, lift; for "stack" and
    "place" also carry, lower, open and retreat."""

    def __init__(self, task: Task, action_dim: int) -> None:
        self._task, self._dim = task, action_dim
        self._spec = OBJECTS[task.target]
        self._closing = 0  # control steps spent closing
        self._opening = 1.0  # of the gripper, at the previous control step
        self._carrying = False
        self._released: np.ndarray | None = None  # where the hand was to be when it let go

    def act(self, state: SceneView) -> np.ndarray:
        """A clean label in physical units [a]: metres (and radians) per control step, gripper -1
        open ... +1 close."""
        hand, target = state.eef_position, state.position(self._task.target)
        grasp = target + np.array([0.0, 0.0, self._spec.grasp_height])
        offset = grasp - hand
        across, above = float(np.hypot(offset[0], offset[1])), -float(offset[2])
        stalled = self._opening - state.gripper_open < 0.015
        self._opening = state.gripper_open
        action = np.zeros(self._dim)
        if self._released is not None and (across > 0.04 or above > 0.06):
            self._released = None  # let go, away, and yet no success: try again
        if (self._carrying or self._closing) and (across > 0.025 or abs(above) > 0.03):
            self._carrying, self._closing = False, 0  # slipped away
        if self._released is not None:
            action[:3], action[-1] = self._retreat(state, hand, self._released), OPEN
        elif self._carrying:
            action[:3], action[-1] = self._carry(state, hand, target)
        elif self._closing or (
            abs(offset[0]) < 0.010 and abs(offset[1]) < 0.013 and abs(above) < 0.014
        ):
            self._closing += 1
            self._carrying = self._closing >= 4 and stalled and state.gripper_open < 0.9
            action[:3], action[-1] = toward(hand, grasp), CLOSE
        else:
            action[:3], action[-1] = toward(hand, self._approach(state, hand, grasp, across)), OPEN
        return action

    def _approach(
        self, state: SceneView, hand: np.ndarray, grasp: np.ndarray, across: float
    ) -> np.ndarray:
        """A waypoint that comes down on the object from above, over whatever stands in the way."""
        clear = self._spec.top - self._spec.grasp_height + FINGERTIP + 0.02
        height = grasp[2] + min(clear, 4.0 * max(0.0, across - 0.008))
        if across > 0.05:
            height = max(height, self._obstacle_top(state, hand, grasp) + FINGERTIP + 0.02)
        return np.array([grasp[0], grasp[1], height])

    def _carry(
        self, state: SceneView, hand: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, float]:
        if self._task.kind == "lift":
            up = (
                TABLE_HEIGHT + self._spec.rest_height + self._spec.grasp_height + LIFT_HEIGHT + 0.06
            )
            return toward(hand, np.array([hand[0], hand[1], up])), CLOSE
        goal = self._goal(state)
        gap = goal - target
        across = float(np.hypot(gap[0], gap[1]))
        near = 0.03 if self._task.kind == "stack" else 0.045
        if across < 0.35 * near and gap[2] > -0.012:
            self._released, self._carrying, self._closing = hand + gap, False, 0
            return toward(hand, hand + gap), OPEN
        ground = goal[2] - self._spec.rest_height if self._task.kind == "stack" else TABLE_HEIGHT
        if across > near:
            safe = (
                max(ground, self._obstacle_top(state, target, goal)) + self._spec.rest_height + 0.03
            )
        else:
            # of the target's origin
            safe = goal[2] + min(0.02, 2.0 * max(0.0, across - 0.2 * near))
        up = GAIN * (safe - float(target[2]))
        command = toward(hand, hand + gap)
        if across > near:
            # up first, then across
            command[:2] *= min(max(1.0 - (safe - float(target[2]) - 0.01) / 0.03, 0.0), 1.0)
        command[2] = min(max(up, -REACH), REACH)
        return command, CLOSE

    def _retreat(self, state: SceneView, hand: np.ndarray, hold: np.ndarray) -> np.ndarray:
        """Hold still until the fingers are apart, then move up."""
        apart = state.gripper_open > 0.94
        return toward(hand, hand + np.array([0.0, 0.0, 0.05]) if apart else hold)

    def _goal(self, state: SceneView) -> np.ndarray:
        """Where the target's origin should come to rest."""
        if self._task.goal is not None:
            below = OBJECTS[self._task.goal]
            height = np.array([0.0, 0.0, below.top + self._spec.rest_height + 0.003])
            return state.position(self._task.goal) + height
        x, y, _ = SCENES[self._task.scene].zone or (0.0, 0.0, 0.0)
        return np.array([x, y, TABLE_HEIGHT + self._spec.rest_height + 0.004])

    def _obstacle_top(self, state: SceneView, start: np.ndarray, end: np.ndarray) -> float:
        """Height of the tallest other object near the straight way from ``start`` to ``end``,
        else the table's."""
        top = TABLE_HEIGHT
        for name in self._task.others:
            position = state.position(name)
            if name != self._task.goal and distance_to_path(position, start, end) < SIDE:
                top = max(top, float(position[2]) + OBJECTS[name].top)
        return top


def make_demonstrator(task: Task, action_dim: int) -> Demonstrator:
    """A fresh expert for one episode of ``task``, for an action space of ``action_dim`` (4 or
    7)."""
    return Demonstrator(task, action_dim)
