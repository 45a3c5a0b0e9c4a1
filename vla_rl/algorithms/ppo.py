"""PPO and its group-relative relatives on one class: GAE, GRPO, RLOO and REINFORCE++ differ in the
advantage alone.

Followed: PPO (Schulman et al. 2017) with the details that matter in practice (Huang et al. 2022):
advantages normalised, gradients clipped, value loss ½·error². A decision (one policy call = one
chunk) is the unit of time for advantages and of minibatches; the ratio is taken per token, per
control step or per chunk. Departures: old log-probs are recomputed by the learner before the first
epoch, since the sampler's may differ (another precision, another batch); the gap is logged. A
separate critic is trained in a loop of its own, with its own epochs, so that an early stop of the
policy does not stop it and a cheap critic never waits for images. Minibatches are split evenly (no
small last one). Steps taken by a human count in the advantage but not in the policy's loss.
Time-outs bootstrap, unless the time limit is part of the task (``bootstrap_truncated``; Pardo et
al. 2018, arXiv 1712.00378, tell the two cases apart).
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import advantages as adv
from vla_rl.algorithms import losses
from vla_rl.algorithms.critic import CriticTrainer
from vla_rl.algorithms.estimators import Estimate, Estimator, scored
from vla_rl.algorithms.optim import (
    GuardedStep,
    adapted_rate,
    even_split,
    load_optimizer_state,
    make_adamw,
    optimizer_state,
    rate_factor,
)
from vla_rl.algorithms.policy_reader import Reader
from vla_rl.algorithms.success_memory import SuccessMemory
from vla_rl.algorithms.surrogate import Rows, Surrogate, Totals, behavior_weights
from vla_rl.build import attribute
from vla_rl.config.algorithms import PPOConfig, advantage_entry
from vla_rl.errors import ConfigError
from vla_rl.interfaces import AlgorithmContext, Critic, OnPolicy, Policy
from vla_rl.ranks import Ranks
from vla_rl.types import RolloutBatch


@dataclass
class _Prepared:
    """What the epochs need of a batch of n decisions, computed once and kept on the policy's
    device."""

    batch: RolloutBatch  # where the rollout left it; minibatches of it are moved
    all: Rows
    tokens: Tensor  # int64 [n], log-prob entries that count in each decision
    taking_part: Tensor  # indices of the decisions that do, on the CPU
    by_trajectory: list[Tensor]  # the same, of each trajectory that has some
    num_trajectories: int


class PPO(OnPolicy):
    """Improves ``policy`` (a `Policy`) from rollouts. See `PPOConfig`.

    ``critic`` is a separate value function; without one, advantage "gae" uses the policy's value
    head (`PolicyEvaluation.value`). A policy with a head may name the head's own parameters by a
    method ``value_parameters()``: they then learn at ``critic_learning_rate`` and alone during the
    critic warm-up. A critic may have ``observe(observation)`` (called once per batch, to keep input
    statistics) and a class attribute ``reads_images = False`` (it is then spared the images).

    Several ``ranks`` (by default those of this process's group) make one update together: each is
    given the whole batch, runs the policy on its share of every minibatch, and trains a critic of
    its own on all of it. ``demonstrations(policy)`` are imitated beside successes where
    ``config.memory`` keeps some (None: there are none).
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        critic: Critic | None = None,
        reference_policy: Policy | None = None,
        ranks: Ranks | None = None,
        demonstrations: Callable[[Policy], Any] = lambda _: None,
    ):
        """Raises ConfigError where the policy lacks what the configuration needs."""
        self.policy = policy = _checked(policy, config)
        if config.kl_coef > 0 and reference_policy is None:
            raise ConfigError(
                f"algorithm.kl_coef={config.kl_coef} needs a reference policy; give "
                "one or set kl_coef=0"
            )
        entry = advantage_entry(config.advantage)
        self.config, self.critic, self.reference_policy = config, critic, reference_policy
        self.ranks = ranks or Ranks.present()
        self.estimator: Estimator = attribute(entry.target)(config)
        self._needs_value = entry.needs_value
        self._surrogate = Surrogate(config, policy.log_prob_axes)
        policy.prepare_for_rl()  # which may freeze parts
        trained = [p for p in policy.parameters() if p.requires_grad]
        head = {id(p) for p in policy.value_parameters()}
        if config.critic_warmup_iterations and critic is None and self._needs_value and not head:
            raise ConfigError(
                f"algorithm.critic_warmup_iterations={config.critic_warmup_iterations} needs a "
                "separate critic, or a policy whose value_parameters() name its value head; "
                f"{type(policy).__name__} has neither"
            )
        self._trunk = [p for p in trained if id(p) not in head]
        groups = [
            (self._trunk, config.learning_rate),
            ([p for p in trained if id(p) in head], config.critic_learning_rate),
        ]
        self.optimizer = make_adamw(
            groups, config.betas, config.weight_decay, offload=config.offload_optimizer
        )
        self.guard = GuardedStep(config.max_bad_updates, config.grad_clip, self.ranks)
        self._critic_trainer = (
            CriticTrainer(critic, config) if critic is not None and self._needs_value else None
        )
        self._reader = Reader(config, policy, self._critic_trainer, self._needs_value, self.ranks)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.memory = (
            SuccessMemory(config, policy, demonstrations, self.ranks)
            if config.memory.episodes
            else None
        )
        self.iteration = 0

    @classmethod
    def from_context(cls, config: PPOConfig, policy: Policy, context: AlgorithmContext) -> PPO:
        """With the critic and, where the config asks for them, the reference policy and the
        demonstrations of the run."""
        reference = context.make_reference() if config.kl_coef > 0 else None
        return cls(
            config, policy, context.make_critic(), reference, demonstrations=context.demonstrations
        )

    @property
    def takes_parts(self) -> bool:
        """Whether each rank needs images and replay of its own part of a batch alone
        (`RolloutBatch.held`): a memory of successes and a critic that sees read all of them."""
        trainer = self._critic_trainer
        return self.memory is None and (trainer is None or not trainer.critic.reads_images)

    # ----------------------------------------------------------------------------------- one update
    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Learn from one batch of rollouts and return metrics (``docs/reference/metrics.md``).

        ``rewards`` float32 [n] per decision, or {name: [n]} with `PPOConfig.reward_names`; by
        default the env's rewards summed over each chunk. Raises `TrainingDiverged`, and ConfigError
        where rewards or a value head are missing.
        """
        config = self.config
        metrics: dict[str, float] = {}
        self.ranks.require_same(
            "batches", batch.num_decisions, float(batch.behavior_log_prob.double().sum())
        )
        if config.decay_iterations or config.warmup_iterations:
            self.optimizer.param_groups[0]["lr"] = config.learning_rate * rate_factor(
                config, self.iteration
            )
        warmup = self._needs_value and self.iteration < config.critic_warmup_iterations
        uses_policy = not (warmup and self.critic is not None)
        old_log_prob, head_values = (
            self._reader.evaluate(self.policy, batch) if uses_policy else (None, None)
        )
        if self._critic_trainer is not None:
            self._critic_trainer.observe(batch.observations)
        values = self._reader.values(batch, head_values)
        estimate = self._estimate(batch, rewards, values, old_log_prob, metrics)
        advantages, returns = estimate.advantages, estimate.returns
        if values is not None and returns is not None:
            metrics["ppo/explained_variance"] = losses.explained_variance(values, returns)
            metrics["ppo/value_mean"] = float(values.mean())
            metrics["ppo/returns_mean"] = float(returns.mean())
            if self._critic_trainer is not None:
                started = time.perf_counter()
                loss = self._critic_trainer.train(
                    batch.observations, returns, values, self.generator
                )
                metrics |= {"ppo/value_loss": loss, "time/critic": time.perf_counter() - started}
        if old_log_prob is not None:
            own_head = self.critic is None and values is not None
            data = self._prepare(
                batch, advantages, old_log_prob, returns if own_head else None, values, metrics
            )
            metrics |= self._train_policy(data, value_only=warmup)
        metrics |= {} if self.memory is None else self.memory.update(batch, learn=not warmup)
        self.iteration += 1
        metrics["ppo/critic_warmup"] = float(warmup)
        metrics["ppo/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        others = (
            part.guard.skipped for part in (self._critic_trainer, self.memory) if part is not None
        )
        metrics["ppo/skipped_updates"] = float(self.guard.skipped + sum(others))
        metrics["ppo/updates_total"] = float(self.guard.updates)
        return metrics

    @torch.no_grad()
    def _estimate(
        self,
        batch: RolloutBatch,
        rewards: Tensor | Mapping[str, Tensor] | None,
        values: Tensor | None,
        old_log_prob: Tensor | None,
        metrics: dict[str, float],
    ) -> Estimate:
        """Advantages before normalisation, and returns; their figures go into ``metrics``."""
        given = scored(batch, self.config, rewards, metrics)
        if values is not None:
            logs, final = (
                self._surrogate.log_weights(old_log_prob, batch),
                self._reader.final_values(batch),
            )
            given = dataclasses.replace(given, values=values, final_values=final, log_weights=logs)
        found = self.estimator.estimate(given)
        metrics |= found.metrics
        # (the ranks' critics may differ in their last digits; what counts is one opinion)
        returns = None if found.returns is None else self.ranks.main(found.returns)
        return Estimate(self.ranks.main(found.advantages), returns)

    # ----------------------------------------------------------------------------------- the epochs
    @torch.no_grad()
    def _prepare(
        self,
        batch: RolloutBatch,
        advantages: Tensor,
        old_log_prob: Tensor,
        returns: Tensor | None,
        old_value: Tensor | None,
        metrics: dict[str, float],
    ) -> _Prepared:
        config, device = self.config, self._reader.device
        learn = batch.valid & ~batch.is_human
        takes_part = learn.any(1)
        mode = config.normalize_advantage
        if mode == "batch" or (mode == "auto" and self._needs_value):
            advantages = adv.whiten(advantages, takes_part)
        if config.skip_zero_advantage:
            takes_part = takes_part & (advantages != 0)
        old, mask = self._surrogate.at_level(old_log_prob, learn.to(device))
        behavior, _ = self._surrogate.at_level(batch.behavior_log_prob.to(device), learn.to(device))
        gap = old - behavior
        metrics["ppo/behavior_gap_mean"] = float(losses.masked_mean(gap.abs(), mask))
        metrics["ppo/behavior_gap_max"] = float(torch.where(mask, gap.abs(), 0.0).amax())
        metrics["ppo/behavior_kl"] = float(
            losses.masked_mean(losses.kl_estimate(behavior, old, "k3"), mask)
        )
        metrics["ppo/advantage_mean"] = float(advantages.mean())
        metrics["ppo/advantage_std"] = float(advantages.std(unbiased=False))
        reference = None
        if self.reference_policy is not None and config.kl_coef > 0:
            reference = self._reader.evaluate(self.reference_policy, batch)[0]
        correction = behavior_weights(config, old, behavior, mask)
        if correction is not None:
            metrics["ppo/behavior_weight_min"] = float(torch.where(mask, correction, 1.0).amin())
            metrics["ppo/behavior_weight_zero"] = float(
                losses.masked_mean((correction == 0).float(), mask)
            )
        index = batch.trajectory_index.to(device)
        mask = mask & takes_part.to(device)[:, None]
        by_trajectory = [
            r[takes_part[r]]
            for r in torch.arange(batch.num_decisions).split(batch.lengths.tolist())
        ]
        return _Prepared(
            batch=batch,
            all=Rows(
                learn=learn.to(device),
                old_log_prob=old_log_prob,
                advantages=advantages.to(device),
                weights=losses.entry_weights(
                    mask, index, batch.num_trajectories, config.loss_aggregation
                ),
                imitate=batch.success[batch.trajectory_index].to(device),
                counts=takes_part.to(device),
                correction=correction,
                reference_log_prob=reference,
                returns=None if returns is None else returns.to(device),
                old_value=None if old_value is None else old_value.to(device),
            ),
            tokens=losses.reduce_log_prob(
                old_log_prob, self.policy.log_prob_axes, learn.to(device), "token"
            )[1].sum(1),
            taking_part=torch.nonzero(takes_part).flatten(),
            by_trajectory=[r for r in by_trajectory if len(r)],
            num_trajectories=int(batch.trajectory_index[takes_part].unique().numel()),
        )

    def _minibatches(self, data: _Prepared) -> Iterator[Tensor]:
        config = self.config
        if config.minibatch_unit == "decision":
            for part in even_split(len(data.taking_part), config.minibatch_size, self.generator):
                yield data.taking_part[part]
        else:
            for part in even_split(len(data.by_trajectory), config.minibatch_size, self.generator):
                yield torch.cat([data.by_trajectory[i] for i in part.tolist()])

    def _train_policy(self, data: _Prepared, value_only: bool) -> dict[str, float]:
        """The epochs over the policy; ``value_only`` (warm-up of a value head) moves the head's
        parameters alone."""
        config = self.config
        collected: dict[str, list[Tensor]] = defaultdict(list)
        epochs_run, planned, stopped = 0, 0, False
        for _ in range(config.epochs if len(data.taking_part) else 0):
            parts = list(self._minibatches(data))
            planned = config.epochs * len(parts)
            for rows in parts:
                stats, loss = self._backward(data, rows, value_only)
                for name, x in stats.items():
                    collected[name].append(x)
                if (
                    config.target_kl is not None
                    and not value_only
                    and float(stats["approx_kl"]) > config.target_kl
                ):
                    stopped = True
                    break
                if value_only:
                    for p in self._trunk:
                        p.grad = None
                norm = self.guard.step(self.optimizer, loss)
                if norm is not None:
                    collected["grad_norm"].append(torch.tensor(norm))
            if stopped:
                break
            epochs_run += 1
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {f"ppo/{k}": _reduce(k, v) for k, v in collected.items()}
        if planned:  # (each KL is read before the update of its own minibatch)
            kls = collected["approx_kl"]
            metrics["ppo/last_kl"] = kl = float(kls[-1])
            if config.adaptive_learning_rate and not value_only:
                group, share = self.optimizer.param_groups[0], (len(kls) - 1) / planned
                group["lr"] = adapted_rate(config, group["lr"], kl, share)
        return metrics | {"ppo/epochs": float(epochs_run), "ppo/early_stop": float(stopped)}

    def _backward(
        self, data: _Prepared, rows: Tensor, value_only: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of this rank's share of one minibatch, accumulated over micro-batches.

        Returns statistics and the loss (detached), both of the whole minibatch.
        """
        config, device = self.config, self._reader.device
        at, count = rows.to(device), len(rows)
        whole = len(data.taking_part), data.num_trajectories
        norm = losses.weight_norm(data.all.weights[at], config.loss_aggregation, *whole)
        advantages = data.all.advantages[at]
        if config.normalize_advantage == "minibatch":
            advantages = adv.whiten(advantages)
        tokens = data.tokens[at]
        totals = Totals(
            count, tokens.sum().clamp(min=1), (tokens * data.all.imitate[at]).sum().clamp(min=1)
        )
        share, rows, real = self._reader.own(data.batch, rows)
        advantages, real = advantages[share.to(device)], real.to(device)
        size = config.micro_batch_size or len(rows)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        kept: dict[str, list[Tensor]] = defaultdict(list)
        for part, part_advantages, counts in zip(
            rows.split(size), advantages.split(size), real.split(size), strict=True
        ):
            out = self._reader.ask(self.policy, data.batch, part)
            own = data.all.share(part.to(device), part_advantages, counts, norm)
            found = self._surrogate.losses(out, own, totals, value_only=value_only)
            found.loss.backward()
            for name, x in found.terms.items():
                sums[name] = sums[name] + x.detach()
            for name, x in (
                ("log_ratio", found.log_ratio),
                ("active", found.active),
                ("mask", found.mask),
            ):
                kept[name].append(x.detach())
        stats = losses.ratio_statistics(
            *(self.ranks.gather(torch.cat(kept[k])) for k in ("log_ratio", "active", "mask"))
        )
        summed = dict(
            zip(sums, self.ranks.sum(torch.stack(list(sums.values()))).unbind(), strict=True)
        )
        return stats | summed, summed["loss"]

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights: critic, optimisers, counters, shuffling,
        statistics. Needs no pickle."""
        return {
            "iteration": self.iteration,
            "optimizer": optimizer_state(self.optimizer),
            "guard": self.guard.state_dict(),
            "critic": None if self._critic_trainer is None else self._critic_trainer.state_dict(),
            "generator": self.generator.get_state(),
            "estimator": self.estimator.state_dict(),
            "memory": None if self.memory is None else self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ConfigError where the parameters or the critic differ
        from those saved."""
        if (state["critic"] is None) != (self._critic_trainer is None):
            raise ConfigError(
                "the saved state and this run disagree on whether there is a separate critic"
            )
        self.iteration = int(state["iteration"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        if self._critic_trainer is not None:
            self._critic_trainer.load_state_dict(state["critic"])
        self.generator.set_state(state["generator"].cpu())
        self.estimator.load_state_dict(state.get("estimator", state.get("running_scale", {})))
        if self.memory is not None and state.get("memory") is not None:
            self.memory.load_state_dict(state["memory"])


def _checked(policy: Policy, config: PPOConfig) -> Policy:
    """Raise `ConfigError` where the policy lacks what the ratio needs."""
    likely = Policy.of(policy)
    missing = [] if "likelihood" in likely.can else ["evaluate"]
    missing += [] if likely.log_prob_axes else ["log_prob_axes"]
    if missing:
        raise ConfigError(
            "PPO needs a policy with a tractable log-prob; "
            f"{type(policy).__name__} lacks {', '.join(missing)}"
        )
    needed = losses.KEPT_AXIS.get(config.ratio_level)
    if needed is not None and needed not in likely.log_prob_axes:
        raise ConfigError(
            f"algorithm.ratio_level={config.ratio_level!r} needs a {needed!r} axis; "
            f"{type(policy).__name__} declares {tuple(likely.log_prob_axes)}; use 'token' or "
            "'chunk'"
        )
    config.check_policy(likely)
    return likely


def _reduce(name: str, parts: list[Tensor]) -> float:
    stacked = torch.stack([p.float() for p in parts])
    return float(
        stacked.amax()
        if name == "ratio_max"
        else stacked.amin()
        if name == "ratio_min"
        else stacked.mean()
    )
