"""What the policy and the critic say of a whole batch before the first update: log-probs and
values, in slices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.algorithms.critic import CriticTrainer
from vla_rl.config.algorithms import PPOConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.ranks import Ranks
from vla_rl.types import Observation, PolicyEvaluation, RolloutBatch


class Reader:
    """``critic`` None: values come from the policy's own head, where the advantage needs any."""

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        critic: CriticTrainer | None,
        needs_value: bool,
        ranks: Ranks,
    ) -> None:
        self.config, self.policy, self.critic = config, policy, critic
        self.needs_value, self.ranks = needs_value, ranks

    @property
    def device(self) -> torch.device:
        return next(iter(self.policy.parameters())).device

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.config.autocast and self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def ask(
        self,
        policy: Policy,
        observations: Observation,
        replay: Mapping[str, Tensor],
        at: Tensor | slice,
    ) -> PolicyEvaluation:
        """What ``policy`` says of the decisions ``at`` (of which a slice copies no images)."""
        with self._autocast():
            return policy.evaluate(
                observations[at].to(self.device),
                {name: x[at].to(self.device) for name, x in replay.items()},
            )

    def _slice_size(self) -> int:
        unit = self.config.minibatch_size if self.config.minibatch_unit == "decision" else 256
        return self.config.micro_batch_size or unit

    @torch.no_grad()
    def evaluate(self, policy: Policy, batch: RolloutBatch) -> tuple[Tensor, Tensor | None]:
        """Log-probs [n *k] and head values [n] (or None) of all decisions under the present
        weights."""
        recompute = policy is not self.policy or self.config.recompute_old_log_prob
        acted = batch.behavior_log_prob.to(self.device).float()
        if not recompute and (not self.needs_value or self.critic is not None):
            return acted, None
        observations, log_probs, values = batch.observations.without_privileged(), [], []
        n, share = batch.num_decisions, self.ranks.share(batch.num_decisions)[0]
        for rows in share.split(self._slice_size()):
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            out = self.ask(
                policy,
                observations,
                batch.replay,
                run if run.stop - run.start == len(rows) else rows,
            )
            log_probs.append(out.log_prob.float())
            if out.value is not None:
                values.append(out.value)
        log_prob = self.ranks.gather(torch.cat(log_probs), n) if recompute else acted
        return log_prob, self.ranks.gather(torch.cat(values).float(), n) if values else None

    @torch.no_grad()
    def values(self, batch: RolloutBatch, head_values: Tensor | None) -> Tensor | None:
        """Values [n] (on the CPU) of all decisions, or None where the advantage needs none."""
        if not self.needs_value:
            return None
        if self.critic is not None:
            return self.critic.values(batch.observations)
        if head_values is None:
            raise ConfigError(
                f"algorithm.advantage={self.config.advantage!r} needs values: "
                f"{type(self.policy).__name__} has no head for them and no critic was given; add "
                "one, or use advantage grpo, rloo or reinforce++"
            )
        return head_values.cpu()

    @torch.no_grad()
    def final_values(self, batch: RolloutBatch) -> Tensor:
        """Value [m] of what was seen after each truncated trajectory; 0 for terminated ones."""
        out = torch.zeros(batch.num_trajectories)
        if not self.config.bootstrap_truncated:
            return out
        rows = torch.nonzero(batch.truncated).flatten()
        for part in rows.split(self._slice_size()) if len(rows) else ():
            seen = batch.final_observations[part]
            if self.critic is not None:
                out[part] = self.critic.values(seen)
            else:
                out[part] = (
                    self._head_value(seen.without_privileged().to(self.device)).float().cpu()
                )
        return out

    def _head_value(self, seen: Observation) -> Tensor:
        with self._autocast():
            value = self.policy.value(seen)
        if value is None:
            raise ConfigError(
                f"{type(self.policy).__name__}.evaluate returns a value, and it has no "
                "value(observation) that does: PPO needs one to bootstrap truncated episodes. Add "
                "it (see docs/how_to/adding_your_own.md), or set "
                "algorithm.bootstrap_truncated=false"
            )
        return value
