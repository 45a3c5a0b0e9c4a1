"""RoboTwin: what can be known without a checkout, and, where the machine has one, its own code as a
simulator.

The latter needs ``VLA_RL_ROBOTWIN``, a checkout of branch RLinf_support, or
``VLA_RL_ROBOTWIN_MAIN``, one of main, and ``VLA_RL_ROBOTWIN_PYTHON``, a Python with its packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import robotwin_worker as worker
import yaml

from benchmarks.simulator import robotwin as bench_robotwin
from benchmarks.simulator.ways import OURS
from sim.calls import Calls, check_machine
from sim.robotwin import branches, primitive_arm
from sim.robotwin.checkout import Checkout
from sim.robotwin.collect import robot_of
from sim.robotwin.published import episodes
from sim.robotwin.seeds import SeedFile, candidates, raw_seed, take
from sim.robotwin.settings import RoboTwinConfig
from sim.robotwin.simulator import RoboTwinSimulator, _embodiment
from sim.robotwin.tasks import BOXES_ONLY, RLINF, TASKS, step_limit
from vla_rl import cli
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.errors import ConfigError, EmbodimentMismatch, MissingDependency, UserError
from vla_rl.specs import CameraSpec, EmbodimentSpec

VARIABLES = {"RLinf_support": "VLA_RL_ROBOTWIN", "main": "VLA_RL_ROBOTWIN_MAIN"}
ROOTS = {branch: os.environ.get(variable, "") for branch, variable in VARIABLES.items()}
PYTHON = os.environ.get("VLA_RL_ROBOTWIN_PYTHON", "")


def needs(*branches: str) -> pytest.MarkDecorator:
    """Skip without a checkout of each of ``branches`` and a Python for them."""
    variables = " and ".join(VARIABLES[branch] for branch in branches)
    why = (
        f"needs {variables} (a checkout of that branch) and VLA_RL_ROBOTWIN_PYTHON (a Python with "
        "its packages)"
    )
    return pytest.mark.skipif(
        not (PYTHON and all(ROOTS[branch] for branch in branches)), reason=why
    )


STARTED = time.time()


# --------------------------------------------------------------------------------- tasks and config
def test_there_are_fifty_tasks_and_limits_by_name() -> None:
    assert len(set(TASKS)) == len(TASKS) == 50 and set(BOXES_ONLY) <= set(TASKS)
    official = {"lift_pot": 400, "stack_blocks_two": 800}
    assert step_limit("lift_pot", "official", official) == 400
    assert step_limit("move_can_pot", "official", official) == 1000
    assert step_limit("stack_blocks_two", "simplevla", official) == 400
    assert step_limit("lift_pot", "simplevla", official) == 200
    assert [
        step_limit(name, "rlinf", official) for name in ("lift_pot", "click_bell", "place_shoe")
    ] == [200, 400, 400]
    assert set(RLINF) <= set(TASKS) and len(RLINF) == 10
    RoboTwinConfig(tasks=list(RLINF), limit="rlinf")
    RoboTwinConfig(tasks=["stack_blocks_two"], limit="rlinf", horizon=30)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tasks": ["fold_towel"]}, "fold_towel"),
        ({"tasks": []}, r"env.tasks=\[\] is empty: it must have 1 or more"),
        ({"setting": "demo_hard"}, "demo_randomized"),
        ({"cameras": ["front"]}, "left_camera"),
        ({"look": "pretty"}, "paper"),
        ({"limit": "none"}, "simplevla"),
        ({"limit": "rlinf"}, "no recipe for stack_blocks_two, only for adjust_bottle"),
        ({"state": "guessed"}, "measured"),
        ({"control": "torque"}, "qpos, ee"),
        ({"embodiment": "primitive", "distance": 0.0}, "distance"),
        ({"horizon": -1}, "horizon=-1 .* 0 or more"),
        ({"seed_list": "mine"}, "official, simplevla"),
        ({"textures": "new"}, "split, seen, unseen"),
        ({"instructions": "both"}, "split, seen, unseen"),
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


# without a limit; no such joint
@pytest.mark.parametrize("change", [{"type": "continuous"}, {"name": "another"}])
def test_a_robot_whose_joint_has_no_limit_is_named(tmp_path, change: dict) -> None:
    folder = primitive_arm.write(tmp_path / "arm")
    described = yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))
    options = {"left_embodiment_config": described, "left_robot_file": str(folder)}
    config = RoboTwinConfig(embodiment="primitive")
    assert _embodiment(config, options, (48, 64)).action_dim == 14
    tree = ElementTree.parse(folder / described["urdf_path"])
    joint = next(joint for joint in tree.iter("joint") if joint.get("name") == "joint3")
    joint.attrib |= change
    if "type" in change:
        joint.remove(joint.find("limit"))
    tree.write(folder / described["urdf_path"])
    with pytest.raises(UserError, match=r"joint joint3 of .*arm\.urdf has no lower limit"):
        _embodiment(config, options, (48, 64))


# ----------------------------------------------------------------------------------------- checkout
@pytest.fixture(params=branches.KNOWN, ids=lambda branch: branch.name)
def checkout(request, tmp_path, monkeypatch):
    """A folder that looks like a checkout without assets, in a Python that has every package."""
    for file, text in {
        "envs/_base_task.py": "def take_action(): ..." + f"def {request.param.steps}(): ...",
        "envs/stack_blocks_two.py": "",
        "envs/lift_pot.py": "",
        f"{request.param.settings}/_embodiment_config.yml": "piper: {file_path: "
        "./assets/embodiments/piper}",
        f"{request.param.settings}/demo_clean.yml": "{}",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.26.4")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"root": ""}, UserError, r"env\.root=FOLDER.*RLinf_support or main"),
        ({"root": "missing"}, UserError, "no checkout of RoboTwin"),
        ({"tasks": ["click_bell"]}, UserError, r"no task 'click_bell' \(envs/click_bell.py\)"),
        ({"embodiment": "r2d2"}, UserError, "'r2d2' is unknown.*piper, primitive"),
        (
            {"embodiment": "piper"},
            MissingDependency,
            r"embodiments\.zip \(0\.2 GB\).*env\.embodiment=primitive",
        ),
        (
            {"tasks": ["lift_pot"]},
            MissingDependency,
            r"lift_pot needs .*objects\.zip \(3\.7 GB\).*stack_blocks_two",
        ),
        (
            {"setting": "demo_randomized"},
            MissingDependency,
            r"background_texture\.zip \(11 GB\).*demo_clean",
        ),
    ],
)
def test_what_a_checkout_lacks_is_one_clear_error(
    checkout, options: dict, error: type, part: str
) -> None:
    with pytest.raises(error, match=part):
        Checkout(
            RoboTwinConfig(**{"root": str(checkout), "embodiment": "primitive", **options})
        ).check()


def test_the_branch_is_found_out_and_an_unknown_one_is_named(checkout, request) -> None:
    config = RoboTwinConfig(root=str(checkout), embodiment="primitive")
    Checkout(config).check()
    (branch,) = (each for each in branches.KNOWN if each.name in request.node.name)
    assert Checkout(config).branch is branch and config.describe().startswith(
        f"branch {branch.name}, demo_clean"
    )
    own, other = {
        "main": ("a path an action", "chunk"),
        "RLinf_support": ("chunks as one path", "action"),
    }[branch.name]
    assert Checkout(config).path != other and config.describe().endswith(own)
    other = dataclasses.replace(config, path=other)
    assert Checkout(other).path == other.path and not other.describe().endswith(own)
    (checkout / "envs" / "_base_task.py").write_text("def play_once(): ...")
    lacks = (
        "RLinf_support has .*gen_sparse_reward_data in .*; main has .*take_action in "
        "envs/_base_task.py"
    )
    with pytest.raises(UserError, match=lacks):
        Checkout(config).check()


def test_stepping_of_another_branch_in_an_older_layout_is_unknown(tmp_path) -> None:
    for file, text in (
        ("envs/_base_task.py", "def take_action(self): ..."),
        ("task_config/_embodiment_config.yml", "{}"),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    lacks = (
        "RLinf_support has gen_sparse_reward_data in envs/_base_task.py; main has "
        "env_cfg/task_config/_embodiment_config"
    )
    with pytest.raises(UserError, match=lacks):
        branches.detect(str(tmp_path))


class Told:
    """A task of main whose expert says which arm it took only after it has moved."""

    def __init__(self) -> None:
        self.info, self.need_plan, self.moves, self.stage = {"info": {}}, True, 0, False

    def move(self, *_: object) -> None:
        self.moves += 1

    def play_once(self) -> dict:
        if self.need_plan:
            raise ValueError("it plans")
        self.move("there")
        self.arm_tag, self.stage = "left", True
        self.info["info"] = {"{A}": "red block", "{a}": self.arm_tag}
        return self.info


def test_what_mains_expert_says_is_known_before_it_acts() -> None:
    task = Told()
    assert branches.KNOWN[1].about(task) == {"{A}": "red block", "{a}": "left"}
    assert task.arm_tag == "left", "which the checks of success of some tasks read"
    assert (task.info, task.need_plan, task.moves, task.stage) == ({"info": {}}, True, 0, False)


class Timed:
    """A planner that makes ``steps`` points of any path and keeps the path."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def TOPP(self, path: np.ndarray, step: float, verbose: bool = False) -> tuple:
        self.path, points = path, np.arange(self.steps)[:, None] * np.ones(path.shape[1])
        return points[:, 0] * step, points, points, points, self.steps * step


def test_an_arms_way_leads_through_all_targets_of_a_chunk() -> None:
    # two joints and the gripper
    targets = np.array([[0.1, 0.2, 0.5], [0.1, 0.2, 0.9], [0.3, 0.2, 0.1]])
    planner = Timed(7)
    way = branches.Way(planner, 1.0, targets)
    _, positions, *_ = way.timed(np.array([[0.0, 0.0], [0.3, 0.2]]), 1 / 250, verbose=True)
    np.testing.assert_array_equal(planner.path, [[0.0, 0.0], [0.1, 0.2], [0.3, 0.2]])
    assert len(positions) == way.length == 7
    openings = [way.opening() for _ in range(7)]  # three, two and two steps for the three targets
    np.testing.assert_allclose(openings, [1 - 0.5 / 3, 1 - 1 / 3, 0.5, 0.7, 0.9, 0.5, 0.1])

    long = branches.Way(Timed(1000), 1.0, targets)
    _, positions, velocities, *_ = long.timed(np.zeros((2, 2)), 1 / 250)
    assert len(positions) == len(velocities) == long.length == 500 and positions[
        [0, -1], 0
    ].tolist() == [0, 999]

    planner, still = Timed(3), np.zeros((4, 3))
    branches.Way(planner, 0.0, still).timed(np.zeros((2, 2)), 1 / 250)
    assert planner.path.shape == (2, 2) and 0 < np.abs(planner.path[1]).max() < 0.01
    assert branches.Way(planner, 0.0, still).length == 50, "of an arm whose path could not be timed"


def test_a_missing_planner_and_a_numpy_that_it_crashes_with_are_named(
    checkout, monkeypatch
) -> None:
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


# -------------------------------------------------------------------------------------------- seeds
def test_solved_seeds_are_kept_and_failed_ones_say_why(tmp_path) -> None:
    answers = iter([(5, ""), (6, "no plan"), (7, "unstable"), (8, ""), (9, "")])
    solved, failed = take("lift_pot", "train", 2, answers)
    assert (
        solved == [5, 8]
        and failed == {"6": "no plan", "7": "unstable"}
        and next(answers) == (9, "")
    )
    with pytest.raises(
        UserError, match=r"solved 1 of the first 3 train seeds, and 2 are wanted \(no plan; unst"
    ):
        take("lift_pot", "train", 2, iter([(5, ""), (6, "no plan"), (7, "unstable")]))
    entry = {
        "fingerprint": "abc",
        "solved": {"train": solved, "held_out": []},
        "failed": {"train": failed},
    }
    SeedFile(tmp_path / "seeds.json", {"lift_pot": entry}).write()
    seeds = SeedFile.read(tmp_path / "seeds.json")
    assert [seeds.seed("lift_pot", "train", i) for i in range(3)] == [5, 8, 5]
    seeds.require("lift_pot", "abc", "official")
    with pytest.raises(UserError, match="no held_out seed of lift_pot"):
        seeds.seed("lift_pot", "held_out", 0)
    with pytest.raises(UserError, match=r"found with other code.*abc, now xyz.*--task lift_pot"):
        seeds.require("lift_pot", "xyz", "official")
    with pytest.raises(UserError, match="no seeds of click_bell"):
        seeds.require("click_bell", "abc", "official")
    with pytest.raises(
        UserError,
        match=r"train seed 5 of lift_pot is not of env.seed_list=simplevla, .* begin at 100000",
    ):
        seeds.require("lift_pot", "abc", "simplevla")


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"format": 9, "tasks": {}}'])
def test_what_is_no_seed_file_is_named(tmp_path, text) -> None:
    file = tmp_path / "seeds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"seeds\.json is no file of 'vla-rl robotwin seeds'"):
        SeedFile.read(file)


def test_official_evaluation_seeds_are_held_out_unless_asked_otherwise() -> None:
    """RoboTwin evaluates from 100000 on; SimpleVLA-RL trains there."""
    name = RoboTwinConfig().seed_list
    assert raw_seed(name, "train", 3) == 3 and raw_seed(name, "held_out", 3) == 100_003
    assert (
        raw_seed("simplevla", "train", 3) == 100_003
        and raw_seed("simplevla", "held_out", 3) == 100_100_003
    )
    assert list(candidates("official", "held_out", 1)) == list(range(100_000, 100_050))
    with pytest.raises(
        UserError,
        match=r"initial state 100000 is beyond the 100000 train seeds of env\.seed_list=official",
    ):
        raw_seed("official", "train", 100_000)  # which is the first that is held out


@pytest.mark.parametrize(
    ("options", "split", "textures", "phrases"),
    [
        ({"setting": "demo_randomized"}, "train", False, False),
        ({"setting": "demo_randomized"}, "held_out", True, True),  # as RoboTwin evaluates
        ({"setting": "demo_clean"}, "held_out", True, False),
        (
            {"setting": "demo_randomized", "instructions": "seen", "textures": "seen"},
            "held_out",
            False,
            False,
        ),
        (
            {"setting": "demo_clean", "instructions": "unseen", "textures": "unseen"},
            "train",
            True,
            True,
        ),
    ],
)
def test_what_a_held_out_scene_shows_and_is_told(
    options: dict, split: str, textures: bool, phrases: bool, checkout
) -> None:
    config = RoboTwinConfig(root=str(checkout), **options)
    assert (config.unseen_textures(split), config.unseen_instructions(split)) == (textures, phrases)
    words = ["seen", "unseen"]
    text = config.describe()
    assert (
        f"held out with {words[config.unseen_textures('held_out')]} textures and" in text
        and "official seeds" in text
    )
    assert f"and {words[config.unseen_instructions('held_out')]} instructions" in text
    simulator = object.__new__(RoboTwinSimulator)
    simulator.config, simulator.options = config, {"render_freq": 0}
    assert simulator.scene_options(split) == {"render_freq": 0, "eval_mode": textures}


# ------------------------------------------------------------------------- published demonstrations
ROBOT = EmbodimentSpec(
    name="robotwin_piper_commanded",
    action_names=tuple("abcd"),
    action_units=("rad", "share") * 2,
    action_low=(-3.0, 0.0) * 2,
    action_high=(12.0, 12.0) * 2,
    frame="joints",
    rotation="none",
    gripper="0 close, 1 open",
    control_hz=250 / 15,
    cameras=(CameraSpec("head_camera", 24, 32),),
    proprio_names=tuple("abcd"),
)
STATES = np.linspace(0.0, 1.0, 20).reshape(5, 4)


LAYOUTS = ("older", "main")
NAMES_OF_MAIN = {"head_camera": "cam_head", "left_camera": "cam_left_wrist"}


def write_published(
    folder: Path, numbers: tuple[int, ...] = (0, 2, 10), layout: str = "older"
) -> Path:
    """Episodes of five frames in a layout of RoboTwin's: a red patch moves down, red and blue
    exchanged in its JPEGs."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'vla-rl[libero]'")
    image = pytest.importorskip("PIL.Image")
    for name in ("data", "instructions"):
        (folder / name).mkdir(parents=True)
    for number in numbers:
        encoded = []
        for frame in range(len(STATES)):
            picture, file = np.zeros((24, 32, 3), np.uint8), io.BytesIO()
            picture[4 * frame : 4 * frame + 8, 8:16, 0] = 200
            image.fromarray(np.ascontiguousarray(picture[..., ::-1])).save(file, "JPEG", quality=95)
            encoded.append(file.getvalue())
        length = max(map(len, encoded))
        padded = [each.ljust(length, b"\0") for each in encoded]
        texts = {"seen": [f"text {i} of {number}" for i in range(4)], "unseen": ["another"]}
        if layout == "main":
            with h5py.File(folder / "data" / f"episode_{number:07d}.hdf5", "w") as opened:
                opened["instructions"] = json.dumps(texts["seen"])
                for group, rows in (("state", slice(-1)), ("action", slice(1, None))):
                    parts = np.split((STATES + number)[rows].astype(np.float32), (1, 2, 3), axis=1)
                    for side, part in zip(("left_arm", "left_ee", "right_arm", "right_ee"), parts):
                        opened[f"{group}/{side}_joint_states"] = part
                for name in NAMES_OF_MAIN.values():
                    opened.create_dataset(
                        f"vision/{name}/colors", data=padded[:-1], dtype=f"S{length}"
                    )
            continue
        with h5py.File(folder / "data" / f"episode{number}.hdf5", "w") as opened:
            opened.create_dataset("joint_action/vector", data=STATES + number)
            for name in NAMES_OF_MAIN:
                opened.create_dataset(f"observation/{name}/rgb", data=padded, dtype=f"S{length}")
        (folder / "instructions" / f"episode{number}.json").write_text(json.dumps(texts))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_demonstrations_are_read_frame_by_frame(tmp_path, layout: str) -> None:
    read = list(episodes(write_published(tmp_path / "clean", layout=layout), ROBOT, "lift_pot"))
    assert [e["init_state_id"] for e in read] == [0, 2, 10] and {e["task_id"] for e in read} == {
        "lift_pot"
    }
    assert [e["instruction"] for e in read] == ["text 0 of 0", "text 2 of 2", "text 2 of 10"]
    last = read[-1]
    np.testing.assert_allclose(last["proprio"], STATES[:-1] + 10, rtol=1e-6)
    np.testing.assert_array_equal(last["actions"][:-1], last["proprio"][1:])
    np.testing.assert_allclose(last["actions"][-1], STATES[-1] + 10, rtol=1e-6)
    pictures = last["images"]["head_camera"]
    assert pictures.shape == (4, 24, 32, 3) and pictures.dtype == np.uint8
    for frame, picture in enumerate(pictures.astype(int)):
        inside = picture[4 * frame + 2 : 4 * frame + 6, 10:14]
        assert abs(inside[..., 0] - 200).max() < 20 and inside[..., 2].max() < 40, "red is red"
    assert len(list(episodes(tmp_path / "clean", ROBOT, "lift_pot", limit=1))) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"action_names": tuple("abcdef")},
            r"holds \[5, 4\] commanded states, and .* has 6 numbers: a, b, c.*embodiment",
        ),
        ({"name": "robotwin_piper_measured"}, "env.state=commanded"),
        ({"frame": "world"}, "env.control=qpos"),
        (
            {"cameras": (CameraSpec("front_camera", 24, 32),)},
            r"head_camera, left_camera.*front_camera.*env\.cameras",
        ),
        (
            {"cameras": (CameraSpec("head_camera", 48, 64),)},
            r"32x24 px, and the env shows 64x48: set env\.camera_type",
        ),
    ],
)
def test_data_of_another_robot_is_refused(tmp_path, changes: dict, part: str, layout: str) -> None:
    folder = write_published(tmp_path, (0,), layout)
    with pytest.raises(EmbodimentMismatch, match=part):
        list(episodes(folder, dataclasses.replace(ROBOT, **changes), "lift_pot"))


def test_what_is_no_data_or_damaged_is_named(tmp_path) -> None:
    with pytest.raises(
        UserError,
        match=r"has no data/episode0\.hdf5 or data/episode_0000000\.hdf5: name the folder of one",
    ):
        list(episodes(tmp_path, ROBOT, "lift_pot"))
    folder = write_published(tmp_path / "clean", (0,))
    file = folder / "data" / "episode0.hdf5"
    whole = file.read_bytes()
    for content in (whole[:500], b""):
        file.write_bytes(content)
        with pytest.raises(
            UserError,
            match=r"episode0\.hdf5 or .*episode0\.json is not RoboTwin's, or it is damaged",
        ):
            list(episodes(folder, ROBOT, "lift_pot"))
    file.write_bytes(whole)
    (folder / "instructions" / "episode0.json").write_text('{"seen": []}')
    with pytest.raises(UserError, match="no seen instruction"):
        list(episodes(folder, ROBOT, "lift_pot"))


def test_what_mains_layout_may_have_besides_is_read_or_named(tmp_path) -> None:
    folder = write_published(tmp_path, (2,), "main")
    file, h5py = folder / "data" / "episode_0000002.hdf5", pytest.importorskip("h5py")

    def changed(name: str, value: object) -> list[dict]:
        with h5py.File(file, "a") as opened:
            kept = opened[name][()]
            del opened[name]
            opened[name] = value
        try:
            return list(episodes(folder, ROBOT, "lift_pot"))
        finally:
            with h5py.File(file, "a") as opened:
                del opened[name]
                opened[name] = kept

    # of an older file, by main's own script
    (converted,) = changed("instructions", ["one", "two", "three"])
    assert converted["instruction"] == "three"
    with pytest.raises(UserError, match=r"episode_0000002\.hdf5 has no seen instruction"):
        changed("instructions", '[""]')
    with pytest.raises(
        UserError, match=r"0000002\.hdf5 has actions that are not the next .*--same-index-action"
    ):
        changed("action/left_arm_joint_states", (STATES[:-1, :1] + 2).astype(np.float32))
    with pytest.raises(
        UserError, match=r"it is damaged \(it has 3 pictures of head_camera for 4 states\)"
    ):
        with h5py.File(file) as opened:
            pictures = opened["vision/cam_head/colors"][:-1]
        changed("vision/cam_head/colors", pictures)
    with pytest.raises(UserError, match=r"0000002\.hdf5 is not RoboTwin's, or it is damaged"):
        file.write_bytes(file.read_bytes()[:500])
        list(episodes(folder, ROBOT, "lift_pot"))


def test_a_conversion_is_a_dataset_of_that_robot(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sim.robotwin.collect.robot_of", lambda config, python: ROBOT.to_dict())
    source, target = write_published(tmp_path / "clean"), tmp_path / "dataset"
    arguments = [
        "robotwin",
        "convert",
        str(source),
        str(target),
        "--task",
        "lift_pot",
        "env.root=somewhere",
    ]
    assert (
        cli.main(arguments) == 0 and "wrote 3 demonstrations of lift_pot" in capsys.readouterr().out
    )
    data = load_demonstrations(target, expected_embodiment=ROBOT)
    assert (
        len(data.episodes) == 3
        and data.actions.shape == (12, 4)
        and data.instructions[0] == "text 0 of 0"
    )
    assert (
        data.images["head_camera"][0, 4, 12, 0] > 150 > 50 > data.images["head_camera"][0, 4, 12, 2]
    )
    assert cli.main(arguments) == 2 and "exists already" in capsys.readouterr().err


# ------------------------------------------------------------------------------ RoboTwin's own code
def config(branch: str, **options) -> RoboTwinConfig:
    fixed = {
        "root": ROOTS[branch],
        "embodiment": primitive_arm.NAME,
        "distance": primitive_arm.DISTANCE,
        "horizon": 50,
    }
    return RoboTwinConfig(**{**fixed, **options})


def opened(config: RoboTwinConfig) -> Calls:
    check_machine(config, PYTHON)
    return Calls(functools.partial(RoboTwinSimulator, config), 1, died="it died", python=PYTHON)


@pytest.fixture(
    scope="module", params=[pytest.param(branch, marks=needs(branch)) for branch in ROOTS]
)
def branch(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def calls(branch):
    with opened(config(branch)) as calls:
        yield calls


def test_an_outcome_depends_on_the_episode_and_the_actions_alone(calls, branch) -> None:
    found = calls.one(worker.outcomes, (0, 3, 0))
    with opened(config(branch)) as fresh:
        found += fresh.one(worker.outcomes, (1,))
    instruction, executed, truncated, first = found[0]
    assert "block" in instruction and (executed, truncated) == (25, True)
    assert first[0][1].shape == (240, 320, 3) and first[0][1].std() > 5
    for other in found[1:]:
        assert other[:3] == (instruction, executed, truncated)
        for mine, theirs in zip(first, other[3]):
            for a, b in zip(mine, theirs):
                np.testing.assert_array_equal(a, b)


def test_a_chunk_ends_where_robotwins_own_loop_ends(calls) -> None:
    ours = calls.one(worker.outcomes, (0,))[0][3][-1][0]
    np.testing.assert_array_equal(ours, calls.one(worker.upstream))


@needs(*ROOTS)
@pytest.mark.parametrize("path", branches.PATHS)
def test_both_branches_end_a_chunk_alike(path: str) -> None:
    ends = []
    for branch in ROOTS:
        with opened(config(branch, path=path)) as fresh:
            ends.append(fresh.one(worker.outcomes, (0,))[0][3][-1][0])
    np.testing.assert_array_equal(*ends)


def test_hands_go_where_poses_send_them_and_outcomes_repeat(branch) -> None:
    poses, found = config(branch, control="ee", horizon=4), []
    robot = EmbodimentSpec.from_dict(robot_of(poses, PYTHON))
    assert (
        robot.action_dim == 16 and robot.rotation == "quaternion_wxyz" and robot.proprio_dim == 14
    )
    assert (
        robot.action_names[:4] == ("left_x", "left_y", "left_z", "left_qw")
        and robot.action_names[-1] == "right_gripper"
    )
    for slots in ((0, 3), (1,)):
        with opened(poses) as fresh:
            found += fresh.one(worker.reached, slots)
    for ends in found:
        assert [(executed, truncated) for executed, truncated, *_ in ends] == [
            (2, False),
            (2, True),
        ]
        for (*_, ours, off), (*_, theirs, _) in zip(ends, found[0]):
            np.testing.assert_array_equal(ours, theirs)
            assert max(off) < 0.005


def test_the_expert_demonstrates_at_the_rate_of_its_data(calls) -> None:
    episode, about, said = calls.one(worker.demonstration)
    assert about == said and set(about) == {"{A}", "{B}", "{a}", "{b}"}
    steps = len(episode["actions"])
    assert (
        episode["success"]
        and steps > 100
        and episode["actions"].shape == episode["proprio"].shape == (steps, 14)
    )
    assert episode["images"]["head_camera"].shape == (steps, 240, 320, 3)
    np.testing.assert_array_equal(episode["actions"][:-1], episode["proprio"][1:])


def test_files_that_robotwins_own_code_writes_are_read(calls, branch, tmp_path) -> None:
    for name in ("data", "instructions"):
        (tmp_path / name).mkdir()
    frames = calls.one(worker.published, str(tmp_path / "data" / "episode0.hdf5"))
    (tmp_path / "instructions" / "episode0.json").write_text('{"seen": ["stack"], "unseen": []}')
    robot = EmbodimentSpec.from_dict(robot_of(config(branch), PYTHON))
    (episode,) = episodes(tmp_path, robot, worker.TASK)
    states, pictures = (np.array(each) for each in zip(*frames))
    np.testing.assert_array_equal(episode["actions"], states[1:].astype(np.float32))
    np.testing.assert_array_equal(episode["proprio"], states[:-1].astype(np.float32))
    apart = np.abs(episode["images"]["head_camera"].astype(int) - pictures[:-1])
    assert (
        apart.mean() < 3
        and apart.mean() < 0.5 * np.abs(pictures[:-1].astype(int) - pictures[:-1, ..., ::-1]).mean()
    )


@needs("main")
def test_an_episode_that_mains_own_script_collects_is_read(tmp_path) -> None:
    with opened(config("main")) as fresh:
        frames = fresh.one(worker.collected, str(tmp_path))
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["episode_0000000.hdf5"]
    robot = EmbodimentSpec.from_dict(robot_of(config("main"), PYTHON))
    (episode,) = episodes(tmp_path, robot, worker.TASK)
    states, pictures = (np.array(each) for each in zip(*frames))
    assert len(states) > 50
    np.testing.assert_array_equal(episode["actions"], states[1:].astype(np.float32))
    np.testing.assert_array_equal(episode["proprio"], states[:-1].astype(np.float32))
    apart = np.abs(episode["images"]["head_camera"].astype(int) - pictures[:-1])
    assert (
        apart.mean() < 3
        and apart.mean() < 0.5 * np.abs(pictures[:-1].astype(int) - pictures[:-1, ..., ::-1]).mean()
    )
    told = json.loads((tmp_path / "instruction" / "episode_0000000.json").read_text())
    assert episode["instruction"] == told["seen"][0] and "block" in told["seen"][0]
    with pytest.raises(
        EmbodimentMismatch,
        match=r"cameras head_camera, and the env shows front_camera: set env\.cameras",
    ):
        list(
            episodes(
                tmp_path,
                dataclasses.replace(robot, cameras=(CameraSpec("front_camera", 240, 320),)),
                worker.TASK,
            )
        )


@pytest.mark.parametrize("checkout", branches.KNOWN[:1], indirect=True)
def test_the_benchmark_needs_rlinfs_own_env_and_joint_targets(checkout) -> None:
    with pytest.raises(
        UserError,
        match=r"robotwin/envs/vector_env\.py, which .* laid out as branch RLinf_support, has not",
    ):
        bench_robotwin.measure(RoboTwinConfig(root=str(checkout)))
    with pytest.raises(ConfigError, match=r"env\.control=ee: set qpos"):
        bench_robotwin.measure(RoboTwinConfig(root=str(checkout), control="ee"))


@needs("RLinf_support")
def test_the_benchmark_shows_what_rlinfs_own_env_shows() -> None:
    document = bench_robotwin.measure(
        config("RLinf_support"), chunk=5, steps=5, resets=5, python=PYTHON
    )
    same = [count for name, count in document["identical"].items() if "official" not in name]
    assert same == [document["decisions"]] * 2 == [8, 8]
    assert document["ms_per_step"][OURS] > 0 and len(document["mb_over_resets"]) == 5


@needs("main")
@pytest.mark.timeout(900)  # its expert plans eight times
def test_the_benchmark_shows_what_mains_own_evaluation_shows() -> None:
    document = bench_robotwin.measure(config("main"), chunk=2, steps=2, resets=1, python=PYTHON)
    same = [count for name, count in document["identical"].items() if "env.path=chunk" not in name]
    assert same == [document["decisions"]] * 3 == [8, 8, 8]
    assert (
        document["identical"]["simulator, env.path=chunk"] >= 4
        and document["ms_per_step"][OURS] > 0
    )
    assert any("evaluation" in name and size > 100 for name, size in document["more"].items())


def test_the_checkout_stays_as_it_is(calls, branch) -> None:
    files = [path for path in Path(ROOTS[branch]).rglob("*") if path.is_file()]
    assert len(files) > 100 and max(path.stat().st_mtime for path in files) < STARTED
