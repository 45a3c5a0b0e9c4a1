"""What all benchmarks do alike: note when and where, take turns, time, compare round by round,
and print."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vla_rl.monitoring.machine import git_commit, process_tree, versions

Side = TypeVar("Side")
Name = TypeVar("Name", bound=Hashable)
say = functools.partial(print, flush=True)  # how far it is, while it lasts


# ----------------------------------------------------------------------------------- when and where
def began(command: str) -> dict[str, Any]:
    """When a benchmark began, by which command, and how busy the machine was by then (processes,
    mean of a minute)."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"date": time.strftime("%Y-%m-%d"), "command": command, "load": load}


def machine() -> dict[str, str]:
    """What it ran on, and the commit of the source."""
    return {"hardware": hardware(versions()), "commit": git_commit()}


def hardware(found: Mapping[str, Any]) -> str:
    """The machine of `versions`, in one line; empty where nothing is known."""
    if not found:
        return ""
    gpus = ", ".join(found.get("gpus") or []) or "no GPU"
    return (
        f"{found.get('cpu_cores')} cores {found.get('cpu')}, {found.get('memory_gib')} GiB, {gpus}"
    )


# ---------------------------------------------------------------------------------------- measuring
class Took(NamedTuple):
    """Seconds of a call: by the clock, and of work, all of this process's threads together."""

    wall: float
    cpu: float


def timed(call: Callable[..., Any], *arguments: Any) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    call(*arguments)
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(
    calls: Mapping[Name, Callable[[], Any]],
    rounds: int,
    each: int = 1,
    *,
    warm: int = 1,
    cold: int = 0,
) -> dict[Name, list[Took]]:
    """What each call took, ``each`` times in a row in every round, all in turn, so that a change of
    the machine's load falls on all alike. ``warm`` rounds come before and do not count, nor do the
    first ``cold`` calls of a row."""
    took: dict[Name, list[Took]] = {name: [] for name in calls}
    for turn in range(-warm, rounds):
        for name, call in calls.items():
            row = [timed(call) for _ in range(cold + each)][cold:]
            took[name] += row if turn >= 0 else []
    return took


def in_turns(sides: Iterable[Side], rounds: int) -> list[tuple[Side, int]]:
    """(side, number of the round) in the order in which they run: each round the other way round,
    so that a drift of the machine meets all sides."""
    order = list(sides)
    return [
        (side, number)
        for number in range(rounds)
        for side in order[:: 1 if number % 2 == 0 else -1]
    ]


class Stopwatch:
    """Seconds spent in wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


def memory_mb() -> float:
    """Proportional memory of this process in MB (10^6 bytes), after a garbage collection."""
    gc.collect()
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def cpu_seconds_below() -> float:
    """CPU seconds of this process and all below it, with those that ended and were waited for."""
    ticks = 0
    for pid in process_tree(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))  # u, s, of children u, s
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------------- comparing
def milliseconds(
    seconds: Iterable[float], levels: Sequence[int] = (50, 95, 99)
) -> dict[str, float]:
    """Percentiles, in milliseconds, by their names: "p50", and "max" for 100."""
    found = 1e3 * np.percentile(list(seconds), levels)
    return {
        "max" if level == 100 else f"p{level}": float(value) for level, value in zip(levels, found)
    }


def over_rounds(plain: Sequence[float], changed: Sequence[float]) -> dict[str, float]:
    """``changed`` over ``plain``, a figure of each round: "ratio" of their means, "low" and
    "high" of a round."""
    of_rounds = [b / a for a, b in zip(plain, changed) if a > 0]
    return {"ratio": sum(changed) / sum(plain), "low": min(of_rounds), "high": max(of_rounds)}


# ----------------------------------------------------------------------------------------- printing
def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal, figures to the right; the first row is the head."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
