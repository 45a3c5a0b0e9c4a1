"""Servers for tests: one of this project in a thread, and one that speaks as openpi's do, well or
badly."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from aiohttp import WSMsgType, web

from vla_rl.config.serving import ServeOptions
from vla_rl.serving.packing import pack, unpack
from vla_rl.serving.server import PolicyServer


@contextlib.contextmanager
def in_thread(run: Callable[[Callable[[int], None]], Any]) -> Iterator[str]:
    """The address of what ``run`` serves, a coroutine that calls back with its port; cancelled at
    the end."""
    loop, listening, ports = asyncio.new_event_loop(), threading.Event(), []

    async def main() -> None:
        def ready(port: int) -> None:
            ports.append(port)
            listening.set()

        with contextlib.suppress(asyncio.CancelledError):
            await run(ready)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for other in left:
            other.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    task = loop.create_task(main())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,), daemon=True)
    thread.start()
    assert listening.wait(60), "the server does not come up"
    try:
        yield f"ws://localhost:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        assert not thread.is_alive()
        loop.close()


@contextlib.contextmanager
def served(policy: Any, **options: Any) -> Iterator[str]:
    """The address of a server of ``policy``."""
    chosen = ServeOptions(**{"port": 0, **options})
    server = PolicyServer(policy, "policy@0", torch.device("cpu"), chosen)
    with in_thread(server.run) as url:
        yield url


@contextlib.contextmanager
def speaking(
    answer: Callable[[dict[str, Any]], Any], metadata: Any = None, port: int = 0
) -> Iterator[str]:
    """A server of openpi's form: it sends ``metadata``, then what ``answer`` makes of each message:
    a mapping, bytes or a text as they are, None closes. ``answer`` runs in a thread of its own."""

    async def connected(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        if metadata is not Silent:
            await send(socket, {} if metadata is None else metadata)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await send(socket, await asyncio.to_thread(answer, unpack(message.data)))
        return socket

    async def send(socket: web.WebSocketResponse, value: Any) -> None:
        if value is None:
            await socket.close()
        elif isinstance(value, str):
            await socket.send_str(value)
        else:
            await socket.send_bytes(value if isinstance(value, bytes) else pack(value))

    async def run(ready: Callable[[int], None]) -> None:
        app = web.Application()
        app.router.add_get("/", connected)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            ready(runner.addresses[0][1])
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    with in_thread(run) as url:
        yield url


class Silent:
    """As ``metadata``: none are sent."""
