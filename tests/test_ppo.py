"""PPO on a tiny synthetic bandit: it learns, resumes bit for bit, accumulates exactly and survives bad numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vla_rl.algorithms import losses
from vla_rl.algorithms.critic import CriticConfig, PrivilegedCritic
from vla_rl.algorithms.optim import optimizer_state
from vla_rl.algorithms.ppo import PPO, PPOConfig
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
    """Logits [h a bins] from proprio; the reward is the share of tokens equal to 3 (see `rollout`)."""

    embodiment = None
    chunk_length = H
    log_prob_axes = ("control_step", "action_dim")

    def __init__(self, seed: int = 0, head: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Linear(P, H * A * BINS, dtype=torch.float64)
        self.net.weight.data = 0.1 * torch.randn(self.net.weight.shape, generator=generator, dtype=torch.float64)
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
    def act(self, observation: Observation, *, deterministic: bool = False, seeds=None) -> PolicyOutput:
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
    return Observation({"camera": torch.zeros(rows, 4, 4, 3, dtype=torch.uint8)}, x, ("go",) * rows, x.clone())


def rollout(policy: BanditPolicy, seed: int, trajectories: int = 16, human: bool = False) -> RolloutBatch:
    """Episodes of 1–3 decisions; each earns the share of tokens equal to 3 at its end; some are truncated."""
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


@pytest.mark.parametrize("level", losses.LEVELS)
def test_gae_with_a_critic_learns_the_bandit(level):
    policy = BanditPolicy()
    ppo = PPO(PPOConfig(learning_rate=0.05, minibatch_size=32, ratio_level=level, epochs=3), policy, critic())
    before = score(policy)
    for i in range(25):
        metrics = ppo.update(rollout(policy, i, 32))
    assert before < 0.3 and score(policy) > 0.7
    assert metrics["ppo/skipped_updates"] == 0 and not policy.saw_privileged


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++"])
def test_critic_free_advantages_learn_the_bandit(advantage):
    policy = BanditPolicy()
    ppo = PPO(PPOConfig(advantage=advantage, gamma=1.0, learning_rate=0.05, minibatch_size=32), policy)
    for i in range(30):
        ppo.update(rollout(policy, i, 32))
    assert score(policy) > 0.6
