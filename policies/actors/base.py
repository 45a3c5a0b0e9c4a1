"""What actors share: units, noise and checkpoints; a frozen policy and an encoder of what it
sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from policies.actors.pictures import PictureTrunk
from policies.actors.settings import PICTURES, ActorConfig
from policies.actors.token import TokenBranch
from policies.trunk.noise import counter_normals, row_seeds
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Policy
from vla_rl.types import (
    ActionChunk,
    EmbodimentSpec,
    Observation,
    PolicyOutput,
    Trajectory,
    Transitions,
)

VISUAL = "visual"  # the frame that images make; what else a frame holds is small
_LOG_STD = (-5.0, 1.0)
# how near to ±1, which no squashed Gaussian reaches, a latent action counts that is to be imitated
_INSIDE = 0.99
_ROWS = 256  # frames that are encoded at once
_PICTURE = "picture"  # before the number of a camera
_BASE = "base."  # before the name of a text file or a weight of the frozen policy
_SMALL = 500_000_000  # bytes of a frozen policy that checkpoints copy


class FrameEncoder(nn.Module):
    """Frames {name: [b d]} → [b f]: a linear layer, LayerNorm and tanh for each name. Critics train
    it (DrQ, HIL-SERL).

    ``trunks``: networks of other frames, to ``width`` numbers each. ``token``: what images make
    becomes a token of that width (`TokenBranch`); 0: as the rest."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        width: int,
        trunks: Mapping[str, nn.Module] | None = None,
        token: int = 0,
    ) -> None:
        super().__init__()
        trunks = dict(trunks or {})
        small = max(16, width // 4)
        self.branches = nn.ModuleDict(
            {
                n: nn.Sequential(
                    nn.Linear(d, w := width if n == VISUAL else small), nn.LayerNorm(w), nn.Tanh()
                )
                for n, d in sizes.items()
            }
        )
        if token:
            self.branches[VISUAL] = TokenBranch(sizes[VISUAL], token)
        self.branches.update(trunks)
        seen = token or width
        self.width = sum(seen if name == VISUAL else small for name in sizes) + width * len(trunks)

    def forward(self, frames: Mapping[str, Tensor]) -> Tensor:
        # (an average of one has buffers alone)
        device = next(itertools.chain(self.parameters(), self.buffers())).device
        return torch.cat(
            [branch(frames[n].to(device).float()) for n, branch in self.branches.items()], dim=1
        )


def gaussian(out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation [b l] before tanh, of the actor's output."""
    mean, raw = out.chunk(2, dim=1)
    return mean, _LOG_STD[0] + (_LOG_STD[1] - _LOG_STD[0]) * (raw.tanh() + 1.0) / 2.0


class Actor(nn.Module, ActorPolicy):
    """An `ActorPolicy` whose latent action is the action, but where a subclass gives it another
    meaning.

    Actions are in half-ranges of the embodiment's bounds, [−1, 1], but where they are sent.
    ``config.noise`` is what a deterministic actor explores with. A subclass makes ``encoder`` and
    ``actor``, and frames (`annotate`).
    """

    policy_type: ClassVar[str]
    stream: ClassVar[int] = 0  # keeps the noise of one actor apart from that of a policy beneath
    config: Any
    chunk_length: int
    latent_dim: int
    encoder: nn.Module
    actor: nn.Module
    low: Tensor
    high: Tensor

    def __init__(self, embodiment: EmbodimentSpec) -> None:
        super().__init__()
        self.embodiment = embodiment
        self.register_buffer("low", torch.tensor(embodiment.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(embodiment.action_high), persistent=False)

    @property
    def reach(self) -> float:
        """The share of the latent range that a deterministic actor may use by itself."""
        return 1.0

    # ------------------------------------------------------------------------------------- learning
    def encode(self, frames: Mapping[str, Tensor]) -> Tensor:
        return self.encoder(frames)

    def actor_inputs(self, encoded: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        return encoded

    def propose(
        self, encoded: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Latent action [b l] in (−1, 1) and its log-prob [b] (0 of a deterministic actor); see
        `ActorPolicy`."""
        return self.meant(self.actor(self.actor_inputs(encoded, frames)), noise)

    def meant(self, out: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `propose` returns, of what the actor's network gave."""
        if not self.stochastic:
            latent = self.reach * out.tanh()
            if noise is not None:
                latent = (latent + self.config.noise * noise.to(latent)).clamp(-1.0, 1.0)
            return latent, latent.new_zeros(len(latent))
        mean, log_std = gaussian(out)
        if noise is None:
            return mean.tanh(), mean.new_zeros(len(mean))
        noise = noise.to(mean)
        before = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        # log(1 − tanh²)
        squashed = 2.0 * (math.log(2.0) - before - nn.functional.softplus(-2.0 * before))
        return before.tanh(), (density - squashed).sum(1)

    def realize(self, latent: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a latent action: the action itself."""
        return latent

    def taken(self, actions: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """What critics read of a stored decision: its actions [b h a] in half-ranges, flat."""
        return self.to_unit(actions).flatten(1)

    def weighted_loss(
        self,
        batch: Transitions,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        weights: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, dict[str, float]]:
        """See `vla_rl.interfaces.ActorPolicy`: −log-likelihood of what is imitated (a Gaussian's
        before tanh, up to what depends on the data alone), or a deterministic actor's squared
        error."""
        latent, counts = self.imitable(batch, frames)
        out = self.actor(self.actor_inputs(encoded, frames))
        if self.stochastic:
            mean, log_std = gaussian(out)
            before = latent.clamp(-_INSIDE, _INSIDE).atanh()
            error = 0.5 * ((before - mean) / log_std.exp()).square() + log_std
        else:
            error = (self.reach * out.tanh() - latent).square()
        return (weights * (error * counts).sum(1)).mean(), {}

    def imitable(self, batch: Transitions, frames: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The latent actions [b l] to imitate (`Transitions.labels`), and which of their numbers
        count (1 or 0) [b l]."""
        counts = batch.valid.to(self.low).repeat_interleave(len(self.low), 1)
        return self.taken(batch.labels, frames), counts

    # --------------------------------------------------------------------------------------- acting
    def latents(
        self,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        deterministic: bool,
        seeds: Sequence[int] | None,
    ) -> Tensor:
        """Latent actions [b l] for present frames and what `encode` makes of them; ``seeds`` as
        of `Policy.act`."""
        return self.propose(
            encoded, frames, None if deterministic else self.normals(len(encoded), seeds)
        )[0]

    def normals(self, rows: int, seeds: Sequence[int] | None) -> Tensor:
        """Standard normal [rows l], of ``seeds`` alone where there are any."""
        mine = [seed ^ self.stream for seed in row_seeds(seeds, rows)]
        return counter_normals(mine, self.latent_dim)

    def to_unit(self, actions: Tensor) -> Tensor:
        """Physical actions → half-ranges, [−1, 1]."""
        actions = actions.to(self.low)
        return 2.0 * (actions - self.low) / (self.high - self.low) - 1.0

    def to_chunk(self, unit: Tensor) -> ActionChunk:
        """Half-ranges [b h·a] → physical actions [b h a]."""
        unit = unit.view(len(unit), -1, len(self.low))
        actions = self.low + (self.high - self.low) * (unit.clamp(-1.0, 1.0) + 1.0) / 2.0
        return ActionChunk.whole(actions)

    def decided(self, latent: Tensor, unit: Tensor, replay: dict[str, Tensor]) -> PolicyOutput:
        """A decision whose log-prob nobody asks for: ``unit`` [b h·a] is sent."""
        return PolicyOutput(self.to_chunk(unit), latent.new_zeros(len(latent)), replay)


def _require_features(kind: type, base: Any) -> None:
    if "features" not in Policy.of(base).can:
        raise ConfigError(
            f"{kind.__name__} builds on what a policy sees, and {type(base).__name__} does not "
            "offer it (frame_features, `vla_rl.interfaces.Policy`): start from a "
            "nano_vla checkpoint"
        )


def _trunks(c: Any, embodiment: EmbodimentSpec) -> dict[str, nn.Module]:
    """Networks of what its cameras show, where those are read."""
    if c.eyes != PICTURES:
        return {}
    cameras = embodiment.cameras
    if not cameras:
        raise ConfigError(
            f"actor.eyes=pictures, and {embodiment.name} has no camera: set "
            "actor.eyes=features, or use a robot or env that shows pictures"
        )
    for key, value in {"shift": c.shift, "stride": c.stride}.items():
        if small := [camera for camera in cameras if value >= min(camera.height, camera.width)]:
            raise ConfigError(
                f"actor.{key}={value} is too much for the {small[0].height}x{small[0].width} "
                f"pixels of camera {small[0].name}: use a few, such as 4"
            )
    return {
        f"{_PICTURE}{i}": PictureTrunk(camera.height, camera.width, c.channels, c.stride, c.encoder)
        for i, camera in enumerate(cameras)
    }


class FrozenBaseActor(Actor):
    """An `ActorPolicy` on a frozen policy with features, which is saved with it."""

    config_class: ClassVar[type]
    base_key = "base_folder"
    stochastic: bool
    reads_pictures: bool
    shift: int
    stream = 0x2545F4914F6CDD1D

    def __init__(
        self,
        config: ActorConfig,
        base: Any,
        extra_inputs: int = 0,
        actor: nn.Module | None = None,
    ) -> None:
        """``actor``: what is trained (None: a small network). Raises ConfigError for a base that
        does not offer what it sees, or for pictures where there is no camera."""
        _require_features(type(self), base)
        super().__init__(base.embodiment)
        self.config = config
        self.stochastic = config.distribution == "gaussian"
        self.reads_pictures = config.eyes == PICTURES
        self.shift = self.config.shift if self.reads_pictures else 0
        self.base: Any = base.requires_grad_(False).eval()
        self._base_folder: Path | None = None
        sizes = {
            name: frame.shape[1]
            for name, frame in self.features(Observation.blank(base.embodiment)).items()
        }
        self._names = tuple(sizes)  # of the frames that are kept
        encoder = FrameEncoder(
            sizes, config.encoder, _trunks(config, base.embodiment), config.token
        )
        self.encoder, self.inputs = encoder, encoder.width + extra_inputs
        if actor is None:
            outputs = self.latent_dim * (1 + self.stochastic)
            # the first latent action is 0
            actor = network(self.inputs, config.hidden, outputs, from_zero=True)
        self.actor = actor

    def encoder_loss(self, frames: Mapping[str, Tensor]) -> Tensor | None:
        """See `vla_rl.interfaces.ActorPolicy`: of the token, where there is one."""
        if not self.config.token:
            return None
        branch: Any = self.encoder.get_submodule(f"branches.{VISUAL}")
        return branch.loss(frames[VISUAL].to(self.low).float())

    @classmethod
    def from_base(cls, config: Any, base: Any) -> Any:
        """An untrained actor on ``base``."""
        return cls(config, base).to(next(base.parameters()).device)

    def beneath(self) -> Any:
        return self.base

    def train(self, mode: bool = True) -> Any:
        """The frozen policy stays as it acts."""
        super().train(mode)
        self.base.eval()
        return self

    # --------------------------------------------------------------------------------------- seeing
    def features(self, observation: Observation) -> dict[str, Tensor]:
        """Frames that are kept {name: [b d]}: of the frozen policy, without what it makes of
        images where those are read."""
        if not self.reads_pictures:
            return self.base.frame_features(observation)
        return self.base.blind_features(observation)

    def pictures(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.ActorPolicy`."""
        names = self.embodiment.camera_names if self.reads_pictures else ()
        return {f"{_PICTURE}{i}": observation.images[name] for i, name in enumerate(names)}

    @torch.no_grad()
    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Frames [t + 1 …] of an episode: what acting left in its replay, and the rest worked
        out."""
        seen: dict[str, list[Tensor]] = {}
        known = all(name in trajectory.replay for name in self._names)
        parts = [] if known else list(_portions(trajectory.observations))
        for part in [*parts, trajectory.final_observation]:
            for name, frame in self.features(part).items():
                seen.setdefault(name, []).append(frame.cpu())
        if not parts:
            seen = {name: [trajectory.replay[name], *last] for name, last in seen.items()}
        return {name: torch.cat(frames) for name, frames in seen.items()}

    # ---------------------------------------------------------------------------------- checkpoints
    def refer_to(self, folder: Path) -> None:
        """See `vla_rl.interfaces.ActorPolicy`; a small policy is copied all the same, unless
        ``copy_base`` says no."""
        size = sum(x.nbytes for x in [*self.base.parameters(), *self.base.buffers()])
        copies = size <= _SMALL if self.config.copy_base is None else self.config.copy_base
        self._base_folder = None if copies else Path(folder)

    def base_folder(self) -> Path | None:
        """See `vla_rl.interfaces.Policy`."""
        return self._base_folder

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; without the frozen policy's where its own checkpoint has them."""
        state = super().state_dict(*args, **kwargs)
        if self._base_folder is None:
            return state
        return {name: value for name, value in state.items() if not name.startswith(_BASE)}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Inverse of `state_dict`."""
        return super().load_state_dict(
            state_dict, strict=strict and self._base_folder is None, assign=assign
        )

    def config_dict(self) -> dict[str, Any]:
        base = {"policy_type": self.base.policy_type, **self.base.config_dict()}
        return {"config": asdict(self.config), "base": base}

    def extra_files(self) -> dict[str, str]:
        return {f"{_BASE}{name}": text for name, text in self.base.extra_files().items()}

    @classmethod
    def from_config_dict(  # type: ignore[override]  # (of what is on top of another)
        cls,
        data: Mapping[str, Any],
        embodiment: EmbodimentSpec,
        files: Mapping[str, str],
        base: Any,
    ) -> Any:
        """``base``: the policy that ``data["base"]`` describes, built."""
        actor = cls(cls.config_class(**data["config"]), base)
        actor._base_folder = Path(data[cls.base_key]) if cls.base_key in data else None
        return actor


def network(
    inputs: int, hidden: Sequence[int], outputs: int, from_zero: bool = False
) -> nn.Sequential:
    """Linear layers with LayerNorm and SiLU between them; ``from_zero``: what comes out is 0 at
    first."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.SiLU()]
        inputs = width
    last = nn.Linear(inputs, outputs)
    if from_zero:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _portions(observation: Observation) -> Iterator[Observation]:
    for start in range(0, len(observation), _ROWS):
        yield observation[start : start + _ROWS]
