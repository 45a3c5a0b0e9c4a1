"""A config as it was written, held against the dataclass that it must fit."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from vla_rl.errors import ConfigError

# Schemas that stand in several places: (where this one is, what its messages say, what they should
# say; *: that place).
_MOVED = (
    ("reward.parts.", "reward", "*"),
    ("rl.fallback_reward", "reward", "*"),
    ("offline.critics", "algorithm.critics", "*"),
    ("algorithm", "sft.augment", "algorithm.augment"),
)


def checked(schema: type, values: dict[str, Any], where: str) -> Any:
    """An instance of the dataclass ``schema``; raises `ConfigError` for unknown keys and wrong
    types under ``where``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_unknown(schema, values, where)
    try:
        found = OmegaConf.to_object(OmegaConf.merge(_structured(schema), values))
    except ConfigError as error:
        raise ConfigError(_with_its_key(str(error), schema, values, where)) from None
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


def _with_its_key(text: str, schema: type, values: dict[str, Any], where: str) -> str:
    """The message of a schema's own check, with the key as the user typed it: some name several
    keys, or a usual place."""
    of_memory = (
        [("algorithm", "sft.augment", "algorithm.memory.augment")] if "memory" in values else []
    )
    for place, usual, here in (*of_memory, *_MOVED):
        if where.startswith(place):
            text = re.sub(
                rf"(?<![\w.]){re.escape(usual)}(?=[. ])", where if here == "*" else here, text
            )
    names = "|".join(re.escape(f"{where}.{name}" if where else str(name)) for name in values)
    if re.match(rf"({names})[\w.]*(=| is )", text):
        return text
    if any(
        f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(schema)
    ):
        return text  # a user's own, without defaults to compare with
    path: list[str] = []
    rest: Any = values
    default: Any = dataclasses.asdict(schema())
    # which key alone, left at its default, makes it right?
    while isinstance(rest, dict) and isinstance(default, dict):
        changed = [key for key in rest if rest[key] != default.get(key)]
        found = [key for key in changed if _fits(schema, _without(values, [*path, key]))]
        if len(found) != 1:
            return text
        path, rest, default = [*path, found[0]], rest[found[0]], default.get(found[0])
    return f"{'.'.join([where, *path] if where else path)}={rest}: {text}"


def _without(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    if len(path) == 1:
        return {key: value for key, value in values.items() if key != path[0]}
    return {
        key: _without(value, path[1:]) if key == path[0] else value for key, value in values.items()
    }


def _fits(schema: type, values: dict[str, Any]) -> bool:
    from omegaconf import OmegaConf

    try:
        OmegaConf.to_object(OmegaConf.merge(_structured(schema), values))
    except ConfigError:
        return False
    return True


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


def _refuse_unknown(schema: type, values: dict[str, Any], where: str) -> None:
    known = {f.name: f for f in dataclasses.fields(schema)}
    # (of a run; they stand as GROUP.type)
    shown = [name for name in known if where or not name.endswith("_type")]
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), shown, n=1)
            prefix = f"{where}." if where else ""
            listing = (
                f" Known keys here: {', '.join(sorted(shown))}."
                if shown
                else " There are no keys here."
            )
            hint = f" Did you mean '{prefix}{close[0]}'?" if close else listing
            raise ConfigError(f"unknown config key '{path}' (value {value!r}).{hint}")
        factory = known[key].default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            if not isinstance(value, dict):
                keys = ", ".join(f.name for f in dataclasses.fields(factory))
                raise ConfigError(
                    f"{path} is {value!r}, it must be a mapping. Set one of its keys "
                    f"instead: {keys}"
                )
            _refuse_unknown(factory, value, path)
