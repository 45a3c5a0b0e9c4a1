"""scripts/results.py: docs/results/ says what benchmarks/results/ holds, and the other pages
link to what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "benchmarks" / "results").glob("[0-9]*.json"))
DOCS = ROOT / "docs"


@pytest.fixture
def results(script):
    return script("results")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_measurement_says_what_it_is(results, path):
    assert results.problems(path.name, json.loads(path.read_text())) == []


def test_the_pages_are_those_that_the_measurements_make(results):
    made = results.pages(results.documents())
    kept = {path.name: path.read_text() for path in (DOCS / "results").glob("*.md")}
    stale = [name for name in {*made, *kept} if made.get(name) != kept.get(name)]
    assert stale == [], "run python scripts/results.py"
    for path in FILES:
        assert sum(f"(../../benchmarks/results/{path.name})" in text for text in made.values()) == 1


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_to_a_measurement_find_it():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target, anchor in re.findall(
            r"\]\(([^)#\s]*results/\w+\.md)#([^)]+)\)", page.read_text()
        ):
            assert anchor in anchors(page.parent / target), (
                f"{page.name} links to {target}#{anchor}"
            )


def test_a_table_keeps_its_columns_and_escapes_its_bars(results):
    table = {"columns": ["a", "b", "c"], "rows": [["x | y", None, True], [1, "", False]]}
    assert results.table_text(table).splitlines() == [
        "| a | c |",
        "| --- | --- |",
        "| x \\| y | yes |",
        "| 1 | no |",
    ]


def test_what_is_wrong_with_a_file_is_said(results):
    table = {"columns": ["a", "b"], "rows": [["x", "y" * 121], ["z"]]}
    document = {
        "title": "T",
        "page": "nowhere",
        "finding": "F",
        "tables": [table, {"columns": ["a"], "rows": []}],
    }
    found = "\n".join(results.problems("f.json", document))
    for part in (
        "'nowhere' is none of",
        "more than 120 characters",
        "a row has not 2 cells",
        "no rows",
    ):
        assert part in found
    assert (
        results.problems("f.json", {"tables": [{"columns": ["a"], "rows": [["1"]]}]})[0]
        == "f.json: no 'title'"
    )


def test_a_study_is_shown_run_by_run(results):
    def evaluation(successes):
        return {
            "episodes": 50,
            "successes": successes,
            "low": 0.1,
            "high": 0.9,
            "failures": {"never_reached": 3},
        }

    runs = [
        {
            "label": "seed 3",
            "evaluations": {"sft": evaluation(20), "rl": evaluation(47)},
            "seconds": 90.0,
            "learning_curve": [
                {"episodes": 0.0, "success": 0.4},
                {"episodes": 64.0, "success": 0.94},
            ],
            "peak_memory_bytes": 3 * 2**30,
            "image_use": {"image_use": 1.234},
        },
    ]
    table = results.tables_of(
        {"summary": {"runs": runs, "groups": [{"evaluations": {"sft": {"median": 0.4}}}]}}
    )[0]
    assert table["rows"] == [
        [
            "seed 3",
            "40 % (10 – 90)",
            "94 % (10 – 90)",
            "0: 40, 64: 94",
            "1.5",
            "3.0 GiB",
            "+1.23",
            *["3 never reached"] * 2,
        ]
    ]


def test_what_is_not_recorded_is_said(results):
    assert results.origin(
        {"command": ["a", "b"], "commit": "c" * 40, "seeds": [1, 2]}, whole=True
    ).splitlines() == [
        "```sh",
        "a",
        "b",
        "```",
        "Commit ccccccc; seeds 1, 2; machine not recorded.",
    ]
    nothing = "; ".join(
        f"{name} not recorded" for name in ("Command", "commit", "machine", "seeds")
    )
    assert results.origin({}, whole=True) == f"{nothing}."
    of_parts = {
        "runs": [{"command": "a", "commit": "1"}, {"command": "a", "commit": "2"}],
        "tables": [{"command": "b"}],
    }
    assert results.origin(of_parts, whole=True).startswith("```sh\na\n```\nCommit 1 and 2;")
    assert results.origin({}, whole=False) == ""
    assert "seeds 0;" in results.origin({"seed": 0}, whole=True)
    # what a bench keeps of each
    assert "seeds 6, 7;" in results.origin({"seeds": {"6": {}, "7": {}}}, whole=True)
