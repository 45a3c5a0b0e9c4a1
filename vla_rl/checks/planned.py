"""A run that is about to begin, as the checks before it see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vla_rl.assembly.folder import pending
from vla_rl.config import RunConfig


@dataclass(frozen=True)
class Planned:
    """``fresh``: what the run's folder holds will be moved away."""

    config: RunConfig
    fresh: bool = False

    @cached_property
    def open_phases(self) -> list[str]:
        """The phases still to run. Raises `UserError` for a folder with damaged records."""
        return pending(self.config, self.fresh)
