"""X-VLA (Zheng et al. 2025, arXiv 2510.10274): a soft-prompted transformer that predicts the
clean actions of a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.denoising.chain import Chain, split_prediction
from policies.lerobot.centring import Eye
from policies.lerobot.flows import FlowHead, first_question
from policies.lerobot.heads import scales, times
from policies.trunk.features import coarse


class XVLAHead(FlowHead):
    """lerobot's sampler mixes each prediction anew with the first noise; a stochastic step goes
    from the noise that the present sample and the prediction imply, as in any flow. Grippers of
    some action spaces are logits along the chain.

    The loss is lerobot's own: it weighs the parts of the action space, and counts padded control
    steps too.
    """

    keeps_first_noise = True

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_denoising_steps)
        self.sample_shape = (policy.config.chunk_size, policy.model.dim_action)

    @property
    def trunk(self) -> Any:
        return self.model.vlm

    @property
    def eyes(self) -> Sequence[Eye]:
        return [
            Eye(self.trunk.vision_tower.convs[0].conv),
            Eye(self.trunk.multi_modal_projector.image_proj_norm),
        ]

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.policy._build_model_inputs(batch).values())

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The encoder's tokens of the first camera and the words [b f], and the others' image
        tokens."""
        given = self.condition(batch)
        return torch.cat(
            [
                coarse(given[name])
                for name in ("vlm_features", "aux_visual_inputs")
                if given[name].shape[1]
            ],
            1,
        )

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss, parts = self.policy.forward(batch)
        return loss, {name: value for name, value in parts.items() if name != "loss"}

    def condition(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        asked = first_question(
            self.model, "transformer", "generate_actions", *self._inputs(batch), steps=1
        )
        return {
            name: value for name, value in asked.items() if name not in ("action_with_noise", "t")
        }

    def estimates(
        self, condition: Mapping[str, Any], x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        _, shown = self.model.action_space.preprocess(condition["proprio"], x)
        action = self.model.transformer(
            **condition, action_with_noise=shown, t=times(chain, index, x)
        )
        return split_prediction("sample", action, x, *scales(chain, index, x))

    def finished(self, x: Tensor) -> Tensor:
        return self.model.action_space.postprocess(x.clone())
