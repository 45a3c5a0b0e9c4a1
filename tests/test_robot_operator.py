"""Who helps beside the console: the scripted operator in real time, and a person's device; each
a process and a client."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from session_device import Raiser
from session_policy import Mover
from test_robot_session import TESTS, begun, gone, overrides, started, unhurried

from real.journal import journals, read
from real.link import Client, LinkError
from real.messages import State
from real.robots.server import ArmServer
from real.robots.world import PointWorld
from real.teleop.coached import RemoteCoach
from real.teleop.process import TeleopConfig, serve
from real.teleop.protocol import DeviceLost
from real.verify import verify
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.config.robot import compose
from vla_rl.errors import ConfigError
from vla_rl.robot.session import SessionRequest, possible

HELPS = [
    "operator.patience_s=0.4",
    "operator.help_gain=2",
    "operator.longest_s=20",
    "operator.reaction_median_s=0.05",
]


@pytest.fixture
def idle(tmp_path, monkeypatch):
    """The checkpoint of a policy that stays where it is."""
    monkeypatch.setenv(
        "PYTHONPATH",
        f"{TESTS}{os.pathsep}{TESTS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    save_checkpoint(tmp_path / "idle", Mover(PointWorld().embodiment, (0.0, 0.0, 0.0, -1.0)))
    return tmp_path / "idle"


@pytest.mark.slow
def test_it_helps_by_a_lease_a_dead_man_and_inputs(tmp_path, idle, capsys):
    given = overrides(tmp_path, idle, *HELPS)
    asked = ["robot", "run", "--headless", "--episodes", "1", *given]
    i, said = unhurried(capsys, lambda i: [*asked, f"name=s{i}"])
    assert "with a person's help: 1 of 1 episodes succeeded" in said
    (episode,) = [read(path) for path in journals(tmp_path / f"s{i}")]
    human = [tick for tick in episode.ticks if tick["is_human"]]
    assert {(tick["mode"], tick["holder"]) for tick in human} == {("HUMAN", "teleop.scripted")}
    assert ("takeover", "teleop.scripted") in [(n["name"], n["value"]) for n in episode.notices]
    assert {e["source"] for e in episode.events if e["name"] == "label"} == {"simulator"}
    assert human[-1]["pose"][2] > human[0]["pose"][2] + 0.1, "it raised the point"
    assert [p for p in verify(tmp_path / f"s{i}")[0] if "policy" in p or "person" in p] == []


@pytest.mark.slow
def test_where_it_dies_the_arm_holds_and_the_session_ends(tmp_path, idle):
    given = overrides(tmp_path, idle, *HELPS, "operator.speed=0.1", "robot.horizon=2000")
    process, said = begun("run", "--headless", "--episodes", "1", *given, until="loading")
    client, modes = None, []
    try:
        while client is None:
            assert process.poll() is None, said
            try:
                client = Client(tmp_path / "s" / "run" / "s", "viewer")
            except LinkError:
                continue
        children = {}
        while "HUMAN" not in modes or modes[-1] == "HUMAN":
            message = client.receive(60.0)
            if isinstance(message, State):
                modes.append(message.mode)
                if message.is_human and not children:
                    children = started(process)
                    os.kill(children["vla_rl.robot.operator"], signal.SIGKILL)
    except LinkError:
        pass  # the launcher was quicker than the supervisor's silence
    client.close()
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "the operator has ended (status -9)" in rest, (said, rest)
    assert "HUMAN" in modes and gone(children.values())
    (episode,) = [read(path) for path in journals(tmp_path / "s")]
    released = [n["value"] for n in episode.notices if n["name"] in ("release", "pause", "stop")]
    assert released and episode.end is not None


def test_a_coach_elsewhere_answers_each_question_or_is_lost(tmp_path):
    server = ArmServer(
        {"socket": str(tmp_path / "a"), "world": "fake", "options": {"tasks": ["raise", "lower"]}}
    )
    ended = threading.Event()

    def run():
        while not ended.is_set():
            server._serve(0.01)
            server._publish()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        coach, world = RemoteCoach(str(tmp_path / "a")), server.simulated.world
        assert coach.embodiment == world.embodiment
        np.testing.assert_array_equal(coach.demonstrate(True), [0.0, 0.0, 0.05, -1.0])
        world.reset({"task": "lower"})
        world.position[2] = 0.275
        np.testing.assert_array_equal(coach.demonstrate(False), [0.0, 0.0, -0.05, -1.0])
        assert coach.progress() == pytest.approx(0.5), "half of the way from 0.3 m to 0.25 m"
    finally:
        ended.set()
        thread.join()
    with pytest.raises(DeviceLost, match="does not say how its task is done"):
        coach.progress()
    server.server.close()
    with pytest.raises(DeviceLost):
        coach.progress()
    coach.close()


def test_an_arm_that_knows_no_expert_has_no_coach(tmp_path, monkeypatch):
    monkeypatch.delattr(PointWorld, "demonstrate")
    server = ArmServer({"socket": str(tmp_path / "a"), "world": "fake"})
    thread = threading.Thread(target=lambda: [server._serve(0.05) for _ in range(20)])
    thread.start()
    with pytest.raises(ConfigError, match="knows no expert"):
        RemoteCoach(str(tmp_path / "a"))
    thread.join()
    server.server.close()


@pytest.mark.parametrize(
    "given, asked, said",
    [
        (
            ["robot=lerobot", "robot.limits=limits/fake_point.yaml"],
            SessionRequest(1),
            "neither with robot.driver nor with",
        ),
        (["robot=fake"], SessionRequest(1, policy=False), "nor with --no-policy"),
        (["robot=fake", "operator.pace=1"], SessionRequest(1), "there is no key operator.pace"),
        (["robot=fake", "operator=stack"], SessionRequest(1), "there is operator=stuck"),
    ],
)
def test_what_nobody_can_play_is_refused(given, asked, said):
    with pytest.raises(ConfigError) as error:
        possible(compose([*given, "operator=stuck"]), asked)
    assert said in str(error.value)


def test_in_virtual_time_a_session_without_learning_is_helped_too(tmp_path, idle, capsys):
    assert (
        main(["robot", "run", "--lockstep", "--episodes", "1", *overrides(tmp_path, idle, *HELPS)])
        == 0
    )
    assert "with a person's help: 1 of 1 episodes succeeded" in capsys.readouterr().out


# -------------------------------------------------------------------------------- a person's device
@pytest.mark.slow
def test_a_persons_device_takes_over_in_a_session(tmp_path, idle, capsys):
    own = ["teleop=session_device:Raiser", "console.port=0", "robot.horizon=2000"]
    asked = ["robot", "run", "--episodes", "1", *overrides(tmp_path, idle, *own)]
    i, said = unhurried(capsys, lambda i: [*asked, f"name=s{i}"])
    assert "with a person's help: 1 of 1 episodes succeeded" in said
    (episode,) = [read(path) for path in journals(tmp_path / f"s{i}")]
    human = [tick for tick in episode.ticks if tick["is_human"]]
    assert {(tick["mode"], tick["holder"]) for tick in human} == {("HUMAN", "teleop.raiser")}
    assert human[-1]["pose"][2] > human[0]["pose"][2] + 0.1, "it raised the point"


class Line:
    """A `Client` for whom ``steps`` are taken one after the other, each once something of the kind
    that it waits for was sent; then the session ends."""

    class writer:
        source = "teleop.raiser"

    def __init__(self, *steps: tuple[str, Callable[[], Any]]):
        self.steps, self.sent, self.seen = list(steps), [], 0

    def receive(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))
        kind, then = self.steps[0]
        if kind in [name for name, _ in self.sent[self.seen :]]:
            self.seen = len(self.sent)
            then()
            del self.steps[0]

    def end(self) -> None:
        raise LinkError("over")

    def send(self, kind, valid_s=0.0, **fields):
        self.sent.append((kind.__name__, fields))


def test_a_device_that_was_lost_is_opened_again(tmp_path):
    gone = tmp_path / "unplugged"
    device = Raiser(str(gone), always=True)
    device.connect()
    client = Line(("Lease", gone.touch), ("Event", gone.unlink))
    client.steps.append(("Lease", client.end))
    serve(client, device)
    kinds = [(kind, fields.get("value", "")) for kind, fields in client.sent]
    lost = kinds.index(("Event", "it is unplugged"))
    assert "Lease" in [kind for kind, _ in kinds[:lost]] and "Lease" in [
        kind for kind, _ in kinds[lost:]
    ], kinds
    assert device.released and not device.connected, "closed as the session ends"


@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["teleop=joystick"],
            "teleop=joystick: there is no such device, use one of spacemouse, lerobot",
        ),
        (
            ["teleop=spacemouse", "teleop.paht=/dev/hidraw0"],
            "the options of teleop=spacemouse are wrong",
        ),
        (["teleop.path=/dev/hidraw0"], "name it, as teleop=spacemouse"),
        (["teleop=spacemouse", "operator=stuck"], "is a person's"),
    ],
)
def test_devices_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError) as error:
        possible(compose(["robot=fake", *given]), SessionRequest(1))
    assert said in str(error.value)
    with pytest.raises(ConfigError, match="is a person's"):
        possible(compose(["robot=fake", "teleop=spacemouse"]), SessionRequest(1, console=False))


def test_a_leaders_own_options_go_to_lerobot():
    leader = TeleopConfig(
        "lerobot", {"type": "so101_leader", "port": "/dev/ttyACM1", "relative": True}
    ).make(("pan",))
    assert (leader.config.type, leader.config.relative) == ("so101_leader", True)
    assert leader.config.options == {"port": "/dev/ttyACM1"} and leader.names == ("pan",)


def test_a_device_that_is_not_there_ends_the_session_before_it_begins(tmp_path, idle, capsys):
    given = overrides(
        tmp_path, idle, "teleop=spacemouse", "teleop.path=/nowhere/hidraw0", "console.port=0"
    )
    assert main(["robot", "run", "--episodes", "1", *given]) == 2
    assert (
        "the teleop did not start: the SpaceMouse at /nowhere/hidraw0 cannot be opened"
        in capsys.readouterr().err
    )
