"""A policy whose chunk says how far from where the robot is: each action less the state that the
chunk begins in, as openpi's ``DeltaActions`` has it (Physical Intelligence, openpi)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import (
    ActionChunk,
    EmbodimentSpec,
    Observation,
    PolicyEvaluation,
    PolicyOutput,
)

_BASE = "base."
# of a base these say nothing of where its actions count from
_SHARED = frozenset({"imitation", "likelihood", "value", "features", "ranks"})


class RelativePolicy(nn.Module, Policy):
    """``base``, whose actions ``names`` count from the state of the same name as its chunk begins;
    what it acts are the robot's own actions, within their bounds. A decision is as likely as the
    base's own is, and what the base makes of pictures is its own too: it offers what of these the
    base offers.

    Raises `ConfigError` for a base that goes on with an old chunk, or leaves weights elsewhere.
    """

    policy_type = "relative"
    low: Tensor
    high: Tensor

    def __init__(self, base: Any, embodiment: EmbodimentSpec, names: Sequence[str]) -> None:
        super().__init__()
        base = Policy.of(base)
        if "memory" in base.can or base.base_folder() is not None:
            raise ConfigError(
                f"env.actions=delta goes with no {type(base).__name__} that remembers its chunk, or "
                "leaves frozen weights to another folder: use env.actions=absolute"
            )
        self.base: Any = base
        self.can = base.can & _SHARED
        self.log_prob_axes = base.log_prob_axes
        self.embodiment, self.names = embodiment, tuple(names)
        self.chunk_length = base.chunk_length
        self._mine = [embodiment.action_names.index(name) for name in names]
        self._its = [embodiment.proprio_names.index(name) for name in names]
        for side, values in (("low", embodiment.action_low), ("high", embodiment.action_high)):
            self.register_buffer(side, torch.tensor(values), persistent=False)

    def _from(self, observation: Observation) -> Tensor:
        """What its actions count from, [b 1 a]: 0 where they are the robot's own."""
        state = observation.proprio.to(self.low)
        origin = state.new_zeros(len(state), 1, len(self.low))
        origin[:, 0, self._mine] = state[:, self._its]
        return origin

    def targets(self, observation: Observation, actions: Tensor) -> Tensor:
        """See `vla_rl.interfaces.Policy`."""
        return actions - self._from(observation).to(actions)

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """The base's chunk from where the robot is now."""
        out = self.base.act(observation, deterministic=deterministic, seeds=seeds)
        actions = (out.chunk.actions + self._from(observation)).clamp(self.low, self.high)
        return dataclasses.replace(out, chunk=ActionChunk(actions, out.chunk.valid))

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor, **more: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """The base's, of `targets`."""
        loss: tuple[Tensor, dict[str, float]] = self.base.imitation_loss(
            observation, actions, valid, **more
        )
        return loss

    @property
    def imitates_itself(self) -> bool:
        """See `vla_rl.interfaces.Policy`."""
        return bool(self.base.imitates_itself)

    # ------------------------------------------------------------------------------ RL: the base's
    @property
    def correlated_axes(self) -> Sequence[str]:
        """See `vla_rl.interfaces.Policy`."""
        axes: Sequence[str] = self.base.correlated_axes
        return axes

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """See `vla_rl.interfaces.Policy`."""
        found: PolicyEvaluation = self.base.evaluate(observation, replay)
        return found

    def prepare_for_rl(self) -> None:
        """See `vla_rl.interfaces.Policy`."""
        self.base.prepare_for_rl()

    def value(self, observation: Observation) -> Tensor | None:
        """See `vla_rl.interfaces.Policy`."""
        value: Tensor | None = self.base.value(observation)
        return value

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """See `vla_rl.interfaces.Policy`."""
        own: Iterable[nn.Parameter] = self.base.value_parameters()
        return own

    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        features: dict[str, Tensor] = self.base.frame_features(observation)
        return features

    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        features: dict[str, Tensor] = self.base.blind_features(observation)
        return features

    @property
    def executed_steps(self) -> int:
        """See `vla_rl.interfaces.Policy`."""
        return int(self.base.executed_steps)

    def image_token_spread(self, observation: Observation) -> float | None:
        """See `vla_rl.interfaces.Policy`."""
        spread: float | None = self.base.image_token_spread(observation)
        return spread

    # -------------------------------------------------------------------------------- several ranks
    def blocks(self) -> Iterable[nn.Module]:
        """See `vla_rl.interfaces.Policy`."""
        blocks: Iterable[nn.Module] = self.base.blocks()
        return blocks

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """See `vla_rl.interfaces.Policy`: the base's statistics and noise."""
        self.base.learn_together(index, size, total)

    # ----------------------------------------------------------------------------------- checkpoint
    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        own = {name.removeprefix(_BASE): value for name, value in weights.items()}
        return {f"{_BASE}{name}": value for name, value in self.base.completed(own).items()}

    def config_dict(self) -> dict[str, Any]:
        beneath = {
            "policy_type": self.base.policy_type,
            "embodiment": self.base.embodiment.to_dict(),
            **self.base.config_dict(),
        }
        return {"config": {"names": list(self.names)}, "base": beneath}

    def extra_files(self) -> dict[str, str]:
        return {f"{_BASE}{name}": text for name, text in self.base.extra_files().items()}

    @classmethod
    def from_config_dict(  # type: ignore[override]  # (of what is on top of another)
        cls,
        data: Mapping[str, Any],
        embodiment: EmbodimentSpec,
        files: Mapping[str, str],
        base: Any,
    ) -> RelativePolicy:
        """``base``: the policy that ``data["base"]`` describes, built."""
        return cls(base, embodiment, data["config"]["names"])
