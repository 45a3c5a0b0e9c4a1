"""Envs of Gymnasium: what is found out about them, their seeds and ends, what cannot serve, and
a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
import gymnasium
from reward_helpers import trajectory

from reward_models.settings import EnvRewardConfig
from reward_models.success import EnvReward
from sim import stepped
from sim.gym import GymConfig, GymSimulator
from sim.pool import ProcessPool
from sim.stepped import collect_episode
from vla_rl import build, cli
from vla_rl.assembly.context import Run, start_checkpoint
from vla_rl.checkpoint import load_policy
from vla_rl.config import compose
from vla_rl.errors import ConfigError, UserError
from vla_rl.monitoring.progress import Progress
from vla_rl.run.random_phase import statistics, unmoved_alike
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


def test_the_envs_own_rewards_until_its_own_end() -> None:
    """Success is not the end where the env goes on: what it pays there would be missed."""
    options = {"spoils": {"success": True, "reward": 2.0}}
    paid = dot(options=options, reward="env", horizon=4)
    paid.start(0, EpisodeSpec("Dot-v0", 0))
    step = paid.step(0, np.zeros((3, 2)))
    assert (step.executed, step.success, step.terminated) == (3, False, False)
    step = paid.step(0, np.zeros((3, 2)))
    assert (step.executed, step.success, step.truncated) == (1, True, True)
    assert step.rewards.tolist() == [2.0, 0.0, 0.0]
    ended = dot(options=options)
    ended.start(0, EpisodeSpec("Dot-v0", 0))
    step = ended.step(0, np.zeros((3, 2)))
    assert (step.executed, step.success, step.terminated) == (1, True, True)
    assert step.rewards.tolist() == [1.0, 0.0, 0.0]


def test_an_env_that_heeds_the_seed_of_its_maker_is_made_for_each_episode() -> None:
    simulator = dot(id="gym_dot:dot/Forgetful-v0", seed_option="seed")
    starts = [simulator.start(0, EpisodeSpec("Forgetful-v0", i)).proprio for i in (2, 3, 2)]
    expected = [
        np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32) for seed in (4, 6, 4)
    ]
    np.testing.assert_array_equal(starts, expected)


def test_an_env_that_forgets_the_seed_of_its_reset_gets_it_through_its_generator() -> None:
    """MetaWorld's are so. Goals that its maker draws have to be fixed besides."""
    simulator = dot(id="gym_dot:dot/Drawn-v0", options={"seed": 1})
    starts = [simulator.start(0, EpisodeSpec("Drawn-v0", i)).proprio[:2] for i in (2, 3, 2)]
    expected = [
        np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32) for seed in (4, 6, 4)
    ]
    np.testing.assert_array_equal(starts, expected)
    with pytest.raises(ConfigError, match=r"made anew with one seed \(goal differs\)"):
        dot(id="gym_dot:dot/Drawn-v0")


def test_numbers_alone_where_nothing_has_to_be_drawn() -> None:
    simulator = dot(observe="state")
    seen = simulator.start(0, EpisodeSpec("Dot-v0", 0))
    assert not seen.images and not simulator.embodiment.cameras
    np.testing.assert_array_equal(seen.proprio, dot().start(0, EpisodeSpec("Dot-v0", 0)).proprio)


def test_slots_take_turns_with_envs(monkeypatch) -> None:
    """One is made for each slot that runs, and what a slot leaves waits for the next of its task,
    in bounds."""
    monkeypatch.setattr(stepped, "WAITING", 2)
    made = []
    make = GymSimulator._make
    monkeypatch.setattr(
        GymSimulator, "_make", lambda self, task, seed: made.append(task) or make(self, task, seed)
    )
    goals = ["middle", "right"]
    simulator = dot(task_option="goal", tasks=goals)
    assert made == ["middle", "middle"]  # to see that they start alike; one of them waits
    for slot in range(2):
        simulator.start(slot, EpisodeSpec("middle", 0))
    simulator.start(0, EpisodeSpec("right", 0))
    simulator.start(1, EpisodeSpec("middle", 1))
    assert made == ["middle"] * 3 + ["right"]
    for slot in range(2, 6):
        simulator.start(slot, EpisodeSpec("right", 0))
    for slot in range(6):
        simulator.start(slot, EpisodeSpec("middle", slot))
    assert len(simulator._waiting._envs) == 2
    simulator.close()


@pytest.mark.real_sim
def test_envs_of_mujoco_draw_in_their_own_contexts() -> None:
    """Gymnasium's viewers draw into whichever is current, and into none once one was closed."""
    pytest.importorskip("mujoco")
    config = GymConfig(id="Reacher-v5", options={"width": 48, "height": 48}, success="terminated")
    simulator = GymSimulator(config)
    for slot in range(2):
        simulator.start(slot, EpisodeSpec("Reacher-v5", slot))
    simulator._slots[1].env.close()
    picture = simulator.step(0, np.zeros((1, 2))).observation.images["render"]
    assert picture.std() > 10
    simulator.close()


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
            {"id": "gym_dot:dot/Restless-v0", "seed_option": "seed"},
            r"starts elsewhere when it is made anew with one seed",
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
        ({"observe": "state", "cameras": ["render"]}, r"observe=state shows no pictures, and"),
        ({"observe": "nothing"}, r"pictures, state"),
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


def test_a_run_that_starts_from_nothing(tmp_path, monkeypatch) -> None:
    """Random weights, scaled by what random actions show, and RL from there."""
    monkeypatch.chdir(tmp_path)
    overrides = (
        "run=gym",
        f"env.id={DOT}",
        "env.observe=state",
        "env.reward=env",
        "reward=env",
        "reward.coefficient=0.5",
        "slots.workers=0",
        "slots.slots_per_worker=4",
        "policy.hidden=[16]",
        "algorithm.critics.hidden=[16]",
        "algorithm.batch_size=16",
        "algorithm.start_decisions=20",
        "rl.iterations=2",
        "rl.episodes_per_iteration=4",
        "rl.eval_every=0",
        "evaluate.episodes_per_task=4",
        "evaluate.video_episodes=0",
    )
    assert cli.main(["train", *overrides]) == 0
    run = tmp_path / "outputs" / "gym"
    phases = json.loads((run / "phases.json").read_text())
    assert phases["random"]["episodes"] == 8 and phases["rl"]["episodes"] == 8
    start = load_policy(run / "checkpoints" / "random", build.policy_class)
    assert float(start.std.min()) > 0.2  # of a state that is uniform on [-1, 1] at first


def test_random_weights_are_the_start_where_a_later_command_names_no_phase_that_makes_one(
    tmp_path,
) -> None:
    config = compose(["run=gym", f"env.id={DOT}", "phases=[rl]", f"output_dir={tmp_path}"])
    run = Run(config, None, Progress(), {})
    weights = run.dir / "checkpoints" / "random"
    weights.mkdir(parents=True)
    assert start_checkpoint(run) == weights
    (run.dir / "checkpoints" / "sft").mkdir()
    assert start_checkpoint(run).name == "sft"


def test_what_an_env_gave_is_what_is_paid() -> None:
    given = torch.tensor([[1.0, 4.0], [-2.0, 0.0]])
    episode = dataclasses.replace(trajectory([0.0, 0.5, 1.0], success=False), rewards=given)
    (paid,) = EnvReward(EnvRewardConfig(coefficient=0.5)).score([episode])
    assert paid.tolist() == [[0.5, 2.0], [-1.0, 0.0]]


def test_what_random_actions_hardly_move_is_scaled_as_what_they_do() -> None:
    rows = torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 5.2], [2.0, 0.0, 5.4]])
    stats = unmoved_alike(statistics(rows))
    assert stats["mean"] == pytest.approx([1.0, 0.0, 5.2])
    assert stats["std"] == pytest.approx([0.8165, 0.1633, 0.1633], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["phases=[collect,sft,random,rl]"], r"a run starts from one policy"),
        (["phases=[rl]"], r"phases=\[random,rl\]"),
        (["env.id=gym_dot:dot/Nothing-v0"], r"NotFound"),
        (["env.reward=env"], r"reward=success reads none of them: set reward=env"),
        (["reward=env"], r"set env\.reward=env, or reward=success"),
        (["run=quickstart", "env=gym", f"env.id={DOT}"], r"run=gym names none"),
    ],
)
def test_what_a_run_from_nothing_cannot_start_with(overrides, words, capsys) -> None:
    assert cli.main(["train", "run=gym", f"env.id={DOT}", *overrides]) == 2
    assert re.search(words, capsys.readouterr().err)


# ---------------------------------------------------------------------------------------- MetaWorld
def metaworld(**options) -> GymSimulator:
    pytest.importorskip("metaworld")
    config = compose(["run=gym", "env=metaworld", "env.observe=state"]).env
    return GymSimulator(dataclasses.replace(config, **options))


@pytest.mark.filterwarnings("ignore:Constant")  # its experts'
def test_metaworlds_episode_is_its_packages_own() -> None:
    """In an env that ran another episode before."""
    simulator = metaworld()
    from metaworld.policies import ENV_POLICY_MAP

    own = gymnasium.make("Meta-World/MT1", env_name="reach-v3", seed=42, disable_env_checker=True)
    own.unwrapped.seed(7)
    seen, _ = own.reset()
    collect_episode(simulator, EpisodeSpec("reach-v3", 0))
    run = collect_episode(simulator, EpisodeSpec("reach-v3", 3, split="held_out"))
    expert = ENV_POLICY_MAP["reach-v3"]()
    for proprio in run["proprio"]:
        np.testing.assert_array_equal(proprio, seen.astype(np.float32))
        seen, _, _, _, info = own.step(expert.get_action(seen))
    assert run["success"] and info["success"]


def test_metaworlds_tasks_are_asked_for_by_name() -> None:
    with pytest.raises(UserError, match=r"failed in make of no-such-v3"):
        metaworld(tasks=["no-such-v3"])
