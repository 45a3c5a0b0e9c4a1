"""What stops the arm is neither lost nor late, whoever says it and whatever else is under way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from real_helpers import LIMITS, Clock, Rig, point_robot

from benchmarks.robot.trials import Operator, driver
from real.body import Body, BodyConfig
from real.console.control import Control
from real.console.hub import Hub
from real.console.settings import ConsoleConfig, Facts
from real.link import Client, LinkError, Server
from real.messages import Event, Grant, Notice, Writer, decode, encode
from real.modes import Mode
from real.robots import remote
from real.robots.faults import Fault
from real.robots.lerobot import LeRobotArm
from real.robots.protocol import RobotLost
from real.robots.remote import RemoteRobot, stop_arm
from real.robots.server import ArmServer, read_log
from real.supervisor import guard
from real.supervisor.loop import Loop

FAKE = BodyConfig(
    limits=str(LIMITS / "fake_point.yaml"),
    record=False,
    supervisor={"required": ["guard", "console"]},
)


def left_unread(server: Server, client: socket.socket) -> None:
    """Let ``client`` say its last word and go without having read what it was sent."""
    server.poll(0.5)
    for connection in server.connections:
        server.send(connection, b"a state that nobody reads")
    client.send(b"stop")
    client.close()


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path / "s")
    yield made
    made.close()


def connected(server: Server) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(server.path))
    return client


# ------------------------------------------------------------------------------------------ sockets
def test_the_last_word_of_who_left_without_reading_is_heard(server):
    left_unread(server, connected(server))
    packets, gone = server.poll(0.5)
    assert [packet for _, packet in packets] == [b"stop"] and len(gone) == 1


def test_the_last_word_is_heard_though_something_was_to_be_sent_meanwhile(server):
    left_unread(server, connected(server))
    (connection,) = server.connections
    assert not server.send(connection, b"another state"), "it takes nothing any more"
    packets, gone = server.poll(0.5)
    assert [packet for _, packet in packets] == [b"stop"] and gone == [connection]


def test_who_comes_speaks_and_goes_is_heard_in_one_poll(server):
    clients = [connected(server) for _ in range(3)]
    for client in clients:
        client.send(b"stop")
        client.close()
    packets, gone = server.poll(0.5)
    assert [packet for _, packet in packets] == [b"stop"] * 3 and len(gone) == 3


def test_a_client_hears_the_farewell_though_it_said_something_that_nobody_read(server):
    client = Client(server.path, "guard", beat_hz=0.0)
    server.poll(0.5)
    for connection in server.connections:
        fields = {"mode": "IDLE", "epoch": 0, "tick": 0, "episode": 0}
        bye = Writer("supervisor", time.monotonic).make(
            Notice, name="farewell", value="", by="supervisor", **fields
        )
        server.send(connection, encode(bye))
    client.send(Event, name="note", value="unread", at=0.0, lease="")
    server.close()
    message = client.receive(0.5)
    assert isinstance(message, Notice) and message.name == "farewell"
    with pytest.raises(LinkError):
        client.receive(0.5)
    client.close()


def test_no_stop_is_one_too_many_for_the_arms_process(tmp_path):
    served, ordinary = (
        Server(tmp_path / name, **rate) for name, rate in (("a", {"rate": float("inf")}), ("b", {}))
    )
    for server, heard in ((served, 1000), (ordinary, 600)):
        client, packets = connected(server), []
        until = time.monotonic() + 1.0
        # begin with a whole second, which the rate counts by
        while int(time.monotonic()) == int(until - 1.0):
            time.sleep(0.001)
        for _ in range(1000):
            client.send(b"stop")
            packets += server.poll(0.0)[0]
        packets += server.poll(0.05)[0]
        assert len(packets) == heard
        client.close()
        server.close()


# -------------------------------------------------------------------------------- the arm's process
class Bus:
    """An arm behind a bus that may lose what it is told; ``told`` is what came through."""

    def __init__(self):
        self.told: list[str] = []
        self.deaf = 0

    def command(self, reference):
        self.told.append(f"command {reference.gripper:g}")

    def hold(self):
        self.told.append("hold")

    def clear(self):
        self.told.append("clear")

    def stop(self):
        if self.deaf:
            self.deaf -= 1
            return False
        self.told.append("stop")
        return True


@pytest.fixture
def arm(tmp_path):
    made = ArmServer({"socket": str(tmp_path / "a"), "world": "fake"})
    made.robot = Bus()
    yield made
    made.server.close()


def command(number: int) -> bytes:
    return msgpack.packb(["command", [0.0] * 3, [1.0, 0, 0, 0], [], float(number)])


def test_of_commands_that_waited_the_newest_is_carried_out_and_a_stop_comes_first(arm):
    client = connected(arm.server)
    for number in range(5):
        client.send(command(number))
    arm._serve(0.1)
    assert arm.robot.told == ["command 4"]
    for packet in (command(5), msgpack.packb(["stop"]), command(6), msgpack.packb(["hold"])):
        client.send(packet)
    arm._serve(0.1)
    assert arm.robot.told[1:] == ["stop", "hold"]
    for packet in (command(7), msgpack.packb(["clear"])):
        client.send(packet)
    arm._serve(0.1)
    assert arm.robot.told[3:] == ["clear"], (
        "what was asked for while it was stopped is not done once it is cleared"
    )
    client.close()


def test_a_guards_stop_counts_once_the_arm_says_so(arm, monkeypatch):
    monkeypatch.setattr(remote, "STOP_S", 0.1)
    with pytest.raises(OSError):  # nobody reads
        stop_arm(str(arm.server.path))
    arm.server.poll(0.1)
    arm.robot.told.clear()
    arm.robot.deaf, problems = 1, []
    ended = threading.Event()

    def guard():
        try:
            for _ in range(2):
                try:
                    stop_arm(str(arm.server.path))
                    problems.append("")
                except OSError:
                    problems.append("not confirmed")
        finally:
            ended.set()

    monkeypatch.setattr(remote, "STOP_S", 1.0)
    threading.Thread(target=guard, daemon=True).start()
    while not ended.is_set():
        arm._serve(0.01)
        arm._tell(msgpack.packb(["measured"]))  # which is no confirmation
    assert problems == ["not confirmed", ""] and arm.robot.told == ["stop"]


def test_a_stop_that_a_bus_lost_is_not_confirmed_and_comes_again(paper_arm, tmp_path):
    ends = dict.fromkeys(paper_arm.JOINTS, 0.0), dict.fromkeys(paper_arm.JOINTS, 100.0)
    arm = LeRobotArm(
        "paper_arm",
        {"port": "x", "calibration_dir": tmp_path},
        low=ends[0],
        high=ends[1],
        clock=Clock(),
    )
    arm.connect()
    arm.observe()
    send, arm.device.send_action = (
        arm.device.send_action,
        lambda action: (_ for _ in ()).throw(ConnectionError("lost")),
    )
    assert arm.stop() is False
    told = len(arm.device.told)
    arm.device.send_action = send
    assert arm.observe().errors == ("stopped",)
    assert len(arm.device.told) == told + 1, "it holds what was measured last"
    arm.observe()
    assert len(arm.device.told) == told + 1 and arm.stop() is True


def test_an_estop_that_the_arms_process_had_no_room_for_is_said_again(arm, monkeypatch):
    monkeypatch.setattr(remote, "described", lambda address: (connected(arm.server), about))
    limits = {"joint_low": (), "joint_high": (), "box": None, "keep_out": ()}
    spec = point_robot(Clock()).embodiment.to_dict()
    about = {"embodiment": spec, "capabilities": {"stopper": ["", ""]}, "limits": limits}
    robot = RemoteRobot(str(arm.server.path))
    arm.server.poll(0.1)
    sent = 0
    try:
        while True:
            robot._socket.send(msgpack.packb(["hold"]))
            sent += 1
    except BlockingIOError:
        pass
    assert robot.stop() is False
    robot.hold()
    while arm.server.poll(0.0)[0]:
        pass
    robot.hold()
    packets = [msgpack.unpackb(packet) for _, packet in arm.server.poll(0.1)[0]]
    assert packets == [["stop"], ["hold"]] and sent > 5
    robot._socket.close()


def test_who_has_no_arm_any_more_is_told(arm):
    address = str(arm.server.path)
    arm.server.close()
    with pytest.raises(RobotLost, match="no simulated arm answers"):
        stop_arm(address)


# ----------------------------------------------------------------------------------- the supervisor
def test_an_acknowledgement_is_not_of_what_came_after_it():
    for later in ("stop", "estop", "fault"):
        clock = Clock()
        rig = Rig(point_robot(clock, Fault("reflex", 0.5, 0.4)), clock).auto()
        rig.chunk(np.zeros((20, len(rig.robot.embodiment.action_names))))
        rig.run(0.6)
        assert rig.supervisor.session.modes.mode is Mode.FAULT, later
        clear, rig.robot.clear = rig.robot.clear, lambda: None  # its errors take their time to go
        rig.event("ack")
        rig.run(0.05)
        rig.event(later, value="the gripper burns")
        rig.run(0.05)
        clear()
        rig.run(1.2)
        assert rig.supervisor.session.modes.mode is Mode.FAULT, later
        said = [m.value for _, m in rig.said if isinstance(m, Notice) and m.name == "ack"]
        assert any("came after it" in value for value in said), later


def test_only_a_session_that_ends_in_order_says_farewell(server):
    for in_order, said in ((True, ["note", "farewell"]), (False, [])):
        client = Client(server.path, "viewer", beat_hz=0.0)
        server.poll(0.5)
        stopped: list[str] = []
        loop = Loop.__new__(Loop)
        rig = Rig(point_robot(Clock()), Clock())
        rig.supervisor.session.clients = dict.fromkeys(server.connections)
        loop.supervisor, loop.server = (
            rig.supervisor,
            SimpleNamespace(connections=server.connections, send=server.send, close=lambda: None),
        )
        loop.robot = SimpleNamespace(
            stop=partial(stopped.append, "stop"), close=partial(stopped.append, "close")
        )
        rig.supervisor.session.notice("note", "", "supervisor")
        loop.close(in_order)
        assert [m.name for m in client.newest() if isinstance(m, Notice)] == said
        assert stopped == (["close"] if in_order else ["stop", "close"])
        client.close()
        server.poll(0.1)


def moving(folder, body: Body):
    """A policy that moves the arm, and who has control; returns both."""
    operator, policy = Operator(body.socket), driver(body.socket, "fake", folder / "driver.txt")
    operator.drive()
    operator.watch(0.4)
    return operator, policy


def test_a_session_that_ends_does_not_wait_for_its_policy_to_stop_the_arm(tmp_path):
    with Body(tmp_path, FAKE) as body:
        operator, policy = moving(tmp_path, body)
        slow = (
            "import signal, time; signal.signal(signal.SIGTERM, lambda *_: 0); print('ready', "
            "flush=True); time.sleep(3); print(time.monotonic())"
        )
        body.processes["policy"] = subprocess.Popen(
            [sys.executable, "-c", slow], stdout=subprocess.PIPE
        )
        pipe = body.processes["policy"].stdout
        pipe.readline()
        when = time.monotonic()
        body.close()
        operator.client.close()
        policy.kill()
        policy.wait()
        ended = float(pipe.read())
        pipe.close()
    log = read_log(tmp_path / "run" / "arm.log")
    assert min(t for t, name in log["event"] if name in ("hold", "stop") and t > when) < ended


def test_a_guard_that_is_told_to_end_while_it_stops_the_arm_goes_on(tmp_path):
    with Body(tmp_path, FAKE) as body:
        operator, policy = moving(tmp_path, body)
        arm, guard = body.processes["arm"], body.processes["guard"]
        arm.send_signal(signal.SIGSTOP)
        body.processes["supervisor"].kill()
        time.sleep(0.3)
        guard.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert guard.poll() is None
        arm.send_signal(signal.SIGCONT)
        assert guard.wait(120.0) == 3
        operator.client.close()
        policy.kill()
        policy.wait()
        end = time.monotonic() + 60.0
        while "stop" not in [name for _, name in read_log(body.run / "arm.log")["event"]]:
            assert time.monotonic() < end, "it was not stopped"
            time.sleep(0.02)


LAUNCHER = """
import sys, threading, time
from pathlib import Path
from real.body import Body, BodyConfig
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
body = Body(Path(sys.argv[1]), BodyConfig(limits=sys.argv[2], record=False, supervisor={"required": ["guard", "console"]}))
body.start()
print(" ".join(str(p.pid) for p in body.processes.values()), flush=True)
time.sleep(60)
"""


def test_where_the_launcher_is_killed_the_arm_comes_to_rest_before_anybody_ends(tmp_path):
    code = [sys.executable, "-c", LAUNCHER, str(tmp_path), FAKE.limits]
    launcher = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    processes = [int(word) for word in launcher.stdout.readline().split()]
    body = Body(tmp_path, FAKE)
    operator, policy = moving(tmp_path, body)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and any(map(running, processes)):
        time.sleep(0.02)
    assert not any(map(running, processes))
    operator.client.close()
    policy.kill()
    policy.wait()
    launcher.stdout.close()
    log = read_log(tmp_path / "run" / "arm.log")
    path = np.array([place for _, place in log["path"]])
    assert np.linalg.norm(path[-1] - path[-20]) < 1e-3, "at rest when it ended"
    assert "hold" in [name for _, name in log["event"][-3:]] or "stop" in [
        name for _, name in log["event"]
    ]


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


# -------------------------------------------------------------------------------------- the console
class Line:
    """The console's connection to the supervisor; ``sent`` is what went out."""

    source = "console"

    def __init__(self, clock):
        self.clock, self.sent, self.writer = clock, [], Writer("console", clock)

    def send(self, kind, valid_s=float("inf"), **fields):
        self.sent.append(self.writer.make(kind, valid_s, **fields))
        return self.sent[-1]

    def grant(self, token: str, holder: str = "console") -> Grant:
        maker = Writer("supervisor", self.clock)
        return maker.make(Grant, granted=True, holder=holder, token=token, until=1e3, reason="")


def test_a_renewal_under_way_does_not_give_control_to_nobody():
    clock, told = Clock(), []
    line = Line(clock)
    control = Control(
        line, clock, lambda viewer, kind, **fields: told.append((viewer.name, fields["mine"]))
    )
    first, second = SimpleNamespace(name="first"), SimpleNamespace(name="second")
    control.request(first, "", False)
    control.hear(line.grant("one"))
    clock.now += 1.0
    control.renew()
    control.release(first)
    control.request(second, "", False)
    control.hear(line.grant("one"))  # the renewal's answer
    control.hear(line.grant("", holder=""))  # the release's
    control.hear_holder("")
    control.hear(line.grant("two"))
    assert control.holds(second) and control.token == "two" and told[-1] == ("second", True)
    assert [m.ask for m in line.sent if hasattr(m, "ask")] == [
        "request",
        "renew",
        "release",
        "request",
    ]


def test_a_page_that_says_too_much_can_still_stop_the_arm_and_is_told_what_was_refused():
    clock = Clock()
    hub = Hub(ConsoleConfig(), Line(clock), lambda frame: None, clock, Facts())
    page = hub.enter()
    numbers = iter(range(10_000))

    def say(name: str) -> None:
        text = {
            "k": "event",
            "c": page.nonce,
            "n": next(numbers),
            "t": clock(),
            "name": name,
            "value": "",
            "at": clock(),
        }
        hub.requests.hear(page, json.dumps(text))

    for _ in range(200):
        say("note")
    for name in ("pause", "stop", "estop"):
        say(name)
    assert [m.name for m in hub.link.sent if isinstance(m, Event) and m.name != "note"] == [
        "pause",
        "stop",
        "estop",
    ]
    while page.out.take() is not None:
        pass
    for _ in range(40):
        say("stop")
    texts = []
    while (text := page.out.take()) is not None:
        texts.append(text)
    assert sum('"name":"stop"' in text for text in texts) >= 15


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_an_arms_process_whose_launcher_ends_while_it_starts_ends_too(delay, named, tmp_path):
    """``named``: as `Body` says who launches it; else it looks at its parent as it begins, or
    finds that it has none."""
    config = tmp_path / "arm.json"
    config.write_text(json.dumps({"socket": str(tmp_path / "a"), "world": "fake", "hz": 100.0}))
    environ = "dict(os.environ, VLA_RL_LAUNCHER=str(os.getpid()))" if named else "None"
    started = (
        f"[sys.executable, '-m', 'real.robots.server', {str(config)!r}], start_new_session=True, "
        f"env={environ}"
    )
    code = (
        f"import os, subprocess, sys, time; p = subprocess.Popen({started}); print(p.pid, "
        "flush=True); time.sleep(100)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pid = int(launcher.stdout.readline())
    time.sleep(delay)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    end = time.monotonic() + 60.0
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.02)


def test_a_guard_whose_supervisor_was_late_goes_on_watching(server, monkeypatch):
    """It stops the arm once, says so as a fault as soon as somebody hears, and stops it again
    the next time."""
    monkeypatch.setattr(guard, "SILENCE_S", 0.05)
    client, stops, status = Client(server.path, "guard", beat_hz=0.0), [], []
    server.poll(0.5)
    watching = threading.Thread(
        target=lambda: status.append(guard.watch(client, lambda: stops.append(1))), daemon=True
    )
    watching.start()

    def say(name: str) -> None:
        for connection in list(server.connections):
            notice = Writer("supervisor", time.monotonic).make(
                Notice,
                name=name,
                value="",
                by="supervisor",
                mode="IDLE",
                epoch=0,
                tick=0,
                episode=0,
            )
            server.send(connection, encode(notice))

    for count in (1, 2):
        while len(stops) < count:
            time.sleep(0.01)
        assert len(stops) == count and not status
        say("lease")
        said: list = []
        while not said:
            said = [decode(p) for _, p in server.poll(1.0)[0]]
        faults = [m for m in said if isinstance(m, Event)]
        assert [m.name for m in faults] == ["fault"] and "supervisor was silent for" in faults[
            0
        ].value
    monkeypatch.setattr(guard, "GONE_S", 0.1)
    watching.join(60.0)
    assert status == [3] and len(stops) == 3, "after so much silence it is not waited for"
    client.close()
