"""lerobot's own SO-101 follower behind a session: nothing drops its torque, its units are its
motors', and whatever its bus raises makes it hold under a latched fault."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time

import numpy as np
import pytest
from joint_arm import JointArm
from real_helpers import DT
from so101_bus import NAMES, FakeBus, patched

from real import limits as limit_files
from real.messages import Event, Grant, Hello, Lease, Notice, Writer
from real.modes import Mode
from real.robots.guarded import Guarded
from real.robots.lerobot import LeRobotArm
from real.robots.protocol import Capabilities, Measured, Reference, RobotLost
from real.robots.remote import RemoteRobot
from real.robots.server import FAILED, ArmServer
from real.robots.simulated import Picture
from real.supervisor.core import Supervisor
from real.supervisor.motion import Actions
from real.supervisor.settings import SupervisorConfig
from vla_rl.errors import ConfigError, MissingDependency
from vla_rl.specs import EmbodimentSpec

SLOW = {
    "joint_speed": 100,
    "joint_acceleration": 1000,
    "joint_jerk": 50_000,
    "joint_step": 15,
    "observation_age": 0.3,
}


@pytest.fixture
def bus(monkeypatch):
    return patched(monkeypatch)


def so101(tmp_path, **more) -> LeRobotArm:
    options = {
        "port": "/dev/ttyACM0",
        "id": "a",
        "calibration_dir": str(tmp_path),
        **more.pop("options", {}),
    }
    return LeRobotArm("so101_follower", options, **more)


# ------------------------------------------------------------------------------------------- torque
def test_no_way_that_an_arm_ends_drops_its_torque(bus, tmp_path):
    arm = so101(tmp_path, options={"disable_torque_on_disconnect": True})
    arm.connect()
    made = FakeBus.made
    assert made.calls.count("limp") == 1 and all(made.torque.values()), (
        "it was limp: lerobot configures it, and holds"
    )
    arm.observe()
    arm.close()
    assert all(made.torque.values()) and made.calls[-1] == "disconnect"
    forgotten = so101(tmp_path)
    forgotten.connect()
    made = FakeBus.made
    del forgotten
    gc.collect()  # lerobot's Robot.__del__ disconnects
    assert not made.is_connected and all(made.torque.values())


def test_an_arm_that_holds_already_goes_on_holding(monkeypatch, tmp_path):
    patched(monkeypatch, held=True)
    so101(tmp_path).connect()
    assert FakeBus.made.calls == ["connect"], (
        "nothing was written to it, so nothing had to be let go"
    )


def test_an_arm_that_holds_in_part_is_refused(monkeypatch, tmp_path):
    patched(monkeypatch)
    arm = so101(tmp_path)
    FakeBus.made.torque["elbow_flex"] = True
    with pytest.raises(ConfigError, match=r"1 of the arm's 6 motors hold, .* support it"):
        arm.connect()
    assert FakeBus.made.calls == ["connect"] and FakeBus.made.torque["elbow_flex"]


@pytest.mark.parametrize("held", [False, True])
def test_an_arm_that_is_not_calibrated_is_refused_before_anything_is_written(
    held, monkeypatch, tmp_path
):
    patched(monkeypatch, calibrated=False, held=held)
    with pytest.raises(
        ConfigError,
        match=r"not calibrated.*lerobot-calibrate --robot.type=so101_follower .*--robot.id=a",
    ):
        so101(tmp_path).connect()
    assert FakeBus.made.calls == ["connect"] and set(FakeBus.made.torque.values()) == {held}


def test_the_two_arms_of_a_pair_keep_theirs(monkeypatch, tmp_path):
    patched(monkeypatch)
    sides = {f"{side}_arm_config": {"port": f"/dev/{side}"} for side in ("left", "right")}
    arm = LeRobotArm("bi_so_follower", {"id": "a", "calibration_dir": str(tmp_path), **sides})
    assert arm.names[0] == "left_shoulder_pan.pos" and arm.embodiment.action_units == (
        "deg",
    ) * 5 + ("percent",) + ("deg",) * 5 + ("percent",)
    arm.connect()
    arm.close()
    assert all(FakeBus.made.torque.values())


# -------------------------------------------------------------------------------------------- units
def test_units_and_ends_are_those_of_the_motors(bus, tmp_path):
    """Half of the calibrated steps, 360 degrees being 4095: lerobot's `_normalize`."""
    arm = so101(tmp_path)
    assert arm.embodiment.action_units == ("deg",) * 5 + ("percent",)
    wanted = [
        180 * 2048 / 4095,
        180 * 2400 / 4095,
        180 * 2200 / 4095,
        180 * 2000 / 4095,
        180.0,
        100.0,
    ]
    np.testing.assert_allclose(arm.limits.joint_high, wanted)
    np.testing.assert_allclose(arm.limits.joint_low, [*(-x for x in wanted[:5]), 0.0])
    shares = so101(tmp_path, options={"use_degrees": False})
    assert shares.embodiment.action_units == ("percent",) * 6
    assert (
        shares.limits.joint_low == (-100.0,) * 5 + (0.0,)
        and shares.limits.joint_high == (100.0,) * 6
    )


def test_what_a_policy_asks_for_in_degrees_is_not_clipped_to_shares(bus, tmp_path):
    arm = so101(tmp_path)
    arm.connect()
    asked = np.array([10.0, -105.0, 95.0, 60.0, 150.0, 40.0])
    request = Actions(arm.embodiment, arm.capabilities).request(asked, arm.observe(), None)
    np.testing.assert_allclose(request.joints, asked)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            {"high": {"wrist_roll.pos": 400.0}},
            r"wrist_roll.pos are -180 and 400, and its motor goes from -180 to 180 deg",
        ),
        ({"low": {"gripper.pos": -5.0}}, r"gripper.pos are -5 and 100"),
        (
            {"low": {"gripper.pos": 60.0}, "high": {"gripper.pos": 50.0}},
            "the low one below the high",
        ),
        ({"low": {"gripper.pos": float("nan")}}, "give finite ends"),
        (
            {"low": {"thumb.pos": 1.0}},
            r"has 'thumb.pos', and lerobot_so101_follower takes shoulder_pan.pos",
        ),
    ],
)
def test_ends_that_the_motors_do_not_have_are_refused(ends, said, bus, tmp_path):
    with pytest.raises(ConfigError, match=said):
        so101(tmp_path, **ends)


def test_narrower_ends_count(bus, tmp_path):
    arm = so101(tmp_path, low={"wrist_roll.pos": -30.0}, high={"wrist_roll.pos": 45.0})
    assert arm.limits.joint_low[4] == -30.0 and arm.embodiment.action_high[4] == 45.0


@pytest.mark.parametrize("given", [{}, {"low": {"shoulder.pos": -1.0}}])
def test_a_robot_that_does_not_tell_its_units_is_refused(given, paper_arm, tmp_path):
    with pytest.raises(
        ConfigError, match=r"does not tell the unit of shoulder.pos: give both of its ends"
    ):
        LeRobotArm("paper_arm", {"calibration_dir": str(tmp_path)}, **given)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_speeds_are_numbers_above_0(speed, bus, tmp_path):
    with pytest.raises(ConfigError, match=r"robot.options.speeds.joint_speed=.*above 0"):
        so101(tmp_path, speeds={"joint_speed": speed})


# ------------------------------------------------------------------------------------------- config
def test_a_config_is_read_as_lerobots_own_command_line_does(bus, tmp_path):
    camera = {"type": "opencv", "index_or_path": 0, "width": 640, "height": 480, "fps": 30}
    arm = so101(tmp_path, options={"cameras": {"front": camera}})
    assert arm.embodiment.cameras[0].name == "front" and arm.embodiment.cameras[0].height == 480
    for options, said in (
        ({"cameras": {"front": {"type": "nothing"}}}, "cameras.front"),
        ({"nonsense": 1}, "nonsense"),
    ):
        with pytest.raises(
            ConfigError, match=f"options of lerobot's robot so101_follower are wrong: .*{said}"
        ):
            so101(tmp_path, options=options)


NEW_WORDS = (
    "'feetech-servo-sdk' is required but not installed. Install it with: pip install "
    "'lerobot[feetech]' (or uv ...)"
)
MISSING = {  # by lerobot 0.4 and 0.6
    "scservo_sdk": ModuleNotFoundError("No module named 'scservo_sdk'", name="scservo_sdk"),
    "feetech-servo-sdk": ImportError(NEW_WORDS),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_vendors_package_that_is_missing_is_named(package, monkeypatch, tmp_path):
    bus = patched(monkeypatch)

    def missing(*_, **__):
        raise MISSING[package]

    monkeypatch.setattr(bus, "__init__", missing)
    said = rf"so101_follower needs the package {package}: pip install 'lerobot\[feetech\]'"
    with pytest.raises(MissingDependency, match=said):
        so101(tmp_path)


# -------------------------------------------------------------------------------- what a bus raises
def raising(error: Exception, first: int, count: int = 1, writes: bool = False):
    left = [count]

    def fault(number: int) -> None:
        if left[0] and ((number == -1) if writes else number >= first):
            left[0] -= 1
            raise error

    return fault


KINDS = [
    IndexError("list index out of range"),
    KeyError("gripper"),
    ValueError("bad"),
    ZeroDivisionError(),
    RuntimeError(),
]
KINDS += [
    TypeError("x"),
    AssertionError(),
    OSError("input/output error"),
    EOFError(),
    NotImplementedError(),
]


def test_one_lost_packet_is_read_again(bus, tmp_path):
    for error in (ConnectionError("There is no status packet!"), TimeoutError()):
        arm = so101(tmp_path)
        arm.connect()
        FakeBus.made.fault = raising(error, 2)
        for _ in range(4):
            assert arm.observe().joints[0] == 10.0
        assert FakeBus.made.reads == 5
        FakeBus.made.fault = raising(error, 1, count=2)
        with pytest.raises(RobotLost, match=type(error).__name__):
            arm.observe()


def test_numbers_that_are_not_finite_are_no_measurement(bus, tmp_path):
    arm = so101(tmp_path)
    arm.connect()
    arm.observe()
    FakeBus.made.place["elbow_flex"] = float("nan")
    with pytest.raises(RobotLost, match="nan"):
        arm.observe()
    arm.hold()
    assert FakeBus.made.goals[-1] == dict.fromkeys(NAMES, 10.0), (
        "it keeps the last pose that was one"
    )


class Served:
    """The arm's process without a process, the supervisor, and a person who has control."""

    def __init__(self, tmp_path, driver: str):
        self.server = ArmServer(
            {"socket": str(tmp_path / "a"), "driver": driver, "options": {"place": str(tmp_path)}}
        )
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        robot = RemoteRobot(str(tmp_path / "a"))
        limits = limit_files.parse(
            SLOW, robot.limits, limit_files.needed("joints", False, False), "test"
        )
        self.supervisor = Supervisor(robot, limits, SupervisorConfig(), time.monotonic())
        self._writer, self._tick = Writer("operator", time.monotonic), -1
        self.send(Hello, role="teleop", pid=1)
        self.send(Lease, ask="request", token="", force=False)
        self.token = next(
            m.token for _, m in self.supervisor.session.outbox if isinstance(m, Grant)
        )

    def send(self, kind, **fields):
        self.supervisor.receive(1, self._writer.make(kind, **fields), time.monotonic())

    def say(self, *names: str):
        for name in names:
            self.send(Event, name=name, value="", at=0.0, lease=self.token)

    def until(self, mode: Mode, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while self.supervisor.session.modes.mode is not mode:
            assert time.monotonic() < end, (
                self.supervisor.session.modes.mode,
                self.supervisor.session.modes.faults,
            )
            self.run(1)

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self._tick += 1
            self.send(Lease, ask="renew", token=self.token, force=False)
            self.supervisor.tick(self._tick, time.monotonic())
            time.sleep(DT)

    def close(self) -> None:
        self.supervisor.session.robot.close()
        self.server.orphaned()
        self._thread.join(5.0)
        self.server.server.close()
        assert not self._thread.is_alive()


class Driver(LeRobotArm):
    """What a config names: the SO-101 of this test."""

    def __init__(self, place: str):
        super().__init__(
            "so101_follower", {"port": "/dev/ttyACM0", "id": "a", "calibration_dir": place}
        )


@pytest.mark.parametrize("writes", [False, True])
def test_whatever_the_bus_raises_the_arm_holds_under_a_latched_fault(writes, bus, tmp_path):
    session = Served(tmp_path, f"{__name__}:Driver")
    made = FakeBus.made
    try:
        for error in KINDS:
            session.say("arm", "takeover")
            session.run(3)
            assert session.supervisor.session.modes.mode is Mode.HUMAN, error
            made.fault = raising(error, made.reads + 1, writes=writes)
            if writes:
                session.supervisor.session.robot.command(Reference(0.0, joints=np.full(6, 12.0)))
            session.until(Mode.FAULT)
            told = len(made.goals)
            session.supervisor.session.robot.command(Reference(0.0, joints=np.full(6, 50.0)))
            session.run(5)
            assert (
                session.supervisor.session.modes.mode is Mode.FAULT
                and FAILED in session.supervisor.session.modes.faults
            ), error
            assert all(max(goal.values()) < 20.0 for goal in made.goals[told:]), (
                "stopped: what comes later is not done"
            )
            reasons = [
                m.value
                for _, m in session.supervisor.session.outbox
                if isinstance(m, Notice) and m.name == "fault"
            ]
            assert any(type(error).__name__ in why for why in reasons), (error, reasons)
            session.supervisor.session.outbox.clear()
            session.say("ack")
            session.until(Mode.IDLE)
        assert all(made.torque.values()) and made.calls.count("limp") == 1, (
            "but for the one before it was driven"
        )
    finally:
        session.close()


class Broken:
    """A driver of one's own that raises what it is told to, wherever it is asked."""

    name = "broken"
    embodiment = capabilities = limits = None

    def __init__(self, error: Exception):
        self.error = error

    def fail(self, *_):
        raise self.error

    connect = observe = command = hold = stop = clear = begin = pictures = close = fail


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_a_driver_of_ones_own_raises_one_kind(error):
    robot = Guarded(Broken(error))
    for call in (robot.observe, robot.hold, robot.clear, robot.pictures, lambda: robot.begin({})):
        with pytest.raises(RobotLost, match=f"the driver of broken failed: {type(error).__name__}"):
            call()
    with pytest.raises(ConfigError, match="broken cannot be opened"):
        robot.connect()
    assert robot.stop() is False and robot.close() is None


class Telling:
    """A driver of one's own, of a hand with seven joints, that reports what it is told to."""

    name, capabilities = "telling", Capabilities(gain=6.0, holds=True)
    limits = limit_files.Limits(
        speed=0.5,
        acceleration=5.0,
        jerk=100.0,
        step=0.1,
        box=limit_files.Box((-1.0,) * 3, (1.0,) * 3),
        joint_low=(-3.0,) * 7,
        joint_high=(3.0,) * 7,
    )
    embodiment = EmbodimentSpec(
        name="telling",
        action_names=("dx", "dy", "dz"),
        action_units=("m",) * 3,
        action_low=(-0.05,) * 3,
        action_high=(0.05,) * 3,
        frame="base",
        rotation="none",
        gripper="none",
        control_hz=10.0,
        cameras=(),
        proprio_names=("x", "y", "z"),
    )

    def __init__(self):
        self.says, self.shows = told(), []

    def observe(self):
        return self.says

    def pictures(self):
        return self.shows

    def hold(self): ...


def told(**changes) -> Measured:
    place, jacobian = np.array([0.1, 0.0, 0.3]), np.arange(42.0).reshape(6, 7) / 42.0
    sound = Measured(
        1.0,
        place,
        np.array([0.0, 1.0, 0.0, 0.0]),
        np.zeros(7),
        np.zeros(7),
        0.5,
        np.zeros(6),
        place,
        jacobian,
    )
    return dataclasses.replace(sound, **changes)


NAN, INF = float("nan"), float("inf")
UNSOUND = [
    *(
        (name, value)
        for name in ("position", "quaternion", "joints", "joint_velocity", "wrench", "proprio")
        for value in (None, "up", [None] * 7, [[0.0], [0.0, 1.0]], 0.0, object(), ["1"] * 7)
    ),
    *(
        (name, np.append(getattr(told(), name)[1:], bad))
        for name in ("position", "joints", "joint_velocity", "wrench", "proprio", "quaternion")
        for bad in (NAN, INF, 1e300)
    ),
    *(
        (name, value)
        for name in ("stamp", "gripper")
        for value in (None, "x", NAN, -INF, [0.5], True, 10**400, 1j)
    ),
    ("position", np.zeros(2)),
    ("position", np.zeros(0)),
    ("position", np.zeros((1, 3))),
    ("position", [0.0, 0.0, 150.0]),
    ("quaternion", np.zeros(4)),
    ("quaternion", np.ones(4)),
    ("quaternion", np.zeros(0)),
    ("quaternion", [1.0, 0.0, 0.0]),
    ("joints", np.zeros(6)),
    ("joints", np.zeros(0)),
    ("joint_velocity", np.zeros(3)),
    ("joint_velocity", np.zeros(8)),
    ("wrench", np.zeros(3)),
    ("proprio", np.zeros(4)),
    ("jacobian", np.zeros((7, 6))),
    ("jacobian", np.zeros(42)),
    ("jacobian", np.full((6, 7), NAN)),
    ("jacobian", np.where(np.arange(42).reshape(6, 7) == 3, NAN, 0.1)),
    ("jacobian", np.full((6, 7), INF)),
    ("jacobian", np.full((6, 7), 1e300)),
    ("jacobian", np.zeros((6, 6))),
    ("jacobian", "none"),
    ("errors", None),
    ("errors", "reflex"),
    ("errors", (1,)),
    ("errors", 3),
    ("errors", {"reflex": 1}),
]


@pytest.mark.parametrize(("name", "value"), UNSOUND, ids=lambda x: x if isinstance(x, str) else "")
def test_a_measurement_that_cannot_be_used_is_a_lost_robot(name, value):
    """And the supervisor latches it, where it ended."""
    robot = Telling()
    supervisor = Supervisor(Guarded(robot), robot.limits, SupervisorConfig(), 0.0)
    assert supervisor.tick(0, 0.01).faults == ()
    robot.says = told(**{name: value})
    with pytest.raises(RobotLost, match="telling"):
        supervisor.session.robot.observe()
    assert (
        supervisor.tick(1, 0.02).faults == ("robot lost",)
        and supervisor.session.modes.mode is Mode.FAULT
    )


@pytest.mark.parametrize("says", [None, (1, 2), {}, Measured], ids=str)
def test_what_is_no_measurement_is_a_lost_robot(says):
    robot = Telling()
    robot.says = says
    supervisor = Supervisor(Guarded(robot), robot.limits, SupervisorConfig(), 0.0)
    assert supervisor.tick(0, 0.01).faults == ("robot lost",)
    with pytest.raises(RobotLost, match="instead of a Measured"):
        supervisor.session.robot.observe()


@pytest.mark.parametrize(
    "changes",
    [
        {"jacobian": None, "wrench": np.zeros(0), "joint_velocity": np.zeros(0)},
        {"position": [0, 0, 1], "quaternion": (0.0, 0.0, 0.0, 1.005), "errors": ["reflex"]},
        {
            "joints": np.zeros(7, dtype=np.float32),
            "gripper": np.float32(1.5),
            "stamp": np.array(1.7e9),
        },
    ],
)
def test_a_measurement_that_can_be_used_is_the_drivers_in_arrays_of_ones_own(changes):
    robot = Telling()
    robot.says = given = told(**changes)
    found = Guarded(robot).observe()
    for name in (f.name for f in dataclasses.fields(Measured)):
        mine, its = getattr(found, name), getattr(given, name)
        np.testing.assert_array_equal(mine, its)
        assert (
            mine is None
            or not isinstance(mine, np.ndarray)
            or (mine.dtype == float and mine is not its)
        )
    assert type(found.errors) is tuple and type(found.stamp) is type(found.gripper) is float


def test_an_arm_of_joints_needs_no_hand_and_goes_on_with_the_joints_that_it_had():
    robot = JointArm()
    caught = Guarded(robot)
    assert caught.observe().joints.shape == (7,)
    robot.place = robot.place[[0, 1, 2, 3, 4, 5, 6, 6]]
    with pytest.raises(RobotLost, match=r"joints of shape \[8\] instead of \[7\]"):
        caught.observe()


IMAGE = np.zeros((2, 3, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "shows",
    [
        None,
        [None],
        [IMAGE],
        [Picture("front", 0, 0.0, None)],
        [Picture("front", 0, 0.0, IMAGE[0])],
        [Picture("front", 0, 0.0, IMAGE / 255.0)],
        [Picture("front", 1, 0.0, IMAGE[:1])],
    ],
    ids=lambda _: "",
)
def test_pictures_that_cannot_be_used_are_a_lost_robot(shows):
    robot = Telling()
    robot.shows = [Picture("front", 0, 0.0, IMAGE)]
    caught = Guarded(robot)
    assert caught.pictures() == robot.shows
    robot.shows = shows
    with pytest.raises(RobotLost, match="telling reports"):
        caught.pictures()
