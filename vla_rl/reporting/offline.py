"""What the offline rounds of a run did: gates, and estimates beside what was measured. Read from
the lines they logged."""

from __future__ import annotations

from html import escape
from typing import Any

from vla_rl.display.charts import Series, line_chart, percent, short
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.reporting import sections
from vla_rl.reporting.runs import RunData

PHASE = "offline"
_LEAD = (
    "Each candidate is what PPO on the denoising chain made of the policy without the env. It "
    "stays if its estimate, the mean Q of decisions in the learned model, exceeds that of the "
    "policy before by what is needed; else weights and optimiser go back. The figure sets the "
    "estimate of each round's policy beside the success of the episodes it then ran."
)


def rounds(run: RunData) -> list[dict[str, Any]]:
    """{round, estimate, success, episodes, low, high, held_out, gates: [{before, after, needed,
    gain_error, accepted}]} of each round; round 0 is the policy as it began. What is not known yet
    is None."""
    found: dict[int, dict[str, Any]] = {}
    for row in run.metrics:
        if row["phase"] != PHASE or not isinstance(row.get("round"), int):
            continue
        number = row["round"]
        names = ("estimate", "success", "episodes", "low", "high", "held_out")
        entry = found.setdefault(number, {"round": number, **dict.fromkeys(names), "gates": []})
        if "gate/after" in row:
            gate = {
                name: row.get(f"gate/{name}")
                for name in ("before", "after", "needed", "gain_error")
            }
            entry["gates"].append({**gate, "accepted": bool(row.get("gate/accepted"))})
        elif row.get("rollout/episodes"):
            trials = int(row["rollout/episodes"])
            low, high = wilson_interval(round(row["rollout/success"] * trials), trials)
            entry |= {
                "success": row["rollout/success"],
                "episodes": trials,
                "low": low,
                "high": high,
            }
            entry |= {"estimate": row.get("ope/value"), "held_out": row.get("eval/success")}
        elif number == 1 and 0 in found:  # what the first critics say of the policy as it began
            found[0]["estimate"] = row.get("ope/value")
    return [found[number] for number in sorted(found)]


def section(run: RunData) -> str:
    """The part of the page; empty where there were no offline rounds."""
    done = rounds(run)
    if not done:
        return ""
    gates = [gate for entry in done for gate in entry["gates"]]
    kept = sum(gate["accepted"] for gate in gates)
    lead = f"{kept} of {len(gates)} candidates were accepted. {_LEAD}" if gates else _LEAD
    return sections.section(
        "Offline rounds", escape(lead), _table(done), _gates(gates), _calibration(done)
    )


def _table(done: list[dict[str, Any]]) -> str:
    rows = []
    for entry in done:
        gates = entry["gates"]
        accepted = f"{sum(g['accepted'] for g in gates)} of {len(gates)}" if gates else "–"
        success = "–"
        if entry["success"] is not None:
            success = (
                f"{percent(entry['success'])} <small>{percent(entry['low'])} to "
                f"{percent(entry['high'])}</small>"
            )
        held_out = "–" if entry["held_out"] is None else percent(entry["held_out"])
        rows.append(
            (
                "",
                [
                    _name(entry),
                    accepted,
                    _written(entry["estimate"]),
                    success,
                    str(entry["episodes"] or "–"),
                    held_out,
                ],
            )
        )
    return sections.table(
        ["", "accepted", "estimate", "success of its episodes", "episodes", "held out"], rows
    )


def _gates(gates: list[dict[str, Any]]) -> str:
    """Every candidate's gain, beside what was needed."""
    if not gates:
        return ""
    rows = [
        (
            "",
            [
                str(i + 1),
                _written(g["before"]),
                _written(g["after"]),
                _written(g["needed"]),
                _written(g["gain_error"]),
                "accepted" if g["accepted"] else "back to the policy before",
            ],
        )
        for i, g in enumerate(gates)
    ]
    table = sections.table(
        ["Candidate", "before", "after", "needed", "error of the gain", ""], rows
    )
    return f"<details><summary>{len(gates)} candidates</summary>{table}</details>"


def _calibration(done: list[dict[str, Any]]) -> str:
    """Estimate against measured success, a point for each round."""
    points = [
        entry for entry in done if entry["estimate"] is not None and entry["success"] is not None
    ]
    if not points:
        return ""
    notes = [
        f"{_name(e)}: estimate {_written(e['estimate'])}, {percent(e['success'])}" for e in points
    ]
    series = Series(
        "rounds",
        [e["estimate"] for e in points],
        [e["success"] for e in points],
        "after",
        "dots",
        [(e["low"], e["high"]) for e in points],
        notes,
    )

    def draw(width: int) -> str:
        return line_chart(
            [series],
            width=min(width, 520),
            height=260,
            y_format=percent,
            y_range=(0.0, 1.0),
            x_label="estimate in the learned model",
            label="; ".join(notes),
        )

    chart = sections.both_widths(draw)
    return f'<h3 class="gap">Estimate and measured success</h3>{chart}'


def _name(entry: dict[str, Any]) -> str:
    return f"round {entry['round']}" if entry["round"] else "start"


def _written(value: float | None) -> str:
    return "–" if value is None else short(value)
