"""Who moves the arm: a latching state machine in one table, pure Python, without a clock.

Anyone may ask for a mode that allows less; for more, only the holder of the lease may ask, and some
changes only the supervisor itself makes. FAULT and STOPPED latch: nothing but a person's explicit
``ack`` leaves them, and never by itself. Every change of mode begins a new *epoch*, and what was
inferred in an older one is never executed.

| mode | what moves the arm |
|---|---|
| IDLE | nothing; commands are refused |
| READY | nothing; an episode may begin |
| AUTO | the policy |
| HUMAN | the operator |
| PAUSED | nothing, in the middle of an episode |
| RESETTING | a scripted move |
| STOPPED | nothing, until a person acknowledges |
| FAULT | nothing, until e-stop and cause are gone and a person acknowledges; then the arm is slow until told otherwise |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(str, Enum):
    IDLE = "IDLE"
    READY = "READY"
    AUTO = "AUTO"
    HUMAN = "HUMAN"
    PAUSED = "PAUSED"
    RESETTING = "RESETTING"
    STOPPED = "STOPPED"
    FAULT = "FAULT"


class By(int, Enum):
    """Who asks. Each may also do what those before it may."""

    ANYONE = 0
    HOLDER = 1
    SUPERVISOR = 2


MOVING = frozenset({Mode.AUTO, Mode.HUMAN, Mode.RESETTING})
IN_EPISODE = frozenset({Mode.AUTO, Mode.HUMAN, Mode.PAUSED})
# Higher allows more. Between two of one rank, and upwards, only the holder of the lease may go.
RANK = {
    Mode.FAULT: 0,
    Mode.STOPPED: 1,
    Mode.IDLE: 2,
    Mode.READY: 3,
    Mode.PAUSED: 3,
    Mode.RESETTING: 4,
    Mode.HUMAN: 5,
    Mode.AUTO: 6,
}


@dataclass(frozen=True)
class _Rule:
    """Where an event leads, and who may ask for it. ``ends`` an episode, ``discards`` it too,
    ``begins`` one."""

    to: Mode
    by: By
    begins: bool = False
    ends: bool = False
    discards: bool = False


_I, _R, _A, _H = Mode.IDLE, Mode.READY, Mode.AUTO, Mode.HUMAN
_P, _Z, _S, _F = Mode.PAUSED, Mode.RESETTING, Mode.STOPPED, Mode.FAULT
_ANY, _HOLDER, _SELF = By.ANYONE, By.HOLDER, By.SUPERVISOR

TABLE: dict[tuple[Mode, str], _Rule] = {
    (_I, "arm"): _Rule(_R, _HOLDER),
    (_R, "disarm"): _Rule(_I, _ANY),
    (_R, "start"): _Rule(_A, _HOLDER, begins=True),
    (_R, "takeover"): _Rule(_H, _HOLDER, begins=True),
    (_R, "reset"): _Rule(_Z, _HOLDER),
    # an episode
    (_A, "takeover"): _Rule(_H, _HOLDER),
    (_A, "pause"): _Rule(_P, _ANY),
    (_A, "end"): _Rule(_R, _ANY, ends=True),
    (_A, "redo"): _Rule(_R, _ANY, ends=True, discards=True),
    (_H, "hand_back"): _Rule(_A, _HOLDER),
    (_H, "release"): _Rule(_P, _ANY),  # letting go holds; it never hands back
    (_H, "pause"): _Rule(_P, _ANY),
    (_H, "end"): _Rule(_R, _ANY, ends=True),
    (_H, "redo"): _Rule(_R, _ANY, ends=True, discards=True),
    (_P, "start"): _Rule(_A, _HOLDER),
    (_P, "hand_back"): _Rule(_A, _HOLDER),
    (_P, "takeover"): _Rule(_H, _HOLDER),
    (_P, "end"): _Rule(_R, _HOLDER, ends=True),
    (_P, "redo"): _Rule(_R, _HOLDER, ends=True, discards=True),
    (_P, "disarm"): _Rule(_I, _ANY, ends=True),
    # back to the start pose
    (_Z, "reset_done"): _Rule(_R, _SELF),
    (_Z, "pause"): _Rule(_R, _ANY),  # no episode runs: what was left of the move is dropped
    (_Z, "takeover"): _Rule(_H, _HOLDER, begins=True),
    # the latches
    (_S, "ack"): _Rule(_I, _HOLDER),
    (_F, "ack"): _Rule(_I, _HOLDER),
    **{(m, "stop"): _Rule(_S, _ANY, ends=m in IN_EPISODE) for m in (_I, _R, _A, _H, _P, _Z)},
    **{
        (m, e): _Rule(_F, _ANY, ends=m in IN_EPISODE)
        for m in Mode
        if m is not _F
        for e in ("estop", "fault")
    },
}
# Asked for where they change nothing: not an error, since whoever asked has what they wanted.
HARMLESS: frozenset[tuple[Mode, str]] = frozenset(
    {(m, "pause") for m in (_I, _R, _P, _S, _F)}
    | {(m, "release") for m in Mode if m is not _H}
    | {(_I, "disarm"), (_S, "stop"), (_F, "stop"), (_F, "estop"), (_F, "fault")}
)
# Events that change what stands beside the mode, in every mode, and who may ask.
_FLAGS = {"estop_clear": By.HOLDER, "full_speed": By.HOLDER}


@dataclass(frozen=True)
class Outcome:
    """What became of a request. ``reason`` says why it was refused, in words for the operator."""

    accepted: bool
    changed: bool
    before: Mode
    after: Mode
    reason: str = ""
    rule: _Rule | None = None


class Modes:
    """The machine. ``epoch`` counts changes and invalidations, ``episode`` the episodes begun (0:
    none yet).

    ``standing`` are causes of faults that still hold ("reflex", "robot lost"): the supervisor names
    and clears them, and an ``ack`` is refused while there are any. ``faults`` are all since the
    last ack. ``slow`` after a fault.
    """

    def __init__(self) -> None:
        self.mode = Mode.IDLE
        self.epoch = 0
        self.episode = 0
        self.estop = False
        self.slow = False
        self.standing: set[str] = set()
        self.faults: tuple[str, ...] = ()

    @property
    def moving(self) -> bool:
        return self.mode in MOVING

    def invalidate(self) -> None:
        """What was inferred until now is void (a stale observation, a gate that tripped), in the
        same mode."""
        self.epoch += 1

    def condition(self, name: str, holds: bool) -> None:
        """A cause of a fault that the supervisor sees now (``holds``), or no longer sees."""
        (self.standing.add if holds else self.standing.discard)(name)

    def ask(self, event: str, by: By, value: str = "") -> Outcome:
        """Ask for ``event``; ``value`` is a fault's name. Never raises: a request that may not
        be is an outcome too."""
        before = self.mode
        if event in _FLAGS:
            return self._flag(event, by)
        rule = TABLE.get((before, event))
        if event == "estop":
            self.estop = True
        if event in ("estop", "fault"):
            self._note(value or event)
        if rule is None:
            if (before, event) in HARMLESS:
                return Outcome(True, False, before, before)
            return Outcome(
                False, False, before, before, f"'{event}' means nothing in {before.value}"
            )
        if by < rule.by:
            who = "the holder of control" if rule.by is By.HOLDER else "the supervisor"
            return Outcome(
                False, False, before, before, f"only {who} may ask for '{event}' in {before.value}"
            )
        if event == "ack" and before is Mode.FAULT and (problem := self._still()):
            return Outcome(False, False, before, before, problem)
        if event == "arm" and self.estop:
            return Outcome(False, False, before, before, "the e-stop is pressed: clear it first")
        self._change(event, rule)
        return Outcome(True, True, before, self.mode, rule=rule)

    def _flag(self, event: str, by: By) -> Outcome:
        if by < _FLAGS[event]:
            return Outcome(
                False,
                False,
                self.mode,
                self.mode,
                f"only the holder of control may ask for '{event}'",
            )
        if event == "full_speed" and self.mode not in (Mode.READY, Mode.PAUSED):
            return Outcome(
                False,
                False,
                self.mode,
                self.mode,
                "full speed is given in READY or PAUSED, while nothing moves",
            )
        if event == "estop_clear":
            self.estop = False
        else:
            self.slow = False
        return Outcome(True, False, self.mode, self.mode)

    def _note(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults = (*self.faults, fault)[-8:]

    def _still(self) -> str:
        if self.estop:
            return "the e-stop is pressed: clear it first"
        return f"the cause still holds: {', '.join(sorted(self.standing))}" if self.standing else ""

    def _change(self, event: str, rule: _Rule) -> None:
        if event == "ack":
            self.slow = self.slow or self.mode is Mode.FAULT
            self.faults = ()
        self.mode = rule.to
        self.epoch += 1
        if rule.begins:
            self.episode += 1
