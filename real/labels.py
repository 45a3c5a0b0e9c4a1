"""Which episode a label means: that in which it was pressed, or in which the moment lies to
which its mark was moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LATE_S = 0.5  # a label that means a moment so soon after an episode's end still means it
AGE_S = 15.0  # how far back a mark may be moved


@dataclass(frozen=True)
class Span:
    """An episode's begin and end in seconds of the session's clock; an end of infinity: it runs."""

    episode: int
    begun: float
    ended: float = math.inf


def meant(at: float, spans: Sequence[Span]) -> Span | None:
    """The one of ``spans`` (in order) that a label ``at`` a moment means; None where it lies in
    none, nor just behind."""
    inside = [span for span in spans if span.begun <= at <= span.ended]
    late = [span for span in spans if span.ended < at <= span.ended + LATE_S]
    return next(reversed(inside or late), None)
