"""One process per folder: of a run, of a replay."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from vla_rl.errors import UserError
from vla_rl.plain import open_plain


class RunLock:
    """Holds a folder for one process (``with RunLock(folder): ...``); a second one gets a
    `UserError`.

    ``what`` it is and the ``remedy`` are what that error says. The kernel drops the lock when the
    process ends, however it ends. ``FILE`` stays behind and is harmless; a folder that holds
    nothing else goes with it.
    """

    FILE = ".lock"

    def __init__(
        self,
        folder: Path | str,
        what: str = "the run folder",
        remedy: str = "Wait for that run to end, or give this one another folder (name=...)",
    ):
        self.folder, self._what, self._remedy = Path(folder), what, remedy
        self._descriptor: int | None = None

    def acquire(self) -> RunLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / self.FILE
        descriptor = open_plain(
            file, os.O_RDWR | os.O_CREAT, "remove it, if no process of yours uses that folder"
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(
                f"{self._what} {self.folder} is in use by {owner}. {self._remedy}"
            ) from None
        if not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat()):
            os.close(descriptor)  # its owner took the folder away between our two calls
            return self.acquire()
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            if not self.folder.is_symlink() and [path.name for path in self.folder.iterdir()] == [
                self.FILE
            ]:
                (self.folder / self.FILE).unlink()
                self.folder.rmdir()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # an owner that was let go, be it as the interpreter ends, where ``os`` is gone
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor is not None:
            close(self._descriptor)
