"""Opening files in folders that others may have written: what is no plain file is refused, and no
link is followed unless the caller says so."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from vla_rl.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def open_plain(
    path: Path,
    flags: int,
    remedy: str,
    error: type[UserError] = UserError,
    mode: int = 0o644,
    *,
    follow: bool = False,
) -> int:
    """A descriptor of the plain file ``path``, as `os.open` gives it. Raises ``error``, whose
    message ends with ``remedy``, for a symbolic link (unless ``follow``: hubs keep what they
    fetched behind links), a folder, a pipe or a device, and `OSError` for what else the system
    refuses.

    ``O_TRUNC`` is not to be among the ``flags``: nothing may be lost before it is known what it is.
    """
    try:
        flags |= 0 if follow else os.O_NOFOLLOW
        # (a pipe would be waited for)
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) and not (
            follow and problem.errno == errno.ELOOP
        ):
            kind = _kind(os.stat(path, follow_symlinks=follow).st_mode)
            raise error(f"{path} is {kind}, and a plain file is needed: {remedy}") from None
        raise
    found = os.fstat(file).st_mode
    if not stat.S_ISREG(found):
        os.close(file)
        raise error(f"{path} is {_kind(found)}, and a plain file is needed: {remedy}")
    return file


def require_plain(path: Path, remedy: str) -> None:
    """Raise `UserError` where ``path`` is no plain file."""
    kind = os.lstat(path).st_mode
    if not stat.S_ISREG(kind):
        raise UserError(f"{path} is {_kind(kind)}, and a plain file is needed: {remedy}")


def read_plain(
    path: Path, remedy: str, error: type[UserError] = UserError, *, follow: bool = False
) -> bytes:
    """What the plain file ``path`` holds; errors as in `open_plain`."""
    with open(open_plain(path, os.O_RDONLY, remedy, error, follow=follow), "rb") as file:
        return file.read()


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")
