"""The rollout actors and what they have to do: which episode is where, who is alive, and what
happens when one is not.

An episode is open from `submit` until its result arrived; at most one result of it counts. The
driver owns what must survive: open episodes, results (which Ray hands to it), weights. So an actor
that dies or hangs is replaced, its open episodes run again, and nothing is lost or there twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vla_rl import errors
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.inference import Servers
from vla_rl.cluster.packing import packed_weights, unpacked
from vla_rl.cluster.payload import Payload, light_trajectories
from vla_rl.cluster.pulse import now
from vla_rl.cluster.rollout_actor import Job, RolloutActor, Taken
from vla_rl.cluster.session import cause_of, log_tail, put
from vla_rl.cluster.worker_context import require_same_code
from vla_rl.config.cluster import RayConfig
from vla_rl.data.codec import trajectory_state
from vla_rl.errors import UserError, first_line
from vla_rl.learning.learners import EpisodesLost
from vla_rl.types import EpisodeSpec, Trajectory

_POLL = 1.0  # seconds that an actor waits for something to tell
_TURN = 0.5  # seconds that the driver waits for an actor


@dataclass
class _Worker:
    """An actor as the driver sees it. Times are of `pulse.now`."""

    number: int
    handle: Any
    waited: Any  # the reference that is waited for: `open`, then one `take` after the other
    payload: Any = None  # references to the objects that come with it
    sent: Any = None  # reference to how the last weights were taken
    sent_at: float = 0.0  # when they were on their way
    failures: int = 0  # in this place since an episode came from it
    ready: bool = False
    open: dict[str, EpisodeSpec] = field(default_factory=dict)
    lists: int = 0  # that it has not told the figures of (meaningless where it streams)
    decisions: int = -1
    running: float = 0.0  # seconds in which it had episodes
    alive: float = field(default_factory=now)  # when it was last seen to do something
    heard: float = field(default_factory=now)  # when it last answered

    def describe(self) -> dict[str, Any]:
        """What it does, JSON-ready."""
        return {
            "number": self.number,
            "state": "starting" if not self.ready else "working" if self.open else "idle",
            "open": len(self.open),
            "decisions": max(0, self.decisions),
            "idle_seconds": now() - self.alive,
        }


@dataclass(frozen=True)
class _Finished:
    """An episode that is done: the object that holds it and its place in there; ``light``, all but
    images and replay, where the driver does not fetch them."""

    spec: EpisodeSpec
    reference: Any
    place: int
    light: Trajectory | None = None

    def payload(self, ray: Any) -> Payload:
        return Payload(ray, self.spec.rollout_id, self.reference, self.place)


@dataclass
class _Tally:
    """Since the last look."""

    restarts: int = 0
    bytes_in: int = 0  # of episodes, that the driver got
    bytes_episodes: int = 0  # of episodes that are done
    bytes_out: int = 0
    bytes_published: int = 0  # of weights, once for all actors
    rollout_busy_seconds: float = 0.0  # the actors' mean
    publish_seconds: float = 0.0  # of the driver
    weights_seconds: float = 0.0  # from then until the actors had the weights, their mean
    inference_busy_seconds: float = 0.0  # the mean of those that there are
    take_seconds: float = 0.0  # in which the driver fetched and unpacked episodes

    def published(self, size: int, seconds: float, acted: float) -> None:
        """A version of the weights, of ``size`` bytes; inference actors were busy ``acted``
        seconds with the last one."""
        self.bytes_published += size
        self.publish_seconds += seconds
        self.inference_busy_seconds += acted


class RolloutGroup:
    """The rollout actors of ``seats``, which do ``job``. A thread of its own looks after them, so
    episodes go on while the driver learns. ``limit``: open episodes an actor has at most; ``say``
    gets what a user should know, ``look`` is called now and then."""

    def __init__(
        self,
        seats: Allocation,
        job: Job,
        say: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
        servers: Servers | None = None,
    ) -> None:
        self._ray, self._config, self._seats, self._servers = (
            seats.ray,
            seats.config,
            seats,
            servers,
        )
        self._job, self._say, self._look = job, say, look
        self.limit = 1
        self.tally = _Tally()
        self._losses: list[str] = []  # what was said of them
        # version, reference, checksum, bytes
        self._weights: tuple[int, Any, int, int] | None = None
        self._waiting: deque[EpisodeSpec] = deque()
        self._finished: dict[str, _Finished] = {}
        self._known: set[str] = set()  # open or finished
        self._sure: set[str] = set()  # of these, those with the policy's most likely actions
        self._rounds: list[dict[str, float]] = []
        self._ended: list[float] = []
        self._error: UserError | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._workers = [
            _started(seats, job, number, servers) for number in range(seats.config.rollouts)
        ]
        self._thread = threading.Thread(target=self._look_after, name="rollout-group", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------- what is asked
    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Have all actors act with these, from their next decision on. They are stored once,
        whatever the number of actors."""
        started = time.perf_counter()
        data, checksum = packed_weights(version, weights, self._config.sent == "bfloat16")
        reference = put(self._ray, data)
        acted = 0.0 if self._servers is None else self._servers.publish(reference, checksum)
        with self._changed:
            self.tally.published(data.nbytes, time.perf_counter() - started, acted)
            self._weights = (version, reference, checksum, data.nbytes)
            for worker in self._workers:
                self._send_weights(worker)
            self._assign()  # (without weights nothing starts)

    def submit(self, specs: Sequence[EpisodeSpec], deterministic: bool = False) -> None:
        """Have these run. Raises ``ValueError`` for one that is under way."""
        with self._changed:
            ids = [spec.rollout_id for spec in specs]
            if len({*ids}) < len(ids) or self._known & {*ids}:
                raise ValueError("a rollout_id is used twice: each episode of a plan needs its own")
            self._known |= {*ids}
            self._sure |= {*ids} if deterministic else set()
            self._waiting.extend(specs)
            self._assign()

    def await_episode(self, ids: Sequence[str]) -> list[Trajectory]:
        """Those of ``ids`` that are done, as soon as there are any; each is handed out once. Raises
        the `UserError` with which the group gave up."""
        wanted = {*ids}
        with self._changed:
            self._changed.wait_for(lambda: self._error or not wanted.isdisjoint(self._finished))
            self._raise()
            found = [self._finished.pop(name) for name in [*self._finished] if name in wanted]
        started = time.perf_counter()
        handed = [self._handed(episode) for episode in found]
        with self._changed:
            self.tally.take_seconds += time.perf_counter() - started
            lost = [episode.spec for episode, t in zip(found, handed) if t is None]
            ended = {episode.spec.rollout_id for episode in found} - {s.rollout_id for s in lost}
            self._known, self._sure = self._known - ended, self._sure - ended
            self._waiting.extendleft(reversed(lost))
            self._assign()
        return [trajectory for trajectory in handed if trajectory is not None]

    def _handed(self, episode: _Finished) -> Trajectory | None:
        """What the driver gets of it; None where it is lost."""
        where = episode.payload(self._ray)
        if episode.light is not None:
            return dataclasses.replace(episode.light, payload=where)
        try:
            return where.fetch()
        except EpisodesLost:
            return None

    def await_done(self, enough: Callable[[Sequence[str]], bool]) -> list[str]:
        """The ids of all that are done and were not handed out, in the order of their ends, once
        ``enough`` holds for them. Raises the `UserError` with which the group gave up."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or enough([*self._finished]))
            self._raise()
            return [*self._finished]

    def finished(self) -> list[dict[str, Any]]:
        """The states of episodes that are done and were not asked for."""
        with self._changed:
            waiting = [*self._finished.values()]
        found: list[dict[str, Any]] = []
        for episode in waiting:
            with contextlib.suppress(EpisodesLost):
                found.append(trajectory_state(episode.payload(self._ray).fetch()))
        return found

    def counts(self) -> tuple[int, int]:
        """Episodes that are open, and that are done and wait."""
        with self._changed:
            return len(self._waiting) + sum(len(w.open) for w in self._workers), len(self._finished)

    def knows(self, rollout_id: str) -> bool:
        """Whether this episode is open, or done and not asked for."""
        return rollout_id in self._known

    def take_rounds(self) -> list[dict[str, float]]:
        """The engine's figures that came since the last call."""
        with self._changed:
            rounds, self._rounds = self._rounds, []
            return rounds

    def take_ended(self) -> list[float]:
        """Seconds of the simulator, of each episode that was told of since the last call, where
        actors stream."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def await_rounds(self) -> list[dict[str, float]]:
        """The engine's figures of the lists that are done, once no actor has any episode left."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error
                    or (not self._waiting and not any(w.open or w.lists for w in self._workers))
                )
            )
            self._raise()
        return self.take_rounds()

    def figures(self) -> dict[str, float]:
        """What happened since the last look, as metrics."""
        with self._changed:
            tally, self.tally = self.tally, _Tally()
        return {
            f"cluster/{name}": float(value) for name, value in dataclasses.asdict(tally).items()
        }

    @property
    def restarts(self) -> int:
        return len(self._losses)

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors (0: not known yet)."""
        with self._changed:
            return [self._seats.pid("rollout", worker.number) for worker in self._workers]

    def describe(self) -> dict[str, Any]:
        """Who does what, JSON-ready."""
        with self._changed:
            return {
                "version": None if self._weights is None else self._weights[0],
                "waiting": len(self._waiting),
                "ready": len(self._finished),
                "actors": [worker.describe() for worker in self._workers],
                "restarts": self._losses + ([] if self._servers is None else self._servers.losses),
            }

    def close(self) -> None:
        """End the actors, and the processes of their simulators."""
        with self._changed:
            self._stopping = True
        self._thread.join(10 * _TURN)
        ready = [worker for worker in self._workers if worker.ready]
        closing = [
            worker.handle.close.options(concurrency_group="orders").remote() for worker in ready
        ]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for worker in self._workers:
            self._ray.kill(worker.handle)

    # -------------------------------------------------------------------------------- looking after
    def _look_after(self) -> None:
        while not self._stopping:
            try:
                self._turn()
                self._look()
            except UserError as error:
                failed = error
            except Exception as error:  # whatever it is, the driver must not wait for ever
                failed = UserError(
                    "the rollout actors cannot be reached any more "
                    f"({type(error).__name__}: {error})"
                )
            else:
                continue
            with self._changed:
                self._error = failed
                self._changed.notify_all()
            return

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        with self._changed:
            waiting = {worker.waited: worker for worker in self._workers}
            sent = [worker.sent for worker in self._workers if worker.sent is not None]
        self._ray.wait([*waiting, *sent], num_returns=1, timeout=_TURN, fetch_local=False)
        # whoever has an answer is alive, however long this process stood still itself
        ready, _ = self._ray.wait(
            list(waiting), num_returns=len(waiting), timeout=0, fetch_local=False
        )
        for reference in ready:
            self._hear(waiting[reference])
        for worker in waiting.values():
            self._hear_sent(worker)
        at = now()
        with self._changed:
            if self._servers is not None:
                self.tally.restarts += self._servers.look(self._workers)
            for worker in self._workers:
                if why := _overdue(worker, self._config, at):
                    self._see_to(worker, why + self._seats.because(), at)

    def _see_to(self, worker: _Worker, why: str, at: float) -> None:
        """Replace ``worker``, and the one that acts for it: only the one of them that gives no sign
        of life, where one does. (Who acts is replaced by `Servers.look`.)"""
        silent = self._config.hang_timeout / 2
        answers = at - worker.heard < silent
        if self._servers is not None and answers:
            if self._servers.silence(worker.number) > silent:
                return
            self._servers.replace(worker.number, f"an actor that it acts for {why}", self._workers)
        self._replace(worker, why)

    def _hear(self, worker: _Worker) -> None:
        worker.heard = now()
        try:
            said = self._ray.get(worker.waited)
        except Exception as error:
            cause_of(self._ray, error)
            with self._changed:
                self._replace(worker, f"{type(error).__name__}: {first_line(error)}")
            return
        with self._changed:
            if worker.ready:
                self._hear_taken(worker, said)
            else:
                self._welcome(worker)
            self._assign()
            self._ask(worker)
            self._changed.notify_all()

    def _hear_sent(self, worker: _Worker) -> None:
        """Whether it took the weights: one that did not would go on with older ones. Raises its
        `UserError`."""
        if (
            worker.sent is None
            or worker not in self._workers
            or not self._ray.wait([worker.sent], timeout=0)[0]
        ):
            return
        reference, sent_at, worker.sent = worker.sent, worker.sent_at, None
        try:
            self._ray.get(reference)
        except Exception as error:
            cause = cause_of(self._ray, error)
            with self._changed:
                self._replace(
                    worker,
                    f"it could not take the weights: {type(cause).__name__}: {first_line(error)}",
                )
            return
        with self._changed:
            self.tally.weights_seconds += (now() - sent_at) / len(self._workers)

    def _welcome(self, worker: _Worker) -> None:
        """It is ready. Raises `UserError` where it is made of other code than this process."""
        require_same_code(self._seats.hello("rollout", worker.number))
        worker.ready, worker.alive = True, now()
        self._send_weights(worker)

    def _hear_taken(self, worker: _Worker, taken: Taken) -> None:
        light: list[Any] = [None] * len(taken.rollout_ids)
        if taken.light is not None:
            light = light_trajectories(unpacked(taken.light, held=True))
        places = [(i, place) for i, count in enumerate(taken.counts) for place in range(count)]
        for name, (i, place), told in zip(taken.rollout_ids, places, light, strict=True):
            spec = worker.open.pop(name)
            self._finished[name] = _Finished(spec, worker.payload[i], place, told)
            worker.failures = 0
        self.tally.bytes_episodes += taken.bytes
        self.tally.bytes_in += taken.bytes if taken.light is None else taken.light.nbytes
        self.tally.rollout_busy_seconds += (taken.running - worker.running) / len(self._workers)
        worker.running = taken.running
        self._rounds += taken.rounds
        self._ended += taken.ended
        worker.lists -= len(taken.rounds)
        if taken.decisions != worker.decisions or taken.rollout_ids or not worker.open:
            worker.decisions, worker.alive = taken.decisions, now()
        if taken.failure is not None:
            kind, text, mendable = taken.failure
            if mendable:
                kinds = {
                    k.__name__: k
                    for k in vars(errors).values()
                    if isinstance(k, type) and issubclass(k, UserError)
                }
                raise (
                    kinds[kind](text)
                    if kind in kinds and kind != "MissingPackage"
                    else UserError(text)
                )
            self._replace(worker, text)

    def _ask(self, worker: _Worker) -> None:
        if worker in self._workers:
            count = 1 + max(1, self._job.objects)
            take = worker.handle.take.options(num_returns=count, concurrency_group="results")
            worker.waited, *worker.payload = take.remote(_POLL)

    def _assign(self) -> None:
        """Give each actor what it has room for; the driver's lock is held. Where they stream, none
        takes what others could begin at once."""
        limit = self.limit
        if self._job.streams:
            total = len(self._waiting) + sum(len(worker.open) for worker in self._workers)
            limit = min(limit, -(-total // len(self._workers)))
        for worker in self._workers:
            room = min(limit - len(worker.open), len(self._waiting))
            if not worker.ready or room < 1 or self._weights is None:
                continue
            specs = [self._waiting.popleft() for _ in range(room)]
            if not worker.open:
                worker.alive = now()
            worker.open |= {spec.rollout_id: spec for spec in specs}
            for sure, alike in itertools.groupby(specs, lambda spec: spec.rollout_id in self._sure):
                worker.lists += 1
                worker.handle.add.options(concurrency_group="orders").remote(list(alike), sure)

    def _send_weights(self, worker: _Worker) -> None:
        if self._weights is None or self._servers is not None or not worker.ready:
            return
        _, reference, checksum, size = self._weights
        self.tally.bytes_out += size
        worker.sent_at = now()
        worker.sent = worker.handle.weights.options(concurrency_group="orders").remote(
            reference, checksum
        )

    # ------------------------------------------------------------------------------- start, replace
    def _replace(self, worker: _Worker, why: str) -> None:
        """Start another actor in the place of one that is lost. Raises `UserError` after too
        many in a row there."""
        worker.failures += 1
        self.tally.restarts += 1
        pid = self._seats.pid("rollout", worker.number)
        if worker.failures >= self._config.max_failures:
            raise _given_up(self._ray, worker, pid, why)
        self._losses.append(
            f"rollout actor {worker.number} (process {pid}) is lost ({first_line(UserError(why))}) "
            f"and replaced; its {len(worker.open)} open episodes run again"
        )
        self._say(self._losses[-1])
        self._ray.kill(worker.handle)
        self._waiting.extendleft(reversed(worker.open.values()))
        new = _started(self._seats, self._job, worker.number, self._servers)
        new.failures = worker.failures
        self._workers[self._workers.index(worker)] = new

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _overdue(worker: _Worker, config: RayConfig, at: float) -> str:
    """Why ``worker`` is taken for dead; empty where it is not."""
    limit = config.hang_timeout if worker.ready else config.start_timeout
    if worker.ready and not worker.open:
        limit = max(limit, 60.0)  # nothing to do, so only its answers are missed
    if at - worker.alive <= limit:
        return ""
    return (
        f"did nothing for {limit:g} s (cluster.hang_timeout)"
        if worker.ready
        else (f"was not ready for {limit:g} s (cluster.start_timeout)")
    )


def _given_up(ray: Any, worker: _Worker, pid: int, why: str) -> UserError:
    tail = log_tail(ray, pid) if pid else ""
    return UserError(
        f"rollout actor {worker.number} failed {worker.failures} times in a row "
        f"(cluster.max_failures={worker.failures}), without an episode in between. The last time: "
        f"{why}" + (f"\nWhat it wrote at last:\n  {tail}" if tail else "")
    )


def _started(seats: Allocation, job: Job, number: int, servers: Servers | None = None) -> _Worker:
    """A new actor, which is told to open what it needs."""
    make = seats.ray.remote(
        **seats.options("rollout", number),
        # of another server it hears while it opens
        concurrency_groups={"orders": 1, "results": 1, "servers": 1},
    )(RolloutActor)
    handle = make.remote(job, None if servers is None else servers.of(number))
    seats.sits("rollout", number, handle.hello.options(concurrency_group="orders").remote())
    return _Worker(number, handle, handle.open.options(concurrency_group="orders").remote())
