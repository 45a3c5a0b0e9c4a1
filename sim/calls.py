"""Calls in worker processes, which may run under another Python (`sim.interpreter`); answers come
in the order of the calls.

`concurrent.futures` does not do here: what it hands to its workers differs between versions of
Python.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

from sim.interpreter import check_python, starting
from sim.pool_worker import describe, end_with_parent, raise_user_error
from vla_rl.errors import UserError

_CLOSE_SECONDS = 2.0
_AHEAD = 2  # calls per worker that are under way or wait for their turn
_NOTHING = object()


class Calls:
    """``workers`` processes, each of which makes something with ``setup()`` once and then serves
    ``function(made, x)``.

    What is sent must be picklable by name. Close it after use, or use it as a context manager.
    ``died`` is what a `UserError` says when a worker ends by itself; ``python`` their executable
    (empty: this one).
    """

    def __init__(
        self, setup: Callable[[], Any], workers: int = 1, *, died: str, python: str = ""
    ) -> None:
        check_python(python)
        self._died, self._asked = died, 0
        self._workers: dict[connection.Connection, BaseProcess] = {}
        context = get_context("spawn")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, setup), daemon=True)
            with starting(python, main=False):
                process.start()
            theirs.close()
            self._workers[ours] = process
        self._idle = list(self._workers)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers: idle ones in order, others at once."""
        for conn, process in self._workers.items():
            with contextlib.suppress(OSError):  # it is dead already
                conn.send(None)
            if conn not in self._idle:
                process.terminate()
        for conn, process in self._workers.items():
            process.join(_CLOSE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            conn.close()
        self._workers, self._idle = {}, []

    def one(self, function: Callable[[Any, Any], Any], x: Any = None) -> Any:
        return next(self.ordered(function, [x]))

    def ordered(
        self, function: Callable[[Any, Any], Any], arguments: Iterable[Any]
    ) -> Iterator[Any]:
        """``function(made, x)`` of each x (there may be endlessly many) in their order; some are
        worked on ahead.

        Raises the `UserError` of a setup or call at its turn, RuntimeError for whatever else they
        raised.
        """
        coming, first = iter(arguments), self._asked
        answers: dict[int, tuple[bool, Any]] = {}
        wanted, x = first, next(coming, _NOTHING)
        while x is not _NOTHING or wanted < self._asked:
            while (
                x is not _NOTHING
                and self._idle
                and self._asked - wanted < _AHEAD * len(self._workers)
            ):
                self._ask(function, x)
                x = next(coming, _NOTHING)
            # (answers to calls that nobody waits for any more are left out)
            if wanted not in answers:
                answers |= {
                    number: (good, answer)
                    for number, good, answer in self._answers()
                    if number >= first
                }
                continue
            good, answer = answers.pop(wanted)
            wanted += 1
            if not good:
                raise_user_error(*answer)
                raise RuntimeError(answer[1])
            yield answer

    def _ask(self, function: Callable[[Any, Any], Any], x: Any) -> None:
        try:
            self._idle.pop(0).send((self._asked, function, x))
        except OSError as error:
            raise UserError(self._died) from error
        self._asked += 1

    def _answers(self) -> Iterator[tuple[int, bool, Any]]:
        """(number of the call, whether it went well, what it returned or raised) of those that
        ended meanwhile."""
        ready = set(connection.wait(list(self._workers)))
        for conn in [conn for conn in self._workers if conn in ready]:
            try:
                yield conn.recv()
            except (EOFError, OSError) as error:
                raise UserError(self._died) from error
            self._idle.append(conn)


def _work(conn: connection.Connection, setup: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    made, failed = None, None
    try:
        made = setup()
    except Exception as error:  # whatever a plug-in raises; the first call says it
        failed = describe(error)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (request := conn.recv()) is not None:
            number, function, x = request
            try:
                answer = (
                    (number, True, function(made, x)) if failed is None else (number, False, failed)
                )
            except Exception as error:
                answer = (number, False, describe(error))
            conn.send(answer)


def check_machine(config: Any, python: str) -> None:
    """``config.check_machine()`` of an env's config, under the Python that its workers run under
    (empty: this one)."""
    if not python:
        config.check_machine()
        return
    died = f"slots.python={python} ended while it looked whether this env can run there"
    with Calls(dict, died=died, python=python) as calls:
        calls.one(_check_machine, config)


def _check_machine(_: Any, config: Any) -> None:
    config.check_machine()
