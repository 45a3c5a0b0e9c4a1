"""Studies: methods compared on seeds that were drawn once the plan was frozen.

A plan is a YAML file: what runs (``run``, ``common``), the ``methods`` (name: overrides), how many
``seeds``, the ``difference`` that matters, and ``measure``, the evaluation whose success is
compared. Freezing writes it with its hash, the commit and the drawn seeds into the study's folder;
from then on neither changes. Each (method, seed) is a run of its own, which goes on where it was
interrupted; with ``start`` one SFT is made per seed, and all methods go on from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation import verdict
from vla_rl.files import read_json
from vla_rl.monitoring.machine import git_commit, own_cores
from vla_rl.monitoring.metrics import write_json

FROZEN, START = "plan.json", "start"
FIRST_DRAWN = 100  # smaller seeds are those that people try
_SPREAD = 0.08  # standard deviation of differences between seeds, as measured on the quickstart


@dataclass
class Plan:
    """What is compared. ``hours``: of one run, for the estimate; ``spread``: of differences from
    seed to seed, for the power."""

    name: str
    methods: dict[str, list[str]]
    run: str = "quickstart"
    common: list[str] = field(default_factory=list)
    seeds: int = 10
    difference: float = 0.05
    measure: str = "rl"
    start: bool = True
    hours: float = 0.1
    spread: float = _SPREAD

    def check(self, where: str) -> None:
        """Raise `ConfigError` for what cannot be a study; every method's config is composed."""
        from vla_rl.config import compose

        if len(self.methods) < 2 or START in self.methods:
            raise ConfigError(
                f"{where}: methods has {sorted(self.methods)}: name two or more, none of them "
                f"{START!r}"
            )
        bad = [n for n in [self.name, *self.methods] if not n or n != Path(n).name or n[0] == "."]
        if bad:
            raise ConfigError(f"{where}: {bad[0]!r} is no name of a folder: use a plain word")
        for key, value, least in (("seeds", self.seeds, 2), ("hours", self.hours, 0)):
            if value < least:
                raise ConfigError(f"{where}: {key}={value}: give {least} or more")
        for key in ("difference", "spread"):
            if not 0 < getattr(self, key) < 1:
                raise ConfigError(
                    f"{where}: {key}={getattr(self, key)}: give a share, such as 0.05"
                )
        for name, own in self.methods.items():
            try:
                compose([f"run={self.run}", *self.common, *own])
            except ConfigError as error:
                raise ConfigError(f"{where}: methods.{name}: {error}") from error

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Plan:
    """Raises `ConfigError` that names file and key."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    known = {f.name: f for f in dataclasses.fields(Plan)}
    if not isinstance(values, dict) or not isinstance(values.get("methods"), dict):
        raise ConfigError(f"{path}: a study is a mapping with name and methods (name: overrides)")
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; its keys are {', '.join(known)}")
    values.setdefault("name", path.stem)
    for key, value in values.items():
        kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}
        kind: Any = kinds.get(str(known[key].type))
        right = kind is None or (
            isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        )
        if not right:
            raise ConfigError(f"{path}: {key}={value!r} has to be of type {known[key].type}")
    for name, own in [*values["methods"].items(), ("common", values.get("common", []))]:
        if not isinstance(own, list) or not all(isinstance(text, str) for text in own):
            raise ConfigError(f"{path}: {name}: give a list of overrides, such as [actor=residual]")
    plan = Plan(**values)
    plan.check(str(path))
    return plan


def described(plan: Plan) -> str:
    """How much it takes, and what it can find."""
    runs = plan.seeds * len(plan.methods)
    hours = runs * plan.hours
    chances = {
        n: verdict.power(plan.difference, plan.spread, n) for n in sorted({3, 5, 10, plan.seeds})
    }
    told = ", ".join(f"{n} seeds {chance:.0%}" for n, chance in chances.items())
    return (
        f"{plan.name}: {len(plan.methods)} methods x {plan.seeds} seeds = {runs} runs of "
        f"run={plan.run}, about {hours:.1f} h one after the other\n"
        f"primary measure: success of evaluation {plan.measure!r}, paired by seed\n"
        f"chance to find a true difference of {plan.difference:.0%} in one pair, where differences "
        f"spread by {plan.spread:.0%} from seed to seed: {told}"
    )


def freeze(plan: Plan, folder: Path) -> dict[str, Any]:
    """The frozen plan of ``folder``: written with its seeds the first time. Raises `ConfigError`
    where another one lies there."""
    path = folder / FROZEN
    if path.exists():
        frozen = read_json(path, "name another study")
        if frozen["sha256"] != plan.digest:
            raise ConfigError(
                f"{path} holds another plan of this name (sha256 {frozen['sha256'][:12]}, this one "
                f"{plan.digest[:12]}): a frozen plan does not change; give the new one another name"
            )
        return frozen
    draw = random.SystemRandom()
    frozen = {
        "sha256": plan.digest,
        "commit": git_commit(),
        "seeds": sorted(draw.sample(range(FIRST_DRAWN, 2**31), plan.seeds)),
        "plan": dataclasses.asdict(plan),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, frozen)
    return frozen


# ------------------------------------------------------------------------------------------ running
def runs(frozen: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, int, list[list[str]]]]:
    """(method, seed, the commands' overrides, one after the other) of every run."""
    plan = Plan(**frozen["plan"])
    common = [f"run={plan.run}", "wandb=false", *plan.common, f"output_dir={folder}"]
    for seed in frozen["seeds"]:
        start = f"{START}/seed_{seed}"
        first = [*common, f"seed={seed}", f"name={start}", "phases=[collect,sft,eval_sft,report]"]
        on_it = [
            f"checkpoint={folder / start / 'checkpoints' / 'sft'}",
            f"dataset={folder / start / 'dataset'}",
            "phases=[eval_sft,reward,rl,eval_rl,report]",
        ]
        for name, own in plan.methods.items():
            last = [*common, f"seed={seed}", f"name={name}/seed_{seed}"]
            steps = [[*last, *own]]
            yield name, seed, [first, [*last, *on_it, *own]] if plan.start else steps


def figure(frozen: Mapping[str, Any], folder: Path, method: str, seed: int) -> float | None:
    """The run's success of the primary measure; None: it is not there yet."""
    path = folder / method / f"seed_{seed}" / f"eval_{frozen['plan']['measure']}.json"
    if not path.exists():
        return None
    outcomes = read_json(path, "remove it, and run the study again")["outcomes"]
    return sum(bool(o["success"]) for o in outcomes) / len(outcomes)


def make(
    frozen: Mapping[str, Any],
    folder: Path,
    jobs: int = 1,
    say: Callable[[str], None] = print,
    train: Callable[[Sequence[str], Path, Sequence[int]], int] | None = None,
) -> None:
    """Make what is not there yet. Raises `UserError` that names the runs that failed."""
    train = train or run_alone
    by_seed: dict[int, list[tuple[str, list[list[str]]]]] = {}
    for name, seed, steps in runs(frozen, folder):
        if figure(frozen, folder, name, seed) is None:
            by_seed.setdefault(seed, []).append((name, steps))

    def of_seed(seed: int, cores: list[int]) -> list[str]:
        failed, begun = [], False
        for name, steps in by_seed[seed]:
            log = folder / name / f"seed_{seed}.log"
            ended = any(train(step, log, cores) for step in (steps[-1:] if begun else steps))
            begun = begun or not ended
            found = figure(frozen, folder, name, seed)
            if ended or found is None:
                failed.append(f"{name}, seed {seed} (see {log})")
            say(f"{name}, seed {seed}: {'failed' if found is None else f'{found:.0%}'}")
        return failed

    if failed := beside(jobs, by_seed, of_seed):
        raise UserError(f"{len(failed)} runs failed, and the others are kept: {'; '.join(failed)}")


def beside(
    jobs: int, seeds: Iterable[int], work: Callable[[int, list[int]], list[str]]
) -> list[str]:
    """``work(seed, cores)`` for every seed, ``jobs`` of them beside each other, each on its share
    of the cores; what all of them return, in the order of the seeds."""
    cores = own_cores()
    share = max(1, len(cores) // jobs)
    free: Queue[list[int]] = Queue()
    for job in range(jobs):
        free.put(cores[job * share : (job + 1) * share] or cores)

    def one(seed: int) -> list[str]:
        mine = free.get()
        try:
            return work(seed, mine)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(jobs) as pool:
        return [text for found in pool.map(one, seeds) for text in found]


def run_alone(
    overrides: Sequence[str], log: Path, cores: Sequence[int], folder: Path | None = None
) -> int:
    """``vla-rl train``, or what is left of it, in a process of its own on these cores, from
    ``folder`` (None: from here); its exit status. What it says goes to the end of ``log``."""
    call = "import os, sys; "
    if cores:
        call += f"os.sched_setaffinity(0, {list(cores)}); "
    call += "from vla_rl.cli import main; sys.exit(main())"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        return subprocess.run(
            [sys.executable, "-c", call, "train", *overrides],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        ).returncode


# ------------------------------------------------------------------------------------------ verdict
def judged(frozen: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Figures of all runs that are there, and what they say; JSON-ready."""
    plan = Plan(**frozen["plan"])
    figures = {
        name: {
            seed: value
            for seed in frozen["seeds"]
            if (value := figure(frozen, folder, name, seed)) is not None
        }
        for name in plan.methods
    }
    return {
        "plan": frozen["plan"],
        "sha256": frozen["sha256"],
        "commit": frozen["commit"],
        "seeds": frozen["seeds"],
        "runs": {name: {str(seed): v for seed, v in of.items()} for name, of in figures.items()},
        "missing": sum(len(frozen["seeds"]) - len(of) for of in figures.values()),
        "methods": verdict.methods(figures),
        "pairs": verdict.to_dict(verdict.pairs(figures)),
    }


def text(found: Mapping[str, Any]) -> str:
    """What a person reads of `judged`."""
    from vla_rl.display.words import text_table

    rows = [
        (
            m["method"],
            str(m["seeds"]),
            f"{m['mean']:.1%}",
            "" if m["low"] != m["low"] else f"{m['low']:.1%} to {m['high']:.1%}",
            f"{m['interquartile_mean']:.1%}",
            f"{m['worst']:.1%}",
        )
        for m in sorted(found["methods"], key=lambda m: -m["mean"])
    ]
    pairs = [
        (
            f"{p['b']} - {p['a']}",
            f"{p['difference']:+.1%}",
            f"{p['low']:+.1%} to {p['high']:+.1%}",
            f"{p['corrected']:.3f}",
            f"{p['better']:.0%}",
            p["verdict"],
        )
        for p in found["pairs"]
    ]
    missing = (
        f"\n{found['missing']} runs are missing: this is no verdict yet" if found["missing"] else ""
    )
    lines = [
        f"plan {found['sha256'][:12]}, frozen at {found['commit'] or 'no commit'}; seeds "
        f"{', '.join(map(str, found['seeds']))}{missing}",
        text_table([("method", "seeds", "mean", "95 %", "middle half", "worst"), *rows]),
    ]
    if pairs:
        head = ("paired by seed", "difference", "95 % over seeds", "p (Holm)", "better", "verdict")
        lines.append(text_table([head, *pairs]))
    return "\n\n".join(lines)
