"""What is in a recording: robot, cameras, rate, tasks, episodes, ranges, first pictures.
``vla-rl data show``."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data import lerobot_reader
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY
from vla_rl.data.recording import Recording

SHOWN = 6  # episodes whose first picture is shown
_SIDE = 240  # pixels of a picture on the sheet, at most
_NUMBERS = ("min", "q01", "q99", "max")


def facts(recording: Recording) -> dict[str, Any]:
    """JSON-ready: {source, robot, margin (of bounds, where no file says them), cameras, hz,
    recorded_hz, frame, rotation, gripper, keys, tasks, episodes, rows, seconds, lengths, success,
    numbers}. ``numbers`` {state | action: [{name, unit, low, high (bounds), min, q01, q99, max}]}
    in the recording's units, ``lengths`` in rows, ``tasks`` {text: episodes}."""
    spec, rows = recording.embodiment, recording.rows
    lengths = np.array([e.length for e in rows.episodes])
    marks = Counter(
        "not said" if e.success is None else "succeeded" if e.success else "failed"
        for e in rows.episodes
    )
    numbers = {
        "state": _numbers(
            rows.vectors[STATE_KEY], spec.proprio_names, [""] * spec.proprio_dim, None
        ),
        "action": _numbers(
            rows.vectors[ACTION_KEY],
            spec.action_names,
            spec.action_units,
            (spec.action_low, spec.action_high),
        ),
    }
    return {
        "source": str(recording.path),
        "robot": spec.name,
        "margin": recording.margin,
        "cameras": [
            {
                "name": c.name,
                "width": c.width,
                "height": c.height,
                "key": recording.keys.cameras[c.name],
                "stored": recording.info["features"][recording.keys.cameras[c.name]]["dtype"],
            }
            for c in spec.cameras
        ],
        "hz": spec.control_hz,
        "recorded_hz": float(recording.info["fps"]),
        **{word: getattr(spec, word) for word in ("frame", "rotation", "gripper")},
        "keys": dict(recording.keys.vectors),
        "tasks": dict(Counter(e.instruction for e in rows.episodes)),
        "episodes": len(rows.episodes),
        "rows": int(lengths.sum()),
        "seconds": float(lengths.sum() / spec.control_hz),
        "lengths": {
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "longest": int(lengths.max()),
        },
        "success": dict(marks),
        "numbers": numbers,
        "findings": [finding.line() for finding in recording.report.findings],
    }


def _numbers(
    values: np.ndarray,
    names: Sequence[str],
    units: Sequence[str],
    bounds: tuple[Sequence[float], Sequence[float]] | None,
) -> list[dict[str, Any]]:
    values = values.astype(np.float64)
    rows = np.stack([values.min(0), *np.quantile(values, (0.01, 0.99), axis=0), values.max(0)])
    out = []
    for i, name in enumerate(names):
        row: dict[str, Any] = {"name": name, "unit": units[i]}
        row |= {"low": float(bounds[0][i]), "high": float(bounds[1][i])} if bounds else {}
        out.append(row | {word: float(rows[k, i]) for k, word in enumerate(_NUMBERS)})
    return out


def text(found: Mapping[str, Any]) -> str:
    """The facts as lines."""
    cameras = ", ".join(
        f"{c['name']} {c['width']}x{c['height']} ({c['key']}, {c['stored']})"
        for c in found["cameras"]
    )
    rate = f"{found['hz']:g} Hz"
    if found["hz"] != found["recorded_hz"]:
        rate += f", of {found['recorded_hz']:g} Hz recorded"
    lengths, success = (
        found["lengths"],
        ", ".join(f"{n} {word}" for word, n in found["success"].items()),
    )
    who = "said by a file"
    if found["margin"] is not None:
        who = (
            f"described by the dataset; bounds are its actions' own, {found['margin']:.0%} of "
            "their range wider on each side"
        )
    lines = [
        f"{found['source']}",
        f"  robot      {found['robot']} ({who})",
        f"             frame {found['frame']}; rotation {found['rotation']}; gripper "
        f"{found['gripper']}",
        f"  cameras    {cameras or 'none'}",
        f"  rate       {rate}",
        f"  episodes   {found['episodes']}, {found['rows']} rows, {found['seconds'] / 60:.1f} "
        f"minutes; {success}",
        f"  lengths    {lengths['shortest']} to {lengths['longest']} rows, median "
        f"{lengths['median']:g}",
        f"  tasks      {len(found['tasks'])}",
        *(
            f"             {n:>5}  {name[:100]}"
            for name, n in sorted(found["tasks"].items(), key=lambda t: -t[1])[:20]
        ),
    ]
    for kind, numbers in found["numbers"].items():
        width = max([len(n["name"]) for n in numbers] + [len(kind)])
        lines.append(
            f"  {kind:<{width}}  " + "".join(f"{word:>11}" for word in _NUMBERS) + "   bounds"
        )
        for n in numbers:
            cells = "".join(f"{n[word]:>11.4g}" for word in _NUMBERS)
            bounds = f"   {n['low']:.4g} … {n['high']:.4g} {n['unit']}" if "low" in n else ""
            lines.append(f"  {n['name']:<{width}}  {cells}{bounds}")
    if found["findings"]:
        lines.append(
            f"  'vla-rl data check' has {len(found['findings'])} things to say of it; the first: "
            f"{found['findings'][0]}"
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------- pictures
def first_pictures(recording: Recording, most: int = SHOWN) -> dict[str, list[np.ndarray]]:
    """{camera: first pictures uint8 [H W 3]} of episodes that lie evenly."""
    r = recording
    found = lerobot_reader.first_pictures(
        r.path, r.info, r.embodiment.cameras, r.keys.cameras, r.rows, most
    )
    return {name: list(frames) for name, frames in found.items()}


def sheet(shown: Mapping[str, Sequence[np.ndarray]]) -> bytes:
    """A PNG with a row of first pictures for each camera, under its name."""
    from PIL import Image, ImageDraw

    tiles = {
        name: [_smaller(Image.fromarray(frame)) for frame in frames]
        for name, frames in shown.items()
    }
    width = max([sum(t.width + 4 for t in row) for row in tiles.values()], default=4)
    height = sum(row[0].height + 20 for row in tiles.values())
    page = Image.new("RGB", (max(width, 120), max(height, 20)), "white")
    draw, top = ImageDraw.Draw(page), 0
    for name, row in tiles.items():
        draw.text((4, top + 3), name.encode("ascii", "replace").decode(), fill="black")
        left = 0
        for tile in row:
            page.paste(tile, (left, top + 18))
            left += tile.width + 4
        top += row[0].height + 20
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _smaller(image: Any) -> Any:
    image.thumbnail((_SIDE, _SIDE))
    return image


def page(found: Mapping[str, Any], shown: Mapping[str, Sequence[np.ndarray]]) -> str:
    """One HTML file with the facts and the pictures."""
    data = base64.b64encode(sheet(shown)).decode("ascii") if shown else ""
    picture = (
        f'<p><img alt="first pictures of each camera" src="data:image/png;base64,{data}"></p>'
        if data
        else ""
    )
    title = escape(Path(found["source"]).name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>body{{font:15px sans-serif;margin:2em}}pre{{overflow:auto}}img{{max-width:100%}}</style>"
        f"<h1>{title}</h1>{picture}<pre>{escape(text(found))}</pre></html>\n"
    )
