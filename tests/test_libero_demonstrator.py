"""LIBERO's scripted experts: grasps that fit the shape and its surroundings, recovery, noise,
collection."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from libero_reference import libero_problem

from sim.libero.settings import LiberoConfig
from vla_rl import build
from vla_rl.config import compose
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec

pytestmark = pytest.mark.real_sim
TASK = "libero_object/1"  # cream cheese into the basket
FINGERS = np.array([0.0, 1.0])  # along y, as LIBERO's arm starts


# ------------------------------------------------------------------------------------------- grasps
def world(target: str, *others: str):
    """Shapes of a small scene, and the body of its object ``target`` (geoms in XML)."""
    import mujoco

    from sim.libero.demonstrator import Shapes

    bodies = "".join(f"<body>{geoms}</body>" for geoms in others)
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><geom type='plane' size='1 1 "
        f"1'/><body><freejoint/>{target}</body>{bodies}</worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return Shapes(model, data), 1


def grasp_in(shapes, body):
    """The planned place (world) and the direction of the fingers, as an angle (degrees) from y."""
    from sim.libero.demonstrator import plan_grasp

    grasp = plan_grasp(shapes, body, shapes.points(body), FINGERS)
    rotation = shapes.data.xmat[body].reshape(3, 3)
    place, axis = shapes.data.xpos[body] + rotation @ grasp.place, rotation @ grasp.axis
    return place, float(np.degrees(np.arctan2(-axis[0], axis[1]))), grasp


def box(x: float, y: float, z: float, at: str = "0 0 0", turn: float = 0.0) -> str:
    return f"<geom type='box' size='{x} {y} {z}' pos='{at}' euler='0 0 {turn}'/>"


def test_a_box_that_fits_is_grasped_in_the_middle_without_turning() -> None:
    place, angle, grasp = grasp_in(*world(box(0.04, 0.02, 0.05, "0.1 0.2 0.05")))
    assert not grasp.turned and angle == pytest.approx(0.0)
    np.testing.assert_allclose(place, [0.1, 0.2, 0.07], atol=1e-9)  # 3 cm below the top


def test_a_box_too_long_for_the_fingers_is_grasped_across_its_narrow_side() -> None:
    place, angle, grasp = grasp_in(*world(box(0.02, 0.06, 0.05, "0.1 0.2 0.05")))
    assert grasp.turned and abs(angle) > 60.0
    np.testing.assert_allclose(place[:2], [0.1, 0.2], atol=1e-9)


def test_the_hand_turns_less_where_less_is_enough() -> None:
    _, angle, _ = grasp_in(*world(box(0.06, 0.015, 0.05, "0 0 0.05", turn=30.0)))
    # at 0 it is too long for the fingers; its narrow side is at 30
    assert angle == pytest.approx(15.0)


def test_flat_things_are_grasped_above_the_ground() -> None:
    place, _, _ = grasp_in(*world(box(0.04, 0.02, 0.009, "0 0 0.009")))
    assert 0.011 < place[2] < 0.018  # fingertips reach 11 mm below that point


def test_a_vessel_is_grasped_by_its_rim_on_the_free_side() -> None:
    wall = "".join(
        box(0.004, 0.02, 0.025, f"{0.05 * np.cos(a)} {0.05 * np.sin(a)} 0.025", turn=np.degrees(a))
        for a in np.arange(0, 2 * np.pi, np.pi / 8)
    )
    place, angle, _ = grasp_in(*world(wall))
    assert (
        angle == pytest.approx(0.0)
        and abs(place[1]) == pytest.approx(0.05, abs=0.006)
        and abs(place[0]) < 1e-6
    )
    assert place[2] == pytest.approx(0.05 - 0.012)
    for side in (1.0, -1.0):
        blocked, angle, _ = grasp_in(*world(wall, box(0.05, 0.02, 0.04, f"0 {side * 0.1} 0.04")))
        assert angle == pytest.approx(0.0) and blocked[1] == pytest.approx(-side * 0.05, abs=0.006)


def test_neighbours_make_the_hand_turn() -> None:
    beside = [box(0.05, 0.01, 0.05, f"0 {y} 0.05") for y in (0.055, -0.055)]
    _, angle, grasp = grasp_in(*world(box(0.015, 0.015, 0.04, "0 0 0.04"), *beside))
    assert grasp.turned and abs(angle) >= 60.0


@pytest.mark.filterwarnings("ignore")  # robosuite's own import warns
def test_rotation_vector() -> None:
    from sim.libero.demonstrator import _rotation_vector

    transforms = pytest.importorskip("robosuite.utils.transform_utils")

    rng = np.random.default_rng(0)
    for quaternion in rng.normal(size=(20, 4)):
        quaternion /= np.linalg.norm(quaternion) * np.sign(quaternion[3])
        expected = transforms.quat2axisangle(quaternion.copy())
        np.testing.assert_allclose(
            _rotation_vector(transforms.quat2mat(quaternion)), expected, atol=1e-5
        )
    np.testing.assert_array_equal(_rotation_vector(np.eye(3)), np.zeros(3))


def test_other_goals_are_refused() -> None:
    from sim.libero.demonstrator import PickAndPlace

    class NoShapes:
        def __init__(self, *_: object) -> None: ...

    problem = SimpleNamespace(goal=(("open", "cabinet_1_top_region"),), objects={})
    scene = SimpleNamespace(model=None, task=SimpleNamespace(task_id="libero_goal/0"))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match=r"libero_goal/0.*dataset=FOLDER"),
    ):
        patch.setattr("sim.libero.demonstrator.Shapes", NoShapes)
        PickAndPlace(SimpleNamespace(problem=problem, scene=scene, data=None))


# -------------------------------------------------------------------------------------- whole tasks
@pytest.fixture(scope="module")
def simulator():
    """One scene for the whole file, drawn small."""
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    from sim.libero.perturb import PerturbedLibero
    from sim.slots import running
    from vla_rl.specs import SlotObservation

    class Blind(PerturbedLibero):
        """Steps without drawing: experts look at no picture."""

        def observe(self, slot):
            s = running(self._slots, slot, over=True)
            return SlotObservation({}, s.scene.proprio(s.seen), self.instruction_of(s.episode))

    config = LiberoConfig(
        tasks=["1"], look="light", controller="fast", cameras=["agentview"], camera_size=16
    )
    simulator = Blind(config)
    yield simulator
    simulator.close()


def collect(simulator, init_state: int, **options):
    from sim.libero.collect import collect_episode

    return collect_episode(
        simulator, EpisodeSpec(TASK, init_state, split="train", seed=init_state), **options
    )


def test_expert_solves_the_task_with_and_without_noise(simulator) -> None:
    runs = [collect(simulator, i, noise_std=noise) for i in range(2) for noise in (0.0, 0.25)]
    assert all(run["success"] for run in runs)
    for run in runs:
        steps = len(run["actions"])
        assert run["actions"].shape == (steps, 7) and run["actions"].dtype == np.float32
        assert run["proprio"].shape == (steps, 8) and np.abs(run["actions"]).max() <= 1.0
        assert run["instruction"] == "pick up the cream cheese and place it in the basket"
        assert set(run["actions"][:, 6]) == {-1.0, 1.0}
        # the hand turns on the way, and is still afterwards
        assert not run["actions"][20:, 3:6].any()


def test_noise_follows_from_the_seed_and_speed_slows_the_expert(simulator) -> None:
    first, again = (collect(simulator, 3, noise_std=0.2) for _ in range(2))
    np.testing.assert_array_equal(first["actions"], again["actions"])
    slow = collect(simulator, 3, speed=0.5)
    fast = collect(simulator, 3)
    assert slow["success"] and len(slow["actions"]) > 1.4 * len(fast["actions"])
    assert (
        np.abs(slow["actions"][:, :6]).max() <= 0.5 and np.abs(fast["actions"][:, :6]).max() == 1.0
    )


def test_expert_picks_up_again_what_it_lost(simulator) -> None:
    from sim.libero.demonstrator import make_demonstrator

    simulator.start(0, EpisodeSpec(TASK, 5, split="train", seed=5))
    state = simulator.state(0)
    expert, lost, phases = make_demonstrator(state), False, []
    while True:
        action = expert.act(state)
        phases.append(expert._phase)
        held = phases[-1] == "carry" and state.position("cream_cheese_1")[2] > 0.08
        if held and not lost:  # someone takes it out of the hand and puts it elsewhere
            lost = True
            joint = simulator.scene(TASK).env.get_object("cream_cheese_1").joints[0]
            start = state.data.joint(joint).qpos
            start[:3] = [-0.05, -0.02, 0.02]
        step = simulator.step(0, action[None])
        if step.terminated or step.truncated:
            break
    assert lost and step.success
    assert "approach" in phases[phases.index("carry") :]


def never_closes(highest: float, action: np.ndarray) -> np.ndarray:
    return np.array([*action[:6], -1.0])


def up_and(gripper: float, limit: float):
    """Straight up once it is lifted; once it was ``limit`` metres high the hand stops, with
    ``gripper`` as its command."""

    def change(highest: float, action: np.ndarray) -> np.ndarray:
        if highest > limit:
            return np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gripper])
        return np.array([0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 1.0]) if highest > 0.01 else action

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda highest, action: np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), "never_reached"),
        (never_closes, "missed_grasp"),
        (up_and(-1.0, 0.25), "dropped"),
        (up_and(-1.0, 0.04), "wrong_place"),
        (up_and(1.0, 0.10), "out_of_time"),
    ],
    ids=["still", "open", "let_go_high", "let_go_low", "hold"],
)
def test_an_episode_that_fails_says_how(simulator, change, kind) -> None:
    """The expert whose actions are changed, by how high it has lifted (m)."""
    from sim.libero.demonstrator import make_demonstrator

    simulator.start(0, EpisodeSpec(TASK, 1, split="train", seed=1))
    simulator.slot(0).horizon = 90
    state = simulator.state(0)
    expert, start, highest = make_demonstrator(state), state.position("cream_cheese_1")[2], 0.0
    while True:
        highest = max(highest, state.position("cream_cheese_1")[2] - start)
        step = simulator.step(0, change(highest, expert.act(state))[None])
        if step.terminated or step.truncated:
            break
        assert step.failure == ""
    assert not step.success and step.failure == kind


def test_the_box_around_an_object_holds_its_points(simulator) -> None:
    """Worked out from the corners of the geoms' boxes, against the vertices of its collision
    shapes."""
    from sim.libero.demonstrator import Shapes

    simulator.start(0, EpisodeSpec(TASK, 1, split="train"))
    scene, data = simulator.scene(TASK), simulator.slot(0).data
    points = Shapes(scene.model, data).points(int(scene.env.obj_body_id["cream_cheese_1"]))
    low, high = scene.box(data, "cream_cheese_1")
    assert (points >= low - 1e-6).all() and (points <= high + 1e-6).all()
    np.testing.assert_allclose(high - low, np.ptp(points, axis=0), atol=0.01)


def test_goals_beyond_pick_and_place_are_not_told() -> None:
    from sim.libero.backend import TaskScene

    objects = {"bowl_1": "bowl"}
    for goal in [
        (("open", "cabinet_1_top_region"),),
        (("in", "bowl_1", "drawer"), ("close", "drawer")),
    ]:
        scene = SimpleNamespace(problem=SimpleNamespace(goal=goal, objects=objects))
        assert TaskScene.tracker(scene, None) is None


def test_absolute_control_is_refused(simulator) -> None:
    absolute = SimpleNamespace(config=LiberoConfig(control_mode="absolute"))
    with pytest.raises(ConfigError, match="use relative"):
        collect(absolute, 0)


def test_the_bench_of_experts_has_a_row_per_task_and_noise(monkeypatch, simulator) -> None:
    from benchmarks.simulator import experts

    monkeypatch.setattr(build, "implementation", lambda group, name: lambda config: simulator)
    monkeypatch.setattr(simulator, "close", lambda: None)
    overrides = ["run=libero_object_nano", "env.tasks=['1']"]
    found = experts.measure(overrides, 1, [0.0, 0.1], 1.0, "train", None)
    assert [(row["task"], row["noise"]) for row in found["rows"]] == [(TASK, 0.0), (TASK, 0.1)]
    assert all(row["successes"] == 1 and row["longest"] > 10 for row in found["rows"])
    assert experts.text(found).count("1 of 1") == 2


# --------------------------------------------------------------------------------------- plugged in
def test_run_config_and_registry() -> None:
    from sim.libero.collect import collect_episode

    assert build.attribute(build.env_entry("libero").collect) is collect_episode
    config = compose(["run=libero_object_nano"])
    assert (
        config.tasks == config.env.tasks
        and config.env_type == "libero"
        and config.env.init_states == "split"
    )
    assert config.env.horizon == 0  # LIBERO's own limit
    assert not config.algorithm.bootstrap_truncated


@pytest.mark.slow
def test_collected_datasets_load_in_lerobot(tmp_path, monkeypatch) -> None:
    import warnings

    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from vla_rl.config.run import CollectConfig
    from vla_rl.data.collect import collect_demonstrations

    env = LiberoConfig(tasks=["1"], look="light", controller="fast", camera_size=32)
    settings = CollectConfig(episodes_per_task=1, action_noise=0.1, workers=1)
    folder = tmp_path / "dataset"
    counts = collect_demonstrations(
        "libero",
        env,
        [TASK],
        settings,
        seed=0,
        dataset=partial(DemonstrationWriter, folder),
        progress=lambda *_, **__: None,
    )
    assert counts["episodes"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lerobot's own imports warn
        lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
        theirs = lerobot.LeRobotDataset(
            "local/demos", root=folder, video_backend="pyav", tolerance_s=1e-3
        )
    assert len(theirs) == counts["control_steps"]
    assert theirs[0]["action"].shape == (7,) and theirs[0]["task"].startswith(
        "pick up the cream cheese"
    )
