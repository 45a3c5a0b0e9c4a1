"""Sections that the page of a run and that of a study share: HTML as text, empty where there is
nothing to say."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from vla_rl.diagnostics import Diagnostic
from vla_rl.display import words
from vla_rl.display.charts import (
    Series,
    count_bars,
    line_chart,
    percent,
    running_mean,
    short,
    stacked_bar,
)
from vla_rl.reporting import figures
from vla_rl.reporting.diagnostics import declared, step_of
from vla_rl.reporting.runs import RunData

MAX_VIDEO_BYTES = 25 * 2**20
WIDE, NARROW = 1040, 360  # drawn for a desk and for a phone; CSS shows the one that fits
COLOURS = 6


def section(title: str, lead: str, *content: str) -> str:
    """A card; ``lead`` and ``content`` are HTML."""
    body = "\n".join(c for c in content if c)
    if not body:
        return ""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def header(line: Sequence[str], head: str, evidence: str) -> str:
    words_of = " · ".join(escape(x) for x in line if x)
    return f'<header><p class="run">{words_of}</p><h1>{escape(head)}</h1><p class="sub">{escape(evidence)}</p></header>'


def machine(run: RunData) -> str:
    v = run.versions
    cores = f"{v['cpu_cores']} core{'s' if v['cpu_cores'] != 1 else ''}" if "cpu_cores" in v else ""
    return ", ".join(str(x) for x in [*v.get("gpus", []), v.get("cpu", ""), cores] if x)


def tiles(rows: Sequence[tuple[str, str, str]]) -> str:
    """(figure, what it is, CSS class)."""
    cells = (
        f'<div class="tile {c}"><b>{escape(big)}</b><span>{escape(small)}</span></div>'
        for big, small, c in rows
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if rows else ""


def alarms(notes: Sequence[str]) -> str:
    """What must be seen before any figure."""
    return (
        f'<ul class="notes alarm">{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>'
        if notes
        else ""
    )


def notes(found: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(n)}</li>" for n in found)
    return section("Worth knowing", "", f'<ul class="notes">{items}</ul>' if found else "")


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], css: str = "") -> str:
    """``rows``: (CSS class, cells), all HTML. It scrolls by itself where the page is too narrow."""
    head = "".join(f"<th>{h}</th>" for h in heads)
    body = "".join(
        f'<tr class="{style}">{"".join(f"<td>{c}</td>" for c in cells)}</tr>'
        for style, cells in rows
    )
    return f'<div class="scroll"><table class="{css}"><tr>{head}</tr>{body}</table></div>'


def both_widths(draw: Callable[[int], str]) -> str:
    """A chart drawn twice, since one picture's text cannot be read at a third of its size."""
    wide = draw(WIDE)
    return f'<div class="wide">{wide}</div><div class="narrow">{draw(NARROW)}</div>' if wide else ""


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(CSS classes of the mark, text)."""
    spans = "".join(
        f'<span><i class="c {style}"></i>{escape(text)}</span>' for style, text in entries
    )
    return f'<div class="legend">{spans}</div>'


def colour(index: int) -> str:
    return f"s{index % COLOURS}"


def evaluation_style(names: Sequence[str], name: str) -> str:
    """The colour of an evaluation among those of a run."""
    if len(names) == 1:
        return "before" if words.before_rl(name) else "after"
    if name == names[-1]:
        return "after"
    return "before" if name == names[0] else f"s{names.index(name) % 5 + 1}"


# ------------------------------------------------------------------------------------------- videos
def videos(run: RunData, lead: str) -> str:
    """The clips of the evaluations, side by side."""
    found = sorted(
        (run.path / "videos").glob("*.mp4"), key=lambda p: words.evaluation_order(p.stem)
    )
    shown = []
    for path in found:
        if "_failure_" in path.stem:
            continue
        result = run.evaluations.get(path.stem)
        rate = f", {percent(result.success_rate)} success" if result else ""
        shown.append(video(path, words.evaluation(path.stem), rate, "autoplay"))
    if not shown:
        return ""
    button = (
        '<button data-replay hidden type="button">Play all from the start</button>'
        if len(shown) > 1
        else ""
    )
    top = f'<div class="row"><p>{lead}</p>{button}</div>'
    return section("Watch it", "", top, f'<div class="two">{"".join(shown)}</div>')


def video(path: Path, name: str, rest: str, play: str = "") -> str:
    """A figure with the clip inside the page; a line where it would be too large."""
    size = path.stat().st_size
    if size > MAX_VIDEO_BYTES:
        return (
            f"<p>{escape(path.name)} is too large for this page ({size / 2**20:.0f} MiB); see "
            "videos/.</p>"
        )
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f"<figure><figcaption><b>{escape(name)}</b>{escape(rest)}</figcaption>"
        f'<video controls muted loop {play} playsinline src="data:video/mp4;base64,{data}"></video></figure>'
    )


# ----------------------------------------------------------------------------------------- failures
def failure_figures(counts: Mapping[str, Mapping[str, int]], episodes: Mapping[str, int]) -> str:
    """Failed episodes by kind for each evaluation {name: {kind: count}}, as bars and a table."""
    names = list(counts)
    kinds = words.failure_kinds({kind for found in counts.values() for kind in found})
    if not names or not kinds:
        return ""

    def bar(kind: str, name: str) -> tuple[str, float, str]:
        amount = counts[name].get(kind, 0)
        note = f"{words.evaluation(name)}: {amount} of {episodes[name]} episodes"
        return evaluation_style(names, name), amount, note

    groups = [(words.failure(kind), [bar(kind, name) for name in names]) for kind in kinds]
    rows = [
        ("", [escape(words.failure(kind)), *_counts_row(kind, counts, episodes)]) for kind in kinds
    ]
    totals = {name: sum(found.values()) for name, found in counts.items()}
    rows.append(
        (
            "total",
            ["all failures", *_counts_row("", {n: {"": t} for n, t in totals.items()}, episodes)],
        )
    )
    heads = [
        "Kind",
        *(f"{escape(words.evaluation(n))} <small>of {episodes[n]}</small>" for n in names),
    ]
    heads += ["change"] if len(names) > 1 else []
    marks = [(evaluation_style(names, n), words.evaluation(n)) for n in names]
    chart = both_widths(lambda width: count_bars(groups, width=width))
    return legend(marks) + chart + table(heads, rows)


def _counts_row(
    kind: str, counts: Mapping[str, Mapping[str, int]], episodes: Mapping[str, int]
) -> list[str]:
    amounts = [found.get(kind, 0) for found in counts.values()]
    cells = [
        f"{n} <small>({percent(n / episodes[name])})</small>" if n else "0"
        for n, name in zip(amounts, counts)
    ]
    return [*cells, words.signed(amounts[-1] - amounts[0])] if len(amounts) > 1 else cells


def failure_clips(run: RunData) -> str:
    """A clip of each kind of failure, before and after."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for path in (run.path / "videos").glob("*_failure_*.mp4"):
        name, _, kind = path.stem.partition("_failure_")
        found.setdefault(kind, []).append((name, path))
    shown = []
    for kind in words.failure_kinds(set(found)):
        for name, path in sorted(found[kind], key=lambda item: words.evaluation_order(item[0])):
            count = run.failures.get(name, {}).get("", {}).get(kind)
            rest = "" if count is None else f", {count} {words.plural('episode', count)}"
            shown.append(video(path, words.failure(kind), f" · {words.evaluation(name)}{rest}"))
    return (
        f'<h3 class="gap">One of each kind</h3><div class="clips">{"".join(shown)}</div>'
        if shown
        else ""
    )


# ----------------------------------------------------------------------------------------- learning
def diagnostics(runs: Sequence[RunData]) -> str:
    """A chart of each diagnostic that the runs have logged; with several runs a line each."""
    cells = []
    for phase, d in declared(runs):
        curves, marks = _diagnostic(phase, d, runs)
        written = percent if d.share else short
        chart = (
            line_chart(curves, y_format=written, x_label=step_of(phase), label=d.title)
            if curves
            else ""
        )
        if chart:
            cells.append(
                f"<div><h3>{escape(d.title)}</h3><p>{escape(d.note)}</p>{marks}{chart}</div>"
            )
    return f'<div class="charts">{"".join(cells)}</div>' if cells else ""


def _diagnostic(phase: str, d: Diagnostic, runs: Sequence[RunData]) -> tuple[list[Series], str]:
    """The curves, and a legend where a second metric stands beside the first."""
    curves: list[Series] = []
    for i, r in enumerate(runs):
        x, y = r.series(phase, d.key)
        if not any(v is not None for v in y):
            continue
        if d.smooth and len(y) > 30:
            if len(runs) == 1:
                curves.append(Series(r.label, x, y, colour(i), "faint"))
            y = running_mean(y, max(3, len(y) // 30))
        curves.append(Series(r.label, x, y, colour(i), "line" if len(runs) <= COLOURS else "faint"))
    if d.beside is None or len(runs) > 1:
        return curves, ""
    key, first_word, second_word = d.beside
    x, y = runs[0].series(phase, key)
    if not any(v is not None for v in y):
        return curves, ""
    curves.append(Series(second_word, x, y, "s2"))
    return curves, legend([("thin s0", first_word), ("thin s2", second_word)])


def success_curve(run: RunData, window: int = 5) -> str:
    """Success in training, iteration by iteration, with the held-out evaluations."""
    x, y = run.series("rl", "rollout/success")
    if not x:
        return ""
    there = [(a, b) for a, b in zip(x, y) if b is not None]
    notes = [f"iteration {a:.0f}: {percent(b)} of the training episodes" for a, b in there]
    curves = [
        Series(
            "each iteration",
            [a for a, _ in there],
            [b for _, b in there],
            "s1",
            "dots",
            notes=notes,
        ),
        Series("each iteration", x, y, "s1", "faint"),
        Series("running mean", x, running_mean(y, window), "s1"),
    ]
    marks = [
        (
            "thin s1",
            "training episodes, sampled actions: each iteration, and the mean of the last "
            f"{window}",
        )
    ]
    ex, ey = run.series("rl", "eval/success")
    if ex:
        at = [a - 1.0 for a in ex]  # an iteration evaluates before it trains
        curves.append(Series("held-out evaluation", at, ey, "s2", "dots", [None] * len(ex)))
        marks.append(("round s2", "held-out evaluations in between"))
    for name in dict.fromkeys(run.names[:1] + run.names[-1:]):
        s = figures.evaluation_summary(run, name)
        style = evaluation_style(run.names, name)
        note = (
            f"{words.evaluation(name)}: {s['successes']} of {s['episodes']} held-out episodes = "
            f"{percent(s['rate'])}"
        )
        first = words.before_rl(name)
        pair = [(s["low"], s["high"])]
        curves.append(
            Series(name, [0.0 if first else max(x)], [s["rate"]], style, "dots", pair, [note])
        )
        marks.append(
            (f"round {style}", f"held-out episodes {'before' if first else 'after'}, 95 % interval")
        )
    record = run.phases.get("rl", {})
    so_far = words.progress(record)
    chart = both_widths(
        lambda width: line_chart(
            curves,
            width=width,
            height=300 if width > 600 else 220,
            y_format=percent,
            y_range=(0.0, 1.0),
            x_label="iteration",
            x_max=record.get("of"),
            label="success over training",
        )
    )
    return (
        "<h3>Success while "
        f"training{escape(f': {so_far}') if so_far else ''}</h3>{legend(marks)}{chart}"
    )


# ---------------------------------------------------------------------------------------- image use
def image_use(run: RunData) -> str:
    """What shuffled inputs do to the loss, at last and over SFT."""
    use = figures.image_use(run)
    if use is None:
        return ""
    true = use["loss"]
    rows = [("", ["nothing", short(true), "", ""])]
    shuffled = [("all cameras" if use["cameras"] else "the camera", use["image_use"])]
    shuffled += [(f"{name} alone", rise) for name, rise in use["cameras"].items()]
    shuffled += [("the instruction", use["instruction_use"])] if "instruction_use" in use else []
    shuffled += [("proprioception", use["proprio_use"])] if "proprio_use" in use else []
    for name, rise in shuffled:
        share = percent(rise / abs(true)).replace("-", "−") if true else "–"
        rows.append(("", [escape(name), short(true + rise), words.signed_short(rise), share]))
    spread = (
        f" Spread of the image features: {short(use['image_spread'])}."
        if "image_spread" in use
        else ""
    )
    first = (
        f" As an episode begins, the loss is {short(use['first_loss'])}."
        if "first_loss" in use
        else ""
    )
    lead = (
        "The imitation loss on demonstrations that SFT was not trained on (update "
        f"{use['update']}), and what it rises by when an input comes from another moment. A policy "
        "that looks loses much with other images; one that does not acts alike wherever things "
        f"lie.{spread}{first}"
    )
    keys = [k for k in run.keys("sft") if re.match(r"validation/image_use(/|$)", k)]
    names = [k.removeprefix("validation/image_use").lstrip("/") or "all cameras" for k in keys]
    curves = [
        Series(name, *run.series("sft", key), colour(i))
        for i, (name, key) in enumerate(zip(names, keys))
    ]
    chart = ""
    if len(curves[0].x) > 1:
        marks = legend([(f"thin {c.style}", c.label) for c in curves]) if len(curves) > 1 else ""
        drawn = line_chart(
            curves,
            width=420,
            height=200,
            x_label="update",
            label="rise of the loss with other images",
        )
        chart = f"<div><h3>Rise of the loss with other images</h3>{marks}{drawn}</div>"
    cells = table(["Taken from elsewhere", "loss", "rise", "share of the loss"], rows)
    alarm = alarms([figures.alarms(run)[0]]) if use["warning"] else ""
    return section(
        "Does it use its images?", lead, alarm, f'<div class="two"><div>{cells}</div>{chart}</div>'
    )


# --------------------------------------------------------------------------------------------- time
def time(runs: Sequence[RunData]) -> str:
    """Seconds of every phase, and the parts of a mean RL iteration."""
    totals: dict[str, dict[str, float]] = {}
    for r in runs:
        for name, phase in r.phases.items():
            row = totals.setdefault(name, {})
            for key in ("seconds", "episodes", "control_steps"):
                if isinstance(phase.get(key), int | float):
                    row[key] = row.get(key, 0) + phase[key]
    shown = {n: t for n, t in totals.items() if t.get("seconds", 0) > 0}
    if not shown:
        return ""
    total = sum(t["seconds"] for t in shown.values())
    parts = [
        (words.phase(n), t["seconds"], f"{words.phase(n)}: {words.clock(t['seconds'])}")
        for n, t in shown.items()
    ]
    rows = []
    for i, (name, t) in enumerate(shown.items()):
        so_far = words.progress(runs[0].phases.get(name, {})) if len(runs) == 1 else ""
        mark = f'<span class="legend inline"><i class="c {colour(i)}"></i></span>{escape(words.phase(name))}'
        steps = t.get("control_steps", 0)
        cells = [
            mark + (f" <small>{escape(so_far)}</small>" if so_far else ""),
            words.clock(t["seconds"]),
        ]
        cells += [percent(t["seconds"] / total), words.count(t.get("episodes")), words.count(steps)]
        rows.append(("", [*cells, f"{steps / t['seconds']:.0f}" if steps else "–"]))
    heads = ["Phase", "time", "share", "episodes", "control steps", "control steps/s"]
    lead = f"{words.clock(total)} in all" + (
        f", {len(runs)} runs together." if len(runs) > 1 else "."
    )
    bar = both_widths(
        lambda width: stacked_bar(parts, width=width, height=34 if width > 600 else 26)
    )
    return section("Where the time goes", lead, bar, table(heads, rows), _iteration(runs))


def _iteration(runs: Sequence[RunData]) -> str:
    """One mean RL iteration split into its parts."""

    def mean(key: str) -> float:
        values = [v for v in (r.mean("rl", key) for r in runs) if v is not None]
        return sum(values) / len(values) if values else 0.0

    rollout, policy, wait = (
        mean("engine/seconds"),
        mean("engine/policy_seconds"),
        mean("engine/wait_seconds"),
    )
    learn, reward = mean("time/update"), mean("time/reward")
    if rollout + learn <= 0:
        return ""
    amounts = {
        "policy": policy,
        "waiting for the simulator": wait,
        "bookkeeping": max(0.0, rollout - policy - wait),
        "reward": reward,
        "learning": learn,
    }
    parts = [(name, s, f"{name}: {s:.2f} s") for name, s in amounts.items() if s > 0]
    marks = [(colour(i), f"{name} {seconds:.1f} s") for i, (name, seconds, _) in enumerate(parts)]
    facts = []
    use, rate, batch = (
        mean(f"engine/{k}") for k in ("env_utilisation", "control_steps_per_second", "policy_batch")
    )
    if rate:
        facts.append(f"{rate:.0f} control steps/s while acting")
    if use:
        facts.append(f"simulators busy {percent(use)} of that time")
    if batch:
        facts.append(f"{batch:.1f} observations per policy call")
    bar = both_widths(
        lambda width: stacked_bar(parts, width=width, height=26 if width > 600 else 22)
    )
    return (
        f'<h3 class="gap">A mean RL iteration ({rollout + learn + reward:.1f} '
        f's)</h3>{legend(marks)}{bar}<p class="soft">{escape("; ".join(facts))}</p>'
    )


# ---------------------------------------------------------------------------------------- to repeat
def versions(run: RunData, title: str = "To repeat this run", *more: str) -> str:
    """The machine, the packages and the exact configuration."""
    v = run.versions
    rows = []
    for key, value in v.items():
        if key == "packages" or value in ("", [], None):
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        text += " GiB" if key == "memory_gib" else ""
        rows.append(
            f"<tr><td>{escape(key.removesuffix('_gib').replace('_', ' '))}</td><td>{escape(text)}</td></tr>"
        )
    packages = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(str(x))}</td></tr>"
        for k, x in v.get("packages", {}).items()
    )
    tables = (f'<table class="plain">{t}</table>' for t in ("".join(rows), packages))
    computer = f'<div class="two">{"".join(tables)}</div>' if v else ""
    config = (
        f"<details{' open' if len(run.config) < 1500 else ''}><summary>Exact "
        f"configuration</summary><pre>{escape(run.config)}</pre></details>"
    )
    return section(title, "", computer, config if run.config else "", *more)
