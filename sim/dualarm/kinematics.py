"""The arm's geometry: where its hand is for given joint angles, and which angles put it somewhere
(numpy only).

Six revolute joints as of a Piper (yaw, shoulder, elbow, forearm roll, wrist, hand roll), all at
zero when the arm is stretched out along x of its base. Lengths in metres, angles in radians; both
bases look along the world's y. The hand's x axis points out of it, its fingers open along its y
axis.
"""

from __future__ import annotations

import functools

import numpy as np

ARMS = ("left", "right")
JOINTS = 6
BASE_X = 0.28  # of the right arm's base; the left one's is the negative of it
COLUMN, SHOULDER = 0.07, 0.14  # heights of the first two joints
# upper arm, forearm, and from the elbow to the joint that rolls the forearm
UPPER, FORE, ROLL = 0.21, 0.20, 0.10
# from the wrist to the hand's own joint, and to the point between the finger pads
WRIST, GRASP = 0.05, 0.13
REACH = UPPER + FORE + GRASP  # from the shoulder to that point, stretched out
QUARTER = np.pi / 2  # rad
LOW = np.array([-2.6, -2.9, 0.0, -1.8, -1.9, -2.9])
HIGH = np.array([2.6, 0.4, 2.9, 1.8, 1.9, 2.9])
# m: where the right hand waits, pointing down; the left one's is its mirror image
HOME = (0.24, 0.16, 0.16)
AXES = "zyyxyx"  # of each joint, in its link's frame
# joints whose angle changes its sign where x does
TURNED = tuple(i for i, axis in enumerate(AXES) if axis != "y")
_DAMPING = 0.01
_LARGEST = 0.4  # rad: of one joint in one iteration
_NEAR = 1e-4  # metres and radians: the solution is good enough


def base(arm: str) -> np.ndarray:
    """World position [3] of an arm's base."""
    return np.array([BASE_X if arm == "right" else -BASE_X, 0.0, 0.0])


def above(height: float) -> np.ndarray:
    """The vector [3] straight up."""
    return np.array([0.0, 0.0, height])


def rotation(axis: str, angle: float) -> np.ndarray:
    """Matrix [3, 3] of a turn about an axis, "x", "y" or "z"."""
    c, s = np.cos(angle), np.sin(angle)
    if axis == "x":
        return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])
    if axis == "y":
        return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


_FACING = rotation("z", np.pi / 2)  # from a base's frame to the world's


def hand(arm: str, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """World position [3] of the grasp point, the hand's rotation [3, 3] and the Jacobian [6, 6]
    (linear, then angular)."""
    turns = [rotation(axis, float(q)) for axis, q in zip(AXES, joints)]
    frame, axes, places = _FACING, np.empty((6, 3)), np.empty((6, 3))
    place = base(arm) + above(COLUMN)
    # along x, from each joint to the next
    ahead = (0.0, UPPER, ROLL, FORE - ROLL, WRIST, GRASP - WRIST)
    for i, (turn, axis) in enumerate(zip(turns, AXES)):
        axes[i], places[i] = frame[:, "xyz".index(axis)], place
        frame = frame @ turn
        place = place + ahead[i] * frame[:, 0]
        if i == 0:
            place = place + above(SHOULDER - COLUMN)
    lever, jacobian = place - places, np.empty((6, 6))
    jacobian[0] = axes[:, 1] * lever[:, 2] - axes[:, 2] * lever[:, 1]
    jacobian[1] = axes[:, 2] * lever[:, 0] - axes[:, 0] * lever[:, 2]
    jacobian[2] = axes[:, 0] * lever[:, 1] - axes[:, 1] * lever[:, 0]
    jacobian[3:] = axes.T
    return place, frame, jacobian


def easy_yaw(arm: str, position: np.ndarray, yaw: float, symmetry: float = np.pi) -> float:
    """``yaw`` plus the multiple of ``symmetry`` (rad) that turns the last joint least, for a
    hand pointing down there."""
    x, y = (position - base(arm))[:2]
    neutral = np.arctan2(-x, y) + np.pi  # where the fingers open along with that joint at zero
    return yaw + symmetry * round((neutral - yaw) / symmetry)


def downward(yaw: float) -> np.ndarray:
    """Rotation [3, 3] of a hand that points down and opens along the horizontal direction
    ``yaw``."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[0.0, c, s], [0.0, s, -c], [-1.0, 0.0, 0.0]])


def turn_between(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """World rotation vector [3] (rad) that turns ``now`` into ``then``."""
    difference = then @ now.T
    axis = np.array(
        [
            difference[2, 1] - difference[1, 2],
            difference[0, 2] - difference[2, 0],
            difference[1, 0] - difference[0, 1],
        ]
    )
    length = float(np.linalg.norm(axis))
    angle = float(np.arctan2(length, np.trace(difference) - 1.0))
    if length < 1e-9:
        return np.zeros(3) if angle < 1.0 else np.array([0.0, 0.0, np.pi])
    return axis * (angle / length)


def turned(rotation_now: np.ndarray, by: np.ndarray) -> np.ndarray:
    """``rotation_now`` [3, 3] after the world rotation vector ``by`` [3] (Rodrigues)."""
    angle = float(np.linalg.norm(by))
    if angle < 1e-12:
        return rotation_now
    x, y, z = by / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return (
        np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * cross @ cross
    ) @ rotation_now


def solve(
    arm: str, position: np.ndarray, orientation: np.ndarray, start: np.ndarray, iterations: int = 20
) -> np.ndarray:
    """Joint angles [6] within their limits that bring the hand to a pose, by damped least squares
    from ``start``.

    The closest that the iterations came where the pose is out of reach (Wampler 1986, doi
    10.1109/TSMC.1986.289285).
    """
    joints = np.clip(np.asarray(start, dtype=np.float64), LOW, HIGH)
    for _ in range(iterations):
        place, frame, jacobian = hand(arm, joints)
        error = np.concatenate([position - place, turn_between(frame, orientation)])
        if np.abs(error).max() < _NEAR:
            break
        damped = jacobian @ jacobian.T + _DAMPING**2 * np.eye(6)
        step = jacobian.T @ np.linalg.solve(damped, error)
        step *= min(1.0, _LARGEST / np.abs(step).max())
        joints = np.clip(joints + step, LOW, HIGH)
    return joints


@functools.cache
def home(arm: str) -> np.ndarray:
    """Joint angles [6] of an arm that waits."""
    place = np.array([HOME[0] if arm == "right" else -HOME[0], *HOME[1:]])
    down = downward(easy_yaw(arm, place, 0.0))
    joints = solve(arm, place, down, np.array([0.0, -1.7, 2.0, 0.0, 1.3, 0.0]), iterations=60)
    joints.flags.writeable = False
    return joints
