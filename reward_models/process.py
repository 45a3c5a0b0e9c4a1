"""Process reward of VLA-RL (arXiv 2505.18719 §3.3): milestones of successful episodes as labels,
used as a potential.

Followed: episodes are split at gripper changes, and within a part at moments near rest; frames that
lead to such a keyframe are positive. Departures: a second head learns the share of milestones
passed, and progress is its mean with the done head's probability; adding the raw 0/1 judgement to
the reward (as the paper does) moves the optimum, a potential does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models import milestones as ms
from reward_models.learned import LearnedReward
from reward_models.network import FrameTable, mlp
from reward_models.settings import ProcessConfig
from vla_rl.errors import UserError
from vla_rl.types import EmbodimentSpec


class _ProcessHead(nn.Module):
    """Per frame: logit of leading to a milestone, logit of the share passed, logit of being
    done."""

    def __init__(self, width: int):
        super().__init__()
        self.net = mlp(width, 2 * width, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)


class ProcessReward(LearnedReward):
    kind = "process"
    config: ProcessConfig
    head: _ProcessHead

    def __init__(self, config: ProcessConfig):
        super().__init__(config)
        self._gripper, self._position = (
            list(config.milestones.gripper),
            list(config.milestones.position),
        )
        self._seconds = config.seconds_per_frame

    def set_embodiment(self, embodiment: EmbodimentSpec, stride: int) -> None:
        """Find the gripper and the position by their names; frames are ``stride`` control steps
        apart."""
        gripper, position = ms.find_channels(embodiment.proprio_names)
        self._gripper, self._position = self._gripper or gripper, self._position or position
        self._seconds = self._seconds or stride / embodiment.control_hz

    def make_head(self, width: int) -> _ProcessHead:
        return _ProcessHead(width)

    def before_fit(self, table: FrameTable) -> dict[str, float]:
        if not self._gripper and not self._position:
            raise UserError(
                "the process reward needs a gripper or an end-effector position to find "
                "milestones, and knows neither: set reward.milestones.gripper=[i] and "
                "reward.milestones.position=[i,j,k] (proprio dimensions)"
            )
        highest = max([*self._gripper, *self._position])
        if highest >= table.proprio.shape[1]:
            raise UserError(
                f"reward.milestones names proprio dimension {highest}, the trajectories have "
                f"{table.proprio.shape[1]}"
            )
        proprio = table.proprio.numpy()
        gripper_range = (0.0, 0.0)
        if self._gripper:
            low, high = np.quantile(proprio[:, self._gripper[0]], (0.02, 0.98)).tolist()
            gripper_range = (low, high)
        seconds = self._seconds or 0.2
        lead = np.zeros(len(table), np.float32)
        share = np.zeros(len(table), np.float32)
        counts = []
        self._labelled = torch.nonzero(table.success & (table.lengths >= 3)).flatten()
        if len(self._labelled) == 0:
            raise UserError(
                "the process reward labels successful trajectories of at least three frames; none "
                f"of the {len(table.lengths)} given is one. Give demonstrations, or rollouts of a "
                "policy that succeeds at times."
            )
        for k in self._labelled.tolist():
            start, length = int(table.starts[k]), int(table.lengths[k])
            part = proprio[start : start + length]
            found = ms.milestones(
                part[:, self._gripper[0]] if self._gripper else None,
                part[:, self._position] if self._position else None,
                seconds,
                self.config.milestones,
                gripper_range,
            )
            counts.append(len(found))
            lead[start : start + length] = ms.leading_labels(
                found, length, self.config.milestones.window_s / seconds
            )
            share[start : start + length] = ms.passed_share(found, length)
        self._lead, self._share = torch.from_numpy(lead), torch.from_numpy(share)
        self._rows = torch.cat(
            [table.starts[k] + torch.arange(int(table.lengths[k])) for k in self._labelled.tolist()]
        )
        self._ends = table.starts[self._labelled] + table.lengths[self._labelled] - 1
        failed = torch.nonzero(~table.success).flatten().tolist()
        self._failed_rows = torch.cat(
            [torch.empty(0, dtype=torch.long)]
            + [table.starts[k] + torch.arange(int(table.lengths[k])) for k in failed]
        )
        return {
            "milestones": float(np.mean(counts)),
            "positive_share": float(lead[self._rows].mean()),
        }

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        rows = self._rows[self.draw(len(self._rows), batch)]
        # The done head sees as many ends as other frames, and failures among those.
        ends = self._ends[self.draw(len(self._ends), batch // 2)]
        pool = self._failed_rows if len(self._failed_rows) else self._rows
        others = torch.cat(
            [
                self._rows[self.draw(len(self._rows), batch // 4)],
                pool[self.draw(len(pool), batch // 4)],
            ]
        )
        out = self.head(self.fitted_network(table, torch.cat([rows, ends, others])))
        labelled, judged = out[: len(rows)], out[len(rows) :, 2]
        done = torch.cat([torch.ones(len(ends)), torch.isin(others, self._ends).float()]).to(
            out.device
        )
        weight = 1.0 / self._lead[self._rows].mean().clamp(0.05, 0.95) - 1.0  # positives are rare
        return (
            F.binary_cross_entropy_with_logits(
                labelled[:, 0], self._lead[rows].to(out.device), pos_weight=weight.to(out.device)
            )
            + F.binary_cross_entropy_with_logits(labelled[:, 1], self._share[rows].to(out.device))
            + F.binary_cross_entropy_with_logits(judged, done)
        )

    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        probabilities = torch.sigmoid(self.head(features))
        w = self.config.done_weight
        return list(
            ((1.0 - w) * probabilities[:, 1] + w * probabilities[:, 2]).split(list(lengths))
        )

    def extra_state(self) -> dict[str, Any]:
        return {"gripper": self._gripper, "position": self._position, "seconds": self._seconds}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._gripper, self._position = list(state["gripper"]), list(state["position"])
        self._seconds = float(state["seconds"])
