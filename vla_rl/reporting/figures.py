"""The figures of one run: success before and after, how it learned, whether it sees, how it
fails; and ``summary.json``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.algorithms import validation
from vla_rl.display import words
from vla_rl.display.charts import percent
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import (
    EpisodeOutcome,
    EvaluationResult,
    compare,
    fallen_text,
    same_episodes,
    summarise,
    task_gap,
)
from vla_rl.evaluation.statistics import PairedComparison, wilson_interval
from vla_rl.reporting.runs import RunData

_VALIDATION = "validation/"


def before_after(run: RunData) -> tuple[str, str] | None:
    """Names of the first and the last evaluation; None where there are not two."""
    return (run.names[0], run.names[-1]) if len(run.names) > 1 else None


def paired(run: RunData) -> PairedComparison | None:
    """Before against after on the episodes both saw; None where they share none, or one of them
    is missing."""
    names = before_after(run)
    if names is None:
        return None
    try:
        return compare(run.evaluations[names[0]], run.evaluations[names[1]])
    except UserError:
        return None


def result_of(run: RunData, name: str) -> EvaluationResult:
    """An evaluation, on whichever set."""
    return run.tests[name] if name in run.tests else run.evaluations[name]


def per_task(run: RunData, name: str) -> dict[str, dict[str, Any]]:
    """`summarise` of each task, with the kinds of its failures where they are known."""
    failures = run.failures.get(name, {})
    rows = result_of(run, name).per_task()
    return {
        task: {**row, **({"failures": failures[task]} if task in failures else {})}
        for task, row in rows.items()
    }


def gap_of(run: RunData, name: str) -> dict[str, Any] | None:
    result = result_of(run, name)
    return task_gap(result.outcomes, result.held_out_tasks)


SPENT = {
    "episodes": "episodes of RL",
    "control_steps": "control steps of RL",
    "seconds": "seconds of RL without its looks",
}
"""What RL spends, and what a curve may go by."""


def _spent(rows: Sequence[Mapping[str, Any]], by: str) -> list[float]:
    """What RL had spent after each of its iterations."""
    if by != "seconds":
        return [float(r[by]) for r in rows]
    own = (float(r.get("time/iteration", 0)) - float(r.get("time/evaluate", 0)) for r in rows)
    return list(itertools.accumulate(own))


def learning_curve(run: RunData, by: str = "episodes") -> list[tuple[float, float]]:
    """(episodes of RL so far, or what else of `SPENT`, held-out success): the evaluations before,
    in between and after."""
    rows = [r for r in run.metrics if r["phase"] == "rl" and r.get("episodes") is not None]
    so_far = [0.0, *_spent(rows, by)]
    # An iteration evaluates before it rolls out, and counts its episodes afterwards.
    points = {
        at: float(r["eval/success"])
        for at, r in zip(so_far, rows)
        if r.get("eval/success") is not None
    }
    ends = before_after(run)
    if ends is not None:
        points[0.0] = run.evaluations[ends[0]].success_rate
        total = run.phases.get("rl", {}).get(by) if by != "seconds" else None
        points[float(total or so_far[-1])] = run.evaluations[ends[1]].success_rate
    elif points and run.names and words.before_rl(run.names[0]):
        points[0.0] = run.evaluations[run.names[0]].success_rate
    return sorted(points.items())


def image_use(run: RunData) -> dict[str, Any] | None:
    """The last of what SFT measured on demonstrations it does not train on; None where it did not.

    ``loss``; what it rises by with other rows' inputs: ``image_use`` (all cameras), ``cameras``,
    ``instruction_use``, ``proprio_use``; ``first_loss``, that of the decisions with which episodes
    begin; ``image_spread``; the ``update``; ``warning``, empty where the policy looks at its images
    and heeds its instruction.
    """
    rows = [
        r for r in run.metrics if r["phase"] == "sft" and r.get("validation/image_use") is not None
    ]
    rows = [r for r in rows if r.get("validation/loss") is not None]
    if not rows:
        return None
    figures = {
        k.removeprefix(_VALIDATION): v
        for k, v in rows[-1].items()
        if k.startswith(_VALIDATION) and v is not None
    }
    cameras = {
        k.removeprefix("image_use/"): v for k, v in figures.items() if k.startswith("image_use/")
    }
    names = ("loss", "first_loss", "image_use", "instruction_use", "proprio_use", "image_spread")
    plain: dict[str, Any] = {k: figures[k] for k in names if k in figures}
    return {
        **plain,
        "cameras": cameras,
        "update": rows[-1]["step"],
        "warning": validation.verdict(figures),
    }


def alarms(run: RunData) -> list[str]:
    """What must not be overlooked: a policy that does not see, and what the guard of RL said."""
    seen = image_use(run)
    blind = seen["warning"] if seen else ""
    return [note for note in (blind and blind[0].upper() + blind[1:], run.guard) if note]


def evaluation_summary(run: RunData, name: str) -> dict[str, Any]:
    """Counts, rate and interval of one evaluation, in all and per task."""
    result = result_of(run, name)
    failures = run.failures.get(name)
    return {
        **summarise(result.outcomes),
        **({"failures": failures[""]} if failures else {}),
        "split": result.split,
        "set": result.set,
        "tasks": per_task(run, name),
        "task_gap": gap_of(run, name),
    }


def run_summary(run: RunData) -> dict[str, Any]:
    """The figures of the page of one run, for scripts."""
    comparison, ends = paired(run), before_after(run)
    return {
        "evaluations": {name: evaluation_summary(run, name) for name in run.names},
        "tests": {name: evaluation_summary(run, name) for name in run.tests},
        "comparison": None
        if comparison is None or ends is None
        else named(ends, comparison.to_dict()),
        "learning_curve": [{"episodes": at, "success": rate} for at, rate in learning_curve(run)],
        "image_use": image_use(run),
        "guard": run.guard,
        "best": {"checkpoint": "checkpoints/best", **run.best} if run.best else None,
        **costs([run]),
    }


def named(ends: tuple[str, str], figures: dict[str, Any]) -> dict[str, Any]:
    return {"before": ends[0], "after": ends[1], **figures}


def costs(runs: Sequence[RunData]) -> dict[str, Any]:
    """Sums over phases and runs; the peak is the largest."""
    return {
        "seconds": sum(r.seconds for r in runs),
        "episodes": sum(r.total("episodes") for r in runs),
        "control_steps": sum(r.total("control_steps") for r in runs),
        "peak_memory_bytes": max(r.peak_memory_bytes for r in runs),
    }


def identity(run: RunData) -> dict[str, Any]:
    """Which run it was, and its phases."""
    commit = run.versions.get("git_commit", "")
    return {
        "folder": run.path.resolve().name,
        "seed": run.seed,
        "phases": run.phases,
        "git_commit": commit,
    }


def verdict(run: RunData) -> tuple[str, str]:
    """What the run achieved, in a plain sentence, and the evidence in a second one."""
    cut_short = "; ".join(
        f"{words.phase(n)}: {text}" for n, p in run.phases.items() if (text := words.progress(p))
    )
    head, evidence = _verdict(run)
    return head, f"{evidence} {cut_short}." if cut_short else evidence


def _verdict(run: RunData) -> tuple[str, str]:
    if not run.names:
        return _of_session(run) or (
            "This run has no evaluation yet",
            "Success figures appear once an evaluation phase is complete.",
        )
    result = run.evaluations[run.names[-1]]
    after = summarise(result.outcomes)
    how_many = (
        f"{after['episodes']} {'held-out' if result.split == 'held_out' else 'training'} episodes"
    )
    ends = before_after(run)
    if ends is None:
        return (
            f"The {words.evaluation(run.names[0])} policy solves {percent(after['rate'])} of "
            f"{how_many}",
            f"{after['successes']} of {after['episodes']} episodes, 95 % interval "
            f"{percent(after['low'])} to {percent(after['high'])}.",
        )
    before, c = summarise(run.evaluations[ends[0]].outcomes), paired(run)
    a, b = (words.evaluation(name) for name in ends)
    rates = f"from {percent(before['rate'])} to {percent(after['rate'])}"
    if c is None:
        return (
            f"Success: {percent(before['rate'])} ({a}) and {percent(after['rate'])} ({b})",
            "The two were evaluated on different episodes, so they cannot be compared pairwise.",
        )
    points = (
        f"{words.signed(c.difference * 100)} points on the same episodes (95 % interval "
        f"{words.signed(c.difference_low * 100)} to {words.signed(c.difference_high * 100)}; exact "
        f"McNemar test, {words.p_value(c.p_value)}). {b} alone solved {c.only_b} "
        f"{words.plural('episode', c.only_b)}, {a} alone {c.only_a}. {fallen_text(c)}"
    ).rstrip()
    if not c.significant:
        same = before["successes"] == after["successes"]
        head = (
            f"{b} left success at {percent(after['rate'])}"
            if same
            else f"{b} moved success {rates}"
        )
        return f"{head} on {how_many}: no more than chance explains", points
    return (
        f"{b} {'raised' if c.difference > 0 else 'lowered'} success {rates} on {how_many}",
        points,
    )


def _of_session(run: RunData) -> tuple[str, str] | None:
    """What an arm's session achieved (``vla-rl robot learn``): as it was judged, else what its
    last episodes show."""
    played = [r for r in run.metrics if r["phase"] == "robot" and r.get("robot/episodes")]
    if not played:
        return None
    last, judged = (
        played[-1],
        [r for r in run.metrics if r["phase"] == "judged" and r.get("eval/episodes")],
    )
    recent = (
        f"Of the last episodes that it learned from {percent(last['robot/autonomous_success'])} "
        f"succeeded without a person, {percent(last['robot/recent_success'])} in all."
    )
    if not judged:
        head = (
            f"The arm learned from {last['robot/episodes']:.0f} "
            f"{words.plural('episode', int(last['robot/episodes']))}"
        )
        return f"{head}, and no held-out episodes judged it", recent
    before, after = judged[0], judged[-1]
    rate, n = after["eval/success"], int(after["eval/episodes"])
    low, high = wilson_interval(round(rate * n), n)
    came = (
        ""
        if before is after or before["step"]
        else f", and {percent(before['eval/success'])} before the first"
    )
    at = int(after["step"])
    head = (
        f"After {at} {words.plural('episode', at)} with the arm the policy solves {percent(rate)} "
        f"of {n} held-out "
    )
    head += f"{words.plural('episode', n)} without help{came}"
    return head, f"95 % interval {percent(low)} to {percent(high)}. {recent}"


def paired_outcomes(run: RunData) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """The same episodes before and after, for the picture of them."""
    ends = before_after(run)
    if ends is None or paired(run) is None:
        return []
    return same_episodes(run.evaluations[ends[0]], run.evaluations[ends[1]])
