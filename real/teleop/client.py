"""The body of a teleop process: one device, its inputs at a steady rate, and control for as long
as it is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from real.messages import SILENCE_S, Event, Grant, Input, Lease, Message, State
from real.modes import Mode
from real.practice import CALL
from real.returns import SHOW
from real.teleop.protocol import Device, DeviceLost, Sample
from real.teleop.scripted import Doing, ScriptedOperator

REST_S = 1.0
# where engaging takes over; in READY a person says so, by a control
JOINS = (Mode.AUTO, Mode.PAUSED, Mode.RESETTING)


@dataclass(frozen=True)
class Line:
    """How the device's side speaks to the supervisor: ``send(kind, valid_s, **fields)``, as
    `real.link.Client.send`, in the name of ``source``."""

    source: str
    send: Callable[..., Message]


class TeleopClient:
    """Asks for control when its device is engaged, sends its state, and lets control lapse when it
    rests.

    A device that is lost is released: nothing is sent any more, and the supervisor's own silence
    limit holds the arm; the reason goes out as a note. ``clock`` is that of all messages.
    """

    def __init__(self, device: Device, link: Line, clock: Callable[[], float] = time.monotonic):
        self.device, self.link, self.clock = device, link, clock
        self.state: State | None = None
        self.token, self.problem = "", ""
        self._engaged = False
        self._asked = self._used = -1e9

    def hear(self, message: Message) -> None:
        if isinstance(message, State):
            self.state = message
            if self.token and message.holder != self.link.source:
                self._lose()
        elif (
            isinstance(message, Event)
            and message.name == "note"
            and isinstance(self.device, ScriptedOperator)
        ):
            if message.value.startswith(CALL):
                self.device.called(self.clock())
            elif message.value.startswith(SHOW):
                self.device.asked_to_show()
        elif isinstance(message, Grant):
            if message.granted and message.token:
                self.token = message.token
            elif self.token and message.holder != self.link.source:
                self._lose()

    def _lose(self) -> None:
        self.token, self._engaged = "", False
        self.device.release()

    def step(self) -> Sample | None:
        """Once per period: read the device, say what it does. None where it was lost."""
        now = self.clock()
        try:
            sample = self.device.read(now, self.state)
        except DeviceLost as error:
            self._say(str(error))
            if self._engaged:
                self._event("release", str(error), now)
            self._engaged = False
            self.device.release()
            return None
        self._say(sample.problem)
        if not self.token:
            self._request(sample, now)
            return sample
        self.link.send(
            Input,
            SILENCE_S,
            lease=self.token,
            device_stamp=sample.stamp,
            dead_man=sample.dead_man,
            axes=sample.axes,
            gripper=sample.gripper,
            keys=sample.keys,
            target=sample.target,
        )
        scripted = isinstance(self.device, ScriptedOperator)
        if (
            sample.dead_man
            and not self._engaged
            and not scripted
            and self.state
            and Mode(self.state.mode) in JOINS
        ):
            self._event("takeover", self.device.name, now)
        self._engaged = sample.dead_man
        if isinstance(self.device, ScriptedOperator):
            for ask in self.device.asks():
                self._event(ask.name, ask.value, ask.at)
        self._rested(now)
        return sample

    def _rested(self, now: float) -> None:
        """A device that rests gives control back, so that a page may hand back to the policy or
        label."""
        busy = isinstance(self.device, ScriptedOperator) and self.device.doing is not Doing.WATCHING
        self._used = now if self._engaged or busy else max(self._used, self._asked)
        if now - self._used > REST_S:
            self.link.send(Lease, 1.0, ask="release", token=self.token, force=False)
            self._lose()

    def _request(self, sample: Sample, now: float) -> None:
        """Once the device is engaged, or its scripted operator has something to say; never by
        force."""
        wanted = sample.dead_man or (
            isinstance(self.device, ScriptedOperator) and self.device.waits
        )
        if wanted and now - self._asked > 0.5:
            self._asked = now
            self.link.send(Lease, 1.0, ask="request", token="", force=False)

    def _event(self, name: str, value: str, at: float) -> None:
        self.link.send(Event, name=name, value=value[:200], at=at, lease=self.token)

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            self._event("note", problem, self.clock())
        self.problem = problem
