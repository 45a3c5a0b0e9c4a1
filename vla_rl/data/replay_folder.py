"""A replay on disk: what it holds (``header.json``), a file of rows per table, and a journal with a
record per episode.

An episode's rows are synced before its record is written, and a record counts once it is whole. So
a process that is killed at any moment leaves every episode that was closed, and behind them perhaps
rows and half a record, which are cut off when the folder is opened. What no kill explains is an
error that names it, and nothing is cut. Nothing is unpickled, and no link is followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from vla_rl.data.journal import Journal
from vla_rl.data.replay_checks import NO_PREFIX, begins_each_decision
from vla_rl.data.tables import Field, Table
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.files import REPLAY_FILES, json_object
from vla_rl.lock import RunLock
from vla_rl.plain import read_plain, require_plain
from vla_rl.storage import disk_full, fsync, is_disk_full, to_json, write_text
from vla_rl.types import EmbodimentSpec

FORMAT = 2  # 1: a folder per episode
DECISIONS, FRAMES = "decisions", "frames"
_HEADER, _JOURNAL, _ROWS = *REPLAY_FILES, ".rows"
_PART, _CUT = f"{_HEADER}.part", ".cut"
_REMEDY = "start over with --fresh, or restore the folder"
_NOT_OURS = "restore that folder, or leave it out of replay.offline"
_MOST = 1 << 40  # decisions, versions, tickets: more is damage


def _whole_number(low: int) -> Callable[[Any], bool]:
    return lambda x: type(x) is int and low <= x < _MOST


# What `Replay.add` writes of an episode, and how it is told from what nobody wrote.
_RECORD: dict[str, Callable[[Any], bool]] = {
    "rollout_id": lambda x: isinstance(x, str),
    "source": lambda x: isinstance(x, str) and bool(x),
    "decisions": _whole_number(1),
    "terminated": lambda x: isinstance(x, bool),
    "success": lambda x: isinstance(x, bool),
    "version": _whole_number(-_MOST),
    "proposed": lambda x: isinstance(x, bool),
    "interventions": lambda x: isinstance(x, list),
    "texts": lambda x: isinstance(x, list) and all(isinstance(text, str) for text in x),
    "checksum": _whole_number(0),
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {
    "actions": _FLOATS,
    "proposed": _FLOATS,
    "proprio": _FLOATS,
    "rewards": (torch.float32,),
    "valid": (torch.bool,),
    "human": (torch.bool,),
    "text": (torch.int64,),
}
_owned: weakref.WeakValueDictionary[tuple[int, Path], RunLock] = weakref.WeakValueDictionary()


def _own(path: Path) -> RunLock:
    """This process's lock on the folder: all who open it here share it, and it is released with
    the last of them."""
    key = (os.getpid(), path.resolve())
    lock = _owned.get(key)
    if lock is None:
        lock = _owned[key] = RunLock(
            path, "replay:", "Only one process may add to a replay: end that one first"
        ).acquire()
    return lock


class ReplayFolder:
    """The files of a replay, for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where there is none. Raises `UserError` for one that holds something
        else, or that another process has open."""
        self.path = path
        self._journal = Journal(path / _JOURNAL)
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if entry.is_dir() and re.fullmatch(r"\.?\d{7}.*", entry.name):
                raise UserError(
                    f"replay: {path} was written by an earlier version of vla-rl, which kept a "
                    "folder per episode: start over with --fresh, or move the folder away"
                )
            ours = entry.name in (_HEADER, _JOURNAL) or entry.suffix in (_ROWS, ".part")
            # (file systems keep hidden files of their own)
            if not ours and not entry.name.startswith("."):
                raise UserError(
                    f"replay: {path} holds {entry.name}, which is of no replay: name another folder"
                )
            if ours:
                require_plain(entry, _REMEDY)
        self._lock = _own(path)

    def tables(self, layout: Mapping[str, list[Field]]) -> dict[str, Table]:
        return _tables(self.path, layout)

    def clear(self) -> None:
        """Empty the folder. The header goes first, under a name that tells who is killed
        meanwhile what the rest is."""
        header, part = self.path / _HEADER, self.path / _PART
        if os.path.lexists(header):
            header.rename(part)
            fsync(self.path)
        (self.path / _JOURNAL).unlink(missing_ok=True)
        for entry in self.path.glob(f"*{_ROWS}"):
            entry.unlink()
        fsync(self.path)
        for entry in self.path.glob("*.part"):
            entry.unlink()
        self._journal = Journal(self.path / _JOURNAL)

    # -------------------------------------------------------------------------------------- opening
    def open(
        self, episodes: int | None, embodiment: EmbodimentSpec | None
    ) -> tuple[dict[str, Table], list[dict[str, Any]], EmbodimentSpec | None]:
        """Tables, records of the first ``episodes`` (None: of all that are whole), robot; all else
        is cut off.

        Raises `UserError` for fewer than that, another robot, or damage that no kill explains; the
        folder is then unchanged.
        """
        cleared = not os.path.lexists(self.path / _HEADER) and os.path.lexists(self.path / _PART)
        if episodes == 0 or (episodes is None and cleared):
            self.clear()
            return {}, [], embodiment
        tables, records, robot, damage = _read(self.path, self._journal, embodiment, _REMEDY)
        whole = _whole(tables, records[:episodes])
        if episodes is not None and whole < episodes:
            raise UserError(
                f"replay: {self.path} holds {whole} episodes and the checkpoint needs "
                f"{episodes}: {_REMEDY}"
            )
        cut = self.path / _CUT
        if episodes is None and not damage:
            damage = _missing(tables, records, whole) or (
                "" if cut.exists() else _unrecorded(tables, records)
            )
        if episodes is None and damage:
            raise UserError(f"replay: {self.path} is damaged ({damage}): {_REMEDY}")
        if whole < len(records):
            cut.touch()  # so that a kill in between is told from a journal that lost records
            fsync(self.path)
        self._journal.cut(whole)  # first, so that it never names what is not there
        for name, table in tables.items() if whole else ():
            table.cut(rows_of(name, records[:whole]))
        cut.unlink(missing_ok=True)
        if not whole:
            return {}, [], embodiment or robot
        return tables, records[:whole], embodiment or robot

    def check(self, tables: Mapping[str, Table], records: list[dict[str, Any]]) -> None:
        """Raise `UserError` for an episode whose rows are not what was written."""
        row = 0
        for number, record in enumerate(records):
            if stored_episode(tables, record, number, row) is None:
                what = f"the rows of episode {number + 1} are not what was written"
                raise UserError(f"replay: {self.path} is damaged ({what}): {_REMEDY}")
            row += record["decisions"]

    # -------------------------------------------------------------------------------------- writing
    def append(
        self,
        tables: Mapping[str, Table],
        rows: Mapping[str, np.ndarray],
        record: dict[str, Any],
        after: int,
        embodiment: EmbodimentSpec | None,
    ) -> None:
        """Write an episode ``after`` so many; returns when the disk has it. Raises `DiskFull`,
        and all is as it was."""
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
        part = self.path / _PART
        part.unlink(missing_ok=True)  # (whatever it is: a link would have another file written)
        header = {
            "format": FORMAT,
            "embodiment": None if embodiment is None else embodiment.to_dict(),
            "tables": {name: [f.to_json() for f in table.fields] for name, table in tables.items()},
        }
        write_text(part, to_json(header))
        part.replace(self.path / _HEADER)


def read_folder(
    path: Path, embodiment: EmbodimentSpec | None
) -> tuple[dict[str, Table], list[dict[str, Any]]]:
    """Tables and records of the whole episodes in another run's folder, as it is: nothing is cut
    off or locked.

    Raises `UserError` for the folder of another robot, or for damage."""
    tables, records, _, damage = _read(path, Journal(path / _JOURNAL), embodiment, _NOT_OURS)
    whole = _whole(tables, records)
    if damage := damage or _missing(tables, records, whole):
        raise UserError(f"replay: {path} is damaged ({damage}): {_NOT_OURS}")
    return tables, records[:whole]


def _read(
    path: Path, journal: Journal, embodiment: EmbodimentSpec | None, remedy: str
) -> tuple[dict[str, Table], list[dict[str, Any]], EmbodimentSpec | None, str]:
    """Tables, records and robot of a folder, whose episodes are not looked at yet; and how its
    journal is damaged, or "".

    Raises `UserError` for another robot than ``embodiment``, a file that is missing or none, or
    what nobody wrote there."""
    records = journal.read()
    if not records and not os.path.lexists(path / _HEADER):
        left = sorted(entry.name for entry in path.glob(f"*{_ROWS}"))
        return (
            {},
            [],
            None,
            journal.damage or (f"it has {left[0]} and no {_HEADER}" if left else ""),
        )
    robot, tables = _header(path, remedy)
    if robot is not None and embodiment is not None:
        embodiment.require(robot, "this run", f"the replay {path}")
    for table in tables.values():
        assert table.path is not None
        if os.path.lexists(table.path):
            require_plain(table.path, remedy)
        elif records:
            raise UserError(f"replay: {path} is damaged ({table.path.name} is missing): {remedy}")
    ticket = 0
    for number, record in enumerate(records, 1):
        if problem := _mistake(record, ticket):
            what = f"the record in line {number} of {_JOURNAL} has {problem}"
            raise UserError(f"replay: {path} is damaged ({what}): {remedy}")
        ticket = record.get("ticket", ticket)
    return tables, records, robot, journal.damage


def _tables(path: Path, layout: Mapping[str, list[Field]]) -> dict[str, Table]:
    return {
        name: Table(fields, path / (quote(name, safe="") + _ROWS))
        for name, fields in layout.items()
    }


def robot_of(path: Path) -> EmbodimentSpec | None:
    """The robot whose episodes a replay keeps, if its header says so. Raises `UserError` for a
    damaged one."""
    return _header(path, _NOT_OURS)[0]


def _header(path: Path, remedy: str) -> tuple[EmbodimentSpec | None, dict[str, Table]]:
    file = path / _HEADER
    if not os.path.lexists(file):
        raise UserError(f"{file} is missing: {remedy}")
    header = json_object(read_plain(file, remedy), file, remedy)
    if header.get("format") != FORMAT:
        raise UserError(
            f"replay: {path} has the format {str(header.get('format'))[:40]}, this version of "
            f"vla-rl reads {FORMAT}: use the version that wrote it, or {remedy}"
        )
    try:
        robot = (
            None if header["embodiment"] is None else EmbodimentSpec.from_dict(header["embodiment"])
        )
        layout = {
            name: [Field.from_json(f) for f in fields] for name, fields in header["tables"].items()
        }
        _check_layout(layout, robot)
        return robot, _tables(path, layout)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ConfigError) as problem:
        raise UserError(f"{file} is damaged ({first_line(problem)}): {remedy}") from problem


def _check_layout(layout: Mapping[str, list[Field]], robot: EmbodimentSpec | None) -> None:
    """Raise ``ValueError`` for columns that no `Replay` has, or that are not of its robot."""
    fields = [field for table in layout.values() for field in table]
    known = {field.name: field for field in fields}
    if len(known) < len(fields):
        raise ValueError("two columns have one name")
    lacking = [name for name in (DECISIONS, FRAMES) if not layout.get(name)]
    lacking += [name for name in _DTYPES if name not in known]
    lacking += [
        f"byte in a row of {name!r}"
        for name, table in layout.items()
        if not any(f.bytes for f in table)
    ]
    if lacking:
        raise ValueError(f"it has no {lacking[0]}")
    (h, a), (_,) = known["actions"].shape, known["proprio"].shape
    wanted = {"proposed": (h, a), "valid": (h,), "human": (h,), "rewards": (), "text": ()}
    images = {
        name.removeprefix("image:"): f.shape
        for name, f in known.items()
        if name.startswith("image:")
    }
    if robot is not None:
        wanted |= {"actions": (h, robot.action_dim), "proprio": (robot.proprio_dim,)}
        if images != (cameras := {c.name: (c.height, c.width, 3) for c in robot.cameras}):
            raise ValueError(f"its images are {images}, those of its robot {cameras}")
    wrong = [f"{known[name]}" for name, shape in wanted.items() if known[name].shape != shape]
    wrong += [
        f"{f}" for f in fields if (name := f.name) in _DTYPES and f.dtype not in _DTYPES[name]
    ]
    wrong += [f"{f}" for f in fields if f.name.startswith("image:") and f.dtype is not torch.uint8]
    decisions = {f.name for f in layout[DECISIONS]}
    wrong += sorted(decisions ^ {"actions", "proposed", "valid", "human", "rewards"})
    if wrong or not h or not a:
        raise ValueError(f"no replay has the column {wrong[0] if wrong else known['actions']}")


def _mistake(record: Mapping[str, Any], ticket: int) -> str:
    """What in a record nobody wrote; "" where all is right. ``ticket``: the highest before it."""
    for name, good in _RECORD.items():
        if name not in record:
            return f"no '{name}'"
        if not good(record[name]):
            return f"{name} {str(record[name])[:40]}"
    if "ticket" in record and not (
        type(record["ticket"]) is int and ticket < record["ticket"] < _MOST
    ):
        return f"ticket {str(record['ticket'])[:40]} after {ticket}"
    end = 0
    for run in record["interventions"]:
        if not (isinstance(run, list) and len(run) == 2 and all(type(x) is int for x in run)):
            return f"interventions {str(run)[:40]}"
        if run[0] < end or run[1] < 1 or run[0] + run[1] > record["decisions"]:
            return f"interventions {run} in an episode of {record['decisions']} decisions"
        end = sum(run)
    return ""


def rows_of(table: str, records: list[dict[str, Any]]) -> int:
    """Rows of a table that episodes fill: every episode of t decisions has t + 1 frames."""
    return sum(r["decisions"] for r in records) + (0 if table == DECISIONS else len(records))


def _whole(tables: Mapping[str, Table], records: list[dict[str, Any]]) -> int:
    """How many of the first episodes have all their rows; those of the last one are read and
    compared with its checksum."""
    decisions = np.array([0, *itertools.accumulate(r["decisions"] for r in records)])
    ends = {
        name: decisions + (0 if name == DECISIONS else np.arange(len(decisions))) for name in tables
    }
    whole = min(
        [
            len(records),
            *(
                int(np.searchsorted(ends[n], t.rows_in_file(), "right")) - 1
                for n, t in tables.items()
            ),
        ]
    )
    while (
        whole
        and stored_episode(tables, records[whole - 1], whole - 1, int(decisions[whole - 1])) is None
    ):
        whole -= 1
    return whole


def _missing(tables: Mapping[str, Table], records: list[dict[str, Any]], whole: int) -> str:
    """Which episode's rows are not as they were written, though rows are on the disk before their
    record; "": none, or the last one's, which a disk may lose that said it had them."""
    if whole >= len(records) - 1:
        return ""
    short = [
        t.path.name
        for n, t in tables.items()
        if t.path and t.rows_in_file() < rows_of(n, records[: whole + 1])
    ]
    what = f"are not in {short[0]}" if short else "are not what was written"
    return f"{len(records)} episodes are in {_JOURNAL}, and the rows of number {whole + 1} {what}"


def _unrecorded(tables: Mapping[str, Table], records: list[dict[str, Any]]) -> str:
    """Whether there are whole rows of more episodes than the one that a kill leaves without its
    record; "" where not. (An episode has one frame more than decisions.)"""
    written = tables[FRAMES].rows_in_file() - tables[DECISIONS].rows_in_file() if tables else 0
    return (
        f"rows of {written} episodes, and {len(records)} are in {_JOURNAL}"
        if written > len(records) + 1
        else ""
    )


def stored_episode(
    tables: Mapping[str, Table], record: Mapping[str, Any], number: int, row: int
) -> dict[str, bytes] | None:
    """What the files hold of episode ``number``, whose first decision is ``row``; None where it is
    not as it was written. Raises `UserError` where what was written is no episode."""
    t, checksum = int(record["decisions"]), 0
    stored: dict[str, bytes] = {}
    for name, table in tables.items():
        stored[name] = (
            table.stored(row, t) if name == DECISIONS else table.stored(row + number, t + 1)
        )
        checksum = zlib.crc32(stored[name], checksum)
    if checksum != record["checksum"]:
        return None
    if not begins_each_decision(tables[DECISIONS].unpack(stored[DECISIONS])["valid"]):
        place = tables[DECISIONS].path
        raise UserError(
            f"replay: episode {number} in {place} has a decision {NO_PREFIX}: restore "
            "it, or go on without it"
        )
    return stored
