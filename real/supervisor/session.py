"""The state of a session, and what changes it: modes, faults, what is void, what is told."""

from __future__ import annotations

import math
import re
from typing import Any

from real.gate import Gate, Request
from real.limits import Limits
from real.messages import Input, Message, Notice, Refused, Writer
from real.modes import By, Mode, Modes, Outcome
from real.robots.protocol import Measured, Robot, RobotLost
from real.supervisor.chunks import Chunks
from real.supervisor.leases import Leases
from real.supervisor.motion import Actions
from real.supervisor.settings import SupervisorConfig
from real.supervisor.steps import Steps
from real.supervisor.watch import Cameras, Client
from vla_rl.errors import ConfigError


class Session:
    """What the parts of a supervisor have in common. ``zero`` is the time of tick 0; ``outbox``
    holds answers as (client, message), client None for all."""

    def __init__(
        self,
        robot: Robot,
        limits: Limits,
        config: SupervisorConfig,
        zero: float,
        name: str = "session",
    ):
        control_hz = robot.embodiment.control_hz
        self.ticks_per_step = round(config.hz / control_hz)
        if (
            abs(self.ticks_per_step * control_hz - config.hz) > 1e-6
            or config.hz > robot.capabilities.max_hz
        ):
            raise ConfigError(
                f"supervisor.hz={config.hz:g} must be a whole multiple of "
                f"{robot.embodiment.name}'s {control_hz:g} Hz, and at most "
                f"{robot.capabilities.max_hz:g}, which the robot takes"
            )
        self.robot, self.limits, self.config = robot, limits, config
        self.zero, self.name = zero, name
        self.actions = Actions(robot.embodiment, robot.capabilities)
        self.actions.require_pose("supervisor.home", config.home)
        self.gate = Gate(limits, robot.capabilities, self.actions.turns, 1.0 / config.hz)
        self.chunks = Chunks(
            config.hz, self.ticks_per_step, self.actions.width, limits.observation_age
        )
        self.modes, self.leases = Modes(), Leases(config.lease_s)
        self.cameras = Cameras(config.cameras, config.frame_age_s)
        self.clients: dict[Any, Client] = {}
        self.outbox: list[tuple[Any, Message]] = []
        self.refused: dict[str, int] = {}  # why messages were not acted on, and how often
        self.now, self.tick_number, self.overruns = zero, -1, 0
        self.writer = Writer("supervisor", lambda: self.now)
        self.steps = Steps(self.actions)
        self.measured: Measured | None = None
        # what was followed last, for a short gap between two rows
        self.last: Request | None = None
        self.idle_since: float | None = None  # since when AUTO has nothing to follow
        self.input: Input | None = None
        self.engaged = False
        self.acking = math.inf
        self.move_since = zero
        self.task = ""
        self.stays = False  # the reset leaves things where they are

    def ask(self, event: str, by: By, why: str) -> Outcome:
        if event in ("stop", "estop", "fault"):
            self.unack(f"a {event} came after it")
        outcome = self.modes.ask(event, by, why)
        if outcome.changed:
            self.changed(event, outcome, why)
        return outcome

    def fault(self, name: str, why: str) -> None:
        """Latch it. `Modes.faults` keeps the name."""
        if name not in self.modes.faults:
            self.unack(f"{name} came after it")
        outcome = self.modes.ask("fault", By.SUPERVISOR, name)
        if outcome.changed:
            self.changed("fault", outcome, why)

    def unack(self, why: str) -> None:
        """An acknowledgement that waits for the robot's errors to go was not of what came since."""
        if self.acking < math.inf:
            self.acking = math.inf
            self.notice("ack", why, "supervisor")

    def void(self) -> None:
        """What was inferred is void, though the mode stays."""
        if self.chunks.left:
            self.modes.invalidate()
        self.chunks.clear()
        self.last = None

    def changed(self, event: str, outcome: Outcome, why: str) -> None:
        self.chunks.clear()
        self.steps.close()
        self.last, self.idle_since, self.engaged = None, None, False
        self.move_since = self.now
        rule = outcome.rule
        self.notice(event, why, "supervisor")
        if rule is not None and rule.begins:
            self.steps.begin()
            self.notice("begin", self.task, "supervisor")
        if rule is not None and rule.ends:
            self.notice("discard" if rule.discards else "end_episode", why, "supervisor")

    def lost(self, error: RobotLost) -> None:
        self.modes.condition("robot lost", True)
        self.fault("robot lost", str(error))

    def lapse(self, now: float) -> None:
        """Nothing goes on where the holder of control is not heard any more."""
        if self.leases.lapsed(now):
            self.unheld("the operator's lease lapsed")

    def unheld(self, why: str) -> None:
        self.notice("lease", "", "supervisor")
        self.ask("release" if self.modes.mode is Mode.HUMAN else "pause", By.ANYONE, why)

    def notice(self, name: str, value: str, by: str) -> None:
        x = self.modes
        notice = self.writer.make(
            Notice,
            name=name,
            value=value[:200],
            by=by,
            mode=x.mode.value,
            epoch=x.epoch,
            tick=max(self.tick_number, 0),
            episode=x.episode,
        )
        self.say(None, notice)

    def farewell(self) -> Notice:
        """The last message of a session that ends in order."""
        self.notice("farewell", "", "supervisor")
        notice = self.outbox.pop()[1]
        assert isinstance(notice, Notice)
        return notice

    def refuse(self, client: Any, message: Message, reason: str) -> None:
        self.count("refused")
        self.say(client, self.writer.make(Refused, about=message.seq, reason=reason[:400]))

    def count(self, reason: str) -> None:
        # as few entries as there are reasons, however long it runs
        reason = re.sub(r"-?\d+(\.\d+)?", "#", reason)
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def say(self, client: Any, message: Message) -> None:
        self.outbox.append((client, message))
