"""A policy from simulation on the simulated arm behind its serial port, with cameras on its table: it
drives, a person takes over, and it learns from that, and goes on learning another day."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest
from test_so101 import buses as _buses
from test_so101 import installed, kit, sdk  # noqa: F401  (fixtures)

from real.journal import journals, read
from sim.so101.joints import LEROBOT_NAMES
from vla_rl.cli import main
from vla_rl.monitoring.metrics import read_metrics

__all__ = ["_buses"]
SIZE = 16
OWN = [  # a policy of some thousand weights, on two demonstrations
    "policy=nano_toy", "policy.bin_range=minmax", f"env.camera_size={SIZE}", "wandb.mode=off",
    "collect.episodes_per_task=2", "collect.workers=1", "sft.updates=120", "sft.learning_rate=2e-3", "sft.warmup_updates=10",
    "sft.validation_episodes=0",
    "threads=1",
]  # fmt: skip


@pytest.fixture
def buses(sdk, tmp_path):  # noqa: F811
    """The pair, the follower at its table, in the wall clock's time once a test says so."""
    from sim.so101.serve import pair

    with pair(tmp_path / "dev", pace=0.02, table=True) as made:
        yield made


class Person(threading.Thread):
    """With a leader in hand: arms, has the arm go home, starts, lets the policy drive for ``steps`` control steps, takes
    over, brings shoulder_pan to ``goal``, says that it succeeded, and ends the episode."""

    def __init__(self, socket, goal: float, steps: int = 8):
        super().__init__(daemon=True)
        self.socket, self.goal, self.steps = socket, goal, steps
        self.faults: list[str] = []
        self.start()

    def run(self) -> None:
        from real.link import Client, LinkError
        from real.messages import Event, Input, Lease, State

        while not self.socket.exists():
            time.sleep(0.1)
        client = Client(self.socket, "teleop", "hand")
        state, asked, target, driven, home, done = None, -1e9, None, 0, False, False
        try:
            while True:
                message = client.receive(1.0)
                if not isinstance(message, State):
                    continue
                state, now = message, time.monotonic()
                driven += state.mode == "AUTO" and state.step_done
                home = home or state.mode == "RESETTING"
                self.faults += [f for f in state.faults if f not in self.faults]
                if now - asked < 0.03:
                    continue
                asked = now

                def say(name: str, value: str = "", at: float = now) -> None:
                    client.send(Event, name=name, value=value, at=at, lease=client.token)

                if state.holder != "hand":
                    client.send(Lease, 1.0, ask="request", token="", force=True)
                elif state.mode == "RESETTING":
                    continue
                elif state.mode == "AUTO":
                    if driven >= self.steps:
                        say("takeover")
                elif state.mode == "HUMAN":
                    target = np.array(state.proprio if target is None else target)
                    target[0] += np.clip(self.goal - target[0], -1.0, 1.0)
                    if done:
                        say("end")
                    elif abs(state.proprio[0] - self.goal) < 3.0:
                        say("label", "success")
                        done = True
                    client.send(
                        Input, 1.0, lease=client.token, device_stamp=now, dead_man=True,
                        axes=(0.0,) * 6, gripper=0.0, keys=(), target=tuple(target.tolist()),
                    )  # fmt: skip
                elif not done:
                    target = None
                    on = "start" if driven < self.steps else "takeover"
                    ready = "start" if home else "reset"
                    doing = {"IDLE": "arm", "READY": ready, "PAUSED": on}
                    say(doing.get(state.mode, "ack"))
        except LinkError:  # the session is over
            pass
        finally:
            client.close()


@pytest.mark.slow
@pytest.mark.real_sim
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="one Python is enough: that of lerobot 0.6, 3.12"
)
def test_a_policy_from_simulation_drives_the_arm_and_learns(
    kit,  # noqa: F811
    buses,
    tmp_path,
    monkeypatch,
):
    from test_robot_session import TESTS, begun

    places = str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    assert main(["train", "run=so101_sim", "name=p", f"output_dir={tmp_path}", *OWN,
                 "phases=[collect,sft]"]) == 0  # fmt: skip
    checkpoint = tmp_path / "p" / "checkpoints" / "sft"
    bus = buses["follower"]
    bus.put(np.array([0.21, 0.0, 0.0]))
    bus.pace, bus.cable.now = 0.0, time.monotonic()  # the wall clock's time from here on
    kit.leader.unlink()
    limits = kit.limits.read_text()
    kit.limits.write_text(limits.replace("observation_age: 0.3", "observation_age: 5.0"))
    assert kit.limits.read_text() != limits
    cameras = [
        f"cameras.{name}{more}"
        for name in ("front", "wrist")
        for more in ("=so101_sim", f".view={name}", f".folder={tmp_path / 'dev'}", f".size={SIZE}",
                     f".height={SIZE}", f".width={SIZE}", ".fps=10")
    ]  # fmt: skip
    command = [
        "so101", "learn", str(checkpoint), "--arm", str(kit.folder), "--out", str(tmp_path / "l"),
        "console.port=0", *cameras,
        "robot.tasks=[lift the red cube]", "robot.supervisor.silence_s=0.3",
        "robot.supervisor.state_age_s=5", "robot.supervisor.frame_age_s=5",
        "robot.supervisor.home=[0,-45,45,90,0,60]", "robot.supervisor.home_tolerance=4",
        "robot.supervisor.fault_s=10", "robot.driver=session_so101:Patient",
        "algorithm.start_decisions=1", "algorithm.batch_size=8", "algorithm.updates_per_decision=0.5",
        "threads=1", "wandb.mode=off",
    ]  # fmt: skip
    for day, goal in ((1, 12.0), (2, -12.0)):
        process, said = begun(*command, "--episodes", str(day), until="session ")
        person = Person(tmp_path / "l" / "sessions" / f"{day:04d}" / "run" / "s", goal)
        try:
            rest = process.communicate(timeout=240)[0]
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, (said, rest)
        assert person.faults == [], person.faults
        assert all(servo.holds for servo in bus.servos)
        assert main(["robot", "verify", str(tmp_path / "l" / "sessions" / f"{day:04d}")]) == 0
        episode, *more = [
            read(path) for path in journals(tmp_path / "l" / "sessions" / f"{day:04d}")
        ]
        assert not more and not episode.lost_bytes
        steps = [s for s in episode.steps if s["sent"]]
        human = np.array([s["is_human"] for s in steps])
        assert not human[:4].any() and human[-1], "the policy first, then the person"
        assert episode.embodiment.action_names == LEROBOT_NAMES
        assert {name: len(frames) > 5 for name, frames in episode.frames.items()} == {
            "front": True, "wrist": True,
        }  # fmt: skip
        rows = list(read_metrics(tmp_path / "l" / "metrics.jsonl"))
        assert sum("robot/success" in row for row in rows) == day
    versions = {row["robot/version"] for row in rows if "robot/version" in row}
    assert len(versions) == 2, f"the second day's policy has learned: {versions}"
