"""``vla-rl advise``: the rules on figures made up by hand, and what is read from a run's folder."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vla_rl.advice.advise import group_episodes, read_figures, render, start_of
from vla_rl.advice.start_checks import (
    BAD,
    GOOD,
    WATCH,
    Check,
    Figures,
    Rate,
    checks,
    chunk_spread,
    overall,
)
from vla_rl.advice.suggestions import more_exploration, progress_reward
from vla_rl.config import RunConfig, compose
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.types import EmbodimentSpec, TaskSpec

RUN = Path("outputs/mine")
TASKS = (TaskSpec("a", ("do a", "make a"), (), 20), TaskSpec("b", ("do b",), (), 20))


@functools.cache
def toy(*overrides: str) -> RunConfig:
    """The toy run: 200 demonstrations a task, 70 updates, temperature 1."""
    return compose(["run=toy", *overrides])


def one(figures: Figures, name: str, *overrides: str) -> Check:
    """The check of that name."""
    found = [c for c in checks(figures, toy(*overrides), RUN) if c.name == name]
    assert len(found) == 1, found
    return found[0]


def held_out(successes: int, episodes: int = 100) -> Figures:
    return Figures(tasks={"lift": Rate(successes, episodes)})


@pytest.mark.parametrize(
    ("rate", "verdict", "remedy"),
    [
        ((0, 100), BAD, "collect.episodes_per_task=400 sft.updates=70"),
        ((0, 100), BAD, "rl.fallback=progress"),
        ((0, 6), WATCH, "rl.fallback=progress"),  # six episodes do not say that it never succeeds
        ((4, 100), WATCH, "collect.episodes_per_task=400"),
        ((5, 100), GOOD, ""),
        ((65, 100), GOOD, ""),
        ((66, 100), WATCH, "fewer demonstrations"),
        ((95, 100), BAD, "make it harder"),
        ((10, 10), WATCH, "make it harder"),  # its interval begins at 72 %
    ],
)
def test_success_of_the_start(rate, verdict, remedy):
    check = one(held_out(*rate), "success of the start")
    assert (
        check.verdict == verdict
        and check.value == rate[0] / rate[1]
        and bool(check.remedy) == (verdict != GOOD)
    )
    assert (
        remedy in check.remedy
        and f"{rate[0]} of {rate[1]}" in check.text
        and check.bounds == "5% to 65%"
    )


def test_a_start_from_a_checkpoint_has_other_remedies():
    check = one(held_out(0), "success of the start", "checkpoint=there")
    assert (
        "collect.episodes_per_task" not in check.remedy
        and "checkpoint=there dataset=DEMONSTRATIONS" in check.remedy
    )


def test_a_run_that_has_a_learned_reward_is_not_told_to_take_one():
    assert "rl.fallback" not in one(held_out(0), "success of the start", "reward=process").remedy
    assert (
        "rl.fallback" not in one(held_out(0), "success of the start", "rl.fallback=progress").remedy
    )


def test_tasks_apart():
    check = one(
        Figures(tasks={"a": Rate(0, 50), "b": Rate(20, 50), "c": Rate(50, 50)}), "tasks apart"
    )
    assert (
        check.verdict == WATCH
        and check.value == 2
        and "curriculum.strategy=frontier" in check.remedy
    )
    assert "more demonstrations of a" in check.remedy and "a 0%, b 40%, c 100%" in check.text
    assert (
        one(
            Figures(tasks={"a": Rate(10, 50), "b": Rate(20, 50), "c": Rate(0, 3)}), "tasks apart"
        ).verdict
        == GOOD
    )
    assert not [c for c in checks(held_out(30), toy(), RUN) if c.name == "tasks apart"]


@pytest.mark.parametrize(
    ("failures", "verdict", "remedy"),
    [
        ({"never_reached": 30, "dropped": 10}, WATCH, "image use"),
        ({"out_of_time": 30, "dropped": 10}, WATCH, "env.horizon"),
        ({"wrong_object": 30, "dropped": 10}, WATCH, "each instruction"),
        (
            {"never_reached": 20, "wrong_object": 21, "dropped": 20},
            WATCH,
            "algorithm.memory.episodes",
        ),
        ({"never_reached": 20, "wrong_object": 20, "dropped": 20}, GOOD, ""),
        ({"never_reached": 10, "missed_grasp": 30, "dropped": 0}, GOOD, ""),
        ({"never_reached": 10, "dropped": 10}, GOOD, ""),  # half is not more than half
    ],
)
def test_failures_by_kind(failures, verdict, remedy):
    check = one(Figures(failures=failures), "failures by kind")
    assert check.verdict == verdict and remedy in check.remedy and " 0" not in check.text


@pytest.mark.parametrize(
    ("use", "verdict", "word"),
    [(0.01, BAD, "blind:"), (0.05, BAD, "nearly blind"), (0.08, GOOD, "")],
)
def test_image_use(use, verdict, word):
    """Of a loss of 0.5: 2, 10 and 16 %, held against the 15 % below which SFT warns too."""
    image = {"loss": 0.5, "image_use": use, "image_use/wrist": 0.02, "image_spread": 0.1}
    check = one(Figures(image=image), "image use")
    assert (
        check.verdict == verdict
        and word in check.remedy
        and check.value == pytest.approx(use / 0.5)
    )
    assert "wrist alone +4%" in check.text


@pytest.mark.parametrize(
    ("spread", "verdict", "word"), [(0.004, WATCH, "every picture"), (0.05, GOOD, "")]
)
def test_spread_of_the_image_features(spread, verdict, word):
    image = {"loss": 0.5, "image_use": 0.5}
    check = one(Figures(image={**image, "image_spread": spread}), "image features")
    assert check.verdict == verdict and word in check.remedy and check.value == spread
    assert all(c.name != "image features" for c in checks(Figures(image=image), toy(), RUN))


@pytest.mark.parametrize(
    ("use", "verdict", "word"), [(0.024, WATCH, "in the same layouts"), (0.025, GOOD, "")]
)
def test_a_policy_that_goes_by_what_it_sees_alone(use, verdict, word):
    image = {"loss": 0.5, "image_use": 0.5, "instruction_use": use}
    two = {"red": Rate(5, 10), "green": Rate(5, 10)}
    check = one(Figures(tasks=two, image=image), "instruction use")
    assert (
        check.verdict == verdict
        and word in check.remedy
        and check.value == pytest.approx(use / 0.5)
    )
    alone = Figures(tasks={"red": Rate(5, 10)}, image=image)
    assert "instruction use" not in {c.name for c in checks(alone, toy(), RUN)}


@pytest.mark.parametrize(
    ("first", "hidden", "verdict", "word"),
    [
        (0.55, 0.0, GOOD, ""),
        (0.65, 0.0, WATCH, "sft.augment.proprio=0.5"),
        (0.65, 0.5, WATCH, "above 0.5"),
    ],
)
def test_a_policy_that_goes_by_its_arms_own_pose(first, hidden, verdict, word):
    """Of a loss of 0.5: 1.1 and 1.3 times, held against 1.2."""
    image = {"loss": 0.5, "image_use": 0.5, "first_loss": first}
    check = one(Figures(image=image), "loss as episodes begin", f"sft.augment.proprio={hidden}")
    assert (
        check.verdict == verdict
        and word in check.remedy
        and check.value == pytest.approx(first / 0.5)
    )


def test_loss_on_held_out_demonstrations():
    rising = one(Figures(losses=[0.9, 0.5, 0.6]), "loss on held-out demonstrations")
    assert (
        rising.verdict == WATCH
        and rising.value == pytest.approx(1.2)
        and "sft.updates below 35" in rising.remedy
    )
    assert one(Figures(losses=[0.9, 0.5, 0.54]), "loss on held-out demonstrations").verdict == GOOD


def test_time_limit():
    """Of the task with the least time to spare: 60 steps for demonstrations of 50 on average."""
    figures = Figures(limits={"a": 60, "b": 60}, demonstrations={"a": [40, 60], "b": [20]})
    check = one(figures, "time limit")
    assert check.verdict == WATCH and check.value == 1.2 and check.remedy.endswith("env.horizon=75")
    figures.limits = {"a": 75, "b": 60}
    assert one(figures, "time limit").verdict == GOOD
    assert one(Figures(limits={"a": 40}, demonstrations={"": [50]}), "time limit").verdict == BAD
    assert not checks(Figures(limits={"a": 40}, demonstrations={"b": [50]}), toy(), RUN)


@pytest.mark.parametrize(
    ("sampled", "verdict", "remedy"),
    [
        ((48, 100), GOOD, ""),
        ((20, 100), WATCH, "policy.temperature=0.7"),  # 40 % of 50 %
        ((10, 100), BAD, "policy.temperature=0.7"),
        ((0, 200), BAD, "hardly ever see a success"),
        ((2, 8), GOOD, ""),  # half of it, but of eight episodes
    ],
)
def test_sampled_success(sampled, verdict, remedy):
    figures = held_out(50)
    figures.sampled, figures.sampled_by = Rate(*sampled), "the rollouts just made"
    check = one(figures, "success with sampled actions")
    assert (
        check.verdict == verdict
        and remedy in check.remedy
        and "the rollouts just made" in check.text
    )
    figures.deterministic = False  # then both are sampled
    if verdict == WATCH:
        assert one(figures, "success with sampled actions").verdict == GOOD


def test_groups_with_both_outcomes():
    def groups(mixed: int, *overrides: str) -> Check:
        return one(
            Figures(mixed=Rate(mixed, 20), group_size=4), "groups with both outcomes", *overrides
        )

    assert (groups(6).verdict, groups(5).verdict, groups(1).verdict) == (GOOD, WATCH, WATCH)
    # which learns from nothing else
    grpo = groups(1, "algorithm.advantage=grpo", "rl.group_size=4")
    assert (
        grpo.verdict == BAD
        and "rl.group_size=8" in grpo.remedy
        and "policy.temperature=1.3" in grpo.remedy
    )
    assert "1 of 20 groups of 4" in grpo.text


def test_exploration_counts_what_a_chunk_s_control_steps_share():
    """Half-ranges are 2 and 1. Two members differ in x by ±1, of deviation √2; y's steps cancel;
    grippers do not count."""
    spec = EmbodimentSpec(
        name="arm",
        action_names=("x", "y", "gripper"),
        action_units=("m", "m", "1"),
        action_low=(-2, -1, -1),
        action_high=(2, 1, 1),
        frame="base",
        rotation="none",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=(),
        proprio_names=(),
    )

    def chunk(*steps: tuple[float, float, float]) -> SimpleNamespace:
        valid = torch.tensor([[True, True, False]])
        return SimpleNamespace(actions=torch.tensor([[*steps, (9.0, 9.0, 9.0)]]), valid=valid)

    group = [chunk((1.0, 1.0, 1.0), (1.0, -1.0, 1.0)), chunk((-1.0, 0.5, -1.0), (-1.0, -0.5, -1.0))]
    assert chunk_spread([group], spec) == pytest.approx(2**0.5 / 2)
    assert chunk_spread([group, [group[0]] * 2], spec) == pytest.approx(2**0.5 / 4)
    narrow = one(Figures(spread=0.03), "exploration")
    assert (
        narrow.verdict == WATCH
        and "policy.noise_correlation=0.8" in narrow.remedy
        and "3.0%" in narrow.text
    )
    assert "noise_corr" not in (
        told := one(Figures(spread=0.03), "exploration", "policy.noise_correlation=0.8").remedy
    )
    assert "policy.temperature=1.3" in told and "units" not in told
    flow = one(
        Figures(spread=0.03),
        "exploration",
        "policy=nano_flow_shared",
        "algorithm.ratio_level=token",
    ).remedy
    assert "units of the bounds" in flow and "noise_corr" not in flow
    # it chooses among samples
    assert one(Figures(spread=0.03), "exploration", "algorithm=parl").verdict == WATCH
    assert one(Figures(spread=0.08), "exploration").verdict == GOOD
    # which explores by its actor
    assert not checks(Figures(spread=0.03), toy("algorithm=residual"), RUN)


def test_a_small_policy_explores_by_its_noise_or_by_what_it_has_learned():
    small = toy("policy=small", "algorithm=sac")
    assert more_exploration(small) == "more exploration (policy.noise=0.26)"
    learned = toy("policy=small", "algorithm=sac", "policy.distribution=gaussian")
    assert more_exploration(learned) == "more noise in the policy's sampling"


def test_what_the_guard_says_and_what_is_refused_are_bad():
    assert one(Figures(guard="Almost no episode succeeds"), "first iterations of RL").verdict == BAD
    assert one(Figures(guard=""), "first iterations of RL").verdict == GOOD
    assert "rl.group_size=1" in one(Figures(), "settings of RL", "algorithm.advantage=grpo").text


def test_the_worst_verdict_decides_and_the_text_ends_with_it():
    found = [
        Check("x", 1.0, "one", "two", GOOD),
        Check("y", 0.0, "three", "four", WATCH, "do five"),
    ]
    assert (
        overall(found) == WATCH
        and overall(found[:1]) == GOOD
        and overall([*found, Check("z", 0, "", "", BAD)]) == BAD
    )
    text = render(found, ["z: --rollouts 64"])
    assert "watch  y: three [good: four]\n       → do five\n" in text and "not measured: z" in text
    assert text.endswith("or bends what it learns.")


def test_groups_share_their_initial_state():
    specs = group_episodes(TASKS, 10, 4, seed=3)
    assert (
        len(specs) == 12
        and len({s.seed for s in specs}) == len({s.rollout_id for s in specs}) == 12
    )
    for group in range(3):
        members = specs[4 * group : 4 * group + 4]
        assert {(s.group_id, s.split) for s in members} == {(group, "train")}
        assert len({(s.task_id, s.init_state_id, s.instruction_index) for s in members}) == 1
    assert [s.task_id for s in specs[::4]] == ["a", "b", "a"]


def evaluated(path, rows, **changes) -> None:
    """Writes an evaluation of (task, failure or "" for success, control steps) rows."""
    outcomes = [
        EpisodeOutcome(task, i, "go", not failure, steps, 1, None, failure=failure)
        for i, (task, failure, steps) in enumerate(rows)
    ]
    figures = {
        "split": "held_out",
        "seed": 0,
        "deterministic": True,
        "control_hz": 10.0,
        "jerk_unit": "m/s³",
    }
    figures |= {"seconds": 1.0, "seconds_per_decision": 0.1, "latency_s": 0.1}
    EvaluationResult(outcomes, **figures | changes).save(path)


def test_what_a_run_left_is_read(tmp_path):
    """Held-out tasks do not count, nor do RL's episodes after the policy's first update."""
    failures = ["never_reached"] * 3 + ["dropped"] + [""] * 6
    rows = [("reach_red", kind, 20) for kind in failures] + [
        ("reach_blue", "never_reached", 20)
    ] * 10
    evaluated(tmp_path / "eval_sft.json", rows, held_out_tasks=["reach_blue"], deterministic=False)
    with MetricsLogger(tmp_path) as logger:
        logger.log("sft", 10, {"validation/loss": 0.9, "validation/image_use": 0.3})
        logger.log("sft", 20, {"validation/loss": 0.5, "validation/image_use": 0.2})
        for i, (success, warmup) in enumerate([(0.25, 1.0), (0.5, 0.0), (0.75, 0.0), (0.75, 0.0)]):
            logger.log(
                "rl",
                i + 1,
                {"rollout/success": success, "ppo/critic_warmup": warmup, "episodes": 16 * (i + 1)},
            )
    figures = read_figures(toy("rl.guard_iterations=3"), tmp_path)
    assert figures.tasks == {"reach_red": Rate(6, 10)} and figures.deterministic is False
    assert figures.failures == {"never_reached": 3, "dropped": 1} and figures.losses == [0.9, 0.5]
    assert (figures.sampled, figures.sampled_by) == (Rate(12, 32), "RL's first episodes")
    assert (
        figures.guard == ""
        and figures.limits == {"reach_red": 20}
        and figures.image["image_use"] == 0.2
    )
    assert read_figures(toy(), tmp_path).guard is None  # its window of five is not complete
    evaluated(
        tmp_path / "sampled_sft.json",
        [("reach_red", "", 9)] * 3 + [("reach_red", "never_reached", 20)] * 6,
    )
    again = read_figures(toy(), tmp_path)
    assert (again.sampled, again.sampled_by) == (Rate(3, 9), "the same episodes")


def test_a_task_s_own_limit_is_seen_where_an_episode_failed(tmp_path):
    evaluated(
        tmp_path / "eval_sft.json",
        [("a", "never_reached", 70), ("a", "never_reached", 80), ("b", "", 30)],
    )
    assert read_figures(compose(["~run"]), tmp_path).limits == {"a": 80}


def test_random_weights_are_a_start_too(tmp_path):
    """What is told of a new run names the start that is there, and advise rolls that out."""
    (tmp_path / "checkpoints" / "random").mkdir(parents=True)
    config = RunConfig(phases=["rl"])
    assert start_of(config, tmp_path) == tmp_path / "checkpoints" / "random"
    assert f"checkpoint={tmp_path}/checkpoints/random" in progress_reward(config, tmp_path)
    (tmp_path / "checkpoints" / "sft").mkdir()
    assert start_of(config, tmp_path) == tmp_path / "checkpoints" / "sft"
