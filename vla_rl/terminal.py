"""The terminal that a command runs in: its streams, its signals, its folder, whatever of them is
missing."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any

from vla_rl.errors import UserError

# How signs that are printed here look where the encoding has none; letters of names become escapes,
# so that they differ.
_PLAIN = {
    "✓": "+",
    "✗": "x",
    "–": "-",
    "−": "-",
    "×": "x",
    "→": "->",
    "←": "<-",
    "↔": "<->",
    "…": "...",
    "·": "*",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "²": "^2",
    "³": "^3",
    "°": " deg",
    "÷": "/",
    "√": "sqrt",
    "“": '"',
    "”": '"',
    "’": "'",
    "─": "-",
    "━": "-",
    "╸": "-",
    "╺": "-",
}


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in text
    ), error.end


codecs.register_error("vla-rl-plain", _plain)


def ready_streams() -> None:
    """Nothing that is printed may end a command: streams that were closed (``>&-``) lead nowhere,
    so that no file of the run gets their number, and what a stream's encoding lacks is written in
    plain letters."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, mode)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    for name in ("stdout", "stderr"):
        stream = vars(sys)[name]
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):  # (a test's stream is something else)
            stream.reconfigure(errors="vla-rl-plain")


def require_folder() -> None:
    """Raise `UserError` where the working folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the working folder was deleted: change into one that is there (cd) and try again"
        ) from None


def unread() -> bool:
    """Whether nobody reads the output any more (``vla-rl ... | head``); then what is left of it
    goes nowhere."""
    output = select.poll()
    output.register(1)
    gone = any(
        event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in output.poll(0)
    )
    if gone:
        _lead_nowhere(1)
    return gone


def leave_terminal() -> None:
    """After SIGHUP: what would be said on the terminal that is gone, and be an error, goes
    nowhere."""
    for number in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):  # (isatty asks the terminal)
            _lead_nowhere(number)


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, a scheduler's way to stop a job, and SIGHUP, of a terminal that is gone, end a
    command as Ctrl-C does: phases write their records. A signal that is ignored (nohup) stays
    so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(which: int, _: Any) -> None:
        if which == signal.SIGHUP:
            leave_terminal()
        raise KeyboardInterrupt

    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGHUP)}
    taken = [which for which, handler in before.items() if handler is not signal.SIG_IGN]
    for which in taken:
        signal.signal(which, interrupt)
    try:
        yield
    finally:
        for which in taken:
            signal.signal(which, before[which])
