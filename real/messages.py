"""What the processes of a session say to each other: one message per packet of a Unix SEQPACKET
socket, in msgpack.

A packet is the array [schema, kind, seq, source, stamp, expiry, *fields of the kind, in the order
of the class]. Decoding is strict: a wrong size, kind, number of fields, type or range raises
`MessageError`, whose text says which, and nothing is unpickled or evaluated. Numbers that are
commands may be NaN on the wire: the gate refuses them, and counts it.

Times are seconds of CLOCK_MONOTONIC, which all processes of one machine share. ``stamp`` is when
the message was made; after ``expiry`` nobody may act on it (`math.inf`: a fact, which does not
expire). ``seq`` counts up per source and connection: a receiver drops what is not newer than the
last one (`Sequence`). A robot's ``action`` is in the units and bounds of its `EmbodimentSpec`;
poses are x y z in metres and a unit quaternion w x y z, both in the robot's base frame.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from real.checks import (
    MAX_ITEMS,
    MAX_ROWS,
    MAX_TEXT,
    MessageError,
    Rows,
    Texts,
    Vector,
    number,
    require,
    rows,
    short,
    text,
    vector,
)
from vla_rl.errors import MissingPackage

try:
    import msgpack
except ModuleNotFoundError as error:  # pragma: no cover - the environment of the tests has it
    raise MissingPackage("msgpack", "real", "A session with a robot") from error

SCHEMA = 1
MAX_BYTES = 64 * 1024  # of one packet: a chunk of 100 control steps of 32 numbers is 29 kB
SILENCE_S = 0.15  # how long a command or an input is valid, unless the session says otherwise

_SOURCE = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,31}")


@dataclass(frozen=True)
class Message:
    """The head that every message has."""

    kind: ClassVar[str] = ""
    seq: int
    source: str
    stamp: float
    expiry: float


# --------------------------------------------------------------------------- towards the supervisor
@dataclass(frozen=True)
class Hello(Message):
    """The first message of a client. ``role`` is one of `ROLES`; the answer is a `Welcome`, or
    `Refused`."""

    kind: ClassVar[str] = "hello"
    role: str
    pid: int


@dataclass(frozen=True)
class Command(Message):
    """One control step that a policy or an absolute device wants now; valid until ``expiry``.

    ``decision`` and ``index`` say which row of which inference it is, ``policy_version`` whose.
    ``obs_stamp`` is when the observation behind it was captured, ``epoch`` the supervisor's epoch
    that it was made for: with another one it is dead. ``lease`` is the holder's token where a
    person's device commands, empty for a policy.
    """

    kind: ClassVar[str] = "command"
    lease: str
    epoch: int
    decision: int
    index: int
    policy_version: str
    obs_stamp: float
    action: Vector


@dataclass(frozen=True)
class Chunk(Message):
    """The rows of one inference. Row i is due at tick ``start + round(i * loop_hz / hz)`` of the
    supervisor.

    Rows that are already late when it comes are skipped, never hurried. ``prefix`` rows at the
    front were taken for committed as the inference began, and the policy was held to what had been
    sent for them; ``delay`` rows were late when it went out. The ``expiry`` says when the first row
    not yet begun dies; the supervisor adds each row's own offset. ``acting`` is one of
    `real.acting.KINDS`; ``predicted`` what the policy itself answered, empty where it is
    ``actions``. ``lasts`` [rows, 1] are the shares of a control step that each row lasts, in whole
    ticks; empty: all of it.
    """

    kind: ClassVar[str] = "chunk"
    epoch: int
    start: int
    hz: float
    decision: int
    policy_version: str
    obs_stamp: float
    prefix: int
    delay: int
    actions: Rows
    acting: str = ""
    predicted: Rows = ()
    lasts: Rows = ()


@dataclass(frozen=True)
class Input(Message):
    """The *complete* state of an operator's device, sent at 30 Hz or more whether or not it
    changed.

    ``axes`` are six numbers in [-1, 1]: translation x y z and rotation x y z. ``gripper`` in [-1,
    1] (1 closes, -1 opens, 0 leaves it). ``keys`` are the names of the keys and buttons that are
    down. ``target`` is an absolute device's own target in the robot's action space (a leader arm),
    empty for others. ``device_stamp`` is the device's clock, for latency.
    """

    kind: ClassVar[str] = "input"
    lease: str
    device_stamp: float
    dead_man: bool
    axes: Vector
    gripper: float
    keys: Texts
    target: Vector


@dataclass(frozen=True)
class Event(Message):
    """Something that happened or is asked for, once. ``name`` is one of `EVENTS`.

    ``at`` is when the person pressed (the page's clock, brought to this machine's), which for a
    label is the moment that is meant. ``value`` is a label ("success", "failure", a stage's name),
    a reason, or the task to begin. ``lease`` is the holder's token, empty from those who only
    watch.
    """

    kind: ClassVar[str] = "event"
    name: str
    value: str
    at: float
    lease: str


@dataclass(frozen=True)
class Beat(Message):
    """I live. ``tick`` counts; a role that the session requires and that falls silent makes the
    arm hold."""

    kind: ClassVar[str] = "beat"
    tick: int


@dataclass(frozen=True)
class Progress(Message):
    """How far a reward model says that an episode's ``step`` has come (1: done); the supervisor
    passes it on to all."""

    kind: ClassVar[str] = "progress"
    model: str
    episode: int
    step: int
    value: float


@dataclass(frozen=True)
class Lease(Message):
    """Ask for control, keep it or give it up. ``ask`` is "request", "renew" or "release"; the
    answer is a `Grant`.

    ``force`` takes it from another holder, which pauses first. ``token`` is the one held (empty
    when requesting).
    """

    kind: ClassVar[str] = "lease"
    ask: str
    token: str
    force: bool


# ------------------------------------------------------------------------------ from the supervisor
@dataclass(frozen=True)
class Welcome(Message):
    """What a client needs to know: ``zero`` is the time of tick 0, so tick k is due at ``zero + k /
    hz``.

    ``control_hz`` is the rate of the robot's actions (rows of a chunk), ``hz`` that of the
    supervisor's ticks. An action's numbers 3 to 5 are a rotation vector where it ``turns``, its
    last one is a gripper's command where it ``grips``.
    """

    kind: ClassVar[str] = "welcome"
    session: str
    robot: str
    hz: float
    control_hz: float
    zero: float
    tick: int
    epoch: int
    action_names: Texts
    action_low: Vector
    action_high: Vector
    turns: bool
    grips: bool
    cameras: Texts
    stages: Texts


@dataclass(frozen=True)
class Refused(Message):
    """An answer to message ``about`` of this client (its seq, -1 where it could not be read)."""

    kind: ClassVar[str] = "refused"
    about: int
    reason: str


@dataclass(frozen=True)
class Grant(Message):
    """Who holds control now. ``token`` is set only in the answer to the holder itself; ``until``
    is when it lapses."""

    kind: ClassVar[str] = "grant"
    granted: bool
    holder: str
    token: str
    until: float
    reason: str


@dataclass(frozen=True)
class State(Message):
    """What the supervisor knows and did in one tick; goes to every client and to the recorder.

    A *control step* lasts several ticks (``step`` counts them in the episode, -1: none).
    ``policy``, ``human`` and ``sent`` are its three actions: what the policy asked for, what the
    person asked for, what was really done after the gate (each empty where there was none; ``sent``
    is final in the tick with ``step_done``). ``reference`` is what went to the robot in this very
    tick, in the robot's own terms, empty while it holds. ``is_human`` says whose request was
    followed, ``holding`` that none was valid. ``decision``, ``index`` and ``policy_version`` belong
    to ``policy`` (-1, -1, ""), ``queue`` is how many rows are left. ``gate`` is the mask of the
    stages that clipped in this tick (bit i = stage i of `Welcome.stages`), ``clipped`` counts their
    ticks in this episode.

    ``proprio`` is what a policy reads, as its `EmbodimentSpec` names it; ``gripper`` is its
    opening, 0 to 1. ``stamp`` is the tick's deadline, ``measured`` when the robot was observed,
    ``lateness`` by how much the tick began late (seconds).
    """

    kind: ClassVar[str] = "state"
    tick: int
    epoch: int
    mode: str
    holder: str
    episode: int
    step: int
    step_done: bool
    proprio: Vector
    pose: Vector
    joints: Vector
    gripper: float
    wrench: Vector
    measured: float
    policy: Vector
    human: Vector
    sent: Vector
    reference: Vector
    is_human: bool
    holding: bool
    decision: int
    index: int
    policy_version: str
    queue: int
    gate: int
    clipped: tuple[int, ...]
    slow: bool
    estop: bool
    faults: Texts
    lateness: float
    overruns: int


@dataclass(frozen=True)
class Frame(Message):
    """A picture lies in slot ``slot`` of the ring at ``ring`` (see `real.ring`), of ``camera``.

    ``number`` counts pictures, ``device_no`` is the device's own number (a gap is a lost picture,
    the same one again a frozen stream). ``capture`` is on this machine's clock, ``device_stamp`` on
    the device's.
    """

    kind: ClassVar[str] = "frame"
    camera: str
    ring: str
    slot: int
    number: int
    device_no: int
    capture: float
    device_stamp: float
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class Notice(Message):
    """What happened, for all: a change of mode, a fault, an episode's begin or end. ``name`` is
    an event's name."""

    kind: ClassVar[str] = "notice"
    name: str
    value: str
    by: str
    mode: str
    epoch: int
    tick: int
    episode: int


_TOWARDS = (Hello, Command, Chunk, Input, Event, Beat, Progress, Lease)
KINDS: dict[str, type[Message]] = {
    c.kind: c for c in (*_TOWARDS, Welcome, Refused, Grant, State, Frame, Notice)
}
ROLES = (
    "policy",
    "teleop",
    "console",
    "camera",
    "recorder",
    "learner",
    "guard",
    "launcher",
    "viewer",
)
ASKS = ("request", "renew", "release")

# Events that ask for another mode (`real.modes.TABLE` says from where and by whom) ...
MODE_EVENTS = (
    *(
        "arm",
        "disarm",
        "start",
        "takeover",
        "release",
        "hand_back",
        "pause",
        "reset",
        "reset_done",
        "end",
        "redo",
    ),
    *("stop", "estop", "estop_clear", "ack", "full_speed", "fault"),
)
# ... and those that do not.
EVENTS = (*MODE_EVENTS, "label", "task", "note", "loss")

# Limits of single fields; what is not listed is held by its type alone.
_CHOICES = {("hello", "role"): ROLES, ("event", "name"): EVENTS, ("lease", "ask"): ASKS}
_LENGTHS = {("input", "axes"): (6,), ("state", "wrench"): (0, 6), ("state", "pose"): (0, 7)}
_UNIT = {("input", "axes"), ("input", "gripper")}  # in [-1, 1], which NaN is not
# the gate judges these
_MAY_BE_NAN = {("command", "action"), ("chunk", "actions"), ("input", "target")}
_MAY_BE_EMPTY = {("chunk", "predicted"), ("chunk", "lasts")}
_POSITIVE = {("chunk", "hz"), ("welcome", "hz"), ("welcome", "control_hz")}
_ENDLESS = {"expiry", "until"}
_SIGNED = {"decision", "index", "about", "step"}  # -1 means none


def encode(message: Message) -> bytes:
    """One packet. Raises `MessageError` for a message that `decode` would refuse: mistakes show
    where they are made."""
    kind = message.kind
    values = [getattr(message, f.name) for f in dataclasses.fields(message)]
    packet = msgpack.packb([SCHEMA, kind, *values], use_bin_type=True)
    require(
        len(packet) <= MAX_BYTES, kind, f"it has {len(packet)} bytes, and {MAX_BYTES} are allowed"
    )
    _build(kind, values)
    return packet


def decode(packet: bytes) -> Message:
    """The message in a packet. Raises `MessageError`."""
    if len(packet) > MAX_BYTES:
        raise MessageError(f"a packet has {len(packet)} bytes, and {MAX_BYTES} are allowed")
    try:
        items = msgpack.unpackb(
            packet,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT * 4,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_ROWS,
            max_map_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MessageError(
            f"a packet is no msgpack within the limits: {str(error) or type(error).__name__}"
        ) from None
    if not isinstance(items, tuple) or len(items) < 6:
        raise MessageError(
            "a packet is no array of schema, kind, seq, source, stamp, expiry and fields"
        )
    schema, kind, *values = items
    if schema != SCHEMA or isinstance(schema, bool):
        raise MessageError(
            f"a packet has schema {short(schema)}, this side speaks {SCHEMA}: both "
            "must be one version"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise MessageError(f"a packet is of kind {short(kind)}; known are {', '.join(KINDS)}")
    return _build(kind, values)


_M = TypeVar("_M", bound=Message)


class Writer:
    """Makes messages of one source: counts ``seq`` up and stamps them by ``clock``:
    CLOCK_MONOTONIC, or virtual time."""

    def __init__(self, source: str, clock: typing.Callable[[], float]):
        self.source, self.clock, self.seq = source, clock, -1

    def make(self, kind: type[_M], valid_s: float = math.inf, **fields: Any) -> _M:
        """A message that expires ``valid_s`` seconds from now."""
        self.seq += 1
        now = self.clock()
        return kind(seq=self.seq, source=self.source, stamp=now, expiry=now + valid_s, **fields)


class Sequence:
    """Which messages of a source are newer than all before: a duplicate, or one that was
    overtaken, is not."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, str], int] = {}

    def newer(self, message: Message) -> bool:
        """True, and remembered, where it is. Each kind of a source is apart: an old beat must
        not kill a command."""
        key = (message.source, message.kind)
        if message.seq <= self.last.get(key, -1):
            return False
        self.last[key] = message.seq
        return True


# ------------------------------------------------------------------------------------------- checks
def _convert(place: str, name: str, kind: Any, value: Any) -> Any:
    """``value`` as the type of its field, or `MessageError`."""
    nan = (place, name) in _MAY_BE_NAN
    if kind is float:
        found = number(place, name, value)
        good = (math.isfinite(found) or name in _ENDLESS) and (
            (place, name) not in _POSITIVE or found > 0
        )
        require(good, place, f"{name} is {found}")
        return found
    if kind is int:
        least = -1 if name in _SIGNED else 0
        if type(value) is not int or not least <= value < 2**53:
            raise MessageError(
                f"a {place} message is wrong: {name} is {short(value)}, no whole "
                f"number from {least}"
            )
        return value
    if kind is bool:
        if type(value) is not bool:
            raise MessageError(
                f"a {place} message is wrong: {name} is {short(value)}, neither true nor false"
            )
        return value
    if kind is str:
        return text(place, name, value)
    if kind == Rows:
        return (
            () if value == () and (place, name) in _MAY_BE_EMPTY else rows(place, name, value, nan)
        )
    if kind == Vector:
        return vector(place, name, value, nan)
    good = isinstance(value, tuple | list) and len(value) <= MAX_ITEMS
    require(good, place, f"{name} is no list of at most {MAX_ITEMS} entries")
    entry = int if kind == tuple[int, ...] else str
    return tuple([_convert(place, name, entry, x) for x in value])


_FIELDS: dict[str, list[tuple[str, Any]]] = {
    kind: [(f.name, typing.get_type_hints(c)[f.name]) for f in dataclasses.fields(c)]
    for kind, c in KINDS.items()
}


def _build(kind: str, values: list[Any]) -> Message:
    fields = _FIELDS[kind]
    require(
        len(values) == len(fields),
        kind,
        f"it has {len(values)} fields, and {len(fields)} belong to it",
    )
    found = {name: _convert(kind, name, of, value) for (name, of), value in zip(fields, values)}
    require(
        _SOURCE.fullmatch(found["source"]) is not None,
        kind,
        "its source is no name of a-z 0-9 _ . : -",
    )
    require(found["expiry"] >= found["stamp"], kind, "it expires before it was made")
    for (place, name), allowed in _CHOICES.items():
        if place == kind and found[name] not in allowed:
            raise MessageError(
                f"a {kind} message is wrong: {name} is {short(found[name])}; known: "
                f"{', '.join(allowed)}"
            )
    for (place, name), lengths in _LENGTHS.items():
        if place == kind:
            require(len(found[name]) in lengths, kind, f"{name} has {len(found[name])} numbers")
    for place, name in _UNIT:
        if place == kind:
            numbers = found[name] if isinstance(found[name], tuple) else (found[name],)
            require(all(-1.0 <= x <= 1.0 for x in numbers), kind, f"{name} is outside [-1, 1]")
    return KINDS[kind](**found)
