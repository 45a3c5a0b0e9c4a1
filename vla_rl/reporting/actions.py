"""Errors of actions on demonstrations that were kept out: the part of a run's page that needs no
simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vla_rl.display import words
from vla_rl.display.charts import Series, line_chart, short
from vla_rl.monitoring.metrics import ACTIONS_FILE
from vla_rl.reporting import sections
from vla_rl.reporting.runs import RunData

_GUESSES = {
    "hold": "go where the robot is",
    "repeat": "repeat the action before",
    "mean": "the mean action",
}
_MOST_TRACES = 14
_LEAD = (
    "How far the most likely actions are from those of demonstrations, in the action's own units, "
    "beside what one could guess without looking. It is no success rate: what the policy does once "
    "it has left the demonstrated states is not seen here. "
)


def of(run: RunData) -> dict[str, dict[str, Any]]:
    """What phase eval_actions wrote, {policy: figures}; without what is no such figures."""
    return {name: figures for name, figures in run.actions.items() if _is_sound(figures)}


def _is_sound(figures: Any) -> bool:
    try:
        joints, steps, traces = figures["joints"], figures["steps"], figures["traces"]
        written = [j[k] for j in joints for k in ("policy", "spread")] + [
            s["policy"] for s in steps
        ]
        written += [value for row in (*traces["recorded"], *traces["predicted"]) for value in row]
        written += [*figures["overall"].values(), *traces["seconds"]]
        texts = [
            figures["verdict"],
            figures["held_out"],
            *(j[k] for j in joints for k in ("name", "unit")),
        ]
        for d in figures.get("datasets", ()):
            written += [d[key] for key in ("episodes", "decisions", "policy", "guess")]
            texts.append(d["dataset"])
        guesses = [row.get(g) for row in (*joints, *steps) for g in _GUESSES]
        wide = {len(joints)} == {len(row) for row in (*traces["recorded"], *traces["predicted"])}
        numbers = all(isinstance(v, int | float) for v in written) and all(
            isinstance(v, int | float | None) for v in guesses
        )
        return bool(
            numbers
            and wide
            and all(isinstance(text, str) for text in texts)
            and isinstance(figures["decisions"], int)
        )
    except (AttributeError, LookupError, TypeError):
        return False


def summary(run: RunData) -> dict[str, Any]:
    """The figures for scripts, without the traces."""
    return {
        name: {k: v for k, v in figures.items() if k != "traces"}
        for name, figures in of(run).items()
    }


def verdict(run: RunData) -> tuple[str, str] | None:
    """(a sentence, its evidence) of the newest policy; None where none was judged so."""
    found = of(run)
    if not found:
        return None
    name, figures = next(reversed(found.items()))
    head, _, rest = figures["verdict"].partition(": ")
    return (
        f"The {words.evaluation(name)} policy's actions are {head}",
        f"{rest}. {figures['held_out']}.",
    )


def section(run: RunData) -> str:
    """Errors by joint and by step, and one episode; of each policy that was judged."""
    sound = of(run)
    parts = [_of_policy(name, figures) for name, figures in sound.items()]
    if left := [name for name in run.actions if name not in sound]:
        parts.append(
            sections.section(
                "Are its actions right?",
                "",
                f"<p>{ACTIONS_FILE} is incomplete: {escape(', '.join(left))}.</p>",
            )
        )
    return "\n".join(parts)


def _of_policy(name: str, figures: Mapping[str, Any]) -> str:
    joints, steps = figures["joints"], figures["steps"]
    shown = [g for g in _GUESSES if any(row.get(g) is not None for row in joints)]
    heads = ["", "policy", *(_GUESSES[g] for g in shown), "spread", "unit"]
    rows = []
    for j in joints:
        known = [j[g] for g in shown if j.get(g) is not None]
        style = "" if not known or j["policy"] < min(known) else "down"
        guessed = ["–" if j.get(g) is None else short(j[g]) for g in shown]
        rows.append(
            (
                style,
                [
                    escape(j["name"]),
                    f"<b>{short(j['policy'])}</b>",
                    *guessed,
                    short(j["spread"]),
                    escape(j["unit"]),
                ],
            )
        )
    held = f"{escape(figures['held_out'])}; {figures['decisions']} decisions."
    lead = (
        f"{_LEAD}{held[0].upper()}{held[1:]} "
        f"{escape(figures['verdict'][0].upper() + figures['verdict'][1:])}."
    )
    by_joint = f"<div><h3>Mean absolute error by joint</h3>{sections.table(heads, rows)}</div>"
    title = f"Are its actions right? ({words.evaluation(name)})"
    return sections.section(
        title,
        lead,
        f'<div class="two">{by_joint}{_by_step(steps)}</div>',
        _by_dataset(figures.get("datasets", ())),
        _traces(figures),
    )


def _by_dataset(datasets: Sequence[Mapping[str, Any]]) -> str:
    if not datasets:
        return ""
    rows = [
        (
            "" if d["policy"] < d["guess"] else "down",
            [
                escape(d["dataset"]),
                f"<b>{short(d['policy'])}</b>",
                short(d["guess"]),
                str(d["episodes"]),
                str(d["decisions"]),
            ],
        )
        for d in datasets
    ]
    heads = ["", "policy", "best guess", "episodes", "decisions"]
    return f"<h3>By dataset, in spreads of the action</h3>{sections.table(heads, rows)}"


def _by_step(steps: Sequence[Mapping[str, Any]]) -> str:
    kinds = ["policy", *(g for g in _GUESSES if any(s.get(g) is not None for s in steps))]
    styles = dict(zip(kinds, ("after", "s1", "s2", "s3")))
    x = [float(s["step"] + 1) for s in steps]
    curves = [
        Series(
            kind, x, [s.get(kind) for s in steps], styles[kind], "line" if len(x) > 1 else "dots"
        )
        for kind in kinds
    ]
    marks = sections.legend(
        [(f"thin {styles[k]}", "the policy" if k == "policy" else _GUESSES[k]) for k in kinds]
    )
    chart = line_chart(
        curves,
        width=420,
        height=220,
        x_label="control step of the chunk",
        label="error by step, in spreads",
    )
    return (
        f"<div><h3>By step of the chunk, in spreads of the action</h3>{marks}{chart}</div>"
        if chart
        else ""
    )


def _traces(figures: Mapping[str, Any]) -> str:
    """One episode, joint by joint."""
    traces, cells = figures["traces"], []
    for i, joint in enumerate(figures["joints"][:_MOST_TRACES]):
        curves = [
            Series(
                "recorded", traces["seconds"], [row[i] for row in traces["recorded"]], "s0", "thick"
            ),
            Series(
                "predicted", traces["seconds"], [row[i] for row in traces["predicted"]], "after"
            ),
        ]
        chart = line_chart(
            curves,
            width=340,
            height=150,
            x_label="s",
            label=f"{joint['name']}, recorded and predicted",
        )
        cells.append(
            f"<div><h3>{escape(joint['name'])} "
            f"<small>{escape(joint['unit'])}</small></h3>{chart}</div>"
        )
    if not cells:
        return ""
    marks = sections.legend(
        [
            ("thin s0", "recorded"),
            ("thin after", "what the policy would do next, from each recorded state"),
        ]
    )
    rest = len(figures["joints"]) - len(cells)
    more = f'<p class="soft">{rest} more are in {ACTIONS_FILE}.</p>' if rest else ""
    return f'<h3 class="gap">One episode that was kept out</h3>{marks}<div class="charts">{"".join(cells)}</div>{more}'
