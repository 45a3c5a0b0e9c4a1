"""What an offline round of RL-100 learns with (arXiv 2510.14830, its offline stage): critics, a
model, PPO, and a gate.

The critics are IQL's, on frames of the data so far. The policy imitates demonstrations and what was
solved so far. A candidate is one PPO update of the policy's denoising chain: the policy decides on
states of the data, each decision's advantage Q − V stands for all of its K steps, and the ratio is
to the policy before (Uni-O4, Lei et al. 2024). The gate compares both in the learned model, from
the same states and noise.

Departures: imitation goes on from the present weights, on kept features of frozen towers, where the
paper starts anew; the estimate is divided by its length, so that it reads as a value; an imagined
episode that ends keeps its last reward for what is left of the horizon, since a sum over fewer
decisions would count success as a loss; decisions in the model are the deterministic ones (the
chain's ODE), as the policy will be judged by.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_rl.algorithms.dynamics import Dynamics, StateCodec
from vla_rl.algorithms.iql import IQL
from vla_rl.algorithms.optim import GuardedStep, make_adamw
from vla_rl.algorithms.picture_inputs import on_device
from vla_rl.algorithms.ppo import PPO
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.imitation import ImitationConfig
from vla_rl.config.offline import OfflineConfig
from vla_rl.config.replay_algorithms import IQLConfig
from vla_rl.data.replay import DEMONSTRATIONS, SOLVED, Replay
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.options import PolicyOptions, config_of, view
from vla_rl.types import EpisodeSpec, Observation, PolicyOutput, RolloutBatch, Transitions

ADVANTAGE = "vla_rl.algorithms.estimators:Given"
_Row = TypeVar("_Row")
_ROWS = 256  # decisions that the policy makes at once


def ppo_config(config: OfflineConfig, online: PPOConfig) -> PPOConfig:
    """PPO's options offline: those of the run's own algorithm but for what offline rounds set."""
    return dataclasses.replace(
        online,
        advantage=ADVANTAGE,
        normalize_advantage="batch",
        decouple_rewards=False,
        reward_names=[],
        reward_weights=[],
        epochs=config.epochs,
        minibatch_size=config.minibatch_size,
        minibatch_unit="decision",
        loss_aggregation="token",
        learning_rate=config.learning_rate,
        clip_low=config.clip,
        clip_high=config.clip,
        grad_clip=config.grad_clip,
        warmup_iterations=0,
        decay_iterations=0,
        critic_warmup_iterations=0,
        kl_coef=0.0,
        success_imitation_coef=0.0,
        adaptive_learning_rate=False,
        skip_zero_advantage=False,
    )


def iql_config(config: OfflineConfig, seed: int) -> IQLConfig:
    """IQL that trains its critics alone."""
    return IQLConfig(
        batch_size=config.batch_size,
        gamma=config.gamma,
        expectile=config.expectile,
        critics=config.critics,
        seed=seed,
        critic_warmup=sys.maxsize,
    )


def accepts(before: float, after: float, min_gain: float) -> bool:
    """Whether an estimate rose by at least ``min_gain`` of its size (RL-100's gate, δ =
    0.05·|J|)."""
    return after - before >= min_gain * abs(before)


class OfflineChain:
    """``actor`` offers the frames of ``policy``, which it is made of
    (an `ActorPolicy` that is the actor ``own``)."""

    def __init__(
        self, config: OfflineConfig, online: PPOConfig, policy: Any, actor: Any, seed: int
    ) -> None:
        """Raises ConfigError for a policy without a denoising chain or with frozen steps to imitate
        with, or an algorithm other than PPO."""
        if "chain" not in Policy.of(policy).can:
            raise ConfigError(
                f"phase offline trains the steps of a denoising chain, and {type(policy).__name__} "
                "has none that it could repeat on stored frames: start from a flow or diffusion "
                "policy of this project (policy=nano_flow), or set algorithm=iql, which trains "
                "tokens too, and leave offline out of phases"
            )
        if config.imitation_updates and view(config_of(policy), PolicyOptions).freeze_untrained:
            raise ConfigError(
                f"offline.imitation_updates={config.imitation_updates} trains all steps of the "
                "chain, and with policy.freeze_untrained=true a copy that never learns takes the "
                "first ones: set either to 0 or false"
            )
        self.config, self.policy, self.actor, self.seed = config, policy, actor, seed
        self.device = next(iter(policy.parameters())).device
        self.ppo = PPO(ppo_config(config, online), policy)
        self.iql = IQL(iql_config(config, seed), actor)
        self.dynamics: Dynamics | None = None

    # -------------------------------------------------------------------------------------- critics
    def learn_values(
        self,
        replay: Replay,
        generator: torch.Generator,
        done: Callable[[int], None] = lambda _: None,
    ) -> dict[str, float]:
        """``critic_updates`` of IQL on all decisions alike; the mean of the last tenth of their
        metrics."""

        def draw(count: int, **options: Any) -> Transitions:
            return replay.draw(count, generator, **{**options, "shares": None})

        history = []
        for i in range(self.config.critic_updates):
            history.append(self.iql.update(draw))
            done(i + 1)
        last = _last_tenth(history)
        return {
            name: sum(row[name] for row in last) / len(last) for name in (last[0] if last else {})
        }

    def learn_dynamics(
        self, replay: Replay, generator: torch.Generator, seed: int
    ) -> dict[str, float]:
        """A new model from every decision there is; ``seed`` fixes its first weights."""
        c = self.config
        every = torch.arange(len(replay))
        data = replay.take(every, gamma=c.gamma, images=False)
        frames = on_device(data.extra, self.device)
        codec = StateCodec.fit(
            frames, data.observations.proprio.to(self.device), c.dynamics.components
        )
        taken = self.actor.taken(data.actions, frames)
        self.dynamics = Dynamics(c.dynamics, codec, taken.shape[1], self.device, seed)
        return self.dynamics.fit(data, taken, generator)

    # --------------------------------------------------------------------------------------- policy
    def imitate(
        self,
        replay: Replay,
        generator: torch.Generator,
        done: Callable[[int], None] = lambda _: None,
    ) -> dict[str, float]:
        """``imitation_updates`` of the policy's supervised loss on demonstrations and solved
        episodes, from kept features.

        The policy goes on from where it stands. Returns the mean of the last tenth of the losses.
        Raises `TrainingDiverged`.
        """
        c, sft = self.config, ImitationConfig()
        if not replay.count(DEMONSTRATIONS) + replay.count(SOLVED):
            return {}  # nothing worth imitating yet
        optimizer = make_adamw(
            [(self.policy.parameters(), c.imitation_learning_rate)], sft.betas, 0.0
        )
        guard, losses = GuardedStep(sft.max_bad_updates, sft.grad_clip), []
        for i in range(c.imitation_updates):
            for group in optimizer.param_groups:
                group["lr"] = c.imitation_learning_rate * (1.0 - i / c.imitation_updates)
            drawn = replay.draw(
                c.imitation_batch, generator, shares={(DEMONSTRATIONS, SOLVED): 1.0}, images=False
            )
            frames = on_device(drawn.extra, self.device)
            actions, valid = drawn.labels.to(self.device), drawn.valid.to(self.device)
            loss, _ = self.policy.imitation_loss(
                drawn.observations, actions, valid, features=frames
            )
            loss.backward()
            guard.step(optimizer, loss.detach())
            losses.append(float(loss.detach()))
            done(i + 1)
        last = _last_tenth(losses)
        return {"offline/imitation_loss": sum(last) / len(last)}

    def improve(self, replay: Replay, generator: torch.Generator, clip: float) -> dict[str, float]:
        """One candidate, in the policy's own weights. Raises `TrainingDiverged`."""
        batch, advantages = self.decisions(replay, generator)
        self.ppo.config.clip_low = self.ppo.config.clip_high = clip
        return self.ppo.update(batch, advantages) | {"offline/advantage": float(advantages.mean())}

    def decisions(self, replay: Replay, generator: torch.Generator) -> tuple[RolloutBatch, Tensor]:
        """What the present policy would do on ``states`` of the data, and the advantage [n] of
        each decision."""
        outputs, seen, advantages = [], [], []
        for count in torch.arange(self.config.states).split(_ROWS):
            drawn = replay.draw(len(count), generator, images=False)
            frames = on_device(drawn.extra, self.device)
            seeds = torch.randint(2**62, (len(count),), generator=generator).tolist()
            out = self.policy.sample(drawn.observations.to(self.device), frames, seeds)
            advantages.append(
                self.iql.advantages(frames, self.actor.taken(out.chunk.actions, frames)).cpu()
            )
            outputs.append(out)
            seen.append(drawn.observations)
        return _as_batch(outputs, Observation.cat(seen)), torch.cat(advantages)

    # ----------------------------------------------------------------------------------------- gate
    def gate_states(self, replay: Replay, seed: int) -> Transitions:
        """Where the gate's estimates begin: the same for the same data and seed."""
        generator, rows = torch.Generator().manual_seed(seed), torch.arange(len(replay))
        if self.config.starts == "first":
            rows = replay.first_decisions()
        pick = torch.randint(len(rows), (self.config.gate_states,), generator=generator)
        return replay.take(rows[pick], images=False)

    @torch.no_grad()
    def estimate(self, states: Transitions, seed: int) -> Tensor:
        """Mean Q of ``horizon`` decisions [b] that the present policy takes from ``states`` in the
        model. ``seed`` fixes noises and members. Not finite where critics or model are not, or the
        policy's own weights."""
        if self.dynamics is None:
            raise RuntimeError("an estimate was asked for before learn_dynamics")
        generator, model = torch.Generator().manual_seed(seed), self.dynamics
        frames, proprio = (
            on_device(states.extra, self.device),
            states.observations.proprio.to(self.device),
        )
        members, state = model.members(len(proprio), generator), model.codec.encode(frames, proprio)
        total, last = (
            torch.zeros(len(proprio), device=self.device),
            torch.zeros(len(proprio), device=self.device),
        )
        goes_on = torch.ones(len(proprio), dtype=torch.bool, device=self.device)
        shape = (len(proprio), self.policy.chunk_length, self.policy.embodiment.action_dim)
        for _ in range(self.config.horizon):
            seen = Observation({}, proprio, states.observations.instruction)
            noise = torch.randn(shape, generator=generator)
            taken = self.actor.taken(self.policy.decode(seen, noise, frames), frames)
            total += torch.where(goes_on, self.iql.action_values(frames, taken), last)
            state, reward, ends = model.step(state, taken, members)
            last = torch.where(goes_on & ends, reward, last)
            goes_on &= ~ends
            frames, proprio = model.codec.decode(state)
        return (total / self.config.horizon).cpu()

    def snapshot(self) -> dict[str, Any]:
        """The policy's weights and all that PPO learns with, as copies."""
        weights = {name: x.detach().clone() for name, x in self.policy.state_dict().items()}
        return {"weights": weights, "ppo": copy.deepcopy(self.ppo.state_dict())}

    def revert(self, snapshot: Mapping[str, Any]) -> None:
        """Back to a snapshot, bit for bit."""
        self.policy.load_state_dict(snapshot["weights"])
        self.ppo.load_state_dict(copy.deepcopy(snapshot["ppo"]))

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights and ``iql``, which keeps a state of its own."""
        model = None if self.dynamics is None else self.dynamics.state_dict()
        return {"ppo": self.ppo.state_dict(), "dynamics": model}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ppo.load_state_dict(state["ppo"])
        found = state["dynamics"]
        self.dynamics = (
            None if found is None else Dynamics.from_state(self.config.dynamics, found, self.device)
        )


def _last_tenth(rows: list[_Row]) -> list[_Row]:
    return rows[-max(1, len(rows) // 10) :]


def _as_batch(outputs: list[PolicyOutput], seen: Observation) -> RolloutBatch:
    """Decisions that nobody executed, each as an episode of its own, as PPO takes them."""
    actions = torch.cat([out.chunk.actions for out in outputs]).cpu()
    valid = torch.cat([out.chunk.valid for out in outputs]).cpu()
    n = len(actions)
    each, nothing = torch.arange(n), torch.zeros(n, dtype=torch.bool)
    return RolloutBatch(
        observations=seen,
        final_observations=seen,
        actions=actions,
        valid=valid,
        rewards=torch.zeros(valid.shape),
        behavior_log_prob=torch.cat([out.behavior_log_prob for out in outputs]).cpu(),
        replay={
            name: torch.cat([out.replay[name] for out in outputs]).cpu()
            for name in outputs[0].replay
        },
        value=None,
        trajectory_index=each,
        lengths=torch.ones(n, dtype=torch.long),
        terminated=~nothing,
        truncated=nothing,
        success=nothing,
        group_index=each,
        policy_version=torch.zeros(n, dtype=torch.long),
        episodes=(EpisodeSpec("", 0),) * n,
        is_human=torch.zeros_like(valid),
        instead=(None,) * n,
    )
