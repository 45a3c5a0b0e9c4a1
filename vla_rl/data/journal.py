"""A file of records, one JSON line each with its checksum: a line counts once it is whole on the disk."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from vla_rl.data.tables import write_at
from vla_rl.storage import fsync


class Journal:
    """The records in ``path``. What a writer that was killed left behind the last whole one is nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = [0]  # where each record begins in the file, and where the last one ends; bytes
        self.damaged = False
        """Whether records follow on one that is not whole, which no kill brings about."""

    def read(self) -> list[dict[str, Any]]:
        """The whole records, up to the first that is not."""
        records = []
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for i, line in enumerate(lines):
            record = _read(line)
            if record is None:
                self.damaged = any(_read(later) is not None for later in lines[i + 1 :])
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
            os.truncate(self.path, self._ends[-1])
            fsync(self.path)


def _read(line: bytes) -> dict[str, Any] | None:
    """A line's record; None where the line is not whole."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None
