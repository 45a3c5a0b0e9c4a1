"""Pictures that leave out what a camera cannot see: every byte as if everything was drawn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from libero_reference import libero_problem

from sim.gl import free_context, make_context
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from sim.libero.world import World
from vla_rl.errors import MissingDependency
from vla_rl.specs import CameraSpec, EpisodeSpec

mujoco = pytest.importorskip("mujoco")
from sim.libero import look, sights  # noqa: E402  (after mujoco is known to be there)

pytestmark = pytest.mark.real_sim
WIDTH, HEIGHT, CAMERAS = 40, 28, 60


@pytest.fixture(scope="module")
def gl() -> Iterator[object]:
    try:
        context = make_context(WIDTH)
    except MissingDependency as error:
        pytest.skip(str(error))
    yield context
    free_context(context)


def scene(mirror: str, seed: int = 0) -> mujoco.MjModel:
    """Things of all kinds within a metre or so, a mirror among them, and cameras all around."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(24):
        kind = ("box", "sphere", "capsule", "cylinder", "ellipsoid", "mesh")[number % 6]
        at, turn = rng.uniform(-1, 1, 3), rng.normal(size=4)
        shape = 'mesh="blob"' if kind == "mesh" else f'size="{_text(rng.uniform(0.02, 0.2, 3))}"'
        clear = 0.4 if number % 5 == 0 else 1
        rows.append(
            f'<geom type="{kind}" {shape} pos="{_text(at)}" quat="{_text(turn)}" group="{number % 4}" '
            f'rgba="{_text(rng.uniform(0, 1, 3))} {clear}"/>'
        )
    for number in range(CAMERAS):
        at, there = rng.uniform(-1.5, 1.5, 3), rng.uniform(-1, 1, 3)
        rows.append(
            f'<body name="t{number}" pos="{_text(there)}"/><camera name="c{number}" '
            f'pos="{_text(at)}" mode="targetbody" target="t{number}" fovy="{20 + number}"/>'
        )
    ball = rng.normal(size=(400, 3)) * (0.3, 0.1, 0.05)
    return mujoco.MjModel.from_xml_string(f"""<mujoco>
      <asset>
        <mesh name="blob" vertex="{_text(ball.ravel())}"/>
        <material name="mirror" reflectance="0.6" rgba=".3 .3 .4 1"/>
        <material name="glass" reflectance="0.6" rgba=".3 .3 .4 .5"/>
      </asset>
      <worldbody>
        <light pos="0 0 2" castshadow="false"/>
        <body>{mirror}{"".join(rows)}</body>
      </worldbody></mujoco>""")


def _text(numbers: np.ndarray) -> str:
    return " ".join(f"{number:.4f}" for number in numbers)


MIRRORS = {
    "none": "",
    "a box": '<geom type="box" size=".3 .2 .05" group="1" material="mirror" euler="20 10 0"/>',
    "two boxes": '<geom type="box" size=".3 .2 .05" pos=".6 0 0" group="1" material="mirror"/>'
    '<geom type="box" size=".3 .3 .05" pos="-.6 0 0" group="1" material="mirror"/>',
    "a hidden box, then one": '<geom type="box" size=".3 .2 .05" group="0" material="mirror"/>'
    '<geom type="box" size=".3 .3 .05" pos="-.6 0 0" group="1" material="mirror"/>',
    "a plane": '<geom type="plane" size=".5 .5 .1" pos="0 0 -.5" group="1" material="mirror"/>',
    "a plane without end": '<geom type="plane" size="0 0 1" pos="0 0 -1" group="1" '
    'material="mirror"/>',
    "glass": '<geom type="box" size=".3 .2 .05" group="1" material="glass"/>',
}


@pytest.mark.parametrize("mirror", MIRRORS)
def test_every_byte_is_as_if_everything_was_drawn(mirror, gl, monkeypatch) -> None:
    model = scene(MIRRORS[mirror])
    cameras = [CameraSpec(f"c{number}", WIDTH, HEIGHT) for number in range(CAMERAS)]
    world = World(model, look.Look("exact"), cameras, gl)
    taken: list[list[sights.Shot]] = []
    shots = sights.Sights.shots
    monkeypatch.setattr(
        sights.Sights, "shots", lambda *given: taken.append(shots(*given)) or taken[-1]
    )
    pictures = world.render(np.zeros(0), {}, rotate=False)
    monkeypatch.setattr(
        sights.Sights, "shots", lambda self, *_: [sights.Shot(self._geoms[:0], True)]
    )
    whole = world.render(np.zeros(0), {}, rotate=False)
    world.close()
    for name, picture in whole.items():
        np.testing.assert_array_equal(pictures[name], picture, err_msg=name)
    assert len({picture.tobytes() for picture in whole.values()}) > CAMERAS / 2
    hidden = [len(shot.hidden) for each in taken for shot in each]
    mirrored = [shot.mirrors for each in taken for shot in each]
    if mirror == "glass":  # whether it reflects is not settled, so nothing is left out
        assert not any(hidden) and all(mirrored)
        return
    assert np.mean(hidden) > 3 and min(hidden) < max(hidden)
    assert any(mirrored) == (mirror != "none") and not all(mirrored)
    np.testing.assert_array_equal(model.geom_group[-24:], np.arange(24) % 4)


def test_where_a_light_casts_shadows_all_is_drawn() -> None:
    model = scene(MIRRORS["none"])
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    seen = sights.Sights(model, np.array([0, 1, 1, 0, 0, 0]))
    assert any(len(seen.shots(data, n, WIDTH, HEIGHT)[0].hidden) for n in range(CAMERAS))
    model.light_castshadow[0] = 1
    assert not any(len(seen.shots(data, n, WIDTH, HEIGHT)[0].hidden) for n in range(CAMERAS))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["libero_goal/7", "libero_object/2", "libero_10/2"])
def test_pictures_of_liberos_scenes_keep_every_byte(task, monkeypatch) -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    suite, number = task.split("/")
    simulator = LiberoSimulator(LiberoConfig(suite=suite, tasks=[number], camera_size=64))
    simulator.start(0, EpisodeSpec(task, 0, split="held_out"))
    careful = [simulator.step(0, np.full((4, 7), -0.3)).observation.images for _ in range(2)][-1]
    monkeypatch.setattr(
        sights.Sights, "shots", lambda self, *_: [sights.Shot(self._geoms[:0], True)]
    )
    for name, picture in simulator.observe(0).images.items():
        np.testing.assert_array_equal(careful[name], picture)
    simulator.close()
