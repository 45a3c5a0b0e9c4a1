"""The policy beneath itself, with frames for critics: trained by its own supervised loss, and saved
as the policy it is.

It learns from the features that were kept, so what makes them (its vision, its words) stays as it
is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.actors.base import FrozenBaseActor
from policies.actors.settings import OwnConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation, PolicyOutput, Transitions


class OwnPolicy(FrozenBaseActor):
    """An `ActorPolicy` with a weighted loss whose actor is the policy beneath. A checkpoint of it
    is one of that policy."""

    config_class: ClassVar[type] = OwnConfig
    config: Any
    named: ClassVar[str] = "own"
    can = frozenset({"weighted_imitation", "guidance"})

    def __init__(self, config: Any, base: Any) -> None:
        """Raises ConfigError for a base that cannot be trained on actions."""
        self._require_trainable(base)
        self.chunk_length, self.latent_dim = (
            base.chunk_length,
            base.chunk_length * base.embodiment.action_dim,
        )
        frozen = {name for name, p in base.named_parameters() if not p.requires_grad}
        super().__init__(config, base, actor=base)  # what is trained is the policy beneath
        for name, p in base.named_parameters():
            p.requires_grad_(name not in frozen)
        base.hold_features()

    @classmethod
    def _require_trainable(cls, base: Any) -> None:
        if "imitation" not in Policy.of(base).can:
            raise ConfigError(
                f"actor {cls.named} trains the policy beneath on what was chosen, and "
                f"{type(base).__name__} has no imitation_loss: use actor=residual or actor=steered"
            )
        if "features" not in inspect.signature(base.imitation_loss).parameters:
            raise ConfigError(
                f"actor {cls.named} trains the policy beneath from the features that were kept, "
                f"and {type(base).__name__} learns from images alone: use actor=residual"
            )

    def weighted_loss(
        self,
        batch: Transitions,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        weights: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, dict[str, float]]:
        """Its imitation loss on ``config.rows`` decisions that are drawn in proportion to their
        weights: in the mean, the weighted loss, whatever kind of loss it is, and no pass is spent
        on rows that hardly count."""
        pick = torch.multinomial(
            weights.detach().cpu(), self.config.rows, replacement=True, generator=generator
        )
        few = {name: frame[pick.to(frame.device)] for name, frame in frames.items()}
        actions, valid = (x[pick].to(self.low.device) for x in (batch.labels, batch.valid))
        return self.base.imitation_loss(batch.observations[pick], actions, valid, features=few)

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """As the policy beneath."""
        out = self.base.act(observation, deterministic=deterministic, seeds=seeds)
        return PolicyOutput(out.chunk, out.behavior_log_prob, replay={})

    @property
    def guidable(self) -> bool:
        """See `vla_rl.interfaces.Policy`: as the policy beneath."""
        return self.base.guidable

    def act_towards(
        self,
        observation: Observation,
        wanted: Tensor,
        weight: Tensor,
        most: float,
        *,
        deterministic: bool = False,
    ) -> ActionChunk:
        return self.base.act_towards(observation, wanted, weight, most, deterministic=deterministic)

    # ---------------------------------------------------------------------------------- checkpoints
    def refer_to(self, folder: Path) -> None:
        """The policy beneath is what is trained: it is always saved."""

    def config_dict(self) -> dict[str, Any]:
        return self.base.config_dict()

    def extra_files(self) -> dict[str, str]:
        return self.base.extra_files()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights of the policy beneath."""
        return self.base.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.base.load_state_dict(state_dict, *args, **kwargs)

    @property
    def policy_type(self) -> str:  # type: ignore[override]  # a class variable of every other actor
        return self.base.policy_type
