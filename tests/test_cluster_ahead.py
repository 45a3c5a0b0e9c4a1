"""Rollouts that run ahead of the learner: how far they may, what each decision knows, and what a
checkpoint keeps."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cluster import TOY, start  # noqa: F401 - a fixture
from test_replay_store import episode

from vla_rl.assembly.env_and_policy import acting_policy, open_env
from vla_rl.assembly.folder import changes
from vla_rl.cluster.collector import AheadRayCollector, job_of, parallel_stats, staleness
from vla_rl.cluster.group import RolloutGroup, _Tally, _Worker
from vla_rl.cluster.packing import packed_weights
from vla_rl.cluster.payload import fetched
from vla_rl.cluster.rollout_actor import Job, RolloutActor
from vla_rl.config import compose, learned_algorithm, load, override, save
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.learning.lookahead import Plans
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import quantiles
from vla_rl.run.pipeline import run_pipeline
from vla_rl.storage import load_state, save_state
from vla_rl.types import EpisodeSpec

BATCH = 6


class Actors:
    """What `AheadRayCollector` offers, with episodes that end in any order: each has the version
    that was published last when it began, and begins when it is issued or when a slot is free."""

    def __init__(self, ahead: int, slots: int, seed: int, late: int = 0) -> None:
        self.ahead, self.late, self.slots, self.random = ahead, late, slots, random.Random(seed)
        self.version = -1
        self.waiting: list[EpisodeSpec] = []
        self.running: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.begun = 0

    def publish(self, version: int) -> None:
        self.version = version

    def issue(self, plan) -> None:
        self.waiting += [spec for spec in plan if spec.rollout_id not in self.done]
        self._begin()

    def _begin(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running[self.waiting.pop(0).rollout_id] = self.version
            self.begun += 1

    def finish(self, count: int) -> None:
        for name in self.random.sample(sorted(self.running), min(count, len(self.running))):
            self.done[name] = self.running.pop(name)
            self._begin()

    def await_done(self, enough) -> list[str]:
        while not enough([*self.done]):
            self.finish(1)
        return [*self.done]

    def collect(self, plan) -> list[int]:
        while not all(spec.rollout_id in self.done for spec in plan):
            self.finish(1)
        return [self.done.pop(spec.rollout_id) for spec in plan]

    def state_dict(self):
        return {"done": dict(self.done)}

    def load_state_dict(self, state) -> None:
        self.done = dict(state["done"])


def proposals(iteration: int, sampling_round: int) -> list[EpisodeSpec]:
    first = iteration * BATCH
    return [
        EpisodeSpec(
            "reach_red", i, group_id=first + i, rollout_id=f"{iteration}-{sampling_round}-{i}"
        )
        for i in range(BATCH)
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("slots", [1, 4, 100])
def test_no_more_than_the_gate_allows_is_started_and_nothing_is_older(ahead, slots):
    """At version v at most (η + v + 1)·B episodes; each is learned from once, in the batch of
    its plan, at an age ≤ η."""
    iterations = 9
    for seed in range(10):
        actors = Actors(ahead, slots, seed)
        plans = Plans(actors, proposals, iterations)
        ages = []
        for v in range(iterations):
            actors.publish(v)
            plan = plans.take(v, 0)
            assert plan == proposals(v, 0)
            ages += [v - version for version in actors.collect(plan)]
            actors.finish(actors.random.randrange(2 * BATCH))  # while the driver learns
            assert actors.begun <= (ahead + v + 1) * BATCH
        assert len(ages) == iterations * BATCH and actors.begun == iterations * BATCH
        assert not actors.done and not actors.running and not actors.waiting
        assert max(ages) <= ahead and min(ages) >= 0
        if slots == 100 and ahead:
            assert max(ages) == ahead  # it is used, too


@pytest.mark.parametrize("ahead, late", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_batch_that_is_cut_off_learns_from_each_episode_once_and_within_the_bound(
    ahead, late, members
):
    """As many episodes as a plan has, whole groups, none older than ahead + late; a resume in
    between changes none of it."""

    def grouped(iteration: int, sampling_round: int) -> list[EpisodeSpec]:
        found = proposals(iteration, sampling_round)
        return [
            dataclasses.replace(spec, group_id=iteration * BATCH + i // members)
            for i, spec in enumerate(found)
        ]

    iterations, mixed = 9, 0
    for seed in range(10):
        actors = Actors(ahead, 100, seed, late)
        plans, learned, ages = Plans(actors, grouped, iterations), [], []
        for v in range(iterations):
            actors.publish(v)
            plan = plans.take(v, 0)
            assert len(plan) == BATCH and all(spec.rollout_id in actors.done for spec in plan)
            groups = Counter(spec.group_id for spec in plan)
            assert set(groups.values()) == {members}
            numbers = [int(spec.rollout_id.split("-")[0]) for spec in plan]
            assert numbers == sorted(numbers) and min(numbers) >= v - late
            mixed += len({*numbers}) > 1
            ages += [v - version for version in actors.collect(plan)]
            learned += [spec.rollout_id for spec in plan]
            actors.finish(actors.random.randrange(2 * BATCH))
            assert actors.begun <= (ahead + v + 1) * BATCH
            if v == 3:
                state = plans.state_dict()
                plans = Plans(actors, grouped, iterations)
                running, actors.running = actors.running, {}
                actors.begun -= len(running)
                plans.load_state_dict(state)
        assert (
            len({*learned}) == len(learned) == iterations * BATCH
            and not actors.done
            and not actors.running
        )
        assert max(ages) <= ahead + late
    assert mixed > 20


def test_cutting_off_favours_short_episodes_unless_what_was_under_way_is_learned_from_later():
    """Half of the episodes succeed, within two ticks; the others run out of time after ten. Of half
    as many again as are needed, the first to end are nearly all successes: the naive form learns
    from a world in which nine of ten succeed. Here those under way come later: the share over the
    run is the true one, and no surplus of successes is ever larger than the episodes that are
    open."""
    batch, iterations = 20, 40
    chance = random.Random(0)
    wins = {
        f"{k}-{i}": chance.random() < 0.5 for k in range(iterations) for i in range(batch * 3 // 2)
    }

    naive = []
    for k in range(iterations):
        begun = [f"{k}-{i}" for i in range(batch * 3 // 2)]
        # the rest is thrown away
        naive += sorted(begun, key=lambda name: 2 if wins[name] else 10)[:batch]
    assert sum(wins[name] for name in naive) / len(naive) > 0.7

    class Timed(Actors):
        """Ticks of a clock: an episode takes 2 or 10."""

        now, begin = 0, None

        def issue(self, plan) -> None:
            self.begin = (self.begin or {}) | {spec.rollout_id: self.now for spec in plan}

        def finish(self, count: int) -> None:
            self.now += 1
            for name, began in [*self.begin.items()]:
                if self.now - began >= (2 if wins[name] else 10):
                    self.done[name] = 0
                    del self.begin[name]

    def plan_of(k: int, _: int) -> list[EpisodeSpec]:
        return [
            EpisodeSpec("reach_red", i, group_id=k * batch + i, rollout_id=f"{k}-{i}")
            for i in range(batch)
        ]

    taken = {}
    for late in (0, 1):
        actors = Timed(1, 1000, 0, late)
        plans, seen = Plans(actors, plan_of, iterations), []
        for v in range(iterations):
            plan = plans.take(v, 0)
            seen.append([wins[spec.rollout_id] for spec in plan])
            actors.collect(plan)
            actors.finish(1)  # the learner takes a tick
            surplus = sum(map(sum, seen)) - sum(
                wins[f"{k}-{i}"] for k in range(v + 1) for i in range(batch)
            )
            assert abs(surplus) <= (0 if not late else batch)
        assert sum(map(len, seen)) == batch * iterations
        taken[late] = seen, actors.now
    true = sum(wins[f"{k}-{i}"] for k in range(iterations) for i in range(batch)) / (
        batch * iterations
    )
    for seen, _ in taken.values():
        assert sum(map(sum, seen)) / (batch * iterations) == true
    # single batches are far off at both ends, as docs/how_to says
    shares = [sum(part) / batch for part in taken[1][0]]
    assert (shares[0], shares[-1]) == (0.85, 0.05)
    assert sum(shares[5:-5]) / (iterations - 10) == pytest.approx(true, abs=0.05)
    assert sum(map(sum, taken[1][0][1:])) / (batch * (iterations - 1)) == pytest.approx(
        true, abs=0.02
    )
    assert taken[1][1] < taken[0][1]  # and the learner waits less


def test_new_weights_in_the_middle_of_an_episode_and_each_decision_knows_whose_it_is(start):  # noqa: F811
    """An actor of its own, without Ray: weights of another version come before its third policy
    call. What the decisions recorded is what the policy of the version that they name says of
    them."""
    config = compose(
        [*TOY, "phases=[rl]", f"checkpoint={start}", "cluster=ray", "cluster.mode=async"]
    )
    env = open_env(config)
    policies = {version: acting_policy(config, start, env.embodiment) for version in (1, 2)}
    with torch.no_grad():
        for parameter in policies[2].parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    actor = RolloutActor(job_of(config))
    actor.open()
    plain, calls = actor._engine.before_decision, []

    def before_decision() -> None:
        calls.append(None)
        if len(calls) == 3:
            actor.weights(*packed_weights(2, learned_weights(policies[2])))
        plain()

    actor._engine.before_decision = before_decision
    actor.weights(*packed_weights(1, learned_weights(policies[1])))
    actor.add(proposals(0, 0)[:2], False)
    found: list = []
    while len(found) < 2:
        found += [fetched(data) for data in actor.take(1.0)[1]]
    actor.close()
    for trajectory in found:
        assert (
            trajectory.decision_version.tolist() == [1, 1] + [2] * (len(trajectory) - 2)
            and len(trajectory) > 2
        )
        assert trajectory.policy_version == 1
        own = torch.stack(
            [
                policies[v].evaluate(trajectory.observations, trajectory.replay).log_prob[i]
                for i, v in enumerate(trajectory.decision_version.tolist())
            ]
        )
        torch.testing.assert_close(own.detach(), trajectory.behavior_log_prob, atol=1e-4, rtol=1e-4)
        other = policies[1].evaluate(trajectory.observations, trajectory.replay).log_prob[2:]
        assert not torch.allclose(other, trajectory.behavior_log_prob[2:], atol=1e-2)


def test_a_collector_that_does_not_run_ahead_is_asked_round_by_round():
    plans = Plans(type("Plain", (), {})(), proposals, 3)
    assert plans.take(0, 0) == proposals(0, 0) and plans.take(0, 2) == proposals(0, 2)
    assert plans.state_dict() is None
    plans.load_state_dict(None)


def test_what_is_under_way_goes_on_after_a_resume(tmp_path):
    actors = Actors(2, slots=3, seed=0)
    plans = Plans(actors, proposals, 5)
    actors.publish(0)
    actors.collect(plans.take(0, 0))
    actors.finish(5)
    ready = set(actors.done)
    assert 5 <= len(ready) < 2 * BATCH
    save_state(tmp_path / "state", {"ahead": plans.state_dict()})
    new = Actors(2, slots=3, seed=1)
    asked = []
    resumed = Plans(new, lambda *which: asked.append(which) or proposals(*which), 5)
    resumed.load_state_dict(load_state(tmp_path / "state")["ahead"])
    assert set(new.done) == ready and new.begun + len(new.waiting) == 2 * BATCH - len(ready)
    learned = []
    for v in range(1, 5):
        new.publish(v)
        plan = resumed.take(v, 0)
        assert plan == proposals(v, 0)
        learned += new.collect(plan)
    assert len(learned) == 4 * BATCH and asked == [(3, 0), (4, 0)]


def test_ages_are_counted_per_decision():
    """Three decisions of version 4, and one of 3 with two of 5; learned from at version 5."""
    whole = episode(0, policy_version=4)
    mixed = episode(0, policy_version=3, decision_version=torch.tensor([3, 5, 5]))
    found = staleness([whole, mixed], 5, 2)
    assert found["cluster/staleness_max"] == 2 and found["cluster/staleness_mean"] == pytest.approx(
        (3 * 1 + 2) / 6
    )
    assert [found[f"cluster/staleness/{age}"] for age in range(3)] == pytest.approx(
        [2 / 6, 3 / 6, 1 / 6]
    )


def test_stale_data_is_corrected_unless_asked_not_to():
    def weight(*overrides: str) -> str:
        return learned_algorithm(compose(["run=toy", *overrides])).behavior_weight

    assert weight() == weight("cluster=ray") == "none"
    assert (
        weight("cluster=ray", "cluster.mode=pipelined")
        == weight("cluster=ray", "cluster.mode=async")
        == "truncate"
    )
    assert weight("cluster=ray", "cluster.mode=async", "algorithm.behavior_weight=mask") == "mask"
    assert weight("cluster=ray", "cluster.mode=async", "cluster.correction=none") == "none"
    assert weight("cluster=ray", "cluster.mode=async", "cluster.max_staleness=0") == "none"
    assert (
        weight("cluster=ray", "cluster.mode=async", "algorithm.recompute_old_log_prob=false")
        == "none"
    )
    config = compose(["run=toy", "cluster=ray", "cluster.mode=async"])
    assert config.algorithm.behavior_weight == "none"  # as it was typed
    assert learned_algorithm(override(config, ["cluster.mode=sync"])).behavior_weight == "none"
    # learns from a replay
    compose(["run=residual_quickstart", "cluster=ray", "cluster.mode=async"])


def test_runs_go_on_whose_record_has_the_correction_written_out(tmp_path):
    """As older ones have. A run that is corrected otherwise is another."""
    words = ["run=toy", "cluster=ray", "cluster.mode=async"]
    save(compose([*words, "algorithm.behavior_weight=truncate"]), tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").algorithm.behavior_weight == "truncate"
    assert changes(compose([*words, "name=other"]), tmp_path) is False
    with pytest.raises(UserError, match=r"behavior_weight: 'truncate' there, 'none' now"):
        changes(compose([*words, "cluster.correction=none"]), tmp_path)
    save(compose(words), tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"behavior_weight: 'truncate' there, 'mask' now"):
        changes(compose([*words, "cluster.correction=mask"]), tmp_path)
    # where nothing runs ahead it says nothing
    save(compose(["run=toy", "cluster=ray"]), tmp_path / "config.yaml")
    assert (
        changes(compose(["run=toy", "cluster=ray", "cluster.correction=mask"]), tmp_path) is False
    )
    assert changes(compose(["run=toy"]), tmp_path) is False


def test_batches_are_cut_off_where_there_are_episodes_to_spare():
    with pytest.raises(
        ConfigError,
        match=r"cluster\.max_late=1 needs episodes to spare.*cluster\.max_staleness=2 or more",
    ):
        compose(["run=toy", "cluster=ray", "cluster.mode=pipelined", "cluster.max_late=1"])
    assert (
        compose(
            ["run=toy", "cluster=ray", "cluster.mode=async", "cluster.max_late=1"]
        ).cluster.ahead
        == 2
    )


def test_an_iteration_whose_episodes_were_all_there_has_figures_too():
    assert (
        parallel_stats([], 2.0)["decisions_per_second"] == 0.0
        and parallel_stats([], 2.0)["seconds"] == 2.0
    )


class Recorder:
    """An actor's handle that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.kinds: list[bool] = []
        self.add = self

    def options(self, **_):
        return self

    def remote(self, specs, deterministic) -> None:
        self.given.append(len(specs))
        self.kinds.append(deterministic)


@pytest.mark.parametrize("streams, given", [(True, [[4], [4], [3]]), (False, [[6], [5], []])])
def test_no_actor_takes_what_others_could_begin_at_once(streams, given):
    """Eleven episodes and three actors with room for six each: even parts where they stream,
    else what the limit says."""
    group = object.__new__(RolloutGroup)
    group._job, group.limit, group._sure = SimpleNamespace(streams=streams), 6, set()
    group._workers = [_Worker(i, Recorder(), None, ready=True) for i in range(3)]
    group._waiting, group._weights = deque(proposals(0, 0) + proposals(1, 0)[:5]), None
    group._assign()
    assert all(not worker.open for worker in group._workers)  # nobody acts before there are weights
    group._weights = (0, None, 0, 0)
    group._assign()
    assert [worker.handle.given for worker in group._workers] == given and not group._waiting
    assert [spec for worker in group._workers for spec in worker.open] == [
        s.rollout_id for s in proposals(0, 0)
    ] + [s.rollout_id for s in proposals(1, 0)[:5]]


def test_sampled_and_most_likely_actions_are_lists_of_their_own():
    """Two sampled episodes, then three with the most likely actions, then one more: an actor goes
    on to the next list of its kind alone, and a plan that is under way with sampled actions cannot
    be had without."""
    group = object.__new__(RolloutGroup)
    group._job, group.limit, group._sure, group._known = (
        SimpleNamespace(streams=True),
        6,
        set(),
        set(),
    )
    group._workers = [_Worker(0, Recorder(), None)]
    group._waiting, group._weights = deque(), (0, None, 0, 0)
    group._changed = threading.Condition()
    plan = proposals(0, 0)
    for part, sure in ((plan[:2], False), (plan[2:5], True), (plan[5:], False)):
        group.submit(part, sure)
    group._workers[0].ready = True
    group._assign()
    handle = group._workers[0].handle
    assert (handle.given, handle.kinds) == ([2, 3, 1], [False, True, False]) and group._workers[
        0
    ].lists == 3

    actor = RolloutActor(Job(None, True, streams=True))
    actor.add(plan[2:5], True)
    assert actor._more() == [] and len(actor._lists) == 1  # those under way are sampled
    actor._deterministic = True
    assert actor._more() == plan[2:5]

    collector = object.__new__(AheadRayCollector)
    collector.group, collector._ready = group, {}
    with pytest.raises(
        ValueError, match="6 episodes of this plan are under way with sampled actions"
    ):
        collector.collect(plan, deterministic=True)


def test_quantiles_are_of_all_episodes_however_few_are_told_of_at_a_time():
    """Nine of a second and one of a minute, one by one: whoever pools what each call tells would
    take a tenth of a minute for every quantile."""
    seconds = iter([1.0] * 9 + [60.0])
    engine = SimpleNamespace(
        mark=lambda: None,
        figures=lambda before, until: {"episodes": 1.0},
        ended=lambda before, until: [next(seconds)],
    )
    actor, group = RolloutActor(Job(None, True, streams=True)), object.__new__(RolloutGroup)
    actor._engine, actor._mark = engine, None
    group.tally, group._rounds, group._ended, group._workers = _Tally(), [], [], [None]
    group._changed, worker = threading.Condition(), _Worker(0, None, None, ready=True)
    for _ in range(10):
        group._hear_taken(worker, actor.take(0.0)[0])
    took = quantiles(group.take_ended())
    assert list(took.values()) == [1.0, 1.0, pytest.approx(6.9), 60.0] and not group.take_ended()
    assert not any(quantiles([]).values())


# ----------------------------------------------------------------------------------------- with Ray
def rows_of(folder: Path) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("late", [0, 1])
def test_rollouts_overlap_and_stay_within_the_bound(ray_here, start, tmp_path, late):  # noqa: F811
    """Ten iterations of 8 episodes on two actors; then the run goes on by two more, with what
    was under way."""
    own = [
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "rl.episodes_per_iteration=8",
        "cluster=ray",
        "cluster.mode=async",
        "cluster.max_staleness=2",
        f"cluster.max_late={late}",
        "cluster.rollouts=2",
        "slots.slots_per_worker=2",
        "env.step_seconds=0.003",
        f"output_dir={tmp_path}",
    ]
    folder = run_pipeline(compose([*own, "rl.iterations=10"]))
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 11)) and rows[-1]["episodes"] == 80
    assert all(0 <= row["cluster/staleness_max"] <= 2 for row in rows)
    assert (
        rows[0]["cluster/staleness_max"] == 0
        and max(row["cluster/staleness_mean"] for row in rows) > 0.3
    )
    for row in rows:
        assert sum(row[f"cluster/staleness/{age}"] for age in range(3)) == pytest.approx(1.0)
        assert row["cluster/open"] + row["cluster/ready"] <= 16
    # nothing is planned beyond the end
    assert rows[-1]["cluster/open"] == rows[-1]["cluster/ready"] == 0
    # (the first trains the critic alone)
    assert all("ppo/behavior_weight_min" in row for row in rows[1:])
    assert (
        0
        < sum(row["cluster/rollout_busy_seconds"] for row in rows)
        <= sum(row["time/iteration"] for row in rows) * 1.01
    )
    folder = run_pipeline(compose([*own, "rl.iterations=12"]))
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 13)) and rows_of(folder)[-1][
        "episodes"
    ] == 96


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_driver_that_is_killed_goes_on_by_the_same_command(start, tmp_path):  # noqa: F811
    words = [
        "train",
        *TOY,
        "phases=[rl]",
        f"checkpoint={start}",
        "rl.episodes_per_iteration=8",
        "rl.iterations=20",
        "name=killed",
        "cluster=ray",
        "cluster.mode=pipelined",
        "slots.slots_per_worker=2",
        "env.step_seconds=0.01",
        f"output_dir={tmp_path}",
    ]
    command = [sys.executable, "-m", "vla_rl"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [*command, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count('"rl"') >= 3):
        assert process.poll() is None and time.monotonic() < deadline, (
            process.stderr.read().decode()
        )
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = len(rows_of(tmp_path / "killed"))
    assert before < 20
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "killed")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["episodes"] == 20 * 8  # none lost, none counted twice
    assert max(row["cluster/staleness_max"] for row in rows) <= 1
    assert json.loads((tmp_path / "killed" / "phases.json").read_text())["rl"]["complete"]
