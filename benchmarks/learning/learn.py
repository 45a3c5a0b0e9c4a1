"""`vla-rl bench learn`: how soon runs reached a success rate, or two settings side by side. (Methods
over seeds are a study: ``vla-rl study``.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import against as two_settings
from benchmarks.learning import runs


def measure(
    overrides: Sequence[str],
    against: str | None,
    level: float,
    figure: Path | None,
    iterations: int,
    rounds: int,
) -> dict[str, Any]:
    """Of `benchmarks.learning.against` with ``against``, else of `benchmarks.learning.runs`."""
    if against:
        changed = two_settings.split_overrides(against)
        return two_settings.measure(overrides, changed, iterations=iterations, rounds=rounds)
    return runs.measure([Path(word) for word in overrides], level=level, figure=figure)


def text(document: Mapping[str, Any]) -> str:
    return two_settings.text(document) if "sides" in document else runs.text(document)
