"""The record of a session: one append-only file per episode, of which a kill at any moment costs at
most the last record.

A record is the magic, its length, the CRC32 of its payload, and the payload in msgpack: a list
whose first entry is its kind. Each is one ``writev``. While an episode runs its file ends in
``.open``; closing it syncs and renames it. `recover` cuts what a kill left behind at the last
record whose CRC is right, and marks it so. A label that is given, or moved, after the end is
appended behind it (`amend`). Journals may come from others: every record is checked
(`real.records`), no link is followed, and what no kill explains is an error that names file and
record.

| kind | content |
|---|---|
| header | {schema, session, episode, task, embodiment, limits, …; monotonic, wall: one instant on both clocks} |
| tick | the fields of a `State` in the order of `TICK_FIELDS`: all three actions, who chose, mode, holder, epoch, … |
| chunk | a decision: acting, decision, epoch, start, hz, prefix, delay, policy_version, obs_stamp, what it predicted [h a] |
| frame | camera, number, device_no, capture, device_stamp, [H W C], JPEG |
| event | what somebody did: name, value, source, at (when it was pressed), stamp; labels among them, also behind the end |
| notice | what the supervisor says: name, value, by, mode, epoch, tick |
| progress | what a reward model says: model, step, value, source, stamp |
| end | {reason, discarded, ticks, frames, recovered, and if so lost_bytes} |
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from real.messages import Chunk, Event, Frame, Notice, Progress, State
from real.records import (
    CHUNK_FIELDS,
    EVENT_FIELDS,
    NOTICE_FIELDS,
    PROGRESS_FIELDS,
    SCHEMA,
    TICK_FIELDS,
    mistake,
    robot_of,
    unlike,
)
from vla_rl.errors import DiskFull, MissingPackage, UserError, first_line
from vla_rl.plain import open_plain
from vla_rl.specs import EmbodimentSpec

MAGIC = b"VRJ1"
SUFFIX, OPEN = ".vrj", ".open"
_HEAD = struct.Struct("<4sII")
_MOST = 64 * 2**20  # bytes of one record: more is damage
_MOST_ENTRIES = 4096  # of a list or a mapping in a record
_REMEDY = "restore that file, or move it away"


class JournalError(UserError):
    """A file that is no journal, or one of a newer schema."""


class JournalWriter:
    """One episode's file, made under ``folder`` with a ``.open`` name. Raises `DiskFull` where
    there is no room."""

    def __init__(self, folder: str | Path, episode: int, about: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # pictures of a room are nobody else's
        self.path = self.folder / f"episode_{episode:06d}{SUFFIX}"
        number = 0
        while self.path.exists() or self._open_path.exists():  # another session of this folder
            number += 1
            self.path = self.folder / f"episode_{episode:06d}_{number}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._open_path, flags, 0o600)
        self.ticks = self.frames = self.size = 0  # size: bytes
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
        self._write(
            ["frame", f.camera, f.number, f.device_no, f.capture, f.device_stamp, size, jpeg]
        )
        self.frames += 1

    def event(self, event: Event) -> None:
        self._write(_event_record(event))

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
            self.size += _append(self._fd, record)
        except OSError as error:
            raise DiskFull(f"the journal {self.path} cannot be written: {error.strerror}") from None


def _event_record(event: Event) -> list[Any]:
    return ["event", *(getattr(event, name) for name in EVENT_FIELDS)]


def _append(fd: int, record: list[Any]) -> int:
    """Returns how many bytes it takes."""
    payload = msgpack.packb(record, use_bin_type=True)
    head = _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload))
    wanted = len(head) + len(payload)
    written = os.writev(fd, [head, payload])
    if written != wanted:  # a disk that is nearly full takes a part
        raise OSError(28, f"only {written} of {wanted} bytes found room")
    return wanted


def _seal(fd: int, open_path: Path, path: Path) -> None:
    os.fsync(fd)
    os.close(fd)
    os.rename(open_path, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def scan(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """(position behind it, record) of every record up to the first that is damaged or cut off.
    Raises `JournalError` for what is no plain file, and for a record that is whole and that nobody
    writes."""
    with open(open_plain(path, os.O_RDONLY, _REMEDY, JournalError), "rb") as file:
        for number, (place, payload) in enumerate(_payloads(file, 0), 1):
            try:
                limits = {
                    "max_array_len": _MOST_ENTRIES,
                    "max_map_len": _MOST_ENTRIES,
                    "max_ext_len": 0,
                }
                record = msgpack.unpackb(payload, raw=False, use_list=True, **limits)
                problem = mistake(record)
            except (
                ValueError,
                TypeError,
                msgpack.exceptions.UnpackException,
                RecursionError,
            ) as error:
                problem = f"it is no msgpack: {first_line(error)}"
            if problem:
                raise wrong(path, number, place, problem)
            yield place, record


def _payloads(file: Any, place: int) -> Iterator[tuple[int, bytes]]:
    """(position behind it, payload) of the whole records from ``place`` on."""
    file.seek(place)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        magic, length, crc = _HEAD.unpack(head)
        if magic != MAGIC or length > _MOST:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != crc:
            return
        place += _HEAD.size + length
        yield place, payload


def wrong(path: Path, number: int, place: int, problem: str) -> JournalError:
    """The error for record ``number`` (from 1), which ends at byte ``place``."""
    where = f"{path} is damaged in record {number}, which ends at byte {place}"
    return JournalError(f"{where}: {problem}. {_REMEDY.capitalize()}")


def _goes_on(file: Any, place: int) -> int:
    """Where behind ``place`` a whole record begins; −1: nowhere. A kill leaves a part of one
    record and nothing behind."""
    file.seek(place)
    rest = file.read()
    at = rest.find(MAGIC, 1)
    while at >= 0:
        if next(_payloads(file, place + at), None) is not None:
            return int(place + at)
        at = rest.find(MAGIC, at + 1)
    return -1


@dataclass
class Episode:
    """One journal, read: ``ticks`` as {field: value}, ``frames`` {camera: [(number, device_no,
    capture, device_stamp, size, jpeg)]}, ``chunks`` as {field: value} with the ``rows`` that were
    predicted. ``lost_bytes`` lay behind the last good record.
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
    embodiment: EmbodimentSpec | None = None

    @property
    def damage(self) -> str:
        """Why nothing should be made of a closed episode: records are missing before its end; ""
        where none are."""
        if not self.lost_bytes or self.end is not None or self.path.name.endswith(OPEN):
            return ""
        return (
            f"{self.lost_bytes} bytes of it are damaged or cut off, and no kill does that to a "
            "closed journal"
        )

    def picture(self, camera: str, number: int) -> np.ndarray:
        """Picture ``number`` (from 0) of ``camera``, uint8 RGB [H W 3]. Raises `JournalError`
        for none of its size."""
        row = self.frames[camera][number]
        try:
            image = picture(row[-1])
            problem = (
                ""
                if list(image.shape) == row[-2]
                else f"it is {list(image.shape)}, and {row[-2]} is said of it"
            )
        except ValueError as error:
            problem = first_line(error)
        if problem:
            raise JournalError(
                f"{self.path}: picture {row[0]} of {camera} is damaged ({problem}): {_REMEDY}"
            )
        return image

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The ticks that ended a control step."""
        return [tick for tick in self.ticks if tick["step_done"]]

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The event of the last label that says success or failure; None where nobody gave one."""
        labels = [
            e for e in self.events if e["name"] == "label" and e["value"] in ("success", "failure")
        ]
        return labels[-1] if labels else None

    @property
    def succeeded(self) -> bool:
        return self.verdict is not None and self.verdict["value"] == "success"


def read(path: str | Path, pictures: bool = True) -> Episode:
    """A journal, whether or not it was closed. Raises `JournalError` for another file, or a
    record that nobody writes."""
    path = Path(path)
    found: Episode | None = None
    place = number = 0
    for number, (place, (kind, *values)) in enumerate(scan(path), 1):
        if found is None:
            found = _begun(path, kind, values[0])
        elif problem := _take(found, kind, values, pictures):
            raise wrong(path, number, place, problem)
    if found is None:
        raise JournalError(f"{path} is no journal, or nothing of it is whole: {_REMEDY}")
    found.lost_bytes = path.stat().st_size - place
    return found


def _begun(path: Path, kind: str, header: Any) -> Episode:
    if kind != "header":
        raise JournalError(f"{path} begins with a {kind} and no header: {_REMEDY}")
    if header["schema"] != SCHEMA:
        raise JournalError(
            f"{path} is a journal of schema {header['schema']}, this version reads {SCHEMA}"
        )
    try:
        return Episode(path, header, embodiment=robot_of(header))
    except ValueError as error:
        raise wrong(path, 1, 0, str(error)) from error


def _take(found: Episode, kind: str, values: list[Any], pictures: bool) -> str:
    """Add a record to ``found``; returns why it cannot be, or ""."""
    if found.end is not None and kind != "event":
        return f"a {kind} behind the end"
    if kind == "header":
        return "another header"
    if kind == "frame":
        found.frames.setdefault(values[0], []).append(
            tuple(values[1:] if pictures else [*values[1:-1], b""])
        )
    elif kind == "end":
        found.end = values[0]
    else:
        lists = {
            "tick": (found.ticks, TICK_FIELDS),
            "chunk": (found.chunks, (*CHUNK_FIELDS, "rows")),
            "event": (found.events, EVENT_FIELDS),
            "notice": (found.notices, NOTICE_FIELDS),
            "progress": (found.progress, PROGRESS_FIELDS),
        }
        row = dict(zip(lists[kind][1], values))
        lists[kind][0].append(row)
        return "" if found.embodiment is None else unlike(found.embodiment, kind, row)
    return ""


def recover(path: str | Path) -> Path | None:
    """Close what a kill left open: cut behind the last good record, write an end that says so,
    rename.

    The episode then counts as cut short, not as failed. A closed journal is left as it is; one of
    which not even the first record is whole is removed (None). Raises `JournalError` where whole
    records follow on a damaged one, which no kill explains: the file is then as it was.
    """
    path = Path(path)
    if not path.name.endswith(OPEN):
        return path
    place, count = _whole_part(path)
    if not count:
        head = path.read_bytes()[: _HEAD.size]
        if not head.startswith(MAGIC[: len(head)]) or (
            len(head) == _HEAD.size and path.stat().st_size >= _HEAD.size + _HEAD.unpack(head)[1]
        ):
            raise JournalError(f"{path} is no journal, or nothing of it is whole: {_REMEDY}")
        path.unlink()
        return None
    episode = read(path, pictures=False)
    fd = open_plain(path, os.O_WRONLY | os.O_APPEND, _REMEDY, JournalError)
    os.ftruncate(fd, place)
    if episode.end is None:
        counts = {"ticks": len(episode.ticks), "frames": sum(map(len, episode.frames.values()))}
        lost = {
            "reason": "recovered",
            "discarded": False,
            "recovered": True,
            "lost_bytes": episode.lost_bytes,
        }
        _append(fd, ["end", {**counts, **lost}])
    final = path.with_name(path.name.removesuffix(OPEN))
    _seal(fd, path, final)
    return final


def amend(path: Path, size: int, event: Event) -> int:
    """Append what is said of an episode after its end to its closed journal of ``size`` bytes
    (more: an amendment that failed); returns the new size when the disk has it. Raises `DiskFull`,
    and `JournalError` where it is another file by now."""
    fd = open_plain(path, os.O_WRONLY | os.O_APPEND, _REMEDY, JournalError)
    try:
        if os.fstat(fd).st_size < size:
            raise JournalError(
                f"{path} is shorter than when it was closed, so it is not amended: {_REMEDY}"
            )
        os.ftruncate(fd, size)
        try:
            size += _append(fd, _event_record(event))
            os.fsync(fd)
        except OSError as error:
            os.ftruncate(fd, size)
            raise DiskFull(f"the journal {path} cannot be amended: {error.strerror}") from None
        return size
    finally:
        os.close(fd)


def _whole_part(path: Path) -> tuple[int, int]:
    """Where its last whole record ends, and how many there are. Raises `JournalError` for damage
    that no kill explains."""
    place = count = 0
    with open(open_plain(path, os.O_RDONLY, _REMEDY, JournalError), "rb") as file:
        for place, _ in _payloads(file, 0):  # noqa: B007 (the last one is used)
            count += 1
        follows = _goes_on(file, place)
    if follows >= 0:
        raise JournalError(
            f"{path} is damaged in record {count + 1}, which begins at byte {place}: whole records "
            f"follow from byte {follows} on, which no kill leaves. {_REMEDY.capitalize()}"
        )
    return place, count


def picture(data: bytes) -> np.ndarray:
    """The picture uint8 RGB [H W 3] of a journal's JPEG. Raises ``ValueError`` for other bytes."""
    try:
        import simplejpeg
    except ModuleNotFoundError as error:
        raise MissingPackage("simplejpeg", "real", "Reading pictures") from error
    return simplejpeg.decode_jpeg(data, colorspace="RGB")


def journals(session: str | Path) -> list[Path]:
    """The episodes of a session's folder in order, closed and open ones. Raises `JournalError`
    where there are none."""
    session = Path(session)
    folder = session / "journal" if (session / "journal").is_dir() else session
    found = sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}{OPEN}")])
    if not found:
        raise JournalError(
            f"{session} holds no journal: give the folder of a session of `vla-rl robot`"
        )
    return found
