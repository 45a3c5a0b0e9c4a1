"""PPO and its group-relative relatives on one class: GAE, GRPO, RLOO and REINFORCE++ differ in the advantage alone.

Followed: PPO (Schulman et al. 2017) with the details that matter in practice (Huang et al. 2022): advantages
normalised, gradients clipped, value loss ½·error². A decision (one policy call = one chunk) is the unit of time for
advantages and of minibatches; the ratio is taken per token, per control step or per chunk. Departures: old log-probs
are recomputed by the learner before the first epoch, since the sampler's may differ (another precision, another batch);
the gap is logged. A separate critic is trained in a loop of its own, with its own epochs, so that an early stop of the
policy does not stop it and a cheap critic never waits for images. Minibatches are split evenly (no small last one).
Steps taken by a human count in the advantage but not in the policy's loss. Time-outs bootstrap, unless the time limit is
part of the task (``bootstrap_truncated``; Pardo et al. 2018, arXiv 1712.00378, tell the two cases apart).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vla_rl.algorithms import advantages as adv
from vla_rl.algorithms import losses
from vla_rl.algorithms.critic import CriticTrainer
from vla_rl.algorithms.optim import (
    GuardedStep,
    even_split,
    load_optimizer_state,
    make_adamw,
    optimizer_state,
)
from vla_rl.algorithms.settings import PPOConfig
from vla_rl.cluster.ranks import Ranks
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Critic, LikelihoodPolicy, Policy
from vla_rl.types import Observation, RolloutBatch


@dataclass
class _Prepared:
    """What the epochs need, computed once and kept on the policy's device."""

    observations: Observation  # [n], where the rollout left it; minibatches of it are moved
    replay: dict[str, Tensor]
    learn: Tensor  # bool [n h], control steps the policy chose and that were executed
    old_log_prob: Tensor  # [n *k]
    reference_log_prob: Tensor | None  # [n *k]
    advantages: Tensor  # [n]
    returns: Tensor | None  # [n]
    old_value: Tensor | None  # [n], of the policy's own value head
    weights: Tensor  # [n e]
    tokens: Tensor  # int64 [n], log-prob entries that count in each decision
    imitate: Tensor  # bool [n], decisions of successful episodes
    rows: Tensor  # decisions that take part, on the CPU
    rows_by_trajectory: list[Tensor]
    num_decisions: int
    num_trajectories: int


class PPO:
    """Improves ``policy`` (a `LikelihoodPolicy`) from rollouts. See `PPOConfig`.

    ``critic`` is a separate value function; without one, advantage "gae" uses the policy's value head
    (`PolicyEvaluation.value`). A policy with a head may name the head's own parameters by a method
    ``value_parameters()``: they then learn at ``critic_learning_rate`` and alone during the critic warm-up.
    A critic may have ``observe(observation)`` (called once per batch, to keep input statistics) and a class attribute
    ``reads_images = False`` (it is then spared the images).

    Several ``ranks`` (by default those of this process's group) make one update together: each is given the whole batch,
    runs the policy on its share of every minibatch, and trains a critic of its own on all of it.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        critic: Critic | None = None,
        reference_policy: LikelihoodPolicy | None = None,
        ranks: Ranks | None = None,
    ):
        """Raises ConfigError where the policy lacks what the configuration needs."""
        missing = [name for name in ("evaluate", "parameters", "log_prob_axes") if not hasattr(policy, name)]
        if missing:
            raise ConfigError(
                f"PPO needs a policy with a tractable log-prob (LikelihoodPolicy); {type(policy).__name__} lacks "
                f"{', '.join(missing)}"
            )
        self.policy = policy = cast(LikelihoodPolicy, policy)
        if config.kl_coef > 0 and reference_policy is None:
            raise ConfigError(f"PPOConfig.kl_coef={config.kl_coef} needs a reference policy; give one or set kl_coef=0")
        needed = losses.KEPT_AXIS.get(config.ratio_level)
        if needed is not None and needed not in policy.log_prob_axes:
            raise ConfigError(
                f"PPOConfig.ratio_level={config.ratio_level!r} needs a {needed!r} axis; {type(policy).__name__} declares "
                f"{tuple(policy.log_prob_axes)}; use 'token' or 'chunk'"
            )
        config.check_policy(policy)
        self.config, self.critic, self.reference_policy = config, critic, reference_policy
        self.ranks = ranks or Ranks.present()
        if hasattr(policy, "prepare_for_rl"):  # which may freeze parts
            policy.prepare_for_rl()
        parameters = [p for p in policy.parameters() if p.requires_grad]
        head = {id(p) for p in policy.value_parameters()} if hasattr(policy, "value_parameters") else set()
        if config.critic_warmup_iterations and critic is None and config.advantage == "gae" and not head:
            raise ConfigError(
                f"PPOConfig.critic_warmup_iterations={config.critic_warmup_iterations} needs a separate critic, or a "
                f"policy whose value_parameters() name its value head; {type(policy).__name__} has neither"
            )
        self._trunk = [p for p in parameters if id(p) not in head]
        self.optimizer = make_adamw(
            [
                (self._trunk, config.learning_rate),
                ([p for p in parameters if id(p) in head], config.critic_learning_rate),
            ],
            config.betas,
            config.weight_decay,
            offload=config.offload_optimizer,
        )
        self.guard = GuardedStep(config.max_bad_updates, config.grad_clip, self.ranks)
        self._critic_trainer = None
        if critic is not None and config.advantage == "gae":
            self._critic_trainer = CriticTrainer(
                critic,
                learning_rate=config.critic_learning_rate,
                betas=config.betas,
                epochs=config.epochs if config.critic_epochs is None else config.critic_epochs,
                minibatch_size=config.critic_minibatch_size,
                value_clip=config.value_clip,
                huber_delta=config.value_huber_delta,
                grad_clip=config.grad_clip,
                max_bad_updates=config.max_bad_updates,
            )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.running_scale = adv.RunningScale()
        self.iteration = 0

    # ------------------------------------------------------------------------------------------------------ one update
    def update(self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Learn from one batch of rollouts and return metrics (``docs/algorithms/metrics.md``).

        ``rewards`` float32 [n] per decision, or {name: [n]} with `PPOConfig.reward_names`; by default the env's rewards
        summed over each chunk. Raises `TrainingDiverged`, and ConfigError where rewards or a value head are missing.
        """
        config = self.config
        metrics: dict[str, float] = {}
        self.ranks.require_same("batches", batch.num_decisions, float(batch.behavior_log_prob.double().sum()))
        if config.decay_iterations or config.warmup_iterations:
            self.optimizer.param_groups[0]["lr"] = config.learning_rate * self._schedule()
        warmup = config.advantage == "gae" and self.iteration < config.critic_warmup_iterations
        uses_policy = not (warmup and self.critic is not None)
        old_log_prob, head_values = self._evaluate_all(self.policy, batch) if uses_policy else (None, None)
        if self._critic_trainer is not None:
            self._critic_trainer.observe(batch.observations)
        values = self._values(batch, head_values)
        advantages, returns = self._advantages(batch, rewards, values, metrics)
        # (the ranks' critics may differ in their last digits; what counts is one opinion)
        advantages, returns = self.ranks.main(advantages), None if returns is None else self.ranks.main(returns)
        if values is not None and returns is not None:
            metrics["ppo/explained_variance"] = losses.explained_variance(values, returns)
            metrics["ppo/value_mean"] = float(values.mean())
            metrics["ppo/returns_mean"] = float(returns.mean())
            if self._critic_trainer is not None:
                started = time.perf_counter()
                loss = self._critic_trainer.train(batch.observations, returns, values, self.generator)
                metrics |= {"ppo/value_loss": loss, "time/critic": time.perf_counter() - started}
        if old_log_prob is not None:
            own_head = self.critic is None and values is not None
            data = self._prepare(batch, advantages, old_log_prob, returns if own_head else None, values, metrics)
            metrics |= self._train_policy(data, value_only=warmup)
        self.iteration += 1
        metrics["ppo/critic_warmup"] = float(warmup)
        metrics["ppo/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        critic_skipped = 0 if self._critic_trainer is None else self._critic_trainer.guard.skipped
        metrics["ppo/skipped_updates"] = float(self.guard.skipped + critic_skipped)
        metrics["ppo/updates_total"] = float(self.guard.updates)
        metrics["ppo/zero_gradients"] = float(self.guard.zero_gradients)
        return metrics

    def _schedule(self) -> float:
        """The share of ``learning_rate`` that this iteration uses: linear up after the critic's warm-up, linear down."""
        config, factor = self.config, 1.0
        if config.decay_iterations:
            factor = max(config.min_learning_rate_fraction, 1.0 - self.iteration / config.decay_iterations)
        if config.warmup_iterations:
            learned = self.iteration - config.critic_warmup_iterations
            factor *= min(1.0, max(0, learned + 1) / config.warmup_iterations)
        return factor

    # --------------------------------------------------------------------------------------- evaluation before epochs
    def _device(self) -> torch.device:
        return next(iter(self.policy.parameters())).device

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.config.autocast and self._device().type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _slice_size(self) -> int:
        unit = self.config.minibatch_size if self.config.minibatch_unit == "decision" else 256
        return self.config.micro_batch_size or unit

    @torch.no_grad()
    def _evaluate_all(self, policy: LikelihoodPolicy, batch: RolloutBatch) -> tuple[Tensor, Tensor | None]:
        """Log-probs [n *k] and head values [n] (or None) of all decisions under the present weights."""
        config = self.config
        if policy is self.policy and not config.recompute_old_log_prob and (config.advantage != "gae" or self.critic):
            return batch.behavior_log_prob.to(self._device()).float(), None
        device, observations = self._device(), batch.observations.without_privileged()
        log_probs, values = [], []
        n, share = batch.num_decisions, self.ranks.share(batch.num_decisions)[0]
        for rows in share.split(self._slice_size()):
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            view = run if run.stop - run.start == len(rows) else rows  # (a slice copies no images)
            with self._autocast():
                out = policy.evaluate(
                    observations[view].to(device), {k: v[view].to(device) for k, v in batch.replay.items()}
                )
            log_probs.append(out.log_prob.float())
            if out.value is not None:
                values.append(out.value)
        recompute = policy is not self.policy or config.recompute_old_log_prob
        log_prob = self.ranks.gather(torch.cat(log_probs), n) if recompute else batch.behavior_log_prob.to(device).float()
        return log_prob, self.ranks.gather(torch.cat(values).float(), n) if values else None

    @torch.no_grad()
    def _values(self, batch: RolloutBatch, head_values: Tensor | None) -> Tensor | None:
        """Values [n] (on the CPU) of all decisions, or None where the advantage needs none."""
        if self.config.advantage != "gae":
            return None
        if self._critic_trainer is not None:
            return self._critic_trainer.values(batch.observations)
        if head_values is None:
            raise ConfigError(
                f"PPOConfig.advantage='gae' needs values: {type(self.policy).__name__} has no value head and no critic "
                f"was given; add one, or use advantage grpo, rloo or reinforce++"
            )
        return head_values.cpu()

    @torch.no_grad()
    def _final_values(self, batch: RolloutBatch) -> Tensor:
        """Value [m] of what was seen after each truncated trajectory; 0 for terminated ones."""
        out = torch.zeros(batch.num_trajectories)
        if not self.config.bootstrap_truncated:
            return out
        rows = torch.nonzero(batch.truncated).flatten()
        for part in rows.split(self._slice_size()) if len(rows) else ():
            seen = batch.final_observations[part]
            if self._critic_trainer is not None:
                out[part] = self._critic_trainer.values(seen)
            else:
                with self._autocast():
                    value = self.policy.act(seen.without_privileged().to(self._device()), deterministic=True).value
                if value is None:
                    raise ConfigError(
                        f"{type(self.policy).__name__}.evaluate returns a value and its act() does not; PPO needs "
                        f"act()'s value to bootstrap truncated episodes"
                    )
                out[part] = value.float().cpu()
        return out

    def _decision_rewards(self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Named rewards per decision [n]; a single one is called "reward"."""
        config, n = self.config, batch.num_decisions
        if rewards is None:
            inside = config.gamma if config.gamma_per_control_step and config.advantage in ("gae", "reinforce++") else 1.0
            rewards = adv.chunk_rewards(batch.rewards, inside)
        several = isinstance(rewards, Mapping)
        given = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
        named = {k: v.float().cpu() for k, v in given.items()}
        if several and set(named) != set(config.reward_names):
            raise ConfigError(
                f"rewards {sorted(named)} were given, PPOConfig.reward_names lists {sorted(config.reward_names)}; name "
                f"each reward there, with its weight in reward_weights"
            )
        for name, x in named.items():
            if x.shape != (n,):
                raise ValueError(f"reward {name!r} has shape {tuple(x.shape)}, expected ({n},): one per decision")
            if not torch.isfinite(x).all():
                raise ValueError(f"reward {name!r} has values that are not finite")
        return named

    @torch.no_grad()
    def _advantages(
        self,
        batch: RolloutBatch,
        rewards: Tensor | Mapping[str, Tensor] | None,
        values: Tensor | None,
        metrics: dict[str, float],
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages [n] before normalisation, and returns [n] (GAE only)."""
        config, m, index = self.config, batch.num_trajectories, batch.trajectory_index
        named = self._decision_rewards(batch, rewards)
        several = isinstance(rewards, Mapping)
        weights = dict(zip(config.reward_names, config.reward_weights, strict=True)) if several else {"reward": 1.0}
        total = torch.stack([weights[k] * x for k, x in named.items()]).sum(0)
        scores = {k: adv.trajectory_sums(x, index, m) for k, x in named.items()}
        score = adv.trajectory_sums(total, index, m)
        metrics["ppo/score_mean"] = float(score.mean())
        metrics |= {f"ppo/score_mean/{k}": float(x.mean()) for k, x in scores.items() if len(scores) > 1}
        discounts = adv.decision_discounts(batch.valid, config.gamma, config.gamma_per_control_step)
        if values is not None:
            return adv.gae(
                total, values, self._final_values(batch), batch.terminated, discounts, config.gae_lambda, batch.lengths
            )
        if config.advantage == "reinforce++":
            learns = (batch.valid & ~batch.is_human).any(1)
            return adv.reinforce_plus_plus_advantages(total, discounts, batch.lengths, learns), None
        groups = batch.group_index
        grouped = functools.partial(
            adv.grpo_advantages,
            group_index=groups,
            center=config.group_center,
            scale=config.group_scale,
            virtual_best=config.virtual_best,
            best_score=config.best_score,
            success=batch.success,
            running=self.running_scale,
        )
        if config.advantage == "rloo":
            per_trajectory = adv.rloo_advantages(score, groups)
        elif config.decouple_rewards and len(scores) > 1:
            per_trajectory = adv.gdpo_advantages(scores, weights, grouped)
        else:
            per_trajectory = grouped(score)
        metrics["ppo/zero_advantage_fraction"] = float((per_trajectory == 0).float().mean())
        return per_trajectory[index], None

    # ------------------------------------------------------------------------------------------------------ the epochs
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
        config, device, axes = self.config, self._device(), self.policy.log_prob_axes
        learn = batch.valid & ~batch.is_human
        takes_part = learn.any(1)
        mode = config.normalize_advantage
        if mode == "batch" or (mode == "auto" and config.advantage == "gae"):
            advantages = adv.whiten(advantages, takes_part)
        if config.skip_zero_advantage:
            takes_part = takes_part & (advantages != 0)
        at_level = functools.partial(
            losses.reduce_log_prob,
            axes=axes,
            valid=learn.to(device),
            level=config.ratio_level,
            reduction=config.ratio_reduction,
        )
        old, mask = at_level(old_log_prob)
        behavior, _ = at_level(batch.behavior_log_prob.to(device))
        gap = old - behavior
        metrics["ppo/behavior_gap_mean"] = float(losses.masked_mean(gap.abs(), mask))
        metrics["ppo/behavior_gap_max"] = float(torch.where(mask, gap.abs(), 0.0).amax())
        metrics["ppo/behavior_kl"] = float(losses.masked_mean(losses.kl_estimate(behavior, old, "k3"), mask))
        metrics["ppo/advantage_mean"] = float(advantages.mean())
        metrics["ppo/advantage_std"] = float(advantages.std(unbiased=False))
        reference = None
        if self.reference_policy is not None and config.kl_coef > 0:
            reference = self._evaluate_all(self.reference_policy, batch)[0]
        index = batch.trajectory_index.to(device)
        mask = mask & takes_part.to(device)[:, None]
        rows = torch.nonzero(takes_part).flatten()
        return _Prepared(
            observations=batch.observations.without_privileged(),
            replay=batch.replay,
            learn=learn.to(device),
            old_log_prob=old_log_prob,
            reference_log_prob=reference,
            advantages=advantages.to(device),
            returns=None if returns is None else returns.to(device),
            old_value=None if old_value is None else old_value.to(device),
            weights=losses.entry_weights(mask, index, batch.num_trajectories, config.loss_aggregation),
            tokens=losses.reduce_log_prob(old_log_prob, axes, learn.to(device), "token")[1].sum(1),
            imitate=batch.success[batch.trajectory_index].to(device),
            rows=rows,
            rows_by_trajectory=[r for r in self._by_trajectory(batch, takes_part) if len(r)],
            num_decisions=len(rows),
            num_trajectories=int(batch.trajectory_index[rows].unique().numel()),
        )

    @staticmethod
    def _by_trajectory(batch: RolloutBatch, takes_part: Tensor) -> list[Tensor]:
        rows = torch.arange(batch.num_decisions).split(batch.lengths.tolist())
        return [r[takes_part[r]] for r in rows]

    def _minibatches(self, data: _Prepared) -> Iterator[Tensor]:
        config = self.config
        if config.minibatch_unit == "decision":
            for part in even_split(len(data.rows), config.minibatch_size, self.generator):
                yield data.rows[part]
        else:
            for part in even_split(len(data.rows_by_trajectory), config.minibatch_size, self.generator):
                yield torch.cat([data.rows_by_trajectory[i] for i in part.tolist()])

    def _train_policy(self, data: _Prepared, value_only: bool) -> dict[str, float]:
        """The epochs over the policy; ``value_only`` (warm-up of a value head) moves the head's parameters alone."""
        config = self.config
        collected: dict[str, list[Tensor]] = defaultdict(list)
        epochs_run, stopped = 0, False
        for _ in range(config.epochs if len(data.rows) else 0):
            for rows in self._minibatches(data):
                stats, loss = self._backward(data, rows, value_only)
                for name, x in stats.items():
                    collected[name].append(x)
                if config.target_kl is not None and not value_only and float(stats["approx_kl"]) > config.target_kl:
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
        if config.adaptive_learning_rate and "ppo/approx_kl" in metrics and not value_only:
            self._adapt_learning_rate(metrics["ppo/approx_kl"])
        return metrics | {"ppo/epochs": float(epochs_run), "ppo/early_stop": float(stopped)}

    def _adapt_learning_rate(self, kl: float) -> None:
        """Multiply or divide the policy's learning rate by 1.5 when the KL is far from its target (as in PPO's §4)."""
        target, start = cast(float, self.config.target_kl), self.config.learning_rate
        group = self.optimizer.param_groups[0]
        if kl > 2.0 * target:
            group["lr"] = max(group["lr"] / 1.5, start / 10.0)
        elif kl < 0.5 * target:
            group["lr"] = min(group["lr"] * 1.5, start * 10.0)

    def _backward(self, data: _Prepared, rows: Tensor, value_only: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of this rank's share of one minibatch, accumulated over micro-batches.

        Returns statistics and the loss (detached), both of the whole minibatch.
        """
        config, device = self.config, self._device()
        at, count = rows.to(device), len(rows)
        norm = losses.weight_norm(data.weights[at], config.loss_aggregation, data.num_decisions, data.num_trajectories)
        advantages = data.advantages[at]
        if config.normalize_advantage == "minibatch":
            advantages = adv.whiten(advantages)
        share, real = self.ranks.share(count)
        rows, advantages, real = rows[share], advantages[share.to(device)], real.to(device)
        size = config.micro_batch_size or len(rows)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        kept: dict[str, list[Tensor]] = defaultdict(list)
        # what sums over tokens are divided by is known before any forward pass, so accumulation is exact
        token_count = data.tokens[at].sum().clamp(min=1)
        imitated_count = (data.tokens[at] * data.imitate[at]).sum().clamp(min=1)
        for part, part_advantages, counts in zip(rows.split(size), advantages.split(size), real.split(size), strict=True):
            where = part.to(device)
            part_learn = data.learn[where] & counts[:, None]
            with self._autocast():
                out = self.policy.evaluate(
                    data.observations[part].to(device), {k: v[part].to(device) for k, v in data.replay.items()}
                )
            axes = self.policy.log_prob_axes
            at_level = functools.partial(losses.reduce_log_prob, axes=axes, valid=part_learn, level=config.ratio_level)
            log_prob, mask = at_level(out.log_prob, reduction=config.ratio_reduction)
            old, _ = at_level(data.old_log_prob[where], reduction=config.ratio_reduction)
            weights = data.weights[where] / norm * counts[:, None]
            log_ratio = losses.log_ratio(log_prob, old)
            entry_advantages, clip_low, clip_high = part_advantages[:, None], config.clip_low, config.clip_high
            if out.advantage_weight is not None:
                entry_advantages = entry_advantages * at_level(out.advantage_weight, reduction="mean")[0]
            if out.clip_scale is not None:
                scale = at_level(out.clip_scale, reduction="mean")[0]
                clip_low, clip_high = clip_low * scale, clip_high * scale
            surrogate, active = losses.policy_loss(log_ratio, entry_advantages, clip_low, clip_high, config.dual_clip)
            entropy, token_mask = losses.reduce_log_prob(out.entropy, axes, part_learn, "token")
            terms = {
                "policy_loss": (surrogate * weights).sum(),
                "entropy": (entropy * token_mask).sum() / token_count,
            }
            loss = terms["policy_loss"] - config.entropy_coef * terms["entropy"]
            if data.reference_log_prob is not None:
                reference, _ = at_level(data.reference_log_prob[where], reduction=config.ratio_reduction)
                terms["reference_kl"] = (losses.kl_estimate(log_prob, reference, config.kl_kind) * weights).sum()
                loss = loss + config.kl_coef * terms["reference_kl"]
            if config.success_imitation_coef > 0:
                tokens, _ = losses.reduce_log_prob(out.log_prob, axes, part_learn & data.imitate[where, None], "token")
                terms["success_imitation_loss"] = -tokens.sum() / imitated_count
                loss = loss + config.success_imitation_coef * terms["success_imitation_loss"]
            if out.auxiliary_loss is not None:
                terms["auxiliary_loss"] = (out.auxiliary_loss * counts).sum() / count
                loss = loss + terms["auxiliary_loss"]
            if value_only:
                loss = torch.zeros((), device=device)
            if data.returns is not None and data.old_value is not None and out.value is not None:
                value_losses = losses.value_loss(
                    out.value.float(),
                    data.returns[where],
                    data.old_value[where],
                    config.value_clip,
                    config.value_huber_delta,
                )
                terms["value_loss"] = (value_losses * counts).sum() / count
                loss = loss + config.value_coef * terms["value_loss"]
            loss.backward()
            terms["loss"] = loss
            for name, x in terms.items():
                sums[name] = sums[name] + x.detach()
            for name, x in (("log_ratio", log_ratio), ("active", active), ("mask", mask)):
                kept[name].append(x.detach())
        stats = losses.ratio_statistics(*(self.ranks.gather(torch.cat(kept[k])) for k in ("log_ratio", "active", "mask")))
        whole = dict(zip(sums, self.ranks.sum(torch.stack(list(sums.values()))).unbind(), strict=True))
        return stats | whole, whole["loss"]

    # ---------------------------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimisers, counters, shuffling and running statistics. Needs no pickle."""
        return {
            "iteration": self.iteration,
            "optimizer": optimizer_state(self.optimizer),
            "guard": self.guard.state_dict(),
            "critic": None if self._critic_trainer is None else self._critic_trainer.state_dict(),
            "generator": self.generator.get_state(),
            "running_scale": self.running_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ConfigError where the parameters or the critic differ from those saved."""
        if (state["critic"] is None) != (self._critic_trainer is None):
            raise ConfigError("the saved state and this run disagree on whether there is a separate critic")
        self.iteration = int(state["iteration"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        if self._critic_trainer is not None:
            self._critic_trainer.load_state_dict(state["critic"])
        self.generator.set_state(state["generator"].cpu())
        self.running_scale.load_state_dict(state["running_scale"])


def _reduce(name: str, parts: list[Tensor]) -> float:
    stacked = torch.stack([p.float() for p in parts])
    return float(stacked.amax() if name == "ratio_max" else stacked.amin() if name == "ratio_min" else stacked.mean())
