"""Simulators in worker processes: requests and results through shared memory, lost workers replaced
(numpy only).

A worker serves its slots one request after the other. Images, proprio, privileged state, actions
and rewards lie in one anonymous shared block (nothing is left behind in /dev/shm, however the
processes end); only a few words per request go over pipes. Torch is not imported in a worker unless
the simulator does so itself.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, reduction
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import numpy as np

from sim.inline import SlotGuard
from sim.interpreter import check_python, starting
from sim.pool_worker import raise_user_error, slot_layout, work
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EmbodimentSpec, EpisodeSpec, SlotEvent, SlotObservation, SlotStep, TaskSpec

if TYPE_CHECKING:
    from vla_rl.interfaces import Simulator  # at run time it would pull torch into every worker

_CLOSE_SECONDS = 2.0


class ProcessPool:
    """An `Env` of ``num_workers`` spawned processes with ``slots_per_worker`` slots each.

    ``factory`` is called in each worker and returns its `Simulator`; it must be picklable (a class
    or function that can be imported, or ``functools.partial`` of one). Slot i lives in worker ``i %
    num_workers``. Each request (`start` or `step`) yields exactly one event, and a slot takes one
    request at a time.

    A worker that dies, or does not answer a request within ``hang_timeout`` seconds (None: no
    limit), is replaced: its open requests yield events with ``error``, and so does the next `step`
    of its other slots. `poll` raises `UserError` when one worker failed more than ``max_restarts``
    times in a row without answering a request in between, when it was not ready within
    ``start_timeout`` seconds that often, or with the simulator's own `UserError`. Any other
    exception of a simulator costs that slot its episode only. ``python`` is the executable that the
    workers run under (empty: this one); `ConfigError` where it cannot run them (`sim.interpreter`).
    """

    repeatable = True  # the same episode and actions give the same images again

    def __init__(
        self,
        factory: Callable[[], Simulator],
        num_workers: int = 1,
        slots_per_worker: int = 1,
        *,
        max_restarts: int = 5,
        hang_timeout: float | None = 300.0,
        start_timeout: float | None = 300.0,
        max_chunk_length: int = 128,
        python: str = "",
    ) -> None:
        if min(num_workers, slots_per_worker, max_chunk_length) < 1 or max_restarts < 0:
            raise ConfigError(
                "A process pool needs num_workers, slots_per_worker, max_chunk_length >= 1 and "
                f"max_restarts >= 0, got {num_workers}, {slots_per_worker}, {max_chunk_length} and "
                f"{max_restarts}."
            )
        try:
            self._needs_main = b"__main__" in pickle.dumps(factory)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"The simulator factory {factory!r} cannot be sent to a worker process ({error}): "
                "pass an importable class or function, or functools.partial of one."
            ) from error
        self.num_workers, self.num_slots = num_workers, num_workers * slots_per_worker
        self.embodiment: EmbodimentSpec
        self.tasks: tuple[TaskSpec, ...]
        self.privileged_dim: int
        self._factory, self._max_restarts, self._max_chunk_length = (
            factory,
            max_restarts,
            max_chunk_length,
        )
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._start_timeout = math.inf if start_timeout is None else start_timeout
        check_python(python)
        self._python = python
        self._events: list[SlotEvent] = []
        self._failure = ""  # why the pool gave up
        self._lost: dict[int, str] = {}  # slots whose episode was lost while no request was open
        self._block: np.ndarray | None = None  # [num_slots] records, see slot_layout
        self._shared: list[_SharedMemory] = []
        self.workers = [_Worker(i) for i in range(num_workers)]
        self._shutdown = weakref.finalize(self, _shut_down, self.workers, self._shared)
        try:
            for worker in self.workers:
                worker.launch(self._factory, self._python, self._needs_main)
            while self._block is None:
                self._receive(math.inf)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------------------- the Env interface
    def start(self, slot: int, episode: EpisodeSpec) -> None:
        self._records()
        self._guard.start(slot, episode)
        self._lost.pop(slot, None)
        self.workers[slot % self.num_workers].request(slot, episode, 0)

    def step(self, slot: int, actions: np.ndarray) -> None:
        """Send a chunk float32 [h a]. Raises `UserError` for a wrong shape or values that are
        not finite."""
        self._records()
        if len(actions) > self._max_chunk_length:
            raise UserError(
                f"Slot {slot} got a chunk of {len(actions)} control steps; this pool was opened "
                f"for at most {self._max_chunk_length}: open it with a larger max_chunk_length."
            )
        actions = self._guard.step(slot, actions)
        if slot in self._lost:
            self._fail(slot, self._lost[slot], blameless=True)
            return
        self._records()["actions"][slot, : len(actions)] = actions
        self.workers[slot % self.num_workers].request(slot, None, len(actions))

    def poll(self, timeout: float | None = None) -> list[SlotEvent]:
        """Events that are ready; waits for at least one, at most ``timeout`` seconds, and not
        where none can come."""
        self._records()
        end = math.inf if timeout is None else time.monotonic() + timeout
        self._receive(0.0)
        while not self._events and any(w.pending for w in self.workers) and time.monotonic() < end:
            self._receive(end - time.monotonic())
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Stop the workers and free the shared memory. May be called again."""
        self._block = None
        self._shutdown()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------- statistics
    @property
    def busy_seconds(self) -> float:
        """Seconds spent inside the simulators, over all workers."""
        return sum(w.busy_seconds for w in self.workers)

    @property
    def restarts(self) -> int:
        return sum(w.restarts for w in self.workers)

    # ------------------------------------------------------------------------------------- requests
    def _records(self) -> np.ndarray:
        """[num_slots] of the shared block. Raises `UserError` where the pool is closed, or gave
        up."""
        if self._block is None:
            raise UserError("This process pool is closed: open a new one.")
        if self._failure:
            raise UserError(self._failure)
        return self._block

    def _receive(self, timeout: float) -> None:
        """Take in what workers report within ``timeout`` seconds (less where a worker's own
        limit comes first)."""
        limits = [
            worker.since + worker.limit(self._start_timeout, self._hang_timeout)
            for worker in self.workers
        ]
        timeout = max(0.0, min(timeout, min(limits) - time.monotonic()))
        sources: list[connection.Connection | int] = []
        for worker in self.workers:
            sources += [worker.conn, worker.process.sentinel]
        ready = set(connection.wait(sources, None if timeout == math.inf else timeout))
        for worker in [w for w in self.workers if w.conn in ready or w.process.sentinel in ready]:
            process = worker.process
            try:
                while worker.conn.poll():
                    self._answer(worker, worker.conn.recv())
                alive = process.is_alive()
            except (EOFError, OSError):
                alive = False
            if not alive and worker.process is process:
                self._replace(worker, _cause_of_death(process))
        for worker in self.workers:
            limit = worker.limit(self._start_timeout, self._hang_timeout)
            if time.monotonic() - worker.since > limit:
                worker.process.kill()
                self._replace(worker, f"did not answer within {limit:g} s and was killed")

    def _answer(self, worker: _Worker, message: tuple) -> None:
        """One message of a worker: it is ready, it failed to start, or it answers its oldest
        open request."""
        worker.since = time.monotonic()
        kind, *rest = message
        if kind == "ready":
            self._ready(worker, *rest)
            return
        if kind == "failed":
            raise_user_error(*rest)
            worker.last_error = rest[1]  # it ends now, which the pipe tells
            return
        slot, _, _ = worker.pending.popleft()
        seconds, *rest = rest
        worker.busy_seconds += seconds
        worker.failures, worker.last_error = 0, ""
        if kind == "raised":
            worker.last_error = rest[1]
            episode = self._guard.answered(slot)
            raise_user_error(*rest)
            self._events.append(
                SlotEvent(slot, episode, None, error=f"the simulator raised {rest[1]}")
            )
            return
        instruction, length, executed, *ended = rest
        episode = self._guard.answered(slot, executed)
        record = self._records()[slot]
        observation = SlotObservation(
            images={name: record[f"image:{name}"].copy() for name in self.embodiment.camera_names},
            proprio=record["proprio"].copy(),
            instruction=instruction,
            privileged=record["privileged"].copy() if self.privileged_dim else None,
        )
        step = None
        if kind == "step":
            rewards = record["rewards"][:length].copy()
            step = SlotStep(observation, rewards, executed, *ended)
        worker.control_steps += executed
        worker.episodes += kind == "start"
        self._events.append(SlotEvent(slot, episode, observation, step, seconds=seconds))

    # -------------------------------------------------------------------------- workers come and go
    def _ready(
        self,
        worker: _Worker,
        embodiment: EmbodimentSpec,
        tasks: tuple[TaskSpec, ...],
        privileged_dim: int,
    ) -> None:
        if self._block is None:
            self.embodiment, self.tasks, self.privileged_dim = embodiment, tasks, privileged_dim
            self._guard = SlotGuard(self.num_slots, embodiment)
            layout = slot_layout(embodiment, privileged_dim, self._max_chunk_length)
            self._shared.append(_SharedMemory(self.num_slots * layout.itemsize))
            self._block = np.frombuffer(self._shared[0].memory, dtype=layout)[: self.num_slots]
        self.embodiment.require(embodiment, "the first worker", f"worker {worker.index}")
        worker.ready = True
        # a worker that died meanwhile is noticed by the next wait
        with contextlib.suppress(OSError):
            reduction.send_handle(worker.conn, self._shared[0].fd, worker.pid)
            worker.conn.send((self.num_slots, self._max_chunk_length))
        for request in worker.pending:
            worker.send(request)

    def _replace(self, worker: _Worker, cause: str) -> None:
        """Report what was lost with a worker, and launch another unless this happens again and
        again."""
        worker.process.join(_CLOSE_SECONDS)
        worker.conn.close()
        reason = f"worker {worker.index} (pid {worker.pid}) {cause}"
        if worker.last_error:
            reason += f"; its last exception: {worker.last_error}"
        # the first was being served; the others merely waited
        for i, (slot, _, _) in enumerate(worker.pending):
            self._fail(slot, reason, blameless=i > 0)
        worker.pending.clear()
        if self._block is not None:
            self._lost |= dict.fromkeys(
                range(worker.index, self.num_slots, self.num_workers), reason
            )
        worker.failures += 1
        if self._block is None:
            raise UserError(
                f"The simulator could not be started: {reason}. Messages above may say more. "
                "(Where the factory is defined in a script, the script must open the pool under: "
                "if __name__ == '__main__'.)"
            )
        if worker.failures > self._max_restarts:
            self._failure = (
                f"The simulator failed {worker.failures} times in a row "
                f"(max_restarts={self._max_restarts}): {reason}."
            )
            raise UserError(self._failure)
        worker.restarts += 1
        worker.launch(self._factory, self._python, self._needs_main)

    def _fail(self, slot: int, reason: str, blameless: bool) -> None:
        self._events.append(
            SlotEvent(slot, self._guard.answered(slot), None, error=reason, blameless=blameless)
        )


@dataclass
class _Worker:
    """The parent's side of a worker. ``pending``: requests without an answer yet, oldest first.
    ``busy_seconds`` inside the simulator, ``control_steps`` and ``episodes`` are of those that it
    replaced too."""

    index: int
    process: BaseProcess = field(init=False)
    conn: connection.Connection = field(init=False)
    pid: int = 0
    ready: bool = False
    pending: deque[tuple[int, EpisodeSpec | None, int]] = field(default_factory=deque)
    since: float = 0.0  # when it last reported, or was given something to do
    failures: int = 0  # in a row
    restarts: int = 0
    last_error: str = ""
    busy_seconds: float = 0.0
    control_steps: int = 0
    episodes: int = 0

    def launch(self, factory: Callable[[], Simulator], python: str, main: bool) -> None:
        context = get_context("spawn")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(
            target=work,
            args=(theirs, factory),
            name=f"vla-rl-sim-{self.index}",
            daemon=True,
        )
        self.ready, self.since = False, time.monotonic()
        with starting(python, main=main):
            self.process.start()
        assert self.process.pid is not None, "it was started"
        self.pid = self.process.pid
        theirs.close()

    def limit(self, start_timeout: float, hang_timeout: float) -> float:
        """How long after ``since`` it must have reported something."""
        if not self.ready:
            return start_timeout
        return hang_timeout if self.pending else math.inf

    def request(self, slot: int, episode: EpisodeSpec | None, length: int) -> None:
        if not self.pending:
            self.since = time.monotonic() if self.ready else self.since
        self.pending.append((slot, episode, length))
        if self.ready:
            self.send((slot, episode, length))

    def send(self, request: tuple | None) -> None:
        # a dead worker is noticed by the next wait, which reports the request
        with contextlib.suppress(OSError):
            self.conn.send(request)


class _SharedMemory:
    """Anonymous memory that other processes map through its file descriptor; no name of it can
    be left behind."""

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("vla-rl-pool")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # a view is alive; the mapping goes with it
            self.memory.close()


def _shut_down(workers: list[_Worker], shared: list[_SharedMemory]) -> None:
    """Ask every worker to end, kill those that do not (or are still starting), free the memory."""
    started = [worker for worker in workers if worker.pid]
    for worker in started:
        if worker.ready:
            worker.send(None)
        else:
            worker.process.kill()
    end = time.monotonic() + _CLOSE_SECONDS
    for worker in started:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        worker.conn.close()
    while shared:
        shared.pop().close()


def _cause_of_death(process: BaseProcess) -> str:
    process.join(_CLOSE_SECONDS)
    code = process.exitcode
    if code is None:
        process.kill()
        return "closed its connection and was killed"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
