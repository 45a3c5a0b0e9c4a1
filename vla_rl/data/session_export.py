"""A robot session's journals as a LeRobotDataset v3, through the writer of demonstrations.

One row per control step: what was seen when it began, and as ``action`` what was *sent*. The
policy's and the person's action, who was followed, the gate's mask and the stamps are further
columns, and whether a step began after the moment that the episode's label means: nothing is lost
but the ticks in between.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.data.lerobot_format import BY_PERSON, CONTROL, DatasetError
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.files import read_json
from vla_rl.storage import replacing, to_json, write_text
from vla_rl.types import EmbodimentSpec

_FLAGS = (BY_PERSON, "gate", "decision", "index", "epoch", "tick")
SESSIONS = "sessions"  # the file in meta/ that says what a dataset was made of
_EARLIER_S = 0.5  # how much older than its control step a picture may be


@dataclass(frozen=True)
class Exported:
    """``left_out`` says why episodes are not in the dataset, ``doubtful`` what `real.verify.check`
    finds in those that are, a line each."""

    path: Path
    episodes: int
    steps: int
    left_out: tuple[str, ...]
    doubtful: tuple[str, ...] = ()


def export_sessions(
    sessions: Sequence[str | Path],
    target: str | Path,
    *,
    video: bool = False,
    discarded: bool = False,
) -> Exported:
    """Write the episodes of ``sessions`` of one robot, in order, into a new folder. Those that were
    discarded stay out unless asked for. ``meta/sessions.json`` says what it was made of.

    Raises `DatasetError` where no episode can be exported, ``target`` exists, or a session is of
    another robot.
    """
    read, find = (build.attribute(f"real.journal:{name}") for name in ("read", "journals"))
    paths = [path for session in _once(sessions) for path in find(session)]
    left_out: list[str] = []
    doubtful: list[str] = []
    writer: DemonstrationWriter | None = None
    shown: EmbodimentSpec | None = None
    steps = 0
    try:
        for path in paths:
            episode = read(path)
            rows, why = control_rows(episode, discarded)
            if why:
                left_out.append(f"{path.name}: {why}" if len(sessions) == 1 else f"{path}: {why}")
                continue
            spec: EmbodimentSpec = episode.embodiment
            own = _shown(spec, episode)
            if writer is None or shown is None:
                shown = own
                writer = DemonstrationWriter(target, shown, video=video, extra=_columns(spec))
            elif unlike := shown.differences(own):
                raise DatasetError(
                    f"{path} does not go with the episodes before it ({unlike[0]}): export it apart"
                )
            writer.add_episode(**_episode(episode, rows, spec))
            steps += len(rows)
            if found := build.attribute("real.verify:check")(episode):
                doubtful.append(f"{path}: {found[0]}" + f" (one of {len(found)})")
        if writer is None:
            said = "; ".join(left_out) or "it is empty"
            raise DatasetError(f"{', '.join(map(str, sessions))} has no episode to export: {said}")
        made_of = {
            "sessions": [str(Path(s).resolve()) for s in sessions],
            "video": video,
            "discarded": discarded,
        }
        made = writer.close()
        write_text(made / "meta" / f"{SESSIONS}.json", to_json(made_of))
        return Exported(made, len(writer), steps, tuple(left_out), tuple(doubtful))
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


def append_sessions(sessions: Sequence[str | Path], target: str | Path) -> Exported:
    """Add sittings to a dataset that was exported: it is made anew from the journals of all, with
    labels as they are by now, and takes the old one's place as a whole.

    Raises `DatasetError` for a dataset of another origin, or whose sessions are gone; it is then as
    it was.
    """
    target = Path(target)
    again = "export all of its sessions into a new folder"
    made_of = read_json(target / "meta" / f"{SESSIONS}.json", again, DatasetError)
    before = made_of.get("sessions")
    if (
        not isinstance(before, list)
        or not before
        or not all(isinstance(name, str) for name in before)
    ):
        raise DatasetError(f"{target / 'meta' / SESSIONS}.json names no sessions: {again}")
    options = {name: made_of.get(name) is True for name in ("video", "discarded")}
    if gone := [name for name in before if not Path(name).is_dir()]:
        raise DatasetError(
            f"{target} was made of {gone[0]}, which is not there any more: restore it, or {again}"
        )
    new = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        done = export_sessions([*before, *sessions], new, **options)
        with replacing(target, keep_last_good=False) as part:
            part.rmdir()
            new.rename(part)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return dataclasses.replace(done, path=target)


def _once(sessions: Sequence[str | Path]) -> list[Path]:
    """Raises `DatasetError` for a session that is named twice."""
    places = [Path(session).resolve() for session in sessions]
    if twice := [str(given) for given, place in zip(sessions, places) if places.count(place) > 1]:
        raise DatasetError(
            f"{twice[-1]} is in the dataset already, or is named twice: name each session once"
        )
    return [Path(session) for session in sessions]


def _columns(spec: EmbodimentSpec) -> dict[str, tuple[str, ...]]:
    actions = {f"{who}_action": spec.action_names for who in ("policy", "human")}
    return {**actions, CONTROL: (*_FLAGS, "after_label"), "stamps": ("measured", "sent")}


def control_rows(episode: Any, discarded: bool) -> tuple[list[tuple[dict, dict]], str]:
    """(the tick in which a control step began, the one in which it ended) of each; or why the
    episode stays out."""
    if episode.end is not None and episode.end["discarded"] and not discarded:
        return [], "discarded by the operator"
    if episode.damage or episode.embodiment is None:
        return [], episode.damage or "its header names no robot"
    rows, begun = [], None
    for tick in episode.ticks:
        if tick["step"] < 0:
            continue
        if begun is None or begun["step"] != tick["step"]:
            begun = tick
        if tick["step_done"] and tick["sent"]:
            rows.append((begun, tick))
    if not rows:
        return [], "no control step"
    if any(not begun["proprio"] for begun, _ in rows):
        return [], "control steps without a state that was measured"
    for camera in episode.embodiment.camera_names:
        shown = episode.frames.get(camera, [])
        if not shown or shown[0][2] > rows[0][0]["stamp"] + _EARLIER_S:
            return [], f"no picture of {camera} at its start"
        if any(row[4] != shown[0][4] for row in shown):
            return [], f"pictures of {camera} of several sizes"
    return rows, ""


def until_mark(episode: Any, rows: list[tuple[dict, dict]]) -> int:
    """How many of `control_rows` had begun at the moment that the verdict means; all without a
    verdict, at least one."""
    if episode.verdict is None:
        return len(rows)
    return max(1, sum(begun["stamp"] <= episode.verdict["at"] for begun, _ in rows))


def _shown(spec: EmbodimentSpec, episode: Any) -> EmbodimentSpec:
    """The embodiment with the cameras' recorded sizes."""
    sizes = {name: episode.frames[name][0][4] for name in spec.camera_names}
    cameras = tuple(
        dataclasses.replace(c, height=sizes[c.name][0], width=sizes[c.name][1])
        for c in spec.cameras
    )
    return dataclasses.replace(spec, cameras=cameras)


def _episode(episode: Any, rows: list[tuple[dict, dict]], spec: EmbodimentSpec) -> dict[str, Any]:
    def vectors(name: str) -> np.ndarray:
        """[T a], zeros where there was none."""
        return np.array([end[name] or [0.0] * spec.action_dim for _, end in rows], np.float32)

    marked = until_mark(episode, rows)
    flags = [
        [*(float(end[name]) for name in _FLAGS), float(i >= marked)]
        for i, (_, end) in enumerate(rows)
    ]
    start = episode.ticks[0]["stamp"]
    task = build.attribute("real.tasks:parse")(str(episode.header.get("task") or "teleoperated"))
    stamps = [[begun["stamp"] - start, end["stamp"] - start] for begun, end in rows]
    images = {}
    for camera in spec.camera_names:
        shown = episode.frames[camera]
        taken = np.array([row[2] for row in shown])
        chosen = np.maximum(
            np.searchsorted(taken, [begun["stamp"] for begun, _ in rows], side="right") - 1, 0
        )
        images[camera] = np.stack([episode.picture(camera, int(i)) for i in chosen])
    return {
        "images": images,
        "proprio": np.array([begun["proprio"] for begun, _ in rows], np.float32),
        "actions": vectors("sent"),
        "instruction": task.instruction,
        "success": episode.succeeded,
        "task_id": task.name,
        "init_state_id": int(episode.header["episode"]),
        "extra": {
            "policy_action": vectors("policy"),
            "human_action": vectors("human"),
            CONTROL: np.array(flags, np.float32),
            "stamps": np.array(stamps, np.float32),
        },
    }
