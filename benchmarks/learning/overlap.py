"""`vla-rl bench overlap`: episodes a second of a run on Ray that rolls out while it learns, against
one that takes turns.

Simulator and learner would share this machine's cores, where overlapping gains little. So their
times are simulated, by sleeping: each control step of the toy env takes ``env.step_seconds``, in
some episodes far longer (``env.step_tail``), and each update of `Paced` takes
``algorithm.update_seconds`` more than it computes, which are found by a short run so that by turns
learning takes about as long as rolling out. Both sides start from one policy with one seed; with a
learning rate of 0 (the default here) they play the same episodes. The first iterations, in which
actors start, and the last, for which nothing is rolled out ahead any more, do not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.learning.against import EQUAL_WORK, make_start, side_config
from benchmarks.learning.runs import rl_records
from benchmarks.measuring import in_turns, over_rounds, table
from vla_rl.algorithms.ppo import PPO
from vla_rl.bounds import bound
from vla_rl.config import RunConfig
from vla_rl.config.algorithms import PPOConfig
from vla_rl.errors import ConfigError
from vla_rl.learning.figures import mean_figures
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import RolloutBatch

DEFAULT = (
    "run=toy",
    "cluster=ray",
    "cluster.rollouts=2",
    "slots.workers=4",
    "slots.slots_per_worker=1",
    "rollout.serve_fraction=0.25",
    "rl.episodes_per_iteration=32",
    "rl.guard=off",
    "env.step_seconds=0.05",
    "env.step_tail=2.0",
    "algorithm.learning_rate=0",
    "algorithm.type=benchmarks.learning.overlap:Paced",
)
SIDES = {
    "turns": ("cluster.mode=sync",),
    "overlapped": ("cluster.mode=async", "cluster.max_staleness=2"),
}
_EDGE = 3  # iterations at either end of a run that do not count


@dataclass
class PacedConfig(PPOConfig):
    """``update_seconds``: how long each update sleeps."""

    update_seconds: float = bound(0.0, ge=0)


class Paced(PPO):
    """PPO whose updates take longer, as on a device that this machine does not have."""

    Config = PacedConfig

    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        time.sleep(self.config.update_seconds)  # type: ignore[attr-defined]
        return super().update(batch, rewards)


def measure(overrides: Sequence[str], iterations: int, rounds: int) -> dict[str, Any]:
    """Both sides in turns. ``iterations`` count, of each side in each of ``rounds``. Raises
    `ConfigError` for overrides of what it sets itself: cluster, mode, staleness, learner."""
    fixed = ("cluster=", "cluster.mode=", "cluster.max_staleness=")
    if other := [word for word in overrides if word.startswith(fixed) and word != "cluster=ray"]:
        raise ConfigError(
            f"{other[0]}: bench overlap compares cluster.mode=sync and async of "
            "cluster=ray; leave it out"
        )
    given = [*DEFAULT, *overrides]
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="vla-rl-overlap-") as name:
        trial = side_config([*given, *SIDES["turns"]], Path(name), "trial")
        if not isinstance(trial.algorithm, PacedConfig):
            asked = f"algorithm.type={trial.algorithm_type}"
            raise ConfigError(
                f"{asked}: bench overlap has a learner whose time it sets; leave it out"
            )
        runs = in_turns(SIDES, rounds)
        words = [[*given, *SIDES[side]] for side, _ in runs]
        configs = [
            side_config(w, Path(name), f"{side}_{number}") for w, (side, number) in zip(words, runs)
        ]
        start = trial.checkpoint or make_start(given, [trial, *configs], [given, *words])
        seconds = trial.algorithm.update_seconds or _as_long_as_rollouts(trial)
        for (side, _), config in zip(runs, configs):
            config.rl.iterations, config.algorithm.update_seconds = iterations + 2 * _EDGE, seconds
            rows = rl_records(run_pipeline(config))
            measured[side].append(figures_of(rows[_EDGE - 1], rows[_EDGE:-_EDGE]))
    return {
        "overrides": given,
        "sides": {s: list(w) for s, w in SIDES.items()},
        "start": start,
        "iterations": iterations,
        "update_seconds": seconds,
        "rounds": measured,
        **compared(measured),
    }


def _as_long_as_rollouts(config: RunConfig) -> float:
    config.rl.iterations = 2 * _EDGE
    rows = rl_records(run_pipeline(config))[_EDGE:]
    rollouts, updates = (
        sum(row[key] for row in rows) / len(rows) for key in ("engine/seconds", "time/update")
    )
    return round(max(0.0, rollouts - updates), 2)


def figures_of(before: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the iterations ``rows`` took and learned from, after the one ``before``; ages of
    decisions are in versions."""
    seconds = sum(float(row["time/iteration"]) for row in rows)
    episodes, steps = (float(rows[-1][key] - before[key]) for key in ("episodes", "control_steps"))
    return {
        "seconds": seconds,
        "episodes": episodes,
        "episodes_per_second": episodes / seconds,
        "control_steps": steps,
        "update_seconds": sum(float(row["time/update"]) for row in rows),
        "staleness": sum(float(row.get("cluster/staleness_mean") or 0.0) for row in rows)
        / len(rows),
        "oldest": max(float(row.get("cluster/staleness_max") or 0.0) for row in rows),
    }


def compared(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Overlapped over turns in episodes a second: of the means, and the range of rounds; whether
    both did the same work."""
    names = ("episodes_per_second", "control_steps")
    rates, steps = ([[row[name] for row in measured[side]] for side in SIDES] for name in names)
    return {
        **over_rounds(*rates),
        "equal_work": abs(sum(steps[1]) / sum(steps[0]) - 1.0) <= EQUAL_WORK,
    }


def text(document: Mapping[str, Any]) -> str:
    sides = {name: mean_figures(rows) for name, rows in document["rounds"].items()}
    rows = [("", *sides)]
    rows += [
        (key.replace("_", " "), *(f"{figures[key]:.2f}" for figures in sides.values()))
        for key in sides["turns"]
    ]
    return (
        f"{len(document['rounds']['turns'])} rounds of {document['iterations']} iterations a side; "
        f"simulated: control steps and {document['update_seconds']:g} s of each "
        f"update\n{table(rows)}\noverlapped / turns: {document['ratio']:.2f} times the episodes a "
        f"second ({document['low']:.2f} to {document['high']:.2f}), at "
        f"{'equal' if document['equal_work'] else 'UNEQUAL'} work"
    )
