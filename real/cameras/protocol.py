"""What a camera's process asks of a camera, and the picture that it makes of what the camera
gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class CameraLost(RuntimeError):
    """It is not there, or not any more: worth trying again."""


@dataclass(frozen=True)
class Grabbed:
    """``image`` uint8 [H W 3] RGB. ``device_no`` is the device's own number of it: a gap is a lost
    picture, the same one again a frozen stream. ``device_stamp`` (s) is on the device's clock,
    whatever that counts from. Where ``mixes`` is False (depth) the mean of two pixels means
    nothing."""

    image: np.ndarray
    device_no: int
    device_stamp: float
    mixes: bool = True


class Camera(Protocol):
    """Made from keywords, without touching the device."""

    def open(self) -> None:
        """Raises `CameraLost` where it is not there, `UserError` where it cannot be what is
        asked for."""
        ...

    def grab(self, timeout_s: float) -> Grabbed | None:
        """The next picture; None where none came. Raises `CameraLost`."""
        ...

    def close(self) -> None: ...


class Changes:
    """Numbers for a camera that gives none: the next one for each picture that differs from the one
    before. A sensor's noise makes two pictures differ, so the same one again is a frozen stream."""

    def __init__(self) -> None:
        self._number = -1
        self._before: np.ndarray | None = None

    def number(self, image: np.ndarray) -> int:
        if self._before is None or not np.array_equal(image, self._before):
            self._number, self._before = self._number + 1, image
        return self._number


def fitted(image: np.ndarray, height: int, width: int, mixes: bool = True) -> np.ndarray:
    """The middle of ``image`` [H W 3] that has this shape, brought to this size: areas are
    averaged, or where that ``mixes`` what it must not, a pixel of each is taken."""
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    share = min(h / height, w / width)
    rows, columns = round(share * height), round(share * width)
    top, left = (h - rows) // 2, (w - columns) // 2
    part = image[top : top + rows, left : left + columns]
    if part.shape[:2] == (height, width):
        return part
    import cv2

    return cv2.resize(
        part, (width, height), interpolation=cv2.INTER_AREA if mixes else cv2.INTER_NEAREST
    )
