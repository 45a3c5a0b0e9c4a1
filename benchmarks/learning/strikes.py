"""What strikes a run on two Ray nodes of this machine, and how that is undone.

    kill:WHOM     -9
    freeze:WHOM   stopped (SIGSTOP), and let go on (SIGCONT) once the run went on without it; the
                  driver, of which there is one, after a while
    disk          the disk of the run's folder is full
    store         Ray's object store is full, so that objects go to the disk
    spill         that disk is full, too
    nan           an update makes weights that are no numbers

WHOM: an actor (rollout, inference, reward, rank), a worker process of an actor's simulator, the
``raylet`` of the second node, the whole ``node``, or the ``driver``. Disks are small file systems
in memory, which takes the right to mount some.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vla_rl.errors import UserError
from vla_rl.monitoring.machine import process_tree
from vla_rl.monitoring.metrics import write_json

# Who is struck → how its process calls itself.
ACTORS = {
    "rollout": "ray::RolloutActor",
    "inference": "ray::InferenceActor",
    "reward": "ray::RewardActor",
    "rank": "ray::LearnerActor",
}
WHOM = (*ACTORS, "simulator", "raylet", "node", "driver")
SURROUNDINGS = ("disk", "store", "spill", "nan")
KINDS = (
    *(f"kill:{whom}" for whom in WHOM),
    *(f"freeze:{whom}" for whom in WHOM if whom not in ("simulator", "node")),
    *SURROUNDINGS,
)
STORE_MIB = 128  # of each node
_DISK_MIB = {"run": 256, "ray": 512}  # of the small disks; a run asks for 100 before it begins
_ATTEMPTS = 5  # to start a node
_PATIENCE = 300.0  # seconds for a process to be there
_NEARLY = 0.97  # of Ray's disk: beyond 0.95 it puts nothing there any more
_POLL = 0.2  # seconds
# Fills the object store, with less and less, to the last or up to so many MiB; stays until stdin
# ends.
_FILLER = """
import sys, numpy, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
kept, left = [], int(sys.argv[2]) << 20
for size in (8 << 20, 1 << 20, 1 << 16, 1 << 12):
    try:
        while left >= size:
            kept.append(ray.put(numpy.ones(size, numpy.uint8)))
            left -= size
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        pass
print("full", flush=True)
sys.stdin.read()
"""


class Nodes:
    """Two nodes of Ray on this machine (one, without a ``second``), whose files are in ``folder``
    (Ray's own place). They end with ``stack``, with all that was started for them."""

    def __init__(
        self,
        environment: Mapping[str, str],
        stack: contextlib.ExitStack,
        folder: Path | None = None,
        second: bool = True,
    ) -> None:
        # as urgent as the driver
        self._environment, self._stack = {**environment, "RAY_worker_niceness": "0"}, stack
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        own = [f"--temp-dir={folder}"] if folder is not None else []
        self._head = self._start("--head", f"--port={port}", "--include-dashboard=false", *own)
        self.second = self._start(f"--address={self.address}") if second else self._head

    @property
    def pids(self) -> list[int]:
        return [*{self._head.pid, self.second.pid}]

    def lose_second(self) -> None:
        """All processes of the second node are gone at once; another node takes its place."""
        end(self.second)
        self.second = self._start(f"--address={self.address}")

    def _start(self, *words: str) -> subprocess.Popen:
        """A node that is up. Ray gives up on one that takes half a minute, which a busy machine
        may need: then once more."""
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--num-cpus=1",
            "--disable-usage-stats",
            f"--object-store-memory={STORE_MIB << 20}",
            *words,
        ]
        for _ in range(_ATTEMPTS):
            log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the stack closes it
            self._stack.callback(log.close)
            node = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
            self._stack.callback(end, node)
            while node.poll() is None:
                log.seek(0)
                if "Ray runtime started" in log.read():
                    return node
                time.sleep(0.5)
        log.seek(0)
        raise UserError(
            f"'{' '.join(command[3:])}' did not start a node of Ray here:\n{log.read()}"
        )


def end(process: subprocess.Popen) -> None:
    """Kill a process and all below it."""
    if process.poll() is None:
        for pid in [*below(process.pid), process.pid]:
            send(pid, signal.SIGKILL)
        process.wait()


def send(pid: int, what: signal.Signals) -> None:
    """Send a signal to a process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def below(pid: int) -> list[int]:
    return process_tree(pid)[1:]


def command_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def token_environment() -> dict[str, str]:
    """This process's environment for a cluster with a token of its own, in which a node that
    stands still is lost after some 20 s and episodes lie in the object store however small."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "2000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_max_direct_call_object_size": "1000",
    }


def end_all_with(token: str) -> int:
    """Kill what is left of a cluster: all processes with its token; returns how many there
    were."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if (
                token.encode() in file.read_bytes()
                and (pid := int(file.parent.name)) != os.getpid()
            ):
                send(pid, signal.SIGKILL)
                found += 1
    return found


@contextlib.contextmanager
def small_disk(folder: Path):
    """A file system of its own at ``folder``, a run's or Ray's. Raises `UserError` where
    none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={_DISK_MIB[folder.name]}m",
        "vla-rl-bench",
        str(folder),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"a small disk could not be mounted at {folder} ({done.stderr.strip()}): as root, or "
            "leave out --kinds disk store spill"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(file: Path, share: float = 1.0) -> None:
    """Make ``file`` so large that this share of its disk is taken."""
    disk = os.statvfs(file.parent)
    left = int(disk.f_frsize * (disk.f_bavail - (1 - share) * disk.f_blocks))
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        os.posix_fallocate(out.fileno(), 0, left)
        out.seek(left)
        while share == 1.0:  # to the last byte
            out.write(bytes(1 << 12))


class Strikes:
    """Strikes the processes of ``nodes``, what ``driver`` gives, and their surroundings: in
    ``place`` are the folders ``run`` and ``ray``. ``frozen``: seconds that the driver stands still;
    ``poison``: a file that makes the next update one of no numbers."""

    def __init__(
        self,
        nodes: Nodes,
        environment: Mapping[str, str],
        driver: Callable[[], subprocess.Popen],
        place: Path,
        poison: Path,
        frozen: float,
    ) -> None:
        self._nodes, self._environment, self._driver = nodes, environment, driver
        self._run, self._ray = place / "run", place / "ray"
        self._poison, self._frozen = poison, frozen

    def strike(self, kind: str, choose: Callable[[list[int]], int]) -> tuple[str, Callable]:
        """Strike; returns what was struck and how to undo it."""
        act, _, whom = kind.partition(":")
        if kind == "kill:node":
            end(self._nodes.second)
            return "the second node", self._nodes.lose_second
        if whom:
            return self._signal(act, whom, choose)
        if kind == "nan":
            write_json(self._poison, True)
            return "the next update", self._poison.unlink
        if kind == "disk":
            fill(self._run / "filler")
            return "the run's disk", (self._run / "filler").unlink
        return self._full_store(kind == "spill")

    def _signal(self, act: str, whom: str, choose: Callable[[list[int]], int]):
        deadline = time.monotonic() + _PATIENCE
        while not (found := self.candidates(whom)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        if not found:
            raise UserError(f"{whom}: there is no such process for {_PATIENCE:g} s")
        pid = choose(sorted(found))
        told = f"{whom} {pid}"
        send(pid, signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        if act == "freeze" and whom == "driver":
            time.sleep(self._frozen)
        if act == "freeze":
            undo = lambda: send(pid, signal.SIGCONT)  # noqa: E731
        if whom == "driver":
            undo()
        if whom == "raylet":
            undo = self._nodes.lose_second
        return told, undo

    def _full_store(self, disk_too: bool) -> tuple[str, Callable]:
        file = self._ray / "filler"
        if disk_too:
            fill(file, _NEARLY)
        size = 100 * STORE_MIB if disk_too else 3 * STORE_MIB // 2
        filler = subprocess.Popen(
            [sys.executable, "-c", _FILLER, self._nodes.address, str(size)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert filler.stdout is not None
        filler.stdout.readline()

        def undo() -> None:
            end(filler)
            file.unlink(missing_ok=True)

        return f"the object store{' and its disk' if disk_too else ''}", undo

    def candidates(self, whom: str) -> list[int]:
        """The processes that may be struck."""
        if whom == "driver":
            return [self._driver().pid]
        if whom == "raylet":
            return [
                pid
                for pid in below(self._nodes.second.pid)
                if command_of(pid).partition(" ")[0].endswith("raylet/raylet")
            ]
        all_ = {pid: command_of(pid) for node in self._nodes.pids for pid in below(node)}
        name = ACTORS.get(whom, ACTORS["rollout"])
        actors = [pid for pid, words in all_.items() if words.startswith(name)]
        if whom in ACTORS:
            return actors
        return [
            pid for actor in actors for pid in below(actor) if "spawn_main" in all_.get(pid, "")
        ]
