"""What each family of lerobot's policies computes, behind one small interface: a loss, and an action or a denoising chain.

A head wraps one `lerobot` policy object and works on lerobot's preprocessed (normalised) batches. Letters: b batch, T
control steps that the model denoises or regresses, d its action dimensions (padding included), a the robot's, k steps of
the chain. The mathematics of the chain are `policies.denoising.chain`'s. Nothing here imports lerobot: the objects are
handed in (`policies.lerobot` builds them).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.denoising.chain import Chain, diffusion_chain, flow_chain, split_prediction
from policies.trunk.features import coarse, mean_word
from vla_rl.errors import ConfigError

STATE, IMAGES, ACTION = "observation.state", "observation.images", "action"
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
PADDED = "action_is_pad"


class Head(Protocol):
    """What every family's head offers. ``executed`` control steps are run of the ``chunk_length``."""

    chunk_length: int
    executed: int

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Training loss over the control steps that ``valid`` [b h] marks, and its parts."""
        ...

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """What the images make [b f], half precision."""
        ...

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What the instruction makes {"text": [b d]}; nothing of families that are told nothing."""
        ...


class ChainHead(Head, Protocol):
    """A head whose actions come out of the steps of a `policies.denoising.chain.Chain`.

    ``first_step`` control steps of a sample lie before the present one, and ``chunk_length`` after.
    """

    first_step: int
    sample_shape: tuple[int, int]
    default_steps: int
    default_noise: float

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        """The table of ``steps`` steps; ``form`` is one of a flow's, ``noise_level`` its a, or η of DDIM."""
        ...

    def condition(self, batch: dict[str, Any]) -> Any:
        """What stays the same along the chain, encoded once."""
        ...

    def estimates(self, condition: Any, x: Tensor, chain: Chain, index: int) -> tuple[Tensor, Tensor]:
        """Estimates of the action and of the noise [b T d] from the sample ``x`` before step ``index``."""
        ...


def _images(policy: Any, batch: dict[str, Any]) -> list[Tensor]:
    return [batch[key] for key in policy.config.image_features]


def _coarse_maps(maps: list[Tensor]) -> Tensor:
    """Feature maps [b c h w] of the cameras on a coarse grid, flat [b f]."""
    return torch.cat([coarse(x.flatten(2).transpose(1, 2)) for x in maps], dim=1)


def _mean_over_valid(losses: Tensor, valid: Tensor) -> Tensor:
    """Mean of ``losses`` [b T d] over the control steps that ``valid`` [b T] marks."""
    weight = valid.to(losses.dtype)[..., None].expand_as(losses)
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def _denoising_loss(losses: Tensor, valid: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss = _mean_over_valid(losses, valid)
    return loss, {"mse": float(loss.detach())}


# ----------------------------------------------------------------------------------------------------------------- ACT
class RegressionHead:
    """ACT (Zhao et al. 2023, arXiv 2304.13705): a chunk in one forward, trained as a conditional VAE with an L1 loss."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.chunk_length, self.executed = policy.config.chunk_size, policy.config.n_action_steps

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """L1 over valid control steps plus ``kl_weight`` · KL(latent ‖ N(0, I)), which sums over latent dimensions."""
        inputs = {**batch, IMAGES: _images(self.policy, batch)} if self.policy.config.image_features else batch
        predicted, (mean, log_variance) = self.policy.model(inputs)
        l1 = _mean_over_valid(F.l1_loss(predicted, batch[ACTION], reduction="none"), valid)
        if not self.policy.config.use_vae:
            return l1, {"l1": float(l1.detach())}
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return l1 + self.policy.config.kl_weight * kl, {"l1": float(l1.detach()), "kl": float(kl.detach())}

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The backbone's maps [b f]."""
        return _coarse_maps([self.policy.model.backbone(x)["feature_map"] for x in _images(self.policy, batch)])

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def predict(self, batch: dict[str, Any]) -> Tensor:
        """Normalised actions [b T a]."""
        return self.policy.predict_action_chunk(batch)


# ----------------------------------------------------------------------------------------------------------- diffusion
class DiffusionHead:
    """Diffusion Policy (Chi et al. 2023, arXiv 2303.04137): DDPM or DDIM over a chunk, conditioned by FiLM.

    The clean-sample estimate is clipped as the checkpoint says; the noise estimate is then that of the clipped sample for
    a checkpoint sampled by DDPM, and the network's own for one sampled by DDIM, as diffusers' schedulers have it.
    """

    default_noise = 1.0

    def __init__(self, policy: Any):
        self.policy, config = policy, policy.config
        self.model = policy.diffusion
        self.first_step = config.n_obs_steps - 1
        self.chunk_length, self.executed = config.horizon - self.first_step, config.n_action_steps
        self.sample_shape = (config.horizon, config.action_feature.shape[0])
        self.default_steps = self.model.num_inference_steps
        self.train_steps = config.num_train_timesteps

    def _history(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Observations with lerobot's axis of ``n_obs_steps`` frames, all of them the present one."""
        frames = self.policy.config.n_obs_steps

        def repeat(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, frames, *x.shape[1:])

        out = {**batch, STATE: repeat(batch[STATE])}
        if self.policy.config.image_features:
            out[IMAGES] = torch.stack([repeat(x) for x in _images(self.policy, batch)], dim=2)
        return out

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Denoising error (of ε or of the clean sample, as the checkpoint predicts) over valid control steps."""
        actions = batch[ACTION]
        if self.first_step:  # steps before the present one have no target: their copies are left out of the mean
            actions = torch.cat([actions[:, :1].expand(-1, self.first_step, -1), actions], dim=1)
            valid = torch.cat([torch.zeros_like(valid[:, :1]).expand(-1, self.first_step), valid], dim=1)
        noise = torch.randn_like(actions)
        timesteps = torch.randint(self.train_steps, (len(actions),), device=actions.device)
        noisy = self.model.noise_scheduler.add_noise(actions, noise, timesteps)
        predicted = self.model.unet(noisy, timesteps, global_cond=self.condition(batch))
        target = noise if self.policy.config.prediction_type == "epsilon" else actions
        return _denoising_loss(F.mse_loss(predicted, target, reduction="none"), valid)

    def condition(self, batch: dict[str, Any]) -> Tensor:
        return self.model._prepare_global_conditioning(self._history(batch))

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The encoder's keypoints of the present frame [b f], without the state that stands before them."""
        last = self.condition(batch).unflatten(1, (self.policy.config.n_obs_steps, -1))[:, -1]
        return last[:, batch[STATE].shape[1] :].half()

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        """The checkpoint's own scheduler (``form`` is a flow's and plays no part): DDPM's posterior, or DDIM with η."""
        if not 1 <= steps <= self.train_steps:
            raise ConfigError(
                f"policy.denoising_steps is {steps}, this checkpoint was trained with {self.train_steps} diffusion steps: "
                f"choose 1 to {self.train_steps}, or 0 for the checkpoint's own number"
            )
        return diffusion_chain(self.model.noise_scheduler, steps, noise_level)

    def estimates(self, condition: Tensor, x: Tensor, chain: Chain, index: int) -> tuple[Tensor, Tensor]:
        config = self.policy.config
        timestep = round(float(chain.time[index]) * self.train_steps) - 1
        out = self.model.unet(x, torch.full((len(x),), timestep, device=x.device), global_cond=condition)
        inputs = (config.prediction_type, out, x, chain.signal[index], chain.noise[index])
        if not config.clip_sample:
            return split_prediction(*inputs)
        limit = torch.tensor(config.clip_sample_range, device=x.device)
        if config.noise_scheduler_type == "DDPM":
            return split_prediction(*inputs, bounds=(-limit, limit))
        action, noise = split_prediction(*inputs)
        return action.clamp(-limit, limit), noise


# ---------------------------------------------------------------------------------------------------------------- flow
@dataclass(frozen=True)
class _Prefix:
    """Keys and values of what stays the same along the chain, and what else a velocity needs."""

    cache: Any
    mask: Tensor
    extra: dict[str, Tensor]


def block_mask(padding: Tensor, starts: Tensor) -> Tensor:
    """Attention mask bool [b L L] of blocks: a position sees its own block and those before it, where ``padding`` [b L]
    is True; ``starts`` [b L] is True where a new block begins."""
    block = starts.long().cumsum(1)
    return (block[:, None, :] <= block[:, :, None]) & padding[:, None, :] & padding[:, :, None]


class FlowHead(abc.ABC):
    """Flow matching by an action expert over a cached prefix.

    Time runs from 1 (noise) to 0 (action); x_t = t·noise + (1 − t)·action and the velocity is noise − action.
    """

    first_step = 0
    default_noise = 0.5

    def __init__(self, policy: Any, default_steps: int):
        self.policy, self.model, self.default_steps = policy, policy.model, default_steps
        self.chunk_length, self.executed = policy.config.chunk_size, policy.config.n_action_steps
        self.sample_shape = (policy.config.chunk_size, policy.config.max_action_dim)

    @abc.abstractmethod
    def _velocity_losses(self, batch: dict[str, Any]) -> Tensor:
        """Squared errors [b T d]; lerobot draws noise N(0, I) and time ~ Beta(1.5, 1)."""

    @abc.abstractmethod
    def condition(self, batch: dict[str, Any]) -> _Prefix:
        """The prefix, run once."""

    @property
    @abc.abstractmethod
    def trunk(self) -> Any:
        """What embeds images and words."""

    @abc.abstractmethod
    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Pictures per camera, their masks, and the instruction's tokens and mask, at least."""

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The image tokens of each camera [b f]."""
        return torch.cat([coarse(self.trunk.embed_image(x)) for x in self._inputs(batch)[0]], dim=1)

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The mean embedding of the instruction's words."""
        return {"text": mean_word(self.trunk.embed_language_tokens(batch[TOKENS]), batch[TOKEN_MASK])}

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Velocity error over valid control steps."""
        return _denoising_loss(self._velocity_losses(batch), valid)

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        return flow_chain(steps, form, noise_level)

    def estimates(self, condition: _Prefix, x: Tensor, chain: Chain, index: int) -> tuple[Tensor, Tensor]:
        velocity = self.model.denoise_step(
            prefix_pad_masks=condition.mask,
            past_key_values=condition.cache,
            x_t=x,
            timestep=chain.time[index].to(x.device).expand(len(x)),
            **condition.extra,
        )
        return split_prediction("velocity", velocity, x, chain.signal[index], chain.noise[index])


class SmolVLAHead(FlowHead):
    """SmolVLA (Shukor et al. 2025, arXiv 2506.01844); the state is a token of the prefix."""

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_steps)

    @property
    def trunk(self) -> Any:
        return self.model.vlm_with_expert

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, masks = self.policy.prepare_images(batch)
        return images, masks, batch[TOKENS], batch[TOKEN_MASK], self.policy.prepare_state(batch)

    def _velocity_losses(self, batch: dict[str, Any]) -> Tensor:
        return self.model.forward(*self._inputs(batch), self.policy.prepare_action(batch))

    def condition(self, batch: dict[str, Any]) -> _Prefix:
        embedded, padding, starts = self.model.embed_prefix(*self._inputs(batch))
        _, cache = self.model.vlm_with_expert.forward(
            attention_mask=block_mask(padding, starts),
            position_ids=padding.long().cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
            fill_kv_cache=True,
        )
        return _Prefix(cache, padding, {})


class Pi0Head(FlowHead):
    """π0 (Black et al. 2024, arXiv 2410.24164): the state goes with the noisy actions. π0.5 (arXiv 2504.16054): the state
    is part of the prompt, which lerobot's preprocessor writes."""

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_inference_steps)
        self.separate_state = policy.config.type == "pi0"

    @property
    def trunk(self) -> Any:
        return self.model.paligemma_with_expert

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, masks = self.policy._preprocess_images(batch)
        return images, masks, batch[TOKENS], batch[TOKEN_MASK]

    def _state(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"state": self.policy.prepare_state(batch)} if self.separate_state else {}

    def _velocity_losses(self, batch: dict[str, Any]) -> Tensor:
        losses = self.model.forward(*self._inputs(batch), *self._state(batch).values(), self.policy.prepare_action(batch))
        return losses[..., : self.policy.config.action_feature.shape[0]]  # as lerobot: not over the padded dimensions

    def condition(self, batch: dict[str, Any]) -> _Prefix:
        embedded, padding, starts = self.model.embed_prefix(*self._inputs(batch))
        trunk = self.model.paligemma_with_expert
        trunk.paligemma.language_model.config._attn_implementation = "eager"  # the mask is an explicit [b 1 L L] bias
        _, cache = trunk.forward(
            attention_mask=self.model._prepare_attention_masks_4d(block_mask(padding, starts)),
            position_ids=padding.long().cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return _Prefix(cache, padding, self._state(batch))


FAMILIES: dict[str, Callable[[Any], Head]] = {
    "act": RegressionHead, "diffusion": DiffusionHead, "smolvla": SmolVLAHead, "pi0": Pi0Head, "pi05": Pi0Head
}  # fmt: skip
