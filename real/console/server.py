"""HTTP and WebSocket of the console: a static page, one socket per page, and a POST that is an
e-stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from real.console.hub import Hub, Pictures
from real.console.link import SocketLink
from real.console.security import FULL, MAX_TEXT_BYTES, WATCH, Gate
from real.console.settings import ConsoleConfig, Facts
from real.console.viewers import Viewer
from vla_rl.errors import ConfigError, MissingPackage, first_line

try:
    from aiohttp import WSCloseCode, WSMsgType, web
except ModuleNotFoundError as error:  # pragma: no cover - the environment of the tests has it
    raise MissingPackage("aiohttp", "real", "The operator console") from error

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
BEAT_HZ = 20.0
STUCK_S = 3.0  # a page that takes no byte for this long is gone
SILENT_S = 120.0  # a hidden page's timers run once a minute

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")


def _tls(config: ConsoleConfig) -> ssl.SSLContext | None:
    if not config.tls_key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"console.tls_certificate {config.tls_certificate} and console.tls_key "
            f"{config.tls_key} are not usable: {first_line(error)}"
        ) from None
    return context


async def _every(period: float, act: Callable[[], None]) -> None:
    due = time.monotonic()
    while True:
        act()
        due = max(due + period, time.monotonic())  # what was missed is not caught up
        await asyncio.sleep(due - time.monotonic())


class Console:
    """The server. ``url`` is the address to open, with the token, once it has started;
    ``watch_url`` is for who may watch alone: nothing that such a page says reaches the
    supervisor."""

    def __init__(
        self,
        config: ConsoleConfig,
        link: SocketLink,
        pictures: Pictures,
        facts: Facts | None = None,
    ):
        self.config = config
        self.gate = Gate(config, time.monotonic)
        self.hub = Hub(config, link, pictures, time.monotonic, facts or Facts())
        self._files = {
            p.name: (p.read_bytes(), TYPES[p.suffix]) for p in PAGE.iterdir() if p.suffix in TYPES
        }
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return self._url(FULL)

    @property
    def watch_url(self) -> str:
        return self._url(WATCH)

    def _url(self, right: str) -> str:
        host = (
            "localhost"
            if self.config.host in ("127.0.0.1", "0.0.0.0", "::", "::1")
            else self.config.host
        )
        if self.config.names:
            host = self.config.names[0]
        return f"{self.config.scheme}://{host}:{self.gate.port}/?token={self.gate.tokens[right]}"

    async def start(self) -> None:
        """Raises `ConfigError` where the address is taken or the certificate is not usable."""
        application = web.Application(middlewares=[self._guard], client_max_size=1024)
        application.on_response_prepare.append(self._headers)
        application.add_routes(
            [
                web.get("/", self._file),
                web.get("/page/{name}", self._file),
                web.get("/ws", self._socket),
                web.post("/estop", self._estop),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            site = web.TCPSite(
                self._runner, self.config.host, self.config.port, ssl_context=_tls(self.config)
            )
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"the console cannot listen on {self.config.host}:{self.config.port}: "
                f"{first_line(error)}. Set console.port to another one (0: any that is free)"
            ) from None
        self.gate.port = self._runner.addresses[0][1]
        self.hub.start()
        self._tasks = [
            asyncio.create_task(_every(1 / BEAT_HZ, self.hub.beat)),
            asyncio.create_task(_every(1 / self.config.state_hz, self.hub.show)),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        self.hub.link.close()

    # ------------------------------------------------------------------------------ who may come in
    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if not self.gate.knows_host(host):
            return _refusal(421, "This server is not known by that name: add it to console.names.")
        token = request.query.get("token")
        if token is not None:
            return self._enter(request, token)
        if not self.gate.right_of_cookie(request.cookies):
            return _refusal(401, "Open the address that the session printed, with its token.")
        upgrade = request.headers.get("Upgrade", "").lower() == "websocket"
        if (upgrade or request.method != "GET") and not self.gate.knows_origin(
            request.headers.get("Origin"), host
        ):
            return _refusal(403, "This was asked for by another page.")
        return await handler(request)

    def _enter(self, request: web.Request, token: str) -> web.StreamResponse:
        """Exchanges a token in the address for a cookie, and sends the browser to the address
        without it."""
        if request.method != "GET" or request.path != "/":
            return _refusal(401, "The token opens the start page alone.")
        right = self.gate.right_of_token(token)
        if not right:
            if not self.gate.may_try():
                return _refusal(429, "Too many wrong tokens. Wait some seconds.")
            return _refusal(
                401, "That token is of another session: open the address that the session printed."
            )
        answer = web.Response(status=303, headers={"Location": "/"})
        name, cookie, secure = (
            self.gate.cookie_name,
            self.gate.cookies[right],
            bool(self.config.tls_key),
        )
        answer.set_cookie(name, cookie, httponly=True, samesite="Strict", path="/", secure=secure)
        return answer

    async def _headers(self, request: web.Request, response: web.StreamResponse) -> None:
        host = request.headers.get("Host", "")
        response.headers.update(self.gate.headers(host if self.gate.knows_host(host) else ""))

    # -------------------------------------------------------------------------------------- answers
    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            return _refusal(404, "There is no such file.")
        data, kind = self._files[name]
        return web.Response(body=data, content_type=kind, charset="utf-8")

    async def _estop(self, request: web.Request) -> web.StreamResponse:
        """The second way for an e-stop, where a page's socket is closed or full."""
        if self.gate.right_of_cookie(request.cookies) != FULL:
            return _refusal(403, "This link is for watching alone.")
        done = self.hub.requests.estop()
        return (
            web.Response(status=204)
            if done
            else _refusal(503, "The supervisor is gone: use the arm's own button.")
        )

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        viewer = self.hub.enter(watches=self.gate.right_of_cookie(request.cookies) != FULL)
        if viewer is None:
            return _refusal(503, "There are too many pages open.")
        answer = web.WebSocketResponse(heartbeat=2.0, compress=False, max_msg_size=MAX_TEXT_BYTES)
        try:
            await answer.prepare(request)
            sender = asyncio.create_task(self._send(viewer, answer))
            try:
                await self._receive(viewer, answer)
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        finally:
            self.hub.leave(viewer)
        return answer

    async def _receive(self, viewer: Viewer, answer: web.WebSocketResponse) -> None:
        while True:
            try:
                message = await answer.receive(timeout=SILENT_S)
            except (asyncio.TimeoutError, ConnectionError):
                break
            if message.type is WSMsgType.TEXT:
                self.hub.requests.hear(viewer, message.data)
            elif message.type is WSMsgType.BINARY:
                self.hub.pages.refuse(viewer, "pages send text")
            else:
                return  # closed, by either side or for a message that was too large
            if viewer.flooding:
                await answer.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many messages")
                return

    async def _send(self, viewer: Viewer, answer: web.WebSocketResponse) -> None:
        while not answer.closed:
            data = await viewer.out.next()
            try:
                sending = (
                    answer.send_str(data) if isinstance(data, str) else answer.send_bytes(data)
                )
                await asyncio.wait_for(sending, STUCK_S)
            except (asyncio.TimeoutError, ConnectionError, RuntimeError):
                self.hub.leave(viewer)
                await answer.close(code=WSCloseCode.TRY_AGAIN_LATER)


async def serve(console: Console, announce: Callable[[str], None], stop: asyncio.Event) -> None:
    """Runs until ``stop`` is set or the supervisor is gone."""
    await console.start()
    announce(f"{console.url}\n{console.watch_url}")
    try:
        while not stop.is_set() and not console.hub.lost:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
        if console.hub.lost:
            await asyncio.sleep(1.0)  # so that the pages hear of it
    finally:
        await console.stop()


def run(
    config: ConsoleConfig,
    connection: socket.socket,
    pictures: Pictures,
    announce: Callable[[str], None],
    facts: Facts | None = None,
) -> None:
    """The body of the console's process: ``connection`` leads to the supervisor, ``announce`` gets
    the addresses to open, a line each: of those who may do all, and of those who may watch.

    Ends with the supervisor, or on SIGTERM and Ctrl-C.
    """
    import signal

    async def body() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(Console(config, SocketLink(connection), pictures, facts=facts), announce, stop)

    asyncio.run(body())
