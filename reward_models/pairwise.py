"""A small pairwise progress critic, trained on demonstrations and rollouts with VLAC's labels
(arXiv 2509.15937 §3).

Followed: the label of a pair is the covered share of what was left; each sample is a group of four
pairs (a neighbour and a distant frame, both ways round); pairs without visible change and pairs
under a wrong instruction get 0; done windows at 80 % and 95 %. Departures: frames are those of
decisions (demonstrations: every `reward_data.stride` control steps); a failed rollout must not show
progress from any frame to its end (a one-sided loss, ``failure_pairs``), since a critic that has
never seen a failure pays for the motions of a success that lacks its effect; progress is mixed with
the done head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models.learned import LearnedReward
from reward_models.network import FrameTable, mlp
from reward_models.progress_math import (
    STAGNATION,
    accumulate,
    changed_share,
    dead_zone,
    done_label,
    pair_label,
)
from reward_models.settings import PairwiseConfig
from vla_rl.errors import UserError
from vla_rl.types import Trajectory


class _PairHead(nn.Module):
    """Delta in −1 … 1 of pairs of features [n width], and the logit of being done."""

    def __init__(self, width: int):
        super().__init__()
        self.pair, self.done = mlp(3 * width, 2 * width, 1), mlp(width, width, 1)

    def delta(self, before: Tensor, after: Tensor) -> Tensor:
        return torch.tanh(self.pair(torch.cat([before, after, after - before], -1)).squeeze(-1))

    def done_logit(self, features: Tensor) -> Tensor:
        return self.done(features).squeeze(-1)


class PairwiseCritic(LearnedReward):
    kind = "pairwise"
    config: PairwiseConfig
    head: _PairHead

    def make_head(self, width: int) -> _PairHead:
        return _PairHead(width)

    # ------------------------------------------------------------------------------------- training
    def before_fit(self, table: FrameTable) -> dict[str, float]:
        self._wins = torch.nonzero(table.success & (table.lengths >= 3)).flatten()
        self._losses = torch.nonzero(~table.success).flatten()
        if len(self._wins) == 0:
            raise UserError(
                "the pairwise reward learns from successful trajectories of at least three frames; "
                f"none of the {len(table.lengths)} given is one. Give demonstrations, or rollouts "
                "of a policy that succeeds at times."
            )
        return {"failures": float(len(self._losses))}

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        groups = max(1, batch // 4)
        parts = [self._pair_loss(table, groups), self._done_loss(table, max(2, batch // 2))]
        if self.config.failure_pairs and len(self._losses):
            parts.append(self._failure_loss(table, groups))
        return torch.stack(parts).sum()

    def _pair_loss(self, table: FrameTable, groups: int) -> Tensor:
        chosen = self._wins[self.draw(len(self._wins), groups)].tolist()
        # frame, frame, last frame, all within the trajectory
        pairs: list[tuple[int, int, int]] = []
        for k in chosen:
            last = int(table.lengths[k]) - 1
            i = int(self.draw(last, 1))
            j = int(self.draw(last, 1))
            j = j if j < i else j + 1  # any frame but i
            pairs += [(i, i + 1, last), (i + 1, i, last), (i, j, last), (j, i, last)]
        owner = torch.tensor(chosen).repeat_interleave(4)
        first = table.starts[owner] + torch.tensor([p[0] for p in pairs])
        second = table.starts[owner] + torch.tensor([p[1] for p in pairs])
        labels = torch.tensor([pair_label(*p) for p in pairs])
        still = (
            torch.stack([changed_share(v[first], v[second]) for v in table.images.values()]).amax(0)
            < STAGNATION
        )
        texts = [table.texts[t] for t in table.text[first].tolist()]
        wrong = torch.rand(groups, generator=self.generator) < self.config.wrong_instruction_share
        for g in torch.nonzero(wrong).flatten().tolist():
            texts[4 * g : 4 * g + 4] = [self._other_instruction(table, chosen[g])] * 4
        labels[still | wrong.repeat_interleave(4)] = 0.0
        features = self.fitted_network(table, torch.cat([first, second]), [*texts, *texts])
        before, after = features.chunk(2)
        return F.smooth_l1_loss(
            self.head.delta(before, after), labels.to(features.device), beta=0.1
        )

    def _other_instruction(self, table: FrameTable, trajectory: int) -> str:
        task = table.tasks[trajectory]
        others = {
            table.texts[int(table.text[s])]
            for s, t in zip(table.starts.tolist(), table.tasks)
            if t != task
        }
        choices = sorted(others) or list(self.config.wrong_instructions)
        return choices[int(self.draw(len(choices), 1))] if choices else ""

    def _done_loss(self, table: FrameTable, count: int) -> Tensor:
        """Binary cross-entropy on complete and incomplete frames in equal numbers; failures are
        never complete."""
        half = count // 2
        rows, labels = [], []
        for k in self._wins[self.draw(len(self._wins), half)].tolist():
            last = int(table.lengths[k]) - 1
            ends = [i for i in range(last + 1) if done_label(i, last) == 1]
            rows.append(int(table.starts[k]) + ends[int(self.draw(len(ends), 1))])
            labels.append(1.0)
        for n in range(half):
            from_failures = len(self._losses) > 0 and n % 2 == 0
            pool = self._losses if from_failures else self._wins
            k = int(pool[self.draw(len(pool), 1)])
            last = int(table.lengths[k]) - 1
            early = [i for i in range(last + 1) if from_failures or done_label(i, last) == 0]
            rows.append(int(table.starts[k]) + early[int(self.draw(len(early), 1))])
            labels.append(0.0)
        logits = self.head.done_logit(self.fitted_network(table, torch.tensor(rows)))
        return F.binary_cross_entropy_with_logits(
            logits, torch.tensor(labels, device=logits.device)
        )

    def _failure_loss(self, table: FrameTable, count: int) -> Tensor:
        chosen = self._losses[self.draw(len(self._losses), count)]
        offset = (torch.rand(count, generator=self.generator) * (table.lengths[chosen] - 1)).long()
        rows, ends = table.starts[chosen] + offset, table.starts[chosen] + table.lengths[chosen] - 1
        before, after = self.fitted_network(table, torch.cat([rows, ends])).chunk(2)
        return F.relu(self.head.delta(before, after)).square().mean()

    # -------------------------------------------------------------------------------------- scoring
    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        return self._curves(features, lengths, reverse=False)

    def _curves(self, features: Tensor, lengths: Sequence[int], reverse: bool) -> list[Tensor]:
        c = self.config
        out = []
        for part in features.split(list(lengths)):
            if c.curve == "anchored":
                first = part[:1].expand(len(part) - 1, -1)
                delta = (
                    -self.head.delta(part[1:], first)
                    if reverse
                    else self.head.delta(first, part[1:])
                )
                values = torch.cat([delta.new_zeros(1), delta.clamp(0.0, 1.0)])
            else:
                critics = dead_zone(
                    self._deltas(part, reverse), c.positive_dead_zone, c.negative_dead_zone
                )
                values = (
                    part.new_tensor(accumulate(critics, c.value_mode)).clamp(0.0, 100.0) / 100.0
                )
            done = torch.sigmoid(self.head.done_logit(part))
            out.append((1.0 - c.done_weight) * values + c.done_weight * done)
        return out

    def _deltas(self, part: Tensor, reverse: bool) -> list[float]:
        """Critic values (percent) of neighbouring frames; in reverse the two are shown the other
        way round and negated."""
        delta = (
            -self.head.delta(part[1:], part[:-1])
            if reverse
            else self.head.delta(part[:-1], part[1:])
        )
        return (100.0 * delta).tolist()

    @torch.no_grad()
    def reverse_progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Progress judged from pairs shown the other way round (for VROC)."""
        table, features = self._features_of(trajectories)
        return [
            c.float().cpu() for c in self._curves(features, table.lengths.tolist(), reverse=True)
        ]

    @torch.no_grad()
    def critics(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Critic value (percent) of each decision: float32 [t]."""
        table, features = self._features_of(trajectories)
        return [
            torch.tensor(self._deltas(p, False)) for p in features.split(table.lengths.tolist())
        ]

    def _features_of(self, trajectories: Sequence[Trajectory]) -> tuple[FrameTable, Tensor]:
        table = FrameTable.of(trajectories, self.fitted_network.cameras)
        return table, self.fitted_network.of_all(table)
