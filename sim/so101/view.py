"""What stands where at a simulated arm's table, in a file: one process has the physics (`Shown`),
others draw it (`View`)."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FILE = "table"  # in the folder of the simulated ports
_HEAD, _END = struct.Struct("=qd"), struct.Struct("=q")
_TRIES = 100


class Shown:
    """Writes the state as often as it is told, each time in one call."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(
            missing_ok=True
        )  # (who reads that of a session before sees no change)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._file, self._number = os.open(folder / FILE, flags, 0o600), 0

    def tell(self, state: np.ndarray, stamp: float) -> None:
        """``stamp``: the monotonic clock's (s)."""
        self._number += 1
        record = _HEAD.pack(self._number, stamp) + state.tobytes() + _END.pack(self._number)
        os.pwrite(self._file, record, 0)

    def close(self) -> None:
        os.close(self._file)


def last(folder: Path, size: int) -> tuple[int, float, np.ndarray]:
    """Number, stamp (s) and state [size] of what was told last. Raises OSError where nobody has,
    or not yet."""
    whole = _HEAD.size + 8 * size + _END.size
    with open(folder / FILE, "rb", buffering=0) as file:
        for _ in range(_TRIES):
            record = os.pread(file.fileno(), whole, 0)
            if len(record) == whole:
                number, stamp = _HEAD.unpack_from(record)
                if _END.unpack_from(record, whole - _END.size)[0] == number:
                    return number, stamp, np.frombuffer(record, np.float64, size, _HEAD.size)
    raise OSError(f"{folder / FILE} holds no state of {size} numbers")


class View:
    """Draws the table whose state lies in ``folder``, ``size`` pixels a side."""

    def __init__(self, folder: str | Path, size: int):
        from sim.gl import ensure_backend

        ensure_backend()  # before mujoco is imported
        import mujoco

        from sim.so101.world import Scene

        self._mujoco, self._folder, self._size = mujoco, Path(folder), size
        self._scene = Scene()
        self._data = mujoco.MjData(self._scene.model)

    def take(self, cameras: Sequence[str]) -> tuple[int, float, dict[str, np.ndarray]]:
        """Number and stamp (s) of the state, and its pictures. Raises OSError."""
        model = self._scene.model
        number, stamp, state = last(self._folder, model.nq)
        self._data.qpos[:] = state
        self._mujoco.mj_kinematics(model, self._data)
        self._mujoco.mj_camlight(model, self._data)
        return number, stamp, self._scene.render(self._data, cameras, self._size)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a context that is gone already
            self._scene.close()
