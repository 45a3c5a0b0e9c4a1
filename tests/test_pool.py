from __future__ import annotations

import copy
import functools
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import ask, assert_same_step, check_env, random_actions

from sim.inline import InlineEnv
from sim.pool import ProcessPool
from sim.toy import ToyConfig, ToyReach
from vla_rl.errors import ConfigError, UserError
from vla_rl.rollout.engine import RolloutConfig, RolloutEngine
from vla_rl.types import ActionChunk, EpisodeSpec, PolicyOutput

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")

SPEC = ToyReach().embodiment


class Noise:
    """Random actions from the seeds, so that an episode's outcome is known whatever it is
    batched with."""

    chunk_length = 4
    embodiment = SPEC

    def act(self, observation, *, deterministic=False, seeds=None):
        rows = [
            torch.rand(4, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            for seed in seeds
        ]
        chunk = ActionChunk(torch.stack(rows), torch.ones(len(rows), 4, dtype=torch.bool))
        return PolicyOutput(chunk, torch.zeros(len(rows)), {"actions": chunk.actions})


def faulty(**config) -> functools.partial:
    return functools.partial(ToyReach, ToyConfig(**config))


def episodes(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(("reach_red", "reach_blue")[i % 2], i, seed=i) for i in range(count)]


def outcomes(result) -> list[tuple]:
    return [
        (
            t.episode,
            t.actions.tolist(),
            t.rewards.tolist(),
            t.observations.proprio.tolist(),
            t.success,
            t.failure,
        )
        for t in result.trajectories
    ]


@functools.cache
def expected(count: int) -> list[tuple]:
    return outcomes(RolloutEngine(InlineEnv(ToyReach(), 3), Noise()).collect(_specs(count)))


@functools.cache
def _specs(count: int) -> list[EpisodeSpec]:
    return episodes(count)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(ToyReach, num_workers=2, slots_per_worker=3) as pool:
        yield pool


def test_keeps_the_env_contract(pool):
    check_env(pool, ToyReach)


def test_outcomes_are_those_of_one_process(pool):
    result = RolloutEngine(pool, Noise()).collect(_specs(20))
    assert outcomes(result) == expected(20)
    assert all(bool(t.failure) != t.success for t in result.trajectories) and any(
        t.failure for t in result.trajectories
    )
    assert 0 < result.stats["env_utilisation"] <= 1 and result.stats["retries"] == 0


def test_work_is_spread_over_the_workers_and_counted(pool):
    before = [copy.copy(worker) for worker in pool.workers]
    ask(pool, [0, 1], lambda slot: pool.start(slot, _specs(2)[slot]))
    ask(pool, [0, 1], lambda slot: pool.step(slot, np.zeros((3, 2))))
    for old, new in zip(before, pool.workers):
        assert new.episodes == old.episodes + 1 and new.control_steps == old.control_steps + 3
        assert new.busy_seconds > old.busy_seconds and new.restarts == 0
    assert pool.busy_seconds == pytest.approx(sum(w.busy_seconds for w in pool.workers))


def test_results_do_not_change_when_the_slot_goes_on(pool):
    start = ask(pool, [0], lambda slot: pool.start(slot, _specs(1)[0]))[0].observation
    proprio, image = start.proprio.copy(), start.images["top"].copy()
    ask(pool, [0], lambda slot: pool.step(slot, np.ones((4, 2))))
    np.testing.assert_array_equal(start.proprio, proprio)
    np.testing.assert_array_equal(start.images["top"], image)


def test_workers_ignore_ctrl_c_and_do_without_torch(pool):
    for worker in pool.workers:
        os.kill(worker.pid, signal.SIGINT)
        # where it is installed may be called so
        maps = Path(f"/proc/{worker.pid}/maps").read_text().replace(sys.prefix, "")
        assert "torch" not in maps
    events = ask(pool, range(6), lambda slot: pool.start(slot, _specs(6)[slot]))
    assert all(event.error is None for event in events.values())
    assert pool.restarts == 0


def test_bad_requests_are_named(pool):
    ask(pool, [0], lambda slot: pool.start(slot, _specs(1)[0]))
    with pytest.raises(UserError, match=r"200 control steps.*at most 128.*max_chunk_length"):
        pool.step(0, np.zeros((200, 2)))
    with pytest.raises(ConfigError, match="num_workers"):
        ProcessPool(ToyReach, num_workers=0)
    with pytest.raises(UserError, match="cannot be sent to a worker"):
        ProcessPool(lambda: ToyReach())


def test_nothing_is_left_after_close():
    names = {"/dev/shm": sorted(os.listdir("/dev/shm"))} if os.path.isdir("/dev/shm") else {}
    descriptors = len(os.listdir("/proc/self/fd"))
    with ProcessPool(ToyReach, num_workers=2, slots_per_worker=2) as pool:
        ask(pool, [0], lambda slot: pool.start(slot, _specs(1)[0]))
        pids = [worker.pid for worker in pool.workers]
        mapped = Path("/proc/self/maps").read_text().count("vla-rl-pool")
        assert mapped >= 1
    assert Path("/proc/self/maps").read_text().count("vla-rl-pool") == mapped - 1
    assert not any(is_running(pid) for pid in pids)
    assert all(sorted(os.listdir(path)) == before for path, before in names.items())
    # multiprocessing keeps its own tracker's pipe
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    with pytest.raises(UserError, match="closed"):
        pool.poll()
    pool.close()


@pytest.mark.parametrize("fault", ["exit", "segfault"])
def test_a_crash_in_the_middle_of_a_chunk_is_survived(tmp_path, fault, capfd):
    marker = str(tmp_path / "struck")
    factory = faulty(fault=fault, fault_init_state_id=5, fault_control_step=6, fault_marker=marker)
    with ProcessPool(factory, num_workers=2, slots_per_worker=2) as pool:
        result = RolloutEngine(pool, Noise(), RolloutConfig(max_retries=1)).collect(_specs(20))
        assert outcomes(result) == expected(20)
        assert os.path.exists(marker) and pool.restarts == 1
        # the episode itself, and the one that shared its worker
        assert 1 <= result.stats["retries"] <= 2
        assert sorted(worker.restarts for worker in pool.workers) == [0, 1]
    if fault == "segfault":
        assert "Segmentation fault" in capfd.readouterr().err  # where it happened is printed


def test_every_open_request_of_a_dead_worker_gets_one_event():
    factory = faulty(fault="exit", fault_init_state_id=0)
    with ProcessPool(factory, num_workers=2, slots_per_worker=3) as pool:
        ask(pool, range(6), lambda slot: pool.start(slot, EpisodeSpec("reach_red", slot)))
        # Slots 0 and 2 share the dying worker and have a request open, slot 4 shares it and waits.
        busy = [0, 1, 2, 3]
        events = ask(pool, busy, lambda slot: pool.step(slot, random_actions(SPEC, 4, slot)))
        assert [events[slot].error is None for slot in busy] == [False, True, False, True]
        assert "ended with exit code 17" in events[0].error
        assert (events[0].blameless, events[2].blameless) == (False, True)
        waiting = ask(pool, [4, 5], lambda slot: pool.step(slot, random_actions(SPEC, 4, slot)))
        assert (
            waiting[4].error == events[0].error
            and waiting[4].blameless
            and waiting[5].error is None
        )
        assert pool.poll(timeout=0.0) == []
        # A new worker takes the slots over, with the same outcome.
        simulator = ToyReach()
        for slot in (2, 4):
            simulator.start(slot, EpisodeSpec("reach_red", slot))
        ask(pool, [2, 4], lambda slot: pool.start(slot, EpisodeSpec("reach_red", slot)))
        again = ask(pool, [2, 4], lambda slot: pool.step(slot, random_actions(SPEC, 4, slot)))
        for slot in (2, 4):
            assert_same_step(again[slot].step, simulator.step(slot, random_actions(SPEC, 4, slot)))


def test_a_killed_worker_is_noticed_and_replaced():
    with ProcessPool(ToyReach, num_workers=1, slots_per_worker=2) as pool:
        ask(pool, [0, 1], lambda slot: pool.start(slot, _specs(2)[slot]))
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        event = ask(pool, [0], lambda slot: pool.step(slot, np.zeros((2, 2))))[0]
        assert "killed by SIGKILL" in event.error
        assert outcomes(RolloutEngine(pool, Noise()).collect(_specs(20))) == expected(20)
        assert pool.restarts == 1


def test_a_worker_that_hangs_is_killed(tmp_path):
    factory = faulty(
        fault="hang",
        fault_init_state_id=3,
        fault_control_step=2,
        fault_marker=str(tmp_path / "struck"),
    )
    with ProcessPool(factory, num_workers=1, slots_per_worker=2, hang_timeout=3.0) as pool:
        result = RolloutEngine(pool, Noise()).collect(_specs(20))
        assert outcomes(result) == expected(20) and pool.restarts == 1


def test_a_worker_that_dies_again_and_again_is_an_error():
    with ProcessPool(faulty(fault="exit", fault_control_step=-1), max_restarts=1) as pool:
        engine = RolloutEngine(pool, Noise(), RolloutConfig(max_retries=50))
        with pytest.raises(UserError, match=r"2 times in a row \(max_restarts=1\).*exit code 17"):
            engine.collect(_specs(20))
        with pytest.raises(UserError, match="2 times in a row"):  # the pool stays given up
            pool.poll()


def test_an_episode_that_always_kills_its_worker_is_named_and_no_other():
    factory = faulty(fault="exit", fault_init_state_id=2)
    with ProcessPool(factory, num_workers=1, slots_per_worker=3) as pool:
        engine = RolloutEngine(pool, Noise(), RolloutConfig(max_retries=1))
        with pytest.raises(
            UserError, match=r"initial state 2, train.*failed 2 times.*exit code 17"
        ):
            engine.collect(_specs(20))


def test_exceptions_of_a_simulator_cost_the_episode_only(tmp_path):
    factory = faulty(fault="raise", fault_init_state_id=3, fault_marker=str(tmp_path / "struck"))
    with ProcessPool(factory, num_workers=1, slots_per_worker=2) as pool:
        result = RolloutEngine(pool, Noise()).collect(_specs(20))
        assert outcomes(result) == expected(20)
        assert result.stats["retries"] == 1 and pool.restarts == 0
        # the simulator's own user errors are raised
        with pytest.raises(ConfigError, match="'reach_green' is not configured"):
            ask(pool, [0], lambda slot: pool.start(slot, EpisodeSpec("reach_green", 0)))


@pytest.mark.parametrize(
    "factory, error, text",
    [
        (
            functools.partial(ToyConfig, fault="burn"),
            ConfigError,
            "env.fault='burn' is not a choice: it must be one of none, exit",
        ),
        (
            functools.partial(ToyReach, 3),
            UserError,
            "could not be started.*'int' object has no attribute",
        ),
        (functools.partial(os._exit, 3), UserError, "could not be started.*exit code 3"),
    ],
)
def test_a_simulator_that_cannot_be_built_says_why(factory, error, text):
    with pytest.raises(error, match=text):
        ProcessPool(factory, num_workers=1)


def wrapped(path: Path, *lines: str) -> str:
    """A Python that first runs ``lines`` of shell."""
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    path.chmod(0o755)
    return str(path)


def test_workers_run_under_another_python_with_packages_of_its_own(tmp_path, monkeypatch):
    """The two Pythons have a module of one name; the workers import theirs, the parent its own."""
    text = (
        "from sim.toy import ToyConfig, ToyReach\n\n\ndef make():\n    return "
        "ToyReach(ToyConfig(horizon={}))\n"
    )
    for name, horizon in (("here", 5), ("there", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "planner_of_test_pool.py").write_text(text.format(horizon))
    monkeypatch.syspath_prepend(tmp_path / "here")
    from planner_of_test_pool import make

    there = [
        f"export PYTHONPATH={tmp_path / 'there'}:$PYTHONPATH",
        f"echo started >> {tmp_path / 'mark'}",
    ]
    python, path = wrapped(tmp_path / "python", *there), list(sys.path)
    with ProcessPool(make, num_workers=2, python=python) as pool:
        assert pool.tasks[0].horizon == 7 and make().tasks[0].horizon == 5
        assert (tmp_path / "mark").read_text().count("started") == 3  # tried once, and two workers
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        assert wait_until(lambda: pool.poll(timeout=0.1) == [] and pool.restarts == 1)
        assert wait_until(lambda: (tmp_path / "mark").read_text().count("started") == 4)
        with ProcessPool(make) as other:  # this Python again
            assert (
                other.tasks[0].horizon == 5
                and (tmp_path / "mark").read_text().count("started") == 4
            )
        event = ask(pool, [0], lambda slot: pool.start(slot, EpisodeSpec("reach_red", 0)))[0]
        assert event.error is None and event.observation.images["top"].shape == (16, 16, 3)
    assert (
        sys.path == path and os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable
    )


def test_a_python_that_cannot_run_workers_is_refused_before_any_starts(tmp_path):
    bare = wrapped(tmp_path / "bare", 'set -- -I -S "$@"')  # without site-packages
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for python, text in (
        (str(tmp_path / "absent"), "slots.python=.*absent is no file"),
        (str(tmp_path), "is no file"),
        (str(plain), "may not be executed"),
        (bare, r"bare cannot run a simulator's worker, .*No module named"),
        ("/bin/false", "cannot run a simulator's worker, .*exit code 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            ProcessPool(ToyReach, python=python)


def test_workers_end_with_a_parent_that_was_killed_even_while_they_are_busy():
    script = """
import functools, os, signal, sys
from sim.pool import ProcessPool
from sim.toy import ToyConfig, ToyReach
from vla_rl.specs import EpisodeSpec
pool = ProcessPool(functools.partial(ToyReach, ToyConfig(fault="hang", fault_control_step=-1)))  # without a main guard
pool.start(0, EpisodeSpec("reach_red", 0))
pool.poll(timeout=0.1)
print(pool.workers[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert wait_until(lambda: not is_running(int(done.stdout)))
