"""How the report names and writes things: phases, evaluations, figures, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_rl.config.phases import PHASES, evaluations
from vla_rl.display.charts import short

FAILURES = (
    "never_reached",
    "missed_grasp",
    "dropped",
    "wrong_place",
    "wrong_object",
    "out_of_time",
    "not told",
)
_EVALUATIONS = evaluations()


def evaluation_order(name: str) -> tuple[int, bool, str]:
    """Sorts evaluations by the phase they belong to; those of no phase follow the first."""
    known = name in _EVALUATIONS
    return list(_EVALUATIONS).index(name) if known else 0, not known, name


def before_rl(name: str) -> bool:
    return evaluation_order(name) < evaluation_order("rl")


def evaluation(name: str) -> str:
    return _EVALUATIONS.get(name, name)


def tested(name: str) -> str:
    """Which policy met the test set (``test``, ``test_best``)."""
    return f"the {'best' if name == 'test_best' else 'last'} policy on the test set"


def phase(name: str) -> str:
    return PHASES[name].label if name in PHASES else name


def failure(kind: str) -> str:
    return kind.replace("_", " ")


def failure_kinds(found: set[str]) -> list[str]:
    """The kinds in the order of how far an episode got; unknown ones last."""
    return [k for k in FAILURES if k in found] + sorted(found - set(FAILURES))


def plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"


def signed(value: float) -> str:
    """A whole number with its sign: "+5", "−3", "0"."""
    text = f"{value:+.0f}"
    return "0" if text in ("+0", "-0") else text.replace("-", "−")


def signed_short(value: float) -> str:
    """As `charts.short`, with a sign."""
    return short(value) if value == 0 else ("+" if value > 0 else "−") + short(abs(value))


def p_value(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def clock(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02d} min"


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "–"


def optional(value: float | None) -> str:
    return "–" if value is None else short(value)


def count(value: float | None) -> str:
    return f"{int(value):,}".replace(",", "\u202f") if value else "–"


def best(note: dict[str, Any]) -> str:
    """Which policy did best on held-out episodes, from ``best.json``."""
    which = (
        f"the policy after iteration {note['iteration']}"
        if note["iteration"]
        else "the policy that RL started from"
    )
    return f"{which}, with {note['success'] * 100:.1f} % of {note['episodes']} held-out episodes"


def progress(record: dict[str, Any]) -> str:
    """ "28 of 50 iterations, incomplete" of a phase record that was cut short; empty for others."""
    if record.get("complete") is not False or "of" not in record:
        return ""
    return f"{record['done']} of {record['of']} {record['unit']}, incomplete"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])
