"""Envs of Gymnasium: what is found out about them, their seeds and ends, what cannot serve, and
a run."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

pytest.importorskip("gymnasium")
import gymnasium

from sim.gym import GymConfig, GymSimulator, collect_episode
from sim.pool import ProcessPool
from vla_rl import cli
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EpisodeSpec

DOT = "gym_dot:dot/Dot-v0"


def dot(**options) -> GymSimulator:
    return GymSimulator(GymConfig(**{"id": DOT, **options}))


def test_what_is_not_named_is_found() -> None:
    simulator = dot()
    robot = simulator.embodiment
    assert robot.camera_names == ("pixels.top",) and (
        robot.cameras[0].height,
        robot.cameras[0].width,
    ) == (16, 16)
    assert robot.proprio_dim == 2 and robot.action_low == (-1.0, -1.0) and robot.control_hz == 10.0
    assert [(t.task_id, t.instructions, t.horizon) for t in simulator.tasks] == [
        ("Dot-v0", ("Dot v0",), 20)
    ]
    vector = dot(options={"observe": "vector"})
    assert vector.embodiment.camera_names == ("render",) and vector.embodiment.proprio_dim == 2
    observation = vector.start(0, EpisodeSpec("Dot-v0", 0))
    assert observation.images["render"].dtype == np.uint8 and observation.proprio.shape == (2,)


def test_an_episode_is_gymnasiums_own_with_that_seed() -> None:
    """And the splits' seeds, 2 i and 2 i + 1, never meet."""
    simulator, own = dot(), gymnasium.make(DOT, disable_env_checker=True)
    actions = np.array([[0.5, -1.0], [3.0, 0.25], [0.0, 0.0]])  # the second is clipped
    for split, seed in (("train", 6), ("held_out", 7)):
        seen, _ = own.reset(seed=seed)
        started = simulator.start(0, EpisodeSpec("Dot-v0", 3, split=split))
        np.testing.assert_array_equal(started.proprio, seen["agent_pos"])
        step = simulator.step(0, actions)
        for action in np.clip(actions, -1, 1):
            seen, *_ = own.step(action.astype(np.float32))
        np.testing.assert_array_equal(step.observation.proprio, seen["agent_pos"])
        np.testing.assert_array_equal(step.observation.images["pixels.top"], seen["pixels"]["top"])
        assert step.executed == 3 and not (step.terminated or step.truncated)


def test_success_ends_a_chunk_and_time_an_episode() -> None:
    simulator = dot(
        horizon=5, expert="gym_dot:expert", options={"tells": "done"}, success="done", reward="env"
    )
    run = collect_episode(simulator, EpisodeSpec("Dot-v0", 0))
    assert (
        run["success"]
        and len(run["actions"]) <= 5
        and run["images"]["pixels.top"].shape[1:] == (16, 16, 3)
    )
    simulator.start(0, EpisodeSpec("Dot-v0", 0))
    there = np.concatenate([run["actions"], run["actions"][-1:]])[None].reshape(-1, 2)
    step = simulator.step(0, there)
    assert (step.success, step.terminated, step.truncated, step.executed) == (
        True,
        True,
        False,
        len(run["actions"]),
    )
    assert step.rewards[step.executed - 1] == pytest.approx(
        -np.linalg.norm(step.observation.proprio), abs=1e-6
    )
    assert not step.rewards[step.executed :].any()
    with pytest.raises(ValueError, match="call start first"):
        simulator.step(0, there)
    simulator.start(0, EpisodeSpec("Dot-v0", 0))
    step = simulator.step(0, np.zeros((9, 2)))
    assert (step.success, step.terminated, step.truncated, step.executed) == (False, False, True, 5)


def test_an_env_that_heeds_the_seed_of_its_maker_is_made_for_each_episode() -> None:
    simulator = dot(id="gym_dot:dot/Forgetful-v0", seed_option="seed")
    starts = [simulator.start(0, EpisodeSpec("Forgetful-v0", i)).proprio for i in (2, 3, 2)]
    expected = [
        np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32) for seed in (4, 6, 4)
    ]
    np.testing.assert_array_equal(starts, expected)


def test_tasks_by_an_option_each_with_its_words() -> None:
    simulator = dot(
        task_option="goal", tasks=["middle", "right"], instructions=["go to the middle", "go right"]
    )
    assert [t.task_id for t in simulator.tasks] == ["middle", "right"]
    texts = [
        simulator.start(i, EpisodeSpec(t.task_id, 0)).instruction
        for i, t in enumerate(simulator.tasks)
    ]
    assert texts == ["go to the middle", "go right"]
    toward = np.tile([1.0, 0.0], (20, 1))
    ends = [simulator.step(slot, toward) for slot in (0, 1)]
    assert ends[0].observation.proprio[0] == 1.0 or ends[0].success
    with pytest.raises(ConfigError, match="'left' is not configured: use one of middle, right"):
        simulator.start(0, EpisodeSpec("left", 0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": ""}, r"env\.id is empty"),
        (
            {"id": "gym_dot:dot/Nothing-v0"},
            r"env\.id='gym_dot:dot/Nothing-v0' failed in make \(\w*NotFound",
        ),
        ({"id": "no_such_module:X-v0"}, r"failed in make \(ModuleNotFoundError.*slots\.python"),
        (
            {"id": "gym_dot:dot/Discrete-v0"},
            r"takes actions of Discrete\(4\), this platform sends a vector",
        ),
        ({"id": "gym_dot:dot/Unbounded-v0"}, r"between \[-inf, -inf\].*RescaleAction"),
        ({"id": "gym_dot:dot/Endless-v0"}, r"without a time limit: set env\.horizon"),
        (
            {"id": "gym_dot:dot/Forgetful-v0"},
            r"starts elsewhere when it is reset twice .*env\.seed_option",
        ),
        (
            {"options": {"goal": "left"}},
            r"failed in make \(KeyError.*env\.options=\{'goal': 'left'\}",
        ),
        ({"cameras": ["agent_pos"]}, r"shows no picture: 'agent_pos' .* float32 \[2\]"),
        (
            {"cameras": ["wrist"]},
            r"env\.cameras names 'wrist', observations of .* have pixels\.top, agent_pos",
        ),
        ({"state": ["joints"]}, r"env\.state names 'joints'"),
        ({"tasks": ["a"]}, r"env\.task_option='' and env\.tasks=\['a'\] belong together"),
        (
            {"task_option": "goal", "tasks": ["a", "a"]},
            r"env\.tasks=\['a', 'a'\] has 'a' more than once",
        ),
        ({"instructions": ["a", "b"]}, r"2 texts for 1 tasks"),
        ({"reward": "dense"}, r"success, env"),
        ({"horizon": -1}, r"env\.horizon=-1 .* 0 or more"),
        ({"expert": "experts"}, r"must be module:name"),
    ],
)
def test_what_cannot_serve_is_one_clear_error(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        dot(**options)


def test_an_env_that_does_not_say_success_and_experts_that_are_none() -> None:
    simulator = dot(options={"tells": "done"})
    simulator.start(0, EpisodeSpec("Dot-v0", 0))
    with pytest.raises(
        UserError, match=r"no 'is_success' nor 'success', only done: set env\.success"
    ):
        simulator.step(0, np.zeros((1, 2)))
    for expert, words in (
        ("", "no scripted"),
        ("gym_dot:nobody", "has no attribute"),
        ("gym_dot:GOALS", "no expert"),
    ):
        with pytest.raises(UserError, match=words):
            collect_episode(dot(expert=expert), EpisodeSpec("Dot-v0", 0))


@pytest.mark.parametrize(
    ("spoils", "words"),
    [
        (
            {"success": "False"},
            r"is_success in the info of .* is 'False', which is neither true nor false",
        ),
        ({"success": float("nan")}, r"is 'nan', which is neither"),
        ({"success": [True, False]}, r"is '\[True, False\]'"),
        ({"reward": float("nan")}, r"gave the reward nan"),
        ({"reward": [1.0, 2.0]}, r"failed in step"),
        (
            {"seen": {"agent_pos": np.array([np.nan, 0.0])}},
            r"the state \[nan, 0\.0\], .* or not finite",
        ),
        (
            {"seen": {"agent_pos": np.zeros(3)}},
            r"the state \[0\.0, 0\.0, 0\.0\], which is of another size",
        ),
        (
            {"seen": {"pixels": {"top": np.zeros((8, 8, 3), np.uint8)}}},
            r"the picture pixels\.top, which is of another size",
        ),
        ({"seen": {"pixels": {}}}, r"failed in observation \(KeyError"),
    ],
)
def test_what_an_env_says_on_the_way_is_looked_at(spoils: dict, words: str) -> None:
    simulator = dot(options={"spoils": spoils}, reward="env")
    simulator.start(0, EpisodeSpec("Dot-v0", 0))
    with pytest.raises(UserError, match=words):
        simulator.step(0, np.zeros((1, 2)))


def test_a_longer_time_limit_than_the_registered_one() -> None:
    simulator = dot(horizon=30)
    simulator.start(0, EpisodeSpec("Dot-v0", 0))
    step = simulator.step(0, np.tile([[0.3, 0.0], [-0.3, 0.0]], (20, 1)))
    assert (step.executed, step.truncated) == (30, True) or step.success


def test_in_a_pool_it_is_the_same() -> None:
    config, episode = GymConfig(id=DOT), EpisodeSpec("Dot-v0", 1)
    alone = GymSimulator(config)
    with ProcessPool(
        functools.partial(GymSimulator, config), num_workers=1, slots_per_worker=2
    ) as pool:
        pool.start(1, episode)
        seen = pool.poll()[0].observation
    np.testing.assert_array_equal(
        seen.images["pixels.top"], alone.start(0, episode).images["pixels.top"]
    )


def test_a_run_learns_on_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = (
        "run=toy_td3",
        "env=gym",
        f"env.id={DOT}",
        "env.expert=gym_dot:expert",
        "~env.success_radius",
        "tasks=[]",
        "env.horizon=12",
        "name=dot",
        "collect.episodes_per_task=12",
        "sft.updates=40",
        "rl.iterations=2",
        "rl.episodes_per_iteration=8",
        "evaluate.episodes_per_task=10",
        "evaluate.video_episodes=0",
    )
    assert cli.main(["train", *overrides]) == 0
    summary = json.loads((tmp_path / "outputs" / "dot" / "summary.json").read_text())
    assert "gym_dot:dot/Dot-v0" in json.dumps(summary)
