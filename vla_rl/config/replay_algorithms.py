"""Options of the algorithms that learn from a replay (torch-free, see
`vla_rl.config.algorithms`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl.bounds import Bounded, bound, several
from vla_rl.diagnostics import Diagnostic
from vla_rl.errors import ConfigError

HEADS = ("mean", "hl_gauss", "c51")
CONSERVATISM = ("none", "cql", "cal_ql")


@dataclass
class CriticsConfig(Bounded, place="algorithm.critics"):
    """An ensemble of ``count`` action values, of which the smallest of ``subset`` random ones is
    the target (0: of all).

    ``hidden`` widths; ``head`` mean, hl_gauss or c51, the latter two over ``bins`` values from
    ``low`` to ``high``; ``tau``: what share of the new weights the targets take at each update.
    """

    # action values of the ensemble
    count: int = bound(2, ge=1)
    # random ones of them whose smallest is the target; 0: all
    subset: int = bound(0, ge=0)
    # widths of the layers
    hidden: list[int] = several([256, 256], ge=1, least=1)
    # a number, or a distribution over bins
    head: str = bound("mean", choices=HEADS)
    # value of the first bin
    low: float = 0.0
    # value of the last bin
    high: float = 1.0
    # bins of a head that is a distribution
    bins: int = bound(51, ge=2)
    # share of the new weights that the targets take at each update
    tau: float = bound(0.005, ge=0, le=1)
    # of AdamW
    learning_rate: float = bound(3e-4, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset > self.count:
            raise ConfigError(
                f"algorithm.critics.subset={self.subset} is out of range: it must be 0 to "
                f"algorithm.critics.count={self.count}"
            )
        if not self.low < self.high:
            raise ConfigError(
                f"algorithm.critics.low={self.low} must lie below "
                f"algorithm.critics.high={self.high}"
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
class ActorCriticConfig(Bounded, place="algorithm"):
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
    batch_size: int = bound(256, ge=1)
    # critic updates for each new decision
    updates_per_decision: float = bound(1.0, ge=0)
    # decisions that must be there before learning starts
    start_decisions: int = bound(500, ge=0)
    # first critic updates, without the actor
    critic_warmup: int = bound(0, ge=0)
    # critic updates for each of the actor
    actor_every: int = bound(2, ge=1)
    # critic updates before the first episode
    offline_updates: int = bound(0, ge=0)
    # what keeps values low where there is no data, before the first episode
    conservatism: str = bound("none", choices=CONSERVATISM)
    # its weight
    conservative_weight: float = bound(5.0, ge=0)
    # actions at random, of the actor, and of the actor at the next frame, that it compares with
    conservative_samples: int = bound(10, ge=1)
    # the target of these updates takes the best of so many actions of a stochastic actor
    max_target_backup: bool = True
    # share of a batch that are demonstrations and what people chose
    demonstration_share: float = bound(0.5, ge=0, le=1)
    # share of a batch from other runs (replay.offline)
    offline_share: float = bound(0.0, ge=0, le=1)
    # demonstrations are drawn after the first episode too; false: only before it
    demonstrations_online: bool = True
    # discount per control step
    gamma: float = bound(0.99, ge=0, le=1)
    # decisions whose reward the target adds up
    n_step: int = bound(1, ge=1)
    critics: CriticsConfig = field(default_factory=CriticsConfig)
    # of the actor
    learning_rate: float = bound(3e-4, ge=0)
    # weight of the squared distance to human and demonstrated actions
    imitation_coef: float = bound(0.0, ge=0)
    # weight of the squared latent action
    action_penalty: float = bound(0.0, ge=0)
    # weight of the squared distance to what the actor did as the first episode began
    anchor_coef: float = bound(0.0, ge=0)
    # updates over which it falls to nothing; 0: it stays
    anchor_updates: int = bound(0, ge=0)
    # share of it that stays
    anchor_floor: float = bound(0.0, ge=0, le=1)
    encoder_online: bool = True
    gripper_penalty: float = bound(0.02, ge=0)
    # largest norm of both gradients; null: no limit
    grad_clip: float | None = bound(10.0, gt=0)
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of batches and noise; 0: the run's seed
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstration_share + self.offline_share > 1:
            raise ConfigError(
                f"algorithm.demonstration_share={self.demonstration_share:g} and "
                f"algorithm.offline_share={self.offline_share:g} are more than a batch: they may "
                "sum to 1"
            )
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
    target_noise: float = bound(0.1, ge=0)
    # limit of that noise
    target_clip: float = bound(0.25, ge=0)


@dataclass
class SACConfig(ActorCriticConfig):
    """Settings of `SAC`.

    The temperature starts at ``temperature`` and follows ``target_entropy`` (None: minus half the
    latent dimensions) at ``temperature_learning_rate`` (0: it stays). ``entropy_in_backup`` puts
    the entropy into the target too.
    """

    diagnostics: ClassVar = _sac_figures("sac")

    # weight of the entropy, at the start
    temperature: float = bound(0.01, gt=0)
    # of the temperature; 0: it stays
    temperature_learning_rate: float = bound(3e-4, ge=0)
    # that the temperature follows; null: minus half the latent dimensions
    target_entropy: float | None = None
    entropy_in_backup: bool = False


@dataclass
class DSRLConfig(SACConfig):
    """Settings of `DSRL`. ``noise_updates`` steps of the noise critic before each of the actor,
    each on noises of which ``own_share`` are the actor's and the rest standard normal (DSRL: 0;
    GR-RL: 0.5). ``support_coef`` on how far the actor's ½‖noise‖² exceeds ``support_limit`` (None:
    half its dimensions, what a standard normal has on average)."""

    diagnostics: ClassVar = _sac_figures("dsrl")

    # updates of the noise critic for each of the actor
    noise_updates: int = bound(1, ge=1)
    # share of their noises that are the actor's; the rest is standard normal
    own_share: float = bound(0.0, ge=0, le=1)
    # weight of leaving the support of the noise
    support_coef: float = bound(0.0, ge=0)
    # half squared norm from which it counts; null: half the dimensions
    support_limit: float | None = bound(None, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    imitation_batch: int = bound(64, ge=1)
    # of the draw among them by their values; 0: the best
    temperature: float = bound(0.0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitation_batch > self.batch_size:
            raise ConfigError(
                f"algorithm.imitation_batch={self.imitation_batch} is out of range: it must be 1 "
                f"to algorithm.batch_size={self.batch_size}"
            )
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
    expectile: float = bound(0.7, gt=0, lt=1)
    # decisions are imitated by exp(beta · advantage)
    beta: float = bound(3.0, ge=0)
    # largest such weight
    weight_limit: float = bound(100.0, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
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
class DaggerConfig(Bounded, place="algorithm"):
    """Settings of `Dagger`: ``updates_per_decision`` of ``batch_size`` decisions each, people's
    alone, for every new decision; ``offline_updates`` on the demonstrations before the first
    episode."""

    # decisions of one update, people's alone
    batch_size: int = bound(256, ge=1)
    # updates for each new decision
    updates_per_decision: float = bound(1.0, ge=0)
    # decisions that must be there before learning starts
    start_decisions: int = bound(0, ge=0)
    # updates on the demonstrations before the first episode
    offline_updates: int = bound(0, ge=0)
    # of AdamW
    learning_rate: float = bound(3e-4, ge=0)
    # of AdamW
    weight_decay: float = bound(0.0, ge=0)
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = bound(10.0, gt=0)
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of batches; 0: the run's seed
    seed: int = 0

    diagnostics: ClassVar = (
        Diagnostic("dagger/loss", "Imitation loss", "On decisions of people, each counting alike."),
    )
    gamma: ClassVar[float] = 1.0  # it adds no rewards up


@dataclass
class RECAPConfig(Bounded, place="algorithm"):
    """Settings of `RECAP`. Its paper gives ``bins``, ``lookahead`` (50 control steps),
    ``positive_share`` (0.4; 0.3 before fine-tuning, 0.1 for its hardest task); ``failure_cost`` is
    RLinf's, where the paper has none."""

    # decisions of one update
    batch_size: int = bound(256, ge=1)
    # updates for each new decision
    updates_per_decision: float = bound(1.0, ge=0)
    # decisions that must be there before learning starts
    start_decisions: int = bound(0, ge=0)
    # updates on the demonstrations before the first episode
    offline_updates: int = bound(0, ge=0)
    # first updates, of the values alone
    value_warmup: int = bound(200, ge=0)
    # control steps of the longest episode, the tasks' horizon: what returns are divided by
    longest: int = bound(500, ge=1)
    # what a failed end costs, in control steps
    failure_cost: float = bound(300.0, ge=0)
    # values between -1 and 0 that V is a distribution over
    bins: int = bound(201, ge=2)
    # widths of its network
    hidden: list[int] = several([256, 256], ge=1, least=1)
    # of AdamW, of the values
    value_learning_rate: float = bound(3e-4, ge=0)
    # decisions of reward before V takes over
    lookahead: int = bound(10, ge=1)
    # of a task's decisions, how many are improvements
    positive_share: float = bound(0.4, gt=0, lt=1)
    # updates between two looks at where that lies
    threshold_every: int = bound(100, ge=1)
    # decisions of such a look
    threshold_decisions: int = bound(2000, ge=1)
    # of AdamW, of the policy
    learning_rate: float = bound(1e-4, ge=0)
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = bound(1.0, gt=0)
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of the values' first weights; 0: the run's seed
    seed: int = 0

    diagnostics: ClassVar = (
        Diagnostic("recap/loss", "Imitation loss", "On all data, told what was an improvement."),
        Diagnostic(
            "recap/value_error",
            "Error of the values",
            "Mean distance to the return, in shares of the longest episode.",
        ),
        Diagnostic(
            "recap/improved", "Improvements", "Share of what is imitated; people's count as such."
        ),
    )
    gamma: ClassVar[float] = 1.0  # its returns are sums
