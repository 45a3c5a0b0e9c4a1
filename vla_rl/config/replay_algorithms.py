"""Options of the algorithms that learn from a replay (torch-free, see
`vla_rl.config.algorithms`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl.config.ranges import require_above_zero, require_choice, require_range
from vla_rl.diagnostics import Diagnostic
from vla_rl.errors import ConfigError

HEADS = ("mean", "hl_gauss", "c51")
CONSERVATISM = ("none", "cql", "cal_ql")


@dataclass
class CriticsConfig:
    """An ensemble of ``count`` action values, of which the smallest of ``subset`` random ones is
    the target (0: of all).

    ``hidden`` widths; ``head`` mean, hl_gauss or c51, the latter two over ``bins`` values from
    ``low`` to ``high``; ``tau``: what share of the new weights the targets take at each update.
    """

    # action values of the ensemble
    count: int = 2
    # random ones of them whose smallest is the target; 0: all
    subset: int = 0
    # widths of the layers
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    # mean | hl_gauss | c51: a number, or a distribution over bins
    head: str = "mean"
    # value of the first bin
    low: float = 0.0
    # value of the last bin
    high: float = 1.0
    # bins of a head that is a distribution
    bins: int = 51
    # share of the new weights that the targets take at each update
    tau: float = 0.005
    # of AdamW
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        require_range("algorithm.critics", "count", self.count, 1)
        require_range("algorithm.critics", "subset", self.subset, 0, self.count)
        require_range("algorithm.critics", "bins", self.bins, 2)
        require_range("algorithm.critics", "tau", self.tau, 0.0, 1.0)
        require_range("algorithm.critics", "learning_rate", self.learning_rate, 0)
        require_choice("algorithm.critics", "head", self.head, HEADS)
        if not self.low < self.high:
            raise ConfigError(
                f"algorithm.critics.low={self.low} must lie below "
                f"algorithm.critics.high={self.high}"
            )
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(
                f"algorithm.critics.hidden={list(self.hidden)!r} needs at least one "
                "width, each 1 or more"
            )


def _figures(name: str) -> tuple[Diagnostic, ...]:
    """What all of them show of their critics."""
    return (
        Diagnostic(
            f"{name}/critic_loss",
            "Loss of the critics",
            "Falls, and rises where new behaviour surprises them.",
        ),
        Diagnostic(
            f"{name}/value_mean",
            "Value of the drawn decisions",
            "Within what rewards can sum to; growing without end is overestimation.",
        ),
    )


def _sac_figures(name: str) -> tuple[Diagnostic, ...]:
    return (
        *_figures(name),
        Diagnostic(
            f"{name}/temperature",
            "Temperature",
            "Weight of the entropy; falls while there is some to spare.",
        ),
        Diagnostic(
            f"{name}/spare_entropy",
            "Entropy above its target",
            "In nats; near 0 the actor explores as little as it is to.",
        ),
    )


@dataclass
class ActorCriticConfig:
    """What TD3 and SAC share.

    Pace: ``updates_per_decision`` critic updates for each new decision, once ``start_decisions``
    are there, the first ``critic_warmup`` of all without the actor; the actor learns every
    ``actor_every`` of them. ``offline_updates`` come before the first episode, on what is there
    then; with ``conservatism`` (cql, or cal_ql, which spares the actor's values below what the data
    earned) at ``conservative_weight``, from ``conservative_samples`` actions each at random, of the
    actor and of the actor at the next frame; with ``max_target_backup`` the target is that of the
    best of so many actions. Weight and samples are those of WSRL's release (PA-RL's weight: 0.005).

    Data: of a batch of ``batch_size``, ``demonstration_share`` are demonstrations and those
    decisions of other episodes in which a person chose a step, each as likely (HIL-SERL);
    ``offline_share`` are of the episodes of other runs that ``replay.offline`` names
    (``demonstrations_online=false``: neither but before the first episode, as WSRL); the rest are
    of online episodes, with a person's decisions among them. ``n_step`` decisions of reward;
    ``gamma`` discounts per control step.

    Actor: ``imitation_coef`` on the squared distance to human and demonstrated actions,
    ``action_penalty`` on the squared latent action, ``grad_clip`` on both gradients.
    ``anchor_coef`` on the squared distance of the latent action to what it was with the same noise
    as the first episode began; it falls evenly, to nothing after ``anchor_updates`` updates (0: it
    stays), but not below the share ``anchor_floor``. With ``encoder_online`` false the encoder,
    which critics train and the actor reads, stays as the updates before the first episode left it,
    so that what critics learn does not move the actor. ``gripper_penalty`` is what the choices of a
    gripper that is decided apart (``actor.gripper=discrete``) pay for each time that it turns
    around.
    """

    gamma_per_control_step: ClassVar[bool] = True  # what is shaped by the discount has to know

    # decisions of one update
    batch_size: int = 256
    # critic updates for each new decision
    updates_per_decision: float = 1.0
    # decisions that must be there before learning starts
    start_decisions: int = 500
    # first critic updates, without the actor
    critic_warmup: int = 0
    # critic updates for each of the actor
    actor_every: int = 2
    # critic updates before the first episode
    offline_updates: int = 0
    # none | cql | cal_ql: what keeps values low where there is no data, before the first episode
    conservatism: str = "none"
    # its weight
    conservative_weight: float = 5.0
    # actions at random, of the actor, and of the actor at the next frame, that it compares with
    conservative_samples: int = 10
    # the target of these updates takes the best of so many actions of a stochastic actor
    max_target_backup: bool = True
    # share of a batch that are demonstrations and what people chose
    demonstration_share: float = 0.5
    # share of a batch from other runs (replay.offline)
    offline_share: float = 0.0
    # demonstrations are drawn after the first episode too; false: only before it
    demonstrations_online: bool = True
    # discount per control step
    gamma: float = 0.99
    # decisions whose reward the target adds up
    n_step: int = 1
    critics: CriticsConfig = field(default_factory=CriticsConfig)
    # of the actor
    learning_rate: float = 3e-4
    # weight of the squared distance to human and demonstrated actions
    imitation_coef: float = 0.0
    # weight of the squared latent action
    action_penalty: float = 0.0
    # weight of the squared distance to what the actor did as the first episode began
    anchor_coef: float = 0.0
    # updates over which it falls to nothing; 0: it stays
    anchor_updates: int = 0
    # share of it that stays
    anchor_floor: float = 0.0
    encoder_online: bool = True
    gripper_penalty: float = 0.02
    # largest norm of both gradients; null: no limit
    grad_clip: float | None = 10.0
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = 10
    # of batches and noise; 0: the run's seed
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "n_step",
            "actor_every",
            "conservative_samples",
            "max_bad_updates",
        ):
            require_range("algorithm", name, getattr(self, name), 1)
        for name in (
            "updates_per_decision",
            "start_decisions",
            "critic_warmup",
            "offline_updates",
            "conservative_weight",
            "learning_rate",
            "imitation_coef",
            "action_penalty",
            "gripper_penalty",
            "anchor_coef",
            "anchor_updates",
        ):
            require_range("algorithm", name, getattr(self, name), 0)
        require_above_zero("algorithm", "grad_clip", self.grad_clip)
        for name in ("gamma", "demonstration_share", "offline_share", "anchor_floor"):
            require_range("algorithm", name, getattr(self, name), 0.0, 1.0)
        if self.demonstration_share + self.offline_share > 1:
            raise ConfigError(
                f"algorithm.demonstration_share={self.demonstration_share:g} and "
                f"algorithm.offline_share={self.offline_share:g} are more than a batch: they may "
                "sum to 1"
            )
        require_choice("algorithm", "conservatism", self.conservatism, CONSERVATISM)
        if not (self.encoder_online or self.offline_updates):
            raise ConfigError(
                "algorithm.encoder_online=false keeps an encoder that learned before the first "
                "episode, and algorithm.offline_updates=0 teaches it nothing then: set either"
            )


@dataclass
class TD3Config(ActorCriticConfig):
    """Settings of `TD3`. ``target_noise`` and ``target_clip`` smooth the target action, in units
    of the latent action."""

    diagnostics: ClassVar = _figures("td3")

    # std of the noise on the target action, in latent units
    target_noise: float = 0.1
    # limit of that noise
    target_clip: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_noise", "target_clip"):
            require_range("algorithm", name, getattr(self, name), 0)


@dataclass
class SACConfig(ActorCriticConfig):
    """Settings of `SAC`.

    The temperature starts at ``temperature`` and follows ``target_entropy`` (None: minus half the
    latent dimensions) at ``temperature_learning_rate`` (0: it stays). ``entropy_in_backup`` puts
    the entropy into the target too.
    """

    diagnostics: ClassVar = _sac_figures("sac")

    # weight of the entropy, at the start
    temperature: float = 0.01
    # of the temperature; 0: it stays
    temperature_learning_rate: float = 3e-4
    # that the temperature follows; null: minus half the latent dimensions
    target_entropy: float | None = None
    entropy_in_backup: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("algorithm", "temperature_learning_rate", self.temperature_learning_rate, 0)
        require_above_zero("algorithm", "temperature", self.temperature)


@dataclass
class DSRLConfig(SACConfig):
    """Settings of `DSRL`. ``noise_updates`` steps of the noise critic before each of the actor,
    each on noises of which ``own_share`` are the actor's and the rest standard normal (DSRL: 0;
    GR-RL: 0.5). ``support_coef`` on how far the actor's ½‖noise‖² exceeds ``support_limit`` (None:
    half its dimensions, what a standard normal has on average)."""

    diagnostics: ClassVar = _sac_figures("dsrl")

    # updates of the noise critic for each of the actor
    noise_updates: int = 1
    # share of their noises that are the actor's; the rest is standard normal
    own_share: float = 0.0
    # weight of leaving the support of the noise
    support_coef: float = 0.0
    # half squared norm from which it counts; null: half the dimensions
    support_limit: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("algorithm", "noise_updates", self.noise_updates, 1)
        require_range("algorithm", "own_share", self.own_share, 0.0, 1.0)
        require_range("algorithm", "support_coef", self.support_coef, 0)
        require_range("algorithm", "support_limit", self.support_limit, 0)
        if self.conservatism != "none" or self.imitation_coef:
            raise ConfigError(
                "algorithm dsrl chooses noises, which demonstrations do not have: set "
                "algorithm.conservatism=none and algorithm.imitation_coef=0 (its critic learns "
                "from demonstrations all the same)"
            )


@dataclass
class PARLConfig(ActorCriticConfig):
    """Settings of `PARL`. ``learning_rate`` is that of the policy, which imitates
    ``imitation_batch`` improved decisions every ``actor_every`` updates; each is drawn by the
    softmax of the values over ``temperature`` (0: the best)."""

    diagnostics: ClassVar = _figures("parl")

    # improved decisions of one update of the policy
    imitation_batch: int = 64
    # of the draw among them by their values; 0: the best
    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("algorithm", "imitation_batch", self.imitation_batch, 1, self.batch_size)
        require_range("algorithm", "temperature", self.temperature, 0)
        if self.imitation_coef or self.action_penalty or self.anchor_coef:
            raise ConfigError(
                "algorithm parl imitates what its critic chose, and has no latent action: set "
                "algorithm.imitation_coef=0, algorithm.action_penalty=0 and algorithm.anchor_coef=0"
            )


@dataclass
class IQLConfig(ActorCriticConfig):
    """Settings of `IQL`. ``expectile`` of the values that V learns (0.5: the mean; towards 1: the
    best that was done); decisions are imitated by exp(``beta`` · advantage), at most
    ``weight_limit``."""

    diagnostics: ClassVar = _figures("iql")

    climbs: ClassVar[bool] = False  # whether the actor climbs the critics later on

    # of the values that V learns (0.5: the mean; towards 1: the best that was done)
    expectile: float = 0.7
    # decisions are imitated by exp(beta · advantage)
    beta: float = 3.0
    # largest such weight
    weight_limit: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.expectile < 1.0:
            raise ConfigError(
                f"algorithm.expectile={self.expectile!r} is out of range; use a value "
                "between 0 and 1"
            )
        require_range("algorithm", "beta", self.beta, 0)
        require_range("algorithm", "weight_limit", self.weight_limit, 1.0)
        if (
            self.conservatism != "none"
            or self.imitation_coef
            or (self.anchor_coef and not self.climbs)
        ):
            raise ConfigError(
                "algorithm iql asks its critics about nothing but what was done, and imitates "
                "that: set algorithm.conservatism=none, algorithm.imitation_coef=0 and "
                "algorithm.anchor_coef=0"
            )


@dataclass
class IQLThenSACConfig(IQLConfig, SACConfig):
    """Settings of `IQLThenSAC`: those of both."""

    diagnostics: ClassVar = _sac_figures("iql_sac")
    climbs = True


@dataclass
class DaggerConfig:
    """Settings of `Dagger`: ``updates_per_decision`` of ``batch_size`` decisions each, people's
    alone, for every new decision; ``offline_updates`` on the demonstrations before the first
    episode."""

    # decisions of one update, people's alone
    batch_size: int = 256
    # updates for each new decision
    updates_per_decision: float = 1.0
    # decisions that must be there before learning starts
    start_decisions: int = 0
    # updates on the demonstrations before the first episode
    offline_updates: int = 0
    # of AdamW
    learning_rate: float = 3e-4
    # of AdamW
    weight_decay: float = 0.0
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = 10.0
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = 10
    # of batches; 0: the run's seed
    seed: int = 0

    diagnostics: ClassVar = (
        Diagnostic("dagger/loss", "Imitation loss", "On decisions of people, each counting alike."),
    )
    gamma: ClassVar[float] = 1.0  # it adds no rewards up

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_bad_updates"):
            require_range("algorithm", name, getattr(self, name), 1)
        for name in (
            "updates_per_decision",
            "start_decisions",
            "offline_updates",
            "learning_rate",
            "weight_decay",
        ):
            require_range("algorithm", name, getattr(self, name), 0)
        require_above_zero("algorithm", "grad_clip", self.grad_clip)
