"""A memory of successes that are imitated again, beside demonstrations, while on-policy RL goes on.

On-policy RL sees each episode once. What it solved is also a demonstration from an initial state
that nobody demonstrated, and imitation learns more of where to look from a few hundred of those
than a policy gradient does (self-imitation: Oh et al. 2018, arXiv 1806.05635, here of whole
successful episodes; expert iteration: Anthony et al. 2017, arXiv 1705.08439).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.imitation import Batch, DecisionSamples, Imitation
from vla_rl.algorithms.optim import GuardedStep
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.imitation import ImitationConfig
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.interfaces import Policy
from vla_rl.ranks import Ranks
from vla_rl.types import Observation, RolloutBatch


class SuccessMemory:
    """The newest successes of each task, and an `Imitation` of them and of
    ``demonstrations(policy)`` (None: there are none). How an update is made (precision,
    accumulation, clipping, where the optimiser lies) is the algorithm's."""

    def __init__(
        self,
        of: PPOConfig,
        policy: Policy,
        demonstrations: Callable[[Policy], DemonstrationDataset | None],
        ranks: Ranks | None = None,
    ) -> None:
        """Raises ConfigError for a policy without ``imitation_loss``, or with nothing to train."""
        self.config = config = of.memory
        self.demonstrations = demonstrations(policy) if config.demonstration_share else None
        self.generator = torch.Generator().manual_seed(of.seed)
        self.episodes: dict[str, deque[DecisionSamples]] = defaultdict(
            lambda: deque(maxlen=config.episodes)
        )
        settings = ImitationConfig(
            updates=max(1, config.updates),
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            min_learning_rate_fraction=config.min_learning_rate_fraction,
            warmup_updates=0,
            weight_decay=0.0,
            seed=of.seed,
            augment=config.augment,
            betas=of.betas,
            autocast=of.autocast,
            grad_clip=of.grad_clip,
            micro_batch_size=of.micro_batch_size,
            offload_optimizer=of.offload_optimizer,
            max_bad_updates=of.max_bad_updates,
        )
        self._imitation = Imitation(settings, policy, self, ranks)

    @property
    def guard(self) -> GuardedStep:
        """What counts the updates that were skipped."""
        return self._imitation.guard

    def update(self, batch: RolloutBatch, learn: bool = True) -> dict[str, float]:
        """Keep what succeeded in a batch, and imitate what is kept. Returns metrics
        ``memory/…``."""
        instead = float(self.add(batch))
        metrics = self.learn() if learn else self._figures([])
        return metrics | ({"memory/instead": instead} if self.config.hindsight else {})

    def add(self, batch: RolloutBatch) -> int:
        """Keep the whole successful episodes of a batch, and with ``hindsight`` what others did
        instead, where that is a task of the batch too and so not one that is kept out; the oldest
        of their tasks make room. (One that began in the middle shows an end that is known already,
        and its first decision is not an episode's.) Returns how many did something else."""
        practised, instead = {episode.task_id for episode in batch.episodes}, 0
        for at, episode in enumerate(batch.episodes):
            success = bool(batch.success[at])
            other = batch.instead[at] if self.config.hindsight and not success else None
            if other and other.task_id not in practised:
                other = None
            if episode.lead or not (success or other):
                continue
            decisions = other.decisions if other else int(batch.lengths[at])
            rows = torch.arange(decisions) + int(batch.starts[at])
            seen = batch.observations[rows].without_privileged().to("cpu")
            if other:
                seen = dataclasses.replace(seen, instruction=(other.instruction,) * decisions)
                instead += 1
            own = ~batch.is_human[rows].any(1).cpu()
            kept = DecisionSamples(seen, batch.actions[rows].cpu(), batch.valid[rows].cpu(), own)
            self.episodes[(other or episode).task_id].append(kept)
        return instead

    def learn(self) -> dict[str, float]:
        """``config.updates`` steps of imitation; none where there is nothing yet. Returns metrics
        ``memory/…``. Raises `TrainingDiverged`."""
        if not any(self.episodes.values()) and self.demonstrations is None:
            return self._figures([])
        self._imitation.updates = 0  # the learning rate falls anew
        losses = [self._imitation.update()["sft/loss"] for _ in range(self.config.updates)]
        return self._figures([loss for loss in losses if math.isfinite(loss)])

    def _figures(self, losses: list[float]) -> dict[str, float]:
        kept = sum(len(episodes) for episodes in self.episodes.values())
        metrics = {"memory/episodes": float(kept), "memory/updates": float(len(losses))}
        return metrics | ({"memory/loss": sum(losses) / len(losses)} if losses else {})

    def next_batch(self) -> Batch:
        """Decisions of successes and of demonstrations, as `Imitation` wants them."""
        c = self.config
        kept = [episode for task in sorted(self.episodes) for episode in self.episodes[task]]
        share = 0.0 if self.demonstrations is None else c.demonstration_share if kept else 1.0
        shown = round(share * c.batch_size)
        parts = []
        if shown and self.demonstrations is not None:
            drawn = self.demonstrations.sample(shown, self.generator, c.first_share)
            parts.append((*drawn, torch.zeros(shown, dtype=torch.bool)))
        if shown < c.batch_size:
            parts.append(self._solved(kept, c.batch_size - shown))
        observations, actions, valid, own = zip(*parts, strict=True)
        return Observation.cat(observations), torch.cat(actions), torch.cat(valid), torch.cat(own)

    def _solved(
        self, kept: list[DecisionSamples], count: int
    ) -> tuple[Observation, Tensor, Tensor, Tensor]:
        """``count`` decisions of successes, each as likely; about ``first_share`` of them an
        episode's first."""
        lengths = torch.tensor([len(episode) for episode in kept])
        starts = lengths.cumsum(0) - lengths
        rows = torch.randint(int(lengths.sum()), (count,), generator=self.generator)
        first = torch.rand(count, generator=self.generator) < self.config.first_share
        rows = torch.where(
            first, starts[torch.randint(len(kept), (count,), generator=self.generator)], rows
        )
        which = torch.searchsorted(starts, rows, right=True) - 1
        drawn = [
            (kept[i], [row])
            for i, row in zip(which.tolist(), (rows - starts[which]).tolist(), strict=True)
        ]
        return (
            Observation.cat([episode.observations[at] for episode, at in drawn]),
            torch.cat([episode.actions[at] for episode, at in drawn]),
            torch.cat([episode.valid[at] for episode, at in drawn]),
            torch.cat([episode.own[at] for episode, at in drawn]),
        )

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """The successes too. Needs no pickle."""
        episodes = {
            task: [
                {
                    "images": e.observations.images,
                    "proprio": e.observations.proprio,
                    "instruction": list(e.observations.instruction),
                    "actions": e.actions,
                    "valid": e.valid,
                    "own": e.own,
                }
                for e in kept
            ]
            for task, kept in self.episodes.items()
        }
        return {
            "episodes": episodes,
            "generator": self.generator.get_state(),
            "imitation": self._imitation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.episodes.clear()
        for task, kept in state["episodes"].items():
            for e in kept:
                seen = Observation(dict(e["images"]), e["proprio"], tuple(e["instruction"]))
                # (states of before say nothing of it)
                own = e.get("own", torch.ones(len(e["actions"]), dtype=torch.bool))
                self.episodes[task].append(DecisionSamples(seen, e["actions"], e["valid"], own))
        self.generator.set_state(state["generator"].cpu())
        self._imitation.load_state_dict(state["imitation"])
