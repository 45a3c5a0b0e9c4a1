"""`vla-rl bench faults`: runs on a cluster of Ray that are struck again and again, each at
a moment drawn from a seed.

A run is struck by some events, one after the other (`benchmarks.learning.strikes` has their kinds).
It must go on to an iteration that began after the event; or end with one error, after which the
same command goes on once what struck it is over. What it learned from is kept by the algorithm
(`Watched`), whose state is part of each checkpoint: so the last one holds the rollout ids of the
whole run as it counts, whatever was done twice in between. Of the synchronous runs the weights are
compared, too, with those of one that nothing struck: with one slot and one rank no batch depends on
who does what when, so that they are equal bit for bit.

Each run's rows are written to ``out`` as it ends; the same command goes on with the next one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.runs import rl_records
from benchmarks.learning.strikes import (
    KINDS,
    SURROUNDINGS,
    Nodes,
    Strikes,
    end,
    end_all_with,
    small_disk,
    token_environment,
)
from benchmarks.measuring import say, table
from vla_rl.algorithms.ppo import PPO
from vla_rl.checkpoint import load_training_state
from vla_rl.config import compose
from vla_rl.config.algorithms import PPOConfig
from vla_rl.errors import UserError
from vla_rl.files import read_json
from vla_rl.monitoring.metrics import write_json
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import RolloutBatch

DEFAULT = (
    "run=toy",
    "collect.episodes_per_task=20",
    "sft.updates=10",
    "sft.validation_episodes=1",
    "rl.episodes_per_iteration=16",
    "algorithm.type=benchmarks.learning.faults:Watched",
    "algorithm.critic_warmup_iterations=0",
    "wandb.mode=off",
)
CLUSTER = (
    "cluster=ray",
    "cluster.inference=1",
    "cluster.reward_workers=1",
    "cluster.start_timeout=900",
    "cluster.hang_timeout=60",
    "cluster.max_failures=5",
    "slots.workers=0",
    "phases=[rl]",
)
MODES = {
    "sync": ("cluster.learners=1", "slots.slots_per_worker=1"),
    "async": (
        "cluster.mode=async",
        "cluster.rollouts=2",
        "cluster.learners=2",
        "slots.slots_per_worker=4",
    ),
}
PER_RUN = 5  # events
SPAN = 3  # iterations of an event: in which it strikes, that notices, that is without it
MOMENT = 2.0  # seconds at most, into an iteration, until the next event
FROZEN = 1.5  # of hang_timeout: how long a driver stands still
PATIENCE = 1800.0  # seconds that a run gets to go on
_POLL = 0.2  # seconds


@dataclass
class WatchedConfig(PPOConfig):
    # a file that holds how many iterations may be learned from so far; more wait. "": no bound
    gate: str = ""
    # while this file is there, an update makes weights that are no numbers
    poison: str = ""


class Watched(PPO):
    """PPO that keeps the rollout ids of what it learned from, in order."""

    Config = WatchedConfig

    def __init__(self, config: WatchedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._gate = Path(config.gate) if config.gate else None
        self._poison = Path(config.poison) if config.poison else None
        self.ids: list[str] = []

    def update(
        self, batch: RolloutBatch, rewards: Tensor | Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        while self._gate and self.iteration >= json.loads(self._gate.read_text()):
            time.sleep(_POLL)
        metrics = super().update(batch, rewards)
        self.ids += [episode.rollout_id for episode in batch.episodes]
        if self._poison and self._poison.exists():
            with torch.no_grad():
                next(iter(self._trunk)).fill_(torch.nan)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ids": list(self.ids)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.ids = list(state["ids"])


def measure(
    overrides: Sequence[str],
    events: int = 60,
    kinds: Sequence[str] = (),
    modes: Sequence[str] = (*MODES,),
    seed: int = 0,
    wall: float = math.inf,
    out: Path = Path("outputs/bench_faults"),
) -> dict[str, Any]:
    """Strike runs by ``events`` of ``kinds`` (none: all that they have); tells each. After ``wall``
    minutes no further run begins. Raises
    `UserError` where there is none of a kind, and where ``out`` holds other events."""
    words = [*DEFAULT, *CLUSTER, *overrides]
    known = [k for k in KINDS if k != "kill:simulator" or compose(words).slots.workers]
    kinds = list(kinds or known)
    if absent := {*kinds} - {*known}:
        raise UserError(f"--kinds {' '.join(sorted(absent))}: these runs have {', '.join(known)}")
    plan = planned(kinds, modes, events, seed)
    out.mkdir(parents=True, exist_ok=True)
    told = {"overrides": list(overrides), "runs": [[mode, *own] for mode, own in plan]}
    if _kept(out / "plan.json", lambda: told) != told:
        raise UserError(f"--out {out} holds other events than these: name another folder")
    start = out / "start" / "checkpoints" / "sft"
    if not start.exists():
        own = [f"output_dir={out.absolute()}", "name=start", "phases=[collect,sft]"]
        run_pipeline(compose([*DEFAULT, *overrides, *own]))
    struck = functools.partial(_struck, overrides=overrides, start=start)
    calm: dict[str, Any] = {}
    if "sync" in modes:
        calm = _kept(out / "calm.json", functools.partial(struck, "sync", [], seed=seed, calm={}))
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * wall
    for number, (mode, own) in enumerate(plan):
        if time.monotonic() > until:
            break
        make = functools.partial(struck, mode, own, seed=seed + number, calm=calm)
        found = _kept(out / f"run-{number:02}.json", make)
        rows += [{"run": number, "mode": mode} | row for row in found["events"]]
    problems = [
        f"run {row['run']} ({row['mode']}), {row['kind']}: {wrong(row)}"
        for row in rows
        if wrong(row)
    ]
    return {"seed": seed, "events": rows, "planned": events, "problems": problems}


def planned(
    kinds: Sequence[str], modes: Sequence[str], count: int, seed: int
) -> list[tuple[str, list[str]]]:
    """(mode, its events) of each run: ``count`` events in all, each kind in each mode as often as
    the others, in an order drawn from ``seed``."""
    pairs = [(mode, kind) for kind in kinds for mode in modes]
    events = [pairs[i % len(pairs)] for i in range(count)]
    random.Random(seed).shuffle(events)
    runs = []
    for mode in modes:
        own = [kind for m, kind in events if m == mode]
        runs += [(mode, own[i : i + PER_RUN]) for i in range(0, len(own), PER_RUN)]
    return runs


def _kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not file.exists():
        write_json(file, make())
    return read_json(file, "")


def wrong(row: Mapping[str, Any]) -> str:
    """What should not have come of an event; empty where nothing is."""
    kind, outcome = row["kind"], row["outcome"]
    found = {
        "the run stood still": "hung" in (outcome, row["then"]),
        "it did not end": outcome == "did not end",
        "it ended the run": outcome == "ended" and kind not in SURROUNDINGS,
        "no clear error": not row["clear"],
        "the same command did not go on": row["then"] == "ended",
        "learned from weights that are no numbers": (kind, outcome) == ("nan", "went on"),
        f"{row['lost']} episodes lost": row["lost"],
        f"{row['twice']} episodes twice": row["twice"],
        "other weights than undisturbed": row["equal"] is False,
    }
    return ", ".join(text for text, so in found.items() if so)


def _struck(
    mode: str,
    kinds: Sequence[str],
    overrides: Sequence[str],
    start: Path,
    seed: int,
    calm: Mapping[str, Any],
) -> dict[str, Any]:
    """One run from its start to its end, and the rows of its events. ``calm``: what became of
    the one that nothing strikes."""
    iterations = SPAN * PER_RUN + 2
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vla-rl-")))
        for part in ("run", "ray"):
            if {"disk", "store", "spill"} & {*kinds}:
                stack.enter_context(small_disk(place / part))
            (place / part).mkdir(exist_ok=True)
        words = [*DEFAULT, *CLUSTER, *MODES[mode], *overrides, f"rl.iterations={iterations}"]
        words += [f"checkpoint={start.absolute()}", f"output_dir={place / 'run'}", "name=rl"]
        two = any(kind.endswith((":raylet", ":node")) for kind in kinds)
        run = _Run(words, place, random.Random(seed), stack, two)
        rows = run.live(kinds, iterations)
        told = run.accounts(iterations)
    equal = told["weights"] == calm["weights"] if mode == "sync" and calm else None
    return told | {"equal": equal, "events": [row | told | {"equal": equal} for row in rows]}


class _Run:
    """One run by the command in ``place``, and what strikes it. It ends with ``stack``. ``two``:
    nodes, else one."""

    def __init__(
        self,
        words: Sequence[str],
        place: Path,
        chance: random.Random,
        stack: contextlib.ExitStack,
        two: bool,
    ) -> None:
        self._place, self._random, self._stack = place, chance, stack
        self._folder, self._log = place / "run" / "rl", place / "log"
        self._gate, poison = place / "gate", place / "poison"
        self._environment = token_environment()
        stack.callback(end_all_with, self._environment["RAY_AUTH_TOKEN"])
        nodes = Nodes(self._environment, stack, place / "ray", two)
        self._words = [*words, f"cluster.address={nodes.address}"]
        self._words += [f"algorithm.gate={self._gate}", f"algorithm.poison={poison}"]
        limit = compose(self._words).cluster.hang_timeout  # type: ignore[union-attr]
        self._strikes = Strikes(
            nodes, self._environment, lambda: self._driver, place, poison, FROZEN * limit
        )

    def live(self, kinds: Sequence[str], iterations: int) -> list[dict[str, Any]]:
        """From the start to the end; the rows of the events, until one that the run does not
        survive."""
        rows: list[dict[str, Any]] = []
        self._allow(1)
        self._begin()
        if (began := self._until(1)) != "went on":
            raise UserError(f"the run {began} before anything struck it: {self._tail(0)}")
        for kind in kinds:
            rows.append(self._event(kind))
            say(json.dumps(rows[-1]))
            if "hung" in (rows[-1]["outcome"], rows[-1]["then"]) or rows[-1]["then"] == "ended":
                return rows
        self._allow(iterations)
        if self._until(iterations + 1) != "ended" or self._driver.returncode:
            rows.append(self._row("the end", "", "did not end", self._log.stat().st_size))
        return rows

    def _event(self, kind: str) -> dict[str, Any]:
        """Strike, and see what becomes of it: "went on", "ended" with an error, "killed" (the
        driver), or "hung"; ``then``: what the same command did, where the run had ended."""
        moment = self._random.uniform(0, MOMENT)
        self._allow(self._steps() + 1)
        time.sleep(moment)
        mark, started = self._log.stat().st_size, time.monotonic()
        struck, undo = self._strikes.strike(kind, self._random.choice)
        before = self._steps()  # (to strike may take a while)
        self._allow(before + SPAN - 1)
        outcome, then = self._until(before + SPAN - 1), ""
        took = time.monotonic() - started
        row = self._row(kind, struck, "killed" if kind == "kill:driver" else outcome, mark)
        undo()
        if outcome == "ended":
            self._begin()
            then = self._until(before + SPAN - 1)
        if "hung" in (outcome, then):
            end(self._driver)
        when = {"iteration": before, "moment_s": round(moment, 2), "seconds": round(took, 1)}
        return row | when | {"then": then, "said": self._said(mark)}

    def _row(self, kind: str, struck: str, outcome: str, mark: int) -> dict[str, Any]:
        error = self._tail(mark) if outcome == "ended" else ""
        clear = outcome != "ended" or (self._driver.returncode == 2 and _is_one_error(error))
        told = {"kind": kind, "struck": struck, "outcome": outcome, "then": ""}
        return told | {"error": error, "clear": clear}

    def accounts(self, iterations: int) -> dict[str, Any]:
        """What came of the run: episodes lost and learned from twice, restarts, and a hash of its
        weights."""
        folder = self._folder / "checkpoints" / "rl"
        ids = Counter(load_training_state(folder)["algorithm"]["ids"])
        expected = iterations * compose(self._words).rl.episodes_per_iteration
        rows = rl_records(self._folder)
        digest = hashlib.sha256()
        for file in sorted(folder.glob("model*.safetensors")):
            digest.update(file.read_bytes())
        return {
            "episodes": expected,
            "lost": expected - len(ids),
            "twice": sum(count - 1 for count in ids.values()),
            "weights": digest.hexdigest(),
            "restarts": sum(int(row.get("cluster/restarts", 0)) for row in rows),
            "rank_restarts": sum(int(row.get("cluster/learner_restarts", 0)) for row in rows),
        }

    # ------------------------------------------------------------------------------------ the driver
    def _begin(self) -> None:
        """The run's command, for the first time or once more."""
        log = self._stack.enter_context(self._log.open("a"))
        command = [sys.executable, "-m", "vla_rl", "train", *self._words]
        self._driver = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self._stack.callback(end, self._driver)

    def _allow(self, iterations: int) -> None:
        write_json(self._gate, iterations)

    def _steps(self) -> int:
        """Iterations that are in the metrics; a run that goes on from a checkpoint may have
        fewer than before."""
        try:
            rows = rl_records(self._folder)
        except (OSError, ValueError, UserError):  # being written anew
            return 0
        return int(rows[-1]["step"]) if rows else 0

    def _until(self, step: int) -> str:
        """Wait for this iteration: "went on", "ended", or "hung"."""
        deadline = time.monotonic() + PATIENCE
        while self._driver.poll() is None:
            if self._steps() >= step:
                return "went on"
            if time.monotonic() > deadline:
                return "hung"
            time.sleep(_POLL)
        return "ended"

    def _tail(self, mark: int) -> str:
        """What the driver wrote since ``mark`` from its error on, or its last lines."""
        text = self._log.read_bytes()[mark:].decode(errors="replace")
        at = [m.start() for m in re.finditer("^(error:|Traceback )", text, re.MULTILINE)]
        return text[at[0] :].strip()[-1500:] if at else "\n".join(text.splitlines()[-10:])

    def _said(self, mark: int) -> list[str]:
        """The lines about what was lost."""
        text = self._log.read_bytes()[mark:].decode(errors="replace")
        return [line.strip()[:300] for line in text.splitlines() if " is lost " in line]


def _is_one_error(text: str) -> bool:
    return text.startswith("error: ") and "Traceback" not in text


def text(document: Mapping[str, Any]) -> str:
    rows = document["events"]
    lines = [("event", "times", "went on", "ended", "median s", "problems")]
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        ends = Counter(row["outcome"] for row in own)
        seconds = statistics.median(row.get("seconds", 0.0) for row in own)
        counts = (len(own), ends["went on"], len(own) - ends["went on"])
        lines.append(
            (kind, *map(str, counts), f"{seconds:.0f}", str(sum(bool(wrong(row)) for row in own)))
        )
    equal = [row["equal"] for row in rows if row["equal"] is not None]
    said = f"{len(rows)} of {document['planned']} events; of {len(equal)} in synchronous runs {sum(equal)} with the weights "
    return "\n".join([table(lines), said + "of an undisturbed run", *document["problems"]])
