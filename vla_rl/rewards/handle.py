"""What several places ask of any reward model, whatever it offers beyond `score`
(`vla_rl.optional`)."""

from __future__ import annotations

from typing import Any

from vla_rl import optional
from vla_rl.asked import RewardOptions, asked, config_of
from vla_rl.types import Trajectory


def is_learned(reward: Any) -> bool:
    """Whether it is trained before it scores."""
    return isinstance(reward, optional.LearnedReward) and bool(reward.learned)


def is_fitted(reward: Any) -> bool:
    """Whether a learned reward can score already."""
    if isinstance(reward, optional.RewardOfParts):
        return all(
            is_fitted(part.reward) for part in reward.parts.values() if is_learned(part.reward)
        )
    return bool(reward.state_dict().get("fitted", True))


def wants_demonstrations(reward: Any) -> bool:
    """Whether ``set_demonstrations`` is to be called before RL."""
    return isinstance(reward, optional.DemonstratedReward) and bool(reward.wants_demonstrations)


def can_prepare(reward: Any) -> bool:
    """Whether a part of its work can be done as each episode ends."""
    return isinstance(reward, optional.PreparingReward)


def prepare(reward: Any, trajectory: Trajectory) -> None:
    """Let it do that part."""
    if isinstance(reward, optional.PreparingReward):
        reward.prepare(trajectory)


def metrics_of(reward: Any) -> dict[str, float]:
    """What the reward model says of its last `score`; empty for one that says nothing."""
    return reward.metrics() if isinstance(reward, optional.ReportingReward) else {}


def state_of(reward: Any) -> dict[str, Any] | None:
    """What changes of it in a run; None for one that stays as it is."""
    return reward.state_dict() if isinstance(reward, optional.StatefulReward) else None


def shaping_of(reward: Any) -> Any:
    """How its config shapes progress into rewards; None where it does not."""
    return asked(config_of(reward), RewardOptions).shaping
