"""RECAP: values of all data by their distribution, and a policy that is told which actions were
better than usual.

π*0.6 (Amin et al. 2025, arXiv 2511.14759). A value function over bins learns the return of each
frame (section IV-A: −1 a step, 0 at success, a cost at a failed end, in shares of the longest
episode, cut off at −1). An action is an improvement where A = Σ of N rewards + V(t + N) − V(t) is
above its task's quantile (IV-B, appendix F); the policy imitates all data, told of most of it
whether it is one (IV-B, eq. 3), and acts as if told so (`policies.lerobot.improvement`).

Departures: V reads what the policy's start makes of pictures, words and state, through a small
network, not a VLM of its own; both go on from their present weights and with every episode, where
the paper starts anew from the pre-trained ones after some hundred. N counts decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import critics
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.config.replay_algorithms import RECAPConfig
from vla_rl.errors import ConfigError
from vla_rl.interfaces import AlgorithmContext, Draw, Policy, Replayed
from vla_rl.types import Observation, Trajectory, Transitions

ADAM_BETAS = (0.9, 0.999)
# kept with each frame
SPENT, TO_GO, TASK, SEEN = "recap/spent", "recap/to_go", "recap/task", "recap/seen"
_ROWS = 256  # frames that are read at once


def spent(steps: Tensor, success: bool, longest: int, failure_cost: float) -> Tensor:
    """Rewards up to each frame [t + 1] of an episode whose decisions took ``steps`` [t] control
    steps: −1 for each but the last one, which costs nothing or ``failure_cost``, all in shares of
    ``longest`` control steps."""
    rewards = -steps.float()
    rewards[-1] += 1.0 - (0.0 if success else failure_cost)
    return torch.cat([torch.zeros(1), rewards.cumsum(0)]) / longest


def to_go(spent: Tensor) -> Tensor:
    """Returns [t + 1] of the frames, not below −1."""
    return (spent[-1] - spent).clamp(min=-1.0)


def advantages(batch: Transitions, value: Tensor, next_value: Tensor) -> Tensor:
    """Σ r + V(next) − V [b]; nothing is to come after an episode's end."""
    over = batch.discounts == 0
    over = over if batch.truncated is None else over | batch.truncated
    rewards = batch.next_extra[SPENT] - batch.extra[SPENT]
    return rewards + torch.where(over, 0.0, next_value) - value


def thresholds(advantages: Tensor, tasks: Tensor, share: float) -> dict[int, float]:
    """Of each task, what ``share`` of its advantages lie above."""
    return {
        int(task): float(advantages[tasks == task].quantile(1.0 - share)) for task in tasks.unique()
    }


class RECAP(Replayed):
    """For a policy that is told of improvements
    (`vla_rl.interfaces.Policy.told_improvement`). Values read what ``reference``, its start, makes
    of a frame."""

    reads_rewards = False
    name = "recap"

    def __init__(self, config: RECAPConfig, policy: Policy, reference: Policy) -> None:
        """Raises ConfigError for a policy that cannot be told."""
        if not Policy.of(policy).told_improvement:
            raise ConfigError(
                "algorithm recap tells a policy which actions were improvements, and this "
                f"{type(policy).__name__} does not listen: set policy.improvement=1, with a policy "
                "of lerobot's that reads instructions (policy=pi0_toy)"
            )
        self.config, self.policy, self.reference = config, policy, reference
        policy.prepare_for_rl()  # which may freeze parts
        trained = [p for p in policy.parameters() if p.requires_grad]
        self.device = trained[0].device
        self.optimizer = make_adamw([(trained, config.learning_rate)], ADAM_BETAS, 0.0)
        self._guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self.head = critics.C51Head(-1.0, 0.0, config.bins)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            width = self._seen(Observation.blank(policy.embodiment)).shape[1]
            self.value = critics.Critics(width, 0, config.hidden, 1, config.bins).to(self.device)
        self.value_optimizer = make_adamw(
            [(self.value.parameters(), config.value_learning_rate)], ADAM_BETAS, 0.0
        )
        self._value_guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self.tasks: list[str] = []
        self.thresholds: dict[int, float] = {}
        self.updates = 0

    @classmethod
    def from_context(cls, config: RECAPConfig, policy: Policy, context: AlgorithmContext) -> RECAP:
        """With a frozen copy of the start, which values read through."""
        return cls(config, policy, context.make_reference())

    # ------------------------------------------------------------------------------- what is kept
    @torch.no_grad()
    def _seen(self, observations: Observation) -> Tensor:
        """What values read of each frame, half precision [n d]."""
        parts = []
        for rows in torch.arange(len(observations)).split(_ROWS):
            seen = self.reference.frame_features(observations[rows].to(self.device))
            parts.append(torch.cat([seen[name].float() for name in sorted(seen)], 1).half().cpu())
        return torch.cat(parts)

    def annotate(self, trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """Rewards so far, returns, the task's number and what values read; the env's own
        ``rewards`` are not asked for. Raises ConfigError for an episode above ``longest``."""
        c, task = self.config, trajectory.episode.task_id
        if task not in self.tasks:
            self.tasks.append(task)
        steps = trajectory.valid.sum(1)
        if int(steps.sum()) > c.longest:
            raise ConfigError(
                f"algorithm.longest={c.longest} control steps is less than an episode of {task} "
                f"took ({int(steps.sum())}): set it to the longest horizon of the tasks"
            )
        so_far = spent(steps, trajectory.success, c.longest, c.failure_cost)
        frames = Observation.cat([trajectory.observations, trajectory.final_observation])
        return {
            SPENT: so_far,
            TO_GO: to_go(so_far),
            TASK: torch.full((len(so_far),), self.tasks.index(task)),
            SEEN: self._seen(frames.without_privileged()),
        }

    # ------------------------------------------------------------------------------------ learning
    def values(self, seen: Tensor) -> Tensor:
        """V [b] of frames [b d]."""
        return self.head.value(self._outputs(seen)).cpu()

    def _outputs(self, seen: Tensor) -> Tensor:
        seen = seen.to(self.device).float()
        return self.value(seen, seen[:, :0])[0]

    @torch.no_grad()
    def judged(self, batch: Transitions) -> Tensor:
        """The advantage [b] of what was done."""
        return advantages(
            batch, self.values(batch.extra[SEEN]), self.values(batch.next_extra[SEEN])
        )

    def improved(self, batch: Transitions, advantage: Tensor) -> Tensor:
        """bool [b]: above the task's threshold, or what a person chose."""
        limits = torch.tensor([self.thresholds.get(int(t), 0.0) for t in batch.extra[TASK]])
        return (advantage > limits) | (batch.is_human & batch.valid).any(1)

    def update(self, draw: Draw) -> dict[str, float]:
        """One step of the values and, after ``value_warmup`` of them, one of the policy. Raises
        `TrainingDiverged`."""
        c = self.config
        figures = self._learn_values(draw(c.batch_size, gamma=1.0, images=False))
        self.updates += 1
        if self.updates > c.value_warmup:
            if not self.thresholds or self.updates % c.threshold_every == 0:
                self._set_thresholds(draw)
            figures |= self._imitate(draw(c.batch_size, gamma=1.0, n_step=c.lookahead))
        return {f"{self.name}/{name}": value for name, value in figures.items()}

    def _learn_values(self, batch: Transitions) -> dict[str, float]:
        outputs = self._outputs(batch.extra[SEEN])
        returns = batch.extra[TO_GO].to(self.device)
        nothing = torch.zeros(1, len(returns), self.head.outputs, device=self.device)
        target = self.head.target(returns, torch.zeros_like(returns), nothing)
        loss = self.head.loss(outputs[None], target)
        loss.backward()
        self._value_guard.step(self.value_optimizer, loss.detach())
        error = (self.head.value(outputs.detach()) - returns).abs().mean()
        return {"value_loss": float(loss.detach()), "value_error": float(error)}

    def _set_thresholds(self, draw: Draw) -> None:
        """From so many decisions of all data."""
        c = self.config
        batch = draw(c.threshold_decisions, gamma=1.0, n_step=c.lookahead, images=False)
        self.thresholds = thresholds(self.judged(batch), batch.extra[TASK], c.positive_share)

    def _imitate(self, batch: Transitions) -> dict[str, float]:
        improved = self.improved(batch, self.judged(batch))
        loss, _ = self.policy.imitation_loss(  # type: ignore[call-arg]
            batch.observations.without_privileged().to(self.device),
            batch.labels.to(self.device),
            batch.valid.to(self.device),
            improved=improved,
        )
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        return {"loss": float(loss.detach()), "improved": float(improved.float().mean())}

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights, and its start's."""
        return {
            "value": dict(self.value.state_dict()),
            "optimizers": {
                "policy": optimizer_state(self.optimizer),
                "value": optimizer_state(self.value_optimizer),
            },
            "guards": [self._guard.state_dict(), self._value_guard.state_dict()],
            "tasks": list(self.tasks),
            "thresholds": {str(task): limit for task, limit in self.thresholds.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.value.load_state_dict(state["value"])
        load_optimizer_state(self.optimizer, state["optimizers"]["policy"])
        load_optimizer_state(self.value_optimizer, state["optimizers"]["value"])
        for guard, saved in zip((self._guard, self._value_guard), state["guards"], strict=True):
            guard.load_state_dict(saved)
        self.tasks = list(state["tasks"])
        self.thresholds = {int(task): float(x) for task, x in state["thresholds"].items()}
        self.updates = int(state["updates"])
