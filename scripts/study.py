#!/usr/bin/env python3
"""Several seeds, and several settings, of one run: makes the runs, then their common report and a
file of figures.

Each column of a study is a set of overrides; each of its seeds is a run of its own in
outputs/NAME/COLUMN/seed_S. With --start, SFT is made once per seed, and the columns go on from its
checkpoint: then they differ in RL alone. Runs that are complete are kept and interrupted ones go
on, so a study can be made over several sittings. With --jobs 2 two runs go beside each other, each
on its share of the cores; times are then those of a shared machine. --draw takes seeds from the
system's random source, for claims that are to hold on seeds nobody has tried; drawn seeds are kept
in outputs/NAME/seeds.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from vla_rl.monitoring.machine import own_cores
from vla_rl.run.study import FIRST_DRAWN, START, beside, run_alone

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("vla-rl")


def train(name: str, overrides: list[str], cores: list[int]) -> str:
    """Make, or go on with, the run ``name``; returns what went wrong, or nothing."""
    log = ROOT / "outputs" / f"{name}.log"
    code = run_alone([f"name={name}", *overrides], log, cores, ROOT)
    return f"{name} ended with status {code}, see {log}" if code else ""


def shortfall(name: str, least: float) -> str:
    """What is wrong with the run ``name`` where its last evaluation succeeds less often than
    ``least``; else nothing."""
    evaluations = json.loads((ROOT / "outputs" / name / "summary.json").read_text())["evaluations"]
    last, found = next(reversed(evaluations.items()), ("", {"rate": 0.0}))
    return (
        ""
        if found["rate"] >= least
        else f"{name}: {found['rate']:.0%} success after {last}, less than --least {least:g}"
    )


def columns_of(texts: list[str]) -> dict[str, list[str]]:
    """``name=override,override`` → {name: overrides}; commas inside brackets belong to their
    override."""
    columns = {}
    for text in texts:
        name, _, rest = text.partition("=")
        parts, depth = [""], 0
        for character in rest:
            depth += (character in "[{(") - (character in ")}]")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        if not name or name == START or name in columns:
            raise SystemExit(
                f"--column {text!r}: give each column a name of its own (not "
                f"{START!r}), as in bc=algorithm=bc"
            )
        columns[name] = [part for part in parts if part]
    return columns or {"": []}


def drawn_seeds(folder: Path, count: int, draw: random.Random | random.SystemRandom) -> list[int]:
    """``count`` different seeds: those that this study drew before, as far as they go, then new
    ones."""
    kept = folder / "seeds.json"
    seeds: list[int] = json.loads(kept.read_text()) if kept.exists() else []
    while len(seeds) < count:
        seed = draw.randrange(FIRST_DRAWN, 2**31)
        seeds += [seed] if seed not in seeds else []
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(seeds) + "\n")
    return seeds[:count]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the study's folder under outputs/")
    parser.add_argument("--run", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--draw", type=int, default=0, metavar="N", help="N random seeds instead of --seeds"
    )
    parser.add_argument("--column", action="append", default=[], metavar="NAME=OVERRIDE,…")
    parser.add_argument("--start", action="store_true", help="one SFT per seed for all columns")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--least",
        type=float,
        default=0.0,
        help="success that each run is to end with, else exit status 1",
    )
    parser.add_argument(
        "--output", type=Path, help="figures go here (default: benchmarks/results/NAME.json)"
    )
    parser.epilog = "Overrides after -- are for every run."
    return parser


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser().parse_args(words[:end]), words[end + 1 :]
    if arguments.jobs < 1:
        parser().error(f"--jobs {arguments.jobs}: give 1 or more")
    folder, columns = ROOT / "outputs" / arguments.name, columns_of(arguments.column)
    seeds = (
        drawn_seeds(folder, arguments.draw, random.SystemRandom())
        if arguments.draw
        else arguments.seeds
    )
    common = [f"run={arguments.run}", "wandb=false", *overrides]

    def make(seed: int, cores: list[int]) -> list[str]:
        """All runs of one seed, one after the other; what went wrong."""
        problems, going_on, stuck = [], [], ""
        if arguments.start:
            start = f"{arguments.name}/{START}/seed_{seed}"
            phases = "phases=[collect,sft,eval_sft,report]"
            problems.append(stuck := train(start, [*common, f"seed={seed}", phases], cores))
            going_on = [
                f"checkpoint=outputs/{start}/checkpoints/sft",
                f"dataset=outputs/{start}/dataset",
                "phases=[eval_sft,reward,rl,eval_rl,report]",
            ]
        for column, own in columns.items():
            name = "/".join(part for part in (arguments.name, column, f"seed_{seed}") if part)
            if not stuck:
                wrong = train(name, [*common, f"seed={seed}", *going_on, *own], cores)
                problems.append(
                    wrong or (shortfall(name, arguments.least) if arguments.least else "")
                )
        return [problem for problem in problems if problem]

    problems = beside(arguments.jobs, seeds, make)
    if subprocess.run([str(COMMAND), "report", str(folder)], cwd=ROOT).returncode:
        raise SystemExit("\n".join([*problems, f"there is no report of {folder}"]))
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    output = arguments.output or ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    document = {
        "command": " ".join(["scripts/study.py", *words]),
        "commit": commit,
        "seeds": seeds,
        "drawn": bool(arguments.draw),
        "cpu_cores": len(own_cores()),
        "jobs": arguments.jobs,
        "problems": problems,
        "summary": json.loads((folder / "summary.json").read_text()),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"figures: {output}, report: {folder / 'report.html'}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
