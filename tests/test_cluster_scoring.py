"""Reward workers: what the driver's own reward would say, whoever dies meanwhile."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from test_cluster import TOY
from test_replay_store import episode

from vla_rl.assembly.env_and_policy import open_env
from vla_rl.assembly.reward import start_reward
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.payload import Payload
from vla_rl.cluster.placement import Amount
from vla_rl.cluster.scoring import RemoteReward, RewardActor
from vla_rl.config import compose
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.learners import EpisodesLost


class ActorLost(Exception): ...


class TaskFailed(Exception):
    cause = LookupError("its node is gone")


class Changing:
    """A reward that changes in a run."""

    def score(self, trajectories):
        return []

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> None: ...


class Worker:
    """A handle of an actor in this process. Its calls happen as they are asked for; once
    ``dead`` they fail."""

    def __init__(self, job) -> None:
        self._actor, self.dead, self.scored = RewardActor(job), False, 0
        self.hello = SimpleNamespace(remote=lambda: self._actor.hello)
        self.score = SimpleNamespace(remote=lambda *given: lambda: self._score(*given))

    def _score(self, data, held):
        if self.dead:
            raise ActorLost("killed")
        if held is not None:
            raise TaskFailed
        self.scored += 1
        return self._actor.score(data, held)


@pytest.fixture
def remote():
    """The reward of a run with two workers, all workers that there ever were, what was said, and
    the driver's own reward."""
    config = compose([*TOY, "cluster=ray", "cluster.reward_workers=2", "reward.time_discount=0.99"])
    said: list[str] = []
    run = SimpleNamespace(
        config=config, env=open_env(config), progress=SimpleNamespace(say=said.append)
    )
    workers: list[Worker] = []

    def make(job) -> Worker:
        workers.append(Worker(job))
        return workers[-1]

    ray = SimpleNamespace(
        remote=lambda **_: lambda _: SimpleNamespace(remote=make),
        get=lambda call, timeout: call(),
        kill=lambda worker: None,
        exceptions=SimpleNamespace(
            RayError=(TaskFailed, ActorLost, TimeoutError),
            RayTaskError=TaskFailed,
            RayActorError=ActorLost,
            GetTimeoutError=TimeoutError,
            ObjectLostError=LookupError,
            ObjectStoreFullError=BufferError,
            OutOfDiskError=BufferError,
        ),
    )
    own = start_reward(run, None)
    seats = Allocation(ray, config, [Amount(1.0)])
    return RemoteReward(seats, run, own), workers, said, own, (seats, run)


def test_each_episode_is_scored_once_and_as_the_driver_would(remote):
    reward, workers, _, own, _ = remote
    episodes = [episode(i) for i in range(5)]
    reward.prepare(episodes[3])  # as it ends first
    found, expected = reward.score(episodes), own.score(episodes)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert any(bool(x.any()) for x in expected)
    assert sorted(worker.scored for worker in workers) == [2, 3]
    assert reward.metrics()["cluster/reward_busy_seconds"] > 0
    assert reward.score([]) == []


def test_a_dead_worker_is_replaced_and_what_it_had_is_asked_again(remote):
    reward, workers, said, own, _ = remote
    episodes = [episode(i) for i in range(6)]
    for trajectory in episodes:
        reward.prepare(trajectory)
    workers[0].dead = True
    found = reward.score(episodes)
    assert all(torch.equal(a, b) for a, b in zip(found, own.score(episodes), strict=True))
    assert len(workers) == 3 and said == ["reward worker 0 is lost (killed) and replaced"]
    assert [worker.scored for worker in workers] == [0, 3, 3]


def test_episodes_that_are_lost_with_their_node_are_named_at_once_and_asked_for_anew(remote):
    """Of four two lie on a node that is gone; they run again, and lie elsewhere."""
    reward, _, _, own, (seats, _) = remote
    episodes = [episode(i) for i in range(4)]
    gone = [
        dataclasses.replace(t.light(), payload=Payload(seats.ray, "", "x", 0)) for t in episodes
    ]
    with pytest.raises(EpisodesLost) as lost:
        reward.score([episodes[0], gone[1], episodes[2], gone[3]])
    assert lost.value.rollout_ids == (episodes[1].rollout_id, episodes[3].rollout_id)
    found = reward.score(episodes)
    assert all(torch.equal(a, b) for a, b in zip(found, own.score(episodes), strict=True))
    assert reward._calls == {}


def test_a_worker_that_is_put_where_no_node_is_any_more_is_replaced_too(remote):
    reward, workers, said, own, (seats, _) = remote
    plain = seats.ray.remote

    def placed(**options):
        def remote_of(job):
            worker = plain(**options)(None).remote(job)
            if len(workers) == 3:
                worker.hello = SimpleNamespace(remote=lambda: lost)
            return worker

        return lambda _: SimpleNamespace(remote=remote_of)

    def lost():
        raise ActorLost("its node has died")

    seats.ray.remote, workers[0].dead = placed, True
    found = reward.score([episode(0)])
    assert torch.equal(found[0], own.score([episode(0)])[0]) and len(workers) == 4
    assert [line.partition("(")[2] for line in said] == [
        "killed) and replaced",
        "its node has died) and replaced",
    ]


def test_workers_that_fail_again_and_again_end_the_run(remote):
    reward, workers, said, _, (seats, run) = remote
    ray = seats.ray
    plain = ray.remote

    def doomed(**options):
        make = plain(**options)(None)

        def remote_of(job):
            worker = make.remote(job)
            worker.dead = True
            return worker

        return lambda _: SimpleNamespace(remote=remote_of)

    ray.remote = doomed
    workers[0].dead = True
    with pytest.raises(
        UserError, match=r"reward workers failed 3 times in a row \(cluster\.max_failures=3\)"
    ):
        reward.score([episode(0)])
    assert len(said) == 2
    with pytest.raises(ConfigError, match=r"cluster\.reward_workers=2: .*changes in the run"):
        RemoteReward(seats, run, Changing())
