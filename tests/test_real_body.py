"""Processes on the wall clock: what happens when one of them dies or hangs while the simulated arm
moves.

Distances come from the arm's own log. Bounds in time are loose, since other work may share the
machine; `vla-rl bench robot` measures them.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from real_helpers import LIMITS, rig

from benchmarks.robot.kept import Kept, unrecorded
from benchmarks.robot.sessions import launcher_trial, learner_trial, starts
from benchmarks.robot.trials import Busy, Operator, driver, trial
from real.body import Body, BodyConfig, StartError
from real.checks import MessageError
from real.journal import JournalWriter, journals, read, scan
from real.link import Client, LinkError, Server
from real.messages import Beat, Frame, Hello, Notice, Writer, decode, encode
from real.named import make_world, named
from real.robots.server import read_log
from real.scheduling import Deadlines
from real.verify import verify
from vla_rl.errors import ConfigError

FAKE = BodyConfig(
    limits=str(LIMITS / "fake_point.yaml"),
    record=False,
    supervisor={"required": ["guard", "console"]},
)
# of a machine that is busy; a policy that drove on for a second would go this far, and on
LATE_S, FAR = 1.0, 0.25


@pytest.mark.parametrize(
    "victim, how",
    [
        ("policy", "killed"),
        ("policy", "frozen"),
        ("supervisor", "killed"),
        ("supervisor", "frozen"),
        ("operator", "killed"),
        ("teleop", "frozen"),
        ("console", "frozen"),
    ],
)
def test_the_arm_holds_when_a_process_dies_or_hangs(victim, how):
    found = trial(victim, how, FAKE, delay=0.5)
    assert found.speed > 0.1, "it was moving"
    assert found.hold_s < LATE_S and found.rest_s < LATE_S + 0.5 and found.distance < FAR, found


SEEN = BodyConfig(
    limits=str(LIMITS / "fake_point.yaml"),
    camera_hz=20.0,
    supervisor={"required": ["guard", "console", "recorder"], "cameras": ["front"]},
)


@pytest.mark.parametrize(
    "victim, how",
    [("picture", "frozen"), ("picture", "killed"), ("recorder", "killed"), ("guard", "frozen")],
)
def test_the_arm_holds_and_the_journal_keeps_what_it_had(victim, how):
    found = trial(victim, how, SEEN, delay=0.5)
    assert found.speed > 0.1, "it was moving"
    assert found.hold_s < LATE_S and found.rest_s < LATE_S + 0.5 and found.distance < FAR, found
    assert found.lost == 0 and (found.unwritten == 0 or victim == "recorder")


def test_what_a_journal_lost_is_counted(tmp_path):
    """Five whole records, then seven; one is changed, which is damage to all behind it; two are
    cut off; all are gone."""
    ticks = {state.tick: state for state in rig().auto().run(0.2)}
    first = min(ticks)
    writer = JournalWriter(tmp_path, 1, {})
    for number in (1, 2, 4, 5):
        writer.tick(ticks[first + number])
    kept = Kept(tmp_path)
    writer.tick(ticks[first + 6])
    path = writer.close("done")
    assert kept.lost() == 0
    assert unrecorded(tmp_path, range(first, first + 9)) == (1, 2), (
        "3 is a hole; 7 and 8 came last; 0 was before it"
    )
    now, whole = Kept(tmp_path), path.read_bytes()
    places = [place for place, _ in scan(path)]
    assert len(places) == 7, "header, five ticks, end"
    path.write_bytes(
        whole[: places[3] - 1] + bytes([whole[places[3] - 1] ^ 1]) + whole[places[3] :]
    )
    assert (kept.lost(), now.lost()) == (2, 4)
    path.write_bytes(whole[: places[4]])
    assert (kept.lost(), now.lost()) == (0, 2)
    path.unlink()
    assert (kept.lost(), now.lost()) == (5, 7) and unrecorded(tmp_path, [1, 2]) == (0, 0)


def test_a_session_records_what_it_did_and_says_farewell(tmp_path):
    config = BodyConfig(
        limits=str(LIMITS / "fake_point.yaml"),
        camera_hz=20.0,
        supervisor={
            "required": ["guard", "recorder"],
            "cameras": ["front"],
            "frame_age_s": 2.0,
            "silence_s": 0.3,
        },
    )
    with Body(tmp_path, config) as body:
        operator, policy = (
            Operator(body.socket),
            driver(body.socket, "fake", tmp_path / "driver.txt", "--sway"),
        )
        try:
            operator.watch(0.5)
            operator.drive()
            operator.watch(1.5)
            operator.press("end")
            operator.watch(0.3)
        finally:
            policy.kill()
            policy.wait()
        frames = [m for m in operator.seen if isinstance(m, Frame)]
        body.close()
        assert any(m.name == "farewell" for m in drained(operator.client) if isinstance(m, Notice))
        operator.client.close()
    (path,) = journals(tmp_path)
    episode = read(path)
    told = iter([tuple(np.round(t["reference"], 6)) for t in episode.ticks if t["reference"]])
    done = [tuple(np.round(v, 6)) for _, v in read_log(tmp_path / "run" / "arm.log")["target"]]
    assert len(set(done)) > 20 and all(target in told for target in done), (
        "what was executed was recorded, in its order (a late arm takes the newest of those that wait)"
    )
    assert episode.frames["front"] and frames[0].camera == "front"
    problems, _ = verify(tmp_path)
    assert [
        p for p in problems if "policy's action" in p or "damaged" in p or "end counts" in p
    ] == []


def drained(client: Client) -> list:
    found = []
    try:
        while (message := client.receive(1.0)) is not None:
            found.append(message)
    except LinkError:
        pass
    return found


def test_a_second_signal_stops_at_once_and_nothing_is_left(tmp_path):
    with Body(tmp_path, FAKE) as body:
        supervisor = body.processes["supervisor"]
        supervisor.send_signal(signal.SIGTERM)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(20.0) is not None
        processes = list(body.processes.values())
    assert all(process.poll() is not None for process in processes)
    assert not (tmp_path / "run" / "s").exists()


def test_a_session_that_cannot_start_says_why(tmp_path):
    for config, said in [
        (
            BodyConfig(limits=str(tmp_path / "none.yaml"), guard=False, record=False),
            "no robot moves without one",
        ),
        (
            BodyConfig(limits=FAKE.limits, world="nothing", guard=False, record=False),
            "no simulated robot 'nothing'",
        ),
    ]:
        with pytest.raises(StartError, match=said), Body(tmp_path / "x", config):
            pass


def test_floods_and_noise_reach_nobody(tmp_path):
    server = Server(tmp_path / "s")
    client = Client(tmp_path / "s", "viewer", beat_hz=0.0)
    for packet in (b"noise", b"\xc1" * 70_000):
        client.socket.send(packet)
    messages: list[bytes] = []
    while len(messages) < 3:
        messages += [p for _, p in server.poll(1.0)[0]]
    assert isinstance(decode(messages[0]), Hello)
    for packet in messages[1:]:
        with pytest.raises(MessageError):
            decode(packet)
    client.socket.setblocking(False)
    sent = 0
    try:
        for _ in range(3000):
            client.send(Beat, tick=sent)
            sent += 1
    except LinkError:
        pass  # its own buffer is full: only the flood waits
    counts = [len(server.poll(0.0)[0]) for _ in range(200)]
    assert sum(counts) <= 600 * 2 and max(counts) <= 64
    client.close()
    _, gone = server.poll(1.0)
    while not gone:
        _, gone = server.poll(1.0)
    assert len(gone) == 1 and not server.connections
    server.close()
    with pytest.raises(LinkError, match="no session answers"):
        Client(tmp_path / "s", "viewer")


def test_a_slow_reader_loses_its_own_packets_alone(tmp_path):
    server = Server(tmp_path / "s")
    slow, quick = (Client(tmp_path / "s", "viewer", beat_hz=0.0) for _ in range(2))
    while len(server.connections) < 2:
        server.poll(0.1)
    peers = sorted(server.connections, key=lambda c: c.socket.fileno())
    writer = Writer("supervisor", time.monotonic)
    for i in range(3000):
        for connection in peers:
            assert server.send(connection, encode(writer.make(Beat, tick=i)))
        if i % 100 == 0:
            quick.newest()
    assert sum(c.dropped > 0 for c in peers) == 1
    quick.skip()
    assert quick.receive(0.0) is None and slow.receive(0.0) is not None
    for client in (slow, quick):
        client.close()
    server.close()


def test_deadlines_skip_and_count_and_never_catch_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("real.scheduling.time.monotonic", lambda: now[0])
    deadlines = Deadlines(100.0, 100.0)
    assert deadlines.next() == 100.0 and deadlines.next() == pytest.approx(100.01)
    now[0] = 100.0573
    assert deadlines.next() == pytest.approx(100.05) and deadlines.overruns == 3
    assert deadlines.lateness() == pytest.approx(0.0073)
    assert deadlines.next() == pytest.approx(100.06)


def test_names():
    assert named("real.gate:Gate").__name__ == "Gate"
    for wrong in ("real.gate", "real.nothing:Gate", "real.gate:Nothing"):
        with pytest.raises(ConfigError):
            named(wrong)
    with pytest.raises(ConfigError, match="use one of fake, tabletop"):
        make_world("x", {})


def test_the_supervisors_process_imports_neither_torch_nor_a_simulator():
    import subprocess
    import sys

    code = (
        "import sys, real.supervisor.loop, real.supervisor.guard, real.recorder, "
        "real.robots.server\nprint(*sorted({'torch', 'mujoco', 'robosuite', 'lerobot', 'sim'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr


# -------------------------------------------------------------------------------- the suite's Panda
@pytest.mark.real_sim
def test_the_free_running_panda_does_what_its_control_steps_do():
    from sim.tabletop.arm import ArmConfig, TabletopArm
    from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
    from vla_rl.specs import EpisodeSpec

    simulator = TabletopSimulator(TabletopConfig(cameras=["agentview"], camera_size=16))
    arm = TabletopArm(ArmConfig(cameras=["agentview"], camera_size=16))
    simulator.start(0, EpisodeSpec("lift_cube", 3))
    arm.reset({"task": "lift_cube/3"})
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4)) * np.array(
        simulator.embodiment.action_high
    )
    for action in actions:
        simulator.step(0, action[None].astype(np.float32))
        arm.aim(arm.read()["position"] + action[:3], np.empty(0), np.empty(0), float(action[3]))
        arm.advance(0.05)
    place = simulator.state(0).eef_position
    np.testing.assert_allclose(arm.read()["position"], place, atol=2e-3)
    assert arm.read()["gripper"] == pytest.approx(simulator.state(0).gripper_open, abs=0.05)
    arm.brake()
    arm.advance(0.15)
    speed = arm.read()["jacobian"][:3] @ arm.read()["joint_velocity"]
    assert np.linalg.norm(speed) < 0.01
    rest = arm.read()["position"]
    arm.advance(1.0)
    np.testing.assert_allclose(arm.read()["position"], rest, atol=1e-3)
    assert arm.pictures()["agentview"].shape == (16, 16, 3)
    arm.close()
    simulator.close()


@pytest.mark.real_sim
@pytest.mark.parametrize("task", ["lift_cube", "stack_cubes", "place_can"])
def test_what_a_scripted_person_goes_by_grows_until_the_task_is_done(task):
    """Whoever does it well at half the expert's speed is never without 2 % of progress for a
    second."""
    from sim.tabletop.arm import ArmConfig, TabletopArm

    arm = TabletopArm(ArmConfig(tasks=[task], cameras=["agentview"], camera_size=16))
    for number in (1, 2):
        arm.reset({"task": f"{task}/{number}"})
        best, since, steps, began = arm.progress(), 0, 0, arm.progress()
        while not arm.success() and steps < 400:
            action = arm.demonstrate(steps == 0)
            arm.aim(
                arm.read()["position"] + 0.5 * action[:3],
                np.empty(0),
                np.empty(0),
                float(action[3]),
            )
            arm.advance(0.05)
            steps += 1
            if arm.progress() > best + 0.02:
                best, since = arm.progress(), steps
            assert steps - since <= 20, (number, steps, arm.progress())
        assert arm.success() and began < 0.5 < 0.85 < arm.progress() <= 1.0
    arm.close()


@pytest.mark.real_sim
@pytest.mark.parametrize("controller", ["osc_position", "osc_pose"])
def test_the_panda_behind_the_gate_keeps_its_limits(controller):
    """Adversarial actions of every kind; the walls were pushed against, and no wall and no speed
    was passed: of the hand, of its turns, of any joint."""
    from benchmarks.robot.gate import CONTROLLERS, KINDS, adversarial

    options = {"cameras": ["agentview"], "camera_size": 16, **CONTROLLERS["tabletop"][controller]}
    world = make_world("tabletop", options)
    figures = adversarial(world, LIMITS / "tabletop.yaml", actions=40 * len(KINDS), seed=2, each=40)
    assert figures["actions"] == 600 and figures["violations"] == 0, figures
    assert 0 < figures["refused"] < figures["ticks"] / 2, "it did move"
    assert (
        figures["fastest"]["speed"]["limit"] == 0.35
        and figures["fastest"]["joint_speed"]["limit"] == 2.0
    )
    assert (
        figures["fastest"]["speed"]["measured"] > 0.25
        and max(figures["fastest"]["joint_speed"]["measured"]) > 1.0
    )
    assert figures["clipped"]["workspace"] > 0 < figures["clipped"]["joints"]


@pytest.mark.parametrize("controller", ["impedance", "following", "joints"])
def test_the_fake_arm_behind_the_gate_keeps_its_limits(controller):
    from benchmarks.robot.gate import CONTROLLERS, KINDS, adversarial

    limits = LIMITS / ("fake_point_joints.yaml" if controller == "joints" else "fake_point.yaml")
    world = make_world("fake", CONTROLLERS["fake"][controller])
    figures = adversarial(world, limits, actions=20 * len(KINDS), seed=0, each=20)
    assert (
        figures["violations"] == 0 and max(figures["fastest"]["joint_speed"]["measured"]) > 0.1
    ), figures
    if controller == "joints":
        assert figures["trips"] > 0 and figures["clipped"]["joints"] > 0, (
            "jumps pause; the ends were pushed against"
        )
        return
    assert all(figures["nearest"][name] > -1e-3 for name in ("box", "keep_out")), figures
    assert figures["clipped"]["workspace"] > 0 and figures["fastest"]["speed"]["measured"] > 0.1, (
        figures
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_session_whose_launcher_or_learner_is_struck_loses_nothing(tmp_path, how):
    """The bench's own trials: the arm holds for its launcher, and goes on without its learner,
    who is replaced."""
    made = starts(tmp_path)
    try:
        found = launcher_trial(how, made["launcher"], 0.5)
        learner = learner_trial(how, made["learner"], 0.5)
    except Busy as error:
        pytest.skip(str(error))
    assert (
        found.speed > 0.1
        and found.hold_s < LATE_S
        and found.rest_s < LATE_S + 0.5
        and found.distance < FAR
    ), found
    assert (found.lost, found.unwritten) == (0, 0)
    assert learner.episodes >= 3 and (learner.lost, learner.records, learner.ended) == (0, 0, 0), (
        learner
    )
