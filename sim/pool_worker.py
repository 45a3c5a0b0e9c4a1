"""What runs in a worker process of `sim.pool`: it builds the simulator, then serves requests
until told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, parent_process, reduction
from typing import TYPE_CHECKING

import numpy as np

from sim.inline import run_request
from vla_rl import errors
from vla_rl.errors import UserError
from vla_rl.specs import EmbodimentSpec, EpisodeSpec, SlotStep

if TYPE_CHECKING:
    from vla_rl.interfaces import Simulator  # at run time it would pull torch into every worker


def slot_layout(embodiment: EmbodimentSpec, privileged_dim: int, max_chunk_length: int) -> np.dtype:
    """The record of one slot in the shared block."""
    return np.dtype(
        [
            *((f"image:{c.name}", np.uint8, (c.height, c.width, 3)) for c in embodiment.cameras),
            ("proprio", np.float32, (embodiment.proprio_dim,)),
            ("privileged", np.float32, (privileged_dim,)),
            ("actions", np.float32, (max_chunk_length, embodiment.action_dim)),
            ("rewards", np.float32, (max_chunk_length,)),
        ],
        align=True,
    )


def work(conn: connection.Connection, factory: Callable[[], Simulator]) -> None:
    """Build the simulator, then serve requests until told to end or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        simulator = factory()
    except Exception as error:  # whatever a plug-in raises; the parent words it
        conn.send(("failed", *describe(error)))
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    conn.send(("ready", simulator.embodiment, simulator.tasks, simulator.privileged_dim))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        fd = reduction.recv_handle(conn)
        num_slots, max_chunk_length = conn.recv()
        layout = slot_layout(simulator.embodiment, simulator.privileged_dim, max_chunk_length)
        memory = mmap.mmap(fd, num_slots * layout.itemsize)
        os.close(fd)
        _serve(conn, simulator, np.frombuffer(memory, dtype=layout))
    simulator.close()


def _serve(conn: connection.Connection, simulator: Simulator, block: np.ndarray) -> None:
    episodes: dict[int, EpisodeSpec] = {}
    while (request := conn.recv()) is not None:
        slot, episode, length = request
        started = time.perf_counter()
        if episode is not None:
            episodes[slot] = episode
        actions = None if episode is not None else block["actions"][slot, :length].copy()
        try:
            result = run_request(simulator, slot, episodes[slot], actions)
        except Exception as error:  # whatever a plug-in raises; the parent words it
            conn.send(("raised", time.perf_counter() - started, *describe(error)))
            continue
        seconds = time.perf_counter() - started
        outcome: tuple[object, ...] = (0, 0)
        if isinstance(result, SlotStep):
            observation = result.observation
            block["rewards"][slot, :length] = result.rewards
            ended = (result.terminated, result.truncated, result.success, result.failure)
            outcome = (
                length,
                result.executed,
                *ended,
                result.sent,
                result.human,
                result.label_source,
                result.instead,
            )
        else:
            observation = result
        for name, image in observation.images.items():
            block[f"image:{name}"][slot] = image
        block["proprio"][slot] = observation.proprio
        if observation.privileged is not None and simulator.privileged_dim:
            block["privileged"][slot] = observation.privileged
        conn.send(
            ("start" if actions is None else "step", seconds, observation.instruction, *outcome)
        )


def describe(error: Exception) -> tuple[str | None, str]:
    """The class name of a `UserError` (None for others), and the message; with its place where
    it is not the user's."""
    if isinstance(error, UserError):
        return next(
            c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c
        ), str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return None, f"{type(error).__name__}: {error}{place}"


def raise_user_error(name: str | None, text: str) -> None:
    """Raise, in the parent, the `UserError` that a worker described (``name`` of its class), if
    it is one."""
    if name is not None:
        cls = getattr(errors, name, UserError)
        error = cls.__new__(cls)  # some classes build their message in __init__
        error.args = (text,)
        raise error


def end_with_parent() -> None:
    """A busy worker must not outlive a parent that was killed (an idle one sees its pipe close)."""
    parent = parent_process()
    assert parent is not None, "a worker process has one"
    connection.wait([parent.sentinel])
    os._exit(1)
