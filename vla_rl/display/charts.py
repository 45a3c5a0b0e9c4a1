"""Small SVG charts as text, for pages that must carry everything themselves. Colours come from CSS
classes of the page.

Classes: ``line``, ``dot``, ``whisker``, ``bar``, ``part`` with ``s0`` … ``s5`` (series),
``before``/``after`` or ``ink``; ``grid``, ``axis``, ``tick``, ``name``, ``on-bar`` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One curve: x, y of equal length (None leaves a gap). ``style``: a CSS class.

    ``kind``: "line", "faint", "thick" or "dots". Per point: ``intervals`` are (low, high) whiskers,
    ``notes`` tooltips.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: str = "s0"
    kind: str = "line"
    intervals: Sequence[tuple[float, float] | None] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers that span low … high."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis needs finite ends, got {low} and {high}")
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 999.5e3:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 999.5:  # three significant digits would be written 2e+03
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share as "41 %", with a space that does not break."""
    return f"{value * 100:.0f}\u00a0%"


def running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the last ``window`` values that are there, at each position."""
    out: list[float | None] = []
    for i in range(len(values)):
        recent = [v for v in values[max(0, i + 1 - window) : i + 1] if v is not None]
        out.append(sum(recent) / len(recent) if recent else None)
    return out


def thin_out(
    x: Sequence[float], y: Sequence[float | None], limit: int = _MAX_POINTS
) -> tuple[list[float], list[float | None]]:
    """Long curves as means over equal stretches, so that a page stays small."""
    if len(x) <= limit:
        return list(x), list(y)
    xs, ys = [], []
    for i in range(limit):
        part = range(i * len(x) // limit, (i + 1) * len(x) // limit)
        there = [y[j] for j in part if y[j] is not None]
        xs.append(sum(x[j] for j in part) / len(part))
        ys.append(sum(there) / len(there) if there else None)  # type: ignore[arg-type]
    return xs, ys


def line_chart(
    series: Sequence[Series],
    *,
    width: int = 360,
    height: int = 190,
    y_format: Callable[[float], str] = short,
    y_range: tuple[float, float] | None = None,
    x_max: float | None = None,
    x_label: str = "",
    label: str = "",
) -> str:
    """An SVG with axes, a grid and the series; empty where nothing is finite. ``label`` is for
    screen readers.

    The x axis reaches to ``x_max`` at least: where a curve would have gone.
    """
    xs = [float(x) for s in series for x in s.x]
    ys = [float(v) for s in series for v in s.y if v is not None and math.isfinite(v)]
    ys += [float(v) for s in series for pair in s.intervals if pair for v in pair]
    if not xs or not ys:
        return ""
    ticks_y = nice_ticks(*(y_range or (min(ys), max(ys))))
    if y_range:
        ticks_y = [t for t in ticks_y if y_range[0] - 1e-9 <= t <= y_range[1] + 1e-9]
    low_x, high_x = min(xs), max(xs if x_max is None else [*xs, x_max])
    if high_x <= low_x:
        low_x, high_x = low_x - 1, high_x + 1
    ticks_x = [
        t
        for t in nice_ticks(low_x, high_x, max(2, width // 110))
        if low_x - 1e-9 <= t <= high_x + 1e-9
    ]
    names = [y_format(t) for t in ticks_y]
    left, right, top, bottom = 12 + 6.4 * max(len(n) for n in names), 12, 10, 34 if x_label else 22
    low_y, high_y = ticks_y[0], ticks_y[-1]
    if high_y <= low_y:  # values that differ by rounding alone leave one tick
        low_y, high_y = low_y - 1, high_y + 1

    def px(x: float) -> float:
        return left + (x - low_x) / (high_x - low_x) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - low_y) / (high_y - low_y) * (height - bottom - top)

    out = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">'
    ]
    for t, name in zip(ticks_y, names, strict=True):
        y = py(t)
        out.append(
            f'<line class="grid" x1="{left:.1f}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(
            f'<text class="tick" x="{left - 6:.1f}" y="{y + 3.5:.1f}" '
            f'text-anchor="end">{escape(name)}</text>'
        )
    for t in ticks_x:
        x, at = px(t), height - bottom + 14
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{at}" '
            f'text-anchor="middle">{escape(short(t))}</text>'
        )
    if x_label:
        middle = (left + width - right) / 2
        out.append(
            f'<text class="axis" x="{middle:.1f}" y="{height - 4}" '
            f'text-anchor="middle">{escape(x_label)}</text>'
        )
    for s in series:
        out += _draw(s, px, py, y_format)
    return "".join(out) + "</svg>"


def _draw(
    s: Series, px: Callable[[float], float], py: Callable[[float], float], y_format: Callable
) -> list[str]:
    out = []
    if s.kind != "dots":
        x, y = thin_out(s.x, s.y)
        pieces: list[list[str]] = [[]]
        for a, b in zip(x, y, strict=True):
            if b is None or not math.isfinite(b):
                pieces.append([])
            else:
                pieces[-1].append(f"{px(a):.1f},{py(b):.1f}")
        for piece in pieces:
            if len(piece) == 1:
                cx, cy = piece[0].split(",")
                out.append(f'<circle class="dot {s.style}" cx="{cx}" cy="{cy}" r="2"/>')
            elif piece:
                points = " ".join(piece)
                out.append(
                    f'<polyline class="line {s.kind} {s.style}" '
                    f'points="{points}"><title>{escape(s.label)}</title>'
                )
                out.append("</polyline>")
        return out
    for i, (a, b) in enumerate(zip(s.x, s.y, strict=True)):
        if b is None or not math.isfinite(b):
            continue
        pair = s.intervals[i] if i < len(s.intervals) else None
        note = s.notes[i] if i < len(s.notes) else f"{s.label}: {y_format(b)}"
        at = px(a)
        if pair:
            out.append(
                f'<line class="whisker {s.style}" x1="{at:.1f}" x2="{at:.1f}" '
                f'y1="{py(pair[0]):.1f}" y2="{py(pair[1]):.1f}"/>'
            )
        radius = 5 if s.intervals else 2.4
        out.append(
            f'<circle class="dot {s.style}" cx="{at:.1f}" cy="{py(b):.1f}" r="{radius}">'
            f"<title>{escape(note)}</title></circle>"
        )
    return out


@dataclass(frozen=True)
class Interval:
    """A row of `interval_chart`: a rate with its interval, all 0 … 1."""

    label: str
    rate: float
    low: float
    high: float
    style: str
    note: str = ""


def interval_chart(rows: Sequence[Interval], *, width: int = 760, row_height: int = 46) -> str:
    """Rates as bars from 0 with a whisker for the interval, on a 0 … 100 % axis."""
    if not rows:
        return ""
    left, right, top, bottom = 14 + 8.2 * max(len(r.label) for r in rows), 20, 4, 22
    # such a row's figure stands to the right of it all
    if any(r.high > 0.9 and r.low < 0.3 for r in rows):
        right = 56
    height = top + bottom + row_height * len(rows)

    def px(v: float) -> float:
        return left + v * (width - left - right)

    text = "; ".join(f"{r.label} {percent(r.rate)}" for r in rows)
    out = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(text)}">'
    ]
    for t in (0, 0.25, 0.5, 0.75, 1.0):
        out.append(
            f'<line class="grid" x1="{px(t):.1f}" x2="{px(t):.1f}" y1="{top}" '
            f'y2="{height - bottom}"/>'
        )
        out.append(
            f'<text class="tick" x="{px(t):.1f}" y="{height - 6}" '
            f'text-anchor="middle">{percent(t)}</text>'
        )
    for i, r in enumerate(rows):
        y = top + i * row_height + row_height / 2
        half = row_height * 0.3
        out.append(
            f'<text class="name" x="{left - 10:.1f}" y="{y + 5:.1f}" '
            f'text-anchor="end">{escape(r.label)}</text>'
        )
        out.append(
            f'<rect class="bar {r.style}" x="{px(0):.1f}" y="{y - half:.1f}" rx="3" '
            f'height="{2 * half:.1f}" '
            f'width="{max(1.5, px(r.rate) - px(0)):.1f}"><title>{escape(r.note or percent(r.rate))}</title></rect>'
        )
        out.append(
            f'<line class="whisker ink" x1="{px(r.low):.1f}" x2="{px(r.high):.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        inside = px(r.rate) - px(0) > 90 and px(r.low) - px(0) > 60
        at, style = (px(0) + 10, "on-bar") if inside else (px(r.high) + 10, "name")
        out.append(f'<text class="{style}" x="{at:.1f}" y="{y + 4.5:.1f}">{percent(r.rate)}</text>')
        for end in (r.low, r.high):
            out.append(
                f'<line class="whisker ink" x1="{px(end):.1f}" x2="{px(end):.1f}" y1="{y - 5:.1f}" '
                f'y2="{y + 5:.1f}"/>'
            )
    return "".join(out) + "</svg>"


def count_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], *, width: int = 760
) -> str:
    """Horizontal bars in groups: (label, [(CSS class, amount, tooltip), …]), each with its
    amount behind it."""
    most = max((amount for _, bars in rows for _, amount, _ in bars), default=0)
    if not rows:
        return ""
    left, right, bar, gap = 14 + 8.2 * max(len(label) for label, _ in rows), 44, 15, 12
    text = "; ".join(f"{label}: {', '.join(note for _, _, note in bars)}" for label, bars in rows)
    height = sum(bar * len(bars) + gap for _, bars in rows)
    out, y = (
        [
            f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(text)}">'
        ],
        gap / 2,
    )
    for label, bars in rows:
        middle = y + bar * len(bars) / 2
        out.append(
            f'<text class="name" x="{left - 10:.1f}" y="{middle + 4.5:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )
        for style, amount, note in bars:
            w = amount / most * (width - left - right) if most else 0.0
            out.append(
                f'<rect class="bar {style}" x="{left:.1f}" y="{y + 1:.1f}" '
                f'width="{max(1.5, w):.1f}" height="{bar - 2}" '
                f'rx="2"><title>{escape(note)}</title></rect>'
            )
            out.append(
                f'<text class="tick" x="{left + max(1.5, w) + 6:.1f}" '
                f'y="{y + bar - 4:.1f}">{short(amount)}</text>'
            )
            y += bar
        y += gap
    return "".join(out) + "</svg>"


def stacked_bar(
    parts: Sequence[tuple[str, float, str]], *, width: int = 760, height: int = 30
) -> str:
    """One horizontal bar split by (label, amount, tooltip); labels are drawn where they fit."""
    total = sum(amount for _, amount, _ in parts)
    if total <= 0:
        return ""
    text = ", ".join(f"{label} {amount / total:.0%}" for label, amount, _ in parts)
    out, x = (
        [
            f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(text)}">'
        ],
        0.0,
    )
    for i, (label, amount, note) in enumerate(parts):
        w = amount / total * width
        out.append(
            f'<rect class="part s{i % 6}" x="{x:.1f}" y="0" width="{max(0.5, w - 1.5):.1f}" '
            f'height="{height}" rx="3">'
        )
        out.append(f"<title>{escape(note)}</title></rect>")
        if w > 7.5 * len(label) + 10:
            out.append(
                f'<text class="on-bar" x="{x + w / 2:.1f}" y="{height / 2 + 4.5:.1f}" text-anchor="middle">'
                f"{escape(label)}</text>"
            )
        x += w
    return "".join(out) + "</svg>"


def episode_squares(states: Sequence[tuple[str, str]], *, columns: int = 50, size: int = 14) -> str:
    """A square per episode: (CSS class, tooltip)."""
    if not states:
        return ""
    columns = min(columns, len(states))
    rows = math.ceil(len(states) / columns)
    out = [
        f'<svg class="squares" viewBox="0 0 {columns * size} {rows * size}" role="img" '
        f'aria-label="one square per episode" style="max-width:{columns * size}px">'
    ]
    for i, (style, note) in enumerate(states):
        x, y = (i % columns) * size, (i // columns) * size
        out.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" '
            'rx="2.5">'
        )
        out.append(f"<title>{escape(note)}</title></rect>")
    return "".join(out) + "</svg>"
