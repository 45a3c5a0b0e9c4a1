"""Any camera that OpenCV opens, and video files. It tells no frame numbers: a picture that
differs has the next one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from real.cameras.protocol import CameraLost, Changes, Grabbed


class OpenCVCamera:
    """``source`` is an index (0 for /dev/video0), a device, a file or an address.
    ``stream_height``, ``stream_width`` and ``fps`` are asked for where they are not 0."""

    def __init__(
        self, source: int | str = 0, stream_height: int = 0, stream_width: int = 0, fps: int = 0
    ):
        self.source = int(source) if str(source).isdigit() else str(source)
        self._asked = (int(stream_height), int(stream_width), int(fps))
        self._device: Any = None
        self._changes = Changes()

    def open(self) -> None:
        import cv2

        self._device = cv2.VideoCapture(self.source)
        if not self._device.isOpened():
            raise CameraLost(f"OpenCV cannot open the camera {self.source!r}")
        names = (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FPS)
        for name, value in zip(names, self._asked):
            if value:
                self._device.set(name, value)

    def grab(self, timeout_s: float) -> Grabbed | None:
        """OpenCV waits as long as it likes: its process has a watchdog."""
        there, image = self._device.read()
        if not there:
            raise CameraLost(f"the camera {self.source!r} gives no more pictures")
        image = np.ascontiguousarray(image[..., ::-1])
        return Grabbed(image, self._changes.number(image), time.monotonic())

    def close(self) -> None:
        if self._device is not None:
            self._device.release()
