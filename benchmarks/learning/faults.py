"""`vla-rl bench faults`: a run on a cluster of two Ray nodes, whose processes are killed at random
all along.

Both nodes are on this machine, each a `ray start` of its own. The kills (-9) are spread over the
iterations, each at a moment after the run has learned since the last one; a run that is ahead of
them waits for them (`Counted`), so that none is missed on a fast machine. Kinds of what is killed:

    rollout     a rollout actor
    simulator   a worker process of an actor's simulator
    inference   an actor that acts for rollout actors (only where the config has some)
    rank        a rank of the learner group
    driver      the process of `vla-rl train`, which is then started again by the same command
    node        the second Ray node with all that runs there; another one joins

What was learned from is kept by the reward (`Counted`), whose state is part of each checkpoint: so
the last one holds the rollout ids of the whole run as it counts, whatever was done twice in
between. The same run without kills is the yardstick.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.learning.runs import rl_records
from benchmarks.measuring import say
from vla_rl import build
from vla_rl.config import compose
from vla_rl.errors import UserError
from vla_rl.evaluation.statistics import difference_interval, wilson_interval
from vla_rl.files import read_json
from vla_rl.monitoring.machine import process_tree
from vla_rl.monitoring.metrics import write_json
from vla_rl.run.pipeline import run_pipeline
from vla_rl.storage import load_state
from vla_rl.types import Trajectory

# What is killed → how its process calls itself.
ACTORS = {
    "rollout": "ray::RolloutActor",
    "inference": "ray::InferenceActor",
    "rank": "ray::LearnerActor",
}
KINDS = (*ACTORS, "simulator", "driver", "node")
DEFAULT = (
    "run=toy",
    "cluster=ray",
    "cluster.mode=async",
    "cluster.rollouts=2",
    "cluster.learners=2",
    "slots.workers=1",
    "slots.slots_per_worker=8",
    "rl.episodes_per_iteration=64",
    "rl.iterations=50",
    "evaluate.video_episodes=0",
)
_POLL = 0.2  # seconds
_MOMENT = 2.0  # seconds at most, after the run went on and before the next kill
_PATIENCE = 900.0  # seconds that the run gets to go on
_ATTEMPTS = 5  # to start a node


@dataclass(frozen=True)
class CountedConfig:
    # a file that holds how many episodes may be scored so far; more wait. "": no bound
    gate: str = ""


class Counted:
    """Task success; its state is the rollout ids of what was scored, in order."""

    Config = CountedConfig

    def __init__(self, config: CountedConfig) -> None:
        self._gate = Path(config.gate) if config.gate else None
        self._reward = build.implementation("reward", "success")(
            build.config_class("reward", "success")()
        )
        self.ids: list[str] = []

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """[t] per trajectory."""
        while self._gate and len(self.ids) >= json.loads(self._gate.read_text()):
            time.sleep(_POLL)
        self.ids += [t.rollout_id for t in trajectories]
        return self._reward.score(trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids = list(state["ids"])


def measure(
    overrides: Sequence[str], kills: int = 24, kinds: Sequence[str] = (), seed: int = 0
) -> dict[str, Any]:
    """Train with and without ``kills`` of ``kinds`` (one that is named twice is twice as frequent;
    none: all that the run has); tells each. Raises `UserError` where a run does not go on or
    fails."""
    given = [*DEFAULT, *overrides, "reward.type=benchmarks.learning.faults:Counted"]
    config = compose(given)
    absent = {
        kind
        for kind, count in (
            ("inference", config.cluster.inference),
            ("rank", config.cluster.learners),
            ("simulator", config.slots.workers),
        )
        if not count
    }
    known = [kind for kind in KINDS if kind not in absent]
    kinds = kinds or known
    if wrong := {*kinds} - {*known}:
        raise UserError(f"--kinds {' '.join(sorted(wrong))}: this run has {', '.join(known)}")
    if kills > (room := (config.rl.iterations - 2) // 2):
        raise UserError(
            f"--kills {kills}: rl.iterations={config.rl.iterations} has room for "
            f"{room}, one in two iterations; give rl.iterations={2 * kills + 2} or "
            "fewer kills"
        )
    expected = config.rl.iterations * config.rl.episodes_per_iteration
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="vla-rl-faults-") as name:
        own = [f"output_dir={name}", "wandb.mode=off"]
        start = run_pipeline(compose([*given, *own, "name=start", "phases=[collect,sft]"]))
        own += ["phases=[rl,eval_rl]", f"checkpoint={start / 'checkpoints' / 'sft'}"]
        for side, count in (("killed", kills), ("calm", 0)):
            order = _order(kinds, count, seed)
            started = time.perf_counter()
            soak = _Soak([*given, *own, f"name={side}"], Path(name) / side, random.Random(seed))
            done = soak.run(order, config.rl.iterations, config.rl.episodes_per_iteration)
            found[side] = (
                done
                | {"seconds": time.perf_counter() - started}
                | _accounts(Path(name) / side, expected)
            )
    a, b = found["killed"], found["calm"]
    difference = difference_interval(a["successes"], a["episodes"], b["successes"], b["episodes"])
    return {"overrides": given, **found, "difference": difference}


def _order(kinds: Sequence[str], count: int, seed: int) -> list[str]:
    """``count`` of ``kinds``, each as often as the others, shuffled."""
    order = [kinds[i % len(kinds)] for i in range(count)]
    random.Random(seed).shuffle(order)
    return order


def _accounts(folder: Path, expected: int) -> dict[str, Any]:
    """What came of a run: episodes that count, of these lost and there twice; held-out success;
    restarts."""
    ids = Counter(load_state(folder / "checkpoints" / "rl" / "training_state")["reward"]["ids"])
    rows = rl_records(folder)
    result = read_json(folder / "eval_rl.json", "")["total"]
    restarts = {
        name: sum(row.get(f"cluster/{key}", 0.0) for row in rows)
        for name, key in (("actors", "restarts"), ("ranks", "learner_restarts"))
    }
    return {
        "learned_from": len(ids),
        "lost": expected - len(ids),
        "twice": sum(count - 1 for count in ids.values()),
        "iterations": [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows),
        "successes": result["successes"],
        "episodes": result["episodes"],
        "restarts": restarts,
    }


class _Soak:
    """One run by the command, and who kills its processes."""

    def __init__(self, words: Sequence[str], folder: Path, chance: random.Random) -> None:
        self._gate = folder.with_suffix(".gate")
        self._words, self._folder, self._random = (
            [*words, f"reward.gate={self._gate}"],
            folder,
            chance,
        )
        self._kills: list[dict[str, Any]] = []

    def run(self, order: Sequence[str], iterations: int, episodes: int) -> dict[str, Any]:
        """Kill ``order`` over ``iterations`` of ``episodes`` each."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        }
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with contextlib.ExitStack() as stack:
            self._nodes = Nodes(environment, stack)
            driver = self._driver = self._begin(environment, stack)
            for i, kind in enumerate(order):
                due = 1 + i * (iterations - 2) // len(order)
                self._allow((due + 1) * episodes)
                steps = self._await_step(due)
                if driver.poll() is not None:
                    break  # it failed
                time.sleep(self._random.uniform(0, _MOMENT))
                self._kill(kind, f"{i + 1}/{len(order)}, after iteration {steps}")
                if kind == "driver":
                    driver.wait()
                    driver = self._driver = self._begin(environment, stack)
            self._allow(iterations * episodes)
            if driver.wait():
                raise UserError(f"the run ended with exit code {driver.returncode}: {self._tail()}")
        return {"kills": self._kills, "counts": dict(Counter(kill["kind"] for kill in self._kills))}

    def _allow(self, episodes: int) -> None:
        write_json(self._gate, episodes)

    def _begin(
        self, environment: Mapping[str, str], stack: contextlib.ExitStack
    ) -> subprocess.Popen:
        self._folder.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "vla_rl", "train"]
        log = stack.enter_context(self._log.open("a"))
        words = [*self._words, f"cluster.address={self._nodes.address}"]
        driver = subprocess.Popen([*command, *words], env=environment, stdout=log, stderr=log)
        stack.callback(_end, driver)
        return driver

    @property
    def _log(self) -> Path:
        return self._folder.with_suffix(".log")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-20:])

    def _steps(self) -> int:
        """Iterations that are in the metrics; a run that goes on from a checkpoint may have
        fewer than before."""
        try:
            rows = rl_records(self._folder)
        except (OSError, ValueError, UserError):  # being written anew
            return 0
        return int(rows[-1]["step"]) if rows else 0

    def _await_step(self, step: int) -> int:
        deadline = time.monotonic() + _PATIENCE
        while self._steps() < step and self._driver.poll() is None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run did not get to iteration {step} within {_PATIENCE:g} s: "
                    f"{self._tail()}"
                )
            time.sleep(_POLL)
        return self._steps()

    def _kill(self, kind: str, when: str) -> None:
        """Kill one process of this kind, as soon as there is one."""
        deadline = time.monotonic() + _PATIENCE
        while not (found := self._candidates(kind)):
            if time.monotonic() > deadline or self._driver.poll() is not None:
                return
            time.sleep(_POLL)
        if kind == "node":
            self._nodes.lose_second()
        else:
            os.kill(self._random.choice(found), signal.SIGKILL)
        self._kills.append({"kind": kind, "when": when})
        say(f"kill {when}: {kind}")

    def _candidates(self, kind: str) -> list[int]:
        if kind == "driver":
            return [self._driver.pid]
        if kind == "node":
            return [self._nodes.second.pid]
        below = {pid: _command(pid) for node in self._nodes.pids for pid in _below(node)}
        actors = [
            pid
            for pid, words in below.items()
            if words.startswith(ACTORS.get(kind, ACTORS["rollout"]))
        ]
        if kind in ACTORS:
            return actors
        return [
            pid for actor in actors for pid in _below(actor) if "spawn_main" in below.get(pid, "")
        ]


class Nodes:
    """Two nodes of Ray on this machine. They end with ``stack``."""

    def __init__(self, environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        # as urgent as the driver
        self._environment, self._stack = {**environment, "RAY_worker_niceness": "0"}, stack
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._head = self._start("--head", f"--port={port}", "--include-dashboard=false")
        self.second = self._start(f"--address={self.address}")

    @property
    def pids(self) -> list[int]:
        return [self._head.pid, self.second.pid]

    def lose_second(self) -> None:
        """All processes of the second node are gone at once; another node takes its place."""
        _end(self.second)
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
            f"--object-store-memory={128 << 20}",
            *words,
        ]
        for _ in range(_ATTEMPTS):
            log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the stack closes it
            self._stack.callback(log.close)
            node = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
            self._stack.callback(_end, node)
            while node.poll() is None:
                log.seek(0)
                if "Ray runtime started" in log.read():
                    return node
                time.sleep(0.5)
        log.seek(0)
        raise UserError(
            f"'{' '.join(command[3:])}' did not start a node of Ray here:\n{log.read()}"
        )


def _end(process: subprocess.Popen) -> None:
    """Kill a process and all below it."""
    if process.poll() is None:
        for pid in [*_below(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _below(pid: int) -> list[int]:
    return process_tree(pid)[1:]


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def text(document: Mapping[str, Any]) -> str:
    lines = []
    for side in ("calm", "killed"):
        d = document[side]
        low, high = wilson_interval(d["successes"], d["episodes"])
        lines.append(
            f"{side:<6}  {sum(d['counts'].values()):>3} kills  {d['learned_from']} episodes "
            f"learned from, {d['lost']} lost, {d['twice']} twice; restarts: "
            f"{json.dumps(d['restarts'])}; held-out success {d['successes'] / d['episodes']:.0%} "
            f"({low:.0%} to {high:.0%}); {d['seconds']:.0f} s"
        )
    counts = ", ".join(
        f"{count} {kind}" for kind, count in sorted(document["killed"]["counts"].items())
    )
    low, high = document["difference"]
    lines.append(
        f"killed: {counts}. Success with kills less that without: {low:+.0%} to {high:+.0%} (95 %)"
    )
    return "\n".join(lines)
