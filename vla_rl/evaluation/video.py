"""Videos of episodes: a grid of small camera images, scaled up, framed by outcome, as H.264 that
browsers play."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.files import replacing_file

RUNNING, SUCCESS, FAILURE = (110, 116, 124), (38, 166, 91), (214, 69, 65)
_BACKGROUND, _TEXT = (24, 26, 30), (235, 237, 240)
_BORDER, _GAP, _CAPTION, _FONT = 8, 8, 30, 20


@dataclass(frozen=True)
class Clip:
    """One episode: ``frames`` uint8 [t H W 3] at ``hz`` frames a second, its outcome and what to
    write below it."""

    frames: np.ndarray
    hz: float
    success: bool
    caption: str


def have_video() -> bool:
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def upscale(image: np.ndarray, factor: int) -> np.ndarray:
    """Enlarge uint8 [H W 3] by a whole factor: smoothly where Pillow is installed, else pixel by
    pixel."""
    if factor == 1:
        return image
    try:
        from PIL import Image
    except ImportError:
        return image.repeat(factor, 0).repeat(factor, 1)
    size = (image.shape[1] * factor, image.shape[0] * factor)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def _caption(width: int, text: str) -> np.ndarray:
    """A strip [30 width 3] with the text; empty without Pillow."""
    strip = np.full((_CAPTION, width, 3), _BACKGROUND, np.uint8)
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return strip
    image = Image.fromarray(strip)
    draw, font = ImageDraw.Draw(image), _font(ImageFont)
    while text and draw.textlength(text, font=font) > width - 10:
        text = text[:-2].rstrip("…") + "…" if len(text) > 2 else ""
    draw.text((5, 3), text, fill=_TEXT, font=font)
    return np.asarray(image)


def _font(module: Any) -> Any:
    try:
        return module.load_default(_FONT)
    except (
        TypeError,
        OSError,
    ):  # an older Pillow, or one without FreeType, has one small font only
        return module.load_default()


def grid(
    clips: Sequence[Clip], *, columns: int = 0, cell: int = 250, hold_s: float = 1.5
) -> tuple[Iterator[np.ndarray], float]:
    """Frames uint8 [H W 3] (even sizes) of all clips side by side, and their rate in Hz.

    All clips start together; one that is over stands still in a green (success) or red (failure)
    frame until the last is over and ``hold_s`` seconds more. ``cell`` is the rough width (pixels)
    of one clip; the scale is a whole number.
    """
    if not clips:
        raise ValueError("a video needs at least one clip")
    hz = max(clip.hz for clip in clips)
    height, width = clips[0].frames.shape[1:3]
    factor = max(1, round(cell / width))
    columns = columns or min(len(clips), max(1, math.ceil(math.sqrt(len(clips) * 4 / 3))))
    rows = math.ceil(len(clips) / columns)
    tile_h, tile_w = height * factor + 2 * _BORDER + _CAPTION, width * factor + 2 * _BORDER
    total_h, total_w = rows * (tile_h + _GAP) + _GAP, columns * (tile_w + _GAP) + _GAP
    canvas = np.full((total_h + total_h % 2, total_w + total_w % 2, 3), _BACKGROUND, np.uint8)
    seconds = max(len(clip.frames) / clip.hz for clip in clips)

    def draw() -> Iterator[np.ndarray]:
        shown: list[tuple[int, bool] | None] = [None] * len(clips)
        captions = [_caption(tile_w, clip.caption) for clip in clips]
        for tick in range(round((seconds + hold_s) * hz)):
            for i, clip in enumerate(clips):
                at = int(tick / hz * clip.hz + 1e-9)
                last = len(clip.frames) - 1
                state = (min(at, last), at >= last)
                if state == shown[i]:
                    continue
                shown[i] = state
                top, left = (
                    (i // columns) * (tile_h + _GAP) + _GAP,
                    (i % columns) * (tile_w + _GAP) + _GAP,
                )
                tile = np.empty((tile_h, tile_w, 3), np.uint8)
                tile[: tile_h - _CAPTION] = (
                    (SUCCESS if clip.success else FAILURE) if state[1] else RUNNING
                )
                tile[_BORDER : tile_h - _CAPTION - _BORDER, _BORDER : tile_w - _BORDER] = upscale(
                    clip.frames[state[0]], factor
                )
                tile[tile_h - _CAPTION :] = captions[i]
                canvas[top : top + tile_h, left : left + tile_w] = tile
            yield canvas

    return draw(), hz


def write_mp4(path: str | Path, frames: Iterator[np.ndarray], hz: float, crf: int = 27) -> Path:
    """Write uint8 RGB frames (even height and width) as H.264 with the index first, so that
    browsers start at once."""
    import av

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = Fraction(hz).limit_denominator(1000)
    with (
        replacing_file(path) as part,
        av.open(str(part), "w", format="mp4", options={"movflags": "+faststart"}) as container,
    ):
        stream = container.add_stream(
            "libx264", rate=rate, options={"crf": str(crf), "preset": "medium"}
        )
        stream.pix_fmt = "yuv420p"
        for i, image in enumerate(frames):
            if i == 0:
                stream.height, stream.width = image.shape[:2]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
