"""LIBERO-plus' variants: what their names say, from a package made by hand and from its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from libero_reference import libero_problem

from sim.libero import package, plus, tasks
from sim.libero.init_states import read_init_states
from sim.libero.settings import LiberoConfig
from vla_rl.errors import MissingDependency, UserError

CASE = Path(__file__).with_name("libero_plus_case.py")
NAMES = (
    "open_it_view_30_15_150_2_352_initstate_0",
    "open_it_view_0_0_100_0_0_initstate_7",
    "open_it_language_3_view_0_0_100_0_0_initstate_0",
    "open_it_moved_level2_sample1",
    "open_it_view_0_0_100_0_0_initstate_0_noise_4",  # none of the four, as those that follow
    "open_it_light_2",
    "open_it_table_1",
    "open_it_add_16",
)


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """A package of the same layout with one variant of each kind."""
    inside = tmp_path / "liberoplus" / "liberoplus"
    for stem, words in (
        ("open_it", "Open it."),
        ("open_it_language_3", "Please Open It"),
        ("open_it_moved_level2_sample1", "Open it."),
    ):
        file = inside / "bddl_files" / "libero_goal" / f"{stem}.bddl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"(define (problem libero_tabletop_manipulation) (:language {words}) "
            "(:objects bowl_1 - bowl) (:goal (and (open bowl_1))))"
        )
    (inside / "benchmark").mkdir()
    (inside / "benchmark" / "libero_suite_task_map.py").write_text(
        f"libero_task_map = {{'libero_goal': {list(NAMES)}}}"
    )
    robots = inside / "envs" / "robots"
    robots.mkdir(parents=True)
    (robots / "mounted_panda.py").write_text(
        "class MountedPanda(Base):\n    def init_qpos(self):\n        return np.array([9, 9])\n"
        "class MountedPanda7(MountedPanda):\n    @property\n    def init_qpos(self):\n"
        "        return np.array([0.5, -1.25,\n 0.0])\n"
    )
    monkeypatch.setattr(plus, "_PLACE", tmp_path)
    for cached in (plus.variants, plus.postures, tasks.suite_tasks):
        cached.cache_clear()
    yield inside
    for cached in (plus.variants, plus.postures, tasks.suite_tasks):
        cached.cache_clear()


def test_each_kind_has_its_variants(made) -> None:
    found = {kind: tasks.suite_tasks(f"libero_plus_goal_{kind}") for kind in plus.KINDS}
    assert {kind: [task.name for task in each] for kind, each in found.items()} == {
        kind: [name] for kind, name in zip(plus.KINDS, NAMES, strict=False)
    }
    (camera,), (robot,), (language,), (layout,) = found.values()
    assert camera.change == plus.Change((30, 15, 150, 2, 352))
    assert robot.change == plus.Change(posture=(0.5, -1.25, 0.0))
    assert language.change == layout.change == plus.Change()
    assert [t.instruction for t in (camera, robot, layout)] == ["open it"] * 3
    assert language.instruction == "please open it"
    assert [t.bddl_file.stem for t in (camera, robot, language, layout)] == [
        "open_it",
        "open_it",
        "open_it_language_3",
        "open_it_moved_level2_sample1",
    ]
    states = made / "init_files"
    assert camera.init_file == robot.init_file == states / "libero_goal" / "open_it.pruned_init"
    assert layout.init_file == (
        states / "libero_newobj" / "libero_goal" / f"{layout.name}.pruned_init"
    )
    assert layout.horizon == 300 and layout.task_id == "libero_plus_goal_layout/0"


def test_a_view_is_turned_as_theirs() -> None:
    """Against scipy's rotations, with which LIBERO-plus turns its camera."""
    mujoco = pytest.importorskip("mujoco")
    pytest.importorskip("robosuite")
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    from scipy.spatial.transform import Rotation

    from sim.libero.perturb_scene import plus_view

    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><camera name="agentview" pos="0.6586 0 1.6103" '
        'quat="0.638 0.3048 0.3048 0.638"/></worldbody></mujoco>'
    )
    position, quaternion = np.array([0.6586, 0, 1.6103]), np.array([0.638, 0.3048, 0.3048, 0.638])
    pivot = np.array([0, 0, 0.8])

    def turned(rotation, q):
        return (rotation * Rotation.from_quat(q[[1, 2, 3, 0]])).as_quat()[[3, 0, 1, 2]].round(4)

    up, about = (
        Rotation.from_rotvec(np.radians(-15) * np.eye(3)[1]),
        Rotation.from_euler("z", 30, True),
    )
    position = (up.apply(position - pivot) + pivot).round(4)
    position = about.apply(position).round(4)
    position = (pivot + (position - pivot) * 1.5).round(4)
    quaternion = turned(about, turned(up, quaternion))
    quaternion = turned(Rotation.from_euler("z", 2, True), quaternion)
    quaternion = turned(Rotation.from_rotvec(np.radians(-352) * np.eye(3)[1]), quaternion)
    edits = plus_view(model, "agentview", (30, 15, 150, 2, 352))
    np.testing.assert_allclose(edits["cam_pos"][1][0], position, atol=1e-12)
    unit = quaternion / np.linalg.norm(quaternion)
    found = edits["cam_quat"][1][0]
    np.testing.assert_allclose(found * np.sign(found[0]), unit * np.sign(unit[0]), atol=1e-12)


def test_a_layouts_one_state_is_one_row(tmp_path) -> None:
    file = tmp_path / plus.LAYOUTS / "a.npz"
    file.parent.mkdir()
    np.savez(file, states=np.arange(5.0))
    assert read_init_states(file).shape == (1, 5)


def test_what_is_not_there_is_one_clear_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plus, "_PLACE", tmp_path)
    with pytest.raises(MissingDependency, match="vla-rl libero plus"):
        plus.root()
    with pytest.raises(UserError, match=r"libero_plus_goal_light.*must be one of"):
        LiberoConfig(suite="libero_plus_goal_light")
    monkeypatch.setattr(
        plus, "_installer", lambda place: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(MissingDependency, match=r"LIBERO-plus was not installed.*status 3"):
        plus.install()


@pytest.fixture
def needs_plus() -> None:
    try:
        package.root(), plus.root()
    except UserError as error:
        pytest.skip(f"needs LIBERO-plus: {error}")


def test_all_variants_of_the_four_kinds_are_there(needs_plus) -> None:
    counts = dict.fromkeys(plus.KINDS, 0)
    for suite, (_, kind) in plus.SUITES.items():
        found = tasks.suite_tasks(suite)
        counts[kind] += len(found)
        assert all(t.bddl_file.is_file() and t.init_file.is_file() for t in found)
    assert counts == {"camera": 1599, "robot": 1550, "language": 1537, "layout": 696}


@pytest.mark.slow
@pytest.mark.real_sim
@pytest.mark.parametrize("task", ["libero_plus_spatial_camera/100", "libero_plus_object_robot/20"])
def test_a_variant_steps_as_its_own_environment_does(task, needs_plus) -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    ran = subprocess.run([sys.executable, str(CASE), task], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "2 pictures equal" in ran.stdout
