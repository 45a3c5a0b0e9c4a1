"""The options of the reward models, apart from the code that computes: reading and checking a
config needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reward_models.milestones import MilestoneConfig
from reward_models.vlac_texts import IMAGE
from vla_rl.bounds import Bounded, bound, told_by
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
_ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


def _needs(*slots: str, images: int | None = None) -> Callable[[str, str], None]:
    """A check of a template, which has to have these slots and shows so many images."""

    def check(text: str, key: str) -> None:
        missing = [slot for slot in slots if slot not in text]
        if missing:
            raise ConfigError(f"{key} lacks the slot {missing[0]}: {text!r}")
        if images is not None and text.count(IMAGE) != images:
            raise ConfigError(
                f"{key} has {IMAGE} {text.count(IMAGE)} times, and needs it {images} times: "
                f"{text!r}"
            )

    return check


@dataclass
class TaskSuccessConfig(Bounded, place="reward"):
    """``coefficient`` is the reward of a success (SimpleVLA-RL: 5). ``time_discount`` < 1
    multiplies it by ``time_discount ** control_steps``, so that faster successes earn more."""

    coefficient: float = bound(1.0, gt=0, hint="it pays for success")
    time_discount: float = bound(1.0, gt=0, le=1)


@dataclass
class EnvRewardConfig(Bounded, place="reward"):
    """``coefficient`` scales what the env gives (MetaWorld's: up to 10 a control step)."""

    coefficient: float = bound(1.0, gt=0)


@dataclass
class EncoderConfig(Bounded, place="reward.encoder"):
    """``type`` pooled, timm, vjepa2 or policy. ``checkpoint``: a transformers folder (vjepa2), or a
    timm state dict.

    pooled: ``grid`` × ``grid`` mean colours in each of ``segments`` equal parts of the clip and in
    its last frame. timm: ``model`` is timm's name; features are averaged over each segment. vjepa2:
    ``num_frames`` (0: the checkpoint's own) are drawn from the clip; the short side is scaled to
    crop · 256/224 and the centre cropped, the crop being the checkpoint's. ``batch_size`` clips
    (vjepa2) or frames (others) go through at once. ``device`` auto, cpu or cuda.
    """

    type: str = bound("pooled", choices=ENCODERS)
    checkpoint: str = ""
    model: str = "vit_small_patch16_224"  # timm's name of the image model
    grid: int = bound(8, ge=1)  # colours per side of a frame (pooled)
    segments: int = bound(4, ge=1)  # equal parts of a clip
    # frames of a clip (vjepa2); 0: the checkpoint's
    num_frames: int = bound(0, ge=0, hint="0: the checkpoint's own")
    batch_size: int = bound(16, ge=1)
    device: str = told_by("auto", check_device)
    half_precision: bool = True  # on CUDA alone


@dataclass
class SRPOConfig(Bounded, place="reward"):
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

    coefficient: float = bound(1.0, gt=0, hint="it pays for success")
    # how distances are scaled over the failures
    normalise: str = bound("minmax", choices=NORMALISE)
    # largest reward of a failure
    scale: float = bound(0.6, ge=0, le=1, hint="a failure must not earn more than a success")
    slope: float = bound(10.0, gt=0)  # of the sigmoid of the distance
    # how successes become centres
    cluster: str = bound("dbscan", choices=CLUSTERS)
    clusters: int = bound(3, ge=1)
    eps: float = bound(0.0, ge=0)  # radius of DBSCAN; 0: from eps_quantile
    eps_quantile: float = bound(0.9, ge=0, le=1)  # quantile of neighbours' distances
    min_samples: int = bound(2, ge=1)  # neighbours of DBSCAN
    # where distances are measured
    space: str = bound("raw", choices=SPACES)
    # whose successes are references
    reference_scope: str = bound("task_local", choices=SCOPES)
    # what failures get where nothing succeeded
    all_fail: str = bound("binary", choices=ALL_FAIL)
    buffer_size: int = bound(64, ge=1)
    demonstrations: int = bound(0, ge=0)
    # the camera that is compared; empty: the first
    camera: str = ""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstrations > self.buffer_size:
            raise ConfigError(
                f"reward.demonstrations={self.demonstrations} is out of range: it must be 0 to "
                f"reward.buffer_size={self.buffer_size}"
            )
        if self.demonstrations and self.all_fail == "binary" and self.reference_scope != "buffer":
            raise ConfigError(
                "reward.demonstrations stand in the buffer, which nothing reads: set "
                "reward.all_fail=buffer (where nothing succeeded) or reward.reference_scope=buffer "
                "(always)"
            )


@dataclass
class ShapingConfig(Bounded, place="reward.shaping"):
    """How progress pays. ``success_coefficient`` is added for a success, on the last decision.

    ``mode``: "potential" pays γ·Φ(s′) − Φ(s) with Φ = 0 at the end, which leaves every policy's
    rank as it is (Ng, Harada and Russell 1999; the end: Grześ 2017); "delta" pays Φ(s′) − Φ(s)
    (VLAC); "final" pays Φ of the end once (trajectory level, as SRPO). Only "potential" cannot be
    exploited. ``weight`` multiplies what progress pays. ``gamma`` is the algorithm's discount (-1:
    taken from it), per control step where ``gamma_per_control_step``. ``truncated_end``: Φ where
    time ran out, "zero" or "keep"; it must be "keep" exactly where the algorithm bootstraps there
    ("auto": taken from it).
    """

    mode: str = bound("potential", choices=MODES)
    weight: float = bound(1.0, ge=0)
    success_coefficient: float = bound(1.0, ge=0)
    # discount; -1: the algorithm's
    gamma: float = bound(
        GAMMA_OF_ALGORITHM, ge=0, le=1, also=[GAMMA_OF_ALGORITHM], hint="-1: the algorithm's"
    )
    gamma_per_control_step: bool = False  # per control step, not per decision
    truncated_end: str = bound("auto", choices=("auto", "zero", "keep"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.weight or self.success_coefficient):
            raise ConfigError(
                f"reward.shaping.weight={self.weight} and "
                f"reward.shaping.success_coefficient={self.success_coefficient}: one of them must "
                "be above 0, or nothing is paid"
            )


@dataclass
class NetworkConfig(Bounded, place="reward.network"):
    """``cameras``: which to read (empty: all). ``backbone`` "conv" is a small network trained with
    the head, on images resized to ``image_size``; any other value is timm's name of an image model,
    used frozen, with the weights of ``backbone_checkpoint`` (without: random ones). ``use_proprio``
    also reads proprioception, ``use_text`` the instruction.
    """

    cameras: list[str] = field(default_factory=list)
    backbone: str = "conv"  # conv: a small network of its own; else timm's name of a frozen one
    backbone_checkpoint: str = ""  # its weights; empty: random
    image_size: int = bound(64, ge=16)  # pixels per side
    # channels of its features
    width: int = bound(96, ge=8)
    use_proprio: bool = False  # read proprioception
    use_text: bool = True  # read the instruction


@dataclass
class LearnedConfig(Bounded, place="reward"):
    """``checkpoint``: a folder that ``vla-rl reward fit`` wrote ("": train within the run, on its
    demonstrations and on rollouts of the policy it starts from). ``updates`` of ``batch_size``
    samples with AdamW; ``refit_updates`` where an already trained model is trained on. ``device``
    auto, cpu or cuda."""

    checkpoint: str = ""
    updates: int = bound(600, ge=1)  # updates of a training
    refit_updates: int = bound(150, ge=1)  # updates of a further training
    batch_size: int = bound(64, ge=1)  # samples of one update
    # of AdamW
    learning_rate: float = bound(1e-3, gt=0)
    # of AdamW
    weight_decay: float = bound(0.01, ge=0)
    device: str = told_by("auto", check_device)
    # of its first weights and its batches; 0: the run's seed
    seed: int = 0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)


@dataclass
class PairwiseConfig(LearnedConfig):
    """``curve``: "steps" accumulates the critic from frame to frame in ``value_mode`` (always,
    mixed, exact; see `accumulate`), with critic values in [-``negative_dead_zone``,
    ``positive_dead_zone``] percent taken as 0; "anchored" compares each frame with the first one.
    ``done_weight`` is the share of the done head in progress.

    ``wrong_instruction_share`` of the samples show an instruction of another task of the data, or
    one of ``wrong_instructions`` where the data has one task only.
    """

    # compare neighbours, or each with the first
    curve: str = bound("anchored", choices=CURVES)
    # how steps add up
    value_mode: str = bound("mixed", choices=VALUE_MODES)
    # percent up to which a rise counts as nothing
    positive_dead_zone: float = bound(0.0, ge=0)
    # percent up to which a fall counts as nothing
    negative_dead_zone: float = bound(0.0, ge=0)
    done_weight: float = bound(0.5, ge=0, le=1)
    wrong_instruction_share: float = bound(0.05, ge=0, le=1)  # share of samples with a wrong one
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


@dataclass
class ProcessConfig(LearnedConfig):
    """``seconds_per_frame``: time between the frames that are labelled (0: from
    ``reward_data.stride`` and the control rate). ``done_weight``: share of the done head in
    progress. ``milestones``: how labels are made."""

    seconds_per_frame: float = bound(0.0, ge=0)
    done_weight: float = bound(0.5, ge=0, le=1)
    milestones: MilestoneConfig = field(default_factory=MilestoneConfig)


@dataclass
class ClassifierConfig(LearnedConfig):
    """``threshold``: probability from which an end counts as a success (0: chosen on a held-out
    ``held_out_share`` of the trajectories). By default the judgement is the only reward: success as
    the simulator sees it adds nothing."""

    # probability that counts as success; 0: chosen on held-out ends
    threshold: float = bound(0.0, ge=0, lt=1)
    held_out_share: float = bound(0.2, gt=0, lt=1)  # share of trajectories held out for it
    shaping: ShapingConfig = field(
        default_factory=lambda: ShapingConfig(mode="final", success_coefficient=0.0)
    )


@dataclass
class ValueProgressConfig(LearnedConfig):
    """``bins`` of the distribution over [0, 1]; ``end_value`` is the value of a success at its
    start (γ is chosen from it, relative to each trajectory's length, so that slow and fast ones
    agree). ``drop_window`` decisions and ``drop_threshold`` of the demonstration filter."""

    bins: int = bound(51, ge=2)  # of the distribution over [0, 1]
    end_value: float = bound(0.2, gt=0, lt=1)  # value of a success at its start
    # share of samples in which a success that is cut off early counts as a failure
    hindsight_share: float = bound(0.1, ge=0, lt=1)
    drop_window: int = bound(4, ge=1)  # decisions of the filter's window
    drop_threshold: float = bound(0.1, ge=0)  # fall of the value in it that drops them


@dataclass
class PreferenceConfig(LearnedConfig):
    """``comparisons``: the file ("": from task success). ``frames`` per trajectory are drawn for
    a comparison."""

    comparisons: str = ""
    frames: int = bound(4, ge=1)


@dataclass
class VLACConfig(Bounded, place="reward"):
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
    reference_frames: int = bound(9, ge=1)  # frames of it
    frame_skip: int = bound(1, ge=1)  # decisions between two compared frames
    # how replies add up
    value_mode: str = bound("mixed", choices=VALUE_MODES)
    # percent up to which a rise counts as nothing
    positive_dead_zone: float = 0.0
    # percent up to which a fall counts as nothing
    negative_dead_zone: float = 0.0
    done_weight: float = 0.0  # share of the done question in progress; 0: not asked
    done_threshold: float = bound(0.0, ge=0, le=1)  # answers up to it count as 0
    compare_last: bool = True
    batch_size: int = bound(10, ge=1)  # questions asked at once
    image_size: int = bound(448, ge=1)  # pixels per side
    lanczos_size: int = bound(0, ge=0, hint="0: none")
    image_newline: bool = False  # end each image with a newline
    bos: bool = False  # start with the tokenizer's start token
    # tokens of a reply
    max_new_tokens: int = bound(12, ge=1)
    max_invalid: float = 0.3
    # run code that the checkpoint brings
    trust_remote_code: bool = False
    # transformers' name of the attention: sdpa, eager, flash_attention_2
    attention: str = bound("sdpa", choices=_ATTENTIONS)
    # on CUDA; float32 on a CPU
    precision: str = bound("bfloat16", choices=("bfloat16", "float16", "float32"))
    # auto | cpu | cuda
    device: str = told_by("auto", check_device)
    # the templates below, or those of release
    texts: str = bound("own", choices=("own", "release"))
    release: str = ""
    # the system's turn, before each question
    system: str = (
        "You judge images of robots at work: where things are, and how far a task has come."
    )
    # question about two frames
    pair_template: str = told_by(
        "Image-1: <image>\nImage-2: <image>\nCompare the two images: is the second one closer to "
        "the goal of the task? Answer with a signed percentage of what was left, + if the second "
        "is closer, - if the first is.\n<task> {task} </task> <score>",
        _needs("{task}", images=2),
    )
    # question whether a frame shows the task completed
    done_template: str = told_by(
        "Image-1: <image>\nIs the task completed? Answer 1 for yes, 0 for no.\n<task> {task} "
        "</task> <done>",
        _needs("{task}", images=1),
    )
    # the example that is shown first
    reference_template: str = told_by(
        "<trajectory> <task> {task} </task>:\n{frames}</trajectory>\n0% <image>\n",
        _needs("{task}", "{frames}"),
    )
    # each further frame of it
    reference_frame_template: str = told_by(" {percent}% <image>\n", _needs("{percent}"))
    reference_pair_template: str = ""
    # how system and question become one text
    chat_template: str = told_by(
        "<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        _needs("{system}", "{question}"),
    )
    # text that ends a reply
    stop: str = "<|im_end|>"
    shaping: ShapingConfig = field(default_factory=lambda: ShapingConfig(mode="delta"))
