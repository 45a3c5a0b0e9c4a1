"""Robots without hardware, for the tests of `real`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from real import limits as limit_files
from real.limits import Limits
from real.messages import (
    Beat,
    Chunk,
    Event,
    Grant,
    Hello,
    Input,
    Lease,
    Message,
    Notice,
    State,
    Writer,
)
from real.robots.faults import Defects, Fault
from real.robots.simulated import SimulatedRobot
from real.robots.world import PointConfig, PointWorld
from real.supervisor.core import Supervisor
from real.supervisor.settings import SupervisorConfig

LIMITS = Path(__file__).resolve().parent.parent / "configs" / "limits"
DT = 0.01


def kill_child(process: subprocess.Popen, named: str) -> None:
    """Kill -9 the one child of ``process`` whose command line holds ``named``."""
    listed = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid=,args="], capture_output=True, text=True
    )
    (child,) = [line.split()[0] for line in listed.stdout.splitlines() if named in line]
    os.kill(int(child), signal.SIGKILL)


def spawned(*arguments: str) -> subprocess.Popen[str]:
    """``vla-rl`` in a process of its own, whose output is one stream."""
    return subprocess.Popen(
        [sys.executable, "-m", "vla_rl", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def stopped_by_guard(said: str) -> bool:
    """Whether a session ended as this machine was too busy for it."""
    return "stopped the arm" in said


class Clock:
    """Virtual time."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def point_robot(
    clock: Clock, *script: Fault, gain: float = 6.0, joints: bool = False, **defects
) -> SimulatedRobot:
    return SimulatedRobot(
        PointWorld(PointConfig(gain=gain, joints=joints)), Defects(script=script, **defects), clock
    )


def point_limits(robot: SimulatedRobot) -> Limits:
    if robot.capabilities.kind == "joints":
        data = {
            "joint_speed": 0.4,
            "joint_acceleration": 20,
            "joint_jerk": 2000,
            "joint_step": 0.06,
        }
        data |= {"observation_age": 0.3, "joint_margin": 0.02}
        return limit_files.parse(
            data, robot.limits, limit_files.needed("joints", False, False), "test"
        )
    return limit_files.load(
        LIMITS / "fake_point.yaml", robot.limits, limit_files.needed("cartesian", False, True)
    )


class Rig:
    """A session in virtual time: a simulated arm, the supervisor, a policy and an operator who
    beat while ``alive``."""

    def __init__(self, robot: SimulatedRobot, clock: Clock, **config: Any):
        self.clock, self.robot = clock, robot
        self.supervisor = Supervisor(
            robot, point_limits(robot), SupervisorConfig(**config), clock()
        )
        self.writers = {
            name: Writer(name, clock) for name in ("policy", "operator", "console", "other")
        }
        self.alive = {"policy", "operator"}
        self.tick, self.token, self.decision = -1, "", -1
        self.states: list[State] = []
        self.said: list[tuple[Any, Message]] = []
        self.dead_man: bool | None = None  # None: no device
        self.renews = True  # else the operator's process lives, and says nothing of its lease
        self.axes = (0.0,) * 6
        self.target: tuple[float, ...] = ()
        for name, role in (("policy", "policy"), ("operator", "teleop")):
            self.send(name, Hello, role=role, pid=1)

    def send(self, name: str, kind: type[Message], valid_s: float = 0.15, /, **fields: Any) -> None:
        self.supervisor.receive(
            name, self.writers[name].make(kind, valid_s, **fields), self.clock()
        )
        self._collect()

    def _collect(self) -> None:
        self.said += [
            (to, m) for to, m in self.supervisor.session.outbox if not isinstance(m, State)
        ]
        self.supervisor.session.outbox.clear()

    def lease(self, name: str = "operator", force: bool = False) -> bool:
        self.send(name, Lease, ask="request", token="", force=force)
        grant = [m for to, m in self.said if isinstance(m, Grant) and to == name][-1]
        if grant.granted:
            self.token = grant.token
        return grant.granted

    def event(
        self, event: str, name: str = "operator", value: str = "", lease: str | None = None
    ) -> None:
        token = self.token if lease is None else lease
        self.send(name, Event, name=event, value=value, at=self.clock(), lease=token)

    def auto(self) -> Rig:
        """With control, armed, under way."""
        assert self.lease()
        self.event("arm")
        self.event("start")
        return self

    def chunk(self, actions: Any, **changes: Any) -> Chunk:
        """From the policy, of what is current unless changed."""
        self.decision += 1
        fields = {
            "epoch": self.supervisor.session.modes.epoch,
            "start": 0,
            "hz": 20.0,
            "decision": self.decision,
            "policy_version": "v0",
            "obs_stamp": self.clock(),
            "prefix": 0,
            "delay": 0,
            "actions": tuple(tuple(float(x) for x in row) for row in np.atleast_2d(actions)),
        }
        message = self.writers["policy"].make(Chunk, 0.15, **fields | changes)
        self.supervisor.receive("policy", message, self.clock())
        self._collect()
        return message

    def run(self, seconds: float) -> list[State]:
        """Tick on; who is alive beats, the device sends its state at 30 Hz or so."""
        new = []
        for _ in range(round(seconds / DT)):
            self.tick += 1
            self.clock.now += DT
            self.robot.advance_to(self.clock.now)
            if self.tick % 3 == 0:
                for name in sorted(self.alive - {"operator"}):
                    self.send(name, Beat, tick=self.tick)
                if "operator" in self.alive:
                    self._operate()
            new.append(self.supervisor.tick(self.tick, self.clock()))
            self._collect()
        self.states += new
        return new

    def _operate(self) -> None:
        if not self.renews:
            self.send("operator", Beat, tick=self.tick)
            return
        if self.dead_man is None:
            self.send("operator", Lease, ask="renew", token=self.token, force=False)
            return
        held = {
            "dead_man": self.dead_man,
            "axes": self.axes,
            "gripper": 0.0,
            "keys": (),
            "target": self.target,
        }
        self.send("operator", Input, lease=self.token, device_stamp=0.0, **held)

    @property
    def mode(self) -> str:
        return self.supervisor.session.modes.mode.value

    def notices(self, name: str = "") -> list[str]:
        return [m.value for _, m in self.said if isinstance(m, Notice) and name in ("", m.name)]

    def speed(self) -> float:
        """Of the arm itself (m/s)."""
        return float(np.linalg.norm(self.robot.world.velocity))


def rig(
    *script: Fault,
    gain: float = 6.0,
    joints: bool = False,
    config: dict[str, Any] | None = None,
    **defects: Any,
) -> Rig:
    clock = Clock()
    return Rig(
        point_robot(clock, *script, gain=gain, joints=joints, **defects), clock, **config or {}
    )
