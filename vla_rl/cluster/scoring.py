"""``cluster.reward_workers``: the reward model in actors of its own, each of which scores an
episode as soon as it ends.

For models that are the same all through a run and score each episode by itself: a large one then
has GPUs of its own, and no learner waits for it. An episode is scored once for the loop, whoever
dies: the driver has it, and sends it to another actor.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vla_rl.assembly.context import Run
from vla_rl.assembly.reward import start_reward
from vla_rl.cluster import worker_context
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.worker_context import require_same_code
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.interfaces import RewardModel
from vla_rl.learning.figures import mean_figures
from vla_rl.learning.learners import EpisodesLost
from vla_rl.rewards.build import reads_policy
from vla_rl.types import Trajectory


@dataclass(frozen=True)
class _RewardJob:
    """What a reward worker is to do."""

    place: worker_context.WorkerContext
    embodiment: dict[str, Any]


class RewardActor:
    """The run's reward model."""

    def __init__(self, job: _RewardJob) -> None:
        self._job = job
        self._reward: Any = None

    def hello(self) -> dict[str, Any]:
        """Where it runs and with what."""
        return worker_context.hello()

    def score(self, data: np.ndarray | None, held: tuple[Any, int] | None) -> np.ndarray:
        """The rewards [t] of a packed episode, or one that lies behind (reference, place), and what
        the model says of them, packed."""
        if held is not None:
            import ray

            data = ray.get(held[0])[held[1]]
        assert data is not None
        if self._reward is None:
            self._reward = start_reward(self._job.place.enter(self._job.embodiment), None)
        started = time.perf_counter()
        rewards = self._reward.score([trajectory_from_state(unpacked(data))])
        figures = {k: float(v) for k, v in self._reward.metrics().items()}
        return packed(
            {"rewards": rewards[0], "metrics": figures, "seconds": time.perf_counter() - started}
        )


@dataclass
class _Call:
    given: tuple[np.ndarray | None, tuple[Any, int] | None]
    place: int
    worker: Any  # the handle that was asked
    reference: Any


class RemoteReward(RewardModel):
    """A reward model that asks ``config.reward_workers`` actors, in turns; ``reward`` is the
    driver's own, which stays unused. Raises `ConfigError` for one that changes in the run, or needs
    what only the driver has."""

    reads_frames = False  # its workers fetch them

    def __init__(self, seats: Allocation, run: Run, reward: Any) -> None:
        config = run.config
        reward = RewardModel.of(reward)
        changes = reward.learned or "state" in reward.can or config.rl.fallback != "none"
        if changes or reward.wants_demonstrations or reads_policy(config.reward):
            raise ConfigError(
                f"cluster.reward_workers={config.cluster.reward_workers}: "
                f"reward.type={config.reward_type} (or rl.fallback) changes in the run, or wants "
                "its demonstrations or its policy, which the driver has: use "
                "cluster.reward_workers=0"
            )
        self._ray, self._seats, self._say = seats.ray, seats, run.progress.say
        c = self._cluster = seats.config
        self._job = _RewardJob(
            worker_context.WorkerContext.of(config, c.reward_workers), run.env.embodiment.to_dict()
        )
        self._workers = [self._started(place) for place in range(c.reward_workers)]
        self._turns = itertools.cycle(range(c.reward_workers))
        self._calls: dict[str, _Call] = {}
        self._metrics: dict[str, float] = {}
        self._failures = 0  # in a row
        # episodes end in another thread than they are learned from
        self._changed = threading.Lock()

    def prepare(self, trajectory: Trajectory) -> None:
        """Have it scored; `score` asks for what came of it."""
        with self._changed:
            if trajectory.rollout_id not in self._calls:
                there = trajectory.payload
                given = (
                    (packed(trajectory_state(trajectory)), None)
                    if there is None
                    else (None, (there.reference, there.place))
                )
                self._calls[trajectory.rollout_id] = self._asked(given)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """As `RewardModel.score`. Raises `EpisodesLost`."""
        for trajectory in trajectories:
            self.prepare(trajectory)
        found = {t.rollout_id: self._answer(self._calls[t.rollout_id]) for t in trajectories}
        lost = [name for name, answer in found.items() if answer is None]
        for name in lost or found:  # (what is lost is asked for anew, where it lies then)
            self._calls.pop(name, None)
        if lost:
            raise EpisodesLost(lost)
        answers = [answer for answer in found.values() if answer is not None]
        self._metrics = mean_figures([answer["metrics"] for answer in answers]) if answers else {}
        self._metrics["cluster/reward_busy_seconds"] = sum(a["seconds"] for a in answers) / len(
            self._workers
        )
        return [answer["rewards"] for answer in answers]

    def metrics(self) -> Mapping[str, float]:
        """Means over the episodes of the last `score`; seconds in which they were scored, the
        mean of the workers."""
        return self._metrics

    def _answer(self, call: _Call) -> dict[str, Any] | None:
        """What a worker said of an episode; None where the episode is lost."""
        while True:
            try:
                answer = unpacked(
                    worker_context.heard(self._ray, call.reference, self._cluster.hang_timeout)
                )
                self._failures = 0
                return answer
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, self._ray.exceptions.ObjectLostError):
                    return None
                raise
            except (
                self._ray.exceptions.RayActorError,
                self._ray.exceptions.GetTimeoutError,
            ) as error:
                with self._changed:
                    self._replace(call, error)
                    again = self._asked(call.given, call.place)
                call.worker, call.reference = again.worker, again.reference

    def _asked(self, given: Any, place: int | None = None) -> _Call:
        place = next(self._turns) if place is None else place
        return _Call(given, place, self._workers[place], self._workers[place].score.remote(*given))

    def _replace(self, call: _Call, error: Exception) -> None:
        """Another worker where the one that was asked is lost or hangs, unless there is one by
        now; and another one where Ray put that on a node that it did not know to be lost."""
        if self._workers[call.place] is not call.worker:
            return
        lost = call.worker
        while lost is not None:
            self._failures += 1
            if self._failures >= self._cluster.max_failures:
                raise UserError(
                    f"reward workers failed {self._failures} times in a row "
                    f"(cluster.max_failures={self._cluster.max_failures}). The last one: "
                    f"{type(error).__name__}: {first_line(error)}"
                )
            self._say(f"reward worker {call.place} is lost ({first_line(error)}) and replaced")
            self._ray.kill(lost)
            try:
                self._workers[call.place], lost = self._started(call.place), None
            except (
                self._ray.exceptions.RayActorError,
                self._ray.exceptions.GetTimeoutError,
            ) as again:
                error = again

    def _started(self, place: int) -> Any:
        worker = self._ray.remote(**self._seats.options("reward", place))(RewardActor).remote(
            self._job
        )
        greeting = self._seats.sits("reward", place, worker.hello.remote())
        require_same_code(self._ray.get(greeting, timeout=self._cluster.start_timeout))
        return worker
