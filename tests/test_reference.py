"""scripts/reference.py: the generated pages are those of the present source, and every key and
option is explained there."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path

import pytest

from vla_rl.bounds import bound
from vla_rl.cli import _parser

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def reference():
    """scripts/reference.py, which imports what lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("reference")


@pytest.fixture(scope="module")
def config_pages(reference):
    return importlib.import_module("reference_config")


@dataclasses.dataclass
class Inner:
    """``told`` by a sentence. And one that nobody tells."""

    told: int = 1
    untold: int = 2


@dataclasses.dataclass
class Sample:
    """Nothing about its fields."""

    ended: float = 0.5  # share that the end of the line tells
    # seconds, as the line above tells
    above: float | None = None
    choice: str = "a|b"  # a | b
    # metres
    limited: float | None = bound(None, ge=0, le=1)
    # of many
    chosen: str = bound("c1", choices=[f"c{i}" for i in range(12)])
    inner: Inner = dataclasses.field(default_factory=lambda: Inner(told=3))
    own_silence: bool = True


def test_the_committed_pages_are_those_of_the_source(reference):
    assert reference.stale(reference.pages()) == [], "write them anew: make docs"


def test_a_page_that_changed_or_is_no_more_is_named(reference, tmp_path):
    texts = {"a.md": f"{reference.NOTE}\nnew\n", "b.md": f"{reference.NOTE}\n"}
    (tmp_path / "a.md").write_text(f"{reference.NOTE}\nold\n")
    (tmp_path / "gone.md").write_text(f"{reference.NOTE}\n")
    (tmp_path / "by_hand.md").write_text("not generated\n")
    assert reference.stale(texts, tmp_path) == ["a.md", "b.md", "gone.md"]


def test_every_key_says_what_it_means(config_pages):
    assert config_pages.unexplained() == [], "say it in a comment beside the field"


def test_every_preset_says_at_its_head_what_it_is(config_pages, monkeypatch, tmp_path):
    assert config_pages.untitled() == []
    preset = tmp_path / "configs" / "env" / "bare.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("# @package _global_\ntype: toy\n")
    monkeypatch.setattr(config_pages, "ROOT", tmp_path)
    assert config_pages.untitled() == ["configs/env/bare.yaml"]


def test_a_key_without_a_word_is_named(config_pages):
    assert config_pages.unexplained([Sample]) == ["Sample.inner.untold", "Sample.own_silence"]


def test_keys_come_from_fields_comments_and_nested_defaults(config_pages):
    keys = {key.name: key[1:] for key in config_pages.keys(Sample)}
    assert keys["ended"] == ("`float`", "`0.5`", "", "share that the end of the line tells")
    assert keys["above"] == ("`float` or null", "`null`", "", "seconds, as the line above tells")
    assert keys["choice"] == ("`str`", "<code>a&#124;b</code>", "", "a | b")
    assert keys["limited"] == ("`float` or null", "`null`", "0 to 1", "metres")
    assert keys["chosen"][2] == "c0, c1, c2, c3, c4, c5, c6, c7 and 4 more"
    assert keys["inner.told"] == ("`int`", "`3`", "", "``told`` by a sentence.")


def test_every_option_says_what_it_is_for(reference):
    assert reference.mute(_parser()) == [], "give it a help text"


def test_an_option_without_help_is_named(reference):
    parser = argparse.ArgumentParser(description="a tool")
    below = parser.add_subparsers().add_parser("go")
    below.add_argument("--far", type=int, metavar="N")
    assert reference.mute(parser) == ["vla-rl go `--far N`", "vla-rl go"]


def test_the_site_has_a_section_for_each_heading_of_the_index(script):
    index = (
        "# Docs\n\n## Look up\n| page | for |\n|---|---|\n| [Keys](a.md) | all: [run](b.md), "
        "[words](a.md#w) |\n\n## Read\n"
    )
    assert script("site_hooks").menu(index + "| [Why](c.md) | [how](https://x.org) |\n") == [
        {"Look up": [{"Keys": [{"Overview": "a.md"}, {"Run": "b.md"}]}]},
        {"Read": [{"Why": "c.md"}]},
    ]


def test_links_out_of_the_docs_become_text_on_the_site(script, tmp_path, caplog):
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "code.py").touch()
    text = (
        "[`code.py`](../code.py#L3), [page](other.md#part), [web](https://x.org), "
        "[lost](../gone.py)"
    )
    seen = script("site_hooks").without_outside_links(text, docs / "page.md", docs)
    assert seen == "`code.py`, [page](other.md#part), [web](https://x.org), lost"
    assert [r.getMessage() for r in caplog.records] == [
        "page.md links to ../gone.py, which does not exist"
    ]
