"""Reward models at work: built from the config, combined, scored while the simulation goes on, saved, and refitted.

A reward model needs `score` alone (`vla_rl.interfaces.RewardModel`); everything else here is used where a model has it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl import build
from vla_rl.algorithms.advantages import RunningScale, decision_discounts, discounted_returns
from vla_rl.checkpoint import CheckpointError, load_state, restoring, save_state
from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import RewardModel
from vla_rl.metrics import write_json
from vla_rl.settings import CombinedConfig, refuse_potential_in_groups
from vla_rl.splits import stable_seed
from vla_rl.types import EmbodimentSpec, Trajectory

REWARD_FILE, STATE_FOLDER = "reward.json", "state"


# ------------------------------------------------------------------------------------------------------------- building
@dataclass(frozen=True)
class RewardContext:
    """What surrounds a reward model: the algorithm's config, the robot, the policy RL starts from, and how far apart
    (control steps) the frames of demonstrations are."""

    algorithm: Any = None
    embodiment: EmbodimentSpec | None = None
    policy: Any = None
    stride: int = 4


def build_reward(kind: str, config: Any, context: RewardContext | None = None) -> RewardModel:
    """The reward model ``kind`` of the config, its trained state loaded where ``config.checkpoint`` names one.

    Raises `ConfigError` where the reward cannot work with this algorithm or policy, `CheckpointError` for a bad folder.
    """
    context = context or RewardContext()
    config = linked_to_algorithm(config, context.algorithm)
    target = build.implementation("reward", kind)
    if kind == "combined":
        model = target(config, lambda part, part_config: build_reward(part, part_config, context))
    elif reads_policy(config):
        model = target(config, image_features(context.policy))
    else:
        model = target(config)
    if context.embodiment is not None and hasattr(model, "set_embodiment"):
        model.set_embodiment(context.embodiment, context.stride)
    if is_learned(model) and getattr(config, "checkpoint", ""):
        load_reward(config.checkpoint, kind, model)
    if getattr(config, "reference", "") and hasattr(model, "set_references"):
        from vla_rl.reward_data import trajectories_of_dataset

        model.set_references(trajectories_of_dataset(config.reference, context.embodiment, stride=context.stride))
    return model


def reads_policy(config: Any) -> bool:
    """Whether a reward's config (or one of its parts) asks for the policy's own image features."""
    parts = getattr(config, "parts", None) or {}
    return getattr(getattr(config, "encoder", None), "type", "") == "policy" or any(
        (part.get("encoder") or {}).get("type") == "policy" for part in parts.values()
    )


def image_features(policy: Any) -> Callable[[Tensor], Tensor]:
    """The policy's own image features. Raises `ConfigError` where there is no policy, or it has none."""
    if policy is None or not hasattr(policy, "image_features"):
        who = "no policy is at hand" if policy is None else f"{type(policy).__name__} has none"
        raise ConfigError(
            f"reward.encoder.type=policy needs a policy with image_features(frames), and {who}: use the reward inside a run "
            f"with such a policy, or choose reward.encoder.type=pooled, timm or vjepa2"
        )
    return policy.image_features


def linked_to_algorithm(config: Any, algorithm: Any) -> Any:
    """The reward's config with discount and end of episodes taken from the algorithm, where it leaves them open.

    Raises `ConfigError` for a potential under group-relative advantages.
    """
    shaping = getattr(config, "shaping", None)
    if shaping is None or algorithm is None or not hasattr(shaping, "truncated_end"):
        return config
    advantage = getattr(algorithm, "advantage", "gae")
    refuse_potential_in_groups(shaping, algorithm)
    changes: dict[str, Any] = {}
    if shaping.gamma < 0:
        changes["gamma"] = getattr(algorithm, "gamma", 1.0)
        changes["gamma_per_control_step"] = getattr(algorithm, "gamma_per_control_step", False)
    if shaping.truncated_end == "auto":
        # Group-relative advantages and reinforce++ sum rewards to the end and never bootstrap there.
        bootstraps = advantage == "gae" and getattr(algorithm, "bootstrap_truncated", True)
        changes["truncated_end"] = "keep" if bootstraps else "zero"
    return dataclasses.replace(config, shaping=dataclasses.replace(shaping, **changes))


def is_learned(reward: Any) -> bool:
    return bool(getattr(reward, "learned", False))


def fit_updates(config: Any) -> int:
    """How many updates `fit` makes (of several parts: the longest), for a progress bar."""
    parts = [config.part(name, part)[1] for name, part in getattr(config, "parts", {}).items()]
    return max([1, *[getattr(c, "updates", 1) for c in (config, *parts)]])


def is_fitted(reward: Any) -> bool:
    """Whether a learned reward can score already."""
    parts = getattr(reward, "parts", None)
    if parts is not None:
        return all(is_fitted(p.reward) for p in parts.values() if is_learned(p.reward))
    return bool(reward.state_dict().get("fitted", True))


# --------------------------------------------------------------------------------------------------------------- saving
def save_reward(folder: Path | str, kind: str, config: Any, reward: Any, figures: Mapping[str, Any] | None = None) -> None:
    """Write a trained reward: ``reward.json`` (type, config, figures of the fit) and ``state/`` (no pickles)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_state(folder / STATE_FOLDER, reward.state_dict())
    write_json(folder / REWARD_FILE, {"type": kind, "config": dataclasses.asdict(config), "figures": dict(figures or {})})


def load_reward(folder: Path | str, kind: str, reward: Any) -> None:
    """Load what `save_reward` wrote into ``reward``. Raises `CheckpointError` that names the folder."""
    folder = Path(folder)
    try:
        stored = json.loads((folder / REWARD_FILE).read_text(encoding="utf-8"))["type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"reward.checkpoint={folder} is no trained reward ({error}). Give a folder that 'vla-rl reward fit' wrote"
        ) from error
    if stored != kind:
        raise CheckpointError(
            f"reward.checkpoint={folder} holds a reward of type {stored!r}, the config asks for {kind!r}: use "
            f"reward={stored}"
        )
    state = load_state(folder / STATE_FOLDER)
    with restoring(folder, f"a trained reward of type {kind!r}"):
        reward.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------------- combined
@dataclass
class Part:
    reward: RewardModel
    weight: float
    scale: RunningScale = field(default_factory=RunningScale)
    largest: float = 0.0

    def amounts(self, rewards: Sequence[Tensor], trajectories: Sequence[Trajectory]) -> Tensor:
        """What says how much this part pays: its sum over each trajectory [m]; of a potential, which sums to −Φ of the
        start whatever happens, the discounted reward to go of each decision [n], which is −Φ(s) beside the success."""
        shaping = getattr(getattr(self.reward, "config", None), "shaping", None)
        if getattr(shaping, "mode", "") != "potential":
            return torch.stack([r.sum() for r in rewards])
        gamma = shaping.gamma if shaping.gamma >= 0 else 1.0
        valid = torch.cat([t.valid for t in trajectories])
        discounts = decision_discounts(valid, gamma, shaping.gamma_per_control_step)
        return discounted_returns(torch.cat(list(rewards)), discounts, torch.tensor([len(r) for r in rewards]))

    def divisor(self, amounts: Tensor, normalise: str) -> float:
        """What this part is divided by, statistics of its `amounts` taken in first; 1 while there is no spread."""
        if normalise == "running_std":
            value = self.scale.update(amounts - amounts.mean())
        elif normalise == "range":
            self.largest = value = max(self.largest, float(amounts.abs().max()))
        else:
            return 1.0
        return value if value > 1e-6 else 1.0


class CombinedReward:
    """Weighted sum of reward models, each normalised for itself."""

    def __init__(self, config: CombinedConfig, build_part: Callable[[str, Any], RewardModel] = build_reward):
        self.config = config
        self.parts: dict[str, Part] = {}
        for name, options in config.parts.items():
            kind, part_config, weight = config.part(name, options)
            self.parts[name] = Part(build_part(kind, part_config), weight)
        self._metrics: dict[str, float] = {}

    @property
    def learned(self) -> bool:
        return any(is_learned(p.reward) for p in self.parts.values())

    def score_parts(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """Normalised, not yet weighted rewards per decision of each part."""
        self._metrics = {}
        out = {}
        for name, part in self.parts.items():
            rewards = part.reward.score(trajectories)
            if rewards:
                sums = torch.stack([r.sum() for r in rewards])
                divisor = part.divisor(part.amounts(rewards, trajectories), self.config.normalise)
                rewards = [r / divisor for r in rewards]
                self._metrics |= {f"reward/{name}_mean": float(sums.mean()), f"reward/{name}_divisor": divisor}
            out[name] = rewards
            for key, value in metrics_of(part.reward).items():
                self._metrics.setdefault(key, value)
        return out

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t] per trajectory."""
        return self.total(self.score_parts(trajectories))

    def total(self, parts: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        weighted = [[self.parts[name].weight * r for r in rewards] for name, rewards in parts.items()]
        return [torch.stack(list(rows)).sum(0) for rows in zip(*weighted)]

    def prepare(self, trajectory: Trajectory) -> None:
        for part in self.parts.values():
            if hasattr(part.reward, "prepare"):
                part.reward.prepare(trajectory)

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    @property
    def wants_demonstrations(self) -> bool:
        return any(getattr(p.reward, "wants_demonstrations", False) for p in self.parts.values())

    def set_demonstrations(self, trajectories: Sequence[Trajectory]) -> None:
        """Hand demonstrations to the parts that want some before RL."""
        for part in self.parts.values():
            if getattr(part.reward, "wants_demonstrations", False):
                part.reward.set_demonstrations(trajectories)

    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Weighted mean of what the parts that estimate progress say. Raises `UserError` where none does."""
        able = [p for p in self.parts.values() if hasattr(p.reward, "progress") and p.weight > 0]
        if not able:
            raise UserError(
                f"none of the parts {', '.join(self.parts)} with a positive weight estimates progress: judge a learned "
                "reward"
            )
        total = sum(p.weight for p in able)
        curves = [[p.weight / total * c for c in p.reward.progress(trajectories)] for p in able]
        return [torch.stack(list(rows)).sum(0) for rows in zip(*curves)]

    def fit(
        self, trajectories: Sequence[Trajectory], progress: Callable[[int, float], None] | None = None
    ) -> dict[str, float]:
        """Train the parts that are not trained yet, or all learned ones where all are."""
        able = {n: p.reward for n, p in self.parts.items() if is_learned(p.reward)}
        chosen = {n: r for n, r in able.items() if not is_fitted(r)} or able
        figures = {}
        for name, reward in chosen.items():
            figures |= {f"{name}_{k}": v for k, v in reward.fit(trajectories, progress).items()}
        return figures

    def state_dict(self) -> dict[str, Any]:
        states = {n: p.reward.state_dict() for n, p in self.parts.items() if hasattr(p.reward, "state_dict")}
        scales = {n: {"scale": p.scale.state_dict(), "largest": p.largest} for n, p in self.parts.items()}
        return {"fitted": is_fitted(self), "parts": states, "scales": scales}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, inner in state["parts"].items():
            self.parts[name].reward.load_state_dict(inner)
        for name, saved in state["scales"].items():
            self.parts[name].scale.load_state_dict(saved["scale"])
            self.parts[name].largest = float(saved["largest"])


def metrics_of(reward: Any) -> dict[str, float]:
    """What the reward model says of its last `score`; empty for one that says nothing."""
    return reward.metrics() if hasattr(reward, "metrics") else {}


# ------------------------------------------------------------------------------------------------ scoring in the rollout
class RewardScorer:
    """Scores trajectories, preparing each in a thread as its episode ends, while the others still simulate.

    A model without ``prepare`` is scored at the end. Use it as a context manager: it owns the thread.
    """

    def __init__(self, reward: RewardModel):
        self.reward = reward
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reward") if hasattr(reward, "prepare") else None
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
        self.reward.prepare(trajectory)  # type: ignore[attr-defined]
        return time.perf_counter() - started

    def score(
        self, trajectories: Sequence[Trajectory], names: Sequence[str] = ()
    ) -> tuple[list[Tensor], Any, dict[str, float]]:
        """(rewards [t] per trajectory, what `Algorithm.update` gets, metrics).

        With ``names`` (the algorithm's several rewards) the second is {name: float32 [n]}, else float32 [n]. Metrics:
        ``time/reward`` is what the loop waited for scores, ``time/reward_overlapped`` what was scored meanwhile.
        """
        started = time.perf_counter()
        overlapped = sum(future.result() for future in self._pending)
        self._pending.clear()
        learn: Any
        if names and hasattr(self.reward, "score_parts"):
            parts = self.reward.score_parts(trajectories)
            rewards = self.reward.total(parts)
            missing = [n for n in names if n not in parts]
            if missing:
                raise ConfigError(
                    f"algorithm.reward_names has {missing[0]!r}, which is no part of the reward ({', '.join(parts)})"
                )
            learn = {n: torch.cat(parts[n]) for n in names} if trajectories else {}
        else:
            rewards = self.reward.score(trajectories)
            learn = torch.cat(rewards) if rewards else torch.zeros(0)
        metrics = {f"{k}": v for k, v in metrics_of(self.reward).items()}
        metrics |= {"time/reward": time.perf_counter() - started, "time/reward_overlapped": overlapped}
        return rewards, learn, metrics


class SwitchingReward:
    """The task's own reward until `switch` puts another in its place for good; a resumed run goes on with the same one.

    ``make`` builds the other one, untrained; its trained state comes with this one's.
    """

    def __init__(self, reward: RewardModel, make: Callable[[], Any]):
        self.active: Any = reward
        self.make = make
        self.switched = False

    def switch(self, reward: Any) -> None:
        self.active, self.switched = reward, True

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        return self.active.score(trajectories)

    def prepare(self, trajectory: Trajectory) -> None:
        if hasattr(self.active, "prepare"):
            self.active.prepare(trajectory)

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.active) | {"reward/switched": float(self.switched)}

    def state_dict(self) -> dict[str, Any]:
        state = self.active.state_dict() if hasattr(self.active, "state_dict") else None
        return {"switched": self.switched, "active": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["switched"] and not self.switched:
            self.switch(self.make())
        if state["active"] is not None:
            self.active.load_state_dict(state["active"])


# ---------------------------------------------------------------------------------------------------------- co-evolving
class CoEvolvingReward:
    """Refits a learned reward on the run's own labelled rollouts every ``every`` scored batches (SPARK's idea), and keeps
    the old one where its quality on held-out trajectories falls.

    One in ``hold_out`` trajectories (chosen by rollout id) is never trained on. ``quality`` maps (reward, trajectories) to
    a number, higher is better, NaN where it cannot be told (then the old reward stays). Buffers hold the last ``buffer``
    trajectories; they start empty again after a resume, the reward itself does not.
    """

    learned = True

    def __init__(
        self,
        reward: Any,
        quality: Callable[[Any, Sequence[Trajectory]], float],
        *,
        every: int,
        buffer: int = 256,
        hold_out: int = 4,
        tolerance: float = 0.02,
        seed_trajectories: Sequence[Trajectory] = (),
    ):
        self.reward, self.quality = reward, quality
        self.every, self.buffer, self.hold_out, self.tolerance = every, buffer, hold_out, tolerance
        self._seed = list(seed_trajectories)
        self._train: list[Trajectory] = []
        self._held: list[Trajectory] = []
        self._batches = 0
        self._metrics: dict[str, float] = {}

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        rewards = self.reward.score(trajectories)
        self._metrics = metrics_of(self.reward)
        for t in trajectories:
            held = stable_seed("held out", t.rollout_id) % self.hold_out == 0
            (self._held if held else self._train).append(t)
        self._train = self._train[-self.buffer :]
        self._held = self._held[-max(1, self.buffer // self.hold_out) :]
        self._batches += 1
        if self._batches % self.every == 0:
            self._metrics |= self.refit()
        return rewards

    def refit(self) -> dict[str, float]:
        """Train on the buffer; go back where quality on the held-out trajectories fell by more than ``tolerance``."""
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
        if hasattr(self.reward, "prepare"):
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
