"""The supervisor's process: ``python -m real.supervisor.loop CONFIG.json``. One thread, one socket,
absolute deadlines.

The first SIGTERM or SIGINT, or the end of the launcher, stops softly and ends once the arm is at
rest; a second signal of a person stops it at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real import limits as limit_files
from real.checks import MessageError
from real.link import Server
from real.messages import Frame, Writer, decode, encode
from real.modes import By
from real.named import named
from real.robots.guarded import Guarded
from real.robots.remote import RemoteRobot
from real.scheduling import ORPHANED, Deadlines, die_with_parent, freeze_garbage, real_time
from real.supervisor.core import Supervisor
from real.supervisor.settings import from_options
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import CameraSpec, EmbodimentSpec

_RESTING_S = 0.6  # how long a soft stop may take


class Loop:
    """``config``: socket, robot ("module:factory"), robot_options, limits (a file), supervisor
    (options), session, real_time (a priority, 0: none), die_with_parent, about and report (files to
    write), cameras ([name, height, width] of those in processes of their own)."""

    def __init__(self, config: dict[str, Any]):
        self.robot = Guarded(named(config["robot"])(**config.get("robot_options", {})))
        if config.get("cameras"):
            self.robot.embodiment = with_cameras(self.robot.embodiment, config["cameras"])
        spec = self.robot.embodiment
        limits = limit_files.load_for(self.robot, config["limits"])
        options = config.get("supervisor", {})
        settings = from_options(options)
        if config.get("about"):  # for the recorder's headers
            about = {
                "session": config.get("session", ""),
                "embodiment": spec.to_dict(),
                "limits": asdict(limits),
            }
            about |= {
                "capabilities": asdict(self.robot.capabilities),
                "supervisor": asdict(settings),
            }
            Path(config["about"]).write_text(json.dumps(about), encoding="utf-8")
        self.deadlines = Deadlines(settings.hz, time.monotonic())
        self.supervisor = Supervisor(
            self.robot, limits, settings, self.deadlines.zero, config.get("session", "session")
        )
        self.server = Server(config["socket"])
        self.signals = 0
        self.late: deque[float] = deque(maxlen=20_000)
        self._frames = Writer("arm", time.monotonic)

    def run(self) -> None:
        """Until it is told to stop and the arm is at rest."""
        ending = math.inf
        while time.monotonic() < ending:
            due = self.deadlines.next()
            while (left := due - time.monotonic()) > 0:
                self._serve(left)
            self._serve(0.0)
            lateness = self.deadlines.lateness()
            self.late.append(lateness)
            self.supervisor.session.overruns = self.deadlines.overruns
            self.supervisor.tick(self.deadlines.tick, time.monotonic(), lateness)
            self._pass_frames()
            self._flush()
            if self.signals and ending == math.inf:
                ending = time.monotonic() + _RESTING_S
                self.supervisor.session.ask("stop", By.SUPERVISOR, "the session ends")
            if self.signals > 1:
                self.robot.stop()
                break

    def close(self, in_order: bool) -> None:
        """A farewell, by which the guard stands down, is only said ``in_order``; else the arm is
        stopped."""
        if in_order:
            self._flush()
            bye = self.supervisor.session.farewell()
            for connection in list(self.server.connections):
                self.server.send(connection, encode(bye))
        else:
            self.robot.stop()
        self.robot.close()
        self.server.close()

    def interrupt(self, *_: Any) -> None:
        self.signals += 1
        if self.signals > 1:
            self.robot.stop()

    def orphaned(self, *_: Any) -> None:
        """The launcher has ended: once is as often as this may count, however often the kernel
        says it."""
        self.signals = max(self.signals, 1)

    def _serve(self, timeout: float) -> None:
        packets, gone = self.server.poll(timeout)
        for connection, packet in packets:
            now = time.monotonic()
            try:
                self.supervisor.receive(connection, decode(packet), now)
            except MessageError as error:
                self.supervisor.reception.unreadable(connection, str(error))
        for connection in gone:
            self.supervisor.reception.left(connection)
        if packets or gone:
            self._flush()

    def _pass_frames(self) -> None:
        """Pictures of a simulated robot come over its own link; those of other cameras from
        their processes."""
        robot = self.robot.robot
        if not isinstance(robot, RemoteRobot) or not robot.frames:
            return
        frames, robot.frames = robot.frames, []
        for (
            camera,
            ring,
            slot,
            number,
            device_no,
            capture,
            stamp,
            height,
            width,
            channels,
        ) in frames:
            place = {
                "camera": camera,
                "ring": ring,
                "slot": slot,
                "number": number,
                "device_no": device_no,
            }
            size = {"height": height, "width": width, "channels": channels}
            self.supervisor.reception.see(
                self._frames.make(Frame, **place, **size, capture=capture, device_stamp=stamp)
            )

    def _flush(self) -> None:
        outbox, self.supervisor.session.outbox = self.supervisor.session.outbox, []
        for client, message in outbox:
            packet = encode(message)
            receivers = [client] if client is not None else list(self.supervisor.session.clients)
            for connection in receivers:
                if connection in self.server.connections:
                    self.server.send(connection, packet)


def with_cameras(embodiment: EmbodimentSpec, others: list[list[Any]]) -> EmbodimentSpec:
    """The robot's own cameras and others beside them. Raises `ConfigError` where a name is
    taken."""
    for name, _, _ in others:
        if name in embodiment.camera_names:
            raise ConfigError(
                f"cameras.{name}: {embodiment.name} has a camera of that name itself, "
                "choose another"
            )
    return dataclasses.replace(
        embodiment, cameras=(*embodiment.cameras, *(CameraSpec(*other) for other in others))
    )


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        config = json.load(file)
    try:
        loop = Loop(config)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    signal.signal(signal.SIGTERM, loop.interrupt)
    signal.signal(signal.SIGINT, loop.interrupt)
    signal.signal(ORPHANED, loop.orphaned)
    if config.get("die_with_parent", True):
        die_with_parent(ORPHANED)
    freeze_garbage()
    scheduled = real_time(int(config.get("real_time", 0)))
    print(f"ready {scheduled}", flush=True)
    in_order = False
    try:
        loop.run()
        in_order = True
    finally:
        loop.close(in_order)
    if config.get("report"):
        Path(config["report"]).write_text(json.dumps(_report(loop, scheduled)), encoding="utf-8")


def _report(loop: Loop, scheduled: str) -> dict[str, Any]:
    late = sorted(loop.late)
    at = (
        {f"p{p}": 1e3 * late[min(len(late) - 1, int(p / 100 * len(late)))] for p in (50, 95, 99)}
        if late
        else {}
    )
    return {
        "scheduling": scheduled,
        "ticks": loop.deadlines.tick + 1,
        "overruns": loop.deadlines.overruns,
        "lateness_ms": at | ({"max": 1e3 * late[-1]} if late else {}),
        "refused": loop.supervisor.session.refused,
        "cpu_seconds": time.process_time(),
    }


if __name__ == "__main__":
    main()
