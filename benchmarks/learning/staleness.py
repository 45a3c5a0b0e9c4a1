"""`vla-rl bench staleness`: how well an algorithm learns from episodes that an older policy played.

Every batch is ``lag`` iterations old, as with a learner that runs ahead of its rollout workers:
episodes act with the weights of ``lag`` iterations ago (with those of the start, before there are
so many). The ways to learn from them:

    none      old log-probs are recomputed; who acted drops out of the loss
    coupled   the recorded log-probs are the old ones, so the clip range lies around the policy that acted
    truncate  recomputed, and each entry is weighed by min(π_p/μ, cap): decoupled PPO
    mask      as truncate, and entries beyond the cap either way are left out
    vtrace    as truncate, and the critic learns V-trace's targets

All ways and lags of a seed start from one SFT and meet the same held-out episodes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.measuring import say, table
from vla_rl.assembly.context import Run, evaluate_held_out
from vla_rl.config import RunConfig, compose, with_run
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Collector
from vla_rl.monitoring.metrics import METRICS_FILE, MetricsLogger, read_metrics
from vla_rl.monitoring.progress import Progress
from vla_rl.run.pipeline import run_pipeline
from vla_rl.run.rl_phase import phase_rl
from vla_rl.types import RolloutResult

# Twice the toy run's learning rate: what the policy becomes within eight iterations is then another
# one.
DEFAULT = ("run=toy", "rl.iterations=25", "algorithm.learning_rate=2e-3")
WAYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "coupled": ("algorithm.recompute_old_log_prob=false",),
    "truncate": ("algorithm.behavior_weight=truncate",),
    "mask": ("algorithm.behavior_weight=mask",),
    "vtrace": ("algorithm.behavior_weight=truncate", "algorithm.advantage=vtrace"),
}


class StaleCollector(Collector):
    """Episodes of ``collector``, whose policy is a copy that gets the weights of ``policy``
    ``lag`` iterations late."""

    def __init__(self, collector: Collector, policy: Any, lag: int) -> None:
        self.policy: Any = policy
        self._collector = collector
        self._kept: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)

    def publish(self, version: int) -> None:
        self._kept.append(
            (version, {name: value.clone() for name, value in self.policy.state_dict().items()})
        )
        version, weights = self._kept[0]
        self._collector.policy.load_state_dict(weights)  # type: ignore[attr-defined]
        self._collector.publish(version)

    def collect(self, plan: Any, **options: Any) -> RolloutResult:
        return self._collector.collect(plan, **options)


@dataclass
class StaleRun(Run):
    """A run whose RL learns from stale episodes."""

    lag: int = 0

    def collector(self, policy: Any) -> Collector:
        return StaleCollector(super().collector(copy.deepcopy(policy)), policy, self.lag)


@dataclass(frozen=True)
class Cell:
    """One training run. ``behavior_kl``: KL(acted ‖ learner) per entry, the mean over the last half
    of the iterations (None: not measured, as with "coupled"); ``success`` of the held-out episodes
    afterwards."""

    lag: int
    way: str
    seed: int
    successes: int
    episodes: int
    behavior_kl: float | None
    seconds: float

    @property
    def success(self) -> float:
        return self.successes / self.episodes


def measure(
    overrides: Sequence[str], lags: Sequence[int], ways: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """Train every way at every lag with every seed; prints a line for each.

    Fresh episodes (lag 0) are learned from in the first way alone: there the ways differ by
    rounding. Raises `ConfigError` where the config's algorithm has no such ways or no SFT comes
    before it.
    """
    given = with_run(overrides, DEFAULT)
    cases = [(lag, way) for lag in sorted(set(lags)) for way in (ways if lag else ways[:1])]
    # a wrong one is named before hours of work
    configs = {way: compose([*given, *WAYS[way]]) for way in ways}
    if not {"sft", "rl"} <= set(configs[ways[0]].phases):
        raise ConfigError(
            f"phases={configs[ways[0]].phases}: this benchmark trains SFT and then "
            "RL, name a run with both"
        )
    starts, cells = {}, []
    with tempfile.TemporaryDirectory(prefix="vla-rl-bench-") as name:
        for seed in seeds:
            own = [*given, f"seed={seed}", f"output_dir={name}", "wandb.mode=off"]
            start = _start(compose([*own, f"name=start_{seed}"]))
            starts[seed] = start.successes / start.episodes
            say(f"seed {seed}: SFT {starts[seed]:.0%} of {start.episodes} held-out episodes")
            for lag, way in cases:
                config = compose([*own, *WAYS[way], f"name=lag_{lag}_{way}_{seed}"])
                config.checkpoint = str(Path(name) / f"start_{seed}" / "checkpoints" / "sft")
                cells.append(_train(config, lag, way))
                say(f"  lag {lag}, {way}: {cells[-1].success:.0%} ({cells[-1].seconds:.0f} s)")
    return {
        "overrides": given,
        "iterations": configs[ways[0]].rl.iterations,
        "start": starts,
        "cells": [asdict(cell) | {"success": cell.success} for cell in cells],
        "table": means(cells),
    }


def _start(config: RunConfig) -> Any:
    """SFT; the starting policy's held-out result."""
    config.phases = [phase for phase in config.phases if phase in ("collect", "sft")]
    with contextlib.redirect_stdout(io.StringIO()):
        folder = run_pipeline(config)
    return _evaluated(config, folder / "checkpoints" / "sft")


def _evaluated(config: RunConfig, checkpoint: Path) -> Any:
    with contextlib.ExitStack() as resources, MetricsLogger(config.run_dir) as logger:
        run = Run(config, logger, Progress(stream=io.StringIO()), {}, resources)
        return evaluate_held_out(run, run.acting(checkpoint), "", video_episodes=0)


def _train(config: RunConfig, lag: int, way: str) -> Cell:
    started = time.perf_counter()
    config.rl.eval_every, config.rl.checkpoint_every = 0, config.rl.iterations
    with contextlib.ExitStack() as resources, MetricsLogger(config.run_dir) as logger:
        phase_rl(StaleRun(config, logger, Progress(stream=io.StringIO()), {}, resources, lag=lag))
    rows = [row for row in read_metrics(config.run_dir / METRICS_FILE) if row["phase"] == "rl"]
    distances = [
        row["ppo/behavior_kl"]
        for row in rows[len(rows) // 2 :]
        if row.get("ppo/behavior_kl") is not None
    ]
    kl = statistics.mean(distances) if distances and way != "coupled" else None
    result = _evaluated(config, config.run_dir / "checkpoints" / "rl")
    return Cell(
        lag, way, config.seed, result.successes, result.episodes, kl, time.perf_counter() - started
    )


def means(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each lag and way, in the cells' order: the success of each seed, its mean, the
    mean KL."""
    rows = []
    for lag, way in dict.fromkeys((cell.lag, cell.way) for cell in cells):
        own = [cell for cell in cells if (cell.lag, cell.way) == (lag, way)]
        distances = [cell.behavior_kl for cell in own if cell.behavior_kl is not None]
        rows.append(
            {
                "lag": lag,
                "way": way,
                "success": [cell.success for cell in own],
                "mean": statistics.mean(cell.success for cell in own),
                "behavior_kl": statistics.mean(distances) if distances else None,
            }
        )
    return rows


def text(document: Mapping[str, Any]) -> str:
    start = ", ".join(f"{value:.0%}" for value in document["start"].values())
    rows = [("lag", "way", "mean", "seeds", "KL(acted, learner)")]
    for row in document["table"]:
        seeds = " ".join(f"{value:>4.0%}" for value in row["success"])
        kl = "–" if row["behavior_kl"] is None else f"{row['behavior_kl']:.3f}"
        rows.append((str(row["lag"]), row["way"], f"{row['mean']:.0%}", seeds, kl))
    words = " ".join(document["overrides"])
    return (
        f"{words}: {document['iterations']} iterations from SFT ({start}); held-out "
        f"success\n{table(rows)}"
    )
