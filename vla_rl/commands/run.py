"""Commands that run phases: quickstart, train, collect."""

from __future__ import annotations

import argparse

from vla_rl.commands.shared import Add, add_overrides
from vla_rl.errors import ConfigError


def add(command: Add) -> None:
    """``vla-rl quickstart``, ``train`` and ``collect``."""
    quickstart = command(
        "quickstart", run_quickstart, "demonstrations, SFT, RL and report on the embedded simulator"
    )
    quickstart.add_argument(
        "--seeds", type=int, nargs="+", metavar="N", help="run these seeds one after the other"
    )
    _add_options(quickstart)
    _add_options(command("train", run_train, "run the phases of a config: vla-rl train run=NAME"))
    _add_options(
        command(
            "collect",
            run_collect,
            "only collect demonstrations: scripted, or of collect.policy=CHECKPOINT",
        )
    )


def _add_options(sub: argparse.ArgumentParser) -> None:
    add_overrides(sub, "config overrides, e.g. seed=1 rl.iterations=10")
    sub.add_argument(
        "--fresh", action="store_true", help="start over; an earlier run folder is kept aside"
    )
    sub.add_argument(
        "--dry-run", action="store_true", help="print the config and what would run; write nothing"
    )


def run_quickstart(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose

    overrides = arguments.overrides = ["run=quickstart", *arguments.overrides]
    if not arguments.seeds:
        run_train(arguments)
        return
    name = compose(overrides).name
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, arguments.seeds))}: name each seed once")
    for seed in arguments.seeds:  # each in a folder of its own
        arguments.overrides = [*overrides, f"seed={seed}", f"name={name}-seed{seed}"]
        run_train(arguments)


def run_collect(arguments: argparse.Namespace) -> None:
    arguments.overrides = [*arguments.overrides, "phases=[collect]"]
    run_train(arguments, report=False)


def run_train(arguments: argparse.Namespace, report: bool = True) -> None:
    from vla_rl.checks import preflight
    from vla_rl.config import compose

    config = compose(arguments.overrides)
    preflight.check(config, fresh=arguments.fresh)  # before the seconds that torch takes to import
    from vla_rl.run.pipeline import plan, run_pipeline

    if arguments.dry_run:
        print(plan(config, fresh=arguments.fresh))
        return
    folder = run_pipeline(config, fresh=arguments.fresh)
    print(f"open {folder / 'report.html'}" if report else f"wrote {folder / 'dataset'}")


RESUMES = (run_quickstart, run_train, run_collect)  # by the same command, once it was interrupted
