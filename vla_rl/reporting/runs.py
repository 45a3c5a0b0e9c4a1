"""Reading run folders (see `metrics.py` for what one holds): what is missing stays empty, what
is damaged is noted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.config.phases import PHASES
from vla_rl.display import words
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.monitoring.metrics import ACTIONS_FILE, BEST_FILE, METRICS_FILE, read_metrics

_DEPTH = 3  # folders below the one named in which runs are looked for
_SET_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # what --fresh moved away
_COUNTS = ("seconds", "episodes", "control_steps", "iterations", "attempts", "updates")


@dataclass
class RunData:
    """What a run folder holds. ``problems`` are files that could not be read; ``label`` names the
    run among others; ``best`` says which policy ``checkpoints/best`` is (empty: there is none).

    ``failures`` count the failed episodes of an evaluation by kind, in all under "" and per task.
    """

    path: Path
    label: str
    seed: int | None
    config: str
    tree: dict[str, Any]
    versions: dict[str, Any]
    phases: dict[str, dict[str, Any]]
    peak_memory_bytes: int
    metrics: list[dict[str, Any]]
    evaluations: dict[str, EvaluationResult]  # on the states that choose
    tests: dict[str, EvaluationResult] = field(default_factory=dict)  # on the test set
    failures: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    # {policy: figures}, as `vla_rl.reporting.actions` reads them
    actions: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The evaluations, in the order of the phases."""
        return list(self.evaluations)

    @property
    def seconds(self) -> float:
        return sum(float(p.get("seconds") or 0) for p in self.phases.values())

    @property
    def guard(self) -> str:
        """What the guard of RL had to say; empty where it was content."""
        return str(self.phases.get("rl", {}).get("guard") or "")

    def total(self, key: str) -> int:
        return sum(int(p.get(key) or 0) for p in self.phases.values())

    def series(self, phase: str, key: str) -> tuple[list[float], list[float | None]]:
        """Steps and values of a metric."""
        rows = [r for r in self.metrics if r["phase"] == phase and key in r]
        return [float(r["step"]) for r in rows], [
            r[key] if _is_number(r[key]) else None for r in rows
        ]

    def keys(self, phase: str) -> list[str]:
        found: dict[str, None] = {}
        for r in self.metrics:
            if r["phase"] == phase:
                found |= {k: None for k, v in r.items() if _is_number(v)}
        return [k for k in found if k not in ("step", "time_s")]

    def mean(self, phase: str, key: str) -> float | None:
        values = [v for v in self.series(phase, key)[1] if v is not None]
        return sum(values) / len(values) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS_FILE, "phases.json")) or any(
        folder.glob("eval_*.json")
    )


def find_runs(folder: str | Path) -> list[Path]:
    """The runs of a folder: itself, unless it holds ``seed_*`` folders, else all below it but those
    that were set aside.

    Raises `UserError` where there is none.
    """
    folder = Path(folder)
    if is_run(folder) and not any(is_run(p) for p in folder.glob("seed_*")):
        return [folder]
    inner = _runs_below(folder, _DEPTH) if folder.is_dir() else []
    if not inner:
        raise UserError(
            f"{folder} is not a run: it holds no {METRICS_FILE}, phases.json or eval_*.json, nor "
            "does a folder in it. Name a folder that 'vla-rl quickstart' or 'vla-rl train' wrote, "
            "such as outputs/quickstart, or one of several runs."
        )
    return inner


def _runs_below(folder: Path, depth: int) -> list[Path]:
    found = []
    for path in sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: _natural(p.name)):
        if _SET_ASIDE.search(path.name):
            continue
        if is_run(path):
            found.append(path)
        elif depth > 1:
            found += _runs_below(path, depth - 1)
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts seed_2 before seed_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def load_run(folder: str | Path) -> RunData:
    """Read a run folder; a phase that was killed is filled in from the metrics it had logged."""
    folder = Path(folder)
    problems: list[str] = []
    phases = _read(folder / "phases.json", problems)
    peak = phases.get("peak_memory_bytes", 0)
    config, tree = _read_config(folder / "config.yaml", problems)
    seed = re.search(r"^seed:\s*(-?\d+)\s*$", config, re.MULTILINE)
    from_name = re.fullmatch(r"seed_(-?\d+)", folder.name)
    number = int(seed[1]) if seed else int(from_name[1]) if from_name else None
    metrics = read_metrics(folder / METRICS_FILE)
    evaluations, failures = _read_evaluations(folder, problems)
    return RunData(
        path=folder,
        label=folder.resolve().name if number is None else f"seed {number}",
        seed=number,
        config=config,
        tree=tree,
        versions=_read(folder / "versions.json", problems),
        phases=_recovered(
            {n: _record(n, v, problems) for n, v in phases.items() if isinstance(v, dict)},
            metrics,
            tree,
        ),
        peak_memory_bytes=int(peak) if _is_number(peak) else 0,
        metrics=metrics,
        evaluations={n: result for n, result in evaluations.items() if not result.test},
        tests={n: result for n, result in evaluations.items() if result.test},
        failures=failures,
        problems=problems,
        best=_read_best(folder / BEST_FILE, problems),
        actions=_read(folder / ACTIONS_FILE, problems),
    )


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read ({error}).")
        return {}
    if not isinstance(value, dict):
        problems.append(
            f"{path.name} could not be read (it holds a {type(value).__name__}, not an object)."
        )
        return {}
    return value


def _record(name: str, record: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """A phase's record without counts that are no numbers."""
    wrong = [k for k in _COUNTS if k in record and not _is_number(record[k])]
    problems += [f"phases.json: {k} of phase {name} is {record[k]!r}, not a number." for k in wrong]
    return {k: v for k, v in record.items() if k not in wrong}


def _read_best(path: Path, problems: list[str]) -> dict[str, Any]:
    note = _read(path, problems)
    return (
        note
        if all(_is_number(note.get(key)) for key in ("iteration", "success", "episodes"))
        else {}
    )


def _read_config(path: Path, problems: list[str]) -> tuple[str, dict[str, Any]]:
    """The text and what it says, both empty where there is none."""
    import yaml

    if not path.exists():
        return "", {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({error}).")
        return "", {}
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"{path.name} is no YAML ({' '.join(str(error).split())}).")
        return text, {}
    return text, tree if isinstance(tree, dict) else {}


def _read_evaluations(
    folder: Path, problems: list[str]
) -> tuple[dict[str, EvaluationResult], dict[str, dict[str, dict[str, int]]]]:
    """The results in the order of the phases, and how their episodes failed where the files say
    it."""
    results, failures = {}, {}
    names = (path.stem.removeprefix("eval_") for path in folder.glob("eval_*.json"))
    for name in sorted(names, key=words.evaluation_order):
        path = folder / f"eval_{name}.json"
        try:
            results[name] = EvaluationResult.load(path)
        except UserError as error:
            problems.append(str(error))
            continue
        raw = _read(path, problems)
        parts = {"": raw.get("total"), **(raw.get("tasks") or {})}
        told = {
            task: part["failures"]
            for task, part in parts.items()
            if isinstance(part, dict) and "failures" in part
        }
        if "" in told:
            failures[name] = {task: dict(kinds) for task, kinds in told.items()}
    known = any(kinds for parts in failures.values() for kinds in parts.values())
    return results, failures if known else {}


def _recovered(
    phases: dict[str, dict[str, Any]], metrics: list[dict[str, Any]], tree: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The phase records; those of a killed process with ``done``, ``of``, ``unit`` and the costs
    that it had logged.

    ``phases.json`` is written when a phase ends or is interrupted, so a kill leaves nothing of it
    there.
    """
    found = dict(phases)
    for name, (unit, where) in ((row.name, row.steps) for row in PHASES.values() if row.steps):
        group, key = where.split(".")
        record, rows = phases.get(name, {}), [r for r in metrics if r["phase"] == name]
        part = tree.get(group)
        total = part.get(key) if isinstance(part, Mapping) else None
        if not rows or record.get("complete") or not isinstance(total, int):
            continue
        last = rows[-1]
        filled = {"complete": False, "done": int(last["step"]), "of": total, "unit": f"{unit}s"}
        filled |= {
            k: int(last[k]) for k in ("episodes", "control_steps") if _is_number(last.get(k))
        }
        found[name] = {
            **record,
            **filled,
            "seconds": max(float(record.get("seconds") or 0), _spent(rows, metrics)),
        }
    order = [*(n for n in PHASES if n in found), *(n for n in found if n not in PHASES)]
    return {name: found[name] for name in order}


def _spent(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> float:
    """Seconds of a phase from the times of its rows. Its begin is not logged: the first stretch
    counts as the mean of the others, or, where there is one row alone, from the row before."""
    first, last = rows[0], rows[-1]
    at = metrics.index(first)
    steps = last["step"] - first["step"]
    if steps <= 0:
        return max(0.0, _time(last) - _time(metrics[at - 1])) if at else _time(last)
    return max(0.0, _time(last) - _time(first)) * last["step"] / steps


def _time(row: Mapping[str, Any]) -> float:
    return float(row["time_s"]) if _is_number(row.get("time_s")) else 0.0
