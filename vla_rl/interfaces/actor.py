"""Policies whose trained part is small and reads what is kept of each observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Generator, Tensor, nn

from vla_rl.interfaces.offering import default
from vla_rl.interfaces.policy import Policy
from vla_rl.types import ActionChunk, Observation, Trajectory, Transitions


class ActorPolicy(Policy):
    """A policy whose trained part is small and reads frames: what is computed once of each
    observation, and then kept.

    ``encoder`` (frames to features, trained by critics) and ``actor`` (features to a latent action
    of ``latent_dim`` numbers in (−1, 1)) are its trained modules. Units are half-ranges of the
    embodiment's bounds, [−1, 1]; d is the number of what critics read of an action. More that one
    ``can``: "actor" (`propose`), "weighted_imitation", "gripper", "steering" and
    "ranked_candidates".
    """

    required = ("act", "propose", "annotate")
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Policy.words,
        "actor": ("propose",),
        "weighted_imitation": ("weighted_loss",),
        "steering": ("latent_of",),
        "ranked_candidates": ("improve",),
        "gripper": ("choice_values",),
    }

    latent_dim: int
    encoder: nn.Module
    actor: nn.Module

    @default
    def stochastic(self) -> bool:
        """Whether `propose` has a density."""
        return False

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Frames {name: [t + 1 …]} of an episode: its observations and the final one."""
        raise NotImplementedError

    def encode(self, frames: Mapping[str, Tensor]) -> Tensor:
        """[b f] with gradient to ``encoder``."""
        raise NotImplementedError

    def encoder_loss(self, frames: Mapping[str, Tensor]) -> Tensor | None:
        """What the encoder learns besides what critics teach it; None: nothing."""
        return None

    def propose(
        self, encoded: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Latent actions [b l] from standard normal ``noise`` [b l] (None: the most likely), and
        their log-probs [b]."""
        raise NotImplementedError

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a latent action [b d], with gradient to it."""
        raise NotImplementedError

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a decision that was stored [b d]: ``actions`` [b h a] as sent,
        ``extra`` its frame."""
        raise NotImplementedError

    def practised(self) -> None:
        """Called after each update of the actor, whose reach may grow with them."""

    def weighted_loss(
        self,
        batch: Transitions,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        weights: Tensor,
        generator: Generator,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss on decisions that were executed, and metrics; each row counts by its weight [b],
        exactly or in the mean over ``generator``'s draws."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- pictures
    @default
    def reads_pictures(self) -> bool:
        """Whether its encoder reads pictures, beside frames that `annotate` leaves them out of: a
        replay has them."""
        return False

    @default
    def shift(self) -> int:
        """By how many pixels learners shift the pictures at most (DrQ)."""
        return 0

    def pictures(self, observation: Observation) -> dict[str, Tensor]:
        """Frames uint8 [b H W 3] for its encoder, one of each camera; none where it reads none."""
        return {}

    # --------------------------------------------------------------------- a gripper decided apart
    # Features to values of three choices, trained by the algorithm; what critics read then leaves
    # the gripper out. None: the gripper is an action as the others.
    choices: nn.Module | None

    def choice_values(
        self, encoded: Tensor, frames: Mapping[str, Tensor], choices: nn.Module | None = None
    ) -> Tensor:
        """[b 3] by ``choices`` (None: its own)."""
        raise NotImplementedError

    def choosable(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choices there are at these frames, bool [b 3]."""
        raise NotImplementedError

    def chosen(self, actions: Tensor, valid: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choice decisions were that were stored, int64 [b]; −1: none of them. ``actions``
        as sent [b h a]."""
        raise NotImplementedError

    def gripper_changes(self, actions: Tensor, valid: Tensor) -> Tensor:
        """1 where a control step of an episode's decisions [t h a] turned the gripper around,
        float32 [t h]."""
        raise NotImplementedError

    # ------------------------ steering: the latent action is the noise that a frozen policy decodes
    def noise(self, latent: Tensor) -> Tensor:
        """Latent actions [b l] → noise [b h a] in standard deviations."""
        raise NotImplementedError

    def latent_of(self, noise: Tensor) -> Tensor:
        """Inverse of `noise`; outside of (−1, 1) for a noise that the actor would not choose."""
        raise NotImplementedError

    def decoded(
        self, noise: Tensor, observation: Observation, frames: Mapping[str, Tensor]
    ) -> Tensor:
        """What the frozen policy makes of ``noise`` [b h a], in half-ranges [b h·a], without
        gradient."""
        raise NotImplementedError

    def to_unit(self, actions: Tensor) -> Tensor:
        """Physical actions → half-ranges."""
        raise NotImplementedError

    # ------- candidates: it chooses among what the policy beneath proposed, which it trains besides
    # The frame that holds them [b n d], and what the algorithm sets: (encoded [b f], actions
    # [b n d]) → values [b n], differentiable in the actions.
    candidates: str
    judge: Callable[[Tensor, Tensor], Tensor] | None

    def improve(self, encoded: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [b n d] moved up the judge's values, and those values [b n]."""
        raise NotImplementedError

    def to_chunk(self, unit: Tensor) -> ActionChunk:
        """Half-ranges [b d] → physical actions."""
        raise NotImplementedError
