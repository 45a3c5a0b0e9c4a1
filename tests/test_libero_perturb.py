"""LIBERO's perturbations: words, pictures, scenes; each repeats, none leaks into another slot.
And faults of LIBERO runs."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from contracts import assert_same_observation, assert_same_step
from libero_reference import libero_problem
from test_libero import Hostile, installed, saved

from sim import perturb_image
from sim.libero import scenes
from sim.libero.perturb import PerturbedLibero
from sim.libero.perturb_language import paraphrase
from sim.libero.settings import LiberoConfig
from sim.libero.tasks import SUITES, suite_tasks
from vla_rl import build
from vla_rl.assembly.env_and_policy import select_tasks
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.specs import EpisodeSpec

SIZE, TASK = 48, "libero_object/2"
REST = np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (8, 1))
LEVELS = range(1, 6)


# -------------------------------------------------------------------------------------------- words
@installed
def test_every_instruction_has_other_words_at_every_level() -> None:
    texts = sorted({task.instruction for suite in SUITES for task in suite_tasks(suite)})
    for i, text in enumerate(texts):
        versions = [paraphrase(text, level, np.random.default_rng(i)) for level in LEVELS]
        assert text not in versions and versions == [
            paraphrase(text, n, np.random.default_rng(i)) for n in LEVELS
        ]
        assert text in versions[0], "level 1 pads"
        assert text not in versions[3] and text not in versions[4], "nouns are described"


DRAWERS, SHELF = {"wooden_cabinet", "white_cabinet"}, {"wooden_two_layer_shelf"}
# words that a paraphrase may use, and the categories of which the scene must then have one
STANDS_FOR = {
    r"drawers?|pull-out|sliding|slides out|set of": DRAWERS,
    r"shelf unit|boards|ledge|wooden (board|surface)|for storage": SHELF,
    r"soup|broth": {"alphabet_soup"},
    r"barbecue|grilled": {"bbq_sauce"},
    r"tomato|pasta": {"tomato_sauce", "alphabet_soup"},
    r"ketchup|catsup|fries": {"ketchup"},
    r"bowl|basin|crock|vessel for cereal": {"akita_black_bowl", "white_bowl"},
    r"cups?|beaker|hot drinks": {
        "porcelain_mug",
        "red_coffee_mug",
        "white_yellow_mug",
        "glazed_rim_porcelain_ramekin",
    },
    r"baking|souffles": {"glazed_rim_porcelain_ramekin"},
    r"plate|platter|tableware": {"plate"},
    r"serving board|carrying": {"wooden_tray"},
    r"hamper|crate|woven": {"basket"},
    r"volume|hardcover|pages": {"black_book"},
    r"desk organizer|desk items": {"desk_caddy"},
    r"skillet|pan|cookware": {"chefmate_8_frypan"},
    r"coffee|espresso": {"moka_pot"},
    r"cooker|hob|burner": {"flat_stove"},
    r"oven|appliance that warms": {"microwave"},
    r"bottle (stand|holder)|frame": {"wine_rack"},
    r"of wine": {"wine_bottle"},
    r"biscuits?|baked sweets": {"cookies"},
    r"carton|cow": {"milk"},
    r"juice|orange|citrus": {"orange_juice"},
    r"vinaigrette|salad|lettuce": {"salad_dressing", "new_salad_dressing"},
    r"custard$|chocolate|brown dessert": {"chocolate_pudding"},
    r"soft cheese|cheese spread|bagels": {"cream_cheese"},
    r"dairy|butter": {"butter"},
}


@installed
def test_paraphrases_name_what_is_there_in_whole_phrases() -> None:
    scenes = {}
    for task in (task for suite in SUITES for task in suite_tasks(suite)):
        things = {*task.problem.objects.values(), *task.problem.fixtures.values()}
        scenes[task.instruction, bool(things & SHELF)] = things
    for (text, _), things in scenes.items():
        for level, seed in ((level, seed) for level in LEVELS for seed in range(10)):
            words = paraphrase(text, level, np.random.default_rng(seed), things)
            for pattern, wanted in STANDS_FOR.items():
                assert not re.search(rf"\b({pattern})\b", words) or things & wanted, (
                    f"{text!r} became {words!r}: {pattern}"
                )
            broken = re.search(
                r"\b(\w+) \1\b|\b(from|on|in|at|of|to|for|with) (from|on|in|at|of|to|for)\b", words
            )
            assert not broken, f"{text!r} became {words!r}: {broken}"
            assert "push shut it" not in words


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (2, r"(grab|lift|take|get hold of) the milk and (set|lay|deposit) it in the basket"),
        (
            4,
            r"pick up the white drink from a cow and place it in the woven container for groceries",
        ),
        (
            5,
            r"in the woven container for groceries is where the white drink from a cow should end up, so bring it there",
        ),
    ],
)
def test_words_are_replaced_by_kind(level, expected) -> None:
    for seed in range(5):
        text = paraphrase(
            "pick up the milk and place it in the basket", level, np.random.default_rng(seed)
        )
        assert re.fullmatch(expected, text), text


def test_a_sentence_without_known_words_is_padded() -> None:
    assert "wave" in (text := paraphrase("wave", 3, np.random.default_rng(0))) and text != "wave"


# ----------------------------------------------------------------------------------------- pictures
@pytest.fixture
def picture() -> np.ndarray:
    """Squares with sharp edges."""
    y, x = np.mgrid[0:64, 0:64] // 8
    return np.stack([(x + y) % 2 * 200 + 20, x * 30, y * 30], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("kind", perturb_image.KINDS)
def test_noise_repeats_and_grows_with_severity(kind, picture) -> None:
    versions = [
        perturb_image.corrupt(picture, kind, severity, np.random.default_rng(3))
        for severity in (2, 6, 10)
    ]
    again = perturb_image.corrupt(picture, kind, 10, np.random.default_rng(3))
    np.testing.assert_array_equal(versions[-1], again)
    assert again.shape == picture.shape and again.dtype == np.uint8
    changes = [np.abs(v.astype(float) - picture).mean() for v in versions]
    assert 0 < changes[0] < changes[1] < changes[2]
    if kind != "glass_blur":  # which rather scatters edges than hides them
        edges = [np.abs(np.diff(v.astype(float), axis=1)).mean() for v in (picture, versions[-1])]
        assert edges[1] < edges[0]


@pytest.mark.parametrize("kind", ["gaussian_blur", "zoom_blur", "motion_blur", "glass_blur"])
def test_blurs_keep_an_even_picture_as_it_is(kind) -> None:
    even = np.full((40, 56, 3), (10, 120, 240), dtype=np.uint8)
    np.testing.assert_array_equal(
        perturb_image.corrupt(even, kind, 7, np.random.default_rng(0)), even
    )


def test_an_unknown_noise_is_named() -> None:
    with pytest.raises(ValueError, match=r"'snow'.*motion_blur"):
        perturb_image.corrupt(np.zeros((8, 8, 3), np.uint8), "snow", 1, np.random.default_rng(0))


# -------------------------------------------------------------------------------- without any scene
@installed
def test_libero_declares_its_seven_factors_and_three_controls() -> None:
    declared = build.implementation("env", "libero").perturbations
    factors = [name for name, p in declared.items() if not p.control]
    assert factors == ["camera", "robot", "language", "light", "background", "noise", "layout"]
    assert all(declared[name].levels == tuple(LEVELS) for name in factors)


@installed
@pytest.mark.parametrize(
    ("perturbation", "config", "split", "words"),
    [
        ("colour:1", {}, "held_out", r"'colour:1' of libero is unknown.*camera \(1 to 5\)"),
        ("camera:6", {}, "held_out", "'camera:6'"),
        (
            "noise:1",
            {"cameras": ["robot0_eye_in_hand"]},
            "held_out",
            "agentview, which is not among",
        ),
        ("robot_benchmark:1", {}, "train", "split 'train' are sampled"),
    ],
)
def test_perturbations_that_cannot_be_are_named(perturbation, config, split, words) -> None:
    simulator = PerturbedLibero(LiberoConfig(tasks=["2"], camera_size=SIZE, **config))
    with pytest.raises(ConfigError, match=words):
        simulator.start(0, EpisodeSpec(TASK, 0, split, perturbation=perturbation))


@installed
def test_held_out_tasks_of_a_suite_are_named_by_id_or_number() -> None:
    offered = PerturbedLibero(LiberoConfig(suite="libero_object")).tasks
    trained = select_tasks(offered, [], exclude=["8", "libero_object/9"])
    assert [task.task_id for task in trained] == [f"libero_object/{i}" for i in range(8)]
    assert [t.task_id for t in select_tasks(offered, ["libero_object/1", "0"])] == [
        "libero_object/0",
        "libero_object/1",
    ]
    with pytest.raises(ConfigError, match=r"'libero_goal/1'.*libero_object/0"):
        select_tasks(offered, ["libero_goal/1"])


@installed
def test_controls_say_nothing_or_something_else() -> None:
    simulator = PerturbedLibero(LiberoConfig(tasks=["2"]))
    episode = EpisodeSpec(TASK, 0, "held_out")
    usual = simulator.instruction_of(episode)
    assert simulator.instruction_of(replace(episode, perturbation="no_instruction:1")) == ""
    other = simulator.instruction_of(replace(episode, perturbation="other_instruction:1"))
    assert other != usual and other in {task.instruction for task in suite_tasks("libero_object")}


# -------------------------------------------------------------------------------------- real scenes
@pytest.fixture(scope="module")
def simulator():
    """One simulator for all tests; they must leave nothing that others would see."""
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    simulator = PerturbedLibero(LiberoConfig(suite="libero_object", tasks=["2"], camera_size=SIZE))
    yield simulator
    simulator.close()


def episode(perturbation: str = "", number: int = 1) -> EpisodeSpec:
    return EpisodeSpec(TASK, number, "held_out", perturbation=perturbation)


def change(a, b, camera: str = "agentview") -> float:
    return float(np.abs(a.images[camera].astype(float) - b.images[camera]).mean())


@pytest.mark.real_sim
@pytest.mark.parametrize(
    "factor", [n for n, p in PerturbedLibero.perturbations.items() if not p.control]
)
def test_a_factor_changes_its_own_episode_alone_and_repeats(simulator, factor) -> None:
    plain = simulator.start(0, episode())
    qpos = simulator.slot(0).data.qpos.copy()
    after = simulator.step(0, REST)
    simulator.start(0, episode())
    perturbed = simulator.start(1, episode(f"{factor}:4"))
    moved = np.abs(simulator.slot(1).data.qpos - qpos)
    # a neighbour's changes do not show, nor move anything
    assert_same_step(simulator.step(0, REST), after)
    stepped = simulator.step(1, REST)
    assert_same_observation(simulator.start(2, episode()), plain)
    assert_same_observation(simulator.start(2, episode(f"{factor}:4")), perturbed)
    assert_same_step(simulator.step(2, REST), stepped)

    assert (perturbed.instruction != plain.instruction) == (factor == "language")
    if factor in ("camera", "light", "background", "noise"):
        assert change(perturbed, plain) > 3.0 and moved.max() == 0.0
    if factor in ("camera", "noise"):
        assert change(perturbed, plain, "robot0_eye_in_hand") == 0.0
    if factor == "language":
        assert change(perturbed, plain) == 0.0
    if factor == "robot":
        assert np.linalg.norm(moved[:7]) == pytest.approx(0.4) and moved[9:].max() == 0.0
        drift = np.abs(stepped.observation.proprio[:3] - perturbed.proprio[:3]).max()
        assert np.abs(perturbed.proprio[:3] - plain.proprio[:3]).max() > 0.02 and drift < 0.005, (
            "and it holds"
        )
    if factor == "layout":
        assert 0.02 < moved[9:].max() <= 0.12 + 0.01 and moved[:7].max() < 0.02


@pytest.mark.real_sim
def test_cameras_see_what_lies_inside_their_opening() -> None:
    """Half the picture of a camera with an opening of 90 degrees is as wide as its distance."""
    mujoco = pytest.importorskip("mujoco")
    from sim.libero.perturb_scene import in_view

    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><camera name='a' fovy='90'/></worldbody></mujoco>"
    )
    points = np.array(
        [[0.9, 0, 0], [1.1, 0, 0], [0, -0.9, 0], [0, -1.1, 0], [0, 0, 2], [1.9, 1.9, -1]],
        dtype=float,
    )
    # from 1 m above the origin, and turned over
    down, up = np.array([1.0, 0, 0, 0]), np.array([0.0, 1, 0, 0])
    height = np.array([0.0, 0.0, 1.0])
    assert in_view(model, 0, height, down, points).tolist() == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]
    assert in_view(model, 0, height, up, points).tolist() == [
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert in_view(model, 0, height, down, np.zeros((0, 3))).tolist() == []


def shown(simulator, perturbation: str, number: int, name: str) -> bool:
    """Whether the agent view of an episode changes where an object vanishes."""
    usual = simulator.start(0, episode(perturbation, number)).images["agentview"]
    s, model = simulator.slot(0), simulator.scene(TASK).model
    body = model.body(f"{name}_main").id
    geoms = np.flatnonzero((model.body_rootid[model.geom_bodyid] == body) & (model.geom_group == 1))
    gone = model.geom_rgba[geoms].copy()
    gone[:, 3] = 0.0
    edits = {**s.snapshot.edits, "geom_rgba": (geoms, gone)}
    return not np.array_equal(s.scene.world.render(s.seen.qpos, edits, True)["agentview"], usual)


@pytest.mark.real_sim
def test_a_turned_camera_still_shows_what_the_task_is_about(simulator) -> None:
    assert all(shown(simulator, "camera:5", number, "basket_1") for number in range(12))


@pytest.mark.real_sim
@pytest.mark.parametrize("factor", ["camera", "layout"])
def test_it_is_said_where_nothing_suitable_is_found(simulator, monkeypatch, caplog, factor) -> None:
    from sim.libero import perturb_scene

    monkeypatch.setattr(perturb_scene, "_TRIES", 0)
    plain = simulator.start(0, episode(number=3))
    perturbed = simulator.start(0, episode(f"{factor}:5", 3))
    assert_same_observation(perturbed, plain)
    assert re.search(
        rf"{factor}:5: nothing suitable.*initial state 3 .*{TASK}, which runs unperturbed",
        caplog.text,
    )


@pytest.mark.real_sim
def test_layouts_are_found_where_things_still_fall_at_the_start() -> None:
    """In official living-room states a bottle begins inside the table; MuJoCo from 3.4 on throws it
    up, and it still falls when the episode starts. It comes to lie where the published MuJoCo
    leaves it."""
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    simulator = PerturbedLibero(
        LiberoConfig(suite="libero_90", tasks=["47"], camera_size=16, look="light")
    )
    start = EpisodeSpec("libero_90/47", 0, "held_out")
    simulator.start(0, start)
    names = list(simulator.task(start.task_id).problem.objects)
    state = simulator.state(0)
    before = {name: state.position(name) for name in names}
    simulator.start(0, replace(start, perturbation="layout:3"))
    moved = {name: state.position(name) - before[name] for name in names}
    assert 0.02 < max(np.abs(shift[:2]).max() for shift in moved.values()) < 0.09 + 0.01
    heights = [moved[name][2] for name in names if name != "ketchup_1"]
    assert np.abs(heights).max() < 0.01 and state.position("ketchup_1")[2] == pytest.approx(
        0.509, abs=0.01
    )
    assert np.abs(simulator.slot(0).data.qvel).max() < 0.1, "and all is at rest"
    simulator.close()


@pytest.mark.real_sim
def test_objects_stay_on_the_floor_and_apart_in_another_layout(simulator) -> None:
    simulator.start(0, episode())
    names = list(simulator.task(TASK).problem.objects)
    before = {name: simulator.state(0).position(name) for name in names}
    for number in (1, 2):
        simulator.start(0, episode("layout:5", number))
        view = simulator.state(0)
        assert not any(view.holds())
        heights = [view.position(name)[2] - before[name][2] for name in names]
        assert np.abs(heights).max() < 0.01
    assert max(np.abs(view.position(name) - before[name]).max() for name in names) > 0.03


@pytest.mark.real_sim
def test_levels_of_one_episode_push_in_one_direction(simulator) -> None:
    simulator.start(0, episode())
    home = simulator.slot(0).data.qpos[:7].copy()
    offsets = []
    for level in LEVELS:
        simulator.start(0, episode(f"robot:{level}"))
        offsets.append(simulator.slot(0).data.qpos[:7] - home)
    np.testing.assert_allclose(
        [np.linalg.norm(o) for o in offsets], [0.1, 0.2, 0.3, 0.4, 0.5], atol=1e-9
    )
    np.testing.assert_allclose(offsets[4] / 5, offsets[0], atol=1e-9)


@pytest.mark.real_sim
def test_the_benchmarks_robot_is_put_back_by_its_reset(simulator) -> None:
    """The stale goal of the reset drags it for a while: less than the nominal 0.3 rad, unlike
    the held start."""
    simulator.start(0, episode())
    home = simulator.slot(0).data.qpos[:7].copy()
    simulator.start(0, episode("robot_benchmark:3"))
    assert 0.05 < np.linalg.norm(simulator.slot(0).data.qpos[:7] - home) < 0.29
    simulator.start(0, episode())
    np.testing.assert_array_equal(simulator.slot(0).data.qpos[:7], home)


# ------------------------------------------------------------------------------------------- faults
@pytest.mark.real_sim
def test_hostile_initial_states_stop_the_episode_and_do_not_run(
    simulator, monkeypatch, tmp_path
) -> None:
    target = tmp_path / "made_by_the_pickle"
    evil = saved(tmp_path / "evil.pruned_init", Hostile(target))
    monkeypatch.setitem(simulator._tasks, TASK, replace(simulator.task(TASK), init_file=evil))
    monkeypatch.setattr(simulator.scene(TASK), "task", simulator.task(TASK))
    with pytest.raises(UserError, match=r"evil\.pruned_init.*nothing but numpy arrays"):
        simulator.start(0, episode(number=33))
    assert not target.exists()


@installed
def test_a_task_file_that_does_not_parse_stops_the_episode(monkeypatch, tmp_path) -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    broken = tmp_path / "broken.bddl"
    broken.write_text("(define (problem LIBERO_Floor_Manipulation)")
    monkeypatch.setattr(scenes, "make_context", lambda size: SimpleNamespace(free=lambda: None))
    simulator = PerturbedLibero(LiberoConfig(tasks=["2"]))
    monkeypatch.setitem(simulator._tasks, TASK, replace(simulator.task(TASK), bddl_file=broken))
    with pytest.raises(UserError, match=r"broken\.bddl is no BDDL problem.*never closed"):
        simulator.start(0, EpisodeSpec(TASK, 0))


class BrokenGL(PerturbedLibero):
    """A worker whose GL driver fails when the scene is to be drawn."""

    def scene(self, task_id):
        raise MissingDependency(
            "The OpenGL backend 'egl' cannot render off-screen here (no device)"
        )


@installed
def test_gl_that_fails_in_a_worker_is_one_clear_error() -> None:
    from sim.pool import ProcessPool

    config = LiberoConfig(tasks=["2"], camera_size=SIZE)
    with ProcessPool(functools.partial(BrokenGL, config)) as pool:
        pool.start(0, EpisodeSpec(TASK, 0))
        with pytest.raises(MissingDependency, match="cannot render off-screen"):
            pool.poll()


class FailsOnce(PerturbedLibero):
    """A picture that cannot be read, the first time that a marker file is not there."""

    def __init__(self, config: LiberoConfig, marker: str) -> None:
        super().__init__(config)
        self.marker = Path(marker)

    def picture_of(self, slot: int, images):
        if self.slot(slot).elapsed and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("mjr_readPixels failed")
        return super().picture_of(slot, images)


@pytest.mark.slow
@pytest.mark.real_sim
def test_an_episode_whose_drawing_failed_runs_again_in_the_pool(tmp_path) -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    from sim.pool import ProcessPool

    config = LiberoConfig(tasks=["2"], camera_size=SIZE, look="light")
    with ProcessPool(functools.partial(FailsOnce, config, str(tmp_path / "struck"))) as pool:
        pool.start(0, episode("camera:2"))
        first = pool.poll()[0].observation
        pool.step(0, REST)
        assert "mjr_readPixels failed" in pool.poll()[0].error and pool.restarts == 0
        pool.start(0, episode("camera:2"))
        assert_same_observation(pool.poll()[0].observation, first)
        pool.step(0, REST)
        assert pool.poll()[0].error is None
