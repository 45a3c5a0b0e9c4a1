"""The multi-task diffusion transformer of lerobot 0.6 (after arXiv 2507.05331): CLIP's features of
pictures and words condition a transformer over the chunk, by diffusion or by a flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.denoising.chain import Chain, flow_chain, split_prediction
from policies.lerobot.centring import Eye
from policies.lerobot.heads import (
    ACTION,
    STATE,
    TOKEN_MASK,
    TOKENS,
    DiffusionHead,
    _denoising_loss,
    _with_past,
    scales,
    times,
)
from vla_rl.errors import ConfigError


def _eyes(clip: Any) -> list[Eye]:
    seen = clip.embeddings
    asked = [Eye(layer.self_attn.out_proj) for layer in clip.encoder.layers]
    return [Eye(seen.patch_embedding, seen.position_embedding.weight[1:]), *asked]


class _DiTDiffusionHead(DiffusionHead):
    """By diffusion."""

    def _model(self) -> Any:
        return self.policy.objective

    def _predicted(self, x: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        return self.policy.noise_predictor(x, timesteps, conditioning_vec=condition)

    def condition(self, batch: dict[str, Any]) -> Tensor:
        return self.policy.observation_encoder.encode(self._history(batch))

    @property
    def eyes(self) -> Sequence[Eye]:
        """Its features are those of CLIP's first token, to which a picture comes by attention
        alone. None without a camera."""
        encoder = self.policy.observation_encoder
        clips = encoder.vision_encoders or [encoder.vision_encoder]  # of each camera, or of all
        return [eye for clip in clips if clip is not None for eye in _eyes(clip.model.vision_model)]

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """CLIP's features of the present frame [b f], without the state before them and the
        words behind."""
        last = self.condition(batch).unflatten(1, (self.policy.config.n_obs_steps, -1))[:, -1]
        return last[
            :, batch[STATE].shape[1] : last.shape[1] - self.policy.observation_encoder.text_dim
        ].half()

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """CLIP's features of the instruction, projected."""
        return {
            "text": self.policy.observation_encoder.text_encoder(batch[TOKENS], batch[TOKEN_MASK])
        }


class _DiTFlowHead(_DiTDiffusionHead):
    """By a flow, whose time runs the other way round in lerobot: 0 is noise. There its velocity
    is action − noise."""

    default_noise = 0.5

    def __init__(self, policy: Any):
        self.policy, config = policy, policy.config
        if config.integration_method != "euler" or config.sigma_min:
            raise ConfigError(
                f"this multi_task_dit policy has integration_method={config.integration_method!r} "
                f"and sigma_min={config.sigma_min}; its steps have a likelihood here with 'euler' "
                "and 0 alone: set policy.options=[integration_method:euler, sigma_min:0.0], and "
                "measure it so"
            )
        self.first_step, self.default_steps = config.n_obs_steps - 1, config.num_integration_steps
        self.chunk_length, self.executed = config.horizon - self.first_step, config.n_action_steps
        self.sample_shape = (config.horizon, config.action_feature.shape[0])

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Velocity error over valid control steps; lerobot draws noise, then time."""
        actions, valid = _with_past(batch[ACTION], valid, self.first_step)
        noise = torch.randn_like(actions)
        time = self.policy.objective._sample_timesteps(len(actions), actions.device)
        share = time[:, None, None]
        predicted = self._predicted(
            share * actions + (1 - share) * noise, time, self.condition(batch)
        )
        return _denoising_loss(F.mse_loss(predicted, actions - noise, reduction="none"), valid)

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        return flow_chain(steps, form, noise_level)

    def estimates(
        self, condition: Tensor, x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        velocity = -self._predicted(x, 1.0 - times(chain, index, x), condition)
        return split_prediction("velocity", velocity, x, *scales(chain, index, x))


def make_head(policy: Any) -> Any:
    return (_DiTFlowHead if policy.config.is_flow_matching else _DiTDiffusionHead)(policy)
