"""The figures of an iteration that do not come from the algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vla_rl.specs import FAILURE_KINDS
from vla_rl.types import Trajectory


def add_figures(metrics: dict[str, float], figures: Mapping[str, float]) -> None:
    """Take the figures of a scoring into an iteration's: seconds add up, of others the last ones
    count."""
    for name, value in figures.items():
        metrics[name] = value + (metrics.get(name, 0.0) if name.startswith("time/") else 0.0)


def mean_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def rollout_metrics(
    trajectories: Sequence[Trajectory], stats: Mapping[str, float]
) -> dict[str, float]:
    """Success, length and failures of this iteration's episodes, and the engine's figures (of all
    rounds).

    ``rollout/failure/KIND`` are shares of all episodes; they are left out where the env does not
    tell how episodes fail.
    """
    steps = [t.num_control_steps for t in trajectories]
    wins = [t.num_control_steps for t in trajectories if t.success]
    metrics = {
        "rollout/success": sum(t.success for t in trajectories) / len(trajectories),
        "rollout/control_steps": sum(steps) / len(steps),
        "rollout/control_steps_to_success": sum(wins) / len(wins) if wins else float("nan"),
    }
    failures = [t.failure for t in trajectories if not t.success]
    if any(failures) or not failures:
        metrics |= {
            f"rollout/failure/{kind}": failures.count(kind) / len(trajectories)
            for kind in FAILURE_KINDS
        }
    # (a cluster names its own)
    return metrics | {k if "/" in k else f"engine/{k}": float(v) for k, v in stats.items()}
