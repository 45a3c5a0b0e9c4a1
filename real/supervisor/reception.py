"""What the supervisor does with what clients say, and how it answers: who may, what is void, who
holds control."""

from __future__ import annotations

import dataclasses
from typing import Any

from real.gate import STAGES
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
    Progress,
    Refused,
    Sequence,
    Welcome,
)
from real.modes import By, Mode
from real.practice import STAY
from real.robots.protocol import RobotLost
from real.supervisor.session import Session
from real.supervisor.watch import Client


class Reception:
    """The side of a supervisor that listens. Times that are passed in are seconds on the clock of
    all messages."""

    def __init__(self, session: Session):
        self.session = session
        self._sequences: dict[Any, Sequence] = {}

    def receive(self, client: Any, message: Message, now: float) -> None:
        """Act on one message of ``client`` (any key that tells connections apart)."""
        self.session.now = max(self.session.now, now)
        if isinstance(message, Hello):
            self.session.clients[client] = Client(message.role, message.source, now)
            self._sequences[client] = Sequence()
            self._sequences[client].newer(message)
            if message.role == "policy":
                self.session.chunks.forget()
            self.session.say(client, self._welcome())
            return
        known = self.session.clients.get(client)
        if known is None:
            self.session.refuse(client, message, "say hello first")
            return
        if message.source != known.source and not isinstance(message, Frame):
            self.session.refuse(client, message, f"this connection is {known.source}")
            return
        if not self._sequences[client].newer(message):
            self.session.count("not newer")
            return
        if now <= message.expiry:
            known.heard = max(known.heard, min(now, message.stamp) if message.stamp <= now else now)
        self._act(client, known, message, now)

    def _act(self, client: Any, known: Client, message: Message, now: float) -> None:
        if isinstance(message, Event):
            self._event(client, known, message, now)
        elif now > message.expiry:
            self.session.count("expired")
        elif isinstance(message, Chunk | Command):
            self._queue(client, known, message, now)
        elif isinstance(message, Input):
            self._take_input(client, known, message, now)
        elif isinstance(message, Lease):
            self._lease(client, known, message, now)
        elif isinstance(message, Frame):
            self.see(message)
        elif isinstance(message, Progress):
            self.session.say(None, message)
        elif not isinstance(message, Beat):
            self.session.refuse(
                client, message, f"a {message.kind} message is not for the supervisor"
            )

    def unreadable(self, client: Any, problem: str) -> None:
        """A packet that is no message: counted, and answered to who has said hello."""
        self.session.count("unreadable")
        if client in self.session.clients:
            self.session.say(
                client, self.session.writer.make(Refused, about=-1, reason=problem[:400])
            )

    def see(self, frame: Frame) -> None:
        """A picture of the robot's own cameras, from inside this process."""
        if problem := self.session.cameras.see(frame, self.session.now):
            self.session.count(problem)
        self.session.say(None, frame)

    def left(self, client: Any) -> None:
        """Its connection ended: faster than its silence tells."""
        known = self.session.clients.pop(client, None)
        self._sequences.pop(client, None)
        if known is None:
            return
        self.session.cameras.left(known.source)
        if known.role == "policy":
            self.session.void()
        if known.source == self.session.leases.holder and all(
            c.source != known.source for c in self.session.clients.values()
        ):
            self.session.leases.drop()
            self.session.unheld("the connection of who had control has ended")
        if self.session.input is not None and self.session.input.source == known.source:
            self.session.input = None

    def _queue(self, client: Any, known: Client, message: Chunk | Command, now: float) -> None:
        if known.role != "policy":
            self.session.refuse(client, message, f"a {known.role} may not send actions")
        elif self.session.modes.mode is not Mode.AUTO:
            self.session.count(f"{message.kind} in {self.session.modes.mode.value}")
        elif problem := self.session.actions.absurd(
            message.actions if isinstance(message, Chunk) else (message.action,)
        ):
            self.session.count("absurd actions")
            self.session.refuse(client, message, problem)
            self.session.void()
            self.session.fault("policy error", f"the policy is broken: {problem}")
        elif problem := self.session.chunks.accept(
            message, self.session.modes.epoch, self.session.tick_number, now
        ):
            self.session.count(f"{message.kind}: {problem.partition(',')[0]}")
            self.session.refuse(client, message, problem)
        elif isinstance(message, Chunk):
            # for the record: what was predicted, beside what runs of it
            self.session.say(None, message)

    def _take_input(self, client: Any, known: Client, message: Input, now: float) -> None:
        if not self.session.leases.renewed(message.lease, now):
            self.session.refuse(
                client, message, "control is somebody else's, or nobody's: ask for the lease"
            )
            return
        rising = message.dead_man and not (self.session.input and self.session.input.dead_man)
        self.session.input = message
        if rising and self.session.modes.mode in (Mode.AUTO, Mode.PAUSED):
            self.session.ask("takeover", By.HOLDER, known.source)

    def _event(self, client: Any, known: Client, event: Event, now: float) -> None:
        by = By.HOLDER if self.session.leases.renewed(event.lease, now) else By.ANYONE
        if event.name == "reset_done" and by is By.HOLDER and not self._scripted():
            by = By.SUPERVISOR  # the operator has put things back, and says so
        relayed = dataclasses.replace(event, lease="")
        if event.name in ("label", "task", "note", "loss"):
            if event.name == "task" and (
                by is By.HOLDER
                or (known.role == "launcher" and self.session.modes.mode is Mode.READY)
            ):
                self.session.task = event.value
            self.session.say(None, relayed)
            return
        if (
            event.name == "ack"
            and by is By.HOLDER
            and self.session.modes.mode is Mode.FAULT
            and not self.session.modes.estop
        ):
            self._clear(now)
            self.session.say(None, relayed)
            return
        outcome = self.session.ask(event.name, by, event.value or known.source)
        if event.name == "estop":
            self.session.robot.stop()
        if event.name == "reset" and outcome.accepted:
            self.session.stays = event.value == STAY
        if outcome.accepted:
            self.session.say(None, relayed)
        else:
            self.session.refuse(client, event, outcome.reason)

    def _scripted(self) -> bool:
        return bool(self.session.config.home) or self.session.robot.capabilities.resets

    def _lease(self, client: Any, known: Client, lease: Lease, now: float) -> None:
        self.session.lapse(now)  # (what comes before the tick that would see it)
        other = self.session.leases.holder not in ("", known.source)
        if lease.ask == "request" and lease.force and other and self.session.modes.moving:
            self.session.ask("pause", By.ANYONE, f"{known.source} takes control")
        answer = self.session.leases.ask(known.source, lease.ask, lease.token, lease.force, now)
        x = self.session.leases
        mine = answer.granted and lease.ask != "release"
        grant = self.session.writer.make(
            Grant,
            granted=answer.granted,
            holder=x.holder,
            token=x.token if mine else "",
            until=max(x.until, 0.0),
            reason=answer.reason,
        )
        self.session.say(client, grant)
        if lease.ask != "renew" and answer.granted:
            self.session.notice("lease", x.holder, known.source)

    def _clear(self, now: float) -> None:
        """A person acknowledged a fault: the robot's errors may go now; the mode follows once
        they have gone."""
        try:
            self.session.robot.clear()
        except RobotLost as error:
            self.session.notice("ack", str(error), "supervisor")
            return
        self.session.acking = now + 1.0

    def _welcome(self) -> Welcome:
        e, hz = self.session.robot.embodiment, self.session.config.hz
        return self.session.writer.make(
            Welcome,
            session=self.session.name,
            robot=self.session.robot.name,
            hz=hz,
            control_hz=e.control_hz,
            zero=self.session.zero,
            tick=max(self.session.tick_number, 0),
            epoch=self.session.modes.epoch,
            action_names=e.action_names,
            action_low=e.action_low,
            action_high=e.action_high,
            turns=self.session.actions.turns,
            grips=self.session.actions.gripper,
            cameras=e.camera_names,
            stages=STAGES,
        )
