"""Actors that act for rollout actors: the same decisions, whoever dies meanwhile; with reward
workers the same run."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_cluster import TOY, alive, assert_same_episodes, figures, gathered, specs, start  # noqa: F401 - a fixture

from vla_rl.assembly.env_and_policy import acting_policy, open_env
from vla_rl.cluster import pulse
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.collector import job_of
from vla_rl.cluster.group import RolloutGroup, _Worker
from vla_rl.cluster.inference import InferenceActor, RemotePolicy, ServerJob, Servers, _Server
from vla_rl.cluster.packing import packed_weights
from vla_rl.cluster.session import nodes_of
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run.pipeline import run_pipeline


class ActorLost(Exception): ...


class TaskFailed(Exception): ...


# What `RemotePolicy` uses of Ray, in one process: calls are made at once.
HERE = SimpleNamespace(
    get=lambda call, timeout: call(),
    exceptions=SimpleNamespace(
        RayError=(TaskFailed, ActorLost),
        RayTaskError=TaskFailed,
        RayActorError=ActorLost,
        ObjectStoreFullError=BufferError,
        OutOfDiskError=BufferError,
    ),
)


def grouped(call):
    """A method of a handle that several callers may have run at once."""

    def options(concurrency_group):
        assert concurrency_group == "acts", (
            "in Ray's default group one request would wait for the one before"
        )
        return SimpleNamespace(remote=call)

    return SimpleNamespace(options=options)


def reached(actor):
    """A handle whose calls `HERE.get` makes."""
    return SimpleNamespace(
        open=SimpleNamespace(remote=lambda: actor.open),
        act=grouped(lambda data: lambda: actor.act(data)),
    )


@pytest.fixture
def parts(start):  # noqa: F811
    """A config, its env and policy, and an actor that has the policy, too."""
    config = compose(
        [*TOY, "phases=[rl]", f"checkpoint={start}", "cluster=ray", "cluster.inference=1"]
    )
    env = open_env(config)
    policy = acting_policy(config, start, env.embodiment)
    policy.prepare_for_rl()
    job = job_of(config)
    actor = InferenceActor(ServerJob(job.place, env.embodiment.to_dict(), job.prepared))
    return config, env, policy, actor


def test_an_engine_that_asks_runs_the_same_episodes_bit_for_bit(parts):
    config, env, policy, actor = parts
    versions: list[int] = []
    remote = RemotePolicy(HERE, reached(actor), versions.append, 1.0).open()
    actor.weights(*packed_weights(7, learned_weights(policy)))
    found = RolloutEngine(env, remote, config.rollout).collect(specs(9)).trajectories
    assert_same_episodes(
        found, RolloutEngine(env, policy, config.rollout).collect(specs(9)).trajectories
    )
    assert {*versions} == {7} and remote.chunk_length == policy.chunk_length


def test_requests_that_wait_are_one_batch_and_each_gets_its_own_rows(parts):
    """Three actors ask before there are weights: one call of the policy answers all, but for one
    that leaves out chance."""
    config, env, policy, actor = parts
    shape = actor.open()
    calls, plain = [], actor._policy.act

    def act(seen, *, deterministic, seeds):
        calls.append((len(seen), deterministic))
        return plain(seen, deterministic=deterministic, seeds=seeds)

    actor._policy.act = act
    assert shape["chunk_length"] == policy.chunk_length
    asked = RolloutEngine(env, policy, config.rollout).collect(specs(6)).trajectories
    rows = [trajectory.observations[:1] for trajectory in asked]
    answers: dict[int, object] = {}

    def ask(i: int, count: int, deterministic: bool) -> None:
        remote = RemotePolicy(HERE, reached(actor), lambda version: None, 1.0).open()
        seen = type(rows[0]).cat(rows[i : i + count])
        answers[i] = remote.act(seen, deterministic=deterministic, seeds=range(i, i + count))

    threads = [
        threading.Thread(target=ask, args=given)
        for given in ((0, 2, False), (2, 1, False), (3, 3, True))
    ]
    for thread in threads:
        thread.start()
    while len(actor._batches._waiting) < 3:
        threading.Event().wait(0.01)
    actor.weights(*packed_weights(1, learned_weights(policy)))
    for thread in threads:
        thread.join()
    assert sorted(calls) == [(3, False), (3, True)]
    for i, count, deterministic in ((0, 2, False), (2, 1, False), (3, 3, True)):
        seen = type(rows[0]).cat(rows[i : i + count])
        with torch.inference_mode():
            expected = policy.act(seen, deterministic=deterministic, seeds=range(i, i + count))
        torch.testing.assert_close(
            answers[i].chunk.actions, expected.chunk.actions, atol=1e-5, rtol=1e-5
        )
        assert answers[i].replay.keys() == expected.replay.keys()


def test_a_decision_is_asked_for_again_where_its_server_is_lost(parts):
    config, env, policy, actor = parts
    actor.weights(*packed_weights(1, learned_weights(policy)))
    actor.open()

    def lost(*_):
        raise ActorLost("killed")

    gone = SimpleNamespace(open=reached(actor).open, act=grouped(lambda data: lost))
    remote = RemotePolicy(HERE, gone, lambda version: None, 30.0).open()
    threading.Timer(0.2, remote.serve_by, [reached(actor)]).start()
    found = RolloutEngine(env, remote, config.rollout).collect(specs(2)).trajectories
    assert_same_episodes(
        found, RolloutEngine(env, policy, config.rollout).collect(specs(2)).trajectories
    )
    with pytest.raises(TimeoutError, match=r"no other server came within 0\.1 s"):
        RolloutEngine(env, RemotePolicy(HERE, gone, print, 0.1).open(), config.rollout).collect(
            specs(1)
        )


def test_a_server_that_is_lost_before_it_has_said_anything_is_replaced_all_the_same(parts):
    _, _, policy, actor = parts

    def lost():
        raise ActorLost("killed")

    remote = RemotePolicy(
        HERE, SimpleNamespace(open=SimpleNamespace(remote=lambda: lost)), print, 30.0
    )
    threading.Timer(0.2, remote.serve_by, [reached(actor)]).start()
    assert remote.open().chunk_length == policy.chunk_length


@pytest.mark.parametrize(
    "answered, server, replaced",
    [
        (1.0, 1.0, ["server 0", "actor"]),  # both live, and nothing is decided
        (1.0, 35.0, []),  # the server stands still: `Servers.look` replaces it
        (39.0, 1.0, ["actor"]),
    ],
)
def test_of_two_that_decide_nothing_the_one_without_a_sign_of_life_goes(answered, server, replaced):
    """Of rollout actor 0 no decision came for 40 s; it answered, and its server gave a sign of
    life, so many seconds ago."""
    found: list[str] = []
    group = object.__new__(RolloutGroup)
    group._config = SimpleNamespace(hang_timeout=40.0)
    group._servers = SimpleNamespace(
        silence=lambda number: server, replace=lambda i, *_: found.append(f"server {i}")
    )
    group._workers, group._replace = [], lambda worker, why: found.append("actor")
    group._see_to(_Worker(0, None, None, heard=100.0 - answered), "did nothing", 100.0)
    assert found == replaced


def test_nobody_is_late_for_a_process_that_stood_still_itself(monkeypatch):
    """Looks after 1, 5 and 3605 s, of which the last hour was slept through."""
    clock = [100.0]
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    awake, found = pulse.Awake(), []
    for clock[0] in (101.0, 105.0, 3705.0):
        found.append(awake.now())
    assert found == [1.0, 5.0, 15.0]


def test_a_server_that_stands_still_is_replaced_and_its_actors_alone_hear_of_it(monkeypatch):
    """Of two servers the first gives signs of life for 10 s, the other all the time; of three actors
    the first and the third ask the first."""
    clock, lively = [0.0], {0: True, 1: True}
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    started: list[Any] = []

    class Made(Servers):
        def _started(self, place):
            call = SimpleNamespace(remote=lambda *_: ("beat", place))
            handle = SimpleNamespace(beat=SimpleNamespace(options=lambda **_: call), place=place)
            started.append(place)
            return _Server(handle, ("watch", place))

    def wait(references, num_returns=1, timeout=0):
        return [r for r in references if r[0] == "beat" and lively[r[1]]], []

    ray = SimpleNamespace(wait=wait, kill=lambda handle: None)
    config = SimpleNamespace(inference=2, hang_timeout=40.0, start_timeout=300.0, max_failures=3)
    servers = Made(SimpleNamespace(ray=ray, config=config), None, print)
    heard: list[int] = []

    def client(number):
        told = SimpleNamespace(remote=lambda handle: heard.append(number))
        handle = SimpleNamespace(serve_by=SimpleNamespace(options=lambda **_: told))
        return _Worker(number, handle, None, alive=0.0)

    clients = [client(number) for number in range(3)]
    for second in range(0, 55, 5):
        clock[0], lively[0] = float(second), second <= 10
        assert servers.look(clients) == 0
    clock[0] = 55.0
    assert servers.look(clients) == 1 and started == [0, 1, 0] and heard == [0, 2]
    assert "gave no sign of life for 40 s (cluster.hang_timeout)" in servers.losses[0]
    assert clients[0].alive > 0 == clients[1].alive
    lively[0], clock[0] = False, 200.0  # the new one has longer to start
    assert servers.look(clients) == 0


def test_no_more_act_than_have_episodes():
    with pytest.raises(
        ConfigError, match=r"cluster\.inference=2 actors would act for cluster\.rollouts=1"
    ):
        compose(["run=toy", "cluster=ray", "cluster.inference=2"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_run_is_the_local_one_bit_for_bit(ray_here, start, tmp_path):  # noqa: F811
    own = [
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "rl.episodes_per_iteration=12",
        f"output_dir={tmp_path}",
    ]
    own += ["rl.iterations=2"]
    local = run_pipeline(compose([*own, "name=local"]))
    ray = run_pipeline(
        compose(
            [*own, "name=ray", "cluster=ray", "cluster.inference=1", "cluster.reward_workers=2"]
        )
    )
    assert figures(ray) == figures(local) and len(figures(local)) == 2
    weights = [
        load_file(folder / "checkpoints" / "rl" / "model.safetensors") for folder in (local, ray)
    ]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_server_costs_no_episode(ray_here, start):  # noqa: F811
    """Two rollout actors and one that acts for both, which is killed in the middle."""
    words = [
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "cluster=ray",
        "cluster.rollouts=2",
        "cluster.inference=1",
    ]
    config = compose([*words, "env.step_seconds=0.005", "slots.slots_per_worker=2"])
    env = open_env(config)
    policy, job, said = acting_policy(config, start, env.embodiment), job_of(config), []
    seats = Allocation(ray_here, config, nodes_of(ray_here))
    servers = Servers(
        seats, ServerJob(job.place, env.embodiment.to_dict(), job.prepared), said.append
    )
    group = RolloutGroup(seats, job, said.append, servers=servers)
    try:
        group.publish(3, learned_weights(policy))
        plan = specs(24)
        group.limit = 12
        group.submit(plan)
        found = gathered(group, plan, until=2)
        pid = ray_here.get(servers.of(0).hello.remote())["pid"]
        os.kill(pid, signal.SIGKILL)
        found += gathered(
            group, [s for s in plan if s.rollout_id not in {t.rollout_id for t in found}]
        )
        assert sorted(t.rollout_id for t in found) == sorted(s.rollout_id for s in plan)
        assert {t.policy_version for t in found} == {3}
        assert (
            len(servers.losses) == 1
            and "inference actor 0 is lost" in said[0]
            and group.restarts == 0
        )
        assert not alive(pid)
        group.publish(4, learned_weights(policy))
        assert 0 < group.figures()["cluster/inference_busy_seconds"] < 600
    finally:
        group.close()
        servers.close()
