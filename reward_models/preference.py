"""Preference reward: a score per frame whose mean over a trajectory explains pairwise comparisons
(Bradley and Terry 1952; Christiano et al. 2017, arXiv 1706.03741 eq. 1).

Comparisons come from a JSON-lines file, {"preferred": rollout id, "other": rollout id}, that a
person or ``vla-rl reward score --preferences FILE`` (a VLM's judgement) wrote; without one, success
is preferred over failure, and of two successes the shorter one. Only trajectories of one task are
compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models.learned import LearnedReward
from reward_models.network import FrameTable, mlp
from reward_models.settings import PreferenceConfig
from vla_rl.errors import UserError
from vla_rl.types import Trajectory


def read_comparisons(path: str | Path) -> list[tuple[str, str]]:
    """(preferred, other) rollout ids. Raises `UserError` that names the line."""
    pairs = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"reward.comparisons={str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
                pairs.append((str(record["preferred"]), str(record["other"])))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise UserError(
                    f'{path}, line {number}: {line[:80]!r} is not {{"preferred": id, "other": id}} '
                    f"({error})"
                ) from error
    return pairs


def comparisons_by_success(table: FrameTable) -> list[tuple[int, int]]:
    """(better, worse) trajectories of one task: success over failure, and of two successes the
    shorter."""
    order = []
    for a in range(len(table.tasks)):
        for b in range(len(table.tasks)):
            same, won, lost = (
                table.tasks[a] == table.tasks[b],
                bool(table.success[a]),
                bool(table.success[b]),
            )
            if same and won and (not lost or table.lengths[a] < table.lengths[b]):
                order.append((a, b))
    return order


class PreferenceReward(LearnedReward):
    kind = "preference"
    config: PreferenceConfig

    def __init__(self, config: PreferenceConfig):
        super().__init__(config)
        self._centre, self._spread = 0.0, 1.0

    def make_head(self, width: int) -> nn.Module:
        return mlp(width, width, 1)

    def fit(self, trajectories: Sequence[Trajectory], progress: Any = None) -> dict[str, float]:
        """As `LearnedReward.fit`; raises `UserError` where no two trajectories are
        comparable."""
        self._ids = {t.rollout_id: i for i, t in enumerate(trajectories)}
        figures = super().fit(trajectories, progress)
        scores = torch.cat([self._raw(t) for t in trajectories])
        self._centre, self._spread = (
            float(scores.mean()),
            float(scores.std(correction=0).clamp(min=1e-3)),
        )
        return figures

    def before_fit(self, table: FrameTable) -> dict[str, float]:
        if self.config.comparisons:
            named = read_comparisons(self.config.comparisons)
            pairs = [
                (self._ids[a], self._ids[b]) for a, b in named if a in self._ids and b in self._ids
            ]
            if not pairs:
                raise UserError(
                    f"none of the {len(named)} comparisons in {self.config.comparisons} is between "
                    f"two of the {len(self._ids)} trajectories given: compare rollouts of the same "
                    "data"
                )
        else:
            pairs = comparisons_by_success(table)
            if not pairs:
                raise UserError(
                    "no two trajectories can be compared: the preference reward needs successes "
                    "beside failures, or successes of different length, of one task; or a file "
                    "reward.comparisons=FILE"
                )
        self._pairs = torch.tensor(pairs)
        return {"comparisons": float(len(pairs))}

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        count = max(1, batch // (2 * self.config.frames))
        # the better ones first
        chosen = self._pairs[self.draw(len(self._pairs), count)].T.flatten()
        shares = torch.rand(len(chosen), self.config.frames, generator=self.generator)
        shares[:, 0] = 1.0 - 1e-6  # how it ended is always among the frames
        rows = table.starts[chosen, None] + (shares * table.lengths[chosen, None]).long()
        scores = (
            self.head(self.fitted_network(table, rows.flatten())).reshape(len(chosen), -1).mean(1)
        )
        better, worse = scores.chunk(2)
        return F.softplus(worse - better).mean()

    def _raw(self, trajectory: Trajectory) -> Tensor:
        table = FrameTable.of([trajectory], self.fitted_network.cameras)
        with torch.no_grad():
            return self.head(self.fitted_network.of_all(table)).squeeze(-1).cpu()

    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        scores = (self.head(features).squeeze(-1) - self._centre) / self._spread
        return list(torch.sigmoid(scores).split(list(lengths)))

    def extra_state(self) -> dict[str, Any]:
        return {"centre": self._centre, "spread": self._spread}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._centre, self._spread = float(state["centre"]), float(state["spread"])
