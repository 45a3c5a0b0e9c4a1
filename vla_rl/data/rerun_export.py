"""Demonstrations, rollouts and robot sessions for the Rerun viewer (https://rerun.io), as one
``.rrd`` file.

Episodes follow one another on the timeline ``step`` (control steps of all episodes), those of a
session on ``time`` (the wall clock); the timeline ``episode`` counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.data.lerobot_writer import encode_png
from vla_rl.data.trajectories import Source
from vla_rl.errors import MissingPackage, UserError
from vla_rl.files import replacing_file, require_new
from vla_rl.types import Observation, Trajectory


def export_rerun(source: Source, file: Path) -> Path:
    """Write the source's episodes: ``camera/<name>``, ``proprio``, ``action``, ``reward`` and the
    text ``episode``.

    Demonstrations have an image for every control step, rollouts one for every decision. Returns
    ``file``. Raises `MissingPackage` without rerun-sdk, and `UserError` where there is nothing to
    write or the name is not ``.rrd``.
    """
    if not source.trajectories:
        raise UserError(f"there is nothing to write: {source.what}")
    with _recording(file) as (rerun, stream):
        step = 0
        for number, trajectory in enumerate(source.trajectories):
            stream.set_time("episode", sequence=number)
            step = _log_episode(rerun, stream, trajectory, number, step)
    return file


def export_session_rerun(session: str | Path, file: Path) -> int:
    """Write every journal of a robot's session, the discarded ones too; returns how many.

    All of each tick that is a number, under its field's name (``sent``, ``policy``, ``human``,
    ``pose``, ``gate`` ...), the recorded JPEGs as ``camera/<name>``, a reward's scores as
    ``reward/<model>``, and as ``log`` what was said and labelled. Raises as `export_rerun`, and
    `JournalError`.
    """
    read = build.attribute("real.journal:read")
    paths = build.attribute("real.journal:journals")(session)
    with _recording(file) as (rerun, stream):
        for number, path in enumerate(paths):
            _log_journal(rerun, stream, read(path), number)
    return len(paths)


@contextlib.contextmanager
def _recording(file: Path) -> Iterator[tuple[Any, Any]]:
    """(rerun, a stream into ``file``), which is there once all went well."""
    try:
        import rerun
    except ImportError:
        raise MissingPackage("rerun-sdk", "rerun", "Exporting for Rerun") from None
    if file.suffix != ".rrd":
        raise UserError(f"{file} is no name for a Rerun recording: let it end in .rrd")
    require_new(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    stream = rerun.RecordingStream("vla-rl", send_properties=False)
    with replacing_file(file) as part:
        try:
            stream.save(part)
            yield rerun, stream
            stream.flush()
        except (
            RuntimeError
        ) as error:  # its writer has ended; what the system said is in its own log
            raise UserError(
                f"{file} could not be written: look for room on the disk, and at ulimit -f "
                f"({error})"
            ) from error
        finally:
            stream.disconnect()


_TICK_NUMBERS = (
    "proprio",
    "pose",
    "joints",
    "gripper",
    "wrench",
    "policy",
    "human",
    "sent",
    "gate",
    "is_human",
    "holding",
    "lateness",
)


def _log_journal(rerun: Any, stream: Any, episode: Any, number: int) -> None:
    header = episode.header
    wall = float(header["wall"]) - float(header["monotonic"])

    def columns(name: str, stamps: list[float], parts: Any) -> None:
        times = rerun.TimeColumn("time", timestamp=np.array(stamps) + wall)
        place = rerun.TimeColumn("episode", sequence=[number] * len(stamps))
        stream.send_columns(name, indexes=[times, place], columns=parts)

    def scalars(name: str, stamps: list[float], rows: list[list[float]]) -> None:
        flat = [x for row in rows for x in row]
        columns(
            name, stamps, rerun.Scalars.columns(scalars=flat).partition([len(row) for row in rows])
        )

    for name in _TICK_NUMBERS:
        rows = [
            (tick["stamp"], np.atleast_1d(tick[name]).astype(float).tolist())
            for tick in episode.ticks
        ]
        if some := [(stamp, row) for stamp, row in rows if row]:
            scalars(name, [stamp for stamp, _ in some], [row for _, row in some])
    for camera, frames in episode.frames.items():
        shown = rerun.EncodedImage.columns(
            blob=[f[5] for f in frames], media_type=["image/jpeg"] * len(frames)
        )
        columns(f"camera/{camera}", [f[2] for f in frames], shown)
    for model in sorted({p["model"] for p in episode.progress}):
        said = [p for p in episode.progress if p["model"] == model]
        scalars(f"reward/{model}", [p["stamp"] for p in said], [[p["value"]] for p in said])
    _log_words(rerun, columns, episode)


def _log_words(rerun: Any, columns: Any, episode: Any) -> None:
    ticks = {tick["tick"]: tick["stamp"] for tick in episode.ticks}
    begun = episode.ticks[0]["stamp"] if episode.ticks else float(episode.header["monotonic"])
    words = [(e["at"], f"{e['source']}: {e['name']} {e['value']}".rstrip()) for e in episode.events]
    words += [
        (ticks.get(n["tick"], begun), f"{n['mode']}: {n['name']} {n['value']}".rstrip())
        for n in episode.notices
    ]
    words.append((begun, f"task {episode.header.get('task', '')}"))
    words.sort()
    columns("log", [at for at, _ in words], rerun.TextLog.columns(text=[text for _, text in words]))


def _log_episode(rerun: Any, stream: Any, trajectory: Trajectory, number: int, step: int) -> int:
    """Log one episode from ``step`` on; returns the first step of the next."""
    spec, seen = trajectory.episode, trajectory.observations
    outcome = (
        "success"
        if trajectory.success
        else f"failure {trajectory.failure.replace('_', ' ')}".strip()
    )
    state = f"initial state {spec.init_state_id}, " if spec.init_state_id >= 0 else ""
    stream.set_time("step", sequence=step)
    text = (
        f"**{number}: {spec.task_id}**\n\n{seen.instruction[0]}\n\n{state}{spec.split}: {outcome}"
    )
    stream.log("episode", rerun.TextDocument(text, media_type="text/markdown"))
    for t in range(len(trajectory)):
        stream.set_time("step", sequence=step)
        _log_observation(rerun, stream, seen, t)
        for h in trajectory.valid[t].nonzero().flatten().tolist():
            stream.set_time("step", sequence=step)
            stream.log("action", rerun.Scalars(trajectory.actions[t, h].numpy()))
            stream.log("reward", rerun.Scalars(float(trajectory.rewards[t, h])))
            step += 1
    stream.set_time("step", sequence=step)
    _log_observation(rerun, stream, trajectory.final_observation, 0)
    return step + 1


def _log_observation(rerun: Any, stream: Any, observation: Observation, row: int) -> None:
    for name, images in observation.images.items():
        image = rerun.EncodedImage(contents=encode_png(images[row].numpy()), media_type="image/png")
        stream.log(f"camera/{name}", image)
    stream.log("proprio", rerun.Scalars(observation.proprio[row].numpy()))
