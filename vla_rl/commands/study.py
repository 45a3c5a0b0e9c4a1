"""``vla-rl study``: methods compared on seeds that were drawn once the plan was frozen."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.shared import Add, write_result


def add(command: Add) -> None:
    """``vla-rl study plan|run|verdict``."""
    study = command("study", run_study, "compare methods on seeds drawn after the plan is frozen")
    study.add_argument(
        "what",
        choices=("plan", "run", "verdict"),
        help="plan: check it, say its power and hours, freeze it; run: make its runs, or what is "
        "left of them; verdict: what they say",
    )
    study.add_argument("file", type=Path, metavar="STUDY.yaml", help="the plan")
    study.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="where the study's folder is",
    )
    study.add_argument("--jobs", type=int, default=1, metavar="N", help="runs beside each other")
    study.add_argument("--json", type=Path, metavar="FILE", help="write the verdict")


def run_study(arguments: argparse.Namespace) -> None:
    from vla_rl.run import study

    plan = study.read(arguments.file)
    folder = (arguments.output_dir / plan.name).absolute()
    if arguments.what == "plan":
        print(study.described(plan))
    frozen = study.freeze(plan, folder)
    if arguments.what == "plan":
        seeds = ", ".join(map(str, frozen["seeds"]))
        print(f"frozen as {folder / study.FROZEN} (sha256 {frozen['sha256'][:12]}), seeds {seeds}")
        return
    if arguments.what == "run":
        study.make(frozen, folder, arguments.jobs)
    found = study.judged(frozen, folder)
    print(study.text(found))
    write_result(arguments.json, found)


RESUMES = (run_study,)
