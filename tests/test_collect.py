"""Collecting demonstrations: what a worker says when it cannot start reaches the user; a trained
policy demonstrates."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from collect_workers import double
from test_pool import wrapped

from sim import toy
from sim.calls import Calls
from sim.inline import InlineEnv
from vla_rl.assembly.context import Run
from vla_rl.checks import preflight
from vla_rl.config import compose
from vla_rl.config.run import CollectConfig
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.lerobot_format import BY_BASE, SENT_KEY
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage, UserError
from vla_rl.evaluation.outcome import mean_jerk
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.rollout.handover import Handover
from vla_rl.rollout.stepwise import Disturbed, Stepwise
from vla_rl.run.collect_policy import collect_with_policy
from vla_rl.run.sft_phase import phase_collect
from vla_rl.types import ActionChunk, EpisodeSpec, PolicyOutput


@pytest.mark.parametrize(
    "simulator, error, text",
    [
        ("WithoutPackage", MissingPackage, r"env.type=rocket needs the package 'rocket'.*\[moon\]"),
        ("Dies", UserError, "a collecting worker process died"),
    ],
)
def test_a_simulator_that_cannot_be_built_says_why(tmp_path, simulator, error, text):
    folder = tmp_path / "dataset"
    with pytest.raises(error, match=text):
        collect_demonstrations(
            f"collect_workers:{simulator}",
            toy.ToyConfig(),
            ["reach_red"],
            CollectConfig(workers=1),
            seed=0,
            dataset=partial(DemonstrationWriter, folder),
            progress=lambda *_, **__: None,
        )
    assert not folder.exists()


# ----------------------------------------------------------------------------- calls, other Pythons
def test_calls_are_answered_in_order_and_their_errors_at_their_turn():
    with Calls(list, workers=2, died="it died") as calls:
        assert [answer for answer, _ in calls.ordered(double, [0, 1, 2, 5, 6])] == [0, 2, 4, 10, 12]
        endless = calls.ordered(double, itertools.count())
        assert [next(endless)[0] for _ in range(3)] == [0, 2, 4]
        with pytest.raises(ConfigError, match="three is too many"):
            next(endless)
        # what is still worked on for the other is nobody's answer
        assert calls.one(double, 7)[0] == 14
        with pytest.raises(RuntimeError, match=r"KeyError: 'four'.*collect_workers\.py"):
            calls.one(double, 4)
        with pytest.raises(UserError, match="it died"):
            calls.one(double, 99)
    with Calls(list, died="it died") as calls:  # what setup made is kept from call to call
        assert [before for _, before in calls.ordered(double, [1, 1, 1])] == [0, 1, 2]


PLUGIN = """
import dataclasses
from sim import toy
from vla_rl.errors import MissingDependency

@dataclasses.dataclass
class Config(toy.ToyConfig):
    def check_machine(self):
        if {horizon} == 3:
            raise MissingDependency("no planner there")

class Sim(toy.ToyReach):
    Config = Config

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, horizon={horizon}))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A simulator of one name in two Pythons: here with a time limit of 5, there of 3. Returns
    the other Python."""
    for name, horizon in (("here", 5), ("there", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "planner_of_test_collect.py").write_text(PLUGIN.format(horizon=horizon))
    monkeypatch.syspath_prepend(tmp_path / "here")
    yield wrapped(tmp_path / "python", f"export PYTHONPATH={tmp_path / 'there'}:$PYTHONPATH")
    sys.modules.pop("planner_of_test_collect", None)


def test_demonstrations_are_collected_under_slots_python(plugin, tmp_path):
    """All attempts are kept, and none ends before its time limit: 2 episodes of 3 control steps
    there, of 5 here."""
    words = [
        "run=toy",
        "env.type=planner_of_test_collect:Sim",
        "env.success_radius=1e-9",
        "phases=[collect]",
        "threads=1",
    ]
    words += [
        "collect.episodes_per_task=2",
        "sft.validation_episodes=0",
        "collect.only_success=false",
        "slots.workers=1",
    ]
    for python, steps in (("", 10), (plugin, 6)):
        config = compose([*words, f"output_dir={tmp_path}", f"name=toy_{steps}"])
        config.slots.python = python
        run = Run(config, None, Progress(stream=io.StringIO()), {})
        run.env = InlineEnv(toy.ToyReach())
        assert phase_collect(run) == {"episodes": 2, "attempts": 2, "control_steps": steps}


def test_the_machine_is_asked_under_slots_python(plugin):
    config = compose(
        [
            "run=toy",
            "env.type=planner_of_test_collect:Sim",
            "slots.workers=1",
            "output_dir=/tmp",
            "name=none",
        ]
    )
    preflight.check(config)
    config.slots.python = plugin
    with pytest.raises(MissingDependency, match="no planner there"):
        preflight.check(config)


# --------------------------------------------------------------------------------- a trained policy
class Towards:
    """Goes a fixed way, which reaches some targets: chunks of three control steps; its memory
    counts decisions."""

    embodiment, chunk_length = toy.ToyReach().embodiment, 3

    def __init__(self, steps: int = 3) -> None:
        self.steps, self.decided = steps, []

    def initial_memory(self):
        return 0

    def act(self, observation, *, deterministic=False, seeds=None, memory=None):
        self.decided += list(memory)
        high = torch.tensor(self.embodiment.action_high)
        numbers = torch.tensor([float(m) for m in memory])[:, None, None]
        actions = (
            (0.2 + 0.1 * torch.arange(3.0)[None, :, None] + 0.05 * numbers)
            * high
            * torch.ones(len(memory), 3, 1)
        )
        valid = (torch.arange(3) < self.steps).expand(len(memory), 3)
        return PolicyOutput(
            ActionChunk(actions, valid),
            torch.zeros(len(memory)),
            {},
            memory=[m + 1 for m in memory],
        )


@pytest.mark.parametrize("steps", [3, 2])
def test_a_policy_step_by_step_sends_what_it_sends_in_chunks(steps):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(horizon=7)), num_slots=2)
    episodes = [EpisodeSpec("reach_red", i, rollout_id=str(i)) for i in range(4)]
    chunked = RolloutEngine(env, Towards(steps)).collect(episodes, deterministic=True).trajectories
    single = (
        RolloutEngine(env, Stepwise(Towards(steps)))
        .collect(episodes, deterministic=True)
        .trajectories
    )
    for a, b in zip(chunked, single):
        assert b.actions.shape[1] == 1 and b.valid.all() and a.success == b.success
        assert torch.equal(a.actions[a.valid], b.actions[:, 0])
        torch.testing.assert_close(a.final_observation.proprio, b.final_observation.proprio)


def test_successes_of_a_policy_become_demonstrations_and_the_smoothest_are_kept(tmp_path):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(success_radius=0.3)), num_slots=4)
    config = CollectConfig(episodes_per_task=3, oversample=2.0)
    found = collect_with_policy(
        env,
        Towards(),
        env.tasks[:1],
        config,
        seed=0,
        dataset=partial(DemonstrationWriter, tmp_path / "d"),
        progress=lambda *_, **__: None,
    )
    dataset = load_demonstrations(tmp_path / "d", env.embodiment)
    assert found["episodes"] == len(dataset.episodes) == 3 and found["attempts"] >= 6
    assert all(e.success for e in dataset.episodes)
    attempts = [
        EpisodeSpec("reach_red", i, "train", rollout_id=str(i)) for i in range(found["attempts"])
    ]
    rolled = (
        RolloutEngine(env, Stepwise(Towards())).collect(attempts, deterministic=True).trajectories
    )
    first_six = [t for t in rolled if t.success][:6]
    jerks = sorted(
        (mean_jerk(t.actions[:, 0].numpy(), env.embodiment) or 0.0, t.episode.init_state_id)
        for t in first_six
    )
    assert sorted(e.init_state_id for e in dataset.episodes) == sorted(i for _, i in jerks[:3])


def test_a_disturbed_policy_is_labelled_with_what_it_asked_for(tmp_path):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(success_radius=0.3)), num_slots=4)

    def written(name: str, **options) -> tuple[DemonstrationDataset, np.ndarray]:
        config = CollectConfig(episodes_per_task=30, policy="there", **options)
        collect_with_policy(
            env,
            Towards(),
            env.tasks[:1],
            config,
            seed=0,
            dataset=partial(DemonstrationWriter, tmp_path / name),
            progress=lambda *_, **__: None,
        )
        rows = pq.read_table(next((tmp_path / name / "data").rglob("*.parquet")))
        sent = np.array(rows[SENT_KEY].to_pylist())
        return load_demonstrations(tmp_path / name, env.embodiment), sent

    (clean, same), (noisy, sent) = written("clean"), written("noisy", policy_noise=0.2)
    np.testing.assert_allclose(same, clean.actions, atol=1e-6)
    asked = noisy.actions.numpy()
    spread = (sent - asked)[(np.abs(sent) < 0.99) & (np.abs(asked) < 0.99)]
    assert len(spread) > 40 and 0.15 < spread.std() < 0.25 and np.abs(spread.mean()) < 0.06
    # the same steps, from where the noise brought it
    assert {*np.round(asked[:, 0], 3)} <= {*np.round(clean.actions[:, 0].numpy(), 3)}
    hand = dataclasses.replace(env.embodiment, action_names=("dx", "gripper"))
    assert (Disturbed(SimpleNamespace(embodiment=hand), 0.2)._spread > 0).tolist() == [True, False]
    with pytest.raises(ConfigError, match=r"collect.policy_noise=0.2.*collect.policy=FOLDER"):
        CollectConfig(policy_noise=0.2)


class Corrected(Towards):
    """On top of `Towards`: goes the same way, half as fast."""

    def beneath(self):
        return Towards()

    def act(self, observation, **options):
        out = super().act(observation, **options)
        return dataclasses.replace(out, chunk=ActionChunk(out.chunk.actions / 2.0, out.chunk.valid))


def test_the_frozen_policy_acts_first_and_hands_over_at_a_random_control_step():
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(horizon=9, success_radius=1e-6)), num_slots=3)
    episodes = [EpisodeSpec("reach_red", i, seed=i, rollout_id=str(i)) for i in range(12)]
    hybrid = Handover(Towards(), Corrected(), longest=6)
    found = RolloutEngine(env, hybrid).collect(episodes, deterministic=True).trajectories
    high, lengths = torch.tensor(env.embodiment.action_high), set()

    def chunk_step(t: int) -> float:  # what `Towards` does after t control steps of its own
        return 0.2 + 0.1 * (t % 3) + 0.05 * (t // 3)

    for trajectory in found:
        first = int(trajectory.replay[BY_BASE].sum())
        assert trajectory.replay[BY_BASE].tolist() == [True] * first + [False] * (9 - first)
        expected = [chunk_step(t) for t in range(first)] + [
            chunk_step(t) / 2.0 for t in range(9 - first)
        ]
        torch.testing.assert_close(trajectory.actions[:, 0], torch.tensor(expected)[:, None] * high)
        lengths.add(first)
    assert lengths <= set(range(7)) and len(lengths) > 3
    again = RolloutEngine(env, hybrid).collect(episodes[5:7]).trajectories
    # the episode's seed decides, not its slot
    assert torch.equal(again[0].replay[BY_BASE], found[5].replay[BY_BASE])


def test_hybrid_rollouts_say_who_acted_and_sft_may_leave_out_the_frozen_policys_part(tmp_path):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(success_radius=0.06)), num_slots=4)
    config = CollectConfig(episodes_per_task=6, policy="there", base_share=0.2)
    options = {
        "seed": 0,
        "dataset": partial(DemonstrationWriter, tmp_path / "d"),
        "progress": lambda *_, **__: None,
    }
    collect_with_policy(env, Corrected(), env.tasks[:1], config, **options)
    dataset = load_demonstrations(tmp_path / "d", env.embodiment, chunk_length=3)
    info = json.loads((tmp_path / "d" / "meta" / "info.json").read_text())
    assert info["features"][BY_BASE] == {"dtype": "float32", "shape": [1], "names": [BY_BASE]}
    stats = json.loads((tmp_path / "d" / "meta" / "stats.json").read_text())[BY_BASE]
    assert stats["mean"] == pytest.approx([float(dataset.by_base.float().mean())])
    assert 0 < int(dataset.by_base.sum()) < len(dataset)
    alone = dataset.without_base()
    assert len(alone) == int((~dataset.by_base).sum()) and not alone.by_base.any()
    assert torch.equal(alone.actions, dataset.actions[~dataset.by_base])
    _, _, valid = alone.at(torch.tensor([len(alone) - 1]))
    assert valid.tolist() == [[True, False, False]]
    train, held = dataset.split(1, 1.0)
    assert torch.equal(torch.cat([train.by_base, held.by_base]), dataset.by_base)
    plain = CollectConfig(episodes_per_task=2)
    collect_with_policy(
        env,
        Corrected(),
        env.tasks[:1],
        plain,
        **options | {"dataset": partial(DemonstrationWriter, tmp_path / "plain")},
    )
    with pytest.raises(UserError, match=r"sft\.base_part=false.*do not say who acted"):
        load_demonstrations(tmp_path / "plain", env.embodiment).without_base()
    with pytest.raises(
        UserError, match=r"base_share=0\.2.*collect\.policy=there has none beneath it"
    ):
        collect_with_policy(
            env,
            Towards(),
            env.tasks[:1],
            config,
            **options | {"dataset": partial(DemonstrationWriter, tmp_path / "no")},
        )
    with pytest.raises(ConfigError, match=r"collect\.base_share=0\.5 lets the policy beneath"):
        CollectConfig(base_share=0.5)


def test_a_policy_that_hardly_succeeds_is_no_demonstrator(tmp_path):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(success_radius=1e-6)), num_slots=8)
    with pytest.raises(UserError, match=r"solved only 0 of .* is no demonstrator"):
        collect_with_policy(
            env,
            Towards(),
            env.tasks[:1],
            CollectConfig(episodes_per_task=2),
            seed=0,
            dataset=partial(DemonstrationWriter, tmp_path / "d"),
            progress=lambda *_, **__: None,
        )
    assert not (tmp_path / "d").exists()
