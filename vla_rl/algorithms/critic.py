"""A critic that reads the simulator's state: small, fast, and never seen by the policy.

An asymmetric critic (Pinto et al. 2018) learns a value from privileged state in a fraction of the
samples that images need; it exists during training alone, so that the policy stays one that could
run on a robot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms import losses
from vla_rl.algorithms.optim import (
    GuardedStep,
    even_split,
    load_optimizer_state,
    make_adamw,
    optimizer_state,
)
from vla_rl.config.algorithms import CriticConfig, PPOConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Critic
from vla_rl.types import Observation


class PrivilegedCritic(nn.Module, Critic):
    """MLP from ``Observation.privileged`` [b s] to a value [b]; inputs are normalised by a running
    mean and variance.

    `observe` takes in a batch's statistics; `value` never changes them, so that values are the same
    whatever the order of minibatches. ``reads_images`` False tells PPO not to move images about for
    it.
    """

    reads_images = False
    mean: Tensor
    m2: Tensor
    count: Tensor

    def __init__(self, privileged_dim: int, config: CriticConfig | None = None):
        """Raises ConfigError where the env offers no privileged state (``privileged_dim`` 0)."""
        super().__init__()
        config = config or CriticConfig()
        if privileged_dim < 1:
            raise ConfigError(
                "PrivilegedCritic needs privileged state, but the env's privileged_dim is "
                f"{privileged_dim}; use the policy's value head (no critic) or an env that exposes "
                "simulator state"
            )
        self.clip = config.clip
        with torch.random.fork_rng(
            devices=[]
        ):  # the weights depend on the seed, the caller's random state stays as it was
            torch.manual_seed(config.seed)
            layers: list[nn.Module] = []
            width = privileged_dim
            for hidden in config.hidden:
                layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU()]
                width = hidden
            head = nn.Linear(width, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.net = nn.Sequential(*layers, head)
        self.register_buffer("mean", torch.zeros(privileged_dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(privileged_dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _privileged(self, observation: Observation) -> Tensor:
        if observation.privileged is None:
            raise ConfigError(
                "PrivilegedCritic got an observation without privileged state; use an env with "
                "privileged_dim > 0, or train the policy's own value head instead (no critic)"
            )
        if observation.privileged.shape[1] != self.mean.shape[0]:
            raise ConfigError(
                f"PrivilegedCritic was made for {self.mean.shape[0]} privileged numbers and got "
                f"{observation.privileged.shape[1]}; use the env it was trained with"
            )
        return observation.privileged.to(self.mean.device)

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Take a batch into the running mean and variance (Chan et al. 1979)."""
        x = self._privileged(observation).double()
        n, mean = x.shape[0], x.mean(0)
        delta, total = mean - self.mean, self.count + n
        self.m2 += (x - mean).square().sum(0) + delta.square() * self.count * n / total
        self.mean += delta * n / total
        self.count.copy_(total)

    def value(self, observation: Observation) -> Tensor:
        """Value float32 [b] with gradient. Raises ConfigError without privileged state, or with
        another size of it."""
        x = self._privileged(observation)
        std = (self.m2 / self.count.clamp(min=1.0)).sqrt()
        # a number that hardly varies (a fixed pose) must not be blown up by its rounding noise
        scale = torch.where((std > 1e-6) & (self.count > 1), std, torch.ones_like(std))
        x = ((x - self.mean) / scale).clamp(-self.clip, self.clip).float()
        return self.net(x).squeeze(-1)


class CriticTrainer:
    """Fits any separate `Critic` to returns, in epochs of its own.

    The critic may have ``observe(observation)``, called once per batch to keep input statistics,
    and a class attribute ``reads_images = False``: then images are not copied for it.
    """

    def __init__(self, critic: Critic, config: PPOConfig) -> None:
        self.critic, self.minibatch_size = Critic.of(critic), config.critic_minibatch_size
        self.epochs = config.epochs if config.critic_epochs is None else config.critic_epochs
        self.value_clip, self.huber_delta = config.value_clip, config.value_huber_delta
        self.optimizer = make_adamw(
            [(critic.parameters(), config.critic_learning_rate)], config.betas, weight_decay=0.0
        )
        self.guard = GuardedStep(config.max_bad_updates, config.grad_clip)

    def _view(self, observation: Observation) -> Observation:
        blind = not self.critic.reads_images
        return replace(observation, images={}) if blind else observation

    def _device(self) -> torch.device:
        return next(iter(self.critic.parameters())).device

    def observe(self, observation: Observation) -> None:
        """Let the critic update its input statistics, if it keeps any."""
        self.critic.observe(self._view(observation))

    @torch.no_grad()
    def values(self, observation: Observation, slice_size: int = 256) -> Tensor:
        """Values float32 [b] on the CPU, without gradient."""
        seen, device = self._view(observation), self._device()
        starts = range(0, len(seen), slice_size)
        return torch.cat(
            [
                self.critic.value(seen[slice(i, i + slice_size)].to(device)).float().cpu()
                for i in starts
            ]
        )

    def train(
        self,
        observation: Observation,
        returns: Tensor,
        old_values: Tensor,
        generator: torch.Generator,
    ) -> float:
        """Run the epochs on observations [n] with ``returns`` [n]; the mean loss. Raises
        `TrainingDiverged`."""
        device, seen = self._device(), self._view(observation)
        if not seen.images:  # small enough to sit on the device as a whole
            seen = seen.to(device)
        returns, old_values = returns.to(device), old_values.to(device)
        total, count = torch.zeros((), device=device), 0
        for _ in range(self.epochs):
            for rows in even_split(len(seen), self.minibatch_size, generator):
                at = rows.to(device)
                value = self.critic.value(seen[rows].to(device)).float()
                loss = losses.value_loss(
                    value, returns[at], old_values[at], self.value_clip, self.huber_delta
                ).mean()
                loss.backward()
                self.guard.step(self.optimizer, loss.detach())
                total, count = total + loss.detach(), count + 1
        return float(total) / max(1, count)

    def state_dict(self) -> dict[str, Any]:
        weights = dict(self.critic.state_dict()) if isinstance(self.critic, nn.Module) else None
        return {
            "weights": weights,
            "optimizer": optimizer_state(self.optimizer),
            "guard": self.guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("weights") is not None and isinstance(self.critic, nn.Module):
            self.critic.load_state_dict(state["weights"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.guard.load_state_dict(state["guard"])
