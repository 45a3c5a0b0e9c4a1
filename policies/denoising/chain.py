"""The denoising chain as tables of coefficients: every sampler here is one affine step with
Gaussian noise.

A noisy chunk is x = signal · x0 + noise · ε, with x0 the action (normalised) and ε standard normal.
The network's output gives estimates of both (`split_prediction`), and step i goes to

    x' = weight_action · x̂0 + weight_noise · ε̂ + std · z,   z standard normal.

Flow matching has signal = 1 − t and noise = t, with t from 1 (noise) to 0 (action) as in π0 (Black
et al. 2024, arXiv 2410.24164). Sources of the stochastic steps: Flow-SDE, Flow-Noise and their
log-probs from πRL (Chen et al. 2025, arXiv 2510.25889); the coefficient-preserving form (CPS) also
as in RL-100 (Lei et al. 2025, arXiv 2510.14830); DDIM with η and the DDPM posterior (Song et al.
2021, arXiv 2010.02502, eq. 12; Ho et al. 2020, arXiv 2006.11239, eq. 6–7) as DPPO uses them (Ren et
al. 2024, arXiv 2409.00588).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from policies.denoising.settings import DenoisingVLAConfig
from vla_rl.errors import ConfigError, MissingPackage


@dataclass(frozen=True)
class Chain:
    """Coefficients float32 [K] of the K steps in the order they are taken, from noise to action.

    ``time`` is what the network is told, near 1 for noise and near 0 for an action. ``mean_action``
    and ``mean_noise`` are the weights of the deterministic step (the flow's ODE, DDIM with η = 0).
    ``std`` is 0 where a step has no noise.
    """

    time: Tensor
    signal: Tensor
    noise: Tensor
    weight_action: Tensor
    weight_noise: Tensor
    std: Tensor
    mean_action: Tensor
    mean_noise: Tensor

    def __len__(self) -> int:
        return self.time.shape[0]

    def rows(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def with_std_limits(self, low: float, high: float) -> Chain:
        """Standard deviations of noisy steps raised to ``low`` and lowered to ``high`` (0: no
        limit)."""
        std = self.std.clamp(min=low, max=high or None)
        return replace(self, std=std)

    def without_last_noise(self) -> Chain:
        std = self.std.clone()
        std[-1] = 0.0
        return replace(self, std=std)


def _chain(**columns: list[float] | Tensor) -> Chain:
    return Chain(
        **{name: torch.as_tensor(column, dtype=torch.float32) for name, column in columns.items()}
    )


def flow_chain(steps: int, form: str, noise_level: float) -> Chain:
    """Euler steps of a flow on the grid 1, 1 − 1/K, … 1/K, 0; ``form`` one of `FLOWS`;
    ``noise_level`` a.

    flow_sde: std = σ√δ and ε̂'s weight t' − σ²δ/(2t), with σ = a√(t/(1 − t)); at t = 1 the
    denominator takes the next grid time. flow_cps: ε̂'s weight t'·cos(πa/2), std = t'·sin(πa/2), 0
    at the last step. flow_noise: the ODE's mean; its std is the network's, so the table holds 0.
    """
    t = 1.0 - torch.arange(steps, dtype=torch.float64) / steps
    after = torch.cat([t[1:], t.new_zeros(1)])
    delta = t - after
    weight_noise, std = after, torch.zeros_like(t)
    if form == "flow_sde":
        remaining = torch.where(t < 1.0, 1.0 - t, 1.0 - after)
        variance_rate = noise_level**2 * t / remaining
        weight_noise = after - variance_rate * delta / (2.0 * t)
        std = (variance_rate * delta).sqrt()
    elif form == "flow_cps":
        weight_noise = after * math.cos(math.pi * noise_level / 2.0)
        std = after * math.sin(math.pi * noise_level / 2.0)
    return _chain(
        time=t,
        signal=1.0 - t,
        noise=t,
        weight_action=1.0 - after,
        weight_noise=weight_noise,
        std=std,
        mean_action=1.0 - after,
        mean_noise=after,
    )


def make_scheduler(form: str, train_timesteps: int, prediction: str) -> Any:
    """diffusers' DDIM or DDPM scheduler: squared-cosine betas, timesteps 0, T/K, 2T/K … in reverse
    ("leading").

    Few steps then start at a timestep with some signal left. At the very last one x̂0 = (x −
    noise·ε̂)/signal divides by almost 0, and clipping would turn the slightest error of ε̂ into an
    action at the robot's bounds.
    """
    try:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    except ModuleNotFoundError as error:
        raise MissingPackage("diffusers", "diffusion", "A diffusion policy") from error
    kind = {"ddim": DDIMScheduler, "ddpm": DDPMScheduler}[form]
    return kind(
        num_train_timesteps=train_timesteps,
        beta_schedule="squaredcos_cap_v2",
        prediction_type=prediction,
        clip_sample=False,  # x̂0 is clipped by the policy, to the robot's own bounds
        timestep_spacing="leading",
    )


def diffusion_chain(scheduler: Any, steps: int, eta: float) -> Chain:
    """Steps of a diffusers DDIM (noise ``eta``) or DDPM scheduler, whose mean is written in x̂0 and
    ε̂.

    The DDPM posterior mean c0·x̂0 + ct·x is (c0 + ct√ᾱ)·x̂0 + ct√(1 − ᾱ)·ε̂.
    """
    train = scheduler.config.num_train_timesteps
    scheduler.set_timesteps(steps)
    columns: dict[str, list[float]] = {name.name: [] for name in fields(Chain)}
    stochastic_ddim = hasattr(scheduler, "final_alpha_cumprod")
    for timestep in scheduler.timesteps.tolist():
        before = timestep - train // steps
        alpha = float(scheduler.alphas_cumprod[timestep])
        alpha_before = float(scheduler.alphas_cumprod[before]) if before >= 0 else 1.0
        if stochastic_ddim:
            std = eta * float(scheduler._get_variance(timestep, before)) ** 0.5
            weights = alpha_before**0.5, max(0.0, 1.0 - alpha_before - std**2) ** 0.5
        else:
            step_alpha = alpha / alpha_before
            toward_action = alpha_before**0.5 * (1.0 - step_alpha) / (1.0 - alpha)
            stay = step_alpha**0.5 * (1.0 - alpha_before) / (1.0 - alpha)
            std = float(scheduler._get_variance(timestep)) ** 0.5 if timestep > 0 else 0.0
            weights = toward_action + stay * alpha**0.5, stay * (1.0 - alpha) ** 0.5
        row = ((timestep + 1) / train, alpha**0.5, (1.0 - alpha) ** 0.5, *weights, std)
        for name, x in zip(
            columns, (*row, alpha_before**0.5, (1.0 - alpha_before) ** 0.5), strict=True
        ):
            columns[name].append(x)
    return _chain(**columns)


def trained_range(config: DenoisingVLAConfig, chain: Chain) -> tuple[int, int]:
    """The first trained step and the end of the stochastic ones."""
    end = min(config.stochastic_window or len(chain), len(chain))
    if config.sampler != "flow_noise":
        while end and float(chain.std[end - 1]) == 0.0:
            end -= 1
    elif not config.last_step_noise:
        end = min(end, len(chain) - 1)
    if end < 1:
        raise ConfigError(
            f"policy.sampler={config.sampler} with denoising_steps={config.denoising_steps} and "
            f"last_step_noise={config.last_step_noise} has no stochastic step to train: take more "
            "steps, or noise at the last one (policy.min_std above 0, last_step_noise=true)"
        )
    if config.trained_steps > end:
        raise ConfigError(
            f"policy.trained_steps is {config.trained_steps}, but only {end} steps are stochastic: "
            "set it to at most that"
        )
    return (end - config.trained_steps if config.trained_steps else 0), end


# -------------------------------------------------------------------------------------- predictions
def training_target(kind: str, action: Tensor, epsilon: Tensor) -> Tensor:
    """What the network is to output for x0 ``action`` and ``epsilon`` [...]: ε − x0, ε or x0."""
    return {"velocity": epsilon - action, "epsilon": epsilon, "sample": action}[kind]


def split_prediction(
    kind: str,
    output: Tensor,
    x: Tensor,
    signal: Tensor,
    noise: Tensor,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimates (x̂0, ε̂) from the network's output at x; ``signal`` and ``noise`` broadcast
    against x.

    With ``bounds`` x̂0 is clipped to them and ε̂ recomputed, so that both still explain x (as in
    DPPO and diffusers).
    """
    if kind == "velocity":
        action, epsilon = x - noise * output, x + signal * output
    elif kind == "epsilon":
        action, epsilon = (x - noise * output) / signal, output
    else:
        action, epsilon = output, (x - signal * output) / noise
    return (action, epsilon) if bounds is None else clip_estimate(action, x, signal, noise, bounds)


def clip_estimate(
    action: Tensor, x: Tensor, signal: Tensor, noise: Tensor, bounds: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """x̂0 within ``bounds``, and the ε̂ with which it still explains x."""
    action = torch.minimum(torch.maximum(action, bounds[0]), bounds[1])
    return action, (x - signal * action) / noise


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density per entry of a normal distribution (nats)."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy per entry of a normal distribution (nats)."""
    return std.log() + 0.5 * math.log(2.0 * math.pi * math.e)


# ------------------------------------------------------------------------------- per-step schedules
def discount_schedule(steps: int, discount: float) -> Tensor:
    """Advantage factors [K'] of the trained steps, noisiest first: γ^(K' − 1 − i) (DPPO, eq. 6:
    γ_denoise)."""
    return discount ** torch.arange(steps - 1, -1, -1, dtype=torch.float32)


def clip_schedule(steps: int, base: float, rate: float) -> Tensor:
    """Factors [K'] on the clip range, noisiest first: base + (1 − base)·(e^(ρt) − 1)/(e^ρ − 1), t =
    i/(K' − 1).

    DPPO's ε_i ÷ ε with base = ε_b/ε: tighter at noisy steps. One step alone takes factor 1.
    """
    if steps == 1 or base == 1.0:
        return torch.ones(steps)
    t = torch.linspace(0.0, 1.0, steps)
    return base + (1.0 - base) * (torch.expm1(rate * t) / math.expm1(rate) if rate else t)
