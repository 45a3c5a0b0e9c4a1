"""Starts and ends the processes around an arm: the simulated arm itself, the supervisor, its guard,
the recorder.

Each gets a log file and a session of its own, so that it does not share its scheduling with what
computes elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from real.cameras.process import CameraConfig
from real.scheduling import LAUNCHER
from vla_rl.errors import UserError

_PRIVATE = 0o077  # the umask of every process: what they write is nobody else's to read
_REVIVE_S = 2.0  # between two starts of a camera's process


class StartError(UserError):
    """A process of the session did not come up; the text holds the end of its log."""


@dataclass(frozen=True)
class BodyConfig:
    """A simulated arm (``world`` with ``options`` and ``defects``), or a driver (``driver``
    "module:Class" with ``options``) in the arm's process, or one that is quick and light enough for
    the supervisor's (``robot``). ``limits`` is a file. ``supervisor`` holds options of
    `SupervisorConfig`. ``record`` keeps a journal under the session's folder. ``real_time`` is a
    SCHED_FIFO priority for the supervisor, 0: an ordinary process. ``cameras`` {name:
    `CameraConfig`} are those beside the arm's own. ``camera_device`` "realsense" sends a simulated
    arm's pictures through a software device of that SDK."""

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
    camera_device: str = ""
    cameras: Mapping[str, CameraConfig] = field(default_factory=dict)
    guard: bool = True
    record: bool = True
    real_time: int = 0


class Body:
    """``folder`` is the session's: sockets, configs and logs lie in ``run``, the journals in
    ``journal``."""

    def __init__(self, folder: str | Path, config: BodyConfig):
        self.folder, self.config = Path(folder), config
        self.run = self.folder / "run"
        self.socket = str(self.run / "s")
        self.arm_socket = str(self.run / "a")
        self.processes: dict[str, subprocess.Popen] = {}
        self._spare: set[str] = set()
        self._started: dict[str, tuple[float, list[str]]] = {}  # when, and the command
        if len(self.socket) > 100:
            raise UserError(
                f"the session's folder {self.folder} is too long a name for a socket: "
                "at most 90 characters"
            )

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
        """In the order that the contract asks for: what watches and records first, the robot
        under control last."""
        x = self.config
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.run):  # tokens, pictures of a room
            folder.mkdir(mode=0o700, exist_ok=True)
        self.run.chmod(0o700)
        robot, options = x.robot, x.options
        if not robot:
            arm: dict[str, Any] = {
                "socket": self.arm_socket,
                "world": x.world,
                "options": x.options,
                "defects": x.defects,
                "driver": x.driver,
                "hz": x.arm_hz,
                "camera_hz": x.camera_hz,
                "camera_device": x.camera_device,
                "log": str(self.run / "arm.log"),
                "episode": x.episode,
            }
            self.process("arm", "real.robots.server", [self.write_config("arm", arm)])
            robot, options = "real.robots.remote:RemoteRobot", {"address": self.arm_socket}
        main: dict[str, Any] = {
            "socket": self.socket,
            "robot": robot,
            "robot_options": options,
            "limits": x.limits,
        }
        needed = {"cameras": [*x.supervisor.get("cameras", ()), *x.cameras]} if x.cameras else {}
        main |= {
            "supervisor": {**x.supervisor, **needed},
            "session": self.folder.name,
            "real_time": x.real_time,
        }
        main |= {
            "cameras": [[name, camera.height, camera.width] for name, camera in x.cameras.items()]
        }
        about = str(self.run / "robot.json")
        main |= {"report": str(self.run / "supervisor.json"), "about": about}
        self.process("supervisor", "real.supervisor.loop", [self.write_config("supervisor", main)])
        if x.guard and not x.robot:
            self.process(
                "guard",
                "real.supervisor.guard",
                [self.socket, "real.robots.remote:stop_arm", self.arm_socket],
            )
        if x.record:
            self.process(
                "recorder", "real.recorder", [self.socket, str(self.folder / "journal"), about]
            )
        for name, camera in x.cameras.items():
            config = {"socket": self.socket, "name": name, "camera": asdict(camera)}
            self.process(
                f"camera_{name}",
                "real.cameras.process",
                [self.write_config(f"camera_{name}", config)],
            )

    def write_config(self, name: str, values: dict[str, Any]) -> str:
        path = self.run / f"{name}.config.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    def process(
        self,
        name: str,
        module: str,
        arguments: list[str],
        timeout: float = 120.0,
        may_end: bool = False,
    ) -> str:
        """Start a process in a session of its own, wait until it says "ready", and return what it
        has said. ``may_end``: the session goes on without it."""
        if may_end:
            self._spare.add(name)
        log = self.run / f"{name}.log.txt"
        self._started[name] = (time.monotonic(), [sys.executable, "-m", module, *arguments])
        process = self._launch(name)
        deadline = time.monotonic() + timeout
        while not log.read_bytes().startswith(b"ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
                end = end.rpartition("error: ")[2] if "\nerror: " in f"\n{end}" else end
                raise StartError(f"the {name} did not start: {end or 'it said nothing'}")
            time.sleep(0.01)
        return log.read_text(encoding="utf-8", errors="replace")

    def _launch(self, name: str) -> subprocess.Popen:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            LAUNCHER: str(os.getpid()),
        }
        # of the logs, which are read as that
        environment["PYTHONIOENCODING"] = "utf-8:backslashreplace"
        log = self.run / f"{name}.log.txt"
        log.touch(mode=0o600)  # the console's holds its token
        with open(log, "wb") as out:
            self.processes[name] = subprocess.Popen(
                self._started[name][1],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment,
                umask=_PRIVATE,
            )
        return self.processes[name]

    def _revive(self, name: str) -> bool:
        """Start a camera's process again, which the arm waits for meanwhile; False for what is
        none."""
        began, command = self._started[name]
        if name.removeprefix("camera_") not in self.config.cameras:
            return False
        if time.monotonic() - began > _REVIVE_S:
            self._started[name] = (time.monotonic(), command)
            self._launch(name)
        return True

    def ended(self) -> str:
        """Which process has ended though the session goes on, with the end of its log; or "". A
        camera's starts again."""
        for name, process in list(self.processes.items()):
            if name not in self._spare and process.poll() is not None and not self._revive(name):
                said = (self.run / f"{name}.log.txt").read_text(encoding="utf-8", errors="replace")[
                    -2000:
                ]
                said = said.removeprefix("ready").strip() or "silently"
                return f"the {name} has ended (status {process.returncode}): {said}"
        return ""

    def close(self) -> None:
        """Softly: the supervisor brings the arm to rest, whatever the policy is busy with; the
        recorder closes its journal, then the arm's process ends. A Ctrl-C meanwhile ends everything
        at once."""
        steps = [("supervisor", "policy"), ("guard",), ("recorder",)]
        steps += [
            tuple(name for name in self.processes if name not in {"arm", *chain(*steps)}),
            ("arm",),
        ]
        try:
            for names in steps:
                processes = [self.processes[name] for name in names if name in self.processes]
                for process in processes:
                    _tell(process)
                for process in processes:
                    _await(process, 10.0)
        except KeyboardInterrupt:
            self.kill()
            raise
        self.processes.clear()

    def kill(self) -> None:
        """At once: the supervisor's second signal stops the arm where it is, whose process ends
        last; who is left half a second later is killed."""
        others = [process for name, process in self.processes.items() if name != "arm"]
        for process in others:
            _tell(process)
        if "supervisor" in self.processes:
            time.sleep(0.02)  # two signals that come together are one
            _tell(self.processes["supervisor"])
        deadline = time.monotonic() + 0.5
        for process in others:
            _await(process, max(0.0, deadline - time.monotonic()))
        if "arm" in self.processes:
            _tell(self.processes["arm"])
            _await(self.processes["arm"], 0.5)
        self.processes.clear()


def _tell(process: subprocess.Popen) -> None:
    """To end, also where it was halted."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)


def _await(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
