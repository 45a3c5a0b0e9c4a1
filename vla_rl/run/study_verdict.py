"""What the runs of a study say: success of each method, every two of them seed by seed, and how far
each was after the same episodes, control steps and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.evaluation import verdict
from vla_rl.monitoring.metrics import TEST, VERDICT_FILE, write_json
from vla_rl.reporting.figures import SPENT, learning_curve
from vla_rl.reporting.runs import load_run
from vla_rl.run.study import measured, scores


def whole(
    frozen: Mapping[str, Any], folder: Path, added: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The document of a study: its plan and what its runs say, and the same of each method that was
    ``added`` after the freeze, against each of the study's. JSON-ready."""
    own, measure = list(frozen["plan"]["methods"]), frozen["plan"]["measure"]
    runs = _Runs(frozen, folder, [*own, *(one["method"] for one in added)])
    return {
        **frozen,
        "set": TEST if measure.startswith(TEST) else "held_out",
        **runs.judged(own),
        "added": [{**one, **runs.judged(own, one["method"])} for one in added],
    }


class _Runs:
    """What the runs of a study have come to: success, and curves of those that have RL, on the
    held-out states that also choose."""

    def __init__(self, frozen: Mapping[str, Any], folder: Path, names: Sequence[str]) -> None:
        self.frozen = frozen
        self.scores, self.curves = {}, {}
        for name in names:
            found = {seed: scores(frozen, folder, name, seed) for seed in frozen["seeds"]}
            self.scores[name] = {seed: of for seed, of in found.items() if of is not None}
            runs = {s: load_run(folder / name / f"seed_{s}") for s in self.scores[name]}
            drawn = {by: {s: learning_curve(run, by) for s, run in runs.items()} for by in SPENT}
            self.curves[name] = {
                by: {seed: curve for seed, curve in of.items() if len(curve) > 1}
                for by, of in drawn.items()
            }

    def judged(self, own: Sequence[str], new: str | None = None) -> dict[str, Any]:
        """What is said of the methods ``own``, or of a ``new`` one against each of them."""
        names = [*own, *([new] if new else [])]
        found = {name: self.scores[name] for name in names}
        return {
            "measure": measured(self.frozen["plan"]["measure"]),
            "runs": {
                name: {str(seed): sum(of) / len(of) for seed, of in found[name].items()}
                for name in ([new] if new else own)
            },
            "missing": sum(len(self.frozen["seeds"]) - len(of) for of in found.values()),
            "methods": verdict.methods(found),
            "pairs": verdict.to_dict(verdict.pairs(found, new)),
            "curves": {
                by: verdict.on_a_grid({name: self.curves[name][by] for name in names})
                for by in SPENT
            },
        }


def write(document: Mapping[str, Any], folder: Path) -> None:
    """Beside the runs, where the report of the folder finds it."""
    write_json(folder / VERDICT_FILE, document)


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
