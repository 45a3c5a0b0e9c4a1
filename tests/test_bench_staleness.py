"""`vla-rl bench staleness`: whose weights act, and the command on the toy task."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.learning.staleness import Cell, StaleCollector, means, text
from vla_rl import cli
from vla_rl.config import compose
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline

TOY = [
    "run=toy",
    "collect.episodes_per_task=20",
    "sft.updates=10",
    "slots.slots_per_worker=16",
    "rl.episodes_per_iteration=16",
    "algorithm.critic_warmup_iterations=0",
    "algorithm.epochs=1",
    "rl.iterations=3",
    "evaluate.episodes_per_task=8",
    "evaluate.video_episodes=0",
]


@pytest.mark.parametrize(("lag", "acted"), [(0, [0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2])])
def test_episodes_act_with_the_weights_of_lag_iterations_ago(lag, acted):
    learner, actor, versions = (
        torch.nn.Linear(1, 1, bias=False),
        torch.nn.Linear(1, 1, bias=False),
        [],
    )
    engine = SimpleNamespace(
        policy=actor, publish=versions.append, collect=lambda plan: actor.weight.item()
    )
    collector = StaleCollector(engine, learner, lag)
    seen = []
    for iteration in range(5):
        with torch.no_grad():
            learner.weight.fill_(float(iteration))
        collector.publish(iteration)
        seen.append(collector.collect([]))
    assert (
        seen == versions == acted and collector.policy is learner and learner.weight.item() == 4.0
    )


@pytest.mark.slow
def test_the_command_trains_each_way_at_each_lag(tmp_path, capsys):
    """At lag 0 it is the plain run: same episodes, same success. With lag, and only then,
    another policy has acted."""
    target = tmp_path / "out.json"
    options = [
        "--lags",
        "0",
        "2",
        "--ways",
        "none",
        "truncate",
        "coupled",
        "vtrace",
        "--seeds",
        "1",
        "--json",
        str(target),
    ]
    assert cli.main(["bench", "staleness", *TOY, *options]) == 0
    found = json.loads(target.read_text())
    cells = {(c["lag"], c["way"]): c for c in found["cells"]}
    assert list(cells) == [(0, "none"), (2, "none"), (2, "truncate"), (2, "coupled"), (2, "vtrace")]
    assert all(
        c["seed"] == 1 and c["episodes"] == 8 and c["success"] == c["successes"] / 8
        for c in cells.values()
    )
    assert (
        abs(cells[0, "none"]["behavior_kl"]) < 1e-9 and cells[2, "coupled"]["behavior_kl"] is None
    )
    assert cells[2, "none"]["behavior_kl"] > 1e-6 and cells[2, "truncate"]["behavior_kl"] > 1e-6
    assert (
        found["command"].startswith("vla-rl bench staleness run=toy") and found["iterations"] == 3
    )
    plain = run_pipeline(compose([*TOY, "seed=1", f"output_dir={tmp_path}"]))
    for name, success in (("sft", found["start"]["1"]), ("rl", cells[0, "none"]["success"])):
        assert json.loads((plain / f"eval_{name}.json").read_text())["total"]["rate"] == success
    assert (
        max(
            abs(r["ppo/behavior_kl"])
            for r in read_metrics(plain / "metrics.jsonl")
            if r["phase"] == "rl"
        )
        < 1e-9
    )
    assert "lag 2, truncate" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_lag_and_way():
    cells = [
        Cell(8, "none", 0, 1, 4, 0.5, 1.0),
        Cell(8, "mask", 0, 2, 4, None, 1.0),
        Cell(8, "none", 1, 3, 4, 0.7, 1.0),
    ]
    rows = means(cells)
    assert [(r["lag"], r["way"], r["success"], r["mean"]) for r in rows] == [
        (8, "none", [0.25, 0.75], 0.5),
        (8, "mask", [0.5], 0.5),
    ]
    assert rows[0]["behavior_kl"] == pytest.approx(0.6) and rows[1]["behavior_kl"] is None
    told = text(
        {"overrides": ["run=toy"], "iterations": 3, "start": {"0": 0.1, "1": 0.2}, "table": rows}
    )
    assert told.splitlines()[2].split() == ["8", "none", "50%", "25%", "75%", "0.600"]
    assert told.splitlines()[3].split()[-1] == "–"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["algorithm=filtered_bc"], "algorithm"),
        (["run=toy", "phases=[rl]", "checkpoint=some/where"], "name a run with both"),
        (["--lags", "-1"], "--lags -1: give 0 or more"),
    ],
)
def test_what_cannot_be_benched_is_named(arguments, part, capsys):
    assert cli.main(["bench", "staleness", *arguments]) == 2
    assert part in capsys.readouterr().err
