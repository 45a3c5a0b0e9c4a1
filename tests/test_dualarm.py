"""The embedded dual-arm suite: geometry, tasks, the Simulator contract without and with
pictures, experts, failures."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest
from contracts import assert_same_observation, assert_same_step, check_env, check_simulator

from benchmarks.simulator.dualarm import measured
from benchmarks.simulator.ways import OURS, Asked, bench, text
from sim import shaders, vulkan
from sim.dualarm import kinematics
from sim.dualarm.demonstrator import make_demonstrator
from sim.dualarm.settings import DualArmConfig
from sim.dualarm.shapes import THINGS
from sim.dualarm.simulator import MAX_STEP, DualArmSimulator
from sim.dualarm.tasks import PRIVILEGED_DIM, TASKS, place_things
from sim.pool import ProcessPool
from vla_rl import splits
from vla_rl.config.run import CollectConfig
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage
from vla_rl.specs import EpisodeSpec

needs_sapien = pytest.mark.skipif(
    importlib.util.find_spec("sapien") is None, reason="sapien is not installed"
)


@functools.cache
def _cannot_draw() -> str:
    try:
        vulkan.ensure_driver()
    except MissingDependency as error:
        return str(error)
    return ""


@pytest.fixture
def drawing() -> None:
    if problem := _cannot_draw():
        pytest.skip(f"needs a Vulkan driver: {problem}")


def state_only(**options) -> DualArmSimulator:
    return DualArmSimulator(DualArmConfig(observe="state", **options))


def pictured(**options) -> DualArmSimulator:
    return DualArmSimulator(DualArmConfig(**{"camera_size": 48, "camera_width": 64, **options}))


@pytest.fixture(scope="module")
def simulator():
    """One simulator without pictures, with all tasks, for the whole file."""
    simulator = state_only()
    yield simulator
    simulator.close()


def expert_run(
    simulator, episode: EpisodeSpec, slot: int = 0, change=lambda highest, action: action
):
    """Executed actions [t 14] and the last `SlotStep`; ``change`` (the target's highest rise so
    far, action) alters them."""
    simulator.start(slot, episode)
    expert, actions, highest = simulator.demonstrator(slot), [], 0.0
    target = TASKS[episode.task_id].targets[0]
    rest = simulator.state(slot).position(target)[2]
    while True:
        highest = max(highest, simulator.state(slot).position(target)[2] - rest)
        actions.append(change(highest, simulator.action(slot, expert.act(simulator.state(slot)))))
        step = simulator.step(slot, actions[-1][None])
        if step.terminated or step.truncated:
            return np.array(actions), step
        assert step.failure == ""


# ----------------------------------------------------------------------------------------- geometry
@pytest.mark.parametrize("arm", kinematics.ARMS)
def test_the_jacobian_is_the_derivative_of_the_hands_pose(arm) -> None:
    joints = np.array([0.3, -1.2, 1.5, 0.4, 0.9, -0.7])
    place, frame, jacobian = kinematics.hand(arm, joints)
    for i, column in enumerate(jacobian.T):
        moved, turned, _ = kinematics.hand(arm, joints + 1e-6 * np.eye(6)[i])
        np.testing.assert_allclose((moved - place) / 1e-6, column[:3], atol=1e-5)
        np.testing.assert_allclose(
            kinematics.turn_between(frame, turned) / 1e-6, column[3:], atol=1e-5
        )


def test_a_stretched_arm_reaches_as_far_as_its_links_are_long() -> None:
    place, frame, _ = kinematics.hand("left", np.zeros(6))
    # along y, from the shoulder
    np.testing.assert_allclose(place, [-0.28, 0.21 + 0.20 + 0.13, 0.14])
    np.testing.assert_allclose(frame[:, 0], [0, 1, 0], atol=1e-12)


@pytest.mark.parametrize("arm", kinematics.ARMS)
def test_inverse_kinematics_finds_what_is_in_reach(arm) -> None:
    rng, side = np.random.default_rng(0), -1.0 if arm == "left" else 1.0
    for _ in range(20):
        place = np.array(
            [side * rng.uniform(0.02, 0.38), rng.uniform(0.15, 0.26), rng.uniform(0.02, 0.10)]
        )
        yaw = kinematics.easy_yaw(arm, place, rng.uniform(-np.pi, np.pi))
        joints = kinematics.solve(
            arm, place, kinematics.downward(yaw), kinematics.home(arm), iterations=60
        )
        there, frame, _ = kinematics.hand(arm, joints)
        np.testing.assert_allclose(there, place, atol=1e-3)
        assert np.linalg.norm(kinematics.turn_between(frame, kinematics.downward(yaw))) < 5e-3
        assert np.all(joints >= kinematics.LOW) and np.all(joints <= kinematics.HIGH)


@needs_sapien
def test_the_physics_has_the_arm_that_the_kinematics_think_of(simulator) -> None:
    simulator.start(0, EpisodeSpec("lift_bar", 0))
    rng = np.random.default_rng(1)
    for _ in range(4):
        simulator.step(0, rng.uniform(-MAX_STEP, MAX_STEP, (6, 14)))
        world = simulator.world(0)
        for arm, name in enumerate(kinematics.ARMS):
            pose = {link.name: link.entity_pose for link in world.arms[arm].get_links()}[
                f"{name}_hand"
            ]
            place, frame, _ = kinematics.hand(name, world.qpos(arm)[:6])
            matrix = pose.to_transformation_matrix()
            np.testing.assert_allclose(matrix[:3, :3], frame, atol=1e-4)
            reach = kinematics.GRASP - kinematics.WRIST
            np.testing.assert_allclose(matrix[:3, 3] + reach * frame[:, 0], place, atol=1e-4)


# --------------------------------------------------------------------------------- tasks and config
def test_tasks_are_well_formed() -> None:
    assert len(TASKS) >= 6 and sum(task.arms == 2 for task in TASKS.values()) >= 2
    for task in TASKS.values():
        assert (
            len(set(task.spec.instructions)) >= 3 and len(set(task.spec.held_out_instructions)) >= 2
        )
        assert set(task.targets) <= set(task.zones) and (task.goal in task.zones or not task.goal)
    texts = [
        text
        for task in TASKS.values()
        for text in task.spec.instructions + task.spec.held_out_instructions
    ]
    assert len(texts) == len(set(texts)) and all(text == text.lower().strip() for text in texts)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_placements_of_the_splits_are_disjoint(task) -> None:
    cells = {"train": set(), "held_out": set()}
    for split in cells:
        for i in range(100):
            poses = place_things(task, i, split)
            again = place_things(task, i, split)
            assert set(poses) == set(task.zones) and all(
                np.array_equal(poses[name], again[name]) for name in poses
            )
            for x, y, _, yaw in poses.values():
                assert abs(yaw) <= task.max_yaw
                cells[split].add(splits.cell_of(x, y))
    assert len(cells["train"]) > 30 and len(cells["held_out"]) > 5
    assert not cells["train"] & cells["held_out"]


@pytest.mark.parametrize("thing", ["ring", "stack"])
def test_tasks_with_the_same_things_begin_alike(thing: str) -> None:
    for i in range(20):
        red, blue = (
            place_things(TASKS[f"{thing}_{color}"], i, "train") for color in ("red", "blue")
        )
        assert red.keys() == blue.keys() and all(
            np.array_equal(red[name], blue[name]) for name in red
        )


def test_the_stick_begins_out_of_the_right_arms_reach() -> None:
    shoulder = kinematics.base("right") + kinematics.above(kinematics.SHOULDER)
    half = max(part.size[0] for part in THINGS["stick"].parts)
    for split in splits.SPLITS:
        for i in range(100):
            x, y, z, yaw = place_things(TASKS["hand_over"], i, split)["stick"]
            nearest = np.array([x + half * np.cos(yaw), y + half * np.sin(yaw), z])
            assert np.linalg.norm(nearest - shoulder) > kinematics.REACH


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tasks": ["juggle"]}, "juggle"),
        ({"tasks": []}, r"env.tasks=\[\] is empty: it must have 1 or more"),
        ({"control": "torque"}, "joint_position"),
        ({"look": "pretty"}, "paper"),
        ({"cameras": ["selfie"]}, "left_wrist"),
        ({"cameras": []}, "env.observe=state"),
        ({"cameras": ["head", "head"]}, "once"),
        ({"camera_size": 4}, "camera_size=4 .* 16 to 2048"),
        ({"horizon": -1}, "horizon=-1 .* 0 or more"),
    ],
)
def test_bad_config_is_one_clear_error(options: dict, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        DualArmConfig(**options)


# ---------------------------------------------------------------------- the machine and its drivers
@pytest.fixture
def no_driver_yet(monkeypatch):
    for name in (*vulkan.CHOICES, vulkan._REMEMBERED):
        monkeypatch.delenv(name, raising=False)


def test_without_sapien_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(vulkan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"dualarm"):
        DualArmConfig().check_machine()
    assert vulkan.check()[0] == "missing" and "dualarm" in vulkan.check()[2]


def test_the_systems_driver_comes_before_the_own_one(monkeypatch, tmp_path, no_driver_yet) -> None:
    own = tmp_path / "lvp_icd.json"
    own.touch()
    monkeypatch.setattr(vulkan, "OWN_DRIVERS", (tmp_path / "none.json", own))
    monkeypatch.setattr(vulkan, "probe", lambda driver="", draw=False: None)
    assert vulkan.choose_driver() == ""
    monkeypatch.setattr(
        vulkan, "probe", lambda driver="", draw=False: None if driver else "no device"
    )
    assert vulkan.choose_driver() == str(own)
    assert vulkan.check() == ("ok", "SAPIEN draws with a software driver of its own", "")
    monkeypatch.setenv(vulkan._REMEMBERED, "a parent's")
    assert vulkan.choose_driver() == "a parent's"


def test_no_driver_is_one_clear_error_with_the_package(
    monkeypatch, tmp_path, no_driver_yet
) -> None:
    monkeypatch.setattr(vulkan, "OWN_DRIVERS", (tmp_path / "none.json",))
    monkeypatch.setattr(vulkan, "probe", lambda driver="", draw=False: vulkan._ABSENT)
    monkeypatch.setattr(vulkan.importlib.util, "find_spec", lambda name: name)
    vulkan.ensure_driver.cache_clear()
    with pytest.raises(
        MissingDependency, match=r"no Vulkan driver.*mesa-vulkan-drivers.*env\.observe=state"
    ):
        DualArmConfig().check_machine()
    status, detail, fix = vulkan.check()
    assert status == "fail" and "no Vulkan driver" in detail and "mesa-vulkan-drivers" in fix
    monkeypatch.setenv("VK_ICD_FILENAMES", "/my/driver.json")
    with pytest.raises(MissingDependency, match=r"VK_ICD_FILENAMES=/my/driver.json.*Unset"):
        vulkan.choose_driver()


@needs_sapien
def test_a_driver_that_is_no_file_is_told_by_the_probe() -> None:
    assert vulkan.probe("/no/such/driver.json") == vulkan._ABSENT


def test_a_shaders_table_is_left_out_and_the_rest_kept() -> None:
    table = "layout(set = 2, binding = 8) uniform sampler2D samplerBRDFLUT;\n"
    text = table + "vec2 a = texture(samplerBRDFLUT, vec2(r, max(n, v))).xy;"
    assert shaders.without_table(text) == "\nvec2 a = vec2(0.0);"
    other = (
        "layout(set = 2, binding = 7) uniform samplerCube samplerEnvironment;\nvec3 c = "
        "texture(samplerEnvironment, n);"
    )
    assert shaders.without_table(other) == other


# ---------------------------------------------------------------------- physics, without a renderer
@needs_sapien
def test_physics_and_state_run_where_nothing_can_draw(tmp_path) -> None:
    """In a process whose Vulkan loader finds no driver."""
    code = """
import numpy as np
from sim.dualarm.simulator import DualArmSimulator, DualArmConfig
from vla_rl.specs import EpisodeSpec
config = DualArmConfig(observe="state")
config.check_machine()
simulator = DualArmSimulator(config)
observation = simulator.start(0, EpisodeSpec("lift_both", 0))
assert observation.images == {} and observation.proprio.shape == (14 + 2 * 7,)
expert = simulator.demonstrator(0)
while True:
    step = simulator.step(0, simulator.action(0, expert.act(simulator.state(0)))[None])
    if step.terminated or step.truncated:
        break
assert step.success
try:
    DualArmConfig().check_machine()
except Exception as error:
    print(type(error).__name__, error)
"""
    nothing = str(tmp_path / "no_driver.json")
    env = {**os.environ, "VK_DRIVER_FILES": nothing, "VK_ICD_FILENAMES": nothing}
    env.pop(vulkan._REMEMBERED, None)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("MissingDependency SAPIEN cannot draw with VK_DRIVER_FILES"), (
        run.stdout
    )


@needs_sapien
def test_observations_fit_the_embodiment(simulator) -> None:
    task = TASKS["lift_both"]
    observation = simulator.start(0, EpisodeSpec("lift_both", 0, instruction_index=1))
    spec = simulator.embodiment
    assert spec.action_dim == 14 and spec.frame == "joints" and spec.gripper == "0 close, 1 open"
    assert (
        observation.proprio.shape == (spec.proprio_dim,) and observation.proprio.dtype == np.float32
    )
    # episodes start with open grippers
    np.testing.assert_allclose(observation.proprio[[6, 13]], 1.0, atol=1e-3)
    np.testing.assert_allclose(observation.proprio[:6], kinematics.home("left"), atol=1e-3)
    poses = place_things(task, 0, "train")
    np.testing.assert_allclose(observation.proprio[14:16], poses["red_block"][:2], atol=1e-3)
    assert (
        observation.privileged.shape == (PRIVILEGED_DIM,)
        and observation.privileged.dtype == np.float32
    )
    assert observation.instruction == task.spec.instructions[1]
    held_out = simulator.start(
        0, EpisodeSpec("lift_both", 0, split="held_out", instruction_index=1)
    )
    assert held_out.instruction == task.spec.held_out_instructions[1]


@needs_sapien
@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_the_task_under_noise(simulator, task: str) -> None:
    rng = np.random.default_rng(3)
    noise = 0.1 * MAX_STEP * np.tile([1.0] * 6 + [0.0], 2)
    for init_state_id in range(2):
        episode = EpisodeSpec(task, init_state_id, split="held_out")
        _, step = expert_run(
            simulator, episode, change=lambda _, a: a + noise * rng.standard_normal(14)
        )
        assert step.success and step.terminated and not step.truncated and step.failure == ""
        assert step.rewards.tolist() == [1.0] and step.observation.privileged[-1] == 1.0


@needs_sapien
def test_positions_as_actions_do_what_steps_do() -> None:
    simulator = state_only(control="joint_position", tasks=["lift_bar"])
    actions, step = expert_run(simulator, EpisodeSpec("lift_bar", 0))
    assert step.success
    np.testing.assert_allclose(actions[0][:6], kinematics.home("left"), atol=MAX_STEP + 1e-3)
    assert simulator.embodiment.action_low[0] == kinematics.LOW[0]
    far = np.tile(np.float64(simulator.embodiment.action_high), (1, 1))
    simulator.start(0, EpisodeSpec("lift_bar", 0))
    before = simulator.world(0).command.copy()
    simulator.step(0, far)
    moved = simulator.world(0).command[:, :6] - before[:, :6]
    np.testing.assert_allclose(moved, MAX_STEP, atol=1e-6)  # however far away, no faster than that


@needs_sapien
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.arms == 2])
@pytest.mark.parametrize("frozen", [0, 1], ids=["left_frozen", "right_frozen"])
def test_one_arm_cannot_do_what_needs_two(simulator, task: str, frozen: int) -> None:
    def freeze(_, action):
        action = action.copy()
        action[7 * frozen : 7 * frozen + 6] = 0.0
        return action

    _, step = expert_run(simulator, EpisodeSpec(task, 0), change=freeze)
    assert not step.success


@needs_sapien
def test_a_bar_that_is_lifted_by_one_end_is_not_lifted(simulator) -> None:
    """Even by an expert that takes what it holds with one hand up at once."""
    simulator.start(0, EpisodeSpec("lift_bar", 0))
    expert = simulator.demonstrator(0)
    expert._grasps[1].check = lambda state: True
    highest = 0.0
    for _ in range(TASKS["lift_bar"].spec.horizon):
        command = expert.act(simulator.state(0))
        command[1] = simulator.world(0).command[1]
        if expert._grasps[0].holds:
            hand = expert._hands[0]
            up = simulator.state(0).hand(0) + kinematics.above(0.02)
            command[0] = hand.go(
                simulator.state(0), up, expert._grasps[0].yaw(simulator.state(0)), 0.0
            )
        step = simulator.step(0, simulator.action(0, command)[None])
        highest = max(highest, float(simulator.state(0).hand(0)[2]))
        if step.truncated:
            break
    assert highest > 0.09 and not step.success


def never_closes(_, action):
    return np.where(np.arange(14) % 7 == 6, 1.0, action)


def lets_go_above(limit):
    """Opens for good once the target was ``limit`` metres high, and moves no more."""

    def change(highest, action):
        return np.where(np.arange(14) % 7 == 6, 1.0, 0.0) if highest > limit else action

    return change


@needs_sapien
@pytest.mark.parametrize(
    ("task", "change", "kind"),
    [
        ("stack_red", lambda _, action: 0.0 * action, "never_reached"),
        ("stack_red", never_closes, "missed_grasp"),
        ("stack_red", lets_go_above(0.012), "wrong_place"),
        ("lift_both", lets_go_above(0.03), "dropped"),
        ("lift_bar", never_closes, "missed_grasp"),
        ("ring_red", lambda _, action: 0.0 * action, "never_reached"),
    ],
)
def test_an_episode_that_fails_says_how(simulator, task: str, change, kind: str) -> None:
    _, step = expert_run(simulator, EpisodeSpec(task, 1), change=change)
    assert not step.success and step.failure == kind


@needs_sapien
@pytest.mark.parametrize(
    ("task", "other"), [("ring_red", "ring_blue"), ("stack_red", "stack_blue")]
)
def test_language_decides_in_a_shared_scene(simulator, task: str, other: str) -> None:
    """The expert for the other thing fails, and the verdict says so."""
    simulator.start(0, EpisodeSpec(task, 2))
    expert = make_demonstrator(other, simulator.state(0))
    while True:
        step = simulator.step(0, simulator.action(0, expert.act(simulator.state(0)))[None])
        if step.terminated or step.truncated:
            break
    assert not step.success and step.failure == "wrong_object"


@needs_sapien
def test_joint_states_depend_on_episode_and_actions_alone(simulator) -> None:
    """Not on the slot, the chunking, what ran before or runs in between, nor on the process's
    history."""
    episode = EpisodeSpec("stack_blue", 11, split="held_out")
    actions, _ = expert_run(simulator, episode)
    reference = []
    simulator.start(0, episode)
    for action in actions:
        simulator.step(0, action[None])
        reference.append(simulator.world(0).state())
    simulator.start(7, EpisodeSpec("lift_bar", 2))
    rng, at = np.random.default_rng(5), 0
    simulator.start(3, EpisodeSpec("hand_over", 4))
    simulator.step(3, rng.uniform(-MAX_STEP, MAX_STEP, (10, 14)))
    simulator.start(3, episode)
    for i in range(0, len(actions), 7):
        simulator.step(7, rng.uniform(-MAX_STEP, MAX_STEP, (1, 14)))
        at += simulator.step(3, actions[i : i + 7]).executed
        np.testing.assert_array_equal(simulator.world(3).state(), reference[at - 1])
    fresh = state_only(tasks=["stack_blue"])
    fresh.start(0, episode)
    step = fresh.step(0, actions)
    assert step.success and step.executed == len(actions) == at
    np.testing.assert_array_equal(fresh.world(0).state(), reference[-1])


@needs_sapien
def test_a_slots_world_goes_with_its_episode(simulator) -> None:
    """At once, not when Python next collects garbage: hundreds of worlds would wait for that."""
    gc.collect()
    gc.disable()
    try:
        simulator.start(5, EpisodeSpec("lift_bar", 0))
        simulator.step(5, np.zeros((3, 14)))
        world = weakref.ref(simulator.world(5))
        simulator.start(5, EpisodeSpec("lift_bar", 1))
        assert world() is None
    finally:
        gc.enable()


@needs_sapien
def test_bad_actions(simulator) -> None:
    simulator.start(0, EpisodeSpec("lift_bar", 0))
    with pytest.raises(ValueError, match="finite"):
        simulator.step(0, np.full((2, 14), np.nan))
    with pytest.raises(ValueError, match=r"\[h, 14\]"):
        simulator.step(0, np.zeros((2, 7)))
    with pytest.raises(ValueError, match="slot 99"):
        simulator.step(99, np.zeros((1, 14)))
    with pytest.raises(ConfigError, match="juggle"):
        simulator.start(0, EpisodeSpec("juggle", 0))


# --------------------------------------------------------------------------------------- the mirror
def in_the_mirror(simulator, monkeypatch, slot: int, episode: EpisodeSpec):
    """Start the episode with everything at the mirror image, in the plane x = 0, of its place;
    the first observation."""

    def place(*arguments):
        return {
            name: pose * [-1.0, 1.0, 1.0, -1.0] for name, pose in place_things(*arguments).items()
        }

    with monkeypatch.context() as patch:
        patch.setattr("sim.dualarm.simulator.place_things", place)
        return simulator.start(slot, episode)


@needs_sapien
@pytest.mark.parametrize("control", ["joint_delta", "joint_position"])
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.symmetric])
def test_a_mirrored_demonstration_does_the_same_in_the_mirrored_scene(
    monkeypatch, task: str, control: str
) -> None:
    simulator, rng = state_only(tasks=[task], control=control), np.random.default_rng(1)
    spec, noise = simulator.embodiment, 0.1 * MAX_STEP * np.tile([1.0] * 6 + [0.0], 2)
    (order, signs), (places, turns) = (
        spec.mirror.of(names) for names in (spec.action_names, spec.proprio_names)
    )
    # where things touch, rounding counts: of 32 states tried one failed in the mirror
    episode = EpisodeSpec(task, 1)
    actions, step = expert_run(
        simulator, episode, change=lambda _, a: a + noise * rng.standard_normal(14)
    )
    assert step.success
    first = simulator.start(0, episode)
    other = in_the_mirror(simulator, monkeypatch, 1, episode)
    np.testing.assert_allclose(other.proprio[places] * turns, first.proprio, atol=1e-5)
    assert not np.allclose(other.proprio, first.proprio, atol=0.01)
    for chunk in np.split(actions[:4], 2):  # nothing is touched yet, nor are grippers that close
        ours, theirs = simulator.step(0, chunk), simulator.step(1, chunk[:, order] * signs)
    np.testing.assert_allclose(
        theirs.observation.proprio[places] * turns, ours.observation.proprio, atol=1e-4
    )
    assert simulator.step(1, actions[4:, order] * signs).success


@needs_sapien
def test_the_mirrors_pictures_are_flipped_but_for_the_light(drawing, monkeypatch) -> None:
    simulator = pictured(
        tasks=["lift_bar", "ring_red"], cameras=["head", "left_wrist", "right_wrist"]
    )
    spec, episode = simulator.embodiment, EpisodeSpec("ring_red", 1)
    actions = np.random.default_rng(0).uniform(-MAX_STEP, MAX_STEP, (8, 14))
    simulator.start(0, episode)
    in_the_mirror(simulator, monkeypatch, 1, episode)
    order, signs = spec.mirror.of(spec.action_names)
    images = [
        simulator.step(slot, a).observation.images
        for slot, a in ((0, actions), (1, actions[:, order] * signs))
    ]
    names = spec.camera_names
    for partner, name in zip(spec.mirror.of(names)[0], names):
        ours, theirs = images[0][name].astype(int), images[1][names[partner]].astype(int)
        # one light comes from the left, one from the right
        apart = np.abs(theirs[:, ::-1] - ours).mean()
        assert apart < 4.0 and apart < 0.3 * np.abs(theirs - ours).mean()


@needs_sapien
def test_only_what_is_symmetric_has_a_mirror() -> None:
    mirrors = [
        pictured(**options).embodiment.mirror is not None
        for options in (
            {"tasks": ["lift_bar"]},
            {"tasks": ["lift_bar", "hand_over"]},
            {"tasks": ["place_cup"]},
            {"tasks": ["lift_bar"], "cameras": ["head", "left_wrist"]},
        )
    ]
    assert mirrors == [True, False, False, False]


# ----------------------------------------------------------------------------------------- pictures
@needs_sapien
def test_the_simulator_contract(drawing) -> None:
    check_simulator(
        lambda: pictured(
            tasks=["stack_red", "hand_over"], cameras=["head", "right_wrist"], horizon=20
        )
    )


@needs_sapien
@pytest.mark.slow
def test_the_pool_shows_what_one_process_shows(drawing) -> None:
    make = functools.partial(pictured, tasks=["lift_bar", "ring_red"])
    with ProcessPool(make, 2, 2, max_chunk_length=8) as pool:
        check_env(pool, make, chunk_length=5)


@needs_sapien
@pytest.mark.slow
def test_after_a_workers_crash_episodes_end_as_they_would_have() -> None:
    """State for state: a worker is killed while both of its slots are in mid-episode; its
    successor runs them again."""
    make, rng = (
        functools.partial(state_only, tasks=["stack_red", "lift_bar"]),
        np.random.default_rng(0),
    )
    episodes = [EpisodeSpec("lift_bar", 4), EpisodeSpec("stack_red", 7)]
    plan = rng.uniform(-MAX_STEP, MAX_STEP, (2, 3, 10, 14)).astype(np.float32)
    alone = make()
    expected = []
    for slot, episode in enumerate(episodes):
        alone.start(slot, episode)
        expected.append([alone.step(slot, chunk) for chunk in plan[slot]])

    def together(pool: ProcessPool, send) -> list:
        for slot in (0, 1):
            send(slot)
        events = {}
        while len(events) < 2:
            events |= {event.slot: event for event in pool.poll(timeout=120.0)}
        return [events[slot] for slot in (0, 1)]

    with ProcessPool(make, 1, 2, max_chunk_length=10) as pool:
        together(pool, lambda slot: pool.start(slot, episodes[slot]))
        together(pool, lambda slot: pool.step(slot, plan[slot, 0]))
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        assert all(
            event.error for event in together(pool, lambda slot: pool.step(slot, plan[slot, 1]))
        )
        together(pool, lambda slot: pool.start(slot, episodes[slot]))
        for chunk in range(3):
            for slot, event in enumerate(
                together(pool, lambda slot, chunk=chunk: pool.step(slot, plan[slot, chunk]))
            ):
                assert_same_step(event.step, expected[slot][chunk])
        assert pool.workers[0].restarts == 1


@needs_sapien
def test_pictures_repeat_and_slots_share_one_renderer(drawing) -> None:
    simulator = pictured(cameras=["head", "left_wrist"])
    rng = np.random.default_rng(0)
    episode, actions = EpisodeSpec("place_cup", 5), rng.uniform(-MAX_STEP, MAX_STEP, (8, 14))
    first, step = simulator.start(0, episode), simulator.step(0, actions)
    drawn = simulator._pictures
    for slot, between in ((1, "ring_red"), (0, "lift_bar"), (6, "stack_blue")):
        simulator.start(slot + 1, EpisodeSpec(between, 3))
        assert_same_observation(first, simulator.start(slot, episode))
        simulator.step(slot + 1, actions[:3])
        assert_same_step(step, simulator.step(slot, actions))
    assert simulator._pictures is drawn, "a reset must not rebuild the renderer"
    assert first.images["head"].shape == (48, 64, 3) and first.images["head"].std() > 10
    red = simulator.start(0, EpisodeSpec("ring_red", 0)).images["head"].astype(int)
    assert ((red[..., 0] > 150) & (red[..., 1] < 100)).sum() >= 6, "the red bell can be seen"


@needs_sapien
@pytest.mark.slow
def test_a_pack_without_the_table_draws_the_same(drawing) -> None:
    """Against SAPIEN's own pack, in a process each: what the table weighs is black."""
    code = """
import sys, numpy as np
from sim import shaders
from sim.dualarm.simulator import DualArmSimulator, DualArmConfig
from vla_rl.specs import EpisodeSpec
if sys.argv[1] == "own":
    shaders.without_table = lambda text: text
simulator = DualArmSimulator(DualArmConfig(camera_size=48, camera_width=64, tasks=["lift_bar"]))
sys.stdout.buffer.write(simulator.start(0, EpisodeSpec("lift_bar", 0)).images["head"].tobytes())
"""
    runs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, how], capture_output=True, timeout=280
        )
        for how in ("own", "copy")
    ]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout and len(set(runs[0].stdout)) > 50


@needs_sapien
def test_the_benchmark_steps_all_ways_through_the_same_pictures(drawing) -> None:
    config = DualArmConfig(
        camera_size=48, camera_width=64, tasks=["lift_bar", "ring_red"], horizon=10**6
    )
    document = bench(
        functools.partial(DualArmSimulator, config), Asked(config, 2, 4, resets=5), (measured,), [1]
    )
    assert (
        document["decisions"] == 12
        and set(document["identical"].values()) == {12}
        and len(document["identical"]) == 2
    )
    assert set(document["ms_per_step"]) == set(document["ms_reset"]) == set(document["mb_per_slot"])
    for name, ratio in document["ratios"]["ms_reset"].items():
        assert ratio == document["ms_reset"][name] / document["ms_reset"][OURS] > 0
    assert (
        document["resets"] == len(document["mb_over_resets"]) == 5
        and min(document["mb_over_resets"]) > 50
    )
    assert document["pool"]["1"]["steps_per_second"] > 0
    assert all(part in text(document) for part in ("12 of 12", "MB over 5 resets", "pool of 1"))


@needs_sapien
def test_demonstrations_become_a_dataset(drawing, tmp_path) -> None:
    config = CollectConfig(episodes_per_task=2, action_noise=0.1, workers=1)
    env = DualArmConfig(camera_size=48, camera_width=64, tasks=["ring_red"])
    counts = collect_demonstrations(
        "dualarm",
        env,
        ["ring_red"],
        config,
        seed=0,
        dataset=functools.partial(DemonstrationWriter, tmp_path / "data"),
        progress=lambda *_, **__: None,
    )
    assert counts["episodes"] == 2
    embodiment = DualArmSimulator(env).embodiment
    data = load_demonstrations(tmp_path / "data", expected_embodiment=embodiment)
    assert data.embodiment == embodiment and len(data.episodes) == 2
