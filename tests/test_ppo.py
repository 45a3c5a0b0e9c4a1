"""PPO on a tiny synthetic bandit: it learns, resumes bit for bit, accumulates exactly and
survives bad numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from vla_rl.algorithms import losses
from vla_rl.algorithms.advantages import discounted_returns
from vla_rl.algorithms.critic import CriticConfig, PrivilegedCritic
from vla_rl.algorithms.estimators import GAE, Estimate
from vla_rl.algorithms.optim import adapted_rate, load_optimizer_state, optimizer_state
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.surrogate import behavior_weights
from vla_rl.errors import ConfigError, TrainingDiverged
from vla_rl.types import (
    ActionChunk,
    EpisodeSpec,
    Observation,
    PolicyEvaluation,
    PolicyOutput,
    RolloutBatch,
    Trajectory,
)

torch.set_num_threads(1)
H, A, BINS, P = 2, 3, 5, 4


class BanditPolicy(nn.Module):
    """Logits [h a bins] from proprio; the reward is the share of tokens equal to 3 (see
    `rollout`)."""

    embodiment = None
    chunk_length = H
    log_prob_axes = ("control_step", "action_dim")

    def __init__(self, seed: int = 0, head: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Linear(P, H * A * BINS, dtype=torch.float64)
        self.net.weight.data = 0.1 * torch.randn(
            self.net.weight.shape, generator=generator, dtype=torch.float64
        )
        self.net.bias.data.zero_()
        self.head = nn.Linear(P, 1, dtype=torch.float64) if head else None
        if head:
            self.head.weight.data.zero_()
            self.head.bias.data.zero_()
            self.value_parameters = self.head.parameters
        self.saw_privileged = False
        self.evaluated = 0

    def distribution(self, observation: Observation) -> torch.distributions.Categorical:
        self.saw_privileged |= observation.privileged is not None
        logits = self.net(observation.proprio.double()).view(-1, H, A, BINS)
        return torch.distributions.Categorical(logits=logits)

    def value(self, observation: Observation) -> Tensor | None:
        return None if self.head is None else self.head(observation.proprio.double()).squeeze(-1)

    @torch.no_grad()
    def act(
        self, observation: Observation, *, deterministic: bool = False, seeds=None
    ) -> PolicyOutput:
        d = self.distribution(observation)
        tokens = d.probs.argmax(-1) if deterministic else d.sample()
        chunk = ActionChunk(tokens.float(), torch.ones(len(observation), H, dtype=torch.bool))
        return PolicyOutput(chunk, d.log_prob(tokens), {"tokens": tokens}, self.value(observation))

    def evaluate(self, observation: Observation, replay) -> PolicyEvaluation:
        self.evaluated += len(observation)
        d = self.distribution(observation)
        return PolicyEvaluation(d.log_prob(replay["tokens"]), d.entropy(), self.value(observation))


def observe(rows: int, generator: torch.Generator) -> Observation:
    x = torch.randn(rows, P, generator=generator)
    return Observation(
        {"camera": torch.zeros(rows, 4, 4, 3, dtype=torch.uint8)}, x, ("go",) * rows, x.clone()
    )


def rollout(
    policy: BanditPolicy, seed: int, trajectories: int = 16, human: bool = False
) -> RolloutBatch:
    """Episodes of 1–3 decisions; each earns the share of tokens equal to 3 at its end; some are
    truncated."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(trajectories):
        t = 1 + i % 3
        observation = observe(t, generator)
        acted = policy.act(observation.without_privileged())
        valid = torch.ones(t, H, dtype=torch.bool)
        if i % 4 == 0:
            valid[-1, -1] = False  # ended inside the chunk
        rewards = ((acted.replay["tokens"] == 3).float().mean(-1) * valid).float()
        out.append(
            Trajectory(
                episode=EpisodeSpec("bandit", i // 4, group_id=i // 4),
                observations=observation,
                final_observation=observe(1, generator),
                actions=acted.chunk.actions,
                valid=valid,
                rewards=rewards,
                behavior_log_prob=acted.behavior_log_prob,
                replay=acted.replay,
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                success=bool(rewards.mean() > 0.2),
                is_human=torch.ones(t, H, dtype=torch.bool) if human else None,
            )
        )
    policy.evaluated = 0
    return RolloutBatch.from_trajectories(out)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def critic() -> PrivilegedCritic:
    return PrivilegedCritic(P, CriticConfig(hidden=[16]))


@torch.no_grad()
def score(policy: BanditPolicy) -> float:
    d = policy.distribution(observe(256, torch.Generator().manual_seed(99)).without_privileged())
    return float(d.probs[..., 3].mean())


@pytest.mark.parametrize("level", ["token", "step", "chunk"])
def test_gae_with_a_critic_learns_the_bandit(level):
    policy = BanditPolicy()
    ppo = PPO(
        PPOConfig(learning_rate=0.05, minibatch_size=32, ratio_level=level, epochs=3),
        policy,
        critic(),
    )
    before = score(policy)
    for i in range(20):
        metrics = ppo.update(rollout(policy, i, 32))
    assert before < 0.3 and score(policy) > 0.6
    assert metrics["ppo/skipped_updates"] == 0 and not policy.saw_privileged


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++"])
def test_critic_free_advantages_learn_the_bandit(advantage):
    policy = BanditPolicy()
    ppo = PPO(
        PPOConfig(advantage=advantage, gamma=1.0, learning_rate=0.05, minibatch_size=32), policy
    )
    for i in range(20):
        ppo.update(rollout(policy, i, 32))
    assert score(policy) > 0.5


def test_value_head_of_the_policy_learns_and_bootstraps():
    policy = BanditPolicy(head=True)
    config = PPOConfig(
        learning_rate=0.05, critic_learning_rate=0.05, minibatch_size=32, critic_warmup_iterations=1
    )
    ppo = PPO(config, policy)
    trunk, head = weights(policy.net), weights(policy.head)
    warm = ppo.update(rollout(policy, 0))
    assert torch.equal(weights(policy.net), trunk) and not torch.equal(weights(policy.head), head)
    assert warm["ppo/critic_warmup"] == 1 and warm["ppo/value_loss"] > 0
    for i in range(1, 15):
        metrics = ppo.update(rollout(policy, i, 32))
    assert metrics["ppo/critic_warmup"] == 0 and score(policy) > 0.5


def test_a_head_values_what_was_seen_last_without_deciding_anything(monkeypatch):
    policy = BanditPolicy(head=True)
    policy.head.bias.data.fill_(2.0)
    batch = rollout(policy, 0)
    monkeypatch.setattr(
        BanditPolicy, "act", lambda self, observation, **options: pytest.fail("it was asked to act")
    )
    config = PPOConfig(gamma=1.0, gae_lambda=1.0, critic_warmup_iterations=0)
    metrics = PPO(config, policy).update(batch, torch.zeros(batch.num_decisions))
    truncated = float(batch.truncated[batch.trajectory_index].double().mean())
    assert 0.0 < truncated < 1.0 and metrics["ppo/returns_mean"] == pytest.approx(
        2.0 * truncated, rel=1e-5
    )


def test_critic_warmup_leaves_the_policy_untouched_and_unasked():
    policy, value = BanditPolicy(), critic()
    ppo = PPO(PPOConfig(critic_warmup_iterations=2), policy, value)
    for i, learns in enumerate([False, False, True]):
        before, before_critic = weights(policy), weights(value)
        batch = rollout(policy, i)
        metrics = ppo.update(batch)
        assert torch.equal(weights(policy), before) is not learns
        assert (policy.evaluated == 0) is not learns
        assert not torch.equal(weights(value), before_critic)
        assert metrics["ppo/critic_warmup"] == float(not learns)


def test_ratio_is_exactly_one_before_the_first_step():
    policy = BanditPolicy()
    config = PPOConfig(advantage="grpo", epochs=1, minibatch_size=10_000)
    metrics = PPO(config, policy).update(rollout(policy, 0))
    assert metrics["ppo/ratio_min"] == metrics["ppo/ratio_max"] == metrics["ppo/ratio_mean"] == 1.0
    assert (
        metrics["ppo/clip_fraction"] == metrics["ppo/approx_kl"] == 0.0
        and metrics["ppo/ess"] == 1.0
    )
    assert metrics["ppo/behavior_gap_max"] < 1e-6


def test_the_gap_to_the_sampler_is_measured_and_only_recomputing_removes_it_from_the_ratio():
    policy = BanditPolicy()
    batch = rollout(policy, 0)
    batch = dataclasses.replace(batch, behavior_log_prob=batch.behavior_log_prob - 0.1)
    for recompute, ratio in ((True, 1.0), (False, math.exp(0.1))):
        config = PPOConfig(
            advantage="grpo",
            epochs=1,
            minibatch_size=10_000,
            learning_rate=0.0,
            recompute_old_log_prob=recompute,
        )
        metrics = PPO(config, policy).update(batch)
        assert metrics["ppo/ratio_mean"] == pytest.approx(ratio, rel=1e-5)
        assert metrics["ppo/behavior_gap_mean"] == pytest.approx(
            0.1 if recompute else 0.0, abs=1e-5
        )


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("unit", ["decision", "trajectory"])
def test_micro_batches_add_up_to_the_whole_minibatch(aggregation, unit):
    results = []
    for micro in (None, 3):
        policy = BanditPolicy(head=True)
        config = PPOConfig(
            loss_aggregation=aggregation,
            minibatch_unit=unit,
            minibatch_size=16 if unit == "decision" else 8,
            micro_batch_size=micro,
            entropy_coef=0.01,
            kl_coef=0.1,
            success_imitation_coef=0.1,
            normalize_advantage="minibatch",
            grad_clip=0.5,
            epochs=2,
        )
        metrics = PPO(config, policy, reference_policy=BanditPolicy(1)).update(rollout(policy, 0))
        results.append((weights(policy), metrics))
    (whole, metrics), (sliced, sliced_metrics) = results
    torch.testing.assert_close(whole, sliced, rtol=1e-5, atol=1e-7)
    for name in metrics:
        assert sliced_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("head", [False, True])
def test_resume_gives_a_bit_equal_next_update(head, tmp_path):
    def make(policy):
        config = PPOConfig(minibatch_size=8, target_kl=0.05, adaptive_learning_rate=True)
        return PPO(config, policy, None if head else critic())

    policy = BanditPolicy(head=head)
    ppo = make(policy)
    for i in range(2):
        ppo.update(rollout(policy, i))
    saved = tmp_path / "state.pt"
    torch.save(
        {
            "ppo": ppo.state_dict(),
            "policy": policy.state_dict(),
            "critic": ppo.critic and ppo.critic.state_dict(),
        },
        saved,
    )
    other = BanditPolicy(seed=5, head=head)
    resumed = make(other)
    state = torch.load(saved, weights_only=True)
    resumed.load_state_dict(state["ppo"])
    other.load_state_dict(state["policy"])
    if not head:
        resumed.critic.load_state_dict(state["critic"])
    batch = rollout(policy, 7)
    a, b = (
        {k: x for k, x in own.update(batch).items() if not k.startswith("time/")}
        for own in (ppo, resumed)
    )
    assert a == b and a
    assert torch.equal(weights(policy), weights(other))
    if not head:
        assert torch.equal(weights(ppo.critic), weights(resumed.critic))


def test_state_is_made_of_plain_values():
    def plain(x) -> bool:
        if isinstance(x, dict):
            return all(isinstance(k, str) and plain(v) for k, v in x.items())
        return (
            all(map(plain, x))
            if isinstance(x, list)
            else isinstance(x, Tensor | str | int | float | bool | None)
        )

    policy = BanditPolicy()
    ppo = PPO(PPOConfig(), policy, critic())
    ppo.update(rollout(policy, 0))
    assert plain(ppo.state_dict())
    with pytest.raises(ConfigError, match="separate critic"):
        PPO(PPOConfig(), BanditPolicy(head=True)).load_state_dict(ppo.state_dict())
    with pytest.raises(ConfigError, match="parameters"):
        load_optimizer_state(
            PPO(PPOConfig(), BanditPolicy(head=True)).optimizer, optimizer_state(ppo.optimizer)
        )


class Poisoned(BanditPolicy):
    """Its loss is NaN while ``poison`` is set."""

    poison = False

    def evaluate(self, observation, replay):
        out = super().evaluate(observation, replay)
        if not self.poison or not torch.is_grad_enabled():
            return out
        return dataclasses.replace(out, log_prob=out.log_prob * float("nan"))


def test_non_finite_updates_are_skipped_counted_and_end_the_run():
    policy = Poisoned()
    ppo = PPO(PPOConfig(advantage="grpo", epochs=1, minibatch_size=1000, max_bad_updates=3), policy)
    policy.poison = True
    before = weights(policy)
    for i in (1, 2):
        assert ppo.update(rollout(policy, i))["ppo/skipped_updates"] == i
    assert torch.equal(weights(policy), before)
    policy.poison = False
    assert ppo.update(rollout(policy, 3))["ppo/skipped_updates"] == 2
    assert not torch.equal(weights(policy), before)  # a good one in between starts the count anew
    policy.poison = True
    for i in (4, 5):
        ppo.update(rollout(policy, i))
    with pytest.raises(TrainingDiverged, match="3 updates in a row"):
        ppo.update(rollout(policy, 6))


def test_target_kl_ends_the_epochs_and_adapts_the_learning_rate():
    policy = BanditPolicy()
    config = PPOConfig(
        advantage="grpo",
        learning_rate=0.1,
        epochs=20,
        minibatch_size=1000,
        target_kl=0.02,
        adaptive_learning_rate=True,
    )
    ppo = PPO(config, policy)
    metrics = ppo.update(rollout(policy, 0))
    assert metrics["ppo/early_stop"] == 1.0 and metrics["ppo/epochs"] < 20
    # a minibatch is the batch: its KL was read 0, 1, … updates in, and ended them at the last
    updates = metrics["ppo/updates_total"]
    wanted = 0.1 * math.sqrt(0.02 * (updates / 20) / metrics["ppo/last_kl"])
    assert metrics["ppo/last_kl"] > 0.02 and metrics["ppo/learning_rate"] == pytest.approx(wanted)


def test_the_rate_is_that_at_which_all_updates_move_by_target_kl():
    config = PPOConfig(learning_rate=0.3, target_kl=0.02, adaptive_learning_rate=True)
    # one of twelve updates made six times the KL that is meant for all: 0.3 · √(1 / (12 · 6))
    assert adapted_rate(config, 0.3, 0.12, 1 / 12) == pytest.approx(0.3 / math.sqrt(72))
    assert adapted_rate(config, 0.2, 0.02, 1.0) == pytest.approx(0.2)
    assert adapted_rate(config, 0.2, 0.001, 1.0) == pytest.approx(0.3)  # rises by half at most
    assert adapted_rate(config, 2.9, 0.001, 1.0) == pytest.approx(3.0)  # to ten times its start
    assert adapted_rate(config, 0.031, 9.0, 0.5) == pytest.approx(0.03)  # and falls to a tenth
    assert adapted_rate(config, 0.2, 0.0, 0.0) == 0.2  # an only minibatch tells nothing


def test_learning_rate_decays_linearly_to_its_floor_and_resumes():
    config = PPOConfig(
        advantage="reinforce++",
        learning_rate=1.0e-3,
        decay_iterations=4,
        min_learning_rate_fraction=0.25,
        epochs=1,
    )
    policy = BanditPolicy()
    ppo = PPO(config, policy)
    rates = [ppo.update(rollout(policy, i))["ppo/learning_rate"] for i in range(3)]
    resumed = PPO(config, policy)
    resumed.load_state_dict(ppo.state_dict())
    rates += [resumed.update(rollout(policy, i))["ppo/learning_rate"] for i in range(3, 6)]
    assert rates == pytest.approx([1.0e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.25e-3, 0.25e-3])


def test_learning_rate_warms_up_once_the_critic_has():
    config = PPOConfig(
        learning_rate=1.0e-3,
        critic_warmup_iterations=1,
        warmup_iterations=4,
        decay_iterations=10,
        epochs=1,
    )
    policy = BanditPolicy()
    ppo = PPO(config, policy, critic())
    rates = [ppo.update(rollout(policy, i))["ppo/learning_rate"] for i in range(6)]
    assert rates == pytest.approx([0.0, 0.25e-3 * 0.9, 0.5e-3 * 0.8, 0.75e-3 * 0.7, 0.6e-3, 0.5e-3])
    with pytest.raises(
        ConfigError, match=r"warmup_iterations=2 and algorithm.adaptive_learning_rate=true"
    ):
        PPOConfig(warmup_iterations=2, target_kl=0.01, adaptive_learning_rate=True)


def test_human_steps_do_not_teach_the_policy_but_do_teach_the_critic():
    policy, value = BanditPolicy(), critic()
    before, before_critic = weights(policy), weights(value)
    PPO(PPOConfig(), policy, value).update(rollout(policy, 0, human=True))
    assert torch.equal(weights(policy), before) and not torch.equal(weights(value), before_critic)


def test_skipping_zero_advantages_only_rescales_the_mean():
    policy = BanditPolicy()
    batch = rollout(policy, 0)
    flat = torch.zeros(batch.num_decisions)
    # one success in group 0, every other group is all the same
    flat[batch.trajectory_index == 0] = 1.0
    plain_policy, skipping_policy = BanditPolicy(), BanditPolicy()
    config = PPOConfig(advantage="grpo", epochs=1, minibatch_size=1000, grad_clip=None)
    a = PPO(config, plain_policy).update(batch, flat)
    skipping_policy.evaluated = 0
    b = PPO(dataclasses.replace(config, skip_zero_advantage=True), skipping_policy).update(
        batch, flat
    )
    first_group = int((batch.group_index[batch.trajectory_index] == 0).sum())
    assert skipping_policy.evaluated == batch.num_decisions + first_group
    assert (
        a["ppo/zero_advantage_fraction"]
        == b["ppo/zero_advantage_fraction"]
        == pytest.approx(12 / 16)
    )
    entries = int((batch.valid.sum(1) * A).sum())
    kept = int((batch.valid.sum(1) * A)[batch.group_index[batch.trajectory_index] == 0].sum())
    assert b["ppo/grad_norm"] == pytest.approx(a["ppo/grad_norm"] * entries / kept, rel=1e-4)
    nothing = PPO(dataclasses.replace(config, skip_zero_advantage=True), BanditPolicy()).update(
        batch, torch.zeros(batch.num_decisions)
    )
    assert nothing["ppo/epochs"] == 0


def test_success_imitation_raises_the_likelihood_of_what_succeeded():
    policy = BanditPolicy()
    batch = rollout(policy, 0)
    config = PPOConfig(advantage="grpo", success_imitation_coef=1.0, learning_rate=0.01, epochs=10)
    succeeded = batch.success[batch.trajectory_index]

    def evaluate():
        return policy.evaluate(batch.observations.without_privileged(), batch.replay).log_prob

    before = evaluate()[succeeded].mean().item()
    metrics = PPO(config, policy).update(batch, torch.zeros(batch.num_decisions))
    assert evaluate()[succeeded].mean().item() > before + 0.1
    assert metrics["ppo/success_imitation_loss"] > 0 and metrics[
        "ppo/policy_loss"
    ] == pytest.approx(0.0, abs=1e-7)


def test_kl_to_the_reference_holds_the_policy_back():
    distances = []
    for coefficient in (1e-9, 10.0):
        policy = BanditPolicy()
        config = PPOConfig(
            advantage="grpo", learning_rate=0.02, epochs=5, kl_coef=coefficient, kl_kind="k2"
        )
        ppo = PPO(config, policy, reference_policy=BanditPolicy())
        for i in range(5):
            ppo.update(rollout(policy, i))
        distances.append(float((weights(policy) - weights(BanditPolicy())).norm()))
    assert distances[1] < 0.5 * distances[0]


def test_several_rewards_are_weighted_or_decoupled():
    policy = BanditPolicy()
    batch = rollout(policy, 0)
    g = torch.Generator().manual_seed(0)
    rewards = {
        "success": torch.rand(batch.num_decisions, generator=g),
        "style": torch.rand(batch.num_decisions, generator=g),
    }
    names = {
        "reward_names": ["success", "style"],
        "reward_weights": [1.0, 0.5],
        "advantage": "grpo",
        "epochs": 1,
        "learning_rate": 0.01,
    }
    summed = PPO(PPOConfig(**names), BanditPolicy()).update(batch, rewards)
    by_hand = rewards["success"] + 0.5 * rewards["style"]
    plain = PPO(PPOConfig(advantage="grpo", epochs=1, learning_rate=0.01), BanditPolicy()).update(
        batch, by_hand
    )
    assert summed["ppo/policy_loss"] == pytest.approx(plain["ppo/policy_loss"])
    assert "ppo/score_mean/style" in summed
    decoupled = PPO(PPOConfig(**names, decouple_rewards=True), BanditPolicy()).update(
        batch, rewards
    )
    assert (
        decoupled["ppo/advantage_std"] == pytest.approx(1.0, abs=0.2)
        and decoupled["ppo/grad_norm"] != summed["ppo/grad_norm"]
    )
    with pytest.raises(ConfigError, match="reward_names"):
        PPO(PPOConfig(advantage="grpo"), BanditPolicy()).update(batch, rewards)


def test_bad_rewards_are_refused():
    policy = BanditPolicy()
    batch, ppo = rollout(policy, 0), PPO(PPOConfig(advantage="grpo"), policy)
    with pytest.raises(ValueError, match="one per decision"):
        ppo.update(batch, torch.zeros(3))
    with pytest.raises(ValueError, match="not finite"):
        ppo.update(batch, torch.full((batch.num_decisions,), float("nan")))


def test_the_simplevla_recipe_is_a_matter_of_config():
    config = PPOConfig(
        advantage="grpo",
        gamma=1.0,
        group_center="mean",
        group_scale="std",
        normalize_advantage="none",
        ratio_level="token",
        loss_aggregation="trajectory",
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        entropy_coef=0.0,
        kl_coef=0.0,
        epochs=1,
        minibatch_unit="trajectory",
        minibatch_size=4,
        micro_batch_size=2,
        learning_rate=5e-6,
        betas=[0.9, 0.999],
        weight_decay=0.01,
        grad_clip=None,
        recompute_old_log_prob=True,
    )
    policy = BanditPolicy()
    batch = rollout(policy, 0)
    metrics = PPO(config, policy).update(batch)
    assert metrics["ppo/updates_total"] == 4  # 16 trajectories, 4 a minibatch
    # the first gradient against the recipe written out: token mean inside a trajectory, then mean
    # over trajectories
    whole = BanditPolicy()
    first = PPO(dataclasses.replace(config, minibatch_size=16), whole)
    norm = first.update(batch)["ppo/grad_norm"]
    reference = BanditPolicy()
    out = reference.evaluate(batch.observations.without_privileged(), batch.replay)
    scores = torch.stack([batch.rewards[batch.trajectory_index == j].sum() for j in range(16)])
    total = 0.0
    for j in range(16):
        members = scores[batch.group_index == batch.group_index[j]]
        a = (scores[j] - members.mean()) / (members.std() + 1e-6)
        rows = batch.trajectory_index == j
        token_ratio = (out.log_prob[rows] - out.log_prob[rows].detach()).exp()[batch.valid[rows]]
        total = total + -(a * token_ratio).mean() / 16
    total.backward()
    by_hand = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    assert norm == pytest.approx(float(by_hand), rel=1e-4)


def test_gae_uses_the_critics_values_and_bootstraps_only_truncated_episodes():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.rows = 0

        def value(self, observation):
            self.rows += len(observation)
            return self.scale * torch.full((len(observation),), 2.0)

    policy, fixed = BanditPolicy(), Fixed()
    batch = rollout(policy, 0)
    config = PPOConfig(gamma=1.0, gae_lambda=1.0, critic_epochs=0, epochs=1)
    metrics = PPO(config, policy, fixed).update(batch, torch.zeros(batch.num_decisions))
    assert fixed.rows == batch.num_decisions + int(batch.truncated.sum())
    truncated = batch.truncated[batch.trajectory_index].float().mean()
    assert metrics["ppo/returns_mean"] == pytest.approx(float(2.0 * truncated), rel=1e-5)
    # running out of time is worth nothing
    limited = dataclasses.replace(config, bootstrap_truncated=False)
    fixed = Fixed()
    assert (
        PPO(limited, policy, fixed).update(batch, torch.zeros(batch.num_decisions))[
            "ppo/returns_mean"
        ]
        == 0.0
    )
    assert fixed.rows == batch.num_decisions


def test_missing_capabilities_name_both_sides():
    class Plain:
        embodiment, chunk_length = None, 1

        def act(self, observation, *, deterministic=False, seeds=None): ...

    with pytest.raises(ConfigError, match="Plain lacks evaluate, log_prob_axes"):
        PPO(PPOConfig(), Plain())
    with pytest.raises(ConfigError, match="reference policy"):
        PPO(PPOConfig(kl_coef=0.1), BanditPolicy(), critic())
    with pytest.raises(ConfigError, match="value_parameters"):
        PPO(PPOConfig(critic_warmup_iterations=1), BanditPolicy())
    flat = BanditPolicy()
    flat.log_prob_axes = ("token", "token")
    with pytest.raises(ConfigError, match="control_step"):
        PPO(PPOConfig(ratio_level="step"), flat, critic())
    policy = BanditPolicy()
    with pytest.raises(ConfigError, match="has no head for them and no critic"):
        PPO(PPOConfig(), policy).update(rollout(policy, 0))
    mute, batch = BanditPolicy(head=True), rollout(BanditPolicy(), 0)
    mute.evaluate = lambda observation, replay: BanditPolicy.evaluate(headed, observation, replay)
    mute.value = lambda observation: None
    headed = BanditPolicy(head=True)
    with pytest.raises(
        ConfigError, match=r"BanditPolicy.evaluate returns a value, .*no value\(observation\)"
    ):
        PPO(PPOConfig(critic_warmup_iterations=0), mute).update(batch)
    policy.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        PPO(PPOConfig(), policy, critic())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": "upgo"}, "'upgo'.*gae, vtrace, grpo, rloo, reinforce"),
        ({"vtrace_rho_cap": 0.0}, "vtrace_rho_cap=0.0"),
        ({"vtrace_c_cap": 2.0}, r"vtrace_c_cap=2.*vtrace_rho_cap=1"),
        ({"advantage": "vtrace", "recompute_old_log_prob": False}, "recompute_old_log_prob=true"),
        ({"ratio_level": "word"}, "token, step, chunk"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"minibatch_size": 0}, "minibatch_size=0"),
        ({"betas": [0.9]}, "betas"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"decouple_rewards": True}, "GDPO"),
        ({"reward_names": ["a"]}, "differ in length"),
        ({"adaptive_learning_rate": True}, "target_kl"),
    ],
)
def test_bad_settings_name_the_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**changes)


def test_config_is_an_omegaconf_schema():
    schema = OmegaConf.structured(PPOConfig)
    merged = OmegaConf.to_object(
        OmegaConf.merge(schema, {"target_kl": 0.02, "micro_batch_size": 4, "dual_clip": None})
    )
    assert merged == PPOConfig(target_kl=0.02, micro_batch_size=4)
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(schema, {"learning_rat": 1.0})
    assert OmegaConf.to_object(OmegaConf.structured(CriticConfig)) == CriticConfig()


# ------------------------------------------------------------------------------------------- critic
def test_critic_normalises_by_running_statistics_whatever_the_split():
    x = torch.randn(40, P, generator=torch.Generator().manual_seed(0)) * 3 + 5
    x[:, 3] = 1.25  # a constant
    make = lambda rows: Observation({}, rows, ("",) * len(rows), rows)  # noqa: E731
    whole, parts = critic(), critic()
    whole.observe(make(x))
    for piece in x.split(7):
        parts.observe(make(piece))
    torch.testing.assert_close(whole.mean, x.double().mean(0))
    torch.testing.assert_close(
        whole.m2 / whole.count, x.double().var(0, unbiased=False), atol=1e-9, rtol=1e-6
    )
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.m2, whole.m2, atol=1e-8, rtol=1e-6)
    assert torch.equal(whole.value(make(x)), torch.zeros(40))  # the head starts at 0
    assert torch.isfinite(whole.value(make(x * 1e6))).all()


def test_critic_learns_a_function_of_the_state():
    generator = torch.Generator().manual_seed(0)
    value = critic()
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)
    for _ in range(150):
        seen = observe(64, generator)
        loss = (value.value(seen) - seen.privileged[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1


def test_critic_needs_privileged_state():
    seen = observe(2, torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="without privileged state"):
        critic().value(seen.without_privileged())
    with pytest.raises(ConfigError, match=r"made for 4 .* got 2"):
        critic().value(dataclasses.replace(seen, privileged=seen.privileged[:, :2]))
    with pytest.raises(ConfigError, match="privileged_dim is 0"):
        PrivilegedCritic(0)
    with pytest.raises(ConfigError, match="hidden"):
        CriticConfig(hidden=[])


def test_critic_init_depends_on_its_seed_alone():
    torch.manual_seed(1)
    a = critic()
    state = torch.get_rng_state()
    b = critic()
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(weights(a), weights(b))
    assert not torch.equal(
        weights(a), weights(PrivilegedCritic(P, CriticConfig(hidden=[16], seed=1)))
    )


# --------------------------------------------------------------------------------------- stale data
def test_behaviour_weights_against_hand_computed_numbers():
    """π_p/μ of four entries: 1, 4, 1/4 and (masked out) 100."""
    old = torch.tensor([[0.0, 4.0, 0.25, 100.0]]).clamp(min=1.0).log() + torch.tensor(
        [[0.0, 0.0, -math.log(4.0), 0.0]]
    )
    behavior, mask = torch.zeros(1, 4), torch.tensor([[True, True, True, False]])
    assert behavior_weights(PPOConfig(), old, behavior, mask) is None
    truncated = behavior_weights(
        PPOConfig(behavior_weight="truncate", behavior_cap=2.0), old, behavior, mask
    )
    mean = (1.0 + 2.0 + 0.25) / 3
    torch.testing.assert_close(truncated[0, :3], torch.tensor([1.0, 2.0, 0.25]) / mean)
    masked = behavior_weights(
        PPOConfig(behavior_weight="mask", behavior_cap=2.0), old, behavior, mask
    )
    torch.testing.assert_close(masked[0, :3], torch.tensor([1.0, 0.0, 0.0]) / mean)


def tilted() -> BanditPolicy:
    """Another policy than the one that acted."""
    policy = BanditPolicy()
    with torch.no_grad():
        policy.net.bias.copy_(torch.linspace(-1.0, 1.0, len(policy.net.bias)))
    return policy


def test_fresh_data_weighs_one_and_stale_data_does_not_drop_the_behaviour_policy():
    """On fresh data the correction changes nothing; on stale data the first step is the
    importance-weighted gradient."""

    def first_gradient(batch, **options) -> Tensor:
        policy = tilted()
        ppo = PPO(
            PPOConfig(
                advantage="reinforce++", epochs=1, minibatch_size=10_000, grad_clip=None, **options
            ),
            policy,
        )
        seen: list[Tensor] = []
        step = ppo.guard.step
        ppo.guard.step = lambda optimizer, loss: (
            seen.append(policy.net.bias.grad.clone()),
            step(optimizer, loss),
        )[1]
        ppo.update(batch)
        return seen[0]

    stale = rollout(BanditPolicy(), 0)
    plain, decoupled = (
        first_gradient(stale),
        first_gradient(stale, behavior_weight="truncate", behavior_cap=100.0),
    )
    assert not torch.allclose(plain, decoupled, rtol=1e-2)
    fresh = rollout(tilted(), 0)
    torch.testing.assert_close(
        first_gradient(fresh), first_gradient(fresh, behavior_weight="truncate")
    )


@pytest.mark.parametrize("decoupled", [False, True])
def test_vtrace_weighs_what_an_older_policy_did_once(decoupled):
    """ρ = min(1, exp of the mean log-ratio over a decision's executed tokens), which is in the
    targets always and in the advantage where the loss has no weight of its own; on fresh data it is
    GAE."""
    options = {"behavior_weight": "truncate"} if decoupled else {}
    config = PPOConfig(advantage="vtrace", gae_lambda=0.8, epochs=1, **options)
    batch = rollout(BanditPolicy(), 0)
    ppo, seen = PPO(config, tilted(), critic()), []
    plain = ppo.estimator.estimate
    ppo.estimator.estimate = lambda scored: (seen.append(scored), plain(scored))[1]
    metrics = ppo.update(batch)
    with torch.no_grad():
        gap = tilted().evaluate(batch.observations, batch.replay).log_prob - batch.behavior_log_prob
    executed = batch.valid[:, :, None].expand_as(gap)
    by_hand = torch.stack([row[mask].mean().exp() for row, mask in zip(gap, executed, strict=True)])
    torch.testing.assert_close(seen[0].log_weights.double(), by_hand.log(), atol=1e-5, rtol=1e-5)
    assert metrics["ppo/vtrace_rho_mean"] == pytest.approx(
        float(by_hand.clamp(max=1.0).mean()), rel=1e-5
    )
    assert (
        0.0 < metrics["ppo/vtrace_truncated"] < 1.0
        and ("ppo/behavior_weight_min" in metrics) is decoupled
    )
    found, scored = plain(seen[0]), seen[0]
    rho = by_hand.clamp(max=1.0).float()
    last = torch.cumsum(batch.lengths, 0) - 1  # r + γV − V there, and V + ρ·(that)
    error = scored.total[last] + scored.discounts[last] * scored.final_values - scored.values[last]
    torch.testing.assert_close(found.returns[last], scored.values[last] + rho[last] * error)
    torch.testing.assert_close(found.advantages[last], error if decoupled else rho[last] * error)

    fresh = dataclasses.replace(scored, log_weights=torch.zeros(len(rho)))
    expected = GAE(config).estimate(fresh)
    torch.testing.assert_close(plain(fresh).advantages, expected.advantages)
    torch.testing.assert_close(plain(fresh).returns, expected.returns)


class CentredReturns:
    """An advantage that is not of this project: reward-to-go less its mean."""

    needs_value, grouped = False, False

    def __init__(self, config):
        self.config = config

    def estimate(self, scored):
        returns = discounted_returns(scored.total, scored.discounts, scored.batch.lengths)
        return Estimate(returns - returns.mean(), metrics={"ppo/own": 1.0})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_an_advantage_of_one_s_own_is_one_class():
    config = PPOConfig(advantage="test_ppo:CentredReturns", epochs=1)
    ppo = PPO(config, BanditPolicy())
    metrics = ppo.update(rollout(ppo.policy, 0))
    assert metrics["ppo/own"] == 1.0 and metrics["ppo/epochs"] == 1.0
    ppo.load_state_dict(ppo.state_dict())
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        PPO(PPOConfig(advantage="nowhere:Estimator"), BanditPolicy())
