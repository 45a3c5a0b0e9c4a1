"""How episodes went: one by one, summed up, and compared."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.display import words
from vla_rl.errors import UserError
from vla_rl.evaluation.statistics import (
    PairedComparison,
    compare_paired,
    difference_interval,
    wilson_interval,
)
from vla_rl.evaluation.video import Clip
from vla_rl.monitoring.metrics import write_json
from vla_rl.specs import FAILURE_KINDS
from vla_rl.types import EmbodimentSpec, Trajectory

NOT_TOLD = "not told"  # how an episode failed


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode went. ``control_steps`` were executed in ``decisions`` policy calls.

    ``mean_jerk`` is None for episodes shorter than four control steps; see `mean_jerk` for the
    unit. ``failure`` is one of `FAILURE_KINDS`, or "" on success and where the env does not tell.
    """

    task_id: str
    init_state_id: int
    instruction: str
    success: bool
    control_steps: int
    decisions: int
    mean_jerk: float | None = None
    perturbation: str = ""
    failure: str = ""

    @property
    def key(self) -> tuple[str, int, str]:
        """What makes it the same episode for another policy."""
        return self.task_id, self.init_state_id, self.instruction


@dataclass
class EvaluationResult:
    """Outcomes of all episodes and figures of the run.

    ``clips`` (some episodes) and ``failure_clips`` (one of each kind) are for the videos and are
    not saved.
    """

    outcomes: list[EpisodeOutcome]
    split: str
    seed: int
    deterministic: bool
    control_hz: float
    jerk_unit: str
    seconds: float
    seconds_per_decision: float  # policy time over decisions, in the batches of this evaluation
    latency_s: float  # one observation alone, median: what a robot would wait
    engine: dict[str, float] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    failure_clips: dict[str, Clip] = field(default_factory=dict)
    # those among them that the policy was not trained on
    held_out_tasks: list[str] = field(default_factory=list)
    test: bool = False  # of the test set, whose states chose nothing

    @property
    def set(self) -> str:
        """Which states they are: ``test``, ``held_out`` (which choose too) or ``train``."""
        return "test" if self.test else self.split

    @property
    def episodes(self) -> int:
        return len(self.outcomes)

    @property
    def successes(self) -> int:
        return sum(o.success for o in self.outcomes)

    @property
    def success_rate(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate over all tasks."""
        return wilson_interval(self.successes, self.episodes)

    @property
    def control_steps(self) -> int:
        return sum(o.control_steps for o in self.outcomes)

    def per_task(self) -> dict[str, dict[str, Any]]:
        """`summarise` of each task's episodes, in the order of their first episode."""
        tasks: dict[str, list[EpisodeOutcome]] = {}
        for outcome in self.outcomes:
            tasks.setdefault(outcome.task_id, []).append(outcome)
        return {task: summarise(outcomes) for task, outcomes in tasks.items()}

    def metrics(self) -> dict[str, float]:
        """Success while RL goes on, as it is logged: ``eval/success``, and that of each task
        where there are several."""
        tasks = self.per_task()
        each = (
            {f"eval/success/{task}": row["rate"] for task, row in tasks.items()}
            if len(tasks) > 1
            else {}
        )
        return {"eval/success": self.success_rate} | each

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` inverts it (without the clips)."""
        return {
            "total": summarise(self.outcomes),
            "tasks": self.per_task(),
            "held_out_tasks": list(self.held_out_tasks),
            "task_gap": task_gap(self.outcomes, self.held_out_tasks),
            "split": self.split,
            "set": self.set,
            "seed": self.seed,
            "deterministic": self.deterministic,
            "control_hz": self.control_hz,
            "jerk_unit": self.jerk_unit,
            "seconds": self.seconds,
            "seconds_per_decision": self.seconds_per_decision,
            "latency_s": self.latency_s,
            "engine": dict(self.engine),
            "outcomes": [asdict(o) for o in self.outcomes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvaluationResult:
        names = (
            "split",
            "seed",
            "deterministic",
            "control_hz",
            "jerk_unit",
            "seconds",
            "seconds_per_decision",
            "latency_s",
        )
        outcomes = [EpisodeOutcome(**o) for o in data["outcomes"]]
        wrong = [o for o in outcomes if not _is_outcome(o)]
        if wrong:
            raise ValueError(f"a figure is no number, or a name no text: {wrong[0]}")
        optional: dict[str, Any] = {"engine": dict(data.get("engine", {}))}
        optional["held_out_tasks"] = list(data.get("held_out_tasks", []))
        optional["test"] = data.get("set") == "test"
        return cls(outcomes, **optional, **{name: data[name] for name in names})

    def save(self, path: str | Path) -> None:
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Raises `UserError` for a file that `save` did not write."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is not an evaluation result ({type(error).__name__}: {error}). Write it "
                "with 'vla-rl eval … --json'."
            ) from error

    def table(self) -> str:
        """Success with interval, length and smoothness per task and in all, as text."""
        rows = [
            ("task", "success", "95 % interval", "steps", "to success", f"jerk ({self.jerk_unit})")
        ]
        for name, s in {**self.per_task(), "all tasks": summarise(self.outcomes)}.items():
            rows.append(
                (
                    name,
                    f"{s['successes']}/{s['episodes']} = {s['rate']:.0%}",
                    f"{s['low']:.1%} – {s['high']:.1%}",
                    _number(s["control_steps"]),
                    _number(s["control_steps_to_success"]),
                    _number(s["mean_jerk"]),
                )
            )
        if len(rows) == 3:  # one task: the line of all tasks says the same
            rows.pop()
        lines = words.text_table(rows).splitlines()
        if failures := count_failures(self.outcomes):
            lines.append(
                "failures: "
                + ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in failures.items())
            )
        how = "most likely actions" if self.deterministic else "sampled actions"
        if gap := task_gap(self.outcomes, self.held_out_tasks):
            lines.append(task_gap_text(gap))
        lines.append(
            f"{self.set} initial states, {how}; {self.seconds_per_decision * 1e3:.2f} ms per "
            f"decision in batches, {self.latency_s * 1e3:.1f} ms for one alone; {self.seconds:.1f} "
            "s in all"
        )
        return "\n".join(lines)


def _is_outcome(outcome: EpisodeOutcome) -> bool:
    texts = (outcome.task_id, outcome.instruction, outcome.perturbation, outcome.failure)
    counts = (outcome.init_state_id, outcome.control_steps, outcome.decisions)
    return (
        all(isinstance(x, str) for x in texts)
        and all(isinstance(x, int) for x in counts)
        and isinstance(outcome.success, bool)
        and isinstance(outcome.mean_jerk, int | float | None)
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def summarise(outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any]:
    """Counts, success rate with 95 % Wilson interval, mean control steps (all episodes; successes
    only), mean jerk, `count_failures`."""
    successes = sum(o.success for o in outcomes)
    low, high = wilson_interval(successes, len(outcomes))
    return {
        "episodes": len(outcomes),
        "successes": successes,
        "rate": successes / len(outcomes) if outcomes else 0.0,
        "low": low,
        "high": high,
        "control_steps": _mean([o.control_steps for o in outcomes]),
        "control_steps_to_success": _mean([o.control_steps for o in outcomes if o.success]),
        "mean_jerk": _mean([o.mean_jerk for o in outcomes if o.mean_jerk is not None]),
        "failures": count_failures(outcomes),
    }


def count_failures(outcomes: Sequence[EpisodeOutcome]) -> dict[str, int]:
    """How many episodes failed in which way: kinds that occurred, in the order of `FAILURE_KINDS`,
    then those of which it is `NOT_TOLD`. Empty where none failed, or it is told of none."""
    failed = [o.failure for o in outcomes if not o.success]
    counts = {kind: failed.count(kind) for kind in FAILURE_KINDS if kind in failed}
    rest = len(failed) - sum(counts.values())
    return counts | ({NOT_TOLD: rest} if counts and rest else {})


def task_gap(
    outcomes: Sequence[EpisodeOutcome], held_out_tasks: Sequence[str]
) -> dict[str, Any] | None:
    """`summarise` of the tasks that were trained on and of the ``held_out_tasks``, and how far
    these lie below those.

    "gap" with "gap_low" and "gap_high" (95 %) is a difference of rates; None where either side has
    no episode.
    """
    trained = summarise([o for o in outcomes if o.task_id not in held_out_tasks])
    held_out = summarise([o for o in outcomes if o.task_id in held_out_tasks])
    if not trained["episodes"] or not held_out["episodes"]:
        return None
    low, high = difference_interval(
        trained["successes"], trained["episodes"], held_out["successes"], held_out["episodes"]
    )
    gap = trained["rate"] - held_out["rate"]
    return {"trained": trained, "held_out": held_out, "gap": gap, "gap_low": low, "gap_high": high}


def task_gap_text(gap: Mapping[str, Any]) -> str:
    """The gap as one line."""
    trained, held_out = (
        f"{s['successes']}/{s['episodes']} = {s['rate']:.0%}"
        for s in (gap["trained"], gap["held_out"])
    )
    return (
        f"tasks trained on: {trained}; held-out tasks: {held_out}; gap {gap['gap'] * 100:+.0f} "
        f"points (95 % interval {gap['gap_low'] * 100:+.1f} to {gap['gap_high'] * 100:+.1f})"
    )


def outcome(trajectory: Trajectory, spec: EmbodimentSpec) -> EpisodeOutcome:
    """The figures of one finished episode."""
    return EpisodeOutcome(
        task_id=trajectory.episode.task_id,
        init_state_id=trajectory.episode.init_state_id,
        instruction=trajectory.observations.instruction[0],
        success=bool(trajectory.success),
        control_steps=trajectory.num_control_steps,
        decisions=len(trajectory),
        mean_jerk=mean_jerk(executed_actions(trajectory), spec),
        perturbation=trajectory.episode.perturbation,
        failure=trajectory.failure,
    )


def executed_actions(trajectory: Trajectory) -> np.ndarray:
    """The actions that were carried out, in order: float32 [control_steps a], physical units."""
    return trajectory.actions[trajectory.valid].float().cpu().numpy()


def moving_dims(spec: EmbodimentSpec) -> list[int]:
    """The action dimensions that move the arm: all but the grippers'; all where there is nothing
    else."""
    dims = [i for i in range(spec.action_dim) if i not in spec.gripper_dims]
    return dims or list(range(spec.action_dim))


def mean_jerk(actions: np.ndarray, spec: EmbodimentSpec) -> float | None:
    """Roughness of executed ``actions`` [t a]: mean |third difference| · control_hz³; None for
    fewer than 4 steps.

    The gripper is left out (it opens and shuts on purpose). The unit is the actions' unit per s³
    (`jerk_unit`): for absolute position targets that is jerk in the usual sense, for delta actions
    it is one derivative higher. Compare it between policies of the same embodiment, not across
    embodiments.
    """
    if len(actions) < 4:
        return None
    third = np.diff(actions[:, moving_dims(spec)].astype(np.float64), n=3, axis=0)
    return float(np.abs(third).mean() * spec.control_hz**3)


def jerk_unit(spec: EmbodimentSpec) -> str:
    units = list(dict.fromkeys(spec.action_units[i] for i in moving_dims(spec)))
    return " & ".join(units) + "/s³"


# ---------------------------------------------------------------------------------------- comparing
def compare(a: EvaluationResult, b: EvaluationResult) -> PairedComparison:
    """Compare two results on the episodes they share: same task, split, initial state and
    instruction. Has `fallen_tasks`.

    Raises:
        UserError: they share none, because the tasks, splits or seeds differ.
    """
    if (a.set, a.seed) != (b.set, b.seed):
        raise UserError(
            f"The two evaluations used other episodes: split {a.set!r} and seed {a.seed} against "
            f"split {b.set!r} and seed {b.seed}. Evaluate both with the same --split and --seed."
        )
    shared = same_episodes(a, b)
    if not shared:
        raise UserError(
            f"The two evaluations share no episode: tasks {sorted(a.per_task())} against "
            f"{sorted(b.per_task())}. Evaluate both on the same tasks."
        )
    return dataclasses.replace(compare_outcomes(shared), fallen_tasks=fallen_tasks(shared))


def same_episodes(
    a: EvaluationResult, b: EvaluationResult
) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """How the episodes that both saw went in each, in the order of ``a``."""
    of_a, of_b = ({o.key: o for o in result.outcomes} for result in (a, b))
    return [(o, of_b[key]) for key, o in of_a.items() if key in of_b]


def compare_outcomes(pairs: Sequence[tuple[EpisodeOutcome, EpisodeOutcome]]) -> PairedComparison:
    """Success of the first of each pair against that of the second."""
    return compare_paired(
        [first.success for first, _ in pairs], [second.success for _, second in pairs]
    )


def fallen_tasks(
    pairs: Sequence[tuple[EpisodeOutcome, EpisodeOutcome]],
) -> dict[str, PairedComparison]:
    """Of several tasks those that the second of each pair solves less often than the first by more
    than chance explains: exact McNemar tests of the tasks at 5 % for all of them together (Holm
    1979, Scand. J. Statist. 6)."""
    of_task: dict[str, list[tuple[EpisodeOutcome, EpisodeOutcome]]] = defaultdict(list)
    for first, second in pairs:
        of_task[first.task_id].append((first, second))
    tasks, fallen = {task: compare_outcomes(found) for task, found in of_task.items()}, {}
    if len(tasks) < 2:
        return {}
    for i, (task, c) in enumerate(sorted(tasks.items(), key=lambda item: item[1].p_value)):
        if c.p_value > (1.0 - c.confidence) / (len(tasks) - i):
            break
        if c.difference < 0:
            fallen[task] = c
    return fallen


def fallen_text(c: PairedComparison) -> str:
    """The tasks that fell, in a sentence; empty where there are none."""
    fallen = [
        f"{task} ({t.successes_a} to {t.successes_b} of {t.trials})"
        for task, t in (c.fallen_tasks or {}).items()
    ]
    return f"Lower than before by more than chance explains: {', '.join(fallen)}." if fallen else ""


def comparison_text(c: PairedComparison, name_a: str = "A", name_b: str = "B") -> str:
    """The comparison in one plain sentence or two."""
    verdict = "more than chance explains" if c.significant else "within what chance explains"
    text = (
        f"{name_b} − {name_a}: {c.difference * 100:+.0f} points on the same {c.trials} episodes "
        f"(95 % interval {c.difference_low * 100:+.1f} to {c.difference_high * 100:+.1f}); "
        f"{name_b} alone solved {c.only_b}, {name_a} alone {c.only_a}, which is {verdict} (exact "
        f"McNemar test, {words.p_value(c.p_value)})."
    )
    # two approximations, which few episodes part
    if c.significant != (c.difference_low > 0 or c.difference_high < 0):
        text += (
            " Test and interval disagree about that, as they can on few episodes: evaluate more of "
            "them."
        )
    return f"{text} {fallen_text(c)}".rstrip()
