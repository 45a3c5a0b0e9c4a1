"""The supervisor without its process: messages in, one decision per tick, messages out. No clock,
no socket, no thread.

`receive` takes what clients say, `tick` observes the robot, decides who moves it, passes that
through the gate and commands it. Both put answers into `outbox` as (client, message), client None
for all. In AUTO nothing is cleared by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from real.gate import SIGNALS, STAGES, Passed, Request
from real.limits import Limits
from real.messages import Input, Message, State
from real.modes import By
from real.robots.protocol import Robot, RobotLost
from real.supervisor.choice import Choice
from real.supervisor.chunks import Row
from real.supervisor.monitor import Monitor
from real.supervisor.reception import Reception
from real.supervisor.session import Session
from real.supervisor.settings import SupervisorConfig
from real.supervisor.watch import Share


class Supervisor:
    """See the module's text. Times that are passed in are seconds on the clock of all messages."""

    def __init__(
        self,
        robot: Robot,
        limits: Limits,
        config: SupervisorConfig,
        zero: float,
        name: str = "session",
    ):
        self.session = Session(robot, limits, config, zero, name)
        self.reception = Reception(self.session)
        self._monitor = Monitor(self.session)
        self._choose = Choice(self.session, self._monitor)
        self._share = Share(round(config.sustained_s * config.hz))

    def receive(self, client: Any, message: Message, now: float) -> None:
        """Act on one message of ``client`` (any key that tells connections apart)."""
        self.reception.receive(client, message, now)

    def tick(self, number: int, now: float, lateness: float = 0.0) -> State:
        """Decide what moves the arm in tick ``number`` and say so. Raises nothing that the robot
        or a client causes."""
        self.session.now, self.session.tick_number = max(self.session.now, now), number
        self._monitor.observe(now)
        self._monitor.housekeeping(now)
        request, row, device = self._choose(number, now)
        passed = self._drive(request, now)
        if not self.session.modes.moving:  # the gate has put an end to it
            row = device = None
        state = self._report(passed, row, device, lateness)
        self.session.say(None, state)
        return state

    def _report(
        self, passed: Passed, row: Row | None, device: Input | None, lateness: float
    ) -> State:
        x, m = self.session.modes, self.session.measured
        fields: dict[str, Any] = {
            "proprio": (),
            "pose": (),
            "joints": (),
            "gripper": 0.0,
            "wrench": (),
            "measured": 0.0,
        }
        if m is not None:
            pose = (*m.position.tolist(), *m.quaternion.tolist()) if len(m.position) else ()
            fields = {
                "proprio": tuple(m.proprio.tolist()),
                "pose": pose,
                "joints": tuple(m.joints.tolist()),
            }
            fields |= {
                "gripper": float(m.gripper),
                "wrench": tuple(m.wrench.tolist()),
                "measured": float(m.stamp),
            }
        fields |= self.session.steps.report(passed, row, device, self.session.tick_number)
        return self.session.writer.make(
            State,
            tick=self.session.tick_number,
            epoch=x.epoch,
            mode=x.mode.value,
            holder=self.session.leases.holder,
            episode=x.episode,
            queue=self.session.chunks.left,
            slow=x.slow,
            estop=x.estop,
            faults=x.faults,
            lateness=lateness,
            overruns=self.session.overruns,
            **fields,
        )

    def _drive(self, request: Request | None, now: float) -> Passed:
        """Through the gate to the robot, or hold. ``mask`` 0 and no reference where nothing was
        asked."""
        passed = Passed(None, 0, np.zeros(len(STAGES)))
        measured = self.session.measured
        if request is not None and measured is not None and self.session.modes.moving:
            passed = self.session.gate(request, measured, now, self.session.modes.slow)
            if passed.trip:
                self.session.ask("pause", By.SUPERVISOR, passed.trip)
                passed = dataclasses.replace(passed, reference=None)
            elif clipped := self._share.add(passed.mask & SIGNALS):
                self.session.ask(
                    "pause",
                    By.SUPERVISOR,
                    f"the gate clips all the time: {_clipping(clipped)}",
                )
                passed = dataclasses.replace(passed, reference=None)
        try:
            if passed.reference is not None:
                self.session.robot.command(passed.reference)
            elif self.session.robot.capabilities.holds or measured is None:
                self.session.gate.reset()
                self.session.robot.hold()
            elif (
                self.session.modes.faults
            ):  # stopped: wherever it is moved to meanwhile, it begins from there
                self.session.gate.reset()
            elif reference := self.session.gate.ramp(measured, now).reference:
                self.session.robot.command(reference)
        except RobotLost as error:
            self.session.lost(error)
        return passed


def _clipping(mask: int) -> str:
    return ", ".join(name for i, name in enumerate(STAGES) if mask >> i & 1)
