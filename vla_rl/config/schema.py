"""A config as it was written, held against the dataclass that it must fit."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from vla_rl.bounds import Bounded, bounds_of
from vla_rl.errors import ConfigError


def checked(schema: type, values: dict[str, Any], where: str) -> Any:
    """An instance of the dataclass ``schema``; raises `ConfigError` for unknown keys and wrong
    types under ``where``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _look(schema, values, where)
    try:
        found = OmegaConf.to_object(OmegaConf.merge(_structured(schema), values))
    except ConfigError as error:
        raise ConfigError(_placed(str(error), schema, where)) from None
    except OmegaConfBaseException as error:
        key = ".".join(p for p in (where, str(error.full_key or "")) if p)
        reason = str(error).splitlines()[0].rstrip(".")
        remedy, value = (
            "Mend the value in your override or YAML.",
            _at(values, str(error.full_key or "")),
        )
        if isinstance(value, str) and "ListConfig" in reason:
            reason, remedy = "this is a list", f"Write it in brackets: {key}=[{value}]"
        elif isinstance(value, list | dict) and "to string" in reason:
            kind = "list" if isinstance(value, list) else "mapping"
            reason, remedy = (
                f"this key takes one text, and that is a {kind}",
                "Write one text, in quotes if it has brackets",
            )
        raise ConfigError(f"{key} = {value!r}: {reason}. {remedy}") from error
    for path, number in _numbers(found, where):
        if not math.isfinite(number):
            raise ConfigError(f"{path}={number} is not finite: give a number")
        if path.rpartition(".")[2] == "seed" and not 0 <= number < 2**63:
            raise ConfigError(f"{path}={number} must be 0 or more, and below 2**63")
    return found


def _placed(text: str, schema: type, where: str) -> str:
    """What a schema's own check says, with keys where they stand: it calls them by their usual
    place."""
    for usual, here in _places(schema, where):
        text = re.sub(rf"(?<![\w.]){re.escape(usual)}(?=\.\w)", here, text)
    return text if not where or where in text else f"{where}: {text}"


def _places(schema: type, where: str) -> Iterator[tuple[str, str]]:
    """(usual place, this one) of a schema and those in it that stand elsewhere than usual."""
    if issubclass(schema, Bounded) and schema.place not in ("", where):
        yield schema.place, where
    for name, inner in _parts(schema).items():
        yield from _places(inner, f"{where}.{name}" if where else name)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """(key, value) of every number in a config."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


@functools.cache
def _structured(schema: type) -> Any:
    """OmegaConf's form of a dataclass, which takes long to make; `OmegaConf.merge` works on a
    copy."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def _at(values: Any, path: str) -> Any:
    """The value under a dotted path, as far as it leads."""
    for name in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(values, dict) and name in values:
            values = values[name]
        elif isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
    return values


@functools.cache
def _parts(schema: type) -> dict[str, type]:
    """{field: dataclass} of the fields that hold one."""
    hints = typing.get_type_hints(schema)
    kinds = {f.name: hints[f.name] for f in dataclasses.fields(schema)}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def _look(schema: type, values: dict[str, Any], where: str) -> None:
    """Raise `ConfigError` for a key that there is not, and a value beyond the limits of its
    field."""
    known = [f.name for f in dataclasses.fields(schema)]
    limits, parts = bounds_of(schema), _parts(schema)
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            raise _unknown(known, key, value, where)
        if key in parts:
            if not isinstance(value, dict):
                keys = ", ".join(f.name for f in dataclasses.fields(parts[key]))
                raise ConfigError(
                    f"{path} is {value!r}, it must be a mapping. Set one of its keys "
                    f"instead: {keys}"
                )
            _look(parts[key], value, path)
        elif key in limits:
            with contextlib.suppress(TypeError):  # of another type, which is told later
                limits[key].check(value, path)


def _unknown(known: Sequence[str], key: Any, value: Any, where: str) -> ConfigError:
    # (of a run; they stand as GROUP.type)
    shown = [name for name in known if where or not name.endswith("_type")]
    prefix = f"{where}." if where else ""
    if close := difflib.get_close_matches(str(key), shown, n=1):
        hint = f"Did you mean '{prefix}{close[0]}'?"
    elif shown:
        hint = f"Known keys here: {', '.join(sorted(shown))}."
    else:
        hint = "There are no keys here."
    return ConfigError(f"unknown config key '{prefix}{key}' (value {value!r}). {hint}")
