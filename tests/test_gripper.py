"""A gripper that is decided apart: its labels, its changes and its target against values worked
out by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from test_actor_critic import FAST, Base, cut, seen
from test_replay import SPEC, episode

from policies.actors.direct import DirectActor
from policies.actors.gripper import HIGH, KEEP, LOW
from policies.actors.residual import ACTION, ResidualPolicy
from policies.actors.settings import DirectConfig, ResidualConfig
from vla_rl import config as configs
from vla_rl.algorithms import gripper_choices
from vla_rl.algorithms.actor_critic import SAC, TD3
from vla_rl.config.replay_algorithms import CriticsConfig, SACConfig, TD3Config
from vla_rl.data.replay import Replay
from vla_rl.errors import ConfigError
from vla_rl.types import ActionChunk, PolicyOutput

ROBOT = dataclasses.replace(SPEC, action_names=("dx", "gripper"), gripper="-1 open, +1 close")


class Hand(Base):
    """A frozen policy that closes its gripper where its observation's number is 5 or more, and
    opens it elsewhere."""

    embodiment = ROBOT

    def act(self, observation, *, deterministic=False, seeds=None):
        out = super().act(observation)
        actions = out.chunk.actions.clone()
        actions[..., 1] = torch.where(observation.proprio[:, :1] >= 5.0, 1.0, -1.0)
        return PolicyOutput(ActionChunk(actions, out.chunk.valid), out.behavior_log_prob, {})


def direct(**config) -> DirectActor:
    torch.manual_seed(0)
    return DirectActor(
        DirectConfig(**{"hidden": [8], "encoder": 8, "gripper": "discrete", **config}), Hand()
    )


def residual(**config) -> ResidualPolicy:
    torch.manual_seed(0)
    options = {
        "hidden": [8],
        "encoder": 8,
        "distribution": "deterministic",
        "gripper": "discrete",
        **config,
    }
    return ResidualPolicy(ResidualConfig(**options), Hand())


def prefer(policy, choice: int, value: float = 1.0) -> None:
    with torch.no_grad():
        policy.choices[-1].bias.zero_()
        policy.choices[-1].bias[choice] = value


def test_the_target_is_the_target_networks_value_of_the_online_choice():
    online = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    target = torch.tensor([[7.0, 0.5, 9.0], [7.0, 0.5, 9.0], [7.0, 0.5, 9.0]])
    there = torch.tensor([[True, True, True], [True, False, True], [True, True, True]])
    found = gripper_choices.choice_target(
        torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 0.5, 0.0]), online, target, there
    )
    # the second may not take the best; the third has ended
    assert found.tolist() == [1.0 + 0.5 * 0.5, 0.5 * 9.0, 2.0]


def test_only_the_value_of_what_was_taken_learns_and_unknown_rows_count_nothing():
    values = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], requires_grad=True)
    loss = gripper_choices.choice_loss(
        values, torch.tensor([1, 2, -1]), torch.tensor([0.0, 1.0, 50.0])
    )
    loss.backward()
    assert loss.item() == (4.0 + 4.0) / 2
    assert values.grad.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_changes_are_counted_by_control_step_of_what_was_executed():
    """Open, open | close, (not executed: open) | neither, close | open, close: the first way is
    none, then 1, 0 and 2."""
    policy = direct(chunk_length=2)
    actions = torch.zeros(4, 2, 2)
    actions[..., 1] = torch.tensor([[-1.0, -0.9], [1.0, -1.0], [0.3, 0.8], [-1.0, 1.0]])
    valid = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    assert policy.gripper_changes(actions, valid).sum(1).tolist() == [0.0, 1.0, 0.0, 2.0]


def test_each_change_costs_the_penalty_once_in_returns_of_any_length():
    """Two control steps a decision, γ ½: a change in the second decision of three costs 0.1 of
    it, ¼ of that before it."""
    policy = direct(chunk_length=2)
    algorithm = SAC(
        SACConfig(gamma=0.5, gripper_penalty=0.1, critics=CriticsConfig(hidden=[8])), policy
    )
    for terminated in (True, False):
        trajectory = cut(episode(0, terminated=terminated), 2)
        actions = torch.zeros(3, 2, 2)
        actions[..., 1] = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]])
        trajectory = dataclasses.replace(trajectory, actions=actions)
        rewards, replay = torch.tensor([0.0, 0.0, 1.0]), Replay()
        replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
        for n_step, expected in (
            (1, {0: 0.0, 1: -0.1, 2: 1.0}),
            (2, {0: -0.025, 1: -0.1 + 0.25, 2: 1.0}),
        ):
            batch = replay.draw(50, torch.Generator().manual_seed(0), gamma=0.5, n_step=n_step)
            paid = gripper_choices.penalised(batch, batch.extra, batch.next_extra, 0.1)
            found = {int(n): float(r) for n, r in zip(batch.observations.proprio[:, 0], paid)}
            assert found == pytest.approx(expected)


def test_a_choice_is_an_end_or_to_keep_and_is_found_again_in_what_was_sent():
    policy, frames = direct(chunk_length=2), Hand().frame_features(seen(0, 2))
    assert policy.latent_dim == 2  # one continuous action for each of two control steps
    valid = torch.ones(2, 2, dtype=torch.bool)
    for choice, command in ((KEEP, 0.0), (LOW, -1.0), (HIGH, 1.0)):
        prefer(policy, choice)
        actions = policy.act(seen(0, 2), deterministic=True).chunk.actions
        assert actions[..., 1].tolist() == [[command] * 2] * 2
        assert policy.chosen(actions, valid, frames).tolist() == [choice] * 2
        assert policy.taken(actions, frames).shape == (2, 2)
    sent = torch.zeros(2, 2, 2)
    sent[..., 1] = torch.tensor([[0.9, -0.6], [0.9, -0.6]])
    executed = torch.tensor([[True, True], [True, False]])
    # the last one that was executed
    assert policy.chosen(sent, executed, frames).tolist() == [LOW, HIGH]


def test_a_residual_keeps_what_the_frozen_policy_does_and_overrides_it_once_it_has_practised():
    policy = residual()
    assert "gripper" in policy.can
    prefer(policy, HIGH)
    memory = [policy.initial_memory()] * 2
    both = dataclasses.replace(seen(0, 2), proprio=torch.tensor([[0.0, 0.0], [6.0, 0.0]]))

    def grip():
        chunk = policy.act(both, memory=memory, deterministic=True).chunk
        return chunk.actions[:, 0, 1].tolist()

    assert grip() == [-1.0, 1.0]
    policy.practised()
    assert grip() == [1.0, 1.0]
    frames = {ACTION: torch.tensor([[0.0, -0.9], [0.0, 0.9], [0.0, 0.1]])}
    assert policy.choosable(frames).tolist() == [
        [True, False, True],
        [True, True, False],
        [True, True, True],
    ]
    sent = torch.tensor([[[0.0, -1.0]], [[0.0, -1.0]], [[0.0, 0.0]]])
    valid = torch.ones(3, 1, dtype=torch.bool)
    assert policy.chosen(sent, valid, frames).tolist() == [KEEP, LOW, KEEP]
    still = {ACTION: torch.tensor([[0.0, -0.9]])}
    # to hold still is none of its choices
    assert policy.chosen(torch.zeros(1, 1, 2), valid[:1], still).tolist() == [-1]
    prefer(policy, LOW)
    assert grip() == [-1.0, -1.0]


def test_exploring_decisions_choose_at_random_by_their_share_and_their_seeds():
    policy = direct(gripper_noise=0.5)
    grips = lambda seeds: policy.act(seen(0, len(seeds)), seeds=seeds).chunk.actions[:, 0, 1]  # noqa: E731
    drawn = grips(range(600))
    # half of them are free, and a third of those keeps
    for command, share in ((-1.0, 1 / 6), (0.0, 4 / 6), (1.0, 1 / 6)):
        assert float((drawn == command).float().mean()) == pytest.approx(share, abs=0.06)
    assert torch.equal(grips(range(100, 110)), drawn[100:110])
    assert not policy.act(seen(0, 50), deterministic=True).chunk.actions[:, 0, 1].any()


@pytest.mark.parametrize("kind", ["direct", "residual"])
@pytest.mark.slow
def test_the_choice_that_pays_is_learned_and_goes_on_exactly_after_a_resume(kind):
    def fresh():
        policy = (
            direct(gripper_noise=0.5)
            if kind == "direct"
            else residual(gripper_noise=0.5, noise=0.3)
        )
        if kind == "direct":
            return SAC(SACConfig(**FAST), policy)
        return TD3(TD3Config(**FAST), policy)

    whole, first, second = fresh(), fresh(), fresh()

    def learn(algorithm, updates: int) -> None:
        """One decision an episode, the frozen policy opening: to close pays 1."""
        policy, replay = algorithm.policy, Replay()
        for i in range(40):
            options = {"memory": [policy.initial_memory()]} if kind == "residual" else {}
            out = fresh().policy.act(seen(0, 1), seeds=[i], **options)
            shape = cut(episode(0, t=1), 1)
            trajectory = dataclasses.replace(
                shape, actions=out.chunk.actions, replay=dict(out.replay)
            )
            reward = (out.chunk.actions[:, 0, 1] == 1.0).float()
            replay.add(trajectory, reward, extra=algorithm.annotate(trajectory, reward))
        for _ in range(updates):
            generator = torch.Generator().manual_seed(algorithm.updates)
            figures = algorithm.update(functools.partial(replay.draw, generator=generator))
            assert figures[f"{algorithm.name}/gripper_loss"] >= 0.0

    learn(whole, 120)
    options = {"memory": [whole.policy.initial_memory()]} if kind == "residual" else {}
    assert whole.policy.act(seen(0, 1), deterministic=True, **options).chunk.actions[0, 0, 1] == 1.0
    learn(first, 60)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(first.state_dict())
    learn(second, 60)
    for a, b in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_conservative_values_of_choices_before_the_first_episode():
    policy = direct()
    offline_alone = {"demonstration_share": 1.0, "offline_updates": 1}
    config = SACConfig(**FAST | offline_alone, conservatism="cal_ql", conservative_weight=3.0)
    algorithm = SAC(config, policy)
    trajectory, rewards = cut(episode(0), 1), torch.tensor([0.0, 0.0, 1.0])
    replay = Replay()
    replay.add(trajectory, rewards, "demonstrations", algorithm.annotate(trajectory, rewards))
    draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
    batch = draw(16)
    frames, after = dict(batch.extra), dict(batch.next_extra)
    encoded = policy.encode(frames)
    learned = functools.partial(
        gripper_choices.learned,
        policy,
        algorithm._target,
        batch,
        encoded,
        (frames, after),
        config.gripper_penalty,
    )
    offline, online = learned(config.conservative_weight), learned(0.0)
    # All values are 0, and none lies above what the data earned: the gap is log-mean-exp(return) =
    # the return.
    expected = 3.0 * float(frames["return"].mean())
    assert float((offline - online).detach()) == pytest.approx(expected, rel=1e-5) and expected > 0


def test_robots_that_cannot_choose_are_refused_with_the_remedy():
    with pytest.raises(
        ConfigError, match=r"actor\.gripper=discrete needs one action named gripper.*continuous"
    ):
        DirectActor(DirectConfig(gripper="discrete"), Base())
    width = Hand()
    width.embodiment = dataclasses.replace(ROBOT, gripper="width")
    with pytest.raises(ConfigError, match=r"'width': use actor=residual"):
        DirectActor(DirectConfig(gripper="discrete"), width)
    ResidualPolicy(ResidualConfig(gripper="discrete", hidden=[8]), width)
    with pytest.raises(ConfigError, match=r"actor\.gripper='both' .* one of continuous, discrete"):
        DirectConfig(gripper="both")
    with pytest.raises(ConfigError, match=r"actor\.gripper_noise=2"):
        DirectConfig(gripper_noise=2.0)
    composed = configs.compose(
        ["run=rlpd_quickstart", "actor.gripper=discrete", "algorithm.gripper_penalty=0.05"]
    )
    assert composed.actor.gripper == "discrete" and composed.algorithm.gripper_penalty == 0.05
