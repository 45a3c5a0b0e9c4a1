"""The image path of OpenVLA checkpoints: from camera pixels to the towers' inputs.

jpeg_lanczos (openvla-oft `libero_utils.py`, `openvla_utils.py`): JPEG and back, because the
training images were stored so; Lanczos to the towers' size; the centre 90 % of the area, for models
trained with random crops. Upstream computes in TensorFlow, whose decoder takes libjpeg's fast
integer transform (`decode_image_op.cc`): here too, which Pillow cannot do.

bicubic: RLinf's own checkpoints, a resize of tensors and nothing else. pil_bicubic: RLinf's loader
of official checkpoints (``implement_version: official``), Pillow's resize, behind the crop where
their env makes one (RoboTwin's).
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.openvla.checkpoint import PREPROCESSOR, Source
from policies.openvla.config import OpenVLAConfig
from vla_rl.errors import EmbodimentMismatch, MissingPackage, UserError
from vla_rl.types import CameraSpec, EmbodimentSpec, Observation

JPEG_QUALITY = 95  # TensorFlow's default
CROP_AREA = 0.9


def jpeg_decoder() -> Callable[..., np.ndarray]:
    """simplejpeg's decoder. `MissingPackage` without it: the accurate transform of others
    differs by several levels."""
    try:
        import simplejpeg
    except ImportError:
        raise MissingPackage(
            "simplejpeg", "openvla", "the JPEG step of policy.image_path=jpeg_lanczos"
        ) from None
    return simplejpeg.decode_jpeg


def decode_jpeg(data: bytes) -> np.ndarray:
    """uint8 RGB [H W 3] of a JPEG file as TensorFlow decodes it: fast integer transform, smooth
    chroma upsampling."""
    return jpeg_decoder()(data, colorspace="RGB", fastdct=True, fastupsample=False)


def through_jpeg(images: Tensor) -> Tensor:
    """uint8 RGB images [n H W 3] encoded as JPEG (quality 95, 4:2:0) and decoded again, on the
    CPU."""
    from PIL import Image

    decoded = []
    for image in images.cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(
            buffer, format="JPEG", quality=JPEG_QUALITY, subsampling="4:2:0"
        )
        decoded.append(decode_jpeg(buffer.getvalue()))
    return torch.from_numpy(np.stack(decoded))


def lanczos3(x: np.ndarray) -> np.ndarray:
    """sinc(x) sinc(x / 3) inside (-3, 3), else 0."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


@functools.cache
def lanczos_matrix(size_in: int, size_out: int) -> Tensor:
    """Weights float32 [out in] of an antialiased Lanczos-3 resize along one axis (TensorFlow's
    ScaleAndTranslate).

    Output sample i sits at (i + ½)·in/out; the kernel widens by the scale when shrinking; rows sum
    to one.
    """
    scale = size_in / size_out
    centers = (np.arange(size_out) + 0.5) * scale
    distance = (np.arange(size_in)[None] + 0.5 - centers[:, None]) / max(scale, 1.0)
    weights = lanczos3(distance)
    return torch.tensor(weights / weights.sum(1, keepdims=True), dtype=torch.float32)


@functools.cache
def crop_matrix(size_in: int, size_out: int) -> Tensor:
    """Weights float32 [out in] that cut out the centre `CROP_AREA` along one axis and stretch it
    bilinearly.

    TensorFlow's crop_and_resize: samples run from one end of the box to the other, in units of in -
    1.
    """
    side = math.sqrt(CROP_AREA)
    at = ((1 - side) / 2 + side * np.arange(size_out) / (size_out - 1)) * (size_in - 1)
    return torch.tensor(
        np.clip(1 - np.abs(at[:, None] - np.arange(size_in)[None]), 0.0, None), dtype=torch.float32
    )


def apply_axes(images: Tensor, matrix_y: Tensor, matrix_x: Tensor) -> Tensor:
    """Resample float images [n 3 H W] by one matrix per axis, in their own precision whatever
    autocast says."""
    with torch.autocast(images.device.type, enabled=False):
        return matrix_y.to(images) @ images @ matrix_x.to(images).T


def resize_lanczos(images: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → uint8 [n 3 size size], rounded half to even."""
    out = apply_axes(
        images.float(), lanczos_matrix(images.shape[2], size), lanczos_matrix(images.shape[3], size)
    )
    return out.round_().clamp_(0, 255).to(torch.uint8)


def resize_bicubic(images: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → uint8 [n 3 size size], antialiased."""
    out = F.interpolate(
        images.float(), (size, size), mode="bicubic", antialias=True, align_corners=False
    )
    return out.round_().clamp_(0, 255).to(torch.uint8)


def resize_pillow(images: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → uint8 [n 3 size size] by Pillow on the CPU, in integers, rounded between
    the axes."""
    from PIL import Image

    rows = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    resized = [
        np.asarray(Image.fromarray(row).resize((size, size), Image.Resampling.BICUBIC))
        for row in rows
    ]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def center_crop(images: Tensor, size: int) -> Tensor:
    """The centre 90 % of the area of uint8 [n 3 H W], stretched to size. Floats in [0, 1] become
    floor(255.5 x)."""
    out = apply_axes(
        images.float() / 255, crop_matrix(images.shape[2], size), crop_matrix(images.shape[3], size)
    )
    return (out.clamp_(0.0, 1.0) * 255.5).floor_().clamp_(max=255).to(torch.uint8)


def prepare(
    images: Tensor,
    size: int,
    *,
    path: str,
    crop: bool,
    rotate: bool,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Camera images uint8 [n H W 3] → uint8 [n 3 size size] on ``device``, as the model's
    processor gets them."""
    images = images.flip(1, 2) if rotate else images
    if path == "jpeg_lanczos":
        images = through_jpeg(images)
    planes = images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    resize = {
        "jpeg_lanczos": resize_lanczos,
        "bicubic": resize_bicubic,
        "pil_bicubic": resize_pillow,
    }[path]
    # the env crops from the camera's size to the model's: nothing is left to resize
    if path == "pil_bicubic" and crop:
        return center_crop(planes, size)
    planes = (
        resize(planes, size).to(device) if planes.shape[2:] != (size, size) else planes.contiguous()
    )
    return center_crop(planes, size) if path == "jpeg_lanczos" and crop else planes


def normalization(
    preprocessor: Mapping[str, Any], towers: int, where: str
) -> list[tuple[Tensor, Tensor]]:
    """(mean, std) float32 [3 1 1] of each tower, as the checkpoint's ``preprocessor_config.json``
    (``where``) states them.

    ``tvf_normalize_params`` wins over ``means`` and ``stds``. The published values are rounded to
    bfloat16: reading them matters, as the textbook constants differ in the third digit.
    """
    strategy = preprocessor.get("image_resize_strategy") or "resize-naive"
    if strategy != "resize-naive" or preprocessor.get("tvf_do_letterbox"):
        raise UserError(
            f"{where} has image_resize_strategy {strategy!r} and tvf_do_letterbox "
            f"{preprocessor.get('tvf_do_letterbox')!r}; only 'resize-naive' without letterbox is "
            "supported, that of every published OpenVLA checkpoint"
        )
    given = preprocessor.get("tvf_normalize_params")
    if not given:
        means, stds = (preprocessor.get(key) or [] for key in ("means", "stds"))
        pairs = (
            zip(means, stds, strict=False)
            if isinstance(means, list) and isinstance(stds, list)
            else ()
        )
        given = [{"mean": m, "std": s} for m, s in pairs]
    if (
        not isinstance(given, list)
        or len(given) != towers
        or not all(isinstance(row, dict) for row in given)
    ):
        count = len(given) if isinstance(given, list) else "no"
        raise UserError(
            f"{where} gives normalisation constants (tvf_normalize_params) for {count} towers, the "
            f"model has {towers}: use the file that the checkpoint was published with"
        )
    return [(_constants(row, "mean", where), _constants(row, "std", where)) for row in given]


def _constants(row: Mapping[str, Any], key: str, where: str) -> Tensor:
    values = row.get(key)
    if (
        not isinstance(values, list)
        or not all(isinstance(v, int | float) and math.isfinite(v) for v in values)
        or len(values) != 3
        or (key == "std" and min(values) <= 0)
    ):
        raise UserError(
            f"{where} has the normalisation constants {key} {values!r}, it should be three "
            f"numbers{' above 0' if key == 'std' else ''}: use the file that the checkpoint was "
            "published with"
        )
    return torch.tensor(values, dtype=torch.float32).view(3, 1, 1)


class PictureInput(nn.Module):
    """The cameras that the policy reads, and the towers' constants (buffers, of no weight)."""

    def __init__(
        self,
        config: OpenVLAConfig,
        embodiment: EmbodimentSpec,
        cameras: Sequence[CameraSpec],
        source: Source,
        size: int,
        towers: int,
    ):
        super().__init__()
        self.config, self.cameras, self.size, self.towers = config, cameras, size, towers
        self.embodiment_name = embodiment.name
        constants = normalization(source.preprocessor, towers, source.beside(PREPROCESSOR))
        for i, (mean, std) in enumerate(constants):
            self.register_buffer(f"mean_{i}", mean, persistent=False)
            self.register_buffer(f"std_{i}", std, persistent=False)

    def pixels(self, observation: Observation) -> Tensor:
        """The cameras' images as the checkpoint's processor gets them: uint8 [b cameras 3 S S],
        on the policy's device."""
        prepared = []
        for camera in self.cameras:
            image = observation.images.get(camera.name)
            if (
                image is None
                or tuple(image.shape[1:]) != (camera.height, camera.width, 3)
                or image.dtype != torch.uint8
            ):
                got = {
                    name: (tuple(value.shape[1:]), str(value.dtype))
                    for name, value in observation.images.items()
                }
                raise EmbodimentMismatch(
                    f"the policy reads camera {camera.name} as uint8 "
                    f"{camera.height}x{camera.width}x3, but the observation has {got}: use an env "
                    f"with the cameras of embodiment {self.embodiment_name}, or set policy.cameras"
                )
            prepared.append(
                prepare(
                    image,
                    self.size,
                    path=self.config.chosen_image_path,
                    crop=self.config.center_crop,
                    rotate=self.config.rotate_images,
                    device=self.get_buffer("mean_0").device,
                )
            )
        return torch.stack(prepared, dim=1)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """What each tower reads of `pixels`: float32 [b·cameras 3 S S]."""
        flat = pixels.flatten(0, 1).float() / 255
        return [
            (flat - self.get_buffer(f"mean_{i}")) / self.get_buffer(f"std_{i}")
            for i in range(self.towers)
        ]
