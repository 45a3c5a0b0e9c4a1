"""``report.html`` and ``summary.json`` of any run folder (see `vla_rl.metrics` for what a run folder holds).

The page is one file that asks the network for nothing: style, charts (SVG) and videos (base64) are inside. A folder of
several runs (``seed_0``, ``seed_1`` …) gives one page over all of them.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vla_rl.charts import (
    Interval,
    Series,
    episode_squares,
    interval_chart,
    line_chart,
    percent,
    running_mean,
    short,
    stacked_bar,
)
from vla_rl.errors import UserError
from vla_rl.evaluate import EvaluationResult, compare, summarise, task_gap, task_gap_text
from vla_rl.metrics import METRICS_FILE, read_metrics, write_json
from vla_rl.statistics import PairedComparison, compare_paired

REPORT_FILE, SUMMARY_FILE = "report.html", "summary.json"
MAX_VIDEO_BYTES = 25 * 2**20
_WINDOW = 5
_EVAL_ORDER = {"start": 0, "base": 0, "sft": 1, "rl": 8, "distill": 9}
_EVAL_LABELS = {"start": "Start", "base": "Base", "sft": "SFT", "rl": "RL", "distill": "Distilled"}
_PHASE_LABELS = {
    "collect": "demonstrations", "sft": "SFT", "eval_sft": "evaluation before", "reward": "reward model", "rl": "RL",
    "eval_rl": "evaluation after", "report": "report",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnostic:
    """A chart of one metric: which keys it takes (first that matches), its title, and how to read it."""

    phase: str
    pattern: str
    title: str
    note: str
    format: Callable[[float], str] = short
    smooth: bool = False


DIAGNOSTICS = (
    Diagnostic(
        "sft",
        r"(sft|imitation)/loss$|^loss$",
        "SFT loss",
        "Falls and flattens; how far is set by the budget.",
        smooth=True,
    ),
    Diagnostic(
        "sft", r"accuracy$", "SFT token accuracy", "Share of action tokens predicted exactly.", percent, smooth=True
    ),
    Diagnostic("rl", r"rollout/control_steps_to_success$", "Control steps to success", "Shorter means more decisive."),
    Diagnostic(
        "rl",
        r"approx_kl$|/kl$",
        "KL per iteration",
        "How far one iteration moves the policy; spikes are too large steps.",
    ),
    Diagnostic("rl", r"entropy$", "Entropy", "Randomness of the actions. A collapse to 0 ends exploration."),
    Diagnostic(
        "rl",
        r"clip_fraction$",
        "Clip fraction",
        "Share of ratios at the clip; above 0.3 the steps are too large.",
        percent,
    ),
    Diagnostic(
        "rl",
        r"reward/progress_end$",
        "Progress by the reward model",
        "How episodes end in its eyes; it should rise with success, not without it.",
        percent,
    ),
    Diagnostic(
        "rl", r"explained_variance$", "Explained variance", "Quality of the critic: 1 is perfect, 0 or less is useless."
    ),
    Diagnostic(
        "rl",
        r"behavior_gap_mean$",
        "Actor–learner gap",
        "Log-probs when acting against when learning; should be near 0.",
    ),
    Diagnostic(
        "rl", r"(^|/)ess$", "Effective sample size", "Share of the data that still counts after importance weighting."
    ),
)


# -------------------------------------------------------------------------------------------------------------- reading
@dataclass
class RunData:
    """What a run folder holds. ``problems`` are files that could not be read."""

    path: Path
    seed: int | None
    config: str
    versions: dict[str, Any]
    phases: dict[str, dict[str, Any]]
    peak_memory_bytes: int
    metrics: list[dict[str, Any]]
    evaluations: dict[str, EvaluationResult]
    problems: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.path.name if self.seed is None else f"seed {self.seed}"

    def series(self, phase: str, key: str) -> tuple[list[float], list[float | None]]:
        """Steps and values of a metric."""
        rows = [r for r in self.metrics if r["phase"] == phase and key in r]
        values = [r[key] if isinstance(r[key], int | float) and not isinstance(r[key], bool) else None for r in rows]
        return [float(r["step"]) for r in rows], values

    def keys(self, phase: str) -> list[str]:
        found: dict[str, None] = {}
        for r in self.metrics:
            if r["phase"] == phase:
                found |= {k: None for k, v in r.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return [k for k in found if k not in ("step", "time_s")]

    def mean(self, phase: str, key: str) -> float | None:
        values = [v for v in self.series(phase, key)[1] if v is not None]
        return sum(values) / len(values) if values else None


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS_FILE, "phases.json")) or any(folder.glob("eval_*.json"))


def find_runs(folder: str | Path) -> list[Path]:
    """The runs of a folder: its ``seed_*`` sub-folders, else itself, else whatever sub-folders are runs.

    Raises `UserError` where there is none.
    """
    folder = Path(folder)
    seeds = sorted((p for p in folder.glob("seed_*") if is_run(p)), key=lambda p: (len(p.name), p.name))
    if seeds:
        return seeds
    if is_run(folder):
        return [folder]
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and is_run(p)) if folder.is_dir() else []
    if not inner:
        raise UserError(
            f"{folder} is not a run: it holds no {METRICS_FILE}, phases.json or eval_*.json. Name a folder that "
            f"'vla-rl quickstart' or 'vla-rl train' wrote, such as outputs/quickstart."
        )
    return inner


def load_run(folder: str | Path) -> RunData:
    """Read a run folder; what is missing stays empty, what is damaged is noted in ``problems``."""
    folder, problems = Path(folder), []

    def read(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.exists():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return value if isinstance(value, dict) else {}
        except (OSError, json.JSONDecodeError) as error:
            problems.append(f"{name} could not be read ({error}).")
            return {}

    phases = read("phases.json")
    evaluations = {}
    for path in sorted(folder.glob("eval_*.json")):
        try:
            evaluations[path.stem.removeprefix("eval_")] = EvaluationResult.load(path)
        except UserError as error:
            problems.append(str(error))
    config = (folder / "config.yaml").read_text(encoding="utf-8") if (folder / "config.yaml").exists() else ""
    seed = re.search(r"^seed:\s*(-?\d+)\s*$", config, re.MULTILINE)
    from_name = re.fullmatch(r"seed_(-?\d+)", folder.name)
    peak = phases.get("peak_memory_bytes", 0)
    return RunData(
        path=folder,
        seed=int(seed[1]) if seed else int(from_name[1]) if from_name else None,
        config=config,
        versions=read("versions.json"),
        phases={name: value for name, value in phases.items() if isinstance(value, dict)},
        peak_memory_bytes=int(peak) if isinstance(peak, int | float) else 0,
        metrics=read_metrics(folder / METRICS_FILE),
        evaluations=dict(sorted(evaluations.items(), key=lambda item: (_EVAL_ORDER.get(item[0], 5), item[0]))),
        problems=problems,
    )


# ------------------------------------------------------------------------------------------------------------- figures
def evaluation_names(runs: Sequence[RunData]) -> list[str]:
    """Names of the evaluations that every run has, in the order of the phases."""
    names = [n for n in runs[0].evaluations if all(n in r.evaluations for r in runs)]
    return names


def pooled(runs: Sequence[RunData], name: str) -> dict[str, Any]:
    """`summarise` over the episodes of all runs."""
    return summarise([o for r in runs for o in r.evaluations[name].outcomes])


def pooled_task_gap(runs: Sequence[RunData], name: str) -> dict[str, Any] | None:
    """`task_gap` over the episodes of all runs; None without held-out tasks, or where runs hold out different ones."""
    held_out = {tuple(r.evaluations[name].held_out_tasks) for r in runs}
    return task_gap([o for r in runs for o in r.evaluations[name].outcomes], held_out.pop()) if len(held_out) == 1 else None


def paired(runs: Sequence[RunData], before: str, after: str) -> PairedComparison | None:
    """Before against after on the episodes both saw, over all runs; None where they share none."""
    a: list[bool] = []
    b: list[bool] = []
    for r in runs:
        first, second = r.evaluations[before], r.evaluations[after]
        try:
            compare(first, second)
        except UserError:
            return None
        of_second = {o.key: o.success for o in second.outcomes}
        for o in first.outcomes:
            if o.key in of_second:
                a.append(o.success)
                b.append(of_second[o.key])
    return compare_paired(a, b)


def summary(runs: Sequence[RunData]) -> dict[str, Any]:
    """The figures of the page, for scripts: success with intervals per evaluation, in all and per run; cost."""
    names = evaluation_names(runs)
    evaluations = {
        name: {
            **pooled(runs, name),
            "split": runs[0].evaluations[name].split,
            "tasks": _task_rows(runs, name),
            "task_gap": pooled_task_gap(runs, name),
        }
        for name in names
    }
    comparison = paired(runs, names[0], names[-1]) if len(names) > 1 else None
    return {
        "verdict": verdict(runs)[0].replace("\u00a0", " "),
        "seeds": [r.seed for r in runs],
        "evaluations": evaluations,
        "comparison": None if comparison is None else {"before": names[0], "after": names[-1], **comparison.to_dict()},
        "seconds": sum(_seconds(r) for r in runs),
        "episodes": sum(_total(r, "episodes") for r in runs),
        "control_steps": sum(_total(r, "control_steps") for r in runs),
        "peak_memory_bytes": max(r.peak_memory_bytes for r in runs),
        "runs": [
            {
                "folder": r.path.name,
                "seed": r.seed,
                "evaluations": {name: summarise(e.outcomes) for name, e in r.evaluations.items()},
                "phases": r.phases,
                "seconds": _seconds(r),
                "peak_memory_bytes": r.peak_memory_bytes,
                "git_commit": r.versions.get("git_commit", ""),
            }
            for r in runs
        ],
    }


def _seconds(run: RunData) -> float:
    return sum(float(p.get("seconds") or 0) for p in run.phases.values())


def _total(run: RunData, key: str) -> int:
    return sum(int(p.get(key) or 0) for p in run.phases.values())


def _task_rows(runs: Sequence[RunData], name: str) -> dict[str, dict[str, Any]]:
    tasks: dict[str, list[Any]] = {}
    for r in runs:
        for o in r.evaluations[name].outcomes:
            tasks.setdefault(o.task_id, []).append(o)
    return {task: summarise(outcomes) for task, outcomes in tasks.items()}


def verdict(runs: Sequence[RunData]) -> tuple[str, str]:
    """What the run achieved, in a plain sentence, and the evidence in a second one."""
    names = evaluation_names(runs)
    if not names:
        return "This run has no evaluation yet", "Success figures appear once an evaluation phase is complete."
    after = pooled(runs, names[-1])
    split = runs[0].evaluations[names[-1]].split
    where = f"{'held-out' if split == 'held_out' else 'training'} episodes"
    how_many = f"{after['episodes']} {where}" + (f" ({len(runs)} runs)" if len(runs) > 1 else "")
    if len(names) == 1:
        who = _name(names[0])
        return (
            f"The {who} policy solves {percent(after['rate'])} of {how_many}",
            f"{after['successes']} of {after['episodes']} episodes, 95 % interval {percent(after['low'])} to "
            f"{percent(after['high'])}.",
        )
    before, c = pooled(runs, names[0]), paired(runs, names[0], names[-1])
    a, b = _name(names[0]), _name(names[-1])
    rates = f"from {percent(before['rate'])} to {percent(after['rate'])}"
    if c is None:
        return (
            f"Success: {percent(before['rate'])} ({a}) and {percent(after['rate'])} ({b})",
            "The two were evaluated on different episodes, so they cannot be compared pairwise.",
        )
    points = (
        f"{_signed(c.difference * 100)} points on the same episodes (95 % interval {_signed(c.difference_low * 100)} "
        f"to {_signed(c.difference_high * 100)}; exact McNemar test, {_p_value(c.p_value)}). {b} alone solved "
        f"{c.only_b} {_plural('episode', c.only_b)}, {a} alone {c.only_a}."
    )
    if not c.significant:
        same = before["successes"] == after["successes"]
        head = f"{b} left success at {percent(after['rate'])}" if same else f"{b} moved success {rates}"
        return f"{head} on {how_many}: no more than chance explains", points
    return f"{b} {'raised' if c.difference > 0 else 'lowered'} success {rates} on {how_many}", points


def _name(evaluation: str) -> str:
    return _EVAL_LABELS.get(evaluation, evaluation)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"


def _signed(value: float) -> str:
    text = f"{value:+.0f}"
    return "0" if text in ("+0", "-0") else text.replace("-", "−")


def _p_value(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def _clock(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02d} min"


def warnings(runs: Sequence[RunData]) -> list[str]:
    """What a reader should know before trusting the figures, and what may be done about it; equal notes are merged."""
    who: dict[str, list[str]] = {}
    for r in runs:
        for note in dict.fromkeys(_run_warnings(r)):
            who.setdefault(note, []).append(r.label)
    if len(runs) == 1:
        return list(who)
    return [note if len(labels) == len(runs) else f"{', '.join(labels)}: {note}" for note, labels in who.items()]


def _run_warnings(r: RunData) -> list[str]:
    notes = list(r.problems)
    for name, phase in r.phases.items():
        if phase.get("complete") is False and name != "report":
            notes.append(f"Phase “{name}” is not complete; the same command resumes it.")
    for phase, key in [(p, k) for p in dict.fromkeys(m["phase"] for m in r.metrics) for k in r.keys(p)]:
        values = [v for v in r.series(phase, key)[1] if v is not None]
        total, most = int(sum(values)), int(max(values, default=0))
        if key.endswith("skipped_updates") and most > 0:  # a running count
            notes.append(
                f"{most} {_plural('update', most)} of {_phase(phase)} {'was' if most == 1 else 'were'} skipped because "
                f"the loss or gradient was not finite. Lower the learning rate if there are many."
            )
        elif key.endswith("retries") and total > 0:
            notes.append(f"{total} {_plural('episode', total)} of {_phase(phase)} ran again after a simulator failure.")
        elif key.endswith("restarts") and total > 0:
            notes.append(f"{total} {_plural('restart', total)} of simulator workers during {_phase(phase)}.")
    clipped, critic = _late(r, r"clip_fraction$"), _late(r, r"explained_variance$")
    if clipped is not None and clipped > 0.3:
        notes.append(
            f"Over the last iterations {percent(clipped)} of the ratios were clipped: the updates are too large. Lower "
            f"the learning rate or the number of epochs."
        )
    if critic is not None and critic < 0:
        notes.append("The critic explains nothing (explained variance below 0): more critic updates or warm-up help.")
    success = [v for v in r.series("rl", "rollout/success")[1] if v is not None]
    notes += _reward_hacking(r)
    if success and max(success) == 0:
        notes.append(
            "No training episode ever succeeded, so RL had nothing to learn from: start from a stronger SFT policy."
        )
    if str(r.versions.get("git_commit", "")).endswith("+changes"):
        notes.append("The source had changes that are in no commit, so the commit alone does not reproduce the run.")
    return notes


def _reward_hacking(r: RunData, gap: float = 0.2) -> list[str]:
    """A warning where the reward model's opinion of how episodes end has outgrown success by more than ``gap``."""
    keys = ("reward/progress_end", "rollout/success")
    rows = [m for m in r.metrics if m["phase"] == "rl" and all(m.get(k) is not None for k in keys)]
    pairs = [tuple(m[k] for k in keys) for m in rows]
    if len(pairs) < 4:
        return []
    part = max(1, min(10, len(pairs) // 3))
    first, last = ([sum(x) / part for x in zip(*some)] for some in (pairs[:part], pairs[-part:]))
    growth = (last[0] - last[1]) - (first[0] - first[1])
    if growth <= gap or last[0] <= first[0]:
        return []
    return [
        f"The reward model may be exploited: its mean progress at the end of an episode went from {first[0]:.2f} to "
        f"{last[0]:.2f} while success went from {percent(first[1])} to {percent(last[1])}. Watch the videos; refit the "
        f"reward (reward_check.refit_every) or lower its weight."
    ]


def _phase(name: str) -> str:
    return _PHASE_LABELS.get(name, name)


def _late(run: RunData, pattern: str, count: int = 10) -> float | None:
    """Mean of an RL metric over the last iterations."""
    values = [v for v in run.series("rl", _match(run, "rl", pattern) or "")[1][-count:] if v is not None]
    return sum(values) / len(values) if values else None


# ------------------------------------------------------------------------------------------------------------- the page
def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` and ``summary.json`` into ``run_dir``; returns the page's path.

    Raises `UserError` where the folder holds no run.
    """
    run_dir = Path(run_dir)
    runs = [load_run(path) for path in find_runs(run_dir)]
    write_json(run_dir / SUMMARY_FILE, summary(runs))
    page = render(runs, run_dir.resolve().name)
    part = run_dir / f".{REPORT_FILE}.part"
    part.write_text(page, encoding="utf-8")
    part.replace(run_dir / REPORT_FILE)
    return run_dir / REPORT_FILE


def render(runs: Sequence[RunData], name: str) -> str:
    """The page as text."""
    head, evidence = verdict(runs)
    notes = warnings(runs)
    sections = [
        _header(runs, name, head, evidence),
        _tiles(runs),
        _success(runs),
        _videos(runs),
        _notes(notes),
        _learning(runs),
        _tasks(runs),
        _time(runs),
        _everything(runs),
        _versions(runs),
        "<footer>Written by vla-rl. The same figures for scripts: summary.json beside this page.</footer>",
    ]
    template = importlib.resources.files("vla_rl").joinpath("report_template.html").read_text(encoding="utf-8")
    parts = {"title": escape(f"{head} · {name}"), "body": "\n".join(s for s in sections if s)}
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template)


def _section(title: str, lead: str, *content: str) -> str:
    body = "\n".join(c for c in content if c)
    if not body:
        return ""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def _header(runs: Sequence[RunData], name: str, head: str, evidence: str) -> str:
    v = runs[0].versions
    cores = f"{v['cpu_cores']} core{'s' if v['cpu_cores'] != 1 else ''}" if "cpu_cores" in v else ""
    machine = ", ".join(str(x) for x in [*v.get("gpus", []), v.get("cpu", ""), cores] if x)
    seeds = [str(r.seed) for r in runs if r.seed is not None]
    seed = f"{_plural('seed', len(seeds))} {', '.join(seeds)}" if seeds else ""
    line = " · ".join(escape(x) for x in (name, seed, machine) if x)
    return f'<header><p class="run">{line}</p><h1>{escape(head)}</h1><p class="sub">{escape(evidence)}</p></header>'


def _tiles(runs: Sequence[RunData]) -> str:
    tiles: list[tuple[str, str, str]] = []
    names = evaluation_names(runs)
    if len(names) > 1:
        before, after = pooled(runs, names[0]), pooled(runs, names[-1])
        tiles.append(
            (
                f"{percent(before['rate'])} → {percent(after['rate'])}",
                f"success, {_name(names[0])} → {_name(names[-1])}",
                "",
            )
        )
        c = paired(runs, names[0], names[-1])
        if c is not None:
            style = ("up" if c.difference > 0 else "down") if c.significant else ""
            tiles.append((f"{_signed(c.difference * 100)} points", "on the same episodes", style))
    elif names:
        tiles.append((percent(pooled(runs, names[0])["rate"]), "success", ""))
    seconds = sum(_seconds(r) for r in runs)
    if seconds:
        tiles.append((_clock(seconds / len(runs)), "total time" + (" per run" if len(runs) > 1 else ""), ""))
    rl = [r.phases["rl"] for r in runs if r.phases.get("rl", {}).get("seconds")]
    steps = sum(int(p.get("control_steps") or 0) for p in rl)
    if steps:
        tiles.append((short(steps / len(rl)), "control steps of RL" + (" per run" if len(runs) > 1 else ""), ""))
        tiles.append((f"{steps / sum(p['seconds'] for p in rl):.0f} /s", "control steps, learning included", ""))
    peak = max(r.peak_memory_bytes for r in runs)
    if peak:
        tiles.append((f"{peak / 2**30:.1f} GiB", "peak memory", ""))
    cells = (
        f'<div class="tile {style}"><b>{escape(big)}</b><span>{escape(small)}</span></div>'
        for big, small, style in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return _section("Worth knowing", "", f'<ul class="notes">{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>')


def _eval_style(names: Sequence[str], name: str) -> str:
    if name == names[-1]:
        return "after"
    return "before" if name == names[0] else f"s{names.index(name) % 5 + 1}"


def _success(runs: Sequence[RunData]) -> str:
    names = evaluation_names(runs)
    if not names:
        return ""
    rows = []
    for r in runs if len(runs) > 1 else ():
        for name in names:
            s = summarise(r.evaluations[name].outcomes)
            rows.append(_interval_row(f"{r.label}, {_name(name)}", s, _eval_style(names, name)))
    for name in names:
        label = _name(name) if len(runs) == 1 else f"all runs, {_name(name)}"
        rows.append(_interval_row(label, pooled(runs, name), _eval_style(names, name)))
    details = []
    for name in names:
        s = pooled(runs, name)
        details.append(
            f"<b>{escape(_name(name))}</b> solved {s['successes']} of {s['episodes']} ({percent(s['rate'])}; "
            f"{s['low'] * 100:.1f} to {s['high'] * 100:.1f} %)"
        )
    first = runs[0].evaluations[names[0]]
    how = "the most likely actions" if first.deterministic else "sampled actions"
    where = "initial states that training never sees" if first.split == "held_out" else "training initial states"
    where = runs[0].phases.get(f"eval_{names[0]}", {}).get("initial_states") or where
    lead = f"Evaluated with {how} on {where}. Lines mark 95 % Wilson intervals. {', '.join(details)}."
    if conditions := runs[0].phases.get(f"eval_{names[0]}", {}).get("conditions"):
        lead += f" Conditions: {escape(conditions)}."
    if len(runs) > 1:
        lead += " Each run's own rows come first; the last rows pool the episodes of all runs."
    for name in names:
        if gap := pooled_task_gap(runs, name):
            lead += f" <b>{escape(_name(name))}</b>, {escape(task_gap_text(gap))}."
    parts = [interval_chart(rows, row_height=46 if len(rows) < 5 else 30)]
    if len(names) > 1 and paired(runs, names[0], names[-1]) is not None:
        parts.append(_squares(runs, names[0], names[-1]))
    return _section("Success", lead, *parts)


def _interval_row(label: str, s: Mapping[str, Any], style: str) -> Interval:
    note = (
        f"{label}: {s['successes']} of {s['episodes']} = {percent(s['rate'])}, {percent(s['low'])} to "
        f"{percent(s['high'])}"
    )
    return Interval(label, s["rate"], s["low"], s["high"], style, note)


def _squares(runs: Sequence[RunData], before: str, after: str) -> str:
    c = paired(runs, before, after)
    assert c is not None
    a, b = _name(before), _name(after)
    kinds = {
        (True, True): ("both", f"solved by both: {c.both}"), (False, True): ("won", f"only by {b}: {c.only_b}"),
        (True, False): ("lost", f"only by {a}: {c.only_a}"), (False, False): ("neither", f"by neither: {c.neither}"),
    }  # fmt: skip
    states = []
    for r in runs:
        second = {o.key: o for o in r.evaluations[after].outcomes}
        for o in r.evaluations[before].outcomes:
            if o.key in second:
                style, text = kinds[(o.success, second[o.key].success)]
                states.append((style, f"{o.task_id} #{o.init_state_id}, {text.split(':')[0]}"))
    order = {"both": 0, "won": 1, "lost": 2, "neither": 3}
    states.sort(key=lambda s: order[s[0]])
    legend = "".join(f'<span><i class="c {style}"></i>{escape(text)}</span>' for style, text in kinds.values())
    return (
        f'<h3 style="margin-top:18px">The same episodes, before and after</h3><div class="legend">{legend}</div>'
        f"{episode_squares(states, size=20 if len(states) <= 200 else 14, columns=50 if len(states) <= 200 else 75)}"
    )


def _videos(runs: Sequence[RunData]) -> str:
    run = runs[-1] if len(runs) == 1 else runs[0]
    folder = run.path / "videos"
    files = sorted(folder.glob("*.mp4"), key=lambda p: (_EVAL_ORDER.get(p.stem, 5), p.stem)) if folder.is_dir() else []
    figures = []
    for path in files:
        size = path.stat().st_size
        if size > MAX_VIDEO_BYTES:
            figures.append(
                f"<p>{escape(path.name)} is too large for this page ({size / 2**20:.0f} MiB); see videos/.</p>"
            )
            continue
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        result = run.evaluations.get(path.stem)
        rate = f", {percent(result.success_rate)} success" if result else ""
        figures.append(
            f"<figure><figcaption><b>{escape(_name(path.stem))}</b>{escape(rate)}</figcaption>"
            f'<video controls muted loop autoplay playsinline src="data:video/mp4;base64,{data}"></video></figure>'
        )
    if not figures:
        return ""
    which = f" of {escape(run.label)}" if len(runs) > 1 else ""
    button = '<button data-replay hidden type="button">Play all from the start</button>' if len(figures) > 1 else ""
    lead = (
        f"Held-out episodes{which} in real time, the same initial states in each video. A frame turns green when the "
        f"task succeeds and red when time runs out."
    )
    return _section("Watch it", "", f'<div class="row"><p>{lead}</p>{button}</div>',
                    f'<div class="two">{"".join(figures)}</div>')  # fmt: skip


def _match(run: RunData, phase: str, pattern: str) -> str | None:
    return next((k for k in run.keys(phase) if re.search(pattern, k)), None)


def _learning(runs: Sequence[RunData]) -> str:
    parts = [_success_curve(runs)]
    cells = []
    for d in DIAGNOSTICS:
        curves = []
        for i, r in enumerate(runs):
            key = _match(r, d.phase, d.pattern)
            if key is None:
                continue
            x, y = r.series(d.phase, key)
            if d.smooth and len(y) > 30:
                curves.append(Series(r.label, x, y, f"s{i % 6}", "faint"))
                y = running_mean(y, max(3, len(y) // 30))
            curves.append(Series(r.label, x, y, f"s{i % 6}"))
        unit = "update" if d.phase == "sft" else "iteration"
        chart = line_chart(curves, y_format=d.format, x_label=unit, label=d.title) if curves else ""
        if chart:
            cells.append(f"<div><h3>{escape(d.title)}</h3><p>{escape(d.note)}</p>{chart}</div>")
    if cells:
        parts.append(f'<div class="charts">{"".join(cells)}</div>')
    return _section("Learning", "", *parts)


def _success_curve(runs: Sequence[RunData]) -> str:
    curves, legend = [], []
    many = len(runs) > 1
    for i, r in enumerate(runs):
        x, y = r.series("rl", "rollout/success")
        if not x:
            continue
        style = f"s{i % 6}" if many else "s1"
        notes = [f"iteration {a:.0f}: {percent(b)} of the training episodes" for a, b in zip(x, y) if b is not None]
        if not many:
            there = [(a, b) for a, b in zip(x, y) if b is not None]
            curves.append(Series("rollout", [a for a, _ in there], [b for _, b in there], style, "dots", notes=notes))
        curves.append(Series("rollout", x, y, style, "faint"))
        curves.append(Series("running mean", x, running_mean(y, _WINDOW), style))
        what = (
            r.label
            if many
            else f"training episodes, sampled actions: each iteration, and the mean of the last {_WINDOW}"
        )
        legend.append(f'<span><i class="c thin {style}"></i>{escape(what)}</span>')
        ex, ey = r.series("rl", "eval/success")
        if ex:
            after = [a - 1.0 for a in ex]  # an iteration evaluates before it trains
            curves.append(Series("greedy evaluation", after, ey, "s2" if not many else style, "dots", [None] * len(ex)))
            if not many:
                legend.append('<span><i class="c round s2"></i>held-out evaluations in between</span>')
    if not curves:
        return ""
    last = max(max(s.x) for s in curves)
    names = evaluation_names(runs)
    if len(names) > 1:
        for name, at in ((names[0], 0.0), (names[-1], last)):
            s, style = pooled(runs, name), _eval_style(names, name)
            note = f"{_name(name)}: {s['successes']} of {s['episodes']} held-out episodes = {percent(s['rate'])}"
            curves.append(Series(name, [at], [s["rate"]], style, "dots", [(s["low"], s["high"])], [note]))
            word = "before" if name == names[0] else "after"
            legend.append(f'<span><i class="c round {style}"></i>held-out episodes {word}, 95 % interval</span>')
    chart = line_chart(
        curves,
        width=1040,
        height=300,
        y_format=percent,
        y_range=(0.0, 1.0),
        x_label="iteration",
        label="success over training",
    )
    return f'<h3>Success while training</h3><div class="legend">{"".join(legend)}</div>{chart}'


def _tasks(runs: Sequence[RunData]) -> str:
    names = evaluation_names(runs)
    if not names:
        return ""
    rows_of = {name: _task_rows(runs, name) for name in names}
    tasks = list(dict.fromkeys(t for rows in rows_of.values() for t in rows))
    unit = runs[0].evaluations[names[0]].jerk_unit
    columns = ("success", "95 % interval", "steps", "jerk")
    head = "".join(f'<th colspan="4" class="group">{escape(_name(n))}</th>' for n in names)
    heads = "".join(f"<th>{c}</th>" for _ in names for c in columns)
    body = []
    lines = [(task, {n: rows_of[n].get(task) for n in names}, "") for task in tasks]
    if len(tasks) > 1:
        lines.append(("all tasks", {n: pooled(runs, n) for n in names}, "total"))
    for task, rows, style in lines:
        cells = [f"<td>{escape(task)}</td>"]
        for name in names:
            s = rows[name]
            if s is None:
                cells.append("<td>–</td>" * 4)
                continue
            bar = f'<span class="mini {_eval_style(names, name)}"><i style="width:{s["rate"] * 100:.0f}%"></i></span>'
            cells.append(
                f"<td>{bar}{percent(s['rate'])} <small>{s['successes']}/{s['episodes']}</small></td>"
                f"<td>{s['low'] * 100:.0f}–{s['high'] * 100:.0f} %</td>"
                f"<td>{_optional(s['control_steps_to_success'])}</td><td>{_optional(s['mean_jerk'])}</td>"
            )
        body.append(f'<tr class="{style}">{"".join(cells)}</tr>')
    after = [r.evaluations[names[-1]] for r in runs]
    latency = sum(e.latency_s for e in after) / len(after)
    batched = sum(e.seconds_per_decision for e in after) / len(after)
    lead = (
        f"Steps: mean control steps of successful episodes. Jerk: mean size of the third difference of the executed "
        f"actions × control rate³ ({escape(unit)}); lower is smoother. One decision of the {escape(_name(names[-1]))} "
        f"policy takes {latency * 1e3:.1f} ms alone and {batched * 1e3:.2f} ms in batches."
    )
    table = f"<table><tr><th class='group'></th>{head}</tr><tr><th>Task</th>{heads}</tr>{''.join(body)}</table>"
    return _section("Tasks", lead, f'<div class="scroll">{table}</div>')


def _optional(value: float | None) -> str:
    return "–" if value is None else short(value)


def _time(runs: Sequence[RunData]) -> str:
    totals: dict[str, dict[str, float]] = {}
    for r in runs:
        for name, phase in r.phases.items():
            row = totals.setdefault(name, {})
            for key in ("seconds", "episodes", "control_steps", "updates", "iterations"):
                if isinstance(phase.get(key), int | float):
                    row[key] = row.get(key, 0) + phase[key]
    shown = {n: t for n, t in totals.items() if t.get("seconds", 0) > 0}
    if not shown:
        return ""
    total = sum(t["seconds"] for t in shown.values())
    parts = [(_phase(n), t["seconds"], f"{_phase(n)}: {_clock(t['seconds'])}") for n, t in shown.items()]
    rows = []
    for i, (name, t) in enumerate(shown.items()):
        rows.append(_time_row(i, name, t, total, t.get("control_steps", 0)))
    table = (
        "<table style='margin-top:12px'><tr><th>Phase</th><th>time</th><th>share</th><th>episodes</th>"
        f"<th>control steps</th><th>control steps/s</th></tr>{''.join(rows)}</table>"
    )
    lead = f"{_clock(total)} in all" + (f", {len(runs)} runs together." if len(runs) > 1 else ".")
    return _section(
        "Where the time goes", lead, stacked_bar(parts), f'<div class="scroll">{table}</div>', _iteration(runs)
    )


def _time_row(i: int, name: str, t: Mapping[str, float], total: float, steps: float) -> str:
    rate = f"{steps / t['seconds']:.0f}" if steps else "–"
    return (
        f'<tr><td><span class="legend" style="display:inline"><i class="c s{i % 6}"></i></span>'
        f"{escape(_phase(name))}</td><td>{_clock(t['seconds'])}</td><td>{percent(t['seconds'] / total)}</td>"
        f"<td>{_count(t.get('episodes'))}</td><td>{_count(steps)}</td><td>{rate}</td></tr>"
    )


def _count(value: float | None) -> str:
    return f"{int(value):,}".replace(",", "\u202f") if value else "–"


def _iteration(runs: Sequence[RunData]) -> str:
    """One mean RL iteration split into its parts."""

    def mean(key: str) -> float:
        values = [v for v in (r.mean("rl", key) for r in runs) if v is not None]
        return sum(values) / len(values) if values else 0.0

    rollout, policy, wait = (mean(f"engine/{k}") for k in ("seconds", "policy_seconds", "wait_seconds"))
    learn, reward = mean("time/update"), mean("time/reward")
    if rollout + learn <= 0:
        return ""
    rest = max(0.0, rollout - policy - wait)
    amounts = {
        "policy": policy,
        "waiting for the simulator": wait,
        "bookkeeping": rest,
        "reward": reward,
        "learning": learn,
    }
    parts = [(name, s, f"{name}: {s:.2f} s") for name, s in amounts.items() if s > 0]
    legend = "".join(
        f'<span><i class="c s{i % 6}"></i>{escape(name)} {seconds:.1f} s</span>'
        for i, (name, seconds, _) in enumerate(parts)
    )
    facts = []
    use, rate, batch = (mean(f"engine/{k}") for k in ("env_utilisation", "control_steps_per_second", "policy_batch"))
    if rate:
        facts.append(f"{rate:.0f} control steps/s while acting")
    if use:
        facts.append(f"simulators busy {percent(use)} of that time")
    if batch:
        facts.append(f"{batch:.1f} observations per policy call")
    return (
        f'<h3 style="margin-top:20px">A mean RL iteration ({rollout + learn + reward:.1f} s)</h3>'
        f'<div class="legend">{legend}</div>{stacked_bar(parts, height=22)}'
        f'<p class="lead" style="margin:8px 0 0;color:var(--soft)">{escape("; ".join(facts))}</p>'
    )


def _everything(runs: Sequence[RunData]) -> str:
    """All other metrics, folded away: curves for what changes, a list for what does not."""
    cells, constants = [], []
    taken = {(d.phase, _match(runs[0], d.phase, d.pattern)) for d in DIAGNOSTICS} | {("rl", "rollout/success")}
    for phase in dict.fromkeys(m["phase"] for r in runs for m in r.metrics):
        for key in dict.fromkeys(k for r in runs for k in r.keys(phase)):
            if (phase, key) in taken:
                continue
            values = {v for r in runs for v in r.series(phase, key)[1] if v is not None}
            if len(values) < 2:
                constants.append(
                    f"<tr><td>{escape(phase)} · {escape(key)}</td><td>{', '.join(map(short, values)) or '–'}</td></tr>"
                )
                continue
            curves = [Series(r.label, *r.series(phase, key), f"s{i % 6}") for i, r in enumerate(runs)]
            chart = line_chart(curves, width=300, height=140, label=key)
            cells.append(f"<div><h3>{escape(key)}</h3><p>{escape(phase)}</p>{chart}</div>")
    charts = f"<details><summary>{len(cells)} more curves</summary><div class='charts'>{''.join(cells)}</div></details>"
    table = f"<details><summary>{len(constants)} constant values</summary><table>{''.join(constants)}</table></details>"
    return _section("All other metrics", "", charts if cells else "", table if constants else "")


def _versions(runs: Sequence[RunData]) -> str:
    v = runs[0].versions
    rows = []
    for key, value in v.items():
        if key == "packages" or value in ("", [], None):
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        text += " GiB" if key == "memory_gib" else ""
        rows.append(f"<tr><td>{escape(key.removesuffix('_gib').replace('_', ' '))}</td><td>{escape(text)}</td></tr>")
    packages = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(str(x))}</td></tr>" for k, x in v.get("packages", {}).items()
    )
    tables = (f'<table class="plain">{t}</table>' for t in ("".join(rows), packages))
    machine = f'<div class="two">{"".join(tables)}</div>' if v else ""
    configs = "".join(
        f"<details{' open' if len(runs) == 1 and len(r.config) < 1500 else ''}><summary>Exact configuration"
        f"{escape(f', {r.label}') if len(runs) > 1 else ''}</summary><pre>{escape(r.config)}</pre></details>"
        for r in runs
        if r.config
    )
    return _section("To repeat this run", "", machine, configs)
