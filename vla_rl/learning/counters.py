"""What a phase has spent, over all its sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals of a phase over all its sessions."""

    iteration: int = 0
    episodes: int = 0
    control_steps: int = 0
    seconds: float = 0.0
