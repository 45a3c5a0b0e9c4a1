"""Commands that look at runs and at this machine: report, export-rerun, advise, doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.shared import Add, add_overrides, write_result
from vla_rl.errors import ConfigError


def add(command: Add) -> None:
    """``vla-rl report``, ``export-rerun``, ``advise`` and ``doctor``."""
    report = command(
        "report",
        run_report,
        "write report.html and summary.json of a run folder, or of several runs",
    )
    report.add_argument(
        "run",
        type=Path,
        nargs="+",
        help="a run; or a folder of seeds, or of unlike runs, such as outputs",
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="of several: default 'comparison' beside the first",
    )

    rerun = command(
        "export-rerun",
        run_export_rerun,
        "write a dataset, a run's rollouts or rollouts for the Rerun viewer",
    )
    rerun.add_argument(
        "source", type=Path, help="a dataset, a run (its policy is rolled out once) or rollouts"
    )
    rerun.add_argument("file", type=Path, help="the .rrd file to write: rerun FILE shows it")
    rerun.add_argument(
        "--limit", type=int, default=20, metavar="N", help="episodes of a dataset (0: all)"
    )
    rerun.add_argument(
        "--episodes",
        type=int,
        default=20,
        metavar="N",
        help="rollouts of a run (kept in <run>/rollouts)",
    )
    rerun.add_argument(
        "--policy",
        default="",
        metavar="NAME",
        help="which checkpoint of a run acts: sft, rl or best",
    )

    advise = command(
        "advise",
        run_advise,
        "is the start of a run one that RL can learn from, and what to change if not?",
    )
    advise.add_argument("run", type=Path, help="a run folder, such as outputs/quickstart")
    advise.add_argument(
        "--rollouts",
        type=int,
        default=0,
        metavar="N",
        help="also run N episodes with sampled actions",
    )
    advise.add_argument(
        "--json", type=Path, metavar="FILE", help="write figures and verdicts as JSON"
    )
    add_overrides(advise, "what if: config overrides, e.g. env.horizon=90")

    doctor = command(
        "doctor", run_doctor, "what works on this machine, and how to fix what does not"
    )
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the checks as JSON")


def run_report(arguments: argparse.Namespace) -> None:
    from vla_rl.reporting.page import write_comparison, write_report

    if len(arguments.run) > 1:
        print(
            write_comparison(
                arguments.run, arguments.out or arguments.run[0].resolve().parent / "comparison"
            )
        )
        return
    if arguments.out:
        raise ConfigError(
            "--out belongs to several runs; the report of one is written into its folder"
        )
    print(write_report(arguments.run[0]))


def run_export_rerun(arguments: argparse.Namespace) -> None:
    from vla_rl.assembly.sources import load_source
    from vla_rl.data.rerun_export import export_rerun
    from vla_rl.files import require_file_target, require_new

    if arguments.limit < 0 or arguments.episodes < 1:
        raise ConfigError("export-rerun needs --limit >= 0 and --episodes >= 1")
    require_new(arguments.file)
    require_file_target(arguments.file, f"FILE {arguments.file}")
    reading = {
        "limit": arguments.limit,
        "episodes": arguments.episodes,
        "checkpoint": arguments.policy,
    }
    source = load_source(arguments.source, stride=1, **reading)
    print(
        f"{source.what}\nwrote {export_rerun(source, arguments.file)}; show it with: rerun "
        f"{arguments.file}"
    )


def run_advise(arguments: argparse.Namespace) -> None:
    from vla_rl.advice.advise import advise

    write_result(
        arguments.json,
        advise(arguments.run, rollouts=arguments.rollouts, overrides=arguments.overrides),
    )


def run_doctor(arguments: argparse.Namespace) -> int:
    from vla_rl.doctor.machine import doctor, exit_status, render

    checks = doctor()
    print(render(checks))
    write_result(arguments.json, [vars(c) for c in checks])
    return exit_status(checks)
