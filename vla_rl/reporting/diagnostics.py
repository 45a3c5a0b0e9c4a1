"""What to look at while a policy learns, and what should make a reader doubt the figures."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from vla_rl import build
from vla_rl.config.phases import PHASES
from vla_rl.config.robot import SESSION_LOGS
from vla_rl.diagnostics import Diagnostic
from vla_rl.display import words
from vla_rl.display.charts import percent, short
from vla_rl.errors import ConfigError
from vla_rl.options import AlgorithmFigures, view
from vla_rl.reporting.runs import RunData


def declared(runs: Sequence[RunData]) -> list[tuple[str, Diagnostic]]:
    """(phase, diagnostic) of the phases and of robot sessions, then of the runs' algorithms,
    each once."""
    own = [(row.name, d) for row in PHASES.values() for d in row.diagnostics]
    sessions = [(name, d) for name, (_, found) in SESSION_LOGS.items() for d in found]
    return list(
        dict.fromkeys([*own, *sessions, *(("rl", d) for r in runs for d in _of_algorithm(r))])
    )


def step_of(phase: str) -> str:
    """What a line of a phase's log stands for, in the singular."""
    row = PHASES.get(phase)
    return SESSION_LOGS[phase][0] if row is None else row.steps[0] if row.steps else ""


def _of_algorithm(r: RunData) -> list[Diagnostic]:
    """What the run's algorithm declares; where it is not known, what any of this project does."""
    options = r.tree.get("algorithm")
    kind = options.get("type") if isinstance(options, Mapping) else None
    found: list[Diagnostic] = []
    for name in [kind] if isinstance(kind, str) else build.names("algorithm"):
        # a class that is not on this machine, or is no more
        with contextlib.suppress(ConfigError, ImportError):
            found += view(build.config_class("algorithm", name), AlgorithmFigures).diagnostics
    return found


def warnings(runs: Sequence[RunData]) -> list[str]:
    """What a reader should know before trusting the figures, and what may be done about it;
    equal notes are merged."""
    who: dict[str, list[str]] = {}
    for r in runs:
        for note in dict.fromkeys(_run_warnings(r)):
            who.setdefault(note, []).append(r.label)
    if len(runs) == 1:
        return list(who)
    return [
        note if len(labels) == len(runs) else f"{', '.join(labels)}: {note}"
        for note, labels in who.items()
    ]


def _run_warnings(r: RunData) -> list[str]:
    notes = list(r.problems)
    for name, phase in r.phases.items():
        if phase.get("complete") is False and name != "report":
            how_far = (
                f" ({text.removesuffix(', incomplete')})" if (text := words.progress(phase)) else ""
            )
            notes.append(f"Phase “{name}” is not complete{how_far}; the same command resumes it.")
    notes += _counted(r)
    for logged_in, d in declared([r]):
        late = _late(r, logged_in, d.key)
        if d.alarm is not None and late is not None and not d.alarm.below <= late <= d.alarm.above:
            notes.append(d.alarm.text.format(value=(percent if d.share else short)(late)))
    keys = ("rollout/success", "rollout/led_success")
    success = [v for key in keys for v in r.series("rl", key)[1] if v is not None]
    notes += _reward_hacking(r)
    if success and max(success) == 0:
        notes.append(
            "No training episode ever succeeded, so RL had nothing to learn from: start from a "
            "stronger SFT policy."
        )
    if str(r.versions.get("git_commit", "")).endswith("+changes"):
        notes.append(
            "The source had changes that are in no commit, so the commit alone does not "
            "reproduce the run."
        )
    return notes


def _counted(r: RunData) -> list[str]:
    """Updates that were skipped, episodes that ran again, workers that were replaced."""
    notes = []
    for phase, key in [
        (p, k) for p in dict.fromkeys(m["phase"] for m in r.metrics) for k in r.keys(p)
    ]:
        values = [v for v in r.series(phase, key)[1] if v is not None]
        total, most = int(sum(values)), int(max(values, default=0))
        where = words.phase(phase)
        if key.endswith("skipped_updates") and most > 0:  # a running count
            notes.append(
                f"{most} {words.plural('update', most)} of {where} "
                f"{'was' if most == 1 else 'were'} skipped because the loss or gradient was not "
                "finite. Lower the learning rate if there are many."
            )
        elif key.endswith("retries") and total > 0:
            notes.append(
                f"{total} {words.plural('episode', total)} of {where} ran again after a "
                "simulator failure."
            )
        elif key.endswith("restarts") and total > 0:
            notes.append(
                f"{total} {words.plural('restart', total)} of simulator workers during {where}."
            )
    return notes


def _reward_hacking(r: RunData, gap: float = 0.2) -> list[str]:
    """A warning where the reward model's opinion of how episodes end has outgrown success by
    more than ``gap``."""
    keys = ("reward/progress_end", "rollout/success")
    rows = [m for m in r.metrics if m["phase"] == "rl" and all(m.get(k) is not None for k in keys)]
    # (those that began in the middle end further on)
    rows = [m for m in rows if not m.get("rollout/led")]
    pairs = [tuple(m[k] for k in keys) for m in rows]
    if len(pairs) < 4:
        return []
    part = max(1, min(10, len(pairs) // 3))
    first, last = ([sum(x) / part for x in zip(*some)] for some in (pairs[:part], pairs[-part:]))
    growth = (last[0] - last[1]) - (first[0] - first[1])
    if growth <= gap or last[0] <= first[0]:
        return []
    return [
        "The reward model may be exploited: its mean progress at the end of an episode went from "
        f"{first[0]:.2f} to {last[0]:.2f} while success went from {percent(first[1])} to "
        f"{percent(last[1])}. Watch the videos; refit the reward (reward_check.refit_every) or "
        "lower its weight."
    ]


def _late(run: RunData, phase: str, key: str, count: int = 10) -> float | None:
    """Mean of a metric over the last lines."""
    values = [v for v in run.series(phase, key)[1][-count:] if v is not None]
    return sum(values) / len(values) if values else None
