"""Robots without hardware, for the tests of `real`."""

from __future__ import annotations

from pathlib import Path

from real import limits as limit_files
from real.limits import Limits
from real.robots.faults import Defects, Fault
from real.robots.simulated import SimulatedRobot
from real.robots.world import PointConfig, PointWorld

LIMITS = Path(__file__).resolve().parent.parent / "configs" / "limits"
DT = 0.01


class Clock:
    """Virtual time."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def point_robot(clock: Clock, *script: Fault, gain: float = 6.0, joints: bool = False, **defects) -> SimulatedRobot:
    return SimulatedRobot(PointWorld(PointConfig(gain=gain, joints=joints)), Defects(script=script, **defects), clock)


def point_limits(robot: SimulatedRobot) -> Limits:
    if robot.capabilities.kind == "joints":
        data = {"joint_speed": 0.4, "joint_acceleration": 20, "joint_jerk": 2000, "joint_step": 0.06}
        data |= {"observation_age": 0.3, "joint_margin": 0.02}
        return limit_files.parse(data, robot.limits, limit_files.needed("joints", False, False), "test")
    return limit_files.load(LIMITS / "fake_point.yaml", robot.limits, limit_files.needed("cartesian", False, True))
