"""A replay on disk: what it holds (``header.json``), a file of rows per table, and a journal with a record per episode.

An episode's rows are synced before its record is written, and a record counts once it is whole. So a process that is killed
at any moment leaves every episode that was closed, and behind them perhaps rows and half a record, which are cut off when
the folder is opened. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from vla_rl.data.journal import Journal
from vla_rl.data.tables import Field, Table
from vla_rl.errors import UserError, first_line
from vla_rl.files import REPLAY_FILES, read_json
from vla_rl.run.lock import RunLock
from vla_rl.storage import disk_full, fsync, is_disk_full, to_json, write_text
from vla_rl.types import EmbodimentSpec

FORMAT = 2  # 1: a folder per episode
DECISIONS, FRAMES = "decisions", "frames"
_HEADER, _JOURNAL, _ROWS = *REPLAY_FILES, ".rows"
_REMEDY = "start over with --fresh, or restore the folder"
_NOT_OURS = "restore that folder, or leave it out of replay.offline"
_owned: weakref.WeakValueDictionary[tuple[int, Path], RunLock] = weakref.WeakValueDictionary()


def _own(path: Path) -> RunLock:
    """This process's lock on the folder: all who open it here share it, and it is released with the last of them."""
    key = (os.getpid(), path.resolve())
    lock = _owned.get(key)
    if lock is None:
        lock = _owned[key] = RunLock(path, "replay:", "Only one process may add to a replay: end that one first").acquire()
    return lock


class ReplayFolder:
    """The files of a replay, for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where there is none. Raises `UserError` for one that holds something else, or that another
        process has open."""
        self.path = path
        self._journal = Journal(path / _JOURNAL)
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if entry.is_dir() and re.fullmatch(r"\.?\d{7}.*", entry.name):
                raise UserError(
                    f"replay: {path} was written by an earlier version of vla-rl, which kept a folder per episode: start "
                    f"over with --fresh, or move the folder away"
                )
            ours = entry.name in (_HEADER, _JOURNAL) or entry.suffix in (_ROWS, ".part")
            if not ours and not entry.name.startswith("."):  # (file systems keep hidden files of their own)
                raise UserError(f"replay: {path} holds {entry.name}, which is of no replay: name another folder")
        self._lock = _own(path)

    def tables(self, layout: Mapping[str, list[Field]]) -> dict[str, Table]:
        return _tables(self.path, layout)

    def clear(self) -> None:
        """Remove the journal first: without it the rest is nothing."""
        for name in (_JOURNAL, _HEADER):
            (self.path / name).unlink(missing_ok=True)
            fsync(self.path)
        for pattern in (f"*{_ROWS}", "*.part"):
            for entry in self.path.glob(pattern):
                entry.unlink()
        self._journal = Journal(self.path / _JOURNAL)

    # ----------------------------------------------------------------------------------------------------------- opening
    def open(
        self, episodes: int | None, embodiment: EmbodimentSpec | None
    ) -> tuple[dict[str, Table], list[dict[str, Any]], EmbodimentSpec | None]:
        """Tables, records of the first ``episodes`` (None: of all that are whole), robot; all else is cut off.

        Raises `UserError` for fewer than that, another robot, or damage that no kill explains; the folder is then unchanged.
        """
        if episodes == 0:
            self.clear()
            return {}, [], embodiment
        records = self._journal.read()
        tables, robot = _described(self.path, embodiment) if records else ({}, None)
        whole = _whole(tables, records[:episodes])
        if episodes is not None and whole < episodes:
            raise UserError(f"replay: {self.path} holds {whole} episodes and the checkpoint needs {episodes}: {_REMEDY}")
        if episodes is None and self._journal.damaged:
            what = f"line {len(records) + 1} of {_JOURNAL} is not whole, later ones are"
            raise UserError(f"replay: {self.path} is damaged ({what}): {_REMEDY}")
        self._journal.cut(whole)  # first, so that it never names what is not there
        for name, table in tables.items():
            table.cut(rows_of(name, records[:whole]))
        return tables, records[:whole], embodiment or robot

    # ----------------------------------------------------------------------------------------------------------- writing
    def append(
        self, tables: Mapping[str, Table], rows: Mapping[str, np.ndarray], record: dict[str, Any], after: int,
        embodiment: EmbodimentSpec | None,
    ) -> None:  # fmt: skip
        """Write an episode ``after`` so many; returns when the disk has it. Raises `DiskFull`, and all is as it was."""
        self._journal.cut(after)  # what an interrupt left between here and the caller's own count
        try:
            if not after:
                self._write_header(tables, embodiment)
            checksum = 0
            for name, table in tables.items():
                table.write(rows[name])
                checksum = zlib.crc32(rows[name].data.cast("B"), checksum)
            if not after:
                fsync(self.path)
            self._journal.append({**record, "checksum": checksum})
            if not after:
                fsync(self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # best effort: opening cuts the same
                self._journal.cut(after)
                for table in tables.values():
                    table.cut(table.count)
                if not after:
                    self.clear()
            if is_disk_full(error):
                raise disk_full(self.path, error) from error
            raise

    def _write_header(self, tables: Mapping[str, Table], embodiment: EmbodimentSpec | None) -> None:
        part = self.path / f"{_HEADER}.part"
        header = {
            "format": FORMAT,
            "embodiment": None if embodiment is None else embodiment.to_dict(),
            "tables": {name: [f.to_json() for f in table.fields] for name, table in tables.items()},
        }
        write_text(part, to_json(header))
        part.replace(self.path / _HEADER)


def read_folder(path: Path, embodiment: EmbodimentSpec | None) -> tuple[dict[str, Table], list[dict[str, Any]]]:
    """Tables and records of the whole episodes in another run's folder, as it is: nothing is cut off or locked.

    Raises `UserError` for the folder of another robot, or for damage."""
    journal = Journal(path / _JOURNAL)
    records = journal.read()
    if journal.damaged:
        raise UserError(f"replay: {path} is damaged (line {len(records) + 1} of {_JOURNAL} is not whole): {_NOT_OURS}")
    tables = _described(path, embodiment, _NOT_OURS)[0] if records else {}
    return tables, records[: _whole(tables, records)]


def _tables(path: Path, layout: Mapping[str, list[Field]]) -> dict[str, Table]:
    return {name: Table(fields, path / (quote(name, safe="") + _ROWS)) for name, fields in layout.items()}


def _described(
    path: Path, embodiment: EmbodimentSpec | None, remedy: str = _REMEDY
) -> tuple[dict[str, Table], EmbodimentSpec | None]:
    """Tables and robot as the header says. Raises `UserError` for another robot than ``embodiment``, or a missing file."""
    robot, layout = _header(path, remedy)
    if robot is not None and embodiment is not None:
        embodiment.require(robot, "this run", f"the replay {path}")
    tables = _tables(path, layout)
    missing = [table.path.name for table in tables.values() if table.path and not table.path.exists()]
    if missing:
        raise UserError(f"replay: {path} is damaged ({missing[0]} is missing): {remedy}")
    return tables, robot


def robot_of(path: Path) -> EmbodimentSpec | None:
    """The robot whose episodes a replay keeps, if its header says so. Raises `UserError` for a damaged one."""
    return _header(path, _NOT_OURS)[0]


def _header(path: Path, remedy: str) -> tuple[EmbodimentSpec | None, dict[str, list[Field]]]:
    header = read_json(path / _HEADER, remedy)
    if header.get("format") != FORMAT:
        raise UserError(
            f"replay: {path} has the format {header.get('format')}, this version of vla-rl reads {FORMAT}: use the "
            f"version that wrote it, or {remedy}"
        )
    try:
        robot = None if header["embodiment"] is None else EmbodimentSpec.from_dict(header["embodiment"])
        return robot, {name: [Field.from_json(f) for f in fields] for name, fields in header["tables"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{path / _HEADER} is damaged ({first_line(problem)}): {remedy}") from problem


def rows_of(table: str, records: list[dict[str, Any]]) -> int:
    """Rows of a table that episodes fill: every episode of t decisions has t + 1 frames."""
    return sum(r["decisions"] for r in records) + (0 if table == DECISIONS else len(records))


def _whole(tables: Mapping[str, Table], records: list[dict[str, Any]]) -> int:
    """How many of the first episodes have all their rows; those of the last one are read and compared with its checksum."""
    decisions = np.array([0, *itertools.accumulate(r["decisions"] for r in records)])
    ends = {name: decisions + (0 if name == DECISIONS else np.arange(len(decisions))) for name in tables}
    whole = min([len(records), *(int(np.searchsorted(ends[n], t.rows_in_file(), "right")) - 1 for n, t in tables.items())])
    while whole and stored_episode(tables, records[whole - 1], whole - 1, int(decisions[whole - 1])) is None:
        whole -= 1
    return whole


def stored_episode(
    tables: Mapping[str, Table], record: Mapping[str, Any], number: int, row: int
) -> dict[str, bytes] | None:
    """What the files hold of episode ``number``, whose first decision is ``row``; None where it is not as it was written."""
    t, checksum = int(record["decisions"]), 0
    stored: dict[str, bytes] = {}
    for name, table in tables.items():
        stored[name] = table.stored(row, t) if name == DECISIONS else table.stored(row + number, t + 1)
        checksum = zlib.crc32(stored[name], checksum)
    return stored if checksum == record["checksum"] else None
