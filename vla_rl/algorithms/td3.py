"""TD3 on chunks: the smallest learner from replay, for policies that are a differentiable function of the observation.

Followed: Fujimoto et al. 2018 (twin critics with a minimum, target smoothing, delayed policy updates), with LayerNorm in
the critics (RLPD, Ball et al. 2023 §4.2) and optional imitation beside (TD3+BC, Fujimoto & Gu 2021, without its scaling). A
chunk is one action; the discount counts control steps, as chunks may be cut short (SMDP; Sutton et al. 1999).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.algorithms.settings import TD3Config
from vla_rl.errors import ConfigError
from vla_rl.interfaces import AlgorithmContext, Draw, Policy, RegressionPolicy
from vla_rl.types import Observation, Trajectory, Transitions


class Critics(nn.Module):
    """``count`` value functions of (features [b f], chunk [b h a]), evaluated as one batched product."""

    def __init__(self, features: int, actions: int, hidden: list[int], count: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList()
        for _ in range(count):
            layers: list[nn.Module] = []
            width = features + actions
            for size in hidden:
                layers += [nn.Linear(width, size), nn.LayerNorm(size), nn.SiLU()]
                width = size
            self.nets.append(nn.Sequential(*layers, nn.Linear(width, 1)))

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Values [critics b]."""
        x = torch.cat([features, actions.flatten(1)], dim=1)
        return torch.stack([net(x).squeeze(-1) for net in self.nets])


class TD3:
    """A `Replayed` algorithm for a `RegressionPolicy`. It owns its critics, targets and optimisers."""

    reads_rewards = True

    def __init__(self, config: TD3Config, policy: Policy) -> None:
        """Raises ConfigError where the policy's actions are no function of the observation."""
        if not isinstance(policy, RegressionPolicy):
            raise ConfigError(
                f"algorithm td3 needs a policy with actions(observation) and features(observation) (RegressionPolicy); "
                f"{type(policy).__name__} has none: use policy=small, or algorithm=ppo"
            )
        self.config, self.policy = config, policy
        parameters = list(policy.parameters())
        device, spec = parameters[0].device, policy.embodiment
        self._low, self._high = (torch.tensor(x, device=device) for x in (spec.action_low, spec.action_high))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(config.seed)
            width = policy.features(_blank(policy)).shape[1]
            self.critics = Critics(width, policy.chunk_length * spec.action_dim, config.hidden, config.critics).to(device)
        self._target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._target_policy = copy.deepcopy(policy)
        self.optimizer = make_adamw([(parameters, config.learning_rate)], (0.9, 0.999), 0.0)
        self.critic_optimizer = make_adamw([(self.critics.parameters(), config.critic_learning_rate)], (0.9, 0.999), 0.0)
        self._guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self._critic_guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.updates = 0

    @classmethod
    def from_context(cls, config: TD3Config, policy: Policy, context: AlgorithmContext) -> TD3:
        """Needs nothing of the context: it makes its own critics."""
        return cls(config, policy)

    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Nothing: features are a function of the observation alone, without weights."""
        return {}

    def update(self, draw: Draw) -> dict[str, float]:
        """One step of the critics and, every ``policy_delay`` of them, one of the policy. Raises `TrainingDiverged`."""
        c = self.config
        shares = {"demonstrations": c.demonstration_share, "online": 1.0 - c.demonstration_share}
        batch = draw(c.batch_size, gamma=c.gamma, n_step=c.n_step, shares=shares)
        with torch.no_grad():
            target = self._targets(batch)
            features = self.policy.features(batch.observations)
        values = self.critics(features, self._unit(batch.actions.to(target)))
        loss = (values - target).square().mean()
        loss.backward()
        self._critic_guard.step(self.critic_optimizer, loss.detach())
        metrics = {"td3/critic_loss": float(loss.detach()), "td3/value_mean": float(values.detach().mean())}
        metrics["td3/target_mean"] = float(target.mean())
        self.updates += 1
        if self.updates % c.policy_delay == 0:
            metrics |= self._improve(batch, features)
            _follow(self._target_policy, self.policy, c.tau)
            _follow(self._target_critics, self.critics, c.tau)
        return metrics

    def _targets(self, batch: Transitions) -> Tensor:
        """reward + discount · min over critics of Q'(s', π'(s') + clipped noise), float32 [b] (Fujimoto 2018, eq. 14)."""
        c = self.config
        actions = self._unit(self._target_policy.actions(batch.next_observations))
        noise = c.target_noise * torch.randn(actions.shape, generator=self.generator).to(actions)
        actions = (actions + noise.clamp(-c.target_clip, c.target_clip)).clamp(-1.0, 1.0)
        values = self._target_critics(self._target_policy.features(batch.next_observations), actions).amin(0)
        return batch.rewards.to(values) + batch.discounts.to(values) * values

    def _improve(self, batch: Transitions, features: Tensor) -> dict[str, float]:
        """One policy step up the first critic."""
        actions = self.policy.actions(batch.observations)
        value = self.critics(features, self._unit(actions))[0].mean()
        loss = -value
        if self.config.imitation_coef:
            shown = torch.tensor([source == "demonstrations" for source in batch.source])[:, None]
            counts = (batch.valid & (batch.is_human | shown)).to(actions.device)
            error = (self._unit(actions) - self._unit(batch.actions.to(actions))).square().mean(-1)
            loss = loss + self.config.imitation_coef * (error * counts).sum() / counts.sum().clamp(min=1)
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        self.critic_optimizer.zero_grad(set_to_none=True)  # the critics' gradients of this pass are not theirs to use
        return {"td3/policy_loss": float(loss.detach())}

    def _unit(self, actions: Tensor) -> Tensor:
        """Physical units → [−1, 1]."""
        return 2.0 * (actions - self._low) / (self._high - self._low) - 1.0

    # ---------------------------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights. Needs no pickle."""
        return {
            "updates": self.updates,
            "critics": dict(self.critics.state_dict()),
            "target_critics": dict(self._target_critics.state_dict()),
            "target_policy": dict(self._target_policy.state_dict()),
            "optimizer": optimizer_state(self.optimizer),
            "critic_optimizer": optimizer_state(self.critic_optimizer),
            "guards": [self._guard.state_dict(), self._critic_guard.state_dict()],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.updates = int(state["updates"])
        self.critics.load_state_dict(state["critics"])
        self._target_critics.load_state_dict(state["target_critics"])
        self._target_policy.load_state_dict(state["target_policy"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        load_optimizer_state(self.critic_optimizer, state["critic_optimizer"])
        self._guard.load_state_dict(state["guards"][0])
        self._critic_guard.load_state_dict(state["guards"][1])
        self.generator.set_state(state["generator"].cpu())


@torch.no_grad()
def _follow(target: Any, source: Any, tau: float) -> None:
    """target ← (1 − tau)·target + tau·source, in place."""
    for theirs, own in zip(target.parameters(), source.parameters(), strict=True):
        theirs.lerp_(own.detach(), tau)


def _blank(policy: RegressionPolicy) -> Observation:
    """One row of zeros, to ask for sizes."""
    spec = policy.embodiment
    images = {c.name: torch.zeros(1, c.height, c.width, 3, dtype=torch.uint8) for c in spec.cameras}
    return Observation(images, torch.zeros(1, spec.proprio_dim), ("",))
