"""An SO-101's joints as lerobot's `SOFollower` tells them with ``use_degrees``: their names, units,
order and zeros (numpy only).

Degrees count from the middle of a joint's range, and the gripper's percent from closed to open.
"""

from __future__ import annotations

import numpy as np

from vla_rl.specs import CameraSpec, EmbodimentSpec

NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LEROBOT_NAMES = tuple(f"{name}.pos" for name in NAMES)
# What an action may ask for, of any SO-101 (`real.so101` has the same): the model's ranges, rounded
# inwards; each real one is calibrated a little otherwise.
HIGH = (110.0, 100.0, 96.0, 95.0, 160.0, 100.0)
LOW = (*(-high for high in HIGH[:5]), 0.0)
CONTROL_HZ = 20.0


def embodiment(cameras: tuple[CameraSpec, ...]) -> EmbodimentSpec:
    """As `real.so101.SO101Arm` describes the arm of a kit."""
    return EmbodimentSpec(
        name="lerobot_so101_follower",
        action_names=LEROBOT_NAMES,
        action_units=("deg",) * 5 + ("percent",),
        action_low=LOW,
        action_high=HIGH,
        frame="joints",
        rotation="none",
        gripper="none",
        control_hz=CONTROL_HZ,
        cameras=cameras,
        proprio_names=LEROBOT_NAMES,
    )


class Units:
    """Between lerobot's numbers and angles (rad) of joints with ``ranges`` [6, 2] (rad)."""

    def __init__(self, ranges: np.ndarray):
        self._zero = np.append(ranges[:5].mean(axis=1), ranges[5, 0])
        self.scale = np.append(np.full(5, np.pi / 180.0), (ranges[5, 1] - ranges[5, 0]) / 100.0)

    def radians(self, told: np.ndarray) -> np.ndarray:
        return self._zero + self.scale * told

    def told(self, radians: np.ndarray) -> np.ndarray:
        return (radians - self._zero) / self.scale
