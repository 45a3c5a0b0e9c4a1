"""The closed episodes of a robot's sessions, on their way to a learner: each to the log and to the
learner, once.

``FOLDER/episodes.jsonl`` is the ledger: one checksummed line per journal that was looked at, with
the ticket under which it goes to the learner, or why it is not learned from. A line is on the disk
before its episode is sent, and the learner keeps the tickets it has: who is killed in between sends
it again under the same ticket.

Reading an episode's pictures, scoring it and fitting the reward take seconds. In real time a thread
of its own does it (`EpisodeFeedThread`), so that whoever leads the session goes on; in virtual time
it is done in turn.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.data.journal import Journal
from vla_rl.data.session_trajectory import VERSION, session_trajectory
from vla_rl.errors import UserError
from vla_rl.learning.learners import RemoteLearner
from vla_rl.monitoring.metrics import METRICS_FILE, MetricsLogger, read_metrics
from vla_rl.robot.labels import SessionReward
from vla_rl.types import Trajectory

LEDGER, SESSIONS, PHASE = "episodes.jsonl", "sessions", "robot"
LOOK_S = 0.5  # between two looks after the learner
# in which a person at a console moves the mark of an episode that has ended (`real.labels.AGE_S`)
SETTLE_S = 15.0
RECENT = 20  # episodes of a running mean


class EpisodeFeed:
    """Sends what the sessions under ``folder`` recorded to ``learner``, with the rewards that
    ``reward`` gives."""

    def __init__(
        self,
        folder: Path,
        chunk_length: int,
        learner: RemoteLearner,
        reward: SessionReward,
        logger: MetricsLogger,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.chunk_length, self.learner = folder, chunk_length, learner
        self._reward, self._logger, self._say = reward, logger, say
        self._ledger = Journal(folder / LEDGER)
        self.records = _ledger_records(self._ledger)

    @property
    def learned(self) -> int:
        """Episodes that went to the learner."""
        return max((int(record["ticket"]) for record in self.records), default=0)

    def tried(self) -> tuple[Any, ...]:
        """What is known of the starts of the labelled episodes (`real.returns.Tried`), the
        oldest first."""
        tried, task, found = (
            build.attribute("real.returns:Tried"),
            build.attribute("real.tasks:Task"),
            [],
        )
        for record in self.records:
            # (not every session says where an episode begins)
            if record["labelled"] and "start" in record:
                (name, number), figures = record["start"], record["figures"]
                found.append(
                    tried(
                        task(name, "", number), bool(figures["success"]), figures["human_steps"] > 0
                    )
                )
        return tuple(found)

    def resume(self) -> None:
        """Take up what an earlier session left: open journals, lines that the log lacks,
        episodes that the learner lacks."""
        for path in sorted((self.folder / SESSIONS).glob("*/journal/*.open")):
            build.attribute("real.journal:recover")(path)
        for record in self.records:
            if record["ticket"] > self.learner.last:
                self._send(self._again(record))
        logged = sum(row["phase"] == PHASE for row in read_metrics(self.folder / METRICS_FILE))
        for step in range(logged, len(self.records)):
            self._logger.log(PHASE, step, self._metrics(step) | self._about_learner())
        self.gather()

    def _again(self, record: Mapping[str, Any]) -> Trajectory:
        episode = build.attribute("real.journal:read")(self.folder / record["journal"])
        trajectory, why = session_trajectory(episode, self.chunk_length)
        assert trajectory is not None, why
        return trajectory

    def _newest(self, count: int) -> list[Trajectory]:
        """The last episodes that were labelled."""
        return [
            self._again(record) for record in [r for r in self.records if r["labelled"]][-count:]
        ]

    def closed(self, settle_s: float = 0.0) -> list[str]:
        """The closed journals that the ledger does not know, in order, up to the first that was
        written to in the last ``settle_s`` seconds."""
        known = {record["journal"] for record in self.records}
        found = sorted((self.folder / SESSIONS).glob("*/journal/*.vrj"))
        new = [path for path in found if str(path.relative_to(self.folder)) not in known]
        now = time.time()
        settled = itertools.takewhile(
            lambda path: not settle_s or now - path.stat().st_mtime >= settle_s, new
        )
        return [str(path.relative_to(self.folder)) for path in settled]

    def gather(self) -> list[Trajectory]:
        """Take what was closed since; returns what is learned from."""
        taken = [self.take(name) for name in self.closed()]
        return [trajectory for trajectory in taken if trajectory is not None]

    def take(self, name: str) -> Trajectory | None:
        """A closed journal of `closed`, once."""
        episode = build.attribute("real.journal:read")(self.folder / name)
        trajectory, why = self._read(episode)
        ticket = 0 if trajectory is None else self.learned + 1
        figures = {} if trajectory is None else episode_figures(episode, trajectory)
        labelled = trajectory is not None and trajectory.label_source != "none"
        record = {
            "journal": name,
            "ticket": ticket,
            "why": why,
            "labelled": labelled,
            "figures": figures,
        }
        task = build.attribute("real.tasks:parse")(str(episode.header.get("task")))
        if task.number >= 0:
            record["start"] = [task.name, task.number]
        self._ledger.append(record)
        self.records.append(record)
        if trajectory is None:
            self._say(f"not learned from: {name}: {why}")
        else:
            self._send(trajectory)
        fitted = (
            self._reward.refit(sum(r["labelled"] for r in self.records), self._newest)
            if labelled
            else {}
        )
        metrics = self._metrics(len(self.records) - 1) | self._about_learner() | fitted
        self._logger.log(PHASE, len(self.records) - 1, metrics)
        return trajectory

    def _read(self, episode: Any) -> tuple[Trajectory | None, str]:
        """Or why it is not learned from."""
        others = {tick["policy_version"] for tick in episode.steps if tick["policy"]}
        if others and not any(name.startswith(VERSION) for name in others):
            return None, f"played by another policy ({', '.join(sorted(others))})"
        return session_trajectory(episode, self.chunk_length)

    def _send(self, trajectory: Trajectory) -> None:
        self.learner.send([(trajectory, self._reward(trajectory))])

    def _about_learner(self) -> dict[str, float]:
        found = self.learner.figures()
        own = {
            f"learner/{name}": float(found[name])
            for name in ("version", "owed", "updates")
            if name in found
        }
        return {**found.get("metrics", {}), **own}

    def _metrics(self, step: int) -> dict[str, float]:
        """Of the episode ``step`` and of the `RECENT` that were learned from before it."""
        kept = [record["figures"] for record in self.records[: step + 1] if record["ticket"]]
        return {
            f"{PHASE}/{name}": value
            for name, value in (self.records[step]["figures"] | totals(kept)).items()
        }


class EpisodeFeedThread:
    """A `EpisodeFeed` that nobody waits for: a queue of closed journals, in order, and a thread
    that takes one after the other.

    Until the ``with`` ends that thread alone has the feed, the log and the learner, whom it
    looks after in between. What it fails of is raised by the next `look`, or as the ``with`` ends,
    which waits until all that was closed has been taken (after a Ctrl-C too). What a kill or a
    second Ctrl-C leaves behind lies closed on the disk: `EpisodeFeed.resume` takes it.
    """

    def __init__(self, feed: EpisodeFeed, settle_s: float = 0.0) -> None:
        """``settle_s``: seconds for which the label of an episode that has ended may still be
        changed."""
        self.feed, self._settle_s = feed, settle_s
        self.owed = 0.0  # updates, as the learner said last
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._queued: set[str] = set()
        self._done = 0
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    @property
    def waiting(self) -> int:
        """Journals that were queued and are not taken yet."""
        return len(self._queued) - self._done

    def look(self) -> None:
        """Queue what was closed since. Never waits."""
        if self._problem is not None:
            raise self._problem
        self._fill(self._settle_s)

    def _fill(self, settle_s: float = 0.0) -> None:
        for name in self.feed.closed(settle_s):
            if name not in self._queued:
                self._queued.add(name)
                self._queue.put(name)

    def _run(self) -> None:
        try:
            while (name := self._next()) is not None:
                if name:
                    self.feed.take(name)
                self.owed = float(self.feed.learner.figures()["owed"])
                self._done += bool(name)
        except BaseException as error:
            self._problem = error

    def _next(self) -> str | None:
        """A journal; "" where none came for a while; None at the end."""
        try:
            return self._queue.get(timeout=LOOK_S)
        except queue.Empty:
            return ""

    def __enter__(self) -> EpisodeFeedThread:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._fill()
        self._queue.put(None)
        self._thread.join()
        if self._problem is not None and kind in (None, KeyboardInterrupt):
            raise self._problem


def _ledger_records(ledger: Journal) -> list[dict[str, Any]]:
    """Raises `UserError` for a ledger that no kill left so, or that nobody wrote."""
    records, ticket, damage = ledger.read(), 0, ""
    for line, record in enumerate(records, 1):
        good = isinstance(record.get("journal"), str) and type(record.get("ticket")) is int
        good = (
            good and record["ticket"] in (0, ticket + 1) and isinstance(record.get("figures"), dict)
        )
        if not (good and isinstance(record.get("labelled"), bool)):
            damage = (
                f"line {line} of {ledger.path.name} is no record of an episode, or not the next"
            )
            break
        ticket = record["ticket"] or ticket
    if damage := damage or ledger.damage:
        raise UserError(
            f"{ledger.path} is damaged ({damage}): restore it, or start over with another --out"
        )
    return records


def episode_figures(episode: Any, trajectory: Trajectory) -> dict[str, float]:
    """Of one episode: ``cycle_seconds`` from its begin to its end, ``intervention_rate`` the
    share of a person's steps."""
    assert trajectory.is_human is not None
    steps, human = trajectory.num_control_steps, int(trajectory.is_human.sum())
    followed = [tick["is_human"] for tick in episode.steps]
    takeovers = sum(now and not before for before, now in zip([False, *followed], followed))
    watched = {"progress_end": episode.progress[-1]["value"]} if episode.progress else {}
    return watched | {
        "success": float(trajectory.success),
        "autonomous": float(not human),
        "control_steps": steps,
        "human_steps": human,
        "intervention_rate": human / steps,
        "takeovers": takeovers,
        "version": trajectory.policy_version,
        "cycle_seconds": episode.ticks[-1]["stamp"] - episode.ticks[0]["stamp"],
    }


def totals(kept: list[Mapping[str, float]]) -> dict[str, float]:
    """Over the last `RECENT` episodes: ``autonomous_success``, the share that succeeded without a
    person, and how much a person did; over all ``episodes``: the ``robot_minutes``."""
    recent = kept[-RECENT:]
    if not recent:
        return {}
    steps = sum(row["control_steps"] for row in recent)
    return {
        "autonomous_success": sum(row["success"] * row["autonomous"] for row in recent)
        / len(recent),
        "recent_success": sum(row["success"] for row in recent) / len(recent),
        "recent_interventions": sum(row["human_steps"] for row in recent) / steps,
        "robot_minutes": sum(row["cycle_seconds"] for row in kept) / 60.0,
        "episodes": len(kept),
    }
