"""One rank of RL, inside an actor of Ray: the algorithm of a local run, on its share of every
minibatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.assembly.context import Run
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.payload import fetched, light_trajectories
from vla_rl.cluster.rank_actor import RankActor
from vla_rl.errors import ConfigError
from vla_rl.learning.learners import BatchLearner
from vla_rl.options import AlgorithmClass, view
from vla_rl.ranks import shard
from vla_rl.types import Held, RolloutBatch


class LearnerActor(RankActor):
    """Rank ``job.index``. Every rank must be called alike: inside, they wait for each other."""

    def _build(self, run: Run) -> None:
        self._policy = shard(trained_policy(run), self._ranks, self._job.mode)
        learner = learner_of(run, self._policy)
        if not isinstance(learner, BatchLearner):
            raise ConfigError(
                f"cluster.learners={self._job.size}: algorithm.type={run.config.algorithm_type} "
                "learns from a replay, which one process has: use cluster.learners=0"
            )
        self._learner = learner

    def _update(
        self, data: np.ndarray, episodes: Sequence[tuple[Any, int]]
    ) -> tuple[dict[str, float], np.ndarray | None, list[int]]:
        """Learn from a batch: ``data`` says of every episode all but images and replay, and which
        rank's it is; ``episodes`` where they lie (reference, place). A rank fetches its own, or all
        where the algorithm reads all. The main one returns the metrics and the weights that
        training changes. The last of what is returned: those that are lost, and nothing was
        learned."""
        told = unpacked(data)
        trajectories = light_trajectories(told)
        owner, alone = told["owner"], self._ranks.size == 1
        parts = not alone and view(self._learner.algorithm, AlgorithmClass).takes_parts
        mine = [i for i, rank in enumerate(owner.tolist()) if not parts or rank == self._job.index]
        found, lost = self._fetched([episodes[i] for i in mine])
        gone = torch.zeros(len(trajectories), dtype=torch.int64)
        gone[[mine[i] for i in lost]] = 1
        if bool((gone := self._ranks.sum(gone)).any()):
            return {}, None, gone.nonzero().flatten().tolist()
        received = sum(entry.nbytes for entry in found)
        whole = (fetched(found.pop(0)) for _ in mine)
        if parts:
            batch = RolloutBatch.from_trajectories(trajectories)
            held = Held.of(owner, batch.lengths, self._job.index, whole)
            batch = dataclasses.replace(batch, held=held)
        else:
            batch = RolloutBatch.from_trajectories(
                [t.having(there) for t, there in zip(trajectories, whole, strict=True)]
            )
        metrics = self._learner.algorithm.update(batch, told["named"])
        metrics["cluster/bytes_rank"] = float(data.nbytes + received)
        weights = self._weights()
        return metrics, packed({"weights": weights}) if self._ranks.is_main else None, []

    @staticmethod
    def _fetched(episodes: Sequence[tuple[Any, int]]) -> tuple[list[np.ndarray], list[int]]:
        """The packed episodes, and which of them are lost."""
        import ray

        found: list[np.ndarray] = []
        lost: list[int] = []
        for i, (reference, place) in enumerate(episodes):
            try:
                found.append(ray.get(reference)[place])
            except ray.exceptions.ObjectLostError:  # its node is gone, and so is what it held
                lost.append(i)
        return found, lost

    def _parts(self) -> dict[str, Any]:
        return {"algorithm": self._learner.state_dict()}

    def _of_parts(self, stored: dict[str, Any]) -> Any:
        return stored["algorithm"]
