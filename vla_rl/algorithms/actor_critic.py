"""Learning from a replay with an actor and an ensemble of critics: TD3 and SAC, and what is built
on them.

A decision is one action, a chunk too; the discount counts control steps, as chunks may be cut short
(SMDP; Sutton et al. 1999). Critics and their encoder learn from each draw, the actor from every
few; the targets follow. Which algorithm of the literature this is depends on the options: RLPD
(Ball et al. 2023), REDQ (Chen et al. 2021), HIL-SERL's learner, ResFiT with a residual actor,
DSRL-SAC with a steered one, Cal-QL and WSRL with updates before the first episode.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms import conservative, critics, gripper_choices
from vla_rl.algorithms.advantages import chunk_rewards
from vla_rl.algorithms.anchor import Anchor
from vla_rl.algorithms.conservative import RETURN
from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.algorithms.picture_inputs import PictureInputs, on_device
from vla_rl.config.replay_algorithms import ActorCriticConfig, SACConfig, TD3Config
from vla_rl.data.replay import DEMONSTRATIONS, INTERVENTIONS, OFFLINE, ONLINE
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Draw, Policy, Replayed
from vla_rl.types import EpisodeSpec, Observation, Trajectory, Transitions

ADAM_BETAS = (0.9, 0.999)


class ActorCritic(Replayed):
    """For an `ActorPolicy`. It owns critics, targets and optimisers; how the
    actor learns from the critics is a subclass's."""

    reads_rewards = True
    actor_distribution = ""  # the only kind of actor that it trains
    name = ""

    def __init__(self, config: ActorCriticConfig, policy: Policy) -> None:
        """Raises ConfigError where the policy has no actor, or not the kind of actor that is
        trained."""
        if not isinstance(policy, ActorPolicy):
            raise ConfigError(
                f"algorithm {self.name} trains a small actor, and {type(policy).__name__} has none "
                "(ActorPolicy): put one on top of it with actor=residual, actor=direct or "
                "actor=steered, use policy=small, or algorithm=ppo"
            )
        self.config, self.policy = config, (policy := ActorPolicy.of(policy))
        kind, other = ("gaussian", "sac") if policy.stochastic else ("deterministic", "td3")
        if self.actor_distribution not in ("", kind):
            raise ConfigError(
                f"algorithm {self.name} trains a {self.actor_distribution} actor, and this one is "
                f"{kind}: set actor.distribution={self.actor_distribution} (of policy=small: "
                f"policy.distribution), or use algorithm={other}"
            )
        self.device = next(policy.actor.parameters()).device
        self.head = critics.value_head(config.critics)
        self._eyes = PictureInputs(policy)
        self.generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.critics = self._new_critics().to(self.device)
        self._learned: list[nn.Module] = [policy.encoder, self.critics]
        self._chooses = gripper_choices.network(policy)
        if self._chooses is not None:
            self._learned.append(self._chooses)
        self._target = copy.deepcopy(nn.ModuleList(self._learned)).requires_grad_(False)
        learned = [p for module in self._learned for p in module.parameters()]
        self.critic_optimizer = make_adamw(
            [(learned, config.critics.learning_rate)], ADAM_BETAS, 0.0
        )
        self.optimizer = make_adamw(
            [(policy.actor.parameters(), config.learning_rate)], ADAM_BETAS, 0.0
        )
        self._guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self._critic_guard = GuardedStep(config.max_bad_updates, config.grad_clip)
        self.updates = 0

    def _new_critics(self) -> critics.Critics:
        c = self.config.critics
        with torch.no_grad():
            blank = _blank(self.policy)
            kept = {name: frame[:1] for name, frame in self.policy.annotate(blank).items()}
            first = self._eyes.seen(kept, blank.observations, torch.Generator())
            self.features = self.policy.encode(first).shape[1]
            return critics.Critics(
                self.features, self._action_width(first), c.hidden, c.count, self.head.outputs
            )

    def _action_width(self, frames: Mapping[str, Tensor]) -> int:
        """How many numbers critics read of an action; ``frames`` are one row."""
        return self.policy.realize(
            torch.zeros(1, self.policy.latent_dim, device=self.device), frames
        ).shape[1]

    # ------------------------------------------------------------------------------------- learning
    def annotate(self, trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """The policy's frames, and discounted [t + 1] (nothing follows the last frame): with Cal-QL
        the rewards to go, for a gripper that is decided apart its changes to go."""
        frames, steps = self.policy.annotate(trajectory), trajectory.valid.sum(1)
        if self.config.conservatism == "cal_ql":
            frames[RETURN] = rewards_to_go(rewards, steps, self.config.gamma)
        if self._chooses is not None:
            changes = self.policy.gripper_changes(trajectory.actions, trajectory.valid)
            frames[gripper_choices.CHANGES] = rewards_to_go(
                chunk_rewards(changes, self.config.gamma), steps, self.config.gamma
            )
        return frames

    def update(self, draw: Draw) -> dict[str, float]:
        """One step of the critics and, every ``actor_every``, one of the actor. Raises
        `TrainingDiverged`."""
        c = self.config
        offline = self.updates < c.offline_updates
        shown, others = (
            (c.demonstration_share, c.offline_share)
            if offline or c.demonstrations_online
            else (0.0, 0.0)
        )
        shares = {
            (DEMONSTRATIONS, INTERVENTIONS): shown,
            (OFFLINE,): others,
            (ONLINE,): 1.0 - shown - others,
        }
        batch = draw(
            c.batch_size, gamma=c.gamma, n_step=c.n_step, shares=shares, images=self._eyes.open
        )
        frames = on_device(
            self._eyes.seen(batch.extra, batch.observations, self.generator), self.device
        )
        next_frames = on_device(
            self._eyes.seen(batch.next_extra, batch.next_observations, self.generator), self.device
        )
        with torch.set_grad_enabled(offline or c.encoder_online):
            encoded = self.policy.encode(frames)
        taken = self._taken(batch, frames)
        with torch.no_grad():
            target = self._targets(batch, next_frames)
        outputs = self.critics(encoded, taken)
        loss = self.head.loss(outputs, target)
        values = self.head.value(outputs)
        figures = {"critic_loss": loss, "value_mean": values.mean()}
        if self._conservative:
            kept, after = ({name: x[name] for name in batch.extra} for x in (frames, next_frames))
            with torch.no_grad():
                following = self.policy.encode(next_frames)
            gap = conservative.gap(self, (encoded, kept), (following, after), values)
            loss = loss + c.conservative_weight * gap
            figures["conservative_gap"] = gap
        if self._chooses is not None:
            figures["gripper_loss"] = gripper_choices.learned(
                self.policy,
                self._target,
                batch,
                encoded,
                (frames, next_frames),
                c.gripper_penalty,
                c.conservative_weight if self._conservative else 0.0,
            )
            loss = loss + figures["gripper_loss"]
        if (besides := self.policy.encoder_loss(frames)) is not None:
            figures["encoder_loss"] = besides
            loss = loss + besides
        loss.backward()
        self._critic_guard.step(self.critic_optimizer, loss.detach())
        self.updates += 1
        metrics = {f"{self.name}/{name}": float(value.detach()) for name, value in figures.items()}
        metrics |= self._learn_besides(encoded.detach(), taken, frames)
        if self.updates > c.critic_warmup and self.updates % c.actor_every == 0:
            metrics |= self._improve(batch, encoded.detach(), frames)
        for target_module, module in zip(self._target, self._learned):
            critics.follow(target_module, module, c.critics.tau)
        return metrics

    def _targets(self, batch: Transitions, next_frames: Mapping[str, Tensor]) -> Tensor:
        """What the critics learn: rewards + discounts · the smallest of a random subset of
        target values."""
        if self._conservative and self.config.max_target_backup and self.policy.stochastic:
            kept = {name: next_frames[name] for name in batch.next_extra}
            outputs, bonus = conservative.best_following(self, next_frames, kept)
        else:
            latent, bonus = self._next_latent(self.policy.encode(next_frames), next_frames)
            outputs = self._target_outputs(latent, batch.next_observations, next_frames)
            outputs = outputs[
                critics.random_subset(
                    self.critics.count, self.config.critics.subset, self.generator
                )
            ]
        discounts = batch.discounts.to(self.device)
        rewards = batch.rewards.to(self.device) + discounts * bonus
        return self.head.target(rewards, discounts, outputs)

    @property
    def _conservative(self) -> bool:
        """Whether this update keeps values low where there is no data: before the first episode,
        if at all."""
        return self.config.conservatism != "none" and self.updates < self.config.offline_updates

    def _taken(self, batch: Transitions, frames: Mapping[str, Tensor]) -> Tensor:
        """What critics read of the stored decisions [b d]."""
        return self.policy.taken(batch.actions, frames)

    def _learn_besides(
        self, encoded: Tensor, taken: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """What else learns from each draw: nothing here. ``encoded`` [b f] has no gradient.
        Returns metrics."""
        return {}

    def _target_outputs(
        self, latent: Tensor, seen: Observation, frames: Mapping[str, Tensor]
    ) -> Tensor:
        """Outputs [critics b …] of the target critics where ``latent`` would be taken."""
        encoder, target = self._target[0], self._target[1]
        return target(encoder(frames), self.policy.realize(latent, frames))

    # -------------------------------------------------------------------- what algorithms differ in
    @abstractmethod
    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        """The latent action of the target [b l], and what is added to its value."""

    @abstractmethod
    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """One step of the actor on ``encoded`` [b f], which has no gradient. Returns metrics."""

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy's weights. Needs no pickle."""
        return {
            "updates": self.updates,
            "critics": dict(self.critics.state_dict()),
            "target": dict(self._target.state_dict()),
            "optimizer": optimizer_state(self.optimizer),
            "critic_optimizer": optimizer_state(self.critic_optimizer),
            "guards": [self._guard.state_dict(), self._critic_guard.state_dict()],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.updates = int(state["updates"])
        self.critics.load_state_dict(state["critics"])
        self._target.load_state_dict(state["target"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        load_optimizer_state(self.critic_optimizer, state["critic_optimizer"])
        self._guard.load_state_dict(state["guards"][0])
        self._critic_guard.load_state_dict(state["guards"][1])
        self.generator.set_state(state["generator"].cpu())


class _ClimbingActor(ActorCritic):
    """The actor's latent action climbs the critics' gradient.

    With ``anchor_coef`` it is held near what it did as the first episode began, less and less,
    while critics that know little of other actions learn what those are worth (`Anchor`). Mean and
    spread are held alike, by the squared Wasserstein distance: that of what both make of the same
    noise. (How much of a correction is in use, ``actor.ramp``, is the present one on both sides.)
    """

    _anchor: Anchor | None = None

    def update(self, draw: Draw) -> dict[str, float]:
        if (
            self.config.anchor_coef
            and self._anchor is None
            and self.updates >= self.config.offline_updates
        ):
            self._anchor = Anchor(self.policy)
        return super().update(draw)

    def _normal(self, rows: int) -> Tensor:
        return torch.randn(rows, self.policy.latent_dim, generator=self.generator).to(self.device)

    def _value(self, encoded: Tensor, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Values [critics b] of a latent action, with gradient to it alone."""
        self.critics.requires_grad_(False)
        value = self.head.value(self.critics(encoded, self.policy.realize(latent, frames)))
        self.critics.requires_grad_(True)
        return value

    def _improve(
        self, batch: Transitions, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """One step up the mean of the critics."""
        c = self.config
        noise = self._noise(len(encoded))
        latent, log_prob = self.policy.propose(encoded, frames, noise)
        value = self._value(encoded, latent, frames).mean(0)
        loss, figures = self._actor_loss(value, log_prob)
        loss = loss + self._penalty(latent)
        if c.imitation_coef:
            loss = loss + c.imitation_coef * self._imitation_error(batch, latent, frames)
        drift = None
        if self._anchor is not None and (held := self._anchor.weight(c, self.updates)):
            drift = self._anchor.drift(latent, frames, noise)
            loss = loss + held * drift
        loss.backward()
        self._guard.step(self.optimizer, loss.detach())
        self.policy.practised()
        figures |= {
            "policy_loss": float(loss.detach()),
            "latent_size": float(latent.detach().abs().mean()),
        }
        figures |= {} if drift is None else {"drift": float(drift.detach())}
        return {f"{self.name}/{name}": value for name, value in figures.items()}

    def _penalty(self, latent: Tensor) -> Tensor:
        return self.config.action_penalty * latent.square().mean()

    def _imitation_error(
        self, batch: Transitions, latent: Tensor, frames: Mapping[str, Tensor]
    ) -> Tensor:
        """Mean squared distance to the actions that people chose, in half-ranges."""
        action = self.policy.realize(latent, frames)
        counts = (batch.valid & batch.is_human).to(action)
        error = (
            (action - self.policy.taken(batch.labels, frames))
            .square()
            .view(*counts.shape, -1)
            .mean(-1)
        )
        return (error * counts).sum() / counts.sum().clamp(min=1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | (
            {} if self._anchor is None else {"anchor": dict(self._anchor.then.state_dict())}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "anchor" in state:
            self._anchor = Anchor(self.policy)
            self._anchor.then.load_state_dict(state["anchor"])

    def _noise(self, rows: int) -> Tensor | None:
        """What the actor decides from as it learns [rows l]; None: its most likely actions."""
        return None

    @abstractmethod
    def _actor_loss(self, value: Tensor, log_prob: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Scalar, from values and log-probs [b], and figures of it."""


class TD3(_ClimbingActor):
    """A deterministic actor with smoothed targets (Fujimoto et al. 2018); with imitation beside it,
    TD3+BC (Fujimoto & Gu
    2021) without its scaling."""

    config: TD3Config
    actor_distribution = "deterministic"
    name = "td3"

    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        """The present actor's action with clipped noise (eq. 14; the actor moves slowly, and has
        no target copy)."""
        latent, _ = self.policy.propose(encoded, frames, None)
        limit = self.config.target_clip
        noise = (self.config.target_noise * self._normal(len(latent))).clamp(-limit, limit)
        return (latent + noise).clamp(-1.0, 1.0), 0.0

    def _actor_loss(self, value: Tensor, log_prob: Tensor) -> tuple[Tensor, dict[str, float]]:
        return -value.mean(), {}


class SAC(_ClimbingActor):
    """A stochastic actor and a temperature that holds its entropy (Haarnoja et al. 2018, arXiv
    1812.05905)."""

    config: SACConfig
    actor_distribution = "gaussian"
    name = "sac"
    needs_latents = True  # of a steered actor: critics read the noise, not the action

    def __init__(self, config: SACConfig, policy: Policy) -> None:
        """Raises ConfigError for demonstrations where critics read a noise."""
        super().__init__(config, policy)
        if (
            self.needs_latents
            and "steering" in self.policy.can
            and (config.demonstration_share or config.offline_share)
        ):
            raise ConfigError(
                f"algorithm {self.name} learns what noises are worth, and demonstrations have no "
                "noise, nor have other runs' episodes: set algorithm.demonstration_share=0 and "
                "algorithm.offline_share=0, or use algorithm=dsrl, which learns from their actions"
            )
        size = self.policy.latent_dim
        self.target_entropy = (
            -size / 2.0 if config.target_entropy is None else config.target_entropy
        )
        self.log_temperature = nn.Parameter(
            torch.tensor(config.temperature, device=self.device).log()
        )
        groups = [([self.log_temperature], config.temperature_learning_rate)]
        self.temperature_optimizer = make_adamw(groups, ADAM_BETAS, 0.0)

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.detach().exp()

    def _next_latent(
        self, encoded: Tensor, frames: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        latent, log_prob = self.policy.propose(encoded, frames, self._noise(len(encoded)))
        return latent, -self.temperature * log_prob if self.config.entropy_in_backup else 0.0

    def _noise(self, rows: int) -> Tensor:
        return self._normal(rows)

    def _actor_loss(self, value: Tensor, log_prob: Tensor) -> tuple[Tensor, dict[str, float]]:
        entropy = -float(log_prob.detach().mean())
        if self.config.temperature_learning_rate:
            (self.log_temperature.exp() * (entropy - self.target_entropy)).backward()
            self.temperature_optimizer.step()
            self.temperature_optimizer.zero_grad(set_to_none=True)
        loss = (self.temperature * log_prob - value).mean()
        return loss, {
            "temperature": float(self.temperature),
            "spare_entropy": entropy - self.target_entropy,
        }

    def state_dict(self) -> dict[str, Any]:
        own = {"log_temperature": self.log_temperature.detach().clone()}
        return (
            super().state_dict()
            | own
            | {"temperature_optimizer": optimizer_state(self.temperature_optimizer)}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        load_optimizer_state(self.temperature_optimizer, state["temperature_optimizer"])


def rewards_to_go(rewards: Tensor, steps: Tensor, gamma: float) -> Tensor:
    """Discounted rewards from each decision on, float32 [t + 1], of rewards [t] and executed
    control steps [t]."""
    total, out = 0.0, [0.0]
    for reward, n in zip(reversed(rewards.tolist()), reversed(steps.tolist())):
        total = reward + gamma**n * total
        out.append(total)
    return torch.tensor(out[::-1])


def _blank(policy: Policy) -> Trajectory:
    """An episode of one decision, to ask for sizes."""
    spec = policy.embodiment
    seen = Observation.blank(spec)
    actions = torch.zeros(1, policy.chunk_length, spec.action_dim)
    valid = torch.ones(1, policy.chunk_length, dtype=torch.bool)
    return Trajectory(
        EpisodeSpec("", 0),
        seen,
        seen,
        actions,
        valid,
        torch.zeros(valid.shape),
        torch.zeros(1),
        {},
        terminated=True,
        truncated=False,
        success=False,
    )
