"""What a run leaves behind while it goes: metrics, progress on screen, memory, versions.

A run folder holds (each file optional; `vla_rl.reporting` shows what is there)

    config.yaml          the exact resolved configuration
    versions.json        `versions()`
    metrics.jsonl        one JSON object a line: {"phase", "step", "time_s", metric: number, …}  (`MetricsLogger`)
    metrics_<phase>.csv  the same as tables; tensorboard/, wandb/ where asked for  (`vla_rl.sinks`)
    phases.json          {phase: {"seconds", "complete", "episodes", "control_steps", …}, "peak_memory_bytes"}
    eval_<name>.json     `vla_rl.evaluate.EvaluationResult.to_dict()`
    checkpoints/         sft, rl, rl_<iteration>, best; best.json: {"iteration", "success", "episodes"} of the last one
    videos/<name>.mp4    episodes of that evaluation; <name>_failure_<kind>.mp4: one of each kind of failure
    summary.json, report.html
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from vla_rl.sinks import Sink

METRICS_FILE, BEST_FILE = "metrics.jsonl", "checkpoints/best.json"
PACKAGES = (
    "vla-rl", "torch", "numpy", "transformers", "timm", "hydra-core", "safetensors", "robosuite", "mujoco", "numba",
    "hf-libero", "lerobot", "ray", "pyarrow", "av", "wandb", "peft", "diffusers", "simplejpeg",
    "pyrealsense2",
)  # fmt: skip
_log = logging.getLogger(__name__)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def finite(value: Any) -> Any:
    """The value with numbers that JSON has no word for (NaN, infinities) turned into None, tensors into numbers."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


# -------------------------------------------------------------------------------------------------------------- metrics
class MetricsLogger:
    """Appends metrics to ``metrics.jsonl``, and hands them to `sinks`, which are opened by the first `log`.

    A run that resumes from an older checkpoint repeats steps: the first `log` of a phase drops the lines of that phase
    from that step on, so no step is there twice. A line cut short by a crash is dropped.
    """

    def __init__(self, run_dir: str | Path, sinks: Sequence[Callable[[], Sink | None]] = ()):
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._started = time.perf_counter() - _last_time(self.path)
        self._seen: set[str] = set()
        self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        self._to_open, self._sinks = list(sinks), list[Sink]()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """One line: ``phase``, ``step`` (counted within the phase) and numbers. NaN and infinities become null."""
        if phase not in self._seen:
            self._seen.add(phase)
            self.truncate(phase, step)
        record = finite(
            {"phase": phase, "step": step, "time_s": round(time.perf_counter() - self._started, 3), **metrics}
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
            self._guarded(lambda start=start: self._open(start))

    def _open(self, start: Callable[[], Sink | None]) -> None:
        sink = start()
        if sink is not None:
            for row in read_metrics(self.path) if sink.whole else ():
                sink.write(row)
            self._sinks.append(sink)

    def _each(self, use: Callable[[Sink], Any]) -> None:
        self._sinks = [sink for sink in self._sinks if self._guarded(lambda sink=sink: use(sink))]

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
            part = self.path.with_name(f".{self.path.name}.part")
            part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            part.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        return dropped

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._each(lambda sink: sink.close())
        self._to_open, self._sinks = [], []


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` in order; lines that are not whole JSON objects, and what is no number in the
    others, are left out."""
    path = Path(path)
    if not os.path.lexists(path):
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("phase"), str) and _is_number(record.get("step")):
            records.append({k: v for k, v in record.items() if k == "phase" or v is None or _is_number(v)})
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


# ------------------------------------------------------------------------------------------------------------- progress
def _clock(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if seconds >= 3600 else (
        f"{seconds // 60}:{seconds % 60:02d}"
    )  # fmt: skip


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Bar:
    """One line of progress. `update` and `inner` are callbacks; see `Progress.task`."""

    def __init__(self, owner: Progress, name: str, total: int, start: int):
        self.name, self.total, self.completed = name, total, start
        self._owner, self._begun = owner, time.perf_counter()
        self._pace_from: tuple[float, float] | None = None  # time and position of the first progress
        self._fraction, self._inner_text, self._values = 0.0, "", {}
        self._row = owner._add_row(self)

    @property
    def position(self) -> float:
        """Steps completed, with the fraction of the present one."""
        return self.completed + self._fraction

    @property
    def eta_s(self) -> float | None:
        """Seconds to go, from this session's own pace since its first progress: what came before was starting up, such
        as workers that import their simulator. None before the second progress."""
        now = time.perf_counter()
        begun, first = self._pace_from or (now, self.position)
        gained = self.position - first
        return (now - begun) / gained * max(0.0, self.total - self.position) if gained > 0 else None

    def _progressed(self) -> None:
        if self._pace_from is None:
            self._pace_from = time.perf_counter(), self.position

    def text(self) -> str:
        parts = [f"{k} {_shown(v)}" for k, v in self._values.items() if v is not None]
        return "  ".join(part for part in (*parts, self._inner_text) if part)

    def update(self, completed: int, total: int | None = None, successes: int | None = None, **values: Any) -> None:
        """``completed`` of ``total`` steps are over; ``successes`` of them as a rate; ``values`` are shown beside."""
        self.completed, self._fraction, self._inner_text = completed, 0.0, ""
        if total is not None:
            self.total = total
        if successes is not None and completed:
            values["success"] = f"{successes}/{completed} = {successes / completed:.0%}"
        self._values |= values
        self._progressed()
        self._owner._refresh(self, force=completed >= self.total)

    def inner(self, finished: int, total: int, successes: int) -> None:
        """Within the present step: ``finished`` of ``total`` episodes, ``successes`` of which succeeded."""
        rate = f", {successes / finished:.0%} success" if finished else ""
        self._fraction = finished / total if total else 0.0
        self._inner_text = f"[{finished}/{total} episodes{rate}]"
        self._progressed()
        self._owner._refresh(self)


class Progress:
    """Progress bars with time to go: rich on a terminal, one plain line every ``every`` seconds elsewhere.

    Use as a context manager; ``with progress.task("RL", 20) as bar: bar.update(3, success=0.4)``.
    """

    def __init__(self, every: float = 15.0, stream: TextIO | None = None):
        self._stream, self._every = stream, every
        self._rich: Any = None
        self._last: dict[int, float] = {}

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stdout

    def __enter__(self) -> Progress:
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self._rich = _rich_progress(self.stream)
            if self._rich is not None:
                self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    def say(self, text: str) -> None:
        """Print a message above the bars."""
        if self._rich is not None:
            self._rich.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    @contextmanager
    def task(self, name: str, total: int, start: int = 0) -> Iterator[Bar]:
        """A bar of ``total`` steps of which ``start`` were done by an earlier session."""
        bar = Bar(self, name, total, start)
        try:
            yield bar
        finally:
            if self._rich is not None:
                self._rich.remove_task(bar._row)
                self.say(self._line(bar))
            elif self._last.get(id(bar)) != bar.position:
                self._print(bar)

    # ---- inner parts
    def _add_row(self, bar: Bar) -> Any:
        if self._rich is not None:
            return self._rich.add_task(bar.name, total=bar.total, completed=bar.completed, note="", eta="–:––")
        self._printed = time.perf_counter()
        return None

    def _refresh(self, bar: Bar, force: bool = False) -> None:
        if self._rich is not None:
            eta = "–:––" if bar.eta_s is None else _clock(bar.eta_s)
            self._rich.update(bar._row, completed=bar.position, total=bar.total, note=bar.text(), eta=eta)
        elif force or time.perf_counter() - self._printed >= self._every:
            self._print(bar)

    def _print(self, bar: Bar) -> None:
        self._printed = time.perf_counter()
        self._last[id(bar)] = bar.position
        print(self._line(bar), file=self.stream, flush=True)

    def _line(self, bar: Bar) -> str:
        share = f"{bar.position / bar.total:4.0%}" if bar.total else "    "
        spent = _clock(time.perf_counter() - bar._begun)
        left = f", {_clock(bar.eta_s)} to go" if bar.eta_s and bar.position < bar.total else ""
        return f"{bar.name:<12} {share}  {bar.completed}/{bar.total}  ({spent}{left})  {bar.text()}".rstrip()


def _rich_progress(stream: TextIO) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (
        TextColumn("[bold]{task.description:<12}", markup=True), BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TextColumn("ETA {task.fields[eta]}"),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)


# --------------------------------------------------------------------------------------------------------------- memory
def memory_bytes() -> int:
    """Memory of this process and all its children, in bytes; shared pages count once (proportional set size).

    0 where the system does not tell (no Linux).
    """
    total = 0
    for pid in _process_tree(os.getpid()):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ValueError):  # it ended meanwhile, or is not ours to read
            continue
    return total


def _process_tree(root: int) -> list[int]:
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                queue.extend(int(child) for child in file.read_text().split())
            except (OSError, ValueError):
                continue
    return found


class MemoryWatch:
    """Samples `memory_bytes` in a thread; ``peak`` is the most seen, starting from ``initial`` (earlier sessions)."""

    def __init__(self, initial: int = 0, every: float = 2.0, measure: Callable[[], int] = memory_bytes):
        self.peak, self._every, self._measure = int(initial), every, measure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._measure())

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.peak = max(self.peak, self._measure())


# ------------------------------------------------------------------------------------------------------------- versions
def versions() -> dict[str, Any]:
    """Packages, machine and source commit: what somebody else needs to know to repeat the run."""
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": available_cores(),
        "memory_gib": round(total_memory_bytes() / 2**30, 1),
        "gpus": gpus,
        "mujoco_gl": os.environ.get("MUJOCO_GL", ""),
        "packages": packages,
        "git_commit": git_commit(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Cores this process may use: an affinity mask or a container's quota may be smaller than the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"))
    return min(cores, math.ceil(quota)) if quota else cores


def cgroup_quota(root: Path) -> float:
    """Cores' worth of time that a container allows (cgroup v2's ``cpu.max``, v1's ``cfs_quota_us``); 0: no limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return max(0.0, float(quota) / float(period))  # (v1 says -1, v2 "max")
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def default_threads() -> int:
    """Threads for torch where nothing else is said: all available cores, or fewer where ``OMP_NUM_THREADS`` says so."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(available_cores(), int(wanted)) if wanted.isdigit() and int(wanted) else available_cores()


def total_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def git_commit() -> str:
    """Commit of the source that runs, "+changes" where tracked files differ from it; empty outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD") if (here.parent / ".git").exists() else ""
        return f"{commit} +changes" if commit and git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""
