"""The options of the policies, apart from the code that computes: reading and checking a config
needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from policies.lerobot.families import FAMILIES as LEROBOT
from policies.lerobot.sizes import require_sizes
from vla_rl.errors import ConfigError, require_packages

NANO_WORDS = Path(__file__).parent / "lerobot" / "nano"
BIN_RANGES = ("bounds", "minmax", "quantile")
BIN_SPACINGS = ("uniform", "power")
_TRUNK_CHOICES = {
    "precision": ("auto", "float32", "bfloat16"),
    "stem_norm": ("layer", "none"),
    "feature_norm": ("position", "batch", "none"),
}


def require_choices(config: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` for the first field of a policy's config whose value is not among its
    choices."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ConfigError(
                f"policy.{name} is {getattr(config, name)!r}, choose one of {', '.join(allowed)}"
            )


def require_positive(config: Any, *names: str) -> None:
    """Raise `ConfigError` for the first of the named counts that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"policy.{name} is {getattr(config, name)}, it must be at least 1")


def require_correlation(value: float, decoding: str = "parallel") -> None:
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"policy.noise_correlation is {value}, it must be at least 0 and below 1")
    if value and decoding == "autoregressive":
        raise ConfigError(
            f"policy.noise_correlation is {value} with policy.decoding=autoregressive: a later "
            "token is drawn given the earlier ones, and noise that it shares with them changes "
            "that distribution, so that its log-prob would be wrong and the gradient biased. Set "
            "policy.noise_correlation=0, or policy.decoding=parallel"
        )


def correlated_axes(config: Any) -> tuple[str, ...]:
    """Log-prob axes along which a policy's ``noise_correlation`` ties the samples of one
    decision together."""
    return ("control_step",) if config.noise_correlation and config.chunk_length > 1 else ()


@dataclass
class TrunkConfig:
    """Sizes and choices of a `VisionLanguageTrunk`. Lengths are counts; nothing here depends on
    the robot."""

    # control steps that one decision predicts
    chunk_length: int = 8
    # which of the embodiment's cameras to read; empty: all
    cameras: list[str] = field(default_factory=list)
    # read proprioception
    use_proprio: bool = True
    # vision's convs before the one to vit_width; empty: patches
    stem_channels: list[int] = field(default_factory=lambda: [32, 64])
    # pixels of each conv's kernel, one more than stem_channels
    stem_kernels: list[int] = field(default_factory=lambda: [8, 3, 3])
    # pixels of each conv's stride
    stem_strides: list[int] = field(default_factory=lambda: [4, 2, 2])
    stem_norm: str = "layer"  # layer | none: over channels, after each conv
    patch_size: int = 14  # used where stem_channels is empty
    # channels of an image token
    vit_width: int = 128
    # transformer layers
    vit_depth: int = 1
    # attention heads
    vit_heads: int = 4
    # width of its MLP, in vit_width
    vit_mlp_ratio: float = 2.0
    merge: int = 2  # merge x merge neighbouring image tokens become one
    share_vision: bool = True  # one vision tower for all cameras
    film: bool = False  # the instruction's words scale and shift the channels of the stem (`FiLM`)
    # position | batch | none: how image tokens are standardised, see `FeatureNorm`
    feature_norm: str = "position"
    # RL then keeps each decision's image tokens instead of encoding its images again
    freeze_vision_in_rl: bool = True
    # language model
    instruction_length: int = 16  # words read of an instruction
    # tokens that the words are pooled into; 0: one per word, padding included
    instruction_tokens: int = 4
    hash_buckets: int = 128  # for words outside the vocabulary
    # channels of a token
    llm_width: int = 128
    # transformer layers
    llm_depth: int = 3
    # attention heads
    llm_heads: int = 4
    # width of its MLP
    llm_mlp: int = 352
    # base of the rotary embedding
    rope_theta: float = 10000.0
    # share of activations that training drops
    dropout: float = 0.0
    # heads
    value_head: bool = True  # predict the value of a state, for algorithms without a critic
    value_gradient: bool = True  # the value loss reaches the trunk
    # auto: bfloat16 autocast where the hardware multiplies it natively, else float32
    precision: str = "auto"
    # torch.compile the forward pass: the first calls take minutes
    compile: bool = False
    # compute activations again in the backward: less memory, slower
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        require_choices(self, _TRUNK_CHOICES)
        require_positive(
            self,
            "chunk_length",
            "patch_size",
            "vit_width",
            "vit_heads",
            "merge",
            "instruction_length",
        )
        require_positive(self, "hash_buckets", "llm_width", "llm_depth", "llm_heads", "llm_mlp")
        for name in ("vit_depth", "instruction_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"policy.{name} is {getattr(self, name)}, it must be 0 or more")
        for name in ("vit_mlp_ratio", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"policy.{name} is {getattr(self, name)}, it must be above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"policy.dropout is {self.dropout}, it must be at least 0 and below 1"
            )
        for name in ("stem_channels", "stem_kernels", "stem_strides"):
            if any(size < 1 for size in getattr(self, name)):
                raise ConfigError(
                    f"policy.{name} is {getattr(self, name)}, each entry must be at least 1"
                )
        if len(set(self.cameras)) < len(self.cameras):
            raise ConfigError(f"policy.cameras is {self.cameras}, name each camera once")
        for width, heads in (("vit_width", "vit_heads"), ("llm_width", "llm_heads")):
            if getattr(self, width) % getattr(self, heads):
                raise ConfigError(
                    f"policy.{width} {getattr(self, width)} is not divisible by {heads} "
                    f"{getattr(self, heads)}"
                )
        if (self.llm_width // self.llm_heads) % 2:
            raise ConfigError(
                f"policy.llm_width / llm_heads is {self.llm_width // self.llm_heads}, rotary "
                "embeddings need it even"
            )
        if self.film and not self.stem_channels:
            raise ConfigError(
                "policy.film=true scales the stem, and policy.stem_channels is empty: name some"
            )
        convs = len(self.stem_channels) + 1
        if self.stem_channels and not len(self.stem_kernels) == len(self.stem_strides) == convs:
            raise ConfigError(
                f"policy.stem_channels has {len(self.stem_channels)} entries, so stem_kernels and "
                f"stem_strides need {convs} each (the last conv leads to vit_width), got "
                f"{len(self.stem_kernels)} and {len(self.stem_strides)}"
            )

    def check_camera(self, name: str, height: int, width: int) -> None:
        """Raise `ConfigError` for images whose tokens cannot be merged."""
        rows, columns = self.grid(height, width)
        if min(rows, columns) < 1 or rows % self.merge or columns % self.merge:
            raise ConfigError(
                f"camera {name} ({height}x{width} px) yields {rows}x{columns} image tokens, which "
                f"policy.merge={self.merge} does not divide: change merge, the stem strides or the "
                "image size"
            )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens before merging for an image of that size (pixels)."""
        if not self.stem_channels:
            return height // self.patch_size, width // self.patch_size
        for k, s in zip(self.stem_kernels, self.stem_strides, strict=True):
            height, width = ((x + 2 * conv_padding(k, s) - k) // s + 1 for x in (height, width))
        return height, width


def conv_padding(kernel: int, stride: int) -> int:
    return (kernel - stride + 1) // 2


_NANO_CHOICES = {
    "decoding": ("parallel", "autoregressive"),
    "bin_range": BIN_RANGES,
    "bin_spacing": BIN_SPACINGS,
    "deterministic_mode": ("argmax", "mean"),
}


@dataclass
class NanoVLAConfig(TrunkConfig):
    """Sizes and choices of a `NanoVLA`: those of its trunk and those of the action tokens."""

    # bins of each action dimension
    action_bins: int = 33
    bin_range: str = "bounds"  # bounds | minmax | quantile: what the end bins stand for
    bin_spacing: str = "uniform"  # uniform | power: power is finer around the middle
    # exponent of the spacing power
    bin_power: float = 2.0
    binary_gripper: bool = False  # gripper dimensions get two bins, the ends of their range
    decoding: str = "parallel"  # parallel | autoregressive
    # one action position per control step instead of one per action dimension
    tokens_per_step: bool = True
    # loss and sampling
    label_smoothing: float = 0.0  # share of the target that is spread over all bins
    # Gaussian soft labels over neighbouring bins, in bins; 0: hard ones
    # (docs/explanation/learning.md)
    soft_label_sigma: float = 1.0
    temperature: float = 1.0  # of sampling and of every reported log-prob
    # of sampling, between the control steps of a chunk (`trunk.chunk_uniforms`); null: 0.8 in
    # parallel decoding, else 0
    noise_correlation: float | None = None
    deterministic_mode: str = "argmax"  # argmax | mean (of the bin distribution)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, _NANO_CHOICES)
        if self.action_bins < 2:
            raise ConfigError(f"policy.action_bins is {self.action_bins}, it must be at least 2")
        if (
            not self.bin_power > 0
            or not 0.0 <= self.label_smoothing < 1.0
            or self.soft_label_sigma < 0
        ):
            raise ConfigError(
                "policy needs bin_power > 0, 0 <= label_smoothing < 1 and soft_label_sigma >= 0, "
                f"got {self.bin_power}, {self.label_smoothing} and {self.soft_label_sigma}"
            )
        if self.noise_correlation is None:
            self.noise_correlation = 0.8 if self.decoding == "parallel" else 0.0
        require_correlation(self.noise_correlation, self.decoding)
        if not self.temperature > 0:
            raise ConfigError(
                f"policy.temperature is {self.temperature}, it must be above 0 (for no sampling "
                "act with deterministic=True)"
            )

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return correlated_axes(self)


LEARNED_NOISE = "flow_noise"
_LEROBOT_CHOICES = {
    "action_range": ("data", "bounds"),
    "sampler": ("flow_sde", "flow_cps", LEARNED_NOISE),
    "stochastic_steps": ("all", "one"),
}


@dataclass
class LeRobotConfig:
    """A checkpoint of lerobot, or a new policy of one of its families.

    ``checkpoint``: a folder in lerobot's form; empty builds a new policy of ``family`` for the
    robot and the data at hand. ``options``: lerobot's own settings of that family as
    ``key:value`` (``[n_action_steps:8]``). ``sizes``: of a new π0 or π0.5 that is not to have
    the published ones (`policies.lerobot.sizes.PUBLISHED` has their names); lerobot cannot load
    it. ``chunk_length``: control steps the model predicts; a checkpoint has its own, and
    another number is refused. ``cameras``: ``feature:camera``, which camera of the robot a
    checkpoint's image feature is ("none": leave it out, where the family allows it); empty
    where the names are the same. ``vlm``: a folder with config and tokenizer of the language
    backbone, for machines without the hub; "nano" is a tokenizer of some hundred words made
    here, for new π0, π0.5 and X-VLA policies. ``action_range``: data, lerobot's own
    normalisation of the family; bounds, ±1 are the robot's bounds, so that noise moves the arm
    as far whatever the demonstrations did. How a chain is sampled: ``denoising_steps`` (0: the
    checkpoint's number); ``sampler`` flow_sde or flow_cps for a flow (a diffusion policy has
    its scheduler, which ``options=[noise_scheduler_type:DDIM]`` changes); ``noise_level``, η of
    DDIM or a of the flow forms (None: 1 and 0.5); ``min_std`` and ``max_std`` (0: none), limits
    of each step's standard deviation in normalised units. How it is learned from:
    ``trained_steps`` last steps (0: all), ``advantage_discount``, ``clip_base`` and
    ``clip_rate`` over them, as in `policies.denoising`. ``repeat_observation`` lets a policy
    that was trained on several past frames act on copies of the present one.
    """

    checkpoint: str = ""
    # family of a new policy, such as act, diffusion, smolvla
    family: str = "act"
    options: list[str] = field(default_factory=list)
    # of a new pi0 or pi05 that is not to have the published ones, such as {width: 64, depth: 4}
    sizes: dict[str, int] = field(default_factory=dict)
    # data | bounds: what a new policy's actions are normalised by
    action_range: str = "data"
    chunk_length: int = 8
    cameras: list[str] = field(default_factory=list)
    # folder of the language backbone's config and tokenizer; "nano": a small tokenizer made here
    vlm: str = ""
    # noisy chunks per demonstration and update; they share one pass of the prefix (of a flow)
    noise_samples: int = 1
    # steps of the chain; 0: the checkpoint's number
    denoising_steps: int = 0
    # flow_sde | flow_cps | flow_noise, for a flow
    sampler: str = "flow_sde"
    # all | one: which steps of a decision are noisy and learned from; one: drawn anew each time
    stochastic_steps: str = "all"
    # limits of flow_noise's standard deviation
    learned_std_low: float = 0.08
    # as above
    learned_std_high: float = 0.16
    # η of DDIM, or a of the flow forms; null: 1 and 0.5
    noise_level: float | None = None
    # of the step noise, between the control steps of a chunk; ratios of token or step level alone
    noise_correlation: float = 0.0
    # least standard deviation of a step, in normalised units; 0: no limit
    min_std: float = 0.05
    # largest one; 0: no limit
    max_std: float = 0.0
    # last steps that RL trains; 0: all
    trained_steps: int = 0
    # RL leaves what encodes pictures and words as it is
    freeze_prefix: bool = False
    # of the advantage, over these steps
    advantage_discount: float = 1.0
    # as that of a denoising_vla
    clip_base: float = 1.0
    # as that of a denoising_vla
    clip_rate: float = 3.0
    repeat_observation: bool = False
    explores_by: ClassVar = "min_std"

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return correlated_axes(self)

    @property
    def words(self) -> str:
        """The folder of the language backbone, "" where lerobot's own name of it holds."""
        return str(NANO_WORDS) if self.vlm == "nano" else self.vlm

    def __post_init__(self) -> None:
        require_correlation(self.noise_correlation)
        require_choices(self, _LEROBOT_CHOICES)
        require_positive(self, "noise_samples")
        if self.family not in LEROBOT:
            raise ConfigError(
                f"policy.family is {self.family!r}, choose one of {', '.join(LEROBOT)}"
            )
        if not 0.0 < self.learned_std_low < self.learned_std_high:
            raise ConfigError(
                f"policy.learned_std_low {self.learned_std_low} and learned_std_high "
                f"{self.learned_std_high} must be positive and in this order"
            )
        if self.sampler == LEARNED_NOISE and self.stochastic_steps == "one":
            raise ConfigError(
                f"policy.stochastic_steps=one does not go with policy.sampler={LEARNED_NOISE}, "
                "whose likelihood joins all steps: set stochastic_steps=all"
            )
        if self.chunk_length < 1:
            raise ConfigError(f"policy.chunk_length is {self.chunk_length}, it must be at least 1")
        if not self.min_std > 0:
            raise ConfigError(
                f"policy.min_std is {self.min_std}, it must be above 0: a step without noise has "
                "no likelihood"
            )
        for name in ("denoising_steps", "max_std", "trained_steps", "clip_rate", "noise_level"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(
                    f"policy.{name} is {getattr(self, name)}, it must not be negative"
                )
        for name in ("advantage_discount", "clip_base"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"policy.{name} is {getattr(self, name)}, it must lie in (0, 1]")
        require_sizes("pi0" if self.checkpoint else self.family, self.sizes)
        for name in ("options", "cameras"):
            wrong = [text for text in getattr(self, name) if ":" not in text]
            if wrong:
                raise ConfigError(f"policy.{name} has {wrong[0]!r}, write each entry as name:value")

    def check_machine(self) -> None:
        """Raise `UserError` where lerobot is not installed, or what it imports and reads only
        once it builds this family."""
        words = ("num2words",) if self.family == "smolvla" and not self.checkpoint else ()
        require_packages(
            "lerobot",
            *words,
            extra="lerobot",
            purpose=f"policy=lerobot policy.family={self.family}",
        )
        from policies.lerobot.needs import require_checkpoint, require_family, require_language

        if self.checkpoint:
            require_checkpoint(self.checkpoint, self.words)
        else:
            require_family(self.family)
            require_language(self.family, self.words, self.option_values())

    def option_values(self) -> dict[str, Any]:
        """``options`` with their values read as JSON where they are JSON, else as text."""
        values: dict[str, Any] = {}
        for key, _, text in (option.partition(":") for option in self.options):
            try:
                values[key] = json.loads(text)
            except json.JSONDecodeError:
                values[key] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
        return values


@dataclass
class SmallConfig:
    """``pixels`` per side that every camera is pooled to; ``noise``: std of the Gaussian when
    acting, in half-ranges."""

    # control steps that one decision predicts
    chunk_length: int = 4
    # widths of the layers
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    # per side that every camera is pooled to
    pixels: int = 16
    # std of the Gaussian when acting, in half-ranges
    noise: float = 0.2
    explores_by: ClassVar = "noise"

    def __post_init__(self) -> None:
        if (
            self.chunk_length < 1
            or self.pixels < 1
            or not self.hidden
            or min(self.hidden) < 1
            or self.noise < 0
        ):
            raise ConfigError(
                "policy small needs chunk_length >= 1, pixels >= 1, at least one hidden width >= 1 "
                f"and noise >= 0, got {self.chunk_length}, {self.pixels}, {list(self.hidden)} and "
                f"{self.noise}"
            )
