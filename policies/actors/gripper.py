"""A gripper that is decided apart: one of three choices by their values (HIL-SERL's hybrid of
SAC and DQN)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policies.actors.base import FrozenBaseActor, network
from policies.actors.settings import GripperConfig
from policies.trunk.noise import counter_uniforms, row_seeds
from vla_rl.errors import ConfigError
from vla_rl.types import EmbodimentSpec, Observation, PolicyOutput

KEEP, LOW, HIGH = range(3)  # choices; the first of equal values is taken
# halfway means neither
_STAYS = ("-1 open, +1 close", "-1 close, +1 open", "0 close, 1 stay, 2 open")
# half-ranges from halfway, beyond which a command goes to an end: what rounding makes of it
_FIRM = 0.5
_STREAM = 0x3C6EF372FE94F82B


def _as_buffers(module: nn.ModuleList) -> nn.ModuleList:
    """Its parameters become buffers of the same names: they change as others learn, and so are
    no frozen weights."""
    for part in module.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, weight.detach().clone())
    return module


class GripperActor(FrozenBaseActor):
    """A `FrozenBaseActor` with the switch ``gripper``. With "discrete", latent actions and what
    critics read leave the gripper out, ``choices`` (features to three values) decides it for all
    control steps of a decision, and an algorithm trains that (`vla_rl.interfaces.ActorPolicy`). The
    choices are keep, and either end of its range."""

    config: GripperConfig
    choices: nn.Module | None
    steady: nn.ModuleList | None  # the running averages of encoder and actor
    averaged: Tensor  # int64 [], how many updates ``steady`` averages
    _at: int

    def __init__(self, config: Any, base: Any, extra_inputs: int = 0) -> None:
        """As of `FrozenBaseActor`."""
        super().__init__(config, base, extra_inputs)
        self.steady = None
        if self.config.average:
            self.steady = _as_buffers(copy.deepcopy(nn.ModuleList([self.encoder, self.actor])))
            self.register_buffer("averaged", torch.zeros((), dtype=torch.int64))
        self.choices, self._at = None, (*self.embodiment.gripper_dims, 0)[0]
        if self.config.gripper == "discrete":
            # the first choice is to keep
            self.choices = network(self.inputs, self.config.hidden, 3, from_zero=True)

    @staticmethod
    def continuous(config: GripperConfig, spec: EmbodimentSpec) -> int:
        """How many of the actions latent actions hold. Raises ConfigError for a robot without a
        gripper to decide apart."""
        discrete = config.gripper == "discrete"
        found = spec.gripper_dims
        if discrete and (spec.gripper == "none" or len(found) != 1 or spec.action_dim < 2):
            raise ConfigError(
                "actor.gripper=discrete needs one action named gripper beside others, and those of "
                f"{spec.name} are {', '.join(spec.action_names)} (gripper: {spec.gripper}): set "
                "actor.gripper=continuous"
            )
        return spec.action_dim - discrete

    def _own_keep(self) -> None:
        """Raise ConfigError where this robot has no command that keeps its gripper as it is."""
        if self.config.gripper == "discrete" and self.embodiment.gripper not in _STAYS:
            raise ConfigError(
                "actor.gripper=discrete needs a gripper command that keeps it as it is, and that "
                f"of {self.embodiment.name} is {self.embodiment.gripper!r}: use actor=residual, "
                "where to keep is to do as the frozen policy does, or actor.gripper=continuous"
            )

    # ------------------------------------------------------------------------------------- learning
    @torch.no_grad()
    def practised(self) -> None:
        """See `vla_rl.interfaces.ActorPolicy`. The average forgets the first weights faster,
        as it is of few."""
        if self.steady is None:
            return
        self.averaged += 1
        kept = min(self.config.average, float(self.averaged) / (float(self.averaged) + 10.0))
        averages = dict(self.steady.named_buffers())
        for name, now in nn.ModuleList([self.encoder, self.actor]).named_parameters():
            averages[name].lerp_(now, 1.0 - kept)

    def without_gripper(self, unit: Tensor) -> Tensor:
        """[b … a] in half-ranges → flat, without the gripper where that is decided apart."""
        if self.choices is None:
            return unit.flatten(1)
        return torch.cat([unit[..., : self._at], unit[..., self._at + 1 :]], dim=-1).flatten(1)

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        return self.without_gripper(self.to_unit(actions))

    def choice_values(
        self, encoded: Tensor, frames: Mapping[str, Tensor], choices: nn.Module | None = None
    ) -> Tensor:
        """Values [b 3]; ``choices``: another network than the actor's own."""
        judge = self.choices if choices is None else choices
        if judge is None:
            raise ValueError(
                "this actor's gripper is an action as the others: it has no values of choices"
            )
        return judge(self.actor_inputs(encoded, frames))

    def choosable(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choices there are, bool [b 3]: an end that keeping goes to anyway is none."""
        kept = _directions(self._kept(frames)[:, -1])
        return torch.stack([torch.ones_like(kept, dtype=torch.bool), kept != -1, kept != 1], dim=1)

    def chosen(self, actions: Tensor, valid: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choice stored decisions were, int64 [b], by the last of their control steps that
        was executed; −1 for one that cannot be chosen, such as a person's to hold still where the
        frozen policy moves."""
        last = (valid.long().sum(1) - 1).clamp(min=0)[:, None]
        unit = self.to_unit(actions)[..., self._at]
        went = _directions(unit.gather(1, last.to(unit.device))[:, 0])
        kept = _directions(self._kept(frames).gather(1, last.to(unit.device))[:, 0])
        choice = torch.where(went == 0, -1, torch.where(went < 0, LOW, HIGH))
        return torch.where(went == kept, KEEP, choice)

    def gripper_changes(self, actions: Tensor, valid: Tensor) -> Tensor:
        """1 where a control step of an episode's decisions [t h a] sent the gripper to the other
        end, float32 [t h]; where it was at first is not known, so its first way is no change."""
        went = _directions(self.to_unit(actions)[..., self._at]).cpu()
        changes, towards = torch.zeros(valid.shape), 0
        for t, (row, executed) in enumerate(zip(went.tolist(), valid.tolist())):
            for j, (direction, counts) in enumerate(zip(row, executed)):
                if counts and direction:
                    changes[t, j] = float(towards not in (0, direction))
                    towards = direction
        return changes

    # --------------------------------------------------------------------------------------- acting
    def decide(
        self,
        observation: Observation,
        kept: dict[str, Tensor],
        deterministic: bool,
        seeds: Sequence[int] | None,
    ) -> PolicyOutput:
        """The decision on present frames (``kept``, and pictures as they are), with the
        gripper's choice."""
        frames = kept | self.pictures(observation)
        encoded = self.encode(frames)
        if deterministic and self.steady is not None:
            encoder, actor = self.steady
            latent = self.meant(actor(self.actor_inputs(encoder(frames), frames)), None)[0]
        else:
            latent = self.latents(encoded, frames, deterministic, seeds)
        unit = self.realize(latent, frames)
        if self.choices is not None:
            unit = unit.view(len(unit), self.chunk_length, -1)
            command = self._commands(self._choice(encoded, frames, deterministic, seeds), frames)[
                ..., None
            ].to(unit)
            unit = torch.cat(
                [unit[..., : self._at], command, unit[..., self._at :]], dim=-1
            ).flatten(1)
        return self.decided(latent, unit, kept)

    def _choice(
        self,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        deterministic: bool,
        seeds: Sequence[int] | None,
    ) -> Tensor:
        """int64 [b]: the best; of exploring decisions a share ``gripper_noise`` chooses at
        random."""
        there = self.choosable(frames).to(self.low.device)
        choice = self.choice_values(encoded, frames).masked_fill(~there, -torch.inf).argmax(1)
        if not self.trusts_choices:
            choice = torch.full_like(choice, KEEP)
        if deterministic or not self.config.gripper_noise:
            return choice
        mine = [seed ^ _STREAM for seed in row_seeds(seeds, len(choice))]
        drawn = torch.from_numpy(counter_uniforms(mine, 2)).to(self.low.device)
        other = (3.0 * drawn[:, 1]).long()
        other = torch.where(there.gather(1, other[:, None])[:, 0], other, KEEP)
        return torch.where(drawn[:, 0] < self.config.gripper_noise, other, choice)

    @property
    def trusts_choices(self) -> bool:
        """Whether values decide yet."""
        return True

    def _commands(self, choice: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """[b h] in half-ranges."""
        kept = self._kept(frames)
        end = torch.where(choice == LOW, -1.0, 1.0).to(kept)[:, None].expand_as(kept)
        return torch.where((choice == KEEP)[:, None], kept, end)

    def _kept(self, frames: Mapping[str, Tensor]) -> Tensor:
        """What to keep is, in half-ranges [b h]: halfway, for a robot to which that means
        neither way."""
        rows = len(next(iter(frames.values())))
        return torch.zeros(rows, self.chunk_length, device=self.low.device)


def _directions(unit: Tensor) -> Tensor:
    """To which end commands go: −1, 1, or 0 for neither."""
    return (unit > _FIRM).long() - (unit < -_FIRM).long()
