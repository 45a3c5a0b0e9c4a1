"""The Franka driver on libfranka's own package against franka-sim, which speaks the robot's protocol
and judges commands as it does. Both have to be installed (franka-sim asks for a numpy of its own, so
in another environment); its arm's model is made of the URDF that it brings along."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from real.body import Body, BodyConfig
from real.franka import Kit, examine, setup
from real.robots.franka import FrankaArm
from real.robots.protocol import Reference, RobotLost

franka_sim = pytest.importorskip("franka_sim", reason="franka-sim is not installed")
pytest.importorskip("pylibfranka", reason="pylibfranka is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ADDRESS = "127.0.0.1"


def model(path: Path) -> Path:
    """The arm without meshes, with the rotors' inertia and the friction of the usual model."""
    import mujoco

    urdf = (Path(franka_sim.__file__).parent / "models" / "fr3.urdf").read_text()
    bare = re.sub(r"<(visual|collision)\b.*?</\1>", "", urdf, flags=re.S)
    spec = mujoco.MjSpec.from_string(bare)
    for joint in spec.joints:
        joint.armature, joint.damping = 0.195, 0.003
    spec.compile()
    path.write_text(spec.to_xml())
    return path


def served(folder: Path, *enforced: str):
    """A server and its log, until the generator goes on."""
    with socket.socket() as probe:
        if probe.connect_ex((ADDRESS, 1337)) == 0:
            pytest.skip("something listens at the robot's port already")
    log = folder / "server.txt"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "franka_sim.run_server", *enforced],
            stdout=out, stderr=out, env=os.environ | {"FR3_MJCF": str(model(folder / "fr3.xml"))},
            start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 60.0
        while b"Robot state initialized" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.05)
        yield log
    finally:
        process.kill()
        process.wait()


LIMITS, LOSSES = "--enforce-motion-limits", "--enforce-comm-constraints"


@pytest.fixture(scope="module", params=[(LIMITS,)], ids=["limits"])
def robot(tmp_path_factory, request):
    """It judges every command by Franka's limits."""
    yield from served(tmp_path_factory.mktemp("sim"), *request.param)


def driven(control: str, **options):
    arm = FrankaArm(address=ADDRESS, control=control, realtime=False, **options)
    arm.connect()
    return arm


def until(arm, wanted, each=lambda: None, seconds: float = 40.0):
    """What is measured once it is ``wanted``."""
    end = time.monotonic() + seconds
    while True:
        try:
            if wanted(measured := arm.observe()):
                return measured
        except RobotLost as error:
            measured = error
        each()
        assert time.monotonic() < end, measured
        time.sleep(0.01)


@pytest.mark.parametrize("control", ["joints", "cartesian"])
def test_it_moves_within_frankas_limits(robot, control):
    """A way of some decimetres, jumps of the target among it: no reflex, and it arrives."""
    arm = driven(control, dynamics=0.5)
    try:
        first = arm.observe()
        drawn = np.random.default_rng(0)
        for _ in range(6):
            if control == "joints":
                goal = first.joints.copy()
                goal[:7] += drawn.uniform(-0.3, 0.3, 7)
                goal[7] = drawn.integers(2)
                sent = Reference(0.0, joints=goal)
            else:
                place = first.position + drawn.uniform(-0.08, 0.08, 3)
                sent = Reference(1.0, position=place, quaternion=first.quaternion)
            for _ in range(30):
                arm.command(sent)
                assert arm.observe().errors == (), robot.read_text(errors="replace")[-1500:]
                time.sleep(0.02)

        def near(m):
            assert m.errors == (), (m.errors, robot.read_text(errors="replace")[-1500:])
            at, to = (
                (m.joints[:7], goal[:7]) if control == "joints" else (m.position, sent.position)
            )
            return np.abs(at - to).max() < 2e-3

        until(arm, near, lambda: arm.command(sent))
    finally:
        arm.close()
    assert b"motion limit violated" not in robot.read_bytes()


def test_lost_commands_are_lived_through(robot):
    """Its loop stands still for some milliseconds again and again, while it moves. Franka warns that
    lost commands may be a reflex although each that came was right: then that is told, a person
    clears it, and it goes on."""
    arm = driven("joints", hand=False)
    try:
        first, drawn = arm.observe().joints, np.random.default_rng(1)
        loop, reflexes, began = arm._loop.process, 0, time.monotonic()
        while (gone := time.monotonic() - began) < 5.0:
            goal = first + 0.3 * np.sin(1.5 * gone) * np.array([1, 0.3, -1, 0.5, 1, -0.5, 1])
            arm.command(Reference(0.0, joints=goal))
            loop.send_signal(signal.SIGSTOP)
            time.sleep(float(drawn.uniform(0.001, 0.005)))
            loop.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            if until(arm, lambda m: True).errors:
                reflexes += 1
                arm.clear()
                until(arm, lambda m: not m.errors)
        until(
            arm,
            lambda m: not m.errors and np.abs(m.joints - first).max() < 2e-3,
            lambda: arm.command(Reference(0.0, joints=first)),
        )
        assert reflexes < 25, "most were none"
    finally:
        arm.close()


def test_its_driver_is_killed_and_the_arm_comes_to_rest(robot, tmp_path):
    """By a session with all its processes: the supervisor is killed, then the arm's own."""
    from benchmarks.robot.trials import Operator, driver
    from real.robots.remote import RemoteRobot

    kit = setup(tmp_path / "kit", {"address": ADDRESS, "realtime": False}, home=False)
    config = BodyConfig(
        limits=str(kit.limits),
        driver="real.robots.franka:FrankaArm",
        options={"address": ADDRESS, "realtime": False, "turn": 0.0},
        supervisor={"required": ["guard", "recorder"], "silence_s": 0.3, "state_age_s": 1.0},
    )
    with Body(tmp_path / "s", config) as body:
        log = tmp_path / "policy.txt"
        policy = driver(body.socket, "fake", log)
        operator, seen = Operator(body.socket), RemoteRobot(body.arm_socket)
        try:
            operator.drive()
            operator.watch(1.0)
            assert np.abs(seen.observe().joint_velocity).max() > 0.01
            body.processes["supervisor"].kill()
            until(seen, lambda m: np.abs(m.joint_velocity).max() < 1e-3, seconds=5.0)
            assert seen.observe().errors == ("stopped",), "by the guard"
            body.processes["arm"].kill()
            body.processes["arm"].wait()
        finally:
            policy.kill()
            policy.wait()
            operator.client.close()
            seen.close()
    end = time.monotonic() + 10.0
    while b"Client session ended" not in robot.read_bytes()[-3000:]:
        assert time.monotonic() < end, "its loop has ended its motion, and itself"
        time.sleep(0.05)


def test_what_is_lacking_is_told_by_the_robot(robot, tmp_path):
    setup(tmp_path / "kit", {"address": ADDRESS, "realtime": False}, home=True)
    rows = {what: good for what, good, *_ in examine(Kit(tmp_path / "kit").folder)}
    assert rows["robot"] and rows["hand's port"] and rows["limits"] and not rows["cameras"]


@pytest.mark.parametrize("robot", [(LIMITS, LOSSES)], indirect=True, ids=["losses"])
def test_a_frozen_loop_is_a_reflex_that_a_person_clears(robot):
    """The robot stops by itself after 20 lost commands; nothing moves before it is cleared, and by
    that alone nothing does."""
    arm = driven("joints", hand=False)
    try:
        goal = arm.observe().joints + np.array([0.6, 0, 0, 0, 0, 0, 0])

        def ask():
            arm.command(Reference(0.0, joints=goal))

        until(arm, lambda m: m.joints[0] > 0.05 or m.errors, ask)
        loop = arm._loop.process
        loop.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        loop.send_signal(signal.SIGCONT)
        m = until(arm, lambda m: m.errors, ask)
        assert "communication_constraints_violation" in m.errors, m.errors
        until(arm, lambda m: np.abs(m.joint_velocity).max() < 1e-3)
        stays = arm.observe().joints
        for _ in range(30):
            ask()
            time.sleep(0.01)
        np.testing.assert_allclose(arm.observe().joints, stays, atol=1e-3)
        arm.clear()
        until(arm, lambda m: not m.errors)
        np.testing.assert_allclose(arm.observe().joints, stays, atol=1e-3)
    finally:
        arm.close()
