"""The image path of OpenVLA checkpoints: from camera pixels to the towers' inputs.

Official (openvla-oft `libero_utils.py`, `openvla_utils.py`): JPEG and back, because the training images were stored so;
Lanczos to the towers' size; the centre 90 % of the area, for models trained with random crops. RLinf resizes bicubically and
does nothing else. Upstream computes in TensorFlow; here are the same formulas. Pillow decodes JPEG with the accurate inverse
transform, so that pixels can differ a little from a decoder with the fast one.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.errors import UserError

JPEG_QUALITY = 95  # TensorFlow's default
CROP_AREA = 0.9


def through_jpeg(images: Tensor) -> Tensor:
    """uint8 RGB images [n H W 3] encoded as JPEG (quality 95, 4:2:0) and decoded again, on the CPU."""
    from PIL import Image

    decoded = []
    for image in images.cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
        decoded.append(np.asarray(Image.open(buffer)))
    return torch.from_numpy(np.stack(decoded))


def lanczos3(x: np.ndarray) -> np.ndarray:
    """sinc(x) sinc(x / 3) inside (-3, 3), else 0."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


@functools.cache
def lanczos_matrix(size_in: int, size_out: int) -> Tensor:
    """Weights float32 [out in] of an antialiased Lanczos-3 resize along one axis (TensorFlow's ScaleAndTranslate).

    Output sample i sits at (i + ½)·in/out; the kernel widens by the scale when shrinking; rows sum to one.
    """
    scale = size_in / size_out
    centers = (np.arange(size_out) + 0.5) * scale
    distance = (np.arange(size_in)[None] + 0.5 - centers[:, None]) / max(scale, 1.0)
    weights = lanczos3(distance)
    return torch.tensor(weights / weights.sum(1, keepdims=True), dtype=torch.float32)


@functools.cache
def crop_matrix(size: int, area: float = CROP_AREA) -> Tensor:
    """Weights float32 [size size] that cut out the centre ``area`` along one axis and stretch it back, bilinearly.

    TensorFlow's crop_and_resize: samples run from one end of the box to the other, in units of size - 1.
    """
    side = math.sqrt(area)
    at = ((1 - side) / 2 + side * np.arange(size) / (size - 1)) * (size - 1)
    return torch.tensor(np.clip(1 - np.abs(at[:, None] - np.arange(size)[None]), 0.0, None), dtype=torch.float32)


def apply_axes(images: Tensor, matrix_y: Tensor, matrix_x: Tensor) -> Tensor:
    """Resample float images [n 3 H W] by one matrix per axis, in their own precision whatever autocast says."""
    with torch.autocast(images.device.type, enabled=False):
        return matrix_y.to(images) @ images @ matrix_x.to(images).T


def resize_lanczos(images: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → uint8 [n 3 size size], rounded half to even."""
    out = apply_axes(images.float(), lanczos_matrix(images.shape[2], size), lanczos_matrix(images.shape[3], size))
    return out.round_().clamp_(0, 255).to(torch.uint8)


def resize_bicubic(images: Tensor, size: int) -> Tensor:
    """uint8 [n 3 H W] → uint8 [n 3 size size], antialiased."""
    out = F.interpolate(images.float(), (size, size), mode="bicubic", antialias=True, align_corners=False)
    return out.round_().clamp_(0, 255).to(torch.uint8)


def center_crop(images: Tensor) -> Tensor:
    """The centre 90 % of the area of uint8 [n 3 S S], stretched back; floats in [0, 1] become floor(255.5 x), saturating."""
    matrix = crop_matrix(images.shape[-1])
    out = apply_axes(images.float() / 255, matrix, matrix).clamp_(0.0, 1.0)
    return (out * 255.5).floor_().clamp_(max=255).to(torch.uint8)


def prepare(
    images: Tensor, size: int, *, jpeg_lanczos: bool, crop: bool, rotate: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """Camera images uint8 [n H W 3] → uint8 [n 3 size size] on ``device``, as the model's processor gets them."""
    images = images.flip(1, 2) if rotate else images
    if jpeg_lanczos:
        images = through_jpeg(images)
    planes = images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    if jpeg_lanczos:
        planes = resize_lanczos(planes, size) if planes.shape[2:] != (size, size) else planes.contiguous()
        return center_crop(planes) if crop else planes
    return resize_bicubic(planes, size) if planes.shape[2:] != (size, size) else planes.contiguous()


def normalization(preprocessor: Mapping[str, Any], towers: int) -> list[tuple[Tensor, Tensor]]:
    """(mean, std) float32 [3 1 1] of each tower, as the checkpoint's ``preprocessor_config.json`` states them.

    ``tvf_normalize_params`` wins over ``means`` and ``stds``. The published values are rounded to bfloat16: reading them
    matters, as the textbook constants differ in the third digit.
    """
    given = preprocessor.get("tvf_normalize_params")
    if not given and "means" in preprocessor and "stds" in preprocessor:
        given = [{"mean": m, "std": s} for m, s in zip(preprocessor["means"], preprocessor["stds"], strict=False)]
    if not given or len(given) != towers:
        raise UserError(
            f"the checkpoint's preprocessor_config.json gives normalisation constants for {len(given or [])} towers, the "
            f"model has {towers}: use the file that the checkpoint was published with"
        )
    return [(_constants(row["mean"]), _constants(row["std"])) for row in given]


def _constants(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(3, 1, 1)
