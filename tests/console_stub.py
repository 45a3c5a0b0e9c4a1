"""A small supervisor that speaks the real messages over a real socket, with the real table of modes
and a point for an arm; and the console before it, in one thread with its own event loop. Tests ask
what the supervisor heard, and what it did."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import secrets
import socket
import threading
import time

import numpy as np

from real import messages as m
from real.console.link import SocketLink
from real.console.server import Console
from real.console.settings import ConsoleConfig
from real.modes import IN_EPISODE, By, Mode, Modes

HZ = 50.0
STAGES = ("finite", "age", "step", "rate", "box", "joints", "ik", "force", "gripper")
NAMES = ("dx", "dy", "dz", "rx", "ry", "rz", "grip")


class StubSupervisor:
    """Holds one lease of 2 s, moves its point at 0.25 m/s times the axes, and sends state and
    pictures."""

    def __init__(self, connection: socket.socket, cameras: tuple[str, ...] = ("front", "wrist")):
        self.link, self.cameras = connection, cameras
        connection.setblocking(False)
        self.modes = Modes()
        self.writer = m.Writer("supervisor", time.monotonic)
        self.heard: list[m.Message] = []
        self.tick = self.number = self.step = 0
        self.holder = self.token = ""
        self.until = 0.0
        self.position = np.zeros(3)
        self.input: m.Input | None = None
        self.zero = time.monotonic()
        self.mute = self.dark = False
        self.frame_every = 5  # ticks
        self.policy = (0.02, 0.0, -0.01, 0.0, 0.0, 0.0, -1.0)
        self._pictures = [self._scene(i) for i in range(8)]

    # what a test asks
    def events(self, *names: str) -> list[m.Event]:
        return [
            e for e in list(self.heard) if isinstance(e, m.Event) and (not names or e.name in names)
        ]

    def inputs(self) -> list[m.Input]:
        return [i for i in list(self.heard) if isinstance(i, m.Input)]

    def other_takes_control(self) -> None:
        self.holder, self.token, self.until = "teleop.mouse", "another", math.inf

    # the loop
    async def run(self) -> None:
        due = time.monotonic()
        while True:
            self._read()
            if not self.mute:
                self._turn()
            due = max(due + 1 / HZ, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def send(self, kind: type[m.Message], **fields) -> None:
        self.send_on(self.writer.make(kind, **fields))

    def send_on(self, message: m.Message) -> None:
        with contextlib.suppress(OSError):
            self.link.send(m.encode(message))

    def _read(self) -> None:
        while True:
            try:
                packet = self.link.recv(m.MAX_BYTES + 1)
            except OSError:
                return
            if not packet:
                return
            message = m.decode(packet)
            self.heard.append(message)
            if not self.mute:
                self._answer(message)

    def _answer(self, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            self.send(
                m.Welcome,
                session="stub",
                robot="stub arm",
                hz=HZ,
                control_hz=HZ,
                zero=self.zero,
                tick=self.tick,
                epoch=self.modes.epoch,
                action_names=NAMES,
                action_low=(-1.0,) * 7,
                action_high=(1.0,) * 7,
                turns=True,
                grips=True,
                cameras=self.cameras,
                stages=STAGES,
            )
        elif isinstance(message, m.Lease):
            self._lease(message)
        elif (
            isinstance(message, m.Input)
            and message.lease == self.token
            and message.expiry > time.monotonic()
        ):
            self.input, self.until = message, time.monotonic() + 2
        elif isinstance(message, m.Event):
            self._event(message)

    def _lease(self, message: m.Lease) -> None:
        if message.ask == "request":
            granted = not self.holder or message.force
            if granted:
                self.holder, self.token, self.until = (
                    message.source,
                    secrets.token_hex(8),
                    time.monotonic() + 2,
                )
            self.send(
                m.Grant,
                granted=granted,
                holder=self.holder,
                token=self.token if granted else "",
                until=self.until,
                reason="" if granted else f"{self.holder} has control",
            )
        elif message.token == self.token:
            self.until = time.monotonic() + 2
            if message.ask == "release":
                self.holder = self.token = ""

    def _event(self, e: m.Event) -> None:
        if e.name not in m.MODE_EVENTS:
            return self.send_on(dataclasses.replace(e, lease=""))
        by = By.HOLDER if self.token and e.lease == self.token else By.ANYONE
        outcome = self.modes.ask(e.name, by, e.value)
        if not outcome.accepted:
            return self.send(m.Refused, about=e.seq, reason=outcome.reason)
        if outcome.changed:
            self.step = 0 if outcome.rule.begins else self.step
            self.send(
                m.Notice,
                name=e.name,
                value="",
                by=e.source,
                mode=self.modes.mode.value,
                epoch=self.modes.epoch,
                tick=self.tick,
                episode=self.modes.episode,
            )

    def _turn(self) -> None:
        self.tick += 1
        now = time.monotonic()
        if self.holder and now > self.until:
            self.holder = self.token = ""
        mode = self.modes.mode
        driven = (
            mode is Mode.HUMAN
            and self.input is not None
            and self.input.expiry > now
            and self.input.dead_man
        )
        human = (*self.input.axes, self.input.gripper) if driven else ()
        if driven:
            self.position += 0.25 / HZ * np.array(self.input.axes[:3])
        if self.modes.mode in IN_EPISODE and mode is not Mode.PAUSED:
            self.step += 1
        self._state(now, mode, driven, human)
        if self.tick % self.frame_every == 0 and not self.dark:
            self._frames(now)
        if self.tick % 10 == 0 and self.modes.mode in IN_EPISODE:
            self.send(
                m.Progress,
                model="classifier",
                episode=self.modes.episode,
                step=self.step,
                value=1 - math.exp(-self.step / 300),
            )

    def _state(self, now: float, mode: Mode, driven: bool, human: tuple[float, ...]) -> None:
        policy = self.policy if mode is Mode.AUTO else ()
        sent = human or tuple(0.8 * x for x in policy)
        x, y, z = (float(v) for v in self.position)
        self.send(
            m.State,
            tick=self.tick,
            epoch=self.modes.epoch,
            mode=mode.value,
            holder=self.holder,
            episode=self.modes.episode,
            step=self.step if self.modes.mode in IN_EPISODE else -1,
            step_done=mode in (Mode.AUTO, Mode.HUMAN),
            proprio=(x, y, z),
            pose=(0.4 + x, y, 0.3 + z, 1.0, 0.0, 0.0, 0.0),
            joints=(0.0, -0.4, 0.1, -2.1, 0.0, 1.9, 0.8),
            gripper=0.7,
            wrench=(0.4, -1.2, 2.5, 0.0, 0.0, 0.0),
            measured=now,
            policy=policy,
            human=human,
            sent=sent,
            reference=(),
            is_human=mode is Mode.HUMAN,
            holding=not (driven or policy),
            decision=-1,
            index=-1,
            policy_version="sft-0012" if policy else "",
            queue=5 if policy else 0,
            gate=4 if policy else 0,
            clipped=(0, 0, self.step // 3, 0, 0, 0, 0, 0, 0),
            slow=self.modes.slow,
            estop=self.modes.estop,
            faults=self.modes.faults,
            lateness=0.0004,
            overruns=0,
        )

    def _scene(self, i: int) -> np.ndarray:
        y, x = np.mgrid[0:120, 0:160]
        picture = np.stack([90 + x // 3, 110 + y // 3, np.full_like(x, 120)], axis=-1).astype(
            np.uint8
        )
        picture[75:] = (94, 78, 60)
        picture[50:85, 30 + 10 * i : 50 + 10 * i] = (200, 60, 50)
        return picture

    def _frames(self, now: float) -> None:
        self.number += 1
        for camera in self.cameras:
            self.send(
                m.Frame,
                camera=camera,
                ring="none",
                slot=self.number % 8,
                number=self.number,
                device_no=self.number,
                capture=now,
                device_stamp=now,
                height=120,
                width=160,
                channels=3,
            )

    def picture(self, frame: m.Frame) -> np.ndarray:
        return self._pictures[frame.slot]


class Session:
    """Stub and console in one thread. ``call`` runs a function in its loop and waits for it."""

    def __init__(self, **settings):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stub = StubSupervisor(ours)
        self.console = Console(
            ConsoleConfig(**{"port": 0, "folder": os.sep, **settings}),
            SocketLink(theirs),
            self.stub.picture,
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Session:
        self.thread.start()
        try:
            self.wait(self.console.start())
        except BaseException:
            self._end()
            raise
        self.task = asyncio.run_coroutine_threadsafe(self.stub.run(), self.loop)
        until(lambda: self.console.hub.display.state is not None)
        return self

    def __exit__(self, *_) -> None:
        self.task.cancel()
        self._end()

    def _end(self) -> None:
        self.wait(self.console.stop())
        self.stub.link.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def call(self, function):
        async def inside():
            return function()

        return self.wait(inside())

    @property
    def address(self) -> str:
        return self.console.url.split("/?")[0]


def until(holds, seconds: float = 60.0, every: float = 0.01):
    """Waits until ``holds()`` is true, and returns it; `AssertionError` after ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not become true"
        time.sleep(every)
    return found
