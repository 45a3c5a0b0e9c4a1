"""`vla-rl bench learn`: made-up runs with figures worked out by hand, and the command on the toy
task."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.learning import against, runs, update
from benchmarks.learning.against import compared
from benchmarks.learning.runs import PARTS, learning_of, run_text
from vla_rl import cli
from vla_rl.assembly import context
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult
from vla_rl.learning.figures import add_figures
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline

TOY = [
    "run=toy",
    "collect.episodes_per_task=2",
    "sft.updates=4",
    "slots.slots_per_worker=8",
    "rl.episodes_per_iteration=8",
    "algorithm.epochs=1",
    "algorithm.critic_epochs=1",
    "evaluate.episodes_per_task=2",
    "evaluate.video_episodes=0",
]


def evaluation(run: Path, name: str, successes: int, episodes: int = 50) -> None:
    outcomes = [EpisodeOutcome("lift", i, "do it", i < successes, 30, 5) for i in range(episodes)]
    EvaluationResult(outcomes, "held_out", 0, True, 20.0, "m/s³", 1.0, 0.1, 0.1).save(
        run / f"eval_{name}.json"
    )


def record(step: int, *, wait: float, learn: float | None, evaluate: float = 0.0, **more) -> dict:
    """An iteration of 64 episodes: 2 s of acting, 0.5 s of scoring, 3 s of updates, 1 s of them
    the critic's."""
    whole = (
        {}
        if learn is None
        else {"time/iteration": learn + evaluate, "time/evaluate": evaluate, "time/critic": 1.0}
    )
    return {
        "phase": "rl",
        "step": step,
        "episodes": 64 * step,
        "control_steps": 3000 * step,
        "engine/seconds": wait + 2.5,
        "engine/wait_seconds": wait,
        "engine/policy_seconds": 2.0,
        "time/reward": 0.5,
        "time/update": 3.0,
        **whole,
        **more,
    }


def write(run: Path, records: list[dict], phases: dict, planned: int = 8) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run / "phases.json").write_text(json.dumps(phases | {"peak_memory_bytes": 1}))
    (run / "config.yaml").write_text(
        f"rl:\n  iterations: {planned}\nenv:\n  type: nobody.knows:This\n"
    )
    return run


@pytest.fixture
def finished(tmp_path) -> Path:
    """Eight iterations: the first takes 12 s, the others 10 s; evaluated before the 1st, 3rd,
    5th and 7th and at the end."""
    rows = [record(1, wait=5.0, learn=12.0, evaluate=10.0, **{"eval/success": 0.4})]
    rows += [record(step, wait=4.0, learn=10.0) for step in range(2, 9)]
    for step, success, seconds in ((3, 0.82, 8.0), (5, 0.78, 9.0), (7, 0.85, 8.0)):
        rows[step - 1] = record(
            step, wait=4.0, learn=10.0, evaluate=seconds, **{"eval/success": success}
        )
    run = write(
        tmp_path / "finished", rows, {"eval_sft": {"complete": True}, "eval_rl": {"complete": True}}
    )
    evaluation(run, "sft", 20)
    evaluation(run, "rl", 46)
    (run / "versions.json").write_text(
        json.dumps({"cpu": "Some CPU", "cpu_cores": 2, "memory_gib": 7.8, "gpus": []})
    )
    return run


# ---------------------------------------------------------------------------------- runs that exist
def test_the_level_counts_once_nothing_falls_below_it_again(finished):
    """82 % after two iterations does not hold: 78 % follow. It is reached after six: 12 + 5 · 10
    s, 6 · 64 episodes."""
    found = learning_of(finished, 0.8)
    assert [
        (p["iteration"], p["episodes"], p["seconds"], p["success"]) for p in found["curve"]
    ] == [
        (0, 0, 0.0, 0.4),
        (2, 128, 22.0, 0.82),
        (4, 256, 42.0, 0.78),
        (6, 384, 62.0, 0.85),
        (8, 512, 82.0, 0.92),
    ]
    at_six = {
        "iteration": 6,
        "episodes": 384,
        "control_steps": 18000,
        "seconds": 62.0,
        "success": 0.85,
    }
    assert found["reached"] == at_six
    assert (
        found["below_before"]["seconds"] == 42.0
        and found["hardware"] == "2 cores Some CPU, 7.8 GiB, no GPU"
    )
    text = (
        "80% reached after 62.0 s and 384 episodes (iteration 6); still below after 42.0 s and 256 "
        "episodes"
    )
    assert text in run_text(found, 0.8)
    assert learning_of(finished, 0.9)["reached"]["seconds"] == 82.0
    assert (
        learning_of(finished, 0.4)["reached"]["iteration"] == 0
        and learning_of(finished, 0.4)["below_before"] is None
    )
    assert "not reached in 512 episodes" in run_text(learning_of(finished, 0.95), 0.95)


def test_episodes_that_judged_a_learned_reward_count(finished):
    phases = json.loads((finished / "phases.json").read_text()) | {
        "reward": {"complete": True, "episodes": 64}
    }
    (finished / "phases.json").write_text(json.dumps(phases))
    found = learning_of(finished, 0.8)
    assert found["episodes"] == 64 + 512 and [p["episodes"] for p in found["curve"]] == [
        64,
        192,
        320,
        448,
        576,
    ]
    assert found["reached"]["episodes"] == 448


def test_several_runs_stand_side_by_side_in_a_table_and_a_figure(finished, tmp_path, capsys):
    rows = [
        record(1, wait=4.0, learn=10.0, **{"eval/success": 0.4}),
        record(2, wait=4.0, learn=10.0),
    ]
    other = write(tmp_path / "other", rows, {})
    (other / "config.yaml").write_text("algorithm:\n  type: td3\nactor:\n  type: residual\n")
    text = runs.text(runs.measure([finished, other], 0.8, tmp_path / "curves.html"))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines[str(finished)][1:] == ["40%", "92%", "384", "18", "000", "62"]
    assert lines[str(other)][1:] == ["td3", "+", "residual", "40%", "40%", "not", "reached"]
    page = (tmp_path / "curves.html").read_text()
    # three axes, each for wide and for narrow screens
    assert page.count("<svg") == 6 and "td3 + residual" in page
    for axis in ("episodes", "control steps", "seconds"):
        assert f"Success against {axis}" in page


def test_where_the_seconds_went(finished):
    """Means of 8 iterations: waiting (5 + 7 · 4)/8; rest 12 − 5 − 2 − 0.5 − 3 = 1.5 once, else
    10 − 4 − 5.5 = 0.5."""
    found = learning_of(finished, 0.8)
    mean = found["seconds_per_iteration"]
    expected = {
        "simulate": 4.125,
        "act": 2.0,
        "score": 0.5,
        "update": 2.0,
        "critic": 1.0,
        "rest": 0.625,
        "learn": 10.25,
    }
    assert {name: mean[name] for name in expected} == pytest.approx(expected)
    assert found["learn_seconds"] == 82.0 and found["evaluate_seconds"] == 35.0  # 10 + 8 + 9 + 8
    text = run_text(found, 0.8)
    assert "8 iterations of RL, 512 episodes, 82.0 s of learning (evaluation 35.0 s apart)" in text
    assert "10.25 s: simulate 4.12 s (40%), act 2.00 s (20%)" in text


def test_a_run_that_goes_on_and_one_of_before(tmp_path, capsys):
    """No time/iteration, no eval/success; an eval_rl.json of fewer iterations does not count
    once the run goes on."""
    rows = [record(step, wait=4.0, learn=None) for step in (1, 2, 3)]
    run = write(
        tmp_path / "old",
        rows,
        {"eval_sft": {"complete": True}, "eval_rl": {"complete": False}},
        planned=16,
    )
    evaluation(run, "sft", 15)
    evaluation(run, "rl", 50)
    document = runs.measure([run], 0.8)
    (found,), text = document["runs"], runs.text(document)
    assert [p["success"] for p in found["curve"]] == [0.3] and found["reached"] is None
    # 3 · (6.5 + 0.5 + 3) s
    assert found["learn_seconds"] == 30.0 and found["seconds_per_iteration"]["rest"] == 0.5
    assert (
        "3 of 16 iterations of RL, 192 episodes, 30.0 s of learning (evaluation not timed then)"
        in text
    )
    assert "80% not reached in 192 episodes" in text and "none fell below it" in text
    (run / "phases.json").unlink()
    assert "unknown: this run was not evaluated" in run_text(learning_of(run, 0.8), 0.8)


# ------------------------------------------------------------------------------------- two settings
def side(wait: float, update: float, steps: int = 1000, epochs: float = 3.0) -> dict:
    """2 s of acting, 2 s of rest, 1 s of the critic's, besides waiting and updating the policy."""
    return {
        "engine/episodes": 8,
        "engine/control_steps": steps,
        "engine/decisions": 125,
        "rollout/learned_share": 0.5,
        "engine/wait_seconds": wait,
        "engine/policy_seconds": 2.0,
        "time/reward": 0.0,
        "time/update": update + 1.0,
        "time/critic": 1.0,
        "time/evaluate": 0.0,
        "time/iteration": wait + update + 5.0,
        "ppo/epochs": epochs,
    }


def test_two_sides_compared():
    """Updates take 3 and 3 s against 6 and 9 s: 7.5/3, in the rounds 2 and 3. The second round
    has 10 % more steps."""
    plain = [[side(4.0, 3.0)], [side(6.0, 3.0)]]
    found = compared([plain, [[side(4.0, 6.0)], [side(6.0, 9.0, steps=1100)]]])
    assert found["ratios"]["update"] == pytest.approx({"ratio": 2.5, "low": 2.0, "high": 3.0})
    assert found["ratios"]["simulate"] == pytest.approx({"ratio": 1.0, "low": 1.0, "high": 1.0})
    assert found["ratios"]["learn"] == pytest.approx(
        {"ratio": 17.5 / 13, "low": 15 / 12, "high": 20 / 14}
    )
    assert found["ratios"]["score"] is None  # nothing against nothing
    assert found["work_differences"] == pytest.approx(
        {
            "episodes": 0.0,
            "control steps": 0.05,
            "decisions": 0.0,
            "episodes learned from": 0.0,
            "epochs": 0.0,
        }
    )
    assert found["equal_work"] == ["act", "score", "update", "critic", "rest"]
    text = {
        "overrides": ["seed=1"],
        "against": ["a=1"],
        "start": "SFT",
        "rounds": 2,
        "iterations": 1,
        **found,
    }
    text["peak_memory_gib"] = [1.5, 2.75]
    table = {line.split("  ")[0].strip(): line.split() for line in against.text(text).splitlines()}
    assert table["update"][1:] == ["3.00", "7.50", "2.50", "2.00", "to", "3.00", "yes"]
    assert table["simulate"][-1] == "no" and table["control steps"][2:] == [
        "1000.0",
        "1050.0",
        "+5.0%",
    ]
    assert table["peak memory, GiB"][3:6] == ["1.50", "2.75", "+1.25"]
    assert "not at equal work: simulate, whole iteration" in against.text(text)
    stopped = compared([plain, [[side(4.0, 1.0, epochs=1.0)], [side(6.0, 1.0, epochs=1.0)]]])
    assert "update" not in stopped["equal_work"] and "simulate" in stopped["equal_work"]


def test_cpu_time_is_compared_where_it_was_counted():
    """Of all processes 10 s against 11."""
    sides = [[[side(4.0, 3.0) | {against.CPU: seconds}]] for seconds in (10.0, 11.0)]
    found = compared(sides)
    assert found["ratios"]["cpu"]["ratio"] == pytest.approx(1.1) and "cpu" in found["equal_work"]
    assert "cpu" not in compared([[[side(4.0, 3.0)]]] * 2)["ratios"]


def test_overrides_are_split_at_commas_before_a_key():
    assert against.split_overrides("a.b=1,tasks=[x,y],c=2") == ["a.b=1", "tasks=[x,y]", "c=2"]
    assert against.split_overrides("++a=1,~b.c") == ["++a=1", "~b.c"]


def test_the_command_compares_two_settings(tmp_path, capsys):
    """With learning rate 0 both sides meet the same episodes, so all but the update is at equal
    work."""
    target = tmp_path / "out.json"
    options = [
        "--against",
        "algorithm.epochs=2",
        "--iterations",
        "1",
        "--rounds",
        "2",
        "--json",
        str(target),
    ]
    assert (
        cli.main(["bench", "learn", *TOY, "algorithm.learning_rate=0", "rl.eval_every=1", *options])
        == 0
    )
    found = json.loads(target.read_text())
    assert (
        found["command"].startswith("vla-rl bench learn run=toy")
        and "--against algorithm.epochs=2" in found["command"]
    )
    assert found["date"] and "cores" in found["hardware"] and found["start"] == "SFT of 4 updates"
    for name, epochs in (("as given", 1), ("against", 2)):
        records = [r for rows in found["sides"][name]["records"] for r in rows]
        # one before each, which warms up, does not count
        assert [r["step"] for r in records] == [2, 4]
        assert all(r["ppo/epochs"] == epochs and r["ppo/critic_warmup"] == 0 for r in records)
        assert all(r["engine/episodes"] == 8 and "eval/success" not in r for r in records)
        mean = found["sides"][name]["seconds_per_iteration"]
        assert (
            sum(mean[part] for part in PARTS) == pytest.approx(mean["learn"]) and mean["critic"] > 0
        )
    assert (
        found["work_differences"]["epochs"] == 1.0
        and found["work_differences"]["control steps"] == 0.0
    )
    assert found["equal_work"] == ["simulate", "act", "score", "critic", "rest"]
    assert found["ratios"]["learn"]["low"] <= found["ratios"]["learn"]["high"]
    assert "not at equal work: update, whole iteration" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- the loop
def test_the_loop_times_its_parts_and_its_evaluation(tmp_path, monkeypatch):
    plain = context.evaluate

    def slow(*arguments, **options):
        time.sleep(0.05)
        return plain(*arguments, **options)

    monkeypatch.setattr(context, "evaluate", slow)
    folder = run_pipeline(
        compose([*TOY, "rl.iterations=3", "rl.eval_every=2", f"output_dir={tmp_path}"])
    )
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    for row in rows:
        parts = ("time/evaluate", "engine/seconds", "time/reward", "time/update")
        assert (
            row["time/iteration"] >= sum(row[part] for part in parts)
            and row["time/update"] >= row["time/critic"] > 0
        )
    spent = [row["time/evaluate"] for row in rows]
    assert spent[2] >= 0.05  # before the 3rd iteration; before the 1st it is known from eval_sft
    found = learning_of(folder, 0.8)
    assert [p["iteration"] for p in found["curve"]] == [0, 2, 3] and found[
        "evaluate_seconds"
    ] == pytest.approx(sum(spent))


def test_seconds_of_several_scorings_add_up():
    metrics = {"time/reward": 1.0, "reward/progress_end": 0.25, "time/evaluate": 2.0}
    add_figures(metrics, {"time/reward": 0.5, "reward/progress_end": 0.75})
    assert metrics == {"time/reward": 1.5, "reward/progress_end": 0.75, "time/evaluate": 2.0}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "name run folders"),
        (["no/such/run"], "no/such/run has no iterations of RL"),
        (["some/run", "--level", "80"], "--level 80.0 is no success rate"),
        (
            ["outputs/quickstart", "--against", "algorithm.epochs=2"],
            "'outputs/quickstart' is not an override",
        ),
        (["run=toy", "--against", "sft.updates=9"], "sft.updates=9 changes nothing"),
        (["~run", "--against", "policy=nano_flow"], "start from one policy"),
        (
            ["run=toy", "--against", "algorithm.epochs=2", "--rounds", "0"],
            "--rounds 0: give 1 or more",
        ),
    ],
)
def test_what_does_not_fit_is_named(arguments, part, capsys):
    assert cli.main(["bench", "learn", *arguments]) == 2
    assert part in capsys.readouterr().err


# ------------------------------------------------------------------------------------- bench update
def test_an_update_with_images_encoded_anew_learns_from_the_same_numbers():
    config = compose(["run=residual_quickstart", "algorithm.batch_size=8"])
    _, replay, base = update.learner_on_noise(config, 84, decisions=120)
    kept, encoded = (
        update.drawing(replay, base, way, torch.Generator().manual_seed(0))(
            8, gamma=0.9, n_step=2, images=False
        )
        for way in (update.KEPT, update.ENCODED)
    )
    assert torch.equal(kept.actions, encoded.actions), "the same rows"
    for a, b in ((kept.extra, encoded.extra), (kept.next_extra, encoded.next_extra)):
        assert {"visual", "state", "base_action"} <= a.keys() == b.keys()
        assert len(a["visual"].unique()) > 100, "frames of noise differ"
        for name in a:
            torch.testing.assert_close(a[name].float(), b[name].float(), rtol=2e-3, atol=4e-3)


def test_bench_update_prints_all_ways_and_refuses_an_actor_without_features():
    document = update.measure(["run=residual_quickstart"], 4, 84, rounds=1, updates=1, decisions=60)
    kept, encoded, pictures = (document["milliseconds"][way] for way in update.WAYS)
    said = update.text(document)
    assert document["ratio"] == pytest.approx(encoded / kept)
    assert (
        f"{kept:.0f} ms with kept features" in said
        and f"{pictures:.0f} ms with eyes of its own" in said
    )
    with pytest.raises(ConfigError, match="actor=own reads no kept features"):
        update.measure(["run=iql_quickstart"], 4, 84)
