"""Sockets between the processes of a session: Unix SEQPACKET, one message per packet, nobody ever
waits for a slow reader.

A `Server` keeps one queue per client; who does not read loses packets of his own, which are
counted. The end of a process shows as the end of its connection, the silence of one that hangs only
by its missing beats.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

from real.checks import MessageError
from real.messages import MAX_BYTES, Beat, Grant, Hello, Message, Writer, decode, encode
from vla_rl.errors import UserError

_PENDING = 512  # packets that wait for one client
_RATE = 600  # packets per second that one client may send

_M = TypeVar("_M", bound=Message)


class LinkError(UserError):
    """A session's socket cannot be opened or reached."""


def read_packet(sock: socket.socket) -> bytes:
    """The next packet, empty at the end. Raises OSError as ``recv`` does.

    Of a peer that went without reading all that it had been sent, the kernel reports a reset
    *before* what it said last, which may be a "stop" or a farewell: that is still there, and asked
    for once more.
    """
    try:
        return sock.recv(MAX_BYTES + 1)
    except ConnectionResetError:
        return sock.recv(MAX_BYTES + 1)


class Connection:
    """One client, as the server sees it; ``rate``: packets a second. ``peer`` is (pid, uid) as
    the kernel says."""

    def __init__(self, sock: socket.socket, rate: float = _RATE):
        self.socket, self._rate = sock, rate
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.peer = (
            int.from_bytes(credentials[:4], "little"),
            int.from_bytes(credentials[4:8], "little"),
        )
        self.dropped = 0
        self._waiting: deque[bytes] = deque()
        self._window, self._received = 0, 0

    def allow(self, now: float) -> bool:
        """False for what is beyond the rate that a client may send at."""
        second = int(now)
        if second != self._window:
            self._window, self._received = second, 0
        self._received += 1
        return self._received <= self._rate

    def send(self, packet: bytes) -> None:
        """Now or later; the oldest is dropped where too much waits. Never blocks; raises OSError
        where the peer is gone."""
        if len(self._waiting) >= _PENDING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(packet)
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            try:
                self.socket.send(self._waiting[0])
            except BlockingIOError:
                return
            self._waiting.popleft()


class Server:
    """Listens at ``path`` (mode 0600: the same user only). `poll` returns what came; it never waits
    longer than asked.

    Only reading tells that a client is gone: what it said before is heard, though nothing can be
    sent to it any more.
    """

    def __init__(self, path: str | Path, rate: float = _RATE):
        self.path, self._rate = Path(path), rate
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(self.path))
        except OSError as error:
            raise LinkError(
                f"the session's socket {self.path} cannot be made: {error.strerror}"
            ) from None
        finally:
            os.umask(before)
        self._listener.listen(32)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.connections: set[Connection] = set()

    def poll(self, timeout: float) -> tuple[list[tuple[Connection, bytes]], list[Connection]]:
        """Packets as (client, bytes), and clients whose connection ended."""
        packets: list[tuple[Connection, bytes]] = []
        gone = []
        for key, _ in self._selector.select(max(0.0, timeout)):
            for connection in self._accept() if key.data is None else [key.data]:
                if connection in self.connections and not self._read(connection, packets):
                    gone.append(connection)
                    self.drop(connection)
        return packets, gone

    def _accept(self) -> list[Connection]:
        """All who wait at the door. They are read at once: a guard says one word and waits for
        the answer."""
        found: list[Connection] = []
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody more, or no descriptor is left for anybody
                return found
            sock.setblocking(False)
            connection = Connection(sock, self._rate)
            if connection.peer[1] not in (os.getuid(), 0):
                sock.close()
                continue
            self.connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)
            found.append(connection)

    def _read(self, connection: Connection, packets: list[tuple[Connection, bytes]]) -> bool:
        for _ in range(64):  # of one client at a time, so that a flood leaves room for others
            try:
                packet = read_packet(connection.socket)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            if connection.allow(time.monotonic()):
                packets.append((connection, packet))
        return True

    def send(self, connection: Connection, packet: bytes) -> bool:
        """False where the client takes nothing any more; what it said may still wait, so `poll`
        tells of its end."""
        try:
            connection.send(packet)
        except OSError:
            return False
        return True

    def drop(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def close(self) -> None:
        for connection in list(self.connections):
            self.drop(connection)
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class Client:
    """One process's side of the supervisor's socket: says hello, beats from a thread, sends and
    receives messages.

    A beat shows that the process runs, not that its work goes on: a loop that wants to show more
    beats itself (``beat_hz`` 0). Raises `LinkError` where nobody listens.
    """

    def __init__(
        self,
        path: str | Path,
        role: str,
        source: str = "",
        beat_hz: float = 40.0,
    ):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.connect(str(path))
        except OSError as error:
            self.socket.close()
            raise LinkError(
                f"no session answers at {path} ({error.strerror}): is `vla-rl robot run` running?"
            ) from None
        self.writer = Writer(source or f"{role}.{os.getpid()}", time.monotonic)
        self.token = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.send(Hello, role=role, pid=os.getpid())
        if beat_hz:
            threading.Thread(target=self._beat, args=(beat_hz,), daemon=True, name="beat").start()

    def send(self, kind: type[_M], valid_s: float = math.inf, /, **fields: Any) -> _M:
        """Make a message of this source and send it. Raises `LinkError` where the supervisor is
        gone."""
        with self._lock:
            message = self.writer.make(kind, valid_s, **fields)
            self.forward(message)
        return message

    def forward(self, message: Message) -> None:
        try:
            self.socket.send(encode(message))
        except OSError as error:
            raise LinkError(f"the supervisor is gone ({error.strerror})") from None

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when none came in ``timeout`` seconds. Raises `LinkError` at
        the end of the connection."""
        self.socket.settimeout(timeout)
        try:
            packet = read_packet(self.socket)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise LinkError(f"the supervisor is gone ({error.strerror})") from None
        if not packet:
            raise LinkError("the supervisor has ended the session")
        message = decode(packet)
        if isinstance(message, Grant) and message.granted:
            self.token = message.token
        return message

    def newest(self) -> list[Message]:
        """All that waits, without waiting."""
        found = []
        while (message := self.receive(0.0)) is not None:
            found.append(message)
        return found

    def skip(self) -> None:
        """Let go of all that waits, unread. Raises `LinkError` at the end of the connection."""
        self.socket.settimeout(0.0)
        try:
            while read_packet(self.socket):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkError(f"the supervisor is gone ({error.strerror})") from None
        raise LinkError("the supervisor has ended the session")

    def _beat(self, hz: float) -> None:
        tick = 0
        while not self._closed.wait(1.0 / hz):
            tick += 1
            try:
                self.send(Beat, 0.5, tick=tick)
            except (LinkError, MessageError):
                return

    def close(self) -> None:
        self._closed.set()
        self.socket.close()
