"""Progress on a terminal, or as a line now and then where there is none."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def _clock(seconds: float) -> str:
    seconds = round(seconds)
    return (
        f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        if seconds >= 3600
        else (f"{seconds // 60}:{seconds % 60:02d}")
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class _Bar:
    """One line of progress. `update` and `inner` are callbacks; see `Progress.task`."""

    def __init__(self, owner: Progress, name: str, total: int, start: int):
        self.name, self.total, self.completed = name, total, start
        self._owner, self._begun = owner, time.perf_counter()
        # time and position of the first progress
        self._pace_from: tuple[float, float] | None = None
        self._fraction, self._inner_text = 0.0, ""
        self._values: dict[str, Any] = {}
        self._row = owner._add_row(self)

    @property
    def position(self) -> float:
        """Steps completed, with the fraction of the present one."""
        return self.completed + self._fraction

    @property
    def eta_s(self) -> float | None:
        """Seconds to go, from this session's own pace since its first progress: what came before
        was starting up, such as workers that import their simulator. None before the second
        progress."""
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

    def update(
        self, completed: int, total: int | None = None, successes: int | None = None, **values: Any
    ) -> None:
        """``completed`` of ``total`` steps are over; ``successes`` of them as a rate; ``values``
        are shown beside."""
        self.completed, self._fraction, self._inner_text = completed, 0.0, ""
        if total is not None:
            self.total = total
        if successes is not None and completed:
            values["success"] = f"{successes}/{completed} = {successes / completed:.0%}"
        self._values |= values
        self._progressed()
        self._owner._refresh(self, force=completed >= self.total)

    def inner(self, finished: int, total: int, successes: int) -> None:
        """Within the present step: ``finished`` of ``total`` episodes, ``successes`` of which
        succeeded."""
        rate = f", {successes / finished:.0%} success" if finished else ""
        self._fraction = finished / total if total else 0.0
        self._inner_text = f"[{finished}/{total} episodes{rate}]"
        self._progressed()
        self._owner._refresh(self)


class Progress:
    """Progress bars with time to go: rich on a terminal, one plain line every ``every`` seconds
    elsewhere.

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
    def task(self, name: str, total: int, start: int = 0) -> Iterator[_Bar]:
        """A bar of ``total`` steps of which ``start`` were done by an earlier session."""
        bar = _Bar(self, name, total, start)
        try:
            yield bar
        finally:
            if self._rich is not None:
                self._rich.remove_task(bar._row)
                self.say(self._line(bar))
            elif self._last.get(id(bar)) != bar.position:
                self._print(bar)

    # ---- inner parts
    def _add_row(self, bar: _Bar) -> Any:
        if self._rich is not None:
            return self._rich.add_task(
                bar.name, total=bar.total, completed=bar.completed, note="", eta="–:––"
            )
        self._printed = time.perf_counter()
        return None

    def _refresh(self, bar: _Bar, force: bool = False) -> None:
        if self._rich is not None:
            eta = "–:––" if bar.eta_s is None else _clock(bar.eta_s)
            self._rich.update(
                bar._row, completed=bar.position, total=bar.total, note=bar.text(), eta=eta
            )
        elif force or time.perf_counter() - self._printed >= self._every:
            self._print(bar)

    def _print(self, bar: _Bar) -> None:
        self._printed = time.perf_counter()
        self._last[id(bar)] = bar.position
        print(self._line(bar), file=self.stream, flush=True)

    def _line(self, bar: _Bar) -> str:
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
        TextColumn("[bold]{task.description:<12}", markup=True),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("ETA {task.fields[eta]}"),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)
