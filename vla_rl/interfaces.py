"""What plug-ins provide. These are Protocols: a plug-in needs no base class and never imports
another plug-in.

What they may offer besides is in `vla_rl.optional`; what is asked of their configs and classes in
`vla_rl.asked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vla_rl.types import (
    ActionChunk,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    PolicyEvaluation,
    PolicyOutput,
    RolloutBatch,
    RolloutResult,
    SlotEvent,
    SlotObservation,
    SlotStep,
    TaskSpec,
    Trajectory,
    Transitions,
)


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


@runtime_checkable
class Env(Protocol):
    """A vectorised env whose slots run on their own; a real robot is ``num_slots`` = 1.

    `start` and `step` return at once; results come from `poll`. A slot that was lost (its worker
    died) reports an event with ``error`` set and can be started again.
    """

    embodiment: EmbodimentSpec
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int
    num_slots: int

    def start(self, slot: int, episode: EpisodeSpec) -> None: ...

    def step(self, slot: int, actions: np.ndarray) -> None: ...

    def poll(self, timeout: float | None = None) -> list[SlotEvent]:
        """Events that are ready; waits until there is at least one, or ``timeout`` seconds
        passed."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Policy(Protocol):
    """Acts. ``chunk_length`` control steps come out of each decision."""

    embodiment: EmbodimentSpec
    chunk_length: int

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row. ``seeds`` [b] fix each row's sampling noise, whatever rows it is
        batched with."""
        ...


@runtime_checkable
class RememberingPolicy(Policy, Protocol):
    """A policy whose decision depends on earlier ones of the episode: a queue of actions, a history
    of observations.

    The policy itself keeps nothing, since its rows belong to many episodes. `act` also takes
    ``memory``, one entry per row: ``initial_memory()`` at an episode's first decision, then what
    the last one returned in `PolicyOutput.memory`.
    """

    def initial_memory(self) -> Any: ...

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput: ...


@runtime_checkable
class LikelihoodPolicy(Policy, Protocol):
    """A policy whose decisions have a tractable log-prob. ``log_prob_axes`` names the axes ``*k``.

    Axis names: "control_step", "action_dim", "denoising_step", "token". A token-level ratio keeps
    all axes, a step-level ratio sums all but "control_step", a denoising-step-level ratio all but
    "denoising_step", a chunk-level ratio sums all. A policy may have ``correlated_axes``
    (`vla_rl.asked.NoiseOptions`): those along which entries are not sampled independently, though
    each has its own log-prob; a ratio that sums over one of them is no likelihood ratio, and PPO
    refuses it.
    """

    log_prob_axes: tuple[str, ...]

    def evaluate(
        self, observation: Observation, replay: Mapping[str, Tensor]
    ) -> PolicyEvaluation: ...

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


@runtime_checkable
class ValuePolicy(Policy, Protocol):
    """A policy that may have a value head, which then serves instead of a separate critic."""

    def value(self, observation: Observation) -> Tensor | None:
        """Value [b] with gradient, that of `act` and `evaluate` for the same observation; None:
        built without a head.

        It decides nothing and draws no noise, so it is cheaper than `act` where deciding takes more
        than the forward.
        """
        ...


@runtime_checkable
class DistillablePolicy(Policy, Protocol):
    """A policy that can teach a faster student.

    The student is a `Policy` with ``distillation_loss(observation, teacher, generator, noises) →
    (loss, metrics)`` and ``after_update()``; those of its parameters that are to be trained require
    a gradient. ``distillation_state()`` and ``load_distillation_state(state)`` hold what its
    learning needs besides its weights to go on after an interruption.
    """

    def make_student(self, steps: int, method: str) -> Policy: ...


@runtime_checkable
class ImitationPolicy(Protocol):
    """A policy that can be trained on demonstrations."""

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Scalar loss and metrics for chunks ``actions`` float32 [b h a] (physical units),
        ``valid`` bool [b h]."""
        ...


@runtime_checkable
class FeaturePolicy(Policy, Protocol):
    """A policy that offers what it sees to small networks beside it.

    One that is also an `ImitationPolicy` may take them as ``features`` in `imitation_loss`, and
    then encodes no image.
    """

    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """{name: float [b d]} without gradient, of about unit scale: "visual", what its images
        make, and smaller ones such as its standardised proprio and what the instruction says. A row
        depends on that row alone."""
        ...


@runtime_checkable
class NoisePolicy(Policy, Protocol):
    """A policy that turns one noise into one chunk, without any further draw."""

    def decode(
        self, observation: Observation, noise: Tensor, features: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Physical actions float32 [b h a] from standard normal ``noise`` [b h a]. ``features`` are
        this policy's own `FeaturePolicy.frame_features` of the observation, which then need not
        show its images."""
        ...


@runtime_checkable
class ActorPolicy(Policy, Protocol):
    """A policy whose trained part is small and reads frames: what is computed once of each
    observation, and then kept.

    ``encoder`` (frames to features, trained by critics) and ``actor`` (features to a latent action
    of ``latent_dim`` numbers in (−1, 1)) are its trained modules; ``stochastic``: whether `propose`
    has a density. Units are half-ranges of the embodiment's bounds, [−1, 1]; d is the number of
    what critics read of an action.
    """

    latent_dim: int
    stochastic: bool
    # since Python 3.12 isinstance sees no submodule of a module (it asks inspect.getattr_static)
    if TYPE_CHECKING:
        encoder: torch.nn.Module
        actor: torch.nn.Module

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Frames {name: [t + 1 …]} of an episode: its observations and the final one."""
        ...

    def encode(self, frames: Mapping[str, Tensor]) -> Tensor:
        """[b f] with gradient to ``encoder``."""
        ...

    def propose(
        self, encoded: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Latent actions [b l] from standard normal ``noise`` [b l] (None: the most likely), and
        their log-probs [b]."""
        ...

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a latent action [b d], with gradient to it."""
        ...

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a decision that was stored [b d]: ``actions`` [b h a] as sent,
        ``extra`` its frame."""
        ...


@runtime_checkable
class SteeredActor(ActorPolicy, Protocol):
    """An `ActorPolicy` whose latent action is the noise that a frozen policy turns into a chunk."""

    def noise(self, latent: Tensor) -> Tensor:
        """Latent actions [b l] → noise [b h a] in standard deviations."""
        ...

    def latent_of(self, noise: Tensor) -> Tensor:
        """Inverse of `noise`; outside of (−1, 1) for a noise that the actor would not choose."""
        ...

    def decoded(
        self, noise: Tensor, observation: Observation, frames: Mapping[str, Tensor]
    ) -> Tensor:
        """What the frozen policy makes of ``noise`` [b h a], in half-ranges [b h·a], without
        gradient."""
        ...

    def to_unit(self, actions: Tensor) -> Tensor:
        """Physical actions → half-ranges."""
        ...


@runtime_checkable
class BasedPolicy(Protocol):
    """A policy whose checkpoints leave frozen weights to another folder: a published model, or
    another checkpoint.

    ``base_key`` is the key of its own config that names the folder. A checkpoint stores where it is
    and a fingerprint of its weights (`vla_rl.checkpoint.BaseReference`); as it is loaded the folder
    is found again, and stands under that key.
    """

    base_key: str

    def base_folder(self) -> Path | None:
        """The folder, as absolute or from the working directory; None: its checkpoints hold all
        weights."""
        ...


@runtime_checkable
class CandidateActor(ActorPolicy, Protocol):
    """An `ActorPolicy` that chooses among actions which the policy beneath it proposed; that policy
    is what is trained.

    Frames hold ``candidates`` [b n d]. ``judge(encoded [b f], actions [b n d]) → values [b n]`` is
    set by the algorithm, and differentiable in the actions.
    """

    candidates: str
    judge: Callable[[Tensor, Tensor], Tensor] | None

    def beneath(self) -> Any:
        """The policy that proposes."""
        ...

    def improve(self, encoded: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [b n d] moved up the judge's values, and those values [b n]."""
        ...

    def to_chunk(self, unit: Tensor) -> ActionChunk:
        """Half-ranges [b d] → physical actions."""
        ...


@runtime_checkable
class ShardablePolicy(Protocol):
    """A policy that several processes can train together (`vla_rl.ranks.shard`).

    Any dataclass of tensors that its ``evaluate`` returns must be a registered pytree, as
    `PolicyEvaluation` is.
    """

    def blocks(self) -> Iterable[torch.nn.Module]:
        """Parts whose weights are gathered one at a time. Each is only ever called as a module, and
        within one that is trained all weights have one dtype; what lies outside of them is gathered
        for the whole forward."""
        ...

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """This is rank ``index`` of ``size``; ``total`` adds a tensor up over the ranks, with
        gradient.

        For statistics over a batch of which each rank sees a part, and for noise that ranks must
        not share.
        """
        ...


@runtime_checkable
class Critic(Protocol):
    """A value function apart from the policy. It alone may read ``Observation.privileged``."""

    def value(self, observation: Observation) -> Tensor:
        """Value [b] with gradient."""
        ...

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


@runtime_checkable
class RewardModel(Protocol):
    """Scores whole trajectories."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor per trajectory: [t], a reward per decision, paid in the last control
        step that the decision executed; or [t h], a reward per control step. Algorithms that
        discount per control step discount inside chunks."""
        ...


@runtime_checkable
class ProgressReward(RewardModel, Protocol):
    """A reward model that also estimates progress, which is what `vla-rl reward quality` judges."""

    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t+1] per trajectory, 0 … 1: before each decision and at the end; NaN
        where unknown.

        The success flag of the trajectory itself must not enter."""
        ...


@runtime_checkable
class FittedReward(ProgressReward, Protocol):
    """A reward model that is trained on trajectories (labelled by their success) before it
    scores."""

    learned: bool

    def fit(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train; a trained model goes on from where it is. Returns figures such as the loss."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of tensors, numbers and strings."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Collector(Protocol):
    """Where episodes come from: the rollout engine, a robot, a cluster."""

    policy: Policy

    def publish(self, version: int) -> None:
        """The policy's weights are now those of ``version``: episodes that start from here on
        act with them."""
        ...

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: Callable[[int, int, int], None] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RolloutResult:
        """Run every episode of ``plan``; ``on_trajectory`` gets each as it ends."""
        ...


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm may make its parts from; it calls what it needs
    (``Class.from_context(config, policy, context)``).

    ``make_critic`` yields the configured critic (None: there is none), ``make_reference`` a frozen
    copy of the start, ``demonstrations(policy)`` those that SFT would imitate, in the policy's
    chunks (a `vla_rl.data.demonstrations.DemonstrationDataset`; None: the run has none).
    """

    make_critic: Callable[[], Critic | None]
    make_reference: Callable[[], LikelihoodPolicy]
    demonstrations: Callable[[Policy], Any] = lambda _: None


@runtime_checkable
class Algorithm(Protocol):
    """Improves a policy. It owns what learning needs besides: critics, targets, a reference,
    optimisers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights, as nested dicts and lists of tensors, numbers and
        strings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class OnPolicy(Algorithm, Protocol):
    """Learns from one batch of the present policy's episodes, and forgets it."""

    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """``rewards`` as `RewardModel.score` gave them, [n] or [n h]; or {name: …} of several."""
        ...


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


@runtime_checkable
class Replayed(Algorithm, Protocol):
    """Learns from every episode there ever was.

    ``config.updates_per_decision``, ``config.start_decisions`` and ``config.offline_updates`` set
    its pace.
    """

    config: Any

    def annotate(self, trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """What the learner wants kept with an episode, {name: [t + 1 …]} per frame; computed once,
        as it is stored. ``rewards`` [t], discounted inside each chunk by ``config.gamma``."""
        ...

    def update(self, draw: Draw) -> dict[str, float]:
        """One update from rows that ``draw`` yields."""
        ...
