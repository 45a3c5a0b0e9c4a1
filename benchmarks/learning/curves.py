"""Methods side by side: held-out success against episodes, control steps and seconds, as a table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from vla_rl.display.charts import Series, line_chart, percent
from vla_rl.display.words import text_table
from vla_rl.files import write_whole
from vla_rl.reporting import sections
from vla_rl.reporting.page import fill

AXES = {"episodes": "episodes", "control_steps": "control steps", "seconds": "seconds"}


def method_of(figures: Mapping[str, Any]) -> str:
    """A run's algorithm, and the actor that it trains."""
    return " + ".join(str(figures[key]) for key in ("algorithm", "actor") if figures.get(key) not in (None, "none"))


def side_by_side(runs: Sequence[Mapping[str, Any]], level: float) -> str:
    """A row per run of `learning_of`: start, end, and what ``level`` took, for a terminal."""
    rows = [("run", "method", "start", "end", *(f"{name} to {level:.0%}" for name in AXES.values()))]
    for run in runs:
        curve, reached = run["curve"], run["reached"]
        ends = [f"{curve[i]['success']:.0%}" for i in (0, -1)] if curve else ["–", "–"]
        to = [_amount(reached[axis]) for axis in AXES] if reached else ["not reached", "", ""]
        rows.append((run["run"], method_of(run), *ends, *to))
    return text_table(rows)


def write_figure(path: Path, runs: Sequence[Mapping[str, Any]], level: float) -> None:
    """One HTML page with a chart for each of `AXES`, every run a curve, and the table."""
    names = [f"{run['run']} ({method_of(run)})" for run in runs]
    body = ["<header><h1>Held-out success by what it took</h1></header>"]
    body.append(sections.legend([(f"thin {sections.colour(i)}", name) for i, name in enumerate(names)]))
    for axis, label in AXES.items():
        series = [_series(run, axis, name, i) for i, (run, name) in enumerate(zip(runs, names))]
        body.append(sections.section(f"Success against {label}", "", sections.both_widths(partial(_chart, series, label))))
    head, _, *lines = side_by_side(runs, level).splitlines()
    body.append(sections.section("In figures", "", f"<pre>{escape(chr(10).join([head, *lines]))}</pre>"))
    footer = "Written by vla-rl bench learn. The same figures for scripts: --json FILE."
    write_whole(path, fill("Learning side by side", body, footer))


def _chart(series: Sequence[Series], label: str, width: int) -> str:
    return line_chart(
        series, width=width, height=260, y_format=percent, y_range=(0.0, 1.0), x_label=label, label=f"success by {label}"
    )


def _series(run: Mapping[str, Any], axis: str, name: str, index: int) -> Series:
    points = run["curve"]
    style = sections.colour(index)
    return Series(name, [p[axis] for p in points], [p["success"] for p in points], style, kind="line")


def _amount(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")
