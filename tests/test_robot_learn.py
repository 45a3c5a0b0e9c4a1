"""``vla-rl robot learn``: what an arm's episodes become, and that each is learned from once,
whatever dies."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from real_helpers import kill_child, spawned, stopped_by_guard

from benchmarks.learning.curves import reached
from benchmarks.robot import hil
from policies.actors.residual import ACTION, ResidualPolicy
from policies.actors.settings import ResidualConfig
from policies.nano_vla import NanoVLA
from policies.settings import NanoVLAConfig, SmallConfig
from policies.small import SmallPolicy
from real.acting import ActingConfig
from real.body import BodyConfig
from real.episodes import Plan
from real.journal import journals, picture, read
from real.lockstep import Lockstep
from real.robots.world import PointWorld
from real.tasks import Task, spoken
from vla_rl.algorithms.dagger import Dagger
from vla_rl.assembly.learner_main import run_of
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.config import from_tree
from vla_rl.config.replay_algorithms import DaggerConfig
from vla_rl.data.replay import INTERVENTIONS, ONLINE, Replay
from vla_rl.data.session_trajectory import session_trajectory, version_name, version_number
from vla_rl.errors import ConfigError, TrainingDiverged, UserError
from vla_rl.monitoring.machine import versions
from vla_rl.monitoring.metrics import MetricsLogger, read_metrics
from vla_rl.paths import config_dir
from vla_rl.robot import learning
from vla_rl.robot.episode_feed import EpisodeFeed, EpisodeFeedThread
from vla_rl.robot.labels import SessionReward
from vla_rl.robot.operator import OperatorSettings, make_operator
from vla_rl.types import FRESH, EpisodeSpec, Observation, Trajectory

SPEC = PointWorld().embodiment
RAISE = Task("raise", "raise the point", horizon=60)
FAKE = BodyConfig(
    limits=str(config_dir() / "limits" / "fake_point.yaml"),
    camera_hz=20.0,
    supervisor={"required": ["guard", "recorder"], "cameras": ["front"]},
)
EXACT = OperatorSettings(
    patience_s=0.4, noise=0.0, reaction_median_s=0.05, help_gain=0.3, speed=0.4
)


def helped(folder: Path, rows: int = 4, episodes: int = 1, task: Task = RAISE, operator=EXACT):
    """Journals of a policy that sinks slowly, ``rows`` control steps a decision, and of an
    operator who raises the point."""

    def sink(images, proprio, instruction, first):
        return np.tile([[0.0, 0.0, -0.002, -1.0]], (rows, 1))

    session = Lockstep(folder, FAKE)
    try:
        if operator is not None:
            session.watched(make_operator(operator, session.world))
        plan = Plan((task,), episodes, alone=True)
        session.run(plan, sink, version_name(7), ActingConfig(), lambda outcome: None)
    finally:
        session.close()
    return [read(path) for path in journals(folder)]


# ---------------------------------------------------------------------------- journal to trajectory
def test_an_episode_with_help_becomes_decisions_of_the_policy_and_of_the_person(tmp_path):
    (episode,) = helped(tmp_path / "s")
    trajectory, why = session_trajectory(episode, 4)
    assert why == "" and trajectory is not None
    steps = [s for s in episode.steps if s["sent"]]
    human = np.array([s["is_human"] for s in steps])
    assert human.any() and not human.all() and not human[0], "both took part"
    assert torch.equal(trajectory.is_human[trajectory.valid], torch.from_numpy(human))
    sent = torch.tensor([s["sent"] for s in steps])
    torch.testing.assert_close(trajectory.actions[trajectory.valid], sent, atol=1e-6, rtol=0)
    asked = torch.tensor([s["human"] if s["is_human"] else s["policy"] for s in steps])
    own = trajectory.proposed[trajectory.valid][~torch.from_numpy(human)]
    torch.testing.assert_close(own, asked[~torch.from_numpy(human)])
    for row, (valid, who) in enumerate(zip(trajectory.valid, trajectory.is_human)):
        assert valid[0] and len({bool(x) for x in who[valid]}) == 1, "no row mixes the two"
        n = int(valid.sum())
        assert torch.equal(valid, torch.arange(4) < n), "executed steps come first"
        assert torch.equal(
            trajectory.actions[row, n:], trajectory.actions[row, n - 1].expand(4 - n, -1)
        )
    turns = np.flatnonzero(np.diff(human.astype(int)))
    assert len(turns) >= 2, "handed back"
    rows_human = trajectory.is_human[:, 0]
    after = torch.cat([torch.tensor([True]), rows_human[:-1]])
    assert torch.equal(trajectory.replay[FRESH], rows_human | after), (
        "the first of all, a person's, and the first after one"
    )
    assert trajectory.success and trajectory.terminated and trajectory.label_source == "simulator"
    last = int(trajectory.valid[-1].sum()) - 1
    assert trajectory.rewards.sum() == 1 and trajectory.rewards[-1, last] == 1
    assert trajectory.policy_version == 7 and version_number("mover@12") == 0


def test_rows_show_what_was_seen_as_they_began(tmp_path):
    (episode,) = helped(tmp_path / "s")
    trajectory, _ = session_trajectory(episode, 4)
    frames = episode.frames["front"]
    firsts = [
        t
        for i, t in enumerate(episode.ticks)
        if t["step"] >= 0 and t["step"] != episode.ticks[i - 1]["step"]
    ]
    done = {s["step"] for s in episode.steps}
    begun = [t["stamp"] for t in firsts if t["step"] in done]
    place = 0
    for row, n in enumerate(trajectory.valid.sum(1).tolist()):
        taken, image = [(f[2], f[5]) for f in frames if f[2] <= begun[place]][-1]
        assert begun[place] - taken <= 0.05 + 1e-6
        assert np.array_equal(trajectory.observations.images["front"][row], picture(image))
        state = min(episode.ticks, key=lambda t: abs(t["measured"] - taken))
        np.testing.assert_allclose(
            trajectory.observations.proprio[row], state["proprio"], atol=1e-6
        )
        place += n
    assert np.array_equal(trajectory.final_observation.images["front"][0], picture(frames[-1][5]))


def test_time_that_ran_out_bootstraps_and_a_discarded_episode_is_none(tmp_path):
    (episode,) = helped(tmp_path / "s", task=dataclasses.replace(RAISE, horizon=12), operator=None)
    trajectory, _ = session_trajectory(episode, 4)
    assert trajectory.truncated and not trajectory.success and trajectory.rewards.sum() == 0
    assert not trajectory.is_human.any() and trajectory.replay[FRESH].tolist() == [
        True,
        False,
        False,
    ]
    episode.end["reason"] = "launcher"  # as where it was paused when its time ran out
    assert session_trajectory(episode, 4)[0].truncated, "a simulator calls nothing else a failure"
    next(e for e in episode.events if e["name"] == "label")["source"] = "operator.console"
    assert session_trajectory(episode, 4)[0].terminated
    episode.events.clear()  # nobody labelled it: it was cut
    assert session_trajectory(episode, 4)[0].truncated
    episode.end["discarded"] = True
    assert session_trajectory(episode, 4) == (None, "discarded by the operator")
    episode.end["discarded"] = False
    episode.steps[-1]["policy_version"] = "other"
    with pytest.raises(UserError, match="several versions of the policy"):
        session_trajectory(episode, 4)


def test_after_a_decision_that_was_never_executed_a_row_does_not_go_on(tmp_path):
    (episode,) = helped(tmp_path / "s", task=dataclasses.replace(RAISE, horizon=16), operator=None)
    assert session_trajectory(episode, 4)[0].replay[FRESH].tolist() == [True, False, False, False]
    for tick in episode.steps:
        tick["decision"] += 2 * (tick["decision"] >= 2)  # two were refused
    assert session_trajectory(episode, 4)[0].replay[FRESH].tolist() == [True, False, True, False]


def test_a_residuals_frozen_chunks_begin_anew_after_a_person():
    """Two decisions a chunk: 0 0 | a person's 2 3, each anew | 4 4 | 6 and the last frame go on
    together."""
    torch.manual_seed(0)
    spec = dataclasses.replace(
        SPEC, cameras=(dataclasses.replace(SPEC.cameras[0], height=28, width=28),)
    )
    base = NanoVLA(NanoVLAConfig(chunk_length=4), spec).eval()
    actor = ResidualPolicy(ResidualConfig(hold=2, distribution="deterministic"), base)
    t = 7
    seen = Observation(
        {"front": torch.randint(0, 256, (t + 1, 28, 28, 3), dtype=torch.uint8)},
        torch.randn(t + 1, 4),
        ("go",) * (t + 1),
    )
    human = torch.zeros(t, 2, dtype=torch.bool)
    human[2:4] = True
    fresh = torch.tensor([True, False, True, True, True, False, False])
    trajectory = Trajectory(
        EpisodeSpec("raise", 0),
        seen[:t],
        seen[t : t + 1],
        torch.zeros(t, 2, 4),
        torch.ones(t, 2, dtype=torch.bool),
        torch.zeros(t, 2),
        torch.zeros(t),
        {FRESH: fresh},
        terminated=True,
        truncated=False,
        success=True,
        is_human=human,
    )
    with torch.no_grad():
        units = actor.to_unit(base.act(seen, deterministic=True).chunk.actions)
    places = [(0, 0), (0, 1), (2, 0), (3, 0), (4, 0), (4, 1), (6, 0), (6, 1)]
    wanted = torch.stack(
        [units[frame, 2 * part : 2 * part + 2].flatten() for frame, part in places]
    )
    torch.testing.assert_close(actor.annotate(trajectory)[ACTION], wanted)


# ----------------------------------------------------------------------------------------- by turns
@pytest.fixture
def start(tmp_path) -> Path:
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(chunk_length=4, hidden=[16]), SPEC)
    save_checkpoint(tmp_path / "start", policy)
    return tmp_path / "start"


def arguments(start: Path, out: Path, *more: str, episodes: int = 3) -> list[str]:
    operator = ["operator.patience_s=0.4", "operator.help_gain=0.3"]
    own = [
        "run=toy_td3",
        "robot.horizon=40",
        "algorithm.start_decisions=5",
        "algorithm.updates_per_decision=0.5",
    ]
    given = ["--robot", "fake", "--out", str(out), "--lockstep", "--episodes", str(episodes)]
    return ["robot", "learn", str(start), *given, *own, "algorithm.batch_size=16", *operator, *more]


def test_a_policy_that_learns_nothing_is_judged_alike_each_time(start, tmp_path, monkeypatch):
    from real.lockstep import Lockstep

    ends, run = [], Lockstep.run

    def noted(self, plan, decide, version, *given):
        done = run(self, plan, decide, version, *given)
        if version == "judged":
            ends.append([self.world.read()["position"].tolist(), len(done.outcomes)])
        return done

    monkeypatch.setattr(Lockstep, "run", noted)
    still = ["algorithm.updates_per_decision=0", "--evaluate", "3", "--every", "1"]
    assert main(arguments(start, tmp_path / "a", *still, episodes=2)) == 0
    assert len(ends) == 3 and ends[0] == ends[1] == ends[2]
    assert ends[0][1] == 3 and any(ends[0][0])


def test_episodes_are_learned_from_logged_and_judged_and_the_same_command_goes_on(
    start, tmp_path, capsys
):
    out = tmp_path / "a"
    assert main(arguments(start, out, "--evaluate", "1", "--every", "3")) == 0
    assert "after 3 episodes: " in capsys.readouterr().out
    rows = [r for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "robot"]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert max(r["robot/intervention_rate"] for r in rows) > 0.1 and rows[-1]["robot/episodes"] == 3
    assert rows[0]["robot/version"] < rows[-1]["robot/version"] <= rows[-1]["learner/version"], (
        "acts with it"
    )
    assert rows[-1]["robot/robot_minutes"] == pytest.approx(
        sum(r["robot/cycle_seconds"] for r in rows) / 60
    )
    judged = [r for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "judged"]
    assert [r["step"] for r in judged] == [0, 3]
    assert (out / "report.html").is_file() and (
        out / "checkpoints" / "rl" / "config.json"
    ).is_file()
    page = (out / "report.html").read_text()
    assert "Success without a person" in page and "Seconds of an episode" in page
    first = json.loads((out / "phases.json").read_text())
    assert first["peak_memory_bytes"] > 2**26 and first["robot"]["seconds"] > 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"].startswith("After 3 episodes with the arm the policy solves ")
    assert (
        summary["verdict"].endswith("before the first")
        and "held-out episode without help" in summary["verdict"]
    )
    assert summary["runs"][0]["git_commit"] == versions()["git_commit"] != ""
    assert main(arguments(start, out)) == 0
    assert "has its 3 episodes" in capsys.readouterr().out
    assert main(arguments(start, out, episodes=4)) == 0
    both = json.loads((out / "phases.json").read_text())
    assert both["robot"]["control_steps"] > first["robot"]["control_steps"]
    assert (
        both["robot"]["seconds"] > first["robot"]["seconds"]
        and both["peak_memory_bytes"] >= first["peak_memory_bytes"]
    )
    replay = Replay(out / "replay", episodes=None)
    assert (replay.episodes, replay.last_ticket) == (4, 4)
    assert sorted(p.name for p in (out / "sessions").iterdir()) == ["0001", "0002"]
    people = sum(
        r["robot/human_steps"] for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "robot"
    )
    assert replay.count(ONLINE) == len(replay) and 0 < replay.count(INTERVENTIONS) <= people


def composed(start: Path, out: Path, *more: str, **asked):
    given = [
        "robot=fake",
        "run=toy_td3",
        "operator.patience_s=0.4",
        "operator.help_gain=0.3",
        "robot.horizon=40",
    ]
    own = [
        "algorithm.start_decisions=5",
        "algorithm.updates_per_decision=0.5",
        "algorithm.batch_size=16",
    ]
    asked = {"episodes": 3, "console": False, "lockstep": True} | asked
    return learning.compose(str(start), out, [*given, *own, *more], **asked)


def test_the_sessions_tasks_are_learned_whichever_a_preset_names(start, tmp_path):
    """(hil_dagger builds on the quickstart, whose task is lift_cube.)"""
    words = ["robot=fake", "run=hil_dagger", "robot.tasks=['lift the cube']"]
    asked = learning.compose(str(start), tmp_path / "out", words, episodes=1, console=False)
    assert asked.config.tasks == ["lift_cube"]
    job = learning._described(asked, PointWorld().embodiment, [spoken("lift the cube")])
    run = run_of(from_tree(job["config"]), job)
    assert [task.instructions for task in run.train_tasks] == [("lift the cube",)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from vla_rl.learning.episode_queue import published_weights

    return published_weights(folder / "learner").tensors


def test_lockstep_learning_is_twice_the_same(start, tmp_path):
    for name in ("a", "b"):
        learning.learn(composed(start, tmp_path / name), lambda text: None)
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["ensemble", "asynchronous"])
def test_what_was_executed_is_learned_from_however_it_was_decided(start, tmp_path, kind):
    """Each row is what was seen as its first step began and what was sent from there on; nothing
    is left out, or twice."""
    out = tmp_path / "a"
    learning.learn(composed(start, out, f"robot.acting={kind}", episodes=1), lambda text: None)
    episode = read(next((out / "sessions").glob("*/journal/*.vrj")))
    assert {chunk["acting"] for chunk in episode.chunks} == {kind}
    trajectory, _ = session_trajectory(episode, 4)
    sent = np.array([tick["sent"] for tick in episode.steps], np.float32)
    np.testing.assert_allclose(trajectory.actions[trajectory.valid].numpy(), sent, atol=1e-6)
    at = 0
    for row, count in enumerate(trajectory.valid.sum(1).tolist()):
        step = episode.steps[at]
        begun = min(t["stamp"] for t in episode.ticks if t["step"] == step["step"])
        shown = max((f for f in episode.frames["front"] if f[2] <= begun), key=lambda f: f[2])
        wanted = picture(shown[5])
        np.testing.assert_array_equal(trajectory.observations.images["front"][row].numpy(), wanted)
        at += count
    replay = Replay(out / "replay", episodes=None)
    assert len(replay) == len(trajectory) and replay.count(ONLINE) == len(trajectory)


class Killed(BaseException):
    """In the place of a signal that cannot be caught."""


@pytest.mark.parametrize("when", ["before the ledger", "before it is sent", "before it is learned"])
def test_what_is_killed_sends_each_episode_once(start, tmp_path, monkeypatch, when):
    from vla_rl.data.journal import Journal
    from vla_rl.learning.learner_server import LearnerServer
    from vla_rl.robot.learning import LearnerInTurns

    owner, name = {
        "before the ledger": (Journal, "append"),
        "before it is sent": (LearnerInTurns, "send"),
        "before it is learned": (LearnerServer, "settle"),
    }[when]
    plain, calls = getattr(owner, name), []

    def dies(self, *arguments):
        calls.append(arguments)
        last = (
            arguments
            and isinstance(arguments[0], dict)
            and str(arguments[0].get("journal", "")).endswith("2.vrj")
        )
        if last or (name != "append" and len(calls) == (2 if name == "send" else 3)):
            raise Killed
        return plain(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dies)
        patched.setattr(LearnerInTurns, "stop", lambda self: None)
        patched.setattr(learning, "_finished", lambda *_: None)
        with pytest.raises(Killed):
            learning.learn(composed(start, tmp_path / "a"), lambda text: None)
    learning.learn(composed(start, tmp_path / "a"), lambda text: None)
    out = tmp_path / "a"
    replay = Replay(out / "replay", episodes=None)
    assert (replay.episodes, replay.last_ticket) == (3, 3)
    lines = (out / "replay" / "journal.jsonl").read_bytes().splitlines()
    kept = [json.loads(line.partition(b" ")[2])["rollout_id"] for line in lines]
    assert kept == ["0001/episode_000001.vrj", "0001/episode_000002.vrj", "0002/episode_000001.vrj"]
    steps = [r["step"] for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "robot"]
    assert steps == [0, 1, 2]


# ------------------------------------------------------------------------------------- off the loop
class Tickets:
    """A learner that keeps what it is sent, after ``before``."""

    def __init__(self, before=lambda: None):
        self.before, self.sent = before, []

    @property
    def last(self) -> int:
        return len(self.sent)

    def send(self, episodes):
        self.before()
        self.sent += [trajectory.episode.rollout_id for trajectory, _ in episodes]

    def figures(self):
        return {"owed": 5.0 * len(self.sent)}


def labels(trajectory):
    return trajectory.rewards.sum(1)


labels.refit = lambda labelled, newest: {}  # type: ignore[attr-defined]


def harvest_of(out: Path, learner: Tickets, logger: MetricsLogger) -> EpisodeFeed:
    return EpisodeFeed(out, 4, learner, labels, logger, lambda text: None)  # type: ignore[arg-type]


def ledger(out: Path) -> list[tuple[int, str]]:
    from vla_rl.data.journal import Journal

    return [
        (record["ticket"], record["journal"]) for record in Journal(out / "episodes.jsonl").read()
    ]


def test_the_session_goes_on_while_an_episode_is_harvested(tmp_path):
    """The first is held in the learner's hands: the loop looks on, a second one is closed, and
    both go out in order."""
    out, under_way, go_on = tmp_path / "a", threading.Event(), threading.Event()
    short = dataclasses.replace(RAISE, horizon=8)
    helped(out / "sessions" / "0001", task=short, operator=None)

    def held():
        under_way.set()
        assert go_on.wait(120)

    learner = Tickets(held)
    with (
        MetricsLogger(out) as logger,
        EpisodeFeedThread(harvest_of(out, learner, logger)) as thread,
    ):
        ready, waits = learning._Ready(thread, 0, print), learning._Ready(thread, 1, print)
        assert ready() and under_way.wait(120)
        assert ledger(out) == [(1, "sessions/0001/journal/episode_000001.vrj")], (
            "on the disk before it is sent"
        )
        helped(out / "sessions" / "0002", task=short, operator=None)
        ready._looked = -math.inf
        assert ready() and thread.waiting == 2 and learner.sent == []
        assert not waits(), "with max_ahead the arm waits, and its launcher does not"
        go_on.set()
    assert learner.sent == ["0001/episode_000001.vrj", "0002/episode_000001.vrj"]
    assert (
        [ticket for ticket, _ in ledger(out)] == [1, 2]
        and thread.waiting == 0
        and thread.owed == 10.0
    )
    assert [r["step"] for r in read_metrics(out / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("when", ["before the ledger", "before it is sent", "before it is logged"])
def test_what_the_harvest_fails_of_is_told_and_each_episode_goes_out_once(
    tmp_path, monkeypatch, when
):
    from vla_rl.data.journal import Journal

    out, learner = tmp_path / "a", Tickets()
    helped(
        out / "sessions" / "0001",
        episodes=3,
        task=dataclasses.replace(RAISE, horizon=8),
        operator=None,
    )
    owner, name = {
        "before the ledger": (Journal, "append"),
        "before it is sent": (Tickets, "send"),
        "before it is logged": (MetricsLogger, "log"),
    }[when]
    plain, calls = getattr(owner, name), []

    def dies(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise UserError("no room")
        return plain(self, *arguments)

    monkeypatch.setattr(owner, name, dies)
    with MetricsLogger(out) as logger:
        with (
            pytest.raises(UserError, match="no room"),
            EpisodeFeedThread(harvest_of(out, learner, logger)),
        ):
            pass  # what was closed is taken as it ends
        again = harvest_of(out, learner, logger)
        again.resume()
        with pytest.raises(KeyboardInterrupt), EpisodeFeedThread(again) as thread:  # nothing is new
            thread.look()
            raise KeyboardInterrupt
    assert learner.sent == [f"0001/episode_00000{n}.vrj" for n in (1, 2, 3)]
    assert [ticket for ticket, _ in ledger(out)] == [1, 2, 3]
    assert [r["step"] for r in read_metrics(out / "metrics.jsonl")] == [0, 1, 2]


def test_after_an_interrupt_what_was_closed_is_taken_and_a_failure_is_still_told(tmp_path):
    out, learner = tmp_path / "a", Tickets()
    helped(
        out / "sessions" / "0001",
        episodes=2,
        task=dataclasses.replace(RAISE, horizon=8),
        operator=None,
    )
    with MetricsLogger(out) as logger:
        with pytest.raises(KeyboardInterrupt), EpisodeFeedThread(harvest_of(out, learner, logger)):
            raise KeyboardInterrupt
        assert learner.sent == ["0001/episode_000001.vrj", "0001/episode_000002.vrj"]
        (out / "sessions" / "0001" / "journal" / "episode_000003.vrj").write_bytes(b"no journal")
        with (
            pytest.raises(UserError, match="is no journal"),
            EpisodeFeedThread(harvest_of(out, learner, logger)),
        ):
            raise KeyboardInterrupt


def test_an_episode_whose_label_may_still_be_changed_waits_and_a_damaged_ledger_is_refused(
    tmp_path,
):
    out, learner = tmp_path / "a", Tickets()
    helped(
        out / "sessions" / "0001",
        episodes=3,
        task=dataclasses.replace(RAISE, horizon=8),
        operator=None,
    )
    paths = sorted((out / "sessions" / "0001" / "journal").glob("*.vrj"))
    # (the second is closed long after this test has ended, however busy the machine is)
    for path, age in zip(paths, (60.0, -3600.0, 60.0)):
        os.utime(path, (time.time() - age,) * 2)
    with MetricsLogger(out) as logger:
        harvest = harvest_of(out, learner, logger)
        names = [f"sessions/0001/journal/{path.name}" for path in paths]
        assert harvest.closed() == names and harvest.closed(15.0) == names[:1], (
            "in order: the third waits for the second"
        )
        with EpisodeFeedThread(harvest, 15.0) as thread:
            thread.look()
            assert thread._queued == set(names[:1])
        assert len(learner.sent) == 3, "as it ends, nothing waits"
        file = out / "episodes.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        forged = json.dumps({**json.loads(lines[1][9:]), "ticket": "2"}).encode()
        for damage, said in (
            (
                [lines[0], b"?" + lines[1][1:], lines[2]],
                "line 2 of episodes.jsonl is not whole, later ones are",
            ),
            (
                [lines[0], lines[2]],
                "line 2 of episodes.jsonl is no record of an episode, or not the next",
            ),
            (
                [lines[0], b"%08x %s\n" % (zlib.crc32(forged), forged)],
                "line 2 of episodes.jsonl is no record",
            ),
        ):
            file.write_bytes(b"".join(damage))
            with pytest.raises(UserError, match=said):
                harvest_of(out, learner, logger)
            assert file.read_bytes() == b"".join(damage)
        file.write_bytes(b"".join(lines) + lines[0][:20])  # half a line, as a kill leaves it
        assert len(harvest_of(out, learner, logger).records) == 3


# ------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize(
    "more, asked, said",
    [
        (
            ["run=quickstart"],
            {},
            "algorithm.type=ppo learns from the decisions of the present policy alone",
        ),
        (["run=toy", "algorithm=filtered_bc"], {}, "algorithm.type=filtered_bc learns from"),
        (["run=hil_residual", "robot.acting=asynchronous"], {}, "Set robot.acting=synchronous"),
        (
            ["run=hil_residual", "robot.acting=rtc"],
            {},
            "robot.acting=rtc: actor=residual learns by what the policy beneath",
        ),
        (
            ["run=quickstart", "robot.acting=ensemble"],
            {},
            "algorithm.type=ppo learns from the decisions of the present",
        ),
        (["operator=stack"], {}, "there is operator=stuck"),
        (["operator.pace=1"], {}, "there is no key operator.pace"),
        (["operator.speed=0"], {}, "operator.speed=0"),
        ([], {"episodes": 0}, "say how long with --episodes N"),
        (["run=toy_td3", "actor=steered", "algorithm=sac"], {}, "use algorithm=dsrl"),
    ],
)
def test_what_cannot_be_learned_is_refused_before_anything_moves(tmp_path, more, asked, said):
    run = [] if any(key.startswith("run=") for key in more) else ["run=toy_td3"]
    given = ["robot=fake", *run, *more]
    with pytest.raises(ConfigError) as error:
        learning.compose(
            str(tmp_path),
            tmp_path / "a",
            given,
            **{"episodes": 3, "console": False, "lockstep": True} | asked,
        )
    assert said in str(error.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "more, said",
    [
        ([], "gone"),
        (["--evaluate", "-1"], "--evaluate -1"),
        (["--every", "0"], "--every 0: give 1 or more"),
    ],
)
def test_the_command_needs_no_number_of_episodes_and_checks_what_it_is_given(
    tmp_path, capsys, more, said
):
    assert (
        main(
            [
                "robot",
                "learn",
                str(tmp_path / "gone"),
                "--robot",
                "fake",
                "--out",
                str(tmp_path / "a"),
                *more,
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert said in told and "--episodes" not in told


def test_a_journal_that_a_kill_left_empty_is_no_obstacle(start, tmp_path):
    out = tmp_path / "run"
    empty = out / "sessions" / "0001" / "journal" / "episode_000000.vrj.open"
    empty.parent.mkdir(parents=True)
    empty.touch()
    assert main(arguments(start, out, episodes=1)) == 0
    assert (
        not empty.exists()
        and len([r for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "robot"]) == 1
    )


# ----------------------------------------------------------------------------- in its own processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_session_and_its_learner_may_be_killed_and_the_same_command_goes_on(start, tmp_path):
    """The learner is killed after the first episode, the session's launcher after the second."""
    out = tmp_path / "a"
    own = [
        "run=toy_td3",
        "robot.horizon=20",
        "algorithm.start_decisions=5",
        "algorithm.updates_per_decision=0.5",
    ]
    slow = [
        "robot.supervisor.silence_s=0.3",
        "robot.supervisor.frame_age_s=2.0",
        "algorithm.batch_size=16",
        "threads=1",
    ]
    asked = ["--robot", "fake", "--out", str(out), "--headless", "--episodes", "4"]
    given = ["robot", "learn", str(start), *asked, *own, *slow]
    process = spawned(*given)
    said = []
    assert process.stdout is not None
    for text in process.stdout:
        said.append(text)
        if text.startswith("episode 1:"):
            kill_child(process, "learner_main")
        if text.startswith("episode 2:"):
            process.kill()
            break
    process.communicate()
    # a guard that stops the arm, as this machine is too busy, ends a session too: once more
    for _ in range(6):
        again = spawned(*given)
        told = again.communicate()[0]
        if not stopped_by_guard(told):
            break
    assert again.returncode == 0, (said, told)
    replay = Replay(out / "replay", episodes=None)
    assert replay.last_ticket == replay.episodes >= 4
    lines = (out / "replay" / "journal.jsonl").read_bytes().splitlines()
    kept = [json.loads(line.partition(b" ")[2]) for line in lines]
    names = [record["rollout_id"] for record in kept]
    assert len(set(names)) == len(names) == len(list((out / "sessions").glob("*/journal/*.vrj")))
    rows = [r for r in read_metrics(out / "metrics.jsonl") if r["phase"] == "robot"]
    assert [r["step"] for r in rows] == list(range(len(names)))
    assert rows[-1]["robot/version"] >= 1 and (out / "checkpoints" / "rl" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_real_time_an_operator_helps_and_a_slow_reward_holds_nothing_up(
    start, tmp_path, monkeypatch
):
    """The first episode's reward is given once the second episode has ended, which it would not
    if anybody waited for it."""
    second, said, plain = threading.Event(), [], SessionReward.__call__

    def slow(self, trajectory):
        assert second.wait(300), said
        return plain(self, trajectory)

    def say(text):
        said.append(text)
        if text.startswith("episode 2:"):
            second.set()

    monkeypatch.setattr(SessionReward, "__call__", slow)
    busy = [
        "robot.supervisor.silence_s=0.3",
        "robot.supervisor.frame_age_s=2.0",
        "threads=1",
        "operator.speed=1",
    ]
    # a guard that stops the arm, as this machine is too busy, ends a session too: once more
    for _ in range(6):
        try:
            learning.learn(composed(start, tmp_path / "a", *busy, lockstep=False, episodes=2), say)
            break
        except UserError as error:
            assert stopped_by_guard(str(error))
            second.set()
    replay = Replay(tmp_path / "a" / "replay", episodes=None)
    assert (
        replay.last_ticket
        == replay.episodes
        == len(list((tmp_path / "a").glob("sessions/*/journal/*.vrj")))
        >= 2
    )
    assert replay.count(INTERVENTIONS) > 0, "the operator helped"


def test_a_classifier_is_fitted_on_the_runs_own_labels_and_kept(start, tmp_path):
    """Every second episode has time to succeed. Labels are rewards until four are there; then
    the classifier scores."""
    from vla_rl.assembly.learner_main import job_of, run_of
    from vla_rl.robot.reward_process import judge_of

    out = tmp_path / "a"
    small = [
        "reward=classifier",
        "reward.updates=60",
        "reward.refit_updates=20",
        "reward_check.refit_every=4",
    ]
    config = composed(start, out, *small, "reward_check.demonstrations=0").config
    for session, horizon in enumerate((60, 8, 60, 8), 1):
        helped(
            out / "sessions" / f"{session:04d}", task=dataclasses.replace(RAISE, horizon=horizon)
        )
    said: list[str] = []
    sent: list[list[float]] = []

    class Keeps:
        last = 0

        def send(self, episodes):
            self.last += len(episodes)
            sent.extend(rewards.tolist() for _, rewards in episodes)

        def figures(self):
            return {}

    def harvest() -> EpisodeFeed:
        run = run_of(config, job_of(config, SPEC, []))
        return EpisodeFeed(
            out, 4, Keeps(), SessionReward(run, None, said.append), logger, said.append
        )

    with MetricsLogger(out) as logger:
        elsewhere = SessionReward(
            run_of(config, job_of(config, SPEC, [])), None
        )  # of the process that shows the curve
        first = harvest()
        taken = first.gather()
        assert [t.success for t in taken] == [True, False, True, False]
        assert [sum(rewards) for rewards in sent] == [1.0, 0.0, 1.0, 0.0], "labels"
        assert len(said) == 1 and "the reward was fitted on 4 labelled episodes" in said[0]
        (row,) = [r for r in read_metrics(out / "metrics.jsonl") if "reward/held_out_accuracy" in r]
        assert row["step"] == 3 and (out / "reward" / "reward.json").is_file()
        assert judge_of(elsewhere)(taken[0]) is None
        elsewhere.refresh()
        assert judge_of(elsewhere)(taken[0]) == float(
            first._reward.reward.progress([taken[0]])[0][-1]
        )
        again = harvest()  # another process: it scores with what was fitted
        for trajectory in taken:
            relabelled = dataclasses.replace(
                trajectory, success=False, rewards=torch.zeros_like(trajectory.rewards)
            )
            assert torch.equal(again._reward(relabelled), first._reward(relabelled))
        won, lost = (float(again._reward.reward.progress([taken[i]])[0][-1]) for i in (0, 1))
        assert won > lost, "what it sees at the end of a success, and of a failure"


# --------------------------------------------------------------------------------- imitating people
def test_dagger_imitates_people_alone():
    """Two episodes of one decision in front of the same picture: the policy's own pushes one
    way, the person's the other."""
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(chunk_length=2, hidden=[16]), SPEC)
    algorithm = Dagger(DaggerConfig(batch_size=8, learning_rate=1e-2), policy)
    replay, generator = Replay(), torch.Generator().manual_seed(0)

    def add(push: float, human: bool) -> None:
        seen = Observation.blank(SPEC)
        valid, actions = torch.tensor([[True, human]]), torch.full((1, 2, 4), push)
        trajectory = Trajectory(
            EpisodeSpec("raise", 0),
            seen,
            seen,
            actions,
            valid,
            torch.zeros(1, 2),
            torch.zeros(1),
            {},
            terminated=True,
            truncated=False,
            success=True,
            is_human=valid & human,
        )
        replay.add(
            trajectory, torch.zeros(1), ONLINE, algorithm.annotate(trajectory, torch.zeros(1))
        )

    before = [p.clone() for p in policy.parameters()]
    add(0.04, human=False)
    assert algorithm.update(lambda *a, **k: replay.draw(*a, generator=generator, **k)) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters())), (
        "nobody has shown anything"
    )
    add(-0.03, human=True)
    for _ in range(300):
        algorithm.update(lambda *a, **k: replay.draw(*a, generator=generator, **k))
    acted = policy.act(Observation.blank(SPEC), deterministic=True).chunk.actions[0]
    torch.testing.assert_close(acted[:, :3], torch.full((2, 3), -0.03), atol=2e-3, rtol=0)
    again = Dagger(DaggerConfig(), policy)
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again.generator.get_state(), algorithm.generator.get_state())


def test_methods_are_compared_in_one_table(start, tmp_path, monkeypatch):
    shared = [
        "robot=fake",
        "robot.horizon=30",
        "operator.patience_s=0.4",
        "algorithm.start_decisions=5",
    ]
    small = ["run=toy_td3", "algorithm.batch_size=16", "algorithm.updates_per_decision=0.5"]
    methods = {
        "hil_serl": [*small, "operator=stuck"],
        "bc": ["run=toy_td3", "algorithm=dagger", "actor=none", "algorithm.batch_size=16"],
    }
    monkeypatch.setattr(hil, "METHODS", methods)
    said: list[str] = []
    page = tmp_path / "page.html"
    monkeypatch.setattr(hil, "say", said.append)
    effort = {"episodes": 2, "every": 2, "judge": 1}
    found = hil.measure(shared, start, "bc,hil_serl", **effort, out=tmp_path / "out", figure=page)
    serl, cloned = found["methods"]
    assert [p["episodes"] for p in serl["curve"]] == [0, 2] and [
        p["episodes"] for p in cloned["curve"]
    ] == [2]
    assert (
        serl["curve"][1]["minutes"] == cloned["curve"][0]["minutes"] > 0
        and serl["first_interventions"] > 0
    )
    assert any("decisions of people" in text for text in said) and "arm's minutes" in hil.text(
        found
    )
    assert "held-out starts" in page.read_text()
    curve = [0.0, 1.0, 0.9, 0.96, 1.0]
    assert reached(curve, 0.95) == 3 and reached(curve[:3], 0.95) is None
    for wrong, text in (("bc", "name that too"), ("dagger", "choose among"), ("", "choose among")):
        with pytest.raises(ConfigError, match=text):
            hil.measure(shared, start, wrong, **effort, out=tmp_path / "b")


def test_the_cost_of_earlier_processes_counts_killed_ones_by_their_last_row(tmp_path):
    rows = [{"phase": "robot", "step": i, "time_s": 10.0 * (i + 1)} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with learning.Cost.of(tmp_path) as cost:
        told = cost.told({"episodes": 3})
    assert (
        30.0 <= told["robot"]["seconds"] < 40.0
        and told["robot"]["episodes"] == 3
        and told["peak_memory_bytes"] > 0
    )
    known = {"robot": {"seconds": 500.0, "complete": False}, "peak_memory_bytes": 2**50}
    (tmp_path / "phases.json").write_text(json.dumps(known))
    with learning.Cost.of(tmp_path) as cost:
        told = cost.told({})
    assert 500.0 <= told["robot"]["seconds"] < 510.0 and told["peak_memory_bytes"] == 2**50


def test_a_session_that_diverges_is_told_what_applies(start, tmp_path, monkeypatch):
    def diverges(*arguments):
        raise TrainingDiverged("ten updates in a row. Lower the learning rate.")

    monkeypatch.setattr(learning, "_in_turns", diverges)
    with pytest.raises(
        TrainingDiverged, match=r"another run: --out NEW_FOLDER .* goes on here with the old ones"
    ):
        learning.learn(composed(start, tmp_path / "a"), lambda text: None)
