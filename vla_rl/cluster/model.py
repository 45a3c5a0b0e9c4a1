"""What a cluster would do, by a discrete-event model of the pipeline that `collector.py` and
`group.py` are.

Rollout actors with slots, cores and a policy each; a learner; the gate of
`vla_rl.learning.lookahead`. Simulations, policy calls, updates, publications and what the driver
does with each episode take the times that were measured (`times.py`); everything else takes none.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

_MOST_ACTORS = 4  # that are played out; more are alike, and the learner's share is scaled
_MOST_EPISODES = 3000  # that are played out, in at least so many iterations:
_FEWEST_ITERATIONS = 8
_SOME_ITERATIONS = 16
_WARM_UP = 0.25  # share of the iterations that does not count


@dataclass(frozen=True)
class Times:
    """Service times in seconds, measured. ``chunk`` of one decision in the simulator, samples;
    ``pace``: by what factor it is longer in each of the episodes that ``decisions`` are of (none:
    1; some are slow from begin to end); ``reset`` of an episode's start; ``decisions`` of episodes,
    samples (counts, or means); a policy call takes ``act_fixed`` + rows · ``act_row``; ``update``
    per episode that is learned from, on one device; ``publish`` of a version by the driver, and
    ``reach`` from then until actors have it, which begin no episode meanwhile; ``take`` of the
    driver per episode (unpacking, rewards), one after the other and not during an update; ``pause``
    of the driver per iteration (checkpoint)."""

    chunk: tuple[float, ...]
    decisions: tuple[float, ...]
    act_fixed: float
    act_row: float
    update: float
    reset: float = 0.0
    publish: float = 0.0
    reach: float = 0.0
    pause: float = 0.0
    take: float = 0.0
    pace: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setup:
    """Of what the cluster is made. ``cores`` and ``slots`` are those of an actor; ``inline``: its
    simulator runs where the policy does (``slots.workers=0``). ``batch`` episodes an iteration.
    Each doubling of the learners' devices keeps ``efficiency`` of the speed that it should
    bring."""

    rollouts: int
    slots: int
    cores: int
    batch: int
    ahead: int = 0
    learners: int = 1
    serve_fraction: float = 0.5
    inline: bool = False
    efficiency: float = 0.95

    @property
    def learner_speed(self) -> float:
        return self.learners * self.efficiency ** math.log2(self.learners)


@dataclass(frozen=True)
class Outcome:
    """Of the iterations that count: seconds of one, episodes a second, shares of time that each
    role works, ages in versions of the decisions as they are learned from."""

    seconds: float
    episodes_per_second: float
    cores: float
    policies: float
    learner: float
    driver: float
    staleness_mean: float
    staleness_max: int


@dataclass
class _Episode:
    plan: int
    left: int  # decisions
    pace: float = 1.0
    versions: list[int] = field(default_factory=list)


@dataclass
class _Actor:
    limit: int  # episodes that it may have
    idle_slots: int
    free_cores: int
    queue: deque[_Episode] = field(default_factory=deque)
    running: int = 0  # episodes in slots
    waiting: list[_Episode] = field(default_factory=list)  # for the policy
    # for a core: seconds, and what follows
    jobs: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    simulating: int = 0
    calling: bool = False

    @property
    def has(self) -> int:
        return len(self.queue) + self.running

    def simulate(self, seconds: float, then: Callable[[], None]) -> None:
        self.simulating += 1
        self.jobs.append((seconds, then))


def _episodes(times: Times, random: random.Random) -> Iterator[tuple[float, float]]:
    """Decisions and pace of one episode after the other: each that was measured once, then each
    once more. (Of a slow one that is seldom, none or three by chance would be far off.)"""
    while True:
        drawn = list(zip(times.decisions, times.pace or itertools.repeat(1.0)))
        random.shuffle(drawn)
        yield from reversed(drawn)


class _World:
    """One run of the model."""

    def __init__(self, times: Times, setup: Setup, iterations: int, seed: int) -> None:
        self.times, self.setup, self.iterations = times, setup, iterations
        self.first = int(iterations * _WARM_UP)  # that counts
        self.random = random.Random(seed)
        self._episodes = _episodes(times, self.random)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        limit = 2 * setup.slots if setup.ahead else math.ceil(setup.batch / setup.rollouts)
        self.actors = [_Actor(limit, setup.slots, setup.cores) for _ in range(setup.rollouts)]
        self.unassigned: deque[_Episode] = deque()
        self.finished: dict[int, list[_Episode]] = {}
        self.version = 0  # that is published
        self.acting = 0  # that actors have
        self.learned = 0  # iterations
        self.issued = 0
        self.learning = False
        self.arrived: deque[_Episode] = deque()  # at the driver
        self.taking = False
        self.worked = {"cores": 0.0, "policies": 0.0, "learner": 0.0, "driver": 0.0}
        self.ages: list[list[int]] = []
        self.ends: list[float] = []
        self.marks: list[dict[str, float]] = []

    def run(self) -> None:
        self._issue()
        while self._events and self.learned < self.iterations:
            self.now, _, then = heapq.heappop(self._events)
            then()

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    # ----------------------------------------------------------------------------------- the driver
    def _issue(self) -> None:
        while self.issued <= min(self.version + self.setup.ahead, self.iterations - 1):
            if self.issued == self.first:
                self._episodes = _episodes(self.times, self.random)
            for _ in range(self.setup.batch):
                mean, pace = next(self._episodes)
                whole = max(1, int(mean + self.random.random()))  # (a mean of 4.3 is 4 or 5)
                self.unassigned.append(_Episode(self.issued, whole, pace * mean / whole))
            self.issued += 1
        self._assign()

    def _assign(self) -> None:
        if self.acting < self.version:  # what is given to actors comes behind the weights
            return
        share = len(self.unassigned) + sum(actor.has for actor in self.actors)
        share = math.ceil(share / len(self.actors)) if self.setup.ahead else self.setup.batch
        for actor in self.actors:
            while self.unassigned and actor.has < min(actor.limit, share):
                actor.queue.append(self.unassigned.popleft())
            while actor.queue and actor.idle_slots:
                actor.idle_slots -= 1
                actor.running += 1
                episode = actor.queue.popleft()
                actor.simulate(self.times.reset, lambda a=actor, e=episode: a.waiting.append(e))  # type: ignore[misc]
                self._work(actor)

    def _take(self) -> None:
        """Have the driver look at the next episode that ended, where it has nothing else to do."""
        if self.arrived and not self.taking and not self.learning:
            self.taking = True
            self._after(self.times.take, self._taken)

    def _taken(self) -> None:
        episode, self.taking = self.arrived.popleft(), False
        self.worked["driver"] += self.times.take
        self.finished.setdefault(episode.plan, []).append(episode)
        self._learn()
        self._take()

    def _learn(self) -> None:
        """Begin an update if its batch is there."""
        done = self.finished.get(self.learned, [])
        if self.learning or len(done) < self.setup.batch or self.version < self.learned:
            return
        self.learning = True
        self.ages.append([self.learned - v for episode in done for v in episode.versions])
        seconds = self.times.update * self.setup.batch / self.setup.learner_speed
        self._after(seconds + self.times.pause, lambda: self._learnt(seconds))

    def _learnt(self, seconds: float) -> None:
        self.worked["learner"] += seconds
        self.worked["driver"] += self.times.pause + self.times.publish
        self.finished.pop(self.learned)
        self.learned += 1
        self._after(self.times.publish, self._published)

    def _published(self) -> None:
        self.learning, self.version = False, self.learned
        self.ends.append(self.now)
        self.marks.append(dict(self.worked))
        self._after(self.times.reach, functools.partial(self._reached, self.version))
        self._learn()
        self._take()

    def _reached(self, version: int) -> None:
        self.acting = version
        self._issue()

    # ------------------------------------------------------------------------------------- an actor
    def _work(self, actor: _Actor) -> None:
        """Put jobs on free cores; where the simulator shares the policy's process, not during a
        call."""
        while actor.jobs and actor.free_cores and not (self.setup.inline and actor.calling):
            seconds, then = actor.jobs.popleft()
            actor.free_cores -= 1
            self._after(seconds, lambda job=(seconds, then): self._worked(actor, *job))  # type: ignore[misc]

    def _worked(self, actor: _Actor, seconds: float, then: Callable[[], None]) -> None:
        self.worked["cores"] += seconds
        actor.free_cores += 1
        actor.simulating -= 1
        then()
        self._work(actor)
        self._serve(actor)

    def _serve(self, actor: _Actor) -> None:
        """Call the policy once enough slots wait, as `RolloutEngine` does."""
        enough = (
            len(actor.waiting) >= max(1.0, self.setup.serve_fraction * actor.running)
            or not actor.simulating
        )
        if actor.calling or not actor.waiting or not enough:
            return
        rows, actor.waiting = actor.waiting, []
        actor.calling = True
        seconds = self.times.act_fixed + len(rows) * self.times.act_row
        for episode in rows:
            episode.versions.append(self.acting)
        self._after(seconds, lambda: self._served(actor, seconds, rows))

    def _served(self, actor: _Actor, seconds: float, rows: Sequence[_Episode]) -> None:
        self.worked["policies"] += seconds
        actor.calling = False
        for episode in rows:
            seconds = self.random.choice(self.times.chunk) * episode.pace
            actor.simulate(seconds, lambda e=episode: self._stepped(actor, e))  # type: ignore[misc]
            self._work(actor)
        self._serve(actor)

    def _stepped(self, actor: _Actor, episode: _Episode) -> None:
        episode.left -= 1
        if episode.left > 0:
            actor.waiting.append(episode)
            return
        actor.running -= 1
        actor.idle_slots += 1
        self.arrived.append(episode)
        self._assign()
        self._take()


def simulate(times: Times, setup: Setup, *, iterations: int = 0, seed: int = 0) -> Outcome:
    """Play ``iterations`` out (0: some). Of more than a few actors a part is played, with its share
    of episodes and learner."""
    share = max(1.0, setup.rollouts / _MOST_ACTORS)
    part = replace(
        setup, rollouts=round(setup.rollouts / share), batch=max(1, round(setup.batch / share))
    )
    scale = setup.batch / part.batch
    iterations = iterations or _enough(times, part.batch)
    world = _World(
        replace(times, update=times.update * scale, take=times.take * scale), part, iterations, seed
    )
    world.run()
    first = world.first
    begun, base = (
        (world.ends[first - 1], world.marks[first - 1])
        if first
        else (0.0, dict.fromkeys(world.worked, 0.0))
    )
    spent = max(world.ends[-1] - begun, 1e-12)
    count = len(world.ends) - first
    used = {name: (world.marks[-1][name] - base[name]) / spent for name in base}
    ages = [age for row in world.ages[first:] for age in row]
    return Outcome(
        seconds=spent / count,
        episodes_per_second=count * setup.batch / spent,
        cores=used["cores"] / (part.rollouts * part.cores),
        policies=used["policies"] / part.rollouts,
        learner=used["learner"],
        driver=used["driver"],
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
    )


def _enough(times: Times, batch: int) -> int:
    """Iterations in which, where episodes have paces of their own, each of these counts as often
    as the others."""
    most = max(_FEWEST_ITERATIONS, _MOST_EPISODES // batch)
    if not times.pace:
        return min(_SOME_ITERATIONS, most)
    whole = max(1, round(len(times.decisions) / batch))
    counted = whole * math.ceil((1.0 - _WARM_UP) * _FEWEST_ITERATIONS / whole)
    return min(math.ceil(counted / (1.0 - _WARM_UP)), most)


def useful_share(
    devices: int, mtbf_hours: float, checkpoint: float, restart: float
) -> tuple[float, float]:
    """Share of time that is not lost to failures of one of ``devices`` (each with this mean time
    between failures), and the seconds between checkpoints that loses least: √(2 · cost · MTBF)
    (Young 1974). A failure of a learner loses half an interval and ``restart`` seconds; a
    ``checkpoint`` takes that many."""
    if not mtbf_hours:
        return 1.0, 0.0
    mean = mtbf_hours * 3600.0 / devices
    interval = math.sqrt(2.0 * checkpoint * mean)
    lost = checkpoint / interval + (interval / 2.0 + restart) / mean
    return max(0.0, 1.0 - lost), interval


def best_split(times: Times, base: Setup, devices: int) -> tuple[Setup, Outcome]:
    """How many of ``devices`` act (an actor each, as ``base`` describes one) and how many learn."""
    return fastest(
        times, [replace(base, learners=n, rollouts=devices - n) for n in splits(devices)]
    )


def splits(devices: int) -> list[int]:
    """How many of ``devices`` may learn: the sixteenths, at least one and not all."""
    return sorted({max(1, min(devices - 1, round(devices * part / 16))) for part in range(1, 16)})


def fastest(times: Times, setups: Sequence[Setup]) -> tuple[Setup, Outcome]:
    """The one with most episodes a second, where learners become more: with few of them these are
    busy all the time, with few actors those, and in between lies one peak."""

    @functools.cache
    def tried(i: int) -> Outcome:
        return simulate(times, setups[i])

    low, high = 0, len(setups) - 1
    while low < high:
        middle = (low + high) // 2
        if tried(middle).episodes_per_second < tried(middle + 1).episodes_per_second:
            low = middle + 1
        else:
            high = middle
    return setups[low], tried(low)
