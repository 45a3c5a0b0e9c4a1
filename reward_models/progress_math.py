"""Progress curves from pairwise judgements, and labels to learn them from (VLAC, arXiv 2509.15937
and its code). Pure functions.

A critic value is a percentage of the way that was left: +20 says that a fifth of it was covered,
−15 that it grew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reward_models.settings import VALUE_MODES

STAGNATION = 0.01  # share of changed pixels below which a pair shows no progress (VLAC §3)
DONE_FROM, NOT_DONE_BEFORE = 0.95, 0.8  # shares of a successful clip


def accumulate(critics: Sequence[float], mode: str = "mixed") -> list[float]:
    """Values 0 … 100 from critic values, starting at 0 (one longer than ``critics``).

    A positive c covers c % of what is left: v + (100 − v)·c/100. A negative one: "always" uses the
    same formula (it may fall far below 0); "exact" undoes a positive step: 100 − max(100 − v,
    1)/(100 + c)·100; "mixed" does so above 50, not below 10, and shrinks v by |c| % below (VLAC's
    True, False and mix_f). c = −100 counts as −99.9 where it would divide by 0.
    """
    if mode not in VALUE_MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(VALUE_MODES)}")
    values = [0.0]
    for c in critics:
        v = values[-1]
        undone = 100.0 - max(100.0 - v, 1.0) / max(100.0 + c, 0.1) * 100.0
        if c > 0 or mode == "always":
            v += (100.0 - v) * c / 100.0
        elif mode == "exact":
            v = undone
        else:
            v = max(10.0, undone) if v > 50.0 else v + v * c / 100.0
        values.append(v)
    return values


def pair_label(i: int, j: int, last: int) -> float:
    """Progress from frame i to frame j of a successful clip whose last frame is ``last``: (j −
    i)/(last − i), in −1 … 1."""
    return max(-1.0, min(1.0, (j - i) / max(last - i, 1)))


def done_label(i: int, last: int) -> int | None:
    """1 at the end of a successful clip, 0 well before it, None in between."""
    share = i / max(last, 1)
    return 1 if share > DONE_FROM else 0 if share < NOT_DONE_BEFORE else None


def changed_share(a: Tensor, b: Tensor, threshold: int = 12) -> Tensor:
    """Share [n] of pixels that differ by more than ``threshold`` levels in some channel, of
    uint8 images [n H W 3]."""
    return ((a.short() - b.short()).abs().amax(-1) > threshold).float().flatten(1).mean(1)


def dead_zone(critics: Sequence[float], positive: float, negative: float) -> list[float]:
    """Critic values with those in [−``negative``, ``positive``] set to 0."""
    return [0.0 if -negative <= c <= positive else c for c in critics]


def reference_indices(length: int, count: int) -> list[int]:
    """Which frames of a reference trajectory are shown: int(k·(length − 1)/(count − 1)), the
    first always."""
    if length < 1 or count < 1:
        raise ValueError(
            f"a reference needs at least one frame, got length={length} and count={count}"
        )
    return [int(k * (length - 1) / (count - 1)) for k in range(count)] if count > 1 else [0]


def drop_filter(values: Tensor, window: int, threshold: float) -> Tensor:
    """Keep-mask bool [t] of decisions from values [t+1]: False where the value falls by more than
    ``threshold`` within the next ``window`` decisions (GR-RL: such stretches of a demonstration are
    mistakes, not skill)."""
    t = len(values) - 1
    keep = torch.ones(t, dtype=torch.bool)
    for i in range(t):
        keep[i] = bool(values[i] - values[i + 1 : i + 1 + window].min() <= threshold)
    return keep
