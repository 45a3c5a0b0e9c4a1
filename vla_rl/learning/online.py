"""Online RL: gather, learn, save, ``config.iterations`` times; the same loop for every algorithm
and collector.

It resumes: its state (algorithm, counters, random generators, curriculum, waiting groups, learned
reward, guard) is part of the checkpoint, and training N iterations equals training k, resuming, and
training N − k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.checkpoint import (
    keep_numbered,
    load_training_state,
    load_weights,
    restoring,
    save_checkpoint,
)
from vla_rl.config.run import RLConfig
from vla_rl.interfaces import Collector, EpisodesDone
from vla_rl.learning.counters import Counters
from vla_rl.learning.figures import add_figures, rollout_metrics
from vla_rl.learning.groups import GroupBuffer
from vla_rl.learning.guard import Finding, Guard
from vla_rl.learning.learners import EpisodesLost, Learner
from vla_rl.learning.lookahead import Plans
from vla_rl.learning.plan import propose_episodes, record_outcomes
from vla_rl.learning.restarts import Restarts, restart_metrics, whole
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.monitoring.progress import Progress
from vla_rl.options import AlgorithmOptions, view
from vla_rl.rewards.scorer import RewardScorer
from vla_rl.rollout.engine import pooled_stats
from vla_rl.types import EpisodeSpec, TaskSpec, Trajectory

_Found = TypeVar("_Found")


@dataclass
class _Gathered:
    """An iteration's episodes: all that were rolled out, those that are learned from, and their
    rewards."""

    rolled_out: list[Trajectory] = field(default_factory=list)
    chosen: list[Trajectory] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)  # per chosen one, as `RewardModel.score`
    named: Any = None  # the same, flat [n], or {name: [n]}
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class OnlineRL:
    """What online RL is made of. What the ``guard`` finds goes to ``on_finding``, which returns how
    many (episodes, control steps) it spent on that; ``evaluate(iteration)`` returns metrics of
    held-out episodes, and ``start`` is what it would return of what RL starts from, where that is
    known."""

    config: RLConfig
    collector: Collector
    learner: Learner
    reward: Any  # a `RewardModel`; one that learns has a state
    curriculum: Curriculum
    tasks: Sequence[TaskSpec]
    seed: int
    evaluate: Callable[[int], dict[str, float]] | None = None
    start: dict[str, float] | None = None
    guard: Guard | None = None
    on_finding: Callable[[Finding], tuple[int, int]] | None = None
    restarts: Restarts = field(default_factory=Restarts)

    def __post_init__(self) -> None:
        c = self.config
        self.counters = Counters()
        self._buffer = (
            GroupBuffer(c.success_low, c.success_high, c.max_staleness)
            if c.dynamic_sampling
            else None
        )
        self._plans = Plans(self.collector, self._propose, c.iterations)
        # rollout id → rewards, where groups are chosen by them
        self._scored: dict[str, Tensor] = {}

    def run(self, folder: Path, logger: MetricsLogger, progress: Progress) -> Counters:
        """Train; checkpoints go to ``folder``, which is resumed from where it holds a state."""
        config, counters = self.config, self.counters
        if (folder / "training_state").exists():
            self._restore(folder)
        started = begun = time.perf_counter()
        started -= counters.seconds
        total = config.iterations
        if not counters.iteration:
            offline = self.learner.prepare(progress)
            if offline:
                self.start = None  # it is another by now
                logger.log("offline", 0, offline)
            if not total:  # what was recorded is all that it learns from
                self.collector.publish(0)
                self._save(folder)
        with (
            progress.task("RL", total, start=counters.iteration) as bar,
            RewardScorer(self.reward) as scorer,
        ):
            while counters.iteration < total:
                metrics = self._evaluated()
                got = self._gather(scorer, bar.inner, metrics)
                metrics |= self._learn(got, scorer)
                counters.seconds = time.perf_counter() - started
                # writing this iteration's line and checkpoint belongs to the next one
                now = time.perf_counter()
                begun, metrics["time/iteration"] = now, now - begun
                count = len(got.rolled_out)
                found, figures = (
                    (None, {})
                    if self.guard is None
                    else self.guard.look(counters.iteration, count, metrics)
                )
                logger.log("rl", counters.iteration, metrics | figures)
                bar.update(counters.iteration, success=metrics["rollout/success"])
                if found is not None and self.on_finding is not None:
                    episodes, steps = self.on_finding(found)
                    counters.episodes, counters.control_steps = (
                        counters.episodes + episodes,
                        counters.control_steps + steps,
                    )
                    self._scored.clear()  # the reward may be another now
                if (
                    found
                    or counters.iteration % config.checkpoint_every == 0
                    or counters.iteration == total
                ):
                    self._save(folder)
                if found is not None and self.guard is not None:
                    self.guard.enforce(folder)
        if rest := self.learner.finish(progress):
            counters.seconds = time.perf_counter() - started
            logger.log("finish", counters.iteration, rest)
            self.collector.publish(counters.iteration)  # what was learned last
            self._save(folder)
        return counters

    # -------------------------------------------------------------------------------- one iteration
    def _evaluated(self) -> dict[str, float]:
        started, metrics = time.perf_counter(), {}
        if (
            self.evaluate is not None
            and (every := self.config.eval_every)
            and self.counters.iteration % every == 0
        ):
            known = None if self.counters.iteration else self.start
            metrics = self.evaluate(self.counters.iteration) if known is None else known
        return metrics | {"time/evaluate": time.perf_counter() - started}

    def _gather(
        self,
        scorer: RewardScorer,
        inner: EpisodesDone,
        metrics: dict[str, float],
    ) -> _Gathered:
        """Roll out what the curriculum proposes, in rounds while groups are chosen and too few
        are left, and score it."""
        config, buffer, got = self.config, self._buffer, _Gathered(metrics=metrics)
        iteration, groups = (
            self.counters.iteration,
            config.episodes_per_iteration // config.group_size,
        )
        self.collector.publish(iteration)
        stats: list[dict[str, float]] = []
        for sampling_round in range(config.max_sampling_rounds if buffer is not None else 1):
            plan = self._plans.take(iteration, sampling_round)
            result = self.collector.collect(plan, progress=inner, on_trajectory=scorer.begin)
            got.rolled_out += result.trajectories
            stats.append(result.stats)
            record_outcomes(self.curriculum, whole(result.trajectories))
            self.restarts.keep(result.trajectories)
            if buffer is not None:
                buffer.add(
                    result.trajectories, self._group_scores(result.trajectories, scorer, metrics)
                )
                if len(buffer) >= groups:
                    break
        got.chosen = got.rolled_out if buffer is None else buffer.take(groups, iteration)
        if got.chosen and all(t.rollout_id in self._scored for t in got.chosen):
            got.rewards = [self._scored.pop(t.rollout_id) for t in got.chosen]
            got.named = torch.cat(got.rewards)
        else:  # (also the groups that a resumed run kept)
            got.chosen, (got.rewards, got.named, figures) = self._with_all(
                got.chosen, lambda chosen: scorer.score(chosen, self._reward_names)
            )
            add_figures(metrics, figures)
        metrics |= rollout_metrics(whole(got.rolled_out), pooled_stats(stats)) | restart_metrics(
            got.rolled_out
        )
        metrics |= {
            "rollout/reward": sum(float(r.sum()) for r in got.rewards) / max(1, len(got.rewards))
        }
        metrics |= {
            "rollout/learned_share": len(got.chosen) / len(got.rolled_out),
            "rollout/rounds": len(stats),
        }
        return got

    def _propose(self, iteration: int, sampling_round: int) -> list[EpisodeSpec]:
        plan = propose_episodes(
            self.config, self.curriculum, self.tasks, iteration, sampling_round, self.seed
        )
        return self.restarts.of(plan)

    def _group_scores(
        self, trajectories: Sequence[Trajectory], scorer: RewardScorer, metrics: dict[str, float]
    ) -> dict[str, float] | None:
        """What groups are chosen by: None for success; else rewards, which are kept for
        learning."""
        if self.config.dynamic_sampling_by != "reward":
            return None
        _, (rewards, _, figures) = self._with_all(list(trajectories), scorer.score)
        add_figures(metrics, figures)
        self._scored |= {t.rollout_id: r for t, r in zip(trajectories, rewards)}
        return {t.rollout_id: float(r.sum()) for t, r in zip(trajectories, rewards)}

    @property
    def _reward_names(self) -> Sequence[str]:
        return view(self.learner.config, AlgorithmOptions).reward_names

    def _with_all(
        self, episodes: list[Trajectory], use: Callable[[list[Trajectory]], _Found]
    ) -> tuple[list[Trajectory], _Found]:
        """What ``use`` makes of the episodes; those that turn out to be lost with a machine run
        again."""
        while True:
            try:
                return episodes, use(episodes)
            except EpisodesLost as lost:
                specs = [t.episode for t in episodes if t.rollout_id in lost.rollout_ids]
                anew = {t.rollout_id: t for t in self.collector.collect(specs).trajectories}
                episodes = [anew.get(t.rollout_id, t) for t in episodes]

    def _learn(self, got: _Gathered, scorer: RewardScorer) -> dict[str, float]:
        """Update the policy, the curriculum and the counters; returns the iteration's metrics."""
        started, counters, scored = time.perf_counter(), self.counters, got.chosen

        def learned(chosen: list[Trajectory]) -> dict[str, float]:
            if chosen is not scored:  # some had to run again
                got.rewards, got.named, _ = scorer.score(chosen, self._reward_names)
            return self.learner.learn(chosen, got.rewards, got.named)

        metrics = got.metrics | self._with_all(scored, learned)[1]
        metrics |= {"time/update": time.perf_counter() - started} | self.curriculum.metrics()
        self.curriculum.tick()
        counters.iteration += 1
        counters.episodes += len(got.rolled_out)
        counters.control_steps += sum(
            t.num_control_steps + len(t.episode.lead) for t in got.rolled_out
        )
        return metrics | {"episodes": counters.episodes, "control_steps": counters.control_steps}

    # ---------------------------------------------------------------------------------- checkpoints
    def _parts(self) -> dict[str, Any]:
        """What changes of the loop besides the policy and the counters; None for what this run
        has not."""
        reward = self.reward if "state" in self.reward.can else None
        return {
            "algorithm": self.learner,
            "curriculum": self.curriculum,
            "buffer": self._buffer,
            "reward": reward,
            "guard": self.guard,
            "ahead": self._plans,
            "restarts": self.restarts,
        }

    def _save(self, folder: Path) -> None:
        state = {
            name: None if part is None else part.state_dict()
            for name, part in self._parts().items()
        }
        state["counters"] = dict(vars(self.counters))
        number, keep = self.counters.iteration, self.config.keep_checkpoints

        def saved() -> None:
            if keep:
                keep_numbered(folder, number, keep)

        save_checkpoint(folder, self.collector.policy, state, then=saved)

    def _restore(self, folder: Path) -> None:
        load_weights(folder, self.collector.policy)
        state: Mapping[str, Any] = load_training_state(folder)
        with restoring(folder):
            if state.get("critic") is not None:  # of before algorithms owned their critics
                state["algorithm"]["critic"]["weights"] = state["critic"]
            for name, part in self._parts().items():
                if part is not None and state.get(name) is not None:
                    part.load_state_dict(state[name])
            if self.guard is not None:
                self.guard.enforce(folder)
            vars(self.counters).update(vars(Counters(**state["counters"])))
