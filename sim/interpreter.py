"""Workers under another Python than this one, for a simulator whose packages cannot live beside torch's.

`multiprocessing` gives a child its parent's ``sys.path``, so with another executable alone it would still import this
Python's numpy. Here the child keeps its own packages, and of this process's path gets what belongs to no Python: a checkout,
the working directory, what PYTHONPATH names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path

from vla_rl.errors import ConfigError, first_line

_PROBE = "import json, sys; import sim.pool_worker; print(json.dumps([p for p in sys.path if p]))"
_PROBE_SECONDS = 120.0  # a first import from a slow disk
_STARTING = threading.Lock()


def check_python(python: str) -> None:
    """Raise `ConfigError` unless ``python`` (empty: this one) can run a worker."""
    if python:
        _worker_path(os.path.abspath(os.path.expanduser(python)))


@contextlib.contextmanager
def started_by(python: str) -> Iterator[None]:
    """A child that starts inside the block runs under ``python``, with that one's packages; empty: nothing changes.

    `multiprocessing` knows one executable for all children of a process, so it is put back before any other pool starts.
    """
    with _STARTING:
        if not python:
            yield
            return
        python = os.path.abspath(os.path.expanduser(python))
        path, executable, prepare = list(_worker_path(python)), spawn.get_executable(), spawn.get_preparation_data
        try:
            spawn.set_executable(python)
            spawn.get_preparation_data = lambda name: prepare(name) | {"sys_path": path}
            yield
        finally:
            spawn.get_preparation_data = prepare
            spawn.set_executable(executable)


@functools.cache
def _worker_path(python: str) -> tuple[str, ...]:
    """``sys.path`` of a worker under ``python``. Raises `ConfigError` where it cannot run one."""
    place = f"slots.python={python}"
    if not os.path.isfile(python):
        raise ConfigError(f"{place} is no file: name a Python, such as /path/to/venv/bin/python, or leave it empty")
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{place} may not be executed: name a Python, or change its permissions (chmod +x)")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(_places())}
    try:
        done = subprocess.run([python, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=_PROBE_SECONDS)
        if done.returncode == 0:
            return tuple(json.loads(done.stdout.splitlines()[-1]))
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as problem:
        said = first_line(problem)
    raise ConfigError(
        f"{place} cannot run a simulator's worker, which needs Python 3.10, numpy and this project there ({said}): install "
        "what is missing into it (pip install --no-deps vla-rl), or leave slots.python empty"
    )


def _places() -> list[str]:
    """Of this process's path what belongs to no Python, absolute."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = [Path(folder).resolve() for folder in own]
    places = dict.fromkeys(os.path.abspath(p) for p in (str(Path(__file__).resolve().parent.parent), *sys.path))
    return [p for p in places if not any(Path(p).resolve().is_relative_to(folder) for folder in folders)]
