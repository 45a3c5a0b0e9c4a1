"""A camera of the simulated SO-101 (``vla-rl robot so101 sim``): draws its table as it stands now."""

from __future__ import annotations

import time
from typing import Any

from real.cameras.protocol import CameraLost, Grabbed
from real.named import named
from vla_rl.errors import ConfigError

_VIEWS = ("front", "wrist")


class SimulatedCamera:
    """``folder`` is that of the simulated ports, ``view`` front or wrist, ``size`` pixels a side of
    what is drawn ``fps`` times a second."""

    def __init__(
        self,
        folder: str = "outputs/so101_sim",
        view: str = "front",
        size: int = 84,
        fps: float = 30.0,
    ):
        if view not in _VIEWS:
            raise ConfigError(f"the simulated SO-101 has no view {view!r}: use {', '.join(_VIEWS)}")
        if not 16 <= size <= 2048 or not 0.0 < fps <= 200.0:
            raise ConfigError(
                f"a simulated camera of size={size} and fps={fps}: give 16 to 2048 pixels, and a "
                "rate above 0 of at most 200"
            )
        self._folder, self._view, self._size, self._gap = folder, view, size, 1.0 / fps
        self._drawn: Any = None
        self._number, self._due, self._count = -1, 0.0, 0

    def open(self) -> None:
        if self._drawn is None:
            self._drawn = named("sim.so101.view:View")(self._folder, self._size)
        self._number = -1
        self._take()

    def _take(self) -> Any:
        try:
            return self._drawn.take([self._view])
        except OSError as error:
            raise CameraLost(
                f"no simulated SO-101 shows its table in {self._folder} ({error}): start it with "
                f"`vla-rl robot so101 sim {self._folder}`"
            ) from None

    def grab(self, timeout_s: float) -> Grabbed | None:
        """None while nothing moves there: its process is gone, or stands still."""
        time.sleep(min(timeout_s, max(0.0, self._due - time.monotonic())))
        self._due = time.monotonic() + self._gap
        number, stamp, pictures = self._take()
        if number == self._number:
            return None
        self._number, self._count = number, self._count + 1
        return Grabbed(pictures[self._view], self._count, stamp)

    def close(self) -> None:
        if self._drawn is not None:
            self._drawn.close()
            self._drawn = None
