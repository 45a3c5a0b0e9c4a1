"""Where metrics go besides ``metrics.jsonl``: CSV files, TensorBoard, Weights & Biases.

`sinks` names those that a run asks for. `MetricsLogger` opens them when there is something to log,
so that a run that never gets so far leaves nothing behind, and gives them what earlier sessions had
logged.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import functools
import importlib.util
import json
import logging
import netrc
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from vla_rl.config.phases import PHASES
from vla_rl.config.run import WandbConfig
from vla_rl.errors import require_packages
from vla_rl.monitoring.machine import process_tree

TENSORBOARD, WANDB_FILE = "tensorboard", "wandb.json"
# The x axis of each phase; "eval" rows stand at the RL iteration of the policy that was evaluated.
AXES = {row.name: f"{row.name}/{row.steps[0]}" for row in PHASES.values() if row.steps} | {
    "eval": "rl/iteration"
}
# Patience with wandb's server: to answer, to begin, to take the rest, and once more at exit.
_REACH_S, _START_S, _FINISH_S, _LEAVE_S = 5.0, 30.0, 120.0, 10.0
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for metrics. Whatever it raises, the run goes on without it."""

    whole: bool  # starts empty, so it wants what earlier sessions of the run logged

    def write(self, record: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``: ``phase``, ``step``, ``time_s`` and numbers or None by
        name."""
        ...

    def video(self, phase: str, step: int, path: Path) -> None: ...

    def close(self) -> None: ...


def sinks(
    folder: Path,
    name: str,
    wandb: WandbConfig,
    tensorboard: bool,
    tree: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[Callable[[], Sink | None]]:
    """What opens each sink of a run (None: it is not to be had); ``tree`` is its config, ``say``
    prints a line."""
    found: list[Callable[[], Sink | None]] = [functools.partial(_CsvSink, folder)]
    if tensorboard:
        found.append(functools.partial(_TensorBoardSink, folder / TENSORBOARD))
    if wandb.mode != "off":
        found.append(functools.partial(start_wandb, folder, name, wandb, tree, say))
    return found


def require_sinks(wandb: WandbConfig, tensorboard: bool) -> None:
    """Raise `MissingPackage` for what is asked for by name and not installed (wandb.mode=auto
    takes what there is)."""
    if tensorboard:
        require_packages("tensorboard", extra="tensorboard", purpose="tensorboard=true")
    if wandb.mode in ("online", "offline") and wandb_mode(wandb.mode) != "disabled":
        require_packages("wandb", extra="wandb", purpose=f"wandb.mode={wandb.mode}")


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by full name: those without a group are put under their phase."""
    return {
        k if "/" in k else f"{record['phase']}/{k}": v
        for k, v in record.items()
        if k not in ("phase", "step") and isinstance(v, int | float)
    }


# ---------------------------------------------------------------------------------------------- CSV
class _CsvSink:
    """``metrics_<phase>.csv``: a row per step, a column per metric; written anew where a new
    metric appears."""

    whole = True

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._columns: dict[str, dict[str, None]] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        phase = record["phase"]
        row = {k: v for k, v in record.items() if k != "phase"}
        rows, columns = self._rows.setdefault(phase, []), self._columns.setdefault(phase, {})
        rows.append(row)
        known = row.keys() <= columns.keys()
        columns |= dict.fromkeys(row)
        with (self._folder / f"metrics_{phase}.csv").open(
            "a" if known else "w", newline="", encoding="utf-8"
        ) as file:
            writer = csv.DictWriter(file, list(columns))
            if not known:
                writer.writeheader()
            writer.writerows([row] if known else rows)

    def video(self, phase: str, step: int, path: Path) -> None:
        """A table holds none."""

    def close(self) -> None:
        """Every row is on disk already."""


# -------------------------------------------------------------------------------------- TensorBoard
class _TensorBoardSink:
    """Event files for ``tensorboard --logdir``. Each session writes the whole run, so no step is
    there twice."""

    whole = True

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def video(self, phase: str, step: int, path: Path) -> None:
        """TensorBoard would need the frames again, and moviepy; the report shows the videos."""

    def close(self) -> None:
        self._writer.close()


# -------------------------------------------------------------------------------------------- wandb
def logged_in() -> bool:
    """Whether wandb would find an account without asking: WANDB_API_KEY, or netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return (
            netrc.netrc(os.environ.get("NETRC") or None).authenticators(_server().netloc)
            is not None
        )
    except (OSError, netrc.NetrcParseError):
        return False


def _server() -> SplitResult:
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")


def reachable() -> bool:
    """Whether wandb's server takes a connection; behind a proxy that is left to wandb."""
    server = _server()
    if server.scheme in urllib.request.getproxies():
        return True
    try:
        socket.create_connection(
            (server.hostname or "", server.port or 443), timeout=_REACH_S
        ).close()
    except (OSError, ValueError):
        return False
    return True


def wandb_mode(wanted: str = "auto") -> str:
    """ "online", "offline" or "disabled"; WANDB_MODE goes before what the config wants. Online
    needs an account: without one wandb would ask for it, and wait."""
    mode = os.environ.get("WANDB_MODE") or wanted
    if mode in ("offline", "dryrun"):
        return "offline"
    return "disabled" if mode == "disabled" else "online" if logged_in() else "offline"


def start_wandb(
    folder: Path,
    name: str,
    config: WandbConfig,
    tree: Mapping[str, Any],
    say: Callable[[str], None],
) -> _WandbSink | None:
    """A wandb run, or None where wandb is missing, switched off or broken, with a word on which.
    Never asks anything."""
    mode = wandb_mode(config.mode)
    if mode == "disabled":
        say("wandb: disabled by WANDB_MODE")
        return None
    if importlib.util.find_spec("wandb") is None:
        say("wandb: not installed, so metrics stay in the run folder")
        return None
    why = "" if logged_in() else ", as nobody is logged in"
    if mode == "online" and not reachable():
        mode, why = "offline", f", as {_server().netloc} cannot be reached"
    known = _known_id(folder, name)
    modes: dict[str, Any] = {"mode": mode, "resume": "allow" if mode == "online" else None}
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=_START_S)
        run = wandb.init(
            project=config.project,
            entity=config.entity or None,
            name=config.name or name,
            tags=config.tags or None,
            config=dict(tree),
            dir=str(folder),
            id=known,
            settings=settings,
            **modes,
        )
        (folder / WANDB_FILE).write_text(
            json.dumps({"id": run.id, "run": name}) + "\n", encoding="utf-8"
        )
    except Exception as error:  # whatever is wrong with an optional logger, training goes on
        say(
            f"wandb: could not start ({' '.join(str(error).split())}); metrics stay in the run "
            "folder"
        )
        _leave_in_time()
        return None
    if mode == "online":
        say(f"wandb: {run.url}")
    else:
        say(f"wandb: offline{why}; to send it later: wandb sync {Path(run.dir).parent}")
    return _WandbSink(run, whole=mode == "offline" or known is None)


def _known_id(folder: Path, name: str) -> str | None:
    """The wandb run of earlier sessions. A copied folder goes on as a run of its own, not in the
    original's."""
    try:
        stored = json.loads((folder / WANDB_FILE).read_text(encoding="utf-8"))
        return stored["id"] if stored["run"] == name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.cache
def _leave_in_time() -> None:
    """At exit Python waits for wandb's helper process, without limit where the server is silent:
    end it after a while."""
    leaving = threading.Event()

    def end() -> None:
        leaving.wait()
        time.sleep(_LEAVE_S)
        for pid in process_tree(os.getpid()):
            with contextlib.suppress(OSError):  # it is over already
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "wandb-core":
                    os.kill(pid, signal.SIGKILL)

    threading.Thread(target=end, name="wandb-end", daemon=True).start()
    atexit.register(leaving.set)  # the last registered is called first, before wandb's own


class _WandbSink:
    """A wandb run whose metrics are drawn over the updates of SFT and the iterations of RL."""

    def __init__(self, run: Any, whole: bool):
        self._run, self.whole = run, whole
        self._defined: set[str] = set()

    def write(self, record: Mapping[str, Any]) -> None:
        self._log(record["phase"], record["step"], numbers(record))

    def video(self, phase: str, step: int, path: Path) -> None:
        import wandb

        self._log(phase, step, {f"videos/{path.stem}": wandb.Video(str(path), format="mp4")})

    def _log(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        axis = AXES.get(phase, f"{phase}/step")
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= values.keys()
        self._run.log({**values, axis: step})

    def close(self) -> None:
        """Send what is left; a server that is gone is not waited for beyond a while."""
        ending = threading.Thread(target=self._finish, name="wandb-finish", daemon=True)
        ending.start()
        ending.join(_FINISH_S)
        if ending.is_alive():
            _log.warning(
                "wandb is still sending after %.0f s; 'wandb sync' sends the rest", _FINISH_S
            )
            _leave_in_time()

    def _finish(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            _log.warning("wandb could not finish (%s)", error)
