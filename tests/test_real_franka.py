"""A Franka by libfranka: commands within its limits whatever is asked for, a hold where nobody asks
any more, errors that stay until a person clears them. Without the package and without a robot; the
stand-in is held against pylibfranka where that is installed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

import fake_franka
import msgpack
import numpy as np
import pytest
from fake_franka import POSE, START, Library, RobotMode
from real_helpers import Clock

from real.franka import Kit, examine
from real.kit import cameras_row
from real.limits import load, needed
from real.robots import franka_path as fr3
from real.robots.franka import HAND_ENDED, FrankaArm, FrankaConfig
from real.robots.franka_hand import Hand
from real.robots.franka_loop import Loop, named_in
from real.robots.franka_path import JointPath, PosePath
from real.robots.guarded import Guarded
from real.robots.protocol import Reference, RobotLost
from real.rotations import difference, from_matrix, from_vector, matrix, multiply, normalised
from vla_rl.cli import main
from vla_rl.errors import ConfigError, MissingPackage


# ----------------------------------------------------------------------------------- the way itself
def driven(path, aim, seed: int, most: int):
    """Random targets and holds at random gaps, ``most`` milliseconds in all: all that was
    commanded."""
    drawn, commands = np.random.default_rng(seed), [path.numbers()] * 3
    while len(commands) < most:
        gap, kind = int(drawn.integers(5, 60)), drawn.random()
        if kind < 0.15:
            path.hold(at_once=kind < 0.07)
        else:
            path.aim(aim(path, drawn), 1e-3 * gap)
        for _ in range(gap):
            path.step()
            commands.append(path.numbers())
    return np.array(commands)


def rates(places):
    found = [places]
    for _ in range(3):
        found.append(np.diff(found[-1], axis=0) / fr3.DT)
    return found


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_joints_keep_every_limit_whatever_is_asked_for(share):
    """Differences of the commands, as the robot takes them, against libfranka's own figures."""

    def aim(path, drawn):
        if drawn.random() < 0.5:
            return path.joints + drawn.normal(size=7) * 0.05
        return drawn.uniform(fr3.LOW - 1.0, fr3.HIGH + 1.0)

    path = JointPath(share)
    path.begin(START)
    places, speed, change, jerk = rates(driven(path, aim, 3, 4000))
    assert (np.abs(speed) < fr3.SPEED * max(share, 0.1) + 1e-2).all()
    assert np.abs(change).max() < fr3.ACCELERATION and np.abs(jerk).max() < fr3.JERK
    way = np.stack([fr3.HIGH - places[:-1], places[:-1] - fr3.LOW])
    fastest = np.sqrt(2.0 * fr3.DECELERATION * np.maximum(way, 0.0)) - fr3.OFFSET
    assert (speed < np.maximum(fastest[0], 0.0)).all() or share < 0.5
    assert (speed[:-1] <= np.maximum(fastest[0], 1e-6)[:-1]).all()
    assert (-speed[:-1] <= np.maximum(fastest[1], 1e-6)[:-1]).all()


@pytest.mark.parametrize("end", [-9.0, 9.0])
def test_joints_stop_short_of_their_ends(end):
    path = JointPath(0.9)
    path.begin(START)
    for _ in range(3000):
        path.aim(np.full(7, end), 0.01)
        path.step()
        assert (path.joints > fr3.LOW).all() and (path.joints < fr3.HIGH).all()
    stops = fr3.HIGH - fr3.MARGIN if end > 0 else fr3.LOW + fr3.MARGIN
    np.testing.assert_allclose(path.joints, stops, atol=1e-3)


def test_a_hand_keeps_every_limit_in_place_and_turn():
    def aim(path, drawn):
        turn = from_vector(drawn.normal(size=3) * drawn.choice([0.05, 2.0]))
        far = drawn.normal(size=3) * drawn.choice([0.02, 0.4])
        return np.concatenate([path.position + far, multiply(turn, path.quaternion)])

    path = PosePath(0.9)
    path.begin(list(POSE))
    poses = driven(path, aim, 4, 3000).reshape(-1, 4, 4).transpose(0, 2, 1)
    size = [np.linalg.norm(x, axis=1).max() for x in rates(poses[:, :3, 3])[1:]]
    assert size[0] <= 3.0 and size[1] <= 9.0 and size[2] <= 4500.0, size
    quaternions = [from_matrix(pose[:3, :3]) for pose in poses]
    turning = np.array([difference(b, a) / fr3.DT for a, b in itertools.pairwise(quaternions)])
    size = [np.linalg.norm(x, axis=1).max() for x in rates(turning)[:3]]
    assert size[0] <= 2.5 and size[1] <= 17.0 and size[2] <= 8500.0, size


def test_a_hand_is_slower_where_its_joints_would_be_too_fast():
    jacobian = np.zeros((6, 7))
    jacobian[range(6), range(6)] = [0.05, 0.5, 0.5, 1.0, 1.0, 1.0]  # joint 1 has little reach
    path, fastest = PosePath(0.9), {}
    for near in (False, True):
        path.begin(list(POSE))
        path.within(jacobian if near else np.eye(6, 7))
        for _ in range(400):
            path.aim(
                np.concatenate([path.position + np.array([0.3, 0.0, 0.0]), path.quaternion]), 0.01
            )
            path.step()
        fastest[near] = path.velocity[0, 0]
        assert fastest[near] / (0.05 if near else 1.0) < fr3.SPEED[0]
    assert fastest[True] < 0.1 < 0.5 < fastest[False]


def test_targets_at_a_slow_rate_become_a_smooth_way():
    """Ten a second, on a straight way at 0.3 rad/s: between them the speed stays near that."""
    path = JointPath(0.5)
    path.begin(START)
    speeds = []
    for i in range(20):
        path.aim(START + 0.03 * (i + 1), 0.1)
        for _ in range(100):
            path.step()
            speeds.append(path.velocity[0, 0])
    settled = np.array(speeds[1000:])
    assert abs(settled.mean() - 0.3) < 0.01 and np.ptp(settled) < 0.05


def test_matrices_and_quaternions_are_each_others():
    drawn = np.random.default_rng(0)
    for _ in range(50):
        q = normalised(drawn.normal(size=4) * drawn.choice([1e-6, 1.0], size=4))
        q = q * np.sign(q[np.argmax(np.abs(q))])
        np.testing.assert_allclose(from_matrix(matrix(q)), q, atol=1e-12)


# ---------------------------------------------------------------------------------------- the loop
class Rig:
    """A `Loop` in this process, and what is told to it."""

    made: ClassVar[list[Rig]] = []

    def __init__(self, control: str = "joints", **options):
        self.library, self.clock = Library(), Clock()
        self.body = self.library.body
        self.here, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here.setblocking(False)
        config = vars(FrankaConfig(address="x", control=control, **options)) | {"reads": False}
        self.loop = Loop(config, theirs, self.library, self.clock)
        self.told: list = []
        Rig.made.append(self)

    def tell(self, kind, numbers=()):
        self.here.send(msgpack.packb([kind, [float(x) for x in numbers]]))

    def run(self, ms: int, each=lambda: None, every: int = 10):
        for i in range(ms):
            if i % every == 0:
                each()
            self.loop.turn()
            self.clock.now += 1e-3
        while True:
            try:
                self.told.append(msgpack.unpackb(self.here.recv(9999)))
            except BlockingIOError:
                return self

    @property
    def errors(self):
        return tuple(next(what for kind, what in self.told[::-1] if kind == "state")[6])

    def fastest(self, since: int = 0):
        return max((np.abs(v).max() for ms, _, v, *_ in self.body.sent if ms >= since), default=0.0)


@pytest.fixture(autouse=True)
def closed():
    yield
    for made in Rig.made:
        made.here.close()
        made.loop.line.link.close()
    Rig.made.clear()


def rig(control="joints"):
    made = Rig(control)
    if control == "joints":
        goal = START + np.array([0.4, 0.2, -0.3, 0.3, 0.4, -0.3, 0.5])
    else:
        goal = np.concatenate([[0.5, 0.15, 0.5], from_matrix(np.diag([1.0, -1.0, -1.0]))])
    return made, goal


@pytest.mark.parametrize("control", ["joints", "cartesian"])
def test_it_goes_where_it_is_told_and_holds_when_nobody_tells_it(control):
    made, goal = rig(control)
    made.run(50)
    assert not made.body.sent, "nothing moves before it is asked for"
    made.run(150, lambda: made.tell("aim", goal))
    assert made.fastest() > 0.05 and not made.errors
    told = made.body.ms
    made.run(400)  # nobody says anything any more
    assert made.fastest(told + 350) < 1e-3, "0.1 s of silence, and a brake"
    assert made.body.motion is not None, "and it holds on by commands"
    made.run(3000, lambda: made.tell("aim", goal))
    at = made.body.q if control == "joints" else np.array(made.body.pose[12:15])
    np.testing.assert_allclose(at, goal[: len(at)], atol=1e-3)
    mode = "JointImpedance" if control == "joints" else "CartesianImpedance"
    assert ("start", control, mode) in made.body.calls


@pytest.mark.parametrize("control", ["joints", "cartesian"])
def test_lost_packets_are_made_up_for(control):
    """One of three is followed by a loss, single or of three: no reflex, and it comes where it
    should."""
    made, goal = rig(control)
    made.body.gaps.extend(np.random.default_rng(0).choice([1, 1, 1, 1, 2, 4], size=4000).tolist())

    def each():
        made.body.deaf = (made.body.ms // 50) % 3  # and some come too late to be taken
        made.tell("aim", goal)

    made.run(3000, each)
    assert not made.errors and made.loop.lost_ms > 500
    at = made.body.q if control == "joints" else np.array(made.body.pose[12:15])
    np.testing.assert_allclose(at, goal[: len(at)], atol=1e-3)


def test_a_reflex_stays_until_a_person_clears_it():
    made, goal = rig()
    made.run(100, lambda: made.tell("aim", goal))
    made.body.strike = fake_franka.ControlException(
        'libfranka: Move command aborted: motion aborted by reflex! ["cartesian_reflex"]'
    )
    made.run(500, lambda: made.tell("aim", goal))
    sent = len(made.body.sent)
    assert made.errors == ("cartesian_reflex",) and ("recover",) not in made.body.calls
    made.tell("clear")
    made.run(20)
    assert made.errors == () and made.body.calls.count(("recover",)) == 1
    assert len(made.body.sent) == sent, "it moves by a new target alone"
    made.run(3000, lambda: made.tell("aim", goal))
    np.testing.assert_allclose(made.body.q, goal, atol=1e-3)


def test_a_stop_is_the_hardest_brake_and_latches():
    made, goal = rig()
    made.run(250, lambda: made.tell("aim", goal))
    fast, when = np.abs(made.body.sent[-1][2]).max(), made.body.ms
    assert fast > 0.3
    made.tell("stop")
    made.run(300, lambda: made.tell("aim", goal))
    assert made.fastest(when + int(1e3 * fast / 9.0) + 15) < 1e-3 and made.errors == ("stopped",)
    made.tell("clear")
    made.run(100, lambda: made.tell("aim", goal))
    assert made.errors == () and made.fastest(made.body.ms - 50) > 0.02


def test_the_user_stop_is_a_persons_to_release():
    made, goal = rig()
    made.run(100, lambda: made.tell("aim", goal))
    made.body.strike = fake_franka.ControlException('libfranka: ["user_stop"]')
    made.run(10)
    made.body.mode, made.body.errors = RobotMode.UserStopped, fake_franka.Errors()
    made.tell("clear")
    made.run(20, lambda: made.tell("aim", goal))
    assert "user stop" in made.errors and any(kind == "said" for kind, _ in made.told)
    made.body.mode = RobotMode.Idle
    made.tell("clear")
    made.run(20)
    assert made.errors == ()


def test_a_cable_that_is_out_is_told_and_found_again():
    made, goal = rig()
    made.run(100, lambda: made.tell("aim", goal))
    made.library.reachable = False
    made.body.motion = None
    made.run(30)
    lost = [what for kind, what in made.told if kind == "lost"]
    if not lost:  # (the motion ended first)
        made.run(5)
        lost = [what for kind, what in made.told if kind == "lost"]
    assert "does not answer" in lost[0]
    made.library.reachable, made.body.mode = True, RobotMode.Idle
    made.clock.now += 2.0
    made.tell("clear")
    made.run(50)
    assert made.errors == () and made.body.motion is None, "nothing moves by that"
    made.run(3000, lambda: made.tell("aim", goal))
    np.testing.assert_allclose(made.body.q, goal, atol=1e-3)


def test_who_tells_it_is_killed_and_it_ends_in_order():
    made, goal = rig()
    made.run(250, lambda: made.tell("aim", goal))
    made.here.close()
    for _ in range(600):
        if made.loop.over:
            break
        made.loop.turn()
        made.clock.now += 1e-3
    assert made.loop.over and made.body.motion is None and made.body.mode is RobotMode.Idle
    assert np.abs(made.body.sent[-1][2]).max() < 1e-3, "at rest before it let go"


def test_what_franka_is_told_of_stiffness_and_collisions():
    made = Rig("cartesian", collision_force=[10.0] * 6, cartesian_impedance=[500.0] * 6)
    calls = {name: rest for name, *rest in made.body.calls}
    assert calls["collision"][2:] == [[10.0] * 6] * 2 and calls["cartesian impedance"] == [
        [500.0] * 6
    ]


# ---------------------------------------------------------------------------------------- the hand
def test_a_hand_takes_the_newest_word_and_keeps_its_grasp(request):
    library, (here, theirs) = Library(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request.addfinalizer(theirs.close)
    config = {"address": "x", "hand_speed": 0.1, "hand_force": 20.0}
    hand = Hand(config, theirs, library)
    for closes in (1, -1, 1):
        here.send(msgpack.packb(["grip", closes]))
    hand.turn()
    hand.turn()
    assert [call[0] for call in library.body.calls] == ["grasp"]
    said = [msgpack.unpackb(here.recv(999)) for _ in range(2)]
    assert said == [["width", 0.25]] * 2
    here.send(msgpack.packb(["grip", -1]))
    hand.turn()
    assert library.body.calls[-1] == ("move", 0.08, 0.1)
    here.close()
    hand.turn()
    assert hand.over and library.body.calls[-1][0] == "move"
    library.body.max_width = 0.0
    with pytest.raises(ConfigError, match="--home"):
        Hand(config, theirs, library)


# -------------------------------------------------------------------------------------- the driver
@pytest.fixture
def of_processes(monkeypatch):
    """A driver with its own two, on the stand-in: the arm, and as a session has it."""
    tests = Path(__file__).resolve().parent
    places = str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    arm = FrankaArm(address="x", control="cartesian", library="fake_franka")
    robot = Guarded(arm)
    robot.connect()
    yield arm, robot
    processes = arm._loop.process, arm._hand.process
    robot.close()
    assert all(process.poll() is not None for process in processes)


def until(robot, wanted, each=lambda: None):
    """What is measured once it is ``wanted``."""
    end = time.monotonic() + 20.0
    while True:
        with contextlib.suppress(RobotLost):
            if wanted(measured := robot.observe()):
                return measured
        each()
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.real_time
def test_a_driver_by_processes(of_processes):
    """It moves, it is read, a killed loop is a lost robot that a person brings back."""
    arm, robot = of_processes
    first = until(robot, lambda m: True)
    np.testing.assert_allclose(first.position, [0.45, 0.0, 0.4])
    assert first.errors == () and first.jacobian.shape == (6, 7)
    goal = first.position + np.array([0.0, 0.02, 0.0])
    closed = Reference(1.0, position=goal, quaternion=first.quaternion)
    until(
        robot,
        lambda m: np.abs(m.position - goal).max() <= 1e-3,
        lambda: robot.command(closed),
    )
    until(robot, lambda m: m.gripper <= 0.3)
    arm._loop.process.kill()
    arm._loop.process.wait()
    with pytest.raises(RobotLost, match="has ended"):
        while True:
            robot.observe()
    with pytest.raises(RobotLost, match="has ended"):
        robot.hold()
    robot.clear()
    assert until(robot, lambda m: True).errors == ()


@pytest.mark.real_time
def test_a_killed_hand_is_an_error_until_a_person_has_it_start_anew(of_processes):
    arm, robot = of_processes
    first = until(robot, lambda m: True)
    arm._hand.process.kill()
    arm._hand.process.wait()
    until(robot, lambda m: m.errors == (HAND_ENDED,))
    opened = Reference(-1.0, position=first.position, quaternion=first.quaternion)
    robot.command(opened)
    until(robot, lambda m: m.errors == (HAND_ENDED,))
    robot.clear()
    seen = until(robot, lambda m: m.gripper > 0.9, lambda: robot.command(opened))
    assert seen.errors == ()


def test_limits_of_the_driver_are_frankas_by_a_share():
    own = FrankaArm(address="x", control="joints", hand=False, dynamics=0.5).limits
    assert own.joint_speed == tuple(0.5 * fr3.SPEED) and own.joint_acceleration == 5.0
    assert own.joint_low == tuple(fr3.LOW)
    hand = FrankaArm(address="x", dynamics=0.5).limits
    assert (hand.speed, hand.rotation_acceleration, hand.joint_margin) == (1.5, 8.5, fr3.MARGIN)


# ------------------------------------------------------------------------------------------ the kit
@pytest.mark.parametrize(
    "more", [[], ["--control", "joints"], ["--no-hand"], ["--control", "joints", "--no-hand"]]
)
def test_a_kit_is_one_that_a_session_takes(tmp_path, more, capsys):
    folder = tmp_path / "kit"
    asked = ["robot", "franka", "setup", "--arm", str(folder), "--address", "127.0.0.9", *more]
    assert main(asked) == 0
    assert "doctor" in capsys.readouterr().out
    kit, robot = Kit(folder), Kit(folder).robot()
    keys = needed(robot.capabilities.kind, robot.embodiment.rotation != "none", True)
    limits = load(kit.limits, robot.limits, keys)
    assert max(np.atleast_1d(limits.joint_speed)[:7]) < 1.0
    from vla_rl.config.robot import compose

    for overrides in (kit.overrides(), [f"robot={kit.arm}"]):
        settings = compose([*overrides, "robot.address=10.0.0.1"])
        assert settings.robot.options["address"] == "10.0.0.1"
        assert settings.robot.limits == str(kit.limits.resolve())
    file = tmp_path / "arm.json"
    assert main(["robot", "franka", "describe", str(file), "--arm", str(folder)]) == 0


def test_what_is_missing_is_told(tmp_path, monkeypatch, capsys):
    rows = examine(tmp_path / "kit")
    assert rows[0][:2] == ("set-up", False) and "--address" in rows[0][3]
    main(["robot", "franka", "setup", "--arm", str(tmp_path / "kit"), "--address", "127.0.0.9"])
    kit = Kit(tmp_path / "kit")
    kit.write(kit.arm, kit.arm.read_text().replace("realtime: true", "library: no_such_library"))
    rows = {what: (good, said) for what, good, said, _ in examine(kit.folder)}
    assert not rows["pylibfranka"][0] and "no_such_library" in rows["pylibfranka"][1]
    kit.write(kit.arm, kit.arm.read_text().replace("no_such_library", "fake_franka"))
    rows = {what: (good, said) for what, good, said, _ in examine(kit.folder)}
    assert not rows["robot's port"][0] and "127.0.0.9:1337" in rows["robot's port"][1]
    assert rows["limits"][0] and not rows["cameras"][0] and "robot" not in rows
    assert main(["robot", "franka", "doctor", "--arm", str(kit.folder)]) == 1
    assert main(["robot", "franka", "run", "--arm", str(tmp_path / "none"), "--no-policy"]) == 2
    assert "holds no Franka: make it with" in capsys.readouterr().err
    assert cameras_row(["front"])[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "options.address is empty"),
        ({"address": "x", "dynamics": 1.5}, "dynamics=1.5"),
        ({"address": "x", "control": "torque"}, "control='torque'"),
        ({"address": "x", "joint_impedance": [1.0]}, "has one entry"),
        ({"address": "x", "stiffness": 3}, "stiffness"),
    ],
)
def test_wrong_options_are_told(options, words):
    with pytest.raises(ConfigError, match=words):
        FrankaArm(**options)


def test_without_the_package_there_is_one_word(tmp_path):
    arm = FrankaArm(address="127.0.0.9", library="no_such_library")
    with pytest.raises(ConfigError, match=r"needs the package 'no_such_library'.*\[franka\]"):
        arm.connect()
    arm.close()
    assert issubclass(MissingPackage, Exception)


# ------------------------------------------------------------------------- the stand-in and the real
def test_the_stand_in_has_the_names_of_pylibfranka():
    real = pytest.importorskip("pylibfranka", reason="pylibfranka is not installed")
    fake = Library()
    for name in ("RobotMode", "ControllerMode", "RealtimeConfig"):
        mine, theirs = getattr(fake, name), getattr(real, name)
        assert {m.name for m in mine} <= set(theirs.__members__), name
    for name in ("CommandException", "ControlException", "NetworkException"):
        assert issubclass(getattr(real, name), RuntimeError)
    for mine, theirs in (
        (fake_franka._Robot, real.Robot),
        (fake_franka._Gripper, real.Gripper),
        (fake_franka.Motion, real.ActiveControlBase),
    ):
        own = {n for n, _ in inspect.getmembers(mine, inspect.isfunction) if not n.startswith("_")}
        assert own <= set(dir(theirs)), own - set(dir(theirs))
    state = vars(Library().body.state())
    assert set(state) <= set(dir(real.RobotState)), set(state) - set(dir(real.RobotState))
    assert {"width", "max_width"} <= set(dir(importlib.import_module("pylibfranka").GripperState))
    joints, pose = real.JointPositions([0.0] * 7), real.CartesianPose(POSE)
    for command in (joints, pose):
        assert command.motion_finished is False
    assert list(joints.q) == [0.0] * 7 and list(pose.O_T_EE) == POSE
    assert str(real.Errors()) == "[]" and not real.Errors() and named_in(str(real.Errors())) == ()
    assert "zero_jacobian" in dir(real.Model) and "to_sec" in dir(real.Duration)
