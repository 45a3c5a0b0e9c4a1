"""The concurrent rhythm: whatever dies, no episode is lost, none is there twice, and the pace is
kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.learning.rhythm import compared, figures_of
from policies.settings import SmallConfig
from policies.small import SmallPolicy
from sim.inline import InlineEnv
from sim.toy import ToyConfig, ToyReach
from vla_rl.algorithms.actor_critic import TD3
from vla_rl.assembly import learner_main
from vla_rl.checkpoint import load_training_state
from vla_rl.config import compose, from_tree, to_tree
from vla_rl.config.replay_algorithms import CriticsConfig, TD3Config
from vla_rl.data.replay import Replay
from vla_rl.errors import CheckpointError, ConfigError, UserError
from vla_rl.files import WEIGHTS as MODEL
from vla_rl.learning.concurrent import SwappingCollector
from vla_rl.learning.episode_queue import (
    INBOX,
    EpisodeQueue,
    learned_weights,
    published_weights,
    stored_learner,
    take_weights,
)
from vla_rl.learning.learner_process import LearnerProcess
from vla_rl.learning.learner_server import STOP, LearnerServer
from vla_rl.learning.learners import ReplayLearner
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run.pipeline import run_pipeline
from vla_rl.storage import load_tensors
from vla_rl.types import EpisodeSpec, Observation, Trajectory

SPEC = ToyReach().embodiment
PACE, START = 0.7, 7  # updates per decision, decisions before the first
LENGTHS = (3, 2, 4, 1, 5, 3)  # decisions of six episodes
ENTRIES = ((0, 2), (2, 3), (3, 6))  # which of them are sent together
# earned by 4, 1, 5 and 3: the third episode makes nine decisions, the first two are before the
# start
EARNED = PACE * 13


def seen(first: int, count: int) -> Observation:
    proprio = torch.tensor([[0.01 * i, 0.0] for i in range(first, first + count)])
    return Observation(
        {"top": torch.zeros(count, 16, 16, 3, dtype=torch.uint8)}, proprio, ("go",) * count
    )


def episode(i: int) -> Trajectory:
    t = LENGTHS[i]
    return Trajectory(
        episode=EpisodeSpec("reach_red", i, rollout_id=f"e{i}"),
        observations=seen(10 * i, t),
        final_observation=seen(10 * i + t, 1),
        actions=torch.full((t, 4, 2), 0.1),
        valid=torch.ones(t, 4, dtype=torch.bool),
        rewards=torch.zeros(t, 4),
        behavior_log_prob=torch.zeros(t),
        replay={},
        terminated=True,
        truncated=False,
        success=True,
    )


def send(folder: Path) -> None:
    for a, b in ENTRIES:
        EpisodeQueue(folder / INBOX).put(
            a + 1, [(episode(i), torch.full((LENGTHS[i],), float(i))) for i in range(a, b)]
        )


class UntilIdle(queue.Queue):
    """Stops the learner once it has nothing to do."""

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        if block:
            return STOP
        raise queue.Empty


def server(folder: Path, commands: queue.Queue | None = None) -> LearnerServer:
    config = TD3Config(
        batch_size=8,
        updates_per_decision=PACE,
        start_decisions=START,
        critics=CriticsConfig(hidden=[8]),
    )
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(chunk_length=4, hidden=[8]), SPEC)
    learner = ReplayLearner(TD3(config, policy), folder / "replay", seed=0, embodiment=SPEC)
    return LearnerServer(folder, policy, learner, 3, commands or UntilIdle())


def check_all_is_there_once(folder: Path) -> None:
    lines = (folder / "replay" / "journal.jsonl").read_bytes().splitlines()
    records = [json.loads(line.partition(b" ")[2]) for line in lines]
    assert [(r["ticket"], r["rollout_id"], r["decisions"]) for r in records] == [
        (i + 1, f"e{i}", n) for i, n in enumerate(LENGTHS)
    ]
    assert not list((folder / INBOX).iterdir())
    state, weights = stored_learner(folder), published_weights(folder)
    assert state["updates"] == weights.updates == math.floor(EARNED)
    assert state["learner"]["owed"] == pytest.approx(EARNED - math.floor(EARNED))
    assert all(torch.equal(x, state["weights"][name]) for name, x in weights.tensors.items())


def test_a_learner_takes_what_was_sent_keeps_the_pace_and_publishes(tmp_path):
    send(tmp_path)
    server(tmp_path).run()
    check_all_is_there_once(tmp_path)
    assert published_weights(tmp_path).version == 4  # the start, after 3, 6 and 9 updates
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["taken"], figures["episodes"], figures["decisions"]) == (6, 6, 18)
    server(tmp_path).run()  # nothing new: the same once more
    check_all_is_there_once(tmp_path)
    assert published_weights(tmp_path).version == 4


KILLS = r"""
import os, signal, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a device is not shared with forks
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from test_concurrent import check_all_is_there_once, send, server
from vla_rl import storage
from vla_rl.data import journal, tables
from vla_rl.data.replay import Replay
from vla_rl.learning import learner_server, episode_queue
from vla_rl.learning.learners import ReplayLearner

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def half(path, offset, data):
    write(path, offset, data[: data.nbytes // 2])
    die()

def one_file_gone(_, entry):
    next(entry.path.iterdir()).unlink()
    die()

write = tables.write_at
def at(owner, name, call, instead=die, after=False):
    '''Die at the given call, before what it does, after it, or in the middle of it.'''
    def patch():
        real, calls = getattr(owner, name), [0]
        def patched(*arguments, **options):
            calls[0] += 1
            if calls[0] != call or after:
                result = real(*arguments, **options)
                return die() if calls[0] == call else result
            return instead(*arguments, **options)
        setattr(owner, name, patched)
    return patch

places = [
    at(learner_server, "save_learner", 1), at(learner_server, "save_learner", 1, after=True),
    at(storage, "_swap_in", 2), at(learner_server, "publish_weights", 1), at(episode_queue, "save_tensors", 2, after=True),
    *[at(tables, "write_at", n, half) for n in (1, 3, 4)], *[at(journal, "write_at", n, half) for n in (1, 2, 6)],
    *[at(Replay, "add", n, after=True) for n in (1, 2, 6)],
    *[at(episode_queue.EpisodeQueue, "remove", n) for n in (1, 2, 3)],
    *[at(episode_queue.EpisodeQueue, "remove", n, one_file_gone) for n in (1, 3)],
    *[at(ReplayLearner, "step", n, after=True) for n in (1, 3, 5, 9)], at(learner_server, "write_json", 3),
]
warm = Path(sys.argv[2]) / "warm"  # what torch imports at the first update, each fork would import again
send(warm)
server(warm).run()
killed = 0
for i, place in enumerate(places):
    folder = Path(sys.argv[2]) / str(i)
    for other in (place, places[(i * 7 + 3) % len(places)], None):  # killed once, once more elsewhere, then not
        child = os.fork()
        if not child:
            if other is place:
                send(folder)
            if other is not None:
                other()
            server(folder).run()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, (i, status)
        assert not (other is None and status), i
        assert other is not place or os.WIFSIGNALED(status), f"place {i} was never reached"
        killed += os.WIFSIGNALED(status)
    check_all_is_there_once(folder)
print(killed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked learners")
def test_a_learner_that_is_killed_anywhere_loses_no_episode_and_adds_none_twice(tmp_path):
    code = [sys.executable, "-c", KILLS, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 30


def test_weights_of_another_policy_and_damaged_episodes_are_refused(tmp_path):
    policy = SmallPolicy(SmallConfig(chunk_length=4, hidden=[8]), SPEC)
    other = SmallPolicy(SmallConfig(chunk_length=4, hidden=[9]), SPEC)
    with pytest.raises(CheckpointError, match="of another policy than the actor's"):
        take_weights(policy, learned_weights(other))
    send(tmp_path)
    (tmp_path / INBOX / "000000003-000000003" / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"000000003-000000003/state\.safetensors is damaged"):
        server(tmp_path).run()
    assert Replay(tmp_path / "replay", episodes=None).last_ticket == 2  # what came before is kept


# --------------------------------------------------------------------------------- the actor's side
class Published:
    """A `RemoteLearner` with a new version at every look, whose actor moves by a tenth of a
    half-range per version."""

    def __init__(self, policy: SmallPolicy) -> None:
        self.version, self._weights = (
            0,
            {name: torch.zeros_like(x) for name, x in learned_weights(policy).items()},
        )
        self._weights |= {"std": torch.ones(2)}

    def newest(self) -> tuple[int, dict[str, torch.Tensor]]:
        self.version += 1
        bias = next(
            name
            for name in reversed(self._weights)
            if name.startswith("actor.") and name.endswith("bias")
        )
        level = torch.full_like(self._weights[bias], 0.1 * self.version).atanh()
        return self.version, self._weights | {bias: level}

    def figures(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("every, versions", [(3, {1, 2, 3, 4}), (0, {1})])
def test_an_episode_runs_under_one_version_and_says_which(every, versions):
    env = InlineEnv(ToyReach(ToyConfig()), num_slots=2)
    policy = SmallPolicy(SmallConfig(chunk_length=4, hidden=[8]), SPEC)
    collector = SwappingCollector(RolloutEngine(env, policy), Published(policy), every)
    progress: list[tuple[int, int, int]] = []
    plan = [EpisodeSpec("reach_red", i, seed=i, rollout_id=str(i)) for i in range(10)]
    result = collector.collect(plan, deterministic=True, progress=lambda *now: progress.append(now))
    assert [t.rollout_id for t in result.trajectories] == [
        str(i) for i in range(10)
    ] and result.stats["episodes"] == 10
    assert [p[:2] for p in progress] == [(i + 1, 10) for i in range(10)]
    assert {t.policy_version for t in result.trajectories} == versions
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    for t in result.trajectories:
        assert len(t) > 1 and torch.allclose(
            t.proposed, (0.1 * t.policy_version * (high - low) / 2).expand_as(t.proposed)
        )


def processes_job(config) -> dict:
    return {
        "config": to_tree(config),
        "embodiment": SPEC.to_dict(),
        "tasks": [dataclasses.asdict(ToyReach().tasks[0])],
    }


def test_a_process_that_keeps_dying_ends_the_run_with_one_message(tmp_path):
    said: list[str] = []
    process = LearnerProcess(tmp_path, "no_such_module", {}, 1.0, 2, said.append)
    try:
        with pytest.raises(
            UserError, match=r"ended by itself \(status 1\), for the 3. time .*goes on from here"
        ):
            process.start()
    finally:
        process.stop()
    assert len(said) == 2 and "started again (2 of at most 2 times)" in said[1]


HANGS = """
import sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "new").write_text('{"taken": 0, "owed": 0.0}')
(folder / "new").replace(folder / "figures.json")  # (as a learner does: whole or not at all)
(folder / "beat").touch()
threading.Event().wait()
"""


def test_a_learner_that_hangs_is_noticed_killed_and_started_again(tmp_path, monkeypatch):
    (tmp_path / "hanging_learner.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    said: list[str] = []
    process = LearnerProcess(
        tmp_path / "learner", "hanging_learner", {}, 1.0, 1, said.append, hang_seconds=0.3
    )
    try:
        process.start()
        first = process.pid
        process.wait(lambda: bool(said))
        assert (
            "hung: no update in 0.3 s (rl.concurrent.hang_seconds), so it was killed and is started "
            "again" in said[0]
        )
        assert process.pid != first and not Path(f"/proc/{first}").exists()
        with pytest.raises(UserError, match=r"hung: no update in 0.3 s .*for the 2. time"):
            process.wait(lambda: False)
    finally:
        process.stop()


# --------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def start(finished_run) -> str:
    return (
        f"checkpoint={finished_run('run=toy_td3', 'phases=[collect,sft]') / 'checkpoints' / 'sft'}"
    )


def concurrently(start: str, folder: Path, *overrides: str):
    shared = [
        "run=toy_td3",
        f"output_dir={folder}",
        start,
        "phases=[rl]",
        "rl.rhythm=concurrent",
        "rl.guard=off",
        "algorithm.demonstration_share=0",
    ]
    return compose([*shared, "rl.concurrent.nice=0", *overrides])


@pytest.mark.slow
def test_what_a_learner_gives_up_for_is_the_actors_error_and_an_orphan_ends(start, tmp_path):
    tree = to_tree(concurrently(start, tmp_path))
    tree["algorithm"] = {"type": "filtered_bc"}
    job, module = processes_job(from_tree(tree)), learner_main.__name__
    process = LearnerProcess(tmp_path / "a", module, job, 1.0, 5, lambda text: pytest.fail(text))
    try:
        with pytest.raises(ConfigError, match="needs an algorithm that learns from a replay"):
            process.start()
    finally:
        process.stop()
    process = LearnerProcess(
        tmp_path / "b", module, processes_job(concurrently(start, tmp_path)), 1.0, 0
    )
    try:
        process.start()
        assert process.newest()[0] == 1 and process.newest() is None and process.is_even
        process._process.stdin.close()  # as the kernel does where the actor was killed
        assert process._process.wait(timeout=240) == 1
    finally:
        process.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_learner_killed_in_the_middle_of_a_run_costs_nothing_and_the_run_resumes(
    start, tmp_path, monkeypatch, capfd
):
    send_plain, pids, refused = LearnerProcess.send, [], []

    def send_and_kill(self, episodes):
        pids.append(self.pid)
        if len(pids) == 2:
            with pytest.raises(
                UserError, match=rf"in use by process {self.pid} on .*Only one process"
            ) as error:
                Replay(tmp_path / "toy_td3" / "replay", episodes=None)
            refused.append(error)
        if len(pids) == 7:
            raise KeyboardInterrupt
        send_plain(self, episodes)
        if len(pids) == 3:
            self.wait(lambda: json.loads((self.folder / "figures.json").read_text())["updates"] > 0)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(LearnerProcess, "send", send_and_kill)
    changes = [
        "rl.episodes_per_iteration=16",
        "rl.concurrent.max_ahead=60",
        "rl.concurrent.swap_every=8",
        "algorithm.start_decisions=80",
        "slots.slots_per_worker=8",
        "algorithm.updates_per_decision=0.5",
    ]
    folder = run_pipeline(concurrently(start, tmp_path, *changes, "rl.iterations=6"))
    assert len(refused) == 1 and len(set(pids)) == 2, "it was killed once, and started again"
    assert capfd.readouterr().out.count("ended by itself (signal 9) and is started again") == 1
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(concurrently(start, tmp_path, *changes, "rl.iterations=8"))
    for pid in set(pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # nothing is left behind
    run_pipeline(concurrently(start, tmp_path, *changes, "rl.iterations=8"))
    replay = Replay(folder / "replay", episodes=None)
    records = [
        json.loads(line.partition(b" ")[2])
        for line in (folder / "replay/journal.jsonl").read_bytes().splitlines()
    ]
    assert len({r["rollout_id"] for r in records}) == len(records) == 8 * 16
    assert [r["ticket"] for r in records] == list(range(1, 129))
    versions = [r["version"] for r in records]
    assert versions == sorted(versions) and versions[-1] > versions[0] >= 1
    counts = [sum(r["decisions"] for r in records[: i + 1]) for i in range(len(records))]
    earned = sum(0.5 * r["decisions"] for r, count in zip(records, counts) if count >= 80)
    weights = published_weights(folder / "learner")
    assert earned - 1.0 < weights.updates <= earned
    assert stored_learner(folder / "learner")["learner"]["algorithm"]["updates"] == weights.updates
    rl = load_tensors(folder / "checkpoints" / "rl" / MODEL)
    assert all(torch.equal(x, rl[name]) for name, x in weights.tensors.items()), (
        "the run ends with the last weights"
    )
    assert load_training_state(folder / "checkpoints" / "rl")["counters"]["iteration"] == 8
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["step"] for r in rows] == list(range(1, 9)) and all(
        r["learner/owed"] <= 60 for r in rows
    )
    assert replay.episodes == 128


@pytest.mark.slow
@pytest.mark.timeout(900)  # two processes beside others
def test_the_toy_task_is_learned_as_it_is_by_turns(start, tmp_path):
    config = concurrently(
        start,
        tmp_path,
        "phases=[eval_sft,rl,eval_rl]",
        "rl.iterations=30",
        "rl.concurrent.max_ahead=130",
        "rl.concurrent.publish_every=20",
    )
    folder = run_pipeline(config)
    before, after = (
        json.loads((folder / f"eval_{name}.json").read_text())["total"] for name in ("sft", "rl")
    )
    # Seed 0 starts at 39 %; 36 iterations end at 88 and 94 %, 18 once at no more than 47.
    assert before["rate"] <= 0.6 and after["rate"] >= before["rate"] + 0.2


# ------------------------------------------------------------------------------------ the benchmark
def measured(folder: Path, seconds: float, *others: dict, **extra: float) -> Path:
    """A run of two iterations of 30 and 34 control steps."""
    shared = {
        "phase": "rl",
        "engine/decisions": 8,
        "engine/seconds": 2.0,
        "time/iteration": seconds,
        "replay/updates": 4,
    }
    rows = [
        *others,
        *({**shared, **extra, "step": i + 1, "control_steps": (30, 64)[i]} for i in range(2)),
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({'time_s': 0.0, **row})}\n" for row in rows)
    )
    return folder


def test_rhythms_are_compared_from_the_first_episode_to_the_last_update(tmp_path):
    turns = figures_of(measured(tmp_path / "a", 8.0, **{"time/update": 5.0}), "alternate")
    assert (turns["seconds"], turns["control_steps_per_second"]) == (16.0, 4.0)
    assert (turns["updates"], turns["update_seconds"], turns["updates_per_decision"]) == (
        8,
        10.0,
        0.5,
    )
    finish = {"phase": "finish", "step": 2, "time/finish": 3.0, "replay/updates": 8}
    others = ({"phase": "offline", "step": 0, "time/start": 7.0}, finish)
    told = {
        "actor/wait_share": 0.25,
        "learner/wait_share": 0.5,
        "learner/staleness": 2.0,
        "learner/version": 9.0,
    }
    both = figures_of(measured(tmp_path / "b", 6.0, *others, **told), "concurrent")
    assert both["seconds"] == 12.0 - 7.0 + 3.0 and both["control_steps_per_second"] == 8.0
    assert both["updates"] == 16 and (both["staleness"], both["actor_wait_share"]) == (2.0, 0.25)
    found = compared(
        {
            "alternate": [turns, turns],
            "concurrent": [both, both | {"control_steps_per_second": 6.0}],
        }
    )
    assert found == {"ratio": 7.0 / 4.0, "low": 1.5, "high": 2.0, "update_ratio": 2.0}
