"""Learner ranks as actors of Ray: together they learn what the driver would, and a dead one costs a restart."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from test_cluster import TOY, start  # noqa: F401 - a fixture

from vla_rl.cluster.learner import GroupLearner
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.learning.learners import BatchLearner
from vla_rl.reporting.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline
from vla_rl.run.preflight import check_run


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_learn_what_the_driver_would_and_one_may_die(ray_here, start, tmp_path, monkeypatch):  # noqa: F811
    """Four iterations; of the two ranks one is killed in the third. With a checkpoint after each, nothing is lost.

    Both learn from the episodes of the run without ranks. Ranks add in another order, so weights differ by rounding; on some
    processors that was enough for one token to be drawn otherwise, and the episodes after it were others.
    """
    own = [*TOY, "phases=[rl]", f"checkpoint={start}", "rl.episodes_per_iteration=8", f"output_dir={tmp_path}"]
    own += ["critic=none", "algorithm.advantage=rloo", "rl.group_size=4", "rl.iterations=4"]
    own += ["algorithm.critic_warmup_iterations=0"]
    told, batches = [], []
    of_ranks, of_one = GroupLearner.learn, BatchLearner.learn

    def recorded(self, *batch):
        batches.append(batch)
        return of_one(self, *batch)

    def learn(self, *batch):
        told.append(list(self.pids))
        if len(told) == 3:
            os.kill(self.pids[1], signal.SIGKILL)
        return of_ranks(self, *batches[len(told) - 1])

    monkeypatch.setattr(BatchLearner, "learn", recorded)
    monkeypatch.setattr(GroupLearner, "learn", learn)
    alone = run_pipeline(compose([*own, "name=alone"]))
    together = run_pipeline(compose([*own, "name=two", "cluster=ray", "cluster.learners=2"]))
    assert len(batches) == len(told) == 4
    assert told[1] == told[0] and not {*told[3]} & {*told[2]}  # both are others now
    rows = [[r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"] for folder in (alone, together)]
    assert [row["cluster/learner_restarts"] for row in rows[1]] == [0, 0, 1, 0]
    assert rows[0][0]["rollout/success"] == rows[1][0]["rollout/success"]
    for a, b in zip(*rows, strict=True):
        for name in ("ppo/policy_loss", "ppo/grad_norm", "ppo/updates_total", "episodes"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    weights = [load_file(folder / "checkpoints" / "rl" / "model.safetensors") for folder in (alone, together)]
    assert weights[0].keys() == weights[1].keys()
    begun = load_file(start / "model.safetensors")
    moved = sum(float((weights[0][name] - x).square().sum()) for name, x in begun.items() if x.is_floating_point()) ** 0.5
    apart = sum(float((x - weights[1][name]).double().square().sum()) for name, x in weights[0].items()) ** 0.5
    assert apart < 0.02 * moved
    assert all(bool(torch.isfinite(x).all()) for x in weights[1].values())


def test_a_replay_has_one_learner():
    with pytest.raises(ConfigError, match=r"cluster\.learners=2: .* learns from a replay"):
        check_run(compose(["run=residual_quickstart", "cluster=ray", "cluster.learners=2"]))
