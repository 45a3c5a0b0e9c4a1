"""Sampling noise that depends on a row's seed and a counter alone, whatever batch the row is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


def counter_uniforms(seeds: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers float32 [b count] in (0, 1) that depend on each row's seed and the index
    alone.

    SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) on a counter: no generator
    state, so a row draws the same noise whatever it is batched with.
    """
    keys = np.array([int(seed) & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = _mix64(keys)[:, None] + np.arange(1, count + 1, dtype=np.uint64)[None] * np.uint64(
            0x9E3779B97F4A7C15
        )
        # 23 bits: the midpoints below are exact in float32 and never 0 or 1
        bits = _mix64(x) >> np.uint64(41)
    return ((bits.astype(np.float64) + 0.5) * 2.0**-23).astype(np.float32)


def counter_normals(seeds: Sequence[int], count: int) -> Tensor:
    """Standard normal numbers float32 [b count] that depend on each row's seed and the index
    alone."""
    return torch.special.ndtri(torch.from_numpy(counter_uniforms(seeds, count)))


def share_noise(own: Tensor, shared: Tensor, correlation: float) -> Tensor:
    """Standard normal numbers of which any two correlate by ``correlation``, from independent
    ones and a common one."""
    return correlation**0.5 * shared + (1.0 - correlation) ** 0.5 * own


def chunk_uniforms(seeds: Sequence[int], h: int, a: int, correlation: float = 0.0) -> Tensor:
    """Sampling noise float32 [b h a], uniform in (0, 1), of which the control steps of a chunk
    share a part.

    The normal scores of two control steps of one action dimension correlate by ``correlation``:
    exploration then moves a whole chunk one way instead of averaging out over it, as coloured noise
    does (Hollenstein et al. 2024, arXiv 2312.11091). Each number by itself stays uniform: tokens
    drawn in parallel keep their own distributions, but their joint one is no longer the product of
    these. Of no use where a token is drawn given the ones before it.
    """
    if not correlation:
        return torch.from_numpy(counter_uniforms(seeds, h * a)).view(-1, h, a)
    scores = torch.special.ndtri(
        torch.from_numpy(counter_uniforms(seeds, (h + 1) * a)).double()
    ).view(-1, h + 1, a)
    mixed = share_noise(scores[:, :h], scores[:, h:], correlation)
    return torch.special.ndtr(mixed).float().clamp_(2.0**-24, 1.0 - 2.0**-24)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """In the block torch's generator starts from ``seed``, and is as it was behind it; None: it
    goes on as it stands."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def row_seeds(seeds: Sequence[int] | None, b: int) -> Sequence[int]:
    """``seeds``, or one for each of ``b`` rows from torch's global generator."""
    seeds = torch.randint(2**62, (b,)).tolist() if seeds is None else seeds
    if len(seeds) != b:
        raise ValueError(f"act got {len(seeds)} seeds for {b} observations")
    return seeds


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index int64 [...] sampled from ``log_probs`` [... bins] by inverting the CDF at
    ``uniforms`` [...]."""
    cdf = log_probs.exp().cumsum(-1)
    index = (cdf < uniforms[..., None] * cdf[..., -1:]).sum(-1)
    return index.clamp_(max=log_probs.shape[-1] - 1)


def choose(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """Index int64 [...] of the most likely entry, or sampled by ``uniforms`` [...]."""
    return log_probs.argmax(-1) if uniforms is None else sample_inverse_cdf(log_probs, uniforms)
