"""What policies that denoise action chunks and their students share: trunk, expert,
normalisation, noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policies.denoising.expert import ActionExpert, Cache
from policies.denoising.settings import DenoisingConfig
from policies.normalization import VectorStats
from policies.tokenizer import WordTokenizer
from policies.trunk.noise import counter_normals, counter_uniforms, row_seeds, share_noise
from policies.trunk.trunk import VisionLanguageTrunk
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation

# the seed of every row's first noise where a deterministic decision is asked for without seeds
_UNSEEDED = 0
_STEP_STREAM = 0x5DEECE66D  # keeps the draw of the step apart from the draws of its noise


def chunk_normals(
    seeds: Sequence[int], steps: int, h: int, a: int, correlation: float
) -> tuple[Tensor, Tensor]:
    """First noise [b h a] and step noise [b steps h a], standard normal.

    In the step noise, two control steps of one action dimension correlate by ``correlation``:
    exploration then moves a whole chunk one way (see `trunk.chunk_uniforms`). The first noise stays
    independent, as the policy was trained on it; each number by itself stays standard normal. The
    log-probs are those of each number alone, so a ratio must not join control steps
    (`correlated_axes`).
    """
    own, shared = (steps + 1) * h * a, steps * a if correlation else 0
    drawn = counter_normals(seeds, own + shared)
    noise = drawn[:, :own].view(-1, steps + 1, h, a)
    first, rest = noise[:, 0], noise[:, 1:]
    if correlation:
        rest = share_noise(rest, drawn[:, own:].view(-1, steps, 1, a), correlation)
    return first, rest


def drawn_steps(seeds: Sequence[int], first: int, end: int) -> Tensor:
    """A step int64 [b] of ``first`` … ``end`` − 1 for each seed."""
    uniform = torch.from_numpy(counter_uniforms([seed ^ _STEP_STREAM for seed in seeds], 1)[:, 0])
    return first + (uniform * (end - first)).long().clamp(max=end - first - 1)


class DenoisingBase(VisionLanguageTrunk, ABC):
    """Trunk, expert, normalisation: what the policies that denoise and their students share."""

    action_offset: Tensor
    action_scale: Tensor
    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        config: DenoisingConfig,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
    ):
        super().__init__(config, embodiment, action_stats, proprio_stats, tokenizer, positions=0)
        self.expert = self._new_expert()
        self._compiled: Any = None
        self._build_value_head()
        offset, scale = _action_scaling(embodiment, self.action_stats, config.action_range)
        self.register_buffer("action_offset", offset, persistent=False)
        self.register_buffer("action_scale", scale, persistent=False)
        for name, bound in (
            ("action_low", embodiment.action_low),
            ("action_high", embodiment.action_high),
        ):
            self.register_buffer(name, torch.tensor(bound, dtype=torch.float32), persistent=False)

    def _new_expert(self) -> ActionExpert:
        c = self.config
        head = c.llm_width // c.llm_heads
        return ActionExpert(
            self.embodiment.action_dim,
            c.chunk_length,
            c.expert_width,
            c.expert_mlp,
            c.expert_depth,
            c.llm_heads,
            head,
        )

    # ---------------------------------------------------------------------------------------- parts
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), *self.expert.layers]

    def run_expert(self, x: Tensor, modulation: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """`ActionExpert.forward`, compiled where ``config.compile`` asks for it."""
        if not self.config.compile:
            return self.expert(x, modulation, cache)
        self._compiled = self._compiled or torch.compile(self.expert.forward, dynamic=True)
        return self._compiled(x, modulation, cache)

    def encode(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> tuple[Cache, Tensor | None]:
        """The prefix cache, which the expert reads at every step, and the value [b] or None.

        ``replay`` may hold what the vision tower made of the images (see
        `VisionLanguageTrunk.image_tokens`).
        """
        inputs = self._inputs(observation, replay)
        with self._autocast():
            prefix = self._prefix(*inputs)
            hidden, present = self.trunk(
                prefix, causal=False, cache_only=not self.config.value_head
            )
        return [(k.float(), v.float()) for k, v in present], self._value(hidden)

    def value(self, observation: Observation) -> Tensor | None:
        """See `vla_rl.interfaces.Policy`: one prefix, and no denoising."""
        return self.encode(observation)[1] if self.config.value_head else None

    @torch.no_grad()
    def decode(
        self, observation: Observation, noise: Tensor, features: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """See `vla_rl.interfaces.Policy`: the deterministic chunk float32 [b h a] that
        starts from ``noise``."""
        kept = None if features is None else self._tokens_of(features)
        return self.denormalize(self._from_noise(observation, noise.to(self.device), kept))

    @abstractmethod
    def _from_noise(
        self, observation: Observation, noise: Tensor, replay: Mapping[str, Tensor] | None
    ) -> Tensor:
        """Normalised actions [b h a]."""

    def normalize(self, actions: Tensor) -> Tensor:
        return (actions - self.action_offset) / self.action_scale

    def denormalize(self, normalized: Tensor) -> Tensor:
        """Physical actions, clipped to the robot's bounds."""
        actions = normalized * self.action_scale + self.action_offset
        return torch.minimum(torch.maximum(actions, self.action_low), self.action_high)

    def _first_noise(self, seeds: Sequence[int] | None, b: int) -> Tensor:
        """Where a deterministic decision starts, [b h a]."""
        h, a = self.chunk_length, self.embodiment.action_dim
        if self.config.deterministic_start == "zero":
            return torch.zeros(b, h, a, device=self.device)
        seeds = row_seeds([_UNSEEDED] * b if seeds is None else seeds, b)
        return counter_normals(seeds, h * a).view(b, h, a).to(self.device)

    def _chunk(self, normalized: Tensor) -> ActionChunk:
        return ActionChunk.whole(self.denormalize(normalized))


def _action_scaling(
    embodiment: EmbodimentSpec, stats: VectorStats, action_range: str
) -> tuple[Tensor, Tensor]:
    """Offset and scale [a]: physical = normalised · scale + offset. Constant dimensions fall
    back on the bounds."""
    bounds = torch.tensor([embodiment.action_low, embodiment.action_high], dtype=torch.float32)
    offset, scale = bounds.mean(0), (bounds[1] - bounds[0]) / 2.0
    if action_range == "zscore":
        mean, std = torch.tensor(stats.mean), torch.tensor(stats.std)
    elif action_range == "quantile":
        mean, std = (
            (torch.tensor(stats.q01) + torch.tensor(stats.q99)) / 2,
            (torch.tensor(stats.q99) - torch.tensor(stats.q01)) / 2,
        )
    else:
        return offset, scale
    keep = std < 1e-6
    keep[list(embodiment.gripper_dims)] = True
    return torch.where(keep, offset, mean), torch.where(keep, scale, std)
