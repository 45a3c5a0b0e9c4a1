"""What the numbers of an action mean for the arm: action to request, a person's axes to an
action, reference to action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from real.gate import Request
from real.messages import Input
from real.robots.protocol import Capabilities, Measured, Reference
from real.rotations import conjugate, difference, from_vector, multiply
from vla_rl.errors import ConfigError
from vla_rl.specs import EmbodimentSpec

# times its range that a number may lie beyond its bounds, and is clipped: beyond it means nothing
_WIDE = 10.0


class Actions:
    """Translates for one embodiment. A delta counts from the pose that was measured when its
    control step began."""

    def __init__(self, embodiment: EmbodimentSpec, capabilities: Capabilities):
        self.embodiment, self.joints = embodiment, embodiment.frame == "joints"
        self.width = embodiment.action_dim
        self.low, self.high = np.array(embodiment.action_low), np.array(embodiment.action_high)
        self.turns = embodiment.rotation == "axis_angle_delta"
        self.gripper = embodiment.gripper != "none" and not self.joints
        wanted = (6 if self.turns else 3) + self.gripper
        name = embodiment.name
        if self.joints != (capabilities.kind == "joints"):
            raise ConfigError(
                f"{name} has actions in the frame {embodiment.frame!r}, the robot "
                f"takes {capabilities.kind}"
            )
        if not self.joints and (
            embodiment.frame not in ("world", "base", "tool")
            or embodiment.rotation not in ("none", "axis_angle_delta")
        ):
            raise ConfigError(
                f"{name} has frame={embodiment.frame!r} and rotation={embodiment.rotation!r}; a "
                "session drives deltas in 'world', 'base' or 'tool' with 'none' or "
                "'axis_angle_delta', and 'joints'"
            )
        if not self.joints and self.width != wanted:
            raise ConfigError(
                f"{name} has {self.width} numbers in an action, and {wanted} belong "
                "to what it says of them"
            )

    def require_pose(self, key: str, pose: Sequence[float]) -> None:
        """Raises `ConfigError` for a ``pose`` (empty: none) that the robot cannot be sent to."""
        if self.joints:
            fits, meant = (
                len(pose) == self.width,
                f"the {self.width} joints {', '.join(self.embodiment.action_names)}",
            )
        else:
            unit = len(pose) != 7 or abs(float(np.linalg.norm(pose[3:])) - 1.0) < 0.01
            fits, meant = (
                len(pose) in (3, 7) and unit,
                "x y z in metres, and w x y z of a quaternion or nothing",
            )
        if len(pose) and not fits:
            raise ConfigError(f"{key}={list(pose)}: {self.embodiment.name} needs {meant}")

    def absurd(self, rows: Sequence[Sequence[float]]) -> str:
        """What of the actions [steps, a] no policy of this robot means, or ""."""
        span = self.high - self.low
        for i, row in enumerate(rows):
            for name, x, low, high, wide in zip(
                self.embodiment.action_names, row, self.low, self.high, span
            ):
                if not low - _WIDE * wide <= x <= high + _WIDE * wide:  # (NaN is not within either)
                    return (
                        f"step {i} of its actions has {name} = {x:g}, where {low:g} to {high:g} "
                        "are meant"
                    )
        return ""

    def request(self, action: np.ndarray, origin: Measured, obs_stamp: float | None) -> Request:
        """``action`` [a], clipped to the embodiment's bounds; ``origin`` was measured when its
        control step began."""
        action = np.clip(action, self.low, self.high)
        if self.joints:
            return Request(0.0, joints=action, obs_stamp=obs_stamp)
        move, turn = action[:3], action[3:6] if self.turns else np.zeros(3)
        if self.embodiment.frame == "tool":
            move, turn = _turned(move, origin.quaternion), _turned(turn, origin.quaternion)
        quaternion = (
            multiply(from_vector(turn), origin.quaternion) if self.turns else origin.quaternion
        )
        grip = float(action[-1]) if self.gripper else 0.0
        return Request(grip, origin.position + move, quaternion, obs_stamp=obs_stamp)

    def human(self, device: Input, origin: Measured, offset: np.ndarray, grip: float) -> np.ndarray:
        """The action [a] that a device asks for. ``offset`` [n] was between the joints and an
        absolute device's target when it took hold (its clutch); ``grip`` is what the gripper does
        now."""
        if self.joints:
            if len(device.target) != self.width:
                return origin.joints.copy()
            return np.array(device.target) + offset
        parts = [np.array(device.axes[:3]), *([np.array(device.axes[3:6])] if self.turns else [])]
        action = np.concatenate([*parts, *([[device.gripper or grip]] if self.gripper else [])])
        return np.where(action >= 0, action * np.abs(self.high), action * np.abs(self.low))

    def offset(self, device: Input, measured: Measured) -> np.ndarray:
        """See `human`: latched at every engagement, so that an absolute device never makes the
        arm jump."""
        if self.joints and len(device.target) == self.width:
            return measured.joints - np.array(device.target)
        return np.zeros(self.width)

    def sent(self, reference: Reference, origin: Measured) -> np.ndarray:
        """The action [a] that would have asked for ``reference``: what was really done in a
        control step."""
        if self.joints:
            return reference.joints
        move = reference.position - origin.position
        turn = difference(reference.quaternion, origin.quaternion) if self.turns else np.zeros(3)
        if self.embodiment.frame == "tool":
            back = conjugate(origin.quaternion)
            move, turn = _turned(move, back), _turned(turn, back)
        parts = [
            move,
            *([turn] if self.turns else []),
            *([[reference.gripper]] if self.gripper else []),
        ]
        return np.concatenate(parts)


def _turned(vector: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
    """``vector`` [3] of the axes that ``quaternion`` describes, in those it is given in."""
    return multiply(multiply(quaternion, np.array([0.0, *vector])), conjugate(quaternion))[1:]
