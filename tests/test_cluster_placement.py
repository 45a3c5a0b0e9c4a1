"""Where the actors of a run are: bundles by hand, the automatic choice against worked-out times,
and two nodes of Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cluster import TOY, start  # noqa: F401 - a fixture

from benchmarks.learning.strikes import Nodes
from vla_rl.checks import cluster as checks
from vla_rl.checks.options import check_run
from vla_rl.checks.preflight import check
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.placement import Amount, Group, arranged, choices, resolved
from vla_rl.cluster.times import measured
from vla_rl.config import RunConfig, compose
from vla_rl.errors import ConfigError, UserError
from vla_rl.monitoring.metrics import read_metrics

GPUS, CPUS = Amount(96, 8), Amount(32)  # a node with, and one without
SIXTEEN = (Amount(64, 16),)


def placed(*words: str, device: str = "auto") -> RunConfig:
    return compose(
        [*TOY, "cluster=ray", f"device={device}", *(f"cluster.{word}" for word in words)]
    )


def seats(config: RunConfig, *nodes: Amount) -> dict[str, list[tuple]]:
    """Role → (group, bundle, CPUs, GPUs) of each actor."""
    found = arranged(config, nodes).seats
    return {
        r: [(s.group, s.bundle, s.amount.cpus, s.amount.gpus) for s in own]
        for r, own in found.items()
        if own
    }


def bundles(config: RunConfig, *nodes: Amount) -> list[tuple[str, Counter]]:
    return [
        (g.strategy, Counter((b.cpus, b.gpus) for b in g.bundles))
        for g in arranged(config, nodes).groups
    ]


PAGE = (Path(__file__).parent.parent / "docs" / "how_to" / "cluster.md").read_text(encoding="utf-8")


def launches() -> list[list[str]]:
    """The words of every command of the page that joins a cluster, those inside of scripts and
    YAML too."""
    blocks = [block.partition("\n")[2] for block in PAGE.split("```")[1::2]]
    text = re.sub(r"\\\n\s*|\n\s+(?=cluster\.)", " ", "\n".join(blocks))
    found = re.findall(r"vla-rl train (.*cluster\.address=auto.*)", text)
    return [line.split(" #")[0].split() for line in found]


def test_the_launches_of_the_page_put_every_model_on_a_gpu_of_its_own():
    """On four nodes with eight GPUs, and sixteen without for simulators."""
    assert len(launches()) >= 5
    for words in launches():
        if "cluster.placement=auto" in words:
            continue
        config = compose(words)
        found = arranged(config, [*[Amount(96, 8)] * 4, *[Amount(64)] * 16]).seats
        models = ["learner", "inference" if config.cluster.inference else "rollout"]
        parts = [seat.amount.gpus for role in models for seat in found[role]]
        shared = 2 if config.cluster.placement == "colocated" else 1
        assert parts and all(part == 1 / shared for part in parts), words


def test_the_kuberay_file_is_one_that_its_operator_takes():
    """What ValidateRayClusterSpec of KubeRay 1.5.1 asks for (authOptions need a rayVersion, a group
    its containers and counts), and what Ray needs in a pod: GPUs as limits equal to requests, one
    volume, memory for objects."""
    yaml = pytest.importorskip("yaml")
    block = next(b.partition("\n")[2] for b in PAGE.split("```")[1::2] if "kind: RayJob" in b)
    spec = yaml.safe_load(block)["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"].split(".")[:2] >= [
        "2",
        "52",
    ]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"runs": "/runs", "shm": "/dev/shm"} and {
            v["name"] for v in pod["volumes"]
        } == {*mounted}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (
        workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
        and workers["groupName"]
    )
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (
        groups[0]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
        and limits["nvidia.com/gpu"] == "8"
    )
    config = compose(spec["entrypoint"].removeprefix("vla-rl train ").split())
    node = Amount(float(limits["cpu"]), float(limits["nvidia.com/gpu"]))
    arranged(config, [Amount(), *[node] * workers["replicas"]])


# ------------------------------------------------------------------------------------ by arithmetic
def test_without_a_placement_each_actor_reserves_what_it_says_and_no_more():
    config = placed("rollouts=2", "rollout_cpus=3", "learners=1", device="cpu")
    assert seats(config, GPUS) == {
        "rollout": [(None, 0, 3.0, 0.0)] * 2,
        "learner": [(None, 0, 0.0, 0.0)],
    }
    assert arranged(config, [GPUS]).groups == ()
    numbered = placed("rollouts=2", device="cuda:1")  # (who names a GPU means it)
    assert seats(numbered, GPUS) == {"rollout": [(None, 0, 0.0, 0.0)] * 2}


@pytest.mark.parametrize(
    ("words", "gpus", "learner", "inference", "rollout"),
    [
        ("rollouts=4", (8,) * 4, [], [], [1.0] * 4),
        ("rollouts=4", (1,), [], [], [0.25] * 4),
        # two on each of three, for 4/6 of a GPU fits once on each
        ("rollouts=6", (4,), [], [], [0.5] * 6),
        ("rollouts=8 learners=4", (8,), [1.0] * 4, [], [0.5] * 8),
        ("rollouts=4 learners=1", (1,), [0.2], [], [0.2] * 4),
        ("rollouts=4 learners=1", (2,), [1.0], [], [0.25] * 4),
        ("rollouts=16 inference=3 learners=1", (8,), [1.0], [1.0] * 3, [0.0] * 16),
        ("rollouts=4 rollout_gpus=0.25 learners=1", (2,), [1.0], [], [0.25] * 4),
        ("rollouts=2 learners=2 learner_gpus=1", (4,), [1.0] * 2, [], [1.0] * 2),
    ],
)
def test_on_gpus_a_model_that_says_nothing_has_its_part_of_one(
    words, gpus, learner, inference, rollout
):
    """An actor that reserves no GPU sees all of its node, and its model is on the first: every
    model would be there."""
    found = arranged(placed(*words.split()), [Amount(64, n) for n in gpus]).seats
    parts = [
        [seat.amount.gpus for seat in found[role]] for role in ("learner", "inference", "rollout")
    ]
    assert parts == [learner, inference, rollout]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        # the CPUs of one actor are of one node
        ("rollouts=1 rollout_cpus=8", (Amount(4), Amount(4))),
        ("rollouts=3 rollout_cpus=3", (Amount(4), Amount(4))),
        ("rollouts=3 rollout_gpus=0.6", (Amount(64, 2),)),  # a part is of one GPU
        ("rollouts=1 rollout_gpus=2", (Amount(64, 1), Amount(64, 1))),
        ("rollouts=8 learners=4", (Amount(64, 4),)),  # no GPU is left to act on
        ("rollouts=8 learners=4", (Amount(64, 2),)),
    ],
)
def test_what_no_node_has_is_refused_at_once(words, nodes):
    with pytest.raises(UserError, match=r"the cluster is too small for cluster\.placement=free"):
        arranged(placed(*words.split()), nodes)


def test_parts_that_fit_are_not_refused():
    for words, nodes in (
        ("rollouts=2 rollout_cpus=4", (Amount(4), Amount(4))),
        ("rollouts=2 rollout_gpus=0.6", (Amount(64, 2),)),
        ("rollouts=4 rollout_gpus=0.5", (Amount(64, 2),)),
        ("rollouts=1 rollout_gpus=2", (Amount(64, 1), Amount(64, 2))),
    ):
        arranged(placed(*words.split()), nodes)
    with pytest.raises(ConfigError, match=r"cluster.rollout_gpus=1.5: an actor has whole GPUs"):
        placed("rollout_gpus=1.5")


def test_the_example_of_a_hybrid_on_eighteen_nodes():
    config = placed(
        "placement=hybrid", "learners=8", "inference=8", "env_nodes=16", "rollout_cpus=32"
    )
    assert config.cluster.rollouts == 16  # one on each
    nodes = [CPUS] * 16 + [GPUS] * 2
    assert bundles(config, *nodes) == [("STRICT_SPREAD", Counter({(0.0, 8.0): 2, (32.0, 0.0): 16}))]
    found = seats(config, *nodes)
    assert (
        found["learner"] == [(0, 0, 0.0, 1.0)] * 8 and found["inference"] == [(0, 1, 0.0, 1.0)] * 8
    )
    assert found["rollout"] == [(0, 2 + i, 32.0, 0.0) for i in range(16)]
    asked = r"too small for cluster\.placement=hybrid: 8 learner ranks \(cluster\.learners\) with 1 GPU each, .*"
    asked += r"16 rollout actors .*32 CPUs each; .*16 nodes of their own"
    there = r"Its nodes: 2 with 96 CPUs and 8 GPUs, 15 with 32 CPUs\. .*cluster\.rollout_cpus"
    with pytest.raises(UserError, match=f"{asked} .*{there}"):
        arranged(config, nodes[1:][::-1])


def test_a_hybrid_shares_nodes_among_models_alone():
    """Three ranks and two servers are on one node with GPUs, five rollout actors on two others:
    three and two."""
    config = placed(
        "placement=hybrid",
        "learners=3",
        "inference=2",
        "env_nodes=2",
        "rollouts=5",
        "rollout_cpus=8",
    )
    found = seats(config, CPUS, GPUS, CPUS)
    assert {bundle for _, bundle, *_ in found["learner"] + found["inference"]} == {0}
    assert [bundle for _, bundle, *_ in found["rollout"]] == [1, 2, 1, 2, 1]
    assert bundles(config, CPUS, GPUS, CPUS)[0][1] == Counter(
        {(0.0, 5.0): 1, (24.0, 0.0): 1, (16.0, 0.0): 1}
    )
    with pytest.raises(UserError, match="too small"):
        arranged(config, [GPUS, GPUS])  # there would be room, but not on nodes of their own
    with pytest.raises(UserError, match="too small"):
        arranged(config, [CPUS, GPUS, Amount(15)])


def test_colocated_actors_divide_the_device_of_their_rank():
    config = placed("placement=colocated", "learners=2", "rollouts=4", "rollout_cpus=2")
    # a GPU, and CPUs for two simulators
    assert bundles(config, GPUS) == [("PACK", Counter({(4.0, 1.0): 2}))]
    found = seats(config, GPUS)
    # no more than a third, in Ray's ten thousandths
    assert found["learner"] == [(0, 0, 0.0, 0.3333), (0, 1, 0.0, 0.3333)]
    assert found["rollout"] == [(0, i % 2, 2.0, 0.3333) for i in range(4)]
    served = seats(
        placed(
            "placement=colocated", "learners=2", "inference=2", "rollouts=4", "reward_workers=1"
        ),
        GPUS,
    )
    assert served["inference"] == [(0, 0, 0.0, 0.5), (0, 1, 0.0, 0.5)]
    # where the one that acts for it is
    assert served["rollout"] == [(0, i % 2, 1.0, 0.0) for i in range(4)]
    assert served["reward"] == [(0, 0, 1.0, 0.0)]
    alone = placed("placement=colocated", "learners=2", "rollouts=2", device="cpu")
    assert bundles(alone, GPUS) == [("PACK", Counter({(1.0, 0.0): 2}))]
    assert seats(alone, GPUS) == {
        role: [(0, 0, 0.5, 0.0), (0, 1, 0.5, 0.0)] for role in ("learner", "rollout")
    }
    with pytest.raises(UserError, match="each rank shares its device with those that act"):
        arranged(alone, [Amount(1)])


def test_disaggregated_actors_have_devices_of_their_own():
    config = placed("placement=disaggregated", "learners=6", "rollouts=2", "rollout_cpus=16")
    assert bundles(config, GPUS) == [
        ("PACK", Counter({(0.0, 1.0): 6})),
        ("PACK", Counter({(16.0, 1.0): 2})),
    ]
    found = seats(config, GPUS)
    assert [s[:2] for s in found["learner"]] == [(0, i) for i in range(6)]
    assert [s[:2] for s in found["rollout"]] == [(1, 0), (1, 1)]
    with pytest.raises(UserError, match="7 learner ranks"):  # nine GPUs
        arranged(placed("placement=disaggregated", "learners=7", "rollouts=2"), [GPUS])
    apart = placed("placement=disaggregated", "learners=1", "rollouts=1", "rollout_cpus=20")
    with pytest.raises(UserError, match="too small"):  # 31 CPUs in all, and no node with 20
        arranged(apart, [Amount(16), Amount(15)])
    assert bundles(apart, Amount(20), Amount(1)) == [
        ("PACK", Counter({(1.0, 0.0): 1})),
        ("PACK", Counter({(20.0, 0.0): 1})),
    ]


def test_parts_of_a_cpu_are_whole_again():
    config = placed(
        "placement=disaggregated",
        "learners=7",
        "learner_cpus=0.1",
        "rollouts=1",
        "rollout_cpus=0.3",
    )
    assert arranged(config, [Amount(1.0)]).groups[1] == Group("PACK", (Amount(0.3),))


# ------------------------------------------------------------------------------------------- errors
def test_a_cluster_that_is_too_small_is_named_before_anything_begins(monkeypatch):
    monkeypatch.setattr(checks, "available_cores", lambda: 2)
    asked = r"cluster\.placement=free: 3 rollout actors \(cluster\.rollouts\) with 200 CPUs and 1 GPU each\."
    with pytest.raises(UserError, match=f"{asked} Its nodes: 1 with 2 CPUs"):
        check(placed("rollouts=3", "rollout_cpus=200", "rollout_gpus=1", device="cpu"))
    checks.check_room(placed("rollouts=3"))
    with pytest.raises(UserError, match=r"cluster\.placement=colocated: 3 learner ranks"):
        checks.check_room(placed("placement=colocated", "learners=3", device="cpu"))
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]

    @contextlib.contextmanager
    def joined(config):
        assert config.address == "head:6379"
        yield type("Ray", (), {"nodes": lambda self: nodes})()

    monkeypatch.setattr(checks, "ray_session", joined)
    with pytest.raises(UserError, match=r"Its nodes: 1 with 4 CPUs\."):  # of those that live
        checks.check_room(placed("rollouts=2", "rollout_cpus=3", "address=head:6379", device="cpu"))


# ---------------------------------------------------------------------------------------- automatic
def times_file(folder, **seconds: float) -> str:
    path = folder / "times.json"
    path.write_text(json.dumps({"chunk": [1e-6], "decisions": [3], "act_row": 0.01, **seconds}))
    return str(path)


def chosen(path: str, *words: str, nodes=SIXTEEN, device: str = "auto"):
    config = compose(
        [
            *TOY,
            "cluster=ray",
            f"device={device}",
            "rl.episodes_per_iteration=256",
            "cluster.placement=auto",
            f"cluster.times={path}",
            *words,
        ]
    )
    return config, *resolved(config, nodes)


def test_the_split_is_where_both_sides_work(tmp_path):
    """Learning an episode takes 90 ms of a device and acting 30 ms (three decisions of 10 ms),
    simulators are free: of 16 devices that overlap a quarter acts, and a little more as ranks lose
    speed together."""
    path = times_file(tmp_path, update=0.09)
    _, c, why = chosen(path, "cluster.mode=async")
    assert (c.placement, c.inference, c.env_nodes) == ("disaggregated", 0, 0)
    assert c.rollouts + c.learners == 16 and c.rollouts in (3, 4, 5)
    assert (
        f"disaggregated ({c.learners} learner ranks, {c.rollouts} rollout actors)" in why
        and path in why
    )
    assert "busiest learning" in why or "busiest acting" in why


def test_by_turns_all_devices_do_both(tmp_path):
    """By turns four devices need 256 · (0.03 + 0.09) / 4 s and what the ranks lose; any split
    needs more, and is named."""
    config, c, why = chosen(times_file(tmp_path, update=0.09), nodes=[Amount(32, 2)] * 2)
    assert (c.placement, c.learners, c.rollouts) == ("colocated", 4, 4)
    assert why.index("colocated") < why.index("; others: disaggregated (")
    found = choices(config, measured(tmp_path / "times.json", config), [Amount(32, 2)] * 2)
    assert found[0].outcome.seconds == pytest.approx(256 * (0.03 + 0.09 / 0.95**2) / 4, rel=0.01)


def test_nodes_without_gpus_simulate_where_simulators_are_slow(tmp_path):
    """A decision is 1 s of a simulator on one of two cores beside each GPU, or on one of 64
    elsewhere."""
    path = times_file(tmp_path, chunk=[1.0], update=0.001)
    nodes = [Amount(2, 2), *[Amount(32)] * 2]
    words = ["slots.workers=1", "slots.slots_per_worker=8", "cluster.mode=pipelined"]
    _, c, why = chosen(path, *words, nodes=nodes)
    assert (c.placement, c.env_nodes, c.rollouts, c.learners, c.inference) == (
        "hybrid",
        2,
        64,
        1,
        1,
    )
    assert why.startswith(
        "hybrid (1 learner rank, 1 inference actor, 64 rollout actors on 2 nodes)"
    )
    assert "busiest simulators; others: disaggregated (1 learner rank, 1 rollout actor)" in why
    _, c, _ = chosen(path, *words, nodes=nodes, device="cpu")  # then all nodes are alike
    assert c.placement == "disaggregated" and c.rollouts + c.learners == 66
    _, c, why = chosen(path, *words, nodes=[Amount(2, 2)])
    assert c.placement == "disaggregated" and why.endswith("nothing else fits")


def test_nothing_is_chosen_without_times_or_room(tmp_path):
    with pytest.raises(
        UserError,
        match=r"vla-rl train \.\.\. cluster=ray cluster\.placement=free .* cluster\.times=",
    ):
        check_run(placed("placement=auto"))
    with pytest.raises(UserError, match="gone"):
        checks.check_room(placed("placement=auto", f"times={tmp_path / 'gone'}"))
    with pytest.raises(UserError, match=r"too small for cluster\.placement=auto: its nodes, 1 CPU"):
        chosen(times_file(tmp_path, update=1.0), "cluster.mode=pipelined", nodes=[Amount(1)])
    with pytest.raises(ConfigError, match=r"cluster\.placement=auto: .* learns from a replay"):
        check_run(compose(["run=residual_quickstart", "cluster=ray", "cluster.placement=auto"]))


def test_what_was_chosen_is_what_its_times_are_of(tmp_path):
    from test_cluster_plan import recorded

    from vla_rl import config as configs

    folder = recorded(tmp_path / "run")
    config = configs.load(folder / "config.yaml")
    cluster = placed("placement=auto", "times=x").cluster
    configs.save(
        dataclasses.replace(config, cluster_type="ray", cluster=cluster), folder / "config.yaml"
    )
    numbers = {
        "placement": "disaggregated",
        "rollouts": 3,
        "learners": 2,
        "inference": 0,
        "env_nodes": 0,
    }
    (folder / "cluster.json").write_text(json.dumps({"placement": {"numbers": numbers}}))
    assert (measured(folder).setup.rollouts, measured(folder).setup.learners) == (3, 2)


# ---------------------------------------------------------------------------------------- two nodes
def test_what_a_placement_waits_for_is_said(monkeypatch):
    """Of three bundles of a hybrid the two of the rollout actors are on nodes that are gone."""
    pytest.importorskip("ray")
    config = placed(
        "placement=hybrid",
        "learners=3",
        "inference=2",
        "env_nodes=2",
        "rollouts=3",
        "rollout_cpus=8",
    )
    nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]
    held = Allocation(SimpleNamespace(nodes=lambda: nodes), config, [GPUS, CPUS, CPUS])
    held._groups = ["group"]
    table = {"state": "RESCHEDULING", "bundles_to_node_id": {0: "a", 1: "b", 2: ""}}
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group_table", lambda group: table)
    assert held.because() == "; " + held.missing()
    assert (
        "hybrid waits for one with 16 CPUs and for one with 8 CPUs to spare and none of its actors"
        in held.missing()
    )
    table["state"] = "CREATED"
    assert held.because() == held.missing() == ""


def nodes_by_role(run: Path) -> dict[str, str]:
    """The node of each role's first actor, as far as all have said where they are."""
    try:
        where = json.loads((run / "cluster.json").read_text())["seats"]
    except (OSError, ValueError):
        return {}
    return (
        {seat["role"]: seat["node"] for seat in where}
        if where and all(seat["node"] for seat in where)
        else {}
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_roles_are_where_a_hybrid_wants_them_before_and_after_a_node_is_lost(start, tmp_path):  # noqa: F811
    """Two nodes with a CPU each: rollouts on one, the rank and the one that acts share the other.
    Whichever is lost, its actors come back on the node that takes its place, and no episode is
    lost."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    run = tmp_path / "hybrid"
    with contextlib.ExitStack() as stack:
        nodes = Nodes(environment, stack)
        words = [
            *TOY,
            "phases=[rl]",
            f"checkpoint={start}",
            "rl.episodes_per_iteration=8",
            "rl.iterations=8",
            "env.step_seconds=0.01",
            f"output_dir={tmp_path}",
            "name=hybrid",
            "cluster=ray",
            "cluster.placement=hybrid",
            f"cluster.address={nodes.address}",
            "cluster.env_nodes=1",
            "cluster.inference=1",
            "cluster.inference_cpus=0.5",
            "cluster.learners=1",
            "cluster.learner_cpus=0.5",
        ]
        command = [sys.executable, "-m", "vla_rl", "train", *words]
        log = stack.enter_context((tmp_path / "log").open("w"))
        driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        stack.callback(driver.kill)

        def await_roles(before: set[str]) -> dict[str, str]:
            """Once all are where they belong: on a new node and the one that went on. They come
            back one after the other."""
            deadline = time.monotonic() + 500
            while True:
                found = nodes_by_role(run)
                whole = found.keys() >= {"rollout", "learner", "inference"}
                moved = not before or len({*found.values()} & before) == 1
                if whole and moved and found["learner"] == found["inference"] != found["rollout"]:
                    return found
                assert driver.poll() is None and time.monotonic() < deadline, (
                    found,
                    (tmp_path / "log").read_text(),
                )
                time.sleep(0.2)

        first = await_roles(set())
        nodes.lose_second()
        await_roles({*first.values()})
        assert driver.wait(500) == 0, (tmp_path / "log").read_text()
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == list(range(1, 9)) and rows[-1]["episodes"] == 8 * 8
