"""The options of the policies, apart from the code that computes: reading and checking a config
needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from policies.lerobot.families import FAMILIES as LEROBOT
from policies.lerobot.sizes import require_sizes
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError, require_packages

if TYPE_CHECKING:
    from vla_rl.types import EmbodimentSpec

NANO_WORDS = Path(__file__).parent / "lerobot" / "nano"
BIN_RANGES = ("bounds", "minmax", "quantile")
BIN_SPACINGS = ("uniform", "power")
LEARNED_NOISE = "flow_noise"
FLOWS = ("flow_sde", LEARNED_NOISE, "flow_cps")


def require_correlation(value: float, decoding: str) -> None:
    if value and decoding == "autoregressive":
        raise ConfigError(
            f"policy.noise_correlation is {value} with policy.decoding=autoregressive: a later "
            "token is drawn given the earlier ones, and noise that it shares with them changes "
            "that distribution, so that its log-prob would be wrong and the gradient biased. Set "
            "policy.noise_correlation=0, or policy.decoding=parallel"
        )


def require_learned_noise(config: Any) -> None:
    """What the options of `LEARNED_NOISE` must be to each other, in any policy that denoises."""
    if config.sampler == LEARNED_NOISE and config.stochastic_steps == "one":
        raise ConfigError(
            f"policy.stochastic_steps=one does not go with policy.sampler={LEARNED_NOISE}, whose "
            "likelihood joins all steps: set policy.stochastic_steps=all"
        )
    if not config.learned_std_low < config.learned_std_high:
        raise ConfigError(
            f"policy.learned_std_low={config.learned_std_low:g} must lie below "
            f"policy.learned_std_high={config.learned_std_high:g}"
        )


def correlated_axes(config: Any) -> tuple[str, ...]:
    """Log-prob axes along which a policy's ``noise_correlation`` ties the samples of one
    decision together."""
    return ("control_step",) if config.noise_correlation and config.chunk_length > 1 else ()


@dataclass
class TrunkConfig(Bounded, place="policy"):
    """Sizes and choices of a `VisionLanguageTrunk`. Lengths are counts; nothing here depends on
    the robot."""

    # control steps that one decision predicts
    chunk_length: int = bound(8, ge=1)
    # which of the embodiment's cameras to read; empty: all
    cameras: list[str] = several([], once=True)
    # read proprioception
    use_proprio: bool = True
    # vision's convs before the one to vit_width; empty: patches
    stem_channels: list[int] = several([32, 64], ge=1)
    # pixels of each conv's kernel, one more than stem_channels
    stem_kernels: list[int] = several([8, 3, 3], ge=1)
    # pixels of each conv's stride
    stem_strides: list[int] = several([4, 2, 2], ge=1)
    # over channels, after each conv
    stem_norm: str = bound("layer", choices=("layer", "none"))
    patch_size: int = bound(14, ge=1)  # used where stem_channels is empty
    # channels of an image token
    vit_width: int = bound(128, ge=1)
    # transformer layers
    vit_depth: int = bound(1, ge=0)
    # attention heads
    vit_heads: int = bound(4, ge=1)
    # width of its MLP, in vit_width
    vit_mlp_ratio: float = bound(2.0, gt=0)
    merge: int = bound(2, ge=1)  # merge x merge neighbouring image tokens become one
    share_vision: bool = True  # one vision tower for all cameras
    film: bool = False  # the instruction's words scale and shift the channels of the stem (`FiLM`)
    # how image tokens are standardised, see `FeatureNorm`
    feature_norm: str = bound("position", choices=("position", "batch", "none"))
    # RL then keeps each decision's image tokens instead of encoding its images again
    freeze_vision_in_rl: bool = True
    # language model
    instruction_length: int = bound(16, ge=1)  # words read of an instruction
    # tokens that the words are pooled into; 0: one per word, padding included
    instruction_tokens: int = bound(4, ge=0)
    hash_buckets: int = bound(128, ge=1)  # for words outside the vocabulary
    # channels of a token
    llm_width: int = bound(128, ge=1)
    # transformer layers
    llm_depth: int = bound(3, ge=1)
    # attention heads
    llm_heads: int = bound(4, ge=1)
    # width of its MLP
    llm_mlp: int = bound(352, ge=1)
    # base of the rotary embedding
    rope_theta: float = bound(10000.0, gt=0)
    # share of activations that training drops
    dropout: float = bound(0.0, ge=0, lt=1)
    # heads
    value_head: bool = True  # predict the value of a state, for algorithms without a critic
    value_gradient: bool = True  # the value loss reaches the trunk
    # auto: bfloat16 autocast where the hardware multiplies it natively, else float32
    precision: str = bound("auto", choices=("auto", "float32", "bfloat16"))
    # torch.compile the forward pass: the first calls take minutes
    compile: bool = False
    # compute activations again in the backward: less memory, slower
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for width, heads in (("vit_width", "vit_heads"), ("llm_width", "llm_heads")):
            if getattr(self, width) % getattr(self, heads):
                raise ConfigError(
                    f"policy.{width}={getattr(self, width)} is not divisible by "
                    f"policy.{heads}={getattr(self, heads)}"
                )
        if (self.llm_width // self.llm_heads) % 2:
            raise ConfigError(
                f"policy.llm_width / policy.llm_heads is {self.llm_width // self.llm_heads}, "
                "rotary embeddings need it even"
            )
        if self.film and not self.stem_channels:
            raise ConfigError(
                "policy.film=true scales the stem, and policy.stem_channels is empty: name some"
            )
        convs = len(self.stem_channels) + 1
        if self.stem_channels and not len(self.stem_kernels) == len(self.stem_strides) == convs:
            raise ConfigError(
                f"policy.stem_channels has {len(self.stem_channels)} entries, so "
                f"policy.stem_kernels and policy.stem_strides need {convs} each (the last conv "
                f"leads to vit_width), got {len(self.stem_kernels)} and {len(self.stem_strides)}"
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


@dataclass
class NanoVLAConfig(TrunkConfig):
    """Sizes and choices of a `NanoVLA`: those of its trunk and those of the action tokens."""

    # bins of each action dimension
    action_bins: int = bound(33, ge=2)
    # what the end bins stand for
    bin_range: str = bound("bounds", choices=BIN_RANGES)
    # power is finer around the middle
    bin_spacing: str = bound("uniform", choices=BIN_SPACINGS)
    # exponent of the spacing power
    bin_power: float = bound(2.0, gt=0)
    binary_gripper: bool = False  # gripper dimensions get two bins, the ends of their range
    # all action tokens at once, or one after the other
    decoding: str = bound("parallel", choices=("parallel", "autoregressive"))
    # one action position per control step instead of one per action dimension
    tokens_per_step: bool = True
    # loss and sampling
    # share of the target that is spread over all bins
    label_smoothing: float = bound(0.0, ge=0, lt=1)
    # Gaussian soft labels over neighbouring bins, in bins; 0: hard ones
    # (docs/explanation/learning.md)
    soft_label_sigma: float = bound(1.0, ge=0)
    # of sampling and of every reported log-prob
    temperature: float = bound(1.0, gt=0, hint="for no sampling act with deterministic=True")
    # of sampling, between the control steps of a chunk (`trunk.chunk_uniforms`); null: 0.8 in
    # parallel decoding, else 0
    noise_correlation: float | None = bound(None, ge=0, lt=1)
    # of the bin distribution; mirror: argmax, averaged with that of what the robot's mirror shows
    deterministic_mode: str = bound("argmax", choices=("argmax", "mean", "mirror"))
    # the logits of what it sees and of what the robot's mirror shows are averaged, as it learns and
    # as it acts; twice the work
    symmetric: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_correlation is None:
            self.noise_correlation = 0.8 if self.decoding == "parallel" else 0.0
        require_correlation(self.noise_correlation, self.decoding)
        if self.symmetric and self.decoding == "autoregressive":
            raise ConfigError(
                "policy.symmetric=true averages the logits of two views, and with "
                "policy.decoding=autoregressive each view would go on from its own tokens: set "
                "policy.decoding=parallel"
            )

    def check_robot(self, robot: EmbodimentSpec) -> None:
        """Raise `ConfigError` for one without the mirror that is asked for."""
        if self.deterministic_mode == "mirror":
            robot.require_mirror(
                "policy.deterministic_mode=mirror", "policy.deterministic_mode=argmax"
            )
        if self.symmetric:
            robot.require_mirror("policy.symmetric=true", "policy.symmetric=false")

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return correlated_axes(self)


@dataclass
class LeRobotConfig(Bounded, place="policy"):
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
    ``clip_rate`` over them, as in `policies.denoising`. ``improvement`` and
    ``improvement_dropout`` are RECAP's (`policies.lerobot.improvement`). ``repeat_observation`` lets a policy
    that was trained on several past frames act on copies of the present one.
    """

    checkpoint: str = ""
    # family of a new policy, such as act, diffusion, smolvla
    family: str = bound("act", choices=tuple(LEROBOT))
    options: list[str] = field(default_factory=list)
    # of a new pi0 or pi05 that is not to have the published ones, such as {width: 64, depth: 4}
    sizes: dict[str, int] = field(default_factory=dict)
    # what a new policy's actions are normalised by
    action_range: str = bound("data", choices=("data", "bounds"))
    chunk_length: int = bound(8, ge=1)
    cameras: list[str] = field(default_factory=list)
    # folder of the language backbone's config and tokenizer; "nano": a small tokenizer made here
    vlm: str = ""
    # noisy chunks per demonstration and update; they share one pass of the prefix (of a flow)
    noise_samples: int = bound(1, ge=1)
    # steps of the chain; 0: the checkpoint's number
    denoising_steps: int = bound(0, ge=0)
    # of a flow
    sampler: str = bound("flow_sde", choices=FLOWS)
    # which steps of a decision are noisy and learned from; one: drawn anew each time
    stochastic_steps: str = bound("all", choices=("all", "one"))
    # least standard deviation of flow_noise
    learned_std_low: float = bound(0.08, gt=0)
    # largest one
    learned_std_high: float = bound(0.16, gt=0)
    # η of DDIM, or a of the flow forms; null: 1 and 0.5
    noise_level: float | None = bound(None, ge=0)
    # of the step noise, between the control steps of a chunk; ratios of token or step level alone
    noise_correlation: float = bound(0.0, ge=0, lt=1)
    # least standard deviation of a step, in normalised units; 0: no limit
    min_std: float = bound(0.05, gt=0, hint="a step without noise has no likelihood")
    # largest one; 0: no limit
    max_std: float = bound(0.0, ge=0)
    # last steps that RL trains; 0: all
    trained_steps: int = bound(0, ge=0)
    # RL leaves what encodes pictures and words as it is
    freeze_prefix: bool = False
    # of the advantage, over these steps
    advantage_discount: float = bound(1.0, gt=0, le=1)
    # as that of a denoising_vla
    clip_base: float = bound(1.0, gt=0, le=1)
    # as that of a denoising_vla
    clip_rate: float = bound(3.0, ge=0)
    # w of the velocity (1 − w) · v + w · v_told that acts, told "Advantage: positive" (RECAP); 0: it
    # is told nothing of that, in imitation either
    improvement: float = bound(0.0, ge=0)
    # share of what is imitated that is told nothing of it
    improvement_dropout: float = bound(0.3, ge=0, le=1)
    # 0: no LoRA, the weights themselves are trained
    lora_rank: int = bound(0, ge=0)
    # 0: the rank, as openpi
    lora_alpha: int = bound(0, ge=0)
    # last parts of the names of linear layers; empty: those of attention and MLP
    lora_targets: list[str] = field(default_factory=list)
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
        super().__post_init__()
        require_learned_noise(self)
        require_sizes("pi0" if self.checkpoint else self.family, self.sizes)
        for name in ("options", "cameras"):
            wrong = [text for text in getattr(self, name) if ":" not in text]
            if wrong:
                raise ConfigError(f"policy.{name} has {wrong[0]!r}, write each entry as name:value")
        if self.lora_rank and not self.checkpoint:
            raise ConfigError(
                f"policy.lora_rank={self.lora_rank} adapts weights that are there, and a new "
                f"{self.family} has random ones: set policy.checkpoint, or policy.lora_rank=0"
            )

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
        if self.lora_rank:
            purpose = f"LoRA (policy.lora_rank={self.lora_rank})"
            require_packages("peft", extra="peft", purpose=purpose)
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
class SmallConfig(Bounded, place="policy"):
    """``pixels`` per side that every camera is pooled to; ``noise``: std of the Gaussian when
    acting, in half-ranges."""

    # control steps that one decision predicts
    chunk_length: int = bound(4, ge=1)
    # widths of the layers
    hidden: list[int] = several([256, 256], ge=1, least=1)
    # per side that every camera is pooled to
    pixels: int = bound(16, ge=1)
    # std of the Gaussian when acting, in half-ranges; "gaussian" has a spread of its own
    noise: float = bound(0.2, ge=0)
    # "gaussian", squashed by tanh, for SAC and Cal-QL
    distribution: str = bound("deterministic", choices=("deterministic", "gaussian"))

    @property
    def explores_by(self) -> str:
        """The option that makes samples differ more; "": they do as the algorithm has taught it."""
        return "noise" if self.distribution == "deterministic" else ""
