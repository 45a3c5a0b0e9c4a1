"""Robustness: the episodes of an evaluation again, each perturbed by one factor, and compared with
themselves unperturbed.

Which perturbations exist, and their levels, is what the simulator's class declares
(``perturbations``, see `vla_rl.specs.Perturbation`). Levels are spread over the episodes, so that a
factor costs one evaluation whatever their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_rl.config.episodes import EvaluateConfig
from vla_rl.display.words import text_table
from vla_rl.errors import ConfigError
from vla_rl.evaluation.evaluate import evaluate, evaluation_episodes
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult, summarise
from vla_rl.evaluation.statistics import PairedComparison, compare_paired
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.specs import EpisodeSpec, Perturbation, TaskSpec

ALL = "all"


def choose(
    declared: Mapping[str, Perturbation],
    names: Sequence[str],
    levels: Sequence[int] = (),
    env: str = "this env",
) -> dict[str, tuple[int, ...]]:
    """{factor: levels to run}; "all" stands for every factor that is no control, no ``levels`` for
    all of a factor's own.

    A control without the wanted levels keeps its own. Raises `ConfigError` for an env without
    perturbations, an unknown name and a level that a factor does not have.
    """
    if not declared:
        raise ConfigError(
            f"--perturb: {env} has no perturbations. Leave the option out, or "
            "evaluate on --suite libero."
        )
    unknown = [name for name in names if name != ALL and name not in declared]
    if unknown:
        raise ConfigError(
            f"--perturb {unknown[0]} is unknown to {env}: use {ALL} or some of "
            f"{', '.join(declared)}."
        )
    factors = [name for name, perturbation in declared.items() if not perturbation.control]
    chosen: dict[str, tuple[int, ...]] = {}
    for name in (n for given in names for n in (factors if given == ALL else [given])):
        has = declared[name].levels
        missing = [level for level in levels if level not in has]
        if missing and not declared[name].control:
            raise ConfigError(
                f"--levels {missing[0]}: {name} has the levels {', '.join(map(str, has))}."
            )
        chosen[name] = tuple(dict.fromkeys(level for level in levels if level in has)) or has
    return chosen


def perturbed_episodes(
    tasks: Sequence[TaskSpec], config: EvaluateConfig, name: str, levels: Sequence[int]
) -> list[EpisodeSpec]:
    """The episodes of `evaluation_episodes` under ``name``, with ``levels`` in turn, shifted
    from task to task."""
    shift = {task.task_id: i for i, task in enumerate(tasks)}
    result = []
    for episode in evaluation_episodes(tasks, config):
        perturbation = (
            f"{name}:{levels[(episode.init_state_id + shift[episode.task_id]) % len(levels)]}"
        )
        rollout_id = f"{episode.rollout_id}-{perturbation}"
        result.append(
            dataclasses.replace(episode, perturbation=perturbation, rollout_id=rollout_id)
        )
    return result


@dataclass
class Robustness:
    """One evaluation without perturbation and one per factor, on the same episodes."""

    unperturbed: EvaluationResult
    factors: dict[str, EvaluationResult]
    declared: Mapping[str, Perturbation]

    def difference(self, outcomes: Sequence[EpisodeOutcome]) -> PairedComparison:
        """Perturbed ``outcomes`` (b) against the same episodes without perturbation (a)."""
        plain = {_episode(o): o.success for o in self.unperturbed.outcomes}
        return compare_paired([plain[_episode(o)] for o in outcomes], [o.success for o in outcomes])

    def outcomes(self) -> list[EpisodeOutcome]:
        """Those of all factors but the controls."""
        return [
            o
            for name, r in self.factors.items()
            if not self.declared[name].control
            for o in r.outcomes
        ]

    def mean_of_factors(self) -> float | None:
        """Each factor counts alike, however many episodes it has; None where only controls ran."""
        rates = [
            r.success_rate for name, r in self.factors.items() if not self.declared[name].control
        ]
        return sum(rates) / len(rates) if rates else None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; each "difference" is perturbed minus unperturbed (see
        `PairedComparison`)."""
        factors = {}
        for name, result in self.factors.items():
            levels = {
                level: self._figures(outcomes)
                for level, outcomes in _by_level(result.outcomes).items()
            }
            factors[name] = {
                "text": self.declared[name].text,
                "control": self.declared[name].control,
                **self._figures(result.outcomes),
                "levels": levels,
                "tasks": result.per_task(),
                "outcomes": [dataclasses.asdict(o) for o in result.outcomes],
            }
        return {
            "unperturbed": summarise(self.unperturbed.outcomes),
            "factors": factors,
            "total": self._figures(self.outcomes()),
            "mean_of_factors": self.mean_of_factors(),
        }

    def _figures(self, outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any]:
        return {**summarise(outcomes), "difference": self.difference(outcomes).to_dict()}

    def table(self) -> str:
        """A row per factor and level: success with interval, and the paired difference to the
        unperturbed episodes."""
        rows = [_row("unperturbed", "", self.unperturbed.outcomes, None)]
        for name, result in self.factors.items():
            by_level = _by_level(result.outcomes)
            label = f"{name} (control)" if self.declared[name].control else name
            rows.append(
                _row(label, ", ".join(by_level), result.outcomes, self.difference(result.outcomes))
            )
            if len(by_level) > 1:
                rows += [
                    _row("", level, outcomes, self.difference(outcomes))
                    for level, outcomes in by_level.items()
                ]
        if everything := self.outcomes():
            rows.append(_row("all factors", "", everything, self.difference(everything)))
        head = (
            "perturbation",
            "level",
            "success",
            "95 % interval",
            "to unperturbed",
            "95 % interval",
            "p",
        )
        text, mean = text_table([head, *rows]), self.mean_of_factors()
        return text if mean is None else f"{text}\nmean of the factors' rates: {mean:.1%}"


def run_robustness(
    engine: RolloutEngine,
    tasks: Sequence[TaskSpec],
    config: EvaluateConfig,
    declared: Mapping[str, Perturbation],
    chosen: Mapping[str, Sequence[int]],
    unperturbed: EvaluationResult,
    progress: Callable[[str], Any],
) -> Robustness:
    """Evaluate under each of ``chosen`` (see `choose`). ``progress(name)`` is a context manager
    that yields a bar."""
    factors = {}
    for name, levels in chosen.items():
        with progress(name) as bar:
            episodes = perturbed_episodes(tasks, config, name, levels)
            factors[name] = evaluate(engine, tasks, config, progress=bar.update, episodes=episodes)
    return Robustness(unperturbed, factors, declared)


def compare_robustness(a: Robustness, b: Robustness) -> tuple[str, dict[str, Any]]:
    """Two policies under the same perturbations, factor by factor: a table and its figures (b
    minus a)."""
    rows, figures = (
        [("perturbation", "first", "second", "second − first", "95 % interval", "p")],
        {},
    )
    pairs = {
        "unperturbed": (a.unperturbed, b.unperturbed),
        **{n: (a.factors[n], b.factors[n]) for n in a.factors},
    }
    for name, (first, second) in pairs.items():
        solved = {_episode(o): o.success for o in second.outcomes}
        c = compare_paired(
            [o.success for o in first.outcomes], [solved[_episode(o)] for o in first.outcomes]
        )
        figures[name] = c.to_dict()
        rows.append(
            (name, f"{first.success_rate:.0%}", f"{second.success_rate:.0%}", *_difference(c))
        )
    return text_table(rows), figures


def _episode(outcome: EpisodeOutcome) -> tuple[str, int]:
    """What stays the same under every perturbation, of the instruction too."""
    return outcome.task_id, outcome.init_state_id


def _by_level(outcomes: Sequence[EpisodeOutcome]) -> dict[str, list[EpisodeOutcome]]:
    levels: dict[str, list[EpisodeOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda o: int(o.perturbation.partition(":")[2])):
        levels.setdefault(outcome.perturbation.partition(":")[2], []).append(outcome)
    return levels


def _row(
    name: str, level: str, outcomes: Sequence[EpisodeOutcome], c: PairedComparison | None
) -> tuple[str, ...]:
    s = summarise(outcomes)
    success = (
        f"{s['successes']}/{s['episodes']} = {s['rate']:.0%}",
        f"{s['low']:.1%} – {s['high']:.1%}",
    )
    return (name, level, *success, *(("", "", "") if c is None else _difference(c)))


def _difference(c: PairedComparison) -> tuple[str, str, str]:
    interval = f"{c.difference_low * 100:+.1f} – {c.difference_high * 100:+.1f}"
    return (
        f"{c.difference * 100:+.0f} points",
        interval,
        "< 0.0001" if c.p_value < 1e-4 else f"{c.p_value:.2g}",
    )
