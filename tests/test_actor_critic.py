"""Critics, targets and actors against values worked out by hand, and small tasks that each
learner solves."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import torch
from contracts import check_policy
from test_replay import SPEC, episode, seen

from policies.actors.base import gaussian
from policies.actors.direct import DirectActor
from policies.actors.improved import CANDIDATES, ImprovedPolicy
from policies.actors.own import OwnPolicy
from policies.actors.residual import ACTION, ResidualPolicy
from policies.actors.settings import (
    DirectConfig,
    ImprovedConfig,
    OwnConfig,
    ResidualConfig,
    SteeredConfig,
)
from policies.actors.steered import LATENT, SteeredPolicy
from policies.small import FEATURES, SmallConfig, SmallPolicy
from vla_rl import build
from vla_rl import config as configs
from vla_rl.algorithms import conservative, critics
from vla_rl.algorithms.actor_critic import SAC, TD3, rewards_to_go
from vla_rl.algorithms.anchor import Anchor
from vla_rl.algorithms.dsrl import DSRL
from vla_rl.algorithms.iql import IQL, IQLThenSAC, advantage_weights, expectile_loss
from vla_rl.algorithms.parl import PARL
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.config.replay_algorithms import (
    CriticsConfig,
    DSRLConfig,
    IQLConfig,
    IQLThenSACConfig,
    PARLConfig,
    SACConfig,
    TD3Config,
)
from vla_rl.data.replay import Replay
from vla_rl.errors import ConfigError
from vla_rl.learning.episode_queue import learned_weights, take_weights
from vla_rl.learning.learners import learner_for
from vla_rl.types import ActionChunk, Observation, PolicyOutput, Trajectory, Transitions

ENDS = {
    name: [sign, sign]
    for names, sign in (("low q01", -1.0), ("high q99", 1.0))
    for name in names.split()
}
STATS = {"mean": [0.0, 0.0], "std": [1.0, 1.0], **ENDS}
# what makes the frames of the trunk, which a replay keeps
FRAMES = ("vision", "projector", "trunk.llama.embed_tokens")


# ------------------------------------------------------------------------------------------ critics
def test_c51_projects_the_shifted_distribution_onto_the_bins():
    head = critics.C51Head(0.0, 1.0, 5)  # bins at 0, ¼, ½, ¾, 1
    certain = torch.full((1, 2, 5), -100.0)
    certain[0, 0, 2], certain[0, 1, 4] = 100.0, 100.0  # all mass at ½; at 1
    target = head.target(torch.tensor([0.2, 0.5]), torch.tensor([0.5, 0.9]), certain)
    # 0.2 + 0.5·0.5 = 0.45: four fifths of the way from ¼ to ½. 0.5 + 0.9 = 1.4 is beyond the last
    # bin.
    torch.testing.assert_close(
        target, torch.tensor([[0.0, 0.2, 0.8, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    )
    ended = head.target(torch.tensor([0.75]), torch.tensor([0.0]), certain[:, :1])
    torch.testing.assert_close(ended, torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]]))


def test_c51_takes_the_whole_distribution_of_the_critic_with_the_smallest_mean():
    head = critics.C51Head(0.0, 1.0, 3)
    outputs = torch.tensor(
        [[[0.0, 0.0, 50.0], [50.0, 0.0, 0.0]], [[0.0, 50.0, 0.0], [0.0, 0.0, 50.0]]]
    )
    target = head.target(torch.zeros(2), torch.ones(2), outputs)
    torch.testing.assert_close(target, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def test_hl_gauss_spreads_a_value_as_a_gaussian_of_three_quarters_of_a_bin():
    head = critics.HLGaussHead(0.0, 1.0, 5)
    share = head.project(torch.tensor([0.5]))[0]
    phi = lambda z: 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))  # noqa: E731
    # the middle bin reaches half a width to either side
    middle = phi(0.5 / 0.75) - phi(-0.5 / 0.75)
    total = phi(2.5 / 0.75) - phi(-2.5 / 0.75)
    assert share[2].item() == pytest.approx(middle / total, abs=1e-6)
    assert float(share.sum()) == pytest.approx(1.0) and head.value(
        share.log()
    ).item() == pytest.approx(0.5, abs=1e-6)
    # beyond the range: the last bin's own
    assert float(head.project(torch.tensor([9.0]))[0].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("head", ["mean", "hl_gauss", "c51"])
def test_each_head_learns_a_value(head):
    torch.manual_seed(0)
    config = CriticsConfig(head=head, bins=21, hidden=[16], count=2)
    own = critics.value_head(config)
    net = critics.Critics(1, 1, config.hidden, config.count, own.outputs)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    features, actions = torch.rand(64, 1), torch.rand(64, 1)
    for _ in range(300):
        outputs = net(features, actions)
        target = own.target(
            0.3 * features[:, 0] + 0.5 * actions[:, 0], torch.zeros(64), outputs.detach()
        )
        loss = own.loss(outputs, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    error = own.value(net(features, actions)) - (0.3 * features[:, 0] + 0.5 * actions[:, 0])
    assert float(error.detach().abs().mean()) < 0.05


def test_critics_are_independent_networks_evaluated_together():
    torch.manual_seed(0)
    net = critics.Critics(3, 2, [8, 8], 4)
    features, actions = torch.randn(5, 3), torch.randn(5, 2)
    before = net(features, actions).detach()
    assert before.shape == (4, 5, 1) and len({round(float(v), 5) for v in before[:, 0, 0]}) == 4
    with torch.no_grad():
        net.layers[0].weight[2] += 1.0
    changed = (net(features, actions) != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False]
    x = torch.cat([features, actions], 1)  # the first of them, layer by layer
    for layer in net.layers:
        x = x @ layer.weight[0] + layer.bias[0]
        if not layer.last:
            x = torch.nn.functional.layer_norm(
                x, x.shape[-1:], layer.scale[0, 0], layer.shift[0, 0]
            )
            x = torch.nn.functional.silu(x)
    torch.testing.assert_close(x.detach(), before[0])


def test_a_random_subset_has_no_critic_twice():
    generator = torch.Generator().manual_seed(0)
    drawn = [critics.random_subset(10, 2, generator).tolist() for _ in range(200)]
    assert all(len(set(pair)) == 2 for pair in drawn) and {
        i for pair in drawn for i in pair
    } == set(range(10))
    assert critics.random_subset(3, 0, generator).tolist() == [0, 1, 2]


def test_cal_ql_leaves_values_alone_that_lie_below_what_the_data_earned():
    # one critic, two rows, two proposed actions each
    proposed = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]])
    data, returns = torch.tensor([[1.0, 1.0]]), torch.tensor([2.0, 2.0])
    assert critics.calibrated_gap(proposed, data, None).item() == pytest.approx(
        ((0.0 - 1.0) + (3.0 - 1.0)) / 2
    )
    assert critics.calibrated_gap(proposed, data, returns).item() == pytest.approx(
        ((2.0 - 1.0) + (3.0 - 1.0)) / 2
    )
    leaf = proposed.clone().requires_grad_()
    critics.calibrated_gap(leaf, data, returns).backward()
    assert not leaf.grad[0, 0].any() and leaf.grad[0, 1].all()  # the first row is not pushed down


def test_rewards_to_go_discount_by_control_steps():
    assert rewards_to_go(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([4, 2, 1]), 0.5).tolist() == [
        0.5**4 * (1.0 + 0.25 * 2.0),
        1.0 + 0.25 * 2.0,
        2.0,
        0.0,
    ]


# -------------------------------------------------------------------------------------- TD3 and SAC
def small(**config) -> SmallPolicy:
    torch.manual_seed(0)
    return SmallPolicy(SmallConfig(**{"hidden": [16], "pixels": 2, **config}), SPEC)


def test_the_small_policy_keeps_what_every_policy_must():
    check_policy(small(), Observation.blank(SPEC, 3))


def batch_of(rewards: list[float], discounts: list[float], policy: SmallPolicy) -> Transitions:
    n = len(rewards)
    valid = torch.ones(n, 4, dtype=torch.bool)
    before, after = ({FEATURES: policy.features(seen(i, n))} for i in (0, 1))
    return Transitions(
        seen(0, n),
        torch.zeros(n, 4, 2),
        valid,
        ~valid,
        torch.tensor(rewards),
        torch.tensor(discounts),
        seen(1, n),
        before,
        after,
        ("online",) * n,
    )


def constant(net: critics.Critics, values: list[float]) -> None:
    """Make each critic say one number, whatever it reads."""
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.layers[-1].bias[:, 0, 0] = torch.tensor(values)


def test_targets_take_the_smallest_critic_and_nothing_beyond_the_end():
    policy = small()
    algorithm = TD3(TD3Config(critics=CriticsConfig(count=3, hidden=[8]), target_noise=0.0), policy)
    constant(algorithm._target[1], [5.0, -2.0, 3.0])
    batch = batch_of([1.0, 0.0, 1.0], [0.5, 0.25, 0.0], policy)
    assert algorithm._targets(batch, batch.next_extra).tolist() == [
        1.0 + 0.5 * -2.0,
        0.25 * -2.0,
        1.0,
    ]


def test_redq_takes_the_smallest_of_a_random_pair():
    policy = small()
    algorithm = TD3(TD3Config(critics=CriticsConfig(count=3, subset=2, hidden=[8])), policy)
    constant(algorithm._target[1], [5.0, -2.0, 3.0])
    batch = batch_of([0.0], [1.0], policy)
    found = {float(algorithm._targets(batch, batch.next_extra)[0].detach()) for _ in range(60)}
    assert found == {-2.0, 3.0}  # (5, 3) → 3, every other pair → −2


def test_targets_follow_slowly_and_the_actor_moves_every_other_update():
    policy = small()
    config = TD3Config(critics=CriticsConfig(hidden=[8], tau=0.25), actor_every=2, batch_size=3)
    algorithm = TD3(config, policy)
    draw = lambda count, **_: batch_of([1.0, 0.0, 1.0], [0.5, 0.25, 0.0], policy)  # noqa: E731
    actor = [p.detach().clone() for p in policy.actor.parameters()]
    before = [p.detach().clone() for p in algorithm.critics.parameters()]
    algorithm.update(draw)
    assert all(torch.equal(a, b) for a, b in zip(actor, policy.actor.parameters()))
    for old, new, target in zip(
        before, algorithm.critics.parameters(), algorithm._target[1].parameters()
    ):
        torch.testing.assert_close(target, old + 0.25 * (new.detach() - old))
    algorithm.update(draw)
    assert any(not torch.equal(a, b) for a, b in zip(actor, policy.actor.parameters()))


def test_a_persons_decisions_are_drawn_with_the_demonstrations(tmp_path):
    """Half of a batch, and the run's setting decides what of them lies in RAM."""
    policy = small()
    algorithm = TD3(
        TD3Config(batch_size=32, start_decisions=1, critics=CriticsConfig(hidden=[8])), policy
    )
    learner = learner_for(
        algorithm,
        tmp_path / "replay",
        0,
        lambda: [("demonstrations", episode(0, t=2))],
        ram_bytes=0,
    )
    human = torch.zeros(20, 4, dtype=torch.bool)
    human[5:8] = True
    first_half, update = set(), algorithm.update

    def watched(draw):
        def look(count, **options):
            batch = draw(count, **options)
            first_half.update(batch.observations.proprio[:16, 0].tolist())
            return batch

        return update(look)

    algorithm.update = watched
    learner.learn(
        [dataclasses.replace(episode(100, t=20), is_human=human)],
        [torch.zeros(20)],
        torch.zeros(20),
    )
    assert first_half == {0.0, 1.0, 105.0, 106.0, 107.0}
    assert all(table.on_disk_alone for table in learner.replay._tables.values())


def test_critics_learn_values_of_a_known_chain():
    """0 → 1 → 2 → end with reward 1: values γ⁸, γ⁴, 1 whatever is done."""
    policy, replay, generator = small(), Replay(), torch.Generator().manual_seed(0)
    config = TD3Config(
        batch_size=64, gamma=0.9, critics=CriticsConfig(hidden=[32], tau=0.05, learning_rate=3e-3)
    )
    algorithm = TD3(config, policy)
    for _ in range(200):
        actions = 2.0 * torch.rand(3, 4, 2, generator=generator) - 1.0
        trajectory, rewards = (
            dataclasses.replace(episode(0), actions=actions),
            torch.tensor([0.0, 0.0, 1.0]),
        )
        replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
    for _ in range(800):
        algorithm.update(functools.partial(replay.draw, generator=generator))
    with torch.no_grad():
        encoded = policy.features(seen(0, 3))
        values = algorithm.head.value(
            algorithm.critics(encoded, policy.propose(encoded, {}, None)[0])
        ).mean(0)
    torch.testing.assert_close(values, torch.tensor([0.9**8, 0.9**4, 1.0]), rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", ["td3", "sac", "anchored sac"])
def test_learning_goes_on_exactly_after_a_resume(kind):
    def fresh() -> TD3 | SAC:
        common = {"critics": CriticsConfig(count=3, subset=2, hidden=[8]), "batch_size": 3}
        if kind == "anchored sac":
            common |= {"anchor_coef": 1.0, "anchor_updates": 20}
        if kind == "td3":
            return TD3(TD3Config(**common), small())
        torch.manual_seed(0)
        return SAC(SACConfig(**common), DirectActor(DirectConfig(hidden=[8], encoder=8), Base()))

    whole, first, second = fresh(), fresh(), fresh()

    def learn(algorithm, updates: int) -> None:
        trajectory = episode(0, t=2)
        rewards = torch.tensor([0.0, 1.0])
        replay = Replay()
        replay.add(
            cut(trajectory, algorithm.policy.chunk_length),
            rewards,
            extra=algorithm.annotate(trajectory, rewards),
        )
        for _ in range(updates):
            algorithm.update(
                functools.partial(
                    replay.draw, generator=torch.Generator().manual_seed(algorithm.updates)
                )
            )

    learn(whole, 6)
    learn(first, 3)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(first.state_dict())
    learn(second, 3)
    for a, b in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_temperature_holds_the_entropy():
    torch.manual_seed(0)
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8), Base())
    algorithm = SAC(SACConfig(temperature=0.1, temperature_learning_rate=0.1), policy)
    value = torch.zeros(4, requires_grad=True)
    # far more certain than wanted: entropy −5 against −1
    algorithm._actor_loss(value, torch.full((4,), 5.0))
    assert float(algorithm.temperature) > 0.1
    raised = float(algorithm.temperature)
    for _ in range(3):
        algorithm._actor_loss(value, torch.full((4,), -5.0))
    assert float(algorithm.temperature) < raised


def test_a_squashed_gaussian_has_its_density():
    torch.manual_seed(1)
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8), Base())
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.4]))
    frames, noise = policy.base.frame_features(seen(0, 5)), torch.randn(5, 2)
    latent, log_prob = policy.propose(policy.encode(frames), frames, noise)
    log_std = -5.0 + 6.0 * (torch.tensor([0.1, 0.4]).tanh() + 1.0) / 2.0
    normal = torch.distributions.Normal(torch.tensor([0.3, -0.2]), log_std.exp())
    squashed = torch.distributions.TransformedDistribution(
        normal, torch.distributions.TanhTransform(cache_size=1)
    )
    torch.testing.assert_close(log_prob, squashed.log_prob(latent).sum(1), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------- actors
class Base(torch.nn.Module):
    """A frozen policy that decides on four control steps: the first action is its observation's
    number / 100."""

    policy_type, embodiment, chunk_length = "base", SPEC, 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.asked = 0

    def frame_features(self, observation):
        numbers = observation.proprio[:, :1]
        return {
            "visual": torch.cat([numbers, numbers.sin(), numbers.cos()], 1).half(),
            "state": observation.proprio / 10.0,
        }

    def act(self, observation, *, deterministic=False, seeds=None):
        self.asked += len(observation)
        first = self.weight.detach() * observation.proprio[:, :1] / 100.0
        steps = torch.stack([first + 0.1 * i for i in range(4)], 1)
        actions = torch.cat([steps, -steps], 2)
        valid = torch.ones(actions.shape[:2], dtype=torch.bool)
        return PolicyOutput(ActionChunk(actions, valid), torch.zeros(len(actions)), {})

    def decode(self, observation, noise, features=None):
        return (0.1 * noise).clamp(-1.0, 1.0)


def cut(trajectory: Trajectory, h: int) -> Trajectory:
    """The same episode with only the first ``h`` control steps of each decision."""
    if h == trajectory.actions.shape[1]:
        return trajectory
    parts = {name: getattr(trajectory, name)[:, :h] for name in ("actions", "valid", "rewards")}
    return dataclasses.replace(trajectory, **parts)


def followed(policy: ResidualPolicy, numbers: range, **options) -> list[PolicyOutput]:
    """Decisions on observations ``numbers`` of one episode, each with what the one before left."""
    memory, out = [policy.initial_memory()], []
    for number in numbers:
        out.append(policy.act(seen(number, 1), memory=memory, **options))
        memory = out[-1].memory
    return out


def test_an_untrained_residual_acts_as_the_frozen_policy_does_step_by_step():
    policy = ResidualPolicy(ResidualConfig(hidden=[8], distribution="deterministic"), Base())
    out = followed(policy, range(10), deterministic=True)
    # decided anew at 0, 4 and 8
    expected = [(n // 4 * 4) / 100.0 + 0.1 * (n % 4) for n in range(10)]
    assert [float(o.chunk.actions[0, 0, 0]) for o in out] == pytest.approx(expected, abs=1e-6)
    assert policy.base.asked == 3


def test_a_correction_may_hold_for_several_control_steps():
    policy = ResidualPolicy(
        ResidualConfig(hidden=[8], distribution="deterministic", hold=2, scale=0.1), Base()
    )
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([50.0, -50.0]))
    # two decisions a chunk: decided anew at 0 and 2
    out = followed(policy, range(3), deterministic=True)
    first = [[[0.1, -0.1], [0.2, -0.2]], [[0.3, -0.3], [0.4, -0.4]], [[0.12, -0.12], [0.22, -0.22]]]
    torch.testing.assert_close(torch.cat([o.chunk.actions for o in out]), torch.tensor(first))
    shown = policy.annotate(cut(episode(0, t=3), 2))
    torch.testing.assert_close(shown[ACTION][1], torch.tensor([0.2, -0.2, 0.3, -0.3]))
    with pytest.raises(ConfigError, match=r"actor\.hold=3 does not divide the 4"):
        ResidualPolicy(ResidualConfig(hold=3), Base())


def test_a_corrections_own_share_grows_with_practice():
    config = ResidualConfig(hidden=[8], distribution="deterministic", scale=0.2, ramp=4, noise=1.0)
    policy = ResidualPolicy(config, Base())
    with torch.no_grad():
        policy.actor[-1].bias.fill_(50.0)
    frames = {**policy.base.frame_features(seen(0, 1)), ACTION: torch.zeros(1, 2)}
    encoded, said = policy.encode(frames), []
    for _ in range(6):
        latent, _ = policy.propose(encoded, frames, None)
        said.append(round(float(policy.realize(latent, frames)[0, 0].detach()), 4))
        policy.practised()
    assert said == [0.0, 0.05, 0.1, 0.15, 0.2, 0.2]
    fresh = ResidualPolicy(config, Base())
    explored, _ = fresh.propose(encoded, frames, torch.tensor([[0.5, -0.5]]))
    assert explored.tolist() == [[0.5, -0.5]]  # noise needs no practice


@pytest.mark.parametrize("kind", ["residual", "direct"])
def test_deterministic_decisions_are_those_of_the_averaged_actor(kind):
    """After n updates the average keeps min(average, n / (n + 10)) of itself: here 1/11 and 1/6
    of weights 0, 1 and 0.5."""
    make, config = {
        "residual": (ResidualPolicy, ResidualConfig),
        "direct": (DirectActor, DirectConfig),
    }[kind]
    policy = make(config(hidden=[8], average=0.999), Base())
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    for bias in (1.0, 0.5):
        with torch.no_grad():
            policy.actor[-1].bias.fill_(bias)
        policy.practised()
    assert policy.steady[1][-1].bias.tolist() == pytest.approx([10 / 11 / 6 + 0.5 * 5 / 6] * 4)
    unaveraged = make(config(hidden=[8]), Base())
    own = {
        name: w
        for name, w in policy.state_dict().items()
        if not name.startswith("steady") and name != "averaged"
    }
    assert set(own) == set(unaveraged.state_dict())
    unaveraged.load_state_dict(own)
    chunks = {
        mode: [
            p.act(seen(0, 1), deterministic=mode, seeds=[3]).chunk.actions
            for p in (policy, unaveraged)
        ]
        for mode in (True, False)
    }
    assert torch.equal(*chunks[False]) and not torch.equal(*chunks[True])
    with torch.no_grad():
        unaveraged.actor[-1].bias.copy_(policy.steady[1][-1].bias)
    assert torch.equal(
        chunks[True][0], unaveraged.act(seen(0, 1), deterministic=True).chunk.actions
    )
    again, elsewhere = make(policy.config, Base()), make(policy.config, Base())
    again.load_state_dict(policy.state_dict())
    changed = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    assert (
        {"averaged", "actor.3.bias", "steady.1.3.bias"} <= changed <= set(learned_weights(policy))
    )
    take_weights(elsewhere, learned_weights(policy))  # what another process acts with
    for other in (again, elsewhere):
        assert torch.equal(other.act(seen(0, 1), deterministic=True).chunk.actions, chunks[True][0])
    with pytest.raises(ConfigError, match=r"actor\.average=1\.0 .* 0 or more and below 1"):
        config(average=1.0)


def test_a_correction_is_bounded_and_only_in_its_dimensions():
    policy = ResidualPolicy(
        ResidualConfig(
            hidden=[8], distribution="deterministic", scale=0.2, dimensions=[SPEC.action_names[1]]
        ),
        Base(),
    )
    with torch.no_grad():
        policy.actor[-1].bias.fill_(50.0)  # as far up as it goes
    chunk = policy.act(seen(0, 1), deterministic=True).chunk.actions[0, 0]
    assert chunk.tolist() == pytest.approx([0.0, 0.2], abs=1e-6)
    own = ResidualPolicy(
        ResidualConfig(hidden=[8], scale=0.1, scales={SPEC.action_names[1]: 1.5}), Base()
    )
    corrected = own.realize(torch.tensor([[1.0, -1.0]]), {ACTION: torch.tensor([[0.0, 1.0]])})
    assert corrected.tolist() == [pytest.approx([0.1, -0.5])]
    with pytest.raises(ConfigError, match=r"actor\.scales has 'claw'"):
        ResidualPolicy(ResidualConfig(scales={"claw": 1.0}), Base())
    with pytest.raises(ConfigError, match=r"actor\.scales\.claw=3\.0 .* above 0 and at most 2"):
        ResidualConfig(scales={"claw": 3.0})
    latent = torch.full((1, 2), 1.0)
    assert policy.realize(latent, {ACTION: torch.tensor([[0.9, 0.9]])}).tolist() == [
        [pytest.approx(0.9), 1.0]
    ]


def test_frames_of_an_episode_are_those_that_were_acted_on():
    policy = ResidualPolicy(ResidualConfig(hidden=[8], distribution="deterministic"), Base())
    for t in (1, 6, 8):
        out = followed(policy, range(t), deterministic=True)
        one_step = dataclasses.replace(
            cut(episode(0, t=t), 1),
            replay={name: torch.cat([o.replay[name] for o in out]) for name in out[0].replay},
        )
        shown = policy.annotate(dataclasses.replace(one_step, replay={}))  # as of a demonstration
        kept = policy.annotate(one_step)
        expected = [(n // 4 * 4) / 100.0 + 0.1 * (n % 4) for n in range(t + 1)]
        assert shown[ACTION][:, 0].tolist() == pytest.approx(expected, abs=1e-6)
        for name, frame in shown.items():
            assert len(frame) == t + 1
            torch.testing.assert_close(frame, kept[name])


def test_a_steered_policy_turns_latent_actions_into_noise_and_back():
    for repeat, size in ((False, 8), (True, 2)):
        policy = SteeredPolicy(SteeredConfig(hidden=[8], bound=1.5, repeat=repeat), Base())
        latent = torch.linspace(-1.0, 1.0, 3 * size).view(3, size)
        noise = policy.noise(latent)
        assert noise.shape == (3, 4, 2) and float(noise.max()) == 1.5
        torch.testing.assert_close(policy.latent_of(noise), latent)
        policy.practised()
        out = policy.act(seen(0, 3), seeds=[1, 2, 3])
        torch.testing.assert_close(out.chunk.actions, 0.1 * policy.noise(out.replay[LATENT]))
        frames = policy.annotate(dataclasses.replace(episode(0), replay=out.replay))
        assert torch.equal(frames[LATENT][:-1], out.replay[LATENT]) and not frames[LATENT][-1].any()
    with pytest.raises(ConfigError, match=r"demonstrations have no noise.*demonstration_share=0"):
        SAC(SACConfig(), policy)


def test_a_steered_policy_explores_with_the_frozen_policys_noise_until_its_actor_learned():
    policy = SteeredPolicy(SteeredConfig(hidden=[8], bound=3.0), Base())
    seeds = list(range(1000))
    # 8000 numbers, of which 22 lie beyond the bound
    first = policy.act(seen(0, 1000), seeds=seeds).replay[LATENT] * 3.0
    assert float(first.mean()) == pytest.approx(0.0, abs=0.04) and float(
        first.std()
    ) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(policy.act(seen(5, 2), seeds=[7, 7]).replay[LATENT] * 3.0, first[[7, 7]])
    assert not policy.act(seen(0, 3), deterministic=True).replay[LATENT].any()
    policy.practised()
    assert float(policy.act(seen(0, 1000), seeds=seeds).replay[LATENT].std() * 3.0) < 0.7
    # of a checkpoint of before
    weights = {k: v for k, v in policy.state_dict().items() if k != "practice"}
    assert policy.completed(weights)["practice"] == 1


def test_a_policy_that_makes_two_chunks_of_one_noise_is_not_steered():
    base = Base()
    base.decode = lambda observation, noise, features=None: torch.rand_like(noise)
    with pytest.raises(
        ConfigError,
        match=r"Base.decode made two chunks of one noise \(0.* half-ranges.*actor=resid",
    ):
        SteeredPolicy.from_base(SteeredConfig(hidden=[8]), base)


def test_the_steering_actor_climbs_the_least_of_the_critics_of_noises():
    policy = SteeredPolicy(SteeredConfig(hidden=[8]), Base())
    algorithm = DSRL(DSRLConfig(critics=CriticsConfig(hidden=[8])), policy)
    algorithm.noise_critics.forward = lambda encoded, latent: torch.stack(
        [latent[:, :1], -3.0 * latent[:, :1]]
    )
    frames = policy.base.frame_features(seen(0, 2))
    latent = torch.zeros(2, 8)
    latent[:, 0] = torch.tensor([0.5, -0.25])
    assert algorithm._value(policy.encode(frames), latent, frames).mean(0).tolist() == [-1.5, -0.25]


def test_the_critic_of_noises_learns_what_the_critic_of_actions_says_of_their_actions():
    policy = SteeredPolicy(SteeredConfig(hidden=[8]), Base())
    algorithm = DSRL(
        DSRLConfig(batch_size=64, critics=CriticsConfig(hidden=[32], learning_rate=1e-2)), policy
    )

    # a critic that values the first action; the second of the two asks for more
    def first_action(encoded, actions):
        return torch.stack([actions[:, :1], actions[:, :1] + 1.0])

    algorithm.critics.forward = first_action
    observation = seen(0, 64)
    frames = policy.base.frame_features(observation)
    encoded = policy.encode(frames).detach()
    for _ in range(400):
        loss = algorithm._learn_noise(observation, encoded, frames)
    assert loss < 1e-3
    noise = torch.zeros(64, 4, 2)
    noise[:, 0, 0] = torch.linspace(-2.0, 2.0, 64)
    values = algorithm._value(encoded, policy.latent_of(noise), frames).detach()
    # (of the two the least)
    torch.testing.assert_close(values[0], 0.1 * noise[:, 0, 0], rtol=0, atol=0.05)


def test_dsrl_bootstraps_from_what_the_frozen_policy_makes_of_the_actors_noise():
    policy = SteeredPolicy(SteeredConfig(hidden=[8]), Base())
    algorithm = DSRL(DSRLConfig(critics=CriticsConfig(hidden=[8])), policy)
    algorithm._target[1].forward = lambda encoded, actions: torch.stack(
        [actions.sum(1, keepdim=True)] * 2
    )
    state = algorithm.generator.get_state()
    frames = policy.base.frame_features(seen(1, 3))
    latent, _ = policy.propose(policy.encode(frames), frames, algorithm._normal(3))
    algorithm.generator.set_state(state)
    valid = torch.ones(3, 4, dtype=torch.bool)
    batch = Transitions(
        seen(0, 3),
        torch.zeros(3, 4, 2),
        valid,
        ~valid,
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([0.5, 0.5, 0.0]),
        seen(1, 3),
        {},
        frames,
        ("online",) * 3,
    )
    beyond = 0.1 * 1.5 * latent.detach().sum(1)
    torch.testing.assert_close(
        algorithm._targets(batch, frames).detach(), batch.rewards + batch.discounts * beyond
    )


def test_the_support_penalty_counts_what_exceeds_the_limit():
    policy = SteeredPolicy(SteeredConfig(hidden=[8], bound=2.0), Base())
    algorithm = DSRL(
        DSRLConfig(support_coef=0.1, support_limit=3.0, critics=CriticsConfig(hidden=[8])), policy
    )
    latent = torch.zeros(2, 8)
    latent[0, 0], latent[1] = 0.5, 1.0  # ½‖noise‖²: ½, and ½ · 8 · 4 = 16
    assert algorithm._penalty(latent).item() == pytest.approx(0.1 * (0.0 + 13.0) / 2)
    # two numbers for four control steps
    shared = SteeredPolicy(SteeredConfig(hidden=[8], bound=2.0, repeat=True), Base())
    # limit: half of the two
    algorithm = DSRL(DSRLConfig(support_coef=0.1, critics=CriticsConfig(hidden=[8])), shared)
    assert algorithm._penalty(torch.ones(3, 2)).item() == pytest.approx(0.1 * (0.5 * 2 * 4.0 - 1.0))


def test_learning_leaves_the_frozen_policy_as_it_was():
    torch.manual_seed(0)
    for policy, algorithm in (
        (p := ResidualPolicy(ResidualConfig(hidden=[8]), Base()), SAC(SACConfig(batch_size=4), p)),
        (p := SteeredPolicy(SteeredConfig(hidden=[8]), Base()), DSRL(DSRLConfig(batch_size=4), p)),
    ):
        replay, rewards = Replay(), torch.tensor([0.0, 1.0])
        trajectory = cut(episode(0, t=2), policy.chunk_length)
        replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        policy.train()
        for _ in range(4):
            algorithm.update(
                functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
            )
        changed = {
            n.split(".")[0] for n, p in policy.named_parameters() if not torch.equal(p, before[n])
        }
        assert changed == {"actor", "encoder"}


# -------------------------------------------------------------------------------------------- PA-RL
class Proposer(Base):
    """A base that also learns: it proposes its weight plus noise for every number."""

    def act(self, observation, *, deterministic=False, seeds=None):
        noise = (
            0.0
            if deterministic
            else torch.randn(len(seeds), 4, 2, generator=torch.Generator().manual_seed(seeds[0]))
        )
        actions = (self.weight.detach() - 1.0 + 0.3 * noise) * torch.ones(len(observation), 4, 2)
        valid = torch.ones(actions.shape[:2], dtype=torch.bool)
        return PolicyOutput(ActionChunk(actions, valid), torch.zeros(len(actions)), {})

    def imitation_loss(self, observation, actions, valid, features=None):
        assert features is not None
        loss = (self.weight - 1.0 - actions).square().mean()
        return loss, {"mse": float(loss.detach())}


def test_the_best_proposals_climb_the_critic_and_keep_their_best_point():
    policy = ImprovedPolicy(
        ImprovedConfig(encoder=8, samples=4, keep=2, steps=3, step_size=0.1), Proposer()
    )
    # best at 0.25 in the first dimension
    policy.judge = lambda encoded, actions: -(actions[..., 0] - 0.25).abs()
    actions = torch.zeros(1, 4, 8)
    actions[0, :, 0] = torch.tensor([-0.9, 0.0, 0.2, 0.9])
    chosen, value = policy.improve(torch.zeros(1, 4), actions)
    # 0.2 → 0.3 → 0.2 → 0.3, which is as near; 0.0 → 0.1 → 0.2 → 0.3. The other two were left out.
    assert sorted(round(float(v), 4) for v in value[0]) == [-0.05, -0.05]
    assert (
        all(0.2 - 1e-6 <= float(x) <= 0.3 + 1e-6 for x in chosen[0, :, 0])
        and not chosen[0, :, 1:].any()
    )


def test_pa_rl_teaches_the_policy_what_its_critic_prefers():
    torch.manual_seed(0)
    base = Proposer()
    policy = ImprovedPolicy(ImprovedConfig(encoder=8, samples=8, keep=4), base)
    config = PARLConfig(
        batch_size=32,
        imitation_batch=32,
        learning_rate=0.02,
        actor_every=1,
        critics=CriticsConfig(hidden=[16]),
    )
    algorithm = PARL(config, policy)
    algorithm.critics.forward = lambda encoded, actions: (
        -(actions.mean(1) - 0.5).square()[None, :, None].expand(2, -1, 1)
    )
    algorithm.critic_optimizer.step = lambda *_: None
    replay, rewards = Replay(), torch.tensor([0.0, 1.0])
    trajectory = episode(0, t=2)
    replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
    before = float(base.weight.detach()) - 1.0
    encoded, frames = torch.zeros(32, 8), replay.draw(32, torch.Generator().manual_seed(0)).extra
    batch = replay.draw(32, torch.Generator().manual_seed(0))
    for _ in range(10):
        algorithm._improve(batch, encoded, frames)
    after = float(base.weight.detach()) - 1.0
    assert before == 0.0 and 0.05 < after < 0.5  # towards 0.5, as far as its own proposals reached


def test_pa_rl_imitates_rows_of_every_source():
    """A batch holds its demonstrations first."""
    base, seen_numbers = Proposer(), set()
    policy = ImprovedPolicy(ImprovedConfig(encoder=8, samples=4, keep=2, steps=1), base)
    algorithm = PARL(
        PARLConfig(
            batch_size=8, imitation_batch=4, actor_every=1, critics=CriticsConfig(hidden=[8])
        ),
        policy,
    )
    replay = Replay()
    for first, source in ((0, "demonstrations"), (50, "online")):
        trajectory, rewards = episode(first, t=2), torch.zeros(2)
        replay.add(trajectory, rewards, source, algorithm.annotate(trajectory, rewards))

    def imitation_loss(observation, actions, valid, features=None):
        seen_numbers.update(observation.proprio[:, 0].tolist())
        assert torch.equal(features["state"], observation.proprio / 10.0)
        return (base.weight - actions).square().mean(), {}

    base.imitation_loss = imitation_loss
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        algorithm.update(functools.partial(replay.draw, generator=generator))
    assert seen_numbers == {0.0, 1.0, 50.0, 51.0}


def test_an_improved_policy_is_saved_as_the_policy_beneath(tmp_path):
    config = configs.compose(["run=toy", "actor=improved", "algorithm=parl"])
    base = build.implementation("policy", "nano_vla").from_statistics(
        config.policy, SPEC, STATS, STATS, seed=0
    )
    built = build.implementation("actor", "improved").from_base(config.actor, base)
    check_policy(built, Observation.blank(SPEC, 3))
    algorithm = PARL(config.algorithm, built)
    out = built.act(seen(0, 3), seeds=[1, 2, 3])
    alone = built.act(seen(1, 1), seeds=[2])
    assert out.replay[CANDIDATES].shape == (3, 16, 8) and torch.equal(
        out.replay[CANDIDATES][1:2], alone.replay[CANDIDATES]
    )
    torch.testing.assert_close(out.chunk.actions[1:2], alone.chunk.actions, rtol=0, atol=1e-4)
    trajectory, rewards = (
        dataclasses.replace(episode(0), replay=out.replay),
        torch.tensor([0.0, 0.0, 1.0]),
    )
    replay = Replay()
    replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    algorithm.config.batch_size = algorithm.config.imitation_batch = 8
    for _ in range(4):
        algorithm.update(functools.partial(replay.draw, generator=torch.Generator().manual_seed(0)))
    changed = {n for n, p in base.named_parameters() if not torch.equal(p, before[n])}
    assert changed and not any(n.startswith(FRAMES) for n in changed)
    save_checkpoint(tmp_path / "c", built)
    again = load_policy(tmp_path / "c", build.policy_class, SPEC)
    assert type(again) is type(base)
    a, b = (p.act(seen(0, 3), deterministic=True).chunk.actions for p in (built.eval(), again))
    assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------- IQL
def test_expectiles_and_weights_by_hand():
    gap = torch.tensor([1.0, -2.0])  # 0.7·1 and 0.3·4, in the mean
    assert float(expectile_loss(gap, 0.7)) == pytest.approx((0.7 + 1.2) / 2)
    assert float(expectile_loss(gap, 0.5)) == pytest.approx(0.5 * (1.0 + 4.0) / 2)
    weights = advantage_weights(torch.tensor([0.0, math.log(2.0), -math.log(2.0), 9.0]), 2.0, 100.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 4.0, 0.25, 100.0]))


def test_an_expectile_is_what_balances_the_weighted_distances():
    """Of 0 and 1 the 0.8-expectile is 0.8: 0.2·0.8 = 0.8·0.2."""
    value = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        expectile_loss(torch.tensor([0.0, 1.0]) - value, 0.8).backward()
        optimizer.step()
    assert float(value.detach()) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("head", ["mean", "hl_gauss", "c51"])
def test_iqls_targets_bootstrap_from_the_value_of_states_and_ask_for_no_action(head):
    policy = small()
    algorithm = IQL(
        IQLConfig(critics=CriticsConfig(hidden=[8], head=head, low=-1.0, high=1.0, bins=5)), policy
    )
    policy.propose = None  # whoever asks for an action, fails
    constant(algorithm.value, [0.5])
    batch = batch_of([0.5, -0.25, 1.0], [0.5, 0.5, 0.0], policy)
    target = algorithm._targets(batch, batch.next_extra)
    if head == "mean":
        assert target.tolist() == [0.75, 0.0, 1.0]
    else:
        means = (target * torch.linspace(-1.0, 1.0, 5)).sum(1)
        torch.testing.assert_close(means[1], torch.tensor(0.0), atol=1e-6, rtol=0)
        if head == "c51":  # halfway between two bins, and on bins
            torch.testing.assert_close(
                target, torch.tensor([[0, 0, 0, 0.5, 0.5], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1.0]])
            )


def test_iqls_advantage_is_the_smallest_critic_less_the_value():
    policy = small()
    algorithm = IQL(IQLConfig(critics=CriticsConfig(hidden=[8], count=2)), policy)
    constant(algorithm._target[1], [0.75, 0.5])
    constant(algorithm.value, [0.125])
    batch = batch_of([0.0], [1.0], policy)
    assert algorithm.advantages(batch.extra, algorithm._taken(batch, batch.extra)).tolist() == [
        0.375
    ]


def test_an_actor_of_joints_decides_and_imitates_the_way_from_where_they_are():
    names = ("a.pos", "b.pos")
    spec = dataclasses.replace(
        SPEC, action_names=names, action_units=("deg",) * 2, action_low=(-100.0, 0.0),
        action_high=(100.0, 100.0), frame="joints", gripper="none", proprio_names=("other", "b.pos", "a.pos"),
    )  # fmt: skip
    base = Base()
    base.embodiment = spec
    shape = {"hidden": [8], "encoder": 8, "chunk_length": 2, "distribution": "deterministic"}
    policy = DirectActor(DirectConfig(**shape, within=0.2), base)
    where = Observation(
        seen(0, 2).images, torch.tensor([[7.0, 50.0, -20.0], [7.0, 99.0, 30.0]]), ("go", "go")
    )
    still = policy.act(where, deterministic=True).chunk.actions  # (an untrained one's latent is 0)
    torch.testing.assert_close(
        still, torch.tensor([[-20.0, 50.0], [30.0, 99.0]])[:, None].expand(2, 2, 2)
    )
    frames = policy.features(where)
    far = policy.to_chunk(policy.realize(torch.ones(2, 4), frames)).actions
    torch.testing.assert_close(far[:, 0], torch.tensor([[0.0, 60.0], [50.0, 100.0]]))
    batch = dataclasses.replace(
        batch_of([0.0, 0.0], [1.0, 1.0], small()), valid=torch.ones(2, 2).bool(), is_human=torch.zeros(2, 2).bool(),
        actions=torch.tensor([[[-10.0, 50.0], [-5.0, 45.0]], [[30.0, 99.0], [90.0, 99.0]]]),
    )  # fmt: skip
    latent, _ = policy.imitable(batch, frames)
    torch.testing.assert_close(
        latent, torch.tensor([[0.5, 0.0, 0.75, -0.5], [0.0, 0.0, 1.0, 0.0]]), rtol=0, atol=1e-5
    )
    with pytest.raises(ConfigError, match=r"actor.within counts from where joints are.*within=0"):
        DirectActor(DirectConfig(**shape, within=0.2), Base())


def test_a_gaussian_imitates_by_weight_and_only_what_was_executed():
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8, chunk_length=2), Base())
    with torch.no_grad():
        # means, then raw spreads
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0]))
    batch, frames = (
        batch_of([0.0, 0.0], [1.0, 1.0], small()),
        policy.base.frame_features(seen(0, 2)),
    )
    actions = torch.tensor([[[0.5, -0.5], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    valid = torch.tensor([[True, False], [True, False]])
    batch = dataclasses.replace(batch, actions=actions, valid=valid, is_human=~valid)
    loss, _ = policy.weighted_loss(
        batch, policy.encode(frames), frames, torch.tensor([3.0, 1.0]), torch.Generator()
    )
    log_std = -5.0 + 6.0 * 0.5  # tanh(0) is the middle
    first = 2 * (0.5 * (math.atanh(0.5) / math.exp(log_std)) ** 2 + log_std)
    assert float(loss.detach()) == pytest.approx((3.0 * first + 1.0 * 2 * log_std) / 2, rel=1e-5)


def test_a_residual_imitates_the_mean_correction_of_what_was_executed():
    policy = ResidualPolicy(
        ResidualConfig(hidden=[8], encoder=8, hold=2, scale=0.5, dimensions=[]), Base()
    )
    batch = dataclasses.replace(
        batch_of([0.0], [1.0], small()),
        actions=torch.tensor([[[0.3, 0.0], [0.5, 0.2]]]),
        valid=torch.tensor([[True, True]]),
        is_human=torch.tensor([[False, False]]),
    )
    frames = {ACTION: torch.tensor([[0.1, 0.0, 0.2, 0.0]])}
    latent, counts = policy.imitable(batch, frames)
    torch.testing.assert_close(
        latent, torch.tensor([[(0.2 + 0.3) / 2 / 0.5, (0.0 + 0.2) / 2 / 0.5]])
    )
    assert counts.tolist() == [[1.0, 1.0]]
    # of the first control step a person asked for less than what was sent
    human = torch.tensor([[True, False]])
    asked = torch.tensor([[[0.2, 0.0], [0.0, 0.0]]])
    shown = dataclasses.replace(
        batch, is_human=human, proposed=asked, proposed_known=torch.tensor([True])
    )
    assert torch.equal(shown.labels, torch.tensor([[[0.2, 0.0], [0.5, 0.2]]])) and torch.equal(
        batch.labels, batch.actions
    )
    torch.testing.assert_close(
        policy.imitable(shown, frames)[0][0, 0], torch.tensor((0.1 + 0.3) / 2 / 0.5)
    )
    cut_short = dataclasses.replace(batch, valid=torch.tensor([[True, False]]))
    torch.testing.assert_close(policy.imitable(cut_short, frames)[0], torch.tensor([[0.4, 0.0]]))


def test_the_policy_itself_imitates_decisions_in_proportion_to_their_weights():
    base, drawn = Proposer(), []
    policy = OwnPolicy(OwnConfig(encoder=8, rows=1000), base)

    def imitation_loss(observation, actions, valid, features=None):
        assert torch.equal(features["state"], observation.proprio / 10.0)
        drawn.extend(observation.proprio[:, 0].tolist())
        return base.weight.square().sum(), {}

    base.imitation_loss = imitation_loss
    batch = batch_of([0.0] * 3, [1.0] * 3, small())
    batch = dataclasses.replace(batch, extra=base.frame_features(batch.observations))
    weights = torch.tensor([1.0, 0.0, 3.0])
    policy.weighted_loss(
        batch, torch.zeros(3, 8), batch.extra, weights, torch.Generator().manual_seed(0)
    )
    assert (
        len(drawn) == 1000 and drawn.count(1.0) == 0 and abs(drawn.count(2.0) / 1000 - 0.75) < 0.05
    )


@pytest.mark.parametrize("name", ["nano_toy", "nano_flow_toy"])
def test_iql_trains_tokens_and_flows_and_goes_on_exactly(name, tmp_path):
    """Demonstrations alone, no episode; a checkpoint is that of the policy."""
    config = configs.compose(
        ["run=toy", "algorithm=iql", f"policy={name}", "actor.rows=4", "actor.encoder=8"]
    )
    options = dataclasses.replace(config.algorithm, batch_size=8, critics=CriticsConfig(hidden=[8]))

    def fresh() -> IQL:
        kind = build.implementation("policy", config.policy_type)
        base = kind.from_statistics(config.policy, SPEC, STATS, STATS, seed=0)
        torch.manual_seed(0)
        return IQL(
            options, build.implementation("actor", "own").from_base(config.actor, base).train()
        )

    whole, first, second = fresh(), fresh(), fresh()
    replay, rewards, trajectory = Replay(), torch.tensor([0.0, 0.0, 1.0]), episode(0)
    replay.add(trajectory, rewards, "demonstrations", extra=whole.annotate(trajectory, rewards))

    def learn(algorithm, updates: int) -> None:
        for _ in range(updates):
            algorithm.update(
                functools.partial(
                    replay.draw, generator=torch.Generator().manual_seed(algorithm.updates)
                )
            )

    before = {n: p.detach().clone() for n, p in whole.policy.base.named_parameters()}
    learn(whole, 4)
    changed = {n for n, p in whole.policy.base.named_parameters() if not torch.equal(p, before[n])}
    assert changed and not any(n.startswith(FRAMES) for n in changed)
    learn(first, 2)
    save_checkpoint(tmp_path / "c", first.policy, first.state_dict())
    assert type(load_policy(tmp_path / "c", build.policy_class, SPEC)) is type(first.policy.base)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(first.state_dict())
    learn(second, 2)
    for a, b in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def anchored(**options) -> SAC:
    torch.manual_seed(0)
    config = SACConfig(
        anchor_coef=2.0,
        offline_updates=2,
        batch_size=3,
        critics=CriticsConfig(hidden=[8]),
        **options,
    )
    return SAC(config, DirectActor(DirectConfig(hidden=[8], encoder=8), Base()))


def test_an_anchor_is_what_the_actor_did_as_the_first_episode_began():
    """Neither what the actor has learned since then nor where the critics moved the encoder
    counts as no drift."""
    algorithm = anchored(actor_every=1, demonstration_share=1.0)
    policy, replay, rewards = algorithm.policy, Replay(), torch.tensor([0.0, 1.0])
    trajectory = cut(episode(0, t=2), 1)
    replay.add(trajectory, rewards, "demonstrations", extra=algorithm.annotate(trajectory, rewards))
    draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
    assert "sac/drift" not in algorithm.update(draw) | algorithm.update(draw)  # offline
    then = copy.deepcopy(policy)
    assert algorithm.update(draw)["sac/drift"] < 1e-6  # (the encoder has made one step)
    for _ in range(20):
        algorithm.update(draw)
    with torch.no_grad():
        frames = algorithm.annotate(trajectory, rewards)
        noise = algorithm._noise(3)
        latents = [p.propose(p.encode(frames), frames, noise)[0] for p in (policy, then)]
        drift = float(algorithm._anchor.drift(latents[0], frames, noise))
    assert drift == pytest.approx(float((latents[0] - latents[1]).square().mean())) and drift > 0.0


def test_an_anchor_holds_the_spread_too():
    """Same mean, wider: the drift is the squared difference of the deviations, in the mean over
    noises (before tanh)."""
    algorithm = anchored(actor_every=1)
    policy = algorithm.policy
    with torch.no_grad():
        last = [module for module in policy.actor.modules() if isinstance(module, torch.nn.Linear)][
            -1
        ]
        last.weight.zero_()
        last.bias.copy_(
            torch.cat([torch.zeros(policy.latent_dim), torch.full((policy.latent_dim,), -0.5)])
        )
        algorithm._anchor = Anchor(algorithm.policy)
        narrow = float(gaussian(last.bias[None])[1].exp()[0, 0])
        last.bias[policy.latent_dim :] = -0.3
        wide = float(gaussian(last.bias[None])[1].exp()[0, 0])
        trajectory = cut(episode(0, t=2), 1)
        frames = {
            name: x[:1].expand(20000, -1)
            for name, x in algorithm.annotate(trajectory, torch.zeros(2)).items()
        }
        noise = algorithm._noise(20000)
        latent, _ = policy.propose(policy.encode(frames), frames, noise)
        drift = float(algorithm._anchor.drift(latent, frames, noise))
    assert wide > 1.2 * narrow and wide < 0.2
    assert drift == pytest.approx((wide - narrow) ** 2, rel=0.1)


@pytest.mark.parametrize(
    ("over", "warmup", "floor", "weights"),
    [
        (0, 0, 0.0, [2.0, 2.0, 2.0]),
        (100, 0, 0.0, [2.0, 1.0, 0.0]),
        (100, 52, 0.0, [2.0, 2.0, 0.0]),
        (100, 0, 0.25, [2.0, 1.0, 0.5]),
    ],
)
def test_an_anchors_weight_stays_or_falls_to_what_is_to_stay(over, warmup, floor, weights):
    """It falls from the actor's first step: after the updates before the first episode, and the
    critics' warm-up."""
    algorithm = anchored(anchor_updates=over, critic_warmup=warmup, anchor_floor=floor)
    assert algorithm._anchor is None
    assert [Anchor.weight(algorithm.config, updates) for updates in (2, 52, 1000)] == weights


def test_an_encoder_that_stays_learns_before_the_first_episode_alone():
    replay, rewards, trajectory = Replay(), torch.tensor([0.0, 1.0]), cut(episode(0, t=2), 1)

    def encoders(**options) -> list[list[torch.Tensor]]:
        algorithm = anchored(actor_every=1, demonstration_share=1.0, **options)
        if not len(replay):
            replay.add(
                trajectory, rewards, "demonstrations", extra=algorithm.annotate(trajectory, rewards)
            )
        draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
        found = [[p.detach().clone() for p in algorithm.policy.encoder.parameters()]]
        for updates in (2, 3):  # before the first episode, and after it
            critics = [p.detach().clone() for p in algorithm.critics.parameters()]
            for _ in range(updates):
                algorithm.update(draw)
            assert not all(map(torch.equal, critics, algorithm.critics.parameters())), (
                "critics go on"
            )
            found.append([p.detach().clone() for p in algorithm.policy.encoder.parameters()])
        return found

    for online in (False, True):
        start, offline, end = encoders(encoder_online=online)
        assert not all(map(torch.equal, start, offline))
        assert all(map(torch.equal, offline, end)) is not online
    with pytest.raises(
        ConfigError, match=r"encoder_online=false .*offline_updates=0 teaches it nothing"
    ):
        SACConfig(encoder_online=False)


def test_an_anchor_holds_the_actor():
    def moved(**options) -> float:
        algorithm = anchored(learning_rate=1e-2, actor_every=1, demonstration_share=1.0, **options)
        replay, rewards, trajectory = Replay(), torch.tensor([0.0, 1.0]), cut(episode(0, t=2), 1)
        replay.add(
            trajectory, rewards, "demonstrations", extra=algorithm.annotate(trajectory, rewards)
        )
        draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
        algorithm.updates = algorithm.config.offline_updates
        for _ in range(60):
            metrics = algorithm.update(draw)
        return metrics["sac/drift"]

    assert moved(anchor_updates=0) < 0.2 * moved(anchor_updates=62)


def test_wsrl_may_learn_offline_by_iql():
    torch.manual_seed(0)
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8), Base())
    options = {
        "offline_updates": 2,
        "actor_every": 1,
        "batch_size": 3,
        "demonstration_share": 1.0,
        "start_decisions": 0,
    }
    algorithm = IQLThenSAC(IQLThenSACConfig(**options, critics=CriticsConfig(hidden=[8])), policy)
    replay, rewards, trajectory = Replay(), torch.tensor([0.0, 1.0]), cut(episode(0, t=2), 1)
    replay.add(trajectory, rewards, "demonstrations", extra=algorithm.annotate(trajectory, rewards))
    draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
    kinds = [set(algorithm.update(draw)) for _ in range(3)]
    assert all(
        "iql_sac/weight_mean" in found and "iql_sac/temperature" not in found for found in kinds[:2]
    )
    assert "iql_sac/temperature" in kinds[2] and "iql_sac/weight_mean" not in kinds[2]


# ----------------------------------------------------------------------------------- they all learn
# what the first dimension of every control step should be; the frozen policy does something else
WISH = 0.12


def rollout(policy, numbers: range, seed: int) -> PolicyOutput:
    """Decisions of one-decision episodes, which cannot be wrong about the future."""
    seeds = [seed * 1000 + i for i in numbers]
    options = (
        {"memory": [policy.initial_memory()] * len(seeds)}
        if isinstance(policy, ResidualPolicy)
        else {}
    )
    return policy.act(seen(numbers.start, len(numbers)), seeds=seeds, **options)


def learns(policy, algorithm, rounds: int, updates: int) -> tuple[float, float]:
    """Mean distance to `WISH` of the most likely actions, before and after; the reward is how
    near the tried ones came."""
    replay, generator = Replay(), torch.Generator().manual_seed(0)

    def distance() -> float:
        options = (
            {"memory": [policy.initial_memory()] * 8} if isinstance(policy, ResidualPolicy) else {}
        )
        chunk = policy.act(seen(0, 8), deterministic=True, **options).chunk.actions
        return float((chunk[..., 0] - WISH).abs().mean())

    before = distance()
    for r in range(rounds):
        out = rollout(policy, range(8), r)
        for i in range(8):
            actions = out.chunk.actions[i : i + 1]
            reward = 1.0 - 10.0 * (actions[..., 0] - WISH).square().mean()[None]
            trajectory = dataclasses.replace(
                cut(episode(i, t=1), policy.chunk_length),
                actions=actions,
                replay={name: value[i : i + 1] for name, value in out.replay.items()},
            )
            replay.add(trajectory, reward.float(), extra=algorithm.annotate(trajectory, reward))
        for _ in range(updates):
            algorithm.update(functools.partial(replay.draw, generator=generator))
    return before, distance()


FAST = {
    "batch_size": 32,
    "learning_rate": 1e-3,
    "actor_every": 1,
    "demonstration_share": 0.0,
    "critics": CriticsConfig(count=2, hidden=[32], learning_rate=3e-3, tau=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "residual td3",
        "residual sac",
        "residual iql",
        "direct sac",
        "direct iql",
        "steered sac",
        "steered dsrl",
    ],
)
def test_each_learner_finds_the_action_that_is_rewarded(kind):
    torch.manual_seed(0)
    actor, algorithm = kind.split()
    shape = {"hidden": [32], "encoder": 16}
    if actor == "residual":
        shape["distribution"] = "deterministic" if algorithm == "td3" else "gaussian"
        policy = ResidualPolicy(ResidualConfig(scale=0.5, noise=0.3, **shape), Base())
    elif actor == "direct":
        policy = DirectActor(DirectConfig(**shape), Base())
    else:
        # decodes to a tenth of the noise
        policy = SteeredPolicy(SteeredConfig(bound=2.0, repeat=True, **shape), Base())
    entropy = {"temperature": 0.01, "target_entropy": -4.0}
    learner = {
        "td3": lambda: TD3(TD3Config(**FAST), policy),
        "sac": lambda: SAC(SACConfig(**FAST, **entropy), policy),
        "dsrl": lambda: DSRL(DSRLConfig(**FAST, **entropy), policy),
        "iql": lambda: IQL(IQLConfig(**FAST, expectile=0.8, beta=20.0), policy),
    }[algorithm]()
    before, after = learns(policy, learner, rounds=25, updates=50)
    assert before > 0.07 and after < 0.5 * before, (before, after)


# ----------------------------------------------------------------------------------------- refusals
def test_what_does_not_fit_is_refused_with_the_remedy():
    class Tokens:
        embodiment, chunk_length = SPEC, 4

        def act(self, observation, *, deterministic=False, seeds=None):
            raise AssertionError("is only looked at")

    with pytest.raises(
        ConfigError, match=r"td3 trains a small actor, and Tokens has none.*actor=residual"
    ):
        TD3(TD3Config(), Tokens())
    with pytest.raises(
        ConfigError, match=r"DirectActor builds on what a policy sees, and Tokens does not offer it"
    ):
        DirectActor(DirectConfig(), Tokens())
    with pytest.raises(
        ConfigError, match="sac trains a gaussian actor, and this one is deterministic"
    ):
        SAC(SACConfig(), small())
    with pytest.raises(
        ConfigError, match="dsrl steers a policy by its noise, and SmallPolicy chooses none"
    ):
        DSRL(DSRLConfig(), small())
    with pytest.raises(
        ConfigError, match=r"iql imitates .* which SteeredPolicy cannot: set actor=own"
    ):
        IQL(IQLConfig(), SteeredPolicy(SteeredConfig(), Base()))
    with pytest.raises(ConfigError, match=r"conservatism=none"):
        IQLConfig(conservatism="cal_ql")
    for config in (IQLConfig, PARLConfig):
        with pytest.raises(ConfigError, match=r"algorithm\.anchor_coef=0"):
            config(anchor_coef=1.0)
    assert IQLThenSACConfig(anchor_coef=1.0).climbs
    with pytest.raises(
        ConfigError, match=r"td3 trains a deterministic actor.*actor\.distribution=deterministic"
    ):
        TD3(TD3Config(), DirectActor(DirectConfig(hidden=[8]), Base()))
    with pytest.raises(ConfigError, match=r"actor\.dimensions has 'wrist'"):
        ResidualPolicy(ResidualConfig(dimensions=["wrist"]), Base())
    with pytest.raises(ConfigError, match=r"actor\.base_steps=9 is more than the 4"):
        ResidualPolicy(ResidualConfig(base_steps=9), Base())
    with pytest.raises(ConfigError, match=r"algorithm\.critics\.subset=5"):
        CriticsConfig(count=3, subset=5)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["algorithm=td3"],
            r"td3 needs an actor, and policy.type=nano_vla is none: set actor=residual or direct",
        ),
        (
            ["algorithm=ppo", "actor=residual"],
            r"likelihood capability, and actor.type=residual has none: set actor=none",
        ),
        (
            ["algorithm=iql", "actor=steered"],
            r"actor.type=steered needs a policy with a noise capability",
        ),
        (
            ["algorithm=iql", "actor=improved"],
            r"weighted_imitation capability, and actor.type=improved has none: set actor=resid",
        ),
        (
            ["algorithm=sac", "actor=steered"],
            r"actor.type=steered needs a policy with a noise capability",
        ),
        (
            ["algorithm=sac", "actor=residual"],
            r"needs a gaussian actor.*set actor.distribution=gaussian",
        ),
        (
            ["algorithm=td3", "actor=direct"],
            r"td3 needs a deterministic actor.*distribution=gaussian: set .*algorithm=sac",
        ),
        (
            ["algorithm=sac", "policy=small"],
            r"needs a gaussian actor, and policy.distribution=deterministic: set policy.dist",
        ),
        (
            ["algorithm=td3", "policy=small", "policy.distribution=gaussian"],
            r"td3 needs a deterministic actor, and policy.distribution=gaussian",
        ),
        (
            ["algorithm=residual_quickstart", "actor.ramp=100"],
            r"actor.ramp=100 bounds a deterministic actor",
        ),
        (
            ["algorithm=residual", "checkpoint=a"],
            r"demonstration_share=0.5 needs demonst.*dataset=FOLDER.*_share=0",
        ),
        (
            ["run=wsrl_quickstart", "checkpoint=a"],
            r"offline_updates=\d+ needs demonstrations.*dataset=FOLDER",
        ),
        (
            ["algorithm=sac", "actor=residual", "actor.scale=0"],
            r"actor.scale=0 .* above 0 and at most 2",
        ),
        (
            ["algorithm=sac", "actor=residual", "actor.distribution=uniform"],
            r"actor.distribution='uniform' .* one of gaussian, deterministic",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_refused_before_anything_runs(overrides, error):
    from vla_rl.checks.options import check_run

    with pytest.raises(ConfigError, match=error):
        check_run(configs.compose(["run=quickstart", *overrides]))


# -------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize(
    ("actor", "policy"),
    [("residual", "nano_toy"), ("direct", "nano_toy"), ("steered", "nano_flow_toy")],
)
def test_an_actor_is_a_policy_and_its_checkpoint_holds_the_frozen_one(tmp_path, actor, policy):
    config = configs.compose(["run=toy", f"policy={policy}", f"actor={actor}", "algorithm=sac"])
    torch.manual_seed(0)
    base = build.implementation("policy", config.policy_type).from_statistics(
        config.policy, SPEC, STATS, STATS, seed=0
    )
    built = build.implementation("actor", actor).from_base(config.actor, base)
    torch.nn.init.normal_(built.actor[-1].weight)
    check_policy(built, Observation.blank(SPEC, 3))
    save_checkpoint(tmp_path / "c", built)
    again = load_policy(tmp_path / "c", build.policy_class, SPEC)
    a, b = (p.act(seen(0, 3), seeds=[1, 2, 3]).chunk.actions for p in (built.eval(), again))
    assert torch.equal(a, b) and type(again.base) is type(base)


def test_rows_of_an_actor_do_not_depend_on_their_batch():
    policy = ResidualPolicy(ResidualConfig(hidden=[8]), Base())
    torch.nn.init.normal_(policy.actor[-1].weight)
    together = policy.act(seen(0, 3), seeds=[5, 6, 7]).chunk.actions
    alone = policy.act(Observation.cat([seen(1, 1)]), seeds=[6]).chunk.actions
    torch.testing.assert_close(together[1:2], alone)


# ------------------------------------------------------------------------------------------- Cal-QL
def test_cal_ql_spares_the_policys_values_alone_and_weighs_by_density():
    """One critic and row, two actions at random and two of the policy: log Σ exp(value − log
    density), as WSRL's release."""
    proposed, data, returns = (
        torch.tensor([[[0.0, 1.0, 0.5, 3.0]]]),
        torch.tensor([[1.0]]),
        torch.tensor([2.0]),
    )
    density = torch.tensor([[math.log(0.25), math.log(0.25), math.log(2.0), math.log(0.5)]])
    own = torch.tensor([False, False, True, True])
    found = critics.calibrated_gap(proposed, data, returns, own, density).item()
    sum_ = math.exp(0.0) / 0.25 + math.exp(1.0) / 0.25 + math.exp(2.0) / 2.0 + math.exp(3.0) / 0.5
    assert found == pytest.approx(math.log(sum_) - 1.0, rel=1e-6)
    plain = math.log((math.exp(0.0) + math.exp(1.0) + math.exp(2.0) + math.exp(3.0)) / 4) - 1.0
    assert critics.calibrated_gap(proposed, data, returns, own).item() == pytest.approx(
        plain, rel=1e-6
    )
    leaf = proposed.clone().requires_grad_()
    critics.calibrated_gap(leaf, data, returns, own, density).backward()
    # what is spared is not pushed down
    assert (leaf.grad[0, 0] != 0).tolist() == [True, True, False, True]


@pytest.mark.parametrize("kind", ["cql", "cal_ql"])
def test_the_conservative_gap_asks_at_random_here_and_at_the_next_frame(kind):
    """Against the formula, from the same draws: three of each."""
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8, chunk_length=2), Base())
    options = {
        "conservative_samples": 3,
        "offline_updates": 1,
        "conservatism": kind,
        "batch_size": 5,
    }
    algorithm = SAC(SACConfig(critics=CriticsConfig(hidden=[8], count=2), **options), policy)
    trajectory, replay, rewards = cut(episode(0), 2), Replay(), torch.tensor([0.0, 0.0, 1.0])
    replay.add(trajectory, rewards, "demonstrations", extra=algorithm.annotate(trajectory, rewards))
    batch = replay.draw(5, torch.Generator().manual_seed(1))
    here, after = policy.encode(batch.extra), policy.encode(batch.next_extra)
    data = algorithm.head.value(algorithm.critics(here, policy.taken(batch.actions, batch.extra)))
    state = algorithm.generator.get_state()
    found = conservative.gap(algorithm, (here, batch.extra), (after, batch.next_extra), data)
    algorithm.generator.set_state(state)
    size, total = policy.latent_dim, torch.zeros(2, 5)
    random = 2.0 * torch.rand(5, 3, size, generator=algorithm.generator) - 1.0
    noises = [
        torch.randn(15, size, generator=algorithm.generator).view(5, 3, size) for _ in range(2)
    ]
    for i in range(5):
        terms = []
        for j in range(3):
            drawn = [(random[i, j], torch.tensor(-size * math.log(2.0)), False)]
            for encoded, frames, noise in (
                (here, batch.extra, noises[0]),
                (after, batch.next_extra, noises[1]),
            ):
                row = {name: frame[i : i + 1] for name, frame in frames.items()}
                latent, log_prob = policy.propose(encoded[i : i + 1], row, noise[i, j][None])
                drawn.append((latent[0], log_prob[0], True))
            for latent, log_prob, own in drawn:
                frames = {name: frame[i : i + 1] for name, frame in batch.extra.items()}
                value = algorithm.head.value(
                    algorithm.critics(here[i : i + 1], policy.realize(latent[None], frames))
                )[:, 0]
                if own and kind == "cal_ql":
                    value = value.clamp(min=float(batch.extra["return"][i]))
                terms.append(value - log_prob)
        total[:, i] = torch.stack(terms).logsumexp(0)
    torch.testing.assert_close(found, (total - data).mean(), rtol=1e-5, atol=1e-6)


def test_the_target_of_a_conservative_update_is_the_best_of_several_actions():
    """A critic that reads the first number of an action: the target is the largest of fifty that
    the actor would do next."""
    policy = DirectActor(DirectConfig(hidden=[8], encoder=8, chunk_length=1), Base())
    common = {
        "critics": CriticsConfig(hidden=[8], count=2, subset=1),
        "conservatism": "cal_ql",
        "conservative_samples": 50,
    }
    algorithm = SAC(SACConfig(offline_updates=1, **common), policy)
    algorithm._target[1].forward = lambda features, actions: actions[None, :, :1].expand(2, -1, -1)
    before, after = (policy.base.frame_features(seen(i, 2)) for i in (0, 1))
    batch = dataclasses.replace(
        batch_of([0.0, 0.5], [1.0, 0.5], small()), extra=before, next_extra=after
    )

    def seeded(function):
        algorithm.generator.manual_seed(7)
        with torch.no_grad():
            return function()

    def drawn() -> torch.Tensor:
        frames = {name: frame.repeat_interleave(50, 0) for name, frame in after.items()}
        noise = torch.randn(100, policy.latent_dim, generator=algorithm.generator)
        latent, _ = policy.propose(policy.encode(after).repeat_interleave(50, 0), frames, noise)
        return policy.realize(latent, frames)[:, 0].view(2, 50).amax(1)

    target, best = seeded(lambda: algorithm._targets(batch, after)), seeded(drawn)
    torch.testing.assert_close(target, torch.stack([best[0], 0.5 + 0.5 * best[1]]))
    algorithm.updates = 1
    online = seeded(lambda: algorithm._targets(batch, after))
    assert bool((target > online).all())
    algorithm.updates, algorithm.config.max_target_backup = 0, False
    torch.testing.assert_close(seeded(lambda: algorithm._targets(batch, after)), online)


def test_wsrl_is_its_releases():
    config = configs.compose(["run=quickstart", "algorithm=wsrl"]).algorithm
    assert (config.conservatism, config.conservative_weight, config.conservative_samples) == (
        "cal_ql",
        5.0,
        10,
    )
    assert config.max_target_backup and not config.entropy_in_backup and config.gamma == 0.99
    assert (config.critics.count, config.critics.subset, config.critics.tau) == (10, 2, 0.005)
    assert (config.temperature, config.target_entropy, config.start_decisions) == (1.0, 0.0, 5000)
    assert (
        config.learning_rate,
        config.critics.learning_rate,
        config.temperature_learning_rate,
    ) == (1e-4, 3e-4, 1e-4)


@pytest.mark.parametrize(
    ("low", "high", "bins"), [(0.0, 1.0, 51), (-100.0, 0.0, 128), (-1.0, 1.0, 5), (0.0, 1.0, 2)]
)
def test_hl_gauss_reads_back_what_it_was_told_up_to_both_ends(low, high, bins):
    """A target at an end, or a state that never pays, was drawn inwards by up to half a bin."""
    head = critics.HLGaussHead(low, high, bins)
    values = torch.linspace(low, high, 401)
    target = head.project(values)
    width = (high - low) / (bins - 1)
    assert bool((target >= 0).all()) and torch.allclose(target.sum(1), torch.ones(401), atol=1e-5)
    assert float((target @ head.centers - values).abs().max()) < 1e-3 * width
    inside = (values - low > 4.0 * width) & (high - values > 4.0 * width)
    edges = torch.cat([head.centers - width / 2, head.centers[-1:] + width / 2])
    mass = torch.distributions.Normal(values[:, None], 0.75 * width).cdf(edges).diff(dim=1)
    torch.testing.assert_close(
        target[inside], mass[inside] / mass[inside].sum(1, keepdim=True), rtol=0, atol=1e-5
    )
