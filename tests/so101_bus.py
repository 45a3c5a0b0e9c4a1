"""lerobot's own SO-101 follower over a bus of this file: what it reads, what it was told, and
what became of its torque."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
# steps
RANGES = dict(
    zip(NAMES, ((1024, 3072), (800, 3200), (900, 3100), (1000, 3000), (0, 4095), (2000, 3500)))
)


class FakeBus:
    """In place of `FeetechMotorsBus`. ``torque`` per motor; ``calls`` in order; ``fault`` may raise
    at every read (its number) and write (-1)."""

    made: FakeBus
    calibrated, held = True, False
    model_resolution_table = {"sts3215": 4096}  # noqa: RUF012 - as lerobot's class has it

    def __init__(self, port, motors, calibration=None):
        from lerobot.motors import MotorCalibration

        usual = {n: MotorCalibration(i + 1, 0, 0, *RANGES[n]) for i, n in enumerate(NAMES)}
        self.motors, self.calibration, self.is_connected = motors, calibration or usual, False
        self.torque = dict.fromkeys(motors, self.held)
        self.place = dict.fromkeys(motors, 10.0)
        self.calls: list[str] = []
        self.goals: list[dict[str, float]] = []
        self.reads = 0
        self.fault: Callable[[int], None] = lambda number: None
        FakeBus.made = self

    @property
    def is_calibrated(self):
        return self.calibrated

    def connect(self):
        self.is_connected = True
        self.calls.append("connect")

    def disconnect(self, disable_torque=True):
        self.is_connected = False
        self.calls.append("disconnect")
        if disable_torque:
            self.disable_torque()

    def disable_torque(self, motors=None):
        self.calls.append("limp")
        self.torque = dict.fromkeys(self.motors, False)

    @contextlib.contextmanager
    def torque_disabled(self):
        self.disable_torque()
        yield
        self.torque = dict.fromkeys(self.motors, True)

    def configure_motors(self):
        self.calls.append("configure")

    def write(self, *_, **__):
        self.calls.append("write")

    def sync_read(self, register, normalize=True, num_retry=0):
        if register == "Torque_Enable":
            return {name: int(on) for name, on in self.torque.items()}
        self.reads += 1
        self.fault(self.reads)
        return dict(self.place)

    def sync_write(self, register, goals):
        self.fault(-1)
        self.goals.append(dict(goals))
        self.place = dict(goals)


def patched(monkeypatch, calibrated: bool = True, held: bool = False) -> type[FakeBus]:
    """lerobot's follower on such a bus; lerobot's import takes seconds."""
    pytest.importorskip("lerobot")
    if importlib.util.find_spec("scservo_sdk") is None:  # nothing here talks to it
        vendor = MagicMock(__spec__=ModuleSpec("scservo_sdk", None))
        sys.modules.setdefault("scservo_sdk", vendor)
    from lerobot.robots.so_follower import so_follower

    monkeypatch.setattr(FakeBus, "calibrated", calibrated)
    monkeypatch.setattr(FakeBus, "held", held)
    monkeypatch.setattr(so_follower, "FeetechMotorsBus", FakeBus)
    return FakeBus
