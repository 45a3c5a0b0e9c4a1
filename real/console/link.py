"""The console's end of its connection to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from real.link import read_packet
from real.messages import Hello, Message, MessageError, Sequence, Writer, decode, encode

_M = TypeVar("_M", bound=Message)


class SocketLink:
    """A connected Unix SEQPACKET socket, read by an event loop. A packet that is no message is
    counted and dropped."""

    source = "console"

    def __init__(self, connection: socket.socket):
        self.writer = Writer(self.source, time.monotonic)
        self.refused = 0
        self._socket: socket.socket | None = connection
        self._lost: Callable[[], None] = lambda: None
        self._heard: Callable[[Message], None] = lambda message: None
        self._newer = Sequence()
        connection.setblocking(False)

    def send(self, kind: type[_M], valid_s: float = float("inf"), **fields: object) -> _M | None:
        """The message that went out, or None where the connection is gone or does not take more."""
        message = self.writer.make(kind, valid_s, **fields)
        if self._socket is None:
            return None
        try:
            self._socket.send(encode(message))
        except (
            OSError
        ):  # it takes no more, or is gone: which of them, and what it said last, reading tells
            return None
        return message

    def listen(self, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        """Call ``heard`` with every message from now on, in the running event loop; ``lost``
        once, when it ends."""
        self._heard, self._lost = heard, lost
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self.send(Hello, role="console", pid=os.getpid())

    def _read(self) -> None:
        for _ in range(64):  # then others get their turn
            if self._socket is None:
                return
            try:
                packet = read_packet(self._socket)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                return self._end()
            try:
                message = decode(packet)
            except MessageError:
                self.refused += 1
                continue
            if self._newer.newer(message):
                self._heard(message)

    def _end(self) -> None:
        if self._socket is not None:
            self.close()
            self._lost()

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
