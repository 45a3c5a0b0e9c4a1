"""What a run on a cluster did with its time: how busy each role was, how old the data were, who
was lost."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from vla_rl.cluster.status import STATUS_FILE, placement_lines
from vla_rl.display import words
from vla_rl.display.charts import percent, short, stacked_bar
from vla_rl.reporting import sections
from vla_rl.reporting.runs import RunData

_AGE = "cluster/staleness/"
_ROLES = {
    "rollouts at work": "cluster/rollout_busy_seconds",
    "inference at work": "cluster/inference_busy_seconds",
    "reward workers at work": "cluster/reward_busy_seconds",
    "learner at work": "time/update",
    "learner waiting for episodes": "cluster/learner_wait_seconds",
    "driver fetching episodes": "cluster/take_seconds",
}


def shares(run: RunData) -> dict[str, float]:
    """Shares of the iterations' time in which the actors of each role had work (their mean), and in
    which the learner waited for episodes. Empty for a run on one machine."""
    total = _sum(run, "time/iteration") - _sum(run, "time/evaluate")
    if not run.keys("rl") or "cluster/rollout_busy_seconds" not in run.keys("rl") or total <= 0:
        return {}
    return {
        name: min(1.0, seconds / total)
        for name, key in _ROLES.items()
        if (seconds := _sum(run, key))
    }


def at_work(run: RunData) -> str:
    """`shares` in a line; empty for a run on one machine."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares(run).items())


def ages(run: RunData) -> dict[int, float]:
    """{age in versions: share of all iterations' decisions}; empty where rollouts and learning
    took turns."""
    found = {
        int(key.removeprefix(_AGE)): run.mean("rl", key)
        for key in run.keys("rl")
        if key.startswith(_AGE)
    }
    return {age: share for age, share in sorted(found.items()) if share is not None}


def section(run: RunData) -> str:
    """The part of the page; empty for a run on one machine."""
    roles = shares(run)
    if not roles:
        return ""
    rows = [("", [escape(name), percent(share)]) for name, share in roles.items()]
    rows += [("", [escape(name), text]) for name, text in _counts(run)]
    old = ages(run)
    parts = [
        (f"{age}", share, f"{age} {words.plural('version', age)} old: {percent(share)}")
        for age, share in old.items()
    ]
    bar = (
        sections.both_widths(lambda width: stacked_bar(parts, width=width, height=28))
        if old
        else ""
    )
    title = '<h3 class="gap">Age of the decisions learned from, in versions</h3>' if old else ""
    losses = "".join(f"<li>{escape(text)}</li>" for text in _losses(run))
    return sections.section(
        "On the cluster",
        "Shares are of the time of the iterations. Where the learner waits, more rollouts help; "
        "where rollouts idle, the learner is what limits.",
        sections.table(["Role", ""], rows),
        _placement(run),
        title + bar,
        f'<h3 class="gap">Actors that were lost and replaced</h3><ul class="notes">{losses}</ul>'
        if losses
        else "",
    )


def _counts(run: RunData) -> list[tuple[str, str]]:
    megabytes = {name: _sum(run, f"cluster/bytes_{name}") / 1e6 for name in ("in", "out")}
    counts = [
        ("actors replaced", "cluster/restarts"),
        ("restarts of the learner ranks", "cluster/learner_restarts"),
    ]
    lines = [(name, f"{_sum(run, key):.0f}") for name, key in counts if key in run.keys("rl")]
    lines.append(
        ("MB of episodes, of weights", f"{short(megabytes['in'])}, {short(megabytes['out'])}")
    )
    published = _sum(run, "cluster/bytes_published") / 1e6
    if published:  # (runs of before did not count it)
        each = 1e3 * _sum(run, "cluster/publish_seconds") / published
        lines.append(("ms of the driver to publish a MB of weights", f"{each:.1f}"))
    return lines


def _placement(run: RunData) -> str:
    """Where the actors were at last, and why."""
    found = _status(run)
    try:
        why = " ".join(placement_lines(found["placement"]))
        seats = [
            (f"{s['role']} {s['number']}", f"{s['host']}, {s['node'][:8]}") for s in found["seats"]
        ]
        rows = [("", [escape(who), escape(where)]) for who, where in seats]
    except (KeyError, TypeError):  # of an older run, or damaged
        return ""
    table = sections.table(["Actor", "Host, Ray's node"], rows)
    return f'<h3 class="gap">Where the actors were</h3><p>{escape(why)}</p>{table}'


def _losses(run: RunData) -> list[str]:
    found = _status(run).get("restarts")
    return [str(text) for text in found] if isinstance(found, list) else []


def _status(run: RunData) -> dict[str, Any]:
    try:
        found = json.loads((run.path / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or damaged: the counts above remain
        return {}
    return found if isinstance(found, dict) else {}


def _sum(run: RunData, key: str) -> float:
    return sum(value for value in run.series("rl", key)[1] if value is not None)
