"""RECAP: its published numbers worked out, what a policy is told and how it acts on it, an update
and its resume."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from policies.lerobot.improvement import TOLD, UNTOLD, AdvisedPolicy, advised
from sim.toy import ToyReach
from vla_rl.algorithms import recap
from vla_rl.algorithms.critics import C51Head
from vla_rl.algorithms.recap import RECAP
from vla_rl.config.replay_algorithms import RECAPConfig
from vla_rl.data.replay import DEMONSTRATIONS, ONLINE, Replay
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.storage import load_state, save_state
from vla_rl.types import EpisodeSpec, Observation, Trajectory, Transitions

TOY = ToyReach().embodiment
SEEN = Observation.blank(TOY)


class Listener(nn.Module, Policy):
    """Acts as ``action`` says where it is told of an improvement, else as ``other``."""

    embodiment = TOY
    chunk_length = 2
    told_improvement = True

    def __init__(self):
        super().__init__()
        self.action, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def act(self, observation, *, deterministic=False, seeds=None):
        raise AssertionError("learning never acts")

    def frame_features(self, observation):
        return {"state": observation.proprio, "visual": torch.zeros(len(observation), 1)}

    def imitation_loss(self, observation, actions, valid, improved):
        aim = torch.where(improved[:, None, None], self.action, self.other)
        error = (aim - actions).square().mean(-1)
        return (error * valid).sum() / valid.sum(), {}


def episode(index: int, success: bool, decisions: int, action: float = 0.0) -> Trajectory:
    """Of two control steps each; all begin alike, then their state tells how they will end, and how
    far they are."""
    shown = torch.arange(decisions + 1.0)[:, None] * torch.tensor([0.0, 0.1])
    shown[1:, 0] = 1.0 if success else -1.0
    seen = dataclasses.replace(
        Observation.cat([SEEN] * (decisions + 1)),
        proprio=shown,
        instruction=("reach the red goal",) * (decisions + 1),
    )
    return Trajectory(
        episode=EpisodeSpec("reach_red", index),
        observations=seen[:decisions],
        final_observation=seen[-1:],
        actions=torch.full((decisions, 2, 2), action),
        valid=torch.ones(decisions, 2, dtype=torch.bool),
        rewards=torch.zeros(decisions, 2),
        behavior_log_prob=torch.zeros(decisions, 2),
        replay={},
        terminated=success,
        truncated=not success,
        success=success,
    )


def test_returns_advantages_and_bins_are_those_of_the_paper_worked_out():
    one = torch.ones(5)
    so_far = recap.spent(one, True, 8, 300.0)
    # −1 a step and 0 at success, in shares of the longest episode
    torch.testing.assert_close(so_far, torch.tensor([0, -1, -2, -3, -4, -4]) / 8)
    torch.testing.assert_close(recap.to_go(so_far), torch.tensor([-4, -3, -2, -1, 0, 0]) / 8)
    failed = recap.spent(one, False, 8, 100.0)
    assert float(failed[-1]) == -104 / 8 and recap.to_go(failed).tolist() == [-1] * 5 + [0]
    # N = 2: Σ r + V(t + 2) − V(t), with nothing to come past the end
    values = torch.tensor([-0.6, -0.5, -0.3, -0.2, -0.05])
    ahead = torch.tensor([2, 3, 4, 5, 5])
    batch = Transitions(
        observations=Observation.cat([SEEN] * 5),
        actions=torch.zeros(5, 1, 2),
        valid=torch.ones(5, 1, dtype=torch.bool),
        is_human=torch.zeros(5, 1, dtype=torch.bool),
        rewards=torch.zeros(5),
        discounts=(ahead < 5).float(),
        next_observations=Observation.cat([SEEN] * 5),
        extra={recap.SPENT: so_far[:5]},
        next_extra={recap.SPENT: so_far[ahead]},
        source=(ONLINE,) * 5,
    )
    found = recap.advantages(batch, values, torch.cat([values, torch.tensor([9.0])])[ahead])
    torch.testing.assert_close(found, torch.tensor([0.05, 0.05, 0, 0.075, 0.05]))
    # an improvement is what lies above the task's quantile: 40 % of five are two
    limit = recap.thresholds(torch.arange(5.0), torch.zeros(5, dtype=torch.long), 0.4)
    assert (torch.arange(5.0) > limit[0]).tolist() == [False] * 3 + [True] * 2
    # a return of −1/3 lies between bins 133 and 134 of 201
    head = C51Head(-1.0, 0.0, 201)
    nothing = torch.zeros(1, 1, 201)
    target = head.target(torch.tensor([-1 / 3]), torch.zeros(1), nothing)[0]
    assert target.nonzero().flatten().tolist() == [133, 134]
    torch.testing.assert_close(target[133:135], torch.tensor([2 / 3, 1 / 3]), rtol=1e-3, atol=0)


def test_a_policy_is_told_of_improvements_and_goes_towards_them():
    seen = dataclasses.replace(Observation.cat([SEEN] * 3), instruction=("go", "go", "go"))
    improved, told = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert advised(seen, improved, told).instruction == (
        "go\nAdvantage: positive",
        "go\nAdvantage: negative",
        "go",
    )

    class Advised(AdvisedPolicy):
        """Of velocity 1, and 3 where it is told."""

        chain = None

        def __init__(self, weight):
            self.config = SimpleNamespace(improvement=weight, improvement_dropout=0.25)
            self.head = SimpleNamespace(condition=lambda batch: batch, estimates=self.moved)

        def _batch(self, observation, check):
            return 3.0 if "positive" in observation.instruction[0] else 1.0

        def moved(self, velocity, x, chain, index):  # at t = 0.5
            return x - 0.5 * velocity, x + 0.5 * velocity

    x = torch.zeros(1)
    for weight, velocity in ((0.0, 1.0), (1.0, 3.0), (1.5, 4.0)):  # 1 − 1.5 of 1, and 1.5 of 3
        policy = Advised(weight)
        action, noise = policy.estimates(policy.condition(seen), x, 0)
        assert float(noise - action) == velocity
    assert set(policy.condition(seen)) == {TOLD, UNTOLD}
    torch.manual_seed(0)
    many = Observation.cat([seen] * 400)
    heard = Advised(1.0)._advice(many, None).instruction
    share = sum("positive" in text for text in heard) / len(heard)
    assert 0.7 < share < 0.8 and not any("negative" in text for text in heard)  # ± 4 deviations
    with pytest.raises(ConfigError, match=r"policy.improvement=1 .* lerobot's act reads none"):
        Advised(1.0).require_words("act", False)


def learned(tmp_path, updates: int) -> tuple[RECAP, partial]:
    """RECAP after so many updates on quick successes, slow ones and failures."""
    config = RECAPConfig(
        longest=20,
        failure_cost=20.0,
        batch_size=64,
        lookahead=2,
        learning_rate=0.05,
        value_learning_rate=3e-3,
        value_warmup=40,
        threshold_every=20,
        threshold_decisions=200,
        hidden=[32],
        seed=1,
    )
    algorithm = RECAP(config, Listener(), Listener())
    replay, generator = Replay(), torch.Generator().manual_seed(2)
    for index in range(6):
        done = index % 2 == 0
        trajectory = episode(index, done, 4 if done else 10, 1.0 if done else -1.0)
        replay.add(
            trajectory,
            torch.zeros(len(trajectory)),
            ONLINE,
            algorithm.annotate(trajectory, torch.zeros(1)),
        )
    draw = partial(replay.draw, generator=generator)
    for _ in range(updates):
        figures = algorithm.update(draw)
    return algorithm, draw, figures


def test_what_did_better_is_told_apart_and_imitated_as_such(tmp_path):
    algorithm, draw, figures = learned(tmp_path, 150)
    with torch.no_grad():
        start, good, bad = algorithm.values(
            torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.1, 0.0], [-1.0, 0.1, 0.0]])
        ).tolist()
    # two decisions in, a success has 5 of 20 steps to go; failures are worth −1; half of all succeed
    assert -0.45 < good < -0.1 and bad < -0.85 and bad + 0.2 < start < good - 0.1
    batch = draw(200, gamma=1.0, n_step=2)
    advantage = algorithm.judged(batch)
    improved = algorithm.improved(batch, advantage)
    first = batch.observations.proprio[:, 1] == 0
    assert first.any() and torch.equal(improved[first], batch.actions[first, 0, 0] > 0)
    assert 0.2 < figures["recap/improved"] < 0.6
    told, other = (float(p[0].detach()) for p in (algorithm.policy.action, algorithm.policy.other))
    assert told > other + 0.3
    # what a person chose, or showed, is an improvement whatever its value
    people = dataclasses.replace(batch, is_human=torch.ones_like(batch.is_human))
    replay, failed = Replay(), episode(7, False, 10, -1.0)
    extra = algorithm.annotate(failed, torch.zeros(1))
    replay.add(failed, torch.zeros(len(failed)), DEMONSTRATIONS, extra)
    shown = replay.draw(200, torch.Generator().manual_seed(0), gamma=1.0)
    for rows in (people, shown):
        assert algorithm.improved(rows, torch.full((200,), -9.0)).all()


def test_resume_and_what_is_refused(tmp_path):
    algorithm, draw, _ = learned(tmp_path, 60)
    save_state(tmp_path / "state", algorithm.state_dict())
    other = RECAP(algorithm.config, Listener(), Listener())
    other.load_state_dict(load_state(tmp_path / "state"))
    other.policy.load_state_dict(algorithm.policy.state_dict())
    assert other.tasks == ["reach_red"] and other.thresholds == algorithm.thresholds
    after = []
    for each in (algorithm, other):
        draw.keywords["generator"].manual_seed(5)
        after.append((each.update(draw), [p.detach().clone() for p in each.policy.parameters()]))
    assert after[0][0] == after[1][0]
    for a, b in zip(after[0][1], after[1][1], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match=r"longest=20 control steps is less .* took \(22\)"):
        algorithm.annotate(episode(9, False, 11), Tensor())
    deaf = Listener()
    deaf.told_improvement = False
    with pytest.raises(ConfigError, match=r"does not listen: set policy.improvement=1"):
        RECAP(algorithm.config, deaf, Listener())
