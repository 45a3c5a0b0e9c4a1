"""Initial states of training and of evaluation, disjoint by construction (numpy only).

Two independent means: `rng` seeds every (task, initial state, split) from a stable hash, so that
the splits draw from different streams; and a lattice over the workspace whose cells belong to one
split each, so that no placement made by `sample_xy` for training ever shares a cell with a held-out
one, however many are drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from vla_rl.errors import ConfigError

SPLITS = ("train", "held_out")
DEFAULT_CELL = 0.01  # metres

# fraction of a cell: placements keep off its border, so that float32 rounding cannot change the
# cell
_BORDER = 1e-3
_MAX_TRIES = 10_000


def check_split(split: str) -> str:
    """``split`` itself; raises `ConfigError` unless it is one of `SPLITS`."""
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} is unknown: use one of {', '.join(SPLITS)}.")
    return split


def stable_seed(*parts: str | int) -> int:
    """A seed in 0 … 2**63 − 1 that depends on ``parts`` alone: the same on every machine and in
    every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rng(task_id: str, init_state_id: int, split: str) -> np.random.Generator:
    """A fresh generator for one initial state; its stream is distinct per task, id and split."""
    seed = stable_seed("init_state", str(task_id), int(init_state_id), check_split(split))
    return np.random.Generator(np.random.PCG64(seed))


def cell_of(x: float, y: float, cell: float = DEFAULT_CELL) -> tuple[int, int]:
    """Integer lattice coordinates of the square cell (side ``cell``, same unit as x and y) that
    holds (x, y)."""
    return math.floor(x / cell), math.floor(y / cell)


def cell_is_held_out(x: float, y: float, cell: float = DEFAULT_CELL) -> bool:
    """Whether the lattice cell of (x, y) belongs to the held-out split.

    Every fifth cell of each row and column does, shifted by two per row: held-out cells are spread
    evenly, never touch along an edge, and each has training cells on all four sides.
    """
    i, j = cell_of(x, y, cell)
    return (i + 2 * j) % 5 == 0


def sample_xy(
    rng: np.random.Generator,
    low: Sequence[float],
    high: Sequence[float],
    split: str,
    cell: float = DEFAULT_CELL,
) -> np.ndarray:
    """A position float64 [2], uniform over those parts of the box ``low`` … ``high`` whose cells
    belong to ``split``.

    Raises `ConfigError` where the box holds no cell of the split (it should span at least five
    cells a side).
    """
    held_out = check_split(split) == "held_out"
    lowest, highest = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    for _ in range(_MAX_TRIES):
        x, y = rng.uniform(lowest, highest)
        inside = min(min(f, 1 - f) for f in ((x / cell) % 1.0, (y / cell) % 1.0)) > _BORDER
        if inside and cell_is_held_out(x, y, cell) == held_out:
            return np.array([x, y])
    raise ConfigError(
        f"No {split} placement found between {lowest.tolist()} and {highest.tolist()} on a lattice "
        f"with cells of {cell}: widen the region to at least five cells a side, or make the cells "
        "smaller."
    )
