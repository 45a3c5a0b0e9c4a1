"""What improves a policy: algorithms, and critics beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from vla_rl.interfaces.offering import Offering, default
from vla_rl.interfaces.policy import Policy
from vla_rl.types import Observation, RolloutBatch, Trajectory, Transitions


class Critic(Offering):
    """A value function apart from the policy. It alone may read ``Observation.privileged``."""

    required = ("value", "parameters")

    def value(self, observation: Observation) -> Tensor:
        """Value [b] with gradient."""
        raise NotImplementedError

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        raise NotImplementedError

    def observe(self, observation: Observation) -> None:
        """Called once per batch, before values are read, to keep statistics of inputs."""

    @default
    def reads_images(self) -> bool:
        """False spares copying them."""
        return True


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm may make its parts from; it calls what it needs
    (``Class.from_context(config, policy, context)``).

    ``make_critic`` yields the configured critic (None: there is none), ``make_reference`` a frozen
    copy of the start, ``demonstrations(policy)`` those that SFT would imitate, in the policy's
    chunks (a `vla_rl.data.demonstrations.DemonstrationDataset`; None: the run has none).
    """

    make_critic: Callable[[], Critic | None]
    make_reference: Callable[[], Policy]
    demonstrations: Callable[[Policy], Any] = lambda _: None


class Algorithm(Offering):
    """Improves a policy. It owns what learning needs besides: critics, targets, a reference,
    optimisers. One is `OnPolicy` or `Replayed`."""

    required: ClassVar[tuple[str, ...]] = ("update", "state_dict", "load_state_dict")

    @classmethod
    def from_context(cls, config: Any, policy: Policy, context: AlgorithmContext) -> Any:
        """The algorithm of a run. It takes what it needs of ``context``; here nothing."""
        made: Any = cls
        return made(config, policy)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights, as nested dicts and lists of tensors, numbers and
        strings. A run keeps of one that leaves this out what `vla_rl.algorithms.optim.state_of`
        finds: optimisers, guards and modules."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class OnPolicy(Algorithm):
    """Learns from one batch of the present policy's episodes, and forgets it."""

    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """``rewards`` as `RewardModel.score` gave them, [n] or [n h]; or {name: …} of several."""
        raise NotImplementedError


@runtime_checkable
class Draw(Protocol):
    """Draws transitions from a replay."""

    def __call__(
        self,
        count: int,
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        shares: Mapping[tuple[str, ...], float] | None = None,
        images: bool = True,
    ) -> Transitions:
        """``count`` rows; ``shares`` {sources: share of them}, by default uniform over all
        decisions; what lies in several sources is drawn as from one. Without ``images`` the
        observations show none, which is much faster."""
        ...


class Replayed(Algorithm):
    """Learns from every episode there ever was.

    ``config.updates_per_decision`` and ``config.start_decisions`` set its pace, and
    ``config.offline_updates``, where it has them, are made before the first episode.
    """

    required = (*Algorithm.required, "annotate")
    config: Any

    def annotate(self, trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """What the learner wants kept with an episode, {name: [t + 1 …]} per frame; computed once,
        as it is stored. ``rewards`` [t], discounted inside each chunk by ``config.gamma``."""
        raise NotImplementedError

    def update(self, draw: Draw) -> dict[str, float]:
        """One update from rows that ``draw`` yields."""
        raise NotImplementedError
