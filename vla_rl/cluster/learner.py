"""``cluster.learners``: a `Learner` whose updates several ranks make together, each an actor of
Ray.

The driver keeps the policy that checkpoints and rollouts see, and takes the weights after each
update. A rank that dies takes its group with it, as the others wait for it: all are started again,
with the driver's weights and the algorithm's state of the last checkpoint, and the batch under way
is learned from again. Checkpoints the ranks write themselves (``cluster.checkpoints``), while
rollouts go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.assembly.context import Run
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.learner_actor import LearnerActor
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.payload import light_state, owners, places, stored
from vla_rl.cluster.rank_group import RankGroup
from vla_rl.learning.episode_queue import take_weights
from vla_rl.learning.learners import EpisodesLost
from vla_rl.monitoring.progress import Progress
from vla_rl.spread import SpreadState
from vla_rl.types import Trajectory


class GroupLearner(RankGroup):
    """A `Learner`: the ranks of ``seats``. ``policy`` is the driver's own, which learning
    changes."""

    actor = LearnerActor
    again = "with the weights of now and the optimisers of the last checkpoint"

    def __init__(self, seats: Allocation, run: Run, policy: Any) -> None:
        self.config = run.config.algorithm
        policy.prepare_for_rl()  # as the ranks' own is, by the algorithm
        self._told = 0  # restarts
        super().__init__(seats, run, policy)

    def learn(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Tensor],
        named: Tensor | Mapping[str, Tensor],
    ) -> dict[str, float]:
        if not trajectories:
            return {}
        if not self._run.config.cluster.ahead:
            self.settle()  # so that a rank which is lost in the update costs none of it
        episodes = stored(self._ray, self._put, trajectories)
        owner = torch.tensor(owners(episodes, len(self._actors)))
        batch = self._put(packed({**light_state(episodes), "owner": owner, "named": named}))
        # (an update may take long; inside, ranks wait no more than hang_timeout for each other,
        # and each has to give signs of life)
        answers = self._surely(lambda: self._all("update", batch, places(episodes), limit=math.inf))
        self._failures = 0
        metrics, weights, gone = answers[0]
        if gone:
            raise EpisodesLost([episodes[i].rollout_id for i in gone])
        self._made += 1
        metrics["cluster/bytes_rank"] = max(m["cluster/bytes_rank"] for m, *_ in answers)
        take_weights(self._policy, unpacked(weights, held=True)["weights"])
        # (since the last row: a rank may be lost while a checkpoint is written, too)
        restarts, self._told = self.restarts - self._told, self.restarts
        return metrics | {"cluster/learner_restarts": float(restarts)}

    def prepare(self, progress: Progress) -> dict[str, float]:
        return {}

    def finish(self, progress: Progress) -> dict[str, float]:
        self.settle()
        return {}

    def state_dict(self) -> Any:
        """Once `settle` was called, a checkpoint of it is there."""
        if self._in_parts:
            return self._parts()
        self._state = unpacked(self._surely(lambda: self._all("state"))[0])
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The driver's policy has its weights by now."""
        if isinstance(state, SpreadState) and self._in_parts:
            self._folder = str(state.folder.absolute())
        else:
            self._state = dict(state)
        self._surely(self._load)
