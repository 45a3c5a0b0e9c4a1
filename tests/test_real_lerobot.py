"""lerobot's robots behind the supervisor: a small registered one stands in for hardware."""

from __future__ import annotations

import numpy as np
import pytest
from real_helpers import DT, Clock

from real import limits as limit_files
from real.messages import Beat, Chunk, Event, Grant, Hello, Lease, Writer
from real.robots.lerobot import LeRobotArm
from real.supervisor.core import Supervisor
from real.supervisor.settings import SupervisorConfig
from vla_rl.errors import ConfigError

# it does not tell its units
LOW = {"shoulder.pos": -100.0, "elbow.pos": -100.0, "gripper.pos": 0.0}
HIGH = dict.fromkeys(LOW, 100.0)


def test_a_registered_robot_is_driven_within_its_limits(paper_arm, tmp_path):
    clock = Clock()
    arm = LeRobotArm(
        "paper_arm", {"port": "x", "calibration_dir": tmp_path}, low=LOW, high=HIGH, clock=clock
    )
    arm.connect()
    assert arm.embodiment.action_low == (-100.0, -100.0, 0.0) and arm.embodiment.camera_names == (
        "wrist",
    )
    data = {
        "joint_speed": 60,
        "joint_acceleration": 600,
        "joint_jerk": 60_000,
        "joint_step": 10,
        "joint_margin": 5,
    }
    keys = limit_files.needed("joints", False, False)
    limits = limit_files.parse({**data, "observation_age": 0.3}, arm.limits, keys, "test")
    supervisor = Supervisor(arm, limits, SupervisorConfig(), clock())
    policy, person = Writer("policy", clock), Writer("operator", clock)
    supervisor.receive(1, policy.make(Hello, role="policy", pid=1), clock())
    supervisor.receive(2, person.make(Hello, role="teleop", pid=1), clock())
    supervisor.receive(2, person.make(Lease, ask="request", token="", force=False), clock())
    token = next(m.token for _, m in supervisor.session.outbox if isinstance(m, Grant))
    for name in ("arm", "start"):
        supervisor.receive(2, person.make(Event, name=name, value="", at=0.0, lease=token), clock())
    # 40 a second, to the joint's very end
    targets = [(float(min(2 * i, 99)), 0.0, 50.0) for i in range(80)]
    for tick in range(400):
        clock.now += DT
        supervisor.receive(1, policy.make(Beat, tick=tick), clock())
        supervisor.receive(2, person.make(Lease, ask="renew", token=token, force=False), clock())
        if tick == 0:
            fields = {
                "hz": 20.0,
                "decision": 0,
                "policy_version": "",
                "prefix": 0,
                "delay": 0,
                "obs_stamp": clock(),
            }
            epoch = supervisor.session.modes.epoch
            supervisor.receive(
                1,
                policy.make(Chunk, 0.15, epoch=epoch, start=0, actions=tuple(targets), **fields),
                clock(),
            )
        supervisor.tick(tick, clock())
    told = np.array([[row[name] for name in paper_arm.JOINTS] for row in arm.device.told])
    speed = np.abs(np.diff(told[:, 0])) / DT
    assert told[:, 0].max() == pytest.approx(95.0, abs=0.1), "as far as its margin"
    assert speed.max() <= 60.0 + 1e-6 and (told[:, 1] == 0.0).all() and (told[:, 2] == 50.0).all()
    assert arm.pictures()[0].image.shape == (4, 6, 3) and arm.observe().gripper == 0.5
    arm.device.plugged = False
    state = supervisor.tick(400, clock.now + DT)
    assert state.mode == "FAULT" and state.faults == ("robot lost",)
    arm.close()


def test_a_stopped_one_ignores_commands_until_it_is_cleared(paper_arm, tmp_path):
    arm = LeRobotArm("paper_arm", {"calibration_dir": tmp_path}, low=LOW, high=HIGH, clock=Clock())
    with pytest.raises(ConfigError, match="no port"):
        arm.connect()
    before = arm.observe().joints
    arm.stop()
    count = len(arm.device.told)
    from real.robots.protocol import Reference

    arm.command(Reference(0.0, joints=before + 1.0))
    assert len(arm.device.told) == count and arm.observe().errors == ("stopped",)
    arm.clear()
    arm.command(Reference(0.0, joints=before + 1.0))
    assert arm.observe().joints[0] == 1.0


def test_unknown_types_and_options_are_one_clear_error(paper_arm):
    with pytest.raises(ConfigError, match=r"knows no robot 'nothing': it knows .*so101_follower"):
        LeRobotArm("nothing")
    with pytest.raises(ConfigError, match="options of lerobot's robot paper_arm are wrong"):
        LeRobotArm("paper_arm", {"nonsense": 1})


# no limit at all, and one that is no speed of a joint
@pytest.mark.parametrize("key", ["speeed", "force"])
def test_a_wrong_key_of_speeds_is_named(key, paper_arm, tmp_path):
    with pytest.raises(ConfigError, match=f"robot.options.speeds has '{key}': use joint_speed"):
        LeRobotArm(
            "paper_arm", {"calibration_dir": tmp_path}, low=LOW, high=HIGH, speeds={key: 1.0}
        )
