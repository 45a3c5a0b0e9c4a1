"""The page and the ``summary.json`` of several runs: alike runs together, unlike ones side by
side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vla_rl.display import words
from vla_rl.display.charts import Interval, Series, interval_chart, line_chart, percent, short
from vla_rl.evaluation.outcome import summarise
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.reporting import figures, sections, study, verdict
from vla_rl.reporting.diagnostics import warnings
from vla_rl.reporting.runs import RunData
from vla_rl.reporting.study import Group

NOTHING = "–"


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """``summary.json`` of a study: figures over the runs of each group, then every run's own."""
    runs = [(r, g) for g in groups for r in g.runs]
    return {
        "verdict": study.verdict(groups)[0].replace("\u00a0", " "),
        "seeds": [r.seed for r, _ in runs],
        **figures.costs([r for r, _ in runs]),
        "groups": [study.group_summary(g) for g in groups],
        "runs": [
            {"label": r.label, "group": g.name, **figures.identity(r), **figures.run_summary(r)}
            for r, g in runs
        ],
    }


def study_sections(groups: Sequence[Group], folder: Path, name: str) -> list[str]:
    """The page of a study."""
    runs = [r for g in groups for r in g.runs]
    head, evidence = study.verdict(groups)
    count = f"{len(runs)} runs" if len(groups) > 1 else f"{len(runs)} {groups[0].unit}"
    machines = sorted({m for r in runs if (m := sections.machine(r))})
    alarms = [f"{r.label}: {note}" for r in runs for note in figures.alarms(r)]
    found = [
        sections.header((name, count, machines[0] if len(machines) == 1 else ""), head, evidence)
    ]
    found += [sections.alarms(alarms), verdict.section(folder)]
    if len(groups) == 1:
        return [*found, *_one_group(groups[0], folder)]
    found.append(_overview(groups))
    for i, group in enumerate(groups):
        found.append(
            sections.section(
                f"{i + 1}. {len(group.runs)} {group.unit}",
                "",
                _settings(group),
                _learning(group),
                _runs_table(group, folder),
                _titled("How it fails", _failures(group)),
                _titled("Image use", _images(group)),
            )
        )
    found.append(sections.notes([*(n for g in groups for n in _notes(g)), *warnings(runs)]))
    return [*found, sections.time(runs), _differences(groups)]


def _one_group(group: Group, folder: Path) -> list[str]:
    worst = min(group.runs, key=_end_rate)
    lead = (
        f"Held-out episodes of {escape(worst.label)}, the lowest at the end, in real time. Other "
        "runs' pages have theirs."
    )
    return [
        _tiles(group),
        sections.section("Learning", "", _learning(group)),
        sections.section(
            f"Every {group.unit.rstrip('s')}", _table_lead(group), _runs_table(group, folder)
        ),
        sections.section("How it fails", "", _failures(group)),
        sections.section("Do they use their images?", _IMAGES, _images(group)),
        _tasks(group),
        sections.videos(worst, lead),
        sections.notes([*_notes(group), *warnings(group.runs)]),
        sections.section("While learning", "A line per run.", sections.diagnostics(group.runs)),
        sections.time(group.runs),
        sections.versions(group.runs[0], f"To repeat {group.runs[0].label}"),
    ]


def _titled(title: str, content: str) -> str:
    return f'<h3 class="gap">{escape(title)}</h3>{content}' if content else ""


def _end_rate(run: RunData) -> float:
    return run.evaluations[run.names[-1]].success_rate if run.names else 2.0


def _notes(group: Group) -> list[str]:
    return [f"{group.name}: {note}" if group.name else note for note in study.notes(group)]


def _points(change: Mapping[str, Any] | None) -> str:
    """ "+45 points (+40 to +50)" of a `study.spread` or a paired comparison."""
    if change is None:
        return NOTHING
    value = change.get("mean", change.get("difference"))
    low, high = (change.get(k, change.get(f"difference_{k}")) for k in ("low", "high"))
    interval = (
        ""
        if low is None
        else f" <small>{words.signed(low * 100)} to {words.signed(high * 100)}</small>"
    )
    return f"{words.signed(value * 100)}{interval}"


def _tiles(group: Group) -> str:
    tiles: list[tuple[str, str, str]] = []
    change, done = study.difference(group), Group(group.finished, group.values)
    if change is not None and group.ends is not None:
        before, after = (study.rates(done, name) or {} for name in group.ends)
        what = (
            f"median success, {words.evaluation(group.ends[0])} → {words.evaluation(group.ends[1])}"
        )
        tiles.append((f"{percent(before['median'])} → {percent(after['median'])}", what, ""))
        tiles.append(
            (
                f"{percent(after['worst'])} – {percent(after['best'])}",
                "worst and best at the end",
                "",
            )
        )
        clear = change["low"] is not None and (change["low"] > 0 or change["high"] < 0)
        style = ("up" if change["mean"] > 0 else "down") if clear else ""
        tiles.append((f"{words.signed(change['mean'] * 100)} points", "mean difference", style))
    elif group.names and (s := study.rates(group, group.names[-1])):
        tiles.append(
            (percent(s["median"]), f"median success, {words.evaluation(group.names[-1])}", "")
        )
        tiles.append((f"{percent(s['worst'])} – {percent(s['best'])}", "worst and best", ""))
    if group.minutes:
        tiles.append(
            (words.clock(60 * sum(group.minutes) / len(group.minutes)), "mean time per run", "")
        )
    peak = max(r.peak_memory_bytes for r in group.runs)
    if peak:
        tiles.append((words.gibibytes(peak), "largest peak memory", ""))
    return sections.tiles(tiles)


# ----------------------------------------------------------------------------------------- learning
def _learning(group: Group) -> str:
    """Held-out success over episodes: a line per run, and the median."""
    found = [(r, c) for r in group.runs if len(c := figures.learning_curve(r)) > 1]
    if not found:
        return ""
    few = len(found) <= sections.COLOURS
    curves, marks = [], []
    for i, (run, curve) in enumerate(found):
        style = sections.colour(i) if few else "s5"
        x, y = [a for a, _ in curve], [b for _, b in curve]
        notes = [f"{run.label}, {a:.0f} episodes: {percent(b)}" for a, b in curve]
        curves.append(Series(run.label, x, y, style, "line" if few else "faint"))
        curves.append(Series(run.label, x, y, style, "dots", notes=notes))
        marks += [(f"thin {style}", run.label)] if few else []
    middle = study.median_curve([c for _, c in found])
    if middle:
        x, y = [a for a, _, _ in middle], [b for _, b, _ in middle]
        curves.append(Series("median", x, y, "ink", "thick"))
        marks.append(("thin ink", f"median of {len(found)}"))
    marks = marks if few else [("thin s5", f"each of {len(found)} {group.unit}"), *marks]
    chart = sections.both_widths(
        lambda width: line_chart(
            curves,
            width=width,
            height=320 if width > 600 else 240,
            y_format=percent,
            y_range=(0.0, 1.0),
            x_label="episodes of RL",
            label="held-out success over episodes",
        )
    )
    return f"<h3>Held-out success over episodes</h3>{sections.legend(marks)}{chart}"


# ------------------------------------------------------------------------------------------- tables
def _table_lead(group: Group) -> str:
    if len(group.runs) < 2:
        return ""
    return (
        f"Each run's interval (95 %) is of its own episodes. The mean's is over the {group.unit}: "
        "Student's t, and never narrower than the episodes alone would allow."
    )


def _runs_table(group: Group, folder: Path) -> str:
    """A row for every run; median, worst, best and mean below."""
    names, ends = group.names, group.ends
    shown = list(ends or names[-1:])
    use = {r.label: figures.image_use(r) for r in group.runs}
    seeing = any(use.values())
    state = any(_state(r) for r in group.runs)
    rows: list[tuple[str, list[str]]] = []
    for r in group.runs:
        cells = [_link(r, folder), *(_rate(r, n) for n in shown)]
        if ends:
            c = figures.paired(r) if r in group.finished else None
            cells.append(_points(c.to_dict() if c else None))
        cells += [
            f"{r.seconds / 60:.1f}" if r.seconds else NOTHING,
            words.gibibytes(r.peak_memory_bytes),
        ]
        cells += [_seen(use[r.label])] if seeing else []
        rows.append(("", [*cells, escape(_state(r))] if state else cells))
    heads = [
        "Run",
        *(escape(words.evaluation(n)) for n in shown),
        *(["difference, points"] if ends else []),
    ]
    heads += [
        "minutes",
        "peak memory",
        *(["image use"] if seeing else []),
        *([""] if state else []),
    ]
    if len(group.runs) > 1:
        rows += _spread_rows(group, shown, len(heads))
    return sections.table(heads, rows)


def _spread_rows(group: Group, shown: Sequence[str], width: int) -> list[tuple[str, list[str]]]:
    spreads = [study.rates(group, n) for n in shown]
    change = study.difference(group) if group.ends else None
    minutes = study.spread(group.minutes, None, 0.0, float("inf")) if group.minutes else None
    rows = []
    for figure in ("median", "worst", "best", "mean"):
        cells = [figure if figure != "mean" else "mean, 95 % interval"]
        for s in spreads:
            cells.append(
                NOTHING
                if s is None
                else percent(s[figure]) + (_interval(s) if figure == "mean" else "")
            )
        if group.ends:
            plain = NOTHING if change is None else words.signed(change[figure] * 100)
            cells.append(_points(change) if figure == "mean" else plain)
        if minutes:  # the worst run is the slowest
            cells.append(f"{minutes[{'worst': 'best', 'best': 'worst'}.get(figure, figure)]:.1f}")
        rows.append(("total" if figure == "median" else "", [*cells, *[""] * (width - len(cells))]))
    return rows


def _interval(s: Mapping[str, Any]) -> str:
    return (
        "" if s["low"] is None else f" <small>{s['low'] * 100:.0f}–{s['high'] * 100:.0f} %</small>"
    )


def _rate(run: RunData, name: str) -> str:
    if name not in run.evaluations:
        return NOTHING
    s = summarise(run.evaluations[name].outcomes)
    return f"{percent(s['rate'])}{_interval(s)}"


def _seen(use: Mapping[str, Any] | None) -> str:
    if use is None:
        return NOTHING
    text = words.signed_short(use["image_use"])
    return f'<span class="bad">{text}</span>' if use["warning"] else text


def _state(run: RunData) -> str:
    return "; ".join(
        f"{words.phase(n)}: {text}" for n, p in run.phases.items() if (text := words.progress(p))
    )


def _link(run: RunData, folder: Path) -> str:
    """The run, leading to its own page where it has one."""
    if not (run.path / "report.html").exists():
        return escape(run.label)
    inside = Path(os.path.relpath(run.path.resolve(), folder.resolve())).as_posix()
    return f'<a href="{escape(quote(inside))}/report.html">{escape(run.label)}</a>'


def _tasks(group: Group) -> str:
    """Median, worst and best over runs for each task, where there are several."""
    found = {name: study.task_rates(group, name) for name in group.ends or group.names[-1:]}
    tasks = list(dict.fromkeys(t for rows in found.values() for t in rows))
    if len(tasks) < 2:
        return ""
    heads = [
        "Task",
        *(h for n in found for h in (f"{escape(words.evaluation(n))}, median", "worst – best")),
    ]
    rows = []
    for task in tasks:
        cells = [escape(task)]
        for of in found.values():
            s = of.get(task)
            around = "" if s is None else f"{percent(s['worst'])} – {percent(s['best'])}"
            cells += [NOTHING, NOTHING] if s is None else [percent(s["median"]), around]
        rows.append(("", cells))
    return sections.section(
        "Tasks", f"Over {len(group.runs)} {group.unit}.", sections.table(heads, rows)
    )


# ------------------------------------------------------------------------------ failures, image use
def _failures(group: Group) -> str:
    """Kinds of failure over all runs that tell, and per run."""
    names = list(group.ends or group.names[-1:])
    runs = [r for r in group.runs if names and all(n in r.failures for n in names)]
    if not runs:
        return ""
    counts = {n: study.failures(runs, n) or {} for n in names}
    kinds = words.failure_kinds({k for found in counts.values() for k in found})
    episodes = {n: sum(r.evaluations[n].episodes for r in runs) for n in names}
    rows = []
    for r in runs if len(runs) > 1 else ():
        cells = [" → ".join(str(r.failures[n][""].get(kind, 0)) for n in names) for kind in kinds]
        rows.append(("", [escape(r.label), *cells]))
    arrow = " → ".join(escape(words.evaluation(n)) for n in names)
    per_run = (
        sections.table([f"{arrow}", *(escape(words.failure(k)) for k in kinds)], rows)
        if rows and kinds
        else ""
    )
    more = f'<h3 class="gap">Run by run</h3>{per_run}' if per_run else ""
    return sections.failure_figures(counts, episodes) + more


_IMAGES = (
    "The imitation loss on demonstrations that SFT was not trained on, and what it rises by when "
    "images or the instruction come from another moment. A policy that looks loses much; one that "
    "does not acts alike wherever things lie."
)


def _images(group: Group) -> str:
    found = [(r, use) for r in group.runs if (use := figures.image_use(r)) is not None]
    if not found:
        return ""
    cameras = list(dict.fromkeys(c for _, use in found for c in use["cameras"]))
    extra = [k for k in ("instruction_use", "image_spread") if any(k in use for _, use in found)]
    heads = [
        "Run",
        "true loss",
        "images shuffled",
        "rise",
        *(f"{escape(c)} alone" for c in cameras),
    ]
    heads += [k.replace("_use", "").replace("_", " ") for k in extra]
    rows = []
    for r, use in found:
        cells = [
            escape(r.label),
            short(use["loss"]),
            short(use["loss"] + use["image_use"]),
            _seen(use),
        ]
        cells += [
            words.signed_short(use["cameras"][c]) if c in use["cameras"] else NOTHING
            for c in cameras
        ]
        cells += [NOTHING if k not in use else _extra(k, use[k]) for k in extra]
        rows.append(("", cells))
    return sections.table(heads, rows)


def _extra(key: str, value: float) -> str:
    return short(value) if key == "image_spread" else words.signed_short(value)


# ------------------------------------------------------------------------------------ unlike groups
def _overview(groups: Sequence[Group]) -> str:
    """A row for every group, and their last success as bars."""
    rows, bars = [], []
    for i, g in enumerate(groups):
        first, last = (
            (study.rates(g, n) for n in g.ends) if g.ends else (_only(g, True), _only(g, False))
        )
        cells = [
            f"{i + 1}. {escape(g.name or 'no config')}",
            str(len(g.runs)),
            _median(first),
            _median(last),
        ]
        cells.append(_points(_change(g)))
        cells.append(f"{sum(g.minutes) / len(g.minutes):.1f}" if g.minutes else NOTHING)
        rows.append(("", cells))
        for s, style in ((first, "before"), (last, "after")):
            if s is not None:
                of_run = wilson_interval(round(s["mean"] * s["episodes"]), s["episodes"])
                low, high = of_run if s["runs"] == 1 else (s["low"], s["high"])
                label = f"{i + 1}" if style == "after" or last is None else f"{i + 1}, first"
                bars.append(
                    Interval(
                        label, s["mean"], low, high, style, f"{g.name}: mean {percent(s['mean'])}"
                    )
                )
    heads = ["Kind", "runs", "first success", "last success", "difference, points", "minutes"]
    lead = (
        "Median over the runs of a kind, with the worst and the best; mean difference, with its 95 "
        "% interval over runs. Kinds may have other tasks and limits: then their figures do not "
        "compare. Bars: the means."
    )
    chart = sections.both_widths(
        lambda width: interval_chart(bars, width=min(width, 760), row_height=26)
    )
    return sections.section("Side by side", lead, sections.table(heads, rows, "named"), chart)


def _only(group: Group, first: bool) -> dict[str, Any] | None:
    """The rates of the only evaluation, where it belongs before or after RL."""
    name = group.names[0] if group.names else None
    return study.rates(group, name) if name is not None and words.before_rl(name) == first else None


def _change(group: Group) -> Mapping[str, Any] | None:
    """The difference over runs; of a single run with the interval of its own episodes."""
    if len(group.runs) > 1 or (c := figures.paired(group.runs[0])) is None:
        return study.difference(group)
    return c.to_dict()


def _median(s: Mapping[str, Any] | None) -> str:
    if s is None:
        return NOTHING
    around = (
        f" <small>{percent(s['worst'])} – {percent(s['best'])}</small>" if s["runs"] > 1 else ""
    )
    return f"{percent(s['median'])}{around}"


def _settings(group: Group) -> str:
    """The keys in which a group differs from others."""
    pairs = (
        f"<code>{escape(k)}={escape(study.written(v))}</code>" for k, v in group.settings.items()
    )
    return f'<p class="settings">{" ".join(pairs)}</p>' if group.settings else ""


def _differences(groups: Sequence[Group]) -> str:
    """All keys that differ, folded away."""
    keys = study.differing_keys(groups)
    rows = [
        ("", [escape(k), *(escape(study.written(g.values.get(k, study.ABSENT))) for g in groups)])
        for k in keys
    ]
    table = sections.table(["Key", *(str(i + 1) for i in range(len(groups)))], rows)
    return sections.section(
        "What differs",
        "",
        f"<details><summary>{len(keys)} keys of the configuration</summary>{table}</details>",
    )
