"""From a recording of an arm that nobody named to that arm, driven by a policy: four commands and
no code."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from test_recording import SMALL, SPEC, TEXTS, foreign

from vla_rl.cli import main
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError
from vla_rl.types import CameraSpec

pytest.importorskip("pyarrow")
pytest.importorskip("PIL.Image")

JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")
ENDS = {"low": (-100, -100, 0), "high": (100, 100, 100)}
ARM = [
    "robot=lerobot",
    "robot.type=paper_arm",
    "robot.options.plugins=[paper_arm]",
    "robot.port=x",
    *(
        f"robot.options.{end}={{{', '.join(f'{n}: {x}' for n, x in zip(JOINTS, values))}}}"
        for end, values in ENDS.items()
    ),
]
LIMITS = """
joint_speed: 60
joint_acceleration: 600
joint_jerk: 60000
joint_step: 10
joint_margin: 5
observation_age: 0.5
"""


TARGET = np.array([20.0, 0.0, 50.0])


def recorded(path: Path, episodes: int = 16, rows: int = 80, hz: float = 40.0) -> Path:
    """From somewhere near it each joint goes by 0.5 a row to `TARGET`, each goal a row ahead of the
    state; as another tool writes it."""
    drawn = np.random.default_rng(0)
    spec = dataclasses.replace(
        SPEC,
        action_names=JOINTS,
        action_units=("lerobot",) * 3,
        action_low=tuple(map(float, ENDS["low"])),
        action_high=tuple(map(float, ENDS["high"])),
        control_hz=hz,
        cameras=(CameraSpec("wrist", 4, 6),),
        proprio_names=JOINTS,
    )
    with DemonstrationWriter(path, spec) as writer:
        for i in range(episodes):
            away = TARGET - drawn.uniform((-10.0, -10.0, 40.0), (35.0, 10.0, 60.0))
            far = np.maximum(np.abs(away) - 0.5 * np.arange(rows + 1)[:, None], 0.0)
            joints = (TARGET - np.sign(away) * far).astype(np.float32)
            writer.add_episode(
                {"wrist": np.full((rows, 4, 6, 3), 7, np.uint8)},
                joints[:-1],
                joints[1:],
                TEXTS[0],
                success=True,
                task_id="t",
                init_state_id=i,
            )
    return foreign(path)


def test_an_arm_is_described_without_being_opened(paper_arm, tmp_path, capsys):
    """Its port does not exist, and no camera is there; the file is what a session would be of."""
    file, camera = tmp_path / "arm.json", "cameras.front=opencv"
    given = [*ARM, camera, "cameras.front.width=320", "cameras.front.height=240"]
    assert main(["robot", "describe", str(file), *given, "robot.options.control_hz=10"]) == 0
    said = json.loads(file.read_text())
    assert said["name"] == "lerobot_paper_arm" and said["control_hz"] == 10
    assert said["action_names"] == list(JOINTS) and said["action_high"] == [100.0] * 3
    assert [(c["name"], c["height"], c["width"]) for c in said["cameras"]] == [
        ("wrist", 4, 6),
        ("front", 240, 320),
    ]
    assert f"env.embodiment={file}" in capsys.readouterr().out
    assert main(["robot", "describe", str(file), *given, "cameras.wrist=opencv"]) == 2
    assert "has a camera of that name itself" in capsys.readouterr().err
    assert main(["robot", "describe", "", "robot=fake"]) == 2
    assert "names no file" in capsys.readouterr().err
    assert main(["robot", "describe", str(tmp_path / "p.json"), "robot=fake"]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["name"] == "fake_point"


class Uncalibrated:
    embodiment = dataclasses.replace(
        SPEC, action_low=(-180.0, -180.0), action_high=(180.0, 180.0), cameras=()
    )


def test_an_arm_without_ends_is_not_described(tmp_path):
    from vla_rl.config.robot import compose
    from vla_rl.robot.describe import describe

    settings = compose(["robot=lerobot", "robot.driver=test_own_arm:Uncalibrated"], moves=False)
    settings.robot.options = {}
    with pytest.raises(ConfigError, match=r"from -180 to 180 deg, as of an arm that is not calib"):
        describe(settings, tmp_path / "arm.json", print)
    assert not (tmp_path / "arm.json").exists()


def driven(folder: Path, reached: list[float]) -> None:
    """What a person at the console does with a policy: arm, start, watch until the shoulder is
    there, say so, until the session ends with its last episode."""
    from real.link import Client, LinkError
    from real.messages import Event, Lease, State

    client = Client(folder, "teleop", "hand")
    asked, state, labelled = 0.0, None, False
    try:
        while True:
            message = client.receive(1.0)
            state = message if isinstance(message, State) else state
            if state is None or time.monotonic() - asked < 0.05:
                continue
            asked = time.monotonic()
            if state.holder != "hand":
                client.send(Lease, 1.0, ask="request", token="", force=True)
                continue
            client.send(Lease, 1.0, ask="renew", token=client.token, force=False)
            doing = {"IDLE": "arm", "READY": "start", "PAUSED": "hand_back", "FAULT": "ack"}
            if state.mode == "AUTO":
                reached.append(float(state.proprio[0]))
                there = reached[-1] > 15.0 and not labelled
                told = ("label", "success") if there else ("end", "") if labelled else None
                labelled = labelled or there
            else:
                told = (doing.get(state.mode, ""), "")  # STOPPED: the session ends
            if told and told[0]:
                client.send(Event, name=told[0], value=told[1], at=asked, lease=client.token)
    except LinkError:  # the session is over
        pass
    finally:
        client.close()


@pytest.mark.slow
def test_from_a_recording_of_an_unnamed_arm_to_that_arm(paper_arm, tmp_path, monkeypatch, capsys):
    """check, describe, train, run; the recording is of 40 Hz, the arm of 20. Its goals are learned as
    moves, so that what is missing in the policy is a share of a small move, not of all ends."""
    from test_robot_session import begun

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    data, arm, limits = recorded(tmp_path / "data"), tmp_path / "arm.json", tmp_path / "l.yaml"
    limits.write_text(LIMITS)
    assert main(["data", "check", str(data)]) == 0
    assert main(["robot", "describe", str(arm), *ARM]) == 0
    train = [
        "train",
        "run=sft",
        f"dataset={data}",
        f"env.embodiment={arm}",
        *SMALL,
        "policy=small",
        "policy.chunk_length=4",
        "sft.updates=300",
        "sft.batch_size=64",
        "sft.learning_rate=3e-3",
        "env.actions=delta",
        "sft.augment.proprio=0",
        f"output_dir={tmp_path}",
        "name=own",
    ]
    assert main(train) == 0
    found = json.loads((tmp_path / "own" / "actions.json").read_text())["sft"]
    assert [j["name"] for j in found["joints"]] == list(JOINTS)
    process, said = begun(
        "run", *ARM, "--episodes", "2", f"checkpoint={tmp_path / 'own' / 'checkpoints' / 'sft'}",
        f"robot.limits={limits}", f"robot.tasks=[{TEXTS[0]}]", "robot.supervisor.silence_s=0.3",
        "robot.supervisor.state_age_s=0.5", "robot.valid_s=1.0", f"output_dir={tmp_path}", "name=s",
        "console.port=0", until="console:",
    )  # fmt: skip
    reached: list[float] = []
    try:
        driven(tmp_path / "s" / "run" / "s", reached)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, (said, rest)
    assert reached[0] < 5.0 and reached[-1] > 15.0, "where its recordings lead"
    assert main(["robot", "verify", str(tmp_path / "s")]) == 0
