"""Held-out episodes in the rollout actors of a cluster: the same ones, with the same ends."""

from __future__ import annotations

import json

import pytest
from test_cluster import TOY, start  # noqa: F401

from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline


def test_another_place_to_evaluate_is_refused():
    with pytest.raises(ConfigError, match=r"cluster.evaluate.*'actors'.*rollouts, driver"):
        compose([*TOY, "cluster=ray", "cluster.evaluate=actors"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_evaluations_are_equal_episode_by_episode(ray_here, start, tmp_path):  # noqa: F811
    own = [*TOY, f"checkpoint={start}", f"output_dir={tmp_path}", "evaluate.episodes_per_task=8"]
    own += ["evaluate.video_episodes=0", "phases=[eval_sft]"]
    found = {}
    for name, more in {
        "alone": [],
        "driver": ["cluster=ray", "cluster.evaluate=driver"],
        "one": ["cluster=ray"],
        "two": ["cluster=ray", "cluster.rollouts=2"],
    }.items():
        folder = run_pipeline(compose([*own, f"name={name}", *more]))
        found[name] = json.loads((folder / "eval_sft.json").read_text())["outcomes"]
        assert (folder / "cluster.json").exists() == (name in ("one", "two"))
    assert len(found["alone"]) == 8 and found["driver"] == found["one"] == found["alone"]
    ends = [
        [(o["task_id"], o["init_state_id"], o["success"]) for o in found[name]]
        for name in ("alone", "two")
    ]
    assert ends[0] == ends[1]  # (in other batches numbers round otherwise)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_learned_is_evaluated_in_the_actors_with_the_weights_of_then(
    ray_here,
    start,  # noqa: F811
    tmp_path,
):
    own = [*TOY, "phases=[rl]", f"checkpoint={start}", f"output_dir={tmp_path}"]
    own += ["rl.iterations=2", "rl.episodes_per_iteration=8", "rl.eval_every=1"]
    own += ["evaluate.episodes_per_task=40", "algorithm.critic_warmup_iterations=0"]
    rows = []
    for name, more in {"alone": [], "ray": ["cluster=ray"]}.items():
        folder = run_pipeline(compose([*own, f"name={name}", *more]))
        rows.append([r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"])
    kept = [
        [{k: v for k, v in row.items() if k.startswith("eval/")} for row in side] for side in rows
    ]
    assert kept[0] == kept[1] and [*kept[0][1]] == ["eval/success"]
