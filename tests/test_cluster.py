"""Rollouts in actors of Ray: the same run, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vla_rl import build
from vla_rl.assembly.env_and_policy import acting_policy, open_env
from vla_rl.checks.options import check_run
from vla_rl.cluster import session, worker_context
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.collector import job_of, parallel_stats
from vla_rl.cluster.group import RolloutGroup
from vla_rl.cluster.packing import packed, packed_weights, unpacked, unpacked_weights
from vla_rl.cluster.session import nodes_of, ray_session
from vla_rl.config import compose
from vla_rl.config.cluster import RayConfig
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.errors import ConfigError, MissingPackage, TrainingDiverged, UserError
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import RolloutEngine, pooled_stats
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import EpisodeSpec

TOY = [
    "run=toy",
    "wandb.mode=off",
    "slots.workers=0",
    "slots.slots_per_worker=4",
    "rollout.serve_fraction=1",
]
# What depends on the clock, or says what a cluster did.
TIMED = (
    "time/",
    "time_s",
    "cluster/",
    "engine/seconds",
    "engine/policy_seconds",
    "engine/wait_seconds",
    "engine/episode_seconds",
    "engine/env_utilisation",
    "engine/decisions_per_second",
    "engine/control_steps_per_second",
)


def specs(count: int, first: int = 0) -> list[EpisodeSpec]:
    return [
        EpisodeSpec("reach_red", i, seed=i, rollout_id=f"e{i}") for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def start(finished_run) -> Path:
    """A policy that knows little yet."""
    run = finished_run(
        *TOY,
        "phases=[collect,sft]",
        "collect.episodes_per_task=10",
        "sft.updates=10",
        "sft.validation_episodes=1",
    )
    return run / "checkpoints" / "sft"


# ------------------------------------------------------------------------------------------ packing
def test_what_is_packed_comes_back_bit_for_bit(start):
    x = torch.arange(12.0).view(3, 4)
    state = {
        "half": x.bfloat16() / 3,
        "part": x[:, 1],
        "again": x,
        "none": None,
        "text": "å\n",
        "empty": torch.zeros(0, 3),
        "list": [1, 2.5, True, {"deep": torch.tensor([True, False])}],
        "number": torch.tensor(7),
    }
    data = packed(state)
    assert data.dtype == np.uint8 and data.ndim == 1
    data.setflags(write=False)  # as Ray hands it out
    found = unpacked(data)
    assert found["half"].dtype == torch.bfloat16 and torch.equal(found["half"], state["half"])
    assert (
        torch.equal(found["part"], x[:, 1])
        and torch.equal(found["again"], x)
        and found["number"] == 7
    )
    assert found["empty"].shape == (0, 3) and torch.equal(
        found["list"][3]["deep"], torch.tensor([True, False])
    )
    assert (found["none"], found["text"], found["list"][:3]) == (None, "å\n", [1, 2.5, True])
    found["again"] += 1  # memory of its own
    assert torch.equal(unpacked(data)["again"], x)


def test_an_episode_survives_packing(start):
    config = compose(TOY)
    env = open_env(config)
    engine = RolloutEngine(env, acting_policy(config, start, env.embodiment), config.rollout)
    trajectory = engine.collect(specs(1)).trajectories[0]
    same = trajectory_from_state(unpacked(packed({"x": trajectory_state(trajectory)}))["x"])
    assert_same_episodes([same], [trajectory])
    assert b"pickle" not in packed({"x": trajectory_state(trajectory)}).tobytes()


def test_weights_are_checked_on_both_ends():
    data, checksum = packed_weights(
        3, {"a": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(2)}
    )
    version, weights = unpacked_weights(data, checksum)
    assert version == 3 and weights["a"].dtype == torch.bfloat16 and weights["n"] == 2
    broken = data.copy()
    broken[-1] ^= 1
    with pytest.raises(UserError, match="changed on their way"):
        unpacked_weights(broken, checksum)
    with pytest.raises(TrainingDiverged, match=r"version 4 are not finite \(the first: b\)"):
        packed_weights(4, {"a": torch.ones(1), "b": torch.tensor([1.0, torch.inf])})


def test_weights_can_be_rounded_on_their_way():
    """Float32 ones alone; the learner's stay as they are."""
    own = {
        "a": torch.tensor([1.001, -2.0]),
        "n": torch.tensor(2),
        "exact": torch.tensor([1.001], dtype=torch.float64),
    }
    data, checksum = packed_weights(1, own, half=True)
    _, weights = unpacked_weights(data, checksum)
    assert (
        weights["a"].dtype == torch.bfloat16
        and weights["a"].tolist() == [1.0, -2.0]
        and own["a"][0] > 1.0
    )
    assert weights["n"] == 2 and torch.equal(weights["exact"], own["exact"])
    assert data.nbytes < packed_weights(1, own | {"a": own["a"].repeat(50)})[0].nbytes
    with pytest.raises(ConfigError, match=r"cluster\.sent='half' .* one of float32, bfloat16"):
        RayConfig(sent="half")


# ------------------------------------------------------------------------------------- the same run
def assert_same_episodes(found, expected) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        left, right = packed(trajectory_state(a)), packed(trajectory_state(b))
        assert np.array_equal(left, right), a.rollout_id


def figures(folder: Path) -> list[dict[str, float]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_actor_makes_the_same_run_bit_for_bit(ray_here, start, tmp_path):
    """A run of three iterations, of which the last goes on from the checkpoint on the other kind
    of machine."""
    own = [
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "rl.episodes_per_iteration=12",
        f"output_dir={tmp_path}",
    ]
    local = run_pipeline(compose([*own, "name=local", "rl.iterations=3"]))
    run_pipeline(compose([*own, "name=ray", "rl.iterations=2", "cluster=ray"]))
    ray = run_pipeline(compose([*own, "name=ray", "rl.iterations=3"]))
    assert len(figures(local)) == 3 and len(figures(local)[0]) > 30
    assert figures(ray) == figures(local)
    weights = [
        load_file(folder / "checkpoints" / "rl" / "model.safetensors") for folder in (local, ray)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    first = next(row for row in read_metrics(ray / "metrics.jsonl") if row["phase"] == "rl")
    assert first["cluster/restarts"] == 0
    assert (
        first["cluster/bytes_in"] > 1000
        and first["cluster/bytes_out"] > 1000
        and first["cluster/take_seconds"] > 0
    )
    words = ["name=rounded", "rl.iterations=1", "algorithm.critic_warmup_iterations=0"]
    rounded = run_pipeline(compose([*own, *words, "cluster=ray", "cluster.sent=bfloat16"]))
    half = next(row for row in read_metrics(rounded / "metrics.jsonl") if row["phase"] == "rl")
    assert half["cluster/bytes_out"] < 0.6 * first["cluster/bytes_out"]
    assert figures(ray)[2]["ppo/behavior_gap_mean"] < 1e-5 < half["ppo/behavior_gap_mean"] < 0.1


@contextlib.contextmanager
def group_of(ray, start: Path, *overrides: str):
    """A group whose actors act with the weights of ``start``, and what it said."""
    config = compose([*TOY, "phases=[rl]", f"checkpoint={start}", "cluster=ray", *overrides])
    env = open_env(config)
    policy = acting_policy(config, start, env.embodiment)
    said: list[str] = []
    group = RolloutGroup(Allocation(ray, config, nodes_of(ray)), job_of(config), said.append)
    try:
        group.publish(1, learned_weights(policy))
        yield group, said
    finally:
        group.close()


def gathered(group: RolloutGroup, plan: list[EpisodeSpec], until: int = 10**9) -> list:
    found: list = []
    ids = [spec.rollout_id for spec in plan]
    while len(found) < min(until, len(plan)):
        found += group.await_episode(ids)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_and_stopped_actors_are_replaced_and_no_episode_is_lost_or_there_twice(
    ray_here, start
):
    own = [
        "cluster.rollouts=2",
        "cluster.hang_timeout=10",
        "env.step_seconds=0.005",
        "slots.slots_per_worker=2",
    ]
    with group_of(ray_here, start, *own) as (group, said):
        plan = specs(24)
        group.limit = 12
        group.submit(plan)
        found = gathered(group, plan, until=2)
        while not all(group.pids):  # the slower one opens
            time.sleep(0.05)
        first = group.pids
        assert len(set(first)) == 2 and all(first)
        os.kill(first[0], signal.SIGKILL)
        found += gathered(
            group, [s for s in plan if s.rollout_id not in {t.rollout_id for t in found}]
        )
        assert sorted(t.rollout_id for t in found) == sorted(s.rollout_id for s in plan)
        assert {t.policy_version for t in found} == {1}
        assert group.restarts == 1 and "run again" in said[0]

        later = specs(24, first=100)
        group.submit(later)
        found = gathered(group, later, until=2)
        stopped = first[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            found += gathered(
                group, [s for s in later if s.rollout_id not in {t.rollout_id for t in found}]
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        assert sorted(t.rollout_id for t in found) == sorted(s.rollout_id for s in later)
        assert group.restarts == 2 and "did nothing for 10 s" in said[1]
        # Which actor ran an episode does not matter, but for the rounding of batches.
        again = {t.rollout_id: t for t in found}
        config = compose([*TOY, "slots.slots_per_worker=2"])
        env = open_env(config)
        engine = RolloutEngine(env, acting_policy(config, start, env.embodiment), config.rollout)
        for expected in engine.collect(later).trajectories:
            assert again[expected.rollout_id].success == expected.success
            assert torch.allclose(again[expected.rollout_id].actions, expected.actions, atol=1e-4)
        pids = [*first, *group.pids]
    deadline = time.monotonic() + 120
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(alive, pids))


class Fatal:
    """A toy env whose worker says something and dies."""

    Config = build.attribute("sim.toy:ToyConfig")

    def __init__(self, config) -> None:
        toy = build.attribute("sim.toy:ToyReach")(config)
        self.embodiment, self.tasks, self.privileged_dim = (
            toy.embodiment,
            toy.tasks,
            toy.privileged_dim,
        )
        self.start = toy.start

    def step(self, slot, actions):
        print("the arm left its bounds", flush=True)
        os._exit(7)

    def close(self) -> None: ...


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_actors_that_fail_again_and_again_end_the_run_with_what_they_wrote(ray_here, start):
    own = ["env.type=test_cluster:Fatal", "cluster.max_failures=2"]
    with group_of(ray_here, start, *own) as (group, said):
        group.submit(specs(2))
        with pytest.raises(
            UserError, match=r"failed 2 times in a row \(cluster.max_failures=2\)"
        ) as error:
            gathered(group, specs(2))
        assert "the arm left its bounds" in str(error.value) and len(said) == 1
        with pytest.raises(UserError, match="in a row"):  # it stays so
            group.await_rounds()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_a_user_can_mend_is_not_tried_again(ray_here, start, tmp_path):
    with group_of(ray_here, start) as (group, said):
        group.submit([EpisodeSpec("fly", 0, rollout_id="x")])
        with pytest.raises(UserError, match="Unknown task 'fly'"):
            gathered(group, specs(1))
        assert not said
    config = compose([*TOY, "phases=[rl]", f"checkpoint={tmp_path / 'gone'}", "cluster=ray"])
    group = RolloutGroup(
        Allocation(ray_here, config, nodes_of(ray_here)), job_of(config), said.append
    )
    try:
        with pytest.raises(UserError, match="gone"):
            gathered(group, specs(1))
        assert not said
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_with_other_code_is_named(ray_here, start, monkeypatch):
    here = worker_context.versions()
    monkeypatch.setattr(worker_context, "versions", lambda: here | {"vla-rl": "another"})
    with (
        group_of(ray_here, start) as (group, _),
        pytest.raises(UserError, match="another vla-rl than this machine"),
    ):
        gathered(group, specs(1))


# ------------------------------------------------------------------------------------------- errors
def test_without_ray_or_with_an_algorithm_that_needs_its_critics(monkeypatch):
    with pytest.raises(ConfigError, match="chooses actions by its critics"):
        check_run(compose(["run=parl_quickstart", "cluster=ray"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"cluster=ray needs the package 'ray'.*\[ray\]"):
        check_run(compose(["run=toy", "cluster=ray"]))


def test_a_cluster_is_joined_with_a_token_alone(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        pytest.raises(UserError, match=r"10\.0\.0\.1:6379: this machine has no token"),
        ray_session(RayConfig(address="10.0.0.1:6379")),
    ):
        pass


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", "silence"])
def test_an_address_where_no_ray_answers_is_named_at_once(monkeypatch, answer):
    """Nothing listens there, or what does hangs up, speaks otherwise, or says nothing. Ray would
    knock for minutes."""
    monkeypatch.setattr("vla_rl.cluster.session._ANSWER_S", 0.2)
    # (another test's Ray may be up in this process)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as server:
        server.bind(("", 0))
        if answer is not None:
            server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.recv(100)
                if answer != "silence":
                    connection.sendall(answer)
                    connection.close()
                    return
                connection.recv(100)  # until the other side hangs up
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start() if answer is not None else None
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(
                UserError, match=f"cluster.address={address}: no cluster of Ray answers there"
            ),
            ray_session(RayConfig(address=address, trusted_network=True)),
        ):
            pass
        if answer is not None:
            thread.join(5)


@pytest.mark.slow
def test_a_ray_that_is_there_answers(ray_here):
    address = ray_here.get_runtime_context().gcs_address
    session._require_answer(RayConfig(address=address))


def test_a_ray_that_is_started_here_asks_for_a_token(ray_here):
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert (
        not Path("~/.ray/auth_token").expanduser().exists()
        or os.environ["RAY_AUTH_TOKEN"] not in Path("~/.ray/auth_token").expanduser().read_text()
    )
    assert ray_here.cluster_resources()["object_store_memory"] <= 100 * 2**20


def test_a_full_store_is_named():
    exceptions = pytest.importorskip("ray.exceptions")

    def put(_):
        raise exceptions.OutOfDiskError("no room")

    with pytest.raises(UserError, match="object store is full"):
        session.put(SimpleNamespace(put=put, exceptions=exceptions), b"x")


def test_figures_of_lists_that_ran_at_once():
    """Two lists at once, worked out by hand: 4 s of 12 decisions in batches of 4, and 2 s of 4
    in batches of 2."""
    one = {
        "episodes": 3,
        "successes": 1,
        "decisions": 12,
        "control_steps": 40,
        "retries": 0,
        "seconds": 4.0,
        "policy_seconds": 1.0,
        "wait_seconds": 2.0,
        "env_utilisation": 0.5,
        "decisions_per_second": 3.0,
        "control_steps_per_second": 10.0,
        "policy_batch": 4.0,
    }
    two = one | {
        "decisions": 4,
        "control_steps": 20,
        "seconds": 2.0,
        "env_utilisation": 0.8,
        "policy_batch": 2.0,
    }
    found = parallel_stats([one, two], 5.0)
    assert (found["episodes"], found["decisions"], found["seconds"]) == (6, 16, 5.0)
    assert found["policy_seconds"] == pytest.approx(2 / 6 * 5) and found[
        "wait_seconds"
    ] == pytest.approx(4 / 6 * 5)
    assert found["env_utilisation"] == pytest.approx((2 + 1.6) / 6)
    assert (found["decisions_per_second"], found["control_steps_per_second"]) == (3.2, 12.0)
    assert found["policy_batch"] == 16 / 5
    assert parallel_stats([one], 4.0) == pytest.approx(pooled_stats([one]))
