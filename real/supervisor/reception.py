"""What the supervisor does with what clients say, and how it answers: who may, what is void, who
holds control."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np

from real.gate import STAGES, Gate, Request
from real.limits import Limits
from real.messages import (
    Beat,
    Chunk,
    Command,
    Event,
    Frame,
    Grant,
    Hello,
    Input,
    Lease,
    Message,
    Notice,
    Progress,
    Refused,
    Sequence,
    Welcome,
    Writer,
)
from real.modes import By, Mode, Modes, Outcome
from real.practice import STAY
from real.robots.protocol import Measured, Robot, RobotLost
from real.supervisor.chunks import Chunks
from real.supervisor.leases import Leases
from real.supervisor.motion import Actions
from real.supervisor.settings import SupervisorConfig
from real.supervisor.steps import Steps
from real.supervisor.watch import Cameras, Client, DeviceClock, Share
from vla_rl.errors import ConfigError


class Reception:
    """The state of a session, and the side of it that talks. ``zero`` is the time of tick 0; times
    that are passed in are seconds on the clock of all messages."""

    def __init__(
        self,
        robot: Robot,
        limits: Limits,
        config: SupervisorConfig,
        zero: float,
        session: str = "session",
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
        self.robot, self.limits, self.config, self.zero, self.session = (
            robot,
            limits,
            config,
            zero,
            session,
        )
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
        self._writer = Writer("supervisor", lambda: self.now)
        self._sequences: dict[Any, Sequence] = {}
        self._clock = DeviceClock()
        self._share = Share(round(config.sustained_s * config.hz))
        self._steps = Steps(self.actions)
        self._measured: Measured | None = None
        self._state_since = zero
        # what was followed last, for a short gap between two rows
        self._last: Request | None = None
        self._idle_since: float | None = None  # since when AUTO has nothing to follow
        self._input: Input | None = None
        self._engaged = False
        self._offset = np.zeros(0)
        self._acking = math.inf
        self._errors: set[str] = set()
        self._move_since = zero
        self._task = ""
        self._stays = False  # the reset leaves things where they are

    # ----------------------------------------------------------------------------- what clients say
    def receive(self, client: Any, message: Message, now: float) -> None:
        """Act on one message of ``client`` (any key that tells connections apart)."""
        self.now = max(self.now, now)
        if isinstance(message, Hello):
            self.clients[client] = Client(message.role, message.source, now)
            self._sequences[client] = Sequence()
            self._sequences[client].newer(message)
            if message.role == "policy":
                self.chunks.forget()
            self._say(client, self._welcome())
            return
        known = self.clients.get(client)
        if known is None:
            self._refuse(client, message, "say hello first")
            return
        if message.source != known.source and not isinstance(message, Frame):
            self._refuse(client, message, f"this connection is {known.source}")
            return
        if not self._sequences[client].newer(message):
            self._count("not newer")
            return
        if now <= message.expiry:
            known.heard = max(known.heard, min(now, message.stamp) if message.stamp <= now else now)
        self._act(client, known, message, now)

    def _act(self, client: Any, known: Client, message: Message, now: float) -> None:
        if isinstance(message, Event):
            self._event(client, known, message, now)
        elif now > message.expiry:
            self._count("expired")
        elif isinstance(message, Chunk | Command):
            self._queue(client, known, message, now)
        elif isinstance(message, Input):
            self._take_input(client, known, message, now)
        elif isinstance(message, Lease):
            self._lease(client, known, message, now)
        elif isinstance(message, Frame):
            self.see(message)
        elif isinstance(message, Progress):
            self._say(None, message)
        elif not isinstance(message, Beat):
            self._refuse(client, message, f"a {message.kind} message is not for the supervisor")

    def unreadable(self, client: Any, problem: str) -> None:
        """A packet that is no message: counted, and answered to who has said hello."""
        self._count("unreadable")
        if client in self.clients:
            self._say(client, self._writer.make(Refused, about=-1, reason=problem[:400]))

    def see(self, frame: Frame) -> None:
        """A picture of the robot's own cameras, from inside this process."""
        if problem := self.cameras.see(frame, self.now):
            self._count(problem)
        self._say(None, frame)

    def ask(self, event: str, by: By, why: str) -> Outcome:
        """For the process around it."""
        return self._ask(event, by, why)

    def farewell(self) -> Notice:
        """The last message of a session that ends in order."""
        self._notice("farewell", "", "supervisor")
        notice = self.outbox.pop()[1]
        assert isinstance(notice, Notice)
        return notice

    def left(self, client: Any) -> None:
        """Its connection ended: faster than its silence tells."""
        known = self.clients.pop(client, None)
        self._sequences.pop(client, None)
        if known is None:
            return
        self.cameras.left(known.source)
        if known.role == "policy":
            self._void()
        if known.source == self.leases.holder and all(
            c.source != known.source for c in self.clients.values()
        ):
            self.leases.drop()
            self._unheld("the connection of who had control has ended")
        if self._input is not None and self._input.source == known.source:
            self._input = None

    def _queue(self, client: Any, known: Client, message: Chunk | Command, now: float) -> None:
        if known.role != "policy":
            self._refuse(client, message, f"a {known.role} may not send actions")
        elif self.modes.mode is not Mode.AUTO:
            self._count(f"{message.kind} in {self.modes.mode.value}")
        elif problem := self.actions.absurd(
            message.actions if isinstance(message, Chunk) else (message.action,)
        ):
            self._count("absurd actions")
            self._refuse(client, message, problem)
            self._void()
            self._fault("policy error", f"the policy is broken: {problem}")
        elif problem := self.chunks.accept(message, self.modes.epoch, self.tick_number, now):
            self._count(f"{message.kind}: {problem.partition(',')[0]}")
            self._refuse(client, message, problem)
        elif isinstance(message, Chunk):
            self._say(None, message)  # for the record: what was predicted, beside what runs of it

    def _take_input(self, client: Any, known: Client, message: Input, now: float) -> None:
        if not self.leases.renewed(message.lease, now):
            self._refuse(
                client, message, "control is somebody else's, or nobody's: ask for the lease"
            )
            return
        rising = message.dead_man and not (self._input and self._input.dead_man)
        self._input = message
        if rising and self.modes.mode in (Mode.AUTO, Mode.PAUSED):
            self._ask("takeover", By.HOLDER, known.source)

    def _event(self, client: Any, known: Client, event: Event, now: float) -> None:
        by = By.HOLDER if self.leases.renewed(event.lease, now) else By.ANYONE
        if event.name == "reset_done" and by is By.HOLDER and not self._scripted():
            by = By.SUPERVISOR  # the operator has put things back, and says so
        relayed = dataclasses.replace(event, lease="")
        if event.name in ("label", "task", "note", "loss"):
            if event.name == "task" and (
                by is By.HOLDER or (known.role == "launcher" and self.modes.mode is Mode.READY)
            ):
                self._task = event.value
            self._say(None, relayed)
            return
        if (
            event.name == "ack"
            and by is By.HOLDER
            and self.modes.mode is Mode.FAULT
            and not self.modes.estop
        ):
            self._clear(now)
            self._say(None, relayed)
            return
        outcome = self._ask(event.name, by, event.value or known.source)
        if event.name == "estop":
            self.robot.stop()
        if event.name == "reset" and outcome.accepted:
            self._stays = event.value == STAY
        if outcome.accepted:
            self._say(None, relayed)
        else:
            self._refuse(client, event, outcome.reason)

    def _scripted(self) -> bool:
        return bool(self.config.home) or self.robot.capabilities.resets

    def _lapse(self, now: float) -> None:
        """Nothing goes on where the holder of control is not heard any more."""
        if self.leases.lapsed(now):
            self._unheld("the operator's lease lapsed")

    def _unheld(self, why: str) -> None:
        self._notice("lease", "", "supervisor")
        self._ask("release" if self.modes.mode is Mode.HUMAN else "pause", By.ANYONE, why)

    def _lease(self, client: Any, known: Client, lease: Lease, now: float) -> None:
        self._lapse(now)  # (what comes before the tick that would see it)
        other = self.leases.holder not in ("", known.source)
        if lease.ask == "request" and lease.force and other and self.modes.moving:
            self._ask("pause", By.ANYONE, f"{known.source} takes control")
        answer = self.leases.ask(known.source, lease.ask, lease.token, lease.force, now)
        x = self.leases
        mine = answer.granted and lease.ask != "release"
        grant = self._writer.make(
            Grant,
            granted=answer.granted,
            holder=x.holder,
            token=x.token if mine else "",
            until=max(x.until, 0.0),
            reason=answer.reason,
        )
        self._say(client, grant)
        if lease.ask != "renew" and answer.granted:
            self._notice("lease", x.holder, known.source)

    def _clear(self, now: float) -> None:
        """A person acknowledged a fault: the robot's errors may go now; the mode follows once
        they have gone."""
        try:
            self.robot.clear()
        except RobotLost as error:
            self._notice("ack", str(error), "supervisor")
            return
        self._acking = now + 1.0

    # --------------------------------------------------------------------------------------- saying
    def _ask(self, event: str, by: By, why: str) -> Outcome:
        if event in ("stop", "estop", "fault"):
            self._unack(f"a {event} came after it")
        outcome = self.modes.ask(event, by, why)
        if outcome.changed:
            self._changed(event, outcome, why)
        return outcome

    def _fault(self, name: str, why: str) -> None:
        """Latch it. `Modes.faults` keeps the name."""
        if name not in self.modes.faults:
            self._unack(f"{name} came after it")
        outcome = self.modes.ask("fault", By.SUPERVISOR, name)
        if outcome.changed:
            self._changed("fault", outcome, why)

    def _unack(self, why: str) -> None:
        """An acknowledgement that waits for the robot's errors to go was not of what came since."""
        if self._acking < math.inf:
            self._acking = math.inf
            self._notice("ack", why, "supervisor")

    def _void(self) -> None:
        """What was inferred is void, though the mode stays."""
        if self.chunks.left:
            self.modes.invalidate()
        self.chunks.clear()
        self._last = None

    def _changed(self, event: str, outcome: Outcome, why: str) -> None:
        self.chunks.clear()
        self._steps.close()
        self._last, self._idle_since, self._engaged = None, None, False
        self._move_since = self.now
        rule = outcome.rule
        self._notice(event, why, "supervisor")
        if rule is not None and rule.begins:
            self._steps.begin()
            self._notice("begin", self._task, "supervisor")
        if rule is not None and rule.ends:
            self._notice("discard" if rule.discards else "end_episode", why, "supervisor")

    def _notice(self, name: str, value: str, by: str) -> None:
        x = self.modes
        notice = self._writer.make(
            Notice,
            name=name,
            value=value[:200],
            by=by,
            mode=x.mode.value,
            epoch=x.epoch,
            tick=max(self.tick_number, 0),
            episode=x.episode,
        )
        self._say(None, notice)

    def _refuse(self, client: Any, message: Message, reason: str) -> None:
        self._count("refused")
        self._say(client, self._writer.make(Refused, about=message.seq, reason=reason[:400]))

    def _count(self, reason: str) -> None:
        # as few entries as there are reasons, however long it runs
        reason = re.sub(r"-?\d+(\.\d+)?", "#", reason)
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _say(self, client: Any, message: Message) -> None:
        self.outbox.append((client, message))

    def _welcome(self) -> Welcome:
        e, hz = self.robot.embodiment, self.config.hz
        return self._writer.make(
            Welcome,
            session=self.session,
            robot=self.robot.name,
            hz=hz,
            control_hz=e.control_hz,
            zero=self.zero,
            tick=max(self.tick_number, 0),
            epoch=self.modes.epoch,
            action_names=e.action_names,
            action_low=e.action_low,
            action_high=e.action_high,
            turns=self.actions.turns,
            grips=self.actions.gripper,
            cameras=e.camera_names,
            stages=STAGES,
        )
