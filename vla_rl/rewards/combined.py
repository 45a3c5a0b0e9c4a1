"""A reward that is a weighted sum of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.advantages import (
    RunningScale,
    decision_discounts,
    decision_rewards,
    discounted_returns,
)
from vla_rl.config.episodes import CombinedConfig
from vla_rl.errors import UserError
from vla_rl.interfaces import RewardModel
from vla_rl.options import ShapingOptions, view
from vla_rl.rewards.build import build_reward
from vla_rl.rewards.handle import is_fitted, shaping_of, state_of
from vla_rl.types import Trajectory


@dataclass
class Part:
    # a `RewardModel`, and perhaps more: fitted, asking for demonstrations, estimating progress
    reward: Any
    weight: float
    scale: RunningScale = field(default_factory=RunningScale)
    largest: float = 0.0

    def amounts(self, rewards: Sequence[Tensor], trajectories: Sequence[Trajectory]) -> Tensor:
        """What says how much this part pays: its sum over each trajectory [m]; of a potential,
        which sums to −Φ of the start whatever happens, the discounted reward to go of each decision
        [n], which is −Φ(s) beside the success."""
        shaping = shaping_of(self.reward)
        if view(shaping, ShapingOptions).mode != "potential":
            return torch.stack([r.sum() for r in rewards])
        gamma = shaping.gamma if shaping.gamma >= 0 else 1.0
        valid = torch.cat([t.valid for t in trajectories])
        discounts = decision_discounts(valid, gamma, shaping.gamma_per_control_step)
        paid = decision_rewards(
            torch.cat(list(rewards)), valid, gamma if shaping.gamma_per_control_step else 1.0
        )
        return discounted_returns(paid, discounts, torch.tensor([len(r) for r in rewards]))

    def divisor(self, amounts: Tensor, normalise: str) -> float:
        """What this part is divided by, statistics of its `amounts` taken in first; 1 while
        there is no spread."""
        if normalise == "running_std":
            value = self.scale.update(amounts - amounts.mean())
        elif normalise == "range":
            self.largest = value = max(self.largest, float(amounts.abs().max()))
        else:
            return 1.0
        return value if value > 1e-6 else 1.0


class CombinedReward(RewardModel):
    """Weighted sum of reward models, each normalised for itself."""

    def __init__(
        self, config: CombinedConfig, build_part: Callable[[str, Any], RewardModel] = build_reward
    ):
        self.config = config
        self.parts: dict[str, Part] = {}
        for name, options in config.parts.items():
            kind, part_config, weight = config.part(name, options)
            self.parts[name] = Part(RewardModel.of(build_part(kind, part_config)), weight)
        self._metrics: dict[str, float] = {}

    @property
    def learned(self) -> bool:
        return any(p.reward.learned for p in self.parts.values())

    @property
    def reads_frames(self) -> bool:
        return any(part.reward.reads_frames for part in self.parts.values())

    def score_parts(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """Normalised, not yet weighted rewards of each part: per decision, or of all per control
        step where one is."""
        self._metrics = {}
        out = {}
        for name, part in self.parts.items():
            rewards = part.reward.score(trajectories)
            if rewards:
                sums = torch.stack([r.sum() for r in rewards])
                divisor = part.divisor(part.amounts(rewards, trajectories), self.config.normalise)
                rewards = [r / divisor for r in rewards]
                self._metrics |= {
                    f"reward/{name}_mean": float(sums.mean()),
                    f"reward/{name}_divisor": divisor,
                }
            out[name] = rewards
            for key, value in part.reward.metrics().items():
                self._metrics.setdefault(key, value)
        if any(r.ndim == 2 for rewards in out.values() for r in rewards):
            place = [t.in_last_steps for t in trajectories]
            out = {
                n: [r if r.ndim == 2 else at(r) for at, r in zip(place, rewards)]
                for n, rewards in out.items()
            }
        return out

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """As `RewardModel.score`."""
        return self.total(self.score_parts(trajectories))

    def total(self, parts: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        weighted = [
            [self.parts[name].weight * r for r in rewards] for name, rewards in parts.items()
        ]
        return [torch.stack(list(rows)).sum(0) for rows in zip(*weighted)]

    def prepare(self, trajectory: Trajectory) -> None:
        for part in self.parts.values():
            part.reward.prepare(trajectory)

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    @property
    def wants_demonstrations(self) -> bool:
        return any(p.reward.wants_demonstrations for p in self.parts.values())

    def set_demonstrations(self, trajectories: Sequence[Trajectory]) -> None:
        """Hand demonstrations to the parts that want some before RL."""
        for part in self.parts.values():
            if part.reward.wants_demonstrations:
                part.reward.set_demonstrations(trajectories)

    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Weighted mean of what the parts that estimate progress say. Raises `UserError` where
        none does."""
        able = [p for p in self.parts.values() if "progress" in p.reward.can and p.weight > 0]
        if not able:
            raise UserError(
                f"none of the parts {', '.join(self.parts)} with a positive weight estimates "
                "progress: judge a learned reward"
            )
        total = sum(p.weight for p in able)
        curves = [[p.weight / total * c for c in p.reward.progress(trajectories)] for p in able]
        return [torch.stack(list(rows)).sum(0) for rows in zip(*curves)]

    def fit(
        self,
        trajectories: Sequence[Trajectory],
        progress: Callable[[int, float], None] | None = None,
    ) -> dict[str, float]:
        """Train the parts that are not trained yet, or all learned ones where all are."""
        able = {n: p.reward for n, p in self.parts.items() if p.reward.learned}
        chosen = {n: r for n, r in able.items() if not is_fitted(r)} or able
        figures: dict[str, float] = {}
        for name, reward in chosen.items():
            figures |= {f"{name}_{k}": v for k, v in reward.fit(trajectories, progress).items()}
        return figures

    def state_dict(self) -> dict[str, Any]:
        states = {
            n: state for n, p in self.parts.items() if (state := state_of(p.reward)) is not None
        }
        scales = {
            n: {"scale": p.scale.state_dict(), "largest": p.largest} for n, p in self.parts.items()
        }
        return {"fitted": is_fitted(self), "parts": states, "scales": scales}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, inner in state["parts"].items():
            self.parts[name].reward.load_state_dict(inner)
        for name, saved in state["scales"].items():
            self.parts[name].scale.load_state_dict(saved["scale"])
            self.parts[name].largest = float(saved["largest"])
