"""Studies: methods compared on seeds that were drawn once the plan was frozen.

A plan is a YAML file (`Plan`). Freezing writes it with its hash, the commit and the drawn seeds
into the study's folder; from then on neither changes. Each (method, seed) is a run of its own,
which goes on where it was interrupted; with ``start`` one SFT is made per seed, and all methods go
on from it. What the runs say is in `vla_rl.run.study_verdict`, a method that comes later in
`vla_rl.run.study_added`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

from vla_rl.config import RunConfig, compose
from vla_rl.config.phases import PHASES, evaluations
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation import verdict
from vla_rl.files import read_json
from vla_rl.monitoring.machine import git_commit, own_cores
from vla_rl.monitoring.metrics import TEST, TEST_BEST, write_json

FROZEN, START = "plan.json", "start"
FIRST_DRAWN = 100  # smaller seeds are those that people try
_LOOK_S = 0.2  # how often a stop is looked for
_SPREAD = 0.08  # standard deviation of differences between seeds, as measured on the quickstart
MEASURES = (TEST, TEST_BEST, *evaluations())


@dataclass
class Plan:
    """What is compared: ``methods`` (name: overrides) of ``run`` with the overrides ``common`` to
    all, on so many ``seeds`` (or on those of a list), by the evaluation ``measure``: ``test`` and
    ``test_best`` are the last and the best policy on the test set, whose states chose nothing.

    ``difference``: the smallest that matters; ``spread``: of differences from seed to seed, for the
    power; ``hours``: of one run, for the estimate; ``start``: one SFT for all methods of a seed;
    ``look_every``: episodes of RL between two looks at the held-out states, the same for all
    methods (0: as each has it); ``tuning``: {method: what was tried to choose its settings}.
    """

    name: str
    methods: dict[str, list[str]]
    run: str = "quickstart"
    common: list[str] = field(default_factory=list)
    seeds: int | list[int] = 10
    difference: float = 0.05
    measure: str = TEST
    start: bool = True
    hours: float = 0.1
    spread: float = _SPREAD
    look_every: int = 0
    tuning: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many seeds."""
        return self.seeds if isinstance(self.seeds, int) else len(self.seeds)

    def check(self, where: str) -> None:
        """Raise `ConfigError` for what cannot be a study; every method's config is composed."""
        if not self.methods or START in self.methods:
            raise ConfigError(
                f"{where}: methods has {sorted(self.methods)}: name one or more, none of them "
                f"{START!r}"
            )
        for name in [self.name, *self.methods]:
            plain_name(name, where)
        if isinstance(self.seeds, list) and len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"{where}: seeds={self.seeds}: give each seed once")
        for key, value, least in (
            ("seeds", self.count, 2),
            ("hours", self.hours, 0),
            ("look_every", self.look_every, 0),
        ):
            if value < least:
                raise ConfigError(f"{where}: {key}={value}: give {least} or more")
        for key, share in (("difference", self.difference), ("spread", self.spread)):
            if not 0 < share < 1:
                raise ConfigError(f"{where}: {key}={share}: give a share, such as 0.05")
        if self.measure not in MEASURES:
            raise ConfigError(f"{where}: measure={self.measure!r}: give {', '.join(MEASURES)}")
        if unknown := sorted(set(self.tuning) - set(self.methods)):
            raise ConfigError(f"{where}: tuning speaks of {unknown[0]!r}, which is no method")
        judged = {}
        for name, own in self.methods.items():
            try:
                config = compose(self._given(own))
                self._added(config)
                judged[name] = judged_by(config)
            except ConfigError as error:
                raise ConfigError(f"{where}: methods.{name}: {error}") from error
        first = next(iter(judged))
        for name, by in judged.items():
            if by != judged[first]:
                raise ConfigError(
                    f"{where}: methods.{name} is judged by other episodes than methods.{first} "
                    f"({by}; {judged[first]}): tasks and evaluate.* belong into common"
                )

    def overrides(self, own: Sequence[str], own_start: bool = False) -> list[str]:
        """Those of a method's run, from its ``own``, and where ``start`` says so from another's SFT
        or by an ``own_start``. The phase of the test set and the looks follow from the plan."""
        given = self._given(own, own_start)
        return [*given, *self._added(compose(given))]

    def _given(self, own: Sequence[str], own_start: bool = False) -> list[str]:
        given = [f"run={self.run}", "wandb=false", *self.common]
        if self.start:
            sft = "sft," if own_start else ""
            given.append(f"phases=[{sft}eval_sft,reward,rl,eval_rl,report]")
        return [*given, *own]

    def _added(self, config: RunConfig) -> list[str]:
        added = []
        if self.measure in (TEST, TEST_BEST) and "eval_test" not in config.phases:
            asked = [name for name in PHASES if name in (*config.phases, "eval_test")]
            added.append(f"phases=[{','.join(asked)}]")
        if self.look_every:
            looks, rest = divmod(self.look_every, config.rl.episodes_per_iteration)
            if rest:
                raise ConfigError(
                    f"look_every={self.look_every} is no multiple of rl.episodes_per_iteration="
                    f"{config.rl.episodes_per_iteration}, and looks come between iterations: "
                    "choose one that all methods' iterations divide"
                )
            added.append(f"rl.eval_every={looks}")
        return added

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return digest(dataclasses.asdict(self))


def plain_name(name: str, where: str) -> str:
    """The name itself; `ConfigError` for one that is no folder's."""
    if not name or name != Path(name).name or name[0] == ".":
        raise ConfigError(f"{where}: {name!r} is no name of a folder: use a plain word")
    return name


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON file says."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def judged_by(config: RunConfig) -> dict[str, Any]:
    """What has to be alike for two runs to meet the same episodes in their evaluations."""
    found = {"tasks": config.tasks, "held_out_tasks": config.held_out_tasks}
    names = ("episodes_per_task", "split", "seed", "test_episodes")
    return found | {f"evaluate.{n}": vars(config.evaluate)[n] for n in names}


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
        if not _is_a(str(known[key].type), value):
            raise ConfigError(f"{path}: {key}={value!r} has to be of type {known[key].type}")
    for name, own in [*values["methods"].items(), ("common", values.get("common", []))]:
        if not isinstance(own, list) or not all(isinstance(text, str) for text in own):
            raise ConfigError(f"{path}: {name}: give a list of overrides, such as [actor=residual]")
    plan = Plan(**values)
    plan.check(str(path))
    return plan


def _is_a(kind: str, value: Any) -> bool:
    plain: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
    if kind == "int | list[int]":
        return all(_is_a("int", v) for v in (value if isinstance(value, list) else [value]))
    if kind == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    if kind not in plain:  # (the lists of overrides are looked at one by one)
        return True
    return isinstance(value, plain[kind]) and isinstance(value, bool) == (kind == "bool")


def described(plan: Plan) -> str:
    """How much it takes, and what it can find."""
    runs = plan.count * len(plan.methods)
    hours = runs * plan.hours
    pairs = len(plan.methods) * (len(plan.methods) - 1) // 2
    told = ", ".join(
        f"{n} seeds {verdict.power(plan.difference, plan.spread, n, pairs):.0%}"
        for n in sorted({3, 5, 10, plan.count})
        if pairs
    )
    methods = f"{len(plan.methods)} method{'s' * (len(plan.methods) > 1)}"
    compared = (
        f"chance to find a true difference of {plan.difference:.0%} in one pair, corrected for "
        f"{pairs}, where differences spread by {plan.spread:.0%} from seed to seed: {told}"
    )
    return (
        f"{plan.name}: {methods} x {plan.count} seeds = {runs} runs of "
        f"run={plan.run}, about {hours:.1f} h one after the other\n"
        f"primary measure: {measured(plan.measure)}, paired by seed\n"
        + (compared if pairs else "one method: nothing is compared")
    )


def measured(measure: str) -> str:
    """What is compared, in words."""
    if measure in (TEST, TEST_BEST):
        which = "the last" if measure == TEST else "the best"
        return f"success of {which} policy on the test set, whose states chose nothing"
    return f"success of evaluation {measure!r} on the held-out states that also choose"


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
    drawn = isinstance(plan.seeds, int)
    draw = random.SystemRandom()
    frozen = {
        "sha256": plan.digest,
        "commit": git_commit(),
        "seeds": sorted(draw.sample(range(FIRST_DRAWN, 2**31), plan.count))
        if drawn
        else plan.seeds,
        "drawn": drawn,
        "plan": dataclasses.asdict(plan),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, frozen)
    return frozen


# ------------------------------------------------------------------------------------------ running
@dataclass(frozen=True)
class Method:
    """One column of a study: ``overrides`` as the plan or an addition has them; code of its own in
    ``folder``; with ``own_start`` it cannot go on from the others' SFT, and imitates the same
    demonstrations."""

    name: str
    overrides: Sequence[str]
    folder: Path | None = None
    own_start: bool = False

    def given(self, plan: Plan) -> list[str]:
        """The overrides of all its runs."""
        return plan.overrides(self.overrides, self.own_start)

    def steps(self, plan: Plan, given: Sequence[str], study: Path, seed: int) -> list[list[str]]:
        """The overrides of the commands that make its run of a seed, one after the other; of the
        start where it is not there yet."""
        at = [f"output_dir={study}", f"seed={seed}"]
        last = [*given, *at, f"name={self.name}/seed_{seed}"]
        if not plan.start:
            return [last]
        name = f"{START}/seed_{seed}"
        common = [f"run={plan.run}", "wandb=false", *plan.common, *at]
        first = [*common, f"name={name}", "phases=[collect,sft,eval_sft,report]"]
        last.append(f"dataset={study / name / 'dataset'}")
        if not self.own_start:
            last.append(f"checkpoint={study / name / 'checkpoints' / 'sft'}")
        return [last] if (study / name / "eval_sft.json").exists() else [first, last]


def methods_of(frozen: Mapping[str, Any], names: Sequence[str] | None = None) -> list[Method]:
    """Those of a frozen plan, or of its ``names``. Raises `UserError` for one that it lacks."""
    found = {name: Method(name, own) for name, own in frozen["plan"]["methods"].items()}
    if missing := sorted(set(names or ()) - set(found)):
        raise UserError(
            f"--methods: the plan has no {', '.join(missing)}; it has {', '.join(found)}"
        )
    return [method for name, method in found.items() if names is None or name in names]


def scores(frozen: Mapping[str, Any], folder: Path, method: str, seed: int) -> list[float] | None:
    """The run's success on each task by the primary measure; None: it is not there yet."""
    path = folder / method / f"seed_{seed}" / f"eval_{frozen['plan']['measure']}.json"
    if not path.exists():
        return None
    tasks: dict[str, list[bool]] = {}
    for outcome in read_json(path, "remove it, and run the study again")["outcomes"]:
        tasks.setdefault(outcome["task_id"], []).append(bool(outcome["success"]))
    return [sum(wins) / len(wins) for _, wins in sorted(tasks.items())]


def make(
    frozen: Mapping[str, Any],
    folder: Path,
    methods: Sequence[Method],
    jobs: int = 1,
    say: Callable[[str], None] = print,
    train: Callable[..., int] | None = None,
) -> None:
    """Make what is not there yet. Raises `UserError` that names the runs that failed. Interrupted,
    it ends the runs that are under way and begins no other."""
    stopped, plan = threading.Event(), Plan(**frozen["plan"])
    train = train or functools.partial(run_alone, stopped=stopped)
    given = {method.name: method.given(plan) for method in methods}
    open_runs = {
        seed: missing
        for seed in frozen["seeds"]
        if (missing := [m for m in methods if scores(frozen, folder, m.name, seed) is None])
    }

    def of_seed(seed: int, cores: list[int]) -> list[str]:
        failed = []
        for method in open_runs[seed]:
            if stopped.is_set():
                break
            log = folder / method.name / f"seed_{seed}.log"
            steps = method.steps(plan, given[method.name], folder, seed)
            ended = any(train(step, log, cores, method.folder) for step in steps)
            found = scores(frozen, folder, method.name, seed)
            if ended or found is None:
                failed.append(f"{method.name}, seed {seed} (see {log})")
            told = "failed" if found is None else f"{sum(found) / len(found):.0%}"
            say(f"{method.name}, seed {seed}: {told}")
        return failed

    if failed := beside(jobs, open_runs, of_seed, stopped):
        raise UserError(f"{len(failed)} runs failed, and the others are kept: {'; '.join(failed)}")


def beside(
    jobs: int,
    seeds: Iterable[int],
    work: Callable[[int, list[int]], list[str]],
    stopped: threading.Event,
) -> list[str]:
    """``work(seed, cores)`` for every seed, ``jobs`` of them beside each other, each on its share
    of the cores; what all of them return, in the order of the seeds. Interrupted, it sets
    ``stopped``, which ends the work that is under way."""
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
        try:
            return [text for found in pool.map(one, seeds) for text in found]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_alone(
    overrides: Sequence[str],
    log: Path,
    cores: Sequence[int],
    code: Path | None = None,
    *,
    stopped: threading.Event,
) -> int:
    """``vla-rl train``, or what is left of it, in a process of its own on these cores, which finds
    the modules in the folder ``code`` before all others; its exit status. What it says goes to the
    end of ``log``. It has a session of its own, so that no Ctrl-C reaches it, and is told once, by
    ``stopped``: a second signal would break into what it saves. It is killed with this process."""
    call, variables = "import ctypes, os, sys; ", dict(os.environ)
    call += "getattr(ctypes.CDLL(None), 'prctl', max)(1, 9); "  # (PR_SET_PDEATHSIG, SIGKILL)
    call += f"os.getppid() == {os.getpid()} or os._exit(1); "
    if cores:
        call += f"os.sched_setaffinity(0, {list(cores)}); "
    if code is not None:  # (its own workers, and those under another Python)
        call += f"sys.path.insert(0, {str(code)!r}); "
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(code), os.environ.get("PYTHONPATH")])
        )
    call += "from vla_rl.cli import main; sys.exit(main())"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a") as file,
        subprocess.Popen(
            [sys.executable, "-c", call, "train", *overrides],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as process,
    ):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
            if stopped.is_set():
                process.terminate()
                process.wait()
    return process.returncode
