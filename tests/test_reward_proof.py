"""scripts/reward_proof.py: what it makes of finished runs (the runs themselves take hours)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "scripts" / "reward_proof.py"


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("reward_proof", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finished(folder: Path, rates: list[float], final: float, judging: int = 0) -> Path:
    """A run of 100 episodes an iteration with an evaluation before each."""
    folder.mkdir()
    rows = [{"phase": "sft", "step": 1}]
    rows += [{"phase": "rl", "step": i + 1, "eval/success": r, "episodes": 100 * (i + 1)} for i, r in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    phases = {"reward": {"episodes": judging, "seconds": 1.0}, "rl": {"seconds": 2.0}}
    (folder / "phases.json").write_text(json.dumps(phases))
    rl = {"rate": final, "low": final - 0.1, "high": final + 0.1}
    (folder / "summary.json").write_text(json.dumps({"evaluations": {"rl": rl}}))
    return folder


def test_episodes_to_the_goal_count_what_was_seen_before_the_evaluation_and_judging(proof, tmp_path):
    plain = proof.figures(finished(tmp_path / "a", [0.1, 0.5, 0.8], 0.9))
    assert plain["curve"] == [(0, 0.1), (100, 0.5), (200, 0.8), (300, 0.9)] and plain["episodes_to_goal"] == 200
    judged = proof.figures(finished(tmp_path / "b", [0.1, 0.5], 0.85, judging=64))
    assert judged["episodes_to_goal"] == 264 and judged["judging_episodes"] == 64 and judged["seconds"] == 3.0
    assert proof.figures(finished(tmp_path / "c", [0.1, 0.5], 0.7))["episodes_to_goal"] is None


def test_shares_are_bounds_where_a_run_does_not_arrive(proof, tmp_path):
    def run(reward, seed, rates, final):
        return {"reward": reward, "seed": seed, **proof.figures(finished(tmp_path / f"{reward}-{seed}", rates, final))}

    runs = [
        run("success", 0, [0.0, 0.4, 0.6, 0.8], 0.9), run("success", 1, [0.0, 0.1, 0.2, 0.3], 0.5),
        run("process", 0, [0.0, 0.8, 0.8, 0.9], 0.9), run("process", 1, [0.0, 0.5, 0.8, 0.8], 0.9),
        run("srpo", 0, [0.0, 0.1, 0.2, 0.3], 0.4), run("other", 7, [0.0], 0.1),
    ]  # fmt: skip
    totals = proof.totals(runs)
    assert set(totals) == {"success", "process", "srpo"}  # the other has no run of success alone beside it
    assert totals["process"]["episodes"] == 300 and totals["process"]["share"] == pytest.approx(300 / 700)
    assert totals["process"]["baseline_reached"] == 1 and totals["srpo"]["reached"] == 0
    table = proof.table({"start": {"0": 0.1, "1": 0.0, "7": 0.0}, "runs": runs, "totals": totals}, every=2)
    assert "| reward | seed | start | iteration 2 | 4 | episodes to 80%" in table
    assert "| success | 1 | 0% | 20% | 50% | not in 400 | 50% (40% – 60%) |" in table
    assert "| other | 7 | 0% |  |  | not in 100 | 10% (0% – 20%) |" in table
    assert "| process | 2 of 2 | 300 | less than 43% | 90% |" in table
    assert "| srpo | 0 of 1 | more than 400 | unknown | 40% |" in table


def test_the_chart_has_a_curve_per_run_and_their_mean(proof, tmp_path):
    from xml.etree import ElementTree

    runs = [
        {"reward": name, "seed": seed, **proof.figures(finished(tmp_path / f"{seed}", [0.0, 0.4], 0.6 + 0.2 * seed, seed))}
        for seed, name in enumerate(("success", "success", "a<b"))
    ]
    picture = ElementTree.fromstring(proof.chart({"runs": runs}))
    lines = [e.get("class") for e in picture.iter() if e.tag.endswith("polyline")]
    assert lines.count("line line goal") == 1
    assert lines.count("line faint s0") == 2 and lines.count("line line s0") == 1 and lines.count("line line s1") == 1
    assert "a<b" in [e.text for e in picture.iter()]


def test_runs_that_do_not_arrive_go_on_when_told_to(proof, tmp_path, monkeypatch, capsys):
    calls = []

    def train(name, overrides, cores):
        longer = "rl.iterations=4" in overrides
        calls.append((name, longer))
        folder = tmp_path / "outputs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        rates = [0.0, 0.9] if "process" in name else [0.0, 0.1]
        finished(folder, rates + [0.2, 0.85] * longer, 0.9 if "process" in name or longer else 0.3)
        (folder / "config.yaml").write_text(f"rl: {{iterations: {4 if longer else 2}}}")
        if "sft" in name:
            (folder / "summary.json").write_text(json.dumps({"evaluations": {"sft": {"rate": 0.0}}}))
            (folder / "phases.json").write_text("{}")
        return folder

    monkeypatch.setattr(proof, "train", train)
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    output = tmp_path / "out.json"
    command = "reward_proof.py --seeds 0 --rewards success process --at-most 4 --output"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(output)])
    proof.main()
    once = [("hard-sft-0", False), ("hard-success-0", False), ("hard-success-0", True), ("hard-process-0", False)]
    assert calls == once
    runs = {run["reward"]: run for run in json.loads(output.read_text())["runs"]}
    assert runs["success"]["episodes_to_goal"] == 300 and runs["success"]["iterations"] == [0, 1, 2, 3, 4]
    assert runs["process"]["episodes_to_goal"] == 100 and runs["process"]["iterations"][-1] == 2
    assert output.with_suffix(".svg").exists() and "| process | 1 of 1 | 100 | 33% | 90% |" in capsys.readouterr().out
    calls.clear()
    proof.main()  # again: a run that was lengthened is not asked to be short
    assert calls == [("hard-sft-0", False), ("hard-success-0", True), ("hard-process-0", False)]
