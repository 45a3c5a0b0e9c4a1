"""An arm in a process of its own, on the wall clock: ``python -m real.robots.server CONFIG.json``.

A simulated one (``world``), or a driver whose calls block or import too much for the supervisor
(``driver``).

As with a real arm, whoever drives it may die: the arm goes on by its own rules. Every client gets
its measurements; any may command (the supervisor) or stop it (a guard). What it physically did is
appended to ``log`` as lines of text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from real.link import Connection, Server
from real.named import make_world
from real.ring import RingWriter
from real.robots.faults import Defects, Fault
from real.robots.guarded import driven
from real.robots.protocol import Reference, RobotLost
from real.robots.simulated import Log, Picture, SimulatedRobot
from real.robots.world import Coach
from real.scheduling import ORPHANED, Deadlines, freeze_garbage, orphaned, own_config
from vla_rl.errors import ConfigError, UserError

# of the supervisor, after which a driver's arm is stopped; a simulated one may have a watchdog of
# its own
SILENCE_S = 0.3
ORPHAN_S = 5.0  # that the supervisor has, after the launcher's end, to bring the arm to rest
MOVES = ("command", "hold")
VOIDS = ("stop", "clear", "begin")  # what was asked for before them is void
FAILED = "driver error"  # of an arm whose driver raised something


class ArmServer:
    """``config``: socket, world, options, defects (with a script), hz, camera_hz, log (a file name,
    or empty), and camera_device ("realsense": pictures go through a software device of that SDK).

    Or ``driver`` "module:Class" of a `Robot` with its options; it is stopped after ``SILENCE_S``
    without a command.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.robot: Any = None
        self.simulated: SimulatedRobot | None = None
        # the latter: when its launcher was found to have ended
        self._heard, self._alone = math.inf, math.inf
        if config.get("driver"):
            self.robot = driven(config["driver"], config.get("options", {}))
        else:
            self.robot = self.simulated = self._simulate(config)
        self.server = Server(config["socket"], rate=math.inf)  # no "stop" is one too many
        self._pictures = _Pictures(config.get("camera_device", ""))
        self._log = None
        if config.get("log"):
            did = self.simulated.log if self.simulated is not None else Log()  # a driver's is empty
            self._log = _LogFile(config["log"], did)
        self._trouble = ""  # what its driver raised, until a person acknowledges it
        self._kept = True  # whether the arm took the stop that this asks for
        # publications in a row that the world called a success; whether that was told
        self._good, self._judged = 0, False

    def _simulate(self, config: dict[str, Any]) -> SimulatedRobot:
        defects = dict(config.get("defects", {}))
        script = tuple(Fault(**f) for f in defects.pop("script", ()))
        world = make_world(config["world"], config.get("options", {}))
        stopper = ("real.robots.remote:stop_arm", config["socket"])
        robot = SimulatedRobot(world, Defects(script=script, **defects), time.monotonic, stopper)
        robot.log.keep = 2000
        if config.get("episode"):
            robot.begin(config["episode"])
        return robot

    def orphaned(self, *_: Any) -> None:
        """The launcher has ended: the supervisor brings the arm to rest, then this ends too."""
        self._alone = min(self._alone, time.monotonic())

    @property
    def _left(self) -> bool:
        orphan_s = time.monotonic() - self._alone
        return orphan_s > ORPHAN_S or (orphan_s >= 0 and not self.server.connections)

    def run(self) -> None:
        """Until it is killed, or nobody is left who would use it."""
        hz, camera_hz = (
            float(self.config.get("hz", 100.0)),
            float(self.config.get("camera_hz", 0.0)),
        )
        deadlines = Deadlines(hz, time.monotonic())
        shown = time.monotonic()
        while not self._left:
            due = deadlines.next()
            while (left := due - time.monotonic()) > 0:
                self._serve(left)
            self._serve(0.0)
            if self.simulated is not None:
                self.simulated.advance_to(time.monotonic())
            elif time.monotonic() - self._heard > SILENCE_S:
                self._kept, self._heard = self.robot.stop(), math.inf
            with self._holding():
                self._publish()
            self._judge(hz)
            if self._log is not None:
                self._log.write()
            if camera_hz and time.monotonic() - shown >= 1.0 / camera_hz - 0.5 / hz:
                shown = time.monotonic()
                with self._holding():
                    for picture in self.robot.pictures():
                        self._tell(msgpack.packb(["frame", *self._pictures.place(picture, shown)]))
            if not self._kept:
                self._kept = self.robot.stop()
        self.robot.stop()

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Whatever a driver raises in here stops its arm, which is told to all and stays so until a
        person acknowledges it. (A simulated arm that has lost its power says nothing, which the
        supervisor sees.)"""
        try:
            yield
        except RobotLost as error:
            if self.simulated is None:
                self._trouble, self._kept = str(error), False
                self._tell(msgpack.packb(["trouble", self._trouble]))

    def _serve(self, timeout: float) -> None:
        """All that came, and of several moves the newest alone: on a slow bus old ones would
        keep a "stop" waiting."""
        move: list[Any] | None = None
        packets, _ = self.server.poll(timeout)
        for connection, packet in packets:
            message = msgpack.unpackb(packet)
            if message[0] in MOVES:
                move, self._heard = message, time.monotonic()
                continue
            move = None if message[0] in VOIDS else move
            with self._holding():
                self._take(connection, message)
        if move is not None:
            with self._holding():
                self._move(move)

    def _move(self, message: list[Any]) -> None:
        if message[0] == "hold":
            return self.robot.hold()
        position, quaternion, joints = (np.array(x, dtype=float) for x in message[1:4])
        self.robot.command(Reference(float(message[4]), position, quaternion, joints))

    def _take(self, connection: Connection, message: list[Any]) -> None:
        kind, robot = message[0], self.robot
        if kind == "describe":
            self.server.send(connection, msgpack.packb(["described", self._description()]))
        elif kind == "stop":
            if robot.stop():
                self.server.send(connection, msgpack.packb(["stopped"]))
        elif kind == "clear":
            robot.clear()
            self._trouble, self._kept = "", True
        elif kind == "begin" and self.simulated is not None:
            self.simulated.begin(message[1])
            self._good, self._judged = 0, False
            self._tell(msgpack.packb(["began", time.monotonic()]))
        elif kind == "inject" and self.simulated is not None:
            self.simulated.inject(*message[1:])
        elif kind in ("demonstrate", "progress") and (coach := self._coach) is not None:
            answer = (
                coach.demonstrate(message[2]).tolist()
                if kind == "demonstrate"
                else float(coach.progress())
            )
            self.server.send(connection, msgpack.packb([kind, message[1], answer]))

    @property
    def _coach(self) -> Coach | None:
        world = self.simulated.world if self.simulated is not None else None
        return world if isinstance(world, Coach) else None

    def _description(self) -> dict[str, Any]:
        robot = self.robot
        capabilities = dataclasses.asdict(robot.capabilities) | {
            "stopper": ["real.robots.remote:stop_arm", self.config["socket"]]
        }
        return {
            "embodiment": robot.embodiment.to_dict(),
            "capabilities": capabilities,
            "limits": dataclasses.asdict(robot.limits),
            "tasks": self.simulated.world.tasks if self.simulated is not None else {},
            "coached": self._coach is not None,
        }

    def _publish(self) -> None:
        m = self.robot.observe()
        arrays = [m.position, m.quaternion, m.joints, m.joint_velocity, m.wrench, m.proprio]
        jacobian = m.jacobian.ravel().tolist() if m.jacobian is not None else None
        values = [
            m.stamp,
            *(np.asarray(a, dtype=float).tolist() for a in arrays),
            jacobian,
            float(m.gripper),
            [*([FAILED] if self._trouble else []), *m.errors],
        ]
        self._tell(msgpack.packb(["measured", *values]))

    def _judge(self, hz: float) -> None:
        """Tell of an episode's success, once, when it has lasted for a control step."""
        if self.simulated is None or self._judged:
            return
        self._good = self._good + 1 if self.simulated.world.success() else 0
        if self._good * self.robot.embodiment.control_hz >= hz:
            self._judged = True
            self._tell(msgpack.packb(["success", time.monotonic()]))

    def _tell(self, packet: bytes) -> None:
        for connection in self.server.connections:
            self.server.send(connection, packet)


class _Pictures:
    """Where clients find an arm's pictures: a ring of shared memory for each camera. With
    ``device`` "realsense" they go through a software device of that SDK."""

    def __init__(self, device: str):
        if device not in ("", "realsense"):
            raise ConfigError(f"robot.camera_device={device}: use realsense, or leave it out")
        self._device = device
        self._rings: dict[str, RingWriter] = {}
        self._numbers: dict[str, int] = {}
        self._devices: dict[str, Any] = {}

    def place(self, picture: Picture, now: float) -> list[Any]:
        """Write it, and say where it lies: camera, ring, slot, number, the device's number, ``now``,
        the device's time, and the shape."""
        if self._device:
            picture = self._through_device(picture)
        camera, shape = picture.camera, picture.image.shape
        ring = self._rings.get(camera)
        if ring is None:
            ring = self._rings[camera] = RingWriter(camera, shape)
        number = self._numbers[camera] = self._numbers.get(camera, -1) + 1
        slot = ring.write(picture.image, number)
        number_of_device, stamp = picture.device_no, picture.device_stamp
        return [camera, ring.address, slot, number, number_of_device, now, stamp, *shape]

    def _through_device(self, picture: Picture) -> Picture:
        """Shown to a software device, and taken from it as from a camera."""
        from real.cameras.realsense import SoftwareRealSense

        device = self._devices.get(picture.camera)
        if device is None:
            device = self._devices[picture.camera] = SoftwareRealSense(*picture.image.shape[:2])
            device.camera.open()
        device.show(picture.image, picture.device_no, picture.device_stamp)
        grabbed = device.camera.grab(1.0)
        assert grabbed is not None, "a software device gives what it was shown"
        return Picture(picture.camera, grabbed.device_no, grabbed.device_stamp, grabbed.image)


class _LogFile:
    """What a simulated arm did, as lines of text that `read_log` reads."""

    def __init__(self, path: str, did: Log):
        self._did, self._file = did, open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._written = [0.0, 0.0, 0.0]  # the time of the last line of each kind

    def write(self) -> None:
        """All that came since the last call."""
        did = self._did
        kinds: list[tuple[str, list[tuple[float, Any]]]]
        kinds = [("target", did.targets), ("path", did.path), ("event", did.events)]
        for i, (kind, entries) in enumerate(kinds):
            for t, value in entries:
                if t > self._written[i]:
                    text = value if isinstance(value, str) else " ".join(f"{x:.9g}" for x in value)
                    self._file.write(f"{kind} {t:.6f} {text}\n")
            if entries:
                self._written[i] = entries[-1][0]
            entries.clear()


def read_log(path: str | Path) -> dict[str, list[tuple[float, Any]]]:
    """{"target", "path", "event": [(time, numbers or name)]} of a log, its last line only if it
    is whole."""
    found: dict[str, list[tuple[float, Any]]] = {"target": [], "path": [], "event": []}
    text = Path(path).read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        kind, t, *rest = line.split(" ")
        found[kind].append((float(t), rest[0] if kind == "event" else tuple(map(float, rest))))
    return found


def main() -> None:
    """It ends as by a signal, whatever ends it: the arm keeps its pose, where an orderly end
    might let go of it."""
    status = 1
    try:
        config = own_config(dies=False)
        server = ArmServer(config)
        signal.signal(ORPHANED, server.orphaned)
        if orphaned():  # while it began, where nobody heard the signal
            server.orphaned()
        freeze_garbage()
        print("ready", flush=True)
        server.run()
        status = 0
    except UserError as error:
        print(f"error: {error}", flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
