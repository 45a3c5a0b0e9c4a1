"""A page that only watches: ``python -m benchmarks.robot.viewer URL FILE`` writes on SIGTERM how
old each picture was (s).

It answers as the page's scripts do, so that it is sent as much; nothing is decoded or drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from real.console.video import HEAD


async def watch(url: str) -> list[float]:
    """Ages of the pictures that came from the console at ``url`` until SIGTERM."""
    import aiohttp

    ages: list[float] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)  # type: ignore[union-attr]
    address = url.split("/?")[0].rstrip("/")
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        await (await client.get(url)).read()
        async with client.ws_connect(address + "/ws", headers={"Origin": address}) as socket:
            print("ready", flush=True)
            with contextlib.suppress(asyncio.CancelledError):
                await _answer(socket, ages)
    return ages


async def _answer(socket: Any, ages: list[float]) -> None:
    nonce, number = "", 0

    async def say(kind: str, **fields: Any) -> None:
        nonlocal number
        number += 1
        await socket.send_str(
            json.dumps({"k": kind, "c": nonce, "n": number, "t": time.monotonic(), **fields})
        )

    async for message in socket:
        if isinstance(message.data, bytes):
            _, _, camera, picture, capture, _, _ = HEAD.unpack(message.data[: HEAD.size])
            ages.append(time.monotonic() - capture)
            await say("seen", camera=camera, number=picture)
            continue
        heard = json.loads(message.data)
        if heard["k"] == "hello":
            nonce = heard["nonce"]
        elif heard["k"] == "state":
            await say("beat", echo=heard["you"]["stamp"], seen=time.monotonic())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(watch(sys.argv[1]))), encoding="utf-8")
