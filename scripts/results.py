#!/usr/bin/env python3
"""Writes docs/results/ from benchmarks/results/<date>-<what>.json: every measured figure with where
it comes from.

A file says in ``title``, ``page`` (of PAGES) and ``finding`` what it is, and may carry ``tables``
(``title``, ``columns``, ``rows``, ``note``), ``date``, ``commit``, ``command``, ``machine``,
``seeds`` and ``note``. A table may have its own of the last six. ``correction`` is what was found
out since, and stands beneath the finding. Without ``tables``, the table of what ``vla-rl study``,
``vla-rl bench learn`` and scripts/paired.py write is made of their raw figures, and that of any
other file of its scalars. The newest measurement of a page stands first.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
WIDTH = 120  # of a line of prose, and at most of a table's cell
SCALARS = 30  # rows of a table that is made of scalars
PAGES = {
    "quickstart": (
        "The quickstart, seed by seed",
        "what the main job gains on every seed that it was run with",
    ),
    "imitation": ("Imitation", "what makes a policy that imitates look at its images"),
    "sparse_starts": (
        "Starts that seldom succeed",
        "what gets RL going from a few percent of success",
    ),
    "several_tasks": (
        "One policy for several tasks",
        "eight tasks of the embedded suite in one run",
    ),
    "libero": ("LIBERO", "learning on LIBERO, its demonstrators and its perturbations"),
    "off_policy": (
        "Learning from a replay",
        "residual, steered, direct and improved actors, RL-100",
    ),
    "methods": ("Methods side by side", "every method from the same starts"),
    "rewards": ("Learned rewards", "progress models beside success alone"),
    "denoising": (
        "Diffusion and flow policies",
        "RL through a denoising chain, and one-step students",
    ),
    "simulators": ("Simulators", "their speed and memory beside other ways to step them"),
    "speed": ("Speed", "policies, updates, data and whole iterations"),
    "robot": (
        "Real arms and people",
        "sessions, gates, faults and people in the loop, on simulated arms",
    ),
    "cluster": ("Ray clusters", "overhead, faults, overlap and staleness"),
}


# ------------------------------------------------------------------------------- tables of raw data
def runs_of(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every run in a document, under its label: what has evaluations with counts of successes."""
    evaluations = found.get("evaluations") if isinstance(found, dict) else None
    told = {name: _total(e) for name, e in (evaluations or {}).items() if isinstance(e, dict)}
    if told and all("successes" in e for e in told.values()):
        label = found.get("label") or " ".join(p for p in path if p not in ("summary", "runs"))
        yield label, {**found, "evaluations": told}
        return
    items = (
        found.items()
        if isinstance(found, dict)
        else enumerate(found)
        if isinstance(found, list)
        else ()
    )
    for key, value in items:
        yield from runs_of(value, (*path, str(key)))


def _total(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The counts of an evaluation; where it kept those of its only task alone, these."""
    tasks = evaluation.get("tasks") or {}
    return (
        {**next(iter(tasks.values())), **evaluation}
        if isinstance(tasks, dict) and len(tasks) == 1
        else evaluation
    )


def number(value: float) -> str:
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:.0f}"
        if abs(value) >= 1000
        else f"{value:.4g}"
    )


def failures(evaluation: dict[str, Any]) -> str:
    kinds = evaluation.get("failures") or {}
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in kinds.items())


def success(evaluation: dict[str, Any]) -> str:
    share = f"{100 * evaluation['successes'] / evaluation['episodes']:.3g} %"
    return (
        f"{share} ({100 * evaluation['low']:.0f} – {100 * evaluation['high']:.0f})"
        if "low" in evaluation
        else share
    )


def curve(points: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{p['episodes']:.0f}: {100 * p['success']:.3g}"
        for p in points
        if p.get("success") is not None
    )


def table_of_runs(runs: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for _, run in runs for name in run["evaluations"]))
    shown = {
        name: name.upper() if name in ("sft", "rl") else name.replace("_", " ") for name in names
    }
    columns = [
        "run",
        *(f"after {shown[name]}" for name in names),
        "success (%) by episodes of RL",
        "minutes",
        "memory",
    ]
    columns += ["image use", *(f"failures after {shown[name]}" for name in names)]
    rows = []
    for label, run in runs:
        found = [run["evaluations"].get(name) for name in names]
        use = run.get("image_use")
        use = use.get("image_use") if isinstance(use, dict) else use
        rows.append(
            [
                label,
                *(success(e) if e else "" for e in found),
                curve(run.get("learning_curve") or []),
                f"{run['seconds'] / 60:.1f}" if "seconds" in run else "",
                f"{run['peak_memory_bytes'] / 2**30:.1f} GiB"
                if run.get("peak_memory_bytes")
                else "",
                "" if use is None else f"{use:+.2f}",
                *(failures(e) if e else "" for e in found),
            ]
        )
    note = (
        "Success with its 95 % interval where it was kept. Image use: what SFT's loss rises by "
        "with other images."
    )
    return {"columns": columns, "rows": rows, "note": note}


def table_of_learning(document: dict[str, Any]) -> dict[str, Any]:
    """What ``vla-rl bench learn`` found of each run."""
    level = f"{100 * document['level']:.0f} %"
    columns = [
        "run",
        "algorithm",
        "success (%) by episodes",
        f"{level} reached after",
        "learning",
        "of an iteration",
    ]
    rows = []
    for run in document["runs"]:
        parts = dict(run["seconds_per_iteration"])
        whole = parts.pop("learn")
        parts.pop("evaluate", None)
        shares = [
            f"{100 * v / whole:.0f} % {k}" for k, v in parts.items() if v and v / whole >= 0.005
        ]
        reached = run["reached"]
        rows.append(
            [
                re.sub(r"^outputs/", "", run["run"]),
                run["algorithm"],
                curve(run["curve"]),
                f"{reached['episodes']} episodes, {reached['seconds']:.0f} s"
                if reached
                else "not reached",
                f"{run['learn_seconds']:.0f} s",
                f"{whole:.1f} s: " + ", ".join(shares),
            ]
        )
    return {"columns": columns, "rows": rows, "note": f"Reached: {document['rule']}."}


def table_of_pairs(document: dict[str, Any]) -> dict[str, Any]:
    """What scripts/paired.py found of two trees."""

    def ratio(found: dict[str, float]) -> str:
        return f"{found['median']:.2f} ({found['quarter']:.2f} to {found['three_quarters']:.2f})"

    rows = [
        [
            case,
            *map(number, f["cpu_ms"]),
            ratio(f["cpu_ratio"]),
            ratio(f["wall_ratio"]),
            f["same_results"],
        ]
        for case, f in document["cases"].items()
    ]
    columns = [
        "work",
        "before, ms of CPU",
        "after",
        "CPU, after over before",
        "wall",
        "same results",
    ]
    return {
        "columns": columns,
        "rows": rows,
        "note": f"Median of {document['rounds']} pairs, half of them in brackets.",
    }


def tables_of_study(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``vla-rl study … --json`` found, and of each method that was added."""
    from vla_rl.reporting import verdict

    def table(title: str, rows: list[tuple[str, ...]], note: str = "") -> dict[str, Any]:
        return {"title": title, "columns": rows[0], "rows": rows[1:], "note": note}

    found = []
    for part in (document, *document["added"]):
        after = f" ({part['method']} added after the freeze)" if "method" in part else ""
        runs = [
            (name, seed, f"{share:.1%}")
            for name, of in part["runs"].items()
            for seed, share in of.items()
        ]
        found.append(
            table(f"Methods{after}", verdict.method_rows(part), f"Measured: {part['measure']}.")
        )
        if part["pairs"]:
            found.append(table(f"Pairs{after}", verdict.pair_rows(part)))
        found += [
            table(
                f"After the same {rows[0][0]}{after}", rows, verdict.CURVES.capitalize()[:-1] + "."
            )
            for rows in verdict.curve_tables(part)
        ]
        found.append(table(f"Runs{after}", [("method", "seed", "success"), *runs]))
    return found


ABOUT = (
    "title",
    "page",
    "finding",
    "date",
    "commit",
    "command",
    "commands",
    "machine",
    "hardware",
    "seeds",
    "note",
    "correction",
    "what",
)


def scalars(found: Any, path: str = "") -> Iterator[list[Any]]:
    items = found.items() if isinstance(found, dict) else ()
    for key, value in items:
        name = f"{path}, {key}" if path else str(key)
        if isinstance(value, dict):
            yield from scalars(value, name)
        elif (
            isinstance(value, list)
            and len(value) <= 6
            and all(isinstance(v, int | float) for v in value)
        ):
            yield [name, ", ".join(map(number, value))]
        elif isinstance(value, int | float):
            yield [name, value if isinstance(value, bool) else number(value)]
        elif isinstance(value, str) and len(value) <= WIDTH and (path or key not in ABOUT):
            yield [name, value]


def tables_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document.get("tables"):
        return list(document["tables"])
    if "pairs" in document and "added" in document:
        return tables_of_study(document)
    if "cases" in document:
        return [table_of_pairs(document)]
    if "level" in document and "runs" in document:
        return [table_of_learning(document)]
    if runs := list(runs_of(document)):
        return [table_of_runs(runs)]
    rows = [row for row in scalars(document) if len(row[0]) <= WIDTH]
    rest = f"{len(rows) - SCALARS} more figures stand in the file." if len(rows) > SCALARS else ""
    return [{"columns": ["figure", "value"], "rows": rows[:SCALARS], "note": rest}]


# ----------------------------------------------------------------------------------------- the text
def cell(value: Any) -> str:
    text = (
        {True: "yes", False: "no", None: ""}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def wrapped(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False
    )


def table_text(table: dict[str, Any]) -> str:
    """The table in Markdown, without columns in which nothing stands."""
    cells = [[cell(value) for value in row] for row in table["rows"]]
    kept = [i for i in range(len(table["columns"])) if any(row[i] for row in cells)]
    lines = [
        [cell(table["columns"][i]) for i in kept],
        ["---"] * len(kept),
        *([row[i] for i in kept] for row in cells),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def nested(found: Any, key: str) -> list[str]:
    """What the parts of a document, but its tables, say under ``key``, once each."""
    items = (
        found.items()
        if isinstance(found, dict)
        else enumerate(found)
        if isinstance(found, list)
        else ()
    )
    texts = []
    for name, value in items:
        texts += (
            [value]
            if name == key and isinstance(value, str)
            else nested(value, key)
            if name != "tables"
            else []
        )
    return list(dict.fromkeys(texts))


def origin(found: dict[str, Any], whole: bool, file: str = "") -> str:
    """Commands in a block, then commit, machine and seeds; of a table only what it says of its
    own."""

    def said(*keys: str) -> list[str]:
        own = [found[key] for key in keys if found.get(key) not in (None, "")]
        own = own or [nested(found, key) for key in keys if whole]
        return [
            str(text)
            for value in own
            for text in ([value] if isinstance(value, str | int) else value)
        ]

    commands = said("command", "commands")
    parts = {
        "command": "" if commands or not whole else "not recorded",
        "commit": " and ".join(said("commit") or said("a", "b")),
        "machine": "; ".join(said("machine", "hardware")),
        "seeds": ", ".join(said("seeds") or said("seed")),
        "date": "" if whole else "".join(said("date")),
    }
    shown = [f"{name} {value}" for name, value in parts.items() if value]
    shown += [
        f"{name} not recorded"
        for name in ("commit", "machine", "seeds")
        if whole and not parts[name]
    ]
    line = re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", "; ".join(shown))
    block = "```sh\n" + "\n".join(commands) + "\n```\n" if commands else ""
    raw = f" Raw data: [{file}](../../benchmarks/results/{file})." if file else ""
    return (
        block + (wrapped(line[:1].upper() + line[1:].rstrip(".") + "." + raw) if line else "")
    ).rstrip("\n")


def section(name: str, document: dict[str, Any]) -> str:
    parts = [
        f"## {document['title']}",
        wrapped(f"*{date_of(name, document)}.* {document['finding']}"),
    ]
    if corrected := document.get("correction"):
        parts.append(wrapped(f"**Corrected:** {corrected}"))
    for table in tables_of(document):
        title = table.get("title", "")
        parts += [f"### {title}"] if title and title != document["title"] else []
        parts.append(table_text(table))
        parts += [
            text for text in (wrapped(table.get("note", "")), origin(table, whole=False)) if text
        ]
    note = wrapped(f"Note: {document['note']}") if document.get("note") else ""
    return "\n\n".join([*parts, *([note] if note else []), origin(document, whole=True, file=name)])


def date_of(name: str, document: dict[str, Any]) -> str:
    return str(document.get("date") or name[:10])


def problems(name: str, document: dict[str, Any]) -> list[str]:
    """What keeps this file from being shown."""
    found = [f"{name}: no {key!r}" for key in ("title", "page", "finding") if not document.get(key)]
    if not found and document["page"] not in PAGES:
        found.append(f"{name}: page {document['page']!r} is none of {', '.join(PAGES)}")
    for table in tables_of(document):
        where = f"{name}, table {table.get('title', '')!r}"
        found += [f"{where}: no rows"] if not table["rows"] else []
        found += [
            f"{where}: a row has not {len(table['columns'])} cells: {row}"
            for row in table["rows"]
            if len(row) != len(table["columns"])
        ]
        found += [
            f"{where}: more than {WIDTH} characters: {value}"
            for row in [table["columns"], *table["rows"]]
            for value in map(cell, row)
            if len(value) > WIDTH
        ]
    return found


def documents() -> dict[str, dict[str, Any]]:
    """Every measurement by its file's name, the newest first. (A study that has no date in its
    name is not filed yet.)"""
    found = {path.name: json.loads(path.read_text()) for path in MEASURED.glob("[0-9]*.json")}
    return dict(sorted(sorted(found.items()), key=lambda item: date_of(*item), reverse=True))


def pages(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The text of every page by its file's name."""
    texts, index = {}, []
    for page, (title, purpose) in PAGES.items():
        own = {name: document for name, document in found.items() if document.get("page") == page}
        if own:
            head = (
                f"# {title}\n\n*Results: {purpose}. Made by `scripts/results.py`; the newest stand "
                "first.*"
            )
            texts[f"{page}.md"] = (
                "\n\n".join([head, *(section(name, own[name]) for name in own)]) + "\n"
            )
            index.append(
                f"| [{title}]({page}.md) | {purpose} | {len(own)} | "
                f"{max(date_of(n, own[n]) for n in own)} |"
            )
    head = (
        "# What was measured\n\n*Results: every measured figure, with its command, commit, "
        "machine, seeds and date.*\n\n"
    )
    head += "| page | what | measurements | newest |\n|---|---|---|---|\n" + "\n".join(index)
    foot = (
        "`python scripts/results.py` writes these pages from the files in `benchmarks/results/`, "
        "which hold the raw data."
    )
    return {"README.md": f"{head}\n\n{wrapped(foot)}\n", **texts}


def main() -> None:
    found = documents()
    if wrong := [
        problem for name, document in found.items() for problem in problems(name, document)
    ]:
        raise SystemExit("\n".join(wrong))
    DOCS.mkdir(exist_ok=True)
    texts = pages(found)
    for old in set(DOCS.glob("*.md")) - {DOCS / name for name in texts}:
        old.unlink()
    for name, text in texts.items():
        (DOCS / name).write_text(text)
    print(f"{len(found)} measurements on {len(texts) - 1} pages in {DOCS}")


if __name__ == "__main__":
    main()
