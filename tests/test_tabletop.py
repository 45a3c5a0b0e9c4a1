"""The embedded suite: tasks and placements, the Simulator contract, demonstrators, looks,
collection, benchmark."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sim import gl
from sim.inline import run_request
from sim.tabletop.collect import collect_episode
from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from sim.tabletop.tasks import OBJECTS, PRIVILEGED_DIM, SCENES, STAGES, TASKS, place_objects
from vla_rl import splits
from vla_rl.errors import ConfigError, MissingDependency
from vla_rl.interfaces import Simulator
from vla_rl.specs import EpisodeSpec, Instead

real_sim = pytest.mark.real_sim
SIZE = 24


@pytest.fixture(scope="module")
def simulator():
    """One simulator with all tasks for the whole file; tests must leave nothing that others
    would see."""
    simulator = TabletopSimulator(TabletopConfig(tasks=list(TASKS), camera_size=SIZE))
    yield simulator
    simulator.close()


def expert_run(simulator, episode: EpisodeSpec, slot: int = 0, noise: float = 0.0):
    """Executed actions [t a] and the last `SlotStep`."""
    simulator.start(slot, episode)
    expert, rng = (
        simulator.demonstrator(episode.task_id),
        np.random.default_rng(episode.init_state_id),
    )
    half_range, actions = np.array(simulator.embodiment.action_high), []
    while True:
        action = expert.act(simulator.state(slot))
        action[:-1] += noise * half_range[:-1] * rng.standard_normal(len(action) - 1)
        actions.append(action)
        step = simulator.step(slot, action[None])
        if step.terminated or step.truncated:
            return np.array(actions), step


# --------------------------------------------------------------------------------- tasks and config
def test_tasks_are_well_formed() -> None:
    assert len(TASKS) >= 6
    for task in TASKS.values():
        assert (
            len(set(task.spec.instructions)) >= 3 and len(set(task.spec.held_out_instructions)) >= 2
        )
        assert not set(task.spec.instructions) & set(task.spec.held_out_instructions)
        assert task.target in SCENES[task.scene].objects
        assert task.kind in ("lift", "stack", "place")
        assert (task.kind == "stack") == (task.goal is not None)
        assert task.kind != "place" or SCENES[task.scene].zone is not None
    texts = [
        text
        for task in TASKS.values()
        for text in task.spec.instructions + task.spec.held_out_instructions
    ]
    assert all(text == text.lower().strip() for text in texts)
    for scene in SCENES:
        specs = [task.spec for task in TASKS.values() if task.scene == scene]
        named = [text for spec in specs for text in spec.instructions + spec.held_out_instructions]
        assert len(named) == len(set(named)), "within a scene an instruction must name one task"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_placements_of_the_splits_are_disjoint_and_apart(task) -> None:
    cells = {"train": set(), "held_out": set()}
    for split in cells:
        for i in range(100):
            poses = place_objects(task, i, split)
            assert set(poses) == set(SCENES[task.scene].objects)
            again = place_objects(task, i, split)
            assert all(np.array_equal(poses[name], again[name]) for name in poses)
            for x, y, _, yaw in poses.values():
                assert (
                    task.region[0] <= x <= task.region[2] and task.region[1] <= y <= task.region[3]
                )
                assert abs(yaw) <= task.max_yaw
                cells[split].add(splits.cell_of(x, y))
            for other in task.others:
                distance = np.abs(poses[task.target][:2] - poses[other][:2])
                assert np.any(distance >= task.apart)
    assert len(cells["train"]) > 50 and len(cells["held_out"]) > 20
    assert not cells["train"] & cells["held_out"]


def test_a_scenes_tasks_begin_alike() -> None:
    for scene in SCENES:
        begun = [place_objects(task, 7, "train") for task in TASKS.values() if task.scene == scene]
        for poses in begun[1:]:
            for name, pose in poses.items():
                assert tuple(pose) == tuple(begun[0][name])
    here, there = (place_objects(TASKS["lift_red"], i, "train")["red_cube"] for i in (7, 8))
    assert here[0] != there[0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tasks": ["juggle"]}, "juggle"),
        ({"tasks": []}, r"env.tasks=\[\] is empty: it must have 1 or more"),
        ({"controller": "joint"}, "osc_pose"),
        ({"look": "pretty"}, "full"),
        ({"cameras": ["selfie"]}, "agentview"),
        ({"camera_size": 4}, "camera_size=4 .* 16 to 2048"),
        ({"success_hold": 0}, "success_hold=0 .* 1 or more"),
    ],
)
def test_bad_config_is_one_clear_error(options: dict, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        TabletopConfig(**options)


# --------------------------------------------------------------------------------------- GL backend
def test_the_users_backend_is_kept(monkeypatch) -> None:
    tried: list[str] = []
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.delenv(gl._REMEMBERED, raising=False)
    monkeypatch.setattr(gl, "probe_backend", tried.append)
    assert gl.choose_backend() == "osmesa" and tried == ["osmesa"]
    monkeypatch.setenv(gl._REMEMBERED, "osmesa")  # a parent process has tried it
    assert gl.choose_backend() == "osmesa" and tried == ["osmesa"]


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("osmesa", r"cannot render off-screen here \(no such library\).*libosmesa6"),
        ("glfw", "MUJOCO_GL=glfw draws in a window, and there is no display"),
        ("GLX", "MUJOCO_GL=glx draws in a window"),
        ("disabled", "switches rendering off"),
        ("vulkan", "is no OpenGL backend.*Unset MUJOCO_GL"),
    ],
)
def test_a_backend_of_the_users_that_cannot_draw_is_named_with_the_remedy(
    monkeypatch, backend, part
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", gl._REMEMBERED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", backend)
    monkeypatch.setattr(gl, "probe_backend", lambda backend: "no such library")
    with pytest.raises(MissingDependency, match=part):
        gl.choose_backend()
    monkeypatch.setenv("DISPLAY", ":0")
    if backend == "glfw":
        assert gl.choose_backend() == "glfw"


def test_the_first_backend_that_works_is_chosen_and_none_is_a_clear_error(monkeypatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv(gl._REMEMBERED, raising=False)
    monkeypatch.setattr(
        gl, "probe_backend", lambda backend: None if backend == "osmesa" else "no device"
    )
    assert gl.choose_backend() == "osmesa"
    monkeypatch.setattr(gl, "probe_backend", lambda backend: "no device")
    with pytest.raises(MissingDependency, match="libegl1"):
        gl.choose_backend()


@real_sim
def test_probe_tells_what_is_missing(monkeypatch) -> None:
    assert any(gl.probe_backend(backend) is None for backend in gl.CANDIDATES)
    monkeypatch.setitem(gl._PROBES, "egl", "raise OSError('libEGL.so.1: no such file')")
    assert "libEGL.so.1" in gl.probe_backend("egl")


# --------------------------------------------------------------------------- the Simulator contract
@real_sim
def test_observations_fit_the_embodiment(simulator) -> None:
    assert isinstance(simulator, Simulator)
    spec = simulator.embodiment
    observation = simulator.start(0, EpisodeSpec("lift_cube", 0, instruction_index=1))
    assert set(observation.images) == set(spec.camera_names)
    for image in observation.images.values():
        assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.uint8 and image.std() > 5
    assert (
        observation.proprio.shape == (spec.proprio_dim,) and observation.proprio.dtype == np.float32
    )
    assert 0.9 < observation.proprio[3] <= 1.0, "episodes start with an open gripper"
    assert observation.privileged.shape == (simulator.privileged_dim,) == (PRIVILEGED_DIM,)
    assert observation.privileged.dtype == np.float32 and np.isfinite(observation.privileged).all()
    assert observation.instruction == TASKS["lift_cube"].spec.instructions[1]
    held_out = simulator.start(
        0, EpisodeSpec("lift_cube", 0, split="held_out", instruction_index=1)
    )
    assert held_out.instruction == TASKS["lift_cube"].spec.held_out_instructions[1]


@real_sim
def test_an_episode_begins_along_a_demonstration(simulator) -> None:
    """What was sent, noise and all, leads to the demonstration's own states; its clean labels do
    not."""
    episode = EpisodeSpec("stack_cubes", 1, seed=5)
    shown = collect_episode(simulator, episode, noise_std=0.3)
    steps = len(shown["actions"]) - 5
    shown |= shown["extra"]
    begun = {
        name: run_request(
            simulator,
            1,
            replace(episode, lead=tuple(map(tuple, shown[name][:steps].tolist()))),
            None,
        )
        for name in ("actions", "sent")
    }
    assert np.abs(begun["sent"].proprio - shown["proprio"][steps]).max() < 1e-4
    assert (
        np.abs(
            begun["sent"].images["agentview"].astype(int) - shown["images"]["agentview"][steps]
        ).mean()
        < 0.5
    )
    assert np.abs(begun["actions"].proprio - shown["proprio"][steps]).max() > 0.01
    step = simulator.step(1, shown["sent"][steps:])
    assert step.success and step.executed == 5


@real_sim
@pytest.mark.parametrize("task", TASKS)
def test_demonstrator_solves_the_task_under_noise(simulator, task: str) -> None:
    successes = 0
    for init_state_id in range(2):
        _, step = expert_run(simulator, EpisodeSpec(task, init_state_id), noise=0.3)
        successes += step.success
        assert step.success == step.terminated != step.truncated
        assert step.rewards.tolist() == [float(step.success)]
        assert np.all(np.abs(step.observation.privileged) < 5.0)
        assert step.observation.privileged[-1] == float(step.success), STAGES
    assert successes == 2


@real_sim
def test_language_decides_in_a_shared_scene(simulator) -> None:
    """The expert for the green cube, in an episode that asks for the red one, does not succeed."""
    simulator.start(0, EpisodeSpec("lift_red", 0))
    expert = simulator.demonstrator("lift_green")
    for _ in range(45):
        step = simulator.step(0, expert.act(simulator.state(0))[None])
        assert not step.terminated
    assert simulator.state(0).position("green_cube")[2] > 0.86


def never_closes(highest, action):
    return action * [1, 1, 1, 0] - [0, 0, 0, 1]


def up_and(gripper, limit):
    """Straight up once it is lifted; once it was ``limit`` metres high the hand stops, with
    ``gripper`` as its command."""

    def change(highest, action):
        if highest > limit:
            return np.array([0.0, 0.0, 0.0, gripper])
        return np.array([0.0, 0.0, 0.05, 1.0]) if highest > 0.01 else action

    return change


@real_sim
@pytest.mark.parametrize(
    ("task", "expert", "change", "kind"),
    [
        ("lift_cube", "lift_cube", lambda highest, action: 0 * action, "never_reached"),
        ("lift_cube", "lift_cube", never_closes, "missed_grasp"),
        ("lift_cube", "lift_cube", up_and(-1.0, 0.015), "dropped"),
        ("lift_red", "lift_green", lambda highest, action: action, "wrong_object"),
        ("place_can", "place_can", up_and(-1.0, 0.12), "dropped"),
        ("place_can", "place_can", up_and(-1.0, 0.015), "wrong_place"),
        ("place_can", "place_can", up_and(1.0, 0.05), "out_of_time"),
    ],
    ids=["still", "open", "let_go", "other", "let_go_high", "let_go_low", "hold"],
)
def test_an_episode_that_fails_says_how(
    simulator, task: str, expert: str, change, kind: str
) -> None:
    """Experts whose actions are changed, by how high they have lifted (m)."""
    simulator.start(0, EpisodeSpec(task, 1))
    demonstrator, target, highest = simulator.demonstrator(expert), TASKS[expert].target, 0.0
    rest, instead = simulator.state(0).position(target)[2], None
    while True:
        view = simulator.state(0)
        highest = max(highest, view.position(target)[2] - rest)
        step = simulator.step(0, change(highest, demonstrator.act(view))[None])
        if step.terminated or step.truncated:
            break
        assert step.failure == ""
        instead = instead or step.instead
    assert not step.success and step.failure == kind
    solved = Instead("lift_green", TASKS["lift_green"].spec.instructions[0])
    assert instead == (solved if kind == "wrong_object" else None)


@real_sim
def test_a_success_has_no_failure(simulator) -> None:
    _, step = expert_run(simulator, EpisodeSpec("place_can", 1))
    assert step.success and step.failure == ""


@real_sim
def test_outcome_depends_on_episode_and_actions_alone(simulator) -> None:
    """Not on the slot, on what ran before, on the chunking, on what runs in between, nor on the
    process's history."""
    episode = EpisodeSpec("lift_cube", 11, split="held_out")
    actions, _ = expert_run(simulator, episode, slot=0, noise=0.2)
    reference = []
    simulator.start(0, episode)
    for action in actions:
        step = simulator.step(0, action[None])
        reference.append((simulator.physics(0).qpos.copy(), step.observation))
    rng = np.random.default_rng(5)
    simulator.start(7, EpisodeSpec("place_can", 2))
    simulator.start(3, EpisodeSpec("lift_cube", 4))
    simulator.step(3, rng.uniform(-0.05, 0.05, (20, 4)) * [1, 1, 1, 20])
    first = simulator.start(3, episode)
    chunks = [actions[i : i + 5] for i in range(0, len(actions), 5)]
    at = 0
    for chunk in chunks:
        simulator.step(7, rng.uniform(-0.05, 0.05, (2, 4)))
        step = simulator.step(3, chunk)
        at += step.executed
        qpos, observation = reference[at - 1]
        np.testing.assert_array_equal(simulator.physics(3).qpos, qpos)
        np.testing.assert_array_equal(step.observation.privileged, observation.privileged)
        for name, image in observation.images.items():
            np.testing.assert_array_equal(step.observation.images[name], image)
    assert step.terminated and at == len(actions)
    fresh = TabletopSimulator(TabletopConfig(camera_size=SIZE))
    again = fresh.start(0, episode)
    np.testing.assert_array_equal(again.privileged[:8], first.privileged[:8])
    np.testing.assert_array_equal(again.images["agentview"], first.images["agentview"])
    step = fresh.step(0, actions)
    assert step.success and step.executed == len(actions)
    np.testing.assert_array_equal(fresh.physics(0).qpos, reference[-1][0])
    fresh.close()


@real_sim
def test_an_episode_stops_at_success_and_at_the_horizon() -> None:
    simulator = TabletopSimulator(TabletopConfig(camera_size=SIZE, horizon=6))
    simulator.start(0, EpisodeSpec("lift_cube", 0))
    step = simulator.step(0, np.zeros((4, 4)))
    assert (step.executed, step.terminated, step.truncated) == (4, False, False)
    step = simulator.step(0, np.zeros((4, 4)))
    assert (step.executed, step.terminated, step.truncated, step.success) == (2, False, True, False)
    assert step.rewards.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="start"):
        simulator.step(0, np.zeros((1, 4)))
    simulator.close()
    with pytest.raises(ValueError, match="closed"):
        simulator.start(0, EpisodeSpec("lift_cube", 0))


@real_sim
def test_bad_actions(simulator) -> None:
    simulator.start(0, EpisodeSpec("lift_cube", 0))
    with pytest.raises(ValueError, match="finite"):
        simulator.step(0, np.full((2, 4), np.nan))
    with pytest.raises(ValueError, match=r"\[h, 4\]"):
        simulator.step(0, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="slot 99"):
        simulator.step(99, np.zeros((1, 4)))
    with pytest.raises(ConfigError, match="juggle"):
        simulator.start(0, EpisodeSpec("juggle", 0))
    wild = np.array([[7.0, -7.0, 0.3, 5.0]] * 3)
    simulator.step(0, wild)
    simulator.start(1, EpisodeSpec("lift_cube", 0))
    simulator.step(
        1, np.clip(wild, simulator.embodiment.action_low, simulator.embodiment.action_high)
    )
    np.testing.assert_array_equal(simulator.physics(0).qpos, simulator.physics(1).qpos)


@real_sim
def test_looks_share_the_physics_but_not_the_pixels(simulator) -> None:
    full = TabletopSimulator(TabletopConfig(camera_size=SIZE, look="full", cameras=["agentview"]))
    actions = np.random.default_rng(0).uniform(-0.05, 0.05, (30, 4)) * [1, 1, 1, 20]
    actions[:, 2] = -0.03  # down onto the table, so that contacts count
    images = []
    for s in (simulator, full):
        s.start(0, EpisodeSpec("lift_cube", 1))
        images.append(s.step(0, actions).observation.images["agentview"].astype(float))
    np.testing.assert_array_equal(simulator.physics(0).qpos, full.physics(0).qpos)
    assert 1.0 < np.abs(images[0] - images[1]).mean() < 60.0
    full.close()


@real_sim
def test_slots_of_a_scene_share_one_model_and_keep_their_states_apart(simulator) -> None:
    first, second = EpisodeSpec("lift_red", 1), EpisodeSpec("stack_cubes", 2)
    simulator.start(0, first)
    simulator.start(1, second)
    names = [scene.name for scene in simulator.scenes()]
    assert len(names) == len(set(names))
    before = simulator.physics(1).qpos.copy()
    simulator.step(0, np.full((5, 4), 0.05))
    np.testing.assert_array_equal(simulator.physics(1).qpos, before)


@real_sim
def test_collected_episode_has_clean_labels(simulator) -> None:
    from sim.tabletop.collect import collect_episode

    episode = EpisodeSpec("lift_cube", 5)
    data = collect_episode(simulator, episode, noise_std=0.3, rng=np.random.default_rng(1))
    count = len(data["actions"])
    assert data["success"] and (data["task_id"], data["init_state_id"]) == ("lift_cube", 5)
    assert set(data["images"]) == set(simulator.embodiment.camera_names)
    assert {images.shape for images in data["images"].values()} == {(count, SIZE, SIZE, 3)}
    assert data["proprio"].shape == (count, 4) and data["actions"].shape == (count, 4)
    assert np.all(
        np.abs(data["actions"]) <= np.array(simulator.embodiment.action_high, dtype=np.float32)
    )
    assert set(np.unique(data["actions"][:, 3])) == {-1.0, 1.0}
    again = collect_episode(simulator, episode, noise_std=0.3, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(data["actions"], again["actions"])
    slow = collect_episode(simulator, episode, speed=0.5)
    assert (
        np.abs(slow["actions"][:, :3]).max() <= 0.5 * 0.05 + 1e-6
        and np.abs(slow["actions"][:, -1]).max() == 1.0
    )
    clean = collect_episode(simulator, episode)
    np.testing.assert_array_equal(clean["proprio"][0], data["proprio"][0])
    assert not np.array_equal(clean["proprio"][3], data["proprio"][3])


@real_sim
def test_osc_pose_demonstrator_and_proprio() -> None:
    simulator = TabletopSimulator(TabletopConfig(camera_size=SIZE, controller="osc_pose"))
    observation = simulator.start(0, EpisodeSpec("lift_cube", 0))
    assert simulator.embodiment.action_dim == 7 and observation.proprio.shape == (8,)
    assert np.linalg.norm(observation.proprio[4:]) == pytest.approx(1.0, abs=1e-5)
    _, step = expert_run(simulator, EpisodeSpec("lift_cube", 0), noise=0.1)
    assert step.success
    simulator.close()


@real_sim
@pytest.mark.slow
def test_bench_compares_both_sides_on_the_same_actions() -> None:
    from benchmarks.simulator import tabletop as bench

    document = bench.measure(tasks=["lift_cube"], chunk=8, workers=[], steps=16, camera_size=SIZE)
    assert json.loads(json.dumps(document)) == document
    assert document["pixels"]["identical"] == document["pixels"]["decisions"] == 2
    assert document["pixels"]["largest_qpos_difference"] < 1e-9
    assert document["simulator"]["ms_per_step"] > 0 and document["plain"]["ms_per_step"] > 0
    assert "control steps/s" in bench.text(document)
    with pytest.raises(ConfigError, match="chunk"):
        bench.measure(tasks=["lift_cube"], chunk=0)


def test_every_object_belongs_to_a_scene() -> None:
    used = {name for scene in SCENES.values() for name in scene.objects}
    assert used == set(OBJECTS)


# --------------------------------------------------------------------------------------- the mirror
@real_sim
@pytest.mark.parametrize("controller", ["osc_position", "osc_pose"])
def test_the_mirrored_arm_in_the_mirrored_scene_does_the_mirrored_thing(controller) -> None:
    simulator = TabletopSimulator(
        TabletopConfig(tasks=["lift_cube"], camera_size=48, controller=controller)
    )
    try:
        mirror, spec = simulator.embodiment.mirror, simulator.embodiment
        actions = (
            np.random.default_rng(0).uniform(-0.6, 0.6, (24, spec.action_dim)) * spec.action_high
        )
        actions[:, 2] = 0.0  # stays above the table
        seen = []
        for side in ("as it is", "mirrored"):
            simulator.start(0, EpisodeSpec("lift_cube", 3, rollout_id=side))
            data = simulator.physics(0)
            x, y, z, *turn = data.qpos[9:16]
            if side == "mirrored":  # a rotation (w, x, y, z) seen in the mirror y = 0
                data.qpos[9:16] = [x, -y, z, turn[0], -turn[1], turn[2], -turn[3]]
                actions = actions * mirror.of(spec.action_names)[1]
            for chunk in np.split(actions, 3):
                step = simulator.step(0, chunk)
            seen.append(step.observation)
        plain, other = seen
        moved = np.abs(plain.proprio[1])
        assert moved > 0.005, "it went sideways"
        order, signs = mirror.of(spec.proprio_names)
        np.testing.assert_allclose(other.proprio, plain.proprio[order] * signs, atol=0.1 * moved)
        hand = "robot0_eye_in_hand"
        same = np.abs(other.images[hand][:, ::-1].astype(int) - plain.images[hand]).mean()
        assert same < 0.2 * np.abs(other.images[hand].astype(int) - plain.images[hand]).mean()
    finally:
        simulator.close()


def test_scenes_with_a_zone_to_one_side_have_no_mirror() -> None:
    simulators = [
        TabletopSimulator(TabletopConfig(tasks=[task], camera_size=SIZE))
        for task in ("stack_cubes", "place_can")
    ]
    assert [s.embodiment.mirror is None for s in simulators] == [False, True]
