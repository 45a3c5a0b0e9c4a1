"""``vla-rl cluster check``: what each node says, what an iteration takes, and one try of a run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from test_cluster import TOY

from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import open_env
from vla_rl.cli import main
from vla_rl.cluster import worker_context
from vla_rl.cluster.rollout_actor import CutOff
from vla_rl.config import compose
from vla_rl.doctor import cluster
from vla_rl.doctor.machine import FAIL, MISSING, OK
from vla_rl.errors import UserError
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.types import EpisodeSpec

RAY = [*TOY, "cluster=ray"]


def node(name: str, store: int = 1 << 30, **resources: float) -> dict[str, Any]:
    has = {"CPU": 8.0, "object_store_memory": float(store), **resources}
    return {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Resources": has}


def said(**changes: Any) -> dict[str, Any]:
    usual = {"host": "b", "shared": True, "renderer": "", "shm": 2 << 30}
    return usual | {"versions": worker_context.versions()} | changes


def found(answer: Any, **resources: float) -> list[tuple[str, str, str]]:
    nodes = [node("a"), node("b", **resources)]
    checks = cluster.checked_nodes(nodes, {"a": said(host="a"), "b": answer}, Path("/runs"))
    first, *rest = [(c.name, c.status, f"{c.detail} → {c.fix}") for c in checks]
    assert first[:2] == ("node a", OK) and "8 CPUs" in first[2]
    return rest


def test_a_node_that_is_in_order_is_one_line():
    ((name, status, text),) = found(said(), GPU=4.0)
    assert (name, status) == ("node b", OK) and "8 CPUs and 4 GPUs" in text
    assert f"torch {worker_context.versions()['torch']}" in text


@pytest.mark.parametrize(
    "answer, words",
    [
        ("no answer within 60 s", ["could not start there: no answer within 60 s", "install"]),
        (
            said(versions={**worker_context.versions(), "torch": "1.0"}),
            ["b has another torch than this machine: 1.0 there", "Install the same versions"],
        ),
        (said(shared=False), ["does not see what this machine wrote to /runs", "mount"]),
        (said(renderer="libEGL is missing"), ["libEGL is missing", "vla-rl doctor"]),
        (said(shm=64 << 20), ["/dev/shm has 64 MiB", "store of 1 GiB", "--shm-size=2g"]),
    ],
)
def test_a_node_that_is_not_is_named_with_what_to_do(answer, words):
    bad = [text for name, status, text in found(answer) if (name, status) == ("node b", FAIL)]
    assert len(bad) == 1 and all(word in bad[0] for word in words), bad


def test_a_node_reads_the_file_that_the_driver_wrote(tmp_path):
    (tmp_path / "token").write_text("one")
    place = worker_context.WorkerContext.of(compose(TOY), 1)
    answers = [
        cluster.Probe(place, str(tmp_path / name), token).answer()["shared"]
        for name, token in (("token", "one"), ("token", "two"), ("none", "one"))
    ]
    assert answers == [True, False, False]


def test_the_batch_that_is_tried_is_as_small_as_can_be_learned_from():
    def counts(*more: str) -> list[int]:
        config = compose([*RAY, *more])
        return [spec.group_id for spec in cluster.few_episodes(config, "t")]

    assert counts() == [0, 1]
    assert counts("cluster.rollouts=3", "cluster.learners=2") == [0, 1, 2]
    grouped = ["rl.group_size=4", "rl.episodes_per_iteration=8", "cluster.rollouts=5"]
    assert counts(*grouped) == [0] * 4 + [1] * 4


def test_what_an_iteration_takes_of_the_object_store():
    """10 episodes of 24 control steps in chunks of 8 are 3 decisions and a last picture."""
    own = [*RAY, "rl.episodes_per_iteration=10", "rollout.replan_steps=8", "policy.chunk_length=8"]
    assert cluster.iteration_bytes(compose(own), 100.0, 24, 7) == 10 * 4 * 100 + 14
    ahead = compose([*own, "cluster.mode=async"])
    assert cluster.iteration_bytes(ahead, 100.0, 25, 7) == 3 * 10 * 5 * 100 + 14
    small = cluster.smallest(ahead, Path("/x"), 60.0)
    assert (small.cluster.ahead, small.cluster.start_timeout, small.cluster.max_failures) == (
        0,
        60.0,
        1,
    )


@pytest.mark.parametrize("more", [[], ["phases=[random,rl]"]])
def test_a_run_that_has_no_policy_yet_is_tried_with_a_new_one_for_one_decision(more, tmp_path):
    own = compose([*RAY, f"output_dir={tmp_path}", *more])
    small = cluster.smallest(own, tmp_path / "check", 60.0)
    with contextlib.ExitStack() as stack:
        run = Run(small, None, Progress(), {}, stack)
        policy = run.acting(cluster._begun(run, own))
        env = CutOff(open_env(small), 1)
        stack.callback(env.close)
        plan = [EpisodeSpec("reach_red", i, seed=i) for i in range(3)]
        trajectories = RolloutEngine(env, policy, small.rollout).collect(plan).trajectories
    assert [len(t) for t in trajectories] == [1, 1, 1]  # (in one slot, one after the other)
    assert all(t.truncated or t.success for t in trajectories)
    assert not own.run_dir.exists()


def test_what_stands_on_a_ray_that_is_not_there_is_not_tried(tmp_path, monkeypatch, capsys):
    def refused(config: Any) -> Any:
        raise UserError("no cluster of Ray answers there")

    monkeypatch.setattr(cluster, "ray_session", refused)
    file = tmp_path / "found.json"
    words = [*RAY, "cluster.address=10.0.0.1:6379", f"output_dir={tmp_path / 'runs'}"]
    assert main(["cluster", "check", *words, "--json", str(file)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "✗ ray           no cluster of Ray answers there"
    assert out[1] == "not in order: ray"
    assert [c["status"] for c in json.loads(file.read_text())] == ["fail"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words, message",
    [(TOY, "this one has cluster=local: add cluster=ray"), ([*RAY, "--limit", "5"], "10 to 86400")],
)
def test_what_cannot_be_checked_is_said(words, message, capsys):
    assert main(["cluster", "check", *words]) == 2
    assert message in capsys.readouterr().err


def test_of_a_hybrid_cluster_not_every_node_must_draw():
    nodes = [node("a"), node("b")]
    answers = {"a": said(host="a", renderer="libEGL is missing"), "b": said()}

    def statuses(drawing: int) -> list[str]:
        return [c.status for c in cluster.checked_nodes(nodes, answers, Path("/runs"), drawing)]

    assert statuses(0) == statuses(2) == [OK, FAIL, OK] and statuses(1) == [OK, MISSING, OK]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_two_ranks_is_tried_and_leaves_nothing(ray_here, tmp_path):
    """The iteration that this run wants does not fit into the test session's object store."""
    own = [*RAY, "cluster.learners=2", f"output_dir={tmp_path}", "rl.episodes_per_iteration=20000"]
    checks = {c.name: c for c in cluster.check_run_on_cluster(compose(own), 300.0)}
    assert [n for n, c in checks.items() if c.status == FAIL] == ["object store"]
    assert "the nodes keep 100 MiB" in checks["object store"].detail
    assert [*checks][-2:] == ["all-reduce", "update"] and "2 ranks over gloo" in (
        checks["all-reduce"].detail
    )
    assert checks["rollout"].detail.startswith("2 episodes of one decision each")
    assert not [*tmp_path.iterdir()]
