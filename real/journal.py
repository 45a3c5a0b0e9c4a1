"""The record of a session: one append-only file per episode, of which a kill at any moment costs at most the last record.

A record is the magic, its length, the CRC32 of its payload, and the payload in msgpack: a list whose first entry is its
kind. Each is one ``writev``. While an episode runs its file ends in ``.open``; closing it syncs and renames it. `recover`
cuts what a kill left behind at the last record whose CRC is right, and marks it so.

| kind | content |
|---|---|
| header | {schema, session, episode, task, embodiment, limits, …; monotonic, wall: one instant on both clocks} |
| tick | the fields of a `State` in the order of `TICK_FIELDS`: all three actions, who chose, mode, holder, epoch, … |
| chunk | a decision: acting, decision, epoch, start, hz, prefix, delay, policy_version, obs_stamp, what it predicted [h a] |
| frame | camera, number, device_no, capture, device_stamp, [H W C], JPEG |
| event | what somebody did: name, value, source, at (when it was pressed), stamp; labels among them |
| notice | what the supervisor says: name, value, by, mode, epoch, tick |
| progress | what a reward model says: model, step, value, source, stamp |
| end | {reason, discarded, ticks, frames, recovered} |
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from real.messages import Chunk, Event, Frame, Notice, Progress, State
from vla_rl.errors import DiskFull, UserError

SCHEMA = 1
MAGIC = b"VRJ1"
SUFFIX, OPEN = ".vrj", ".open"
_HEAD = struct.Struct("<4sII")
_MOST = 64 * 2**20  # bytes of one record: more is damage
TICK_FIELDS = tuple(f.name for f in dataclasses.fields(State))
CHUNK_FIELDS = ("acting", "decision", "epoch", "start", "hz", "prefix", "delay", "policy_version", "obs_stamp")  # and rows


class JournalError(UserError):
    """A file that is no journal, or one of a newer schema."""


class JournalWriter:
    """One episode's file, made under ``folder`` with a ``.open`` name. Raises `DiskFull` where there is no room."""

    def __init__(self, folder: str | Path, episode: int, about: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"episode_{episode:06d}{SUFFIX}"
        number = 0
        while self.path.exists() or self._open_path.exists():  # another session of this folder
            number += 1
            self.path = self.folder / f"episode_{episode:06d}_{number}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._open_path, flags, 0o644)
        self.ticks = self.frames = 0
        clocks = {"monotonic": time.monotonic(), "wall": time.time()}
        try:
            self._write(["header", {"schema": SCHEMA, "episode": episode, **clocks, **about}])
        except BaseException:
            self._open_path.unlink()  # nothing is in it
            raise

    @property
    def _open_path(self) -> Path:
        return self.path.with_name(self.path.name + OPEN)

    def tick(self, state: State) -> None:
        self._write(["tick", *(getattr(state, name) for name in TICK_FIELDS)])
        self.ticks += 1

    def chunk(self, chunk: Chunk) -> None:
        predicted = chunk.predicted or chunk.actions
        self._write(["chunk", *(getattr(chunk, name) for name in CHUNK_FIELDS), predicted])

    def frame(self, frame: Frame, jpeg: bytes) -> None:
        f = frame
        size = [f.height, f.width, f.channels]
        self._write(["frame", f.camera, f.number, f.device_no, f.capture, f.device_stamp, size, jpeg])
        self.frames += 1

    def event(self, event: Event) -> None:
        self._write(["event", event.name, event.value, event.source, event.at, event.stamp])

    def notice(self, n: Notice) -> None:
        self._write(["notice", n.name, n.value, n.by, n.mode, n.epoch, n.tick])

    def progress(self, p: Progress) -> None:
        self._write(["progress", p.model, p.step, p.value, p.source, p.stamp])

    def close(self, reason: str, discarded: bool = False) -> Path:
        """Write the end, sync and rename. Returns the final name."""
        counts = {"ticks": self.ticks, "frames": self.frames, "recovered": False}
        self._write(["end", {"reason": reason, "discarded": discarded, **counts}])
        _seal(self._fd, self._open_path, self.path)
        return self.path

    def _write(self, record: list[Any]) -> None:
        try:
            _append(self._fd, record)
        except OSError as error:
            raise DiskFull(f"the journal {self.path} cannot be written: {error.strerror}") from None


def _append(fd: int, record: list[Any]) -> None:
    payload = msgpack.packb(record, use_bin_type=True)
    head = _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload))
    wanted = len(head) + len(payload)
    written = os.writev(fd, [head, payload])
    if written != wanted:  # a disk that is nearly full takes a part
        raise OSError(28, f"only {written} of {wanted} bytes found room")


def _seal(fd: int, open_path: Path, path: Path) -> None:
    os.fsync(fd)
    os.close(fd)
    os.rename(open_path, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def scan(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """(position behind it, record) of every record up to the first that is damaged or cut off."""
    with open(path, "rb") as file:
        place = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, length, crc = _HEAD.unpack(head)
            if magic != MAGIC or length > _MOST:
                return
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != crc:
                return
            place += _HEAD.size + length
            yield place, msgpack.unpackb(payload, raw=False, use_list=True)


@dataclass
class Episode:
    """One journal, read: ``ticks`` as {field: value}, ``frames`` {camera: [(number, device_no, capture, device_stamp, size,
    jpeg)]}, ``chunks`` as {field: value} with the ``rows`` that were predicted. ``lost_bytes`` lay behind the last good
    record.
    """

    path: Path
    header: dict[str, Any]
    ticks: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    frames: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    notices: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    lost_bytes: int = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The ticks that ended a control step."""
        return [tick for tick in self.ticks if tick["step_done"]]

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The event of the last label that says success or failure; None where nobody gave one."""
        labels = [e for e in self.events if e["name"] == "label" and e["value"] in ("success", "failure")]
        return labels[-1] if labels else None

    @property
    def succeeded(self) -> bool:
        return self.verdict is not None and self.verdict["value"] == "success"


def read(path: str | Path, pictures: bool = True) -> Episode:
    """A journal, whether or not it was closed. Raises `JournalError` for another file."""
    path = Path(path)
    found: Episode | None = None
    place = 0
    for place, (kind, *values) in scan(path):  # noqa: B007 (the last one is used)
        if found is None:
            if kind != "header" or values[0].get("schema") != SCHEMA:
                raise JournalError(f"{path} is a journal of schema {values[0].get('schema')}, this version reads {SCHEMA}")
            found = Episode(path, values[0])
        elif kind == "tick":
            found.ticks.append(dict(zip(TICK_FIELDS, values)))
        elif kind == "chunk":
            found.chunks.append(dict(zip((*CHUNK_FIELDS, "rows"), values)))
        elif kind == "frame":
            row = tuple(values[1:] if pictures else [*values[1:-1], b""])
            found.frames.setdefault(values[0], []).append(row)
        elif kind == "event":
            found.events.append(dict(zip(("name", "value", "source", "at", "stamp"), values)))
        elif kind == "notice":
            found.notices.append(dict(zip(("name", "value", "by", "mode", "epoch", "tick"), values)))
        elif kind == "progress":
            found.progress.append(dict(zip(("model", "step", "value", "source", "stamp"), values)))
        elif kind == "end":
            found.end = values[0]
    if found is None:
        raise JournalError(f"{path} is no journal, or nothing of it is whole")
    found.lost_bytes = path.stat().st_size - place
    return found


def recover(path: str | Path) -> Path:
    """Close what a kill left open: cut behind the last good record, write an end that says so, rename.

    The episode then counts as cut short, not as failed. A closed journal is left as it is.
    """
    path = Path(path)
    if not path.name.endswith(OPEN):
        return path
    episode = read(path, pictures=False)
    whole = path.stat().st_size - episode.lost_bytes
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.ftruncate(fd, whole)
    if episode.end is None:
        counts = {"ticks": len(episode.ticks), "frames": sum(map(len, episode.frames.values()))}
        lost = {"reason": "recovered", "discarded": False, "recovered": True, "lost_bytes": episode.lost_bytes}
        _append(fd, ["end", {**counts, **lost}])
    final = path.with_name(path.name.removesuffix(OPEN))
    _seal(fd, path, final)
    return final


def journals(session: str | Path) -> list[Path]:
    """The episodes of a session's folder in order, closed and open ones. Raises `JournalError` where there are none."""
    session = Path(session)
    folder = session / "journal" if (session / "journal").is_dir() else session
    found = sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}{OPEN}")])
    if not found:
        raise JournalError(f"{session} holds no journal: give the folder of a session of `vla-rl robot`")
    return found
