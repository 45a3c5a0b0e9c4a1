"""The options of what learns, apart from the code that computes: reading and checking a config
needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vla_rl.bounds import Bounded, bound, several, told_by
from vla_rl.config.imitation import MemoryConfig
from vla_rl.diagnostics import Alarm, Diagnostic, Movement
from vla_rl.errors import ConfigError
from vla_rl.options import AdvantageClass, AlgorithmOptions, PolicyOptions, view

STRATEGIES = ("uniform", "vla_rl", "vla_rl_power", "frontier", "thompson")
CENTERS = ("mean", "median")
SCALES = ("std", "none", "mad", "running_std")
VIRTUAL_BEST = ("none", "all_fail", "always")
LEVELS = ("token", "step", "chunk", "denoising_step")
REDUCTIONS = ("sum", "mean")
KEPT_AXIS = {"step": "control_step", "denoising_step": "denoising_step"}
AGGREGATIONS = ("token", "trajectory", "step_count")
KL_KINDS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class _AdvantageEntry:
    """An advantage estimator ("module:Class"): ``needs_value`` wants a critic or a value head,
    ``grouped`` compares the episodes of a group (`EpisodeSpec.group_id`) with each other."""

    target: str
    needs_value: bool = False
    grouped: bool = False


ADVANTAGES = {
    "gae": _AdvantageEntry("vla_rl.algorithms.estimators:GAE", needs_value=True),
    "vtrace": _AdvantageEntry("vla_rl.algorithms.estimators:VTrace", needs_value=True),
    "grpo": _AdvantageEntry("vla_rl.algorithms.estimators:GRPO", grouped=True),
    "rloo": _AdvantageEntry("vla_rl.algorithms.estimators:RLOO", grouped=True),
    "reinforce++": _AdvantageEntry("vla_rl.algorithms.estimators:ReinforcePlusPlus"),
}


def advantage_entry(name: str) -> _AdvantageEntry:
    """The estimator called ``name``, or a user's own as "package.module:Class"."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    from vla_rl.build import attribute, refuse_misspelt

    refuse_misspelt(attribute(name), AdvantageClass, name)
    own = view(attribute(name), AdvantageClass)
    return _AdvantageEntry(name, bool(own.needs_value), bool(own.grouped))


def _check_advantage(name: str, key: str) -> None:
    if ":" not in name and name not in ADVANTAGES:
        raise ConfigError(
            f"{key}={name!r} is not a choice: it must be one of {', '.join(ADVANTAGES)}, or your "
            "own as package.module:Class"
        )


def advantage_of(algorithm: Any) -> _AdvantageEntry:
    """The estimator that an algorithm's config names; one that names none counts as GAE: values
    bootstrap, no groups."""
    chosen = view(algorithm, AlgorithmOptions).advantage
    return advantage_entry("gae" if chosen is None else chosen)


@dataclass
class CurriculumConfig(Bounded, place="curriculum"):
    """``strategy``: uniform, vla_rl (paper), vla_rl_power (its code), frontier or thompson (VADE).

    ``temperature`` is τ (vla_rl, frontier) or T (vla_rl_power). ``window`` trials back from which
    an item's success rate is taken. ``floor`` is the share of the probability spread evenly over
    all items. ``decay`` shrinks every item's counts at each `Curriculum.tick` and ``visited_decay``
    an item's counts before new ones are added (thompson).
    """

    # how tasks and initial states are chosen
    strategy: str = bound("uniform", choices=STRATEGIES)
    temperature: float = bound(1.0, ge=1e-3)
    window: int = bound(20, ge=1)
    floor: float = bound(0.1, ge=0, le=1)
    # factor on every item's counts at each tick (thompson)
    decay: float = bound(0.99, ge=0, le=1)
    # factor on an item's counts before new ones are added (thompson)
    visited_decay: float = bound(0.8, ge=0, le=1)


@dataclass
class CriticConfig(Bounded, place="critic"):
    """``hidden`` widths of the MLP; ``clip`` bounds normalised inputs to ±clip standard
    deviations."""

    # widths of the layers
    hidden: list[int] = several([256, 256], ge=1, least=1)
    clip: float = bound(10.0, ge=0.1)
    # of its first weights; 0: the run's seed
    seed: int = 0


_PPO_FIGURES = (
    Diagnostic(
        "ppo/approx_kl",
        "KL per iteration",
        "How far one iteration moves the policy; spikes are too large steps.",
    ),
    Diagnostic(
        "ppo/entropy", "Entropy", "Randomness of the actions. A collapse to 0 ends exploration."
    ),
    Diagnostic(
        "ppo/clip_fraction",
        "Clip fraction",
        "Share of ratios at the clip; above 0.3 the steps are too large.",
        share=True,
        alarm=Alarm(
            "Over the last iterations {value} of the ratios were clipped: the updates are too "
            "large. Lower the learning rate or the number of epochs.",
            above=0.3,
        ),
    ),
    Diagnostic(
        "ppo/explained_variance",
        "Explained variance",
        "Quality of the critic: 1 is perfect, 0 or less is useless.",
        alarm=Alarm(
            "The critic explains nothing (explained variance below 0): more critic updates or "
            "warm-up help.",
            below=0.0,
        ),
    ),
    Diagnostic(
        "ppo/behavior_gap_mean",
        "Actor–learner gap",
        "Log-probs when acting against when learning; should be near 0.",
    ),
    Diagnostic(
        "ppo/ess",
        "Effective sample size",
        "Share of the data that still counts after importance weighting.",
    ),
)


@dataclass
class PPOConfig(Bounded, place="algorithm"):
    """Settings of `PPO`. Sizes are in decisions unless ``minibatch_unit`` is "trajectory".

    Advantage: ``advantage`` one of gae, vtrace, grpo, rloo, reinforce++; ``gamma`` and
    ``gae_lambda`` (λ per decision); ``vtrace_rho_cap`` and ``vtrace_c_cap`` are ρ̄ and c̄ of
    V-trace, for data of older policies (`estimators.VTrace`); ``bootstrap_truncated`` False makes
    running out of time worth nothing: right where success within the time limit is the task and the
    critic sees the time left; a critic that predicts value beyond the limit would reward being
    slow. ``gamma_per_control_step`` discounts by gamma**executed steps. Groups: ``group_center``,
    ``group_scale``, ``virtual_best`` and ``best_score`` as in `grpo_advantages`. Several rewards:
    ``reward_names`` and ``reward_weights``; ``decouple_rewards`` normalises each on its own (GDPO,
    with advantage grpo). ``normalize_advantage``: "batch", "minibatch", "none", or "auto" (batch
    for gae, none for the others). ``skip_zero_advantage`` leaves out decisions whose advantage is
    exactly 0 (all-same groups, MC-GRPO's median).

    Loss: ``ratio_level`` token, step, denoising_step or chunk; ``ratio_reduction`` sum or mean
    (over a ratio's executed entries; with mean a much smaller clip range fits);
    ``loss_aggregation`` token, trajectory or step_count; ``clip_low``, ``clip_high``, ``dual_clip``
    (None is off); a policy may scale advantage and clip range per log-prob entry; ``value_clip``,
    ``value_huber_delta`` (None is off) and ``value_coef``; ``entropy_coef`` on the mean entropy per
    token; ``kl_coef`` with ``kl_kind`` towards the reference policy; ``success_imitation_coef`` on
    −log-prob per token of what successful episodes did; ``memory`` keeps successes and imitates
    them again after each update (`MemoryConfig`). Stale data: ``behavior_weight`` "truncate" weighs
    each entry by how much likelier the policy at the start of the update makes it than the one that
    acted, at most ``behavior_cap`` times; "mask" also drops what is beyond it either way (decoupled
    PPO, `surrogate`).

    Optimisation: ``minibatch_size`` per update, run in slices of ``micro_batch_size`` decisions
    (None: at once); ``critic_epochs`` (None: as ``epochs``) and ``critic_minibatch_size`` for a
    separate critic; ``warmup_iterations`` (0: none) raise the policy's learning rate linearly,
    after those that train the critic alone; ``decay_iterations`` (0: none) lowers it linearly, down
    to ``min_learning_rate_fraction`` of it. ``critic_warmup_iterations`` train the critic alone.
    ``target_kl`` ends the policy's epochs early; with ``adaptive_learning_rate`` the learning rate
    becomes that at which all of an iteration's updates make it (`optim.adapted_rate`). ``offload_optimizer`` keeps the
    optimiser's state (float32) in host memory. ``autocast`` uses bf16 on CUDA. ``max_bad_updates``
    non-finite updates in a row raise `TrainingDiverged`.
    """

    diagnostics: ClassVar = _PPO_FIGURES
    movement: ClassVar = Movement(
        updates_total="ppo/updates_total",
        skipped_total="ppo/skipped_updates",
        approx_kl="ppo/approx_kl",
        zero_advantages="ppo/zero_advantage_fraction",
        critic_alone="ppo/critic_warmup",
    )

    # gae | vtrace | grpo | rloo | reinforce++, or your own package.module:Class
    advantage: str = told_by("gae", _check_advantage)
    # discount per decision, or per control step with gamma_per_control_step
    gamma: float = bound(0.99, ge=0, le=1)
    # λ per decision
    gae_lambda: float = bound(0.95, ge=0, le=1)
    # ρ̄ of V-trace: cap of the weight of a decision's own error
    vtrace_rho_cap: float = bound(1.0, gt=0)
    # c̄ of V-trace: cap of the weight by which later errors come back
    vtrace_c_cap: float = bound(1.0, gt=0)
    # running out of time is worth what the critic says; false: nothing, as where the time limit is
    # part of the task
    bootstrap_truncated: bool = True
    gamma_per_control_step: bool = False
    # what a group's scores are compared with
    group_center: str = bound("mean", choices=CENTERS)
    # what the difference is divided by
    group_scale: str = bound("std", choices=SCALES)
    # when a score of best_score is added to a group
    virtual_best: str = bound("none", choices=VIRTUAL_BEST)
    # that score
    best_score: float = 1.0
    # parts of a combined reward that are taken apart; empty: their sum
    reward_names: list[str] = field(default_factory=list)
    # one weight for each of them
    reward_weights: list[float] = field(default_factory=list)
    decouple_rewards: bool = False
    # auto: batch for gae, none for the others
    normalize_advantage: str = bound("auto", choices=("auto", "batch", "minibatch", "none"))
    skip_zero_advantage: bool = False

    # what one likelihood ratio is of
    ratio_level: str = bound("token", choices=LEVELS)
    # over a ratio's executed entries
    ratio_reduction: str = bound("sum", choices=REDUCTIONS)
    # what counts alike in the loss
    loss_aggregation: str = bound("token", choices=AGGREGATIONS)
    # the ratio is clipped below 1 - clip_low
    clip_low: float = bound(0.2, ge=0)
    # and above 1 + clip_high
    clip_high: float = bound(0.2, ge=0)
    # bound of the loss where the advantage is negative; null: none
    dual_clip: float | None = bound(None, ge=1)
    # weight of the value head's loss
    value_coef: float = bound(0.5, ge=0)
    # most that a value may move in an update; null: no limit
    value_clip: float | None = bound(None, ge=0)
    # from which error on the value loss is linear; null: squared
    value_huber_delta: float | None = None
    # weight of the mean entropy per token
    entropy_coef: float = bound(0.0, ge=0)
    # weight of the KL towards the policy that RL starts from; 0: none is kept
    kl_coef: float = bound(0.0, ge=0)
    # its estimator
    kl_kind: str = bound("k3", choices=KL_KINDS)
    # weight of imitating what successful episodes did, per token
    success_imitation_coef: float = bound(0.0, ge=0)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    # how decisions of older policies are weighed
    behavior_weight: str = bound("none", choices=("none", "truncate", "mask"))
    # largest such weight
    behavior_cap: float = bound(2.0, ge=1)

    # passes over the batch
    epochs: int = bound(3, ge=1)
    # decisions (or trajectories) of one update
    minibatch_size: int = bound(256, ge=1)
    # what minibatch_size counts
    minibatch_unit: str = bound("decision", choices=("decision", "trajectory"))
    # decisions that go through at once, to save memory; null: the whole minibatch
    micro_batch_size: int | None = bound(None, ge=1)
    # of the policy (AdamW)
    learning_rate: float = bound(1e-4, ge=0)
    # iterations in which the policy's learning rate rises; 0: none
    warmup_iterations: int = bound(0, ge=0)
    # iterations over which it falls; 0: it stays
    decay_iterations: int = bound(0, ge=0)
    # share of the learning rate that it falls to
    min_learning_rate_fraction: float = bound(0.1, ge=0, le=1)
    # of a separate critic
    critic_learning_rate: float = bound(1e-3, ge=0)
    # passes of a separate critic; null: as epochs
    critic_epochs: int | None = bound(None, ge=0)
    # decisions of one update of a separate critic
    critic_minibatch_size: int = bound(256, ge=1)
    # first iterations, which train the critic alone
    critic_warmup_iterations: int = bound(0, ge=0)
    # of AdamW
    betas: list[float] = several([0.9, 0.999], ge=0, lt=1, least=2, most=2)
    # of AdamW
    weight_decay: float = bound(0.0, ge=0)
    # keep the optimiser's state in host memory
    offload_optimizer: bool = False
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = bound(1.0, gt=0)
    # KL at which an iteration's epochs end; null: they never end early
    target_kl: float | None = bound(None, gt=0)
    # let the KL set the learning rate too: down at once, up by 1.5 at a time, within [÷10, ×10]
    adaptive_learning_rate: bool = False
    # ask the policy at the start of the update for its log-probs instead of taking those from
    # acting
    recompute_old_log_prob: bool = True
    # bfloat16 on CUDA
    autocast: bool = True
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of the minibatches; 0: the run's seed
    seed: int = 0

    @property
    def mirrors(self) -> bool:
        """Whether some rows are shown in the robot's mirror."""
        return bool(self.remembered and self.memory.augment.mirror)

    @property
    def remembered(self) -> int:
        """Successes of each task that are kept."""
        return self.memory.episodes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_vtrace()
        for name in ("warmup_iterations", "decay_iterations"):
            if getattr(self, name) and self.adaptive_learning_rate:
                raise ConfigError(
                    f"algorithm.{name}={getattr(self, name)} and "
                    "algorithm.adaptive_learning_rate=true both set the learning rate; choose one"
                )
        if len(self.reward_names) != len(self.reward_weights):
            raise ConfigError(
                f"algorithm.reward_names={list(self.reward_names)!r} and "
                f"algorithm.reward_weights={list(self.reward_weights)!r} differ in length; give "
                "one weight per name"
            )
        if self.decouple_rewards and self.advantage != "grpo":
            raise ConfigError(
                f"algorithm.decouple_rewards=true (GDPO) needs algorithm.advantage=grpo, got "
                f"{self.advantage!r}"
            )
        if self.decouple_rewards and self.group_scale == "running_std":
            raise ConfigError(
                "algorithm.decouple_rewards=true cannot share one running_std between "
                "rewards; use algorithm.group_scale=std"
            )
        if self.adaptive_learning_rate and self.target_kl is None:
            raise ConfigError(
                "algorithm.adaptive_learning_rate=true needs algorithm.target_kl; set it (0.01 is "
                "a usual start)"
            )

    def _check_vtrace(self) -> None:
        if self.vtrace_c_cap > self.vtrace_rho_cap:
            raise ConfigError(
                f"algorithm.vtrace_c_cap={self.vtrace_c_cap:g} must be at most "
                f"algorithm.vtrace_rho_cap={self.vtrace_rho_cap:g}, or what comes later would be "
                "believed more than what was seen"
            )
        if self.advantage == "vtrace" and not self.recompute_old_log_prob:
            raise ConfigError(
                "algorithm.advantage=vtrace weighs decisions by how likely they are now, which "
                "algorithm.recompute_old_log_prob=false does not ask: use "
                "recompute_old_log_prob=true, or advantage=gae"
            )

    def check_policy(self, policy: Any) -> None:
        """Raise `ConfigError` where the ratio would join entries that ``policy`` (or its config)
        samples together.

        With noise shared over h control steps (correlation ρ), a mean that moves by d standard
        deviations gives the ratio of a whole chunk the mean exp(½·d²·h·(h − 1)·ρ) instead of 1:
        1.25 for d = 0.1, h = 8, ρ = 0.8.
        """
        kept = KEPT_AXIS.get(self.ratio_level)
        joined = [axis for axis in view(policy, PolicyOptions).correlated_axes if axis != kept]
        if self.ratio_level == "token" or not joined:
            return
        raise ConfigError(
            f"algorithm.ratio_level={self.ratio_level} takes the entries along {', '.join(joined)} "
            "for independent, and policy.noise_correlation ties them together: the ratio's mean "
            "would not be 1 and clipping would decide the update. Set algorithm.ratio_level=token "
            "or policy.noise_correlation=0"
        )
