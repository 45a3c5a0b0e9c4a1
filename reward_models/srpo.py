"""SRPO: failures earn by how near they come to this batch's own successes (arXiv 2511.15605;
siiRL's code).

One reward per trajectory, on its last decision: 1 for a success, ``scale`` · sigmoid(...) for a
failure. Departures from the published code: every embedding is keyed by its rollout id (there,
rollouts of one initial state share one), the radius of DBSCAN comes from the data (the published
0.5 finds no cluster), and a trajectory without a usable embedding keeps its task reward (there,
even a success then gets 0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reward_models import srpo_math as m
from reward_models.encoders import ImageFeatures, make_encoder
from reward_models.frames import frames_of, reward_at_end
from reward_models.settings import SRPOConfig
from vla_rl.errors import UserError
from vla_rl.interfaces import RewardModel
from vla_rl.types import Trajectory


@dataclass(frozen=True)
class References:
    """What failures are compared with: centres [c d] in ``space``, and how to get there."""

    centres: Tensor
    space: str
    mean: Tensor
    scale: Tensor
    clusters: int  # that were found; 0: the mean stands in
    noise_share: float

    def distances(self, rows: Tensor) -> Tensor:
        return m.distances_to(
            m.to_space(rows, self.space, self.mean, self.scale), self.centres, self.space
        )


def find_references(successes: Tensor, config: SRPOConfig) -> References:
    """Centres of the success embeddings [n d], n >= 1."""
    mean, scale = m.standardisation(successes)
    standard = (successes - mean) / scale
    labels = torch.arange(len(successes))
    if config.cluster == "mean":
        labels = torch.zeros(len(successes), dtype=torch.long)
    elif config.cluster == "kmeans":
        labels = m.kmeans(standard, config.clusters)
    elif config.cluster == "dbscan":
        eps = config.eps or m.eps_from_data(standard, config.min_samples, config.eps_quantile)
        labels = m.dbscan(standard, eps, config.min_samples)
    found = sorted(set(labels.tolist()) - {-1})
    # The mean of a cluster in the standardised space, mapped back, is the mean of its raw rows.
    centres = (
        torch.stack([successes[labels == k].mean(0) for k in found])
        if found
        else successes.mean(0, keepdim=True)
    )
    centres = m.to_space(centres, config.space, mean, scale)
    return References(
        centres, config.space, mean, scale, len(found), float((labels == -1).float().mean())
    )


class SRPO(RewardModel):
    """See the module. ``prepare`` embeds a trajectory ahead of `score`, while others still
    simulate."""

    def __init__(self, config: SRPOConfig, policy_features: ImageFeatures | None = None):
        self.config = config
        self.encoder = make_encoder(config.encoder, policy_features)
        # task → (rollout id, embedding) of successes, oldest first
        self.buffer: dict[str, list[tuple[str, Tensor]]] = {}
        self._cache: dict[str, Tensor] = {}  # rollout id → embedding [d]
        self._metrics: dict[str, float] = {}

    # ----------------------------------------------------------------------------------- embeddings
    def prepare(self, trajectory: Trajectory) -> None:
        self._embeddings([trajectory], keep_all=True)

    def _embeddings(self, trajectories: Sequence[Trajectory], keep_all: bool = False) -> Tensor:
        """Float32 [m d]; each rollout is encoded once. Rows that are not finite mean: no
        embedding."""
        missing = [t for t in trajectories if t.rollout_id not in self._cache]
        if missing:
            rows = self.encoder.encode([frames_of(t, self.config.camera) for t in missing]).float()
            self._cache |= {t.rollout_id: row for t, row in zip(missing, rows)}
        rows = torch.stack([self._cache[t.rollout_id] for t in trajectories])
        if not keep_all:  # what is not in this batch will not come again
            self._cache = {t.rollout_id: self._cache[t.rollout_id] for t in trajectories}
        return rows

    # -------------------------------------------------------------------------------------- scoring
    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t] per trajectory: the reward stands on the last decision."""
        c = self.config
        if not trajectories:
            return []
        rows = self._embeddings(trajectories)
        usable = rows.isfinite().all(1) & (rows != 0).any(1)
        success = torch.tensor([t.success for t in trajectories])
        values = success.float()
        shared = (
            _gather_successes(trajectories, rows, usable)
            if c.reference_scope == "task_global"
            else {}
        )
        shaped = fallback = 0
        found: list[References] = []
        for key, members in self._scopes(trajectories).items():
            index = torch.tensor(members)
            failed, won = (
                index[usable[index] & ~success[index]],
                index[usable[index] & success[index]],
            )
            if len(failed) == 0:
                continue
            references = self._references(
                key, trajectories[members[0]].episode.task_id, rows[won], shared
            )
            if references is None:
                fallback += len(failed)
                continue
            found.append(references)
            shape = m.shape_minmax if c.normalise == "minmax" else m.shape_zscore
            values[failed] = shape(references.distances(rows[failed]), c.scale, c.slope)
            shaped += len(failed)
        self._remember(trajectories, rows, usable)
        failures = int((~success).sum())
        self._metrics = {
            "reward/invalid_share": 1.0 - float(usable.float().mean()),
            "reward/shaped_share": shaped / max(1, failures),
            "reward/fallback_share": fallback / max(1, failures),
            "reward/clusters": sum(r.clusters for r in found) / max(1, len(found)),
            "reward/noise_share": sum(r.noise_share for r in found) / max(1, len(found)),
            "reward/mean_fallbacks": float(sum(r.clusters == 0 for r in found)),
            "reward/failure_mean": float(values[~success].mean()) if failures else float("nan"),
        }
        return [reward_at_end(t, c.coefficient * v) for t, v in zip(trajectories, values.tolist())]

    def metrics(self) -> dict[str, float]:
        """How the last `score` came about; ``fallback_share``: failures with nothing to be
        compared with."""
        return dict(self._metrics)

    def _scopes(self, trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], list[int]]:
        """Trajectories that are compared with each other; two tasks never mix."""
        scopes: dict[tuple[str, int], list[int]] = {}
        for i, t in enumerate(trajectories):
            group = t.episode.group_id if self.config.reference_scope == "group" else 0
            scopes.setdefault((t.episode.task_id, group), []).append(i)
        return scopes

    def _references(
        self,
        key: tuple[str, int],
        task: str,
        own: Tensor,
        shared: Mapping[str, list[tuple[str, Tensor]]],
    ) -> References | None:
        c = self.config
        if c.reference_scope == "task_global":
            rows = [row for _, row in shared.get(task, [])]
        else:
            rows = list(own)
            if c.reference_scope == "buffer":
                rows += [row for _, row in self.buffer.get(task, [])]
        if not rows and c.all_fail == "buffer":
            rows = [row for _, row in self.buffer.get(task, [])]
        return find_references(torch.stack(rows), c) if rows else None

    def add_references(self, trajectories: Sequence[Trajectory]) -> None:
        """Put successful trajectories (demonstrations, say) into the buffer of their task."""
        wins = [t for t in trajectories if t.success]
        if wins:
            rows = self._embeddings(wins)
            self._remember(wins, rows, rows.isfinite().all(1))

    @property
    def wants_demonstrations(self) -> bool:
        """Whether `set_demonstrations` should be called before RL."""
        return self.config.demonstrations > 0

    def set_demonstrations(self, trajectories: Sequence[Trajectory]) -> None:
        """Let the first ``config.demonstrations`` successes of each task stand in the buffer.
        Raises `UserError` where there is none."""
        seen = Counter[str]()
        chosen = []
        for t in trajectories:
            seen[t.episode.task_id] += t.success
            if t.success and seen[t.episode.task_id] <= self.config.demonstrations:
                chosen.append(t)
        if not chosen:
            raise UserError(
                f"reward.demonstrations={self.config.demonstrations}, and the run has no "
                "successful demonstration: give dataset=FOLDER, or set it to 0"
            )
        self.add_references(chosen)

    def _remember(self, trajectories: Sequence[Trajectory], rows: Tensor, usable: Tensor) -> None:
        for t, row, fine in zip(trajectories, rows, usable.tolist()):
            if t.success and fine:
                kept = [x for x in self.buffer.get(t.episode.task_id, []) if x[0] != t.rollout_id]
                self.buffer[t.episode.task_id] = [*kept, (t.rollout_id, row)][
                    -self.config.buffer_size :
                ]

    # -------------------------------------------------------------------------------------- judging
    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Progress float32 [t+1] in 0 … 1 of every prefix, without a look at the outcome: 1 at the
        successes' centres, 0.5 at their median distance from where trajectories start. A success is
        not its own reference.

        Tasks without another success give NaN. (Training uses the whole trajectory alone.)
        """
        whole = self._embeddings(trajectories)
        out: list[Tensor] = []
        for i, t in enumerate(trajectories):
            task = t.episode.task_id
            others = [
                j
                for j, o in enumerate(trajectories)
                if j != i and o.success and o.episode.task_id == task
            ]
            rows = [whole[j] for j in others if whole[j].isfinite().all()]
            rows += [row for name, row in self.buffer.get(task, []) if name != t.rollout_id]
            if not rows:
                out.append(torch.full((len(t) + 1,), float("nan")))
                continue
            clip = frames_of(t, self.config.camera)
            prefixes = self.encoder.encode([clip[: k + 1] for k in range(len(clip))]).float()
            distances = find_references(torch.stack(rows), self.config).distances(prefixes)
            out.append(distances)
        starts = [float(d[0]) for d in out if d.isfinite().all() and float(d[0]) > 0]
        unit = torch.tensor(starts).median() if starts else torch.tensor(1.0)
        return [2.0 ** -(d / unit) for d in out]

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": {task: [[i, row] for i, row in kept] for task, kept in self.buffer.items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer = {
            task: [(i, row) for i, row in kept] for task, kept in state["buffer"].items()
        }


def _gather_successes(
    trajectories: Sequence[Trajectory], rows: Tensor, usable: Tensor
) -> dict[str, list[tuple[str, Tensor]]]:
    """(rollout id, embedding) of the successes of all processes, by task."""
    own: dict[str, list[tuple[str, Tensor]]] = {}
    for t, row, fine in zip(trajectories, rows, usable.tolist()):
        if t.success and fine:
            own.setdefault(t.episode.task_id, []).append((t.rollout_id, row))
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return own
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    merged: dict[str, list[tuple[str, Tensor]]] = {}
    for part in parts:
        for task, items in part.items():
            merged.setdefault(task, []).extend(items)
    return merged
