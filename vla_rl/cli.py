"""The command line: ``vla-rl <command>``. Commands only compose; the work is in the modules they
call."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl import __version__
from vla_rl.commands import (
    bench,
    checkpoint,
    cluster,
    data,
    evaluate,
    hub,
    libero,
    look,
    policy,
    reward,
    robot,
    robotwin,
    run,
    serve,
    study,
)
from vla_rl.errors import ConfigError, UserError, visible
from vla_rl.paths import is_address
from vla_rl.terminal import ready_streams, require_folder, terminable, unread


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (2: bad input, 130: interrupted, 141: nobody reads
    on)."""
    ready_streams()
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(r.startswith("-") for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides that follow an option; argparse takes positional arguments in one go only
        arguments.overrides += rest
    if "function" not in arguments:
        parser.print_help()
        return 2
    _wait_briefly()
    if arguments.function not in hub.REACHES:  # nothing else reaches for a hub or an account
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        folder = vars(arguments).get("config_dir")
        require_folder()
        with terminable(), _searching(folder):
            _locate(arguments)
            _check_numbers(arguments)
            _check_targets(arguments)
            status = arguments.function(arguments) or 0
            print(end="", flush=True)  # so that a reader that has gone shows here
            return status
    except UserError as error:
        print(f"error: {visible(error)}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and unread():
            return 128 + signal.SIGPIPE
        from vla_rl.files import explained

        text = (
            explained(error)
            if isinstance(error, OSError)
            else "there is not enough memory for these settings"
        )
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = arguments.function in (*run.RESUMES, *study.RESUMES, robot.run_learn)
        print("\ninterrupted" + ("; the same command resumes" if resumes else ""), file=sys.stderr)
        return 130


def _wait_briefly() -> None:
    """Let torch's threads sleep soon where they wait for each other, unless the user said how.

    GCC's OpenMP lets them spin for milliseconds. That gains little on free cores, and where other
    programs share them each wait takes several of the scheduler's turns. It is read as torch is
    imported, here and in every process below.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _searching(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Configs of the user's own are found in ``folder`` too, where one is given."""
    if folder is None:
        return contextlib.nullcontext()
    from vla_rl.config.own_files import searching  # with numpy, which parsing needs not wait for

    return searching([folder])


def _locate(arguments: argparse.Namespace) -> None:
    """A checkpoint or dataset may be named as a hub does."""
    from vla_rl.hub import DATASET, MODEL, located

    for name, kind in {"checkpoint": MODEL, "compare": MODEL, "source": DATASET}.items():
        value = getattr(arguments, name, None)
        if isinstance(value, Path | str) and not is_address(value):
            setattr(arguments, name, type(value)(located(str(value), kind)))


# What the numbers among the options may be, whatever the command (None: no limit).
_LIMITS: dict[str, tuple[float, float | None]] = {
    "episodes": (1, None),
    "jobs": (1, None),
    "episodes_per_task": (1, None),
    "seed": (0, 2**63 - 1),
    "seeds": (0, 2**63 - 1),
    "lags": (0, 1000),
    "levels": (1, None),
    "rollouts": (0, None),
    "limit": (0, None),
    "videos": (0, None),
    "steps": (1, None),
    "updates": (0, None),
    "evaluate_episodes": (0, None),
    "learning_rate": (0, None),
    "chunk": (1, None),
    "workers": (1, 4096),
    "iterations": (1, None),
    "rounds": (1, None),
    "decisions": (1, None),
    "size": (1, 4096),
    "trials": (0, None),
    "held_out": (1, None),
    "every": (1, None),
    "evaluate": (0, None),
    "judge": (1, None),
}


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for a number among the options that is out of its range."""
    for name, (least, most) in _LIMITS.items():
        given = getattr(arguments, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= (
                sys.float_info.max if most is None else most
            ):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value}: give {least} or more"
                    + ("" if most is None else f", up to {most}")
                )


def _check_targets(arguments: argparse.Namespace) -> None:
    """Raise `UserError` where what a command is asked to write cannot be written: before it has
    worked for an hour."""
    from vla_rl.files import require_file_target, require_writable

    for name in ("json", "video", "preferences", "figure", "out", "folder"):
        # `--video` is a switch in some commands
        if isinstance(path := getattr(arguments, name, None), Path):
            key = f"FOLDER {path}" if name == "folder" else f"--{name} {path}"
            (require_writable if name in ("out", "folder") else require_file_target)(path, key)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vla-rl", description="RL fine-tuning of vision-language-action policies"
    )
    parser.add_argument("--version", action="version", version=f"vla-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    for module in (
        run,
        evaluate,
        serve,
        policy,
        data,
        hub,
        look,
        reward,
        robot,
        libero,
        robotwin,
        checkpoint,
        cluster,
        study,
        bench,
    ):
        module.add(command)
    return parser
