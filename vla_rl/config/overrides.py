"""``key=value`` words of a command line, as Hydra's grammar takes them.

That grammar knows ASCII letters and some signs. A name in another script and a path with an
apostrophe are values too: such a text is put into quotes here, and so is each entry of a list. What
Hydra reads itself stays as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vla_rl.errors import ConfigError

EXAMPLE = "Overrides look like run=quickstart seed=1 algorithm.learning_rate=1e-4"
_KEY = re.compile(r"[+~]*[A-Za-z_][\w./@:-]*", re.ASCII)


def require_key_value(words: Sequence[str]) -> None:
    """Raise `ConfigError` for a word that is no ``key=value``, or whose key no config has."""
    for text in words:
        key, equals, value = text.partition("=")
        if (not equals and not text.startswith("~")) or not key.strip("+~. "):
            raise ConfigError(f"{text!r} is not an override of the form key=value. {EXAMPLE}")
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"unknown config key {key!r} (value {value!r}): keys are ASCII words "
                f"with dots. {EXAMPLE}"
            )
        if bad := [c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"]:
            raise ConfigError(
                f"{key}={value!r}: {bad[0]!r} is no character of this terminal's encoding. Set "
                "LC_ALL=C.UTF-8 or PYTHONUTF8=1, or use another name"
            )


def spoken(word: str, texts: Collection[str]) -> str:
    """``key=value`` with quotes where Hydra needs some. The values of the keys ``texts`` are texts,
    whatever they look like (``name=1e3``, ``output_dir=a,b``). Raises `ConfigError` for what even
    so is no value, or is several."""
    key, equals, value = word.partition("=")
    if not equals:
        return word
    made = _text(value.strip()) if key.lstrip("+") in texts else _quoted(value)
    if (found := _parsed(made)) is None:
        raise ConfigError(_unreadable(word))
    if found.is_sweep_override():
        raise ConfigError(
            f"{word} names several values, and a run takes one. Write a list in brackets, "
            f"{key}=[...], and a text that has commas or brackets in quotes: {_typed(key, value)}"
        )
    return f"{key}={made}"


def dotlist(words: Sequence[str]) -> Any:
    """``key=value`` words as OmegaConf reads them, whose values are YAML. Raises `ConfigError`
    for one that is none."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    for word in words:
        try:
            OmegaConf.from_dotlist([word])
        except YAMLError as error:
            raise ConfigError(_unreadable(word)) from error
    return OmegaConf.from_dotlist(list(words))


def _unreadable(word: str) -> str:
    """What is wrong with ``key=value``, which no grammar reads, and how to write what may have
    been meant."""
    key, _, value = word.partition("=")
    value = value.strip()
    opened, closed = value[:1], value[-1:] if len(value) > 1 else ""
    as_text = f"Where it belongs to the text, type {_typed(key, value)}"
    if opened in ("'", '"'):
        inside = value[1:].replace(f"\\{opened}", "")
        what = (
            "is opened and not closed"
            if opened not in inside
            else "is closed before the end of the value"
        )
        return f"{word}: the quote {opened} {what}. {as_text}"
    if opened in ("[", "{") and (end := {"[": "]", "{": "}"}[opened]) != closed:
        return (
            f"{word}: {opened} is opened and not closed: write {end} behind the last entry. "
            f"{as_text}"
        )
    if opened == "{":
        return (
            f"{word}: a mapping is written {key}={{word: value, word: value}}, each word of ASCII "
            "letters, digits and _, and every quote closed. Others can stand in a file of your "
            f"own: run=./mine.yaml. {as_text}"
        )
    return f"{word}: {value!r} is no value: close every quote and bracket in it. {as_text}"


def _typed(key: str, value: str) -> str:
    """The word for a shell, with ``value`` as one text."""
    inside = re.sub(r'(["$`\\])', r"\\\1", f"{key}={_in_quotes(value.strip())}")
    return f'"{inside}"'


def _text(value: str) -> str:
    read = _read(value)
    plain = value[:1] in ("'", '"', "[", "{") or value == "null"
    return value if plain or isinstance(read, str) else _in_quotes(value)


def _quoted(value: str) -> str:
    inner = value.strip()
    if _read(inner) is not None:
        return value
    if inner[:1] + inner[-1:] == "[]":
        return f"[{','.join(map(_quoted, _split(inner[1:-1])))}]"
    if inner[:1] + inner[-1:] == "{}":
        pairs = (part.partition(":") for part in _split(inner[1:-1]))
        return f"{{{','.join(f'{name}{colon}{_quoted(entry)}' for name, colon, entry in pairs)}}}"
    return value if inner[:1] in ("'", '"', "[", "{") else _in_quotes(inner)


def _split(inside: str) -> Iterator[str]:
    """The parts between the commas that are in no brackets and quotes."""
    depth, quote, begun = 0, "", 0
    for i, c in enumerate(inside):
        if quote:
            quote = "" if c == quote and inside[i - 1] != "\\" else quote
        elif c in "'\"" and not inside[begun:i].strip(
            " [{:"
        ):  # an apostrophe within a word opens nothing
            quote = c
        elif c in "[{":
            depth += 1
        elif c in "]}":
            depth -= 1
        elif c == "," and not depth:
            yield inside[begun:i]
            begun = i + 1
    if inside.strip():
        yield inside[begun:]


def _in_quotes(value: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(value, Quote.single).with_quotes()


def _read(value: str) -> Any:
    """What Hydra makes of it (a sweep or null: that it does); None where it cannot read it."""
    override = _parsed(value)
    if override is None:
        return None
    return ... if override.is_sweep_override() or override.value() is None else override.value()


def _parsed(value: str) -> Any:
    """Hydra's own override, or None."""
    from hydra.errors import HydraException

    try:
        return _parser().parse_override(f"++x={value}")
    except HydraException:
        return None


@functools.cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()
