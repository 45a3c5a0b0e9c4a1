"""Rewards inside a chunk, worked out by hand: Σ_j γ^j·r_j on every way from a reward model to
what an algorithm learns."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from test_replay import episode

from reward_models.settings import PairwiseConfig, ShapingConfig, TaskSuccessConfig
from reward_models.shaping import shaped_reward
from reward_models.success import TaskSuccess
from vla_rl import build
from vla_rl.algorithms import estimators
from vla_rl.algorithms.actor_critic import RETURN, SAC
from vla_rl.algorithms.advantages import decision_discounts, decision_rewards, discounted_returns
from vla_rl.algorithms.offline_chain import iql_config
from vla_rl.assembly.prior_data import _scored
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.episodes import CombinedConfig
from vla_rl.config.offline import OfflineConfig
from vla_rl.config.replay_algorithms import CriticsConfig, SACConfig
from vla_rl.interfaces import RewardModel
from vla_rl.learning.learners import ReplayLearner
from vla_rl.options import AlgorithmOptions, view
from vla_rl.rewards.build import linked_to_algorithm
from vla_rl.rewards.combined import CombinedReward
from vla_rl.rewards.scorer import RewardScorer
from vla_rl.types import RolloutBatch, Trajectory

CONFIGS = {name: build.config_class("algorithm", name) for name in build.names("algorithm")}
REPLAYED = sorted(
    name for name, config in CONFIGS.items() if hasattr(config, "updates_per_decision")
)
for name in ("dagger", "recap"):  # they read no rewards
    REPLAYED.remove(name)


def solved(k: int, t: int = 3) -> Trajectory:
    """Four control steps a decision; the last one succeeds, and ends the episode, in its
    ``k``-th."""
    rewards = torch.zeros(t, 4)
    rewards[-1, k - 1] = 1.0
    return dataclasses.replace(episode(0, t=t, last_steps=k), rewards=rewards)


class Drawing:
    """An algorithm that keeps what it draws, as ``config`` says."""

    def __init__(self, config) -> None:
        self.config, self.annotated = config, None

    def annotate(self, trajectory, rewards):
        self.annotated = rewards
        return {}


def replayed(config, trajectory: Trajectory, rewards, n_step: int = 1) -> dict[int, float]:
    """{decision: the reward of its transition} as an algorithm of that config draws them."""
    learner = ReplayLearner(Drawing(config), None, 0)
    learner.add(trajectory, rewards, "online")
    batch = learner.replay.draw(
        60, torch.Generator().manual_seed(0), gamma=config.gamma, n_step=n_step
    )
    return dict(zip(batch.observations.proprio[:, 0].int().tolist(), batch.rewards.tolist()))


def test_the_reward_of_a_decision_by_hand():
    valid = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    steps = torch.tensor([[1.0, 2.0, 0.0, 4.0], [0.0, 3.0, 0.0, 0.0], [0.0] * 4])
    assert decision_rewards(steps, valid, 0.5).tolist() == [1.0 + 1.0 + 0.5, 1.5, 0.0]
    # in the last that ran
    assert decision_rewards(torch.tensor([8.0, 8.0, 8.0]), valid, 0.5).tolist() == [1.0, 4.0, 8.0]
    assert decision_rewards(torch.tensor([8.0, 8.0, 8.0]), valid, 1.0).tolist() == [8.0] * 3


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("options", "inside"),
    [
        ({"advantage": "gae", "gamma_per_control_step": True}, 0.9),
        ({"advantage": "vtrace", "gamma_per_control_step": True}, 0.9),
        ({"advantage": "reinforce++", "gamma_per_control_step": True}, 0.9),
        # sums of whole episodes: no time in them
        ({"advantage": "grpo", "gamma_per_control_step": True}, 1.0),
        ({"advantage": "rloo", "gamma_per_control_step": True}, 1.0),
        ({"advantage": "gae"}, 1.0),  # time counts in decisions, as in the quickstart
    ],
)
def test_an_early_success_inside_a_chunk_earns_more_on_policy(k, options, inside):
    """As a run feeds it, and as PPO sums the env's own: γ 0.9, success in control step k."""
    config, trajectory = PPOConfig(gamma=0.9, **options), solved(k)
    batch = RolloutBatch.from_trajectories([trajectory])
    with RewardScorer(TaskSuccess(TaskSuccessConfig())) as scorer:
        _, given, _ = scorer.score([trajectory])
    for rewards in (given, None, trajectory.rewards):
        found = estimators.scored(batch, config, rewards, {}).total
        assert found.tolist() == pytest.approx([0.0, 0.0, inside ** (k - 1)])


def test_returns_do_not_depend_on_where_chunks_are_cut():
    """Ten control steps, success in the tenth, γ 0.9: 0.9⁹ from the start in chunks of 4, of 2,
    of 1, and of 10."""
    for h in (1, 2, 4, 10):
        t = -(-10 // h)
        valid = torch.zeros(t, h, dtype=torch.bool)
        valid.view(-1)[:10] = True
        earned = torch.zeros(t)
        earned[-1] = 1.0
        rewards = decision_rewards(earned, valid, 0.9)
        returns = discounted_returns(
            rewards, decision_discounts(valid, 0.9, True), torch.tensor([t])
        )
        assert float(returns[0]) == pytest.approx(0.9**9)


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_an_early_success_inside_a_chunk_earns_more_from_a_replay(name, k):
    config = dataclasses.replace(build.config_class("algorithm", name)(), gamma=0.9)
    # so that a potential counts as the replay does
    assert view(config, AlgorithmOptions).gamma_per_control_step
    trajectory, last = solved(k), 0.9 ** (k - 1)
    given = TaskSuccess(TaskSuccessConfig()).score([trajectory])[0]
    ((_, shown),) = _scored("demonstrations", TaskSuccess(TaskSuccessConfig()), [trajectory])
    for rewards in (given, shown.rewards, trajectory.rewards):
        assert replayed(config, trajectory, rewards) == pytest.approx({0: 0.0, 1: 0.0, 2: last})
        # two decisions ahead: the four control steps between count too
        by_two = {0: 0.0, 1: 0.9**4 * last, 2: last}
        assert replayed(config, trajectory, rewards, n_step=2) == pytest.approx(by_two)


def test_offline_rounds_discount_by_their_own_gamma():
    config = iql_config(OfflineConfig(gamma=0.5), 0)
    assert replayed(config, solved(3), torch.tensor([0.0, 0.0, 1.0]))[2] == pytest.approx(0.25)


def test_what_is_annotated_has_it_too():
    """Returns of Cal-QL: 0.5⁹ before nine control steps of which the tenth pays; of one that has
    ended nothing."""
    from test_actor_critic import small

    algorithm = SAC.__new__(SAC)
    algorithm.config = SACConfig(
        gamma=0.5, conservatism="cal_ql", critics=CriticsConfig(hidden=[8])
    )
    algorithm.policy, algorithm._chooses = small(), None
    learner = ReplayLearner(algorithm, None, 0)
    learner.add(solved(2), torch.tensor([0.0, 0.0, 1.0]), "online")
    batch = learner.replay.draw(60, torch.Generator().manual_seed(0))
    found = dict(zip(batch.observations.proprio[:, 0].int().tolist(), batch.extra[RETURN].tolist()))
    assert found == pytest.approx({0: 0.5**9, 1: 0.5**5, 2: 0.5})


def test_a_gripper_change_late_in_a_chunk_costs_less_than_an_early_one():
    from test_gripper import direct

    policy = direct(chunk_length=2)
    algorithm = SAC(SACConfig(gamma=0.5, critics=CriticsConfig(hidden=[8])), policy)
    actions = torch.zeros(1, 2, 2)
    for commands, cost in (([-1.0, 1.0], 0.5), ([1.0, -1.0], 0.5), ([1.0, 1.0], 0.0)):
        actions[..., 1] = torch.tensor(commands)
        short = dataclasses.replace(
            episode(0, t=1),
            actions=actions,
            valid=torch.ones(1, 2, dtype=torch.bool),
            rewards=torch.zeros(1, 2),
        )
        assert algorithm.annotate(short, torch.zeros(1))["gripper_changes"].tolist() == [cost, 0.0]


@pytest.mark.parametrize("last_steps", [1, 3, 4])
def test_a_potential_of_control_steps_still_sums_to_minus_its_start(last_steps):
    """γ 0.9, Φ 0.2 → 0.7 → 0.4 → end: the discounted sum is −0.2, and the success on top is
    worth 0.9^(8 + k − 1)."""
    trajectory = dataclasses.replace(episode(0, last_steps=last_steps), success=True)
    potential, config = (
        torch.tensor([0.2, 0.7, 0.4, 0.9]),
        PPOConfig(gamma=0.9, gamma_per_control_step=True),
    )
    batch = RolloutBatch.from_trajectories([trajectory])
    for coefficient in (0.0, 1.0):
        shaping = ShapingConfig(
            gamma=0.9,
            gamma_per_control_step=True,
            success_coefficient=coefficient,
            truncated_end="zero",
        )
        scored = estimators.scored(batch, config, shaped_reward(trajectory, potential, shaping), {})
        returns = discounted_returns(scored.total, scored.discounts, batch.lengths)
        assert float(returns[0]) == pytest.approx(
            -0.2 + coefficient * 0.9 ** (8 + last_steps - 1), abs=1e-6
        )


@pytest.mark.parametrize("gamma", [-1.0, 0.9])
def test_a_potential_counts_time_as_its_algorithm_does_whoever_gives_the_discount(gamma):
    """Else it would be discounted inside the chunk once more; returns are −Φ of each decision (γ
    0.9)."""
    trajectory = episode(0, last_steps=4)
    potential, config = torch.tensor([0.2, 0.7, 0.4, 0.9]), SACConfig(gamma=0.9)
    reward = linked_to_algorithm(
        PairwiseConfig(shaping=ShapingConfig(gamma=gamma, truncated_end="zero")), config
    )
    given = shaped_reward(
        trajectory, potential, dataclasses.replace(reward.shaping, success_coefficient=0.0)
    )
    rewards = decision_rewards(given, trajectory.valid, 0.9)
    returns = discounted_returns(
        rewards, decision_discounts(trajectory.valid, 0.9, True), torch.tensor([3])
    )
    torch.testing.assert_close(returns, -reward.shaping.weight * potential[:3])


def test_parts_of_a_combined_reward_count_alike_whatever_they_pay_by():
    """A success per decision beside a potential per control step: as each of them alone."""
    trajectory = dataclasses.replace(episode(0, last_steps=3), success=True)
    potential = torch.tensor([0.2, 0.7, 0.4, 0.9])

    class Shaped(RewardModel):
        def score(self, trajectories):
            shaping = ShapingConfig(
                gamma=0.9,
                gamma_per_control_step=True,
                success_coefficient=0.0,
                truncated_end="zero",
            )
            return [shaped_reward(t, potential, shaping) for t in trajectories]

    own = {"potential": Shaped(), "success": TaskSuccess(TaskSuccessConfig())}
    options = {"success": {"weight": 2.0}, "potential": {"type": "success", "weight": 1.0}}
    combined = CombinedReward(
        CombinedConfig(parts=options, normalise="none"), lambda kind, _: own["success"]
    )
    combined.parts["potential"].reward = own["potential"]
    valid = trajectory.valid
    alone = {
        name: decision_rewards(reward.score([trajectory])[0], valid, 0.9)
        for name, reward in own.items()
    }
    together = decision_rewards(combined.score([trajectory])[0], valid, 0.9)
    torch.testing.assert_close(together, alone["potential"] + 2.0 * alone["success"])


def test_the_shape_of_rewards_is_checked():
    batch = RolloutBatch.from_trajectories([solved(2)])
    score = functools.partial(estimators.scored, batch, PPOConfig(), metrics={})
    for shape in ((2,), (3, 3), (4, 3)):
        with pytest.raises(ValueError, match=r"expected \(3,\) or \(3, 4\)"):
            score(rewards=torch.zeros(shape))
