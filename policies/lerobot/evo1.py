"""Evo-1 (Lin et al. 2025, arXiv 2511.04555): cross attention from the noisy chunk to what
InternVL3 makes of pictures and words, with the state as one more token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.denoising.chain import Chain, split_prediction
from policies.lerobot.centring import Eye
from policies.lerobot.flows import FlowHead
from policies.lerobot.heads import scales, times
from policies.trunk.features import coarse

_TIMES = 1000  # that its embedding of time has


class Evo1Head(FlowHead):
    """Its time runs the other way round (0 is noise, velocity is action − noise), and its noise is
    uniform between -1 and 1: a chain's first noise is mapped to that. The steps that RL adds are
    Gaussian, so their likelihood is exact; the marginals of Flow-SDE, which hold for Gaussian
    noise, are not the flow's.

    The loss is lerobot's own: over control steps that are not padded, and the robot's dimensions.
    """

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_inference_timesteps)

    @property
    def trunk(self) -> Any:
        return self.model.embedder

    @property
    def eyes(self) -> Sequence[Eye]:
        seen = self.trunk.model.vision_tower.embeddings
        places = seen.position_embeddings
        return [Eye(seen.patch_embeddings.projection, None if places is None else places[0, 1:])]

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, masks = self.policy._collect_image_batches(batch)
        return self.policy._normalize_task_batch(batch), images, masks

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """What InternVL makes of pictures and words [b f]."""
        return coarse(self.policy._compute_fused_tokens(*self._inputs(batch))[0])

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss, _ = self.policy.forward(batch)
        return loss, {"mse": float(loss.detach())}

    def begins(self, noise: Tensor) -> Tensor:
        return torch.erf(noise / math.sqrt(2.0))

    def condition(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        fused, seen = self.policy._compute_fused_tokens(*self._inputs(batch))
        state, _ = self.policy._prepare_state(batch)
        who = self.policy._get_embodiment_ids(batch, len(state))
        context, left_out, who = self.model.action_head._prepare_context(fused, state, who, seen)
        fixed = {"context": context, "who": who}
        return fixed if left_out is None else fixed | {"left_out": left_out}

    def estimates(
        self, condition: Mapping[str, Any], x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        head = self.model.action_head
        robot = torch.arange(self.sample_shape[1], device=x.device) < self.policy._env_action_dim
        # (in double precision: a time on the edge of two embeddings would take the lower one)
        since = (1.0 - times(chain, index, x).double()) * (_TIMES - 1) + 1e-4
        time = head.time_pos_enc(_TIMES).to(x)[0, since.long().clamp(max=_TIMES - 1)]
        y = head._project_actions(x * robot, condition["who"])
        for block in head.transformer_blocks:
            y = block(y, condition["context"].to(x), time, condition.get("left_out"))
        y = head.norm_out(y)
        pooled = head.seq_pool_proj(y.flatten(1)) if head.horizon > 1 else y[:, 0]
        velocity = -head.mlp_head(pooled, condition["who"]).view(x.shape) * robot
        return split_prediction("velocity", velocity, x, *scales(chain, index, x))
