"""A file of records, one JSON line each with its checksum: a line counts once it is whole on the
disk."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from vla_rl.data.tables import cut_at, write_at
from vla_rl.plain import read_plain
from vla_rl.storage import fsync

_REMEDY = "restore that file, or move it away"


class Journal:
    """The records in ``path``. What a writer that was killed left behind the last whole one is
    nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = [0]  # where each record begins in the file, and where the last one ends; bytes
        self.damage = ""
        """What no kill brings about behind the records that were read; "" where all is
        explained."""

    def read(self) -> list[dict[str, Any]]:
        """The whole records, up to the first that is not. Raises `UserError` for what is no
        plain file."""
        self._ends, self.damage = [0], ""
        records: list[dict[str, Any]] = []
        data = read_plain(self.path, _REMEDY) if os.path.lexists(self.path) else b""
        lines = data.split(b"\n")[:-1]
        for i, line in enumerate(lines, 1):
            place = f"line {i} of {self.path.name}"
            if not _is_whole(line):
                if any(map(_is_whole, lines[i:])):
                    self.damage = f"{place} is not whole, later ones are"
                elif (
                    b"\0" not in line
                ):  # half a line has no end; a disk that lost power leaves zeros
                    self.damage = f"{place} is not what was written: its checksum is another"
                break
            record = _parsed(line)
            if record is None:
                self.damage = f"{place} is no record, though its checksum is right"
                break
            records.append(record)
            self._ends.append(self._ends[-1] + len(line) + 1)
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Returns when the disk has it."""
        text = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        write_at(self.path, self._ends[-1], memoryview(line))
        self._ends.append(self._ends[-1] + len(line))

    def cut(self, records: int) -> None:
        """Keep the first ``records`` and nothing behind them; returns when the disk knows."""
        del self._ends[records + 1 :]
        if self.path.exists() and self.path.stat().st_size != self._ends[-1]:
            cut_at(self.path, self._ends[-1])
            fsync(self.path)


def _is_whole(line: bytes) -> bool:
    checksum, _, text = line.partition(b" ")
    return checksum == b"%08x" % zlib.crc32(text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole line's record; None where it is no object of JSON."""
    try:
        record = json.loads(line.partition(b" ")[2])
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
