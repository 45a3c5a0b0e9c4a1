"""Kill or freeze a process while the arm moves; the arm's own log tells when it began to hold and
where it came to rest.

Every trial has a session of its own on the wall clock. All processes share one clock
(CLOCK_MONOTONIC), so the moment of the signal and the arm's log can be compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.robot.kept import Kept, unrecorded
from real.body import Body, BodyConfig, StartError
from real.link import Client
from real.messages import Event, Lease, Message, Notice, State
from real.robots.remote import inject
from real.robots.server import read_log

AT_REST = 0.01  # m/s
FULL = 0.05  # metres a control step of a device's full deflection, in both worlds
TRIES = 4  # of a trial in which a pause of a busy machine had stopped the arm before the signal
DEFECTS = {"killed": "camera_lost", "frozen": "camera_freeze"}  # of a simulated arm's own cameras
# about 0.25 m/s each
MOVES = {"fake": (-0.048, 0.0, 0.0, -1.0), "tabletop": (0.0, 0.041, 0.0, -1.0)}


class Busy(StartError):
    """The session's guard stopped the arm before anything was struck: this machine is too busy
    to keep the loop's time."""

    def __init__(self) -> None:
        super().__init__(
            "the arm was stopped before anything was struck: try again where this machine has "
            "less to do"
        )


@dataclass(frozen=True)
class Trial:
    """Seconds and metres from the signal on. ``speed`` is the arm's at that moment; ``load`` the
    machine's average. ``lost`` counts acknowledged records that the journal lacks after it, and
    holes in it; ``unwritten`` the ticks that had been announced, which a recorder took with it."""

    victim: str
    how: str
    speed: float
    hold_s: float
    rest_s: float
    distance: float
    load: float
    lost: int = 0
    unwritten: int = 0


class Operator:
    """Whoever holds control in a measurement: keeps the lease, sees states."""

    def __init__(self, socket: str, role: str = "console"):
        self.client = Client(socket, role)
        self.state: State | None = None
        self.seen: list[Message] = []
        self.announced: list[tuple[float, int]] = []  # stamp and number of every tick

    def watch(self, seconds: float) -> None:
        """Read, and renew the lease, for so long."""
        end, renew = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            if self.client.token and now > renew:
                renew = now + 0.5
                self.client.send(Lease, ask="renew", token=self.client.token, force=False)
            message = self.client.receive(min(0.02, max(end - now, 0.001)))
            if isinstance(message, State):
                self.state = message
                self.announced.append((message.stamp, message.tick))
            elif message is not None:
                self.seen.append(message)

    def until(self, mode: str, seconds: float = 60.0, going_on: bool = False) -> None:
        """``going_on``: from each pause. Raises `Busy` in FAULT, which nobody here acknowledges."""
        end = time.monotonic() + seconds
        while self.state is None or self.state.mode != mode:
            if self.state is not None and self.state.mode == "FAULT":
                raise Busy
            if going_on and self.state is not None and self.state.mode == "PAUSED":
                self.press("start")
            if time.monotonic() > end:
                said = [f"{m.name}: {m.value}" for m in self.seen if isinstance(m, Notice)][-5:]
                raise StartError(
                    f"the session did not reach {mode}: it is "
                    f"{self.state and self.state.mode}; {said}"
                )
            self.watch(0.02)

    def press(self, *names: str) -> None:
        for name in names:
            self.client.send(
                Event, name=name, value="", at=time.monotonic(), lease=self.client.token
            )

    def resume(self) -> None:
        """Back to AUTO, as often as a pause comes in between: a machine under load misses beats."""
        self.watch(0.05)
        self.until("AUTO", going_on=True)

    def drive(self, mode: str = "AUTO") -> None:
        """Take control and let the policy move; or until ``mode``, where somebody else takes
        over at once."""
        self.client.send(Lease, ask="request", token="", force=False)
        while not self.client.token:
            self.watch(0.02)
        self.press("arm", "start")
        self.resume() if mode == "AUTO" else self.until(mode)


def driver(socket: str, world: str, log: Path, *more: str) -> subprocess.Popen:
    """The scripted policy in a process of its own; or a hand, or a console, as ``more`` says."""
    scale = FULL if "--hand" in more else 1.0
    command = [
        sys.executable,
        "-m",
        "benchmarks.robot.driver",
        socket,
        "20",
        *(str(x / scale) for x in MOVES[world]),
        *more,
    ]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    while not log.read_bytes().startswith(b"ready"):
        if process.poll() is not None:
            raise StartError(
                "the driver did not start: "
                f"{log.read_text(encoding='utf-8', errors='replace')[-500:]}"
            )
        time.sleep(0.01)
    return process


@contextlib.contextmanager
def swaying(body: Body, world: str, role: str = "console") -> Iterator[Operator]:
    """Whoever watches in that role, while the scripted policy is there, which turns round all
    the time."""
    policy = driver(body.socket, world, body.run / "driver.txt", "--sway")
    operator = Operator(body.socket, role)
    try:
        yield operator
    finally:
        policy.kill()
        policy.wait()
        operator.client.close()


def trial(victim: str, how: str, config: BodyConfig, delay: float) -> Trial:
    """``victim`` "policy", "teleop" (whose device then moves the arm), "console", "supervisor",
    "guard", "recorder", "camera" (of ``config``), "picture" (those of a simulated arm's own
    cameras), or "operator" (who has control, in this process) is "killed" or "frozen" ``delay``
    seconds after the arm was told to move."""
    return undisturbed(lambda: _tried(victim, how, config, delay))


def undisturbed(tried: Callable[[], Trial]) -> Trial:
    """Tried again where a busy machine had stopped the arm before the signal."""
    for left in reversed(range(TRIES)):
        try:
            if (found := tried()).speed > 5 * AT_REST or not left:
                break
        except Busy:
            if not left:
                raise
    return found


def _tried(victim: str, how: str, config: BodyConfig, delay: float) -> Trial:
    with (
        tempfile.TemporaryDirectory(prefix="trial") as place,
        Body(place, config) as body,
    ):
        own = {"policy": driver(body.socket, config.world, Path(place) / "driver.txt")}
        if victim == "console":
            own["console"] = driver(
                body.socket, config.world, Path(place) / "console.txt", "--console"
            )
        if victim == "teleop":
            own["teleop"] = driver(body.socket, config.world, Path(place) / "hand.txt", "--hand")
        operator = Operator(body.socket, "launcher" if victim == "console" else "console")
        try:
            operator.drive("HUMAN" if victim == "teleop" else "AUTO")
            operator.watch(delay)
            # camera_side0
            processes = {name.split("_")[0]: process for name, process in body.processes.items()}
            when = _strike(victim, how, processes | own, operator, body)
            kept = Kept(body.folder / "journal")
            if victim == "operator":
                time.sleep(1.2)  # its packets are not read any more either
            else:
                _wait(operator, 1.2)
            log = read_log(body.run / "arm.log")
        finally:
            for process in [*own.values(), *body.processes.values()]:
                process.send_signal(signal.SIGCONT) if process.poll() is None else None
            for process in own.values():
                process.kill()
                process.wait()
            operator.client.close()
        body.close()
        return Trial(
            victim,
            how,
            *judged(log, when),
            os.getloadavg()[0],
            *losses(victim, kept, operator, when),
        )


def losses(victim: str, kept: Kept, operator: Operator, when: float) -> tuple[int, int]:
    """`Trial.lost` and `Trial.unwritten` of a session that has ended. Only a recorder may take
    what comes last with it."""
    lost = kept.lost()
    holes, last = unrecorded(
        kept.folder, [tick for stamp, tick in operator.announced if stamp <= when]
    )
    return (lost + holes, last) if victim == "recorder" else (lost + holes + last, 0)


def _strike(
    victim: str, how: str, processes: dict[str, subprocess.Popen], operator: Operator, body: Body
) -> float:
    when = time.monotonic()
    if victim == "operator":  # this very process: its beats and its lease end
        operator.client.close()
    elif victim == "picture":
        inject(body.arm_socket, DEFECTS[how], 3600.0)
    else:
        processes[victim].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    return when


def _wait(operator: Operator, seconds: float) -> None:
    try:
        operator.watch(seconds)
    except Exception:  # the supervisor was the victim
        time.sleep(seconds)


def judged(
    log: dict[str, list[tuple[float, Any]]], when: float
) -> tuple[float, float, float, float]:
    """Speed at the signal; then hold and rest (s) and distance (m) after it."""
    times = np.array([t for t, _ in log["path"]])
    places = np.array([p for _, p in log["path"]])
    start = int(np.searchsorted(times, when))
    window = slice(max(0, start - 15), start)
    span = times[window][-1] - times[window][0]
    speed = (
        float(np.linalg.norm(places[window][-1] - places[window][0]) / span) if span > 0 else 0.0
    )
    stops = [t for t, name in log["event"] if name in ("hold", "stop", "watchdog")]
    later_stops = [t for t in stops if t > when]
    hold = later_stops[0] - when if later_stops else float("inf")
    if stops and not later_stops and all(t <= stops[-1] for t, _ in log["target"]):
        # a late supervisor's arm had begun to hold by itself, and was told nothing since
        hold = 0.0
    after, later = places[start:], times[start:]
    step = max(1, int(0.01 / 0.002) - 1)
    speeds = np.linalg.norm(after[step:] - after[:-step], axis=1) / np.maximum(
        later[step:] - later[:-step], 1e-6
    )
    fast = np.flatnonzero(speeds > AT_REST)
    rest = float(later[min(fast[-1] + step, len(later) - 1)] - when) if len(fast) else 0.0
    return speed, hold, rest, float(np.linalg.norm(after[-1] - places[start - 1]))
