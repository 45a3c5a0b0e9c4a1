"""Milestones of a manipulation episode: gripper changes and moments of rest (VLA-RL, arXiv
2505.18719 §3.3). numpy only.

The paper publishes no speed threshold and no detector; hysteresis, quantiles and windows in seconds
are this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_rl.bounds import Bounded, bound


@dataclass
class MilestoneConfig(Bounded, place="reward.milestones"):
    """``gripper`` and ``position``: proprio dimensions by number (empty: by their names where these
    are known).

    A gripper change is a crossing of two thresholds that lie ``hysteresis`` of the data's range
    inside its ends. A rest is the slowest frame of each stretch below the episode's
    ``speed_quantile``. ``window_s``: frames that long before a milestone lead to it. Milestones
    closer than ``merge_s`` are one. Times are in seconds.
    """

    gripper: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    hysteresis: float = bound(0.3, ge=0, lt=0.5)
    speed_quantile: float = bound(0.15, ge=0, le=1)
    window_s: float = bound(0.4, ge=0)
    merge_s: float = bound(0.5, ge=0)


def find_channels(names: Sequence[str]) -> tuple[list[int], list[int]]:
    """(gripper, position) dimensions of proprio ``names``: what mentions a gripper; names that
    are or end in x, y, z."""
    gripper = [i for i, n in enumerate(names) if "gripper" in n.lower()]
    position = [
        i
        for i, n in enumerate(names)
        if n.lower().rpartition("_")[2] in ("x", "y", "z")
        and not any(w in n.lower() for w in ("quat", "rot", "gripper"))
    ]
    return gripper[:1], position[:3]


def gripper_changes(openness: np.ndarray, low: float, high: float) -> list[int]:
    """Frames at which the gripper has changed state: it was below ``low`` and is now above
    ``high``, or the reverse."""
    state, changes = 0, []
    for i, value in enumerate(np.asarray(openness, np.float64)):
        new = 1 if value > high else -1 if value < low else state
        if state and new != state:
            changes.append(i)
        state = new or state
    return changes


def rests(position: np.ndarray, seconds_per_frame: float, quantile: float) -> list[int]:
    """The slowest frame of each stretch whose speed is at most the episode's quantile; position [t
    d] in metres.

    The stretches at the very start and end are left out: there an episode rests without having done
    anything.
    """
    if len(position) < 3:
        return []
    speed = np.linalg.norm(np.diff(position, axis=0), axis=1) / seconds_per_frame
    slow = speed <= np.quantile(speed, quantile)
    out, i = [], 0
    while i < len(slow):
        if slow[i]:
            j = i
            while j < len(slow) and slow[j]:
                j += 1
            if i > 0 and j < len(slow):
                out.append(i + int(speed[i:j].argmin()) + 1)
            i = j
        i += 1
    return out


def merge(frames: Sequence[int], distance: float) -> list[int]:
    """Sorted frames without those closer than ``distance`` to the one kept before."""
    kept: list[int] = []
    for f in sorted(set(frames)):
        if not kept or f - kept[-1] >= distance:
            kept.append(f)
    return kept


def milestones(
    openness: np.ndarray | None,
    position: np.ndarray | None,
    seconds_per_frame: float,
    config: MilestoneConfig,
    gripper_range: tuple[float, float] = (0.0, 1.0),
    success: bool = True,
) -> list[int]:
    """Milestone frames of one episode of t frames: gripper changes, rests, and the last frame of
    a success."""
    track = position if openness is None else openness
    if track is None:
        raise ValueError(
            "milestones are found by the gripper's openness or by the position, and "
            "neither is given"
        )
    length = len(track)
    found: list[int] = []
    low, high = gripper_range
    if openness is not None and high > low:
        margin = config.hysteresis * (high - low)
        found += gripper_changes(openness, low + margin, high - margin)
    if position is not None:
        found += rests(position, seconds_per_frame, config.speed_quantile)
    distance = config.merge_s / seconds_per_frame
    found = merge(found, distance)
    if success:
        found = [f for f in found if length - 1 - f >= distance] + [length - 1]
    return found


def leading_labels(milestone_frames: Sequence[int], length: int, window: float) -> np.ndarray:
    """bool [t]: frames that lead to a milestone, at most ``window`` frames before it, the
    milestone included."""
    labels = np.zeros(length, bool)
    for f in milestone_frames:
        labels[max(0, int(np.ceil(f - window))) : f + 1] = True
    return labels


def passed_share(milestone_frames: Sequence[int], length: int) -> np.ndarray:
    """float32 [t]: how far along the milestones each frame is, 0 at the first frame, 1 at the last
    milestone.

    Between two milestones it rises in proportion to time, so that the target says more than a
    staircase would.
    """
    points = [0, *[f for f in milestone_frames if f > 0]]
    levels = np.linspace(0.0, 1.0, len(points)) if len(points) > 1 else np.zeros(1)
    return np.interp(np.arange(length), points, levels).astype(np.float32)
