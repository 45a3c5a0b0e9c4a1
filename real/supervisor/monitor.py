"""What the supervisor sees of the robot and of those who should be there, and when it pauses for
it."""

from __future__ import annotations

import math

from real.modes import By, Mode
from real.practice import STRAYED
from real.robots.protocol import RobotLost
from real.supervisor.session import Session
from real.supervisor.watch import Client, DeviceClock


class Monitor:
    """Called once per tick, before anything moves."""

    def __init__(self, session: Session):
        self.session = session
        self._clock = DeviceClock()
        self._state_since = session.zero
        self._errors: set[str] = set()

    def observe(self, now: float) -> None:
        try:
            measured = self.session.robot.observe()
        except RobotLost as error:
            return self.session.lost(error)
        self.session.modes.condition("robot lost", False)
        age = self._clock.age(measured.stamp, now)
        self.session.modes.condition("clock jumped", age < 0)
        if age < 0:
            self.session.fault("clock jumped", f"the robot's clock jumped by {-age:.2f} s")
            self._clock.reset()
        if age <= self.session.config.state_age_s:
            self._state_since = now
        elif self.session.modes.moving:
            if now - self._state_since > self.session.config.fault_s:
                self.session.fault("robot silent", "the robot's state does not change any more")
            else:
                self.session.ask("pause", By.SUPERVISOR, f"the robot's state is {age:.2f} s old")
        self.session.measured = measured
        for name in self._errors | set(measured.errors):
            self.session.modes.condition(name, name in measured.errors)
        self._errors = set(measured.errors)
        if measured.errors:
            self.session.fault(
                measured.errors[0], f"the robot reports {', '.join(measured.errors)}"
            )

    def housekeeping(self, now: float) -> None:
        mode = self.session.modes.mode
        if self.session.acking < math.inf:
            outcome = self.session.modes.ask("ack", By.HOLDER)
            if outcome.accepted:
                self.session.acking = math.inf
                self.session.changed("ack", outcome, "")
            elif now > self.session.acking:
                self.session.acking = math.inf
                self.session.notice("ack", outcome.reason, "supervisor")
        self.session.lapse(now)
        if not self.session.modes.moving:
            return
        for role in self.session.config.required:
            if role != "policy" and self.silent(role, now):
                self.session.ask("pause", By.SUPERVISOR, f"the {role} is silent")
        holder = self.session.leases.holder
        if holder and self._unheard(
            [c for c in self.session.clients.values() if c.source == holder], now
        ):
            self.session.ask("pause", By.SUPERVISOR, f"{holder}, who has control, is silent")
        if self.session.config.cameras and (problem := self.session.cameras.stale(now)):
            self.session.ask("pause", By.SUPERVISOR, problem)
        if mode is Mode.HUMAN:
            self._watch_operator(now)
        elif mode is Mode.AUTO and self.session.config.safe_low and (problem := self._strayed()):
            self.session.ask("pause", By.SUPERVISOR, f"{STRAYED}: {problem}")

    def _strayed(self) -> str:
        """Where the hand is outside of its safe set."""
        x = self.session.config
        if self.session.measured is None or not len(self.session.measured.position):
            return "the robot does not say where its hand is"
        for name, at, low, high in zip(
            "xyz", self.session.measured.position, x.safe_low, x.safe_high
        ):
            if not low <= at <= high:
                return f"{name} is {at:.3f} m, and {low:g} to {high:g} are safe"
        return ""

    def _watch_operator(self, now: float) -> None:
        device = self.session.input
        fresh = device is not None and now <= device.stamp + self.session.config.silence_s
        if not fresh and (
            self.session.engaged or now - self.session.move_since > self.session.config.silence_s
        ):
            self.session.ask("release", By.SUPERVISOR, "the operator's device is silent")
        elif device is not None and not device.dead_man and self.session.engaged:
            self.session.ask("release", By.SUPERVISOR, "let go")

    def silent(self, role: str, now: float) -> bool:
        return self._unheard([c for c in self.session.clients.values() if c.role == role], now)

    def _unheard(self, clients: list[Client], now: float) -> bool:
        return not clients or now - max(c.heard for c in clients) > self.session.config.silence_s
