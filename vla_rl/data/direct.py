"""Rows of a file that memory cannot hold, read past the system's cache, many at once.

What is drawn at random from more than the cache holds is not there when it is wanted. Then the
system has to find room for each page, fill it and copy it; reading straight into a buffer costs the
copy alone, and a disk answers many requests at once as fast as one.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vla_rl.devices import free_memory_bytes

BLOCK = 512  # bytes, of which most disks want places and lengths to be multiples
_THREADS = 16  # that wait for the disk
_RUN = 256  # rows of one request; a system takes 1024 pieces


def cacheable_bytes() -> float:
    """How much of files the system may be trusted to keep in memory: half of what is free; all
    where it does not say."""
    return 0.5 * free_memory_bytes() or float("inf")


@functools.cache
def can_read_directly(folder: Path) -> bool:
    """Whether the system, the file system and the disk of ``folder`` can."""
    path = folder / f".direct-{os.getpid()}"
    try:
        with path.open("xb") as file:  # (never through a link that lies there)
            file.write(bytes(4 * BLOCK))
        read_rows(path, np.arange(1, 3), aligned(2, BLOCK))
    except (AttributeError, OSError):
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def aligned(rows: int, row_bytes: int) -> np.ndarray:
    """Room for rows that a disk can fill: uint8 [rows row_bytes]."""
    room = np.empty(rows * row_bytes + BLOCK, np.uint8)
    return room[-room.ctypes.data % BLOCK :][: rows * row_bytes].reshape(rows, row_bytes)


def read_rows(path: Path, index: np.ndarray, out: np.ndarray) -> None:
    """Rows ``index`` of a file of rows, a multiple of `BLOCK` bytes each, into ``out``
    (`aligned`). Raises OSError."""
    order = np.argsort(index, kind="stable")
    rows = index[order]
    again = np.flatnonzero(np.diff(rows) == 0) + 1  # drawn before: copied, not read
    first = np.delete(np.arange(len(rows)), again)
    cuts = np.flatnonzero(np.diff(rows[first]) > 1) + 1
    # side by side
    runs = [
        part for run in np.split(first, cuts) for part in np.split(run, range(_RUN, len(run), _RUN))
    ]
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        parts = [runs[i::_THREADS] for i in range(min(_THREADS, len(runs)))]
        work = functools.partial(_read_runs, file, rows, order.tolist(), out)
        list(_pool(os.getpid()).map(work, parts))
    finally:
        os.close(file)
    for k in again.tolist():
        out[order[k]] = out[order[k - 1]]


def _read_runs(
    file: int, rows: np.ndarray, order: list[int], out: np.ndarray, runs: list[np.ndarray]
) -> None:
    size, memory = out.shape[1], out.reshape(-1).data
    for run in runs:
        places = [order[k] * size for k in run.tolist()]
        start, wanted = int(rows[run[0]]) * size, len(run) * size
        if os.preadv(file, [memory[place : place + size] for place in places], start) != wanted:
            raise OSError(
                f"a file of the replay ends before byte {start + wanted}: it was cut "
                "short while it was open"
            )


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Of this process: a forked one has not its parent's threads."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="replay")
