"""Devices of an operator: when they engage, what their bytes mean, that no leader makes its
follower jump."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import socket
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real import messages as m
from real.modes import Mode
from real.teleop.client import REST_S, TeleopClient
from real.teleop.engage import Align, Clutch, Hysteresis, MotionEngage
from real.teleop.leader import Leader, LeaderConfig, build
from real.teleop.protocol import DeviceLost, Sample
from real.teleop.scripted import (
    LAG_S,
    Doing,
    Expert,
    OperatorConfig,
    Random,
    ScriptedOperator,
    Stuck,
)
from real.teleop.spacemouse import Reports, SpaceMouse, SpaceMouseConfig, find
from vla_rl.errors import ConfigError, MissingDependency, UserError


def state(mode: str = "AUTO", **changes) -> m.State:
    vectors = (
        "proprio",
        "pose",
        "joints",
        "wrench",
        "policy",
        "human",
        "sent",
        "reference",
        "clipped",
        "faults",
    )
    numbers = (
        "tick",
        "epoch",
        "episode",
        "step",
        "gripper",
        "measured",
        "queue",
        "gate",
        "lateness",
        "overruns",
    )
    fields = dict.fromkeys(vectors, ()) | dict.fromkeys(numbers, 0)
    fields |= {"holder": "", "policy_version": "", "decision": -1, "index": -1}
    fields |= dict.fromkeys(("step_done", "is_human", "holding", "slow", "estop"), False)
    return m.Writer("supervisor", lambda: 0.0).make(m.State, mode=mode, **fields | changes)


# ----------------------------------------------------------------------------------------- engaging
def test_motion_engages_at_once_and_lets_go_after_it_was_quiet():
    engage = MotionEngage(Hysteresis(on=0.2, off=0.1, hold_s=0.25))
    path = [
        (0.0, 0.15),
        (0.1, 0.2),
        (0.2, 0.12),
        (0.3, 0.0),
        (0.4, 0.11),
        (0.5, 0.05),
        (0.7, 0.09),
        (0.76, 0.0),
        (0.8, 0.15),
    ]
    #       below on     on          above off    quiet       not quiet    quiet from here           0.26 s        below on
    assert [engage.update(x, t) for t, x in path] == [
        False,
        True,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    engage.update(1.0, 1.0)
    engage.release()
    assert not engage.engaged


def test_a_clutch_takes_both_origins_anew():
    clutch = Clutch()
    assert clutch.update(False, (5.0, 5.0), (0.0, 1.0)) == ()
    assert clutch.update(True, (5.0, 5.0), (0.0, 1.0)) == (0.0, 1.0), "engaging moves nothing"
    assert clutch.update(True, (5.5, 4.0), (0.2, 0.9)) == (0.5, 0.0)
    assert clutch.update(False, (0.0, 0.0), (0.5, 0.0)) == ()
    assert clutch.update(True, (-3.0, 9.0), (0.5, 0.0)) == (0.5, 0.0), (
        "the hand went back meanwhile"
    )


@given(st.lists(st.tuples(st.booleans(), st.floats(-1, 1)), max_size=60))
def test_a_clutch_never_jumps(path):
    clutch, robot, before = Clutch(), 0.0, None
    for engaged, device in path:
        target = clutch.update(engaged, (device,), (robot,))
        if target:
            moved = 0.0 if before is None else abs(device - before)
            assert abs(target[0] - robot) <= moved + 1e-9
            robot, before = target[0], device
        else:
            before = None


def test_alignment():
    align = Align(("pan", "lift"), tolerance=5.0, jump=15.0)
    assert (
        align.update((40.0, 0.0), (0.0, 1.0))
        == "move the leader's pan by -40.00 to where the arm is"
    )
    assert "pan" in align.update((30.0, 0.0), (0.0, 1.0))
    assert "pan" in align.update((16.0, 0.0), (0.0, 1.0))
    assert align.update((4.0, 0.0), (0.0, 1.0)) == ""
    assert align.update((18.0, 0.0), (0.0, 1.0)) == "", "once aligned it leads"
    assert align.update((18.0, 40.0), (18.0, 1.0)) == "the leader's lift jumped: align it again"
    assert "lift" in align.update((18.0, 40.0), (18.0, 1.0))
    assert align.update((18.0, 30.0), (18.0, 29.0)) == ""
    assert align.update((18.0, math.nan), (18.0, 29.0)) == "the leader arm says no number"


# --------------------------------------------------------------------------------------- SpaceMouse
def report(kind: int, *numbers: int) -> bytes:
    return bytes([kind]) + struct.pack(f"<{len(numbers)}h", *numbers)


def test_bytes_of_a_space_mouse():
    """Pushed right, towards the operator and down by the full 350: back, right and down for the
    robot."""
    reports = Reports()
    reports.feed(bytes.fromhex("015e0100000000"), 1.0)  # 0x015e = 350, right
    assert reports.axes(0.0) == (0, -1, 0, 0, 0, 0)
    reports.feed(bytes.fromhex("0100005e01a2fe"), 1.1)  # towards 350, down -350
    assert reports.axes(0.0) == (-1, 0, 1, 0, 0, 0)
    reports.feed(report(2, 175, 0, -35), 1.2)
    assert reports.axes(0.0) == pytest.approx((-1, 0, 1, 0, -0.5, 0.1))
    assert reports.axes(0.2) == pytest.approx((-1, 0, 1, 0, -0.375, 0)), (
        "the dead-zone is cut out, not off"
    )
    reports.feed(report(1, 0, 0, 0, 700, 0, 0), 1.3)  # all six in one report, beyond the range
    assert reports.axes(0.0) == (0, 0, 0, 0, -1, 0)
    reports.feed(bytes([3, 2, 0]), 1.4)
    assert (reports.buttons, reports.stamp, reports.unknown) == (2, 1.4, 0)
    for noise in (b"", b"\x01\x02", b"\x09abcdefgh"):
        reports.feed(noise, 9.0)
    assert (reports.unknown, reports.stamp) == (3, 1.4)


def test_a_space_mouse_engages_by_motion_and_its_silence_while_displaced_is_a_loss():
    # like hidraw, a read is one report
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mouse = SpaceMouse(SpaceMouseConfig(dead_zone=0.0))
    with pytest.raises(DeviceLost):
        mouse.read(0.0, None)
    mouse.adopt(theirs.detach())
    assert mouse.read(0.0, None) == Sample(0.0, False, (-0.0,) * 6)
    ours.send(report(1, 0, -350, 0))
    ours.send(bytes([3, 1]))
    assert mouse.read(1.0, None) == Sample(1.0, True, (1, 0, 0, 0, 0, 0), 1.0, ("button 0",))
    assert mouse.read(1.1, None).dead_man
    with pytest.raises(DeviceLost, match="says nothing"):
        mouse.read(1.2, None)
    ours.send(report(1, 0, 0, 0))
    ours.send(bytes([3, 0]))
    assert not mouse.read(2.0, None).dead_man
    assert not mouse.read(60.0, None).dead_man, "at rest it says nothing, and that is well"
    ours.close()
    with pytest.raises(DeviceLost, match="gone"):
        mouse.read(61.0, None)
    mouse.close()


def test_a_space_mouse_is_found_by_its_vendor(tmp_path):
    for name, ids in (("hidraw0", "0003:0000046D:0000C52B"), ("hidraw1", "0003:0000256F:0000C635")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "uevent").write_text(f"DRIVER=hid-generic\nHID_ID={ids}\n")
    assert find(tmp_path) == "/dev/hidraw1", "the other one is a receiver of the same house"
    (tmp_path / "hidraw1" / "device" / "uevent").unlink()
    with pytest.raises(MissingDependency, match=r"no SpaceMouse.*teleop\.path"):
        find(tmp_path)
    with pytest.raises(MissingDependency, match=r"70-spacemouse\.rules"):
        SpaceMouse(SpaceMouseConfig(path=str(tmp_path / "none"))).connect()


# -------------------------------------------------------------------------------------- leader arms
class FakeLeader:
    """What lerobot's `Teleoperator` is to this package."""

    def __init__(self, names=("pan.pos", "lift.pos"), calibrated=True):
        self.action_features = dict.fromkeys(names, float)
        self.is_calibrated = calibrated
        self.at = dict.fromkeys(names, 0.0)
        self.connected = False

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate, "never by itself: it asks questions on a terminal"
        self.connected = True

    def get_action(self) -> dict[str, float]:
        if not self.connected:
            raise ConnectionError("no status packet")
        return dict(self.at)

    def disconnect(self) -> None:
        self.connected = False


NAMES = ("lift.pos", "pan.pos")  # the robot's order, which is another


def test_a_leader_leads_once_it_is_aligned_and_moved():
    fake = FakeLeader()
    leader = Leader(LeaderConfig(), NAMES, fake)
    leader.connect()
    robot = state(proprio=(0.0, 30.0, 7.0))
    assert leader.read(0.0, None).problem
    first = leader.read(0.01, robot)
    assert not first.dead_man and first.target == () and "pan.pos by +30" in first.problem
    for i in range(3):
        fake.at["pan.pos"] += 10.0
        sample = leader.read(0.2 + 0.2 * i, robot)
    assert sample.problem == "" and sample.target == (0.0, 30.0), (
        "aligned while it was moved, and it leads in the robot's order"
    )
    still = leader.read(5.0, robot)
    assert still.dead_man, "held still it leads on"
    leader.release()
    assert not leader.read(5.1, robot).dead_man, "after that it has to be moved anew"
    fake.at["lift.pos"] = 90.0
    assert "jumped" in leader.read(5.2, robot).problem
    fake.connected = False
    with pytest.raises(DeviceLost, match="no status packet"):
        leader.read(5.3, robot)
    leader.close()


def test_a_relative_leader_adds_to_where_the_follower_was():
    fake = FakeLeader()
    leader = Leader(LeaderConfig(relative=True), NAMES, fake)
    leader.connect()
    fake.at = {"pan.pos": 90.0, "lift.pos": -50.0}
    robot = state(proprio=(1.0, 2.0))
    assert not leader.read(0.0, robot).dead_man
    fake.at["pan.pos"] = 92.0
    engaged = leader.read(0.1, robot)
    assert engaged.dead_man and engaged.target == (1.0, 2.0), "engaging moves nothing"
    fake.at["pan.pos"], fake.at["lift.pos"] = 95.0, -51.0
    assert leader.read(0.2, robot).target == (0.0, 5.0)
    fake.at["lift.pos"] = 40.0
    assert not leader.read(0.3, robot).dead_man, "a leap of one reading is no hand"


@pytest.mark.parametrize(
    "fake, said",
    [
        (FakeLeader(names=("pan.pos",)), "same joints"),
        (FakeLeader(calibrated=False), "not calibrated"),
    ],
)
def test_a_leader_that_does_not_fit_is_one_clear_error(fake, said):
    with pytest.raises(UserError, match=said):
        Leader(LeaderConfig(), NAMES, fake).connect()


@pytest.mark.slow  # imports all devices of lerobot
def test_leaders_of_lerobot_by_name():
    pytest.importorskip("lerobot")
    import lerobot_leader

    config = LeaderConfig(type="test_leader", options={"port": "here"})
    leader = Leader(config, NAMES)
    leader.connect()
    assert isinstance(build(config), lerobot_leader.TestLeader)
    robot = state(proprio=(1.0, 2.0))
    assert leader.read(0.0, robot).problem == "" and leader.read(0.0, robot).target == ()
    leader.close()
    with pytest.raises(
        ConfigError, match=r"options of lerobot.s leader arm test_leader are wrong: .*prot"
    ):
        build(LeaderConfig(type="test_leader", options={"prot": "here"}))
    with pytest.raises(UserError, match=r"does not connect: nothing at there"):
        Leader(LeaderConfig(type="test_leader", options={"port": "there"}), NAMES).connect()
    with pytest.raises(ConfigError, match=r"'so999'.*test_leader"):
        build(LeaderConfig(type="so999"))
    # (tests/so101_bus.py has one)
    if "scservo_sdk" not in sys.modules and importlib.util.find_spec("scservo_sdk") is None:
        with pytest.raises(
            MissingDependency,
            match=r"so101_leader needs the package (scservo_sdk|feetech-servo-sdk)",
        ):
            build(LeaderConfig(type="so101_leader", options={"port": "/dev/null"}))


# -------------------------------------------------------------------------------- scripted operator
class Line(Expert):
    """A task: get from 0 to 1. The expert pushes forward."""

    def __init__(self) -> None:
        self.x = 0.0

    def action(self, state):
        return (1.0, 0.05, 0, 0, 0, 0), -1.0

    def outcome(self, state):
        return "success" if self.x >= 1 else ""

    def progress(self, state):
        return self.x


def play(config: OperatorConfig, seconds: float = 30.0, hz: float = 50.0, episode: int = 1):
    """The policy does nothing; the operator's hand moves the point at 0.25 a second. Returns
    (time, ask) and the samples."""
    line = Line()
    operator = ScriptedOperator(line, Stuck(line), config)
    mode, asked, samples = "AUTO", [], []
    for i in range(int(seconds * hz)):
        now = i / hz
        sample = operator.read(now, state(mode, episode=episode, step=i))
        samples.append(sample)
        line.x += 0.25 / hz * sample.axes[0] * (mode == "HUMAN")
        for ask in operator.asks():
            asked.append((now, ask.name, ask.value))
            mode = {"takeover": "HUMAN", "hand_back": "AUTO", "end": "READY"}.get(ask.name, mode)
    return asked, samples


def test_the_scripted_operator_helps_hands_back_and_labels():
    exact = OperatorConfig(
        reaction_sigma=0.0, distracted=0.0, noise=0.0, wrong_label=0.0, late_s=(0.5, 0.5)
    )
    asked, samples = play(exact)
    first = asked[0]
    assert first[1] == "takeover" and first[0] == pytest.approx(2.0 + 0.7, abs=0.05), (
        "2 s of no progress, 0.7 s of reaction"
    )
    assert asked[1][1] == "hand_back"
    # 0.15 s of lag, 0.2 of progress at 0.25 a second, then 0.5 s late
    assert asked[1][0] - first[0] == pytest.approx(0.8 + 0.5, abs=0.1)
    names = [name for _, name, _ in asked]
    assert names[-2:] == ["label", "end"] and asked[-2][2] == "success"
    assert names.count("takeover") >= 3
    moving = [s for s in samples if s.dead_man and s.axes[0]]
    assert all(s.axes == (1, 0, 0, 0, 0, 0) and s.gripper == -1 for s in moving), (
        "0.05 is in the dead-zone"
    )


def test_the_scripted_operator_repeats_and_seeds_differ():
    one, two, other = (play(OperatorConfig(seed=seed)) for seed in (3, 3, 4))
    assert one == two
    assert one[0] != other[0]


def test_delays_noise_and_wrong_labels_are_as_said():
    line = Line()
    operator = ScriptedOperator(line, Stuck(line), OperatorConfig(distracted=0.0))
    operator.read(0.0, state())
    delays = np.array([operator.delay(1.0) for _ in range(4000)])
    assert delays.min() > 0.2 and np.median(delays) == pytest.approx(0.7, abs=0.02)
    assert np.log(delays - 0.2).std() == pytest.approx(0.4, abs=0.02)
    tired = np.median([operator.delay(3601.0) for _ in range(4000)])
    assert tired == pytest.approx(1.05, abs=0.03)
    labels = [
        next(v for _, n, v in play(OperatorConfig(wrong_label=w, seed=1))[0] if n == "label")
        for w in (0.0, 1.0)
    ]
    assert labels == ["success", "failure"]
    _, samples = play(OperatorConfig(noise=0.15, lag_s=0.0))
    pushes = np.array([s.axes[0] for s in samples if s.dead_man])
    assert pushes.max() == 1 and 0.05 < pushes.std() < 0.15, "clipped at one side"
    for wrong in ({"noise": 2.0}, {"lag_s": LAG_S + 1}):
        with pytest.raises(ConfigError, match="operator"):
            OperatorConfig(**wrong)


def test_the_rules_of_rlif():
    rng = np.random.default_rng(0)
    rule = Random(gap=5, length=3, control_hz=10)
    gaps, lengths, step = [], [], 0
    rule.begin(rng)
    for _ in range(300):
        start = step
        while not rule.wants(state(step=step), 0.0):
            step += 1
        gaps.append(step - start)
        helped = 1
        while not rule.enough(state(step=step + helped), 0.0, helped / 10):
            helped += 1
        lengths.append(helped)
        step += helped
    assert set(gaps) == {1, 2, 3, 4, 5} and set(lengths) == {1, 2, 3}


# ------------------------------------------------------------------------------- a device's process
class FakeLink:
    source = "teleop.fake"

    def __init__(self) -> None:
        self.sent, self.writer = [], m.Writer(self.source, lambda: self.now)
        self.now = 0.0

    def send(self, kind, valid_s=math.inf, **fields):
        self.sent.append(self.writer.make(kind, valid_s, **fields))
        m.encode(self.sent[-1])
        return self.sent[-1]

    def of(self, kind):
        return [x for x in self.sent if isinstance(x, kind)]


class FakeDevice:
    name = "fake"

    def __init__(self) -> None:
        self.sample, self.lost, self.released = Sample(0.0), False, 0

    def read(self, now, state):
        if self.lost:
            raise DeviceLost("it is unplugged")
        return dataclasses.replace(self.sample, stamp=now)

    def release(self):
        self.released += 1


def grant(granted: bool, holder: str, token: str) -> m.Grant:
    return m.Writer("supervisor", lambda: 0.0).make(
        m.Grant, granted=granted, holder=holder, token=token, until=9.0, reason=""
    )


def test_a_device_takes_over_while_it_is_engaged_and_gives_control_back():
    link, device = FakeLink(), FakeDevice()
    client = TeleopClient(device, link, lambda: link.now)
    client.hear(state("AUTO"))
    client.step()
    assert link.sent == [], "a device that rests asks for nothing"
    device.sample = Sample(0.0, True, (1, 0, 0, 0, 0, 0))
    client.step()
    assert [x.ask for x in link.of(m.Lease)] == ["request"] and not link.of(m.Lease)[0].force
    assert not link.of(m.Input)
    client.hear(grant(True, link.source, "t"))
    client.hear(state("AUTO", holder=link.source))
    for link.now in (0.1, 0.2):
        client.step()
    assert [x.name for x in link.of(m.Event)] == ["takeover"]
    assert [(x.lease, x.dead_man, x.axes[0]) for x in link.of(m.Input)] == [("t", True, 1.0)] * 2
    assert link.of(m.Input)[-1].expiry == pytest.approx(0.2 + m.SILENCE_S)
    device.sample = Sample(0.0)
    link.now = 0.3
    client.step()
    assert not link.of(m.Input)[-1].dead_man and client.token
    link.now = 0.3 + REST_S
    client.step()
    assert link.of(m.Lease)[-1].ask == "release" and client.token == "" and device.released == 1


def test_a_device_that_is_lost_or_robbed_is_released():
    link, device = FakeLink(), FakeDevice()
    client = TeleopClient(device, link, lambda: link.now)
    device.sample = Sample(0.0, True)
    client.step()
    client.hear(grant(True, link.source, "t"))
    client.hear(state("AUTO", holder=link.source))
    client.step()
    client.hear(state("HUMAN", holder="console"))
    assert client.token == "" and device.released == 1
    client.hear(grant(True, link.source, "u"))
    client.step()
    device.lost = True
    count = len(link.of(m.Input))
    for _ in range(5):
        assert client.step() is None
    assert len(link.of(m.Input)) == count, "its silence is what the supervisor notices"
    assert [(x.name, x.value) for x in link.of(m.Event)][-2:] == [
        ("note", "it is unplugged"),
        ("release", "it is unplugged"),
    ]


def test_a_scripted_operator_whose_arm_holds_lets_go_and_presses_anew():
    """Else it would hold its dead-man over an arm that stands still: found by `vla-rl bench
    soak`."""
    line = Line()
    operator = ScriptedOperator(
        line, Stuck(line), OperatorConfig(reaction_sigma=0.0, distracted=0.0, lag_s=0.0)
    )
    held, asked = [], []
    for i in range(250):
        now = i / 50
        mode = "HUMAN" if asked else "AUTO"
        if asked and now >= 4.0:  # it has driven for a while
            mode = "PAUSED" if len(asked) == 1 else "HUMAN"
        held.append(operator.read(now, state(mode, episode=1, step=i)).dead_man)
        asked += [(ask.name, now) for ask in operator.asks()]
    assert [name for name, _ in asked] == ["takeover", "takeover"]
    assert held[199] and not held[200], "it lets go as it sees the pause"
    again = asked[1][1]
    assert again == pytest.approx(4.0 + 0.7, abs=0.03), "a reaction later"
    assert not any(held[200 : round(50 * again)]) and all(held[round(50 * again) :])


def test_a_scripted_operator_asks_through_its_client():
    link, line = FakeLink(), Line()
    exact = OperatorConfig(reaction_sigma=0.0, distracted=0.0)
    operator = ScriptedOperator(line, Stuck(line), exact)
    client = TeleopClient(operator, link, lambda: link.now)
    mode = "AUTO"
    for i in range(200):
        link.now = i / 50
        client.hear(state(mode, episode=1, step=i, holder=link.source if client.token else ""))
        client.step()
        if link.of(m.Lease) and not client.token:
            client.hear(grant(True, link.source, "t"))
        mode = "HUMAN" if link.of(m.Event) else "AUTO"
    assert link.of(m.Event)[0].name == "takeover" and operator.doing in (
        Doing.HELPING,
        Doing.LETTING_GO,
    )
    assert Mode(mode) is Mode.HUMAN and any(x.dead_man and x.axes[0] > 0 for x in link.of(m.Input))
