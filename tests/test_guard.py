"""The guard of RL on histories made by hand, and what is refused before a run begins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vla_rl import cli
from vla_rl.advice.start_checks import Figures, Rate, checks
from vla_rl.advice.suggestions import advice, image_figures
from vla_rl.checks.options import check_run
from vla_rl.checks.rewards import is_sparse
from vla_rl.config import compose
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.imitation import FilteredBCConfig
from vla_rl.config.run import RLConfig
from vla_rl.diagnostics import Movement
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.guard import NO_SUCCESS, STILL, Guard, judge
from vla_rl.monitoring.metrics import MetricsLogger


def window(
    count: int = 5, episodes: int = 128, successes: int = 0, first: int = 3, **figures: float
) -> list[dict]:
    """Rows of ``count`` iterations that went alike; by default the policy moves and nothing
    succeeds."""
    moving = {"updates": 12.0, "skipped": 0.0, "approx_kl": 4e-3}
    row = {"episodes": episodes, "successes": successes}
    return [{"iteration": first + i} | row | moving | figures for i in range(count)]


# ------------------------------------------------------------------------------------- the decision
def test_almost_no_success_is_found_and_said_in_numbers():
    found = judge(window(), threshold=0.03)
    assert found.kind == NO_SUCCESS
    # without a success Wilson's interval ends at z²/(n + z²) = 3.8415/643.84
    for part in ("0 of 640", "iterations 3 to 7", "0.0% to 0.6%", "below 3.0%"):
        assert part in found.text, found.text


@pytest.mark.parametrize(("episodes", "found"), [(124, False), (125, True)])
def test_the_upper_bound_decides(episodes, found):
    """z²/(n + z²) < 0.03 from n = 124.2 on."""
    assert (judge(window(1, episodes), threshold=0.03) is not None) == found


def test_successes_are_pooled_over_the_window():
    rows = window(4) + window(1, successes=13)  # 13 of 640: 1.2 % to 3.4 %
    assert judge(rows, threshold=0.03) is None and judge(rows, threshold=0.04).kind == NO_SUCCESS


def test_a_reward_that_pays_without_success_is_not_warned_about():
    assert judge(window(), threshold=0.03, sparse=False) is None


def test_successes_of_episodes_that_began_in_the_middle_count_too():
    guard = Guard(RLConfig(guard_iterations=1), Movement())
    found, figures = guard.look(
        1, 64, {"rollout/success": 0.0, "rollout/led": 32.0, "rollout/led_success": 0.5}
    )
    assert (
        guard.rows[0]["successes"] == 16 and found is None and figures["guard/success_high"] > 0.3
    )


STANDING_STILL = [
    ({"zero_advantages": 1.0}, "every advantage was 0"),
    ({"learned_share": 0.0}, "rollout/learned_share 0"),
    ({"updates": 0.0, "skipped": 12.0}, "all 60 updates were skipped"),
    ({"updates": 0.0}, "no update was made"),
    ({"approx_kl": 1e-8}, "at most 1.0e-08"),
]


@pytest.mark.parametrize(("figures", "why"), STANDING_STILL)
def test_a_policy_that_does_not_move_is_found(figures, why):
    found = judge(window(successes=60, **figures), threshold=0.03)
    assert found.kind == STILL and why in found.text and "300 of 640" in found.text
    both = judge(window(**figures), threshold=0.03)
    assert both.kind == NO_SUCCESS and why in both.text


@pytest.mark.parametrize(("figures", "_"), STANDING_STILL)
def test_one_iteration_that_moves_is_enough(figures, _):
    assert (
        judge(window(4, successes=60, **figures) + window(1, successes=60), threshold=0.03) is None
    )


def test_the_kl_of_a_single_update_says_nothing():
    """It is measured before the step, so it is 0 however far the step goes."""
    assert judge(window(successes=60, updates=1.0, approx_kl=0.0), threshold=0.03) is None


def test_an_algorithm_that_logs_neither_is_judged_by_success_alone():
    rows = [{"iteration": 1, "episodes": 200, "successes": 100}]
    assert judge(rows, threshold=0.03) is None


# ------------------------------------------------------------------------------------ while RL runs
PPO, FILTERED = PPOConfig.movement, FilteredBCConfig.movement


def logged(total: float, success: float = 0.0, warmup: float = 0.0) -> dict[str, float]:
    """What an iteration logs, with ``total`` optimiser steps since the start."""
    return {
        "rollout/success": success,
        "ppo/critic_warmup": warmup,
        "ppo/updates_total": total,
        "ppo/skipped_updates": 0.0,
        "ppo/approx_kl": float("nan") if warmup else 2e-3,
        "rollout/learned_share": 1.0,
    }


def test_the_guard_speaks_once_after_its_window():
    guard = Guard(
        RLConfig(guard_iterations=2), PPO, advice={NO_SUCCESS: "What helps: a stronger start."}
    )
    # the critic's warm-up does not count
    assert guard.look(1, 128, logged(0, success=0.5, warmup=1.0)) == (None, {})
    assert guard.look(2, 128, logged(10)) == (None, {})
    found, figures = guard.look(3, 128, logged(22))
    assert found.kind == NO_SUCCESS and found.text.endswith("What helps: a stronger start.")
    assert "0 of 256 in iterations 2 to 3" in found.text
    assert [r["updates"] for r in guard.rows] == [10.0, 12.0]
    assert figures["guard/no_success"] == 1.0 and figures["guard/still"] == 0.0
    assert figures["guard/success_high"] == pytest.approx(3.8415 / 259.8415, rel=1e-4)
    assert guard.look(4, 128, logged(30)) == (None, {}) and guard.finding == found


def test_an_algorithm_says_itself_what_moves_its_policy():
    """Filtered BC logs its updates per iteration, and those that were skipped as a running count;
    one that declares nothing is judged by success alone."""
    still = {"rollout/success": 0.5, "filtered_bc/updates": 0.0, "filtered_bc/skipped_updates": 4.0}
    found, _ = Guard(RLConfig(guard_iterations=1), FILTERED).look(1, 128, still)
    assert found.kind == STILL and "all 4 updates were skipped" in found.text
    assert Guard(RLConfig(guard_iterations=1), Movement()).look(1, 128, still)[0] is None


def test_nothing_is_said_of_a_run_that_learns():
    guard = Guard(RLConfig(guard_iterations=1), PPO)
    found, figures = guard.look(1, 128, logged(10, success=0.25))
    assert found is None and figures["guard/no_success"] == 0.0 and guard.finding is None
    guard.enforce(Path("rl"))


def test_a_window_goes_on_after_a_resume():
    first, second = (
        Guard(RLConfig(guard_iterations=2), PPO),
        Guard(RLConfig(guard_iterations=2), PPO),
    )
    first.look(1, 128, logged(10))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.look(2, 128, logged(22)) == first.look(2, 128, logged(22))
    assert second.state_dict() == first.state_dict() and second.finding.kind == NO_SUCCESS
    third = Guard(RLConfig(guard_iterations=2, guard="stop"), PPO)
    third.load_state_dict(second.state_dict())
    with pytest.raises(UserError, match=r"0 of 256.*checkpoints/rl.*rl\.guard=warn"):
        third.enforce(Path("run/checkpoints/rl"))


def test_a_fallback_stands_in_for_stopping():
    rl = RLConfig(guard_iterations=1, guard="stop", fallback="progress")
    guard = Guard(rl, PPO)
    guard.look(1, 128, logged(10))
    guard.enforce(Path("rl"))
    still = Guard(rl, PPO)  # which no reward mends
    still.look(1, 128, logged(0, success=0.5))
    with pytest.raises(UserError, match="no update was made"):
        still.enforce(Path("rl"))


def test_remedies_name_the_blindness_and_the_overrides(tmp_path):
    config = compose(["run=toy"])
    assert image_figures(config, tmp_path) == {}
    with MetricsLogger(tmp_path) as logger:
        logger.log("sft", 10, {"validation/loss": 0.9, "validation/image_use": 0.3})
        logger.log(
            "sft",
            20,
            {
                "validation/loss": 0.5,
                "validation/image_use": 0.01,
                "validation/image_use/top": 0.01,
            },
        )
        logger.log("sft", 30, {"sft/loss": 0.4})
    assert image_figures(config, tmp_path) == {
        "loss": 0.5,
        "image_use": 0.01,
        "image_use/top": 0.01,
    }
    text = advice(config, tmp_path)[NO_SUCCESS]
    for part in (
        "algorithm.memory.episodes=256",
        "collect.episodes_per_task=400 sft.updates=70",
        "rl.fallback=progress",
        "does not look at its images",
        "sft.augment.proprio=0.5",
    ):
        assert part in text, text
    assert "policy.temp" not in text and "policy.temperature=1.3" in advice(config, tmp_path)[STILL]
    # the figures of the run it starts from
    started = compose(["run=toy", f"checkpoint={tmp_path}/checkpoints/sft"])
    assert image_figures(started, tmp_path / "other")["image_use"] == 0.01


PRESETS = sorted(
    path.stem for path in (Path(__file__).parent.parent / "configs" / "run").glob("*.yaml")
)


@pytest.mark.parametrize("name", PRESETS)
def test_every_override_that_a_remedy_names_is_one(name, tmp_path):
    """In each shipped run: it exists there, is allowed, and changes something."""
    config = compose([f"run={name}"])
    figures = Figures(
        tasks={"a": Rate(0, 100), "b": Rate(0, 100)},
        failures={"never_reached": 150, "wrong_object": 100},
        spread=0.01,
        sampled=Rate(0, 100),
        mixed=Rate(0, 32),
        image={"loss": 1.0, "image_use": 0.01, "first_loss": 2.0},
        losses=[1.0, 2.0],
    )
    texts = [
        *advice(config, tmp_path).values(),
        *(c.remedy for c in checks(figures, config, tmp_path)),
    ]
    easy = Figures(tasks={"a": Rate(100, 100)}, sampled=Rate(20, 100))
    texts += [c.remedy for c in checks(easy, config, tmp_path)]
    named = [
        found
        for text in texts
        for found in re.findall(r"([a-z_]+(?:\.[a-z_]+)+)=([a-z0-9.]*[a-z0-9])", text)
    ]
    assert len(named) >= 4, texts
    for key, value in named:
        present = config
        for part in key.split("."):
            present = getattr(present, part)  # it is there
        assert str(present).lower() != value, f"{key}={value} is set already"
    compose([f"run={name}", *(f"{key}={value}" for key, value in dict(named).items())])


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ("quickstart", "policy.temperature=1.3"),
        ("flow_quickstart", "policy.noise_level=0.52"),
        ("diffusion_quickstart", "policy.min_std=0.1"),
        ("residual_quickstart", "algorithm.temperature="),
        ("toy_td3", "policy.noise=0.26"),
    ],
)
def test_exploration_is_raised_where_it_comes_from(run, key, tmp_path):
    assert key in advice(compose([f"run={run}"]), tmp_path)[STILL]


def test_with_a_dataset_nothing_is_collected_so_no_remedy_says_so(tmp_path):
    text = advice(compose(["run=quickstart", "dataset=some/data"]), tmp_path)[NO_SUCCESS]
    assert "collect." not in text and "sft.updates=600" in text


# ------------------------------------------------------------------------------ before a run begins
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_groups_of_one_are_refused_before_anything_runs(advantage, tmp_path, capsys):
    arguments = ["run=toy", f"algorithm.advantage={advantage}", f"output_dir={tmp_path}"]
    assert cli.main(["train", *arguments]) == 2
    text = capsys.readouterr().err
    for part in ("rl.group_size=1", f"algorithm.advantage={advantage}", "rl.group_size=8"):
        assert part in text, text
    assert not list(tmp_path.iterdir())
    check_run(compose([*arguments, "rl.group_size=2"]))
    check_run(compose([*arguments, "phases=[collect,sft]"]))  # nothing is learned online


def test_a_virtual_sample_joins_groups_of_one():
    check_run(compose(["run=toy", "algorithm.advantage=grpo", "algorithm.virtual_best=always"]))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["reward=process"], ["reward.type=process", "rl.fallback=none"]),
        (["reward=srpo"], ["reward.type=srpo", "reward=success"]),
        (
            ["algorithm.advantage=grpo", "rl.group_size=4", "rl.dynamic_sampling=true"],
            ["rl.dynamic_sampling_by=reward"],
        ),
        (["rl.fallback_reward.shaping.mode=potential"], ["mode=potential", "delta"]),
        (["rl.fallback_reward.updats=3"], ["rl.fallback_reward.updats", "updates"]),
        (["checkpoint=some/where"], ["dataset=FOLDER", "rl.fallback_reward.checkpoint=FOLDER"]),
        (["reward_check.demonstrations=0"], ["reward_check.demonstrations", "dataset=FOLDER"]),
    ],
)
def test_a_fallback_that_cannot_work_is_refused(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        check_run(compose(["run=toy", "rl.fallback=progress", *overrides]))
    assert all(part in str(caught.value) for part in ["rl.fallback", *parts]), caught.value


def test_a_fallback_that_can_work_is_not(tmp_path):
    check_run(compose(["run=toy", "rl.fallback=progress"]))
    check_run(
        compose(["run=toy", "rl.fallback=progress", "checkpoint=some/where", "dataset=some/data"])
    )
    check_run(
        compose(
            [
                "run=toy",
                "rl.fallback=progress",
                "checkpoint=a",
                "rl.fallback_reward.checkpoint=outputs/process",
            ]
        )
    )


def test_filtered_cloning_reads_no_rewards():
    config = compose(["run=toy", "algorithm=filtered_bc", "critic=none", "rl.fallback=progress"])
    with pytest.raises(ConfigError, match="filtered_bc reads no rewards"):
        check_run(config)
    config.reward_type = "process"
    assert is_sparse(config) and not is_sparse(compose(["run=toy", "reward=process"]))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rl.guard=maybe", ["rl.guard", "off, warn, stop"]),
        ("rl.fallback=srpo", ["rl.fallback", "none, progress"]),
        ("rl.guard_success=0", ["guard_success"]),
        ("rl.guard_iterations=-1", ["guard_iterations"]),
        ("rl={guard: off, fallback: progress}", ["rl.fallback=progress", "rl.guard=warn"]),
    ],
)
def test_settings_out_of_range_are_named(override, parts):
    with pytest.raises(ConfigError) as caught:
        compose(["run=toy", override])
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_bare_off_in_yaml_is_off():
    assert (
        RLConfig(guard="False").guard == "off"
        and compose(["run=toy", "rl.guard=off"]).rl.guard == "off"
    )
