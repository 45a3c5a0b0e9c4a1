"""The supervisor without its process: messages in, one decision per tick, messages out. No clock,
no socket, no thread.

`receive` takes what clients say, `tick` observes the robot, decides who moves it, passes that
through the gate and commands it. Both put answers into `outbox` as (client, message), client None
for all. In AUTO nothing is cleared by itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from real.gate import SIGNALS, STAGES, Passed, Request
from real.messages import Input, State
from real.modes import By, Mode
from real.practice import STRAYED
from real.robots.protocol import Measured, Resettable, RobotLost
from real.supervisor.chunks import Row
from real.supervisor.reception import Reception
from real.supervisor.watch import Client


class Supervisor(Reception):
    """See the module's text. Times that are passed in are seconds on the clock of all messages."""

    def tick(self, number: int, now: float, lateness: float = 0.0) -> State:
        """Decide what moves the arm in tick ``number`` and say so. Raises nothing that the robot
        or a client causes."""
        self.now, self.tick_number = max(self.now, now), number
        self._observe(now)
        self._housekeeping(now)
        request, row, device = self._choose(number, now)
        passed = self._drive(request, now)
        if not self.modes.moving:  # the gate has put an end to it
            row = device = None
        state = self._report(passed, row, device, lateness)
        self._say(None, state)
        return state

    def _report(
        self, passed: Passed, row: Row | None, device: Input | None, lateness: float
    ) -> State:
        x, m = self.modes, self._measured
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
        fields |= self._steps.report(passed, row, device, self.tick_number)
        return self._writer.make(
            State,
            tick=self.tick_number,
            epoch=x.epoch,
            mode=x.mode.value,
            holder=self.leases.holder,
            episode=x.episode,
            queue=self.chunks.left,
            slow=x.slow,
            estop=x.estop,
            faults=x.faults,
            lateness=lateness,
            overruns=self.overruns,
            **fields,
        )

    def _observe(self, now: float) -> None:
        try:
            measured = self.robot.observe()
        except RobotLost as error:
            return self._lost(error)
        self.modes.condition("robot lost", False)
        age = self._clock.age(measured.stamp, now)
        self.modes.condition("clock jumped", age < 0)
        if age < 0:
            self._fault("clock jumped", f"the robot's clock jumped by {-age:.2f} s")
            self._clock.reset()
        if age <= self.config.state_age_s:
            self._state_since = now
        elif self.modes.moving:
            if now - self._state_since > self.config.fault_s:
                self._fault("robot silent", "the robot's state does not change any more")
            else:
                self._ask("pause", By.SUPERVISOR, f"the robot's state is {age:.2f} s old")
        self._measured = measured
        for name in self._errors | set(measured.errors):
            self.modes.condition(name, name in measured.errors)
        self._errors = set(measured.errors)
        if measured.errors:
            self._fault(measured.errors[0], f"the robot reports {', '.join(measured.errors)}")

    def _lost(self, error: RobotLost) -> None:
        self.modes.condition("robot lost", True)
        self._fault("robot lost", str(error))

    def _housekeeping(self, now: float) -> None:
        mode = self.modes.mode
        if self._acking < math.inf:
            outcome = self.modes.ask("ack", By.HOLDER)
            if outcome.accepted:
                self._acking = math.inf
                self._changed("ack", outcome, "")
            elif now > self._acking:
                self._acking = math.inf
                self._notice("ack", outcome.reason, "supervisor")
        self._lapse(now)
        if not self.modes.moving:
            return
        for role in self.config.required:
            if role != "policy" and self._silent(role, now):
                self._ask("pause", By.SUPERVISOR, f"the {role} is silent")
        holder = self.leases.holder
        if holder and self._unheard([c for c in self.clients.values() if c.source == holder], now):
            self._ask("pause", By.SUPERVISOR, f"{holder}, who has control, is silent")
        if self.config.cameras and (problem := self.cameras.stale(now)):
            self._ask("pause", By.SUPERVISOR, problem)
        if mode is Mode.HUMAN:
            self._watch_operator(now)
        elif mode is Mode.AUTO and self.config.safe_low and (problem := self._strayed()):
            self._ask("pause", By.SUPERVISOR, f"{STRAYED}: {problem}")

    def _strayed(self) -> str:
        """Where the hand is outside of its safe set."""
        x = self.config
        if self._measured is None or not len(self._measured.position):
            return "the robot does not say where its hand is"
        for name, at, low, high in zip("xyz", self._measured.position, x.safe_low, x.safe_high):
            if not low <= at <= high:
                return f"{name} is {at:.3f} m, and {low:g} to {high:g} are safe"
        return ""

    def _watch_operator(self, now: float) -> None:
        device = self._input
        fresh = device is not None and now <= device.stamp + self.config.silence_s
        if not fresh and (self._engaged or now - self._move_since > self.config.silence_s):
            self._ask("release", By.SUPERVISOR, "the operator's device is silent")
        elif device is not None and not device.dead_man and self._engaged:
            self._ask("release", By.SUPERVISOR, "let go")

    def _silent(self, role: str, now: float) -> bool:
        return self._unheard([c for c in self.clients.values() if c.role == role], now)

    def _unheard(self, clients: list[Client], now: float) -> bool:
        return not clients or now - max(c.heard for c in clients) > self.config.silence_s

    def _choose(self, number: int, now: float) -> tuple[Request | None, Row | None, Input | None]:
        """What is to be followed in this tick, and whose it is."""
        mode, measured = self.modes.mode, self._measured
        if measured is None or not self.modes.moving:
            self._idle_since = None
            return None, None, None
        if mode is Mode.AUTO:
            return self._follow_policy(number, now, measured)
        if mode is Mode.HUMAN:
            return self._follow_person(number, measured)
        return self._reset_request(now, measured), None, None

    def _follow_policy(
        self, number: int, now: float, measured: Measured
    ) -> tuple[Request | None, Row | None, Input | None]:
        silent = self._silent("policy", now)
        row = None if silent else self.chunks.row(number, now)
        if row is not None:
            self._idle_since = None
            origin = self._steps.origin((row.decision, row.index), self.gate.origin(measured))
            # its observation's age was judged when it came; a row that waits in the queue is no
            # staler than planned
            self._last = self.actions.request(row.action, origin, None)
            return self._in_time(self._last, row.until - number), row, None
        self._steps.close()
        self._idle_since = now if self._idle_since is None else self._idle_since
        idle = now - self._idle_since
        if silent:
            self._void()
            if idle > self.config.fault_s:
                self._fault("policy silent", "the policy's process is gone or hangs")
            return None, None, None
        if idle > self.config.thinking_s:
            self._ask("pause", By.SUPERVISOR, f"the policy has sent nothing for {idle:.0f} s")
        return (self._last if idle < self.config.silence_s else None), None, None

    def _follow_person(
        self, number: int, measured: Measured
    ) -> tuple[Request | None, Row | None, Input | None]:
        device = self._input
        if device is None or not device.dead_man:
            self._steps.close()
            return None, None, None
        if not self._engaged:
            self._engaged, self._offset = True, self.actions.offset(device, measured)
        begun, latched = self._steps.human(number, self.ticks_per_step, device)
        origin = self._steps.origin(("human", begun), self.gate.origin(measured))
        action = self.actions.human(latched, origin, self._offset, self.gate.grip)
        self._steps.asked = action
        request = self.actions.request(action, origin, None)
        return self._in_time(request, begun + self.ticks_per_step - number), None, latched

    def _in_time(self, request: Request, ticks: int) -> Request:
        """To be there when its control step ends, in ``ticks``."""
        return dataclasses.replace(request, seconds=ticks / self.config.hz)

    def _reset_request(self, now: float, measured: Measured) -> Request | None:
        """A step of the scripted reset; the simulator resets itself; else the operator is waited
        for."""
        home = np.array(self.config.home)
        if not home.size:
            if self._begin_simulated():
                self._ask("reset_done", By.SUPERVISOR, "the simulator")
            elif self._stays:
                self._ask("reset_done", By.SUPERVISOR, "nothing is put back")
            return None
        if now - self._move_since > self.config.home_timeout_s:
            self._ask("pause", By.SUPERVISOR, "the reset did not reach its pose in time")
            return None
        here = measured.joints if self.actions.joints else measured.position
        if float(np.max(np.abs(home[: len(here)] - here))) <= self.config.home_tolerance:
            if self._stays:
                self._begin_simulated()
            self._ask("reset_done", By.SUPERVISOR, "home")
            return None
        if self.actions.joints:
            step = self.limits.joint_step
            return Request(0.0, joints=here + np.clip(home - here, -step, step))
        quaternion = home[3:7] if len(home) == 7 else measured.quaternion
        return Request(-1.0, home[:3], quaternion)

    def _begin_simulated(self) -> bool:
        """Let a simulated arm begin what is asked for, where things are in practice; False for a
        real one."""
        if not self.robot.capabilities.resets or not isinstance(self.robot, Resettable):
            return False
        try:
            self.robot.begin({"task": self._task, "stay": self._stays})
        except RobotLost as error:
            self._lost(error)
            return False
        return True

    def _drive(self, request: Request | None, now: float) -> Passed:
        """Through the gate to the robot, or hold. ``mask`` 0 and no reference where nothing was
        asked."""
        passed = Passed(None, 0, np.zeros(len(STAGES)))
        measured = self._measured
        if request is not None and measured is not None and self.modes.moving:
            passed = self.gate(request, measured, now, self.modes.slow)
            if passed.trip:
                self._ask("pause", By.SUPERVISOR, passed.trip)
                passed = dataclasses.replace(passed, reference=None)
            elif clipped := self._share.add(passed.mask & SIGNALS):
                self._ask(
                    "pause",
                    By.SUPERVISOR,
                    f"the gate clips all the time: {self._clipping(clipped)}",
                )
                passed = dataclasses.replace(passed, reference=None)
        try:
            if passed.reference is not None:
                self.robot.command(passed.reference)
            elif self.robot.capabilities.holds or measured is None:
                self.gate.reset()
                self.robot.hold()
            elif (
                self.modes.faults
            ):  # stopped: wherever it is moved to meanwhile, it begins from there
                self.gate.reset()
            elif reference := self.gate.ramp(measured, now).reference:
                self.robot.command(reference)
        except RobotLost as error:
            self._lost(error)
        return passed

    def _clipping(self, mask: int) -> str:
        return ", ".join(name for i, name in enumerate(STAGES) if mask >> i & 1)
