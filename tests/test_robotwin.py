"""RoboTwin: what can be known without a checkout, and, where the machine has one, its own code as a simulator.

The latter needs ``VLA_RL_ROBOTWIN``, a checkout of branch RLinf_support, and ``VLA_RL_ROBOTWIN_PYTHON``, a Python with its
packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import robotwin_worker as worker
import yaml

from sim.bench_ways import OURS
from sim.calls import Calls, check_machine
from sim.robotwin import primitive_arm
from sim.robotwin.bench import bench_robotwin
from sim.robotwin.checkout import Checkout
from sim.robotwin.seeds import FIRST, SeedFile, raw_seed, take
from sim.robotwin.settings import RoboTwinConfig
from sim.robotwin.simulator import RoboTwinSimulator
from sim.robotwin.tasks import BOXES_ONLY, TASKS, step_limit
from vla_rl.errors import ConfigError, MissingDependency, UserError

ROOT, PYTHON = os.environ.get("VLA_RL_ROBOTWIN", ""), os.environ.get("VLA_RL_ROBOTWIN_PYTHON", "")
WHY = "needs VLA_RL_ROBOTWIN (a checkout) and VLA_RL_ROBOTWIN_PYTHON (a Python with its packages)"
needs_checkout = pytest.mark.skipif(not (ROOT and PYTHON), reason=WHY)
STARTED = time.time()


# ----------------------------------------------------------------------------------------------------- tasks and config
def test_there_are_fifty_tasks_and_limits_by_name() -> None:
    assert len(set(TASKS)) == len(TASKS) == 50 and set(BOXES_ONLY) <= set(TASKS)
    official = {"lift_pot": 400, "stack_blocks_two": 800}
    assert step_limit("lift_pot", "official", official) == 400
    assert step_limit("move_can_pot", "official", official) == 1000
    assert step_limit("stack_blocks_two", "simplevla", official) == 400
    assert step_limit("lift_pot", "simplevla", official) == 200


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tasks": ["fold_towel"]}, "fold_towel"),
        ({"tasks": []}, "at least one"),
        ({"setting": "demo_hard"}, "demo_randomized"),
        ({"cameras": ["front"]}, "left_camera"),
        ({"look": "pretty"}, "paper"),
        ({"limit": "none"}, "simplevla"),
        ({"state": "guessed"}, "measured"),
        ({"embodiment": "primitive", "distance": 0.0}, "distance"),
        ({"horizon": -1}, "horizon"),
    ],
)
def test_bad_config_is_one_clear_error(options: dict, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        RoboTwinConfig(**options)


def test_the_primitive_arm_is_a_chain_of_six_joints_and_two_fingers(tmp_path) -> None:
    folder = primitive_arm.write(tmp_path / "arm")
    robot = ElementTree.parse(folder / "arm.urdf").getroot()
    joints = {joint.get("name"): joint for joint in robot.iter("joint")}
    parents = [joints[f"joint{i}"].find("parent").get("link") for i in range(1, 7)]
    assert parents == ["base", *(f"link{i}" for i in range(1, 6))]
    described = yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))
    gripper = described["gripper_name"][0]
    named = [*described["arm_joints_name"][0], gripper["base"], gripper["mimic"][0][0]]
    assert set(named) <= set(joints) and described["ee_joints"] == ["joint6", "joint6"]
    assert {link.get("name") for link in robot.iter("link")} >= {"camera", "finger_a", "finger_b"}


# -------------------------------------------------------------------------------------------------------------- checkout
@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like a checkout without assets, in a Python that has every package."""
    for file, text in {
        "envs/_base_task.py": "def gen_sparse_reward_data(): ...",
        "envs/stack_blocks_two.py": "",
        "envs/lift_pot.py": "",
        "task_config/_embodiment_config.yml": "piper: {file_path: ./assets/embodiments/piper}",
        "task_config/demo_clean.yml": "{}",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.26.4")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"root": ""}, UserError, r"env\.root=FOLDER.*RLinf_support"),
        ({"root": "missing"}, UserError, "no checkout of RoboTwin"),
        ({"tasks": ["click_bell"]}, UserError, r"no task 'click_bell' \(envs/click_bell.py\)"),
        ({"embodiment": "r2d2"}, UserError, "'r2d2' is unknown.*piper, primitive"),
        ({"embodiment": "piper"}, MissingDependency, r"embodiments\.zip \(0\.2 GB\).*env\.embodiment=primitive"),
        ({"tasks": ["lift_pot"]}, MissingDependency, r"lift_pot needs .*objects\.zip \(3\.7 GB\).*stack_blocks_two"),
        ({"setting": "demo_randomized"}, MissingDependency, r"background_texture\.zip \(11 GB\).*demo_clean"),
    ],
)
def test_what_a_checkout_lacks_is_one_clear_error(checkout, options: dict, error: type, part: str) -> None:
    with pytest.raises(error, match=part):
        Checkout(RoboTwinConfig(**{"root": str(checkout), "embodiment": "primitive", **options})).check()


def test_a_whole_one_is_accepted_and_another_branch_is_not(checkout) -> None:
    config = RoboTwinConfig(root=str(checkout), embodiment="primitive")
    Checkout(config).check()
    (checkout / "envs" / "_base_task.py").write_text("def take_action(): ...")
    with pytest.raises(UserError, match="checkout RLinf_support"):
        Checkout(config).check()


def test_a_missing_planner_and_a_numpy_that_it_crashes_with_are_named(checkout, monkeypatch) -> None:
    config = RoboTwinConfig(root=str(checkout), embodiment="primitive")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.6")
    with pytest.raises(MissingDependency, match=r"numpy 1, as mplib.*2\.4\.6.*slots\.python"):
        Checkout(config).check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mplib" else name)
    with pytest.raises(MissingDependency, match=r"mplib \(mplib is its planner\).*slots\.python"):
        Checkout(config).check()


def test_the_hash_follows_code_setting_and_robot(checkout) -> None:
    def mark(**options) -> str:
        config = RoboTwinConfig(root=str(checkout), embodiment="primitive", **options)
        return Checkout(config).fingerprint("stack_blocks_two")

    first = mark()
    assert mark() == first and mark(distance=0.5) != first and mark(look="default") == first
    (checkout / "envs" / "lift_pot.py").write_text("another task's code")
    assert mark() == first
    (checkout / "envs" / "stack_blocks_two.py").write_text("changed")
    assert mark() != first


# ----------------------------------------------------------------------------------------------------------------- seeds
def test_solved_seeds_are_kept_and_failed_ones_say_why(tmp_path) -> None:
    answers = iter([(5, ""), (6, "no plan"), (7, "unstable"), (8, ""), (9, "")])
    solved, failed = take("lift_pot", "train", 2, answers)
    assert solved == [5, 8] and failed == {"6": "no plan", "7": "unstable"} and next(answers) == (9, "")
    with pytest.raises(UserError, match=r"solved 1 of the 3 train seeds from 100000 on, and 2 are wanted \(no plan; unst"):
        take("lift_pot", "train", 2, iter([(5, ""), (6, "no plan"), (7, "unstable")]))
    entry = {"fingerprint": "abc", "solved": {"train": solved, "held_out": []}, "failed": {"train": failed}}
    SeedFile(tmp_path / "seeds.json", {"lift_pot": entry}).write()
    seeds = SeedFile.read(tmp_path / "seeds.json")
    assert [seeds.seed("lift_pot", "train", i) for i in range(3)] == [5, 8, 5]
    seeds.require("lift_pot", "abc")
    with pytest.raises(UserError, match="no held_out seed of lift_pot"):
        seeds.seed("lift_pot", "held_out", 0)
    with pytest.raises(UserError, match=r"found with other code.*abc, now xyz.*--task lift_pot"):
        seeds.require("lift_pot", "xyz")
    with pytest.raises(UserError, match="no seeds of click_bell"):
        seeds.require("click_bell", "abc")


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"format": 9, "tasks": {}}'])
def test_what_is_no_seed_file_is_named(tmp_path, text) -> None:
    file = tmp_path / "seeds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"seeds\.json is no file of 'vla-rl robotwin seeds'"):
        SeedFile.read(file)


def test_the_splits_seeds_never_meet() -> None:
    assert raw_seed("train", 3) == 100_003 and raw_seed("held_out", 3) == 100_100_003
    assert FIRST["held_out"] - FIRST["train"] > 10**7


# ---------------------------------------------------------------------------------------------- RoboTwin's own code
def config(**options) -> RoboTwinConfig:
    fixed = {"root": ROOT, "embodiment": primitive_arm.NAME, "distance": primitive_arm.DISTANCE, "horizon": 50}
    return RoboTwinConfig(**{**fixed, **options})


@pytest.fixture(scope="module")
def calls():
    check_machine(config(), PYTHON)
    with Calls(functools.partial(RoboTwinSimulator, config()), 1, died="it died", python=PYTHON) as calls:
        yield calls


@needs_checkout
def test_an_outcome_depends_on_the_episode_and_the_actions_alone(calls) -> None:
    found = calls.one(worker.outcomes, (0, 3, 0))
    with Calls(functools.partial(RoboTwinSimulator, config()), 1, died="it died", python=PYTHON) as fresh:
        found += fresh.one(worker.outcomes, (1,))
    instruction, executed, truncated, first = found[0]
    assert "block" in instruction and (executed, truncated) == (25, True)
    assert first[0][1].shape == (240, 320, 3) and first[0][1].std() > 5
    for other in found[1:]:
        assert other[:3] == (instruction, executed, truncated)
        for mine, theirs in zip(first, other[3]):
            for a, b in zip(mine, theirs):
                np.testing.assert_array_equal(a, b)


@needs_checkout
def test_a_chunk_ends_where_robotwins_own_loop_ends(calls) -> None:
    ours = calls.one(worker.outcomes, (0,))[0][3][-1][0]
    np.testing.assert_array_equal(ours, calls.one(worker.upstream))


@needs_checkout
def test_the_expert_demonstrates_at_the_rate_of_its_data(calls) -> None:
    episode = calls.one(worker.demonstration)
    steps = len(episode["actions"])
    assert episode["success"] and steps > 100 and episode["actions"].shape == episode["proprio"].shape == (steps, 14)
    assert episode["images"]["head_camera"].shape == (steps, 240, 320, 3)
    np.testing.assert_array_equal(episode["actions"][:-1], episode["proprio"][1:])


@needs_checkout
def test_the_benchmark_shows_what_rlinfs_own_env_shows() -> None:
    document = bench_robotwin(config(), chunk=5, steps=5, resets=5, python=PYTHON)
    same = [count for name, count in document["identical"].items() if "official" not in name]
    assert same == [document["decisions"]] * 2 == [8, 8]
    assert document["ms_per_step"][OURS] > 0 and len(document["mb_over_resets"]) == 5


@needs_checkout
def test_the_checkout_stays_as_it_is(calls) -> None:
    files = [path for path in Path(ROOT).rglob("*") if path.is_file()]
    assert len(files) > 100 and max(path.stat().st_mtime for path in files) < STARTED
