"""A policy for other programs: openpi's websocket protocol, and vla-eval's beside it.

On connect the server sends its metadata; each message after that is an observation, each answer an
action chunk. What is not understood is answered with a text, as openpi's servers answer their
errors. There is no authentication: it listens on this machine alone unless told otherwise, and
takes no connection that a web page opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

import vla_rl
from vla_rl.config.serving import ServeOptions, require_wire
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.interfaces import Policy
from vla_rl.serving import rows
from vla_rl.serving.batches import Act, Answer, Batches
from vla_rl.serving.packing import WireError, pack, pack_for_vla_eval, unpack
from vla_rl.specs import SlotObservation
from vla_rl.types import Observation

if TYPE_CHECKING:
    from aiohttp import web

_TEXTS = 64 * 2**10  # bytes of a row besides its pictures
_MOST_ROWS = 256  # of a batch
_HELLO_VERSION = 1  # of vla-eval's protocol
_READY = "OK\n"


class PolicyServer:
    """``version`` names the policy to clients. Raises `ConfigError` for a policy that nobody could
    ask over this wire."""

    def __init__(
        self, policy: Any, version: str, device: torch.device, options: ServeOptions
    ) -> None:
        require_wire("vla-rl serve")
        policy = Policy.of(policy)
        if "memory" in policy.can:
            raise ConfigError(
                f"{type(policy).__name__} remembers earlier decisions of an episode, and a message "
                "of openpi's protocol does not say which episode it is of: serve the policy "
                "beneath it"
            )
        self.options, self._embodiment = options, policy.embodiment
        self._batches, self._open = Batches(_acting(policy, device), _MOST_ROWS), 0
        pictures = sum(3 * c.height * c.width for c in self._embodiment.cameras)
        self._most = options.rows * (pictures + _TEXTS)
        self._executed = policy.executed_steps
        axes = list(policy.log_prob_axes) if "likelihood" in policy.can else []
        self.metadata: dict[str, Any] = {
            "action_horizon": policy.chunk_length,
            rows.ABOUT: {
                "protocol": rows.PROTOCOL, "version": vla_rl.__version__, "policy": version,
                "embodiment": self._embodiment.to_dict(), "chunk_length": policy.chunk_length,
                "executed_steps": self._executed, "log_prob_axes": axes, "rows": options.rows,
                "images": rows.camera_keys(self._embodiment), "state": rows.STATE, "prompt": rows.PROMPT,
            },
        }  # fmt: skip

    # ----------------------------------------------------------------------------------------------
    # running
    async def run(self, ready: Callable[[int], None]) -> None:
        """Until it is cancelled; ``ready`` gets the port once it listens. Raises `UserError` where
        it cannot."""
        from aiohttp import web

        app = web.Application()
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/vla-eval", self._guarded(self._vla_eval))
        app.router.add_get("/{any:.*}", self._guarded(self._openpi))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await self._listen(web.TCPSite(runner, self.options.host, self.options.port))
            ready(runner.addresses[0][1])
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            self._batches.close()

    async def _listen(self, site: web.TCPSite) -> None:
        host, port = self.options.host, self.options.port
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} is taken: choose another --port, or 0") from None
            if error.errno == errno.EACCES:
                raise UserError(f"--port {port} is the system's: choose one from 1024 on") from None
            raise UserError(f"--host {host} is no address of this machine ({error})") from None

    async def _healthy(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=_READY)

    def _guarded(
        self, speak: Callable[[web.WebSocketResponse], Awaitable[None]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler of connections, as long as there is room, and for programs alone: a page in a
        browser says its origin."""
        from aiohttp import web

        async def handle(request: web.Request) -> web.StreamResponse:
            socket = web.WebSocketResponse(max_msg_size=self._most, compress=False, heartbeat=30.0)
            if "Origin" in request.headers:
                return web.Response(status=403, text="web pages may not ask this policy\n")
            if not socket.can_prepare(request):
                return web.Response(
                    status=426, text="this is a websocket: connect with openpi's client\n"
                )
            if self._open >= self.options.connections:
                return web.Response(
                    status=503, text=f"all {self.options.connections} connections are taken\n"
                )
            self._open += 1
            try:
                await socket.prepare(request)
                with contextlib.suppress(ConnectionError):  # (who has gone needs no answer)
                    await speak(socket)
            finally:
                self._open -= 1
            return socket

        return handle

    # ----------------------------------------------------------------------------------------------
    # openpi's dialect
    async def _openpi(self, socket: web.WebSocketResponse) -> None:
        from aiohttp import WSMsgType

        await socket.send_bytes(pack(self.metadata))
        async for message in socket:
            try:
                if message.type is not WSMsgType.BINARY:
                    raise WireError("a message is a text: send msgpack, as openpi's client does")
                await socket.send_bytes(await self._answered(unpack(message.data)))
            except UserError as error:
                await socket.send_str(str(error))

    async def _answered(self, asked: Mapping[str, Any]) -> bytes:
        """What to send back: of one observation, or of several under `rows.ROWS`, then with a
        leading axis."""
        several = rows.ROWS in asked
        given = asked[rows.ROWS] if several else [asked]
        if not isinstance(given, list) or not 0 < len(given) <= self.options.rows:
            raise WireError(f"{rows.ROWS} must be a list of 1 to {self.options.rows} observations")
        seen = [rows.read_row(row, self._embodiment) for row in given]
        answer = await self._decided(seen, asked.get(rows.SAMPLE), rows.seeds_of(given))
        out = dict(answer.rows)
        if not asked.get(rows.LOG_PROB):
            del out["log_prob"]
        timing = {"infer_ms": 1e3 * answer.told, "batch_size": answer.batch}
        sent = {name: (x if several else x[0]).numpy() for name, x in out.items()}
        return pack({**sent, "server_timing": timing})

    async def _decided(
        self, seen: list[SlotObservation], sample: Any, seeds: list[int | None]
    ) -> Answer:
        if sample is not None and not isinstance(sample, bool):
            raise WireError(f"{rows.SAMPLE} is {sample!r}: send true, false, or leave it out")
        chosen = self.options.sample if sample is None else sample
        # where no noise is asked for it is any when sampling, and the same each time when not
        drawn = [(random.getrandbits(62) if chosen else 0) if s is None else s for s in seeds]
        try:
            return await asyncio.wrap_future(
                self._batches.ask(Observation.from_slots(seen), not chosen, drawn)
            )
        except (UserError, asyncio.CancelledError):
            raise
        except Exception as error:  # of the policy: its other clients go on
            raise WireError(
                f"the policy failed: {type(error).__name__}: {first_line(error)}"
            ) from error

    # ----------------------------------------------------------------------------------------------
    # vla-eval's dialect
    async def _vla_eval(self, socket: web.WebSocketResponse) -> None:
        """One action for each observation: a chunk is decided on, then followed for as many steps
        as it is meant for."""
        from aiohttp import WSMsgType

        queue: list[Any] = []
        async for message in socket:
            asked: dict[str, Any] = {}
            try:
                if message.type is not WSMsgType.BINARY:
                    raise WireError("a message is a text: send msgpack, as vla-eval does")
                asked = unpack(message.data)
                kind, payload = asked.get("type"), asked.get("payload")
                if kind == "hello":
                    await _reply(socket, asked, "hello", self._hello())
                elif kind in ("episode_start", "episode_end"):
                    queue.clear()
                elif kind == "observation":
                    if not queue:
                        answer = await self._decided(
                            [rows.read_row(payload, self._embodiment)], None, [None]
                        )
                        steps = int(answer.rows["valid"][0].long().cumprod(0).sum())
                        if not steps:
                            raise WireError("the policy decides on no step")
                        queue.extend(answer.rows["actions"][0, :steps].numpy())
                    await _reply(socket, asked, "action", {"actions": queue.pop(0)})
                else:
                    raise WireError(
                        f"a message is of type {kind!r}, which vla-eval's protocol does not have"
                    )
            except UserError as error:
                await _reply(socket, asked, "error", {"error": str(error)})

    def _hello(self) -> dict[str, Any]:
        wants = {
            "send_wrist_image": len(self._embodiment.cameras) > 1,
            "send_state": self._embodiment.proprio_dim > 0,
        }
        return {
            "harness_version": f"vla-rl {vla_rl.__version__}", "protocol_version": _HELLO_VERSION,
            "model_server": self.metadata[rows.ABOUT]["policy"], "capabilities": {},
            "observation_params": {name: True for name, wanted in wants.items() if wanted},
            rows.ABOUT: self.metadata[rows.ABOUT],
        }  # fmt: skip


def _acting(policy: Policy, device: torch.device) -> Act:
    """Rows [n …]: actions float32 [n h a] (physical units), valid bool [n h] and log_prob [n *k];
    told are the seconds that the batch took."""

    def act(
        observation: Observation, deterministic: bool, seeds: list[int]
    ) -> tuple[dict[str, torch.Tensor], float]:
        started = time.perf_counter()
        with torch.inference_mode():
            out = policy.act(observation.to(device), deterministic=deterministic, seeds=seeds)
        rows = {
            "actions": out.chunk.actions.float(),
            "valid": out.chunk.valid,
            "log_prob": out.behavior_log_prob.float(),
        }
        rows = {name: x.cpu() for name, x in rows.items()}
        return rows, time.perf_counter() - started

    return act


async def _reply(
    socket: web.WebSocketResponse, asked: Mapping[str, Any], kind: str, payload: dict[str, Any]
) -> None:
    number = asked.get("seq")
    seq = number if isinstance(number, int) else 0
    message = {"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}
    await socket.send_bytes(pack_for_vla_eval(message))
