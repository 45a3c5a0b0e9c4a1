"""A memory of successes: what is kept, what is drawn of it, what imitating it does beside PPO,
and that it resumes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import test_ppo
import torch
from test_filtered_bc import Constant, batch, trajectory
from test_ppo import BanditPolicy, rollout
from torch import Tensor

from vla_rl.algorithms.optim import make_adamw
from vla_rl.algorithms.ppo import PPO
from vla_rl.algorithms.success_memory import SuccessMemory
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.imitation import AugmentConfig, MemoryConfig
from vla_rl.errors import ConfigError
from vla_rl.specs import Instead
from vla_rl.storage import load_state, save_state
from vla_rl.types import EpisodeSpec, Observation

PLAIN = AugmentConfig(shift=0, brightness=0.0, contrast=0.0)


def settings(**changes) -> MemoryConfig:
    return MemoryConfig(
        **{"episodes": 2, "updates": 3, "batch_size": 40, "first_share": 0.0, "augment": PLAIN}
        | changes
    )


def of_task(task: str, *args, **kwargs):
    made = trajectory(*args, **kwargs)
    return dataclasses.replace(made, episode=EpisodeSpec(task, 0))


class Shown:
    """Demonstrations whose proprio is −1."""

    def __init__(self):
        self.asked: list[tuple[int, float]] = []

    def sample(
        self, batch_size: int, generator=None, first_share: float = 0.0
    ) -> tuple[Observation, Tensor, Tensor]:
        self.asked.append((batch_size, first_share))
        made = trajectory(-1, True, batch_size)
        return made.observations.without_privileged(), made.actions, made.valid


def made(
    config: MemoryConfig, policy=None, demonstrations=lambda _: None, **changes
) -> SuccessMemory:
    return SuccessMemory(PPOConfig(memory=config, **changes), policy or Constant(), demonstrations)


def drawn(memory: SuccessMemory) -> list[float]:
    return memory.next_batch()[0].proprio[:, 0].tolist()


def test_demonstrations_and_what_a_person_did_are_not_the_policys_own():
    memory = made(
        settings(batch_size=64, demonstration_share=0.5), demonstrations=lambda _: Shown()
    )
    with_person = batch(trajectory(1, True), trajectory(2, True))
    is_human = torch.zeros_like(with_person.valid)
    is_human[with_person.trajectory_index == 1, 0] = True
    memory.add(dataclasses.replace(with_person, is_human=is_human))
    seen, _, _, own = memory.next_batch()
    assert set(seen.proprio[:, 0].tolist()) == {-1.0, 1.0, 2.0}
    assert torch.equal(own, seen.proprio[:, 0] == 1.0)
    again = made(settings(batch_size=64, demonstration_share=0.5), demonstrations=lambda _: Shown())
    again.load_state_dict(memory.state_dict())
    (kept,) = again.episodes.values()
    assert [e.own.all() for e in kept] == [True, False]


def test_the_newest_successes_of_each_task_are_kept():
    memory = made(settings())
    memory.add(batch(of_task("a", 1, True), of_task("a", 2, False), of_task("b", 3, True, 5)))
    assert set(drawn(memory)) == {1.0, 3.0}
    memory.add(batch(of_task("a", 4, True), of_task("a", 5, True)))
    assert set(drawn(memory)) == {3.0, 4.0, 5.0}  # the oldest of a's three had to go


def test_in_hindsight_a_failure_is_the_success_of_what_it_did_instead():
    blue = Instead("blue", "reach the blue goal", decisions=2)
    taken = dataclasses.replace(of_task("red", 1, False, 5), instead=blue)
    nobody_asks = dataclasses.replace(taken, instead=Instead("kept out", "reach it", 2))
    on_the_way = dataclasses.replace(of_task("red", 2, True, 3), instead=blue)
    told = batch(taken, nobody_asks, on_the_way, of_task("blue", 3, False))
    plain, memory = made(settings()), made(settings(hindsight=True))
    assert plain.update(told, learn=False) == {"memory/episodes": 1.0, "memory/updates": 0.0}
    assert memory.update(told, learn=False) == {
        "memory/episodes": 2.0,
        "memory/updates": 0.0,
        "memory/instead": 1.0,
    }
    ((kept,), (own,)) = memory.episodes["blue"], memory.episodes["red"]
    assert len(kept) == 2 and kept.observations.instruction == (blue.instruction,) * 2
    assert torch.equal(kept.actions, taken.actions[:2]) and kept.own.all()
    assert len(own) == 3 and own.observations.instruction == ("go",) * 3


def test_every_decision_is_as_likely_but_for_first_ones():
    memory = made(settings(batch_size=3000))
    long = of_task("a", 0, True, 9)
    long = dataclasses.replace(
        long,
        observations=dataclasses.replace(long.observations, proprio=torch.arange(9.0)[:, None]),
    )
    memory.add(batch(long, of_task("b", 50, True, 1)))

    def shares() -> Tensor:
        values = torch.tensor(drawn(memory))
        return torch.stack([(values == x).float().mean() for x in [*map(float, range(9)), 50.0]])

    torch.testing.assert_close(shares(), torch.full((10,), 0.1), atol=0.02, rtol=0.0)
    memory.config.first_share = 0.5  # a quarter more for each of the two episodes' first decisions
    torch.testing.assert_close(
        shares(), torch.tensor([0.3] + [0.05] * 8 + [0.3]), atol=0.03, rtol=0.0
    )


def test_demonstrations_have_their_share():
    shown = Shown()
    memory = made(
        settings(demonstration_share=0.25, first_share=0.3), demonstrations=lambda _: shown
    )
    assert drawn(memory) == [-1.0] * 40  # nothing else is there yet
    memory.add(batch(of_task("a", 1, True)))
    assert sorted(drawn(memory)) == [-1.0] * 10 + [1.0] * 30
    assert shown.asked == [(40, 0.3), (10, 0.3)]


def test_it_imitates_as_often_as_asked_and_nothing_where_there_is_nothing():
    policy = Constant()
    memory = made(settings(learning_rate=0.05, updates=60), policy)
    memory.add(batch(trajectory(3, False)))
    assert (
        memory.learn() == {"memory/episodes": 0.0, "memory/updates": 0.0}
        and policy.action.item() == 0.0
    )
    memory.add(batch(trajectory(0, True, action=0.7), trajectory(1, False, action=-5.0)))
    metrics = memory.learn()
    assert (metrics["memory/episodes"], metrics["memory/updates"]) == (1.0, 60.0)
    assert policy.action.item() == pytest.approx(0.7, abs=0.05) and metrics["memory/loss"] > 0


def test_the_learning_rate_falls_anew_in_each_iteration(tmp_path):
    def rates(memory: SuccessMemory) -> list[float]:
        seen: list[float] = []
        update = memory._imitation.update
        memory._imitation.update = lambda: seen.append(figures := update()) or figures
        memory.learn()
        del memory._imitation.update
        return [figures["sft/learning_rate"] for figures in seen]

    # a cosine over three updates, down to a hundredth
    wanted = [1.0, 0.99 * 0.75 + 0.01, 0.99 * 0.25 + 0.01]
    config = settings(learning_rate=1.0, min_learning_rate_fraction=0.01)
    memory = made(config)
    memory.add(batch(of_task("a", 1, True)))
    assert rates(memory) == pytest.approx(wanted) and rates(memory) == pytest.approx(wanted)
    save_state(tmp_path / "state", memory.state_dict())
    again = made(config)
    again.load_state_dict(load_state(tmp_path / "state"))
    assert rates(again) == pytest.approx(wanted)
    constant = made(settings(learning_rate=1.0, min_learning_rate_fraction=1.0))
    constant.add(batch(of_task("a", 1, True)))
    assert rates(constant) == [1.0] * 3


def test_updates_are_made_as_the_algorithms_and_bad_ones_are_counted():
    memory = made(
        settings(),
        micro_batch_size=7,
        offload_optimizer=True,
        autocast=False,
        grad_clip=0.5,
        betas=[0.8, 0.9],
    )
    own = memory._imitation.config
    assert (own.micro_batch_size, own.offload_optimizer, own.autocast) == (7, True, False)
    assert (own.grad_clip, own.betas) == (0.5, [0.8, 0.9])
    policy = Constant()
    memory = made(settings(), policy)
    memory.add(batch(of_task("a", 0, True, action=0.7)))
    with torch.no_grad():
        policy.action.fill_(math.nan)
    # and no loss that is none
    assert memory.learn() == {"memory/episodes": 1.0, "memory/updates": 0.0}
    assert memory.guard.skipped == 3


class Imitator(BanditPolicy):
    def imitation_loss(self, observation, actions, valid):
        return self.net.weight.square().sum(), {}


def run(
    memory: MemoryConfig,
    updates: int,
    policy: BanditPolicy | None = None,
    state=None,
    start: int = 0,
):
    torch.manual_seed(0)
    policy = policy or Imitator()
    ppo = PPO(PPOConfig(advantage="grpo", learning_rate=0.01, memory=memory), policy)
    if state is not None:
        ppo.load_state_dict(state)
    metrics = {}
    for seed in range(start, start + updates):
        data = rollout(policy, seed)
        metrics = ppo.update(data, torch.zeros(data.num_decisions))
    return policy, ppo, metrics


def test_ppo_imitates_beside_and_resumes_bit_for_bit(tmp_path):
    none, _, plain = run(settings(episodes=0), 2)
    assert not any(name.startswith("memory/") for name in plain)
    whole, _, metrics = run(settings(episodes=4), 2)
    assert metrics["memory/updates"] == 3.0 and 0 < metrics["memory/episodes"] <= 4
    assert not all(torch.equal(a, b) for a, b in zip(none.parameters(), whole.parameters()))
    half, ppo, _ = run(settings(episodes=4), 1)
    save_state(tmp_path / "state", ppo.state_dict())
    again = Imitator()
    again.load_state_dict(half.state_dict())
    resumed, _, _ = run(settings(episodes=4), 1, again, load_state(tmp_path / "state"), start=1)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offload"])
def test_neither_optimiser_undoes_what_the_other_did(offload):
    """In bfloat16 each keeps a float32 copy of the weights."""
    policy = Imitator().to(torch.bfloat16)
    ppo = make_adamw([(policy.parameters(), 1e-2)], [0.9, 0.99], 0.0, offload=offload)
    memory = make_adamw([(policy.parameters(), 1e-2)], [0.9, 0.99], 0.0, offload=offload)
    weight, path = policy.net.weight, []
    for _ in range(4):
        for optimizer, way in ((ppo, -1.0), (memory, -1.0)):
            weight.grad = torch.full_like(weight, way)
            optimizer.step()
            path.append(weight.mean().item())
    steps = [b - a for a, b in itertools.pairwise(path)]
    assert min(steps) > 0.005 and path[-1] - path[0] == pytest.approx(0.07, abs=0.015), path


def test_critics_that_warm_up_keep_the_policy_as_it_is():
    class Imitating(test_ppo.BanditPolicy):
        def imitation_loss(self, observation, actions, valid):
            return self.net.weight.square().sum(), {}

    policy = Imitating(head=True)
    config = PPOConfig(learning_rate=0.01, critic_warmup_iterations=1, memory=settings(episodes=4))
    ppo, before = PPO(config, policy), policy.net.weight.detach().clone()
    data = rollout(policy, 0)
    metrics = ppo.update(data, torch.zeros(data.num_decisions))
    assert (
        metrics["ppo/critic_warmup"] == 1.0
        and metrics["memory/updates"] == 0.0 < metrics["memory/episodes"]
    )
    assert torch.equal(policy.net.weight, before)
    metrics = ppo.update(rollout(policy, 1), torch.zeros(data.num_decisions))
    assert metrics["memory/updates"] == 3.0 and not torch.equal(policy.net.weight, before)


def test_bad_settings_and_policies_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.memory\.demonstration_share"):
        MemoryConfig(demonstration_share=1.5)
    with pytest.raises(ConfigError, match=r"algorithm\.memory\.episodes"):
        MemoryConfig(episodes=-1)
    with pytest.raises(ConfigError, match=r"algorithm\.memory\.min_learning_rate_fraction"):
        MemoryConfig(min_learning_rate_fraction=1.5)
    with pytest.raises(ConfigError, match="imitation_loss"):
        PPO(PPOConfig(advantage="grpo", memory=settings()), BanditPolicy())
