"""Pieces of a Markdown page, for the scripts that write docs/reference."""

from __future__ import annotations

import re
from collections.abc import Sequence

NOTE = "<!-- Written by scripts/reference.py from the source; `make docs` writes it anew. -->"


def cell(text: str) -> str:
    """``text`` for a cell of a Markdown table: no bars, and nothing that reads as markup outside
    of code."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split())))
    plain = (p if p.startswith("`") else re.sub(r"([*<])", r"\\\1", p) for p in parts)
    return "".join(plain).replace(" | ", " / ").replace("|", "&#124;")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def page(title: str, purpose: str, lines: Sequence[str]) -> str:
    """A generated page, which says at its head what it is for."""
    return (
        "\n".join([f"# {title}", "", f"*Reference: {purpose}.*", "", NOTE, "", *lines]).rstrip()
        + "\n"
    )
