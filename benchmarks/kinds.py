"""The kinds of ``vla-rl bench``: a row for each, with its words, its options and the module that
measures it.

Such a module has ``measure(**options)``, which gets the row's options by their names and returns a
document, JSON-ready, and ``text(document)``, which makes of it what is printed. `run` calls both
and notes when, by which command and on which machine it was. Nothing heavy is imported before that.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.commands.shared import Names, add_overrides, write_result

WAYS = ("none", "coupled", "truncate", "mask", "vtrace")  # of `benchmarks.learning.staleness`


SIZED, TRAINED = ("openvla_oft", "pi05", "smolvla"), ("expert", "lora", "all")  # of `policy.gpu`


@dataclass(frozen=True)
class Kind:
    """``options``: {flag: what argparse is told of it}. ``overrides`` says what its key=value
    are ("": it takes none)."""

    words: str
    module: str
    options: Mapping[str, Mapping[str, Any]]
    overrides: str = ""
    metavar: str = "key=value"

    @property
    def names(self) -> list[str]:
        """What ``measure`` is given."""
        return [
            *(["overrides"] if self.overrides else []),
            *(flag.strip("-").replace("-", "_") for flag in self.options),
        ]


def _count(default: int | None, text: str, metavar: str | None = None) -> dict[str, Any]:
    return {"type": int, "default": default, "help": text, "metavar": metavar}


def _counts(
    default: tuple[int, ...] | None, text: str, metavar: str | None = None
) -> dict[str, Any]:
    return {
        "type": int,
        "nargs": "+",
        "default": default and list(default),
        "help": text,
        "metavar": metavar,
    }


def _number(default: float, text: str, metavar: str | None = None) -> dict[str, Any]:
    return {"type": float, "default": default, "help": text, "metavar": metavar}


def _path(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": Path, "metavar": metavar, "help": text, **more}


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _turns(iterations: int, both: str) -> dict[str, dict[str, Any]]:
    return {
        "--iterations": _count(iterations, "of RL, per side and round", "N"),
        "--rounds": _count(2, f"of both {both}, in turn", "N"),
    }


_WAYS = {
    "nargs": "+",
    "choices": ("parts", "whole"),
    "default": ["parts", "whole"],
    "help": "one after the other: by each rank, or as a whole",
}
_WORLD = {
    "--world": {"default": "fake", "help": "fake or tabletop"},
    "--limits": _path("FILE", "default: the world's own in configs/limits"),
}

KINDS: dict[str, Kind] = {
    "sim": Kind(
        "control steps/s of the simulator against its plain gym stepping",
        "benchmarks.simulator.suites",
        {
            "--suite": {"default": "tabletop", "help": "tabletop, libero_spatial, ..."},
            "--tasks": {
                "nargs": "+",
                "action": Names,
                "metavar": "TASK",
                "help": "default: lift_cube, or the suite's first",
            },
            "--look": {
                "choices": ["light", "full"],
                "help": "of tabletop (default: light); LIBERO is measured in both",
            },
            "--chunk": _count(None, "control steps per decision (8; 25 of dualarm and robotwin)"),
            "--steps": _count(
                None, "control steps per measurement (160; 50 of dualarm and robotwin)"
            ),
            "--workers": _counts(
                None, "worker processes of the pool to measure (1 2; LIBERO: 1 2 4)"
            ),
        },
        overrides="of dualarm and robotwin: env.root=FOLDER ...",
    ),
    "experts": Kind(
        "how often an env's scripted experts succeed, by task and noise",
        "benchmarks.simulator.experts",
        {
            "--episodes": _count(20, "of each task and noise", "N"),
            "--noise": {
                "type": float,
                "nargs": "+",
                "default": [0.0],
                "help": "std of what is put on executed actions, as a share of their half-range",
            },
            "--speed": _number(1.0, "share of the expert's own speed"),
            "--split": {"choices": ("train", "held_out"), "default": "train", "help": "of states"},
            "--perturb": {"metavar": "NAME:LEVEL", "help": "such as layout:3"},
        },
        overrides="default: run=quickstart",
    ),
    "metaworld": Kind(
        "scripted policies of MetaWorld through env=gym against its own loop, episode by episode",
        "benchmarks.simulator.metaworld",
        {"--episodes": _count(3, "of each task", "N")},
        overrides="env.tasks=[reach-v3] ... (default: all 50)",
    ),
    "learn": Kind(
        "how soon runs reached a success rate, and where their seconds went",
        "benchmarks.learning.learn",
        {
            "--level": _number(0.8, "of held-out episodes that succeed", "SHARE"),
            "--against": {
                "metavar": "OVERRIDES",
                "help": "measure a config with and without these (a=1,b=2), in turns",
            },
            "--iterations": _count(2, "of RL that count, per side and round", "N"),
            "--rounds": _count(2, "of --against", "N"),
            "--figure": _path("FILE", "an HTML page with the runs' curves"),
        },
        overrides="run folders; with --against, a config",
        metavar="RUN|key=value",
    ),
    "families": Kind(
        "small random policies of lerobot's families on the toy task: SFT, then PPO",
        "benchmarks.learning.families",
        {
            "--families": {
                "metavar": "A,B",
                "help": "of those (default: all that have a likelihood)",
            },
            "--seed": _count(0, "of every run", "N"),
            "--out": _path("FOLDER", "the runs' place", default=Path("outputs/bench_families")),
        },
        overrides="of every run, e.g. rl.iterations=10",
    ),
    "staleness": Kind(
        "success after RL on episodes that an older policy played",
        "benchmarks.learning.staleness",
        {
            "--lags": _counts((0, 8), "iterations that episodes are old", "N"),
            "--ways": {
                "nargs": "+",
                "choices": WAYS,
                "default": WAYS,
                "help": "to learn from them (default: all)",
            },
            "--seeds": _counts((0, 1, 2), "of the runs at every lag", "N"),
        },
        overrides="default: run=toy and settings that move it fast",
    ),
    "update": Kind(
        "ms of an update from a replay: kept features, images encoded anew, own eyes",
        "benchmarks.learning.update",
        {
            "--batch": _count(256, "decisions", "N"),
            "--size": _count(84, "pixels of each of two cameras"),
        },
        overrides="default: run=residual_quickstart",
    ),
    "rhythm": Kind(
        "control steps/s of an actor and a learner at once against by turns",
        "benchmarks.learning.rhythm",
        {
            **_turns(20, "rhythms"),
            "--as-given": _switch("keep algorithm.updates_per_decision, else balanced"),
        },
        overrides="a config that learns from a replay",
    ),
    "overlap": Kind(
        "episodes/s of rolling out while learning on Ray, against by turns",
        "benchmarks.learning.overlap",
        _turns(20, "ways"),
        overrides="default: run=toy, which sleeps",
    ),
    "exchange": Kind(
        "bytes and CPU s of episodes on their way to the ranks that learn from them, on Ray",
        "benchmarks.learning.exchange",
        {
            "--episodes": _count(32, "of the batch", "N"),
            "--decisions": _count(30, "of each", "N"),
            "--size": _count(224, "pixels of each of two cameras"),
            "--ranks": _counts((1, 2, 4), "numbers of ranks, one after the other", "N"),
            "--ways": _WAYS,
        },
    ),
    "checkpoint": Kind(
        "memory, pause and seconds of a checkpoint of learner ranks, and of going on from it, on Ray",
        "benchmarks.learning.checkpoint",
        {
            "--millions": _count(100, "parameters of the random model, in millions", "N"),
            "--ranks": _count(2, "that hold it", "N"),
            "--ways": _WAYS,
            "--dtype": {
                "choices": ("float32", "bfloat16"),
                "default": "float32",
                "help": "of weights and moments",
            },
        },
    ),
    "faults": Kind(
        "runs on two Ray nodes that are struck: processes killed and frozen, full disks, a diverging "
        "learner",
        "benchmarks.learning.faults",
        {
            "--events": _count(60, "in all", "N"),
            "--kinds": {
                "nargs": "+",
                "default": [],
                "metavar": "KIND",
                "help": "kill:rollout freeze:rank disk nan ... (default: all that the runs have)",
            },
            "--modes": {
                "nargs": "+",
                "choices": ("sync", "async"),
                "default": ["sync", "async"],
                "help": "cluster.mode of the runs",
            },
            "--seed": _count(0, "of what is struck, and when"),
            "--wall": _number(math.inf, "begin no run after so long", "MINUTES"),
            "--out": _path("FOLDER", "the rows' place", default=Path("outputs/bench_faults")),
        },
        overrides="default: run=toy at its smallest",
    ),
    "reward": Kind(
        "frames/s of reward models, and their share of a run's iterations",
        "benchmarks.learning.reward",
        {
            "--episodes": _count(64, "synthetic episodes to score"),
            "--decisions": _count(6, "decisions per episode"),
            "--size": _count(84, "pixels of the camera"),
            "--run": {"type": Path, "help": "a run with RL iterations to compare with"},
        },
        overrides="reward=NAME ... (default: the usual ones)",
    ),
    "policy": Kind(
        "latency of acting and samples/s of learning",
        "benchmarks.policy.presets",
        {
            "--preset": {
                "default": "nano",
                "help": "nano, small, 7b, openvla-nano, openvla-7b, pi05-nano or pi05-mid",
            },
            "--device": {"default": "cpu", "help": "cpu, cuda, or auto: cuda where there is one"},
            "--compile": _switch("measure the heads with torch.compile too (minutes)"),
            "--dry-run": _switch("only estimate an OpenVLA's memory (preset or run)"),
        },
        overrides="with --dry-run: the run, e.g. run=NAME",
    ),
    "gpu": Kind(
        "the published policies with random weights on a GPU: ms, share of its peak, memory; or by "
        "arithmetic",
        "benchmarks.policy.gpu",
        {
            "--models": {
                "nargs": "+",
                "choices": SIZED,
                "default": SIZED,
                "help": "default: all",
            },
            "--modes": {
                "nargs": "+",
                "choices": TRAINED,
                "default": TRAINED,
                "help": "what is trained: the expert, adapters, all weights (default: each)",
            },
            "--micro-batch": _count(8, "rows of an update", "N"),
            "--updates": _count(5, "and decisions that count", "N"),
            "--device": {"default": "cuda", "help": "cuda, cuda:1, or cpu with --nano"},
            "--nano": _switch("small ones, which try the same code anywhere"),
            "--dry-run": _switch("the table by arithmetic alone"),
        },
    ),
    "replay": Kind(
        "batches/s of the replay against shuffled tuples in RAM",
        "benchmarks.learning.replay",
        {
            "--steps": _count(20_000, "control steps"),
            "--size": _count(128, "pixels of a camera"),
            "--cameras": _count(2, "pictures in each observation"),
            "--chunk": _count(1, "control steps per decision, each of which has a frame"),
            "--folder": {
                "type": Path,
                "help": "where to make a temporary folder (default: the system's place)",
            },
        },
    ),
    "data": Kind(
        "rows/s and memory of drawing demonstrations from videos on the disk, against lerobot's "
        "own loader",
        "benchmarks.learning.loader",
        {
            "--frames": _count(30_000, "rows of the dataset that is made"),
            "--size": _count(256, "pixels of each of its two cameras"),
            "--codec": {
                "default": "libsvtav1",
                "help": "of its videos: libsvtav1 (lerobot's own) or libx264",
            },
            "--dataset": _path("FOLDER", "measure on this one instead"),
            "--batches": _count(30, "that count, per side and round"),
            "--loader-workers": _counts((0, 2), "of lerobot's DataLoader", "N"),
            "--rounds": _count(2, "of all sides, in turn", "N"),
            "--ram": _number(2.0, "of decoded pictures that may be held", "GIB"),
        },
    ),
    "robot": Kind(
        "a session with a simulated arm: kills and freezes, lateness, takeover, the gate",
        "benchmarks.robot.report",
        {
            **_WORLD,
            "--trials": _count(3, "of each kind of kill and freeze"),
            "--victims": {
                "nargs": "+",
                "default": [],
                "metavar": "PROCESS",
                "help": "of those (default: all)",
            },
            "--steps": _count(10_000, "adversarial actions against the gate", "N"),
            "--seconds": _number(20.0, "of measuring the loop's lateness"),
            "--busy": _count(1, "processes that compute meanwhile"),
            "--cameras": _count(2, "of 640 x 480 at 30 Hz, recorded and shown meanwhile"),
            "--real-time": _count(0, "SCHED_FIFO, if permitted", "PRIORITY"),
        },
    ),
    "soak": Kind(
        "hours of sessions in virtual time, with a random fault every half minute",
        "benchmarks.robot.soak",
        {
            **_WORLD,
            "--minutes": _number(120.0, "of virtual time"),
            "--wall": _number(math.inf, "end earlier, after so long", "MINUTES"),
            "--every": _number(30.0, "between two faults", "SECONDS"),
            "--seed": _count(0, "of the faults and of what the person does"),
            "--keep": _path("FOLDER", "for the journals in which something is wrong"),
        },
    ),
    "bus": Kind(
        "an SO-101 behind its simulated serial bus: a policy's success there, faults at random",
        "benchmarks.robot.bus",
        {
            "--checkpoint": {
                "default": "",
                "metavar": "CKPT",
                "help": "a policy of env=so101 (default: faults alone)",
            },
            "--episodes": _count(
                30, "of it on the bus, and in env=so101 from the same states", "N"
            ),
            "--size": _count(84, "pixels of each of its cameras"),
            "--faults": _count(200, "at random, of the bus and of who drives it", "N"),
            "--every": _number(1.5, "of motion before each of them", "SECONDS"),
            "--wall": _number(math.inf, "end those earlier, after so long", "MINUTES"),
            "--seed": _count(0, "of the faults"),
        },
    ),
    "acting": Kind(
        "jumps where chunks meet: synchronous, asynchronous, ensemble, rtc",
        "benchmarks.robot.acting",
        {
            "--episodes": _count(5, "in each way", "N"),
            "--thinking": _number(0.12, "that a decision takes, virtually", "SECONDS"),
            "--seed": _count(0, "of the episodes"),
        },
        overrides="checkpoint=CKPT robot.KEY=... (a toy flow)",
    ),
    "hil": Kind(
        "ways to learn from a person on an arm, with a scripted one in virtual time",
        "benchmarks.robot.hil",
        {
            "--start": _path("CKPT", "the policy that all start from", required=True),
            "--methods": {
                "default": "hil_serl,hil_dagger,bc,hil_residual",
                "metavar": "A,B",
                "help": "residual_alone too",
            },
            "--episodes": _count(200, "of each method", "N"),
            "--every": _count(20, "episodes between judgements", "N"),
            "--judge": _count(50, "held-out episodes a judgement, without help", "N"),
            "--out": _path("FOLDER", "the runs' place", default=Path("outputs/bench_hil")),
            "--figure": _path("FILE", "an HTML page with the curves"),
        },
        overrides="dataset=DEMOS robot.KEY=... operator.KEY=... ...",
    ),
}


def add(parsers: Any) -> None:
    """A parser of each kind, for ``vla-rl bench``."""
    for name, kind in KINDS.items():
        parser = parsers.add_parser(name, help=kind.words)
        parser.set_defaults(function=functools.partial(run, name))
        if kind.overrides:
            add_overrides(parser, kind.overrides, kind.metavar)
        for flag, settings in kind.options.items():
            parser.add_argument(flag, **settings)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")


def run(name: str, arguments: argparse.Namespace) -> int:
    """Measure, print, and write what ``--json`` asks for; 1 where the document has ``problems``.
    Raises `UserError`."""
    from benchmarks.measuring import began, machine

    module = importlib.import_module(KINDS[name].module)
    started = began(command(name, arguments))
    found = module.measure(**{option: getattr(arguments, option) for option in KINDS[name].names})
    document = {**started, **machine(), **found}
    print(module.text(document))
    write_result(arguments.json, document)
    return int(bool(document.get("problems")))


def command(name: str, arguments: argparse.Namespace) -> str:
    """The command line that measures the same, with all options that say something."""
    kind = KINDS[name]
    words = ["vla-rl", "bench", name, *(arguments.overrides if kind.overrides else ())]
    for flag in kind.options:
        value = getattr(arguments, flag.strip("-").replace("-", "_"))
        if value is True:
            words.append(flag)
        elif value is not None and value is not False and value != []:
            words += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    return shlex.join(words)
