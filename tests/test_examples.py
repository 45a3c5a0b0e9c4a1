"""Everything in ``examples/`` runs, with tiny numbers."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from vla_rl import cli
from vla_rl.checkpoint import load_training_state
from vla_rl.config import compose, load
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY = [
    "collect.episodes_per_task=6",
    "sft.validation_episodes=1",
    "sft.updates=3",
    "rl.iterations=2",
    "rl.episodes_per_iteration=8",
    "evaluate.episodes_per_task=4",
    "evaluate.video_episodes=1",
    "slots.workers=0",
]


@pytest.fixture
def own(monkeypatch):
    """``PYTHONPATH=examples``, in worker processes too."""
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n.startswith("my_")]:
        del sys.modules[name]


def test_a_training_from_python(tmp_path):
    module = runpy.run_path(str(EXAMPLES / "train_from_python.py"))
    before, after = module["train"]([*TINY, f"output_dir={tmp_path}"])
    found = json.loads((tmp_path / "from_python" / "summary.json").read_text())["evaluations"]
    assert (before, after) == (found["sft"]["successes"] / 4, found["rl"]["successes"] / 4)


def test_a_run_with_an_env_a_reward_and_a_config_of_ones_own(own, tmp_path, monkeypatch, capsys):
    """And it goes on, and is reported, when the file is gone: from the record in its folder."""
    file = tmp_path / "moved.yaml"
    file.write_text((EXAMPLES / "my_run.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "run=./moved.yaml", *TINY]) == 0, capsys.readouterr().err
    folder = tmp_path / "outputs" / "moved"
    assert load(folder / "config.yaml").env_type == "my_env:Center"
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert len(rows) == 2 and rows[-1]["episodes"] == 16
    file.unlink()
    assert cli.main(["report", "outputs/moved"]) == 0
    assert cli.main(["train", "run=outputs/moved/config.yaml", "rl.iterations=3"]) == 0, (
        capsys.readouterr().err
    )
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"] == [
        1,
        2,
        3,
    ]
    assert [p.name for p in (tmp_path / "outputs").iterdir() if p.is_dir()] == ["moved"]


def test_an_algorithm_without_a_state_of_its_own_resumes_with_its_optimiser(
    own, finished_run, tmp_path
):
    start = finished_run("run=toy", "name=start", "phases=[collect,sft]", *TINY)
    given = ["run=toy", "phases=[rl]", f"checkpoint={start / 'checkpoints' / 'sft'}", *TINY]
    given += [f"dataset={start / 'dataset'}", f"output_dir={tmp_path}", "critic=none"]
    given += ["algorithm=ppo", "algorithm.type=my_algorithm:ClonedSuccess"]
    given += ["algorithm.start_decisions=1", "algorithm.batch_size=8"]
    folders = [
        run_pipeline(compose([*given, f"name={name}", f"rl.iterations={count}"]))
        for name, count in (("whole", 2), ("parts", 1), ("parts", 2))
    ]
    states = [load_training_state(f / "checkpoints" / "rl") for f in folders[::2]]
    whole, parts = (state["algorithm"]["algorithm"] for state in states)
    assert whole["guard"] == parts["guard"] and whole["guard"]["updates"] > 1
    moments = [x["adamw"]["state"] for x in (whole, parts)]
    assert moments[0] and moments[0].keys() == moments[1].keys()
    for key, kept in moments[0].items():
        assert kept["step"] > 1 and torch.equal(kept["exp_avg"], moments[1][key]["exp_avg"])


def test_the_commands_of_the_page_compose(own, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = re.findall(r"vla-rl train ([^`]+)`", (EXAMPLES / "README.md").read_text())
    lines = [line.split() for line in found if "any.yaml" not in line]
    assert len(lines) == 2
    for words in lines:
        assert compose(words).reward_type == "my_reward:CalmSuccess"


def test_the_notebook(tmp_path):
    """Its cells in order, as Jupyter would run them; valid for nbformat 4.5, without outputs."""
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and set(book) == {
        "cells",
        "metadata",
        "nbformat",
        "nbformat_minor",
    }
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids) and all(
        re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in ids
    )
    space: dict = {}
    shown = []
    for cell in book["cells"]:
        assert isinstance(cell["source"], list) and isinstance(cell["metadata"], dict)
        if cell["cell_type"] != "code":
            assert set(cell) == {"cell_type", "id", "metadata", "source"}
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        text = "".join(cell["source"])
        last = text.rpartition("\n")[2]
        exec(compile(text, cell["id"], "exec"), space)
        if last.startswith("curve("):
            shown.append(eval(last, space)._repr_html_())
        space["OVERRIDES"] = [*TINY, f"output_dir={tmp_path}"]
    loss, success = shown
    assert "<svg" in loss and "<polyline" in success  # (a loss of three updates is one point)


def test_nothing_here_is_untested():
    names = {
        "train_from_python.py",
        "my_env.py",
        "my_algorithm.py",  # (tests/test_studies.py)
        "my_reward.py",
        "my_run.yaml",
        "my_study.yaml",
        "notebook.ipynb",
        "README.md",
    }
    assert {p.name for p in EXAMPLES.iterdir() if p.name != "__pycache__"} == names
