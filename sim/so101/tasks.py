"""The SO-101's table: what lies on it, what is asked for, where things start, and when it is done
(numpy only).

Lengths in metres, in the frame of the arm's base: x ahead of it, z up, the table at z = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_rl import splits
from vla_rl.specs import TaskSpec

HALF = 0.015  # of the cube's side
LIFT_HEIGHT = 0.04  # between the lifted cube's underside and the table
REACHED = 0.03  # from the point between the jaws to the cube's middle
REGION = (0.17, -0.06, 0.26, 0.06)  # x low, y low, x high, y high: where the cube starts
MAX_YAW = 0.3  # rad
BIN, BIN_HALF, BIN_WALL = (0.20, 0.17), 0.055, 0.025  # its middle, half its width, its height
MARK, MARK_HALF = (0.21, -0.17), 0.05  # of the marked square
STAGES = ("reached", "grasped", "lifted", "success")  # flags at the end of the privileged state


@dataclass(frozen=True)
class Task:
    """A task of ``kind`` "lift", "bin" or "push"."""

    spec: TaskSpec
    kind: str


TASKS: dict[str, Task] = {
    task.spec.task_id: task
    for task in (
        Task(
            TaskSpec(
                "lift_cube",
                ("lift the red cube", "pick up the red cube", "raise the cube off the table"),
                ("grab the red cube and lift it up", "take the red block off the table"),
                horizon=80,
            ),
            "lift",
        ),
        Task(
            TaskSpec(
                "bin_cube",
                (
                    "put the red cube into the bin",
                    "drop the red block into the bin",
                    "place the cube in the bin",
                ),
                ("the red cube belongs in the bin", "throw the red block into the bin"),
                horizon=120,
            ),
            "bin",
        ),
        Task(
            TaskSpec(
                "push_cube",
                (
                    "push the red cube onto the blue square",
                    "slide the red block to the blue square",
                    "shove the cube onto the blue mark",
                ),
                ("move the red cube over to the blue square", "nudge the block onto the mark"),
                horizon=120,
            ),
            "push",
        ),
    )
}
# hand: position, velocity, opening, time left · cube: position, way from the hand, velocity, cos and
# sin of its yaw · its way to the goal, whether there is one · task · stages
PRIVILEGED_DIM = 3 + 3 + 1 + 1 + 3 + 3 + 3 + 2 + 4 + len(TASKS) + len(STAGES)


def place_cube(init_state_id: int, split: str) -> np.ndarray:
    """Its initial x, y (m) and yaw (rad), the same for every task, so that what is to be done stands
    in the instruction alone; the two splits' never share a lattice cell."""
    rng = splits.rng("so101", init_state_id, split)
    xy = splits.sample_xy(rng, REGION[:2], REGION[2:], split)
    return np.array([*xy, rng.uniform(-MAX_YAW, MAX_YAW)])


def goal(kind: str) -> np.ndarray | None:
    """Where the cube's middle should come to rest [3]; None where it is to be lifted."""
    place = {"bin": BIN, "push": MARK}.get(kind)
    return None if place is None else np.array([*place, HALF])
