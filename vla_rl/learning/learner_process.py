"""The actor's side of the concurrent rhythm: a learner in a process of its own, which may die and
is started again.

Nothing here knows a simulator: a robot's runner sends the episodes that it closed and takes the
weights that are newest, as the rollout loop does (`vla_rl.learning.learners.RemoteLearner`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl import errors
from vla_rl.errors import UserError
from vla_rl.learning.episode_queue import (
    BEAT,
    FAILURE,
    FIGURES,
    INBOX,
    JOB,
    EpisodeQueue,
    NewestWeights,
    read_figures,
)
from vla_rl.learning.learner_server import CHECKPOINT, EPISODES, STOP
from vla_rl.monitoring.metrics import write_json
from vla_rl.types import Trajectory

_LOOK = 0.05  # seconds between looks at what is waited for
_STOP_SECONDS = 60.0  # for the update under way and the state


class LearnerProcess:
    """A `RemoteLearner`: ``python -m module folder`` (`vla_rl.assembly.learner_main`). ``job`` is
    what it is to do, JSON-ready; ``updates_per_decision`` its pace.

    Every method but `stop` looks after the process: one that died, or whose loop has not turned for
    ``hang_seconds`` (0: any time), is started again, at most ``restarts`` times, and ``say`` is
    told. One more, or a `UserError` with which the learner itself gave up, is raised. What comes
    before the first episode may take any time.
    """

    def __init__(
        self,
        folder: Path,
        module: str,
        job: Mapping[str, Any],
        updates_per_decision: float,
        restarts: int,
        say: Callable[[str], None] = print,
        hang_seconds: float = 0.0,
    ) -> None:
        self.folder, self.job, self._pace, self._say = folder, job, updates_per_decision, say
        self._module = module
        self._spool = EpisodeQueue(folder / INBOX)
        self._restarts, self._died = restarts, 0
        self._hang_seconds = hang_seconds
        # the newest, and since when (this process's clock)
        self._beat: tuple[int, float] = (0, 0.0)
        self._process: subprocess.Popen[bytes] | None = None
        self.last = 0  # ticket
        # decisions of each ticket that the learner may not have taken yet
        self._sent: dict[int, int] = {}
        self._newest = NewestWeights(folder)
        self._figures: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> dict[str, float]:
        """Returns once the learner has done what comes before the first episode (in an earlier
        session perhaps), with the metrics of that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (FIGURES, FAILURE):
            (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / JOB, self.job)
        self._launch()
        self.wait(lambda: bool(self.figures()))
        self.last = max([self._figures["taken"], *(entry.last for entry in self._spool.entries())])
        return self._figures.get("offline", {})

    # -------------------------------------------------------------------------------- RemoteLearner
    def send(self, episodes: Sequence[tuple[Trajectory, Tensor]]) -> None:
        """Hand over closed episodes, each with its rewards (`RewardModel.score`); on the disk
        when it returns."""
        self._watch()
        if not episodes:
            return
        entry = self._spool.put(
            self.last + 1, [(_slim(trajectory), rewards) for trajectory, rewards in episodes]
        )
        self.last = entry.last
        self._sent |= {
            entry.first + i: len(trajectory) for i, (trajectory, _) in enumerate(episodes)
        }
        self._tell(EPISODES)

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """The newest version and its weights; None where that is the one that was asked for
        last."""
        self._watch()
        weights = self._newest()
        return None if weights is None else (weights.version, weights.tensors)

    def figures(self) -> dict[str, Any]:
        """What the learner said last (`LearnerServer`), and "owed" with what it has not taken
        yet; {} before it is ready."""
        self._watch()
        self._figures = read_figures(self.folder / FIGURES) or self._figures
        if not self._figures:
            return {}
        self._sent = {
            ticket: n for ticket, n in self._sent.items() if ticket > self._figures["taken"]
        }
        return self._figures | {
            "owed": self._figures["owed"] + self._pace * sum(self._sent.values())
        }

    @property
    def is_even(self) -> bool:
        """Whether all that was sent is learned from, and the newest weights show it."""
        f = self.figures()
        return not self._sent and f["owed"] < 1.0 and f["published"] >= f["updates"]

    def checkpoint(self) -> None:
        """Have the learner write its state soon. Without it nothing is lost but time: updates
        since are made again."""
        self._watch()
        self._tell(CHECKPOINT)

    def stop(self) -> None:
        """End the process, which writes its state; called twice it does nothing."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        ready = (self.folder / FIGURES).exists()  # before, it has nothing to keep
        self._tell(STOP)
        self._process = None
        try:
            process.wait(_STOP_SECONDS if ready else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def wait(self, until: Callable[[], bool]) -> float:
        """Wait, looking after the process; returns the seconds."""
        started = time.perf_counter()
        while not until():
            self._watch()
            time.sleep(_LOOK)
        return time.perf_counter() - started

    # --------------------------------------------------------------------------------------- inside
    def _launch(self) -> None:
        """Its own session, so that Ctrl-C reaches the actor alone; the end of stdin tells it
        that the actor is gone."""
        (self.folder / BEAT).unlink(missing_ok=True)
        paths = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(self.folder.resolve())],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def _tell(self, command: str) -> None:
        assert self._process is not None and self._process.stdin is not None, (
            "the learner was not started"
        )
        # it died, which the next look finds, or its stdin is closed
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()

    def _watch(self) -> None:
        """Start the process again if it died or hangs."""
        if self._process is None:
            return
        hangs = self._process.poll() is None and self._hangs()
        if hangs:
            self._process.kill()
            self._process.wait()
        if (code := self._process.poll()) is None:
            return
        failure = read_figures(self.folder / FAILURE)
        if failure:
            kinds = {
                k.__name__: k
                for k in vars(errors).values()
                if isinstance(k, type) and issubclass(k, UserError)
            }
            raise kinds.get(failure["error"], UserError)(failure["text"])
        how = f"ended by itself ({f'signal {-code}' if code < 0 else f'status {code}'})"
        if hangs:
            how = (
                f"hung: no update in {self._hang_seconds:g} s (rl.concurrent.hang_seconds), so it "
                "was killed"
            )
        if self._died >= self._restarts:
            raise UserError(
                f"the learner's process {how}, for the {self._died + 1}. time "
                f"(rl.concurrent.restarts={self._restarts}). What it said stands above. No episode "
                "is lost: the same command goes on from here"
            )
        self._died += 1
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._say(
            f"the learner's process {how} and is started again ({self._died} of at most "
            f"{self._restarts} times); the actor goes on with the weights it has, and no episode "
            "is lost"
        )
        self._launch()

    def _hangs(self) -> bool:
        """Whether its loop has begun to turn, and has not for too long."""
        path, now = self.folder / BEAT, time.monotonic()
        newest = path.stat().st_mtime_ns if path.exists() else 0
        if newest != self._beat[0]:
            self._beat = newest, now
        return bool(self._hang_seconds and newest) and now - self._beat[1] > self._hang_seconds


def _slim(trajectory: Trajectory) -> Trajectory:
    """Without what no learner of a replay reads."""
    return dataclasses.replace(trajectory.without_privileged(), value=None)
