"""Scripted experts that read simulator state: closed-loop, near full speed, one action per control step."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sim.tabletop.tasks import LIFT_HEIGHT, OBJECTS, Task

GAIN = 2.6  # a commanded offset moves the hand by about a third of itself per control step
OPEN, CLOSE = -1.0, 1.0


class SceneState(Protocol):
    """What an expert may look at; positions in metres, world frame."""

    eef_position: np.ndarray
    gripper_open: float

    def position(self, name: str) -> np.ndarray: ...


class Demonstrator(Protocol):
    def act(self, state: SceneState) -> np.ndarray:
        """A clean label in physical units [a]: metres (and radians) per control step, gripper -1 open ... +1 close."""
        ...


def toward(state: SceneState, goal: np.ndarray, limit: float = 0.05) -> np.ndarray:
    """Offset [3] that moves the hand towards ``goal``, straight and at most ``limit`` per dimension."""
    offset = GAIN * (goal - state.eef_position)
    largest = float(np.max(np.abs(offset)))
    return offset * (limit / largest) if largest > limit else offset


class LiftDemonstrator:
    """Reach down over the object, close, lift."""

    def __init__(self, task: Task, action_dim: int) -> None:
        self._task = task
        self._dim = action_dim
        self._closing = 0

    def act(self, state: SceneState) -> np.ndarray:
        spec = OBJECTS[self._task.target]
        grasp = state.position(self._task.target) + (0.0, 0.0, spec.grasp_height)
        offset = grasp - state.eef_position
        across = float(np.hypot(offset[0], offset[1]))
        action = np.zeros(self._dim)
        holding = across < 0.02 and abs(offset[2]) < 0.022
        if self._closing and not holding:
            self._closing = 0
        if self._closing or (across < 0.008 and abs(offset[2]) < 0.012):
            self._closing += 1
            action[-1] = CLOSE
            if self._closing > 5 and state.gripper_open < 0.75:
                lift = np.array([state.eef_position[0], state.eef_position[1], grasp[2] + LIFT_HEIGHT + 0.05])
                action[:3] = toward(state, lift)
            else:
                action[:3] = toward(state, grasp)
            return action
        action[-1] = OPEN
        goal = grasp.copy()
        goal[2] += min(0.06, max(0.0, 2.0 * (across - 0.012)))
        action[:3] = toward(state, goal)
        return action


def make_demonstrator(task: Task, action_dim: int) -> Demonstrator:
    """A fresh expert for one episode of ``task``."""
    return LiftDemonstrator(task, action_dim)
