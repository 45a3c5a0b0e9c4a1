"""A simulator of which only the task has to be written: how an episode begins, what a control step
does, what is seen. Slots, time limits, chunks, instructions and demonstrations are here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from sim.recording import record_demonstration
from sim.slots import checked_actions, chunk_result, in_words, instruction, running, task_named
from vla_rl import splits
from vla_rl.bounds import Bounded
from vla_rl.errors import ConfigError
from vla_rl.specs import EmbodimentSpec, EpisodeSpec, SlotObservation, SlotStep, TaskSpec

State = TypeVar("State")


@dataclass
class Running(Generic[State]):
    """An episode in its slot: ``state`` is the simulator's own, ``elapsed`` control steps have
    passed."""

    episode: EpisodeSpec
    task: TaskSpec
    state: State
    elapsed: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)

    @property
    def time_left(self) -> float:
        """The share of the episode's control steps that is left."""
        return 1.0 - self.elapsed / self.task.horizon


def spot(centre: ArrayLike, half_width: float, size: int) -> np.ndarray:
    """A point seen from above: a Gaussian spot uint8 [size size] a pixel wide, whose position can
    be read to a fraction of one. The picture is ``half_width`` metres to each side, y up."""
    x, y = np.nan_to_num(np.asarray(centre), nan=1e3)  # what is nowhere is out of sight
    pixels = (np.arange(size) + 0.5) / size * 2 * half_width - half_width
    row, column = (np.exp(-0.5 * ((pixels - c) / (2 * half_width / size)) ** 2) for c in (x, -y))
    return (255 * np.outer(column, row)).round().astype(np.uint8)  # the first row is the top


@dataclass
class _NoOptions(Bounded, place="env"):
    """Of a simulator that has none."""


class SimpleSimulator(Generic[State]):
    """`vla_rl.interfaces.Simulator`. A subclass has ``embodiment``, ``tasks`` and the methods
    `begin`, `move` and `look`; an `expert` where it demonstrates, ``Config`` where it has options.

    The reward is 1 for the control step in which a task succeeds, and an episode ends with it.
    """

    Config: ClassVar[type] = _NoOptions
    embodiment: EmbodimentSpec
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self._slots: dict[int, Running[State]] = {}

    def begin(self, episode: EpisodeSpec, rng: np.random.Generator) -> State:
        """The initial state. ``rng`` is fixed by task, initial state and split."""
        raise NotImplementedError

    def move(self, s: Running[State], action: np.ndarray) -> bool:
        """Advance ``s.state`` by a control step of ``action`` float64 [a], which is inside the
        bounds; whether the task has succeeded."""
        raise NotImplementedError

    def look(
        self, s: Running[State]
    ) -> tuple[Mapping[str, np.ndarray], ArrayLike, ArrayLike | None]:
        """Images uint8 {camera: [H W 3]}, proprioception [p], and what only a critic may read
        [``privileged_dim``] (None: nothing)."""
        raise NotImplementedError

    def instead(self, s: Running[State]) -> str | None:
        """The id of another task that this control step solved (None: none, or unknown)."""
        return None

    def failure(self, s: Running[State]) -> str:
        """How an episode failed whose time is up (`vla_rl.specs.FAILURE_KINDS`; "": unknown)."""
        return ""

    def expert(self, s: Running[State]) -> np.ndarray:
        """A demonstrator's action [a]; what is out of bounds is clipped."""
        raise ConfigError(
            f"{type(self).__name__} has no demonstrator: give it a method `expert`, or start from "
            "data (dataset=FOLDER) or a policy (checkpoint=FOLDER)"
        )

    # ---------------------------------------------------------------------------- what it makes of it
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Begin the episode in ``slot``; `ConfigError` for an unknown task."""
        task = task_named({task.task_id: task for task in self.tasks}, episode.task_id)
        rng = splits.rng(episode.task_id, episode.init_state_id, episode.split)
        self._slots[slot] = Running(episode, task, self.begin(episode, rng))
        return self._observe(self._slots[slot])

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h a], clipped to the bounds, until success or the time limit."""
        s = running(self._slots, slot)
        rewards, success, executed = np.zeros(len(actions), np.float32), False, 0
        instead = None
        for action in self._clipped(checked_actions(slot, actions, self.embodiment.action_dim)):
            success = bool(self.move(s, action))
            s.elapsed += 1
            rewards[executed] = success
            executed += 1
            instead = instead or self.instead(s)
            s.over = success or s.elapsed >= s.task.horizon
            if s.over:
                break
        truncated = s.over and not success
        failure = self.failure(s) if truncated else ""
        told = in_words(self.tasks, instead, s.episode) if instead else None
        return chunk_result(self._observe(s), rewards, executed, success, truncated, failure, told)

    def close(self) -> None:
        self._slots.clear()

    def collect_episode(
        self,
        episode: EpisodeSpec,
        *,
        noise_std: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> dict[str, Any]:
        """Run one episode by `expert` (`record_demonstration`). ``noise_std`` is the std of the
        Gaussian on what is executed, as a share of the action's half-range; ``rng`` draws it
        (default: from the episode's seed)."""
        rng = np.random.default_rng(episode.seed) if rng is None else rng
        observation = self.start(0, episode)
        low, high = self._bounds
        spread = noise_std * (high - low) / 2.0
        return record_demonstration(
            episode,
            observation,
            act=lambda: self._clipped(np.asarray(self.expert(self._slots[0]))),
            disturb=lambda label: label + spread * rng.standard_normal(label.shape),
            execute=lambda actions: self.step(0, actions),
        )

    @functools.cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.embodiment.action_low), np.array(self.embodiment.action_high)

    def _clipped(self, actions: np.ndarray) -> np.ndarray:
        low, high = self._bounds
        return np.minimum(np.maximum(actions, low), high)

    def _observe(self, s: Running[State]) -> SlotObservation:
        images, proprio, privileged = self.look(s)
        return SlotObservation(
            dict(images),
            np.asarray(proprio, dtype=np.float32),
            instruction(s.task, s.episode),
            None if privileged is None else np.asarray(privileged, dtype=np.float32),
        )
