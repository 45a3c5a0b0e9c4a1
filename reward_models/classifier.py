"""Success classifier from frames (HIL-SERL's recipe, arXiv 2410.21845): a backbone, a small head,
balanced classes, a split by trajectory, and a threshold chosen on the held-out part.

Departure: the default backbone is small and trained with the head; ``network.backbone`` = a timm
name with weights gives the frozen one of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models.learned import LearnedReward
from reward_models.network import FrameTable, mlp
from reward_models.progress_math import done_label
from reward_models.settings import ClassifierConfig
from vla_rl.errors import UserError
from vla_rl.types import Trajectory


def best_threshold(probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    """The threshold with the highest balanced accuracy, in the middle of the gap where several do
    as well, and that accuracy."""
    order = probabilities.unique()
    cuts = (
        torch.cat([order[:1] / 2, (order[:-1] + order[1:]) / 2])
        if len(order) > 1
        else torch.tensor([0.5])
    )
    hits = torch.stack([(probabilities >= c) for c in cuts])
    accuracy = (hits[:, labels].float().mean(1) + (~hits[:, ~labels]).float().mean(1)) / 2
    best = torch.nonzero(accuracy >= accuracy.max() - 1e-9).flatten()
    return float(cuts[best[len(best) // 2]]), float(accuracy.max())


class SuccessClassifier(LearnedReward):
    kind = "classifier"
    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig):
        super().__init__(config)
        self.threshold = config.threshold or 0.5

    def make_head(self, width: int) -> nn.Module:
        return mlp(width, width, 1)

    def fit(
        self,
        trajectories: Sequence[Trajectory],
        progress: Callable[[int, float], None] | None = None,
    ) -> dict[str, float]:
        """As `LearnedReward.fit`; also ``threshold``, ``held_out_accuracy`` (balanced, on ends the
        training did not see) and ``held_out``, the number of those. Raises `UserError` without both
        successes and failures."""
        won = [t for t in trajectories if t.success]
        lost = [t for t in trajectories if not t.success]
        if not won or not lost:
            raise UserError(
                f"the classifier needs successes and failures, got {len(won)} and {len(lost)}: add "
                "rollouts of a policy that fails at times (demonstrations alone never fail)"
            )
        held, train = [], []
        for group in (won, lost):
            share = max(1, round(self.config.held_out_share * len(group))) if len(group) > 1 else 0
            order = torch.randperm(len(group), generator=self.generator).tolist()
            held += [group[i] for i in order[:share]]
            train += [group[i] for i in order[share:]]
        figures = super().fit(train, progress)
        judged = (
            held if any(t.success for t in held) and any(not t.success for t in held) else train
        )
        probabilities = torch.stack([self._probabilities([t])[0][-1] for t in judged])
        found, accuracy = best_threshold(probabilities, torch.tensor([t.success for t in judged]))
        self.threshold = self.config.threshold or found
        return {
            **figures,
            "threshold": self.threshold,
            "held_out_accuracy": accuracy,
            "held_out": float(len(held)),
        }

    def before_fit(self, table: FrameTable) -> dict[str, float]:
        positive: list[int] = []
        negative: list[int] = []
        for k, won in enumerate(table.success.tolist()):
            start, last = int(table.starts[k]), int(table.lengths[k]) - 1
            for i in range(last + 1):
                label = done_label(i, last) if won else 0
                if label is not None:
                    (positive if label else negative).append(start + i)
        self._positive, self._negative = torch.tensor(positive), torch.tensor(negative)
        return {"positive_frames": float(len(positive)), "negative_frames": float(len(negative))}

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        half = max(1, batch // 2)
        rows = torch.cat(
            [pool[self.draw(len(pool), half)] for pool in (self._positive, self._negative)]
        )
        logits = self.head(self.fitted_network(table, rows)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(
            logits, torch.cat([torch.ones(half), torch.zeros(half)]).to(logits.device)
        )

    @torch.no_grad()
    def _probabilities(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        table = FrameTable.of(trajectories, self.fitted_network.cameras)
        return [
            p.cpu()
            for p in torch.sigmoid(self.head(self.fitted_network.of_all(table)).squeeze(-1)).split(
                table.lengths.tolist()
            )
        ]

    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        return list(torch.sigmoid(self.head(features).squeeze(-1)).split(list(lengths)))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """With shaping mode "final": ``weight`` where the end is above the threshold, else 0;
        else as `LearnedReward`."""
        rewards = super().score(trajectories)
        if self.config.shaping.mode == "final":
            c = self.config.shaping
            for t, reward in zip(trajectories, rewards):
                judged = float(reward[-1] - c.success_coefficient * float(t.success))
                passed = judged >= c.weight * self.threshold
                reward[-1] = c.weight * float(passed) + c.success_coefficient * float(t.success)
        return rewards

    def extra_state(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.threshold = self.config.threshold or float(state["threshold"])
