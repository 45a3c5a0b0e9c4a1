"""Offline rounds: values and a model from the data so far, candidates past a gate, new episodes of
what came through.

RL-100's iterated offline stage (arXiv 2510.14830, algorithm 1). Only `_episodes` asks the env. It
resumes: what a kill interrupts, a part of a round, begins again from the state before it, and comes
out the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_rl.algorithms.offline_chain import OfflineChain, accepts
from vla_rl.checkpoint import (
    load_training_state,
    load_weights,
    restoring,
    save_checkpoint,
)
from vla_rl.config.offline import OfflineConfig
from vla_rl.data.replay import ONLINE
from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import Collector, RewardModel
from vla_rl.learning.counters import Counters
from vla_rl.learning.figures import rollout_metrics
from vla_rl.learning.learners import ReplayLearner
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.episodes import rollout_episodes
from vla_rl.splits import stable_seed
from vla_rl.types import TaskSpec, Transitions

PHASE = "offline"
_SAVED_CANDIDATES = 10  # of those that the gate sent back, one in so many is saved


@dataclass
class _Position:
    """Where the rounds stand: ``part`` is start, values, candidates or episodes, ``events`` are
    lines logged. ``estimate`` is that of the present policy, as of this round's critics and
    model."""

    part: str = "start"
    candidate: int = 0
    accepted: int = 0
    events: int = 0
    estimate: float = 0.0


@dataclass
class OfflineRounds:
    """What the rounds are made of. ``data`` keeps the episodes and trains ``chain.iql``;
    ``evaluate(round)`` returns metrics of held-out episodes."""

    config: OfflineConfig
    chain: OfflineChain
    data: ReplayLearner
    collector: Collector
    reward: RewardModel
    tasks: Sequence[TaskSpec]
    seed: int
    evaluate: Callable[[int], dict[str, float]] | None = None
    counters: Counters = field(default_factory=Counters)  # (iterations are rounds)

    def __post_init__(self) -> None:
        self._at = _Position()
        self._generator = torch.Generator().manual_seed(self.seed)
        self._states: tuple[int, Transitions] | None = None  # where this round's gate begins
        self._judged: torch.Tensor | None = None  # the present policy's estimate from there

    def run(self, folder: Path, logger: MetricsLogger, progress: Progress) -> dict[str, Any]:
        """Run all rounds; checkpoints go to ``folder``, which is resumed from where it holds a
        state. Returns totals.

        Raises ConfigError where there is nothing to learn from.
        """
        c, counters, at = self.config, self.counters, self._at
        if (folder / "training_state").exists():
            self._restore(folder)
        started = time.perf_counter() - counters.seconds
        while counters.iteration < c.rounds:
            now, saved = counters.iteration + (at.part != "start"), True
            if at.part == "start":
                metrics = self._start(progress)
            elif at.part == "values":
                metrics = self._values(progress)
            elif at.part == "candidates":
                metrics = self._candidate(progress)
                saved = (
                    bool(metrics["gate/accepted"])
                    or at.candidate % _SAVED_CANDIDATES == 0
                    or at.part != "candidates"
                )
            else:
                metrics = self._episodes(progress)
            counters.seconds = time.perf_counter() - started
            at.events += 1
            totals = {
                "round": now,
                "episodes": counters.episodes,
                "control_steps": counters.control_steps,
            }
            logger.log(PHASE, at.events, metrics | totals)
            if saved:
                self._save(folder)
        return {
            "rounds": counters.iteration,
            "accepted": at.accepted,
            "gates": c.rounds * c.candidates,
            **_spent(counters),
        }

    # ----------------------------------------------------------------------------- parts of a round
    def _start(self, progress: Progress) -> dict[str, float]:
        metrics = (
            self._gather(progress, self.config.start_episodes) if self.config.start_episodes else {}
        )
        if not len(self.data.replay):
            raise ConfigError(
                "phase offline learns from data, and there is none: give dataset=FOLDER, put "
                "collect among the phases, or let the policy act first with "
                "offline.start_episodes=64"
            )
        self._at.part = "values"
        return metrics

    def _values(self, progress: Progress) -> dict[str, float]:
        """Critics, a new model, and what they say of the policy as it is; then it imitates what
        was solved."""
        started, number = time.perf_counter(), self.counters.iteration + 1
        with progress.task(f"round {number}: critics", self.config.critic_updates) as bar:
            metrics = self.chain.learn_values(self.data.replay, self._generator, bar.update)
        progress.say(
            f"round {number}: a model of what follows, from {len(self.data.replay)} decisions"
        )
        seed = stable_seed("dynamics", self.seed, number) % 2**62
        metrics |= self.chain.learn_dynamics(self.data.replay, self._generator, seed)
        self._at.part, self._at.candidate = "candidates", 0
        self._judged = self._present()
        self._at.estimate = float(self._judged.mean())
        metrics["ope/value"] = self._at.estimate
        if updates := self.config.imitation_updates:
            with progress.task(f"round {number}: imitation", updates) as bar:
                learned = self.chain.imitate(self.data.replay, self._generator, bar.update)
            if learned:
                self._judged = self._present()
                self._at.estimate = float(self._judged.mean())
                metrics |= learned | {"ope/imitated": self._at.estimate}
        return metrics | {"time/values": time.perf_counter() - started}

    def _candidate(self, progress: Progress) -> dict[str, float]:
        """One candidate and its judgement; sent back, it leaves weights and optimiser as they were.
        One that cannot be judged, since it is not finite, is sent back too."""
        c, at, started = self.config, self._at, time.perf_counter()
        done = self.counters.iteration * c.candidates + at.candidate
        before = self._present() if self._judged is None else self._judged
        kept = self.chain.snapshot()
        metrics = self.chain.improve(
            self.data.replay, self._generator, c.clip * (1.0 - done / (c.rounds * c.candidates))
        )
        after = self._estimate()
        gain = after - before
        figures = {
            "gate/before": float(before.mean()),
            "gate/after": float(after.mean()),
            "gate/needed": c.min_gain * abs(float(before.mean())),
            "gate/gain_error": float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else 0.0,
        }
        finite = bool(after.isfinite().all())
        stays = finite and (
            not c.gate or accepts(figures["gate/before"], figures["gate/after"], c.min_gain)
        )
        if not stays:
            self.chain.revert(kept)
        self._judged = after if stays else before
        at.estimate = float(self._judged.mean())
        at.candidate, at.accepted = at.candidate + 1, at.accepted + stays
        if at.candidate == c.candidates:
            at.part = "episodes"
        remedy = " (it is not finite: lower offline.learning_rate if that happens often)"
        progress.say(
            f"round {self.counters.iteration + 1}, candidate {at.candidate}: estimate "
            f"{figures['gate/before']:.4f} → {figures['gate/after']:.4f}, a gain of "
            f"{float(gain.mean()):+.4f} ({figures['gate/needed']:.4f} needed): "
            f"{'accepted' if stays else 'back to the policy before'}{'' if finite else remedy}"
        )
        return (
            metrics
            | figures
            | {"gate/accepted": float(stays), "time/candidate": time.perf_counter() - started}
        )

    def _episodes(self, progress: Progress) -> dict[str, float]:
        """New episodes into the data, which end the round; without any it ends at once."""
        if not self.config.episodes:
            self.counters.iteration, self._at.part = self.counters.iteration + 1, "values"
            progress.say(f"round {self.counters.iteration}: estimate {self._at.estimate:.4f}")
            return {"ope/value": self._at.estimate}
        metrics = self._gather(progress, self.config.episodes)
        number = self.counters.iteration + 1
        if self.evaluate is not None and self.config.evaluate:
            metrics |= self.evaluate(number)
        progress.say(
            f"round {number}: estimate {self._at.estimate:.4f}, {metrics['rollout/success']:.1%} "
            f"of {self.config.episodes} episodes succeeded"
        )
        self.counters.iteration, self._at.part = number, "values"
        return metrics | {"ope/value": self._at.estimate}

    def _gather(self, progress: Progress, episodes: int) -> dict[str, float]:
        """Episodes of sampled actions, scored and kept."""
        name = f"{PHASE}-{self.counters.iteration}-{self._at.part}"
        self.collector.publish(self._at.events)
        with progress.task(f"{PHASE} episodes", episodes) as bar:
            got = self.collector.collect(
                rollout_episodes(self.tasks, episodes, self.seed, name), progress=bar.update
            )
        for trajectory, rewards in zip(
            got.trajectories, self.reward.score(got.trajectories), strict=True
        ):
            self.data.add(trajectory, rewards, ONLINE)
        self.counters.episodes += len(got.trajectories)
        self.counters.control_steps += sum(t.num_control_steps for t in got.trajectories)
        counts = {
            "rollout/episodes": float(episodes),
            "replay/decisions": float(len(self.data.replay)),
        }
        return rollout_metrics(got.trajectories, got.stats) | counts

    def _present(self) -> torch.Tensor:
        """The estimate of a policy that is there to stay. Raises `UserError` where it is not
        finite."""
        found = self._estimate()
        if not bool(found.isfinite().all()):
            raise UserError(
                "the estimate of the present policy in the learned model is not finite: lower "
                "offline.horizon, offline.critics.learning_rate or offline.dynamics.learning_rate "
                "(in a run of another name)"
            )
        return found

    def _estimate(self) -> torch.Tensor:
        """Of the present policy, from this round's states with this round's noise."""
        number = self.counters.iteration
        seed = stable_seed("gate", self.seed, number) % 2**62
        if self._states is None or self._states[0] != number:
            self._states = number, self.chain.gate_states(self.data.replay, seed)
        return self.chain.estimate(self._states[1], seed + 1)

    # --------------------------------------------------------------------------------------- resume
    def _save(self, folder: Path) -> None:
        state = {
            "chain": self.chain.state_dict(),
            "data": self.data.state_dict(),
            "generator": self._generator.get_state(),
            "position": asdict(self._at),
            "counters": asdict(self.counters),
        }
        save_checkpoint(folder, self.chain.policy, state)

    def _restore(self, folder: Path) -> None:
        load_weights(folder, self.chain.policy)
        state: Mapping[str, Any] = load_training_state(folder)
        with restoring(folder):
            self.chain.load_state_dict(state["chain"])
            self.data.load_state_dict(state["data"])
            self._generator.set_state(state["generator"].cpu())
            vars(self._at).update(vars(_Position(**state["position"])))
            vars(self.counters).update(vars(Counters(**state["counters"])))


def _spent(counters: Counters) -> dict[str, float]:
    return {
        "episodes": counters.episodes,
        "control_steps": counters.control_steps,
        "seconds": counters.seconds,
    }
