"""HG-DAgger: imitation of what people chose, whenever they chose to (Kelly et al. 2019, arXiv
1810.02890).

Demonstrations and a person's corrections are one growing data set; the policy's own steps are
played and never imitated. With ``offline_updates`` alone, and no episodes, it is behaviour cloning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms import gripper_choices
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.algorithms.picture_inputs import PictureInputs
from vla_rl.config.replay_algorithms import DaggerConfig
from vla_rl.data.replay import DEMONSTRATIONS, INTERVENTIONS
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Draw, Replayed
from vla_rl.types import Trajectory

ADAM_BETAS = (0.9, 0.999)


class Dagger(Replayed):
    """For an `ActorPolicy` with a weighted loss: that on decisions of people, each counting
    alike."""

    reads_rewards = False
    name = "dagger"

    def __init__(self, config: DaggerConfig, policy: Any) -> None:
        """Raises ConfigError for a policy that cannot imitate what was executed."""
        if "weighted_imitation" not in ActorPolicy.can_of(policy):
            raise ConfigError(
                f"algorithm dagger imitates what people did, which {type(policy).__name__} cannot: "
                "set actor=direct, actor=residual or actor=own (the policy itself), or use "
                "policy=small"
            )
        if gripper_choices.network(policy) is not None:
            raise ConfigError(
                "algorithm dagger has no values to choose a gripper by: set "
                "actor.gripper=continuous"
            )
        self.config: DaggerConfig = config
        self.policy: Any = policy
        self.device = next(policy.actor.parameters()).device
        self.generator = torch.Generator().manual_seed(config.seed)
        self._eyes = PictureInputs(policy)
        learned: dict[int, nn.Parameter] = {}
        for module in (policy.encoder, policy.actor):
            learned |= {id(p): p for p in module.parameters() if p.requires_grad}
        self.optimizer = make_adamw(
            [(list(learned.values()), config.learning_rate)], ADAM_BETAS, config.weight_decay
        )
        self._guard = GuardedStep(config.max_bad_updates, config.grad_clip)

    def annotate(self, trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        return self.policy.annotate(trajectory)

    def update(self, draw: Draw) -> dict[str, float]:
        """One step of imitation; none where nobody has shown anything yet. Raises
        `TrainingDiverged`."""
        batch = draw(
            self.config.batch_size,
            shares={(DEMONSTRATIONS, INTERVENTIONS): 1.0},
            images=self._eyes.open,
        )
        theirs = batch.valid & batch.is_human
        rows = theirs.any(1).to(torch.float32)
        if not bool(rows.any()):
            return {}
        seen = self._eyes.seen(batch.extra, batch.observations, self.generator)
        frames = {name: frame.to(self.device) for name, frame in seen.items()}
        batch = dataclasses.replace(batch, valid=theirs)
        encoded = self.policy.encode(frames)
        loss, figures = self.policy.weighted_loss(
            batch, encoded, frames, rows.to(self.device), self.generator
        )
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        return {
            f"{self.name}/{name}": value
            for name, value in ({"loss": float(loss.detach())} | figures).items()
        }

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights."""
        return {
            "optimizer": optimizer_state(self.optimizer),
            "guard": self._guard.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        load_optimizer_state(self.optimizer, state["optimizer"])
        self._guard.load_state_dict(state["guard"])
        self.generator.set_state(state["generator"].cpu())
