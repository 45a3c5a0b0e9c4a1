"""Leads a session through its episodes: reset, start, success or time-out, label, end. No clock, no
socket, no torch.

It asks for control only while nobody else has it, and gives it up once an episode runs, so that a
person may take over at any moment; while a person has control it waits. It clears no fault.
Messages go in (`hear`, `judged`), requests come out (`due`), from three sources: "launcher", who
leads, "simulator", who labels, and in practice "reward.confident", who may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from real.asking import AGAIN_S, Asking, Requests
from real.labels import Span, meant
from real.messages import Event, Grant, Message, Notice, Progress, Refused, State
from real.modes import IN_EPISODE, Mode
from real.practice import CALL, GAVE_UP, LEADER, REMIND_S, STAY, STRAYED, Practice, Rounds
from real.returns import SHOW, Returns, Starts, Tried
from real.tasks import Task, parse

JUDGE, SEER = "simulator", "reward.confident"
# as long may a simulator take to reset; twice would strike in the middle of the episode
RESET_S = 20.0
_IN = {m.value for m in IN_EPISODE}


@dataclass(frozen=True)
class Plan:
    """What a session is to do. ``episodes`` 0: until it is told to end.

    ``leads``: arm, reset and start by itself (a simulated arm only); else a person does, and this
    only labels and ends. ``policy``: episodes are started for the policy; else a person drives.
    ``alone``: nobody watches, so that after a pause it goes on by itself (at most ``resumes`` times
    an episode), and a fault ends the session. ``judged``: the simulator labels. An episode ends
    without success after its task's horizon, or ``patience`` times as many seconds as that takes.
    In ``practice`` it goes on by itself until it wants help, also with a real arm once a person has
    begun the first episode. With ``returns`` it says where each episode begins, ``past`` are those
    of earlier sessions.
    """

    tasks: tuple[Task, ...]
    episodes: int = 0
    leads: bool = True
    policy: bool = True
    alone: bool = False
    judged: bool = True
    resumes: int = 20
    patience: float = 4.0
    practice: Practice | None = None
    returns: Returns | None = None
    past: tuple[Tried, ...] = ()

    def task(self, number: int, chosen: str) -> Task:
        """Of episode ``number``: the one that a person has ``chosen``, by its text, else the next
        in turn."""
        in_turn = self.tasks[number % len(self.tasks)]
        return next((task for task in self.tasks if task.text == chosen), in_turn)


@dataclass
class Outcome:
    """One episode. ``success`` None: nobody labelled it. Steps are control steps; ``pauses``
    counts those of the machine."""

    episode: int
    task: Task
    begun: float
    success: bool | None = None
    labelled_by: str = ""
    steps: int = 0
    human_steps: int = 0
    pauses: int = 0
    seconds: float = 0.0
    reason: str = ""
    discarded: bool = False
    reset: bool = False  # of practice


class _Verdict:
    """How the episode that runs ends: ``success`` is the word of ``seer``, the simulator or in
    practice a confident reward."""

    def __init__(self, plan: Plan, control_hz: float):
        self.plan, self.control_hz = plan, control_hz
        self.success, self.seer = False, JUDGE
        self._sure = 0

    def begin(self) -> None:
        self.success, self._sure = False, 0

    def watched(self, confident: float, current: Outcome, progress: Progress) -> None:
        sure = progress.episode == current.episode and progress.value >= confident > 0
        self._sure = self._sure + 1 if sure else 0
        if self._sure == 2 and not self.success:
            self.success, self.seer = True, SEER

    def of(self, current: Outcome, now: float) -> str:
        """One of "success" and "out of time", or "" while it runs."""
        if self.success:
            return "success"
        horizon = current.task.horizon or self._horizon(current.task.name)
        if not self.plan.policy or not horizon:
            return ""
        late = now - current.begun > self.plan.patience * horizon / self.control_hz + 5.0
        return "out of time" if current.steps >= horizon or late else ""

    def _horizon(self, name: str) -> int:
        practice = self.plan.practice
        known = (*self.plan.tasks, *([practice.reset] if practice is not None else ()))
        return next((task.horizon for task in known if task.name == name), 0)


class Conductor:
    """See the module's text. ``control_hz`` is the robot's."""

    def __init__(self, plan: Plan, control_hz: float):
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self.problem = ""  # why it had to give up
        self.notes: list[str] = []  # for the person at the terminal
        self._state: State | None = None
        self._asking = Asking()
        self._current: Outcome | None = None
        self._kept = 0  # episodes that were not discarded
        self._prepared = self._asked_reset = False
        self._verdict = _Verdict(plan, control_hz)
        self.rounds = Rounds(plan.tasks, plan.practice) if plan.practice is not None else None
        self.starts = (
            Starts(plan.tasks, plan.returns, plan.past) if plan.returns is not None else None
        )
        self._told = False  # whether everybody knows where the next episode begins
        self._chosen = ""  # the task that a person chose, as text
        self._shows = False  # whether a person is still to be asked to show the episode that runs

    @property
    def done(self) -> bool:
        """Whether as many episodes have ended as were wanted, or it gave up."""
        return bool(self.problem) or (0 < self.plan.episodes <= self._kept)

    @property
    def between(self) -> bool:
        """Whether no episode runs."""
        return self._current is None

    # -------------------------------------------------------------------------------------- hearing
    def judged(self, news: str) -> None:
        """The simulator says "began" (its reset is done) or "success"."""
        if news == "began":
            self._prepared, self._verdict.success = self._asked_reset, False
        elif news == "success":
            self._verdict.success, self._verdict.seer = self._current is not None, JUDGE

    def hear(self, message: Message) -> None:
        if isinstance(message, State):
            if self._state is None and message.mode == Mode.FAULT.value:  # it struck before
                self._fault(", ".join(message.faults))
            self._state = message
            self._asking.hear(message)
            if self._current is not None and message.step_done:
                self._current.steps += 1
                self._current.human_steps += message.is_human
        elif isinstance(message, Grant):
            self._asking.hear(message)
        elif (
            isinstance(message, Event)
            and message.name == "label"
            and message.value in ("success", "failure")
        ):
            self._labelled(message)
        elif isinstance(message, Event) and message.name == "task" and message.source != LEADER:
            if message.value != self._chosen:
                self._chosen, self._prepared, self._asked_reset = message.value, False, False
        elif (
            isinstance(message, Event)
            and message.name in ("pause", "stop", "estop")
            and message.source != LEADER
        ):
            if self.rounds is not None and message.value != GAVE_UP:
                self.rounds.interrupted(
                    f"{message.name} by {message.source}: {message.value or 'it was pressed'}"
                )
        elif (
            isinstance(message, Progress) and self.rounds is not None and self._current is not None
        ):
            self._verdict.watched(self.rounds.practice.confident, self._current, message)
        elif isinstance(message, Refused):
            # (whatever was refused: a reset that was not is asked for once more)
            self._asked_reset = False
        elif isinstance(message, Notice):
            self._notice(message)

    def _labelled(self, event: Event) -> None:
        """The episode that it means, which may have ended, is what it says."""
        told = [*self.outcomes, *([self._current] if self._current is not None else [])]
        spans = [
            Span(o.episode, o.begun, math.inf if o is self._current else o.begun + o.seconds)
            for o in told
        ]
        found = meant(event.at, spans)
        if found is None:
            return
        outcome = next(o for o, span in zip(told, spans) if span is found)
        if outcome is not self._current and outcome.success is not (event.value == "success"):
            self.notes.append(
                f"episode {outcome.episode} is a {event.value} now, says {event.source}"
            )
        outcome.success = event.value == "success"
        outcome.labelled_by = event.source.partition(".")[0]

    def _notice(self, n: Notice) -> None:
        if n.mode in (Mode.FAULT.value, Mode.STOPPED.value, Mode.IDLE.value):
            self._asked_reset = False  # it was dropped on its way
        if n.name == "begin":
            task = parse(n.value)
            resets = self.rounds is not None and task.name == self.rounds.practice.reset.name
            self._current = Outcome(n.episode, task, n.stamp, reset=resets)
            self._prepared = self._asked_reset = False
            self._verdict.begin()
            self._shows = self.starts is not None and self.starts.is_shown(task)
            self._asking.forget("label")
        elif n.name in ("end_episode", "discard") and (ended := self._current) is not None:
            ended.discarded, ended.seconds = n.name == "discard", n.stamp - ended.begun
            ended.reason = ended.reason or n.value
            self.outcomes.append(ended)
            self._kept += not ended.discarded
            self._current, self._told = None, False
            if self.rounds is not None and not ended.discarded:
                self.rounds.ended(ended.task, ended.success)
            if self.starts is not None and not ended.discarded and ended.success is not None:
                self.starts.ended(Tried(ended.task, ended.success, ended.human_steps > 0))
        elif n.name == "pause" and self._current is not None and n.mode == "PAUSED":
            self._current.pauses += 1
            self.notes.append(f"paused: {n.value}")
            if n.value.startswith(STRAYED):
                self._want(f"the arm has {n.value}")
        elif n.name == "pause" and n.mode == Mode.READY.value:
            self._asked_reset = False  # so it was: a camera was late, somebody pressed pause
        elif n.name == "release":
            self._want("a person let go of the arm")
        elif n.name == "lease" and self.rounds is not None and self.rounds.control(n.value, n.by):
            self._prepared = self._asked_reset = False
        elif n.name == "reset_done" and not self.plan.judged:
            self._prepared = self._asked_reset
        elif n.name == "fault":
            self._fault(n.value)

    def _fault(self, why: str) -> None:
        self.notes.append(f"fault: {why}")
        if self.plan.alone and not (self.rounds is not None and self.rounds.practice.attended):
            self.problem = f"the session stopped with a fault: {why}"
        else:
            self._want(f"a fault: {why}")

    def _want(self, why: str) -> None:
        if self.rounds is not None:
            self.rounds.want(why)

    # --------------------------------------------------------------------------------------- asking
    def due(self, now: float) -> Requests:
        """(source, kind, fields) of what is to be sent now."""
        state = self._state
        if state is None or self.done:
            return []
        if self.rounds is not None and self.rounds.wanted:
            return self._call(self.rounds, state, now)
        if state.mode in _IN and self._current is not None:
            return self._during(state, self._current, now)
        leads = self.plan.leads or (self.rounds is not None and self.rounds.begun)
        if self.starts is not None and not leads and not self._told:
            return self._announce(self.starts, state, now)
        if self._current is not None or not leads or state.holder not in ("", LEADER):
            return []  # (where an episode has begun, this state is older than that)
        if state.mode == Mode.IDLE.value:
            return self._asking.lead("arm", now)
        if state.mode == Mode.READY.value:
            return self._between(now)
        return []

    def _call(self, rounds: Rounds, state: State, now: float) -> Requests:
        """Say that help is wanted, and wait. Between episodes the task is set first that a
        person puts things back for."""
        if not rounds.practice.attended:
            self.problem = f"help is wanted, and nobody is there: {rounds.wanted}"
            return []
        if not rounds.told:
            free = state.holder in ("", LEADER)
            if state.mode == Mode.READY.value and free and not self._asking.token:
                return self._asking.lead("task", now)
            rounds.told = True
            self._asking.forget("note")
            self.notes.append(f"{CALL}: {rounds.wanted}; take control, help, and give control up")
            if self._asking.token:
                return (
                    self._asking.event(LEADER, "task", now, rounds.forward.text)
                    + self._asking.let_go()
                )
        if not self._asking.may("note", now, REMIND_S):
            return self._asking.let_go()
        return (
            self._asking.event(LEADER, "note", now, f"{CALL}: {rounds.wanted}")
            + self._asking.let_go()
        )

    def _announce(self, starts: Starts, state: State, now: float) -> Requests:
        """A person puts things back and begins: say from where. (In READY the supervisor takes that
        of its launcher, whoever has control.)"""
        if self._current is not None or state.mode != Mode.READY.value:
            return []
        self._told, task = True, starts.next.text
        note = f"next: {starts.note or 'a new start'}: {task}"
        self.notes.append(note)
        asking = self._asking
        return asking.event(LEADER, "task", now, task) + asking.event(LEADER, "note", now, note)

    def _between(self, now: float) -> Requests:
        if not self._prepared:
            if self._asking.since("reset", now) < (RESET_S if self._asked_reset else AGAIN_S):
                return []
            if not self._asking.token:
                return self._asking.lead("reset", now)
            task, how = self.plan.task(len(self.outcomes), self._chosen), ""
            if self.rounds is not None:
                task, how = self.rounds.next, STAY if self.rounds.begun else ""
            elif self.starts is not None:
                task = self.starts.next
            self._asked_reset = True
            self._asking.forget("reset")
            said = self._asking.event(LEADER, "task", now, task.text)
            return said + self._asking.lead("reset", now, how)
        if not self.plan.policy:
            return self._asking.let_go()
        return self._asking.lead("start", now)

    def _during(self, state: State, current: Outcome, now: float) -> Requests:
        if self._shows:
            self._shows = False
            self.notes.append(f"{SHOW}: {current.task.text}")
            return self._asking.event(LEADER, "note", now, self.notes[-1])
        verdict = self._verdict.of(current, now)
        if verdict:
            return self._finish(state, current, verdict, now)
        if state.mode == Mode.PAUSED.value and (self.plan.alone or self.rounds is not None):
            if state.holder not in ("", LEADER):
                return []
            if current.pauses > self.plan.resumes and self.rounds is not None:
                current.pauses = 0
                self.rounds.want(
                    f"the episode was paused {self.plan.resumes} times, the last time "
                    f"as {self.notes[-1]}"
                )
                return []
            if current.pauses > self.plan.resumes:
                self.problem = (
                    f"an episode was paused {current.pauses} times; the last reason: "
                    f"{self.notes[-1]}"
                )
                return []
            return self._asking.lead("start", now)
        return self._asking.let_go()

    def _finish(self, state: State, current: Outcome, verdict: str, now: float) -> Requests:
        """Label it, and end it once the supervisor has told everybody: labels come over a link of
        their own, and a record that has ended takes none. In PAUSED ending needs control."""
        current.reason = verdict
        if (self.plan.judged or verdict == "success") and not current.labelled_by:
            value, by = (
                ("success", self._verdict.seer) if verdict == "success" else ("failure", JUDGE)
            )
            may = self._asking.may("label", now)
            return self._asking.event(by, "label", now, value) if may else []
        if state.mode == Mode.PAUSED.value:
            leads = self.plan.leads or self.rounds is not None
            return self._asking.lead("end", now) if leads and state.holder in ("", LEADER) else []
        may = self._asking.may("end", now)
        return self._asking.event(LEADER, "end", now, verdict) if may else []
