"""Pictures for a page: a head of 24 bytes, then a JPEG.

Big-endian: "V", version 1, camera (place in the list of cameras), 0; picture number (u32); capture
(f64, seconds of the server's monotonic clock); height and width (u16); four bytes of nothing, so
that numbers are aligned.
"""

from __future__ import annotations

import struct

import numpy as np

from vla_rl.errors import MissingPackage

HEAD = struct.Struct(">cBBxIdHH4x")


def pack(camera: int, number: int, capture: float, picture: np.ndarray, quality: int) -> bytes:
    """``picture`` [height width 3] uint8 RGB, or [height width 1] or [height width]."""
    try:
        import simplejpeg
    except ModuleNotFoundError as error:  # pragma: no cover - the environment of the tests has it
        raise MissingPackage("simplejpeg", "real", "The operator console") from error
    height, width = picture.shape[:2]
    if picture.ndim == 2:
        picture = picture[:, :, None]
    colours, halved = ("RGB", "420") if picture.shape[2] == 3 else ("GRAY", "Gray")
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality, colours, halved)
    return HEAD.pack(b"V", 1, camera, number % 2**32, capture, height, width) + data
