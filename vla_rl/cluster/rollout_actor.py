"""What runs inside an actor of Ray: the env, the rollout engine and the policy of a local run, none
of them changed.

The actor itself is three threads: one that episodes run in, one that takes orders (`add`,
`weights`) and one that hands out what is done (`take`, which waits). An order is a few words or a
reference, a result is a packed array.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vla_rl import build
from vla_rl.assembly.learner import trained_policy
from vla_rl.cluster import worker_context
from vla_rl.cluster.inference import RemotePolicy
from vla_rl.cluster.packing import packed, unpacked_weights
from vla_rl.cluster.payload import handed_out, light_state, split
from vla_rl.errors import UserError
from vla_rl.interfaces import Collector, Env
from vla_rl.learning.episode_queue import take_weights
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.types import EpisodeSpec, SlotEvent, Trajectory


@dataclass(frozen=True)
class Job:
    """What an actor is to do. ``prepared``: the algorithm prepares its policy for RL. ``streams``:
    lists follow each other without a pause, and weights change in the middle of episodes."""

    place: worker_context.WorkerContext
    prepared: bool
    streams: bool = False
    # objects that what is done at one time is spread over (0: its images and replay go to the
    # driver too)
    objects: int = 0
    patience: float = 300.0  # seconds that it waits for another server where its own is lost
    decisions: int = 0  # after which an episode is cut off (0: at its own end)


@dataclass(frozen=True)
class Taken:
    """What an actor tells beside the episodes it hands out. ``rounds`` are the engine's figures of
    lists that are done, or of the time since the last call where it streams; ``failure`` (class,
    text, whether the user can mend it) why it gave up."""

    rollout_ids: tuple[str, ...]  # of the objects that come along, one behind the other
    decisions: int  # policy calls since it started: a sign of life
    rounds: tuple[dict[str, float], ...]
    failure: tuple[str, str, bool] | None
    bytes: int = 0  # of what is handed out
    counts: tuple[int, ...] = ()  # episodes of each object
    light: np.ndarray | None = None  # `payload.light_state`, packed, for a driver that fetches none
    running: float = 0.0  # seconds in which it had episodes, since it started
    # of the simulator, for each episode that ended since the last call, where it streams
    ended: tuple[float, ...] = ()


class CutOff(Env):
    """``env``, whose episodes are out of time after ``decisions`` decisions."""

    def __init__(self, env: Any, decisions: int) -> None:
        self._env, self._decisions = Env.of(env), decisions
        self._left: dict[int, int] = {}  # slot → decisions
        self.embodiment, self.tasks = env.embodiment, env.tasks
        self.privileged_dim, self.num_slots = env.privileged_dim, env.num_slots

    def start(self, slot: int, episode: EpisodeSpec) -> None:
        self._left[slot] = self._decisions
        self._env.start(slot, episode)

    def step(self, slot: int, actions: np.ndarray) -> None:
        self._left[slot] -= 1
        self._env.step(slot, actions)

    def poll(self, timeout: float | None = None) -> Sequence[SlotEvent]:
        return [
            event
            if event.step is None or event.step.terminated or self._left[event.slot]
            else dataclasses.replace(event, step=dataclasses.replace(event.step, truncated=True))
            for event in self._env.poll(timeout)
        ]

    def close(self) -> None:
        self._env.close()


class RolloutActor:
    """Runs the episodes it is given, list after list, in the order of their arrival."""

    def __init__(self, job: Job, server: Any = None) -> None:
        """``server``: the handle of an `inference.InferenceActor` that acts in its stead."""
        self._job = job
        self._remote = None if server is None else self._asking(server)
        self._lists: deque[tuple[list[EpisodeSpec], bool]] = deque()
        self._done: list[Trajectory] = []
        self._rounds: list[dict[str, float]] = []
        self._failure: tuple[str, str, bool] | None = None
        self._weights: tuple[int, dict[str, torch.Tensor]] | None = None
        self._decisions = 0
        self._running = 0.0
        self._since: float | None = None  # when the list under way began
        self._deterministic = False  # the kind of that list
        self._changed = threading.Condition()

    # --------------------------------------------------------------------------------------- orders
    def hello(self) -> dict[str, Any]:
        """Where it runs and with what: said before anything that takes long or can fail."""
        return worker_context.hello()

    def open(self) -> None:
        """Open the env and the policy. Raises `UserError` for what the run's user can mend."""
        run = self._job.place.enter()
        config = run.config
        policy = self._remote.open() if self._remote is not None else trained_policy(run)
        if self._job.prepared:
            policy.prepare_for_rl()
        env = CutOff(run.env, self._job.decisions) if self._job.decisions else run.env
        engine = RolloutEngine(env, policy, config.rollout)
        engine.before_decision = self._before_decision
        self._run, self._policy, self._engine, self._mark = run, policy, engine, engine.mark()
        self._collector: Collector = build.implementation("collector", config.collector_type)(
            config.collector, engine
        )
        threading.Thread(target=self._work, name="rollouts", daemon=True).start()

    def _asking(self, server: Any) -> RemotePolicy:
        import ray

        return RemotePolicy(
            ray, server, lambda version: self._collector.publish(version), self._job.patience
        )

    def serve_by(self, server: Any) -> None:
        """Another one acts from now on, also where this actor is still opening."""
        if self._remote is not None:
            self._remote.serve_by(server)

    def weights(self, data: np.ndarray, checksum: int) -> int:
        """Act with these from the next decision on; returns their version."""
        version, tensors = unpacked_weights(data, checksum)
        with self._changed:
            self._weights = (version, tensors)
        return version

    def add(self, specs: Sequence[EpisodeSpec], deterministic: bool) -> None:
        """Run these too."""
        with self._changed:
            self._lists.append((list(specs), deterministic))
            self._changed.notify_all()

    # -------------------------------------------------------------------------------------- results
    def take(self, wait: float) -> tuple[Any, ...]:
        """A `Taken`, and what is done since the last call (`payload.handed_out`), in as many
        objects as ``job.objects`` says; waits at most ``wait`` seconds for something to tell."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._rounds or self._failure, wait)
            done, rounds, self._done, self._rounds = self._done, self._rounds, [], []
            now = time.perf_counter()
            running = self._running + (now - self._since if self._since is not None else 0.0)
            ended: tuple[float, ...] = ()
            if self._job.streams:
                before, self._mark = self._mark, self._engine.mark()
                rounds = [_floats(self._engine.figures(before, self._mark))]
                ended = tuple(self._engine.ended(before, self._mark))
            told = Taken(
                tuple(t.rollout_id for t in done),
                self._decisions,
                tuple(rounds),
                self._failure,
                running=running,
                ended=ended,
            )
        count = max(1, self._job.objects)
        chosen = split([len(t) for t in done], count)
        parts = [[t for t, at in zip(done, chosen) if at == i] for i in range(count)]
        objects = [handed_out(part) for part in parts]
        order = [t for part in parts for t in part]
        told = dataclasses.replace(
            told,
            rollout_ids=tuple(t.rollout_id for t in order),
            counts=tuple(map(len, parts)),
            bytes=sum(data.nbytes for held in objects for data in held),
            light=packed(light_state(order)) if self._job.objects and done else None,
        )
        return told, *objects

    def close(self) -> None:
        self._run.resources.close()

    # --------------------------------------------------------------------------------------- inside
    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lists)
                specs, self._deterministic = self._lists.popleft()
                self._since = time.perf_counter()
            options: dict[str, Any] = {"more": self._more} if self._job.streams else {}
            try:
                self._swap()
                result = self._collector.collect(
                    specs, deterministic=self._deterministic, on_trajectory=self._ended, **options
                )
            except BaseException as error:
                mendable = isinstance(error, UserError)
                text = str(error) if mendable else traceback.format_exc()
                with self._changed:
                    self._failure = (type(error).__name__, text, mendable)
                    self._changed.notify_all()
                return
            with self._changed:
                self._running += time.perf_counter() - self._since
                self._since = None
                if not self._job.streams:
                    self._rounds.append(_floats(result.stats))
                self._changed.notify_all()

    def _more(self) -> list[EpisodeSpec]:
        """For a slot that has nothing to do: none of another kind than those under way."""
        with self._changed:
            return (
                self._lists.popleft()[0]
                if self._lists and self._lists[0][1] == self._deterministic
                else []
            )

    def _ended(self, trajectory: Trajectory) -> None:
        with self._changed:
            self._done.append(trajectory)
            self._changed.notify_all()

    def _before_decision(self) -> None:
        self._decisions += 1
        self._swap()

    def _swap(self) -> None:
        with self._changed:
            pending, self._weights = self._weights, None
        if pending is not None:
            version, tensors = pending
            take_weights(self._policy, tensors)
            self._collector.publish(version)


def _floats(stats: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in stats.items()}
