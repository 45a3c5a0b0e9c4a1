"""SFT on the learner ranks of a cluster: each has the run's demonstrations, and reads its own share
of every batch.

The driver keeps the policy that validation sees, and takes the weights when they are asked for;
checkpoints the ranks write themselves (``cluster.checkpoints``). Where a rank is lost, all begin anew
at the last checkpoint and make the updates since then once more, the same ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.imitation import imitating, imitation_of
from vla_rl.cluster.allocation import Allocation, allocated
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.rank_actor import RankActor
from vla_rl.cluster.rank_group import RankGroup
from vla_rl.cluster.session import ray_session
from vla_rl.learning.episode_queue import take_weights
from vla_rl.learning.sft import OwnSFT
from vla_rl.ranks import gathered_state, shard
from vla_rl.spread import SpreadState, Unfinished


class ImitationActor(RankActor):
    """Rank ``job.index``, with a local run's training."""

    def _build(self, run: Run) -> None:
        policy, dataset, _, _ = imitating(run)
        self._ranks.require_same(
            "demonstrations", len(dataset), float(dataset.actions.double().sum())
        )
        self._policy = shard(policy, self._ranks, self._job.mode)
        self._learner = OwnSFT(imitation_of(run, self._policy, dataset))

    def _update(self) -> dict[str, float]:
        return self._learner.update()

    def weights(self) -> np.ndarray | None:
        """Those that training changes, of the main rank. Collective."""
        found = {"weights": self._weights()}
        return packed(found) if self._ranks.is_main else None

    def state(self) -> np.ndarray | None:
        """Weights and what is needed to go on, of the main rank. Collective."""
        found = {"weights": self._weights(), "state": gathered_state(self._learner.state_dict())}
        return packed(found) if self._ranks.is_main else None

    def _parts(self) -> dict[str, Any]:
        return self._learner.state_dict()

    def _of_parts(self, stored: dict[str, Any]) -> Any:
        return stored


class GroupImitation(RankGroup):
    """An `SFTLearner`."""

    actor = ImitationActor
    again = "from the last checkpoint, and make the updates since then once more"

    def __init__(self, seats: Allocation, run: Run, policy: Any) -> None:
        self.config = seeded(run.config.sft, run.config.seed)
        self._asked = self._taken = 0  # updates: wanted, of the driver's weights
        super().__init__(seats, run, policy)

    @property
    def policy(self) -> Any:
        """The driver's own, with the weights of the last update."""
        self._take()
        return self._policy

    @property
    def described(self) -> Any:
        return self._policy if self._in_parts else self.policy

    def update(self) -> dict[str, float]:
        self._asked += 1
        metrics = self._surely(self._catch_up)
        self._failures = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        if self._in_parts:
            parts = self._parts()
            return dict.fromkeys(parts.structure, parts)
        self._take()
        return dict(self._state or self._surely(self._told)["state"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first = state["algorithm"]
        if isinstance(first, SpreadState) and self._in_parts:
            self._folder = str(first.folder.absolute())
        else:
            self._state = {name: dict(state[name]) for name in ("algorithm", "sampler")}
        self._surely(self._load)

    def _load(self) -> None:
        self._made = self._kept  # (updates since then are made again)
        super()._load()

    def _save(self, unfinished: Unfinished) -> None:
        """Nothing goes on here meanwhile."""
        super()._save(unfinished)
        self.settle()

    def _snapshot(self) -> str:
        self._catch_up()
        return super()._snapshot()

    def _catch_up(self) -> dict[str, float]:
        """The updates that are wanted and not made; metrics of the last."""
        metrics: dict[str, float] = {}
        while self._made < self._asked:
            metrics = self._all("update", limit=math.inf)[0]
            self._made += 1
        return metrics

    def _told(self) -> dict[str, Any]:
        self._catch_up()
        return unpacked(self._all("weights" if self._in_parts else "state")[0])

    def _take(self) -> None:
        """Take what the driver keeps of the last update, unless it is here: the weights, and where
        it writes the checkpoints the state that goes with them."""
        if self._taken == self._asked:
            return
        told = self._surely(self._told)
        take_weights(self._policy, told["weights"])
        self._taken = self._asked
        if not self._in_parts:
            self._state, self._kept = told["state"], self._asked


@contextlib.contextmanager
def ranks_for_sft(run: Run, policy: Any) -> Iterator[GroupImitation]:
    """The ranks that train ``policy``; Ray and they end with the block."""
    with (
        ray_session(run.config.cluster) as ray,
        allocated(ray, run) as seats,
        contextlib.closing(GroupImitation(seats, run, policy)) as learner,
    ):
        run.progress.say(f"SFT on {seats.config.learners} learner ranks (cluster.learners)")
        yield learner
