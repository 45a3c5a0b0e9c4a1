"""Names every gap and contradiction of a session's journals, in a line each."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from real.journal import OPEN, Episode, journals, read
from vla_rl.errors import UserError


def verify(session: str | Path) -> tuple[list[str], list[str]]:
    """(problems, one summary line per episode). Open journals are read, not closed."""
    problems, lines = [], []
    for path in journals(session):
        try:
            episode = read(path, pictures=False)
        except UserError as error:
            problems.append(str(error))
            continue
        found = check(episode)
        problems += [f"{path.name}: {text}" for text in found]
        steps, human = episode.steps, sum(t["is_human"] for t in episode.steps)
        frames = (
            ", ".join(f"{name} {len(rows)}" for name, rows in sorted(episode.frames.items()))
            or "no pictures"
        )
        labels = ", ".join(e["value"] for e in episode.events if e["name"] == "label") or "no label"
        lines.append(
            f"{path.name}: {len(episode.ticks)} ticks, {len(steps)} control steps ({human} by a "
            f"person), {frames}; {labels}"
        )
    return problems, lines


def check(episode: Episode) -> list[str]:
    """What is wrong with one episode."""
    found = []
    if episode.path.name.endswith(OPEN):
        found.append(
            "it was not closed: `vla-rl robot verify --recover` cuts it at its last good record"
        )
    if episode.damage:
        found.append(episode.damage)
    elif episode.lost_bytes:
        found.append(
            f"{episode.lost_bytes} bytes behind the last good record are damaged or cut off"
        )
    end = episode.end
    if end is not None:
        if end["recovered"]:
            found.append(
                f"recovered after a kill: its end is missing ({end['lost_bytes']} bytes cut)"
            )
        for name, count in (
            ("ticks", len(episode.ticks)),
            ("frames", sum(map(len, episode.frames.values()))),
        ):
            if end[name] != count:
                found.append(f"its end counts {end[name]} {name}, and {count} are there")
    found += _tick_gaps(episode.ticks) + _step_gaps(episode.ticks)
    for camera, rows in sorted(episode.frames.items()):
        found += _frame_gaps(camera, rows)
    found += _contradictions(episode.ticks)
    found += _unexplained(episode)
    return found


def _tick_gaps(ticks: list[dict[str, Any]]) -> list[str]:
    found = []
    for a, b in itertools.pairwise(ticks):
        missing = b["tick"] - a["tick"] - 1 - (b["overruns"] - a["overruns"])
        if b["tick"] <= a["tick"]:
            found.append(f"tick {b['tick']} comes after {a['tick']}")
        elif missing > 0:
            found.append(f"{missing} ticks between {a['tick']} and {b['tick']} were not recorded")
        if b["stamp"] < a["stamp"]:
            found.append(f"the clock went back at tick {b['tick']}")
    return found


def _step_gaps(ticks: list[dict[str, Any]]) -> list[str]:
    """Control steps are counted up, and end once; what is told of the arm keeps its length."""
    found = []
    followed = [t for t in ticks if t["step"] >= 0]
    for a, b in itertools.pairwise(followed):
        place = f"tick {b['tick']}: control step {b['step']}"
        if b["step"] < a["step"]:
            found.append(f"{place} comes after {a['step']}")
        elif b["step"] == a["step"] and a["step_done"]:
            found.append(f"{place} goes on after its end")
    for name in ("pose", "joints"):
        told = [t for t in ticks if t[name]]
        for a, b in itertools.pairwise(told):
            if len(a[name]) != len(b[name]):
                found.append(
                    f"tick {b['tick']}: {name} has {len(b[name])} numbers after {len(a[name])}"
                )
    return found


def _frame_gaps(camera: str, rows: list[tuple[Any, ...]]) -> list[str]:
    found = []
    for (n, device, capture, *_), (m, next_device, next_capture, *_) in itertools.pairwise(rows):
        if m != n + 1:
            found.append(
                f"{camera}: picture {m} follows {n}: {m - n - 1} were not recorded"
                if m > n
                else f"{camera}: {m} after {n}"
            )
        if next_device == device:
            found.append(f"{camera}: the device sent its picture {device} again (frozen?)")
        elif next_device != device + 1:
            found.append(f"{camera}: the device's pictures jump from {device} to {next_device}")
        if next_capture < capture:
            found.append(f"{camera}: picture {m} was taken before {n}")
    return found


def _contradictions(ticks: list[dict[str, Any]]) -> list[str]:
    found = []
    for t in ticks:
        place = f"tick {t['tick']}"
        if t["step_done"] and not t["sent"] and t["reference"]:
            found.append(f"{place}: a control step without what was sent")
        if t["sent"] and t["step"] < 0:
            found.append(f"{place}: something was sent outside of a control step")
        if t["is_human"] and t["policy"]:
            found.append(f"{place}: both a person and a policy were followed")
        if t["policy"] and t["mode"] != "AUTO":
            found.append(f"{place}: a policy's action in {t['mode']}")
        if t["is_human"] and t["mode"] != "HUMAN":
            found.append(f"{place}: a person's action in {t['mode']}")
    return found


def _unexplained(episode: Episode) -> list[str]:
    """Decisions that ran, and of which the record has not what was predicted; it had none of any
    before there were such."""
    told = {(c["epoch"], c["decision"]) for c in episode.chunks}
    ran = dict.fromkeys((t["epoch"], t["decision"]) for t in episode.ticks if t["policy"])
    missing = [key for key in ran if told and key not in told]
    return [
        f"decision {number} of epoch {epoch} ran, and what it predicted is not there"
        for epoch, number in missing
    ]
