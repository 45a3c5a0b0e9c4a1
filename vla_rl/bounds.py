"""What an option may be, said beside it: fields of dataclasses with limits.

    @dataclass
    class PPOConfig(Bounded, place="algorithm"):
        clip_low: float = bound(0.2, ge=0)
        kl_kind: str = bound("k3", choices=("k1", "k2", "k3"))
        betas: list[float] = several([0.9, 0.999], ge=0, lt=1, least=2, most=2)

`Bounded` holds every instance to its limits as it is made. What a user typed is held to them before
that, by `vla_rl.config.schema.checked`, so that the error names the key where it was written. What
compares several fields stands in the ``__post_init__`` of their class. The reference of the config
keys shows the limits (scripts/reference.py).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

from vla_rl.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    """The limits of one field, or (``many``) of each entry of its list or mapping; ``also`` are
    values that are allowed besides.

    ``least`` and ``most`` entries, ``once``: none of them twice. ``hint`` is told with an error.
    ``null``: the field's type allows None, which no limit is asked of. ``by`` looks at a value and
    its key instead, and raises a `ConfigError` of its own.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    also: tuple[Any, ...] = ()
    many: bool = False
    least: int = 0
    most: int | None = None
    once: bool = False
    hint: str = ""
    null: bool = False
    by: Callable[[Any, str], object] | None = None

    def check(self, value: Any, key: str) -> None:
        """Raise `ConfigError`, which names ``key``, the value and what it may be, unless ``value``
        is within the limits; `TypeError` where it is of another kind than they are."""
        if value is None:
            return
        if self.by is not None:
            self.by(value, key)
        elif not self.many:
            if not self._allows(value):
                raise self._error(f"{key}={value!r}", "it must be", f"{self._each}{self._or_null}")
        elif isinstance(value, Mapping):
            for name, entry in value.items():
                replace(self, many=False).check(entry, f"{key}.{name}")
        elif isinstance(value, list | tuple):
            self._check_entries(list(value), f"{key}={list(value)!r}")
        else:
            raise TypeError(f"{key}={value!r} is no list")

    def _check_entries(self, values: list[Any], given: str) -> None:
        if len(values) < self.least or (self.most is not None and len(values) > self.most):
            number = f"has {len(values)} entries" if len(values) > 1 else "has one entry"
            hint = f" ({self.hint})" if self.hint else ""
            raise ConfigError(
                f"{given} {number if values else 'is empty'}: it must have {self._number}{hint}"
            )
        for value in values:
            if not self._allows(value):
                raise self._error(f"{given} has {value!r}, which", "each must be", self._each)
            if self.once and values.count(value) > 1:
                raise ConfigError(f"{given} has {value!r} more than once: name each once")

    def _error(self, given: str, must: str, words: str) -> ConfigError:
        problem = "is not a choice" if self.choices else "is out of range"
        one = " one of" if self.choices else ""
        hint = f" ({self.hint})" if self.hint else ""
        return ConfigError(f"{given} {problem}: {must}{one} {words}{hint}")

    def _allows(self, value: Any) -> bool:
        if value in self.also:
            return True
        if self.choices:
            if not isinstance(value, str):
                raise TypeError(f"{value!r} is no text")
            return value in self.choices
        return (  # (nothing holds of what is no number: nan)
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    @property
    def words(self) -> str:
        """What the field may be, such as "0 or more and below 1"; "" where `by` alone says it."""
        if not self.many:
            return f"{self._each}{self._or_null}"
        each = f"each {'one of ' if self.choices else ''}{self._each}" if self._each else ""
        number = self._number if self.least or self.most is not None else ""
        return ", ".join(part for part in (number, "none twice" if self.once else "", each) if part)

    @property
    def _or_null(self) -> str:
        return ", or null" if self.null else ""

    @property
    def _number(self) -> str:
        if self.most is None:
            return f"{self.least} or more entries"
        if self.least == self.most:
            return f"{self.least} entries"
        return f"{f'{self.least} to' if self.least else 'at most'} {self.most} entries"

    @property
    def _each(self) -> str:
        if self.choices:
            return ", ".join(choice or '""' for choice in self.choices)
        if self.ge is not None and self.le is not None:
            limits = f"{_written(self.ge)} to {_written(self.le)}"
        else:
            said = {
                "{} or more": self.ge,
                "above {}": self.gt,
                "at most {}": self.le,
                "below {}": self.lt,
            }
            limits = " and ".join(t.format(_written(x)) for t, x in said.items() if x is not None)
        return ", or ".join([*map(str, self.also), limits])


def _written(number: float) -> str:
    if isinstance(number, int) and number > 10**6 and number & (number - 1) == 0:
        return f"2**{number.bit_length() - 1}"
    return str(number)


def bound(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[str] = (),
    also: Sequence[Any] = (),
    hint: str = "",
) -> Any:
    """A field that is at least ``ge``, above ``gt``, at most ``le`` and below ``lt``, or one of
    ``choices``; in a mapping each value is.

    The values of ``also`` are allowed besides, and so is None where the field's type allows it.
    ``hint`` is told with an error.
    """
    own = Bound(
        ge, gt, le, lt, tuple(choices), tuple(also), isinstance(default, Mapping), hint=hint
    )
    return _field(default, own)


def several(
    default: Sequence[Any],
    *,
    ge: float | None = None,
    lt: float | None = None,
    choices: Sequence[str] = (),
    least: int = 0,
    most: int | None = None,
    once: bool = False,
    hint: str = "",
) -> Any:
    """A field that holds a list of ``least`` to ``most`` entries, each within limits as of `bound`;
    ``once``: none of them twice."""
    own = Bound(
        ge=ge,
        lt=lt,
        choices=tuple(choices),
        many=True,
        least=least,
        most=most,
        once=once,
        hint=hint,
    )
    return _field(default, own)


def told_by(default: Any, check: Callable[[Any, str], object]) -> Any:
    """A field for which ``check(value, key)`` raises a `ConfigError` of its own."""
    return _field(default, Bound(by=check))


def _field(default: Any, own: Bound) -> Any:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata={"bound": own})
    return field(default=default, metadata={"bound": own})


@functools.cache
def bounds_of(kind: type) -> dict[str, Bound]:
    """{field: its limits} of a dataclass. A field that a subclass declares anew, with another
    default, keeps the limits that its base gave it."""
    found: dict[str, Bound] = {}
    for base in reversed([c for c in kind.__mro__ if is_dataclass(c)]):
        for own in fields(base):
            if (limits := own.metadata.get("bound")) is not None:
                found[own.name] = replace(limits, null="None" in str(own.type))
    return found


class Bounded:
    """A base of dataclasses whose instances are held to the limits of their fields: making one
    raises a `ConfigError` that names field, value and limits.

    ``place`` is where the options usually stand in a config, such as "algorithm": errors of an
    instance that was made in Python name its fields so. A ``__post_init__`` of a subclass calls
    this one first.
    """

    place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if place is not None:
            cls.place = place

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, own in bounds_of(kind).items():
            own.check(getattr(self, name), f"{self.place}.{name}" if self.place else name)
