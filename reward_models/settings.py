"""The options of the reward models, apart from the code that computes: reading and checking a
config needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from reward_models.milestones import MilestoneConfig
from reward_models.vlac_texts import IMAGE
from vla_rl.devices import check_device
from vla_rl.errors import ConfigError

ENCODERS = ("pooled", "timm", "vjepa2", "policy")
MODES = ("potential", "delta", "final")
GAMMA_OF_ALGORITHM = -1.0
VALUE_MODES = ("always", "mixed", "exact")
SPACES = ("raw", "standardised", "cosine")
CLUSTERS = ("mean", "dbscan", "kmeans", "nearest")
NORMALISE = ("minmax", "zscore")
SCOPES = ("group", "task_local", "task_global", "buffer")
ALL_FAIL = ("binary", "buffer")
CURVES = ("steps", "anchored")
_SLOTS = {
    "pair_template": ("{task}",),
    "done_template": ("{task}",),
    "reference_template": ("{task}", "{frames}"),
    "reference_frame_template": ("{percent}",),
    "chat_template": ("{system}", "{question}"),
}
_ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


@dataclass
class TaskSuccessConfig:
    """``coefficient`` is the reward of a success (SimpleVLA-RL: 5). ``time_discount`` < 1
    multiplies it by ``time_discount ** control_steps``, so that faster successes earn more."""

    coefficient: float = 1.0
    time_discount: float = 1.0

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ConfigError(
                f"reward.coefficient={self.coefficient} does not pay for success: it "
                "must be above 0"
            )
        if not 0.0 < self.time_discount <= 1.0:
            raise ConfigError(f"reward.time_discount must be in (0, 1], got {self.time_discount}")


@dataclass
class EncoderConfig:
    """``type`` pooled, timm, vjepa2 or policy. ``checkpoint``: a transformers folder (vjepa2), or a
    timm state dict.

    pooled: ``grid`` × ``grid`` mean colours in each of ``segments`` equal parts of the clip and in
    its last frame. timm: ``model`` is timm's name; features are averaged over each segment. vjepa2:
    ``num_frames`` (0: the checkpoint's own) are drawn from the clip; the short side is scaled to
    crop · 256/224 and the centre cropped, the crop being the checkpoint's. ``batch_size`` clips
    (vjepa2) or frames (others) go through at once. ``device`` auto, cpu or cuda.
    """

    type: str = "pooled"
    checkpoint: str = ""
    model: str = "vit_small_patch16_224"  # timm's name of the image model
    grid: int = 8  # colours per side of a frame (pooled)
    segments: int = 4  # equal parts of a clip
    num_frames: int = 0  # frames of a clip (vjepa2); 0: the checkpoint's
    batch_size: int = 16
    device: str = "auto"
    half_precision: bool = True  # on CUDA alone

    def __post_init__(self) -> None:
        if self.type not in ENCODERS:
            raise ConfigError(
                f"reward.encoder.type is {self.type!r}, choose one of {', '.join(ENCODERS)}"
            )
        check_device(self.device, "reward.encoder.device")
        for name in ("grid", "segments", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"reward.encoder.{name} is {getattr(self, name)}, it must be at least 1"
                )
        if self.num_frames < 0:
            raise ConfigError(
                f"reward.encoder.num_frames is {self.num_frames}, it must be >= 0 (0: "
                "the checkpoint's own)"
            )


@dataclass
class SRPOConfig:
    """``coefficient`` multiplies every reward. A failure gets ``scale`` · sigmoid of its distance,
    ``normalise``d over the failures compared with it: minmax (``slope`` 10 in siiRL) or zscore
    (slope 1 in the paper).

    References are the successes of the same group, of the same task in this process (task_local) or
    in all processes (task_global), or of the same task in the last ``buffer_size`` successes too
    (buffer). ``cluster`` turns them into centres: mean, dbscan, kmeans (``clusters`` of them) or
    nearest (every success is one). DBSCAN works in the standardised space with the radius ``eps``
    (0: the ``eps_quantile`` of the successes' distances to their ``min_samples``-th neighbour);
    where it finds no cluster, the mean of all successes is the only centre. ``space``: where
    distances are measured. ``all_fail``: what failures get where nothing succeeded: binary (0), or
    buffer (compare with earlier successes of the task, as far as there are any). ``demonstrations``
    (at most ``buffer_size``) of the run's own demonstrations stand in the buffer when RL starts, so
    that a policy that never succeeds has something to come near to.
    """

    coefficient: float = 1.0
    # minmax | zscore
    normalise: str = "minmax"
    scale: float = 0.6  # largest reward of a failure
    slope: float = 10.0  # of the sigmoid of the distance
    # mean | dbscan | kmeans | nearest
    cluster: str = "dbscan"
    clusters: int = 3
    eps: float = 0.0  # radius of DBSCAN; 0: from eps_quantile
    eps_quantile: float = 0.9  # quantile of neighbours' distances
    min_samples: int = 2  # neighbours of DBSCAN
    # raw | standardised | cosine: where distances are measured
    space: str = "raw"
    # group | task_local | task_global | buffer: whose successes are references
    reference_scope: str = "task_local"
    # binary | buffer: what failures get where nothing succeeded
    all_fail: str = "binary"
    buffer_size: int = 64
    demonstrations: int = 0
    # the camera that is compared; empty: the first
    camera: str = ""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)

    def __post_init__(self) -> None:
        for name, choices in (
            ("normalise", NORMALISE),
            ("cluster", CLUSTERS),
            ("space", SPACES),
            ("reference_scope", SCOPES),
            ("all_fail", ALL_FAIL),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"reward.{name} is {getattr(self, name)!r}, choose one of {', '.join(choices)}"
                )
        if not self.coefficient > 0:
            raise ConfigError(
                f"reward.coefficient={self.coefficient} does not pay for success: it "
                "must be above 0"
            )
        if (
            not 0.0 <= self.scale <= 1.0
            or self.slope <= 0
            or self.eps < 0
            or not 0.0 <= self.eps_quantile <= 1.0
        ):
            raise ConfigError(
                "reward needs 0 <= scale <= 1 (a failure must not earn more than a success), slope "
                f"> 0, eps >= 0 and 0 <= eps_quantile <= 1, got {self.scale}, {self.slope}, "
                f"{self.eps} and {self.eps_quantile}"
            )
        if not 0 <= self.demonstrations <= self.buffer_size:
            raise ConfigError(
                f"reward.demonstrations is {self.demonstrations}, it must lie between 0 and "
                f"reward.buffer_size ({self.buffer_size})"
            )
        if self.demonstrations and self.all_fail == "binary" and self.reference_scope != "buffer":
            raise ConfigError(
                "reward.demonstrations stand in the buffer, which nothing reads: set "
                "reward.all_fail=buffer (where nothing succeeded) or reward.reference_scope=buffer "
                "(always)"
            )
        if self.clusters < 1 or self.min_samples < 1 or self.buffer_size < 1:
            raise ConfigError(
                f"reward needs clusters, min_samples and buffer_size >= 1, got {self.clusters}, "
                f"{self.min_samples} and {self.buffer_size}"
            )


@dataclass
class ShapingConfig:
    """How progress pays. ``success_coefficient`` is added for a success, on the last decision.

    ``mode``: "potential" pays γ·Φ(s′) − Φ(s) with Φ = 0 at the end, which leaves every policy's
    rank as it is (Ng, Harada and Russell 1999; the end: Grześ 2017); "delta" pays Φ(s′) − Φ(s)
    (VLAC); "final" pays Φ of the end once (trajectory level, as SRPO). Only "potential" cannot be
    exploited. ``weight`` multiplies what progress pays. ``gamma`` is the algorithm's discount (-1:
    taken from it), per control step where ``gamma_per_control_step``. ``truncated_end``: Φ where
    time ran out, "zero" or "keep"; it must be "keep" exactly where the algorithm bootstraps there
    ("auto": taken from it).
    """

    mode: str = "potential"
    weight: float = 1.0
    success_coefficient: float = 1.0
    gamma: float = GAMMA_OF_ALGORITHM  # discount; -1: the algorithm's
    gamma_per_control_step: bool = False  # per control step, not per decision
    truncated_end: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"reward.shaping.mode is {self.mode!r}, choose one of {', '.join(MODES)}"
            )
        if self.truncated_end not in ("auto", "zero", "keep"):
            raise ConfigError(
                f"reward.shaping.truncated_end is {self.truncated_end!r}, choose one "
                "of auto, zero, keep"
            )
        if (
            self.weight < 0
            or self.success_coefficient < 0
            or not (self.weight or self.success_coefficient)
        ):
            raise ConfigError(
                "reward.shaping needs weight and success_coefficient >= 0, and one of them above "
                f"0, or nothing is paid; got {self.weight} and {self.success_coefficient}"
            )
        if not (self.gamma == GAMMA_OF_ALGORITHM or 0.0 <= self.gamma <= 1.0):
            raise ConfigError(
                f"reward.shaping.gamma is {self.gamma}, it must lie in [0, 1], or be "
                "-1 for the algorithm's"
            )


@dataclass
class NetworkConfig:
    """``cameras``: which to read (empty: all). ``backbone`` "conv" is a small network trained with
    the head, on images resized to ``image_size``; any other value is timm's name of an image model,
    used frozen, with the weights of ``backbone_checkpoint`` (without: random ones). ``use_proprio``
    also reads proprioception, ``use_text`` the instruction.
    """

    cameras: list[str] = field(default_factory=list)
    backbone: str = "conv"  # conv: a small network of its own; else timm's name of a frozen one
    backbone_checkpoint: str = ""  # its weights; empty: random
    image_size: int = 64  # pixels per side
    # channels of its features
    width: int = 96
    use_proprio: bool = False  # read proprioception
    use_text: bool = True  # read the instruction

    def __post_init__(self) -> None:
        if self.image_size < 16 or self.width < 8:
            raise ConfigError(
                f"reward.network needs image_size >= 16 and width >= 8, got {self.image_size} and "
                f"{self.width}"
            )


@dataclass
class LearnedConfig:
    """``checkpoint``: a folder that ``vla-rl reward fit`` wrote ("": train within the run, on its
    demonstrations and on rollouts of the policy it starts from). ``updates`` of ``batch_size``
    samples with AdamW; ``refit_updates`` where an already trained model is trained on. ``device``
    auto, cpu or cuda."""

    checkpoint: str = ""
    updates: int = 600  # updates of a training
    refit_updates: int = 150  # updates of a further training
    batch_size: int = 64  # samples of one update
    # of AdamW
    learning_rate: float = 1e-3
    # of AdamW
    weight_decay: float = 0.01
    device: str = "auto"
    # of its first weights and its batches; 0: the run's seed
    seed: int = 0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)

    def __post_init__(self) -> None:
        if (
            self.updates < 1
            or self.refit_updates < 1
            or self.batch_size < 1
            or not self.learning_rate > 0
        ):
            raise ConfigError(
                "reward needs updates, refit_updates and batch_size >= 1 and learning_rate > 0, "
                f"got {self.updates}, {self.refit_updates}, {self.batch_size} and "
                f"{self.learning_rate}"
            )
        if self.weight_decay < 0:
            raise ConfigError(f"reward.weight_decay={self.weight_decay} must be 0 or more")
        check_device(self.device, "reward.device")


@dataclass
class PairwiseConfig(LearnedConfig):
    """``curve``: "steps" accumulates the critic from frame to frame in ``value_mode`` (always,
    mixed, exact; see `accumulate`), with critic values in [-``negative_dead_zone``,
    ``positive_dead_zone``] percent taken as 0; "anchored" compares each frame with the first one.
    ``done_weight`` is the share of the done head in progress.

    ``wrong_instruction_share`` of the samples show an instruction of another task of the data, or
    one of ``wrong_instructions`` where the data has one task only.
    """

    curve: str = "anchored"  # steps | anchored: compare neighbours, or each with the first
    value_mode: str = "mixed"  # always | mixed | exact: how steps add up
    # percent up to which a rise counts as nothing
    positive_dead_zone: float = 0.0
    # percent up to which a fall counts as nothing
    negative_dead_zone: float = 0.0
    done_weight: float = 0.5
    wrong_instruction_share: float = 0.05  # share of samples with a wrong one
    wrong_instructions: list[str] = field(
        default_factory=lambda: [
            "pour the water into the cup",
            "close the top drawer",
            "fold the towel in half",
        ]
    )
    # failed rollouts must not show progress from any frame to their end
    failure_pairs: bool = True
    shaping: ShapingConfig = field(default_factory=lambda: ShapingConfig(mode="delta"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("curve", CURVES), ("value_mode", VALUE_MODES)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"reward.{name} is {getattr(self, name)!r}, choose one of {', '.join(choices)}"
                )
        for name in ("done_weight", "wrong_instruction_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"reward.{name} is {getattr(self, name)}, it must lie in [0, 1]")
        if self.positive_dead_zone < 0 or self.negative_dead_zone < 0:
            raise ConfigError(
                "reward.positive_dead_zone and negative_dead_zone must be >= 0, got "
                f"{self.positive_dead_zone} and {self.negative_dead_zone}"
            )


@dataclass
class ProcessConfig(LearnedConfig):
    """``seconds_per_frame``: time between the frames that are labelled (0: from
    ``reward_data.stride`` and the control rate). ``done_weight``: share of the done head in
    progress. ``milestones``: how labels are made."""

    seconds_per_frame: float = 0.0
    done_weight: float = 0.5
    milestones: MilestoneConfig = field(default_factory=MilestoneConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.done_weight <= 1.0 or self.seconds_per_frame < 0:
            raise ConfigError(
                "reward needs 0 <= done_weight <= 1 and seconds_per_frame >= 0, got "
                f"{self.done_weight} and {self.seconds_per_frame}"
            )


@dataclass
class ClassifierConfig(LearnedConfig):
    """``threshold``: probability from which an end counts as a success (0: chosen on a held-out
    ``held_out_share`` of the trajectories). By default the judgement is the only reward: success as
    the simulator sees it adds nothing."""

    threshold: float = 0.0  # probability that counts as success; 0: chosen on held-out ends
    held_out_share: float = 0.2  # share of trajectories held out for it
    shaping: ShapingConfig = field(
        default_factory=lambda: ShapingConfig(mode="final", success_coefficient=0.0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.threshold < 1.0 or not 0.0 < self.held_out_share < 1.0:
            raise ConfigError(
                f"reward needs 0 <= threshold < 1 and 0 < held_out_share < 1, got {self.threshold} "
                f"and {self.held_out_share}"
            )


@dataclass
class ValueProgressConfig(LearnedConfig):
    """``bins`` of the distribution over [0, 1]; ``end_value`` is the value of a success at its
    start (γ is chosen from it, relative to each trajectory's length, so that slow and fast ones
    agree). ``drop_window`` decisions and ``drop_threshold`` of the demonstration filter."""

    bins: int = 51  # of the distribution over [0, 1]
    end_value: float = 0.2  # value of a success at its start
    # share of samples in which a success that is cut off early counts as a failure
    hindsight_share: float = 0.1
    drop_window: int = 4  # decisions of the filter's window
    drop_threshold: float = 0.1  # fall of the value in it that drops them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 2 or not 0.0 < self.end_value < 1.0 or not 0.0 <= self.hindsight_share < 1.0:
            raise ConfigError(
                "reward needs bins >= 2, 0 < end_value < 1 and 0 <= hindsight_share < 1, got "
                f"{self.bins}, {self.end_value} and {self.hindsight_share}"
            )
        if self.drop_window < 1 or self.drop_threshold < 0:
            raise ConfigError(
                f"reward needs drop_window >= 1 and drop_threshold >= 0, got {self.drop_window} "
                f"and {self.drop_threshold}"
            )


@dataclass
class PreferenceConfig(LearnedConfig):
    """``comparisons``: the file ("": from task success). ``frames`` per trajectory are drawn for
    a comparison."""

    comparisons: str = ""
    frames: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise ConfigError(f"reward.frames is {self.frames}, it must be at least 1")


@dataclass
class VLACConfig:
    """``checkpoint``: a folder of an InternVL-type model. ``camera``: "" is the first.

    Frames ``frame_skip`` decisions apart are compared; ``value_mode`` (always, mixed, exact) turns
    the replies into a curve (`accumulate`), after critic values within the dead zones became 0.
    ``reference``: a dataset whose first successful demonstration of each task is shown as an
    example of ``reference_frames`` frames. ``batch_size`` questions are asked at once, images being
    ``image_size`` square. ``done_weight`` > 0 also asks whether each frame shows the task completed
    and mixes that into progress, answers up to ``done_threshold`` counting as 0. ``compare_last``
    compares the last frame too where it is no multiple of ``frame_skip``. More than ``max_invalid``
    invalid replies make a curve invalid (NaN).

    ``texts`` "release" takes the templates from ``release``: a folder with VLAC's code, or a file
    (see `vlac_texts`). ``reference_pair_template`` is the question where an example is shown ("":
    ``pair_template``). ``bos`` puts the tokenizer's own start token first, ``image_newline`` ends
    each image with a newline of its own (both as ms-swift, with which VLAC was trained and runs).
    ``lanczos_size`` > 0 first makes frames square with Lanczos, as VLAC's inference does; the
    resize to ``image_size`` is bicubic, as ms-swift's.
    """

    checkpoint: str = ""
    camera: str = ""
    reference: str = ""  # a dataset whose demonstration is shown; empty: none
    reference_frames: int = 9  # frames of it
    frame_skip: int = 1  # decisions between two compared frames
    value_mode: str = "mixed"  # always | mixed | exact: how replies add up
    # percent up to which a rise counts as nothing
    positive_dead_zone: float = 0.0
    # percent up to which a fall counts as nothing
    negative_dead_zone: float = 0.0
    done_weight: float = 0.0  # share of the done question in progress; 0: not asked
    done_threshold: float = 0.0  # answers up to it count as 0
    compare_last: bool = True
    batch_size: int = 10  # questions asked at once
    image_size: int = 448  # pixels per side
    lanczos_size: int = 0
    image_newline: bool = False  # end each image with a newline
    bos: bool = False  # start with the tokenizer's start token
    # tokens of a reply
    max_new_tokens: int = 12
    max_invalid: float = 0.3
    # run code that the checkpoint brings
    trust_remote_code: bool = False
    # transformers' name of the attention: sdpa, eager, flash_attention_2
    attention: str = "sdpa"
    precision: str = "bfloat16"  # on CUDA; float32 on a CPU
    # auto | cpu | cuda
    device: str = "auto"
    texts: str = "own"  # own | release
    release: str = ""
    # the system's turn, before each question
    system: str = (
        "You judge images of robots at work: where things are, and how far a task has come."
    )
    # question about two frames
    pair_template: str = (
        "Image-1: <image>\nImage-2: <image>\nCompare the two images: is the second one closer to "
        "the goal of the task? Answer with a signed percentage of what was left, + if the second "
        "is closer, - if the first is.\n<task> {task} </task> <score>"
    )
    # question whether a frame shows the task completed
    done_template: str = (
        "Image-1: <image>\nIs the task completed? Answer 1 for yes, 0 for no.\n<task> {task} "
        "</task> <done>"
    )
    # the example that is shown first
    reference_template: str = (
        "<trajectory> <task> {task} </task>:\n{frames}</trajectory>\n0% <image>\n"
    )
    # each further frame of it
    reference_frame_template: str = " {percent}% <image>\n"
    reference_pair_template: str = ""
    # how system and question become one text
    chat_template: str = (
        "<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    # text that ends a reply
    stop: str = "<|im_end|>"
    shaping: ShapingConfig = field(default_factory=lambda: ShapingConfig(mode="delta"))

    def __post_init__(self) -> None:
        for name, choices in (
            ("value_mode", VALUE_MODES),
            ("attention", _ATTENTIONS),
            ("precision", ("bfloat16", "float16", "float32")),
            ("texts", ("own", "release")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"reward.{name} is {getattr(self, name)!r}, choose one of {', '.join(choices)}"
                )
        check_device(self.device, "reward.device")
        for name in (
            "reference_frames",
            "frame_skip",
            "batch_size",
            "image_size",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"reward.{name} is {getattr(self, name)}, it must be at least 1")
        if self.lanczos_size < 0 or not 0.0 <= self.done_threshold <= 1.0:
            raise ConfigError(
                "reward needs lanczos_size >= 0 (0: none) and 0 <= done_threshold <= 1, got "
                f"{self.lanczos_size} and {self.done_threshold}"
            )
        for name, slots in _SLOTS.items():
            missing = [s for s in slots if s not in getattr(self, name)]
            if missing:
                raise ConfigError(
                    f"reward.{name} lacks the slot {missing[0]}: {getattr(self, name)!r}"
                )
        if self.pair_template.count(IMAGE) != 2 or self.done_template.count(IMAGE) != 1:
            raise ConfigError(
                f"reward.pair_template needs {IMAGE} twice and done_template once, they have it "
                f"{self.pair_template.count(IMAGE)} and {self.done_template.count(IMAGE)} times"
            )
