"""Connections to a policy server, for a program that waits for its answers: one for each row that
is asked at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vla_rl.config.serving import require_wire
from vla_rl.errors import PolicyLost
from vla_rl.serving.packing import WireError, pack, unpack

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
_PAUSE = 0.2  # seconds between two tries
_MOST_BYTES = 64 * 2**20  # of an answer
_TOLD = 400  # characters of a server's text that are shown

T = TypeVar("T")


class Connections:
    """Any number of connections to ``url``. Their pings are answered in a thread while nobody asks.

    What cannot be reached, goes away or takes longer than ``seconds`` raises `PolicyLost`, and all
    connections are closed: a late answer is never taken for another's. What answers, but not in
    openpi's protocol, raises `WireError`.
    """

    def __init__(self, url: str, seconds: float) -> None:
        require_wire("a policy on another machine")
        self.url, self.seconds = url, seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"wire {url}", daemon=True
        )
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None
        self._sockets: list[aiohttp.ClientWebSocketResponse] = []
        self.metadata: dict[str, Any] = {}

    def open(self, patience: float = 0.0) -> None:
        """Connect, unless it is: ``metadata`` is the server's own then. Where nobody answers it
        tries for ``patience`` seconds."""
        until = time.monotonic() + patience
        while not self._sockets:
            try:
                self._within(self._grow(1), min(CONNECT_SECONDS, self.seconds))
            except PolicyLost:
                if time.monotonic() > until:
                    raise
                time.sleep(min(_PAUSE, patience))

    def ask(
        self, messages: Sequence[dict[str, Any]], seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """The answers, in their order."""
        return self._within(
            self._asked([pack(message) for message in messages]), seconds or self.seconds
        )

    def close(self) -> None:
        """Idempotent."""
        if not self._loop.is_closed():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CONNECT_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _within(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        import aiohttp

        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop)
        try:
            return future.result()
        except WireError:
            raise
        except BaseException as error:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            if isinstance(error, asyncio.TimeoutError):
                raise PolicyLost(f"{self.url} did not answer within {seconds:g} s") from None
            if isinstance(error, aiohttp.WSServerHandshakeError):
                raise WireError(
                    f"{self.url} is no policy server of openpi's protocol: it answered HTTP "
                    f"{error.status}"
                ) from None
            if isinstance(error, aiohttp.InvalidURL | ValueError):
                raise WireError(
                    f"{self.url} is no address: give one such as ws://localhost:8000"
                ) from None
            if isinstance(error, OSError | aiohttp.ClientError):
                raise PolicyLost(
                    f"{self.url} cannot be reached ({error}): is the server up, and the port right?"
                ) from None
            raise

    # ----------------------------------------------------------------------------------------------
    # in the thread
    async def _grow(self, count: int) -> None:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession()
        while len(self._sockets) < count:
            socket = await self._session.ws_connect(
                self.url,
                max_msg_size=_MOST_BYTES,
                compress=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
            try:
                self.metadata = await self._answer(socket, "on connect")
            except BaseException:
                await socket.close()
                raise
            self._sockets.append(socket)

    async def _asked(self, messages: Sequence[bytes]) -> list[dict[str, Any]]:
        import aiohttp

        if any(socket.closed for socket in self._sockets):
            await self._close()
            raise PolicyLost(f"{self.url} went away")
        await self._grow(len(messages))

        async def one(socket: aiohttp.ClientWebSocketResponse, message: bytes) -> dict[str, Any]:
            try:
                await socket.send_bytes(message)
            except (OSError, aiohttp.ClientError):
                raise PolicyLost(f"{self.url} went away") from None
            return await self._answer(socket, "for actions")

        return list(await asyncio.gather(*map(one, self._sockets, messages)))

    async def _answer(self, socket: aiohttp.ClientWebSocketResponse, when: str) -> dict[str, Any]:
        from aiohttp import WSMsgType

        message = await socket.receive()
        if message.type is WSMsgType.TEXT:
            raise WireError(f"{self.url} refuses, asked {when}: {_short(message.data)}")
        if message.type is not WSMsgType.BINARY:
            raise PolicyLost(f"{self.url} went away")
        try:
            return unpack(message.data)
        except WireError as error:
            raise WireError(
                f"{self.url} speaks another protocol than openpi's, asked {when}: {error}"
            ) from None

    async def _close(self) -> None:
        sockets, self._sockets = self._sockets, []
        for socket in sockets:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(), 1.0)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _short(text: str) -> str:
    """The last line of a traceback says what was wrong."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else " ".join(lines))[:_TOLD]
