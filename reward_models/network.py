"""A small network over frames, shared by the reward models that are trained here, and the tables
it is trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models.encoders import normalized_pixels, resized, timm_model
from reward_models.frames import frames_of, instruction_of
from reward_models.settings import NetworkConfig
from vla_rl.errors import UserError
from vla_rl.splits import stable_seed
from vla_rl.types import Trajectory

TEXT_BUCKETS = 256
_SHIFT = 3  # pixels of random shift in training, of ``image_size`` pixels


@dataclass(frozen=True)
class FrameTable:
    """All frames of several trajectories in one: ``images`` {camera: uint8 [n H W 3]}, ``proprio``
    float32 [n p], ``text`` int64 [n] into ``texts``; trajectory i owns rows ``starts[i]`` …
    ``starts[i] + lengths[i] − 1`` (t + 1 of them)."""

    images: dict[str, Tensor]
    proprio: Tensor
    text: Tensor
    texts: tuple[str, ...]
    starts: Tensor
    lengths: Tensor
    success: Tensor  # bool, per trajectory
    tasks: tuple[str, ...]  # per trajectory

    def __len__(self) -> int:
        return len(self.proprio)

    @staticmethod
    def of(trajectories: Sequence[Trajectory], cameras: Sequence[str] = ()) -> FrameTable:
        """Raises `UserError` for no trajectories, or one that lacks a camera."""
        if not trajectories:
            raise UserError(
                "a learned reward needs at least one trajectory, got none: give data=FOLDER"
            )
        names = list(cameras) or sorted(trajectories[0].observations.images)
        lengths = torch.tensor([len(t) + 1 for t in trajectories])
        texts: dict[str, int] = {}
        text = torch.tensor([texts.setdefault(instruction_of(t), len(texts)) for t in trajectories])
        return FrameTable(
            images={
                c: torch.cat([frames_of(t, c, "reward.network.cameras") for t in trajectories])
                for c in names
            },
            proprio=torch.cat(
                [
                    torch.cat([t.observations.proprio, t.final_observation.proprio])
                    for t in trajectories
                ]
            ),
            text=text.repeat_interleave(lengths),
            texts=tuple(texts),
            starts=torch.cumsum(lengths, 0) - lengths,
            lengths=lengths,
            success=torch.tensor([t.success for t in trajectories]),
            tasks=tuple(t.episode.task_id for t in trajectories),
        )

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [n ...] per trajectory."""
        return list(values.split(self.lengths.tolist()))


def text_ids(text: str) -> list[int]:
    """Its words as buckets of a stable hash: any instruction can be read, none needs a
    vocabulary."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return [stable_seed("word", w) % TEXT_BUCKETS for w in words] or [0]


class FrameNetwork(nn.Module):
    """Features float32 [n width] of frames (their cameras, proprioception and instruction)."""

    tower: nn.Module
    frozen: nn.Module | None
    proprio_mean: Tensor
    proprio_scale: Tensor

    def __init__(self, config: NetworkConfig, cameras: Sequence[str], proprio_dim: int):
        super().__init__()
        self.config, self.cameras = config, list(cameras)
        self.generator: torch.Generator | None = None  # of the random shifts
        self.frozen = None
        if config.backbone == "conv":
            self.tower = nn.Sequential(
                nn.Conv2d(3, 16, 8, 4, 2),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
                nn.LazyLinear(config.width),
            )
            self.tower(torch.zeros(1, 3, config.image_size, config.image_size))
            inner = config.width
        else:
            self.frozen, inner, self.size = timm_model(
                config.backbone, config.backbone_checkpoint, "reward.network.backbone"
            )
            self.frozen.eval().requires_grad_(False)
            self.tower = nn.Linear(inner, config.width)
        self.text = nn.EmbeddingBag(TEXT_BUCKETS, config.width, mode="mean")
        nn.init.normal_(self.text.weight, std=0.1)
        proprio = proprio_dim if config.use_proprio else 0
        self.register_buffer("proprio_mean", torch.zeros(proprio_dim))
        self.register_buffer("proprio_scale", torch.ones(proprio_dim))
        self.mix = nn.Sequential(
            nn.Linear(
                config.width * (len(self.cameras) + int(config.use_text)) + proprio,
                2 * config.width,
            ),
            nn.LayerNorm(2 * config.width),
            nn.GELU(),
            nn.Linear(2 * config.width, config.width),
        )

    def train(self, mode: bool = True) -> FrameNetwork:
        super().train(mode)
        if self.frozen is not None:
            self.frozen.eval()
        return self

    def set_statistics(self, proprio: Tensor) -> None:
        self.proprio_mean.copy_(proprio.mean(0))
        self.proprio_scale.copy_(proprio.std(0, correction=0).clamp(min=1e-3))

    def pixels(self, frames: Tensor) -> Tensor:
        """uint8 [n H W 3] → what the tower reads; shifted at random in training."""
        device = self.proprio_mean.device
        if self.frozen is not None:
            with torch.no_grad():
                return self.frozen(normalized_pixels(frames, self.size, device))
        size = self.config.image_size
        pixels = resized(frames.to(device).permute(0, 3, 1, 2), size).float() / 127.5 - 1.0
        if self.training:
            top, left = torch.randint(0, 2 * _SHIFT + 1, (2,), generator=self.generator).tolist()
            padded = F.pad(pixels, (_SHIFT,) * 4, mode="replicate")
            pixels = padded[:, :, top : top + size, left : left + size]
        return pixels

    def forward(
        self, table: FrameTable, rows: Tensor, texts: Sequence[str] | None = None
    ) -> Tensor:
        """Features of the table's ``rows`` int64 [n]; ``texts`` [n] replaces their instructions."""
        device = self.proprio_mean.device
        parts = [self.tower(self.pixels(table.images[c][rows])) for c in self.cameras]
        if self.config.use_text:
            names = (
                texts if texts is not None else [table.texts[i] for i in table.text[rows].tolist()]
            )
            ids = [text_ids(name) for name in names]
            offsets = torch.tensor([0, *[len(i) for i in ids[:-1]]]).cumsum(0)
            parts.append(
                self.text(
                    torch.tensor([i for row in ids for i in row], device=device), offsets.to(device)
                )
            )
        if self.config.use_proprio:
            parts.append((table.proprio[rows].to(device) - self.proprio_mean) / self.proprio_scale)
        return self.mix(torch.cat(parts, -1))

    @torch.no_grad()
    def of_all(self, table: FrameTable) -> Tensor:
        """Features [n width] of all rows, in slices that bound the memory."""
        return torch.cat([self(table, rows) for rows in torch.arange(len(table)).split(512)])


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
