"""lerobot's flow policies drawn towards a chunk that is wanted (real-time chunking).

lerobot has this too (`lerobot.policies.rtc`), but takes 1 for the Jacobian: it computes the
velocity before it asks for a gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policies.denoising.chain import Chain
from policies.denoising.guidance import Guidance, guided
from policies.lerobot.flows import FlowHead
from policies.lerobot.heads import ACTION, scales
from vla_rl.types import ActionChunk, Observation


class GuidedChain:
    """A `vla_rl.interfaces.Policy`, of a policy whose ``head`` denoises."""

    head: Any
    chain: Chain
    estimates: Callable[[Any, Tensor, int | Tensor], tuple[Tensor, Tensor]]  # x̂0 and ε̂ of a step

    @property
    def guidable(self) -> bool:
        return isinstance(self.head, FlowHead)

    def _estimates(
        self, condition: Any, x: Tensor, index: int | Tensor, guidance: Guidance | None
    ) -> tuple[Tensor, ...]:
        """x̂0 and ε̂ [b T d] of step ``index``, as of a head's `estimates`."""

        def plain(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.estimates(condition, x, index)

        return guided(plain, x, *scales(self.chain, index, x), guidance)

    @abstractmethod
    def _walk(
        self, observation: Observation, deterministic: bool, seeds: None, guidance: Guidance
    ) -> Any:
        """The chain's ``path``, from its first noise to what is decided [b T d]."""

    @torch.inference_mode(False)  # it needs a gradient, and may be called in that mode
    @torch.no_grad()
    def act_towards(
        self: Any,
        observation: Observation,
        wanted: Tensor,
        weight: Tensor,
        most: float,
        *,
        deterministic: bool = False,
    ) -> ActionChunk:
        """See `vla_rl.interfaces.Policy`. Dimensions that only pad the model's are free."""
        normal = self._batch(observation, wanted, torch.ones(wanted.shape[:2], dtype=torch.bool))[
            ACTION
        ]
        h, a = normal.shape[1:]
        aim, mask = (
            torch.zeros(len(wanted), *self.head.sample_shape, device=self.device) for _ in range(2)
        )
        aim[:, :h, :a], mask[:, :h, :a] = normal.float(), weight.to(self.device)[..., None]
        walk = self._walk(observation, deterministic, None, Guidance(aim, mask, most))
        return self._decided(walk.path[-1])
