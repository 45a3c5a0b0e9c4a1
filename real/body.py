"""Starts and ends the processes around an arm: the simulated arm itself, the supervisor, its guard, the recorder.

Each gets a log file and a session of its own, so that it does not share its scheduling with what computes elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError


class StartError(UserError):
    """A process of the session did not come up; the text holds the end of its log."""


@dataclass(frozen=True)
class BodyConfig:
    """A simulated arm (``world`` with ``options`` and ``defects``), or a driver (``driver`` "module:Class" with ``options``)
    in the arm's process, or one that is quick and light enough for the supervisor's (``robot``). ``limits`` is a file.
    ``supervisor`` holds options of `SupervisorConfig`. ``record`` keeps a journal under
    the session's folder. ``real_time`` is a SCHED_FIFO priority for the supervisor, 0: an ordinary process."""

    limits: str
    world: str = "fake"
    driver: str = ""
    robot: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    defects: dict[str, Any] = field(default_factory=dict)
    episode: dict[str, Any] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)
    arm_hz: float = 100.0
    camera_hz: float = 0.0
    guard: bool = True
    record: bool = True
    real_time: int = 0


class Body:
    """``folder`` is the session's: sockets, configs and logs lie in ``run``, the journals in ``journal``."""

    def __init__(self, folder: str | Path, config: BodyConfig):
        self.folder, self.config = Path(folder), config
        self.run = self.folder / "run"
        self.socket = str(self.run / "s")
        self.arm_socket = str(self.run / "a")
        self.processes: dict[str, subprocess.Popen] = {}
        self._spare: set[str] = set()
        if len(self.socket) > 100:
            raise UserError(f"the session's folder {self.folder} is too long a name for a socket: at most 90 characters")

    def __enter__(self) -> Body:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self) -> None:
        """In the order that the contract asks for: what watches and records first, the robot under control last."""
        x = self.config
        self.run.mkdir(parents=True, exist_ok=True)
        robot, options = x.robot, x.options
        if not robot:
            arm = {"socket": self.arm_socket, "world": x.world, "options": x.options, "defects": x.defects}
            arm |= {
                "driver": x.driver,
                "hz": x.arm_hz,
                "camera_hz": x.camera_hz,
                "log": str(self.run / "arm.log"),
                "episode": x.episode,
            }
            self.process("arm", "real.robots.server", [self.write_config("arm", arm)])
            robot, options = "real.robots.remote:RemoteRobot", {"address": self.arm_socket}
        main = {"socket": self.socket, "robot": robot, "robot_options": options, "limits": x.limits}
        main |= {"supervisor": x.supervisor, "session": self.folder.name, "real_time": x.real_time}
        about = str(self.run / "robot.json")
        main |= {"report": str(self.run / "supervisor.json"), "about": about}
        self.process("supervisor", "real.supervisor.loop", [self.write_config("supervisor", main)])
        if x.guard and not x.robot:
            self.process("guard", "real.supervisor.guard", [self.socket, "real.robots.remote:stop_arm", self.arm_socket])
        if x.record:
            self.process("recorder", "real.recorder", [self.socket, str(self.folder / "journal"), about])

    def write_config(self, name: str, values: dict[str, Any]) -> str:
        path = self.run / f"{name}.config.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    def process(
        self, name: str, module: str, arguments: list[str], timeout: float = 120.0, may_end: bool = False
    ) -> str:
        """Start a process in a session of its own, wait until it says "ready", and return what it has said. ``may_end``: the
        session goes on without it."""
        if may_end:
            self._spare.add(name)
        log = self.run / f"{name}.log.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with open(log, "wb") as out:
            command = [sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=environment
            )
        self.processes[name] = process
        deadline = time.monotonic() + timeout
        while not log.read_bytes().startswith(b"ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
                end = end.rpartition("error: ")[2] if "\nerror: " in f"\n{end}" else end
                raise StartError(f"the {name} did not start: {end or 'it said nothing'}")
            time.sleep(0.01)
        return log.read_text(encoding="utf-8", errors="replace")

    def ended(self) -> str:
        """Which process has ended though the session goes on, with the end of its log; or ""."""
        for name, process in self.processes.items():
            if name not in self._spare and process.poll() is not None:
                said = (self.run / f"{name}.log.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
                said = said.removeprefix("ready").strip() or "silently"
                return f"the {name} has ended (status {process.returncode}): {said}"
        return ""

    def close(self) -> None:
        """Softly: the supervisor brings the arm to rest, the recorder closes its journal, then the arm's process ends. A
        Ctrl-C meanwhile ends everything at once."""
        first = ("policy", "supervisor", "guard", "recorder")
        rest = [name for name in self.processes if name not in (*first, "arm")]
        try:
            for name in (*first, *rest, "arm"):
                if (process := self.processes.get(name)) is not None:
                    _end(process, 10.0)
        except KeyboardInterrupt:
            self.kill()
            raise
        self.processes.clear()

    def kill(self) -> None:
        """At once: the supervisor's second signal stops the arm where it is; half a second later who is left is killed."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 0.5
        for process in self.processes.values():
            _end(process, max(0.0, deadline - time.monotonic()))
        self.processes.clear()


def _end(process: subprocess.Popen, seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
