"""``vla-rl bench rhythm``: environment steps a second, actor and learner at the same time against
by turns.

Both sides start from one policy with one seed, run the same iterations, and make every update that
their decisions earn, so the work is the same; what is counted runs from the first episode to the
last update.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.against import make_start
from benchmarks.learning.runs import rl_records
from benchmarks.measuring import in_turns, over_rounds, table
from vla_rl import config as configs
from vla_rl.checks import preflight
from vla_rl.checks.options import check_run
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError
from vla_rl.learning.figures import mean_figures
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.run.pipeline import run_pipeline

SIDES = ("alternate", "concurrent")
_TRIAL = 3  # iterations of the run that finds the pace
_FEWEST = 1e-3  # seconds


def measure(
    overrides: Sequence[str], iterations: int, rounds: int, as_given: bool
) -> dict[str, Any]:
    """Both rhythms of a config in turns.

    Unless ``as_given``, ``algorithm.updates_per_decision`` is chosen so that by turns updating
    takes as long as collecting does, where doing both at once can gain most. Raises `ConfigError`
    for an algorithm without a replay.
    """
    with tempfile.TemporaryDirectory(prefix="vla_rl_rhythm_") as folder:
        check_run(configs.compose([*overrides, "rl.rhythm=concurrent"]))
        plain = _config(overrides, folder, "trial", "alternate")
        plain.rl.iterations = _TRIAL
        start = plain.checkpoint or make_start(overrides, [plain], [overrides])
        shown = plain.run_dir / "dataset"
        plain.dataset = plain.dataset or (str(shown.resolve()) if shown.exists() else "")
        given = plain.algorithm.updates_per_decision
        pace = given if as_given else _even_pace(plain, given)
        measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for side, number in in_turns(SIDES, rounds):
            config = _config(overrides, folder, f"{side}_{number}", side)
            config.checkpoint, config.dataset = plain.checkpoint, plain.dataset
            config.algorithm.updates_per_decision, config.rl.iterations = pace, iterations
            measured[side].append(figures_of(run_pipeline(config), side))
    return {
        "start": start,
        "iterations": iterations,
        "rounds": rounds,
        "threads": preflight.threads(plain),
        "updates_per_decision": pace,
        "balanced": not as_given,
        "sides": {
            side: {"mean": mean_figures(rows), "rounds": rows} for side, rows in measured.items()
        },
        **compared(measured),
    }


def _config(overrides: Sequence[str], folder: str, name: str, rhythm: str) -> RunConfig:
    """The config with nothing but online RL, each decision of which earns updates from the first
    on."""
    config = configs.compose([*overrides, f"rl.rhythm={rhythm}"])
    config.output_dir, config.name, config.wandb.mode, config.phases = folder, name, "off", ["rl"]
    config.rl.eval_every, config.rl.guard, config.rl.keep_best = 0, "off", False
    config.algorithm.start_decisions, config.algorithm.offline_updates = 1, 0
    return config


def _even_pace(config: RunConfig, given: float) -> float:
    """Updates per decision with which an iteration updates for as long as it collects; from a
    short run by turns."""
    if not given:
        raise ConfigError(
            "algorithm.updates_per_decision=0.0 learns nothing: give a pace, such as 1.0"
        )
    rows = rl_records(run_pipeline(config))[1:]  # without the first, which imports and compiles
    collect, update = (sum(row[name] for row in rows) for name in ("engine/seconds", "time/update"))
    return round(given * collect / max(update, _FEWEST), 3)


def figures_of(run: Path, side: str) -> dict[str, float]:
    """What a run did from its first episode to its last update."""
    rows, others = rl_records(run), read_metrics(run / METRICS_FILE)
    extra = {r["phase"]: r for r in others if r["phase"] in ("offline", "finish")}
    finish, offline = extra.get("finish", {}), extra.get("offline", {})
    seconds = (
        sum(row["time/iteration"] for row in rows)
        + finish.get("time/finish", 0.0)
        - offline.get("time/start", 0.0)
    )
    updates = sum(row["replay/updates"] for row in rows) + finish.get("replay/updates", 0.0)
    decisions = sum(row["engine/decisions"] for row in rows)
    figures = {
        "seconds": seconds,
        "control_steps": float(rows[-1]["control_steps"]),
        "updates": updates,
        "decisions": decisions,
        "control_steps_per_second": rows[-1]["control_steps"] / seconds,
        "updates_per_decision": updates / decisions,
        "collect_seconds": sum(row["engine/seconds"] for row in rows),
    }
    if side == "alternate":
        return figures | {"update_seconds": sum(row["time/update"] for row in rows)}
    told = [row for row in rows if row.get("learner/staleness") is not None]
    return figures | {
        "finish_seconds": finish["time/finish"],
        "actor_wait_share": sum(row["actor/wait_share"] for row in rows) / len(rows),
        "learner_wait_share": sum(row["learner/wait_share"] for row in rows) / len(rows),
        "staleness": sum(row["learner/staleness"] for row in told) / max(1, len(told)),
        "versions": float(rows[-1]["learner/version"]),
    }


def compared(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Concurrent over alternate in environment steps a second, and in the updates that went with
    each decision."""
    steps, updates = (
        over_rounds(*([row[key] for row in measured[side]] for side in SIDES))
        for key in ("control_steps_per_second", "updates_per_decision")
    )
    return {**steps, "update_ratio": updates["ratio"]}


def text(document: Mapping[str, Any]) -> str:
    a, b = (document["sides"][side]["mean"] for side in SIDES)
    rows = [("", *SIDES)]
    for name in (
        "control_steps",
        "updates",
        "updates_per_decision",
        "seconds",
        "control_steps_per_second",
    ):
        rows.append((name.replace("_", " "), f"{a[name]:.1f}", f"{b[name]:.1f}"))
    return (
        f"{document['rounds']} rounds of {document['iterations']} iterations a side, from "
        f"{document['start']}\n{table(rows)}\nby turns: {a['collect_seconds']:.1f} s collecting, "
        f"{a['update_seconds']:.1f} s updating; at once: the learner had nothing to do "
        f"{b['learner_wait_share']:.0%} of its time, the actor waited {b['actor_wait_share']:.0%} "
        f"of its, episodes were {b['staleness']:.1f} versions old, the last updates took "
        f"{b['finish_seconds']:.1f} s\nconcurrent / alternate: {document['ratio']:.2f} in control "
        f"steps a second ({document['low']:.2f} to {document['high']:.2f}), at "
        f"{document['update_ratio']:.3f} times the updates per decision"
    )
