"""What a page may say: small JSON objects of five kinds, each with its fields, types and ranges,
and nothing else.

Every message repeats the connection's nonce (what was recorded from another connection is refused),
counts ``n`` up, and carries the page's clock ``t`` in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from real.console.security import MAX_TEXT_BYTES
from vla_rl.errors import UserError

AXES, MAX_KEYS, MAX_KEY, MAX_VALUE = 6, 16, 24, 200
STOPS = ("pause", "stop", "estop")
FOR_ALL = (*STOPS, "note")  # events that a viewer without control may ask for
FOR_HOLDER = (
    *(
        "arm",
        "disarm",
        "start",
        "takeover",
        "release",
        "hand_back",
        "reset",
        "reset_done",
        "end",
        "redo",
    ),
    *("estop_clear", "ack", "full_speed", "label", "task"),
)


class PageError(UserError):
    """A message of a page that is none."""


@dataclass(frozen=True)
class _Head:
    n: int
    t: float


@dataclass(frozen=True)
class PageInput(_Head):
    dead_man: bool
    axes: tuple[float, ...]
    gripper: float
    keys: tuple[str, ...]


@dataclass(frozen=True)
class PageBeat(_Head):
    """``echo`` is the newest server stamp that the page has seen, ``seen_at`` when it saw it, on
    its own clock."""

    echo: float
    seen_at: float


@dataclass(frozen=True)
class PageEvent(_Head):
    name: str
    value: str
    at: float


@dataclass(frozen=True)
class PageControl(_Head):
    """``ask`` is "request" or "release"; ``who`` how the operator wants to be called."""

    ask: str
    force: bool
    who: str


@dataclass(frozen=True)
class PageSeen(_Head):
    """A picture was drawn, so another may be sent."""

    camera: int
    number: int


PageMessage = PageInput | PageBeat | PageEvent | PageControl | PageSeen


def _number(value: Any, low: float, high: float) -> float:
    # NaN is in no range
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise PageError(f"a number is {str(value)[:20]}, and {low:g} to {high:g} are allowed")
    return float(value)


def _whole(value: Any, high: int = 2**53) -> int:
    if type(value) is not int or not 0 <= value < high:
        raise PageError(f"{str(value)[:20]} is no whole number below {high}")
    return value


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise PageError("neither true nor false")
    return value


def _text(value: Any, longest: int) -> str:
    if (
        not isinstance(value, str)
        or len(value) > longest
        or not all(c.isprintable() for c in value)
    ):
        raise PageError(f"no printable text of at most {longest} characters")
    return value


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise PageError(f"{str(value)[:20]!r} is none of {', '.join(known)}")
    return value


def _list(value: Any, longest: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise PageError(f"no list of at most {longest} entries")
    return value


_CLOCK = 1e9  # seconds: a page that has been open for thirty years


def _input(d: dict[str, Any]) -> PageInput:
    axes = tuple(_number(x, -1, 1) for x in _list(d["a"], AXES))
    if len(axes) != AXES:
        raise PageError(f"{len(axes)} axes, and {AXES} are needed")
    keys = tuple(_text(x, MAX_KEY) for x in _list(d["keys"], MAX_KEYS))
    return PageInput(
        _whole(d["n"]),
        _number(d["t"], 0, _CLOCK),
        _truth(d["d"]),
        axes,
        _number(d["g"], -1, 1),
        keys,
    )


def _beat(d: dict[str, Any]) -> PageBeat:
    times = [_number(d[k], 0, _CLOCK) for k in ("t", "echo", "seen")]
    return PageBeat(_whole(d["n"]), *times)


def _event(d: dict[str, Any]) -> PageEvent:
    name = _one_of(d["name"], FOR_ALL + FOR_HOLDER)
    return PageEvent(
        _whole(d["n"]),
        _number(d["t"], 0, _CLOCK),
        name,
        _text(d["value"], MAX_VALUE),
        _number(d["at"], 0, _CLOCK),
    )


def _control(d: dict[str, Any]) -> PageControl:
    ask = _one_of(d["ask"], ("request", "release"))
    return PageControl(
        _whole(d["n"]), _number(d["t"], 0, _CLOCK), ask, _truth(d["force"]), _text(d["who"], 24)
    )


def _seen(d: dict[str, Any]) -> PageSeen:
    return PageSeen(
        _whole(d["n"]), _number(d["t"], 0, _CLOCK), _whole(d["camera"], 64), _whole(d["number"])
    )


# how to read it, and its own fields
_KINDS: dict[str, tuple[Callable[[dict[str, Any]], PageMessage], set[str]]] = {
    "input": (_input, {"d", "a", "g", "keys"}),
    "beat": (_beat, {"echo", "seen"}),
    "event": (_event, {"name", "value", "at"}),
    "control": (_control, {"ask", "force", "who"}),
    "seen": (_seen, {"camera", "number"}),
}


def parse(text: str, nonce: str) -> PageMessage:
    """The message in ``text``, of the connection that was given ``nonce``. Raises `PageError`."""
    if len(text) > MAX_TEXT_BYTES:
        raise PageError(f"{len(text)} characters, and {MAX_TEXT_BYTES} are allowed")
    try:
        found = json.loads(text, parse_constant=lambda word: math.nan)
    except (ValueError, RecursionError):
        raise PageError("no JSON") from None
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("k"), str)
        or found["k"] not in _KINDS
    ):
        raise PageError("of no known kind")
    build, fields = _KINDS[found["k"]]
    if set(found) != fields | {"k", "c", "n", "t"}:
        raise PageError(f"a message of kind {found['k']} has other fields")
    if found["c"] != nonce:
        raise PageError("of another connection")
    return build(found)
