"""scripts/study.py: which runs it makes of seeds and columns (the runs themselves take long)."""

from __future__ import annotations

import json
import random

import pytest


@pytest.fixture
def study(script, tmp_path, monkeypatch):
    module = script("study")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_columns_are_names_with_overrides(study):
    found = study.columns_of(["plain", "b=algorithm=grpo,tasks=[a,b],rl.group_size=8"])
    assert found == {"plain": [], "b": ["algorithm=grpo", "tasks=[a,b]", "rl.group_size=8"]}
    assert study.columns_of([]) == {"": []}
    for bad in (["start=x=1"], ["=x=1"], ["a=x=1", "a=x=2"]):
        with pytest.raises(SystemExit, match="a name of its own"):
            study.columns_of(bad)


def test_drawn_seeds_are_kept_and_never_those_that_people_try(study, tmp_path):
    first = study.drawn_seeds(tmp_path / "s", 3, random.Random(1))
    assert len(set(first)) == 3 and min(first) >= study.FIRST_DRAWN
    assert study.drawn_seeds(tmp_path / "s", 5, random.Random(2))[:3] == first


def test_columns_of_a_seed_go_on_from_one_start(study, tmp_path, monkeypatch):
    calls, reports = [], []

    def train(name, overrides, cores):
        calls.append((name, overrides))
        return "broken" if name.endswith("start/seed_7") else ""

    def run(command, **_):
        if "report" in command:
            reports.append(command)
            folder = tmp_path / "outputs" / "mine"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text('{"verdict": "fine"}')
        return type("Done", (), {"stdout": "abc\n", "returncode": 0})

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study.subprocess, "run", run)
    words = (
        "mine --start --seeds 3 7 --column ppo --column bc=algorithm=filtered_bc -- rl.iterations=2"
    )
    with pytest.raises(SystemExit, match="broken"):
        study.main(words.split())
    assert [name for name, _ in calls] == [
        "mine/start/seed_3",
        "mine/ppo/seed_3",
        "mine/bc/seed_3",
        "mine/start/seed_7",
    ]
    assert "phases=[collect,sft,eval_sft,report]" in calls[0][1]
    assert calls[2][1][-1] == "algorithm=filtered_bc" and "rl.iterations=2" in calls[2][1]
    assert "checkpoint=outputs/mine/start/seed_3/checkpoints/sft" in calls[1][1]
    document = json.loads((tmp_path / "benchmarks" / "results" / "mine.json").read_text())
    assert len(reports) == 1 and document["seeds"] == [3, 7] and document["problems"] == ["broken"]
    assert document["summary"] == {"verdict": "fine"} and not document["drawn"]


def test_a_column_that_fails_leaves_the_others_their_turn(study, monkeypatch):
    calls = []

    def train(name, overrides, cores):
        calls.append(name)
        return f"{name} broke" if "/a/" in name else ""

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(
        study.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "", "returncode": 2})
    )
    with pytest.raises(SystemExit, match=r"mine/a/seed_1 broke\nthere is no report of .*mine"):
        study.main(["mine", "--seeds", "1", "--column", "a=seed=1", "--column", "b=seed=2"])
    assert calls == ["mine/a/seed_1", "mine/b/seed_1"]
    with pytest.raises(SystemExit):
        study.main(["mine", "--jobs", "0"])


def test_a_run_that_ends_too_low_is_a_problem(study, tmp_path, monkeypatch):
    def train(name, overrides, cores):
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        rate = 0.95 if "seed_1" in name else 0.04
        evaluations = {"sft": {"rate": 0.9}, "rl": {"rate": rate}}
        (folder / "summary.json").write_text(json.dumps({"evaluations": evaluations}))
        return ""

    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(
        study.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "", "returncode": 2})
    )
    with pytest.raises(SystemExit) as ended:
        study.main(["mine", "--seeds", "1", "2", "--least", "0.8"])
    text = str(ended.value)
    assert (
        "mine/seed_2: 4% success after rl, less than --least 0.8" in text and "seed_1" not in text
    )
