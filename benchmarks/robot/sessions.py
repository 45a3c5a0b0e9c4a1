"""Kill or freeze a session's launcher, or the learner that learns from it, by the commands that a
user gives.

``vla-rl robot run`` and ``robot learn`` play the point robot in processes of their own, and this
one watches. A learner is none of those that the arm waits for: it goes on, by the weights that it
has, and what counts is that no episode is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.robot.kept import Kept
from benchmarks.robot.trials import Busy, Operator, Trial, judged, losses, undisturbed
from policies.settings import SmallConfig
from policies.small import SmallPolicy
from real.body import StartError
from real.link import LinkError
from real.messages import Notice
from real.robots.server import read_log
from real.robots.world import PointWorld
from vla_rl.checkpoint import save_checkpoint
from vla_rl.robot.replay import Recorded

AFTER_S = 1.2  # that is watched from the signal on
# at most; a machine that is very busy takes minutes to import what learns
START_S, END_S = 600.0, 300.0
HANG_S = 15.0  # after which a learner that stands still is replaced; 600 unless one says so
_RUN = [sys.executable, "-m", "vla_rl", "robot"]
_LEARN = [
    "run=toy_td3",
    "algorithm.start_decisions=5",
    "algorithm.updates_per_decision=0.5",
    "algorithm.batch_size=16",
]
_EPISODES = 3


@dataclass(frozen=True)
class Spared:
    """A trial of a learner. ``paused``: why the arm did not go on in `AFTER_S` (""; it did).
    ``again_s``: from the signal until another learner was there. ``episodes`` were closed, of which
    ``lost`` are not in the replay, or more than once; ``records`` of journals were lost. ``ended``:
    the command's exit status."""

    victim: str
    how: str
    paused: str
    again_s: float
    episodes: int
    lost: int
    records: int
    ended: int
    load: float


def starts(folder: Path) -> dict[str, Path]:
    """Checkpoints of the point robot: one that moves its hand in a circle of 4 cm, and a small
    one to learn from."""
    robot = PointWorld().embodiment
    turns = torch.arange(2000) * 2 * math.pi / robot.control_hz
    rows = torch.stack(
        [0.048 * turns.cos(), 0.048 * turns.sin(), 0 * turns, -torch.ones_like(turns)], dim=1
    )
    save_checkpoint(folder / "launcher", Recorded(robot, rows, torch.ones(2000), [10] * 200))
    small: Any = SmallPolicy(SmallConfig(chunk_length=4, hidden=[16]), robot)
    save_checkpoint(folder / "learner", small)
    return {name: folder / name for name in ("launcher", "learner")}


def launcher_trial(how: str, start: Path, delay: float) -> Trial:
    """The launcher of a session whose policy is the checkpoint ``start`` is "killed" or "frozen"
    while the arm moves."""
    return undisturbed(lambda: _launcher(how, start, delay))


def _launcher(how: str, start: Path, delay: float) -> Trial:
    with tempfile.TemporaryDirectory(prefix="launch") as place:
        session = Path(place) / "s"
        words = [
            "run",
            "--headless",
            f"checkpoint={start}",
            "robot=fake",
            f"output_dir={place}",
            "name=s",
        ]
        command = [*words, "robot.horizon=2000", "threads=1"]
        with (
            _command(command, Path(place)) as launcher,
            _moving(launcher, session, Path(place), delay) as viewer,
        ):
            when = time.monotonic()
            launcher.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            kept = Kept(session / "journal")
            _watched(viewer)
            log = read_log(session / "run" / "arm.log")
            if how == "frozen":
                launcher.send_signal(signal.SIGCONT)
                launcher.send_signal(signal.SIGINT)
            launcher.wait(END_S)
            _over(session)
        return Trial(
            "launcher",
            how,
            *judged(log, when),
            os.getloadavg()[0],
            *losses("launcher", kept, viewer, when),
        )


def learner_trial(how: str, start: Path, delay: float) -> Spared:
    """The learner of ``robot learn`` from the policy ``start`` is "killed" or "frozen" while the
    arm moves."""
    with tempfile.TemporaryDirectory(prefix="learn") as place:
        out = Path(place) / "a"
        asked = [
            "learn",
            str(start),
            "--robot",
            "fake",
            "--out",
            str(out),
            "--headless",
            "--episodes",
            str(_EPISODES),
        ]
        more = ["robot.horizon=60", "threads=1", f"rl.concurrent.hang_seconds={HANG_S}", *_LEARN]
        with _command([*asked, *more], Path(place)) as launcher:
            session = out / "sessions" / "0001"
            with _moving(launcher, session, Path(place), delay) as viewer:
                victim, when = _learner(launcher.pid), time.monotonic()
                os.kill(victim, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                kept = Kept(session / "journal")
                paused = _watched(viewer)
            again = _again(launcher, victim) - when
            ended = launcher.wait(END_S)
            _over(session)
        episodes, lost = _learned(out)
        return Spared(
            "learner", how, paused, again, episodes, lost, kept.lost(), ended, os.getloadavg()[0]
        )


# ----------------------------------------------------------------------------------- of one session
@contextlib.contextmanager
def _command(words: list[str], place: Path) -> Iterator[subprocess.Popen]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    with open(place / "said.txt", "wb") as out:
        process = subprocess.Popen(
            [*_RUN, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
    try:
        yield process
    finally:
        if process.poll() is None:  # its children end with it
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def _moving(
    launcher: subprocess.Popen, session: Path, place: Path, delay: float
) -> Iterator[Operator]:
    """A viewer of the session, ``delay`` seconds after the policy began to move the arm, without a
    pause since. Raises `StartError`; `Busy` where it is in FAULT, which nobody here
    acknowledges."""
    until, viewer = time.monotonic() + START_S, None
    while viewer is None and time.monotonic() < until and launcher.poll() is None:
        with contextlib.suppress(LinkError):
            viewer = Operator(str(session / "run" / "s"), "viewer")
        time.sleep(0.05)
    with contextlib.closing(viewer.client) if viewer else contextlib.nullcontext():
        since = 0.0
        while viewer and time.monotonic() < until and launcher.poll() is None:
            try:
                viewer.watch(0.02)
            except LinkError:  # the session is over
                launcher.wait(END_S)
                break
            if viewer.state is not None and viewer.state.mode == "FAULT":
                raise Busy
            if viewer.state is None or viewer.state.mode != "AUTO":
                since = 0.0
            elif viewer.state.policy:
                since = since or time.monotonic()
            if since and time.monotonic() - since >= delay:
                yield viewer
                return
    said = (place / "said.txt").read_text(encoding="utf-8", errors="replace")
    if "stopped the arm" in said:
        raise Busy
    raise StartError(f"the session did not get under way: {said[-1000:]}")


def _watched(viewer: Operator) -> str:
    """Why the arm did not go on for `AFTER_S`; or ""."""
    viewer.seen.clear()
    began = time.monotonic()
    with contextlib.suppress(LinkError):
        viewer.watch(AFTER_S)
    time.sleep(max(0.0, began + AFTER_S - time.monotonic()))
    return next(
        (
            f"{m.name}: {m.value}"
            for m in viewer.seen
            if isinstance(m, Notice) and m.name in ("pause", "fault")
        ),
        "",
    )


def _over(session: Path) -> None:
    """Wait until the session's processes have closed what they had open."""
    until = time.monotonic() + END_S
    while time.monotonic() < until and (
        (session / "run" / "s").exists() or list(session.glob("journal/*.open"))
    ):
        time.sleep(0.05)


def _learner(launcher: int) -> int:
    """The process id of the launcher's learner; 0: it has none now."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if (
                int(stat[1]) == launcher
                and stat[0] != "Z"
                and b"learner_main" in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
    return 0


def _again(launcher: subprocess.Popen, before: int) -> float:
    """When (on the clock of all processes) another learner was there, or the command had ended."""
    until = time.monotonic() + END_S
    while (
        time.monotonic() < until
        and launcher.poll() is None
        and _learner(launcher.pid) in (0, before)
    ):
        time.sleep(0.02)
    return time.monotonic()


def _learned(out: Path) -> tuple[int, int]:
    """Episodes that were closed, and how many of those the replay lacks or has twice."""
    closed = len(list(out.glob("sessions/*/journal/*.vrj")))
    lines = (out / "replay" / "journal.jsonl").read_bytes().splitlines()
    kept = [json.loads(line.partition(b" ")[2])["rollout_id"] for line in lines]
    return closed, abs(closed - len(set(kept))) + len(kept) - len(set(kept))


def summary(how: str, rows: list[Spared]) -> dict[str, object]:
    """Of the trials of a learner."""
    again = sorted(row.again_s for row in rows)
    return (
        {
            "victim": "learner",
            "how": how,
            "trials": len(rows),
            "went_on": sum(not row.paused for row in rows),
            "paused": [row.paused for row in rows if row.paused],
            "again_s": {"median": again[len(again) // 2], "max": again[-1]},
            "episodes": sum(row.episodes for row in rows),
            "lost": sum(row.lost + row.records for row in rows),
            "ended_well": sum(row.ended == 0 for row in rows),
            "load": sum(row.load for row in rows) / len(rows),
            "trials_all": [dataclasses.asdict(row) for row in rows],
        }
        if rows
        else {"victim": "learner", "how": how, "trials": 0}
    )
