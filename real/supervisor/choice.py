"""Who moves the arm in a tick, and where to."""

from __future__ import annotations

import dataclasses

import numpy as np

from real.gate import Request
from real.messages import Input
from real.modes import By, Mode
from real.robots.protocol import Measured, Resettable, RobotLost
from real.supervisor.chunks import Row
from real.supervisor.monitor import Monitor
from real.supervisor.session import Session


class Choice:
    """Of the policy, a person and the scripted reset, the one that the mode gives the arm to."""

    def __init__(self, session: Session, monitor: Monitor):
        self.session, self.monitor = session, monitor
        self._offset = np.zeros(0)  # between the operator's device and the arm

    def __call__(self, number: int, now: float) -> tuple[Request | None, Row | None, Input | None]:
        """What is to be followed in this tick, and whose it is."""
        mode, measured = self.session.modes.mode, self.session.measured
        if measured is None or not self.session.modes.moving:
            self.session.idle_since = None
            return None, None, None
        if mode is Mode.AUTO:
            return self._follow_policy(number, now, measured)
        if mode is Mode.HUMAN:
            return self._follow_person(number, measured)
        return self._reset_request(now, measured), None, None

    def _follow_policy(
        self, number: int, now: float, measured: Measured
    ) -> tuple[Request | None, Row | None, Input | None]:
        silent = self.monitor.silent("policy", now)
        row = None if silent else self.session.chunks.row(number, now)
        if row is not None:
            self.session.idle_since = None
            origin = self.session.steps.origin(
                (row.decision, row.index), self.session.gate.origin(measured)
            )
            # its observation's age was judged when it came; a row that waits in the queue is no
            # staler than planned
            self.session.last = self.session.actions.request(row.action, origin, None)
            return self._in_time(self.session.last, row.until - number), row, None
        self.session.steps.close()
        self.session.idle_since = (
            now if self.session.idle_since is None else self.session.idle_since
        )
        idle = now - self.session.idle_since
        if silent:
            self.session.void()
            if idle > self.session.config.fault_s:
                self.session.fault("policy silent", "the policy's process is gone or hangs")
            return None, None, None
        if idle > self.session.config.thinking_s:
            self.session.ask(
                "pause", By.SUPERVISOR, f"the policy has sent nothing for {idle:.0f} s"
            )
        return (self.session.last if idle < self.session.config.silence_s else None), None, None

    def _follow_person(
        self, number: int, measured: Measured
    ) -> tuple[Request | None, Row | None, Input | None]:
        device = self.session.input
        if device is None or not device.dead_man:
            self.session.steps.close()
            return None, None, None
        if not self.session.engaged:
            self.session.engaged, self._offset = True, self.session.actions.offset(device, measured)
        begun, latched = self.session.steps.human(number, self.session.ticks_per_step, device)
        origin = self.session.steps.origin(("human", begun), self.session.gate.origin(measured))
        action = self.session.actions.human(
            latched, origin, self._offset, self.session.gate.gripper.state
        )
        self.session.steps.asked = action
        request = self.session.actions.request(action, origin, None)
        return self._in_time(request, begun + self.session.ticks_per_step - number), None, latched

    def _in_time(self, request: Request, ticks: int) -> Request:
        """To be there when its control step ends, in ``ticks``."""
        return dataclasses.replace(request, seconds=ticks / self.session.config.hz)

    def _reset_request(self, now: float, measured: Measured) -> Request | None:
        """A step of the scripted reset; the simulator resets itself; else the operator is waited
        for."""
        home = np.array(self.session.config.home)
        if not home.size:
            if self._begin_simulated():
                self.session.ask("reset_done", By.SUPERVISOR, "the simulator")
            elif self.session.stays:
                self.session.ask("reset_done", By.SUPERVISOR, "nothing is put back")
            return None
        if now - self.session.move_since > self.session.config.home_timeout_s:
            self.session.ask("pause", By.SUPERVISOR, "the reset did not reach its pose in time")
            return None
        here = measured.joints if self.session.actions.joints else measured.position
        if float(np.max(np.abs(home[: len(here)] - here))) <= self.session.config.home_tolerance:
            if self.session.stays:
                self._begin_simulated()
            self.session.ask("reset_done", By.SUPERVISOR, "home")
            return None
        if self.session.actions.joints:
            step = self.session.limits.joint_step
            return Request(0.0, joints=here + np.clip(home - here, -step, step))
        quaternion = home[3:7] if len(home) == 7 else measured.quaternion
        return Request(-1.0, home[:3], quaternion)

    def _begin_simulated(self) -> bool:
        """Let a simulated arm begin what is asked for, where things are in practice; False for a
        real one."""
        if not self.session.robot.capabilities.resets or not isinstance(
            self.session.robot, Resettable
        ):
            return False
        try:
            self.session.robot.begin({"task": self.session.task, "stay": self.session.stays})
        except RobotLost as error:
            self.session.lost(error)
            return False
        return True
