"""What several places ask of any reward model, whatever it offers beyond `score`
(`vla_rl.interfaces.RewardModel`)."""

from __future__ import annotations

from typing import Any

from vla_rl.interfaces import RewardModel
from vla_rl.options import RewardOptions, config_of, view


def is_fitted(reward: Any) -> bool:
    """Whether a learned reward can score already."""
    if RewardModel.of(reward).parts:
        return all(is_fitted(part.reward) for part in reward.parts.values() if part.reward.learned)
    return bool(reward.state_dict().get("fitted", True))


def state_of(reward: Any) -> dict[str, Any] | None:
    """What changes of it in a run; None for one that stays as it is."""
    return reward.state_dict() if "state" in RewardModel.of(reward).can else None


def shaping_of(reward: Any) -> Any:
    """How its config shapes progress into rewards; None where it does not."""
    return view(config_of(reward), RewardOptions).shaping
