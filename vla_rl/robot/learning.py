"""``vla-rl robot learn``: sessions with an arm whose closed episodes a learner learns from, while
the arm goes on.

    outputs/NAME/  config.yaml            the run: algorithm, actor, start
                   sessions/0001/ ...     one per start of the command, as `vla-rl robot run` leaves it
                   episodes.jsonl         which episode went to the learner under which ticket (`vla_rl.robot.episode_feed`)
                   learner/, replay/      the learner's (`vla_rl.learning.episode_queue`, `vla_rl.data.replay`)
                   checkpoints/rl         the policy, when a session ends; metrics.jsonl, report.html

The learner is the one of ``rl.rhythm=concurrent``, in a process of its own; in lockstep it takes
turns with the arm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl import build
from vla_rl import config as configs
from vla_rl.assembly.context import LEARNER_FOLDER
from vla_rl.assembly.folder import read_phases, take_folder
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.assembly.learner_main import job_of, learner_process, run_of
from vla_rl.checkpoint import save_checkpoint
from vla_rl.checks.data import check_offline_replays
from vla_rl.config import RunConfig
from vla_rl.config.robot import SessionSettings
from vla_rl.config.robot import compose as compose_session
from vla_rl.data.recorded import check_recorded
from vla_rl.data.session_trajectory import version_name
from vla_rl.devices import check_device
from vla_rl.errors import ConfigError, TrainingDiverged, UserError
from vla_rl.files import check_checkpoint
from vla_rl.learning.episode_queue import INBOX, EpisodeQueue, published_weights, take_weights
from vla_rl.learning.learner_server import LearnerServer
from vla_rl.learning.learners import ReplayLearner
from vla_rl.lock import RunLock
from vla_rl.monitoring.machine import MemoryWatch, versions
from vla_rl.monitoring.metrics import METRICS_FILE, MetricsLogger, read_metrics, write_json
from vla_rl.reporting.page import write_report
from vla_rl.robot import session as sessions
from vla_rl.robot.episode_feed import (
    LOOK_S,
    PHASE,
    SESSIONS,
    SETTLE_S,
    EpisodeFeed,
    EpisodeFeedThread,
)
from vla_rl.robot.labels import SessionReward
from vla_rl.robot.operator import make_operator
from vla_rl.robot.policy import load_others, make_decide
from vla_rl.robot.reward_process import start_watcher, watcher_of, why_not
from vla_rl.robot.session import SessionRequest
from vla_rl.types import EmbodimentSpec, TaskSpec, Trajectory

PRESET = "hil_residual"
_OF_SESSION = ("robot", "cameras", "console", "operator", "teleop")  # keys that are not the run's
# actors of which every step that was sent is right, however it was decided
_FROM_EXECUTED = ("none", "direct", "own")
_SAVE_EVERY = 10  # episodes, in lockstep


@dataclass(frozen=True)
class Learning:
    """What ``vla-rl robot learn`` was asked for. ``episodes`` in all, of earlier sessions too (0:
    until Ctrl-C). ``evaluate`` episodes of the most likely actions, without help and on held-out
    starts, every ``every`` episodes."""

    session: SessionSettings
    config: RunConfig
    episodes: int = 0
    console: bool = True
    lockstep: bool = False
    evaluate: int = 0
    every: int = 20

    @property
    def folder(self) -> Path:
        return self.config.run_dir


def compose(checkpoint: str, out: Path, overrides: Sequence[str], **asked: Any) -> Learning:
    """The settings of ``vla-rl robot learn``. Raises `ConfigError`, for an algorithm that could
    not learn from this too."""
    own = [o for o in overrides if o.partition("=")[0].partition(".")[0] in _OF_SESSION]
    rest = [o for o in overrides if o not in own]
    preset = [] if any(o.startswith("run=") for o in rest) else [f"run={PRESET}"]
    place = [f"output_dir={out.parent}"] if out.parent != Path() else []
    config = configs.compose(
        [*preset, *rest, *place, f"name={out.name}", f"checkpoint={checkpoint}", "phases=[rl]"]
    )
    session = compose_session(own)
    session = dataclasses.replace(
        session, checkpoint=checkpoint, deterministic=False, device=config.device
    )
    session.threads = session.threads or config.threads
    learning = Learning(session, config, **asked)
    _check(learning)
    return learning


def _check(learning: Learning) -> None:
    config, settings = learning.config, learning.session
    entry, name = build.entry("algorithm", config.algorithm_type), config.algorithm_type
    if isinstance(entry, build.AlgorithmEntry) and entry.needs not in (
        "actor",
        "weighted_imitation",
    ):
        raise ConfigError(
            f"algorithm.type={name} learns from the decisions of the present policy alone, and an "
            "arm's episodes hold a person's steps and those of older versions: use "
            "run=hil_residual, run=hil_serl or run=hil_dagger, or algorithm=residual, rlpd, td3 or "
            "sac"
        )
    if config.actor_type == "steered" and name != "dsrl":
        raise ConfigError(
            f"algorithm.type={name} with actor=steered learns from the noises that were chosen, "
            "and a journal holds what was executed: use algorithm=dsrl, which learns from that"
        )
    if settings.robot.acting != "synchronous" and config.actor_type not in _FROM_EXECUTED:
        raise ConfigError(
            f"robot.acting={settings.robot.acting}: actor={config.actor_type} learns by what the "
            "policy beneath decides on what is seen as a row begins, and so decisions would be "
            "older than that, or averaged. Set robot.acting=synchronous, or learn from what was "
            "executed alone: run=hil_serl (actor=direct) or actor=own"
        )
    check_offline_replays(config)
    _ = config.one_dataset  # (several are put together for env=dataset alone)
    if not (learning.folder / LEARNER_FOLDER).exists():  # who goes on has those episodes
        check_recorded(config.replay.offline, learning.folder / "replay", None)
    sessions.possible(
        settings, SessionRequest(learning.episodes, True, learning.console, learning.lockstep)
    )


@sessions.private()
def learn(learning: Learning, say: Callable[[str], None] = print) -> Path:
    """Until the episodes are done, or Ctrl-C; returns the run's folder. The same command goes on
    after a kill."""
    checkpoint, folder = Path(learning.session.checkpoint), learning.folder
    check_checkpoint(checkpoint)
    check_device(learning.config.device)
    sessions.acting_config(learning.session)
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):
        take_folder(learning.config, folder)
        torch.set_num_threads(learning.config.threads or torch.get_num_threads())
        torch.manual_seed(learning.config.seed)
        write_json(folder / "versions.json", versions())
        try:
            with MetricsLogger(folder) as logger, Cost.of(folder) as cost:
                (_in_turns if learning.lockstep else _at_once)(learning, logger, cost, say)
        except TrainingDiverged as error:
            raise TrainingDiverged(
                f"{error} (Another learning rate is another run: --out NEW_FOLDER and the changed "
                "settings. The same command goes on here with the old ones.)"
            ) from error
        finally:  # Ctrl-C is the usual end
            if read_metrics(folder / METRICS_FILE):
                write_report(folder)
                say(f"report: {folder / 'report.html'}")
    return folder


def _new_session(folder: Path) -> Path:
    """A folder of its own for each start."""
    numbers = [int(path.name) for path in (folder / SESSIONS).glob("[0-9]*")]
    return folder / SESSIONS / f"{max(numbers, default=0) + 1:04d}"


def _described(learning: Learning, embodiment: Any, tasks: Sequence[Any]) -> dict[str, Any]:
    """The learner's job."""
    known = [TaskSpec(t.name, (t.instruction,), (t.instruction,), t.horizon or 1) for t in tasks]
    return job_of(_of_the_session(learning.config), embodiment, known)


def _of_the_session(config: RunConfig) -> RunConfig:
    """Learned from are the session's tasks, whichever of a simulator a preset names."""
    return dataclasses.replace(config, tasks=[], held_out_tasks=[])


class Cost:
    """Seconds and the most memory (of this process and those below it) that ``folder`` took, in
    earlier processes too."""

    def __init__(self, seconds: float, peak: int) -> None:
        self._started, self._memory = time.perf_counter() - seconds, MemoryWatch(peak)

    @classmethod
    def of(cls, folder: Path) -> Cost:
        """What is known of ``folder``: a process that was killed left no record, and the time of
        its last row."""
        known = read_phases(folder)
        rows = [float(row["time_s"]) for row in read_metrics(folder / METRICS_FILE)]
        return cls(
            max([float(known.get(PHASE, {}).get("seconds", 0.0)), *rows]),
            int(known.get("peak_memory_bytes", 0)),
        )

    def __enter__(self) -> Cost:
        self._memory.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.__exit__(*error)

    def told(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """``phases.json`` with that record of the session."""
        seconds = time.perf_counter() - self._started
        return {PHASE: {**record, "seconds": seconds}, "peak_memory_bytes": self._memory.sample()}


def _finished(learning: Learning, feed: EpisodeFeed, policy: Any, cost: Cost) -> None:
    """Keep the policy and what the report shows."""
    kept = [record["figures"] for record in feed.records if record["ticket"]]
    save_checkpoint(learning.folder / "checkpoints" / "rl", policy)
    done = 0 < learning.episodes <= len(kept)
    record = {
        "episodes": len(kept),
        "control_steps": sum(int(row["control_steps"]) for row in kept),
        "complete": done,
    }
    write_json(learning.folder / "phases.json", cost.told(record))


def _left(learning: Learning, feed: EpisodeFeed, say: Callable[[str], None]) -> int | None:
    """Episodes that are still to come (0: any number; None: no more)."""
    if learning.episodes and feed.learned >= learning.episodes:
        say(
            f"{learning.folder} has its {feed.learned} episodes: ask for more with --episodes, "
            "or give another --out"
        )
        return None
    return learning.episodes - feed.learned if learning.episodes else 0


# ------------------------------------------------------------------------------------------ at once
def _at_once(
    learning: Learning, logger: MetricsLogger, cost: Cost, say: Callable[[str], None]
) -> None:
    """Arm, policy and learner in processes of their own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings, config = learning.session, learning.config
    spec = check_checkpoint(Path(settings.checkpoint))
    names = settings.robot.tasks or ["teleoperated"]
    job = _described(learning, spec, [build.attribute("real.tasks:spoken")(name) for name in names])
    process = learner_process(config, job, say)
    run = run_of(_of_the_session(config), job)
    policy = trained_policy(run)  # of this process: what rewards read, and what is kept at the end
    feed = EpisodeFeed(
        learning.folder, policy.chunk_length, process, SessionReward(run, policy, say), logger, say
    )
    try:
        say("starting the learner")
        process.start()
        feed.resume()
        left = _left(learning, feed, say)
        if left is not None:
            with EpisodeFeedThread(feed, SETTLE_S if learning.console else 0.0) as feeding:
                _session(learning, left, spec, feeding, say)
        say(f"learning on: {process.figures()['owed']:.0f} updates are owed")
        process.wait(lambda: process.is_even)
    finally:
        process.stop()
        newest = published_weights(learning.folder / LEARNER_FOLDER)
        if newest is not None:
            take_weights(policy, newest.tensors)
            _finished(learning, feed, policy, cost)


def _session(
    learning: Learning,
    left: int,
    spec: Any,
    feeding: EpisodeFeedThread,
    say: Callable[[str], None],
) -> None:
    settings, request = learning.session, SessionRequest(left, True, learning.console, learns=True)
    body = build.attribute("real.body:Body")(
        _new_session(learning.folder), sessions.body_config(settings)
    )
    with body:
        say(f"session {body.folder}; end it with Ctrl-C, at once with a second one")
        judge = build.attribute("real.robots.remote:Judge")(body.arm_socket)
        with contextlib.closing(judge):
            plan = dataclasses.replace(
                sessions.make_plan(settings, request, judge.tasks), past=feeding.feed.tried()
            )
            checkpoint, learner = Path(settings.checkpoint), str(learning.folder / LEARNER_FOLDER)
            about = json.loads((body.run / "robot.json").read_text(encoding="utf-8"))["embodiment"]
            sessions.require_same(EmbodimentSpec.from_dict(about), checkpoint)
            sessions.start_person(body, settings, spec)
            sessions.start_policy(body, settings, checkpoint, about, plan, learner)
            if not why_not(learning.config):
                start_watcher(
                    body, learning.config, spec, settings.robot.score_every, settings.threads
                )
            if learning.console:
                sessions.open_console(body, settings, plan, checkpoint, say)
            ready = _Ready(feeding, learning.config.rl.concurrent.max_ahead, say)
            sessions.lead(body, plan, spec.control_hz, judge, say, ready)


class _Ready:
    """Between episodes: queues what was closed, and says whether the next may start. Never waits
    itself."""

    def __init__(
        self, feeding: EpisodeFeedThread, max_ahead: int, say: Callable[[str], None]
    ) -> None:
        self._feeding, self._max_ahead, self._say = feeding, max_ahead, say
        self._looked, self._behind, self._waits = -math.inf, False, False

    def __call__(self) -> bool:
        now, h = time.monotonic(), self._feeding
        if now - self._looked < LOOK_S:
            return not self._waits
        self._looked = now
        h.look()
        behind = h.owed > self._max_ahead > 0
        if behind and not self._behind:
            self._say(
                f"the arm waits: more than rl.concurrent.max_ahead={self._max_ahead} updates "
                "are owed"
            )
        # (the queued owe more)
        self._behind, self._waits = behind, behind or (self._max_ahead > 0 and h.waiting > 0)
        return not self._waits


# ----------------------------------------------------------------------------------------- by turns
class LearnerInTurns:
    """A `RemoteLearner` in this process, with the policy that acts: `send` returns once all that
    is owed is learned."""

    def __init__(self, folder: Path, policy: Any, learner: ReplayLearner) -> None:
        self._spool = EpisodeQueue(folder / INBOX)
        self._server = LearnerServer(folder, policy, learner, 10**9, queue.Queue())
        self._learner = learner
        self.last = self.version = 0
        self._since = 0  # episodes since the state was kept

    def start(self) -> None:
        self._server.begin()
        self.version = self._server.settle()
        self.last = self._learner.replay.last_ticket

    def send(self, episodes: Sequence[tuple[Trajectory, Tensor]]) -> None:
        self.last = self._spool.put(self.last + 1, episodes).last
        self.version = self._server.settle()
        self._since += len(episodes)
        if self._since >= _SAVE_EVERY:
            self.checkpoint()

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """None: the policy that acts is the one that learns."""
        return None

    def figures(self) -> dict[str, Any]:
        return self._server.figures

    def checkpoint(self) -> None:
        self._since = 0
        self._server.save()

    def stop(self) -> None:
        self.checkpoint()


def _in_turns(
    learning: Learning, logger: MetricsLogger, cost: Cost, say: Callable[[str], None]
) -> None:
    """World, policy, learner and a scripted operator in this process, in virtual time: twice the
    same."""
    settings, config = learning.session, learning.config
    lockstep, base = build.attribute("real.lockstep:Lockstep"), sessions.body_config(settings)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            contextlib.closing(lockstep(_new_session(learning.folder), base))
        )
        spec = session.robot.embodiment
        sessions.require_same(spec, Path(settings.checkpoint))
        plan = sessions.make_plan(
            settings,
            SessionRequest(learning.episodes, console=False, learns=True),
            session.world.tasks,
        )
        acting = settings.robot.acting
        session.others = load_others(
            sessions.reset_policy(settings, plan), spec, config.device, acting
        )
        run = run_of(_of_the_session(config), _described(learning, spec, plan.tasks))
        policy = trained_policy(run)
        inner = learner_of(run, policy)
        if not isinstance(inner, ReplayLearner):
            raise ConfigError(
                f"algorithm.type={config.algorithm_type} keeps no replay for a "
                "session to learn from"
            )
        learner = LearnerInTurns(learning.folder / LEARNER_FOLDER, policy, inner)
        reward = SessionReward(run, policy, say)
        if not why_not(config):
            session.scored(watcher_of(reward, config.reward_type, settings.robot.score_every))
        feed = EpisodeFeed(learning.folder, policy.chunk_length, learner, reward, logger, say)
        learner.start()
        feed.resume()
        torch.manual_seed(config.seed + 1_000_003 * feed.learned)
        if settings.operator is not None:
            session.watched(make_operator(settings.operator, session.world))
        judge = Judge(learning, policy, run.device)

        def judged() -> None:
            n, done = learning.evaluate, feed.learned
            if n and (done % learning.every == 0 or done == learning.episodes):
                figures = judge(n)
                logger.log("judged", done, figures)
                say(
                    f"after {done} episodes: {figures['eval/success']:.0%} of {n} held-out "
                    "episodes without help"
                )

        def told(outcome: Any) -> str:
            say(sessions.line(outcome))
            if feed.gather():
                judged()
            return version_name(learner.version)

        decide = make_decide(policy, False, run.device, acting)
        left = _left(learning, feed, say)
        try:
            judged()
            if left is not None:
                plan = dataclasses.replace(plan, alone=True, episodes=left, past=feed.tried())
                done = session.run(
                    plan,
                    decide,
                    version_name(learner.version),
                    sessions.acting_config(settings),
                    told,
                )
                for text in sessions.summary(done.outcomes):
                    say(text)
                if done.problem:
                    raise UserError(done.problem)
        finally:
            learner.stop()
            _finished(learning, feed, policy, cost)


class Judge:
    """Held-out episodes of a policy's most likely actions, without help, each time in a fresh
    session: what was judged before changes nothing."""

    def __init__(self, learning: Learning, policy: Any, device: Any) -> None:
        self._learning = learning
        self._decide = make_decide(policy, True, device, learning.session.robot.acting)

    def __call__(self, n: int) -> dict[str, float]:
        """Metrics of ``n`` episodes."""
        settings, random = self._learning.session, torch.get_rng_state()
        config = sessions.body_config(settings)
        apart = build.attribute("real.named:keeps_starts_apart")(settings.robot.world)
        options = config.options | ({"split": "held_out"} if apart else {})
        config = dataclasses.replace(config, record=False, options=options)
        lockstep = build.attribute("real.lockstep:Lockstep")(
            self._learning.folder / "judged", config
        )
        with contextlib.closing(lockstep) as session:
            plan = sessions.make_plan(
                settings, SessionRequest(n, console=False, learns=True), session.world.tasks
            )
            starts = [
                dataclasses.replace(plan.tasks[i % len(plan.tasks)], number=i // len(plan.tasks))
                for i in range(n)
            ]
            plan = dataclasses.replace(
                plan, alone=True, tasks=tuple(starts), practice=None, returns=None
            )
            done = session.run(
                plan, self._decide, "judged", sessions.acting_config(settings), lambda outcome: None
            )
        torch.set_rng_state(random)  # judging changes nothing of what follows
        if done.problem:
            raise UserError(f"judging stopped: {done.problem}")
        good = [o.seconds for o in done.outcomes if o.success]
        return {
            "eval/success": len(good) / n,
            "eval/episodes": n,
            "eval/cycle_seconds": sum(good) / max(1, len(good)),
        }
