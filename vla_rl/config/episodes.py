"""The options of what runs and judges episodes, apart from the code that computes: checking a
config needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_rl import build
from vla_rl.bounds import Bounded, bound
from vla_rl.config.algorithms import advantage_of
from vla_rl.config.schema import checked
from vla_rl.errors import ConfigError
from vla_rl.options import AlgorithmOptions, ShapingOptions, methods, view
from vla_rl.splits import SPLITS

ON_BAD = ("stop", "warn")
EPISODE_SECONDS = {
    f"episode_seconds_{name}": q
    for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0))
}
"""Figures of the episodes that ended: quantiles over them of the seconds that the simulator
worked for one."""
FIRST_TEST_STATE = 1_000_000
"""Where the test set begins in a split that has no end."""
NORMALISE = ("none", "running_std", "range")


def refuse_potential(shaping: Any, algorithm: Any) -> None:
    """Raise `ConfigError` for a potential under group-relative advantages: its sum over an episode
    is the same whatever the policy does, so that no member of a group would differ; and for one
    whose discount is not, or may not be, that of the algorithm: γ Φ(s') − Φ(s) leaves the best
    policy as it is for the γ by which rewards are added up alone (Ng, Harada and Russell 1999,
    theorem 1). With another γ' each step pays (γ' − γ) Φ(s') beside it, for being where the
    potential is high."""
    if view(shaping, ShapingOptions).mode != "potential" or not shaping.weight:
        return
    if shaping.gamma < 0 and view(algorithm, AlgorithmOptions).gamma is None:
        raise ConfigError(
            f"reward.shaping.gamma={shaping.gamma:g} takes the discount of the algorithm, and "
            f"{type(algorithm).__name__} has no option 'gamma': call its discount so, or give "
            "reward.shaping.gamma (1: nothing is discounted)"
        )
    own = view(algorithm, AlgorithmOptions)
    if own.gamma is not None and shaping.gamma >= 0 and not math.isclose(shaping.gamma, own.gamma):
        raise ConfigError(
            f"reward.shaping.gamma={shaping.gamma:g} is not algorithm.gamma={own.gamma:g}: a "
            "potential with another discount than the learner's changes which policy is best. "
            "Leave reward.shaping.gamma out, or set both alike"
        )
    gamma = shaping.gamma if shaping.gamma >= 0 else own.gamma
    if (
        own.gamma is not None
        and shaping.gamma_per_control_step
        and not own.gamma_per_control_step
        and gamma != 1.0
    ):
        raise ConfigError(
            "reward.shaping.gamma_per_control_step=true discounts by the control step, and "
            f"algorithm.type={type(algorithm).__name__} by the decision: leave it out, or set "
            "algorithm.gamma_per_control_step=true"
        )
    if advantage_of(algorithm).grouped:
        raise ConfigError(
            "reward.shaping.mode=potential tells the episodes of a group nothing apart, and "
            f"algorithm.advantage={algorithm.advantage} compares nothing else: set "
            "reward.shaping.mode=final or delta, or algorithm.advantage=gae"
        )


@dataclass
class RolloutConfig(Bounded, place="rollout"):
    """How episodes are run.

    ``serve_fraction`` (0 to 1): the share of live slots that must wait before the policy serves
    them. ``replan_steps``: control steps executed of each chunk before the policy is asked again
    (0: the whole chunk). ``max_retries``: how often one episode may run again after it made its
    simulator fail or its worker die (episodes that are lost because they shared that worker always
    run again).
    """

    serve_fraction: float = bound(0.5, ge=0, le=1)
    replan_steps: int = bound(0, ge=0)
    max_retries: int = bound(2, ge=0)


@dataclass
class EvaluateConfig(Bounded, place="evaluate"):
    """What is evaluated. ``video_episodes`` episodes (the first of each task in turn) are kept for
    the video, and beside them the first one of each kind of failure; 0 keeps none.

    ``sampled_too`` also measures the start of RL with sampled actions, which is where RL starts
    from (None: where the policy's decision is a chain of denoising steps, whose noise can cost
    success).

    ``test_episodes`` are those of each task in the test set: held-out initial states that no choice
    sees, while the first ``episodes_per_task`` choose ``checkpoints/best`` and whatever else is
    chosen by looking at them. The phase ``eval_test`` meets them once, after training.
    """

    # episodes of each task
    episodes_per_task: int = bound(100, ge=1)
    # which initial states
    split: str = bound("held_out", choices=SPLITS)
    # of the episodes that are chosen
    seed: int = 0
    # the policy takes its most likely action instead of a sample
    deterministic: bool = True
    sampled_too: bool | None = None
    video_episodes: int = bound(12, ge=0)
    # episodes of each task in the test set, which the phase eval_test meets
    test_episodes: int = bound(100, ge=1)

    def test_states(self, env: Any) -> range:
        """The initial states of the test set, in the env of this config: held-out ones far behind
        the others, or the last where there are few. Raises `ConfigError` where they would be among
        the others."""
        counted = methods(env).state_count
        count = None if counted is None else counted("held_out")
        first = FIRST_TEST_STATE if count is None else count - self.test_episodes
        if self.episodes_per_task > max(first, 0):
            there = "1000000 before the test set" if count is None else f"{count} of each task"
            raise ConfigError(
                f"evaluate.episodes_per_task={self.episodes_per_task} and "
                f"evaluate.test_episodes={self.test_episodes} have to share no initial state, and "
                f"of the held-out ones there are {there}: choose fewer of both, such as half each"
            )
        return range(first, first + self.test_episodes)


@dataclass
class RewardCheckConfig(Bounded, place="reward_check"):
    """Training and judging a learned reward before RL (phase ``reward``), and refitting it during
    RL.

    Demonstrations (at most ``demonstrations`` of them, a frame every ``stride`` control steps) and
    ``episodes`` rollouts of the policy RL starts from are the data; a ``held_out_share`` of the
    rollouts is for judging alone. The verdict is bad where AUC at equal times < ``min_auc`` or that
    of proprioception alone, VOC < ``min_voc``, the share of invalid curves > ``max_invalid``;
    ``on_bad`` stop or warn. ``refit_every`` iterations (0: never) the reward is trained on the
    run's own rollouts, of which the last ``buffer_episodes`` are kept, and the old one stays where
    that AUC on held-out ones falls by more than ``guard_tolerance``.
    """

    # control steps between two frames
    stride: int = bound(4, ge=1)
    # demonstrations that are used, at most
    demonstrations: int = bound(100, ge=0)
    # rollouts of the policy that RL starts from
    episodes: int = bound(64, ge=2)
    # share of the rollouts that only judge
    held_out_share: float = bound(0.4, gt=0, lt=1)
    # least area under the ROC curve of success, at equal times
    min_auc: float = bound(0.7, ge=0, le=1)
    # least rank correlation of progress with time on successes (VOC)
    min_voc: float = bound(0.3, ge=-1, le=1)
    # largest share of invalid curves
    max_invalid: float = bound(0.05, ge=0, le=1)
    # what a bad verdict does
    on_bad: str = bound("stop", choices=ON_BAD)
    # iterations between two refits during RL; 0: never
    refit_every: int = bound(0, ge=0)
    # last rollouts that are kept for it
    buffer_episodes: int = bound(256, ge=8)
    # fall of the held-out AUC up to which the new one is taken
    guard_tolerance: float = bound(0.02, ge=0)


@dataclass
class CombinedConfig(Bounded, place="reward"):
    """``parts``: {name: {weight: 1.0, type: <reward, default: the name>, and that reward's own
    keys}}.

    ``normalise``: what each part is divided by before it is weighted and summed: "running_std" (the
    running standard deviation of its sums over trajectories), "range" (the largest such sum so far)
    or "none". The sums of a potential telescope to next to nothing, so for such a part it is the
    reward to go of each decision instead. Only the scale changes, so that what pays still pays. For
    GDPO give the parts' names as ``algorithm.reward_names`` too.
    """

    parts: dict[str, Any] = field(default_factory=lambda: {"success": {"weight": 1.0}})
    normalise: str = bound("running_std", choices=NORMALISE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise ConfigError(
                "reward.parts={} is empty: name at least one reward, e.g. "
                "reward.parts.success.weight=1"
            )
        weights = [self.part(name, part)[2] for name, part in self.parts.items()]
        if not any(weights):
            raise ConfigError(
                f"reward.parts {', '.join(self.parts)} all have weight 0, so nothing "
                "is paid: raise one"
            )

    def part(self, name: str, part: Any) -> tuple[str, Any, float]:
        """(type, config, weight) of one part, checked."""
        if not isinstance(part, Mapping):
            raise ConfigError(
                f"reward.parts.{name} is {part!r}, it must be a mapping such as {{weight: 0.5}}"
            )
        options = dict(part)
        kind, weight = options.pop("type", name), options.pop("weight", 1.0)
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise ConfigError(f"reward.parts.{name}.weight is {weight!r}, it must be a number")
        if kind == "combined":
            raise ConfigError(
                f"reward.parts.{name} is itself combined: list its parts here instead"
            )
        return (
            str(kind),
            checked(build.config_class("reward", str(kind)), options, f"reward.parts.{name}"),
            float(weight),
        )


@dataclass
class DistillConfig(Bounded, place="distill"):
    """``steps`` of the student and the ``method`` it learns by (the policy says which there are).

    ``episodes`` of the teacher give the observations; ``updates`` of ``batch_size`` observations
    with ``noises`` first noises each; learning rate with warm-up and cosine. ``updates`` 0 takes
    over a student that learnt beside RL. ``evaluate_episodes`` (0: none) of the held-out split
    compare teacher and student.
    """

    steps: int = bound(1, ge=1)
    method: str = "same_noise"
    episodes: int = bound(100, ge=1)
    updates: int = bound(1000, ge=0)
    batch_size: int = bound(64, ge=1)
    noises: int = bound(2, ge=1)
    learning_rate: float = bound(5e-4, gt=0)
    warmup_updates: int = 50
    grad_clip: float = 1.0
    evaluate_episodes: int = bound(200, ge=0)
    seed: int = 0
