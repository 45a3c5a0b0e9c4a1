"""A process that must not be late: a session of its own, no garbage collection, real-time
priority only where asked for."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from typing import Any

from real import BORN_OF

# the parent has ended. Not SIGTERM: of a parent with several threads it comes several times
ORPHANED = signal.SIGHUP
LAUNCHER = "VLA_RL_LAUNCHER"  # in the environment: the process id of a session's launcher
_PDEATHSIG = 1  # of prctl
# of CPU time in one go, after which a real-time process is stopped by the kernel
_RTTIME_US = 200_000


def freeze_garbage() -> None:
    """Collect once, then never: a full collection takes up to a second where much is imported."""
    gc.collect()
    gc.freeze()
    gc.disable()


def orphaned() -> bool:
    """Whether who launched this process has ended: `real.body` says who that is (`LAUNCHER`), else
    whoever was its parent as it began; a parent 1 then was none any more."""
    launcher = int(os.environ.get(LAUNCHER, 0)) or (BORN_OF if BORN_OF > 1 else -1)
    return os.getppid() != launcher


def die_with_parent(sign: int = signal.SIGTERM) -> None:
    """Ask the kernel for ``sign`` when the parent ends, and take it at once where that has ended
    already (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, int(sign), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if orphaned():
        os.kill(os.getpid(), sign)


def own_config(dies: bool = True) -> dict[str, Any]:
    """Of a process that owns a device: the config file that the command line names. It ends at once
    by SIGTERM, or with its parent (with ``dies`` false it hears `ORPHANED` then), and not by a
    Ctrl-C that was meant for the session's launcher."""
    die_with_parent(signal.SIGKILL if dies else ORPHANED)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(sys.argv[1], encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    return config


def real_time(priority: int) -> str:
    """Ask for SCHED_FIFO with ``priority`` (0: leave it) and say what came of it.

    Children do not inherit it (SCHED_RESET_ON_FORK), and RLIMIT_RTTIME ends a loop that runs away.
    Never for a process that computes: one that spins at this priority takes its core from everybody
    else.
    """
    if priority <= 0:
        return "ordinary"
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (_RTTIME_US, _RTTIME_US))
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (OSError, ValueError) as error:
        return f"ordinary ({error})"
    return f"SCHED_FIFO {priority}"


class Deadlines:
    """Absolute deadlines ``zero + k / hz``. An overrun skips ticks, which are counted; nothing
    catches up."""

    def __init__(self, hz: float, zero: float):
        self.hz, self.zero = hz, zero
        self.tick, self.overruns = -1, 0

    def next(self) -> float:
        """The time of the next tick that is still to come."""
        due = int((time.monotonic() - self.zero) * self.hz)
        if due > self.tick + 1:
            self.overruns += due - self.tick - 1
            self.tick = due
        else:
            self.tick += 1
        return self.zero + self.tick / self.hz

    def lateness(self) -> float:
        """By how much the present tick is late, in seconds."""
        return max(0.0, time.monotonic() - (self.zero + self.tick / self.hz))
