"""Messages of the wire as bytes: msgpack with arrays, as openpi and vla-eval put them. Nothing is
ever unpickled.

An array is a mapping of its bytes, type and shape, under keys that are bytes (openpi) or text
(vla-eval, which packs pictures as PNG or JPEG besides). Only plain numbers are taken, of as many
bytes as their shape says.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np

from vla_rl.errors import UserError, first_line

_NUMBERS = re.compile(r"[<>|](b1|[iu][1248]|f[248])")  # numpy's names of plain types
_DIMENSIONS = 8  # an array has at most
_PIXELS = 4096  # a side of a picture has at most


class WireError(UserError):
    """A message of the other side that is none, or not of this protocol."""


def pack(value: Any) -> bytes:
    """Mappings, lists, text, numbers and arrays of plain numbers, as openpi packs them."""
    import msgpack

    return msgpack.packb(value, default=_of_openpi)


def pack_for_vla_eval(value: Any) -> bytes:
    """The same as vla-eval packs it."""
    import msgpack

    return msgpack.packb(value, default=_of_vla_eval)


def unpack(data: bytes) -> dict[str, Any]:
    """The mapping in a message of either. Raises `WireError`."""
    import msgpack

    try:
        value = msgpack.unpackb(data, object_hook=_array)
    except WireError:
        raise
    except Exception as error:  # (msgpack has many of its own, and says little)
        raise WireError(f"a message is no msgpack: {first_line(error)}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise WireError(
            f"a message holds a {type(value).__name__}, and a mapping of names is needed"
        )
    return value


def _of_openpi(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or not _NUMBERS.fullmatch(value.dtype.str):
        raise TypeError(f"{type(value).__name__} cannot be put on the wire")
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": list(value.shape),
    }


def _of_vla_eval(value: Any) -> Any:
    packed = _of_openpi(value)
    return {k.decode(): v for k, v in packed.items()} if isinstance(packed, dict) else packed


def _array(value: dict[Any, Any]) -> Any:
    """What a mapping stands for, where it stands for an array, a number of numpy's or a picture."""
    if b"__ndarray__" in value:
        return _numbers(value[b"data"], value[b"dtype"], value[b"shape"])
    if "__ndarray__" in value:
        return _numbers(value["data"], value["dtype"], value["shape"])
    if b"__npgeneric__" in value:
        return value[b"data"]
    if "__image__" in value:
        if value["format"] == "raw":
            return _numbers(value["data"], value["dtype"], value["shape"])
        return _picture(value["data"], str(value["format"]))
    return value


def _numbers(data: Any, kind: Any, shape: Any) -> np.ndarray:
    if isinstance(kind, bytes):
        kind = kind.decode("ascii", "replace")
    if not isinstance(kind, str) or not _NUMBERS.fullmatch(kind):
        raise WireError(
            f"an array is of type {kind!r}: send plain numbers, such as uint8 or float32"
        )
    sizes = list(shape) if isinstance(shape, list | tuple) else [-1]
    if len(sizes) > _DIMENSIONS or not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise WireError(f"an array has the shape {shape!r}")
    dtype, count = np.dtype(kind), math.prod(sizes)
    if not isinstance(data, bytes) or len(data) != count * dtype.itemsize:
        size = f"{len(data)} bytes" if isinstance(data, bytes) else "no bytes"
        raise WireError(f"an array of shape {sizes} and type {kind} has {size}")
    return np.frombuffer(data, dtype).reshape(sizes).copy()


def _picture(data: Any, form: str) -> np.ndarray:
    from PIL import Image

    if form not in ("png", "jpeg") or not isinstance(data, bytes):
        raise WireError(f"a picture is of form {form!r}: send raw, png or jpeg")
    try:
        with Image.open(io.BytesIO(data), formats=[form.upper()]) as image:
            if max(image.size) > _PIXELS:
                raise WireError(
                    f"a picture has {image.size[0]}x{image.size[1]} pixels, of at most {_PIXELS}"
                )
            return np.array(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise WireError(f"a picture is damaged: {first_line(error)}") from error
