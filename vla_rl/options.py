"""What the core asks of a component by name: options of its config, and what its class says of
itself.

A user's own component may declare any of these names, with the meaning that they have here, and
need not. Each dataclass says what is assumed of a component without them (None: the question does
not arise); `view` reads them. Methods of live objects (policies, envs, reward models) are in
`vla_rl.interfaces`. Nothing here needs torch, since configs are checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from vla_rl.diagnostics import Diagnostic, Movement

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from vla_rl.specs import EmbodimentSpec


_Asked = TypeVar("_Asked", bound="DataclassInstance")


def view(of: Any, kind: type[_Asked]) -> _Asked:
    """``kind``, each field read from ``of`` (a config, a class, None), or left at its default
    where ``of`` has none."""
    return kind(**{f.name: getattr(of, f.name) for f in fields(kind) if hasattr(of, f.name)})


_DISCOUNT = ("discount", "discounts", "discounting", "discount_factor", "discount_rate")
# of what would be asked for in vain
SYNONYMS = dict.fromkeys(_DISCOUNT, "gamma") | {"lr": "learning_rate"}


def misspelt(own: type, kind: type[DataclassInstance]) -> tuple[str, str] | None:
    """A name that a user's class ``own`` declares, and the one that ``kind`` asks for and that it
    does not declare, of which the first is another word or a slip: it would be taken for left out,
    and its default used in silence. Or None.

    A slip is a letter too many, too few, wrong, or changed with its neighbour, but for the first
    and an s at the end.
    """
    # (without a value)
    annotated = {name for part in own.__mro__ for name in vars(part).get("__annotations__", ())}
    declared, wanted = (
        annotated | {name for name in dir(own) if name[0] != "_"},
        {f.name for f in fields(kind)},
    )
    pairs = (
        (name, meant) for name in sorted(declared - wanted) for meant in sorted(wanted - declared)
    )
    return next((pair for pair in pairs if SYNONYMS.get(pair[0]) == pair[1] or _near(*pair)), None)


def _near(name: str, meant: str) -> bool:
    """Whether one slip makes ``meant`` of ``name``."""
    a, b = (text.lower().replace("_", "") for text in (name, meant))
    if len(b) < 5 or a[:1] != b[0] or a.rstrip("s") == b.rstrip("s"):
        return a == b
    start = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    rest, other = a[start:], b[start:]
    return (
        rest[1:] in (other, other[1:])
        or rest == other[1:]
        or (rest[:2] == other[1::-1] and rest[2:] == other[2:])
    )


def config_of(component: Any) -> Any:
    """The config that a live component keeps, or None."""
    return view(component, _Configured).config


@dataclass(frozen=True)
class _Configured:
    config: Any = None


# --------------------------------------------------------------------------- options of the configs
@dataclass(frozen=True)
class MemoryOptions:
    episodes: int = 0
    hindsight: bool = False


@dataclass(frozen=True)
class AlgorithmOptions:
    """``algorithm.…``: what rewards, checks and advice depend on. ``virtual_best`` belongs to
    advantage=grpo."""

    # None: it has no estimator to choose; then values bootstrap, and nothing is grouped
    advantage: str | None = None
    gamma: float | None = None  # None: what takes it over has to be told
    gamma_per_control_step: bool = False
    bootstrap_truncated: bool = True
    reward_names: Sequence[str] = ()
    virtual_best: str = "none"
    learning_rate: float | None = None
    offload_optimizer: bool = False
    micro_batch_size: int | None = None
    mirrors: bool = False  # it shows some rows in the robot's mirror
    remembered: int = 0  # successes of each task that it keeps in its checkpoint
    offline_updates: int = 0  # before the first episode, on demonstrations
    updates_per_decision: float | None = None  # None: it learns from no replay
    demonstration_share: float = 0.0  # of each batch
    # of each batch, of other runs' episodes; None: it has no such option
    offline_share: float | None = None
    temperature: float | None = None
    critic_warmup_iterations: int | None = None  # in which its critic learns alone
    # how it weighs what an older policy chose (none, truncate, mask), given log-probs that its
    # learner recomputes
    behavior_weight: str | None = None
    recompute_old_log_prob: bool = False
    memory: Any = None  # `MemoryOptions`, of successes that are imitated again


@dataclass(frozen=True)
class AlgorithmFigures:
    """Of the class of an algorithm's options: what the report draws of what it logs, when it warns,
    and what the guard reads of it."""

    diagnostics: Sequence[Diagnostic] = ()
    movement: Movement = field(default_factory=Movement)


@dataclass(frozen=True)
class PolicyOptions:
    """``policy.…``. ``value_head`` False: the policy could have one and has not. ``lora_rank``: it
    is an OpenVLA. ``explores_by`` names the option that makes its samples differ more."""

    chunk_length: int | None = None
    checkpoint: str | None = None  # of published weights that it starts from
    cameras: Sequence[str] = ()  # () takes all
    explores_by: str = "temperature"
    value_head: bool | None = None
    lora_rank: int | None = None
    feature_norm: str = "position"
    noise_correlation: float | None = None  # of the noise that the control steps of a chunk share
    decoding: str = ""  # of tokens: parallel or autoregressive
    action_range: str = ""  # what the noise of a denoising policy is in units of
    student_steps: int = 0  # of a student that learns beside RL
    # denoising steps that RL does not train are taken by a copy from before it
    freeze_untrained: bool = False
    # axes along which entries are not sampled independently (`Policy.log_prob_axes`), of a policy
    # or its config
    correlated_axes: Sequence[str] = ()


@dataclass(frozen=True)
class EnvOptions:
    """``env.…``: what room on the disk and checks depend on. Sizes are in pixels. ``tasks``: those
    that are built (none: all). ``horizon`` in control steps (0: the tasks' own). ``observe`` state:
    it shows no pictures. ``chunk_is_path``: the same actions, in other chunks, lead elsewhere.
    ``action_noise`` is put on what is executed. ``reward`` env: it gives rewards of its own,
    success: none but that. ``finds_cameras``: where none is named, it has those it finds."""

    tasks: Sequence[str] | None = None
    horizon: int | None = None
    cameras: Sequence[str] = ("camera",)
    camera_size: int | None = None
    image_size: int = 0
    observe: str = "pictures"
    chunk_is_path: bool = False
    action_noise: float | None = None
    reward: str = ""
    finds_cameras: bool = False

    @property
    def pixels(self) -> int:
        """The side of a picture; 0 where it is not known."""
        return self.image_size if self.camera_size is None else self.camera_size


@dataclass(frozen=True)
class ActorOptions:
    """``actor.…``: what its encoder reads of images (features, pictures), of all that it
    ``can_see``; pixels. What its ``distribution`` is (gaussian, deterministic)."""

    can_see: Sequence[str] = ("features",)
    eyes: str = "features"
    shift: int = 0
    stride: int = 1
    distribution: str = ""


@dataclass(frozen=True)
class RewardOptions:
    """``reward.…``. ``updates`` of its training, ``refit_updates`` of each later one: with these it
    is a learned reward. ``reference`` is a dataset, ``parts`` are those of a combined reward,
    ``milestones`` name proprioception."""

    checkpoint: str | None = None
    reference: str = ""
    parts: Mapping[str, Any] | None = None
    encoder: Any = None
    shaping: Any = None
    updates: int | None = None
    refit_updates: int | None = None
    milestones: Any = None


@dataclass(frozen=True)
class EncoderOptions:
    """``reward.encoder.…``; "policy" stands for the policy's own image features."""

    type: str = ""


@dataclass(frozen=True)
class ShapingOptions:
    """``reward.shaping.…``. A potential also has ``weight``, ``gamma`` and
    ``gamma_per_control_step``."""

    mode: str = ""
    truncated_end: str | None = None


OPTIONS: Mapping[str, type] = {
    "algorithm": AlgorithmOptions,
    "policy": PolicyOptions,
    "env": EnvOptions,
    "actor": ActorOptions,
    "reward": RewardOptions,
}


# ------------------------------------------------------------------- what classes say of themselves
@dataclass(frozen=True)
class ComponentClass:
    Config: Any = None  # the dataclass of its options


@dataclass(frozen=True)
class PolicyClass:
    config_path: Sequence[str] = ("config",)  # where its options stand in `config_dict`


@dataclass(frozen=True)
class EnvClass:
    # {name: `vla_rl.specs.Perturbation`}
    perturbations: Mapping[str, Any] = field(default_factory=dict)
    tells_instead: bool = False  # `vla_rl.specs.SlotStep.instead`


@dataclass(frozen=True)
class RewardClass:
    judge_first: bool = False  # its quality is checked before RL trains on it
    learned: bool = False


@dataclass(frozen=True)
class AlgorithmClass:
    """``actor_distribution``: the only kind of actor that it trains, gaussian or deterministic
    ("": any). ``takes_parts``, of the algorithm itself: of several ranks, each needs images and
    replay of its own part of a batch alone (`vla_rl.types.Held`)."""

    reads_rewards: bool = True
    actor_distribution: str = ""
    takes_parts: bool = False


@dataclass(frozen=True)
class AdvantageClass:
    needs_value: bool = False
    grouped: bool = False


CLASSES: Mapping[str, type] = {
    "algorithm": AlgorithmClass,
    "policy": PolicyClass,
    "env": EnvClass,
    "reward": RewardClass,
    "advantage": AdvantageClass,
}


# --------------------------------------------------------------------------- methods of the configs
@dataclass(frozen=True)
class ConfigMethods:
    """What the config of any component may answer; None where it does not."""

    # Of an algorithm: (policy, or its config): raises `ConfigError` where it cannot learn with it.
    check_policy: Callable[[Any], None] | None = None
    # Of a policy: (name, height, width in pixels) of a camera: raises `ConfigError` where it cannot
    # cut up its pictures.
    check_camera: Callable[[str, int, int], None] | None = None
    # Of a policy: (robot): raises `ConfigError` where it cannot act for it.
    check_robot: Callable[[EmbodimentSpec], None] | None = None
    # Raises `UserError` where packages, files or OpenGL are missing.
    check_machine: Callable[[], None] | None = None
    # Of an env: in a line what a figure depends on besides the policy, and where episodes of a
    # split start.
    describe: Callable[[], str] | None = None
    initial_states: Callable[[str], str] | None = None
    # Of an env: how many initial states a split has of each task, before they come again (None:
    # no end).
    state_count: Callable[[str], int | None] | None = None
    # Of an env that others publish figures of: (split, python), what a figure has in common with
    # published ones, when workers run under ``python`` (empty: this one): at least ``departures``,
    # why the two may not be compared (empty: they may), and ``line``, all of it in a line.
    benchmark: Callable[[str, str], Mapping[str, Any]] | None = None


def methods(config: Any) -> ConfigMethods:
    """What the config of a component answers."""
    return view(config, ConfigMethods)
