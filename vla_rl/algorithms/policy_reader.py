"""What the policy and the critic say of a whole batch before the first update: log-probs and
values, in slices."""

from __future__ import annotations

import contextlib

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

    def ask(self, policy: Policy, batch: RolloutBatch, at: Tensor | slice) -> PolicyEvaluation:
        """What ``policy`` says of the decisions ``at``, which are here (of which a slice copies no
        images)."""
        observations, replay = batch.observations, batch.replay
        if batch.held is not None:
            observations, replay = batch.held.observations, batch.held.replay
            at = batch.held.at[at]
        with self._autocast():
            return policy.evaluate(
                observations.without_privileged()[at].to(self.device),
                {name: x[at].to(self.device) for name, x in replay.items()},
            )

    def own(self, batch: RolloutBatch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's share of the decisions ``rows``: their places among ``rows``, the decisions,
        which are here, and bool, False where one only fills up."""
        if batch.held is None:
            at, real = self.ranks.share(len(rows))
            return at, rows[at], real
        at, real = self.ranks.share_of(batch.held.owner[rows])
        mine = rows[at]
        if not bool(real.any()):  # (it runs as many forwards as the others)
            mine = torch.full_like(at, int((batch.held.owner == self.ranks.index).nonzero()[0, 0]))
        return at.clamp(min=0), mine, real

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
        log_probs, values, n = [], [], batch.num_decisions
        _, share, real = self.own(batch, torch.arange(n))
        for rows in share.split(self._slice_size()):
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            whole = batch.held is None and run.stop - run.start == len(rows)
            out = self.ask(policy, batch, run if whole else rows)
            log_probs.append(out.log_prob.float())
            if out.value is not None:
                values.append(out.value)

        def of_all(parts: list[Tensor]) -> Tensor:
            x = torch.cat(parts).float()
            if batch.held is None:
                return self.ranks.gather(x, n)
            return self.ranks.scatter(x[real.to(x.device)], share[real], n)

        log_prob = of_all(log_probs) if recompute else acted
        return log_prob, of_all(values) if values else None

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
        held = batch.held if self.critic is None else None
        if held is not None and len(rows):
            at, real = self.ranks.share_of(held.owner_of[rows])
            there = held.final_at[rows[at]] if bool(real.any()) else torch.zeros_like(at)
            found = [
                self._head_value(held.final_observations[part].to(self.device)).float().cpu()
                for part in there.split(self._slice_size())
            ]
            return self.ranks.scatter(torch.cat(found)[real], rows[at[real]], len(out))
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
