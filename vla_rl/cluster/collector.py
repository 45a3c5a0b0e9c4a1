"""``cluster=ray``: a `Collector` whose episodes run in actors of Ray; the loop, the learner and
the rewards stay here."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vla_rl import build
from vla_rl.assembly.context import Run
from vla_rl.cluster.allocation import allocated
from vla_rl.cluster.group import RolloutGroup
from vla_rl.cluster.inference import ServerJob, Servers
from vla_rl.cluster.rollout_actor import Job
from vla_rl.cluster.session import dashboard, ray_session
from vla_rl.cluster.status import STATUS_FILE, StatusFile
from vla_rl.cluster.worker_context import WorkerContext
from vla_rl.config import RunConfig
from vla_rl.config.episodes import EPISODE_SECONDS
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.interfaces import Collector, EpisodesDone
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.rollout.engine import pooled_seconds, quantiles
from vla_rl.types import EpisodeSpec, RolloutResult, Trajectory

_STATS = (
    "episodes",
    "successes",
    "decisions",
    "control_steps",
    "retries",
    "seconds",
    "policy_seconds",
    "wait_seconds",
    "env_utilisation",
    "decisions_per_second",
    "control_steps_per_second",
    "policy_batch",
    *EPISODE_SECONDS,
)


def ray_collector(run: Run, policy: Any) -> RayCollector:
    """Where the episodes of ``run`` come from with ``cluster=ray``."""
    return (AheadRayCollector if run.config.cluster.ahead else RayCollector)(run, policy)


class RayCollector(Collector):
    """Collects as the rollout engine does: every episode of a plan, in the plan's order.

    With one actor and ``rollout.serve_fraction`` 1 the episodes are those of the engine, bit for
    bit; with several, each gets a consecutive part of the plan, and batches of other sizes round
    differently.
    """

    def __init__(self, run: Run, policy: Any, decisions: int = 0) -> None:
        """``decisions``: after so many an episode is cut off (0: at its own end)."""
        config: Any = run.config.cluster
        self.policy = policy
        self._version: int | None = None
        self._resources = contextlib.ExitStack()
        try:
            ray = self._resources.enter_context(ray_session(config))
            seats = self._resources.enter_context(allocated(ray, run))
            config = seats.config  # with numbers
            self._status = StatusFile(run.dir / STATUS_FILE, self._describe)
            self._ages: dict[str, float] = {}
            self._seats, self._say, self._waits = seats, run.progress.say, ""
            job = dataclasses.replace(job_of(run.config), decisions=decisions)
            servers = None
            if config.inference:
                place = WorkerContext.of(run.config, config.inference, config.threads)
                server = ServerJob(place, run.env.embodiment.to_dict(), job.prepared)
                servers = Servers(seats, server, run.progress.say)
                self._resources.callback(servers.close)
            self.group = RolloutGroup(seats, job, run.progress.say, self._status.look, servers)
            self._resources.callback(self._status.end)
            self._resources.callback(self.group.close)
        except BaseException:
            self._resources.close()
            raise

    def _describe(self) -> dict[str, Any]:
        found = self.group.describe() | self._seats.describe()
        before, self._waits = self._waits, found["placement"]["waits"]
        if self._waits and not before:
            self._say(self._waits)
        return found | {"staleness": self._ages, "dashboard": dashboard(self._seats.ray)}

    def publish(self, version: int) -> None:
        """Once per version."""
        if version != self._version:
            self._version = version
            self.group.publish(version, learned_weights(self.policy))

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: EpisodesDone | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RolloutResult:
        started = time.perf_counter()
        self.group.limit = -(-len(plan) // self.group.size)
        self.group.submit(plan, deterministic)
        trajectories = self._await(plan, progress, on_trajectory)
        rounds = self.group.await_rounds()
        seconds = time.perf_counter() - started
        stats = {
            **parallel_stats(rounds, seconds),
            **self.group.figures(),
            "cluster/learner_wait_seconds": seconds,
        }
        return RolloutResult(trajectories, stats)

    def _await(
        self,
        plan: Sequence[EpisodeSpec],
        progress: EpisodesDone | None,
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> list[Trajectory]:
        """The episodes of a plan that is under way, in its order."""
        ids = [spec.rollout_id for spec in plan]
        done: dict[str, Trajectory] = {}
        successes = 0
        while len(done) < len(plan):
            for trajectory in self.group.await_episode(ids):
                done[trajectory.rollout_id] = trajectory
                successes += trajectory.success
                if on_trajectory is not None:
                    on_trajectory(trajectory)
                if progress is not None:
                    progress(len(done), len(plan), successes)
        return [done[name] for name in ids]

    def close(self) -> None:
        self._resources.close()


class AheadRayCollector(RayCollector):
    """Plans are issued early ("ahead" in `Collector.can`), and actors go on from one to the
    next while the driver learns.

    New weights reach episodes under way at their next decision, and each decision knows its
    version. Work goes to whoever has room, so a slow actor holds up no more than what it has.
    """

    def __init__(self, run: Run, policy: Any) -> None:
        super().__init__(run, policy)
        c: Any = run.config.cluster
        self.late: int = c.max_late
        self.ahead: int = c.ahead - c.max_late  # so that no decision is older than c.ahead
        self._saves, self._oldest = c.save_ready, c.ahead
        self._waited = 0.0  # seconds since the last plan
        self._ready: dict[str, Trajectory] = {}  # of a run that goes on
        self._left = time.perf_counter()  # when the last plan was complete
        slots = run.config.slots
        self.group.limit = 2 * max(1, slots.workers) * slots.slots_per_worker

    def issue(self, plan: Sequence[EpisodeSpec]) -> None:
        self.group.submit([spec for spec in plan if spec.rollout_id not in self._ready])

    def await_done(self, enough: Callable[[Sequence[str]], bool]) -> list[str]:
        started, kept = time.perf_counter(), [*self._ready]
        done = self.group.await_done(lambda names: enough([*kept, *names]))
        self._waited += time.perf_counter() - started
        return [*kept, *done]

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: EpisodesDone | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RolloutResult:
        """Raises ``ValueError`` for ``deterministic`` where the plan was issued before: those
        are sampled."""
        started = time.perf_counter()
        issued = [s for s in plan if s.rollout_id in self._ready or self.group.knows(s.rollout_id)]
        if deterministic and issued:
            raise ValueError(
                f"{len(issued)} episodes of this plan are under way with sampled actions"
            )
        kept = {
            spec.rollout_id: self._ready.pop(spec.rollout_id)
            for spec in plan
            if spec.rollout_id in self._ready
        }
        for trajectory in kept.values():
            if on_trajectory is not None:
                on_trajectory(trajectory)
        rest = [spec for spec in plan if spec.rollout_id not in kept]
        self.group.submit(
            [spec for spec in rest if not self.group.knows(spec.rollout_id)], deterministic
        )
        kept |= {t.rollout_id: t for t in self._await(rest, progress, on_trajectory)}
        now = time.perf_counter()
        seconds, self._left = now - self._left, now
        trajectories = [kept[spec.rollout_id] for spec in plan]
        # (what actors tell at one time is of an episode or two, which have no quantiles)
        took = quantiles(self.group.take_ended())
        stats = parallel_stats(self.group.take_rounds(), seconds) | took | self.group.figures()
        open_count, ready = self.group.counts()
        waited, self._waited = self._waited + now - started, 0.0
        stats |= {"cluster/learner_wait_seconds": waited, "cluster/open": float(open_count)}
        stats |= {"cluster/ready": float(ready)} | (
            ages := staleness(trajectories, self._version or 0, self._oldest)
        )
        self._ages = {
            name.rpartition("/")[2]: share for name, share in ages.items() if name.count("/") == 2
        }
        return RolloutResult(trajectories, stats)

    def state_dict(self) -> dict[str, Any]:
        kept = [trajectory_state(trajectory) for trajectory in self._ready.values()]
        return {"ready": kept + self.group.finished() if self._saves else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for trajectory in map(trajectory_from_state, state["ready"]):
            self._ready[trajectory.rollout_id] = trajectory


def staleness(trajectories: Sequence[Trajectory], version: int, most: int) -> dict[str, float]:
    """How many versions old the decisions are as version ``version`` is about to learn from them:
    mean, maximum, and the share of each age."""
    parts = [
        torch.full((len(t),), t.policy_version)
        if t.decision_version is None
        else t.decision_version
        for t in trajectories
    ]
    ages = version - torch.cat(parts)
    shares = {
        f"cluster/staleness/{age}": float((ages == age).float().mean()) for age in range(most + 1)
    }
    return {
        "cluster/staleness_mean": float(ages.float().mean()),
        "cluster/staleness_max": float(ages.max()),
    } | shares


def job_of(config: RunConfig) -> Job:
    """What a rollout actor of this run does."""
    entry, cluster = build.entry("algorithm", config.algorithm_type), config.cluster
    # (of a user's own nothing is known)
    needs = entry.needs if isinstance(entry, build.AlgorithmEntry) else "likelihood"
    place = WorkerContext.of(config, cluster.rollouts, cluster.threads)
    return Job(
        place,
        needs in ("likelihood", "imitation"),
        cluster.ahead > 0,
        cluster.learners,
        cluster.start_timeout,
    )


def parallel_stats(rounds: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """The engine's ``stats`` of lists that ran at the same time, which took ``seconds`` in all:
    counts add up, shares and waiting are means over the lists by their time."""
    rounds = rounds or [dict.fromkeys(_STATS, 0.0)]
    total = {name: sum(stats[name] for stats in rounds) for name in rounds[0]}
    worked = max(total["seconds"], 1e-9)
    busy = sum(stats["env_utilisation"] * stats["seconds"] for stats in rounds)
    calls = sum(
        stats["decisions"] / stats["policy_batch"] for stats in rounds if stats["policy_batch"]
    )
    return (
        total
        | {
            "seconds": seconds,
            "policy_seconds": total["policy_seconds"] / worked * seconds,
            "wait_seconds": total["wait_seconds"] / worked * seconds,
            "env_utilisation": min(1.0, busy / worked),
            "decisions_per_second": total["decisions"] / seconds,
            "control_steps_per_second": total["control_steps"] / seconds,
            "policy_batch": total["decisions"] / max(1.0, calls),
        }
        | pooled_seconds(rounds)
    )
