"""Learner ranks as actors of Ray: together they learn what the driver would, and a dead one
costs a restart."""

from __future__ import annotations

import itertools
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_cluster import TOY, start  # noqa: F401 - a fixture

from vla_rl.checks.options import check_run
from vla_rl.cluster import pulse
from vla_rl.cluster.learner import GroupLearner
from vla_rl.cluster.rank_group import RankLost
from vla_rl.cluster.session import alive_nodes
from vla_rl.config import compose
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.learners import BatchLearner
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline
from vla_rl.spread import merge


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_learn_what_the_driver_would_and_one_may_die(
    ray_here,
    start,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Four iterations; of the two ranks one is killed in the third. With a checkpoint after each,
    nothing is lost.

    Both learn from the episodes of the run without ranks. Ranks add in another order, so weights
    differ by rounding; on some processors that was enough for one token to be drawn otherwise, and
    the episodes after it were others.
    """
    own = [
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "rl.episodes_per_iteration=8",
        f"output_dir={tmp_path}",
    ]
    own += ["critic=none", "algorithm.advantage=rloo", "rl.group_size=4", "rl.iterations=4"]
    # (of small steps: how far rounding carries the two apart grows with them)
    own += ["algorithm.critic_warmup_iterations=0", "algorithm.learning_rate=1e-4"]
    own += ["policy.precision=float32"]  # (a processor with bfloat16 would use it)
    told, batches = [], []
    of_ranks, of_one = GroupLearner.learn, BatchLearner.learn

    def recorded(self, *batch):
        batches.append(batch)
        return of_one(self, *batch)

    def learn(self, *batch):
        told.append(list(self.pids))
        if len(told) == 3:
            self.settle()  # a rank that is lost while it writes costs that checkpoint
            os.kill(self.pids[1], signal.SIGKILL)
        return of_ranks(self, *batches[len(told) - 1])

    monkeypatch.setattr(BatchLearner, "learn", recorded)
    monkeypatch.setattr(GroupLearner, "learn", learn)
    alone = run_pipeline(compose([*own, "name=alone"]))
    together = run_pipeline(compose([*own, "name=two", "cluster=ray", "cluster.learners=2"]))
    assert len(batches) == len(told) == 4
    assert told[1] == told[0] and not {*told[3]} & {*told[2]}  # both are others now
    rows = [
        [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
        for folder in (alone, together)
    ]
    assert [row["cluster/learner_restarts"] for row in rows[1]] == [0, 0, 1, 0]
    assert rows[0][0]["rollout/success"] == rows[1][0]["rollout/success"]
    for a, b in zip(*rows, strict=True):
        for name in ("ppo/policy_loss", "ppo/grad_norm", "ppo/updates_total", "episodes"):
            assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-5), name
    merge(together / "checkpoints" / "rl", tmp_path / "merged")  # (the ranks wrote their parts)
    weights = [
        load_file(folder / "model.safetensors")
        for folder in (alone / "checkpoints" / "rl", tmp_path / "merged")
    ]
    assert weights[0].keys() == weights[1].keys()
    begun = load_file(start / "model.safetensors")
    moved = (
        sum(
            float((weights[0][name] - x).square().sum())
            for name, x in begun.items()
            if x.is_floating_point()
        )
        ** 0.5
    )
    apart = (
        sum(float((x - weights[1][name]).double().square().sum()) for name, x in weights[0].items())
        ** 0.5
    )
    assert apart < 0.02 * moved
    assert all(bool(torch.isfinite(x).all()) for x in weights[1].values())


class FakeRay:
    """Actors are lists of what their calls do: "answers", "silent"."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=ZeroDivisionError)

    def __init__(self, *nodes: str) -> None:
        self.alive = set(nodes)

    def nodes(self):
        return [{"NodeID": name, "Alive": True} for name in self.alive]

    def wait(self, references, num_returns=1, timeout=None):
        return [r for r in references if r[1] == "answers"][:num_returns], []


def rank(update: str, beat: str):
    def call(name, does):
        return SimpleNamespace(remote=lambda *_: (name, does), options=lambda **_: call(name, does))

    return SimpleNamespace(update=call("update", update), beat=call("beat", beat))


def learner_of_ranks(ray, *ranks, most: int = 3) -> GroupLearner:
    learner = GroupLearner.__new__(GroupLearner)
    cluster = SimpleNamespace(hang_timeout=30.0, max_failures=most)
    learner._ray, learner._actors, learner._hello = ray, list(ranks), []
    learner._run = SimpleNamespace(
        config=SimpleNamespace(cluster=cluster), progress=SimpleNamespace(say=lambda text: None)
    )
    learner._failures = learner.restarts = learner._made = learner._kept = 0
    learner._saving, learner._folder = None, ""
    learner._nodes = alive_nodes(ray)
    return learner


@pytest.mark.parametrize(
    "ranks", [[("silent", "silent")], [("silent", "answers"), ("silent", "silent")]]
)
def test_a_rank_that_stands_still_is_noticed_in_an_update_of_any_length(monkeypatch, ranks):
    """One alone has no peers that would give up on it. Time is played: 2 s each time that it is asked for."""
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    learner = learner_of_ranks(FakeRay("a"), *(rank(*does) for does in ranks))
    with pytest.raises(
        RankLost, match=r"gave no sign of life for 30 s \(cluster.hang_timeout\) in update"
    ) as caught:
        learner._all("update", limit=math.inf)
    assert caught.value.index == len(ranks) - 1 and next(clock) < 100


def test_a_lost_node_is_one_failure_whatever_dies_with_it(monkeypatch):
    """The peer's connection ends first; the new rank is put where it was, which fails once Ray
    knows; the third is good."""
    ray = FakeRay("a", "b")
    learner = learner_of_ranks(ray, most=2)
    begun = iter([RankLost(0, "the node died"), None])

    def begin() -> None:
        ray.alive.discard("b")
        if (lost := next(begun)) is not None:
            raise lost

    monkeypatch.setattr(learner, "_begin", begin)
    monkeypatch.setattr(learner, "_load", lambda: None)
    monkeypatch.setattr(learner, "_end", lambda: None)
    learner._restart(RankLost(1, "gloo: closed by peer"))
    assert learner._failures == 1 and learner.restarts == 2
    with pytest.raises(UserError, match=r"failed 2 times in a row \(cluster.max_failures=2\)"):
        learner._restart(RankLost(0, "no node is lost now"))


def test_a_replay_has_one_learner():
    with pytest.raises(ConfigError, match=r"cluster\.learners=2: .* learns from a replay"):
        check_run(compose(["run=residual_quickstart", "cluster=ray", "cluster.learners=2"]))
