"""A camera without a device: a picture with a moving bar, at its rate.
``cameras.NAME=benchmarks.robot.pattern:Pattern``."""

from __future__ import annotations

import time

import numpy as np

from real.cameras.protocol import Grabbed


class Pattern:
    """``height`` × ``width`` pixels, ``hz`` pictures a second."""

    def __init__(self, height: int = 480, width: int = 640, hz: float = 30.0):
        self.hz, self._number, self._due = hz, -1, 0.0
        across, down = np.meshgrid(
            np.arange(width) * 255 // width, np.arange(height) * 255 // height
        )
        self._ground = np.stack([across, down, 255 - across], axis=-1).astype(np.uint8)

    def open(self) -> None:
        self._due = time.monotonic()

    def grab(self, timeout_s: float) -> Grabbed | None:
        if (wait := self._due - time.monotonic()) > timeout_s:
            time.sleep(timeout_s)
            return None
        time.sleep(max(0.0, wait))
        self._due = max(self._due + 1.0 / self.hz, time.monotonic())
        self._number += 1
        image = self._ground.copy()
        image[:, self._number * 8 % image.shape[1]] = 255
        return Grabbed(image, self._number, time.monotonic())

    def close(self) -> None:
        pass
