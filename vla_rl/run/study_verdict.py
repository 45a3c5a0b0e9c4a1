"""What the runs of a study say: success of each method, every two of them seed by seed, and how far
each was after the same episodes, control steps and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.evaluation import verdict
from vla_rl.monitoring.metrics import VERDICT_FILE, write_json
from vla_rl.reporting.figures import SPENT, learning_curve
from vla_rl.reporting.runs import load_run
from vla_rl.run.study import Plan, measured, scores


def judged(
    frozen: Mapping[str, Any], folder: Path, names: Sequence[str], new: str | None = None
) -> dict[str, Any]:
    """Figures of all runs of ``names`` that are there, and what they say; with ``new`` of that one
    against each of the others. JSON-ready."""
    plan, seeds = Plan(**frozen["plan"]), frozen["seeds"]
    found = {name: _found(frozen, folder, name) for name in names}
    curves = {name: _curves(folder, name, found[name]) for name in names}
    shown = list(names) if new is None else [new]
    return {
        "measure": measured(plan.measure),
        "runs": {
            name: {str(seed): sum(of) / len(of) for seed, of in found[name].items()}
            for name in shown
        },
        "missing": sum(len(seeds) - len(found[name]) for name in names),
        "methods": verdict.methods(found),
        "pairs": verdict.to_dict(verdict.pairs(found, new)),
        "curves": {by: verdict.on_a_grid({n: of[by] for n, of in curves.items()}) for by in SPENT},
    }


def whole(frozen: Mapping[str, Any], folder: Path, added: Sequence[Mapping[str, Any]]) -> Any:
    """The document of a study: its plan and verdict, and those of what was ``added`` after the
    freeze, each with its verdict."""
    names = list(frozen["plan"]["methods"])
    return {
        **frozen,
        "set": "test" if frozen["plan"]["measure"].startswith("test") else "held_out",
        **judged(frozen, folder, names),
        "added": [
            {**a, **judged(frozen, folder, [*names, a["method"]], a["method"])} for a in added
        ],
    }


def write(document: Mapping[str, Any], folder: Path) -> None:
    """Beside the runs, where the report of the folder finds it."""
    write_json(folder / VERDICT_FILE, document)


def _found(frozen: Mapping[str, Any], folder: Path, name: str) -> dict[int, list[float]]:
    return {
        seed: of
        for seed in frozen["seeds"]
        if (of := scores(frozen, folder, name, seed)) is not None
    }


def _curves(
    folder: Path, name: str, seeds: Mapping[int, Any]
) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """{what is spent: {seed: success on the held-out states that also choose}}, of runs that have
    RL."""
    runs = {seed: load_run(folder / name / f"seed_{seed}") for seed in seeds}
    return {
        by: {seed: curve for seed, run in runs.items() if len(curve := learning_curve(run, by)) > 1}
        for by in SPENT
    }


def require(document: Mapping[str, Any], least: float) -> None:
    """Raise `UserError` where a run is missing, or succeeds less often than ``least``."""
    low = [
        f"{name}, seed {seed}: {share:.0%}"
        for name, of in document["runs"].items()
        for seed, share in of.items()
        if share < least
    ]
    if document["missing"]:
        low.append(f"{document['missing']} runs are missing")
    if low:
        raise UserError(f"less than --least {least:g} in {'; '.join(low)}")
