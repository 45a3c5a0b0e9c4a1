"""One step of a motion whose speed, acceleration and jerk are limited: `real.gate` takes it at every
tick, an arm's own interpolator (`real.robots.franka_path`) at every millisecond.

Vectors are [groups, width]: a group is bounded by its length (a hand's move, its turn, a joint).
Pure numpy, no clock.
"""

from __future__ import annotations

import numpy as np

_HUGE = 1e9
_BRAKING = 0.8  # of the acceleration, that a target lets an arm brake with


def shorten(vectors: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Rows of ``vectors`` [groups, width], none longer than ``most`` [groups or 1]."""
    length = np.sqrt(np.einsum("gw,gw->g", vectors, vectors))
    if (length <= most).all():
        return vectors
    return vectors * (np.minimum(length, most) / np.maximum(length, 1e-200))[:, None]


def towards(ahead: np.ndarray, acceleration: np.ndarray, seconds: float) -> np.ndarray:
    """The velocity that goes to what lies ``ahead``, in no less than ``seconds``, and can stop
    there."""
    length = np.linalg.norm(ahead, axis=1)
    fastest = np.minimum(np.sqrt(2.0 * _BRAKING * acceleration * length), length / seconds)
    return shorten(ahead * _HUGE, fastest)


def paced(
    goal: np.ndarray,
    velocity: np.ndarray,
    change: np.ndarray,
    most: tuple[np.ndarray, np.ndarray],
    dt: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The next velocity, and its change a second: towards the velocity ``goal`` as fast as ``most``
    (acceleration, jerk) allows without having to overshoot it: the acceleration may be at most what
    its own jerk can take back in time."""
    acceleration, jerk = most
    gap = goal - velocity
    size = np.linalg.norm(gap, axis=1)
    step = jerk * dt  # change of the acceleration
    landing = np.sqrt(2.0 * jerk * size + 0.25 * step**2) - 0.5 * step
    best = shorten(gap * _HUGE, np.minimum(np.minimum(acceleration, size / dt), landing))
    change = change + shorten(best - change, step)
    return velocity + change * dt, change
