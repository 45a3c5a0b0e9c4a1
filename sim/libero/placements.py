"""What LIBERO's resets place after one seed, which all of them draw from numpy's global
generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Placements:
    """What LIBERO's resets after one seed left, in their order: fixtures (edits), joint positions
    [nq], where the constraint solver starts [nv] and what the controller remembers; with the state
    of numpy's generator and the number of draws of openings for the next reset."""

    wanted: tuple[int, Any]
    draws: int
    generator: Any
    of_resets: list[tuple[Mapping[str, Any], np.ndarray, np.ndarray, Any]] = field(
        default_factory=list
    )


def seeded(seed: int) -> Any:
    """The state of numpy's global generator, which LIBERO draws from, after ``seed``."""
    return np.random.RandomState(seed).get_state()


@contextmanager
def numpy_state(state: Any) -> Iterator[None]:
    """numpy's global generator in ``state``; afterwards as it was."""
    before = np.random.get_state()
    np.random.set_state(state)
    try:
        yield
    finally:
        np.random.set_state(before)
