"""``vla-rl study``: methods compared on seeds that were drawn once the plan was frozen."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vla_rl.commands.shared import Add, add_overrides, write_result


def add(command: Add) -> None:
    """``vla-rl study plan|run|verdict|add``."""
    study = command("study", None, "compare methods on seeds drawn after the plan is frozen")
    actions = study.add_subparsers(title="actions", metavar="ACTION", required=True)
    _action(actions, "plan", run_plan, "check a plan, say its power and hours, and freeze it")
    run = _action(actions, "run", run_run, "make its runs, or what is left of them")
    run.add_argument(
        "--methods", nargs="+", metavar="NAME", help="these first (default: all, seed by seed)"
    )
    _runs(run)
    _result(_action(actions, "verdict", run_verdict, "what its runs say"))
    text = (
        "a method of one's own, in one file, joins a frozen study: only its runs are made, and it "
        "is compared with each of the others"
    )
    more = actions.add_parser("add", help=text, description=text)
    more.set_defaults(function=run_add)
    more.add_argument(
        "code", type=Path, metavar="FILE.py", help="one class: an algorithm, a reward or a policy"
    )
    _shared(more)
    more.add_argument("--name", default="", help="of the method (default: the file's)")
    more.add_argument(
        "--tuning", default="", metavar="TEXT", help="what was tried to choose its settings"
    )
    _runs(more)
    add_overrides(more, "what else the method sets, such as critic=none")


def _action(actions: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text)
    action.set_defaults(function=function)
    _shared(action)
    return action


def _shared(action: argparse.ArgumentParser) -> None:
    action.add_argument("file", type=Path, metavar="STUDY.yaml", help="the plan")
    action.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="where the study's folder is",
    )


def _runs(action: argparse.ArgumentParser) -> None:
    action.add_argument("--jobs", type=int, default=1, metavar="N", help="runs beside each other")
    _result(action)


def _result(action: argparse.ArgumentParser) -> None:
    action.add_argument("--json", type=Path, metavar="FILE", help="write the verdict here too")
    action.add_argument(
        "--least",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="exit status 2 where a run succeeds less often",
    )


def _plan(arguments: argparse.Namespace) -> tuple[Any, Path]:
    from vla_rl.run import study

    plan = study.read(arguments.file)
    return plan, (arguments.output_dir / plan.name).absolute()


def _frozen(arguments: argparse.Namespace) -> tuple[Any, Path]:
    from vla_rl.run import study

    plan, folder = _plan(arguments)
    return study.freeze(plan, folder), folder


def run_plan(arguments: argparse.Namespace) -> None:
    from vla_rl.run import study

    plan, folder = _plan(arguments)
    print(study.described(plan))
    frozen = study.freeze(plan, folder)
    seeds = ", ".join(map(str, frozen["seeds"]))
    print(f"frozen as {folder / study.FROZEN} (sha256 {frozen['sha256'][:12]}), seeds {seeds}")


def run_run(arguments: argparse.Namespace) -> None:
    from vla_rl.run import study

    frozen, folder = _frozen(arguments)
    study.make(frozen, folder, study.methods_of(frozen, arguments.methods), arguments.jobs)
    _tell(arguments, frozen, folder)


def run_add(arguments: argparse.Namespace) -> None:
    from vla_rl.run import study, study_added

    frozen, folder = _frozen(arguments)
    added = study_added.add(
        arguments.code, frozen, folder, arguments.overrides, arguments.name, arguments.tuning
    )
    method = study_added.method_of(added, folder)
    with study_added.importable(study_added.copy_of(added, folder)):
        study.make(frozen, folder, [method], arguments.jobs)
    _tell(arguments, frozen, folder)


def run_verdict(arguments: argparse.Namespace) -> None:
    _tell(arguments, *_frozen(arguments))


def _tell(arguments: argparse.Namespace, frozen: Any, folder: Path) -> None:
    """The verdict as text, as JSON and on the study's page."""
    from vla_rl.reporting import verdict
    from vla_rl.reporting.page import write_report
    from vla_rl.run import study_added, study_verdict

    found = study_verdict.whole(frozen, folder, study_added.all_of(frozen, folder))
    print(verdict.text(found))
    study_verdict.write(found, folder)
    if any(found["runs"].values()):
        print(f"page: {write_report(folder)}")
    write_result(arguments.json, found)
    study_verdict.require(found, arguments.least)


RESUMES = (run_run, run_add)
