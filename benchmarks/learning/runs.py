"""How soon runs reached a success rate, and where their seconds went: read from their folders.

Held-out evaluation is no part of learning: its seconds are counted apart. Seconds come from
``metrics.jsonl`` (see ``docs/reference/metrics.md``), so a run that was interrupted counts only
what it kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import reached, side_by_side, write_figure
from benchmarks.measuring import hardware
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.files import read_json
from vla_rl.learning.figures import mean_figures
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics

PARTS = ("simulate", "act", "score", "update", "critic", "rest")
RULE = "the first held-out evaluation at or above the level after which none fell below it"
Record = Mapping[str, Any]


def iteration_seconds(record: Record) -> dict[str, float]:
    """Seconds of one iteration of RL: `PARTS`, "learn" (their sum) and "evaluate", which is no part
    of it.

    "simulate" is the wait for the env, "act" the policy in rollouts, "update" what learning took
    besides training a separate critic, "rest" bookkeeping and checkpoints. Of runs from before
    ``time/iteration`` was logged the time between rollouts, scoring and learning is not known.
    """

    def logged(key: str) -> float:
        return float(record.get(key) or 0.0)

    evaluate, critic = logged("time/evaluate"), logged("time/critic")
    learn = logged("engine/seconds") + logged("time/reward") + logged("time/update")
    if "time/iteration" in record:
        learn = logged("time/iteration") - evaluate
    parts = {
        "simulate": logged("engine/wait_seconds"),
        "act": logged("engine/policy_seconds"),
        "score": logged("time/reward"),
        "update": logged("time/update") - critic,
        "critic": critic,
    }
    return parts | {
        "rest": max(0.0, learn - sum(parts.values())),
        "learn": learn,
        "evaluate": evaluate,
    }


@dataclass(frozen=True)
class Point:
    """Held-out ``success`` after so much of RL."""

    iteration: int
    episodes: int
    control_steps: int
    seconds: float  # of learning
    success: float


def rl_records(run: Path) -> list[dict[str, Any]]:
    """The iterations of a run's phase rl, in order. Raises `UserError` where there are none."""
    rows = [r for r in read_metrics(run / METRICS_FILE) if r["phase"] == "rl"]
    if not rows:
        raise UserError(
            f"{run} has no iterations of RL in its {METRICS_FILE}: name a run folder "
            "whose phase rl has begun"
        )
    return rows


def learning_curve(
    rows: Sequence[Record], before: float | None, after: float | None, judged: int = 0
) -> list[Point]:
    """Held-out success over the course of RL.

    ``eval/success`` of an iteration was measured before its episodes. ``before`` and ``after`` are
    the success of the starting policy and of the last one, as the phases eval_sft and eval_rl
    measured them (None: they did not). ``judged`` episodes were spent before on judging a learned
    reward; they count.
    """
    points = (
        [] if before is None or "eval/success" in rows[0] else [Point(0, judged, 0, 0.0, before)]
    )
    episodes, steps, seconds = judged, 0, 0.0
    for row in rows:
        if row.get("eval/success") is not None:
            points.append(
                Point(int(row["step"]) - 1, episodes, steps, seconds, float(row["eval/success"]))
            )
        episodes, steps = judged + int(row.get("episodes") or 0), int(row.get("control_steps") or 0)
        seconds += iteration_seconds(row)["learn"]
    if after is not None:
        points.append(Point(int(rows[-1]["step"]), episodes, steps, seconds, after))
    return points


def learning_of(run: Path, level: float) -> dict[str, Any]:
    """What a run folder says of its speed of learning, JSON-ready. Raises `UserError` where its
    RL has not begun."""
    rows, phases = rl_records(run), _read(run / "phases.json")
    seconds = [iteration_seconds(row) for row in rows]

    def evaluated(name: str) -> float | None:
        path, complete = run / f"eval_{name}.json", phases.get(f"eval_{name}", {}).get("complete")
        return EvaluationResult.load(path).success_rate if complete and path.exists() else None

    judged = int(phases.get("reward", {}).get("episodes", 0))
    curve = learning_curve(rows, evaluated("sft"), evaluated("rl"), judged)
    at = reached([point.success for point in curve], level)
    return {
        "run": str(run),
        "iterations": int(rows[-1]["step"]),
        **_configured(run),
        "episodes": judged + int(rows[-1].get("episodes") or 0),
        "learn_seconds": sum(s["learn"] for s in seconds),
        "evaluate_seconds": sum(s["evaluate"] for s in seconds)
        if all("time/iteration" in r for r in rows)
        else None,
        "curve": [asdict(point) for point in curve],
        "reached": None if at is None else asdict(curve[at]),
        "below_before": asdict(curve[at - 1]) if at else None,
        "seconds_per_iteration": mean_figures(seconds),
        "hardware": hardware(_read(run / "versions.json")),
    }


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, "put a whole copy in its place, or remove it") if path.exists() else {}


def _configured(run: Path) -> dict[str, Any]:
    """What the run's config says: ``rl.iterations``, algorithm and actor (None: not known). It is
    read as plain YAML, since its plug-ins may not be importable here."""
    import yaml

    path = run / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, yaml.YAMLError):  # it is only shown beside the figures
        tree = None

    def at(group: str, key: str) -> Any:
        values = tree.get(group) if isinstance(tree, dict) else None
        return values.get(key) if isinstance(values, dict) else None

    return {
        "planned_iterations": at("rl", "iterations"),
        "algorithm": at("algorithm", "type"),
        "actor": at("actor", "type"),
    }


def require_level(level: float) -> None:
    """Raise `ConfigError` unless ``level`` is a success rate that can be reached."""
    if not 0.0 < level <= 1.0:
        raise ConfigError(
            f"--level {level} is no success rate: give a number above 0 and at most 1, such as 0.8"
        )


def measure(runs: Sequence[Path], level: float, figure: Path | None = None) -> dict[str, Any]:
    """`learning_of` each run, which ran on what ``hardware`` and ``commit`` say; as curves on a
    page ``figure`` too."""
    require_level(level)
    if not runs:
        raise UserError(
            "name run folders (vla-rl bench learn outputs/quickstart), or compare two "
            "settings with --against"
        )
    found, made = (
        [learning_of(run, level) for run in runs],
        [_read(run / "versions.json") for run in runs],
    )
    if figure is not None:
        write_figure(figure, found, level)
        print(f"figure: {figure}")
    origin = {
        "hardware": [hardware(each) for each in made],
        "commit": [each.get("git_commit", "") for each in made],
    }
    joined = {name: "; ".join(filter(None, dict.fromkeys(texts))) for name, texts in origin.items()}
    return {**joined, "level": level, "rule": RULE, "runs": found}


def text(document: Mapping[str, Any]) -> str:
    runs, level = document["runs"], document["level"]
    lines = [run_text(run, level) for run in runs] + (
        [side_by_side(runs, level)] if len(runs) > 1 else []
    )
    return "\n".join([*lines, f"reached: {RULE}; evaluation is no part of the learning time"])


def run_text(figures: Mapping[str, Any], level: float) -> str:
    """`learning_of` in plain words."""
    planned, evaluate = figures["planned_iterations"], figures["evaluate_seconds"]
    of = f" of {planned}" if planned not in (None, figures["iterations"]) else ""
    apart = (
        "evaluation not timed then" if evaluate is None else f"evaluation {evaluate:.1f} s apart"
    )
    lines = [
        f"{figures['run']}: {figures['iterations']}{of} iterations of RL, {figures['episodes']} "
        f"episodes, {figures['learn_seconds']:.1f} s of learning ({apart})",
        f"  {level:.0%} {_reached_text(figures)}",
    ]
    curve = ", ".join(f"{p['iteration']}: {p['success']:.0%}" for p in figures["curve"])
    lines += [f"  held-out success by iteration: {curve}"] if curve else []
    mean = figures["seconds_per_iteration"]
    shares = [
        f"{name} {mean[name]:.2f} s ({mean[name] / max(mean['learn'], 1e-9):.0%})" for name in PARTS
    ]
    return "\n".join(
        [*lines, f"  a mean iteration takes {mean['learn']:.2f} s: {', '.join(shares)}"]
    )


def _reached_text(figures: Mapping[str, Any]) -> str:
    point, below = figures["reached"], figures["below_before"]
    if not figures["curve"]:
        return (
            "unknown: this run was not evaluated on held-out episodes yet (rl.eval_every, phase "
            "eval_rl)"
        )
    if point is None:
        return f"not reached in {figures['episodes']} episodes"
    if not point["iteration"]:
        return "reached by the starting policy"
    text = (
        f"reached after {point['seconds']:.1f} s and {point['episodes']} episodes (iteration "
        f"{point['iteration']})"
    )
    if below is None:
        return f"{text}, its first evaluation"
    return f"{text}; still below after {below['seconds']:.1f} s and {below['episodes']} episodes"
