"""Where episodes happen: simulators, envs, and collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from vla_rl.interfaces.offering import Offering, default
from vla_rl.interfaces.policy import Policy
from vla_rl.types import (
    EmbodimentSpec,
    EpisodeSpec,
    RolloutResult,
    SlotEvent,
    SlotObservation,
    SlotStep,
    TaskSpec,
    Trajectory,
)

# episodes finished, all episodes, successes
EpisodesDone = Callable[[int, int, int], None]


@runtime_checkable
class Simulator(Protocol):
    """A simulator inside one process, with several slots that may share a compiled scene. Blocking
    calls, no threads.

    The outcome of an episode depends on its `EpisodeSpec` and on the actions alone: not on the
    slot, nor on what ran there before. Actions that are not finite raise ``ValueError``; actions
    out of range are clipped.
    """

    embodiment: EmbodimentSpec
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int

    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Put the slot into the episode's initial state and observe it. An `Env` sends its
        ``lead`` by itself."""
        ...

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run a chunk float32 [h a]; stop early where the episode ends or a person takes over;
        observe once, at the end."""
        ...

    def close(self) -> None: ...


class Env(Offering):
    """A vectorised env whose slots run on their own; a real robot is ``num_slots`` = 1.

    `start` and `step` return at once; results come from `poll`. A slot that was lost (its worker
    died) reports an event with ``error`` set and can be started again.
    """

    required = ("start", "step", "poll", "close")

    embodiment: EmbodimentSpec
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int
    num_slots: int

    def start(self, slot: int, episode: EpisodeSpec) -> None:
        raise NotImplementedError

    def step(self, slot: int, actions: np.ndarray) -> None:
        raise NotImplementedError

    def poll(self, timeout: float | None = None) -> Sequence[SlotEvent]:
        """Events that are ready; waits until there is at least one, or ``timeout`` seconds
        passed."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @default
    def repeatable(self) -> bool:
        """Whether the same episode and actions give the same images again, so that videos can be
        drawn later."""
        return False

    @default
    def num_workers(self) -> int:
        """Its processes, which take cores from the policy."""
        return 0

    @default
    def busy_seconds(self) -> float | None:
        """For how many seconds its workers simulated, all together; None: it does not know."""
        return None


class Collector(Offering):
    """Where episodes come from: the rollout engine, a robot, a cluster. What it ``can``: "ahead",
    start episodes before they are asked for (`issue`)."""

    required = ("publish", "collect")
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {"ahead": ("issue",)}

    policy: Policy

    def publish(self, version: int) -> None:
        """The policy's weights are now those of ``version``: episodes that start from here on
        act with them."""
        raise NotImplementedError

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: EpisodesDone | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RolloutResult:
        """Run every episode of ``plan``; ``on_trajectory`` gets each as it ends."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it holds, processes for example: called as the phase ends."""

    # Episodes may start ``ahead`` iterations before they are learned from, and be learned from
    # ``late`` iterations after the one that they were planned for.
    ahead: int
    late: int

    def issue(self, plan: Sequence[EpisodeSpec]) -> None:
        """Start these; a `collect` of the same plan will ask for them."""
        raise NotImplementedError

    def await_done(self, enough: Callable[[Sequence[str]], bool]) -> Sequence[str]:
        """The rollout ids of episodes that are done and were not asked for yet, in the order of
        their ends, once ``enough`` holds for them."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The episodes that are done and were not asked for yet."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; before anything is issued."""
        raise NotImplementedError
