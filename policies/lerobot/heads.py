"""What a family of lerobot's policies computes, behind one small interface: a loss, and an action
or a denoising chain. Here are ACT and diffusion; `policies.lerobot.flows` has those that match a
flow, `policies.lerobot.families` the table of all.

A head wraps one `lerobot` policy object and works on lerobot's preprocessed (normalised) batches.
Letters: b batch, T control steps that the model denoises or regresses, d its action dimensions
(padding included), a the robot's, k steps of the chain. The mathematics of the chain are
`policies.denoising.chain`'s. Nothing here imports lerobot: the objects are handed in
(`policies.lerobot` builds them).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.denoising.chain import Chain, diffusion_chain, split_prediction
from policies.lerobot.centring import Eye
from policies.trunk.features import coarse
from vla_rl.errors import ConfigError

STATE, IMAGES, ACTION = "observation.state", "observation.images", "action"
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
PADDED = "action_is_pad"


class Head(abc.ABC):
    """What every family's head offers, and what is assumed of one that says no more. ``executed``
    control steps are run of the ``chunk_length``.

    ``noise_samples``: how many noisy chunks of each row the loss takes on one pass of the prefix
    (None: it takes one, and no other number).
    """

    chunk_length: int
    executed: int
    noise_samples: int | None = None

    @abc.abstractmethod
    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Training loss over the control steps that ``valid`` [b h] marks, and its parts."""

    @abc.abstractmethod
    def visual(self, batch: dict[str, Any]) -> Tensor:
        """What the images make [b f], half precision."""

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What the instruction makes {"text": [b d]}; nothing of families that are told nothing."""
        return {}

    @property
    def eyes(self) -> Sequence[Eye]:
        """What is centred of a picture encoder that, as it begins, depends on the pictures it will
        see, in the order in which a picture goes through."""
        return ()


class ChainHead(Head):
    """A head whose actions come out of the steps of a `policies.denoising.chain.Chain`.

    ``first_step`` control steps of a sample lie before the present one, and ``chunk_length`` after.
    ``keeps_first_noise``: a step without noise goes on with the chain's first noise, not with the
    present estimate of it. ``output``: the linear layer in which a network ends that has features
    of each control step.
    """

    first_step: int = 0
    sample_shape: tuple[int, int]
    default_steps: int
    default_noise: float
    keeps_first_noise: bool = False
    output: nn.Linear | None = None

    @abc.abstractmethod
    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        """The table of ``steps`` steps; ``form`` is one of a flow's, ``noise_level`` its a, or η
        of DDIM."""

    @abc.abstractmethod
    def condition(self, batch: dict[str, Any]) -> Any:
        """What stays the same along the chain, encoded once."""

    @abc.abstractmethod
    def estimates(
        self, condition: Any, x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Estimates of the action and of the noise [b T d] from the sample ``x`` before step
        ``index``, one of all rows or int64 [b], one of each."""

    def begins(self, noise: Tensor) -> Tensor:
        """What a chain starts from, of standard normal ``noise`` [b T d]."""
        return noise

    def finished(self, x: Tensor) -> Tensor:
        """Normalised actions [b T d] of the chain's end."""
        return x


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


def times(chain: Chain, index: int | Tensor, x: Tensor) -> Tensor:
    """The time [b] of step ``index`` of ``chain`` for each row of ``x``."""
    return chain.time[index].to(x.device).expand(len(x))


def scales(chain: Chain, index: int | Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Signal and noise of step ``index``, that broadcast against ``x`` [b T d]."""
    return column(chain.signal, index, x), column(chain.noise, index, x)


def column(values: Tensor, index: int | Tensor, x: Tensor) -> Tensor:
    """The entry of a chain's column [K] at ``index``, that broadcasts against ``x`` [b T d]."""
    chosen = values[index].to(x.device)
    return chosen[:, None, None] if chosen.dim() else chosen


def _with_past(actions: Tensor, valid: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Chunks [b h a] with ``steps`` control steps before the present one, which have no target:
    copies of the first that are left out of a mean over ``valid`` [b h]."""
    if not steps:
        return actions, valid
    before = torch.zeros_like(valid[:, :1]).expand(-1, steps)
    return torch.cat([actions[:, :1].expand(-1, steps, -1), actions], dim=1), torch.cat(
        [before, valid], dim=1
    )


# ---------------------------------------------------------------------------------------------- ACT
class RegressionHead(Head):
    """ACT (Zhao et al. 2023, arXiv 2304.13705): a chunk in one forward, trained as a conditional
    VAE with an L1 loss."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.chunk_length, self.executed = policy.config.chunk_size, policy.config.n_action_steps

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """L1 over valid control steps plus ``kl_weight`` · KL(latent ‖ N(0, I)), which sums over
        latent dimensions."""
        inputs = (
            {**batch, IMAGES: _images(self.policy, batch)}
            if self.policy.config.image_features
            else batch
        )
        predicted, (mean, log_variance) = self.policy.model(inputs)
        l1 = _mean_over_valid(F.l1_loss(predicted, batch[ACTION], reduction="none"), valid)
        if not self.policy.config.use_vae:
            return l1, {"l1": float(l1.detach())}
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return l1 + self.policy.config.kl_weight * kl, {
            "l1": float(l1.detach()),
            "kl": float(kl.detach()),
        }

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The backbone's maps [b f]."""
        return _coarse_maps(
            [self.policy.model.backbone(x)["feature_map"] for x in _images(self.policy, batch)]
        )

    def predict(self, batch: dict[str, Any]) -> Tensor:
        """Normalised actions [b T a]."""
        return self.policy.predict_action_chunk(batch)


# ---------------------------------------------------------------------------------------- diffusion
class DiffusionHead(ChainHead):
    """Diffusion Policy (Chi et al. 2023, arXiv 2303.04137): DDPM or DDIM over a chunk, conditioned
    by FiLM.

    The clean-sample estimate is clipped as the checkpoint says; the noise estimate is then that of
    the clipped sample for a checkpoint sampled by DDPM, and the network's own for one sampled by
    DDIM, as diffusers' schedulers have it.
    """

    default_noise = 1.0

    def __init__(self, policy: Any):
        self.policy, config = policy, policy.config
        self.model = self._model()
        self.scheduler, self.default_steps = (
            self.model.noise_scheduler,
            self.model.num_inference_steps,
        )
        self.first_step = config.n_obs_steps - 1
        self.chunk_length, self.executed = config.horizon - self.first_step, config.n_action_steps
        self.sample_shape = (config.horizon, config.action_feature.shape[0])
        self.train_steps = config.num_train_timesteps

    def _model(self) -> Any:
        """What has the scheduler and the number of steps."""
        return self.policy.diffusion

    def _predicted(self, x: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        return self.model.unet(x, timesteps, global_cond=condition)

    def _history(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Observations with lerobot's axis of ``n_obs_steps`` frames, all of them the present
        one."""
        frames = self.policy.config.n_obs_steps

        def repeat(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, frames, *x.shape[1:])

        out = {**batch, STATE: repeat(batch[STATE])}
        if self.policy.config.image_features:
            out[IMAGES] = torch.stack([repeat(x) for x in _images(self.policy, batch)], dim=2)
        return out

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Denoising error (of ε or of the clean sample, as the checkpoint predicts) over valid
        control steps."""
        actions, valid = _with_past(batch[ACTION], valid, self.first_step)
        noise = torch.randn_like(actions)
        timesteps = torch.randint(self.train_steps, (len(actions),), device=actions.device)
        predicted = self._predicted(
            self.scheduler.add_noise(actions, noise, timesteps), timesteps, self.condition(batch)
        )
        target = noise if self.policy.config.prediction_type == "epsilon" else actions
        return _denoising_loss(F.mse_loss(predicted, target, reduction="none"), valid)

    def condition(self, batch: dict[str, Any]) -> Tensor:
        return self.model._prepare_global_conditioning(self._history(batch))

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The encoder's keypoints of the present frame [b f], without the state that stands
        before them."""
        last = self.condition(batch).unflatten(1, (self.policy.config.n_obs_steps, -1))[:, -1]
        return last[:, batch[STATE].shape[1] :].half()

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        """The checkpoint's own scheduler (``form`` is a flow's and plays no part): DDPM's
        posterior, or DDIM with η."""
        if not 1 <= steps <= self.train_steps:
            raise ConfigError(
                f"policy.denoising_steps is {steps}, this checkpoint was trained with "
                f"{self.train_steps} diffusion steps: choose 1 to {self.train_steps}, or 0 for the "
                "checkpoint's own number"
            )
        return diffusion_chain(self.scheduler, steps, noise_level)

    def estimates(
        self, condition: Tensor, x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self.policy.config
        timesteps = (times(chain, index, x) * self.train_steps).round().long() - 1
        inputs = (
            config.prediction_type,
            self._predicted(x, timesteps, condition),
            x,
            *scales(chain, index, x),
        )
        if not config.clip_sample:
            return split_prediction(*inputs)
        limit = torch.tensor(config.clip_sample_range, device=x.device)
        if config.noise_scheduler_type == "DDPM":
            return split_prediction(*inputs, bounds=(-limit, limit))
        action, noise = split_prediction(*inputs)
        return action.clamp(-limit, limit), noise
