"""EO-1 (Qu et al. 2025, arXiv 2508.21112): Qwen2.5-VL reads pictures, words, the state as one
token and the noisy chunk as the last ones, all by the same weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.denoising.chain import Chain, split_prediction
from policies.lerobot.centring import Eye
from policies.lerobot.flows import FlowHead
from policies.lerobot.heads import ACTION, STATE, scales, times
from policies.trunk.features import coarse


class EO1Head(FlowHead):
    """The chunk's tokens see each other causally, as Qwen's do.

    The loss is lerobot's own, which by default counts padded control steps and dimensions.
    """

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_denoise_steps)
        self.output = self.model.action_out_proj[0]
        # (that lerobot says the pictures' limits in an older form, once a decision)
        logging.getLogger("transformers.processing_utils").setLevel(logging.ERROR)

    @property
    def trunk(self) -> Any:
        return self.model.vlm_backbone.model

    @property
    def eyes(self) -> Sequence[Eye]:
        seen = self.trunk.visual
        return [Eye(seen.patch_embed.proj), Eye(seen.merger.mlp[-1])]

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        given = self.policy._get_model_inputs(batch, {STATE, ACTION})
        return given, self.policy.prepare_state(batch[STATE])

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """What Qwen makes of pictures, words and state [b f]."""
        return coarse(self._read(batch)[1])

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss, _ = self.policy.forward(batch)
        return loss, {"mse": float(loss.detach())}

    def condition(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        return self._read(batch)[0]

    def _read(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Cache, mask and places of the chunk's tokens after one pass of what stands before them,
        and its hidden states [b L d]. Prompts are padded on the left, so chunks start together."""
        given, state = self._inputs(batch)
        names = {name: given[name] for name in ("state_token_id", "action_token_id")}
        ids, seen, kinds = (
            given[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
        )
        grid, pixels = given["image_grid_thw"], given["pixel_values"]
        embedded = self.model.embed_prefix(ids, states=state, **names)
        start = int((ids[0] == names["action_token_id"]).int().argmax())
        end = start + self.chunk_length
        places, _ = self.trunk.get_rope_index(
            ids, image_grid_thw=grid, attention_mask=seen, mm_token_type_ids=kinds
        )
        read = self.trunk(
            input_ids=ids[:, :start],
            attention_mask=seen[:, :start],
            position_ids=places[..., :start],
            inputs_embeds=embedded[:, :start],
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=kinds[:, :start],
            use_cache=True,
            return_dict=True,
        )
        fixed = {
            "cache": read.past_key_values,
            "seen": seen[:, :end],
            "places": places[..., start:end].transpose(0, 1),
        }
        return fixed, read.last_hidden_state

    def estimates(
        self, condition: Mapping[str, Any], x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        from transformers import DynamicCache

        shown = self.model.embed_suffix(times(chain, index, x), x)
        read = self.trunk(
            attention_mask=condition["seen"],
            past_key_values=DynamicCache([(k, v) for k, v, *_ in condition["cache"]]),
            inputs_embeds=shown.to(self.trunk.dtype),
            position_ids=condition["places"].transpose(0, 1),
            use_cache=True,
            return_dict=True,
        )
        with torch.autocast(x.device.type, enabled=False):
            velocity = self.model.action_out_proj(read.last_hidden_state.float()).view(x.shape)
        return split_prediction("velocity", velocity, x, *scales(chain, index, x))
