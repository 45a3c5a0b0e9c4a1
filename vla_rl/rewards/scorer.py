"""Scoring, part of it while other episodes still simulate; and rewards that change in the middle
of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import RewardModel
from vla_rl.rewards.handle import state_of
from vla_rl.splits import stable_seed
from vla_rl.types import Trajectory

HOLD_OUT = 4  # one in so many episodes of a run judges a reward that is refitted on the others


# --------------------------------------------------------------------------- scoring in the rollout
class RewardScorer:
    """Scores trajectories, preparing each in a thread as its episode ends, while the others still
    simulate.

    A model without ``prepare`` is scored at the end. Use it as a context manager: it owns the
    thread.
    """

    def __init__(self, reward: RewardModel):
        self.reward = reward = RewardModel.of(reward)
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="reward")
            if "preparing" in reward.can
            else None
        )
        self._pending: list[Future[float]] = []

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(self, trajectory: Trajectory) -> None:
        """An episode has ended (a callback of `RolloutEngine.collect`)."""
        if self._pool is not None:
            self._pending.append(self._pool.submit(self._prepare, trajectory))

    def _prepare(self, trajectory: Trajectory) -> float:
        started = time.perf_counter()
        self.reward.prepare(self._seen(trajectory))
        return time.perf_counter() - started

    def _seen(self, trajectory: Trajectory) -> Trajectory:
        return trajectory.whole() if self.reward.reads_frames else trajectory

    def score(
        self, trajectories: Sequence[Trajectory], names: Sequence[str] = ()
    ) -> tuple[list[Tensor], Any, dict[str, float]]:
        """(rewards per trajectory, [t] or [t h] as `RewardModel.score` says; what
        `Algorithm.update` gets; metrics).

        With ``names`` (the algorithm's several rewards) the second is {name: [n …]}, else [n …],
        float32. Metrics: ``time/reward`` is what the loop waited for scores,
        ``time/reward_overlapped`` what was scored meanwhile.
        """
        started = time.perf_counter()
        overlapped = sum(future.result() for future in self._pending)
        self._pending.clear()
        trajectories = [self._seen(trajectory) for trajectory in trajectories]
        learn: Any
        if names and "parts" in self.reward.can:
            parts = self.reward.score_parts(trajectories)
            rewards = self.reward.total(parts)
            missing = [n for n in names if n not in parts]
            if missing:
                raise ConfigError(
                    f"algorithm.reward_names has {missing[0]!r}, which is no part of the reward "
                    f"({', '.join(parts)})"
                )
            learn = {n: torch.cat(parts[n]) for n in names} if trajectories else {}
        else:
            rewards = self.reward.score(trajectories)
            learn = torch.cat(rewards) if rewards else torch.zeros(0)
        metrics = {f"{k}": v for k, v in self.reward.metrics().items()}
        metrics |= {
            "time/reward": time.perf_counter() - started,
            "time/reward_overlapped": overlapped,
        }
        return rewards, learn, metrics


class SwitchingReward(RewardModel):
    """The task's own reward until `switch` puts another in its place for good; a resumed run goes
    on with the same one.

    ``make`` builds the other one, untrained; its trained state comes with this one's.
    """

    def __init__(self, reward: RewardModel, make: Callable[[], Any]):
        self.active: Any = RewardModel.of(reward)
        self.make = make
        self.switched = False

    @property
    def reads_frames(self) -> bool:
        return self.active.reads_frames

    def switch(self, reward: Any) -> None:
        self.active, self.switched = RewardModel.of(reward), True

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        return self.active.score(trajectories)

    def prepare(self, trajectory: Trajectory) -> None:
        self.active.prepare(trajectory)

    def metrics(self) -> dict[str, float]:
        return self.active.metrics() | {"reward/switched": float(self.switched)}

    def state_dict(self) -> dict[str, Any]:
        return {"switched": self.switched, "active": state_of(self.active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["switched"] and not self.switched:
            self.switch(self.make())
        if state["active"] is not None:
            self.active.load_state_dict(state["active"])


# -------------------------------------------------------------------------------------- co-evolving
class CoEvolvingReward(RewardModel):
    """Refits a learned reward on the run's own labelled rollouts every ``every`` scored batches
    (SPARK's idea), and keeps the old one where its quality on held-out trajectories falls.

    One in `HOLD_OUT` trajectories (chosen by rollout id) is never trained on. ``quality`` maps
    (reward, trajectories) to a number, higher is better, NaN where it cannot be told (then the old
    reward stays). Buffers hold the last ``buffer`` trajectories; they start empty again after a
    resume, the reward itself does not.
    """

    learned = True

    def __init__(
        self,
        reward: Any,
        quality: Callable[[Any, Sequence[Trajectory]], float],
        *,
        every: int,
        buffer: int = 256,
        tolerance: float = 0.02,
        seed_trajectories: Sequence[Trajectory] = (),
    ):
        self.reward, self.quality = RewardModel.of(reward), quality
        self.every, self.buffer, self.tolerance = every, buffer, tolerance
        self._seed = list(seed_trajectories)
        self._train: list[Trajectory] = []
        self._held: list[Trajectory] = []
        self._batches = 0
        self._metrics: dict[str, float] = {}

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        rewards = self.reward.score(trajectories)
        self._metrics = dict(self.reward.metrics())
        for t in trajectories:
            if t.episode.lead:  # labels count from the initial state
                continue
            held = stable_seed("held out", t.rollout_id) % HOLD_OUT == 0
            (self._held if held else self._train).append(t)
        self._train = self._train[-self.buffer :]
        self._held = self._held[-max(1, self.buffer // HOLD_OUT) :]
        self._batches += 1
        if self._batches % self.every == 0:
            self._metrics |= self.refit()
        return rewards

    def refit(self) -> dict[str, float]:
        """Train on the buffer; go back where quality on the held-out trajectories fell by more
        than ``tolerance``."""
        before, state = self.quality(self.reward, self._held), self.reward.state_dict()
        try:
            figures = self.reward.fit([*self._seed, *self._train])
        except UserError:  # no labels to be made yet (no success so far)
            self.reward.load_state_dict(state)
            return {"reward/refit_accepted": 0.0, "reward/quality_before": before}
        after = self.quality(self.reward, self._held)
        accepted = after >= before - self.tolerance  # False for NaN
        if not accepted:
            self.reward.load_state_dict(state)
        return {
            "reward/refit_accepted": float(accepted),
            "reward/quality_before": before,
            "reward/quality_after": after,
            "reward/refit_loss": figures.get("loss", float("nan")),
        }

    def prepare(self, trajectory: Trajectory) -> None:
        self.reward.prepare(trajectory)

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        return self.reward.progress(trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"reward": self.reward.state_dict(), "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reward.load_state_dict(state["reward"])
        self._batches = int(state["batches"])
