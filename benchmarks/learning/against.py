"""Two settings side by side: seconds per iteration of RL of a config, and of the same with more
overrides, in turns."""

from __future__ import annotations

import itertools
import re
import tempfile
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.runs import Record, iteration_seconds, rl_records
from benchmarks.measuring import cpu_seconds_below, in_turns, over_rounds, table
from vla_rl import config as configs
from vla_rl.assembly.folder import read_phases
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError
from vla_rl.learning.figures import mean_figures
from vla_rl.monitoring.machine import versions
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.options import AlgorithmOptions, view
from vla_rl.run.pipeline import run_pipeline

START_UPDATES = 100  # of the SFT that both start from
EQUAL_WORK = 0.01  # the share by which two amounts of work may differ and count as equal
NEGLIGIBLE = 1e-3  # seconds per iteration below which a ratio says nothing
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
    "cpu": ("episodes", "control steps", "decisions", "episodes learned from", "epochs"),
}
WHOLE = {"learn": "whole iteration", "cpu": "its CPU time, all processes"}
CPU = "bench/cpu_seconds"  # of a record


def split_overrides(text: str) -> list[str]:
    """``a=1,b=[x,y],c=2`` as overrides: at the commas that a new key follows."""
    return re.split(r",(?=[~+]*[\w./@]+=|~)", text)


def measure(
    overrides: Sequence[str], against: Sequence[str], *, iterations: int, rounds: int
) -> dict[str, Any]:
    """Both sides start from one policy (``checkpoint=`` among the overrides, or a short SFT made
    here) with one seed. In each of ``rounds`` each side goes on by ``iterations`` that count, after
    one that does not: simulators build their scenes in it, and caches and compiled graphs are
    filled. Evaluation and the critic's warm-up are off.
    """
    words = (list(overrides), [*overrides, *against])
    records: list[list[list[dict[str, Any]]]] = [[], []]  # by side, by round
    with tempfile.TemporaryDirectory(prefix="vla-rl-bench-") as name:
        sides = [side_config(given, Path(name), side) for given, side in zip(words, SIDES)]
        _require_comparable(sides[0], sides[1], against)
        start = sides[0].checkpoint or make_start(overrides, sides, words)
        for side, _ in in_turns((0, 1), rounds):
            records[side].append(_go_on(sides[side], iterations))
        memory = [read_phases(side.run_dir)["peak_memory_bytes"] / 2**30 for side in sides]
    return {
        "versions": versions(),
        "start": start,
        "overrides": words[0],
        "against": list(against),
        "iterations": iterations,
        "rounds": rounds,
        "peak_memory_gib": memory,
        **compared(records),
    }


def side_config(overrides: Sequence[str], folder: Path, name: str) -> RunConfig:
    """One side's run: RL alone, without evaluation, in ``folder``."""
    config = configs.compose(overrides)
    config.output_dir, config.name, config.wandb.mode = str(folder), name.replace(" ", "_"), "off"
    config.phases, config.reward_check.on_bad = ["reward", "rl"], "warn"
    config.rl.iterations = config.rl.eval_every = 0
    # such iterations leave the policy out
    if view(config.algorithm, AlgorithmOptions).critic_warmup_iterations is not None:
        config.algorithm.critic_warmup_iterations = 0
    return config


def _require_comparable(plain: RunConfig, changed: RunConfig, against: Sequence[str]) -> None:
    """Raises `ConfigError` where the two sides cannot start from one policy, or do not differ in
    anything that RL reads."""
    named = ",".join(against)
    if (plain.policy_type, plain.checkpoint) != (changed.policy_type, changed.checkpoint):
        raise ConfigError(
            f"--against {named}: both sides start from one policy: leave policy.type "
            "and checkpoint alone"
        )
    trees = [configs.to_tree(config) for config in (plain, changed)]
    for tree in trees:
        for key in ("name", "collect", "sft", "evaluate", "policy_changes"):
            tree.pop(key)
    if trees[0] == trees[1]:
        raise ConfigError(
            f"--against {named} changes nothing that RL of this run reads: name another value, "
            "such as algorithm.minibatch_size=512"
        )


def make_start(
    overrides: Sequence[str], sides: Sequence[RunConfig], words: Sequence[Sequence[str]]
) -> str:
    """A policy for both sides to start from, by a short SFT where the config has one; says what
    it is."""
    config = configs.compose(overrides)
    # it starts from a published checkpoint, which each side reads itself
    if "sft" not in config.phases:
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
    """Lengthen a side's run by ``iterations`` after one that warms up; their records, each with
    the CPU seconds of all processes since the one before."""
    config.rl.iterations += 1 + iterations
    spent: list[float] = []
    log = MetricsLogger.log

    def noted(logger: MetricsLogger, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        if phase == "rl":
            spent.append(cpu_seconds_below())
        log(logger, phase, step, metrics)

    with unittest.mock.patch.object(MetricsLogger, "log", noted):
        run_pipeline(config)
    records = rl_records(config.run_dir)[-iterations:]
    return [r | {CPU: b - a} for r, (a, b) in zip(records, itertools.pairwise(spent), strict=True)]


def work_of(record: Record) -> dict[str, float]:
    """How much one iteration had to do. "epochs" are there for algorithms that log them (an
    early stop ends them)."""
    episodes = float(record["engine/episodes"])
    work = {
        "episodes": episodes,
        "control steps": float(record["engine/control_steps"]),
        "decisions": float(record["engine/decisions"]),
        "episodes learned from": episodes * float(record["rollout/learned_share"]),
    }
    return work | (
        {"epochs": float(record["ppo/epochs"])} if record.get("ppo/epochs") is not None else {}
    )


def compared(records: Sequence[Sequence[Sequence[Record]]]) -> dict[str, Any]:
    """Two sides (each a list of rounds, each a list of iterations): their means, and "against" over
    "as given".

    Ratios are None where both sides take next to nothing. "low" and "high" are the smallest and
    largest ratio of a round. ``equal_work`` names the parts for which both sides had the same to
    do, within `EQUAL_WORK`.
    """
    by_round = [[mean_figures([_seconds(r) for r in rows]) for rows in side] for side in records]
    plain, changed = (mean_figures(side) for side in by_round)
    work = [mean_figures([work_of(r) for rows in side for r in rows]) for side in records]
    ratios: dict[str, Any] = {}
    for part in WORK_OF.keys() & plain.keys() & changed.keys():
        told = max(plain[part], changed[part]) >= NEGLIGIBLE and plain[part] > 0
        ratios[part] = (
            over_rounds(*([row[part] for row in side] for side in by_round)) if told else None
        )
    differences = {
        unit: work[1][unit] / work[0][unit] - 1.0
        for unit in work[0]
        if unit in work[1] and work[0][unit]
    }
    equal = [
        p
        for p, units in WORK_OF.items()
        if all(abs(differences.get(u, 0.0)) <= EQUAL_WORK for u in units)
    ]
    sides = {
        name: {
            "seconds_per_iteration": seconds,
            "work_per_iteration": amount,
            "rounds": rounds,
            "records": list(rows),
        }
        for name, seconds, amount, rounds, rows in zip(
            SIDES, (plain, changed), work, by_round, records
        )
    }
    return {"ratios": ratios, "work_differences": differences, "equal_work": equal, "sides": sides}


def text(document: Mapping[str, Any]) -> str:
    """The table of `compared`."""
    plain, changed = (document["sides"][name] for name in SIDES)
    rows: list[Sequence[str]] = [
        ("seconds an iteration", *SIDES, "ratio", "range over rounds", "equal work")
    ]
    for part in (part for part in WORK_OF if part in plain["seconds_per_iteration"]):
        a, b, ratio = (
            *(side["seconds_per_iteration"][part] for side in (plain, changed)),
            document["ratios"].get(part),
        )
        shown = (
            (f"{ratio['ratio']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
            if ratio
            else ("–", "")
        )
        equal = "yes" if part in document["equal_work"] else "no"
        rows.append((_whole(part), f"{a:.2f}", f"{b:.2f}", *shown, equal))
    for unit, a in plain["work_per_iteration"].items():
        b, difference = (
            changed["work_per_iteration"].get(unit),
            document["work_differences"].get(unit),
        )
        if b is not None and difference is not None:
            rows.append((unit, f"{a:.1f}", f"{b:.1f}", f"{difference:+.1%}"))
    a, b = document["peak_memory_gib"]
    rows.append(("peak memory, GiB", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"))
    unequal = [_whole(part) for part in WORK_OF if part not in document["equal_work"]]
    return "\n".join(
        [
            f"as given: {' '.join(document['overrides']) or 'run=quickstart'} (start: "
            f"{document['start']})",
            f"against:  {' '.join(document['against'])}",
            f"{document['rounds']} rounds of {document['iterations']} iterations a side; ratio: "
            "against / as given; memory: of this process and all below it",
            table(rows),
            f"not at equal work: {', '.join(unequal)}. With algorithm.learning_rate=0 both sides "
            "meet the same episodes"
            if unequal
            else f"all figures are at equal work (within {EQUAL_WORK:.0%})",
        ]
    )


def _whole(part: str) -> str:
    return WHOLE.get(part, part)


def _seconds(record: Record) -> dict[str, float]:
    """`iteration_seconds`, with those of the processors ("cpu") where they were counted."""
    counted = {"cpu": float(record[CPU])} if CPU in record else {}
    return iteration_seconds(record) | counted
