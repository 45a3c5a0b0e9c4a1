"""A robot registered with lerobot that stands in for hardware; its import brings lerobot's,
which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from lerobot.robots import Robot
from lerobot.robots.config import RobotConfig

JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")


@RobotConfig.register_subclass("paper_arm")
@dataclass(kw_only=True)
class PaperArmConfig(RobotConfig):
    port: str = ""


class PaperArm(Robot):
    """Goes where it is told in a tick; a drawer of what it was told."""

    config_class = PaperArmConfig
    name = "paper_arm"

    def __init__(self, config):
        self.config, self.told, self.plugged = config, [], True
        self.place = {name: 50.0 if "gripper" in name else 0.0 for name in JOINTS}

    observation_features = dict.fromkeys(JOINTS, float) | {"wrist": (4, 6, 3)}
    action_features = dict.fromkeys(JOINTS, float)
    is_connected = is_calibrated = True

    def connect(self, calibrate=True):
        if not self.config.port:
            raise ConnectionError("no port")

    def calibrate(self): ...

    def configure(self): ...

    def disconnect(self): ...

    def get_observation(self):
        if not self.plugged:
            raise ConnectionError("the cable is out")
        return {**self.place, "wrist": np.full((4, 6, 3), 7, np.uint8)}

    def send_action(self, action):
        self.told.append(dict(action))
        self.place = dict(action)
        return action
