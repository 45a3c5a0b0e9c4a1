"""`vla-rl bench learn`: how soon runs reached a success rate and where their seconds went; or two settings side by side.

Held-out evaluation is no part of learning: its seconds are counted apart. Seconds come from ``metrics.jsonl`` (see
``docs/reference/metrics.md``), so a run that was interrupted counts only what it kept.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.learning.curves import side_by_side, write_figure
from vla_rl import config as configs
from vla_rl.asked import CriticWarmup
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.files import read_json
from vla_rl.reporting.machine import versions
from vla_rl.reporting.metrics import METRICS_FILE, read_metrics
from vla_rl.run.pipeline import run_pipeline
from vla_rl.run.preflight import read_phases

PARTS = ("simulate", "act", "score", "update", "critic", "rest")
RULE = "the first held-out evaluation at or above the level after which none fell below it"
START_UPDATES = 100  # of the SFT that a comparison of two settings starts from
EQUAL_WORK = 0.01  # the share by which two amounts of work may differ and count as equal
NEGLIGIBLE = 1e-3  # seconds per iteration below which a ratio says nothing
Record = Mapping[str, Any]
Side = TypeVar("Side")


# ------------------------------------------------------------------------------------------------------- one iteration
def iteration_seconds(record: Record) -> dict[str, float]:
    """Seconds of one iteration of RL: `PARTS`, "learn" (their sum) and "evaluate", which is no part of it.

    "simulate" is the wait for the env, "act" the policy in rollouts, "update" what learning took besides training a
    separate critic, "rest" bookkeeping and checkpoints. Of runs from before ``time/iteration`` was logged the time between
    rollouts, scoring and learning is not known.
    """

    def logged(key: str) -> float:
        return float(record.get(key) or 0.0)

    evaluate, critic = logged("time/evaluate"), logged("time/critic")
    learn = logged("engine/seconds") + logged("time/reward") + logged("time/update")
    if "time/iteration" in record:
        learn = logged("time/iteration") - evaluate
    parts = {
        "simulate": logged("engine/wait_seconds"),
        "act": logged("engine/policy_seconds"),
        "score": logged("time/reward"),
        "update": logged("time/update") - critic,
        "critic": critic,
    }
    return parts | {"rest": max(0.0, learn - sum(parts.values())), "learn": learn, "evaluate": evaluate}


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure that all rows have."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


# ------------------------------------------------------------------------------------------------------ runs that exist
@dataclass(frozen=True)
class Point:
    """Held-out ``success`` after so much of RL."""

    iteration: int
    episodes: int
    control_steps: int
    seconds: float  # of learning
    success: float


def rl_records(run: Path) -> list[dict[str, Any]]:
    """The iterations of a run's phase rl, in order. Raises `UserError` where there are none."""
    rows = [r for r in read_metrics(run / METRICS_FILE) if r["phase"] == "rl"]
    if not rows:
        raise UserError(f"{run} has no iterations of RL in its {METRICS_FILE}: name a run folder whose phase rl has begun")
    return rows


def learning_curve(rows: Sequence[Record], before: float | None, after: float | None, judged: int = 0) -> list[Point]:
    """Held-out success over the course of RL.

    ``eval/success`` of an iteration was measured before its episodes. ``before`` and ``after`` are the success of the
    starting policy and of the last one, as the phases eval_sft and eval_rl measured them (None: they did not). ``judged``
    episodes were spent before on judging a learned reward; they count.
    """
    points = [] if before is None or "eval/success" in rows[0] else [Point(0, judged, 0, 0.0, before)]
    episodes, steps, seconds = judged, 0, 0.0
    for row in rows:
        if row.get("eval/success") is not None:
            points.append(Point(int(row["step"]) - 1, episodes, steps, seconds, float(row["eval/success"])))
        episodes, steps = judged + int(row.get("episodes") or 0), int(row.get("control_steps") or 0)
        seconds += iteration_seconds(row)["learn"]
    if after is not None:
        points.append(Point(int(rows[-1]["step"]), episodes, steps, seconds, after))
    return points


def reached(curve: Sequence[Point], level: float) -> int | None:
    """Where in ``curve`` the level was reached by `RULE`; None where it was not."""
    first = max((i for i, point in enumerate(curve) if point.success < level), default=-1) + 1
    return first if first < len(curve) else None


def learning_of(run: Path, level: float) -> dict[str, Any]:
    """What a run folder says of its speed of learning, JSON-ready. Raises `UserError` where its RL has not begun."""
    rows, phases = rl_records(run), _read(run / "phases.json")
    seconds = [iteration_seconds(row) for row in rows]

    def evaluated(name: str) -> float | None:
        path, complete = run / f"eval_{name}.json", phases.get(f"eval_{name}", {}).get("complete")
        return EvaluationResult.load(path).success_rate if complete and path.exists() else None

    judged = int(phases.get("reward", {}).get("episodes", 0))
    curve = learning_curve(rows, evaluated("sft"), evaluated("rl"), judged)
    at = reached(curve, level)
    return {
        "run": str(run),
        "iterations": int(rows[-1]["step"]),
        **_configured(run),
        "episodes": judged + int(rows[-1].get("episodes") or 0),
        "learn_seconds": sum(s["learn"] for s in seconds),
        "evaluate_seconds": sum(s["evaluate"] for s in seconds) if all("time/iteration" in r for r in rows) else None,
        "curve": [asdict(point) for point in curve],
        "reached": None if at is None else asdict(curve[at]),
        "below_before": asdict(curve[at - 1]) if at else None,
        "seconds_per_iteration": mean_of(seconds),
        "hardware": hardware(_read(run / "versions.json")),
    }


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, "put a whole copy in its place, or remove it") if path.exists() else {}


def _configured(run: Path) -> dict[str, Any]:
    """What the run's config says: ``rl.iterations``, algorithm and actor (None: not known). It is read as plain YAML, since
    its plug-ins may not be importable here."""
    import yaml

    path = run / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, yaml.YAMLError):  # it is only shown beside the figures
        tree = None

    def at(group: str, key: str) -> Any:
        values = tree.get(group) if isinstance(tree, dict) else None
        return values.get(key) if isinstance(values, dict) else None

    return {
        "planned_iterations": at("rl", "iterations"), "algorithm": at("algorithm", "type"), "actor": at("actor", "type"),
    }  # fmt: skip


def require_level(level: float) -> None:
    """Raise `ConfigError` unless ``level`` is a success rate that can be reached."""
    if not 0.0 < level <= 1.0:
        raise ConfigError(f"--level {level} is no success rate: give a number above 0 and at most 1, such as 0.8")


def bench_runs(
    runs: Sequence[Path], level: float, figure: Path | None = None, words: Sequence[str] | None = None
) -> dict[str, Any]:
    """Print and return `learning_of` each run; several also side by side, and as curves on a page ``figure``.

    ``words`` of the command, as it is noted (None: the runs).
    """
    require_level(level)
    if not runs:
        raise UserError("name run folders (vla-rl bench learn outputs/quickstart), or compare two settings with --against")
    named = [*map(str, runs)] if words is None else words
    document: dict[str, Any] = {**made("learn", [*named, "--level", str(level)]), "level": level, "rule": RULE, "runs": []}
    for run in runs:
        document["runs"].append(learning_of(run, level))
        print(run_text(document["runs"][-1], level))
    if len(runs) > 1:
        print(side_by_side(document["runs"], level))
    if figure is not None:
        write_figure(figure, document["runs"], level)
        print(f"figure: {figure}")
    print(f"reached: {RULE}; evaluation is no part of the learning time")
    return document


def run_text(figures: Mapping[str, Any], level: float) -> str:
    """`learning_of` in plain words."""
    planned, evaluate = figures["planned_iterations"], figures["evaluate_seconds"]
    of = f" of {planned}" if planned not in (None, figures["iterations"]) else ""
    apart = "evaluation not timed then" if evaluate is None else f"evaluation {evaluate:.1f} s apart"
    lines = [
        f"{figures['run']}: {figures['iterations']}{of} iterations of RL, {figures['episodes']} episodes, "
        f"{figures['learn_seconds']:.1f} s of learning ({apart})",
        f"  {level:.0%} {_reached_text(figures)}",
    ]
    curve = ", ".join(f"{p['iteration']}: {p['success']:.0%}" for p in figures["curve"])
    lines += [f"  held-out success by iteration: {curve}"] if curve else []
    mean = figures["seconds_per_iteration"]
    shares = [f"{name} {mean[name]:.2f} s ({mean[name] / max(mean['learn'], 1e-9):.0%})" for name in PARTS]
    return "\n".join([*lines, f"  a mean iteration takes {mean['learn']:.2f} s: {', '.join(shares)}"])


def _reached_text(figures: Mapping[str, Any]) -> str:
    point, below = figures["reached"], figures["below_before"]
    if not figures["curve"]:
        return "unknown: this run was not evaluated on held-out episodes yet (rl.eval_every, phase eval_rl)"
    if point is None:
        return f"not reached in {figures['episodes']} episodes"
    if not point["iteration"]:
        return "reached by the starting policy"
    text = f"reached after {point['seconds']:.1f} s and {point['episodes']} episodes (iteration {point['iteration']})"
    if below is None:
        return f"{text}, its first evaluation"
    return f"{text}; still below after {below['seconds']:.1f} s and {below['episodes']} episodes"


# ----------------------------------------------------------------------------------------------------- two settings
SIDES = ("as given", "against")
# What the seconds of each part hang on: where these are equal, so is the work.
WORK_OF = {
    "simulate": ("episodes", "control steps", "decisions"),
    "act": ("decisions",),
    "score": ("decisions",),
    "update": ("decisions", "episodes learned from", "epochs"),
    "critic": ("decisions",),
    "rest": ("episodes", "decisions"),
    "learn": ("episodes", "control steps", "decisions", "episodes learned from", "epochs"),
}


def split_overrides(text: str) -> list[str]:
    """``a=1,b=[x,y],c=2`` as overrides: at the commas that a new key follows."""
    return re.split(r",(?=[~+]*[\w./@]+=|~)", text)


def bench_against(
    overrides: Sequence[str], against: Sequence[str], *, iterations: int = 2, rounds: int = 2
) -> dict[str, Any]:
    """Seconds per iteration of RL of a config and of the same with ``against`` added, in turns; prints a table.

    Both sides start from one policy (``checkpoint=`` among the overrides, or a short SFT made here) with one seed. In each
    of ``rounds`` each side goes on by ``iterations`` that count, after one that does not: simulators build their scenes in
    it, and caches and compiled graphs are filled. Evaluation and the critic's warm-up are off.
    """
    if iterations < 1 or rounds < 1:
        raise ConfigError(f"bench learn needs --iterations >= 1 and --rounds >= 1, got {iterations} and {rounds}")
    words = (list(overrides), [*overrides, *against])
    given = [*overrides, "--against", ",".join(against), "--iterations", str(iterations), "--rounds", str(rounds)]
    began = made("learn", given)
    records: list[list[list[dict[str, Any]]]] = [[], []]  # by side, by round
    with tempfile.TemporaryDirectory(prefix="vla-rl-bench-") as name:
        sides = [side_config(given, Path(name), side) for given, side in zip(words, SIDES)]
        _require_comparable(sides[0], sides[1], against)
        start = sides[0].checkpoint or make_start(overrides, sides, words)
        for side, _ in in_turns((0, 1), rounds):
            records[side].append(_go_on(sides[side], iterations))
        memory = [read_phases(side.run_dir)["peak_memory_bytes"] / 2**30 for side in sides]
    document = {
        **began, "hardware": hardware(versions()), "versions": versions(), "start": start, "overrides": words[0],
        "against": list(against), "iterations": iterations, "rounds": rounds, "peak_memory_gib": memory, **compared(records),
    }  # fmt: skip
    print(against_text(document))
    return document


def in_turns(sides: Iterable[Side], rounds: int) -> list[tuple[Side, int]]:
    """(side, number of the round) in the order in which they run: each round the other way round, so that a drift of the
    machine meets all sides."""
    order = list(sides)
    return [(side, number) for number in range(rounds) for side in order[:: 1 if number % 2 == 0 else -1]]


def side_config(overrides: Sequence[str], folder: Path, name: str) -> RunConfig:
    """One side's run: RL alone, without evaluation, in ``folder``."""
    config = configs.compose(overrides)
    config.output_dir, config.name, config.wandb.mode = str(folder), name.replace(" ", "_"), "off"
    config.phases, config.reward_check.on_bad = ["reward", "rl"], "warn"
    config.rl.iterations = config.rl.eval_every = 0
    if isinstance(config.algorithm, CriticWarmup):  # such iterations leave the policy out
        config.algorithm.critic_warmup_iterations = 0
    return config


def _require_comparable(plain: RunConfig, changed: RunConfig, against: Sequence[str]) -> None:
    """Raises `ConfigError` where the two sides cannot start from one policy, or do not differ in anything that RL reads."""
    named = ",".join(against)
    if (plain.policy_type, plain.checkpoint) != (changed.policy_type, changed.checkpoint):
        raise ConfigError(f"--against {named}: both sides start from one policy: leave policy.type and checkpoint alone")
    trees = [configs.to_tree(config) for config in (plain, changed)]
    for tree in trees:
        for key in ("name", "collect", "sft", "evaluate", "policy_changes"):
            tree.pop(key)
    if trees[0] == trees[1]:
        raise ConfigError(
            f"--against {named} changes nothing that RL of this run reads: name another value, such as "
            "algorithm.minibatch_size=512"
        )


def make_start(overrides: Sequence[str], sides: Sequence[RunConfig], words: Sequence[Sequence[str]]) -> str:
    """A policy for both sides to start from, by a short SFT where the config has one; says what it is."""
    config = configs.compose(overrides)
    if "sft" not in config.phases:  # it starts from a published checkpoint, which each side reads itself
        return "as the config says"
    config.output_dir, config.name, config.wandb.mode = sides[0].output_dir, "start", "off"
    config.phases = ["collect", "sft"]
    if not any(word.lstrip("+").startswith("sft.updates=") for word in overrides):
        config.sft.updates = min(config.sft.updates, START_UPDATES)
    folder = run_pipeline(config)
    for side, given in zip(sides, words):
        side.checkpoint = str(folder / "checkpoints" / "sft")
        configs.with_policy_changes(side, given)
        if (folder / "dataset").is_dir():  # for rewards that want demonstrations
            side.run_dir.mkdir(parents=True)
            (side.run_dir / "dataset").symlink_to((folder / "dataset").resolve())
    return f"SFT of {config.sft.updates} updates"


def _go_on(config: RunConfig, iterations: int) -> list[dict[str, Any]]:
    """Lengthen a side's run by ``iterations`` after one that warms up; their records."""
    config.rl.iterations += 1 + iterations
    run_pipeline(config)
    return rl_records(config.run_dir)[-iterations:]


def work_of(record: Record) -> dict[str, float]:
    """How much one iteration had to do. "epochs" are there for algorithms that log them (an early stop ends them)."""
    episodes = float(record["engine/episodes"])
    work = {
        "episodes": episodes,
        "control steps": float(record["engine/control_steps"]),
        "decisions": float(record["engine/decisions"]),
        "episodes learned from": episodes * float(record["rollout/learned_share"]),
    }
    return work | ({"epochs": float(record["ppo/epochs"])} if record.get("ppo/epochs") is not None else {})


def compared(records: Sequence[Sequence[Sequence[Record]]]) -> dict[str, Any]:
    """Two sides (each a list of rounds, each a list of iterations): their means, and "against" over "as given".

    Ratios are None where both sides take next to nothing. "low" and "high" are the smallest and largest ratio of a round.
    ``equal_work`` names the parts for which both sides had the same to do, within `EQUAL_WORK`.
    """
    by_round = [[mean_of([iteration_seconds(r) for r in rows]) for rows in side] for side in records]
    plain, changed = (mean_of(side) for side in by_round)
    work = [mean_of([work_of(r) for rows in side for r in rows]) for side in records]
    ratios: dict[str, Any] = {}
    for part in (*PARTS, "learn"):
        of_rounds = [b[part] / a[part] for a, b in zip(*by_round) if a[part] > 0]
        told = of_rounds and max(plain[part], changed[part]) >= NEGLIGIBLE and plain[part] > 0
        value = {"ratio": changed[part] / plain[part], "low": min(of_rounds), "high": max(of_rounds)} if told else None
        ratios[part] = value
    differences = {unit: work[1][unit] / work[0][unit] - 1.0 for unit in work[0] if unit in work[1] and work[0][unit]}
    equal = [p for p, units in WORK_OF.items() if all(abs(differences.get(u, 0.0)) <= EQUAL_WORK for u in units)]
    sides = {
        name: {"seconds_per_iteration": seconds, "work_per_iteration": amount, "rounds": rounds, "records": list(rows)}
        for name, seconds, amount, rounds, rows in zip(SIDES, (plain, changed), work, by_round, records)
    }
    return {"ratios": ratios, "work_differences": differences, "equal_work": equal, "sides": sides}


def against_text(document: Mapping[str, Any]) -> str:
    """The table of `compared`."""
    plain, changed = (document["sides"][name] for name in SIDES)
    lines = [
        f"as given: {' '.join(document['overrides']) or 'run=quickstart'} (start: {document['start']})",
        f"against:  {' '.join(document['against'])}",
        f"{document['rounds']} rounds of {document['iterations']} iterations a side; ratio: against / as given",
        f"{'seconds an iteration':<22} {'as given':>9} {'against':>9} {'ratio':>7}  range over rounds  equal work",
    ]
    for part in (*PARTS, "learn"):
        a, b, ratio = (*(side["seconds_per_iteration"][part] for side in (plain, changed)), document["ratios"][part])
        shown = f"{'–':>7}  {'':<17}"
        if ratio:
            shown = f"{ratio['ratio']:>7.2f}  {ratio['low']:.2f} to {ratio['high']:.2f}".ljust(26)
        equal = "yes" if part in document["equal_work"] else "no"
        lines.append(f"{'whole iteration' if part == 'learn' else part:<22} {a:>9.2f} {b:>9.2f} {shown}  {equal}")
    for unit, a in plain["work_per_iteration"].items():
        b, difference = changed["work_per_iteration"].get(unit), document["work_differences"].get(unit)
        if b is not None and difference is not None:
            lines.append(f"{unit:<22} {a:>9.1f} {b:>9.1f} {difference:>+7.1%}")
    a, b = document["peak_memory_gib"]
    lines.append(f"{'peak memory, GiB':<22} {a:>9.2f} {b:>9.2f} {b - a:>+7.2f}  (of this process and all below it)")
    unequal = [part for part in WORK_OF if part not in document["equal_work"]]
    if unequal:
        lines.append(
            f"not at equal work: {', '.join('whole iteration' if p == 'learn' else p for p in unequal)}. With "
            "algorithm.learning_rate=0 both sides meet the same episodes"
        )
    else:
        lines.append(f"all figures are at equal work (within {EQUAL_WORK:.0%})")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- records
def hardware(found: Mapping[str, Any]) -> str:
    """The machine of `versions`, in one line; empty where nothing is known."""
    if not found:
        return ""
    gpus = ", ".join(found.get("gpus") or []) or "no GPU"
    return f"{found.get('cpu_cores')} cores {found.get('cpu')}, {found.get('memory_gib')} GiB, {gpus}"


def made(kind: str, words: Sequence[str]) -> dict[str, Any]:
    """When a benchmark began, by which command, and how busy the machine was by then (processes, mean of a minute)."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"date": time.strftime("%Y-%m-%d"), "command": shlex.join(["vla-rl", "bench", kind, *words]), "load": load}
