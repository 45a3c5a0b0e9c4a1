"""LIBERO's scenes: equal to the package's own environment bit by bit, whatever ran in a slot
before; looks, faults, pool."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
from contracts import assert_same_observation, assert_same_step, check_simulator
from libero_recorded import Trace, is_recorded
from libero_reference import Reference, libero_problem

from sim.libero import package
from sim.libero.init_states import read_init_states
from sim.libero.plain import REST
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from vla_rl import splits
from vla_rl.errors import MissingDependency, UserError
from vla_rl.specs import EpisodeSpec, Instead

SIZE, CHUNK = 48, 8
SPATIAL = "libero_spatial/0"

pytestmark = pytest.mark.real_sim


@pytest.fixture(autouse=True, scope="module")
def _assets() -> None:
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")


def make(suite: str, *tasks: str, **options) -> LiberoSimulator:
    return LiberoSimulator(
        LiberoConfig(suite=suite, tasks=list(tasks), camera_size=SIZE, **options)
    )


@pytest.fixture(scope="module")
def simulator():
    """One simulator for the whole file; tests must leave nothing that others would see."""
    simulator = make("libero_spatial", "0", "1")
    yield simulator
    simulator.close()


@pytest.fixture(scope="module")
def reference():
    reference = Reference("libero_spatial", 0, SIZE)
    yield reference
    reference.close()


def smooth_actions(steps: int, seed: int) -> np.ndarray:
    """Actions [steps 7] that wander like a hand does, the gripper opening and closing."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(steps, 7))
    for step in range(1, steps):
        noise[step] = 0.85 * noise[step - 1] + 0.5 * noise[step]
    noise[:, 2] -= 0.25  # towards the table, so that there are contacts
    return np.clip(noise, -1.0, 1.0).astype(np.float32)


def assert_equal_to(
    reference: Reference, simulator: LiberoSimulator, slot: int, observed: dict, observation
) -> None:
    """Physics bit by bit, images byte by byte (turned by 180 degrees), proprio to single
    precision."""
    data = simulator.slot(slot).data
    np.testing.assert_array_equal(data.qpos, reference.data.qpos)
    np.testing.assert_array_equal(data.qvel, reference.data.qvel)
    np.testing.assert_array_equal(
        observation.proprio[:3], observed["robot0_eef_pos"].astype(np.float32)
    )
    np.testing.assert_array_equal(
        observation.proprio[6:], observed["robot0_gripper_qpos"].astype(np.float32)
    )
    np.testing.assert_allclose(
        observation.proprio[3:6], axis_angle(observed["robot0_eef_quat"]), atol=1e-6
    )
    for camera, image in observation.images.items():
        np.testing.assert_array_equal(image, observed[f"{camera}_image"][::-1, ::-1])


def axis_angle(xyzw: np.ndarray) -> np.ndarray:
    from robosuite.utils.transform_utils import quat2axisangle

    return quat2axisangle(np.array(xyzw))


def run_beside(
    reference: Reference | None,
    simulator: LiberoSimulator,
    slot: int,
    actions: np.ndarray,
    trace: Trace | None = None,
) -> int:
    """Both take the actions chunk by chunk and are compared after each; without a ``reference`` ours
    is looked at alone. Returns the control steps taken."""
    taken, trace = 0, trace or Trace()
    for at in range(0, len(actions), CHUNK):
        step = simulator.step(slot, actions[at : at + CHUNK])
        taken += step.executed
        trace.add(step.executed, step.success)
        trace.look(simulator.slot(slot).data, step.observation)
        if reference is not None:
            observed = reference.run(actions[at : at + CHUNK])
            assert step.success == bool(reference.success)
            np.testing.assert_array_equal(simulator.slot(slot).data.qpos, reference.data.qpos)
            if not step.success:
                assert_equal_to(reference, simulator, slot, observed, step.observation)
        if step.success:
            break
    return taken


# ------------------------------------------------------------------------ equal to LIBERO's own env
@pytest.mark.slow
def test_equal_to_liberos_own_env_also_after_a_cached_reset_and_in_a_used_slot(
    simulator, reference
) -> None:
    actions = smooth_actions(3 * CHUNK, seed=0)
    episode = EpisodeSpec(SPATIAL, 7, split="held_out")
    first = simulator.start(0, episode)
    assert_equal_to(reference, simulator, 0, reference.reset(0, official=7), first)
    run_beside(reference, simulator, 0, actions)

    # another state and other fixtures in the same slot, then again
    simulator.start(0, EpisodeSpec(SPATIAL, 3))
    simulator.step(0, actions[:CHUNK])
    assert_same_observation(simulator.start(0, episode), first)
    reference.reset(0, official=7)
    run_beside(reference, simulator, 0, actions[: 2 * CHUNK])


def seed_of(number: int) -> int:
    return splits.stable_seed("libero", SPATIAL, "train", number, 0) % 2**32


def test_sampled_states_are_those_that_libero_draws_from_the_seed(
    simulator, reference, monkeypatch
) -> None:
    monkeypatch.setattr(simulator.config, "arm_noise", 0.0)
    started = simulator.start(0, EpisodeSpec(SPATIAL, 105))
    assert_equal_to(reference, simulator, 0, reference.reset(seed_of(105), official=None), started)
    run_beside(reference, simulator, 0, smooth_actions(CHUNK, seed=1))


@pytest.mark.slow
def test_arm_noise_is_that_of_an_initial_state_which_libero_is_given(simulator, reference) -> None:
    """The sampled state with a noisy arm, handed to LIBERO's own `set_init_state` as evaluations
    do with official ones."""
    reference.reset(seed_of(6), official=None, settle=0)
    state = reference.env.get_sim_state()
    state[1:8] += 0.02 * np.random.default_rng(seed_of(6)).standard_normal(7)
    reference.env.set_init_state(state)
    for _ in range(10):
        observed = reference.step(REST)
    started = simulator.start(0, EpisodeSpec(SPATIAL, 6))
    assert_equal_to(reference, simulator, 0, observed, started)
    run_beside(reference, simulator, 0, smooth_actions(CHUNK, seed=1))


def test_arms_of_sampled_states_spread_as_those_of_official_ones(simulator, monkeypatch) -> None:
    monkeypatch.setattr(simulator.config, "settle_steps", 0)
    sampled = [
        simulator.initial_state(EpisodeSpec(SPATIAL, 200 + n)).seen.qpos[:7] for n in range(50)
    ]
    official = read_init_states(simulator.task(SPATIAL).init_file)[:, 1:8]
    np.testing.assert_allclose(np.std(sampled, axis=0), official.std(axis=0), rtol=0.35)
    np.testing.assert_allclose(
        np.mean(sampled, axis=0), official.mean(axis=0), atol=4 * 0.02 * np.sqrt(2 / 50)
    )


def test_slots_with_other_fixtures_do_not_disturb_each_other(simulator) -> None:
    """Fixtures stand in the model that slots share, so what one slot shows must not depend on
    who was drawn before."""
    actions = smooth_actions(2 * CHUNK, seed=2)
    episodes = [
        EpisodeSpec(SPATIAL, 0),
        EpisodeSpec(SPATIAL, 1),
        EpisodeSpec("libero_spatial/1", 0),
    ]
    alone = []
    for episode in episodes:
        start = simulator.start(0, episode)
        alone.append(
            (start, simulator.step(0, actions[:CHUNK]), simulator.step(0, actions[CHUNK:]))
        )
    starts = [
        simulator.start(slot, episode)
        for slot, episode in enumerate([*episodes, episodes[0]], start=1)
    ]
    first = [simulator.step(slot, actions[:CHUNK]) for slot in (1, 2, 3, 4)]
    second = [simulator.step(slot, actions[CHUNK:]) for slot in (4, 3, 2, 1)][::-1]
    for slot, (start, one, two) in enumerate([*alone, alone[0]]):
        assert_same_observation(starts[slot], start)
        assert_same_step(first[slot], one)
        assert_same_step(second[slot], two)
    fixtures = [dict(simulator.initial_state(e).edits)["body_pos"][1] for e in episodes[:2]]
    assert np.abs(fixtures[0] - fixtures[1]).max() > 1e-4, "else this test shows nothing"


def test_official_states_repeat_after_fifty_and_differ_from_sampled_ones(simulator) -> None:
    official = simulator.initial_state(EpisodeSpec(SPATIAL, 7, split="held_out"))
    assert simulator.initial_state(EpisodeSpec(SPATIAL, 57, split="held_out")) is official
    sampled = [simulator.initial_state(EpisodeSpec(SPATIAL, n)).seen.qpos for n in (0, 1)]
    assert np.abs(sampled[0] - sampled[1]).max() > 1e-3
    assert min(np.abs(sampled[n] - official.seen.qpos).max() for n in (0, 1)) > 1e-3
    before = np.random.get_state()[1].copy()
    simulator.initial_state(EpisodeSpec(SPATIAL, 2))
    np.testing.assert_array_equal(
        np.random.get_state()[1], before, err_msg="numpy's global generator is left alone"
    )


def test_the_fast_controller_agrees_to_rounding(simulator) -> None:
    fast = make("libero_spatial", "0", controller="fast", look="light")
    actions = smooth_actions(2 * CHUNK, seed=3)
    episode = EpisodeSpec(SPATIAL, 9, split="held_out")
    for each in (simulator, fast):
        each.start(0, episode)
        each.step(0, actions)
    np.testing.assert_allclose(
        fast.slot(0).data.qpos, simulator.slot(0).data.qpos, atol=1e-6, rtol=0
    )
    fast.close()


def test_light_look_has_the_same_physics_and_a_similar_picture(simulator) -> None:
    light = make("libero_spatial", "0", look="light")
    episode = EpisodeSpec(SPATIAL, 4, split="held_out")
    pictures = [
        each.start(0, episode).images["agentview"].astype(float) for each in (simulator, light)
    ]
    assert 0 < np.abs(pictures[0] - pictures[1]).mean() < 25
    assert np.corrcoef(pictures[0].ravel(), pictures[1].ravel())[0, 1] > 0.9
    actions = smooth_actions(CHUNK, seed=4)
    states = []
    for each in (simulator, light):
        each.step(0, actions)
        states.append(each.slot(0).data.qpos.copy())
    np.testing.assert_array_equal(*states)
    scenes = [each.scene(SPATIAL).model.mesh_facenum.sum() for each in (simulator, light)]
    assert scenes[1] < 0.5 * scenes[0]
    light.close()


def test_what_experts_and_critics_read(simulator) -> None:
    simulator.start(0, EpisodeSpec(SPATIAL, 0, split="held_out"))
    view = simulator.state(0)
    assert view.problem.goal == (("on", "akita_black_bowl_1", "plate_1"),) and view.holds() == [
        False
    ]
    assert 0.8 < view.gripper_open <= 1.0 and view.touches("akita_black_bowl_1") == (False, False)
    assert view.position("akita_black_bowl_1").shape == (3,) and view.eef_rotation.shape == (3, 3)
    assert abs(view.joint("wooden_cabinet_1_top_region")) < 0.01
    with pytest.raises(UserError, match="no object or region 'teapot'"):
        view.position("teapot")
    data, scene = simulator.slot(0).data, simulator.scene(SPATIAL)
    bowl = scene.model.joint("akita_black_bowl_1_joint0").qposadr[0]
    before = simulator.observe(0).privileged
    data.qpos[bowl : bowl + 3] = view.position("plate_1") + np.array([0.0, 0.0, 0.02])
    step = simulator.step(0, np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (CHUNK, 1)))
    assert step.success and step.terminated and step.rewards.sum() == 1.0 and step.executed < CHUNK
    assert view.holds() == [True] and not np.array_equal(before, step.observation.privileged)
    with pytest.raises(ValueError, match="no running episode"):
        simulator.step(0, np.zeros((1, 7), dtype=np.float32))


def test_absolute_control_moves_the_hand_to_the_pose_it_is_given() -> None:
    simulator = make("libero_spatial", "0", control_mode="absolute", look="light")
    start = simulator.start(0, EpisodeSpec(SPATIAL, 0, split="held_out"))
    target = start.proprio[:6].copy()
    target[:3] += [0.03, -0.02, 0.02]
    step = simulator.step(0, np.tile(np.float32([*target, -1.0]), (30, 1)))
    np.testing.assert_allclose(step.observation.proprio[:3], target[:3], atol=0.01)
    simulator.close()


# ------------------------------------------------------------------------------------------- faults
def test_an_incomplete_asset_copy_names_what_is_missing(tmp_path) -> None:
    whole = package.find_assets()
    for folder in package.ASSET_FOLDERS:
        (tmp_path / folder).mkdir()
        for item in (whole / folder).iterdir():
            if item.name != "alphabet_soup":
                (tmp_path / folder / item.name).symlink_to(item)
    simulator = make("libero_object", "0", assets=str(tmp_path))
    with pytest.raises((MissingDependency, UserError), match=r"libero_object/0.*alphabet_soup"):
        simulator.start(0, EpisodeSpec("libero_object/0", 0))
    simulator.close()


def test_states_of_another_scene_are_a_clear_error(monkeypatch, simulator) -> None:
    monkeypatch.setattr("sim.libero.simulator._official_states", lambda path: np.zeros((50, 11)))
    with pytest.raises(UserError, match=r"11 numbers.*libero_spatial/0 has 92"):
        simulator.start(0, EpisodeSpec(SPATIAL, 49, split="held_out"))


def test_no_gl_backend_is_a_clear_error(monkeypatch) -> None:
    def broken(size: int) -> None:
        raise MissingDependency("The OpenGL backend 'egl' cannot render off-screen here")

    monkeypatch.setattr("sim.libero.scenes.make_context", broken)
    simulator = make("libero_spatial", "0")
    with pytest.raises(MissingDependency, match="OpenGL"):
        simulator.start(0, EpisodeSpec(SPATIAL, 0))
    simulator.close()


# --------------------------------------------------------------------------------------- long tests
@pytest.mark.slow
def test_simulator_contract() -> None:
    check_simulator(lambda: make("libero_object", "3", "1", look="light", horizon=60))


EPISODES = [
    ("libero_spatial", 4, 0),  # with a drawer that starts open
    ("libero_object", 0, 11),
    ("libero_object", 6, 2),
    ("libero_goal", 7, 30),  # with a stove to turn on
    ("libero_goal", 0, 1),
    ("libero_10", 2, 5),
    ("libero_10", 9, 49),  # with a microwave
    ("libero_90", 0, 3),
    ("libero_90", 60, 20),
    ("libero_90", 85, 8),
]


def whole_episode(suite: str, task: int, official: int, beside: bool) -> str:
    """The `Trace` of an episode, looked at after each chunk; ``beside``: and compared with LIBERO's
    own env, which takes the same actions."""
    simulator, trace = make(suite, str(task)), Trace()
    horizon = simulator.tasks[0].horizon
    actions = smooth_actions(horizon, seed=official)
    started = simulator.start(0, EpisodeSpec(f"{suite}/{task}", official, split="held_out"))
    trace.look(simulator.slot(0).data, started)
    reference = Reference(suite, task, SIZE) if beside else None
    if reference is not None:
        assert_equal_to(reference, simulator, 0, reference.reset(0, official=official), started)
    taken = run_beside(reference, simulator, 0, actions, trace)
    assert taken >= min(horizon, CHUNK)
    simulator.close()
    if reference is not None:
        reference.close()
    return trace.text


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task", "official"), EPISODES)
def test_whole_episodes_are_equal_in_every_suite(suite, task, official) -> None:
    take = functools.partial(whole_episode, suite, task, official)
    if not is_recorded(f"episode {suite}/{task} {official}", lambda: take(beside=False)):
        take(beside=True)


@pytest.mark.slow
def test_a_burner_shows_as_it_does_in_libero() -> None:
    simulator, reference = make("libero_10", "2"), Reference("libero_10", 2, SIZE)
    dark = simulator.start(0, EpisodeSpec("libero_10/2", 0, split="held_out"))
    reference.reset(0, official=0)
    for data in (simulator.slot(0).data, reference.data):
        data.qpos[simulator.scene("libero_10/2").model.joint("flat_stove_1_button").qposadr[0]] = (
            1.0
        )
    run_beside(reference, simulator, 0, smooth_actions(CHUNK, seed=0))
    assert simulator.state(0).holds()[0]
    # no light in a slot beside it
    other = simulator.start(1, EpisodeSpec("libero_10/2", 0, split="held_out"))
    assert_same_observation(other, dark)
    run_beside(reference, simulator, 0, smooth_actions(CHUNK, seed=1))
    simulator.close()
    reference.close()


@pytest.mark.slow
def test_what_was_done_instead_is_told_and_what_held_before_is_not() -> None:
    simulator = make("libero_goal", "2", "7")
    knob = simulator.scene("libero_goal/2").model.joint("flat_stove_1_button").qposadr[0]
    asked, idle = EpisodeSpec("libero_goal/2", 0), np.zeros((1, 7))
    simulator.start(0, asked)
    assert simulator.step(0, idle).instead is None
    simulator.slot(0).data.qpos[knob] = 1.0
    step = simulator.step(0, idle)
    assert step.instead == Instead("libero_goal/7", "turn on the stove") and not step.terminated
    # a stove that is lit as the episode begins was lit by nobody
    lit = simulator.initial_state(asked)
    begins = lit.physics.copy()
    begins[1 + knob] = 1.0  # behind the time
    simulator.edit_initial_state = lambda *_: dataclasses.replace(lit, physics=begins)
    simulator.start(0, asked)
    assert simulator.scene("libero_goal/7").holds(simulator.slot(0).wrapped) == [True]
    assert simulator.step(0, idle).instead is None
    simulator.close()


LEROBOTS = [
    ("libero_object", 1, 1),
    ("libero_spatial", 4, 1),
    ("libero_spatial", 4, 2),  # a drawer starts open
]


def lerobots_episode(suite: str, task: int, reset: int, beside: bool) -> str:
    """The `Trace` of four chunks, ``beside`` lerobot's env after as many resets."""
    simulator, trace = make(suite, str(task), scene_seed=3, opening_draws=2 + reset), Trace()
    episode = EpisodeSpec(f"{suite}/{task}", reset - 1, split="held_out")
    observation = simulator.start(0, episode)
    theirs = LeRobots(suite, task, reset) if beside else None
    for actions in [None, *np.split(smooth_actions(4 * CHUNK, seed=5), 4)]:
        if actions is not None:
            observation = simulator.step(0, actions).observation
        trace.look(simulator.slot(0).data, observation)
        if theirs is not None:
            theirs.equal(simulator, actions, observation)
    # as LIBERO's own loop starts: with other fixtures, if openings are drawn
    plain = make(suite, str(task), scene_seed=3)
    fixtures = [
        dict(each.initial_state(episode).edits)["body_pos"][1] for each in (simulator, plain)
    ]
    assert np.array_equal(*fixtures) == (suite == "libero_object")
    plain.close()
    simulator.close()
    if theirs is not None:
        theirs.env.close()
    return trace.text


class LeRobots:
    """lerobot's constructor resets once, and each reset leaves LIBERO one more draw of openings:
    3 at its first episode."""

    def __init__(self, suite: str, task: int, resets: int) -> None:
        import lerobot.envs.libero as lerobot

        package.load()
        with package.quiet():
            self.env = lerobot.LiberoEnv(
                lerobot._get_suite(suite),
                task,
                suite,
                obs_type="pixels_agent_pos",
                observation_width=SIZE,
                observation_height=SIZE,
            )
            for _ in range(resets):
                self.observed, _ = self.env.reset(seed=3)

    def equal(self, simulator: LiberoSimulator, actions: np.ndarray | None, observation) -> None:
        for action in () if actions is None else actions:
            self.env._env.sim._render_context_offscreen.gl_ctx.make_current()
            self.observed = self.env.step(action)[0]
        np.testing.assert_array_equal(
            simulator.slot(0).data.qpos, self.env._env.sim.data._data.qpos
        )
        for camera, name in (("agentview", "image"), ("robot0_eye_in_hand", "image2")):
            np.testing.assert_array_equal(
                observation.images[camera], self.observed["pixels"][name][::-1, ::-1]
            )


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task", "reset"), LEROBOTS)
def test_equal_to_lerobots_env(suite, task, reset) -> None:
    take = functools.partial(lerobots_episode, suite, task, reset)
    if not is_recorded(f"lerobot {suite}/{task} {reset}", lambda: take(beside=False)):
        pytest.importorskip("lerobot.envs.libero")
        take(beside=True)


# what `libero_recorded.py` goes beside
BESIDE_THEM = {
    f"episode {suite}/{task} {official}": functools.partial(
        whole_episode, suite, task, official, beside=True
    )
    for suite, task, official in EPISODES
} | {
    f"lerobot {suite}/{task} {reset}": functools.partial(
        lerobots_episode, suite, task, reset, beside=True
    )
    for suite, task, reset in LEROBOTS
}


@pytest.mark.slow
def test_few_built_scenes_are_kept_and_rebuilt_alike() -> None:
    simulator = make("libero_object", "0", "1", built_scenes=1, look="light")
    episode = EpisodeSpec("libero_object/0", 0)
    first = simulator.start(0, episode)
    simulator.start(0, EpisodeSpec("libero_object/1", 0))
    simulator.start(0, EpisodeSpec("libero_object/1", 1))
    assert len(simulator.scenes.built) == 1 and len(simulator.scenes.worlds) == 1
    assert_same_observation(simulator.start(0, episode), first)
    simulator.close()


@pytest.mark.slow
def test_where_memory_is_short_worlds_that_no_slot_is_in_go(monkeypatch, capsys) -> None:
    """And it is said, once, where one of them is built again."""
    monkeypatch.setattr("sim.libero.scenes.free_memory_bytes", lambda: 1 << 20)
    simulator = make("libero_object", "0", "1", "2", look="light")
    first = simulator.start(0, EpisodeSpec("libero_object/0", 0))
    simulator.start(1, EpisodeSpec("libero_object/1", 0))
    assert_same_observation(simulator.observe(0), first)
    simulator.start(0, EpisodeSpec("libero_object/1", 1))
    simulator.start(0, EpisodeSpec("libero_object/2", 0))
    assert list(simulator.scenes.built) == ["libero_object/1", "libero_object/2"]
    assert len(simulator.scenes.worlds) == 2
    assert "memory is short" not in capsys.readouterr().err
    for state in (1, 2):
        simulator.start(0, EpisodeSpec("libero_object/0", state))
        simulator.start(0, EpisodeSpec("libero_object/2", state))
    assert capsys.readouterr().err.count("env.look=light need less") == 1
    simulator.close()


@pytest.mark.slow
def test_a_worker_killed_in_mid_chunk_costs_its_episode_only() -> None:
    from sim.pool import ProcessPool

    config = LiberoConfig(suite="libero_object", tasks=["0"], camera_size=SIZE, look="light")
    episode = EpisodeSpec("libero_object/0", 0)
    with ProcessPool(
        functools.partial(LiberoSimulator, config), num_workers=1, slots_per_worker=1
    ) as pool:
        pool.start(0, episode)
        first = pool.poll()[0].observation
        pool.step(0, np.zeros((100, 7), dtype=np.float32))
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        assert pool.poll()[0].error
        pool.start(0, episode)
        assert_same_observation(pool.poll()[0].observation, first)
