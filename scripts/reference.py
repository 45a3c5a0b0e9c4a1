"""Writes the generated pages of docs/reference: every config key, every option of the command line,
the public API.

`make docs` calls it; ``--check`` writes nothing and names the pages that are stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from reference_api import api_pages
from reference_config import config_pages, shown
from reference_text import NOTE, cell, page, table

from vla_rl.cli import _parser

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"


class Command(NamedTuple):
    words: str
    text: str
    parser: argparse.ArgumentParser


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            yield action


def commands(
    parser: argparse.ArgumentParser, words: str = "vla-rl", text: str = ""
) -> Iterator[Command]:
    """The parser itself and all commands below it."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield Command(words, text or parser.description or "", parser)
    for group in below:
        texts = {a.dest: a.help or "" for a in group._choices_actions}
        for name, inner in group.choices.items():
            yield from commands(inner, f"{words} {name}", texts.get(name, ""))


def _written(action: argparse.Action) -> str:
    """An option as it is typed: ``--seeds N [N ...]``."""
    word = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    words = {0: "", "?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}.get(
        action.nargs, word
    )
    return f"`{' '.join(w for w in (', '.join(action.option_strings), words) if w)}`"


def _kind(action: argparse.Action) -> str:
    if action.choices:
        return ", ".join(f"`{c}`" for c in action.choices)
    if action.nargs == 0:
        return "switch"
    return {int: "integer", float: "number", Path: "path"}.get(action.type, "text")


def _option_default(action: argparse.Action) -> str:
    if action.required and action.nargs not in ("*", "?"):
        return "required"
    if action.nargs == 0 or action.default in (None, [], argparse.SUPPRESS):
        return ""
    return shown(action.default)


def _cli_page(bench: bool) -> str:
    lines: list[str] = []
    for words, text, parser in commands(_parser()):
        if words.startswith("vla-rl bench") != bench:
            continue
        rows = [
            (_written(a), _kind(a), _option_default(a), cell(a.help or ""))
            for a in _options(parser)
        ]
        lines += [
            f"## {words}",
            "",
            cell(text[:1].upper() + text[1:]) + ("" if text.endswith(".") else "."),
            "",
        ]
        lines += [*(table(("option", "type", "default", "meaning"), rows) if rows else []), ""]
    if bench:
        return page("Command line: `vla-rl bench`", "every measurement and its options", lines)
    lines = [
        "`vla-rl COMMAND --help` prints the same. The benchmarks have [a page of their "
        "own](cli_bench.md).",
        "",
        *lines,
    ]
    return page("Command line", "every command and option of `vla-rl`", lines)


def mute(parser: argparse.ArgumentParser) -> list[str]:
    """Options and commands without a word of help."""
    found = [
        f"{c.words} {_written(a)}"
        for c in commands(parser)
        for a in _options(c.parser)
        if not a.help
    ]
    return found + [c.words for c in commands(parser) if not c.text]


def pages() -> dict[str, str]:
    """{path below docs/reference: text} of all generated pages."""
    return {
        **config_pages(),
        "cli.md": _cli_page(False),
        "cli_bench.md": _cli_page(True),
        **api_pages(),
    }


def stale(texts: dict[str, str], folder: Path = REFERENCE) -> list[str]:
    """Pages that differ from what is committed, and generated ones that are no more."""
    there = [p for p in folder.rglob("*.md") if NOTE in p.read_text(encoding="utf-8")]
    gone = {str(p.relative_to(folder)) for p in there} - set(texts)
    same = {
        n
        for n, t in texts.items()
        if (folder / n).exists() and (folder / n).read_text(encoding="utf-8") == t
    }
    return sorted(gone | (set(texts) - same))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="write the generated pages of docs/reference")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a page is stale"
    )
    check = parser.parse_args(argv).check
    texts = pages()
    for name in stale(texts):
        print(f"docs/reference/{name} {'is stale' if check else 'written'}")
        if check:
            continue
        if name not in texts:
            (REFERENCE / name).unlink()
            continue
        (REFERENCE / name).parent.mkdir(exist_ok=True)
        (REFERENCE / name).write_text(texts[name], encoding="utf-8")
    return int(check and bool(stale(texts)))


if __name__ == "__main__":
    sys.exit(main())
