"""Weights and inputs of π0 and π0.5 by formula, and what openpi's own model makes of them
(float32), for tests.

The numbers were computed with openpi's PyTorch model (commit 15a9616) on these weights, without any
file of its.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SIZES = {
    "width": 40,
    "mlp": 64,
    "depth": 2,
    "head_dim": 8,
    "expert_width": 24,
    "expert_mlp": 48,
    "vision_width": 24,
    "vision_mlp": 40,
    "vision_depth": 2,
    "vision_heads": 2,
    "vocabulary": 300,
}
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TABLE = "paligemma_with_expert.paligemma.lm_head.weight"
VISION_NORMS = ("layer_norm1.weight", "layer_norm2.weight", "post_layernorm.weight")
EXPECTED: dict[str, dict[str, Any]] = {
    "pi0": {
        "image": (1.150262, -0.228002, 0.475080, -0.238238),
        "word": (-0.382915, 1.640964, 0.954171, 1.991146),
        "suffix": (0.349629, 0.642144, 0.763360, 0.894944),
        "velocity": (-0.159879, 0.910381, -1.971642, -0.883874),
        "velocity_sum": 577.0134,
        "loss": 3.189255,
        "four": (-1.551677, -0.529411, 1.113567, 2.599556),
        "ten": (-1.647120, -0.588322, 1.133963, 2.505574),
        "ten_end": (0.635758, -0.669038, 2.134755, 0.892521),
        "ten_sums": (-209.4069, 758.1933),
    },
    "pi05": {
        "image": (-1.055413, 1.891370, 0.130920, -0.625404),
        "word": (-1.509028, 1.214748, 0.012122, -1.858488),
        "suffix": (0.242540, 0.088173, 0.299710, -0.808410),
        "velocity": (-0.624086, 0.952224, 2.797903, -2.258682),
        "velocity_sum": 717.3489,
        "loss": 4.013199,
        "four": (-0.321598, 0.039318, -1.481812, 2.890859),
        "ten": (-0.783636, 0.128646, -1.473920, 2.609599),
        "ten_end": (-0.560726, 1.238239, 2.586472, 1.092833),
        "ten_sums": (15.2224, 740.2504),
        "condition": (-0.242334, -0.213500, 0.536169, -0.041932),
    },
}


def fraction(count: int, key: int) -> np.ndarray:
    """``count`` numbers in [−0.5, 0.5), float64."""
    x = 43758.5453 * np.sin(np.arange(count) + 1.0 + 1000 * key)
    return x - np.floor(x) - 0.5


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """{name as openpi has it: tensor} for those of ``shapes`` that openpi's file has and uses."""
    out = {}
    for rank, name in enumerate(sorted(set(shapes) - {UNUSED, TIED})):
        shape = shapes[name]
        count = int(np.prod(shape))
        scale = 4.0 / np.sqrt(count / shape[0]) if len(shape) > 1 else 0.2
        values = scale * fraction(count, rank) + (1.0 if name.endswith(VISION_NORMS) else 0.0)
        out[name] = torch.tensor(values.reshape(shape), dtype=torch.float32)
    return out


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Two rows: ``state`` [2 32], ``actions`` and ``noise`` [2 10 32], ``time`` [2], ``tokens`` and
    ``mask``, and the pictures ``0`` and ``1`` [2 3 224 224] in [0, 1]; the third camera is
    absent."""
    shapes = {"state": (2, 32), "actions": (2, 10, 32), "noise": (2, 10, 32)}
    out = {
        name: torch.tensor(
            np.sqrt(12) * fraction(int(np.prod(shape)), 1001 + i).reshape(shape),
            dtype=torch.float32,
        )
        for i, (name, shape) in enumerate(shapes.items())
    }
    valid = (9, 5) if family == "pi0" else (17, 11)
    j, b = np.arange(max(valid))[None], np.arange(2)[:, None]
    mask = j < np.array(valid)[:, None]
    out["tokens"] = torch.tensor(np.where(mask, 3 + (7 * j + 5 * b) % 290, 0))
    out["mask"] = torch.tensor(mask)
    out["time"] = torch.tensor([0.7, 0.15])
    b, c, y, x = np.ogrid[:2, :3, :224, :224]
    for k in range(2):
        pixels = (37 * c + 3 * y + 5 * x + 11 * b + 101 * k) % 256
        out[str(k)] = torch.tensor(pixels / 255.0, dtype=torch.float32)
    return out
