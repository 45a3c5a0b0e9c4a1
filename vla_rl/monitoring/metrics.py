"""The metrics of a run, written while it goes.

A run folder holds (each file optional; `vla_rl.reporting` shows what is there)

    config.yaml          the exact resolved configuration
    versions.json        `versions()`
    metrics.jsonl        one JSON object a line: {"phase", "step", "time_s", metric: number, …}  (`MetricsLogger`)
    metrics_<phase>.csv  the same as tables; tensorboard/, wandb/ where asked for  (`vla_rl.monitoring.sinks`)
    phases.json          {phase: {"seconds", "complete", "episodes", "control_steps", …}, "peak_memory_bytes"}
    eval_<name>.json     `vla_rl.evaluation.outcome.EvaluationResult.to_dict()`
    actions.json         {policy: `vla_rl.evaluation.action_error.action_errors`}
    checkpoints/         sft, offline, rl, rl_<iteration>, student, best
    checkpoints/best.json  {"iteration", "success", "episodes"} of the last one
    videos/<name>.mp4    episodes of that evaluation; <name>_failure_<kind>.mp4: one of each kind of failure
    summary.json, report.html
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from vla_rl.files import write_whole
from vla_rl.monitoring.sinks import Sink

VERDICT_FILE = "verdict.json"  # in the folder of a study
TEST, TEST_BEST = "test", "test_best"
"""eval_NAME.json of the last and of the best policy on the test set."""
METRICS_FILE, BEST_FILE = "metrics.jsonl", "checkpoints/best.json"
ACTIONS_FILE = "actions.json"  # errors of actions on demonstrations that were kept out
_log = logging.getLogger(__name__)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value with numbers that JSON has no word for (NaN, infinities) turned into None,
    tensors into numbers."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class MetricsLogger:
    """Appends metrics to ``metrics.jsonl``, and hands them to `sinks`, which are opened by the
    first `log`.

    A run that resumes from an older checkpoint repeats steps: the first `log` of a phase drops the
    lines of that phase from that step on, so no step is there twice. A line cut short by a crash is
    dropped.
    """

    def __init__(self, run_dir: str | Path, sinks: Sequence[Callable[[], Sink | None]] = ()):
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._started = time.perf_counter() - _last_time(self.path)
        self._seen: set[str] = set()
        self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        self._to_open = list(sinks)
        self._sinks: list[Sink] = []

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """One line: ``phase``, ``step`` (counted within the phase) and numbers. NaN and
        infinities become null."""
        if phase not in self._seen:
            self._seen.add(phase)
            self.truncate(phase, step)
        record = finite(
            {
                "phase": phase,
                "step": step,
                "time_s": round(time.perf_counter() - self._started, 3),
                **metrics,
            }
        )
        assert self._file is not None, "this MetricsLogger is closed"
        self._open_sinks()
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._each(lambda sink: sink.write(record))

    def video(self, phase: str, step: int, path: Path) -> None:
        """An mp4 file, for the sinks that show videos."""
        self._open_sinks()
        self._each(lambda sink: sink.video(phase, step, path))

    def _open_sinks(self) -> None:
        starts, self._to_open = self._to_open, []
        for start in starts:
            self._guarded(functools.partial(self._open, start))

    def _open(self, start: Callable[[], Sink | None]) -> None:
        sink = start()
        if sink is not None:
            for row in read_metrics(self.path) if sink.whole else ():
                sink.write(row)
            self._sinks.append(sink)

    def _each(self, use: Callable[[Sink], Any]) -> None:
        self._sinks = [sink for sink in self._sinks if self._guarded(functools.partial(use, sink))]

    def _guarded(self, action: Callable[[], Any]) -> bool:
        """Whether it worked: a lost connection must not end a training run."""
        try:
            action()
        except Exception as error:
            _log.warning("a logger stopped working (%s); metrics go on in %s", error, self.path)
            return False
        return True

    def truncate(self, phase: str, step: int) -> int:
        """Drop the lines of ``phase`` at ``step`` and later; returns how many."""
        kept, dropped = [], 0
        for record in read_metrics(self.path):
            if record["phase"] == phase and record["step"] >= step:
                dropped += 1
            else:
                kept.append(json.dumps(record))
        if dropped:
            if self._file is not None:
                self._file.close()
            write_whole(self.path, "".join(f"{line}\n" for line in kept))
            self._file = self.path.open("a", encoding="utf-8")
        return dropped

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._each(lambda sink: sink.close())
        self._to_open, self._sinks = [], []


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` in order; lines that are not whole JSON objects, and what
    is no number in the others, are left out."""
    path = Path(path)
    if not os.path.lexists(path):
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(record, dict)
            and isinstance(record.get("phase"), str)
            and _is_number(record.get("step"))
        ):
            records.append(
                {k: v for k, v in record.items() if k == "phase" or v is None or _is_number(v)}
            )
    return records


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def _last_time(path: Path) -> float:
    return max((float(r.get("time_s") or 0.0) for r in read_metrics(path)), default=0.0)
