"""LIBERO without a simulation: config, tasks, the package's files, hostile initial states,
broken BDDL files."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import libero_recorded
import numpy as np
import pytest

from sim.libero import package, tasks
from sim.libero.init_states import read_init_states
from sim.libero.scenes import Scenes
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage, UserError

try:
    package.root()
    installed = pytest.mark.skipif(False, reason="")
except MissingPackage as missing:
    installed = pytest.mark.skipif(True, reason=str(missing))


# --------------------------------------------------------------------------------- config and tasks
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"suite": "libero_100"}, "libero_spatial, libero_object"),
        ({"look": "pretty"}, "exact, light"),
        ({"controller": "slow"}, "exact, fast"),
        ({"control_mode": "delta"}, "relative, absolute"),
        ({"init_states": "random"}, "split, official, sampled"),
        ({"cameras": ["rear"]}, "agentview"),
        ({"cameras": []}, r"env.cameras=\[\] is empty: it must have 1 or more"),
        ({"cameras": ["agentview", "agentview"]}, "each once"),
        ({"camera_size": 8}, "16 to 2048"),
        ({"horizon": -1}, "horizon=-1 .* 0 or more"),
        ({"built_scenes": 0}, "built_scenes=0 .* 1 or more"),
        ({"arm_noise": float("nan")}, "arm_noise=nan .* 0 to 0.5"),
        ({"opening_draws": 0}, "opening_draws=0 .* 1 or more"),
        ({"fixtures": "random"}, "per_state, loop, numbered"),
    ],
)
def test_config_errors_name_the_choices(values, words) -> None:
    with pytest.raises(ConfigError, match=words):
        LiberoConfig(**values)


@installed
def test_five_suites_have_130_tasks_with_their_own_texts_files_and_horizons() -> None:
    counts = {suite: len(tasks.suite_tasks(suite)) for suite in tasks.SUITES}
    assert counts == {
        "libero_spatial": 10,
        "libero_object": 10,
        "libero_goal": 10,
        "libero_10": 10,
        "libero_90": 90,
    }
    horizons = [tasks.suite_tasks(suite)[0].horizon for suite in tasks.SUITES]
    assert horizons == [220, 280, 300, 520, 400]
    everything = [task for suite in tasks.SUITES for task in tasks.suite_tasks(suite)]
    assert len({task.task_id for task in everything}) == 130
    assert all(task.bddl_file.is_file() and task.init_file.is_file() for task in everything)
    assert all(
        task.instruction.split()[0].islower() and "_" not in task.instruction for task in everything
    )
    task = tasks.suite_tasks("libero_10")[2]
    assert (
        task.name.startswith("KITCHEN_SCENE3")
        and task.instruction == "turn on the stove and put the moka pot on it"
    )


@installed
def test_every_published_task_file_parses_within_the_sizes_of_the_privileged_state() -> None:
    for suite in tasks.SUITES:
        for task in tasks.suite_tasks(suite):
            problem = task.problem
            assert (
                1 <= len(problem.goal) <= tasks.MAX_GOALS
                and 1 <= len(problem.objects) <= tasks.MAX_OBJECTS
            )
            assert problem.language and problem.name.startswith("libero_")
    problem = tasks.suite_tasks("libero_object")[0].problem
    assert problem.goal == (("in", "alphabet_soup_1", "basket_1_contain_region"),)
    assert (
        problem.of_interest == ("alphabet_soup_1", "basket_1")
        and problem.objects["butter_1"] == "butter"
    )
    assert problem.fixtures == {"floor": "floor"}


def own_task(folder: Path, more: str, goal: str) -> tasks.Task:
    """Of a suite of one's own that has a published one's name."""
    path = folder / f"{len(list(folder.iterdir()))}.bddl"
    text = GOOD.replace("basket_1 - basket)", f"basket_1 - basket{more})")
    path.write_text(text.replace("(In a_1 basket_1_contain_region) (Open basket_1)", goal))
    words = "pick up the apple and place it in the basket"
    return tasks.Task(path.stem, "libero_object", path.stem, words, path, path, 0)


@installed
def test_what_else_a_scene_asks_for_is_what_its_words_say_there(tmp_path):
    def other(suite, number):
        suite_tasks = tasks.suite_tasks(suite)
        return {*tasks.instead_of(suite_tasks[number], suite_tasks).values()}

    # one layout; one goal for all; objects by their kinds, of which seven lie there
    assert other("libero_goal", 8) == {f"libero_goal/{i}" for i in range(10) if i != 8}
    assert not other("libero_spatial", 0)
    object_tasks = tasks.suite_tasks("libero_object")
    there = object_tasks[0].problem.objects
    known = {
        task.task_id
        for task in object_tasks[1:]
        if task.instruction.split("pick up the ")[1].split(" and")[0].replace(" ", "_") + "_1"
        in there
    }
    assert len(known) == 5 and other("libero_object", 0) == known
    # "the left plate" of another living room is another plate; a pudding is a pudding
    rooms = tasks.suite_tasks("libero_90")
    for task in rooms:
        for task_id in tasks.instead_of(task, rooms).values():
            found = rooms[int(task_id.split("/")[1])]
            same_scene = found.name.split("SCENE")[1][:2] == task.name.split("SCENE")[1][:2]
            assert same_scene or found.instruction.startswith("pick up the"), (
                task.name,
                found.name,
            )
    # closing the drawer is part of putting the pudding into it and closing it, which says more
    ten = [t for t in rooms if t.name.startswith("KITCHEN_SCENE10")]
    told = [*tasks.instead_of(ten[3], ten)]
    assert [*map(len, told)] == sorted(map(len, told), reverse=True) and len(told[-1]) == 1
    assert any(tasks.instead_of(task, rooms) for task in rooms)
    # a suite of one's own that has the name alone
    own = [
        own_task(tmp_path, "", "(In a_1 basket_1_contain_region)"),
        own_task(tmp_path, "\n plate_1 - plate", "(On a_1 plate_1)"),
        own_task(tmp_path, "\n plate_1 - plate", "(In a_2 basket_1_contain_region)"),
    ]
    assert not tasks.instead_of(own[0], own)
    assert [*tasks.instead_of(own[1], own).values()] == ["2"]
    varied = dataclasses.replace(object_tasks[0], change=SimpleNamespace())
    assert not tasks.instead_of(varied, object_tasks)


@installed
def test_tasks_are_found_by_id_number_and_name() -> None:
    suite = tasks.suite_tasks("libero_goal")
    assert tasks.find_tasks("libero_goal", []) == suite
    assert tasks.find_tasks("libero_goal", ["libero_goal/3", "5", suite[3].name]) == (
        suite[3],
        suite[5],
    )
    with pytest.raises(ConfigError, match=r"'libero_object/1'.*libero_goal/0 to libero_goal/9"):
        tasks.find_tasks("libero_goal", ["libero_object/1"])
    with pytest.raises(ConfigError, match="libero_spatial"):
        tasks.suite_tasks("libero_2")


@installed
def test_a_simulator_lists_its_tasks_without_building_anything() -> None:
    simulator = LiberoSimulator(
        LiberoConfig(suite="libero_object", tasks=["1", "4"], horizon=50, camera_size=32)
    )
    assert [task.task_id for task in simulator.tasks] == ["libero_object/1", "libero_object/4"]
    assert {task.horizon for task in simulator.tasks} == {50}
    assert simulator.embodiment.action_dim == 7 and simulator.embodiment.proprio_dim == 8
    assert simulator.tasks[0].instructions == (
        "pick up the cream cheese and place it in the basket",
    )
    with pytest.raises(ConfigError, match="libero_object/0"):
        simulator.task("libero_object/0")
    assert [simulator.config.is_official(split) for split in ("train", "held_out")] == [False, True]
    simulator.close()


def test_both_kinds_of_initial_states_can_be_forced(monkeypatch) -> None:
    monkeypatch.setattr("sim.libero.simulator.find_tasks", lambda *_: ())
    assert "the 50 initial states" in LiberoConfig().initial_states("held_out")
    assert "sampled" in LiberoConfig().initial_states("train")
    for name, expected in (("official", True), ("sampled", False)):
        simulator = LiberoSimulator(LiberoConfig(init_states=name))
        assert [simulator.config.is_official(split) for split in ("train", "held_out")] == [
            expected
        ] * 2


def test_conditions_name_look_controller_and_limit() -> None:
    assert LiberoConfig(
        suite="libero_goal", look="light", controller="fast", camera_size=84
    ).describe() == (
        "light look at 84 px, fast control (relative), at most 300 control steps after 10 settling "
        "ones, 2 draws of openings"
    )
    assert (
        "at most 90 control steps (the suite's own: 280)"
        in LiberoConfig(horizon=90, arm_noise=0.0).describe()
    )
    assert (
        LiberoConfig(fixtures="loop", scene_seed=7)
        .describe()
        .endswith("2 draws of openings, fixtures loop from seed 7")
    )
    assert "no arm noise" in LiberoConfig(arm_noise=0.0).initial_states("train")
    assert "arm noise 0.02 rad" in LiberoConfig().initial_states("train")


@installed
def test_a_suite_is_named_on_the_command_line(tmp_path) -> None:
    from vla_rl import config as configs
    from vla_rl.commands.evaluate import config_of_checkpoint

    plain = config_of_checkpoint(
        tmp_path / "checkpoint", "libero_goal", ["env.camera_size=64", "env.tasks=[0,2]"]
    )
    assert (
        plain.env_type == "libero"
        and plain.env.suite == "libero_goal"
        and plain.env.tasks == ["0", "2"]
    )
    options = ["env.suite=libero_object", "env.tasks=[3]", "env.camera_size=96", "env.horizon=99"]
    run = configs.compose(["~run", "env=libero", *options])
    configs.save(run, tmp_path / "config.yaml")
    checkpoint = tmp_path / "checkpoints" / "rl"
    assert config_of_checkpoint(checkpoint, None, []).env.tasks == ["3"]
    other = config_of_checkpoint(checkpoint, "libero_goal", [])
    assert (other.env.suite, other.env.tasks, other.env.camera_size) == ("libero_goal", [], 96)
    assert other.env.horizon == 0 and config_of_checkpoint(checkpoint, None, []).env.horizon == 99
    assert config_of_checkpoint(checkpoint, "libero_goal", ["env.horizon=50"]).env.horizon == 50


# -------------------------------------------------------------------------- the package's own files
@pytest.fixture
def fake_package(tmp_path, monkeypatch) -> Path:
    """A LIBERO package without assets, and a home of its own."""
    root = tmp_path / "site" / "libero" / "libero"
    for folder in ("bddl_files", "init_files"):
        (root / folder).mkdir(parents=True)
    monkeypatch.setattr(package, "root", lambda: root)
    monkeypatch.setattr(package.copies, "packaged", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    return root


def test_the_config_file_is_written_once_and_never_changed(fake_package, tmp_path) -> None:
    path = package.ensure_config()
    assert path == tmp_path / "home" / ".libero" / "config.yaml"
    assert f'bddl_files: "{fake_package}/bddl_files"' in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["config.yaml"], "no temporary file is left"
    mine = path.read_text().replace("datasets", "my_datasets")
    path.write_text(mine)
    assert package.ensure_config() == path and path.read_text() == mine


@pytest.mark.parametrize(
    "text",
    ["datasets: /mine\n", 'bddl_files: "/gone/bddl_files"\ninit_states: "/gone/init_files"\n'],
)
def test_a_config_file_whose_folders_are_gone_is_left_alone_and_not_used(
    fake_package, tmp_path, monkeypatch, text
) -> None:
    """As a deleted environment leaves it; LIBERO, imported or not, then reads another."""
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(text)
    imported = ModuleType("libero.libero")
    monkeypatch.setitem(sys.modules, "libero.libero", imported)
    path = package.ensure_config()
    assert path.is_relative_to(tmp_path / "home" / ".cache" / "vla_rl")
    assert str(fake_package / "init_files") in path.read_text()
    assert imported.config_file == str(path) and os.environ["LIBERO_CONFIG_PATH"] == str(
        path.parent
    )
    assert (
        package.ensure_config() == path and (tmp_path / "mine" / "config.yaml").read_text() == text
    )


def test_a_config_folder_that_cannot_be_written_is_a_clear_error(
    fake_package, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "file"))
    with pytest.raises(UserError, match="LIBERO_CONFIG_PATH"):
        package.ensure_config()


def test_missing_and_partial_assets_are_clear_errors(fake_package, tmp_path) -> None:
    with pytest.raises(MissingDependency, match=r"HF_HUB_OFFLINE.*env\.assets"):
        package.find_assets()
    assert not (tmp_path / "home" / ".cache").exists(), (
        "a failed download leaves no empty folder behind"
    )
    with pytest.raises(MissingDependency, match=r"no folder.*nowhere"):
        package.find_assets(str(tmp_path / "nowhere"))
    copy = tmp_path / "copy"
    for name in package.ASSET_FOLDERS[1:]:
        (copy / name).mkdir(parents=True)
    with pytest.raises(MissingDependency, match="lacks articulated_objects"):
        package.find_assets(str(copy))
    (copy / package.ASSET_FOLDERS[0]).mkdir()
    assert package.find_assets(str(copy)) == copy.resolve()


def test_assets_are_found_where_the_package_downloads_them(fake_package, tmp_path) -> None:
    place = tmp_path / "home" / ".cache" / "libero" / "assets"
    for name in package.ASSET_FOLDERS:
        (place / name).mkdir(parents=True)
    assert package.find_assets() == place.resolve()


def test_assets_of_packages_go_before_a_download_and_must_be_whole(
    fake_package, tmp_path, monkeypatch
) -> None:
    packaged, downloaded = tmp_path / "packaged", tmp_path / "home" / ".cache" / "libero" / "assets"
    for name in package.ASSET_FOLDERS:
        (packaged / name).mkdir(parents=True)
        (downloaded / name).mkdir(parents=True)
    monkeypatch.setattr(package.copies, "packaged", lambda: packaged)
    with pytest.raises(
        MissingDependency, match=r"not whole: 864 of 864 files are missing .*vla-rl libero assets"
    ):
        package.find_assets()
    monkeypatch.setattr(package.copies, "published", dict)
    assert package.find_assets() == packaged.resolve()
    assert package.find_assets(str(downloaded)) == downloaded.resolve()


def test_a_failed_download_is_one_clear_error(fake_package, tmp_path, monkeypatch) -> None:
    class Hub:
        @staticmethod
        def download_assets_from_huggingface(folder: str) -> None:
            os.makedirs(folder)
            raise ConnectionError("no route to the hub")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(package.importlib, "import_module", lambda name: Hub)
    with pytest.raises(MissingDependency, match=r"no route to the hub.*env\.assets"):
        package.find_assets()
    assert not (tmp_path / "home" / ".cache" / "libero" / "assets").exists()


def test_without_the_package_the_extra_to_install_is_named(monkeypatch) -> None:
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"\[libero\]"):
        package.root()


# ----------------------------------------------------------------------------------- initial states
class Hostile:
    """A pickle that runs a command when it is loaded without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def saved(path: Path, content: object, protocol: int = 2) -> Path:
    """``content`` as torch.save lays it out."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=protocol))
        archive.writestr("archive/version", "3\n")
    return path


@installed
def test_all_official_states_are_read_and_equal_those_that_torch_loads() -> None:
    torch = pytest.importorskip("torch")
    for suite in tasks.SUITES:
        for task in tasks.suite_tasks(suite):
            states = read_init_states(task.init_file)
            assert states.shape[0] == 50 and states.dtype == np.float64
    np.testing.assert_array_equal(states, torch.load(task.init_file, weights_only=False))


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_as_they_were(tmp_path, order) -> None:
    states = np.asarray(np.random.default_rng(0).normal(size=(3, 5)), order=order)
    np.testing.assert_array_equal(
        read_init_states(saved(tmp_path / "a.pruned_init", states)), states
    )


def test_hostile_content_is_refused_and_not_run(tmp_path) -> None:
    target = tmp_path / "made_by_the_pickle"
    for content in (
        Hostile(target),
        [Hostile(target)],
        {"states": np.zeros((2, 3)), "x": Hostile(target)},
    ):
        with pytest.raises(UserError, match=r"nothing but numpy arrays.*reinstall hf-libero"):
            read_init_states(saved(tmp_path / "evil.pruned_init", content))
    objects = np.array([[Hostile(target)]], dtype=object)
    with pytest.raises(UserError, match="cannot be read"):
        read_init_states(saved(tmp_path / "objects.pruned_init", objects))
    assert not target.exists()
    before = np.dtype(np.float64)
    with pytest.raises(UserError):
        read_init_states(saved(tmp_path / "swapped.pruned_init", np.zeros((2, 3), dtype=">i2")))
    assert np.dtype(np.float64) == before and np.dtype("f8").byteorder == "=", (
        "numpy's own types are not touched"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no archive", "not a zip file"),
        (np.zeros(4), r"float64 \[4\]"),
        (np.zeros((2, 3), dtype=np.float32), "float32"),
        (np.full((2, 3), np.nan), "not finite"),
        ("text", "str"),
        (None, "No such file"),
    ],
)
def test_files_that_hold_no_states_are_clear_errors(tmp_path, content, words) -> None:
    path = tmp_path / "some.pruned_init"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        saved(path, content)
    with pytest.raises(UserError, match=words):
        read_init_states(path)


# --------------------------------------------------------------------------------------------- BDDL
GOOD = """
(define (problem LIBERO_Floor_Manipulation)  ; a comment
  (:domain robosuite)
  (:language put it there)
  (:fixtures floor - floor)
  (:objects a_1 a_2 - apple
    basket_1 - basket)
  (:obj_of_interest a_1)
  (:goal (And (In a_1 basket_1_contain_region) (Open basket_1))))
"""


def test_a_problem_is_read(tmp_path) -> None:
    path = tmp_path / "task.bddl"
    path.write_text(GOOD)
    problem = tasks.read_problem(path)
    assert problem.name == "libero_floor_manipulation" and problem.language == "put it there"
    assert problem.objects == {"a_1": "apple", "a_2": "apple", "basket_1": "basket"}
    assert problem.goal == (("in", "a_1", "basket_1_contain_region"), ("open", "basket_1"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("(Open basket_1))))", "(Open basket_1)", "line 9 is never closed"),
        ("(Open basket_1))))", "(Open basket_1)))))", "line 9 closes"),
        ("(define", "(defined", "one \\(define"),
        ("(:language put it there)", "", ":language .* is missing"),
        ("(Open basket_1)", "(Fly basket_1)", "Fly"),
        ("(Open basket_1)", "(Open basket_1 floor)", "Open"),
        ("basket_1 - basket)", "basket_1)", "kind of basket_1"),
        ("basket_1 - basket)", "basket_1 -)", "kind of basket_1"),
    ],
)
def test_files_that_do_not_parse_are_clear_errors(tmp_path, old, new, words) -> None:
    path = tmp_path / "task.bddl"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError, match=words) as caught:
        tasks.read_problem(path)
    assert str(path) in str(caught.value) and "hf-libero" in str(caught.value)


def test_a_missing_task_file_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(UserError, match=r"gone\.bddl"):
        tasks.read_problem(tmp_path / "gone.bddl")


# ---------------------------------------------------------------------------------- what is recorded
def test_a_hash_stands_for_liberos_own_env_only_where_it_is_the_recorded_one(tmp_path, monkeypatch):
    def uncalled() -> str:
        pytest.fail("nothing to compare with")

    monkeypatch.setattr(libero_recorded, "FILE", tmp_path / "recorded.json")
    kept = dict.fromkeys(libero_recorded.PACKAGES, "1")
    monkeypatch.setattr(libero_recorded, "version_of", kept.get)
    monkeypatch.setattr(
        libero_recorded, "_kept", functools.cache(libero_recorded._kept.__wrapped__)
    )
    assert not libero_recorded.is_recorded("episode", uncalled)
    libero_recorded.record({"episode": "a", "lerobot's": "b"})
    assert libero_recorded.is_recorded("episode", lambda: "a")
    assert not libero_recorded.is_recorded("episode", lambda: "b")
    assert not libero_recorded.is_recorded("another", uncalled)
    kept["lerobot"] = "2"
    assert libero_recorded.is_recorded("episode", lambda: "a"), "lerobot has no part in it"
    assert not libero_recorded.is_recorded("lerobot's", uncalled)
    kept["mujoco"] = "2"
    assert not libero_recorded.is_recorded("episode", uncalled)
    libero_recorded.record({"another": "c"})
    assert not libero_recorded.is_recorded("episode", uncalled), "of other versions"


def test_each_recorded_case_looked_at_something_of_its_own():
    hashes = libero_recorded._kept()["hashes"]
    assert len({*hashes.values(), libero_recorded.Trace().text}) == len(hashes) + 1


def test_where_memory_is_short_whole_worlds_go_the_oldest_first(monkeypatch):
    """Of one that several tasks share, all go, or none where a slot is in one of them."""
    free = iter([1 << 30, 1 << 30, 3 << 30])
    monkeypatch.setattr("sim.libero.scenes.free_memory_bytes", lambda: next(free))
    scenes = {name: SimpleNamespace(key=key) for name, key in zip("abcdef", "xyxzwz", strict=True)}
    closed: list[str] = []
    forgotten: list[str] = []
    slots = {0: SimpleNamespace(scene=scenes["d"], forget=forgotten.append)}
    made = Scenes(LiberoConfig(), (), slots)
    made.built.update(scenes)
    made.worlds.update(
        {key: SimpleNamespace(close=functools.partial(closed.append, key)) for key in "xyzw"}
    )
    made.make_room()
    assert closed == forgotten == ["x", "y"]
    assert list(made.built) == ["d", "e", "f"] and set(made.worlds) == {"z", "w"}
    made.worlds.clear()  # (these are nobody's to free)
