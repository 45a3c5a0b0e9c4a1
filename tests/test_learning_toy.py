"""It learns: the toy run goes from a weak imitator to a policy that succeeds, on initial states
it never trained on."""

from __future__ import annotations

import json

import pytest

from vla_rl.config import compose
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline


@pytest.mark.slow
def test_rl_makes_the_toy_policy_succeed(tmp_path):
    folder = run_pipeline(compose(["run=toy", f"output_dir={tmp_path}"]))
    before, after = (
        json.loads((folder / f"eval_{name}.json").read_text())["total"] for name in ("sft", "rl")
    )
    assert before["episodes"] == after["episodes"] == 100
    # Measured with seeds 0, 1, 2: from 22, 26 and 39 % to 76, 82 and 83 %.
    assert before["rate"] <= 0.75, "the start is meant to be weak"
    assert after["rate"] >= 0.65 and after["rate"] - before["rate"] >= 0.2
    success = [
        r["rollout/success"] for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"
    ]
    assert sum(success[-5:]) / 5 > sum(success[:5]) / 5 + 0.2


@pytest.mark.slow
def test_td3_makes_the_toy_policy_succeed_from_its_replay(tmp_path):
    """A quarter of PPO's episodes; resuming from the replay on disk is part of it."""
    common = ["run=toy_td3", f"output_dir={tmp_path}"]
    run_pipeline(compose([*common, "rl.iterations=8"]))
    folder = run_pipeline(compose([*common, "rl.iterations=16"]))
    before, after = (
        json.loads((folder / f"eval_{name}.json").read_text())["total"] for name in ("sft", "rl")
    )
    # Measured with seed 0, 20 iterations: from 39 to 75 %.
    assert before["rate"] <= 0.6 and after["rate"] >= before["rate"] + 0.15
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["replay/episodes"] for r in rows] == [20 + 32 * (i + 1) for i in range(16)]
