"""Checks of what a packet holds: each raises one `MessageError` that says which field of which
kind is wrong, and how."""

from __future__ import annotations

import math
from typing import Any

from vla_rl.errors import UserError

# characters of a text, entries of a list, control steps of a chunk
MAX_TEXT, MAX_ITEMS, MAX_ROWS = 512, 64, 256

Vector = tuple[float, ...]
Rows = tuple[Vector, ...]  # [control steps, action dimensions]
Texts = tuple[str, ...]


class MessageError(UserError):
    """A packet that is no message of this schema; the text says what is wrong with it."""


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require(good: bool, place: str, problem: str) -> None:
    if not good:
        raise MessageError(f"a {place} message is wrong: {problem}")


def number(place: str, name: str, value: Any, nan: bool = False) -> float:
    if type(value) is not float and (not isinstance(value, float | int) or isinstance(value, bool)):
        raise MessageError(f"a {place} message is wrong: {name} is {short(value)}, no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if number != number and not nan:
        raise MessageError(f"a {place} message is wrong: {name} is not a number")
    return number


def vector(place: str, name: str, value: Any, nan: bool) -> Vector:
    if not isinstance(value, tuple | list) or len(value) > MAX_ITEMS:
        raise MessageError(
            f"a {place} message is wrong: {name} is no list of at most {MAX_ITEMS} numbers"
        )
    if nan and all(type(x) is float for x in value):  # most of what comes, at a quarter of the time
        return tuple(value)
    return tuple([number(place, name, x, nan) for x in value])


def rows(place: str, name: str, value: Any, nan: bool) -> Rows:
    good = isinstance(value, tuple | list) and 0 < len(value) <= MAX_ROWS
    require(good, place, f"{name} is no list of 1 to {MAX_ROWS} rows")
    rows = tuple([vector(place, name, row, nan) for row in value])
    require(
        len({len(row) for row in rows}) == 1 and len(rows[0]) > 0,
        place,
        f"the rows of {name} differ in length",
    )
    return rows


def text(place: str, name: str, value: Any) -> str:
    require(
        isinstance(value, str) and len(value) <= MAX_TEXT,
        place,
        f"{name} is no text of ≤ {MAX_TEXT} characters",
    )
    return value
