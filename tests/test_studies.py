"""Studies: frozen plans, runs that go on, and what several seeds can and cannot say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation import verdict
from vla_rl.run import study

PLAN = {
    "name": "two",
    "run": "toy",
    "seeds": 3,
    "methods": {"ppo": [], "slow": ["algorithm.learning_rate=1e-4"]},
}


def plan(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps({**PLAN, **changes}))  # (JSON is YAML)
    return path


# --------------------------------------------------------------------------------------- statistics
def test_the_interquartile_mean_by_hand():
    assert verdict.interquartile_mean([0.0, 1.0, 2.0, 9.0]) == 1.5
    # of five the middle half is 2.5 wide: three quarters of the second, the third, and as the
    # second
    assert verdict.interquartile_mean([0, 1, 2, 3, 100]) == pytest.approx(
        (0.75 + 2 + 0.75 * 3) / 2.5
    )


def test_signs_are_tested_exactly():
    assert verdict.sign_test([0.1, 0.2, 0.3]) == 2 / 8  # both ends of eight patterns
    assert verdict.sign_test([1.0, -1.0]) == 1.0
    # 1+2+3-… : of 16 patterns the sums 10, 8 and their negatives are as far out as 8
    assert verdict.sign_test([-1.0, 2.0, 3.0, 4.0]) == 4 / 16
    assert verdict.sign_test([0.01] * 20) < 1e-3


def test_holm_corrects_for_the_number_of_pairs():
    assert verdict.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert verdict.holm([]) == []


def test_two_seeds_are_not_enough_and_ten_are():
    def figures(n: int) -> dict[str, dict[int, float]]:
        return {
            "a": {i: 0.5 + 0.01 * (i % 3) for i in range(n)},
            "b": {i: 0.7 + 0.01 * (i % 2) for i in range(n)},
            "c": {i: 0.5 + 0.01 * ((i + 1) % 3) for i in range(n)},
        }

    assert {p.verdict for p in verdict.pairs(figures(2))} == {"not enough seeds"}
    found = {(p.a, p.b): p for p in verdict.pairs(figures(10))}
    assert found["a", "b"].verdict == "b is better" and found["a", "b"].better == 1.0
    assert found["a", "c"].verdict == "not told apart"
    assert found["b", "c"].verdict == "b is better" and found["b", "c"].difference < 0
    pair = found["a", "b"]
    assert pair.low < pair.difference < pair.high and pair.corrected == pytest.approx(3 * 2 / 2**10)
    assert verdict.pairs({"a": {1: 0.5}, "b": {2: 0.5}}) == []  # no seed in common


def test_power_is_what_the_formula_gives():
    # of many seeds the t test is the z test: Φ(√n d/s − 1.96)
    n, d, s = 50, 0.03, 0.1
    expected = 0.5 * (1 + math.erf((math.sqrt(n) * d / s - 1.96) / math.sqrt(2)))
    assert verdict.power(d, s, n) == pytest.approx(expected, abs=0.03)
    assert verdict.power(0.05, 0.08, 3) < 0.3 < verdict.power(0.05, 0.08, 10)


# -------------------------------------------------------------------------------------------- plans
def test_a_plan_is_frozen_once(tmp_path):
    found = study.read(plan(tmp_path))
    first = study.freeze(found, tmp_path / "two")
    assert study.freeze(study.read(plan(tmp_path)), tmp_path / "two") == first
    assert len({*first["seeds"]}) == 3 and min(first["seeds"]) >= study.FIRST_DRAWN
    other = study.read(plan(tmp_path, difference=0.1))
    with pytest.raises(ConfigError, match=r"another plan of this name .*give the new one another"):
        study.freeze(other, tmp_path / "two")
    assert "2 methods x 3 seeds = 6 runs" in study.described(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"ppo": []}}, "name two or more"),
        ({"methods": {"ppo": [], "start": []}}, "none of them 'start'"),
        ({"methods": {"ppo": [], "../x": []}}, r"'\.\./x' is no name of a folder"),
        ({"methods": {"ppo": [], "b": "x=1"}}, "b: give a list of overrides"),
        ({"methods": {"ppo": [], "b": ["rl.iteration=3"]}}, "methods.b: .*rl.iteration"),
        ({"methods": ["ppo"]}, "a mapping with name and methods"),
        ({"seeds": 1}, "seeds=1: give 2 or more"),
        ({"seeds": "many"}, "seeds='many' has to be of type int"),
        ({"difference": 5}, "difference=5: give a share"),
        ({"seed": 3}, "unknown key 'seed'; its keys are name, methods"),
        ({"name": "a/b"}, "'a/b' is no name of a folder"),
    ],
)
def test_bad_plans_name_the_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        study.read(plan(tmp_path, **changes))


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("methods: [")
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be read as YAML"):
        study.read(path)
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        study.read(tmp_path / "none.yaml")


# --------------------------------------------------------------------------------------------- runs
def test_runs_go_on_and_what_failed_is_named(tmp_path):
    folder = tmp_path / "two"
    frozen = study.freeze(study.read(plan(tmp_path)), folder)
    asked, said = [], []

    def train(overrides, log, cores):
        """Writes the run's evaluation; one run fails at first."""
        asked.append(list(overrides))
        name = next(o for o in overrides if o.startswith("name=")).partition("=")[2]
        bad = name == f"slow/seed_{frozen['seeds'][1]}" and len(said) < 4
        if name.startswith(study.START) or bad:
            return int(bad)
        run = folder / name
        run.mkdir(parents=True)
        wins = 3 if name.startswith("ppo") else 1
        outcomes = [{"success": i < wins} for i in range(4)]
        (run / "eval_rl.json").write_text(json.dumps({"outcomes": outcomes}))
        return 0

    with pytest.raises(UserError, match=r"1 runs failed.*slow, seed \d+ \(see .*log\)"):
        study.make(frozen, folder, say=said.append, train=train)
    assert study.judged(frozen, folder)["missing"] == 1
    assert any(f"seed={seed}" in asked[0] for seed in frozen["seeds"])
    said += ["", ""]
    count = len(asked)
    study.make(frozen, folder, say=said.append, train=train)
    assert len(asked) == count + 2  # the start, which is there, and the one run that was missing
    found = study.judged(frozen, folder)
    assert found["missing"] == 0 and [m["mean"] for m in found["methods"]] == [0.75, 0.25]
    (pair,) = found["pairs"]
    assert pair["difference"] == -0.5 and pair["verdict"] == "not enough seeds"  # of three: 2/8
    shown = study.text(found)
    assert "slow - ppo" in shown and "not enough seeds" in shown and frozen["sha256"][:12] in shown


@pytest.mark.slow
def test_a_study_of_the_toy_from_plan_to_verdict(tmp_path, capsys):
    from vla_rl.cli import main

    path = plan(
        tmp_path,
        seeds=2,
        common=["rl.iterations=1", "sft.updates=20", "evaluate.episodes_per_task=5"],
    )
    where = ["--output-dir", str(tmp_path / "out")]
    assert not main(["study", "plan", str(path), *where])
    assert not main(["study", "run", str(path), *where])
    assert not main(["study", "verdict", str(path), *where, "--json", str(tmp_path / "v.json")])
    found = json.loads((tmp_path / "v.json").read_text())
    assert found["missing"] == 0 and [m["seeds"] for m in found["methods"]] == [2, 2]
    assert "not enough seeds" in capsys.readouterr().out
