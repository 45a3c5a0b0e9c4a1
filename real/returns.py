"""Where episodes begin: at new starts, and again where it failed, until it does not; there a person
shows it. No clock.

The degrees by which a person helps in VLAC (arXiv 2509.15937): *return and explore* begins episodes
in states where the policy often fails, *guided explore* has a person show what to do from there.
(The first, *demonstration replay*, is the learner's: what people did is drawn with the
demonstrations.) A start is a task and a number: a simulated world's initial state; on a real arm
the operator puts things back as they were at the first episode with that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from real.tasks import Task

SHOW = "show it from here"  # how the note begins that asks a person for the whole episode


@dataclass(frozen=True)
class Returns:
    """``share`` of the episodes begin where an earlier one failed, or needed help, as long as there
    is such a start. After ``shown`` failures running from one a person is asked to show it (0:
    never). A start is done with after ``mastered`` successes running without help."""

    share: float = 0.5
    shown: int = 3
    mastered: int = 2


@dataclass(frozen=True)
class Tried:
    """An episode that counted. ``helped``: a person did some of it."""

    task: Task
    success: bool
    helped: bool


@dataclass
class _Start:
    """Of one that is not mastered: failures and successes running, and which try was the last."""

    task: Task
    failures: int = 0
    successes: int = 0
    last: int = 0


class Starts:
    """Chooses; ``past`` are the episodes of earlier sessions."""

    def __init__(self, tasks: Sequence[Task], returns: Returns, past: Sequence[Tried] = ()):
        self.tasks, self.returns = tuple(tasks), returns
        self._open: dict[tuple[str, int], _Start] = {}
        self._fresh = {task.name: 0 for task in tasks}  # the next number of each
        self._tries, self._new = 0, 0
        self._owed = 0.0  # returns
        self._next: _Start | None = None
        for tried in past:
            self.ended(tried)

    @property
    def next(self) -> Task:
        """The same until an episode has counted."""
        if self._next is None:
            self._owed = min(1.0, self._owed + self.returns.share)
            if self._open and self._owed >= 1.0:
                self._owed -= 1.0
                self._next = min(
                    self._open.values(), key=lambda start: (-start.failures, start.last)
                )
            else:
                task = self.tasks[self._new % len(self.tasks)]
                self._next = _Start(replace(task, number=self._fresh[task.name]))
        return self._next.task

    @property
    def note(self) -> str:
        """What a person is to know of the next one; "" for a new start."""
        task, start = self.next, self._next
        assert start is not None
        if (task.name, task.number) not in self._open:
            return ""
        failed = f"{start.failures} failures running" if start.failures else "which needed help"
        return f"back to start {task.name}/{task.number}, {failed}"

    def is_shown(self, task: Task) -> bool:
        """Whether a person is to show an episode from this start."""
        start = self._open.get((task.name, task.number))
        return start is not None and 0 < self.returns.shown <= start.failures

    def ended(self, tried: Tried) -> None:
        """An episode has counted. What succeeded with help is no success of the policy, and no
        failure to be shown."""
        key = (tried.task.name, tried.task.number)
        if key[0] not in self._fresh or key[1] < 0:
            return  # another session's task
        self._next, self._tries = None, self._tries + 1
        if key[1] >= self._fresh[key[0]]:
            self._fresh[key[0]], self._new = key[1] + 1, self._new + 1
        if tried.success and not tried.helped and key not in self._open:
            return
        own = next(task for task in self.tasks if task.name == key[0])
        start = self._open.setdefault(key, _Start(replace(own, number=key[1])))
        start.last = self._tries
        start.failures = 0 if tried.success else start.failures + 1
        start.successes = start.successes + 1 if tried.success and not tried.helped else 0
        if start.successes >= self.returns.mastered:
            del self._open[key]
