"""What chunks that overlap in time make of each other, in numpy: their mean (temporal ensembling),
or how far the next one is held to the one before (real-time chunking)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from real.rotations import from_vector, normalised, to_vector

SCHEDULES = ("exp", "linear")


@dataclass(frozen=True)
class Guide:
    """What a chunk is denoised towards: ``wanted`` [k a] the rows of the chunk before that are left
    from its first row on, ``weight`` [k] how much each counts; ``most`` is the limit of the
    guidance's factor."""

    wanted: np.ndarray
    weight: np.ndarray
    most: float


def soft_mask(rows: int, delay: int, schedule: str) -> np.ndarray:
    """W [``rows``] of real-time chunking (arXiv 2506.07339, eq. 5), of the rows that the chunk
    before has left.

    The first ``delay`` will have run before the inference ends, and weigh 1. Then c falls linearly,
    by 1/(rows − delay + 1) a row, to 0 behind the last: c itself ("linear"), or c·(e^c − 1)/(e − 1)
    ("exp", the paper's).
    """
    c = np.minimum((rows - np.arange(rows)) / (rows - min(delay, rows) + 1.0), 1.0)
    c[:delay] = 1.0
    return c if schedule == "linear" else c * np.expm1(c) / np.expm1(1.0)


def ensemble_weights(count: int, decay: float) -> np.ndarray:
    """exp(−decay · i) [``count``], the oldest prediction first, with the sum 1 (ACT, arXiv
    2304.13705, algorithm 2)."""
    weights = np.exp(-decay * np.arange(count))
    return weights / weights.sum()


def mean_action(actions: np.ndarray, weights: np.ndarray, turns: bool, grips: bool) -> np.ndarray:
    """The mean [a] of ``actions`` [n a] for one control step, with ``weights`` [n] of sum 1.

    Numbers 3 to 5 are rotation vectors where they are ``turns``: their mean is that of the
    rotations, as unit quaternions of one half of the sphere. The last is a gripper's command where
    it ``grips``, whose sign says where to go: half open and half closed is nothing that anybody
    predicted, so the greater weight wins (the oldest's sign where they are even).
    """
    mean = weights @ actions
    if turns:
        quaternions = np.stack([from_vector(vector) for vector in actions[:, 3:6]])
        same = np.where(quaternions @ quaternions[0] < 0.0, -1.0, 1.0)
        mean[3:6] = to_vector(normalised((weights * same) @ quaternions))
    if grips:
        command = actions[:, -1]
        vote = float(weights @ np.sign(command))
        won = np.sign(command) == (np.sign(vote) if abs(vote) > 1e-9 else np.sign(command[0]))
        mean[-1] = weights[won] @ command[won] / weights[won].sum()
    return mean
