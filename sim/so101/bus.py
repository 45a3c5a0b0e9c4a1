"""A simulated SO-101 behind a serial port: a pty that speaks its servos' protocol, with MuJoCo
behind it, in the time of the wall clock. Whatever opens a serial port drives it unchanged.

A follower holds once it is told to; a leader is the same arm that somebody's hand moves
(`Bus.lead`). ``vla-rl robot so101 sim`` starts both. What goes wrong on a real bus can be asked for
(`Faults`).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import threading
import time
import tty
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.so101.joints import NAMES
from sim.so101.model import STEP_S, Arm
from sim.so101.servos import OVERLOAD, STEPS, Chain, Servo, packets
from sim.so101.view import Shown

if TYPE_CHECKING:
    from sim.so101.world import World

VOLTS = 7.4
DEAD_VOLTS = 3.5  # below it servos lose what they did not keep, their torque too
_LAG_S = 0.1  # time that is left out where the machine was late
_POLL_S = 0.004


@dataclass
class Faults:
    """``lose`` and ``corrupt`` are the shares of status packets that never come, and of which a bit
    is turned; ``deaf`` the share of instructions that no servo hears. The next
    answers come ``late`` s after they would, once."""

    lose: float = 0.0
    corrupt: float = 0.0
    deaf: float = 0.0
    late: float = 0.0
    seed: int = 0


class _Cable:
    """A pty on which ``bus`` answers, in a thread of its own, and in which its time passes.
    ``link`` leads to it: ``port`` is its name, or that of the pty."""

    def __init__(self, bus: Bus, link: Path | None) -> None:
        self._bus, self._link = bus, link
        self.port = ""
        self.now = 0.0  # until when the arm's physics were worked out
        self._controller = self._line = -1
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="so101", daemon=True)

    def connect(self) -> None:
        self.plug()
        self.now = time.monotonic()
        self._thread.start()

    def disconnect(self) -> None:
        self._stop.set()
        self._thread.join()
        self.unplug()

    def plug(self) -> None:
        """The port is there (again)."""
        with self._lock:
            self._controller, self._line = os.openpty()
            # (its number may be that of one that was just unplugged, on which the thread still
            # waits)
            os.set_blocking(self._controller, False)
            tty.setraw(self._line)
            self.port = os.ttyname(self._line)
            if self._link is not None:
                self._link.unlink(missing_ok=True)
                self._link.symlink_to(self.port)
                self.port = str(self._link)

    def unplug(self) -> None:
        """It is out: the port hangs up. The arm keeps its power."""
        with self._lock:
            for descriptor in (self._line, self._controller):
                if descriptor >= 0:
                    os.close(descriptor)
            self._line = self._controller = -1
            if self._link is not None:
                self._link.unlink(missing_ok=True)

    @property
    def controller(self) -> int:
        """The servos' end of the line, for who answers in a thread of its own; -1: unplugged."""
        with self._lock:
            return self._controller

    def _run(self) -> None:
        while not self._stop.is_set():
            controller = self.controller
            if controller < 0:
                time.sleep(_POLL_S)
            else:
                with contextlib.suppress(OSError, ValueError):  # unplugged meanwhile
                    self._listen(controller)
            self._catch_up()

    def _listen(self, controller: int) -> None:
        ready, _, _ = select.select([controller], [], [], _POLL_S)
        if ready:
            data = os.read(controller, 4096)
            self._catch_up()
            reply = self._bus.answer(data)
            if reply:
                late, self._bus.faults.late = self._bus.faults.late, 0.0
                time.sleep(late)
                os.write(controller, reply)

    def _catch_up(self) -> None:
        if self._bus.pace:
            return
        late = time.monotonic() - self.now
        if late > _LAG_S:
            self.now += late - _LAG_S
        steps = int((time.monotonic() - self.now) / STEP_S)
        if steps > 0:
            self.now += steps * STEP_S
            self._bus.advance(steps * STEP_S)


class Bus:
    """``mounted`` [6] is what each encoder says (steps) at the joint's zero, as a person happened
    to screw it on. ``port`` names a link to the pty, so that an unplugged one comes back under its
    name. ``pace`` above 0: that much time (s) passes with each instruction, and none else.
    ``world``: the arm is the one at that table, whose state is told to ``shown``."""

    def __init__(
        self,
        port: str | Path = "",
        mounted: tuple[int, ...] = (STEPS // 2,) * 6,
        pace: float = 0.0,
        world: World | None = None,
        shown: Shown | None = None,
    ):
        self.pace, self.world, self._shown = pace, world, shown
        self.arm = Arm() if world is None else world.arm
        self.servos = [Servo(i + 1, mounted[i]) for i in range(len(NAMES))]
        self.chain = Chain(self.servos)
        self.faults, self.volts = Faults(), VOLTS
        self.told = 0  # instructions heard
        self._random = random.Random(self.faults.seed)
        self._lock = threading.RLock()
        self._buffer = bytearray()
        self.cable = _Cable(self, Path(port) if port else None)
        self.feel()

    def advance(self, seconds: float) -> None:
        """Physics, with what the servos were told."""
        with self._lock:
            holds = np.array([servo.holds for servo in self.servos])
            torque = np.array([servo.torque for servo in self.servos])
            goal = [(s.goal - s.mounted) * 2 * math.pi / STEPS for s in self.servos]
            joints = self.arm.joints
            joints.power(holds.astype(float), torque)
            joints.aim(np.where(holds, goal, joints.angles))
            self.arm.advance(seconds)
            self.feel()
            self._tell()

    def _tell(self) -> None:
        if self._shown is not None:
            self._shown.tell(self.arm.data.qpos, time.monotonic())

    def answer(self, data: bytes) -> bytes:
        """What comes back on the line."""
        with self._lock:
            self._buffer += data
            reply = b""
            for id, kind, parameters in packets(self._buffer):
                if self._random.random() < self.faults.deaf:
                    continue
                self.told += 1
                if self.pace:
                    self.advance(self.pace)
                for status in self.chain.answer(id, kind, parameters):
                    reply += self._sent(status)
            return reply

    def lead(self, angles: np.ndarray | None, at_once: bool = False) -> None:
        """A hand leads the joints there (rad, [6]), or has them there ``at_once``; None: it lets
        go."""
        with self._lock:
            self.arm.hand = None if angles is None else np.asarray(angles, dtype=float)
            if self.arm.hand is not None and at_once:
                self.arm.joints.put(self.arm.hand)
                self.feel()

    def put(self, cube: np.ndarray) -> None:
        """The cube lies at [x, y, yaw] (m, rad). ValueError for an arm without a table."""
        if self.world is None:
            raise ValueError("this arm has no table")
        with self._lock:
            self.world.put(cube)
            self._tell()

    def sag(self, volts: float) -> None:
        """The power supply gives this from now on; what fell below `DEAD_VOLTS` starts anew."""
        with self._lock:
            self.volts = volts
            if volts < DEAD_VOLTS:
                for servo in self.servos:
                    servo.start()
            self.feel()

    def overload(self, joint: int, on: bool = True) -> None:
        """That servo says that it is overloaded, and goes on."""
        with self._lock:
            servo = self.servos[joint]
            servo.error = servo.error | OVERLOAD if on else servo.error & ~OVERLOAD

    @property
    def angles(self) -> np.ndarray:
        with self._lock:
            return self.arm.joints.angles

    def _sent(self, status: bytes) -> bytes:
        if self.volts < DEAD_VOLTS or self._random.random() < self.faults.lose:
            return b""
        if self._random.random() < self.faults.corrupt:
            place = self._random.randrange(len(status))
            wrong = status[place] ^ (1 << self._random.randrange(8))
            return status[:place] + bytes((wrong,)) + status[place + 1 :]
        return status

    def feel(self) -> None:
        """The servos measure where the arm is."""
        joints = self.arm.joints
        rate = STEPS / (2 * math.pi)
        for servo, angle, speed in zip(self.servos, joints.angles.tolist(), joints.speeds.tolist()):
            gap = (servo.goal - servo.mounted) / rate - angle if servo.holds else 0.0
            load = float(np.clip(5.0 * gap, -1.0, 1.0))
            servo.feel(servo.mounted + rate * angle, rate * speed, load, self.volts)

    def __enter__(self) -> Bus:
        self.cable.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.cable.disconnect()

    def strike(self, **faults: Any) -> None:
        """`Faults` from now on, such as ``lose=0.1``; without any: none."""
        with self._lock:
            self.faults = Faults(**faults)
            self._random = random.Random(self.faults.seed)
