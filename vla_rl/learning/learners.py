"""How scored episodes reach an algorithm: as one batch that is then forgotten, or through a
replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.algorithms.advantages import decision_rewards
from vla_rl.algorithms.optim import load_state, state_of
from vla_rl.config.run import RAM_BYTES
from vla_rl.data.replay import ONLINE, Replay
from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import OnPolicy, Replayed
from vla_rl.learning.figures import mean_figures
from vla_rl.monitoring.progress import Progress
from vla_rl.options import AlgorithmOptions, config_of, view
from vla_rl.types import EmbodimentSpec, RolloutBatch, Trajectory

# a replay's source, and an episode with its rewards, that is there before the first
Given = tuple[str, Trajectory]


class EpisodesLost(Exception):
    """Images and replay of the episodes ``rollout_ids`` are gone with the machine that held them,
    before they were learned from."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__(f"{len(rollout_ids)} episodes are lost")
        self.rollout_ids = tuple(rollout_ids)


class Learner(Protocol):
    """What the loop does with the episodes of an iteration."""

    @property
    def config(self) -> Any:
        """The algorithm's options; None: it keeps none."""
        ...

    def learn(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Tensor],
        named: Tensor | Mapping[str, Tensor],
    ) -> dict[str, float]:
        """``rewards``: [t] or [t h] per trajectory (`RewardModel`); ``named``: the same flat [n …],
        or {name: [n …]} of several. Returns metrics. Raises `EpisodesLost` for some that have to
        run again."""
        ...

    def prepare(self, progress: Progress) -> dict[str, float]:
        """What is learned before the first episode. Returns metrics."""
        ...

    def finish(self, progress: Progress) -> dict[str, float]:
        """What is left to learn after the last episode. Returns metrics; none where nothing was."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RemoteLearner(Protocol):
    """A learner that runs while episodes are collected, as the collecting side sees it: a rollout
    loop, a robot's runner.

    It may die and start again in between; no episode is lost by that, and none of these waits for
    it. ``last`` is the highest ticket of what it has, or will find where it is started again.
    """

    last: int

    def send(self, episodes: Sequence[tuple[Trajectory, Tensor]]) -> None:
        """Hand over closed episodes, each with its rewards (`RewardModel.score`); they are safe
        when it returns."""
        ...

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """The newest version and the weights that training changes; None where they are those of
        the last call."""
        ...

    def figures(self) -> dict[str, Any]:
        """What it said last of itself: version, updates, owed (updates), staleness (versions)
        and more."""
        ...

    def checkpoint(self) -> None:
        """Have it write its state soon."""
        ...

    def stop(self) -> None:
        """End it; what it knows is kept."""
        ...


class BatchLearner:
    """For an `OnPolicy` algorithm."""

    def __init__(self, algorithm: OnPolicy) -> None:
        self.algorithm: OnPolicy = algorithm

    @property
    def config(self) -> Any:
        return config_of(self.algorithm)

    def learn(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Tensor],
        named: Tensor | Mapping[str, Tensor],
    ) -> dict[str, float]:
        return (
            self.algorithm.update(RolloutBatch.from_trajectories(trajectories), named)
            if trajectories
            else {}
        )

    def prepare(self, progress: Progress) -> dict[str, float]:
        return {}

    def finish(self, progress: Progress) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.algorithm)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state(self.algorithm, state)


class ReplayLearner:
    """For a `Replayed` algorithm: episodes are kept in ``folder`` (None: in memory), and before the
    first of them what ``given`` yields, each with its source.

    Each new decision earns ``config.updates_per_decision`` updates, from ``config.start_decisions``
    of them on.
    """

    def __init__(
        self,
        algorithm: Replayed,
        folder: Path | None,
        seed: int,
        given: Callable[[], Iterable[Given]] = tuple,
        embodiment: EmbodimentSpec | None = None,
        ram_bytes: int = RAM_BYTES,
    ) -> None:
        self.algorithm, self._folder, self._given = algorithm, folder, given
        self._options: dict[str, Any] = {"embodiment": embodiment, "ram_bytes": ram_bytes}
        self._generator = torch.Generator().manual_seed(seed)
        self._replay: Replay | None = None
        self.owed = 0.0  # updates that decisions earned and that were not made yet

    @property
    def config(self) -> Any:
        return self.algorithm.config

    @property
    def replay(self) -> Replay:
        if self._replay is None:  # a new run; one that goes on has loaded its state
            self._replay = Replay(self._folder, **self._options)
            for source, trajectory in self._given():
                self.add(trajectory, trajectory.rewards, source)
        return self._replay

    def learn(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Tensor],
        named: Tensor | Mapping[str, Tensor],
    ) -> dict[str, float]:
        replay = self.replay
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            self.add(trajectory, reward, ONLINE)
        figures = {
            "replay/episodes": float(replay.episodes),
            "replay/decisions": float(len(replay)),
            "replay/updates": 0.0,
        }
        self._earn(replay.count(ONLINE), sum(len(t) for t in trajectories))
        updates = int(self.owed)
        self.owed -= updates
        return figures | self._update(updates) | {"replay/updates": float(updates)}

    def prepare(self, progress: Progress) -> dict[str, float]:
        """``config.offline_updates`` on what was given. Raises `ConfigError` where that is
        nothing."""
        updates = view(self.config, AlgorithmOptions).offline_updates
        if updates and not len(self.replay):
            raise ConfigError(
                f"algorithm.offline_updates={updates} learns from what is there before the first "
                "episode, and this run has no demonstrations: give dataset=FOLDER, put collect "
                "among the phases, or set it to 0"
            )
        if not updates:
            return {}
        with progress.task("offline", updates) as bar:
            return self._update(updates, bar.update)

    def finish(self, progress: Progress) -> dict[str, float]:
        return {}

    def take(self, trajectory: Trajectory, rewards: Tensor, ticket: int) -> None:
        """One closed episode, whose updates are left to `step`; ``ticket`` as of `Replay.add`."""
        self.add(trajectory, rewards, ONLINE, ticket)
        self._earn(self.replay.count(ONLINE), len(trajectory))

    def step(self) -> dict[str, float]:
        """One of the updates that are owed."""
        self.owed -= 1.0
        return self._update(1)

    def _earn(self, count: int, decisions: int) -> None:
        """``decisions`` more, which made ``count`` in all."""
        if count >= self.config.start_decisions:
            self.owed += self.config.updates_per_decision * decisions

    def _update(
        self, updates: int, done: Callable[[int], None] = lambda _: None
    ) -> dict[str, float]:
        """So many updates; the mean of their metrics."""
        rows = []
        draw = functools.partial(self.replay.draw, generator=self._generator)
        for i in range(updates):
            rows.append(self.algorithm.update(draw))
            done(i + 1)
        return mean_figures(rows)

    def add(
        self, trajectory: Trajectory, rewards: Tensor, source: str, ticket: int | None = None
    ) -> None:
        """Keep an episode with what the algorithm wants of it; ``rewards`` [t] of decisions or [t
        h] of control steps, which the algorithm's discount (``config.gamma``, per control step as
        `Replay` counts) sums inside each chunk."""
        gamma = view(self.config, AlgorithmOptions).gamma
        rewards = decision_rewards(
            rewards.float(), trajectory.valid, 1.0 if gamma is None else gamma
        )
        # A robot shows no privileged state, and what acting left behind is on-policy's.
        slim = replace(trajectory.without_privileged(), replay={}, value=None)
        self.replay.add(slim, rewards, source, self.algorithm.annotate(trajectory, rewards), ticket)

    def state_dict(self) -> dict[str, Any]:
        """The replay itself lies in its folder: a checkpoint keeps how far it was."""
        return {
            "algorithm": state_of(self.algorithm),
            "episodes": self.replay.episodes,
            "generator": self._generator.get_state(),
            "owed": self.owed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load(state, episodes=int(state["episodes"]))

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict` for a learner that was killed later on: episodes that were added
        since stay, and have earned their updates."""
        self._load(state, episodes=None)
        known = int(state["episodes"])
        if self.replay.episodes < known:
            raise UserError(
                f"replay: {self._folder} holds {self.replay.episodes} episodes and the learner's "
                f"state needs {known}: start over with --fresh, or restore the folder"
            )
        later = self.replay.lengths(known)
        count = self.replay.count(ONLINE) - sum(later)
        for decisions in later:
            count += decisions
            self._earn(count, decisions)

    def _load(self, state: Mapping[str, Any], episodes: int | None) -> None:
        load_state(self.algorithm, state["algorithm"])
        self._replay = Replay(self._folder, episodes=episodes, **self._options)
        self._generator.set_state(state["generator"].cpu())
        self.owed = float(state["owed"])


def learner_for(
    algorithm: Any,
    folder: Path,
    seed: int,
    given: Callable[[], Iterable[Given]] = tuple,
    embodiment: EmbodimentSpec | None = None,
    ram_bytes: int = RAM_BYTES,
) -> Learner:
    """The way in which ``algorithm`` learns. Raises `ConfigError` for one that is neither
    `OnPolicy` nor `Replayed`.

    ``embodiment``: the robot, which a replay then insists on; ``ram_bytes``: what a replay keeps in
    RAM.
    """
    if isinstance(algorithm, Replayed):
        return ReplayLearner(algorithm, folder, seed, given, embodiment, ram_bytes)
    if isinstance(algorithm, OnPolicy):
        return BatchLearner(algorithm)
    raise ConfigError(
        f"{type(algorithm).__name__} is no algorithm: it needs update, state_dict and "
        "load_state_dict (OnPolicy), and annotate to learn from a replay (Replayed)"
    )
