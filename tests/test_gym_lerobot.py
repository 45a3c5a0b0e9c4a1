"""Envs that lerobot makes: by their type, under its features' names, and what cannot serve."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

pytest.importorskip("lerobot")
import gymnasium

from sim.gym import GymConfig, GymSimulator
from sim.lerobot import LeRobotEnvConfig, LeRobotSimulator
from vla_rl.errors import UserError
from vla_rl.specs import EpisodeSpec

DOT = "lerobot_dot:dot"


def dot(**options) -> LeRobotSimulator:
    return LeRobotSimulator(LeRobotEnvConfig(**{"id": DOT, **options}))


def test_a_policy_sees_what_lerobots_do() -> None:
    simulator, plain = dot(), GymSimulator(GymConfig(id="gym_dot:dot/Dot-v0"))
    assert simulator.embodiment.camera_names == ("top",)
    assert [(t.task_id, t.horizon) for t in simulator.tasks] == [("dot/0", 20)]
    own = plain.start(0, EpisodeSpec("Dot-v0", 3))
    seen = simulator.start(0, EpisodeSpec("dot/0", 3))
    np.testing.assert_array_equal(seen.images["top"], own.images["pixels.top"])
    np.testing.assert_array_equal(seen.proprio, own.proprio)
    toward = np.tile([0.1, -0.2], (3, 1))
    stepped, wanted = simulator.step(0, toward), plain.step(0, toward)
    np.testing.assert_array_equal(
        stepped.observation.images["top"], wanted.observation.images["pixels.top"]
    )
    assert stepped.executed == wanted.executed


def test_suites_of_several_tasks_with_their_words(monkeypatch) -> None:
    import gym_dot
    from lerobot.envs import factory

    class Told(gym_dot.Dot):
        _max_episode_steps = 7

        def __init__(self, goal: str) -> None:
            super().__init__("rgb_array", goal=goal)
            self.task_description = f"go to the {goal}"

    def make_env(config, n_envs):
        return {
            "easy": {
                i: gymnasium.vector.SyncVectorEnv([lambda goal=goal: Told(goal)])
                for i, goal in enumerate(gym_dot.GOALS)
            }
        }

    monkeypatch.setattr(factory, "make_env", make_env)
    simulator = dot()
    assert [(t.task_id, t.instructions, t.horizon) for t in simulator.tasks] == [
        ("easy/0", ("go to the middle",), 7),
        ("easy/1", ("go to the right",), 7),
    ]
    assert dot(tasks=["easy/1"]).tasks == simulator.tasks[1:]
    simulator.start(0, EpisodeSpec("easy/1", 0))
    simulator.start(1, EpisodeSpec("easy/1", 0))
    right = np.tile([1.0, 0.0], (7, 1))
    assert simulator.step(0, right).success == simulator.step(1, right).success
    with pytest.raises(UserError, match=r"names 'hard/0', and lerobot makes .*: easy/0, easy/1"):
        dot(tasks=["hard/0"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": ""}, r"is no env of lerobot's, which has aloha, .*libero.*pusht"),
        ({"id": "pushed"}, r"env\.id='pushed' is no env of lerobot's"),
        ({"id": "no_such_module:dot"}, r"failed in make \(ModuleNotFoundError"),
        ({"options": {"gaol": "right"}}, r"failed in make \(TypeError.*gaol.*pip install"),
        ({"options": {"goal": "left"}}, r"failed in make \(KeyError"),
        ({"options": {"task": "Discrete-v0"}}, r"takes actions of Discrete\(4\)"),
        ({"cameras": ["wrist"]}, r"env\.cameras names 'wrist', .* have top, state"),
    ],
)
def test_what_cannot_serve_is_one_clear_error(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        dot(**options)


@pytest.mark.skipif(
    importlib.util.find_spec("gym_pusht") is None, reason="gym-pusht is not installed"
)
def test_push_t() -> None:
    simulator = dot(id="pusht")
    seen = simulator.start(0, EpisodeSpec("pusht/0", 0))
    assert seen.images["image"].shape == (96, 96, 3) and seen.proprio.shape == (2,)
    step = simulator.step(0, np.tile(seen.proprio, (3, 1)))
    assert step.executed == 3 and not step.success
