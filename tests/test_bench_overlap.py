"""`vla-rl bench overlap`: what it compares, and the command with one actor."""

from __future__ import annotations

import json

import pytest

from benchmarks.learning.overlap import DEFAULT, compared, figures_of, measure
from vla_rl import cli
from vla_rl.config import compose
from vla_rl.errors import ConfigError

ONE_ACTOR = [
    "cluster.rollouts=1",
    "slots.workers=0",
    "slots.slots_per_worker=4",
    "rl.episodes_per_iteration=4",
    "collect.episodes_per_task=8",
    "sft.updates=2",
    "env.step_seconds=0",
    "env.step_tail=0",
]


def test_figures_are_those_of_the_iterations_that_count():
    before = {"episodes": 4, "control_steps": 10}
    row = {"time/iteration": 2.0, "time/update": 0.5, "episodes": 12, "control_steps": 50}
    late = row | {
        "cluster/staleness_mean": 1.0,
        "cluster/staleness_max": 2.0,
        "time/iteration": 6.0,
        "episodes": 20,
        "control_steps": 90,
    }
    found = figures_of(before, [row, late])
    assert (found["episodes"], found["control_steps"]) == (16.0, 80.0)
    assert found["episodes_per_second"] == 2.0 and found["update_seconds"] == 1.0
    assert (found["staleness"], found["oldest"]) == (0.5, 2.0)
    other = figures_of(before, [row, late | {"time/iteration": 2.0}])
    told = compared({"turns": [found, found], "overlapped": [other, found]})
    assert (told["ratio"], told["low"], told["high"], told["equal_work"]) == (1.5, 1.0, 2.0, True)
    assert not compared({"turns": [found], "overlapped": [other | {"control_steps": 90.0}]})[
        "equal_work"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=local"], "cluster=local: .* leave it out"),
        (["cluster.max_staleness=1"], "max_staleness=1: .* leave it out"),
        (["algorithm.type=ppo"], "algorithm.type=ppo"),
        (["algorithm.update_seconds=-1"], "algorithm.update_seconds=-1"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        measure(words, 1, 1)


@pytest.mark.slow
def test_the_command_sleeps_as_asked_and_keeps_the_work_equal(tmp_path, capsys):
    pytest.importorskip("ray")
    target = tmp_path / "out.json"
    words = [
        *ONE_ACTOR,
        "algorithm.update_seconds=0.2",
        "--iterations",
        "2",
        "--rounds",
        "1",
        "--json",
        str(target),
    ]
    assert cli.main(["bench", "overlap", *words]) == 0
    found = json.loads(target.read_text())
    turns, overlapped = (found["rounds"][side][0] for side in ("turns", "overlapped"))
    assert (
        turns["update_seconds"] >= 0.4
        and overlapped["update_seconds"] >= 0.4
        and found["update_seconds"] == 0.2
    )
    assert turns["oldest"] == 0 < overlapped["oldest"] <= 2 and found["equal_work"]
    assert turns["control_steps"] == overlapped["control_steps"] and turns["episodes"] == 8
    assert "times the episodes a second" in capsys.readouterr().out


def test_the_default_is_a_run_that_sleeps():
    config = compose(DEFAULT)
    assert (
        config.env.step_seconds > 0
        and config.env.step_tail > 1
        and config.algorithm.learning_rate == 0
    )
