"""Workers under another Python than this one, for a simulator whose packages cannot live beside
torch's.

`multiprocessing` gives a child its parent's ``sys.path``, so with another executable alone it would
still import this Python's numpy. Here the child keeps its own packages, and of this process's path
gets what belongs to no Python: a checkout, the working directory, what PYTHONPATH names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Any

from vla_rl.errors import ConfigError, first_line

# a worker is one thread: more workers use more cores
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB")
SINGLE_THREADED = {f"{name}_NUM_THREADS": "1" for name in _THREADS}
_PROBE = "import json, sys; import sim.pool_worker; print(json.dumps([p for p in sys.path if p]))"
_PROBE_SECONDS = 120.0  # a first import from a slow disk
_STARTING = threading.Lock()


def check_python(python: str) -> None:
    """Raise `ConfigError` unless ``python`` (empty: this one) can run a worker."""
    if python:
        _worker_path(os.path.abspath(os.path.expanduser(python)))


@functools.cache
def version_of(package: str, python: str = "") -> str:
    """The installed version of ``package`` under ``python`` (empty: this one); "" where it is
    not installed there."""
    if not python:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(_places())}
    try:
        done = subprocess.run(
            [python, "-c", code], env=env, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def started_by(python: str) -> Iterator[None]:
    """A child that starts inside the block runs under ``python``, with that one's packages; empty:
    nothing changes.

    `multiprocessing` knows one executable for all children of a process, so it is put back before
    any other pool starts.
    """
    with _STARTING:
        if not python:
            yield
            return
        python = os.path.abspath(os.path.expanduser(python))
        path, executable, prepare = (
            list(_worker_path(python)),
            spawn.get_executable(),
            spawn.get_preparation_data,
        )
        try:
            spawn.set_executable(python)
            spawn.get_preparation_data = lambda name: prepare(name) | {"sys_path": path}
            yield
        finally:
            spawn.get_preparation_data = prepare
            spawn.set_executable(executable)


@contextlib.contextmanager
def starting(python: str, *, main: bool) -> Iterator[None]:
    """A child that starts inside the block has one thread, runs under ``python`` (`started_by`),
    never sees Ctrl-C and, unless it needs the ``main`` module, does not run the parent's script
    again."""
    resource_tracker.ensure_running()  # it would unblock SIGINT
    hidden = contextlib.nullcontext() if main else _main_module_hidden()
    with _environment(SINGLE_THREADED), _interrupts_blocked(), started_by(python), hidden:
        yield


@functools.cache
def _worker_path(python: str) -> tuple[str, ...]:
    """``sys.path`` of a worker under ``python``. Raises `ConfigError` where it cannot run one."""
    place = f"slots.python={python}"
    if not os.path.isfile(python):
        raise ConfigError(
            f"{place} is no file: name a Python, such as /path/to/venv/bin/python, or "
            "leave it empty"
        )
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"{place} may not be executed: name a Python, or change its permissions (chmod +x)"
        )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(_places())}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
        if done.returncode == 0:
            return tuple(json.loads(done.stdout.splitlines()[-1]))
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as problem:
        said = first_line(problem)
    raise ConfigError(
        f"{place} cannot run a simulator's worker, which needs Python 3.10, numpy and this project "
        f"there ({said}): install what is missing into it (pip install --no-deps vla-rl), or leave "
        "slots.python empty"
    )


def _places() -> list[str]:
    """Of this process's path what belongs to no Python, absolute."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = [Path(folder).resolve() for folder in own]
    places = dict.fromkeys(
        os.path.abspath(p) for p in (str(Path(__file__).resolve().parent.parent), *sys.path)
    )
    return [
        p for p in places if not any(Path(p).resolve().is_relative_to(folder) for folder in folders)
    ]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a child that starts inside the block: libraries read them
    when they are loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """A child that starts inside the block does not run the parent's main script again.

    It would import all that the script does (torch: seconds and 270 MB), and break where a script
    has no main guard.
    """
    main = sys.modules["__main__"]
    before: dict[str, Any] = {
        name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
    }
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A child that starts inside the block never sees Ctrl-C, not even while it imports; the
    parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
