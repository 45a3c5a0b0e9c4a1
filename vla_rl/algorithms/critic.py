"""A critic that reads the simulator's state: small, fast, and never seen by the policy.

An asymmetric critic (Pinto et al. 2018) learns a value from privileged state in a fraction of the samples that images
need; it exists during training alone, so that the policy stays one that could run on a robot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vla_rl.algorithms.optim import require_range
from vla_rl.errors import ConfigError
from vla_rl.types import Observation


@dataclass
class CriticConfig:
    """``hidden`` widths of the MLP; ``clip`` bounds normalised inputs to ±clip standard deviations."""

    hidden: list[int] = field(default_factory=lambda: [256, 256])
    clip: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"CriticConfig.hidden={list(self.hidden)!r} needs at least one width, each 1 or more")
        require_range("CriticConfig", "clip", self.clip, 0.1)


class PrivilegedCritic(nn.Module):
    """MLP from ``Observation.privileged`` [b s] to a value [b]; inputs are normalised by a running mean and variance.

    `observe` takes in a batch's statistics; `value` never changes them, so that values are the same whatever the order
    of minibatches. ``reads_images`` False tells PPO not to move images about for it.
    """

    reads_images = False

    def __init__(self, privileged_dim: int, config: CriticConfig | None = None):
        """Raises ConfigError where the env offers no privileged state (``privileged_dim`` 0)."""
        super().__init__()
        config = config or CriticConfig()
        if privileged_dim < 1:
            raise ConfigError(
                f"PrivilegedCritic needs privileged state, but the env's privileged_dim is {privileged_dim}; "
                f"use the policy's value head (no critic) or an env that exposes simulator state"
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
                "PrivilegedCritic got an observation without privileged state; use an env with privileged_dim > 0, "
                "or train the policy's own value head instead (no critic)"
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
        """Value float32 [b] with gradient. Raises ConfigError without privileged state, or with another size of it."""
        x = self._privileged(observation)
        std = (self.m2 / self.count.clamp(min=1.0)).sqrt()
        # a number that hardly varies (a fixed pose) must not be blown up by its rounding noise
        scale = torch.where((std > 1e-6) & (self.count > 1), std, torch.ones_like(std))
        x = ((x - self.mean) / scale).clamp(-self.clip, self.clip).float()
        return self.net(x).squeeze(-1)
