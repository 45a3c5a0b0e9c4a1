"""Policy-agnostic RL: a critic improves the policy's own proposals, and the policy imitates them by
its supervised loss.

Mark et al. 2024 (arXiv 2412.06685), algorithm 1: sampled actions are ranked by the critics' mean,
the best ones climb its gradient, the best of all acts and is what the targets bootstrap from. To
learn, the worst proposal gives its place to the action that was executed. Any policy with samples
and an imitation loss can be trained: tokens, flow, diffusion, regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.actor_critic import ActorCritic
from vla_rl.config.replay_algorithms import PARLConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Policy
from vla_rl.types import Transitions


class PARL(ActorCritic):
    """For an `ActorPolicy` that ranks candidates, whose judge it becomes."""

    config: PARLConfig
    policy: ActorPolicy
    name = "parl"

    def __init__(self, config: PARLConfig, policy: Policy) -> None:
        """Raises ConfigError for a policy that does not choose among proposals."""
        if "ranked_candidates" not in ActorPolicy.can_of(policy):
            raise ConfigError(
                f"algorithm parl chooses among what a policy proposes, and {type(policy).__name__} "
                "offers no proposals: set actor=improved"
            )
        super().__init__(config, policy)
        self.policy.judge = self.judge

    def judge(self, encoded: Tensor, actions: Tensor) -> Tensor:
        """Mean values [b n] of ``actions`` [b n d]."""
        b, n, _ = actions.shape
        outputs = self.critics(encoded.repeat_interleave(n, 0), actions.flatten(0, 1))
        return self.head.value(outputs).mean(0).view(b, n)

    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        return self.policy.propose(encoded, frames, None)[0], 0.0

    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """One step of the policy towards what the critics make of its proposals and of what was
        executed."""
        rows = torch.randperm(len(encoded), generator=self.generator)[: self.config.imitation_batch]
        few = {name: frame[rows] for name, frame in frames.items()}
        proposals = few[self.policy.candidates].to(encoded)
        with torch.no_grad():
            worst = self.judge(encoded[rows], proposals).argmin(1)
        proposals = proposals.clone()
        proposals[torch.arange(len(proposals)), worst] = self._taken(batch, frames)[rows]
        chosen = self._choose(*self.policy.improve(encoded[rows], proposals))
        chunk = self.policy.to_chunk(chosen)
        seen, trained = batch.observations[rows], self.policy.beneath()
        loss, figures = trained.imitation_loss(seen, chunk.actions, chunk.valid, features=few)
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        moved = float((chosen - proposals.mean(1)).abs().mean())
        own = {"imitation_loss": float(loss.detach()), "moved": moved, **figures}
        return {f"{self.name}/{name}": value for name, value in own.items()}

    def _choose(self, actions: Tensor, values: Tensor) -> Tensor:
        """One of the improved proposals [b n d] in each row [b d], by their values [b n]."""
        pick = values.argmax(1)
        if self.config.temperature:
            shares = (values / self.config.temperature).softmax(1).cpu()
            pick = torch.multinomial(shares, 1, generator=self.generator)[:, 0].to(pick)
        return actions[torch.arange(len(actions), device=actions.device), pick]

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Besides, the encoder: the policy's own checkpoint is that of the policy beneath."""
        return super().state_dict() | {"encoder": dict(self.policy.encoder.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.policy.encoder.load_state_dict(state["encoder"])
