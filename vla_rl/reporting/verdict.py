"""The verdict of a study, as text and on its page: tables of methods, of pairs, and of curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vla_rl.display.words import text_table
from vla_rl.files import read_json
from vla_rl.monitoring.metrics import VERDICT_FILE
from vla_rl.reporting import sections
from vla_rl.reporting.figures import SPENT

CURVES = (
    "interquartile means over seeds after the same effort, on the held-out states that also choose:"
)


def text(document: Mapping[str, Any]) -> str:
    """What a person reads of `whole`."""
    tuning = document["plan"]["tuning"]
    untold = [name for name in document["plan"]["methods"] if name not in tuning]
    lines = [
        _origin(document),
        *_tables(document),
        *(f"tuning of {name}: {told}" for name, told in tuning.items()),
        *([f"tuning not stated: {', '.join(untold)}"] if untold else []),
    ]
    for number, one in enumerate(document["added"], start=1):
        lines += [_introduced(one, number), *_tables(one)]
    return "\n\n".join(lines)


def _origin(document: Mapping[str, Any]) -> str:
    how = "drawn as it was frozen" if document["drawn"] else "given, not drawn"
    missing = document["missing"]
    return (
        f"Plan {document['sha256'][:12]}, frozen at {document['commit'][:12] or 'no commit'}; seeds "
        f"{', '.join(map(str, document['seeds']))} ({how}). Measured: {document['measure']}."
        + (f" {missing} runs are missing: this is no verdict yet." if missing else "")
    )


def _introduced(one: Mapping[str, Any], number: int) -> str:
    tuning = f" Its tuning: {one['tuning']}." if one["tuning"] else " Its tuning is not stated."
    return (
        f"{one['method']} ({one['class']}, sha256 {one['file_sha256'][:12]}) was added after plan "
        f"{one['of'][:12]} was frozen, by someone who could see its runs: addition {number} of this "
        "study. p-values are corrected for its own comparisons, not for other additions."
        f"{tuning}"
    )


def _tables(document: Mapping[str, Any]) -> list[str]:
    parts = [text_table(method_rows(document))]
    if document["pairs"]:
        parts.append(text_table(pair_rows(document)))
    if tables := curve_tables(document):
        parts.append(CURVES)
        parts += map(text_table, tables)
    return parts


def method_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A table's rows, the head first."""
    return [
        ("method", "seeds", "mean", "95 %", "interquartile mean", "95 %", "worst"),
        *(
            (
                m["method"],
                str(m["seeds"]),
                f"{m['mean']:.1%}",
                "" if m["low"] is None else f"{m['low']:.1%} to {m['high']:.1%}",
                f"{m['interquartile_mean']:.1%}",
                "{:.1%} to {:.1%}".format(*m["interquartile_interval"]),
                f"{m['worst']:.1%}",
            )
            for m in sorted(document["methods"], key=lambda m: -m["mean"])
        ),
    ]


def pair_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    head = ("paired by seed", "difference", "95 % over seeds", "p (Holm)", "P(better)", "95 %")
    return [
        (*head, "verdict"),
        *(
            (
                f"{p['b']} - {p['a']}",
                f"{p['difference']:+.1%}",
                f"{p['low']:+.1%} to {p['high']:+.1%}",
                f"{p['corrected']:.3f}",
                f"{p['better']:.0%}",
                f"{p['better_low']:.0%} to {p['better_high']:.0%}",
                p["verdict"],
            )
            for p in document["pairs"]
        ),
    ]


def curve_tables(document: Mapping[str, Any]) -> list[list[tuple[str, ...]]]:
    """One for each thing that is spent, at every second place of its grid."""
    return [
        [
            (SPENT[by], "looks", *(f"{at:,.0f}" for at in found["grid"][::2])),
            *(
                (name, str(of["looks"]), *(f"{share:.0%}" for share in of["success"][::2]))
                for name, of in found["methods"].items()
            ),
        ]
        for by, found in document["curves"].items()
        if found
    ]


def section(folder: Path) -> str:
    """The verdict that lies in a study's folder, for its page; empty where there is none."""
    path = folder / VERDICT_FILE
    if not path.exists():
        return ""
    document = read_json(path, "make it again with vla-rl study verdict")
    parts = _html(document)
    for number, one in enumerate(document["added"], start=1):
        parts += [f'<p class="lead">{escape(_introduced(one, number))}</p>', *_html(one)]
    return sections.section("Verdict", f"{escape(_origin(document))}", *parts)


def _html(document: Mapping[str, Any]) -> list[str]:
    tables = [method_rows(document), *([pair_rows(document)] if document["pairs"] else [])]
    found = [_table(rows) for rows in tables]
    if curves := curve_tables(document):
        found += [f'<p class="lead">{escape(CURVES.capitalize())}</p>', *map(_table, curves)]
    return found


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    heads, *cells = ([escape(cell) for cell in row] for row in rows)
    return sections.table(heads, [("", row) for row in cells])
