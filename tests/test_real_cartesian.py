"""An arm of joints that is driven by poses of its hand: where the hand goes, what bounds it, and
what is refused."""

from __future__ import annotations

import math

import joint_arm
import numpy as np
import pytest

pytest.importorskip("mink")
from real_helpers import DT, Clock

from real import limits as limit_files
from real.messages import Beat, Event, Grant, Hello, Input, Lease, Writer
from real.robots.cartesian import CartesianArm
from real.robots.protocol import Reference
from real.rotations import multiply
from real.supervisor.core import Supervisor
from real.supervisor.settings import SupervisorConfig
from vla_rl.config.robot import compose
from vla_rl.errors import ConfigError


def made(folder, clock=None, **changes) -> CartesianArm:
    options = {
        "arm": "joint_arm:JointArm",
        "model": joint_arm.model(folder),
        "hand": "tip",
        "joints": joint_arm.JOINTS,
        "zeros": joint_arm.ZEROS,
        "turn": 0.3,
        "clock": clock or Clock(),
    }
    arm = CartesianArm(**options | changes)
    arm.connect()
    return arm


def driven(arm, position, quaternion, ticks=200, gripper=0.0):
    for _ in range(ticks):
        arm.clock.now += DT
        arm.observe()
        arm.command(Reference(gripper, np.array(position), np.array(quaternion)))
    return arm.observe()


def turned_by(a, b) -> float:
    return 2.0 * math.acos(min(1.0, abs(float(np.dot(a, b)))))


def test_the_hand_goes_where_it_is_told_and_the_joints_within_their_speed(tmp_path):
    arm = made(tmp_path)
    start = arm.observe()
    assert start.joints[1] == pytest.approx(math.radians(-30.0)) and start.gripper == 1.0, (
        "less its zero, in radians"
    )
    place = start.position + np.array([0.05, -0.08, -0.03])
    seen = driven(arm, place, start.quaternion)
    np.testing.assert_allclose(seen.position, place, atol=5e-4)
    assert turned_by(seen.quaternion, start.quaternion) < 5e-3
    told = np.radians(np.array(arm.arm.told)[:, :6])
    assert np.abs(np.diff(told, axis=0)).max() / DT <= 2.0 + 1e-6
    assert (np.array(arm.arm.told)[:, 6] == 100.0).all(), "the gripper stays until it is asked for"
    # about its own z
    wanted = multiply(seen.quaternion, np.array([math.cos(0.25), 0.0, 0.0, math.sin(0.25)]))
    there = driven(arm, seen.position, wanted, gripper=1.0)
    assert turned_by(there.quaternion, wanted) < 5e-3 and there.gripper == 0.0
    np.testing.assert_allclose(there.position, seen.position, atol=1e-3)


def test_its_jacobian_is_how_the_hand_moves(tmp_path):
    arm = made(tmp_path)
    before = arm.observe()
    for i in range(6):
        arm.arm.place = joint_arm.REST + 0.01 * np.eye(7)[i]
        moved = (arm.observe().position - before.position) / math.radians(0.01)
        np.testing.assert_allclose(moved, before.jacobian[:3, i], atol=1e-4)


def test_out_of_reach_it_goes_as_near_as_it_can_and_stays_within_its_joints(tmp_path):
    arm = made(tmp_path, model=joint_arm.model(tmp_path, degrees=80))
    start = arm.observe()
    seen = driven(arm, (2.0, 0.0, 0.3), start.quaternion, ticks=600)
    assert (
        seen.position[0] > start.position[0] + 0.1
        and np.abs(seen.joints).max() <= math.radians(80) + 1e-3
    )
    still = driven(arm, (2.0, 0.0, 0.3), start.quaternion, ticks=50)
    np.testing.assert_allclose(still.position, seen.position, atol=2e-3)


def test_without_turns_the_hand_keeps_its_own(tmp_path):
    arm = made(tmp_path, turn=0.0)
    assert (
        arm.embodiment.action_names == ("dx", "dy", "dz", "gripper")
        and arm.embodiment.rotation == "none"
    )
    start = arm.observe()
    tilted = multiply(np.array([0.9, 0.1, 0.0, math.sqrt(1 - 0.82)]), start.quaternion)
    driven(arm, start.position, start.quaternion, ticks=1)
    place = start.position + np.array([0.0, 0.06, 0.0])
    seen = driven(arm, place, tilted)
    np.testing.assert_allclose(seen.position, place, atol=5e-4)
    assert turned_by(seen.quaternion, start.quaternion) < 0.02


def test_a_person_drives_it_by_axes_behind_the_gate(tmp_path):
    clock = Clock()
    arm = made(tmp_path, clock, turn=0.0)
    data = {
        "speed": 0.1,
        "acceleration": 5,
        "jerk": 500,
        "step": 0.05,
        "observation_age": 0.3,
        "joint_speed": 2.0,
        "box": {"low": [-0.6, -0.6, 0.0], "high": [0.6, 0.6, 0.9]},
    }
    limits = limit_files.parse(
        data, arm.limits, limit_files.needed("cartesian", False, False), "test"
    )
    supervisor, person = (
        Supervisor(arm, limits, SupervisorConfig(), clock()),
        Writer("teleop", clock),
    )
    supervisor.receive(2, person.make(Hello, role="teleop", pid=1), clock())
    supervisor.receive(2, person.make(Lease, ask="request", token="", force=False), clock())
    token = next(m.token for _, m in supervisor.session.outbox if isinstance(m, Grant))
    for name in ("arm", "takeover"):
        supervisor.receive(2, person.make(Event, name=name, value="", at=0.0, lease=token), clock())
    start, speeds = arm.observe().position, []
    for tick in range(100):
        clock.now += DT
        arm.arm.now = clock.now
        supervisor.receive(2, person.make(Beat, tick=tick), clock())
        fields = {"device_stamp": clock(), "gripper": 0.0, "keys": (), "target": ()}
        push = person.make(
            Input, 0.15, lease=token, dead_man=True, axes=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0), **fields
        )
        supervisor.receive(2, push, clock())
        before = arm.observe().position
        state = supervisor.tick(tick, clock())
        speeds.append(float(np.linalg.norm(arm.observe().position - before)) / DT)
    moved = arm.observe().position - start
    assert state.mode == "HUMAN" and moved[1] > 0.08 and np.abs(moved[[0, 2]]).max() < 0.01, (
        state.mode,
        moved,
    )
    assert max(speeds) <= 0.1 * 1.1


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"hand": "finger"},
            r"'finger' is no body or site of the model; its bodies are link1, link2",
        ),
        ({"joints": {"j1.pos": "elbow"}}, r"leaves out j2\.pos"),
        (
            {"joints": joint_arm.JOINTS | {"j6.pos": "wrist"}},
            r"'wrist', which is no hinge .* joint1, joint2",
        ),
        (
            {"joints": joint_arm.JOINTS | {"j9.pos": "joint1"}},
            r"'j9\.pos', and the robot takes j1\.pos",
        ),
        ({"model": "nowhere.urdf"}, r"nowhere\.urdf: there is no such file"),
        (
            {"unit": 1.0},
            r"j2\.pos is measured at -30\.00 rad, and the model's joint goes from -2\.62 to 2\.62",
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_error(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, **changes)


def test_a_file_that_is_no_model_is_one_clear_error(tmp_path):
    (tmp_path / "arm.urdf").write_text("<robot", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"arm\.urdf cannot be read"):
        made(tmp_path, model=str(tmp_path / "arm.urdf"))


def test_its_options_are_named_in_short():
    given = [
        "robot=lerobot_cartesian",
        "robot.type=so101_follower",
        "robot.port=/dev/ttyACM0",
        "robot.model=arm.urdf",
        "robot.hand=tip",
        "robot.joints={shoulder_pan.pos: pan}",
        "robot.limits=limits/fake_point.yaml",
    ]
    own = compose(given).robot.options
    assert own["options"]["options"] == {"use_degrees": True, "port": "/dev/ttyACM0"}
    assert (own["model"], own["hand"], own["joints"]) == (
        "arm.urdf",
        "tip",
        {"shoulder_pan.pos": "pan"},
    )
