"""A scripted operator for experiments: takes over by a rule, after a person's delay, with a
person's imprecision.

Everything is drawn from one seed, and time is passed in, so a session in virtual time repeats
exactly. What an operator knows of the task comes from an `Expert`. Defaults: shared fact sheet,
runner.md §8 (129 driver studies for the reaction).
"""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from real.messages import State
from real.modes import Mode
from real.teleop.protocol import STILL, Sample
from vla_rl.bounds import Bounded, bound

LAG_S = 2.0  # how much of the expert's past is kept


class Expert(abc.ABC):
    """What the operator sees and would do. ``state`` is the supervisor's; a simulated task may
    know more. ``rate`` (1/s) is how fast a hand closes the gap to its goal."""

    rate: float = 10.0

    @abc.abstractmethod
    def action(self, state: State) -> tuple[tuple[float, ...], float]:
        """Six axes in [-1, 1], and the gripper."""

    def goal(self, state: State) -> tuple[float, ...]:
        """Where the joints should be, of an arm that is led by them (else empty)."""
        return ()

    @abc.abstractmethod
    def outcome(self, state: State) -> str:
        """One of success and failure, or empty while the episode goes on."""

    @abc.abstractmethod
    def progress(self, state: State) -> float:
        """How far the task is, higher is further."""


class Rule(Protocol):
    """When to take over, and when to hand back."""

    def begin(self, rng: np.random.Generator) -> None:
        """An episode begins."""
        ...

    def wants(self, state: State, now: float) -> bool: ...

    def enough(self, state: State, now: float, helped_s: float) -> bool: ...


class Stuck:
    """Take over after ``patience_s`` without ``gain`` of progress; hand back after ``help_gain``
    of it, or ``longest_s``."""

    def __init__(
        self,
        expert: Expert,
        patience_s: float = 2.0,
        gain: float = 0.02,
        help_gain: float = 0.2,
        longest_s: float = 5.0,
    ):
        self.expert, self.patience_s, self.gain = expert, patience_s, gain
        self.help_gain, self.longest_s = help_gain, longest_s
        self._best, self._since, self._start = -np.inf, 0.0, 0.0

    def begin(self, rng: np.random.Generator) -> None:
        self._best = -np.inf

    def wants(self, state: State, now: float) -> bool:
        progress = self.expert.progress(state)
        if progress > self._best + self.gain or self._best == -np.inf:
            self._best, self._since = progress, now
        self._start = progress
        return now - self._since > self.patience_s

    def enough(self, state: State, now: float, helped_s: float) -> bool:
        gained = self.expert.progress(state) - self._start
        done = helped_s > self.longest_s or gained > self.help_gain
        if done:
            self._best, self._since = -np.inf, now
        return done


class Random:
    """Take over U{1..``gap``} control steps after the last time, for U{1..``length``} steps
    (RLIF's random rule)."""

    def __init__(self, gap: int, length: int, control_hz: float):
        self.gap, self.length, self.control_hz = gap, length, control_hz
        self._due, self._steps, self._rng = 0, 0, np.random.default_rng(0)

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._draw(0)

    def _draw(self, step: int) -> None:
        self._due = step + int(self._rng.integers(1, self.gap + 1))
        self._steps = int(self._rng.integers(1, self.length + 1))

    def wants(self, state: State, now: float) -> bool:
        return state.step >= self._due

    def enough(self, state: State, now: float, helped_s: float) -> bool:
        done = helped_s >= self._steps / self.control_hz
        if done:
            self._draw(state.step)
        return done


@dataclass(frozen=True)
class OperatorConfig(Bounded, place="operator"):
    """``reaction_s`` plus a log-normal of median ``reaction_median_s`` and log-deviation
    ``reaction_sigma`` passes between wanting and acting; with probability ``distracted`` the median
    is ``distracted_median_s``. After ``tired_after_s`` delays are ``tired`` times as long. The hand
    is ``lag_s`` behind, ``noise`` is its error as a share of full deflection, below ``dead_zone``
    it does nothing. It lets go ``late_s`` (least, most) after it was enough. ``wrong_label``: share
    of labels.
    """

    seed: int = 0
    reaction_s: float = 0.2
    reaction_median_s: float = 0.5
    reaction_sigma: float = 0.4
    distracted: float = bound(0.05, ge=0, le=1)
    distracted_median_s: float = 2.0
    tired_after_s: float = 3600.0
    tired: float = 1.5
    lag_s: float = bound(0.15, ge=0, le=LAG_S)
    noise: float = bound(0.15, ge=0, le=1)
    dead_zone: float = bound(0.1, ge=0, le=1)
    late_s: tuple[float, float] = (0.3, 1.0)
    wrong_label: float = bound(0.03, ge=0, le=1)


class Doing(Enum):
    WATCHING = "watching"
    REACTING = "reacting"  # has decided to take over, and the hand is on its way
    HELPING = "helping"
    LETTING_GO = "letting go"


@dataclass(frozen=True)
class Ask:
    """An event to send, and when its key was pressed."""

    name: str
    value: str
    at: float


class _Hand:
    """A person's: ``lag_s`` behind what they want, and imprecise."""

    def __init__(self, config: OperatorConfig):
        self.config = config
        self._past: deque[tuple[float, np.ndarray, float]] = deque()
        self._led: np.ndarray = np.empty(0)  # where it has an absolute device, and since when
        self._at = 0.0

    def follow(self, now: float, wanted: tuple[tuple[float, ...], float]) -> None:
        """``wanted`` as of `Expert.action`."""
        axes, gripper = wanted
        self._past.append((now, np.asarray(axes, dtype=float), gripper))
        while len(self._past) > 1 and self._past[1][0] <= now - self.config.lag_s:
            self._past.popleft()

    def does(self, now: float, rng: np.random.Generator) -> tuple[tuple[float, ...], float]:
        """What was wanted ``lag_s`` ago; nothing before there is something."""
        then, axes, gripper = self._past[0]
        if then > now - self.config.lag_s:
            return STILL, 0.0
        noisy = axes + self.config.noise * rng.standard_normal(6) * (np.abs(axes) > 0)
        noisy[np.abs(noisy) < self.config.dead_zone] = 0.0
        return tuple(np.clip(noisy, -1, 1).tolist()), float(np.clip(gripper, -1, 1))

    def leads(
        self, now: float, joints: tuple[float, ...], rate: float, rng: np.random.Generator
    ) -> tuple[float, ...]:
        """Where it has an absolute device: on the way to where the joints should have been
        ``lag_s`` ago, at ``rate``. It begins at ``joints``, where the arm is."""
        then, goal, _ = self._past[0]
        if not self._led.size or then > now - self.config.lag_s:
            self._led, self._at = np.array(joints), now
        gone, self._at = now - self._at, now
        way = (1.0 - np.exp(-rate * gone)) * (goal - self._led)
        self._led = self._led + way * (1.0 + self.config.noise * rng.standard_normal(len(way)))
        return tuple(self._led.tolist())

    def rest(self) -> None:
        self._led = np.empty(0)


@dataclass
class ScriptedOperator:
    """A `Device` that also asks for events (`asks`): takeover, hand_back, label and end. `called`
    for help it ends what runs and puts things back; `asked_to_show` it takes over and keeps control
    until the episode's end."""

    expert: Expert
    rule: Rule
    config: OperatorConfig = field(default_factory=OperatorConfig)
    name: str = "scripted"

    def __post_init__(self) -> None:
        self.doing = Doing.WATCHING
        self._rng = np.random.default_rng(self.config.seed)
        self._asks: list[Ask] = []
        self._hand = _Hand(self.config)
        self._episode, self._due, self._since = -1, 0.0, 0.0
        self._begun: float | None = None
        self._label: tuple[float, str] | None = None
        self._labelled = False
        self._comes: float | None = None  # when it is there, called for help
        self._shows = False
        self._drove = False  # since it began to help

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None:
        self.doing = Doing.WATCHING

    def called(self, now: float) -> None:
        """Help is wanted: it comes a reaction time later."""
        self._comes = now + self.delay(now) if self._comes is None else self._comes

    def asked_to_show(self) -> None:
        self._shows = True

    def _help(self, now: float, mode: Mode) -> None:
        if mode is Mode.PAUSED:  # then it looks again
            self._asks += [Ask("label", "failure", now), Ask("end", self.name, now)]
            self._comes = now + self.delay(now)
        elif mode is Mode.READY:
            self._asks.append(Ask("reset", self.name, now))
            self._comes = None
        else:
            self._comes = None

    @property
    def waits(self) -> bool:
        """Whether it has asked for something that nobody has taken yet."""
        return bool(self._asks)

    def asks(self) -> list[Ask]:
        """What was asked for since the last call."""
        found, self._asks = self._asks, []
        return found

    def delay(self, now: float) -> float:
        """One reaction time (seconds)."""
        c = self.config
        median = c.distracted_median_s if self._rng.random() < c.distracted else c.reaction_median_s
        tired = c.tired if self._begun is not None and now - self._begun > c.tired_after_s else 1.0
        return tired * (c.reaction_s + float(self._rng.lognormal(np.log(median), c.reaction_sigma)))

    def read(self, now: float, state: State | None) -> Sample:
        if state is None:
            return Sample(now)
        self._begun = now if self._begun is None else self._begun
        mode = Mode(state.mode)
        if state.episode != self._episode:
            self._begin(state.episode)
        if self._comes is not None and now >= self._comes and not self._asks:
            self._help(now, mode)
        if mode not in (Mode.AUTO, Mode.HUMAN, Mode.PAUSED):
            self.release()
            self._shows = False
            return Sample(now)
        self._judge(now, state)
        self._decide(now, state, mode)
        if goal := self.expert.goal(state):
            return self._lead(now, state, goal)
        self._hand.follow(now, self.expert.action(state))
        if self.doing not in (Doing.HELPING, Doing.LETTING_GO):
            return Sample(now)
        axes, gripper = self._hand.does(now, self._rng)
        return Sample(now, True, axes, gripper, ("scripted",))

    def _lead(self, now: float, state: State, goal: tuple[float, ...]) -> Sample:
        """With a leader arm in the hand, which stays with the arm until it leads."""
        self._hand.follow(now, (goal, 0.0))
        if self.doing not in (Doing.HELPING, Doing.LETTING_GO):
            self._hand.rest()
            return Sample(now)
        if state.mode != Mode.HUMAN.value:
            self._hand.rest()
            return Sample(now, True, keys=("scripted",), target=state.joints)
        led = self._hand.leads(now, state.joints, self.expert.rate, self._rng)
        return Sample(now, True, keys=("scripted",), target=led)

    def _begin(self, episode: int) -> None:
        self._episode, self.doing, self._label, self._labelled = (
            episode,
            Doing.WATCHING,
            None,
            False,
        )
        self._hand = _Hand(self.config)
        # episodes do not depend on each other
        self._rng = np.random.default_rng((self.config.seed, max(episode, 0)))
        self.rule.begin(self._rng)

    def _judge(self, now: float, state: State) -> None:
        """Label the episode a reaction time after its outcome is plain; the press is late, as a
        person's is."""
        if self._label is None and not self._labelled and (outcome := self.expert.outcome(state)):
            if self._rng.random() < self.config.wrong_label:
                outcome = "failure" if outcome == "success" else "success"
            self._label = now + self.delay(now), outcome
        if self._label is not None and now >= self._label[0]:
            value, self._label, self._labelled = self._label[1], None, True
            self._asks += [Ask("label", value, now), Ask("end", value, now)]

    def _decide(self, now: float, state: State, mode: Mode) -> None:
        self._drove |= mode is Mode.HUMAN
        if self.doing in (Doing.HELPING, Doing.LETTING_GO) and self._drove and mode is Mode.PAUSED:
            # the arm holds: let go, and press anew
            self.doing, self._due = Doing.REACTING, now + self.delay(now)
        elif (
            self.doing is Doing.WATCHING
            and mode is Mode.AUTO
            and (self._shows or self.rule.wants(state, now))
        ):
            self.doing, self._due = Doing.REACTING, now + self.delay(now)
        elif self.doing is Doing.REACTING and now >= self._due:
            self.doing, self._since, self._drove = Doing.HELPING, now, False
            self._asks.append(Ask("takeover", self.name, now))
        elif (
            self.doing is Doing.HELPING
            and not self._shows
            and self.rule.enough(state, now, now - self._since)
        ):
            self.doing, self._due = (
                Doing.LETTING_GO,
                now + float(self._rng.uniform(*self.config.late_s)),
            )
        elif self.doing is Doing.LETTING_GO and now >= self._due:
            self.doing = Doing.WATCHING
            self._asks.append(Ask("hand_back", self.name, now))
