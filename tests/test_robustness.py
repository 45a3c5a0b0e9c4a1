"""Evaluation under perturbations, and the gap between tasks trained on and held out, on the toy
env."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from perturbed_toy import PerturbedToy
from test_evaluate import Seeker

from policies.nano_vla import NanoVLA
from policies.normalization import VectorStats
from sim.inline import InlineEnv
from vla_rl import cli
from vla_rl.checkpoint import save_checkpoint
from vla_rl.config import compose
from vla_rl.config.episodes import EvaluateConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation.evaluate import evaluate, evaluation_episodes
from vla_rl.evaluation.outcome import EvaluationResult, task_gap
from vla_rl.evaluation.robustness import (
    choose,
    compare_robustness,
    perturbed_episodes,
    run_robustness,
)
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run.pipeline import run_pipeline
from vla_rl.specs import EpisodeSpec

DECLARED = PerturbedToy.perturbations
SETTINGS = EvaluateConfig(episodes_per_task=6, video_episodes=0)


@contextlib.contextmanager
def no_bar(_: str):
    yield SimpleNamespace(update=None)


def robust(ignore_text: bool = False):
    env = InlineEnv(PerturbedToy(), num_slots=4)
    engine = RolloutEngine(env, Seeker(env.embodiment, ignore_text))
    plain = evaluate(engine, env.tasks, SETTINGS)
    wanted = choose(DECLARED, ["all", "wrong"])
    return run_robustness(engine, env.tasks, SETTINGS, DECLARED, wanted, plain, no_bar)


@pytest.fixture(scope="module")
def result():
    return robust()


def test_what_is_chosen():
    assert choose(DECLARED, ["all"]) == {"grey": (1, 2), "mute": (1, 2, 3)}
    assert choose(DECLARED, ["wrong", "grey"], [2]) == {"wrong": (1,), "grey": (2,)}
    assert choose(DECLARED, ["mute", "all"], [2, 1]) == {"mute": (2, 1), "grey": (2, 1)}


@pytest.mark.parametrize(
    ("declared", "names", "levels", "words"),
    [
        ({}, ["all"], [], "toy has no perturbations"),
        (
            DECLARED,
            ["grey", "lihgt"],
            [],
            "lihgt is unknown to toy: use all or some of grey, mute, wrong",
        ),
        (DECLARED, ["all"], [3], "--levels 3: grey has the levels 1, 2"),
    ],
)
def test_what_does_not_exist_is_named(declared, names, levels, words):
    with pytest.raises(ConfigError, match=words):
        choose(declared, names, levels, "toy")


def test_the_same_episodes_with_the_levels_in_turn():
    tasks = PerturbedToy().tasks
    plain, grey = (
        evaluation_episodes(tasks, SETTINGS),
        perturbed_episodes(tasks, SETTINGS, "mute", (1, 2, 3)),
    )
    same = ("task_id", "init_state_id", "split", "seed", "instruction_index", "group_id")
    assert [[getattr(e, n) for n in same] for e in plain] == [
        [getattr(e, n) for n in same] for e in grey
    ]
    assert [e.perturbed[1] for e in grey if e.task_id == tasks[0].task_id] == [1, 2, 3, 1, 2, 3]
    assert [e.perturbed[1] for e in grey if e.task_id == tasks[1].task_id] == [2, 3, 1, 2, 3, 1]
    assert len({e.rollout_id for e in plain + grey}) == 2 * len(plain)
    assert EpisodeSpec("x", 0).perturbed == ("", 0) and plain[0].perturbation == ""


def test_figures_of_factors_levels_and_all(result):
    assert result.unperturbed.success_rate == 1.0
    document = json.loads(json.dumps(result.to_dict()))
    grey, mute, wrong = (document["factors"][name] for name in ("grey", "mute", "wrong"))
    assert (
        grey["levels"]["1"]["rate"] == 1.0
        and grey["levels"]["2"]["rate"] == 0.0
        and grey["rate"] == 0.5
    )
    assert (
        grey["levels"]["2"]["difference"]["difference"] == -1.0
        and grey["difference"]["only_a"] == 6
    )
    assert (
        mute["rate"] == 0.5 and mute["tasks"]["reach_red"]["rate"] == 0.0 and wrong["rate"] == 0.5
    )
    assert (
        wrong["control"]
        and document["total"]["episodes"] == 24
        and document["mean_of_factors"] == 0.5
    )
    assert {o["perturbation"] for o in grey["outcomes"]} == {"grey:1", "grey:2"}


def test_the_table_has_a_row_per_factor_and_level(result):
    lines = result.table().splitlines()
    assert lines[2].split()[:3] == ["unperturbed", "12/12", "="]
    assert "grey" in lines[3] and "6/12 = 50%" in lines[3] and "-50 points" in lines[3]
    assert lines[4].split()[0] == "1" and "+0 points" in lines[4] and "-100 points" in lines[5]
    assert (
        any(line.startswith("wrong (control)") for line in lines)
        and "mean of the factors' rates: 50.0%" in lines[-1]
    )


def test_two_policies_are_compared_factor_by_factor(result):
    text, figures = compare_robustness(result, robust(ignore_text=True))
    assert list(figures) == ["unperturbed", "grey", "mute", "wrong"]
    assert figures["unperturbed"]["difference"] == -0.5 and figures["mute"]["difference"] == 0.0
    assert "second − first" in text and "-50 points" in text


def test_a_gap_needs_both_kinds_of_tasks(result, tmp_path):
    mute = result.factors["mute"]
    assert (
        task_gap(mute.outcomes, []) is None
        and task_gap(mute.outcomes, ["reach_red", "reach_blue"]) is None
    )
    gap = task_gap(mute.outcomes, ["reach_red"])
    assert (gap["trained"]["rate"], gap["held_out"]["rate"], gap["gap"]) == (
        1.0,
        0.0,
        1.0,
    ) and 0 < gap["gap_low"] < 1
    held = EvaluationResult.from_dict({**mute.to_dict(), "held_out_tasks": ["reach_red"]})
    assert "held-out tasks: 0/6 = 0%; gap +100 points" in held.table()
    held.save(tmp_path / "eval.json")
    again = EvaluationResult.load(tmp_path / "eval.json")
    assert again.to_dict() == held.to_dict() and again.to_dict()["task_gap"]["gap"] == 1.0


# --------------------------------------------------------------------------------- the command line
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """That of a run which holds out a task; the policy is as it was made."""
    here = [
        "run=toy",
        "env.type=perturbed_toy:PerturbedToy",
        "held_out_tasks=[reach_blue]",
        "evaluate.episodes_per_task=2",
    ]
    folder = tmp_path_factory.mktemp("robust")
    config = compose(
        [
            *here,
            "phases=[eval_sft]",
            f"output_dir={folder}",
            f"checkpoint={folder}/toy/checkpoints/sft",
        ]
    )
    spec = PerturbedToy().embodiment
    stats = [VectorStats.identity(dim).to_dict() for dim in (spec.action_dim, spec.proprio_dim)]
    save_checkpoint(
        Path(config.checkpoint),
        NanoVLA.from_statistics(config.policy, spec, *stats),
        keep_last_good=False,
    )
    run_pipeline(config)
    return Path(config.checkpoint)


def test_report_and_summary_show_the_gap_of_held_out_tasks(checkpoint):
    folder = checkpoint.parent.parent
    summary = json.loads((folder / "summary.json").read_text())
    gap = summary["evaluations"]["sft"]["task_gap"]
    assert gap["trained"]["episodes"] == gap["held_out"]["episodes"] == 2
    assert json.loads((folder / "eval_sft.json").read_text())["held_out_tasks"] == ["reach_blue"]
    assert "held-out tasks: " in (folder / "report.html").read_text()


def test_eval_prints_and_writes_the_factors(checkpoint, tmp_path, capsys):
    target = tmp_path / "result.json"
    command = [
        "eval",
        str(checkpoint),
        "--episodes-per-task",
        "2",
        "--perturb",
        "all",
        "--json",
        str(target),
    ]
    assert cli.main(command) == 0
    document = json.loads(target.read_text())
    assert (
        set(document["robustness"]["factors"]) == {"grey", "mute"}
        and document["total"]["episodes"] == 4
    )
    assert (
        document["held_out_tasks"] == ["reach_blue"]
        and document["task_gap"]["trained"]["episodes"] == 2
    )
    text = capsys.readouterr().out
    assert "to unperturbed" in text and "grey" in text and "all factors" in text and "gap" in text


def test_eval_compares_two_checkpoints_under_perturbations(checkpoint, tmp_path, capsys):
    target = tmp_path / "result.json"
    command = [
        "eval",
        str(checkpoint),
        "--compare",
        str(checkpoint),
        "--episodes",
        "2",
        "--perturb",
        "wrong,grey",
    ]
    assert cli.main([*command, "--levels", "2", "--json", str(target)]) == 0
    document = json.loads(target.read_text())
    assert [set(r["factors"]) for r in document["robustness"]] == [{"wrong", "grey"}] * 2
    assert document["robustness_comparison"]["grey"]["difference"] == 0.0
    assert list(document["robustness"][0]["factors"]["grey"]["levels"]) == ["2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--perturb", "fog"],
            "fog is unknown to perturbed_toy:PerturbedToy: use all or some of grey",
        ),
        (["--perturb", "all", "--levels", "9"], "grey has the levels 1, 2"),
        (["--levels", "1"], "--levels belongs to --perturb"),
        (["--suite", "toy", "--perturb", "all"], "toy has no perturbations"),
        (["--episodes-per-task", "0"], "--episodes-per-task 0: give 1 or more"),
    ],
)
def test_errors_come_before_any_episode(checkpoint, capsys, arguments, words):
    assert cli.main(["eval", str(checkpoint), *arguments]) == 2
    assert words in capsys.readouterr().err
