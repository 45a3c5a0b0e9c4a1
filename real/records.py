"""What a journal's records hold: checks of what somebody else may have written (`real.journal`
has the table of kinds)."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from real.checks import MAX_ITEMS, MAX_ROWS, MAX_TEXT, Vector, short
from real.messages import State
from vla_rl.errors import ConfigError, first_line
from vla_rl.specs import EmbodimentSpec

SCHEMA = 1
# and rows
CHUNK_FIELDS = (
    "acting",
    "decision",
    "epoch",
    "start",
    "hz",
    "prefix",
    "delay",
    "policy_version",
    "obs_stamp",
)
EVENT_FIELDS = ("name", "value", "source", "at", "stamp")
NOTICE_FIELDS = ("name", "value", "by", "mode", "epoch", "tick")
PROGRESS_FIELDS = ("model", "step", "value", "source", "stamp")
_MOST_PIXELS = 1 << 15  # of a side of a picture

Check = Callable[[Any], bool]


def _number(x: Any) -> bool:
    return type(x) in (float, int) and -1e300 < x < 1e300  # NaN is in no range


def _expiry(x: Any) -> bool:
    return _number(x) or x == math.inf


def _whole(x: Any) -> bool:
    return type(x) is int and -1 <= x < 2**53  # −1 means none


def _truth(x: Any) -> bool:
    return type(x) is bool


def _text(x: Any) -> bool:
    return type(x) is str and len(x) <= MAX_TEXT


def _vector(x: Any) -> bool:
    return type(x) is list and len(x) <= MAX_ITEMS and all(map(_number, x))


def _rows(x: Any) -> bool:
    good = type(x) is list and len(x) <= MAX_ROWS and all(map(_vector, x))
    return good and len({len(row) for row in x}) <= 1


def _list_of(entry: Check) -> Check:
    return lambda x: type(x) is list and len(x) <= MAX_ITEMS and all(map(entry, x))


def _size(x: Any) -> bool:
    return (
        type(x) is list and len(x) == 3 and all(type(n) is int and 0 < n < _MOST_PIXELS for n in x)
    )


def _mapping(x: Any) -> bool:
    return type(x) is dict


_OF_TYPE: dict[Any, Check] = {
    float: _number,
    int: _whole,
    bool: _truth,
    str: _text,
    Vector: _vector,
    tuple[int, ...]: _list_of(_whole),
    tuple[str, ...]: _list_of(_text),
}
TICK_FIELDS = tuple(f.name for f in dataclasses.fields(State))
_HINTS = typing.get_type_hints(State)
_FIELDS: dict[str, dict[str, Check]] = {
    "header": {"about": _mapping},
    "tick": {name: _expiry if name == "expiry" else _OF_TYPE[_HINTS[name]] for name in TICK_FIELDS},
    "chunk": dict(
        zip(
            (*CHUNK_FIELDS, "rows"),
            (_text, *[_whole] * 3, _number, *[_whole] * 2, _text, _number, _rows),
        )
    ),
    "frame": {
        "camera": _text,
        "number": _whole,
        "device_no": _whole,
        "capture": _number,
        "device_stamp": _number,
        "size": _size,
        "jpeg": lambda x: type(x) is bytes,
    },
    "event": dict(zip(EVENT_FIELDS, (_text, _text, _text, _number, _number))),
    "notice": dict(zip(NOTICE_FIELDS, (_text, _text, _text, _text, _whole, _whole))),
    "progress": dict(zip(PROGRESS_FIELDS, (_text, _whole, _number, _text, _number))),
    "end": {"end": _mapping},
}
_ARTICLES = {"event": "an", "end": "an"}
# of a header
_ABOUT: dict[str, Check] = {
    "schema": _whole,
    "episode": _whole,
    "monotonic": _number,
    "wall": _number,
}
# where a header has them
_SPOKEN: dict[str, Check] = {"session": _text, "task": _text, "embodiment": _mapping}
_END: dict[str, Check] = {
    "reason": _text,
    "discarded": _truth,
    "ticks": _whole,
    "frames": _whole,
    "recovered": _truth,
}


def mistake(record: Any) -> str:
    """What in a record nobody writes; "" where all is right."""
    if type(record) is not list or not record or type(record[0]) is not str:
        return f"it is no list that begins with its kind: {short(record)}"
    kind, *values = record
    fields = _FIELDS.get(kind)
    if fields is None:
        return f"its kind is {short(kind)}; known are {', '.join(_FIELDS)}"
    if len(values) != len(fields):
        return (
            f"{_ARTICLES.get(kind, 'a')} {kind} has {len(values)} fields, and {len(fields)} belong "
            "to it"
        )
    for (name, good), value in zip(fields.items(), values):
        if not good(value):
            return f"{name} of {_ARTICLES.get(kind, 'a')} {kind} is {short(value)}"
    return _mistaken(kind, values[0]) if kind in ("header", "end") else ""


def _mistaken(kind: str, found: Mapping[str, Any]) -> str:
    if kind == "header" and _whole(found.get("schema")) and found["schema"] != SCHEMA:
        return ""  # of another version, which says so itself
    for name, good in (_ABOUT if kind == "header" else _END).items():
        if name not in found or not good(found[name]):
            return (
                f"{name} of the {kind} is {short(found[name])}"
                if name in found
                else f"the {kind} has no {name}"
            )
    for name, good in _SPOKEN.items() if kind == "header" else ():
        if name in found and found[name] is not None and not good(found[name]):
            return f"{name} of the header is {short(found[name])}"
    if kind == "end" and found["recovered"] and not _whole(found.get("lost_bytes")):
        return f"lost_bytes of the end is {short(found.get('lost_bytes'))}"
    return ""


def robot_of(header: Mapping[str, Any]) -> EmbodimentSpec | None:
    """The robot that a header describes; None where it names none. Raises ``ValueError`` for
    what describes none."""
    if header.get("embodiment") is None:
        return None
    try:
        return EmbodimentSpec.from_dict(header["embodiment"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ConfigError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise ValueError(f"embodiment of the header describes no robot ({what})") from error


def unlike(robot: EmbodimentSpec, kind: str, values: Mapping[str, Any]) -> str:
    """How a tick or a chunk is not of ``robot``; "" where it is."""
    lengths = {"proprio": robot.proprio_dim} if kind == "tick" else {}
    named = ("policy", "human", "sent") if kind == "tick" else ()
    if kind == "tick" and len(values["pose"]) not in (0, 3, 7):
        return f"pose of a tick has {len(values['pose'])} numbers, and 3 or 7 belong to it"
    for name, wanted in {**lengths, **dict.fromkeys(named, robot.action_dim)}.items():
        if len(values[name]) not in (0, wanted):
            return (
                f"{name} of a {kind} has {len(values[name])} numbers, and {wanted} belong to the "
                f"robot {robot.name}"
            )
    rows = values["rows"] if kind == "chunk" else []
    if rows and len(rows[0]) != robot.action_dim:
        return (
            f"the rows of a chunk have {len(rows[0])} numbers, and {robot.action_dim} belong to "
            f"the robot {robot.name}"
        )
    return ""
