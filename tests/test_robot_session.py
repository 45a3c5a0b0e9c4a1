"""``vla-rl robot run``: a policy in a session sees what it sees in the simulator, and sessions
begin, go on and end."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from real_helpers import LIMITS, Clock, Rig, point_robot, spawned, stopped_by_guard
from session_policy import Mover, Stubborn

import real.body
from benchmarks.robot import acting as bench_acting
from benchmarks.robot.acting import seams
from real.acting import Acting, ActingConfig
from real.body import Body, BodyConfig
from real.episodes import Conductor, Plan
from real.journal import journals, read
from real.link import Client
from real.lockstep import Lockstep
from real.messages import Chunk, Event, Grant, Input, Lease, Notice, State, Writer
from real.overlap import ensemble_weights, mean_action, soft_mask
from real.robots.world import PointWorld
from real.tasks import Task, parse
from real.verify import check, verify
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.config.robot import compose
from vla_rl.data.session_export import export_sessions
from vla_rl.data.session_trajectory import session_trajectory
from vla_rl.doctor.robot import FAIL, MISSING, OK, check_devices, check_port, doctor, render
from vla_rl.errors import ConfigError, UserError
from vla_rl.robot import session
from vla_rl.robot.operator import OperatorSettings, make_operator
from vla_rl.robot.policy import make_decide
from vla_rl.robot.session import SessionRequest, default_checkpoint, run

TESTS = Path(__file__).resolve().parent
RAISE = Task("raise", "raise the point", horizon=40)
FAKE = BodyConfig(
    limits=str(LIMITS / "fake_point.yaml"),
    camera_hz=20.0,
    supervisor={"required": ["guard", "recorder"], "cameras": ["front"]},
)


def up(images, proprio, instruction, first):
    return np.tile([[0.0, 0.0, 0.04, -1.0]], (6, 1))


def lockstep(
    folder, decide, acting=None, episodes=2, config=FAKE, task=RAISE, thinking_s=0.0, operator=None
):
    session = Lockstep(folder, config, thinking_s)
    if operator is not None:
        session.watched(make_operator(operator, session.world))
    try:
        plan = Plan((task,), episodes, alone=True)
        return session.run(plan, decide, "v1", acting or ActingConfig(), lambda outcome: None)
    finally:
        session.close()


# --------------------------------------------------------------------------- what a policy is shown
def test_a_policy_acts_in_a_session_as_in_the_simulator(tmp_path):
    pytest.importorskip("robosuite")
    from policies.nano_vla import NanoVLA
    from policies.settings import NanoVLAConfig
    from vla_rl.types import Observation

    torch.manual_seed(0)
    settings = compose(["robot.tasks=[lift_cube]"]).robot
    config = BodyConfig(
        limits=settings.limits,
        world=settings.world,
        options=settings.options,
        camera_hz=settings.camera_hz,
        supervisor=settings.supervisor,
        record=False,
    )
    session = Lockstep(tmp_path / "s", config)
    policy = NanoVLA(NanoVLAConfig(chunk_length=4), session.robot.embodiment).eval()
    acts, instructions = make_decide(policy, True), []

    def decide(images, proprio, instruction, first):
        """The simulator looks at the very state that the session's pictures and measurements are
        of."""
        seen = session.world._simulator.observe(0)
        assert set(images) == set(seen.images)
        for name, image in images.items():
            np.testing.assert_array_equal(image, seen.images[name])
        np.testing.assert_array_equal(proprio, seen.proprio)
        actions = acts(images, proprio, instruction, first)
        wanted = policy.act(Observation.from_slots([seen]), deterministic=True).chunk
        np.testing.assert_array_equal(actions, wanted.actions[0].detach().numpy())
        instructions.append((instruction, seen.instruction))
        return actions

    task = Task("lift_cube", session.world.tasks["lift_cube"]["instruction"], 7, horizon=12)
    try:
        session.run(Plan((task,), 1, alone=True), decide, "v", ActingConfig(), lambda outcome: None)
    finally:
        session.close()
    assert len(instructions) >= 3 and set(instructions) == {
        ("lift the red cube", "lift the red cube")
    }


def acted(tmp_path, kind, steps=0, rows=6):
    """(rows sent, the journal's control steps) of an episode that counts its rows up in x."""
    told: list[tuple[np.ndarray, bool]] = []

    def count(images, proprio, instruction, first):
        begin = 0.0001 * 10 * len(told)
        told.append((proprio, first))
        return np.array([[begin + 0.0001 * i, 0.0, 0.02, -1.0] for i in range(rows)])

    lockstep(
        tmp_path / kind,
        count,
        ActingConfig(kind, steps),
        1,
        task=dataclasses.replace(RAISE, horizon=24),
    )
    return told, read(journals(tmp_path / kind)[0]).steps


def test_synchronous_acting_runs_the_rows_and_decides_again(tmp_path):
    told, steps = acted(tmp_path, "synchronous", steps=4)
    assert [first for _, first in told] == [True] + [False] * (len(told) - 1)
    assert [(s["decision"], s["index"]) for s in steps] == [(i // 4, i % 4) for i in range(24)]
    ticks = np.diff([s["tick"] for s in steps])
    assert [int(t) for t in ticks] == [6 if i % 4 == 3 else 5 for i in range(23)], (
        "one tick to decide in"
    )
    for decision, (proprio, _) in list(enumerate(told))[1:6]:
        before = steps[4 * decision - 1]
        assert 0 < proprio[2] - before["proprio"][2] < 0.01, "seen when the last row was over"
    assert {s["policy_version"] for s in steps} == {"v1"}


def test_asynchronous_acting_goes_on_from_the_observation(tmp_path):
    _, steps = acted(tmp_path, "asynchronous", steps=3)
    assert [(s["decision"], s["index"]) for s in steps][:3] == [(0, 0), (0, 1), (0, 2)]
    later = [s for s in steps if s["decision"] > 0]
    assert {s["index"] for s in later} <= set(range(6)) and len({s["decision"] for s in later}) > 4
    assert (np.diff([s["tick"] for s in steps]) == 5).all(), (
        "no gap between chunks, and no step cut short"
    )


# ------------------------------------------------------------------------------ chunks that overlap
def test_the_mean_of_predictions_by_hand():
    """Weights 1, 1/2, 1/4 over 7/4: the oldest counts most. Turns of 170° and −170° meet at
    180°, not at 0."""
    weights = ensemble_weights(3, math.log(2.0))
    np.testing.assert_allclose(weights, [4 / 7, 2 / 7, 1 / 7])
    rows = np.array([[0.07, 0.0, 0.0, 1.0], [0.0, 0.07, 0.0, -1.0], [0.0, 0.0, 0.07, -0.5]])
    np.testing.assert_allclose(
        mean_action(rows, weights, False, False), [0.04, 0.02, 0.01, 4 / 7 - 2 / 7 - 0.5 / 7]
    )
    np.testing.assert_allclose(mean_action(rows, weights, False, True)[-1], 1.0)
    np.testing.assert_allclose(
        mean_action(rows, np.array([0.2, 0.3, 0.5]), False, True)[-1], -(0.3 + 0.25) / 0.8
    )
    np.testing.assert_allclose(mean_action(rows[:2], np.array([0.5, 0.5]), False, True)[-1], 1.0)
    third, half = math.radians(170.0), np.array([0.5, 0.5])
    turned = mean_action(
        np.array([[0, 0, 0, 0, 0, third], [0, 0, 0, 0, 0, -third]]), half, True, False
    )
    np.testing.assert_allclose(np.abs(turned[3:]), [0.0, 0.0, math.pi], atol=1e-6)
    small = np.array([[0, 0, 0, 0.1, 0, 0], [0, 0, 0, 0.2, 0, 0]])
    np.testing.assert_allclose(
        mean_action(small, half, True, False), [0, 0, 0, 0.15, 0, 0], atol=1e-12
    )


def test_the_soft_mask_by_hand():
    """Four rows left, one of them to run before the inference ends: c = 1, 3/4, 1/2, 1/4."""
    np.testing.assert_allclose(soft_mask(4, 1, "linear"), [1.0, 0.75, 0.5, 0.25])
    e = math.e
    wanted = [
        1.0,
        0.75 * (e**0.75 - 1) / (e - 1),
        0.5 * (e**0.5 - 1) / (e - 1),
        0.25 * (e**0.25 - 1) / (e - 1),
    ]
    np.testing.assert_allclose(soft_mask(4, 1, "exp"), wanted)
    np.testing.assert_allclose(soft_mask(2, 0, "linear"), [2 / 3, 1 / 3])
    np.testing.assert_allclose(
        soft_mask(3, 7, "exp"),
        [1.0, 1.0, 1.0],
        err_msg="a decision that takes longer than the rest",
    )


def numbered(told):
    """A policy whose rows say in x which decision and row they are, and which keeps the guides
    that it gets in ``told``."""

    def decide(images, proprio, instruction, first, guide=None):
        told.append((first, guide))
        n = len(told) - 1
        return np.array([[0.001 * n + 0.0001 * i, 0.0, 0.02, (-1.0) ** n] for i in range(6)])

    return decide


def test_an_ensemble_runs_the_mean_of_what_was_predicted_and_the_record_has_both(tmp_path):
    told = []
    task = dataclasses.replace(RAISE, horizon=24)
    lockstep(
        tmp_path / "s", numbered(told), ActingConfig("ensemble", ensemble_decay=0.5), 1, task=task
    )
    episode = read(journals(tmp_path / "s")[0])
    assert len(episode.chunks) > 15 and {c["acting"] for c in episode.chunks} == {"ensemble"}
    first = next(t["tick"] for t in episode.ticks if t["policy"])
    starts = {c["decision"]: c["start"] or first for c in episode.chunks}
    mixed = 0
    for tick in episode.ticks:
        if not tick["policy"]:
            continue
        total = weight = 0.0
        known = [c for c in episode.chunks if c["decision"] <= tick["decision"]]
        own = [
            c["rows"][k]
            for c in known
            if 0 <= (k := (tick["tick"] - starts[c["decision"]]) // 5) < 6
        ]
        for i, row in enumerate(own):
            total, weight = total + math.exp(-0.5 * i) * row[0], weight + math.exp(-0.5 * i)
        assert tick["policy"][0] == pytest.approx(total / weight, abs=1e-12)
        assert tick["policy"][3] in (-1.0, 1.0)
        mixed += len(own) > 3
    assert mixed > 50
    for c in episode.chunks:
        assert c["rows"][5][0] == pytest.approx(0.001 * c["decision"] + 0.0005), (
            "as the policy said it"
        )
    trajectory, _ = session_trajectory(episode, 6)
    assert trajectory.valid.sum(1).tolist() == [6] * 4, (
        "an ensemble's steps are no single decisions"
    )
    np.testing.assert_allclose(
        trajectory.actions[0, :, 0], [s["sent"][0] for s in episode.steps[:6]], atol=1e-7
    )
    assert verify(tmp_path / "s")[0] == []
    del episode.chunks[3]
    assert "what it predicted is not there" in check(episode)[0]


def test_real_time_chunking_is_given_the_rows_that_will_run_before_it_answers(tmp_path):
    told = []
    config = ActingConfig("rtc", steps=2, rtc_guidance=3.0, rtc_schedule="linear")
    task = dataclasses.replace(RAISE, horizon=30)
    lockstep(tmp_path / "s", numbered(told), config, 1, task=task, thinking_s=0.12)
    episode = read(journals(tmp_path / "s")[0])
    ran = {(t["tick"]): t["policy"][0] for t in episode.ticks if t["policy"]}
    guided = [c for c in episode.chunks if told[c["decision"]][1] is not None]
    assert told[0] == (True, None) and len(guided) == len(episode.chunks) - 1 > 6
    for c in guided:
        guide = told[c["decision"]][1]
        assert guide.most == 3.0 and c["delay"] == c["prefix"] in (2, 3), (
            "of constant latency, all is foreseen"
        )
        np.testing.assert_array_equal(
            guide.weight, soft_mask(len(guide.wanted), c["delay"], "linear")
        )
        executed = [ran[c["start"] + 5 * i] for i in range(c["delay"])]
        np.testing.assert_allclose(guide.wanted[: c["delay"], 0], executed)
        if c["start"] + 5 * c["delay"] in ran:
            assert ran[c["start"] + 5 * c["delay"]] == pytest.approx(c["rows"][c["delay"]][0])
    assert (np.diff([s["tick"] for s in episode.steps]) == 5).all()


@pytest.mark.parametrize("kind", ["ensemble", "rtc"])
def test_nothing_is_mixed_with_or_held_to_what_was_predicted_before_a_takeover(tmp_path, kind):
    """Decisions take 120 ms, so one is under way as the operator takes over, and others were
    made before."""
    told = []

    def sink(images, proprio, instruction, first, guide=None):
        told.append((first, guide))
        return np.array([[0.0, 0.0, -0.002, -1.0]] * 5 + [[0.001 * len(told), 0.0, -0.002, -1.0]])

    operator = OperatorSettings(
        patience_s=0.4, noise=0.0, reaction_median_s=0.05, help_gain=0.3, speed=0.4
    )
    task = dataclasses.replace(RAISE, horizon=60)
    lockstep(
        tmp_path / "s", sink, ActingConfig(kind), 1, task=task, thinking_s=0.12, operator=operator
    )
    episode = read(journals(tmp_path / "s")[0])
    firsts = [i for i, (first, _) in enumerate(told) if first]
    assert len(firsts) > 1 and any(t["is_human"] for t in episode.ticks)
    assert len(told) > len(episode.chunks), "what was under way was refused"
    for chunk in episode.chunks:
        first, guide = told[chunk["decision"]]
        assert guide is None or not first
        ran = [
            t
            for t in episode.ticks
            if (t["epoch"], t["decision"]) == (chunk["epoch"], chunk["decision"])
        ]
        if first:
            assert all(t["policy"] == chunk["rows"][t["index"]] for t in ran), (
                "nothing from before in it"
            )
    assert any(told[c["decision"]][1] is not None for c in episode.chunks) == (kind == "rtc")


def test_what_is_counted_where_chunks_meet_by_hand():
    """Two ticks to a control step; bounds of ±0.05, so 0.01 is 0.2 half-ranges. Of decision 1
    one row has passed."""

    def tick(number, decision, x, done):
        return {
            "tick": number,
            "decision": decision,
            "policy": [x, 0.0, 0.0, (-1.0) ** number],
            "step_done": done,
            "stamp": number * 0.01,
        }

    asked = [(0, 0, 0.01), (2, 0, 0.02), (4, 1, 0.05), (6, 1, 0.04)]
    ticks = [tick(at + i, decision, x, bool(i)) for at, decision, x in asked for i in range(2)]
    chunks = [
        {"start": 0, "delay": 0, "rows": [[0.01] + [0.0] * 3]},
        {"start": 2, "delay": 1, "rows": [[0.03, 0.0, 0.0, 1.0], [0.05, 0.0, 0.0, 1.0]]},
    ]
    spec = dataclasses.replace(PointWorld().embodiment, control_hz=50.0)
    found = seams(
        SimpleNamespace(ticks=ticks, chunks=chunks, header={"supervisor": {"hz": 100.0}}), spec
    )
    np.testing.assert_allclose(found["seam"], [0.6])
    np.testing.assert_allclose(found["within"], [0.2, 0.2])
    np.testing.assert_allclose(found["prefix"], [0.2])
    assert found["late"].tolist() == [0.0, 1.0] and found["seconds"] == pytest.approx(0.06)


@pytest.mark.slow
def test_guided_chunks_agree_with_what_ran_before_they_came(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_acting, "_UPDATES", 150)
    file = tmp_path / "a.json"
    assert (
        main(
            [
                "bench",
                "acting",
                "--episodes",
                "1",
                "--thinking",
                "0.1",
                "--json",
                str(file),
                "robot.horizon=40",
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())["acting"]
    assert (
        list(rows) == ["synchronous", "asynchronous", "ensemble", "rtc"]
        and "rtc " in capsys.readouterr().out
    )
    assert rows["rtc"]["late"] == rows["asynchronous"]["late"] > 1.0
    assert rows["rtc"]["prefix"] < 0.6 * rows["asynchronous"]["prefix"]
    assert rows["rtc"]["seam"] < 0.6 * rows["asynchronous"]["seam"]
    assert rows["synchronous"]["steps_per_s"] < 17.0 < 19.9 < rows["rtc"]["steps_per_s"]


def test_late_rows_of_an_asynchronous_chunk_are_dropped():
    """A decision that takes 120 ms at 20 Hz: the rows of the first two control steps have passed
    when it comes."""
    clock = Clock()
    rig = Rig(point_robot(clock), clock)
    rig.lease()
    rig.event("arm")
    rig.event("start")
    rig.run(0.05)
    seen = rig.states[-1]
    rig.run(0.12)
    row = (0.01, 0.0, 0.0, -1.0)
    rig.send(
        "policy",
        Chunk,
        0.3,
        epoch=seen.epoch,
        start=seen.tick + 1,
        hz=20.0,
        decision=0,
        policy_version="v",
        obs_stamp=seen.stamp,
        prefix=0,
        delay=3,
        actions=(row,) * 6,
    )
    rig.run(0.3)
    assert [s.index for s in rig.states if s.step_done and s.decision == 0] == [3, 4, 5]


def test_another_decision_waits_for_a_picture_from_after_the_last(tmp_path):
    acting = Acting(up, lambda frame: None, "v", ActingConfig())
    assert not acting.due
    with pytest.raises(ConfigError, match="synchronous, asynchronous"):
        ActingConfig("now and then")
    for wrong, said in (
        ({"rtc_schedule": "cubic"}, "rtc_schedule='cubic' .* one of exp, linear"),
        ({"rtc_guidance": 0.0}, "rtc_guidance=0.0 .* above 0"),
        ({"ensemble_decay": -1.0}, "ensemble_decay=-1.0 .* 0 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            ActingConfig(**wrong)
    with pytest.raises(UserError, match=r"\[2, 3\]; this robot takes \[steps, 4\]"):
        lockstep(tmp_path / "s", lambda *_: np.zeros((2, 3)))


# ----------------------------------------------------------------------------------------- episodes
def test_episodes_end_with_the_simulators_verdict_and_are_exported(tmp_path):
    done = lockstep(tmp_path / "s", up, episodes=2)
    assert [(o.success, o.labelled_by, o.reason) for o in done.outcomes] == [
        (True, "simulator", "success")
    ] * 2
    still = lockstep(tmp_path / "t", lambda *_: np.zeros((6, 4)), episodes=1)
    assert [(o.success, o.reason, o.steps) for o in still.outcomes] == [(False, "out of time", 40)]
    problems, lines = verify(tmp_path / "s")
    assert problems == [] and len(lines) == 2 and all(line.endswith("success") for line in lines)
    labels = [e for e in read(journals(tmp_path / "s")[0]).events if e["name"] == "label"]
    assert [(e["value"], e["source"]) for e in labels] == [("success", "simulator")]
    exported = export_sessions([tmp_path / "s"], tmp_path / "data")
    assert exported.episodes == 2 and not exported.left_out


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_what_a_session_writes_is_nobody_elses_to_read(tmp_path):
    """The console's log holds its token, the journal pictures of a room."""
    before = os.umask(0o022)
    try:
        config = BodyConfig(limits=str(LIMITS / "fake_point.yaml"), guard=False)
        with Body(tmp_path / "a" / "s", config) as body:
            job = {"socket": body.socket, "console": {"port": 0}}
            body.process("console", "real.console.process", [body.write_config("console", job)])
            log = (body.run / "console.log.txt").read_text()
            assert log.count("token=") == 2
        lockstep(tmp_path / "t", lambda *_: np.zeros((6, 4)), episodes=1)
    finally:
        os.umask(before)
    found = [
        path
        for name in ("a/s", "t")
        for path in (tmp_path / name).rglob("*")
        if not path.is_socket()
    ]
    assert {path.name for path in found} >= {
        "console.log.txt",
        "robot.json",
        "journal",
        "episode_000001.vrj",
    }
    inside = [path for path in found if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in inside} == {0}, inside
    assert {
        (tmp_path / name).stat().st_mode & 0o077 for name in ("a/s", "a/s/run", "t/journal")
    } == {0}


def test_a_world_that_faults_ends_a_session_that_nobody_watches(tmp_path):
    script = [{"name": "reflex", "at": 0.6}]
    config = dataclasses.replace(FAKE, defects={"script": script})
    done = lockstep(tmp_path / "s", lambda *_: np.zeros((6, 4)), config=config)
    assert "fault" in done.problem and len(done.outcomes) <= 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_fault_that_struck_before_anybody_listened_is_told(alone):
    """A policy that loads can keep a machine so busy that the guard stops the arm: of that fault
    the launcher, which listens once the policy is there, hears no notice."""
    clock = Clock(10.0)
    conductor = Conductor(Plan((RAISE,), 1, alone=alone), 20.0)
    state = Rig(point_robot(clock), clock).run(0.01)[-1]
    why = "the supervisor was silent for 0.2 s, so the guard stopped the arm"
    conductor.hear(dataclasses.replace(state, mode="FAULT", faults=(why,)))
    assert conductor.notes == [f"fault: {why}"] and conductor.due(clock()) == []
    assert conductor.problem == (f"the session stopped with a fault: {why}" if alone else "")
    assert conductor.done is alone, "else a person acknowledges it"


def test_who_is_too_slow_to_hear_all_still_asks():
    """Its messages come faster than it hears them: the loop goes on all the same."""
    state = Rig(point_robot(clock := Clock()), clock).run(0.01)[-1]
    skipped, heard = [], []
    flood = SimpleNamespace(receive=lambda seconds: state, skip=lambda: skipped.append(1))
    conductor = SimpleNamespace(hear=heard.append, judged=heard.append)
    judge = SimpleNamespace(news=lambda: ["began"])
    session._hear({"launcher": flood, "simulator": flood}, conductor, judge)
    assert len(heard) >= 2 and heard[-1] == "began" and skipped == [1]


def test_an_episode_ends_once_its_label_is_known_and_none_is_reset_that_runs():
    """Label and end go over two connections, and a notice comes before the state that shows what
    it says."""
    clock = Clock(10.0)
    told = Writer("supervisor", clock)
    conductor = Conductor(Plan((RAISE,), 1), 20.0)
    rig = Rig(point_robot(clock), clock)
    ready = rig.run(0.01)[-1]

    def notice(name, mode):
        return told.make(
            Notice,
            name=name,
            value="raise: raise the point",
            by="x",
            mode=mode,
            epoch=1,
            tick=1,
            episode=1,
        )

    def asked():
        return [
            (source, fields.get("name", fields.get("ask")))
            for source, _, fields in conductor.due(clock())
        ]

    conductor.hear(dataclasses.replace(ready, mode="READY"))
    conductor.hear(notice("begin", "AUTO"))
    assert asked() == [], "not a reset"
    conductor.hear(dataclasses.replace(ready, mode="AUTO"))
    conductor.judged("success")
    assert asked() == [("simulator", "label")] and asked() == []
    label = Event(5, "simulator", clock(), math.inf, "label", "success", clock(), "")
    conductor.hear(label)
    assert asked() == [("launcher", "end")]
    conductor.hear(notice("end_episode", "READY"))
    assert conductor.done and conductor.outcomes[0].labelled_by == "simulator"


def test_a_label_changes_the_episode_that_it_means_and_a_chosen_task_is_begun():
    clock = Clock(10.0)
    told = Writer("supervisor", clock)
    lower = Task("lower", "lower the point")
    conductor = Conductor(Plan((RAISE, lower), judged=False), 20.0)
    ready = dataclasses.replace(
        Rig(point_robot(clock), clock).run(0.01)[-1], mode="READY", holder="launcher"
    )

    def notice(name, at, episode, value="raise: raise the point"):
        place = {
            "by": "x",
            "mode": "AUTO" if name == "begin" else "READY",
            "epoch": 1,
            "tick": 1,
            "episode": episode,
        }
        clock.now = at
        conductor.hear(told.make(Notice, name=name, value=value, **place))

    def event(name, value, at):
        conductor.hear(Event(5, "console", clock(), math.inf, name, value, at, ""))

    notice("begin", 11.0, 1)
    event("label", "success", 13.0)
    notice("end_episode", 13.1, 1)
    event("label", "failure", 12.5)
    notice("begin", 20.0, 2)
    event("label", "success", 11.5)
    assert [(o.success, o.labelled_by) for o in conductor.outcomes] == [(True, "console")]
    assert conductor.notes == [
        "episode 1 is a failure now, says console",
        "episode 1 is a success now, says console",
    ]
    notice("end_episode", 22.0, 2)
    assert [o.success for o in conductor.outcomes] == [True, None]
    event("task", lower.text, 22.5)
    for _ in range(2):  # until another is chosen, and not in turn
        conductor.hear(ready)
        conductor.hear(
            told.make(Grant, granted=True, holder="launcher", token="t", until=math.inf, reason="")
        )
        clock.now += 30.0
        assert [f.get("value") for _, _, f in conductor.due(clock())] == [lower.text, ""]
        notice("begin", clock.now + 1.0, 3, lower.text)
        notice("end_episode", clock.now + 1.0, 3)


@pytest.mark.parametrize(
    "name, mode", [("pause", "READY"), ("fault", "FAULT"), ("stop", "STOPPED")]
)
def test_a_reset_that_was_dropped_is_asked_for_again_soon(name, mode):
    """A camera was late, so that RESETTING became READY, or a fault struck. It used to wait for 20
    s: `vla-rl bench soak` found that."""
    clock = Clock(10.0)
    told = Writer("supervisor", clock)
    conductor = Conductor(Plan((RAISE,), 1), 20.0)
    ready = dataclasses.replace(
        Rig(point_robot(clock), clock).run(0.01)[-1], mode="READY", holder="launcher"
    )
    grant = told.make(Grant, granted=True, holder="launcher", token="t", until=math.inf, reason="")

    def asked():
        return [fields["name"] for _, _, fields in conductor.due(clock())]

    conductor.hear(ready)
    conductor.hear(grant)
    assert asked() == ["task", "reset"] and asked() == []
    place = {"mode": mode, "epoch": 1, "tick": 1, "episode": 0}
    conductor.hear(
        told.make(Notice, name=name, value="camera front is late", by="supervisor", **place)
    )
    assert asked() == [], "not in every tick"
    clock.now += 0.51
    assert asked() == ["task", "reset"]
    clock.now += 1.0
    assert asked() == [], "one that is under way is waited for"
    conductor.judged("began")
    assert asked() == ["start"]


def test_in_virtual_time_a_picture_that_the_device_lost_is_no_picture_that_was_not_recorded(
    tmp_path,
):
    config = dataclasses.replace(
        FAKE, defects={"script": [{"name": "camera_gap", "at": 0.2, "seconds": 1.0, "value": 0.5}]}
    )
    lockstep(tmp_path / "s", lambda *_: np.zeros((6, 4)), config=config, episodes=1)
    problems, _ = verify(tmp_path / "s")
    assert problems and all("front: the device's pictures jump" in text for text in problems)


def test_the_task_of_an_episode_is_one_text():
    for task in (
        Task("lift_cube", "lift the red cube", 12),
        Task("lift_cube", "lift: now"),
        Task("suite/a", "b", 3),
    ):
        assert parse(task.text) == task
    assert parse("fold the towel: twice") == Task("fold the towel: twice", "fold the towel: twice")


# ---------------------------------------------------------------------------------- the whole thing
@pytest.fixture
def mover(tmp_path, monkeypatch):
    """A checkpoint for the point robot, which the policy's process can load."""
    monkeypatch.setenv(
        "PYTHONPATH",
        f"{TESTS}{os.pathsep}{TESTS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    save_checkpoint(tmp_path / "mover", Mover(PointWorld().embodiment))
    return tmp_path / "mover"


def overrides(tmp_path, mover, *more):
    slow = ["robot.supervisor.silence_s=0.3", "robot.supervisor.frame_age_s=2.0", "threads=1"]
    return [f"checkpoint={mover}", "robot=fake", f"output_dir={tmp_path}", "name=s", *slow, *more]


def unhurried(capsys, arguments):
    """(which try, what was said) of a session in real time, whose ``arguments`` may depend on the
    try: once more where the guard has stopped the arm, since this machine is too busy for a
    session."""
    for i in range(6):
        code, said = main(arguments(i)), capsys.readouterr()
        if code == 0:
            return i, said.out
        assert stopped_by_guard(said.err), said
    raise AssertionError(said)


@pytest.mark.slow
def test_a_policy_that_cannot_be_guided_is_refused_before_anything_moves(tmp_path, mover, capsys):
    asked = ["robot", "run", "--headless", "--episodes", "1"]
    for more in (["--lockstep"], []):
        assert (
            main(
                [
                    *asked,
                    *more,
                    *overrides(tmp_path, mover, "robot.acting=rtc", f"name=s{len(more)}"),
                ]
            )
            == 2
        )
        said = capsys.readouterr().err
        assert (
            "robot.acting=rtc" in said
            and "Mover cannot be guided: use robot.acting=ensemble or asynchronous" in said
        )
    assert not list(tmp_path.glob("s*/journal/*"))


def test_a_session_of_processes_runs_and_ends_by_itself(tmp_path, mover, capsys):
    asked = ["robot", "run", "--headless", "--episodes", "2", *overrides(tmp_path, mover)]
    i, said = unhurried(capsys, lambda i: [*asked, f"name=s{i}"])
    session = tmp_path / f"s{i}"
    assert "autonomous: 2 of 2 episodes succeeded (100 %)" in said, said
    episodes = [read(path) for path in journals(session)]
    assert len(episodes) == 2 and all(
        e.end is not None and not e.end["recovered"] for e in episodes
    )
    assert {e.header["task"] for e in episodes} == {"raise: raise the point"}
    assert all(step["policy_version"].startswith("mover@") for e in episodes for step in e.steps)
    problems, _ = verify(session)
    assert [
        p for p in problems if "policy's action" in p or "damaged" in p or "end counts" in p
    ] == []
    assert main(["robot", "export", str(session), str(tmp_path / "data")]) == 0
    assert not (session / "run" / "s").exists(), "its socket is gone"


@pytest.mark.slow
def test_the_console_is_announced_and_interrupts_end_everything(tmp_path, mover):
    given = overrides(tmp_path, mover, "console.port=0", "robot.horizon=6")
    process, said = begun("run", *given, until="episode 1:")
    listed = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
    )
    children = listed.stdout.split()
    assert len(children) == 6, said  # arm, supervisor, guard, recorder, policy, console
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=240)[0]
    assert process.returncode == 130, rest
    assert any(text.startswith("console: http://") and "token=" in text for text in said), said
    assert "failure (simulator)" in said[-1]
    assert gone(children)


def begun(*arguments: str, until: str):
    """(the process, what it has said up to the line that begins with ``until``); begun anew where
    the guard has stopped the arm, since this machine is too busy for a session: one with a console
    then waits for a person."""
    for _ in range(6):
        process = spawned("robot", *arguments)
        said: list[str] = []
        assert process.stdout is not None
        waits = threading.Timer(120.0, process.kill)
        waits.start()
        for text in process.stdout:
            said.append(text)
            if text.startswith(until):
                waits.cancel()
                return process, said
        waits.cancel()
        process.communicate()
        if not stopped_by_guard("".join(said)) and process.returncode != -signal.SIGKILL:
            break
        for first in said[:1]:
            shutil.rmtree(first.removeprefix("session ").partition(";")[0], ignore_errors=True)
    raise AssertionError(said)


def started(process) -> dict[str, int]:
    """{module: process} of those that a session has started."""
    listed = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid=,args="], capture_output=True, text=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {row[row.index("-m") + 1]: int(row[0]) for row in rows if "-m" in row}


# what a person does who wants to drive; a fault is a busy machine's
NEXT = {"FAULT": "ack", "IDLE": "arm", "READY": "takeover", "PAUSED": "takeover"}


def gone(pids) -> bool:
    """Whether they end, given the time that the kernel needs."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_second_interrupt_ends_a_session_that_is_slow_to_close(tmp_path, mover):
    """Its policy does not end when it is told to, which a session waits ten seconds for."""
    save_checkpoint(tmp_path / "stubborn", Stubborn(PointWorld().embodiment))
    told = tmp_path / "told"
    os.environ["STUBBORN"] = str(told)
    given = overrides(tmp_path, tmp_path / "stubborn", "robot.horizon=20", "robot.options.goal=9.0")
    try:
        process, said = begun("run", "--headless", *given, until="episode 1:")
    finally:
        del os.environ["STUBBORN"]
    children = started(process)
    assert len(children) == 5, said  # arm, supervisor, guard, recorder, policy
    process.send_signal(signal.SIGINT)
    while not told.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=240)[0]
    assert process.returncode == 130 and "Traceback" not in rest, (said, rest)
    assert gone(children.values())


def test_an_interrupt_while_a_session_closes_ends_every_process(tmp_path, monkeypatch):
    body = Body(tmp_path / "s", FAKE)
    stubborn = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('there', "
        "flush=True); input()"
    )
    for name in ("policy", "arm"):
        process = subprocess.Popen(
            [sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        body.processes[name] = process
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
    processes, end, calls = list(body.processes.values()), real.body._await, []

    def interrupted(process, seconds):
        calls.append(process)
        if len(calls) == 1:
            raise KeyboardInterrupt
        end(process, seconds)

    monkeypatch.setattr(real.body, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        body.close()
    assert [process.returncode for process in processes] == [
        -signal.SIGKILL
    ] * 2 and not body.processes
    for process in processes:
        process.stdin.close()
        process.stdout.close()


@pytest.mark.slow
def test_teaching_records_what_a_person_does(tmp_path):
    """A device takes control over the session's socket, drives up, labels; then the episode that
    was asked for is there."""
    given = [
        "robot=fake",
        f"output_dir={tmp_path}",
        "name=s",
        "console.port=0",
        "robot.supervisor.silence_s=0.3",
    ]
    # so that the simulator does not label
    given += ["robot.supervisor.frame_age_s=2.0", "robot.options.goal=9.0"]
    process, said = begun("teach", "--episodes", "1", *given, until="console:")
    client = Client(tmp_path / "s" / "run" / "s", "teleop", "hand")
    state: State | None = None
    recorded, asked = 0, -math.inf
    try:
        while recorded < 40:
            message = client.receive(1.0)
            if isinstance(message, State):
                state = message
                recorded += state.mode == "HUMAN" and state.step_done
            if state is None or time.monotonic() - asked < 0.03:
                continue
            asked = time.monotonic()
            if state.holder != "hand":
                client.send(Lease, 1.0, ask="request", token="", force=True)
            elif state.mode in NEXT:
                client.send(Event, name=NEXT[state.mode], value="", at=asked, lease=client.token)
            if state.holder == "hand":
                client.send(
                    Input,
                    0.15,
                    lease=client.token,
                    device_stamp=asked,
                    dead_man=True,
                    axes=(0.0, 0.0, 0.5, 0.0, 0.0, 0.0),
                    gripper=0.0,
                    keys=(),
                    target=(),
                )
        client.send(Event, name="label", value="success", at=time.monotonic(), lease=client.token)
        client.send(Event, name="end", value="", at=time.monotonic(), lease=client.token)
        rest = process.communicate(timeout=240)[0]
    finally:
        client.close()
        process.kill()
        process.communicate()
    assert process.returncode == 0, (said, rest)
    (episode,) = [read(path) for path in journals(tmp_path / "s")]
    assert all(step["is_human"] for step in episode.steps) and len(episode.steps) >= 40
    assert not any(step["policy"] for step in episode.steps)
    assert episode.steps[-1]["proprio"][2] > episode.steps[0]["proprio"][2] + 0.05, "it went up"
    assert main(["robot", "export", str(tmp_path / "s"), str(tmp_path / "data")]) == 0


def test_an_arm_of_lerobot_is_named_in_short():
    given = [
        "robot=lerobot",
        "robot.type=so101_follower",
        "robot.port=/dev/ttyACM0",
        "robot.limits=limits/fake_point.yaml",
    ]
    own = compose(given).robot.options
    assert own == {"type": "so101_follower", "options": {"port": "/dev/ttyACM0"}}
    with pytest.raises(ConfigError, match=r"there is no key robot\.prot"):
        compose([*given, "robot.prot=1"])


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["robot=panda"],
            "there is no robot 'panda': use one of fake, franka, lerobot, lerobot_cartesian, "
            "so101_sim, tabletop",
        ),
        (["robot.limits=none.yaml"], "robot.limits=none.yaml: there is no such file"),
        (["robot=lerobot"], "robot.limits is empty: no robot moves without limits"),
        (["robot.acing=synchronous"], "there is no key robot.acing. Did you mean robot.acting?"),
        (["robot.horizon=soon"], "robot.horizon='soon' is of the wrong type"),
        (["robot.arm_hz=.inf"], "robot.arm_hz=inf is not finite: give a number"),
        (["robot.score_every=0"], "robot.score_every=0 is out of range: it must be 1 or more"),
        (["robot.driver=a:B"], "give one of them"),
        (["tabletop"], "'tabletop' is no key=value"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError) as error:
        compose(given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "given, said",
    [
        (["robot.options={gaol: 1}"], "options of the simulated robot 'fake'"),
        (["robot.world=tabletop", "robot.options={cameras: [nose]}"], "nose"),
        (["robot.supervisor.hz=33"], "whole multiple"),
        (["robot.supervisor.colour=red"], "no key robot.supervisor.colour"),
    ],
)
def test_a_robot_or_camera_that_is_not_there_is_one_line(tmp_path, given, said):
    if "robot.world=tabletop" in given:
        pytest.importorskip("robosuite")
    save_checkpoint(tmp_path / "c", Mover(PointWorld().embodiment))
    settings = compose(
        ["robot=fake", f"checkpoint={tmp_path / 'c'}", f"output_dir={tmp_path}", "name=s", *given]
    )
    with pytest.raises(UserError) as error:
        run(settings, SessionRequest(1, console=False))
    assert said in str(error.value) and "Traceback" not in str(error.value)


def test_a_policy_of_another_robot_rate_or_camera_is_refused_before_anything_moves(tmp_path):
    spec = PointWorld().embodiment
    camera = dataclasses.replace(spec.cameras[0], name="wrist")
    for i, (changed, said) in enumerate(
        [
            ({"name": "another"}, "name: "),
            ({"control_hz": 10.0}, "control_hz: 20.0 != 10.0"),
            ({"cameras": (camera,)}, "cameras: "),
            ({"action_high": (0.1, 0.1, 0.1, 1.0)}, "action_high: "),
        ]
    ):
        save_checkpoint(tmp_path / f"c{i}", Mover(dataclasses.replace(spec, **changed)))
        settings = compose(
            [
                f"checkpoint={tmp_path / f'c{i}'}",
                "robot=fake",
                f"output_dir={tmp_path}",
                f"name=s{i}",
            ]
        )
        with pytest.raises(UserError, match="this session's robot") as error:
            run(settings, SessionRequest(1, console=False, lockstep=True))
        assert said in str(error.value)


def test_what_is_missing_is_said_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"vla-rl quickstart.*--no-policy"):
        run(compose(["robot=fake"]), SessionRequest(1, console=False))
    for name in ("sft", "best"):
        folder = tmp_path / "outputs" / "quickstart" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        os.utime(folder / "config.json", (1, 2 if name == "sft" else 1))
    assert default_checkpoint().name == "sft", "the newest"
    for asked, said in [
        (SessionRequest(policy=False, console=False), "somebody has to drive"),
        (
            SessionRequest(policy=False, console=False, lockstep=True, episodes=1),
            "somebody has to drive",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            run(compose(["robot=fake"]), asked)


def test_the_doctor_names_what_is_missing_and_the_remedy(tmp_path):
    serial = ("serial ports", ("ttyACM*", "ttyUSB*"), "dialout", "arms")
    assert check_devices(tmp_path, *serial).status == MISSING
    (tmp_path / "ttyACM0").touch()
    assert check_devices(tmp_path, *serial).status == OK
    if os.geteuid():
        (tmp_path / "ttyACM0").chmod(0)
        assert "usermod -aG dialout" in check_devices(tmp_path, *serial).fix
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert check_port(taken.getsockname()[1]).status == FAIL
    checks = doctor(tmp_path)
    assert all(check.fix for check in checks if check.status != OK)
    assert {"linux", "msgpack", "cores", "clock", "SCHED_FIFO", "disk", "policy"} <= {
        check.name for check in checks
    }
    assert len(render(checks).splitlines()) >= len(checks)
