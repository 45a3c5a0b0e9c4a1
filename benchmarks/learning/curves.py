"""Methods side by side: held-out success against episodes, control steps and seconds, as a table
and one figure."""

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
    return " + ".join(
        str(figures[key])
        for key in ("algorithm", "actor")
        if figures.get(key) not in (None, "none")
    )


def side_by_side(runs: Sequence[Mapping[str, Any]], level: float) -> str:
    """A row per run of `learning_of`: start, end, and what ``level`` took, for a terminal."""
    rows = [
        ("run", "method", "start", "end", *(f"{name} to {level:.0%}" for name in AXES.values()))
    ]
    for run in runs:
        curve, reached = run["curve"], run["reached"]
        ends = [f"{curve[i]['success']:.0%}" for i in (0, -1)] if curve else ["–", "–"]
        to = [_amount(reached[axis]) for axis in AXES] if reached else ["not reached", "", ""]
        rows.append((run["run"], method_of(run), *ends, *to))
    return text_table(rows)


def write_figure(path: Path, runs: Sequence[Mapping[str, Any]], level: float) -> None:
    """One HTML page with a chart for each of `AXES`, every run a curve, and the table."""
    names = [f"{run['run']} ({method_of(run)})" for run in runs]
    charts = []
    for axis, label in AXES.items():
        series = [
            curve(name, run["curve"], axis, i) for i, (run, name) in enumerate(zip(runs, names))
        ]
        charts.append((f"Success against {label}", label, series))
    write_page(
        path, "learn", "Held-out success by what it took", names, charts, side_by_side(runs, level)
    )


def curve(
    name: str, points: Sequence[Mapping[str, float]], axis: str, index: int, figure: str = "success"
) -> Series:
    """``figure`` of the points over ``axis``; a single one is a dot."""
    x, y = ([point[key] for point in points] for key in (axis, figure))
    return Series(name, x, y, sections.colour(index), "line" if len(points) != 1 else "dots")


Chart = tuple[str, str, Sequence[Series]]  # heading, what is along, and the curves


def write_page(
    path: Path, kind: str, title: str, names: Sequence[str], charts: Sequence[Chart], figures: str
) -> None:
    """One HTML page of ``vla-rl bench KIND``: ``charts`` of shares of ``names``, and
    ``figures``."""
    body = [f"<header><h1>{title}</h1></header>"]
    body.append(
        sections.legend([(f"thin {sections.colour(i)}", name) for i, name in enumerate(names)])
    )
    for heading, along, series in charts:
        body.append(
            sections.section(
                heading, "", sections.both_widths(partial(_chart, series, along, heading))
            )
        )
    body.append(sections.section("In figures", "", f"<pre>{escape(figures)}</pre>"))
    footer = f"Written by vla-rl bench {kind}. The same figures for scripts: --json FILE."
    write_whole(path, fill(title, body, footer))


def _chart(series: Sequence[Series], along: str, heading: str, width: int) -> str:
    return line_chart(
        series,
        width=width,
        height=260,
        y_format=percent,
        y_range=(0.0, 1.0),
        x_label=along,
        label=heading,
    )


def reached(success: Sequence[float], level: float) -> int | None:
    """The first evaluation at or above ``level`` after which none fell below it; None where
    there is none."""
    first = max((i for i, share in enumerate(success) if share < level), default=-1) + 1
    return first if first < len(success) else None


def _amount(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")
