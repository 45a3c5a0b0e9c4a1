"""Video encoders: a clip of any length becomes one vector. `_VideoEncoder` is the interface;
`make_encoder` picks one.

"pooled" needs no weights and costs next to nothing on a CPU; "timm" averages the features of an
image model; "vjepa2" is the encoder of SRPO (arXiv 2511.15605), V-JEPA 2 through transformers;
"policy" averages the policy's own image features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reward_models.settings import EncoderConfig
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError, MissingDependency

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ImageFeatures = Callable[[Tensor], Tensor]  # uint8 [n H W 3] → float32 [n d]


class _VideoEncoder(Protocol):
    """Clips uint8 [t H W 3], each of its own length t >= 1, become float32 [b d] on the CPU."""

    def encode(self, clips: Sequence[Tensor]) -> Tensor: ...


def make_encoder(
    config: EncoderConfig, policy_features: ImageFeatures | None = None
) -> _VideoEncoder:
    """The encoder of ``config``; ``policy_features`` serves type "policy". Raises `ConfigError`
    where it is missing."""
    if config.type == "pooled":
        return PooledEncoder(config.grid, config.segments)
    if config.type == "timm":
        return SegmentEncoder(timm_features(config), config.segments, config.batch_size)
    if config.type == "vjepa2":
        return VJEPA2Encoder(config)
    if policy_features is None:
        raise ConfigError(
            "reward.encoder.type=policy uses the image features of the run's own policy, and none "
            "was given: use it inside a run with a policy that has image_features(), or choose "
            "another encoder"
        )
    return SegmentEncoder(policy_features, config.segments, config.batch_size)


def segment_means(values: Tensor, segments: int) -> Tensor:
    """Mean of values [t ...] over ``segments`` equal parts of time: [segments ...]; short clips
    repeat frames."""
    t = values.shape[0]
    edges = torch.linspace(0, t, segments + 1)
    parts = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist()):
        first = min(int(low), t - 1)
        parts.append(values[first : max(first + 1, int(high))].mean(0))
    return torch.stack(parts)


class PooledEncoder:
    """Mean colours on a coarse grid over segments of time and at the end: order and outcome,
    without any weights."""

    def __init__(self, grid: int = 8, segments: int = 4):
        self.grid, self.segments = grid, segments

    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        rows = []
        for clip in clips:
            pixels = clip.permute(0, 3, 1, 2).float() / 255.0
            small = F.adaptive_avg_pool2d(pixels, self.grid).flatten(1)
            rows.append(torch.cat([segment_means(small, self.segments), small[-1:]]).flatten())
        return torch.stack(rows)


class SegmentEncoder:
    """Image features of each frame, averaged over segments of time: float32 [b segments·d]."""

    def __init__(self, features: ImageFeatures, segments: int, batch_size: int):
        self.features, self.segments, self.batch_size = features, segments, batch_size

    @torch.inference_mode()
    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        frames = torch.cat(list(clips)).split(self.batch_size)
        features = torch.cat([self.features(part).float().cpu() for part in frames])
        parts = features.split([len(clip) for clip in clips])
        return torch.stack([segment_means(part, self.segments).flatten() for part in parts])


def normalized_pixels(frames: Tensor, size: int, device: torch.device) -> Tensor:
    """uint8 [n H W 3] → ImageNet-normalised float32 [n 3 size size] (bilinear, aspect not kept)."""
    pixels = resized(frames.to(device).permute(0, 3, 1, 2), size).float() / 255.0
    return (pixels - pixels.new_tensor(IMAGENET_MEAN)[:, None, None]) / pixels.new_tensor(
        IMAGENET_STD
    )[:, None, None]


def resized(frames: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → [n 3 size size], anti-aliased. torch has fast code for bytes on CPUs,
    and none on GPUs."""
    if frames.shape[-2:] == (size, size):
        return frames
    if frames.device.type == "cpu":
        return F.interpolate(frames, (size, size), mode="bilinear", antialias=True)
    return (
        F.interpolate(frames.float(), (size, size), mode="bilinear", antialias=True)
        .round()
        .clamp(0, 255)
    )


def timm_features(config: EncoderConfig) -> ImageFeatures:
    """Frozen features of a timm image model. Without ``checkpoint`` its weights are random
    (nothing is downloaded)."""
    model, _, size = timm_model(config.model, config.checkpoint)
    device = pick_device(config.device, "reward.encoder.device")
    model.to(device).eval().requires_grad_(False)
    return lambda frames: model(normalized_pixels(frames, size, device))


def timm_model(
    name: str, checkpoint: str, owner: str = "reward.encoder"
) -> tuple[nn.Module, int, int]:
    """A timm model without its classifier, how many features it gives, and the image size it
    reads (pixels)."""
    import timm

    try:
        # The weights' own path is opened by timm; `pretrained` stays off, so that nothing reaches
        # for a hub. Its type is that of any module, which says nothing of what all of timm's models
        # have.
        model: Any = timm.create_model(
            name, pretrained=False, num_classes=0, checkpoint_path=checkpoint or ""
        )
    except (RuntimeError, FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{owner}.model={name!r} with checkpoint={checkpoint!r} cannot be built ({error}). "
            "Give a name that timm knows and a state dict of that model."
        ) from error
    return (
        model,
        int(model.num_features),
        int(model.default_cfg.get("input_size", (3, 224, 224))[-1]),
    )


def clip_indices(length: int, count: int) -> list[int]:
    """Frames of a clip that V-JEPA 2 gets: ``int(linspace(0, length − 1, count))`` as siiRL samples
    its control steps; a clip shorter than ``count`` is stretched, each moment showing the nearest
    frame.

    Frames here are those of decisions, so nearly every clip is short. siiRL shows a short one over
    and over: how often, and where in the cycle the clip then ends, would depend on its length and
    hide what happened.
    """
    moments = torch.linspace(0, length - 1, count, dtype=torch.float64)
    return (moments if length >= count else moments.round()).int().tolist()


class VJEPA2Encoder:
    """V-JEPA 2 (arXiv 2506.09985): the mean of all encoder tokens of a clip, float32 [b hidden],
    not L2-normalised."""

    def __init__(self, config: EncoderConfig):
        try:
            from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2Model
        except ImportError:
            raise MissingDependency(
                "reward.encoder.type=vjepa2 needs a newer transformers: pip install "
                "'transformers>=4.53'"
            ) from None
        if not (Path(config.checkpoint) / "config.json").is_file():
            raise MissingDependency(
                f"reward.encoder.checkpoint={config.checkpoint!r} is no V-JEPA 2 folder (no "
                "config.json). Download one, such as facebook/vjepa2-vitg-fpc64-384, and give its "
                "path."
            )
        self.config, self.device = config, pick_device(config.device, "reward.encoder.device")
        model: Any = VJEPA2Model.from_pretrained(config.checkpoint)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.crop = int(self.model.config.crop_size)
        self.num_frames = config.num_frames or int(self.model.config.frames_per_clip)

    @torch.inference_mode()
    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        half = self.config.half_precision and self.device.type == "cuda"
        out = []
        for start in range(0, len(clips), self.config.batch_size):
            videos = torch.stack(
                [self.preprocess(c) for c in clips[start : start + self.config.batch_size]]
            )
            with torch.autocast(self.device.type, torch.float16, enabled=half):
                tokens = self.model(
                    pixel_values_videos=videos.to(self.device), skip_predictor=True
                ).last_hidden_state
            out.append(tokens.float().mean(1).cpu())
        return torch.cat(out)

    def preprocess(self, clip: Tensor) -> Tensor:
        """uint8 [t H W 3] → float32 [num_frames 3 crop crop], as published (short side ·
        256/224, centre crop)."""
        frames = clip[clip_indices(len(clip), self.num_frames)].permute(0, 3, 1, 2).float()
        height, width = frames.shape[-2:]
        short = int(self.crop * 256 / 224)
        size = (
            (short, round(short * width / height))
            if height <= width
            else (round(short * height / width), short)
        )
        frames = (
            F.interpolate(frames, size, mode="bilinear", antialias=True, align_corners=False).clamp(
                0, 255
            )
            / 255.0
        )
        top, left = (size[0] - self.crop) // 2, (size[1] - self.crop) // 2
        frames = frames[:, :, top : top + self.crop, left : left + self.crop]
        mean, std = (frames.new_tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
        return (frames - mean) / std
