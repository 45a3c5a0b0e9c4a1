"""Value as progress (GR-RL, arXiv 2512.01801): a distributional critic's mean is progress, and
where it drops a demonstration is not worth imitating.

Followed: sparse reward γ^(frames to the end) for successes, 0 for failures; a categorical
distribution over [0, 1]; the drop filter. Hindsight failures: with ``hindsight_share`` a prefix of
a success counts as a failed episode, here cut at a random frame in its first half (there, at
annotated retries). Departure: Monte-Carlo targets of V, not TD3+BC on Q of action chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reward_models.learned import LearnedReward
from reward_models.network import FrameTable, mlp
from reward_models.progress_math import drop_filter
from reward_models.settings import ValueProgressConfig
from vla_rl.types import Trajectory


def two_hot(values: Tensor, bins: int) -> Tensor:
    """Values [n] in 0 … 1 as weights [n bins] on the two nearest of ``bins`` evenly spaced
    support points."""
    position = values.clamp(0.0, 1.0) * (bins - 1)
    low = position.floor().long().clamp(max=bins - 2)
    share = position - low
    weights = values.new_zeros(len(values), bins)
    weights.scatter_(1, low[:, None], (1.0 - share)[:, None])
    return weights.scatter_add_(1, low[:, None] + 1, share[:, None])


class ValueProgress(LearnedReward):
    kind = "value_progress"
    config: ValueProgressConfig

    def make_head(self, width: int) -> nn.Module:
        return mlp(width, 2 * width, self.config.bins)

    def before_fit(self, table: FrameTable) -> dict[str, float]:
        targets = torch.zeros(len(table))
        for k in torch.nonzero(table.success).flatten().tolist():
            start, last = int(table.starts[k]), int(table.lengths[k]) - 1
            left = (last - torch.arange(last + 1)) / max(last, 1)
            targets[start : start + last + 1] = self.config.end_value**left
        self._targets = targets
        early = [
            int(table.starts[k]) + i
            for k in torch.nonzero(table.success).flatten().tolist()
            for i in range(int(table.lengths[k]) // 2)
        ]
        self._early = torch.tensor(early, dtype=torch.long)
        return {"mean_target": float(targets.mean())}

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        hindsight = round(self.config.hindsight_share * batch) if len(self._early) else 0
        rows = self.draw(len(table), batch - hindsight)
        targets = self._targets[rows]
        if hindsight:
            rows = torch.cat([rows, self._early[self.draw(len(self._early), hindsight)]])
            targets = torch.cat([targets, torch.zeros(hindsight)])
        logits = self.head(self.fitted_network(table, rows))
        weights = two_hot(targets, self.config.bins).to(logits.device)
        return -(weights * logits.log_softmax(-1)).sum(-1).mean()

    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        support = torch.linspace(0.0, 1.0, self.config.bins, device=features.device)
        return list((self.head(features).softmax(-1) @ support).split(list(lengths)))

    def keep_masks(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Which decisions of demonstrations to imitate: bool [t] each, False where the value
        soon drops."""
        c = self.config
        return [
            drop_filter(v, c.drop_window, c.drop_threshold) for v in self.progress(trajectories)
        ]
