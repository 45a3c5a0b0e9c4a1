"""Practice without a person: a task and the one that undoes it in turn, and when a person is asked
for help. No clock.

After minimal supervision and MTRF: nobody puts anything back between episodes, as the reset is a
task too. Help is wanted where resets keep failing, where the arm has left its safe set, where
pauses do not end, after a fault, and where a person has paused, stopped or let go. Until a person
has taken control and given it up again, nothing is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from real.tasks import Task

LEADER = "launcher"
CALL = "help is wanted"  # how the note that asks for it begins
GAVE_UP = "the operator gave control up"  # the reason of a pause that is no call for anything
STRAYED = "left the safe set"  # how the supervisor's reason for such a pause begins
STAY = "stay"  # of a reset that leaves things where they are
REMIND_S = 30.0  # between two calls for the same help


@dataclass(frozen=True)
class Practice:
    """``reset`` is the task that undoes the others. After ``failures`` of them in a row a person is
    asked. A learned reward that says at least ``confident`` twice running has seen a success (0: it
    decides nothing). ``attended``: somebody will come; else the session ends where help is
    wanted."""

    reset: Task
    failures: int = 3
    confident: float = 0.0
    attended: bool = True


class Rounds:
    """What is next, and whether help is wanted."""

    def __init__(self, tasks: tuple[Task, ...], practice: Practice):
        self.tasks, self.practice = tasks, practice
        self.wanted = ""  # why a person is wanted
        self.calls = 0
        self.begun = False  # whether an episode has ended: from then on nothing is put back
        self._forward, self._resets, self._failed = 0, False, 0
        self._came = self.told = False

    @property
    def forward(self) -> Task:
        return self.tasks[self._forward % len(self.tasks)]

    @property
    def next(self) -> Task:
        return self.practice.reset if self._resets else self.forward

    def ended(self, task: Task, success: bool | None) -> None:
        """An episode that counts: what follows a reset is the next task, if it succeeded; what
        follows a task is a reset."""
        self.begun = True
        if task.name != self.practice.reset.name:
            self._forward, self._resets = self._forward + 1, True
        elif success:
            self._resets, self._failed = False, 0
        else:
            self._failed += 1
            if self._failed >= self.practice.failures:
                self.want(f"{self._failed} resets in a row have failed: put things back")

    def want(self, why: str) -> None:
        if not self.wanted:
            self.wanted, self.told, self._came = why, False, False
            self.calls += 1

    def interrupted(self, why: str) -> None:
        """Somebody stopped it, or a page with control has gone: that it then gives control up
        says nothing."""
        self.want(why)
        self._came = False

    def control(self, holder: str, by: str) -> bool:
        """``by`` has changed who has control ("" : nobody). Whoever took it and gave it up has
        helped: True then. A lease that lapses (by the supervisor) is no word that the arm may go
        on."""
        if not self.wanted or by == LEADER:
            return False
        self._came = self._came or bool(holder)
        if not self._came or holder or by == "supervisor":
            return False
        self.wanted, self._resets, self._failed = "", False, 0
        return True
