"""``report.html`` and ``summary.json`` of a run folder (`metrics.py` says what one holds) or of a
folder of runs.

The page is one file that asks the network for nothing: style, charts (SVG) and videos (base64) are
inside.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vla_rl.display import words
from vla_rl.display.charts import (
    Interval,
    Series,
    episode_squares,
    interval_chart,
    line_chart,
    percent,
    short,
)
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import summarise, task_gap_text
from vla_rl.files import write_whole
from vla_rl.monitoring.metrics import write_json
from vla_rl.reporting import actions, cluster, figures, offline, sections, study_page
from vla_rl.reporting.diagnostics import declared, warnings
from vla_rl.reporting.runs import RunData, find_runs, is_run, load_run
from vla_rl.reporting.study import group_runs

REPORT_FILE, SUMMARY_FILE = "report.html", "summary.json"


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` and ``summary.json`` into ``run_dir``; returns the page's path.

    Raises `UserError` where the folder holds no run.
    """
    run_dir = Path(run_dir)
    return _write([load_run(path) for path in find_runs(run_dir)], run_dir)


def write_comparison(run_dirs: Sequence[Path], folder: Path) -> Path:
    """``report.html`` and ``summary.json`` of the runs of several folders, in ``folder``; returns
    the page's path.

    Raises `UserError` where one holds no run, and where ``folder`` is itself a run.
    """
    if is_run(folder):
        raise UserError(
            f"{folder} is a run, whose own report would be overwritten: name another "
            "folder for the comparison"
        )
    paths = dict.fromkeys(path.resolve() for given in run_dirs for path in find_runs(given))
    return _write([load_run(path) for path in paths], folder)


def _write(runs: list[RunData], run_dir: Path) -> Path:
    name = run_dir.resolve().name
    if len(runs) == 1:
        head, found, body = _verdict(runs[0])[0], summary(runs[0]), run_sections(runs[0], name)
    else:
        groups = group_runs(runs)
        found = study_page.summary(groups)
        head, body = found["verdict"], study_page.study_sections(groups, run_dir, name)
    write_json(run_dir / SUMMARY_FILE, found)
    write_whole(run_dir / REPORT_FILE, fill(f"{head} · {name}", body))
    return run_dir / REPORT_FILE


_BESIDE = "Written by vla-rl. The same figures for scripts: summary.json beside this page."


def fill(title: str, body: list[str], footer: str = _BESIDE) -> str:
    """The page as text, from its sections."""
    template = (
        importlib.resources.files("vla_rl")
        .joinpath("report_template.html")
        .read_text(encoding="utf-8")
    )
    body = [*body, f"<footer>{footer}</footer>"]
    parts = {"title": escape(title), "body": "\n".join(s for s in body if s)}
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template)


def summary(run: RunData) -> dict[str, Any]:
    """``summary.json`` of one run."""
    found = figures.run_summary(run)
    seconds = {"seconds": found["seconds"], "peak_memory_bytes": found["peak_memory_bytes"]}
    only = {name: summarise(result.outcomes) for name, result in run.evaluations.items()}
    if judged := actions.summary(run):
        found["actions"] = judged
    if rounds := offline.rounds(run):
        found["offline"] = rounds
    return {
        "verdict": _verdict(run)[0].replace("\u00a0", " "),
        "seeds": [run.seed],
        **found,
        "runs": [{**figures.identity(run), "evaluations": only, **seconds}],
    }


def run_sections(run: RunData, name: str) -> list[str]:
    """The page of one run."""
    head, evidence = _verdict(run)
    seed = "" if run.seed is None else f"seed {run.seed}"
    return [
        sections.header((name, seed, sections.machine(run)), head, evidence),
        sections.alarms(figures.alarms(run)),
        _tiles(run),
        _success(run),
        _tests(run),
        sections.videos(
            run,
            "Held-out episodes in real time, the same initial states in each video. A frame turns "
            "green when the task succeeds and red when time runs out.",
        ),
        offline.section(run),
        _failures(run),
        actions.section(run),
        sections.notes(warnings([run])),
        sections.section(
            "Learning", _best(run), sections.success_curve(run), sections.diagnostics([run])
        ),
        sections.image_use(run),
        _tasks(run),
        sections.time([run]),
        cluster.section(run),
        _everything(run),
        sections.versions(run),
    ]


def _verdict(run: RunData) -> tuple[str, str]:
    """Success where it was measured, else how right its actions are."""
    return (None if run.names else actions.verdict(run)) or figures.verdict(run)


def _best(run: RunData) -> str:
    if not run.best:
        return ""
    which = words.best(run.best)
    return (
        f"{escape(which[0].upper() + which[1:])}, did best and is kept as "
        "<code>checkpoints/best</code>. The best of several rates on the same episodes flatters: "
        "other episodes judge it (the phase <code>eval_test</code>)."
    )


def _tiles(run: RunData) -> str:
    tiles: list[tuple[str, str, str]] = []
    ends = figures.before_after(run)
    if ends is not None:
        before, after = (run.evaluations[n].success_rate for n in ends)
        what = f"success, {words.evaluation(ends[0])} → {words.evaluation(ends[1])}"
        tiles.append((f"{percent(before)} → {percent(after)}", what, ""))
        c = figures.paired(run)
        if c is not None:
            style = ("up" if c.difference > 0 else "down") if c.significant else ""
            tiles.append(
                (f"{words.signed(c.difference * 100)} points", "on the same episodes", style)
            )
    elif run.names:
        tiles.append((percent(run.evaluations[run.names[0]].success_rate), "success", ""))
    if run.seconds:
        tiles.append((words.clock(run.seconds), "total time", ""))
    rl = run.phases.get("rl", {})
    if so_far := words.progress(rl):
        tiles.append(
            (f"{rl['done']} of {rl['of']}", "RL " + so_far.partition(f"{rl['of']} ")[2], "down")
        )
    steps, seconds = int(rl.get("control_steps") or 0), rl.get("seconds")
    if steps and seconds:
        tiles.append((short(steps), "control steps of RL", ""))
        tiles.append((f"{steps / seconds:.0f} /s", "control steps, learning included", ""))
    if run.peak_memory_bytes:
        tiles.append((words.gibibytes(run.peak_memory_bytes), "peak memory", ""))
    return sections.tiles(tiles)


def _success(run: RunData) -> str:
    if not run.names:
        return ""
    rows, details = [], []
    for name in run.names:
        s = summarise(run.evaluations[name].outcomes)
        label = words.evaluation(name)
        low, high = percent(s["low"]), percent(s["high"])
        note = (
            f"{label}: {s['successes']} of {s['episodes']} = {percent(s['rate'])}, {low} to {high}"
        )
        rows.append(
            Interval(
                label,
                s["rate"],
                s["low"],
                s["high"],
                sections.evaluation_style(run.names, name),
                note,
            )
        )
        details.append(
            f"<b>{escape(label)}</b> solved {s['successes']} of {s['episodes']} "
            f"({percent(s['rate'])}; {s['low'] * 100:.1f} to {s['high'] * 100:.1f} %)"
        )
    first = run.evaluations[run.names[0]]
    how = "the most likely actions" if first.deterministic else "sampled actions"
    where = (
        "initial states that training never sees"
        if first.split == "held_out"
        else "training initial states"
    )
    where = run.phases.get(f"eval_{run.names[0]}", {}).get("initial_states") or where
    lead = (
        f"Evaluated with {how} on {where}. Lines mark 95 % Wilson intervals. {', '.join(details)}."
    )
    phase = run.phases.get(f"eval_{run.names[0]}", {})
    if conditions := phase.get("conditions"):
        lead += f" Conditions: {escape(conditions)}."
    if benchmark := phase.get("benchmark", {}).get("line"):
        lead += f" Benchmark: {escape(benchmark)}."
    for name in run.names:
        if gap := figures.gap_of(run, name):
            lead += f" <b>{escape(words.evaluation(name))}</b>, {escape(task_gap_text(gap))}."
    height = 46 if len(rows) < 5 else 30
    chart = sections.both_widths(
        lambda width: interval_chart(rows, width=min(width, 760), row_height=height)
    )
    return sections.section("Success", lead, chart, _squares(run))


def _tests(run: RunData) -> str:
    """The last and the best policy on states that chose nothing."""
    cells = []
    for name, result in run.tests.items():
        s = summarise(result.outcomes)
        row = (
            escape(words.tested(name)),
            f"{s['successes']} of {s['episodes']}",
            percent(s["rate"]),
            f"{percent(s['low'])} to {percent(s['high'])}",
        )
        cells.append(("", row))
    lead = (
        "Held-out initial states that nothing was chosen by, met once, after training. The figures "
        "above are of those that <code>checkpoints/best</code> is chosen by."
    )
    heads = ("policy", "solved", "success", "95 % interval")
    return sections.section("On the test set", lead, sections.table(heads, cells)) if cells else ""


def _squares(run: RunData) -> str:
    """A square for every episode that both policies met."""
    ends, c, pairs = figures.before_after(run), figures.paired(run), figures.paired_outcomes(run)
    if ends is None or c is None:
        return ""
    a, b = (words.evaluation(name) for name in ends)
    kinds = {
        (True, True): ("both", f"solved by both: {c.both}"),
        (False, True): ("won", f"only by {b}: {c.only_b}"),
        (True, False): ("lost", f"only by {a}: {c.only_a}"),
        (False, False): ("neither", f"by neither: {c.neither}"),
    }
    states = []
    for before, after in pairs:
        style, text = kinds[(before.success, after.success)]
        states.append((style, f"{before.task_id} #{before.init_state_id}, {text.split(':')[0]}"))
    order = {"both": 0, "won": 1, "lost": 2, "neither": 3}
    states.sort(key=lambda s: order[s[0]])
    size, columns = (20, 50) if len(states) <= 200 else (14, 75)
    wide = episode_squares(states, size=size, columns=columns)
    narrow = episode_squares(states, size=size, columns=25)
    return (
        '<h3 class="gap">The same episodes, before and '
        f'after</h3>{sections.legend(list(kinds.values()))}<div class="wide">{wide}</div><div '
        f'class="narrow">{narrow}</div>'
    )


def _failures(run: RunData) -> str:
    names = [n for n in dict.fromkeys(run.names[:1] + run.names[-1:]) if n in run.failures]
    counts = {n: run.failures[n][""] for n in names}
    lead = "Failed held-out episodes by how far they got"
    lead += ", before and after: what RL mended, and what is left." if len(names) > 1 else "."
    shown = sections.failure_figures(counts, {n: run.evaluations[n].episodes for n in names})
    return sections.section(
        "How it fails", lead if shown else "", shown, sections.failure_clips(run)
    )


def _tasks(run: RunData) -> str:
    names = run.names
    if not names:
        return ""
    rows_of = {name: figures.per_task(run, name) for name in names}
    tasks = list(dict.fromkeys(t for rows in rows_of.values() for t in rows))
    columns = ("success", "95 % interval", "steps", "jerk")
    head = "".join(
        f'<th colspan="4" class="group">{escape(words.evaluation(n))}</th>' for n in names
    )
    heads = "".join(f"<th>{c}</th>" for _ in names for c in columns)
    body = []
    lines = [(task, {n: rows_of[n].get(task) for n in names}, "") for task in tasks]
    keys = {task: f"eval/success/{task}" for task in tasks} | {"all tasks": "eval/success"}
    on_the_way = {
        task: [rate for rate in run.series("rl", key)[1] if rate is not None]
        for task, key in keys.items()
    }
    tracked = any(on_the_way[task] for task in tasks)
    if tracked:
        head, heads = f'{head}<th class="group"></th>', f"{heads}<th>on the way, %</th>"
    if len(tasks) > 1:
        lines.append(
            ("all tasks", {n: summarise(run.evaluations[n].outcomes) for n in names}, "total")
        )
    for task, rows, style in lines:
        cells = [f"<td>{escape(task)}</td>"]
        for name in names:
            s = rows[name]
            if s is None:
                cells.append("<td>–</td>" * 4)
                continue
            css = sections.evaluation_style(names, name)
            bar = f'<span class="mini {css}"><i style="width:{s["rate"] * 100:.0f}%"></i></span>'
            cells.append(
                f"<td>{bar}{percent(s['rate'])} "
                f"<small>{s['successes']}/{s['episodes']}</small></td>"
                f"<td>{s['low'] * 100:.0f}–{s['high'] * 100:.0f} %</td>"
                f"<td>{words.optional(s['control_steps_to_success'])}</td>"
                f"<td>{words.optional(s['mean_jerk'])}</td>"
            )
        if tracked:
            cells.append(
                f"<td>{', '.join(f'{rate * 100:.0f}' for rate in on_the_way[task]) or '–'}</td>"
            )
        body.append(f'<tr class="{style}">{"".join(cells)}</tr>')
    last = run.evaluations[names[-1]]
    lead = (
        "Steps: mean control steps of successful episodes. Jerk: mean size of the third difference "
        f"of the executed actions × control rate³ ({escape(last.jerk_unit)}); lower is smoother. "
        f"One decision of the {escape(words.evaluation(names[-1]))} policy takes "
        f"{last.latency_s * 1e3:.1f} ms alone and {last.seconds_per_decision * 1e3:.2f} ms in "
        "batches."
    )
    table = (
        "<table><tr><th "
        f"class='group'></th>{head}</tr><tr><th>Task</th>{heads}</tr>{''.join(body)}</table>"
    )
    return sections.section("Tasks", lead, f'<div class="scroll">{table}</div>')


def _everything(run: RunData) -> str:
    """All other metrics, folded away: curves for what changes, a list for what does not."""
    cells, constants = [], []
    taken = {(phase, d.key) for phase, d in declared([run])} | {("rl", "rollout/success")}
    for phase in dict.fromkeys(m["phase"] for m in run.metrics):
        for key in run.keys(phase):
            if (phase, key) in taken:
                continue
            x, y = run.series(phase, key)
            values = {v for v in y if v is not None}
            if len(values) < 2:
                constants.append(
                    ("", [f"{escape(phase)} · {escape(key)}", ", ".join(map(short, values)) or "–"])
                )
                continue
            chart = line_chart([Series(run.label, x, y, "s0")], width=300, height=140, label=key)
            cells.append(f"<div><h3>{escape(key)}</h3><p>{escape(phase)}</p>{chart}</div>")
    charts = (
        f"<details><summary>{len(cells)} more curves</summary><div "
        f"class='charts'>{''.join(cells)}</div></details>"
    )
    table = sections.table(["Metric", "value"], constants)
    listed = f"<details><summary>{len(constants)} constant values</summary>{table}</details>"
    return sections.section(
        "All other metrics", "", charts if cells else "", listed if constants else ""
    )
