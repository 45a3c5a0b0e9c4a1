"""How an episode of pick-and-place failed, told from what a simulator sees at every control step
(standard library only).

docs/how_to/evaluation.md says it in the words of users. Both the embedded suite and LIBERO feed the
same tracker; what they know of an object reaches it through `Facts`. Contacts are asked for only
while an object is off its place or in the hand, so that most control steps cost a few comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

LIFTED = 0.01  # metres above the lowest place where an object has been
# metres that an object may fall after the fingers have opened and still count as put down
FALL = 0.08
RIM_FALL = 0.20  # the same for goals inside something, over whose rim things are let go
AT_REST = 0.05  # m/s
# control steps after contact is lost in which opening the gripper shows that the object was put
# down
SET_DOWN_STEPS = 10


class Facts(Protocol):
    """What a simulator knows of the objects of one running episode, by name; live."""

    def height(self, name: str) -> float:
        """Of the object's origin (m)."""
        ...

    def near(self, name: str) -> bool:
        """Whether the hand is where it could grasp the object."""
        ...

    def fingers(self, name: str) -> int:
        """How many of the two fingers touch the object."""
        ...

    def settled(self, name: str) -> bool:
        """Whether the object is slower than `AT_REST`."""
        ...

    def at_goal(self, name: str) -> bool:
        """Whether the object is where the task wants it, at rest and let go of or not."""
        ...


class _Past:
    """What has happened to one object so far."""

    __slots__ = ("held", "let_go_at", "lifted", "lowest", "reached", "since", "slipped")

    def __init__(self, height: float) -> None:
        self.lowest = self.let_go_at = height
        self.reached = self.lifted = self.held = self.slipped = False
        self.since = 0  # control steps without contact

    def lose(self, height: float, opening: bool) -> None:
        self.held, self.slipped, self.let_go_at, self.since = False, not opening, height, 0

    def look_back(self, height: float, opening: bool) -> None:
        """Fingers may lose what they set down just before they open: without a fall that is no
        slip."""
        self.since += 1
        if opening and self.since <= SET_DOWN_STEPS and self.let_go_at - height < LIFTED:
            self.slipped = False


class FailureTracker:
    """Watches one episode; `update` after every control step, `verdict` when it ended without
    success.

    ``targets`` {object to move: metres that it may fall after the fingers have opened and still
    count as put down; None where nothing is to be put down}; ``others``: objects to be left alone.
    """

    def __init__(
        self, facts: Facts, targets: Mapping[str, float | None], others: Iterable[str]
    ) -> None:
        self._facts, self._targets = facts, dict(targets)
        self._others = [name for name in others if name not in self._targets]
        self._past = {name: _Past(facts.height(name)) for name in (*self._targets, *self._others)}
        self._opening = True

    def update(self, opening: bool) -> None:
        """Take in the state after a control step in which the gripper was told to open, or not."""
        facts, self._opening = self._facts, opening
        for name in self._targets:
            past = self._past[name]
            past.reached = past.reached or facts.near(name)
        for name, past in self._past.items():
            height = facts.height(name)
            if past.held:
                if not facts.fingers(name):
                    past.lose(height, opening)
                continue
            if past.slipped:
                past.look_back(height, opening)
            if height < past.lowest:
                past.lowest = height
            elif height - past.lowest > LIFTED and facts.fingers(name) == 2:
                past.held = past.lifted = True

    def verdict(self) -> str:
        """One of `vla_rl.specs.FAILURE_KINDS`, for the objects that are not where the task wants
        them."""
        pending = [name for name in self._targets if not self._facts.at_goal(name)]
        if not pending:
            return "out_of_time"
        lifted = [name for name in pending if self._past[name].lifted]
        if lifted:
            kinds = [self._after_lift(name) for name in lifted]
            return next((kind for kind in kinds if kind != "out_of_time"), "out_of_time")
        if any(self._past[name].lifted for name in self._others):
            return "wrong_object"
        return (
            "missed_grasp" if any(self._past[name].reached for name in pending) else "never_reached"
        )

    def _after_lift(self, name: str) -> str:
        facts, past, fall = self._facts, self._past[name], self._targets[name]
        height = facts.height(name)
        if past.held:
            if facts.fingers(name) == 2 or height - past.lowest > LIFTED:
                return "out_of_time"
            past.lose(height, self._opening)  # it stands again, and a finger only leans against it
        if fall is None or past.slipped or past.let_go_at - height > fall:
            return "dropped"
        return "wrong_place" if facts.settled(name) else "out_of_time"
