"""`vla-rl bench families`: what it tells a run, and what it reads of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.learning import families
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult


def test_a_family_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--families has 'act': choose from pi0,pi05,"):
        families.measure([], "pi0,act", 1, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="most need lerobot 0.6, and that 3.12")
def test_each_is_a_run_whose_parts_are_at_hand(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    for name in families.SMALL:
        config = compose(families.told(name, tmp_path))
        config.policy.check_machine()
        assert (config.policy.family, config.tasks) == (name, ["reach_red"])


def test_what_it_reads_of_a_run(tmp_path: Path) -> None:
    """30 of 200 episodes before and 70 after: 20 points."""
    for name, successes in (("sft", 30), ("rl", 70)):
        outcomes = [EpisodeOutcome("reach", i, "go", i < successes, 9, 3) for i in range(200)]
        result = EvaluationResult(outcomes, "held_out", 0, True, 10.0, "", 1.0, 0.1, 0.1)
        result.save(tmp_path / f"eval_{name}.json")
    rows = [{"phase": "rl", "step": i, "rollout/success": x} for i, x in ((1, 0.125), (2, 0.25))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = families._found(tmp_path)
    assert found == {"episodes": 200, "before": 0.15, "after": 0.35, "by_iteration": [0.125, 0.25]}
    said = families.text({"seed": 7, "rows": [{"family": "evo1", "cpu_s": 61.2, **found}]})
    assert said.splitlines()[-1].split() == ["evo1", "15.0%", "35.0%", "+20.0", "200", "61"]
