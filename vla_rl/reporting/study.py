"""Several runs: which of them are alike, and figures over the seeds of those.

Episodes of one run share a policy, so they are not independent trials of a method: seeds are.
Figures of a group are therefore medians, worst and best over its runs, with Student's t interval of
their mean.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from vla_rl.config import MACHINE_KEYS, as_learned
from vla_rl.display import words
from vla_rl.display.charts import percent
from vla_rl.evaluation.outcome import compare_outcomes, summarise
from vla_rl.evaluation.statistics import mean_interval, wilson_interval
from vla_rl.reporting import figures
from vla_rl.reporting.runs import RunData

_PATHS = ("checkpoint", "dataset")  # may name the seed's own folder
_SHOWN = 8  # differing keys in a headline
ABSENT = "–"


@dataclass
class Group:
    """Runs that differ in nothing but the seed and the machine.

    ``settings``: where they differ from other groups; ``name``: as many of them as tell the group
    from all others.
    """

    runs: list[RunData]
    values: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def unit(self) -> str:
        """What the runs are called together: seeds, where each has its own."""
        seeds = {r.seed for r in self.runs}
        return words.plural(
            "seed" if len(seeds) == len(self.runs) and None not in seeds else "run", len(self.runs)
        )

    @property
    def ends(self) -> tuple[str, str] | None:
        """The first and the last evaluation that any run has; None where there are not two."""
        names = sorted({name for r in self.runs for name in r.names}, key=words.evaluation_order)
        return (names[0], names[-1]) if len(names) > 1 else None

    @property
    def names(self) -> list[str]:
        return sorted({name for r in self.runs for name in r.names}, key=words.evaluation_order)

    @property
    def finished(self) -> list[RunData]:
        """Runs that have both the first and the last evaluation."""
        ends = self.ends
        return [r for r in self.runs if ends and all(name in r.evaluations for name in ends)]

    @property
    def minutes(self) -> list[float]:
        """Of the runs that have come to the last evaluation, if any has."""
        ended = [r for r in self.runs if self.names and self.names[-1] in r.evaluations]
        return [r.seconds / 60 for r in ended or self.runs if r.seconds]


def written(value: Any) -> str:
    """A config value as one types it."""
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value).replace('"', "")


# ----------------------------------------------------------------------------------------- grouping
def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """The runs in groups of equal config; seed, name and what belongs to the machine do not
    count."""
    groups: list[Group] = []
    for run in runs:
        values = _compared(run)
        found = next((g for g in groups if g.values == values), None)
        if found is None:
            groups.append(Group([run], values))
        else:
            found.runs.append(run)
    keys = differing_keys(groups)
    naming = naming_keys(groups)
    for group in groups:
        group.settings = {
            k: group.values[k] for k in keys if k in group.values and _tells(k, group, groups)
        }
        group.name = ", ".join(
            f"{k}={written(group.values[k])}" for k in naming if k in group.values
        )
    _label([r for g in groups for r in g.runs], groups)
    return groups


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """The config keys in which groups differ: tasks and kinds of components first."""
    keys = dict.fromkeys(key for g in groups for key in g.values)
    differ = [k for k in keys if len({written(g.values.get(k, ABSENT)) for g in groups}) > 1]
    return sorted(differ, key=lambda k: (k != "tasks", not k.endswith(".type")))


def naming_keys(groups: Sequence[Group]) -> list[str]:
    """Few keys that tell every group from every other: tasks, kinds of components, then what
    splits most; paths last."""
    keys = differing_keys(groups)
    chosen = [k for k in keys if k == "tasks" or k.endswith(".type")]
    for rest in ([k for k in keys if k not in _PATHS], list(_PATHS)):
        while (apart := _classes(groups, chosen)) < len(groups):
            best = max(rest, key=lambda k: _classes(groups, [*chosen, k]), default=None)
            if best is None or _classes(groups, [*chosen, best]) == apart:
                break
            chosen.append(best)
    return chosen


def _classes(groups: Sequence[Group], keys: Sequence[str]) -> int:
    """How many groups differ in these keys."""
    return len({tuple(written(g.values.get(k, ABSENT)) for k in keys) for g in groups})


def _tells(key: str, group: Group, groups: Sequence[Group]) -> bool:
    """Whether a key tells a group from one with the same component; options of another component
    say nothing more."""
    kind = f"{key.partition('.')[0]}.type"
    if key == kind or kind not in group.values:
        return True
    alike = [g for g in groups if g.values.get(kind) == group.values[kind]]
    return len({written(g.values.get(key, ABSENT)) for g in alike}) > 1


def _compared(run: RunData) -> dict[str, Any]:
    """The flat config without seed, name and machine; without a config, the tasks that were
    evaluated."""
    if not run.tree:
        return {"tasks": sorted({o.task_id for e in run.evaluations.values() for o in e.outcomes})}
    values = {}
    for key, value in _flat(as_learned(run.tree)):
        if key in ("seed", "name") or f"{key}:".startswith(MACHINE_KEYS):
            continue
        values[key] = _without_seed(value, run.seed) if key in _PATHS else value
    return values


def _without_seed(value: Any, seed: int | None) -> Any:
    """A path with the run's own seed in it (``starts/seed_3/checkpoints/sft``) is the same for
    every seed."""
    if not isinstance(value, str) or seed is None:
        return value
    found = list(re.finditer(rf"(?<!\d){seed}(?!\d)", value))
    return f"{value[: found[-1].start()]}SEED{value[found[-1].end() :]}" if found else value


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and (tree or not prefix):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _label(runs: Sequence[RunData], groups: Sequence[Group]) -> None:
    """Seeds name the runs of one group; among several groups, or where a seed is there twice,
    folders do."""
    seeds = [r.seed for r in runs]
    if len(groups) == 1 and None not in seeds and len(set(seeds)) == len(seeds):
        return
    for run in runs:
        twins = [r for r in runs if r.path.name == run.path.name]
        run.label = run.path.name if len(twins) == 1 else f"{run.path.parent.name}/{run.path.name}"


# ------------------------------------------------------------------------------------------ figures
def spread(
    values: Sequence[float], pooled: tuple[float, float] | None, low: float, high: float
) -> dict[str, Any]:
    """Median, worst, best and mean over runs; "low" and "high" are the 95 % interval of the mean
    (None for one run).

    Student's t, kept in ``low`` … ``high``. It is never narrower than ``pooled``, the interval as
    if episodes of all runs were independent: seeds that happen to agree, such as three times 100 %,
    would make it a point.
    """
    found = {
        "median": median(values),
        "worst": min(values),
        "best": max(values),
        "mean": fmean(values),
        "runs": len(values),
    }
    interval = mean_interval(values)
    if interval is None:
        return {**found, "low": None, "high": None}
    bottom, top = pooled or interval
    return {
        **found,
        "low": max(low, min(interval[0], bottom)),
        "high": min(high, max(interval[1], top)),
    }


def rates(
    group: Group, name: str, of: Callable[[RunData], Mapping[str, Any] | None] | None = None
) -> dict[str, Any] | None:
    """`spread` of the success rates of an evaluation (or of what ``of`` takes from a run); None
    where no run has it."""
    take = of or (
        lambda r: summarise(r.evaluations[name].outcomes) if name in r.evaluations else None
    )
    rows = [row for r in group.runs if (row := take(r)) is not None]
    if not rows:
        return None
    pooled = wilson_interval(
        sum(row["successes"] for row in rows), sum(row["episodes"] for row in rows)
    )
    return {
        **spread([row["rate"] for row in rows], pooled, 0.0, 1.0),
        "episodes": sum(row["episodes"] for row in rows),
    }


def _tested(name: str) -> Callable[[RunData], Mapping[str, Any] | None]:
    return lambda run: summarise(run.tests[name].outcomes) if name in run.tests else None


def task_rates(group: Group, name: str) -> dict[str, dict[str, Any]]:
    """`rates` of each task."""
    tasks = dict.fromkeys(
        t for r in group.runs if name in r.evaluations for t in r.evaluations[name].per_task()
    )

    def of(task: str) -> Callable[[RunData], Mapping[str, Any] | None]:
        return lambda r: r.evaluations[name].per_task().get(task) if name in r.evaluations else None

    return {task: row for task in tasks if (row := rates(group, name, of(task))) is not None}


def difference(group: Group) -> dict[str, Any] | None:
    """`spread` of each run's difference on its same episodes, with how many runs rose and fell;
    None without any."""
    comparisons = [c for r in group.finished if (c := figures.paired(r)) is not None]
    if not comparisons or group.ends is None:
        return None
    pairs = [pair for r in group.finished for pair in figures.paired_outcomes(r)]
    pooled = compare_outcomes(pairs)
    values = [c.difference for c in comparisons]
    row = spread(values, (pooled.difference_low, pooled.difference_high), -1.0, 1.0)
    return figures.named(
        group.ends,
        {**row, "above": sum(v > 0 for v in values), "below": sum(v < 0 for v in values)},
    )


def failures(runs: Sequence[RunData], name: str) -> dict[str, int] | None:
    """Failed episodes by kind, over all runs; None where a run does not tell."""
    told = [r.failures[name][""] for r in runs if name in r.failures]
    if not told or len(told) < len(runs):
        return None
    kinds = words.failure_kinds({kind for counts in told for kind in counts})
    return {kind: sum(counts.get(kind, 0) for counts in told) for kind in kinds}


def median_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, int]]:
    """(episodes, median success, number of runs) where at least half of the runs, and two, have got
    to.

    Between two points of a run its curve is straight.
    """
    curves = [c for c in curves if c]
    need = max(2, (len(curves) + 1) // 2)
    out = []
    for at in sorted({x for c in curves for x, _ in c}):
        values = [v for c in curves if (v := _height(c, at)) is not None]
        if len(values) >= need:
            out.append((at, median(values), len(values)))
    return out


def _height(curve: Sequence[tuple[float, float]], at: float) -> float | None:
    if not curve[0][0] <= at <= curve[-1][0]:
        return None
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[0][1]


def verdict(groups: Sequence[Group]) -> tuple[str, str]:
    """What the study shows, in a plain sentence, and the evidence in a second one."""
    if len(groups) == 1:
        return group_verdict(groups[0])
    count = sum(len(g.runs) for g in groups)
    keys = list(dict.fromkeys([*naming_keys(groups), *(k for g in groups for k in g.settings)]))
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (
        f"{count} runs of {len(groups)} kinds, side by side",
        f"They differ in {', '.join(keys[:_SHOWN])}{more}. Unlike runs are not pooled: each kind "
        "has its own figures.",
    )


def group_verdict(group: Group) -> tuple[str, str]:
    if not group.names:
        return (
            "These runs have no evaluation yet",
            "Success figures appear once an evaluation phase is complete.",
        )
    over, missing = f"{len(group.runs)} {group.unit}", len(group.runs) - len(group.finished)
    change = difference(group)
    if change is None or group.ends is None:
        name = group.names[-1]
        s = rates(group, name)
        assert s is not None
        head = f"The {words.evaluation(name)} policies solve a median of {percent(s['median'])}"
        return (
            f"{head} over {s['runs']} {group.unit}",
            f"Worst {percent(s['worst'])}, best {percent(s['best'])}.",
        )
    done = Group(group.finished, group.values)
    before, after = (rates(done, name) for name in group.ends)
    assert before is not None and after is not None
    a, b = (words.evaluation(name) for name in group.ends)
    clear = change["low"] is not None and (change["low"] > 0 or change["high"] < 0)
    verb = ("raised" if change["mean"] > 0 else "lowered") if clear else "moved"
    head = (
        f"{b} {verb} success from a median of {percent(before['median'])} to "
        f"{percent(after['median'])} over {change['runs']} {done.unit} (worst "
        f"{percent(after['worst'])}, best {percent(after['best'])})"
    )
    interval = (
        ""
        if change["low"] is None
        else (
            f" (95 % interval over {done.unit} {words.signed(change['low'] * 100)} to "
            f"{words.signed(change['high'] * 100)})"
        )
    )
    evidence = (
        f"Mean difference {words.signed(change['mean'] * 100)} points{interval}; {b} ended above "
        f"{a} in {change['above']}, below it in {change['below']} of {change['runs']} runs."
    )
    waiting = (
        f" {missing} of {over} {'has' if missing == 1 else 'have'} no last evaluation yet."
        if missing
        else ""
    )
    return head if clear else f"{head}: no more than chance explains", evidence + waiting


# ------------------------------------------------------------------------------------------ summary
def group_summary(group: Group) -> dict[str, Any]:
    """The figures of a group of alike runs, for scripts."""
    evaluations = {}
    for name in group.names:
        told = failures([r for r in group.runs if name in r.evaluations], name)
        row = {**(rates(group, name) or {}), "tasks": task_rates(group, name)}
        evaluations[name] = row if told is None else {**row, "failures": told}
    curve = median_curve([figures.learning_curve(r) for r in group.runs])
    use = [u["image_use"] for r in group.runs if (u := figures.image_use(r)) is not None]
    tested = dict.fromkeys(name for r in group.runs for name in r.tests)
    return {
        "name": group.name,
        "settings": group.settings,
        "runs": [r.label for r in group.runs],
        "seeds": [r.seed for r in group.runs],
        "evaluations": evaluations,
        "tests": {name: rates(group, name, _tested(name)) for name in tested},
        "difference": difference(group),
        "learning_curve": [
            {"episodes": at, "success": rate, "runs": count} for at, rate, count in curve
        ],
        "image_use": {"median": median(use), "worst": min(use), "best": max(use), "runs": len(use)}
        if use
        else None,
        **figures.costs(group.runs),
    }


def notes(group: Group) -> list[str]:
    """What makes the runs of a group less than alike and independent."""
    found = []
    seeds = [r.seed for r in group.runs if r.seed is not None]
    if twice := sorted({s for s in seeds if seeds.count(s) > 1}):
        which = f"{words.plural('Seed', len(twice))} {', '.join(map(str, twice))}"
        found.append(
            f"{which} ran more than once: such runs are not independent, so the interval "
            "is too narrow."
        )
    commits = {str(r.versions["git_commit"]) for r in group.runs if r.versions.get("git_commit")}
    if len(commits) > 1:
        found.append(
            f"The runs are of {len(commits)} different commits: "
            f"{', '.join(c[:12] for c in sorted(commits))}."
        )
    return found
