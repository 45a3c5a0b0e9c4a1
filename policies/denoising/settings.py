"""The options of the policies that denoise, apart from the code that computes: checking a config
needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from policies.settings import (
    FLOWS,
    LEARNED_NOISE,
    TrunkConfig,
    correlated_axes,
    require_learned_noise,
)
from vla_rl.bounds import bound
from vla_rl.errors import ConfigError, require_packages

DIFFUSIONS = ("ddim", "ddpm")
PREDICTIONS = ("velocity", "epsilon", "sample")
METHODS = ("same_noise", "lcm")


@dataclass
class DenoisingConfig(TrunkConfig):
    """What every denoising policy has: trunk, expert, and how actions are normalised."""

    # predict the value of a state, for algorithms without a critic
    value_head: bool = False
    precision: str = "float32"  # of the trunk; the expert and the chain always compute in float32
    # channels of the action expert
    expert_width: int = bound(128, ge=1)
    # width of its MLP
    expert_mlp: int = bound(256, ge=1)
    # its layers
    expert_depth: int = bound(6, ge=1)
    # what ±1 stands for; grippers use their bounds
    action_range: str = bound("zscore", choices=("zscore", "bounds", "quantile"))
    # steps from noise to an action
    denoising_steps: int = bound(10, ge=1)
    # first noise where no step noise is drawn
    deterministic_start: str = bound("seeded", choices=("seeded", "zero"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_width % 2:
            raise ConfigError(
                f"policy.expert_width={self.expert_width}: the time embedding needs it even"
            )


@dataclass
class DenoisingVLAConfig(DenoisingConfig):
    """Sampler and likelihood of a `DenoisingVLA`. Standard deviations are in normalised action
    units; 0 turns a limit off.

    ``stochastic_steps`` "one" draws one step per decision that is stochastic and trained, the
    others are deterministic; ``stochastic_window`` w (0: all) leaves only the first w steps
    stochastic; ``trained_steps`` K' (0: all) trains the last K' of the stochastic ones, and
    ``freeze_untrained`` takes the steps before them with a frozen copy of the policy. ``min_std``,
    ``max_std`` limit what is sampled; ``min_log_prob_std`` is the floor in the likelihood.
    ``clip_base`` and ``clip_rate`` shape the clip range over the trained steps,
    ``advantage_discount`` the advantage.
    """

    # how an action is sampled from noise
    sampler: str = bound("flow_sde", choices=(*FLOWS, *DIFFUSIONS))
    # velocity with flows, epsilon or sample with diffusion; auto: velocity or epsilon
    prediction: str = bound("auto", choices=("auto", *PREDICTIONS))
    train_timesteps: int = bound(100, ge=1)  # of the diffusion schedule
    eta: float = bound(1.0, gt=0, le=1)  # of DDIM's noise
    noise_level: float = bound(0.5, gt=0, le=1)  # a of flow_sde and flow_cps
    learned_std_low: float = bound(0.08, gt=0)  # of flow_noise
    # upper end of flow_noise's standard deviation
    learned_std_high: float = 0.16
    clip_action: bool = False  # clip x̂0 to the robot's bounds at every step
    # which steps draw noise
    stochastic_steps: str = bound("all", choices=("all", "one"))
    # first steps that are stochastic; 0: all
    stochastic_window: int = bound(0, ge=0)
    # last stochastic steps that RL trains; 0: all
    trained_steps: int = bound(0, ge=0)
    # a frozen copy of the policy takes the steps before the trained ones
    freeze_untrained: bool = False
    # draw noise at the last step too
    last_step_noise: bool = True
    # least standard deviation that is sampled with; 0: no limit
    min_std: float = bound(0.0, ge=0)
    # largest one; 0: no limit
    max_std: float = bound(0.0, ge=0)
    # least one in the likelihood; 0: no limit
    min_log_prob_std: float = bound(0.0, ge=0)
    noise_clip: float = bound(0.0, ge=0)  # limit of |z| of the step noise
    # of the step noise z, between the control steps of a chunk; see `chunk_normals`
    noise_correlation: float = bound(0.0, ge=0, lt=1)
    log_prob_low: float | None = None  # clamp of each entry's log-prob
    # upper end of that clamp; null: none
    log_prob_high: float | None = None
    # of the advantage, over the trained steps
    advantage_discount: float = bound(1.0, gt=0, le=1)
    # factor of the clip range at the first trained step
    clip_base: float = bound(1.0, gt=0, le=1)
    # exponent by which it grows from there to 1 at the last one
    clip_rate: float = bound(3.0, ge=0)
    # noisy chunks per demonstration and update; they share one pass of the trunk
    noise_samples: int = bound(4, ge=1)
    student_steps: int = bound(0, ge=0)  # a student with so many steps learns beside RL (0: none)
    student_coef: float = bound(1.0, ge=0)  # weight of its loss

    def __post_init__(self) -> None:
        super().__post_init__()
        flow = self.sampler in FLOWS
        if self.prediction == "auto":
            self.prediction = "velocity" if flow else "epsilon"
        if flow != (self.prediction == "velocity"):
            raise ConfigError(
                f"policy.prediction={self.prediction!r} does not go with "
                f"policy.sampler={self.sampler!r}: flows predict the velocity, diffusion epsilon "
                "or the sample"
            )
        if not flow and self.train_timesteps % self.denoising_steps:
            raise ConfigError(
                f"policy.train_timesteps={self.train_timesteps} is not a multiple of "
                f"policy.denoising_steps={self.denoising_steps}: change either"
            )
        require_learned_noise(self)
        if self.freeze_untrained and not self.trained_steps:
            raise ConfigError(
                "policy.freeze_untrained=true freezes the steps before policy.trained_steps: set "
                "that too (1 or more)"
            )

    def check_machine(self) -> None:
        """Raise `MissingPackage` where the sampler's package is not installed."""
        if self.sampler in DIFFUSIONS:
            require_packages(
                "diffusers", extra="diffusion", purpose=f"policy.sampler={self.sampler}"
            )

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return correlated_axes(self)

    @property
    def explores_by(self) -> str:
        """The option that makes samples differ more."""
        if self.sampler == LEARNED_NOISE:
            return "learned_std_high"
        return "noise_level" if self.sampler in FLOWS else "min_std"


@dataclass
class ConsistencyConfig(DenoisingConfig):
    """A student's steps (as `consistency.Grid`; empty: a straight grid of ``denoising_steps``)
    and parametrisation."""

    # steps from noise to an action
    denoising_steps: int = 1
    prediction: str = bound("velocity", choices=("velocity", "sample"))  # what the network predicts
    method: str = bound("same_noise", choices=METHODS)  # how it learns
    # time at which each step starts, 1 (noise) to 0; empty: evenly spaced
    step_times: list[float] = field(default_factory=list)
    # share of the action in what each step starts from
    step_signals: list[float] = field(default_factory=list)
    # share of the noise in it
    step_noises: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_times:
            time = 1 - np.arange(self.denoising_steps, dtype=np.float32) / np.float32(
                self.denoising_steps
            )
            self.step_times, self.step_signals, self.step_noises = (
                time.tolist(),
                (1 - time).tolist(),
                time.tolist(),
            )
        sizes = [len(self.step_times), len(self.step_signals), len(self.step_noises)]
        if sizes != [self.denoising_steps] * 3:
            raise ConfigError(
                f"policy.step_times, policy.step_signals and policy.step_noises have {sizes} "
                f"entries, they need policy.denoising_steps={self.denoising_steps} each"
            )
