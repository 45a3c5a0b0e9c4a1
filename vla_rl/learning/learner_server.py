"""The learner's side of the concurrent rhythm: takes closed episodes from a spool, learns,
publishes weights.

It owns algorithm, optimisers and replay, and knows nothing of where episodes come from. Killed at
any moment it goes on from its last state, from the replay, which has every episode that was taken,
and from the spool, which has the others: an episode leaves the spool once the replay has it under
its ticket, so none is lost and none is there twice.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

from vla_rl.checkpoint import restoring
from vla_rl.learning.episode_queue import (
    BEAT,
    FIGURES,
    INBOX,
    STATE,
    EpisodeQueue,
    Weights,
    learned_weights,
    publish_weights,
    published_weights,
    save_learner,
    stored_learner,
    take_weights,
)
from vla_rl.learning.figures import mean_figures
from vla_rl.learning.learners import ReplayLearner
from vla_rl.monitoring.metrics import write_json
from vla_rl.monitoring.progress import Progress

EPISODES, CHECKPOINT, STOP = "episodes", "checkpoint", "stop"  # commands
_NAP = 1.0  # seconds after which it looks into the spool untold


class LearnerServer:
    """Serves ``folder`` (`vla_rl.learning.episode_queue`) until it is told to stop. ``commands``
    are words from the actor."""

    def __init__(
        self,
        folder: Path,
        policy: Any,
        learner: ReplayLearner,
        publish_every: int,
        commands: queue.Queue[str],
    ) -> None:
        self.folder, self.policy, self.learner = folder, policy, learner
        self._publish_every, self._commands, self._spool = (
            publish_every,
            commands,
            EpisodeQueue(folder / INBOX),
        )
        self._updates = 0  # since the first episode
        self._published = 0  # of those, in the newest version
        self._version = 0
        self._rows: list[dict[str, float]] = []  # metrics since the last figures
        self._figures: dict[str, Any] = {}
        self._seconds = {"busy": 0.0, "idle": 0.0}
        self._stopping = False
        self._beaten = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        """What it said of itself last."""
        return self._figures

    def run(self) -> None:
        self.begin()
        while not self._stopping:
            started = time.perf_counter()
            learned = self._take() or self._step()
            if not learned:
                self._publish()
            now = time.perf_counter()
            self._seconds["busy"] += now - started
            self._beat()
            self._obey(wait=not learned)
            self._seconds["idle"] += time.perf_counter() - now
        self.save()

    def settle(self) -> int:
        """In the actor's own process, by turns: take what was sent and learn all that is owed.
        Returns the version."""
        while self._take() or self._step():
            pass
        self._publish()
        return self._version

    def begin(self) -> None:
        """Go on from the state that there is; else what is learned before the first episode."""
        newest, state = published_weights(self.folder), stored_learner(self.folder)
        if state is not None:
            with restoring(self.folder / STATE, "a learner's state of this run"):
                take_weights(self.policy, state["weights"])
                self.learner.go_on(state["learner"])
                self._updates = int(state["updates"])
        else:
            newest = None
            self._figures["offline"] = self.learner.prepare(Progress())
            # before the first episode leaves the spool: the replay is kept from here on
            self.save()
        if newest is None:
            self._publish(first=True)
        else:  # a version is never used twice, and weights of fewer updates are not published again
            self._version, self._published = newest.version, newest.updates
        self._tell()

    # ------------------------------------------------------------------------------------- one turn
    def _take(self) -> bool:
        """Take what waits in the spool; whether there was anything."""
        ages: list[int] = []
        for entry in (entries := self._spool.entries()):
            for ticket, trajectory, rewards in self._spool.read(
                entry, self.learner.replay.last_ticket
            ):
                self.learner.take(trajectory, rewards, ticket)
                self._beat()
                ages.append(self._version - trajectory.policy_version)
            self._spool.remove(entry)
        if ages:
            self._figures["staleness"] = sum(ages) / len(ages)
            self._tell()
        return bool(entries)

    def _step(self) -> bool:
        """One update, if one is owed."""
        if self.learner.owed < 1.0:
            return False
        self._rows.append(self.learner.step())
        self._updates += 1
        if self._updates % self._publish_every == 0:
            self._publish()
        return True

    def _obey(self, wait: bool) -> None:
        try:
            command = self._commands.get(wait, _NAP)
        except queue.Empty:
            return
        self._stopping = command == STOP
        if command == CHECKPOINT:
            self.save()

    # -------------------------------------------------------------------------------------- telling
    def _publish(self, first: bool = False) -> None:
        """The present weights as a new version, unless one of as many updates is there; and how
        far learning is."""
        if first or self._updates > self._published:
            self._version, self._published = self._version + 1, self._updates
            publish_weights(
                self.folder, Weights(self._version, self._updates, learned_weights(self.policy))
            )
        elif self._figures["updates"] == self._updates:
            return
        self._tell()

    def _tell(self) -> None:
        replay = self.learner.replay
        if self._rows:
            self._figures["metrics"], self._rows = mean_figures(self._rows), []
        self._figures |= {
            "version": self._version,
            "updates": self._updates,
            "published": self._published,
            "owed": self.learner.owed,
            "taken": replay.last_ticket,
            "episodes": replay.episodes,
            "decisions": len(replay),
            **self._seconds,
        }
        write_json(self.folder / FIGURES, self._figures)

    def _beat(self) -> None:
        """At most once a second: it touches the disk."""
        if time.perf_counter() - self._beaten >= _NAP / 2:
            self._beaten = time.perf_counter()
            (self.folder / BEAT).touch()

    def save(self) -> None:
        """The state from which another process goes on."""
        weights = {name: x.detach() for name, x in learned_weights(self.policy).items()}
        save_learner(
            self.folder,
            {"learner": self.learner.state_dict(), "updates": self._updates, "weights": weights},
        )
