"""Smaller copies of a scene's textures for the light look: LIBERO's own have up to 4096 pixels a
side."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path

LARGEST = 512  # pixels per side
_TEXTURE = re.compile(r'(<texture\b[^>]*?\bfile=")([^"]+)(")')


def smaller(xml: str) -> str:
    """The XML with every texture file of more than `LARGEST` pixels a side replaced by a smaller
    copy, made once and kept in ``~/.cache/vla_rl/libero/textures``. What cannot be read, or no copy
    written of, stays as it is."""
    return _TEXTURE.sub(lambda found: found[1] + _copy(found[2]) + found[3], xml)


@functools.cache
def _copy(file: str) -> str:
    from PIL import Image

    try:
        source = Path(file)
        status = source.stat()
        key = hashlib.sha256(
            f"{source.resolve()} {status.st_size} {status.st_mtime_ns} {LARGEST}".encode()
        ).hexdigest()[:24]
        target = Path("~/.cache/vla_rl/libero/textures").expanduser() / f"{key}.png"
        if target.is_file():
            return str(target)
        with Image.open(source) as picture:
            factor = max(picture.size) / LARGEST
            if factor <= 1.0:
                return file
            size = [max(1, round(side / factor)) for side in picture.size]
            small = picture.convert("RGB").resize((size[0], size[1]), Image.Resampling.BOX)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as out:
                small.save(out, "PNG")
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except (OSError, ValueError):  # no such file, or no picture: whoever compiles the scene says so
        return file
    return str(target)
