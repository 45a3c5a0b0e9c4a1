"""The concurrent rhythm inside `OnlineRL`: episodes go to a learner that runs meanwhile, its newest
weights come back.

Weights are swapped between episodes, never within one, so a trajectory's ``policy_version`` says
which weights acted in all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vla_rl.interfaces import Collector, EpisodesDone
from vla_rl.learning.episode_queue import take_weights
from vla_rl.learning.learner_process import LearnerProcess
from vla_rl.learning.learners import RemoteLearner
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.engine import pooled_stats
from vla_rl.types import EpisodeSpec, RolloutResult, Trajectory


class ConcurrentLearner:
    """A `Learner` whose learning is done elsewhere: `learn` hands episodes over and returns."""

    def __init__(self, process: LearnerProcess, config: Any, max_ahead: int = 0) -> None:
        """``config``: the algorithm's; ``max_ahead`` updates may be owed before `learn` waits
        (0: any number)."""
        self.process, self.config, self._max_ahead = process, config, max_ahead
        self._before: dict[str, float] = {}  # figures of the last look
        self._looked = time.perf_counter()

    def prepare(self, progress: Progress) -> dict[str, float]:
        started = time.perf_counter()
        offline = self.process.start()
        self._looked = time.perf_counter()
        return {**offline, "time/start": self._looked - started}

    def learn(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Tensor],
        named: Tensor | Mapping[str, Tensor],
    ) -> dict[str, float]:
        """Returns the learner's latest figures, which are about earlier episodes."""
        self.process.send(list(zip(trajectories, rewards, strict=True)))
        waited = 0.0
        if self._max_ahead:
            waited = self.process.wait(lambda: self.process.figures()["owed"] <= self._max_ahead)
        now = time.perf_counter()
        seconds, self._looked = max(now - self._looked, 1e-9), now
        steps = sum(t.num_control_steps for t in trajectories)
        return self._figures() | {
            "actor/wait_share": waited / seconds,
            "actor/control_steps_per_second": steps / seconds,
        }

    def finish(self, progress: Progress) -> dict[str, float]:
        """Wait for the updates that are owed still."""
        started, total = time.perf_counter(), max(1, round(self.process.figures()["owed"]))
        with progress.task("learning on", total) as bar:

            def even() -> bool:
                bar.update(max(0, total - round(self.process.figures()["owed"])))
                return self.process.is_even

            self.process.wait(even)
        return self._figures() | {"time/finish": time.perf_counter() - started}

    def _figures(self) -> dict[str, float]:
        found, before = self.process.figures(), self._before
        since = {name: found[name] - before.get(name, 0.0) for name in ("busy", "idle", "updates")}
        if min(since.values()) < 0:  # it was started again
            since = {name: float(found[name]) for name in ("busy", "idle")} | {
                "updates": max(0.0, since["updates"])
            }
        self._before = found
        learner = {
            name: float(found[name]) for name in ("version", "owed", "staleness") if name in found
        }
        return (
            found.get("metrics", {})
            | {f"learner/{name}": value for name, value in learner.items()}
            | {
                "learner/wait_share": since["idle"] / max(since["busy"] + since["idle"], 1e-9),
                "replay/episodes": float(found["episodes"]),
                "replay/decisions": float(found["decisions"]),
                "replay/updates": float(since["updates"]),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """The learner keeps its own, in its folder, and goes on from there."""
        self.process.checkpoint()
        return {"rhythm": "concurrent"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare(Progress())
        self._before = self.process.figures()


class SwappingCollector(Collector):
    """A `Collector` that acts with the learner's newest weights: they are taken before every
    ``every`` episodes (0: before those of each call), when no episode is under way."""

    def __init__(self, collector: Collector, learner: RemoteLearner, every: int = 0) -> None:
        self.policy = collector.policy
        self._collector, self._learner, self._every = collector, learner, every

    def swap(self) -> None:
        """Take the newest weights, if they are others than those at hand."""
        newest = self._learner.newest()
        if newest is not None:
            version, tensors = newest
            take_weights(self.policy, tensors)
            self._collector.publish(version)

    def publish(self, version: int) -> None:
        """Iterations are no versions here, the weights bring their own; the newest are taken."""
        self.swap()

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: EpisodesDone | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RolloutResult:
        rounds: list[RolloutResult] = []
        done = [0, 0]  # episodes and successes of earlier rounds

        def closed(trajectory: Trajectory) -> None:
            self._learner.figures()  # a learner that died is started again meanwhile
            if on_trajectory is not None:
                on_trajectory(trajectory)

        def count(finished: int, total: int, successes: int) -> None:
            if progress is not None:
                progress(done[0] + finished, len(plan), done[1] + successes)

        every = self._every or len(plan)
        for first in range(0, len(plan), every):
            self.swap()
            part = plan[first : first + every]
            got = self._collector.collect(
                part, deterministic=deterministic, progress=count, on_trajectory=closed
            )
            rounds.append(got)
            done = [done[0] + len(part), done[1] + sum(t.success for t in got.trajectories)]
        return RolloutResult(
            [t for r in rounds for t in r.trajectories], pooled_stats([r.stats for r in rounds])
        )
