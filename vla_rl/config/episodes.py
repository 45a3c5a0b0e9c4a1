"""The options of what runs and judges episodes, apart from the code that computes: checking a
config needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_rl import build
from vla_rl.asked import AlgorithmOptions, ShapingOptions, asked
from vla_rl.config.algorithms import advantage_of
from vla_rl.config.schema import checked
from vla_rl.errors import ConfigError
from vla_rl.splits import check_split

ON_BAD = ("stop", "warn")
EPISODE_SECONDS = {
    f"episode_seconds_{name}": q
    for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0))
}
"""Figures of the episodes that ended: quantiles over them of the seconds that the simulator
worked for one."""
NORMALISE = ("none", "running_std", "range")


def refuse_potential(shaping: Any, algorithm: Any) -> None:
    """Raise `ConfigError` for a potential under group-relative advantages: its sum over an episode
    is the same whatever the policy does, so that no member of a group would differ; and for one
    whose discount is not, or may not be, that of the algorithm: γ Φ(s') − Φ(s) leaves the best
    policy as it is for the γ by which rewards are added up alone (Ng, Harada and Russell 1999,
    theorem 1). With another γ' each step pays (γ' − γ) Φ(s') beside it, for being where the
    potential is high."""
    if asked(shaping, ShapingOptions).mode != "potential" or not shaping.weight:
        return
    if shaping.gamma < 0 and asked(algorithm, AlgorithmOptions).gamma is None:
        raise ConfigError(
            f"reward.shaping.gamma={shaping.gamma:g} takes the discount of the algorithm, and "
            f"{type(algorithm).__name__} has no option 'gamma': call its discount so, or give "
            "reward.shaping.gamma (1: nothing is discounted)"
        )
    own = asked(algorithm, AlgorithmOptions)
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
class RolloutConfig:
    """How episodes are run.

    ``serve_fraction`` (0 to 1): the share of live slots that must wait before the policy serves
    them. ``replan_steps``: control steps executed of each chunk before the policy is asked again
    (0: the whole chunk). ``max_retries``: how often one episode may run again after it made its
    simulator fail or its worker die (episodes that are lost because they shared that worker always
    run again).
    """

    serve_fraction: float = 0.5
    replan_steps: int = 0
    max_retries: int = 2

    def __post_init__(self) -> None:
        if not 0.0 <= self.serve_fraction <= 1.0:
            raise ConfigError(
                f"rollout.serve_fraction={self.serve_fraction} must lie between 0 and 1."
            )
        if self.replan_steps < 0 or self.max_retries < 0:
            raise ConfigError(
                f"rollout.replan_steps and max_retries must be >= 0, got {self.replan_steps} and "
                f"{self.max_retries}."
            )


@dataclass
class EvaluateConfig:
    """What is evaluated. ``video_episodes`` episodes (the first of each task in turn) are kept for
    the video, and beside them the first one of each kind of failure; 0 keeps none.

    ``sampled_too`` also measures the start of RL with sampled actions, which is where RL starts
    from (None: where the policy's decision is a chain of denoising steps, whose noise can cost
    success).
    """

    # episodes of each task
    episodes_per_task: int = 100
    # which initial states: held_out | train
    split: str = "held_out"
    # of the episodes that are chosen
    seed: int = 0
    # the policy takes its most likely action instead of a sample
    deterministic: bool = True
    sampled_too: bool | None = None
    video_episodes: int = 12

    def __post_init__(self) -> None:
        check_split(self.split, "evaluate.split")
        if self.episodes_per_task < 1 or self.video_episodes < 0:
            raise ConfigError(
                "evaluate needs episodes_per_task >= 1 and video_episodes >= 0, got "
                f"{self.episodes_per_task} and {self.video_episodes}"
            )


@dataclass
class RewardCheckConfig:
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
    stride: int = 4
    # demonstrations that are used, at most
    demonstrations: int = 100
    # rollouts of the policy that RL starts from
    episodes: int = 64
    # share of the rollouts that only judge
    held_out_share: float = 0.4
    # least area under the ROC curve of success, at equal times
    min_auc: float = 0.7
    # least rank correlation of progress with time on successes (VOC)
    min_voc: float = 0.3
    # largest share of invalid curves
    max_invalid: float = 0.05
    # stop | warn: what a bad verdict does
    on_bad: str = "stop"
    # iterations between two refits during RL; 0: never
    refit_every: int = 0
    # last rollouts that are kept for it
    buffer_episodes: int = 256
    # fall of the held-out AUC up to which the new one is taken
    guard_tolerance: float = 0.02

    def __post_init__(self) -> None:
        if self.on_bad not in ON_BAD:
            raise ConfigError(
                f"reward_check.on_bad is {self.on_bad!r}, choose one of {', '.join(ON_BAD)}"
            )
        if (
            self.stride < 1
            or self.demonstrations < 0
            or self.episodes < 2
            or self.refit_every < 0
            or self.buffer_episodes < 8
        ):
            raise ConfigError(
                "reward_check needs stride >= 1, demonstrations >= 0, episodes >= 2, refit_every "
                f">= 0 and buffer_episodes >= 8, got {self.stride}, {self.demonstrations}, "
                f"{self.episodes}, {self.refit_every} and {self.buffer_episodes}"
            )
        if (
            not 0.0 < self.held_out_share < 1.0
            or not 0.0 <= self.min_auc <= 1.0
            or not -1.0 <= self.min_voc <= 1.0
        ):
            raise ConfigError(
                "reward_check needs 0 < held_out_share < 1, 0 <= min_auc <= 1 and -1 <= min_voc <= "
                f"1, got {self.held_out_share}, {self.min_auc} and {self.min_voc}"
            )
        if not 0.0 <= self.max_invalid <= 1.0 or self.guard_tolerance < 0:
            raise ConfigError(
                "reward_check needs 0 <= max_invalid <= 1 and guard_tolerance >= 0, got "
                f"{self.max_invalid} and {self.guard_tolerance}"
            )


@dataclass
class CombinedConfig:
    """``parts``: {name: {weight: 1.0, type: <reward, default: the name>, and that reward's own
    keys}}.

    ``normalise``: what each part is divided by before it is weighted and summed: "running_std" (the
    running standard deviation of its sums over trajectories), "range" (the largest such sum so far)
    or "none". The sums of a potential telescope to next to nothing, so for such a part it is the
    reward to go of each decision instead. Only the scale changes, so that what pays still pays. For
    GDPO give the parts' names as ``algorithm.reward_names`` too.
    """

    parts: dict[str, Any] = field(default_factory=lambda: {"success": {"weight": 1.0}})
    normalise: str = "running_std"

    def __post_init__(self) -> None:
        if self.normalise not in NORMALISE:
            raise ConfigError(
                f"reward.normalise is {self.normalise!r}, choose one of {', '.join(NORMALISE)}"
            )
        if not self.parts:
            raise ConfigError(
                "reward.parts is empty: name at least one reward, e.g. "
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
class DistillConfig:
    """``steps`` of the student and the ``method`` it learns by (the policy says which there are).

    ``episodes`` of the teacher give the observations; ``updates`` of ``batch_size`` observations
    with ``noises`` first noises each; learning rate with warm-up and cosine. ``updates`` 0 takes
    over a student that learnt beside RL. ``evaluate_episodes`` (0: none) of the held-out split
    compare teacher and student.
    """

    steps: int = 1
    method: str = "same_noise"
    episodes: int = 100
    updates: int = 1000
    batch_size: int = 64
    noises: int = 2
    learning_rate: float = 5e-4
    warmup_updates: int = 50
    grad_clip: float = 1.0
    evaluate_episodes: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("episodes", 1),
            ("updates", 0),
            ("batch_size", 1),
            ("noises", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"distill {name} is {getattr(self, name)}, it must be at least {least}"
                )
        if self.evaluate_episodes < 0 or not self.learning_rate > 0:
            raise ConfigError(
                "distill needs evaluate_episodes >= 0 and learning_rate > 0, got "
                f"{self.evaluate_episodes} and {self.learning_rate}"
            )
