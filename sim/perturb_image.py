"""Sensor noise for robustness evaluations: five corruptions of camera pictures, in numpy.

The kinds are those of LIBERO-Plus (motion blur, Gaussian blur, zoom blur, fog, glass blur), which
takes them from Hendrycks and Dietterich, "Benchmarking neural network robustness to common
corruptions and perturbations" (2019), with severities 1 to 10. Widths are meant for pictures of 256
pixels and scale with the picture, so that one severity hides as much at any size. A blur is two
small matrix products; glass is one gather.
"""

from __future__ import annotations

import functools

import numpy as np

KINDS = ("motion_blur", "gaussian_blur", "zoom_blur", "fog", "glass_blur")
SEVERITIES = 10
_MEANT_FOR = 256  # pixels
_ZOOM_STEPS = 12
_FOG_DECAY = 2.0  # of an octave's amplitude: smooth fog with some detail


def corrupt(image: np.ndarray, kind: str, severity: float, rng: np.random.Generator) -> np.ndarray:
    """``image`` uint8 [H W 3] with one of `KINDS` at ``severity`` 1 ... 10; what is random comes
    from ``rng``."""
    scale = max(image.shape[:2]) / _MEANT_FOR
    pixels = image.astype(np.float32) / 255.0
    if kind == "gaussian_blur":
        pixels = _gaussian(pixels, severity * scale)
    elif kind == "zoom_blur":
        pixels = _zoom(pixels, 1.0 + 0.055 * severity)
    elif kind == "motion_blur":
        radius = 5.0 + 30.0 * (severity - 1) / (SEVERITIES - 1)
        pixels = _motion(pixels, radius * scale, rng.uniform(-np.pi / 4, np.pi / 4))
    elif kind == "fog":
        pixels = _fog(pixels, 0.5 * severity, rng)
    elif kind == "glass_blur":
        pixels = _glass(pixels, severity, scale, rng)
    else:
        raise ValueError(f"image noise {kind!r} is unknown: use one of {', '.join(KINDS)}")
    return (np.clip(pixels, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


def _gaussian(pixels: np.ndarray, sigma: float) -> np.ndarray:
    return _apply(pixels, *(_blur_matrix(size, round(sigma, 6)) for size in pixels.shape[:2]))


def _apply(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Linear maps [H H] over the rows and [W W] over the columns of ``pixels`` [H W 3]."""
    height, width, channels = pixels.shape
    down = (rows @ pixels.reshape(height, -1)).reshape(height, width, channels)
    across = columns @ down.transpose(1, 0, 2).reshape(width, -1)
    return across.reshape(width, height, channels).transpose(1, 0, 2)


@functools.lru_cache(maxsize=64)
def _blur_matrix(size: int, sigma: float) -> np.ndarray:
    """Float32 [size size]: a Gaussian of ``sigma`` pixels whose weights within the picture sum
    to 1."""
    distance = np.arange(size)[:, None] - np.arange(size)[None, :]
    weights = np.exp(-0.5 * (distance / max(sigma, 1e-3)) ** 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _zoom(pixels: np.ndarray, largest: float) -> np.ndarray:
    """The mean of the picture and of enlargements of its middle up to ``largest`` times."""
    height, width = pixels.shape[:2]
    factors = [round(float(f), 6) for f in np.linspace(1.0, largest, _ZOOM_STEPS)]
    enlarged = (_apply(pixels, _zoom_matrix(height, f), _zoom_matrix(width, f)) for f in factors)
    return sum(enlarged, np.zeros_like(pixels)) / len(factors)


@functools.lru_cache(maxsize=256)
def _zoom_matrix(size: int, factor: float) -> np.ndarray:
    """Float32 [size size]: linear interpolation at the pixels of an enlargement about the
    middle."""
    middle = (size - 1) / 2
    at = middle + (np.arange(size) - middle) / factor
    return np.maximum(0.0, 1.0 - np.abs(at[:, None] - np.arange(size)[None, :])).astype(np.float32)


def _motion(pixels: np.ndarray, radius: float, angle: float) -> np.ndarray:
    """A one-sided trail of ``radius`` pixels in direction ``angle`` (rad), fading as a Gaussian
    of half that width."""
    height, width = pixels.shape[:2]
    steps = int(np.ceil(radius))
    padded = np.pad(pixels, ((steps, steps), (steps, steps), (0, 0)), mode="edge")
    total, result = np.float32(0.0), np.zeros_like(pixels)
    for k in range(steps + 1):
        weight = np.float32(np.exp(-0.5 * (k / max(radius / 2, 0.5)) ** 2))
        top, left = steps - round(k * np.sin(angle)), steps - round(k * np.cos(angle))
        result += weight * padded[top : top + height, left : left + width]
        total += weight
    return result / total


def _fog(pixels: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
    """Adds ``amount`` times a cloud in 0 ... 1 and keeps the picture's brightest value: haze
    hides contrast."""
    brightest = float(pixels.max())
    fogged = pixels + amount * _cloud(pixels.shape[:2], rng)[..., None]
    return fogged * brightest / (brightest + amount)


def _cloud(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Float32 [H W] in 0 ... 1: a sum of smooth random fields, each half as coarse and as strong
    as the one before."""
    total = np.zeros(shape, dtype=np.float32)
    cells, amplitude = 2, 1.0
    while cells < max(shape):
        grid = rng.random((cells + 1, cells + 1), dtype=np.float32)
        rows, columns = (_grid_matrix(size, cells) for size in shape)
        total += amplitude * (rows @ grid @ columns.T)
        cells, amplitude = cells * 2, amplitude / _FOG_DECAY
    low, high = float(total.min()), float(total.max())
    return (total - low) / max(high - low, 1e-6)


@functools.lru_cache(maxsize=64)
def _grid_matrix(size: int, cells: int) -> np.ndarray:
    """Float32 [size, cells + 1]: linear interpolation between the corners of ``cells`` cells."""
    at = np.linspace(0.0, cells, size)
    return np.maximum(0.0, 1.0 - np.abs(at[:, None] - np.arange(cells + 1)[None, :])).astype(
        np.float32
    )


def _glass(
    pixels: np.ndarray, severity: float, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """Each pixel shows one up to some pixels away, between two slight blurs."""
    sigma = (0.5 + 0.1 * severity) * scale
    reach = max(1, round((1.0 + 0.6 * severity) * scale))
    height, width = pixels.shape[:2]
    pixels = _gaussian(pixels, sigma)
    rows = np.arange(height)[:, None] + rng.integers(-reach, reach + 1, (height, width))
    columns = np.arange(width)[None, :] + rng.integers(-reach, reach + 1, (height, width))
    return _gaussian(pixels[np.clip(rows, 0, height - 1), np.clip(columns, 0, width - 1)], sigma)
