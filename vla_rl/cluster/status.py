"""``<run>/cluster.json``: who does what, written by the driver every few moments, and read by
`vla-rl cluster status`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.files import read_json
from vla_rl.monitoring.metrics import write_json

STATUS_FILE = "cluster.json"
_SILENT = 30.0  # seconds


class StatusFile:
    """Writes what ``describe`` says into ``path``, at most every ``every`` seconds."""

    def __init__(
        self, path: Path, describe: Callable[[], dict[str, Any]], every: float = 3.0
    ) -> None:
        self._path, self._describe, self._every = path, describe, every
        self._written = -math.inf
        self._last: dict[str, Any] = {}

    def look(self) -> None:
        if time.monotonic() - self._written >= self._every:
            self._written = time.monotonic()
            self._last = {**self._describe(), "time": time.time(), "ended": False}
            write_json(self._path, self._last)

    def end(self) -> None:
        """The run's rollouts are over."""
        if self._last:
            # (a Ray that is gone answers with all kinds of them)
            with contextlib.suppress(Exception):
                self._last = self._describe()
            write_json(self._path, {**self._last, "time": time.time(), "ended": True})


def find_status(given: Path) -> Path:
    """The file of a run, or of the newest run below a folder of runs. Raises `UserError` where
    there is none."""
    found = [given / STATUS_FILE, *given.glob(f"*/{STATUS_FILE}")]
    found = sorted(
        (path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise UserError(
            f"{given} holds no {STATUS_FILE}: name the folder of a run with cluster=ray "
            "that has reached RL"
        )
    return found[-1]


def status_text(path: Path) -> str:
    """The file as a table."""
    found = read_json(path, "the run writes it anew every few seconds")
    age = time.time() - found["time"]
    running = (
        "running" if age < _SILENT else f"silent for {age:.0f} s: its driver is gone, or hangs"
    )
    state = "ended" if found["ended"] else running
    left = f"{found['waiting']} episodes wait for an actor, {found['ready']} for the learner"
    if found["ended"]:  # what was under way ended with it
        actors = [actor | {"state": "ended", "open": 0} for actor in found["actors"]]
        left, found = "nothing is under way", {**found, "actors": actors}
    lines = [
        f"{path.parent}: {state}; version {found['version']}, {left}",
        f"{'actor':<13} {'host':<20} {'node':<8} {'process':>8}  {'state':<8} {'open':>5} "
        f"{'decisions':>10}  seen to work",
    ]
    work = {actor["number"]: actor for actor in found["actors"]}
    lines += [
        _line(seat, work.get(seat["number"]) if seat["role"] == "rollout" else None)
        for seat in found["seats"]
    ]
    lines += placement_lines(found["placement"])
    if found["staleness"]:
        ages = ", ".join(
            f"{age} versions: {share:.0%}" for age, share in sorted(found["staleness"].items())
        )
        lines.append(f"age of the decisions learned from last: {ages}")
    lines += [f"Ray's own pages: {found['dashboard']}"] if found["dashboard"] else []
    lines += [
        f"restarts: {len(found['restarts'])}",
        *(f"  {text}" for text in found["restarts"][-5:]),
    ]
    return "\n".join(lines)


def placement_lines(placement: Mapping[str, Any]) -> list[str]:
    """What was placed and why, and what it waits for."""
    lines = [f"placement: {placement['why'] or placement['numbers']['placement']}"]
    return lines + ([placement["waits"]] if placement["waits"] else [])


def _line(seat: Mapping[str, Any], work: Mapping[str, Any] | None) -> str:
    line = (
        f"{seat['role']:<9} {seat['number']:>3} {seat['host']:<20} {seat['node'][:8]:<8} "
        f"{seat['pid']:>8}"
    )
    if work is None:
        return line
    return (
        f"{line}  {work['state']:<8} {work['open']:>5} {work['decisions']:>10}  "
        f"{work['idle_seconds']:.0f} s ago"
    )
