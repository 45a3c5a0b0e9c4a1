"""``vla-rl serve``: a policy for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.evaluate import config_of_checkpoint
from vla_rl.commands.shared import Add, add_overrides


def add(command: Add) -> None:
    """``vla-rl serve``."""
    serve = command(
        "serve",
        run_serve,
        "a policy for other programs, by openpi's websocket protocol and vla-eval's",
    )
    serve.add_argument("checkpoint", type=Path, help="the folder of the policy")
    serve.add_argument("--port", type=int, default=8000, help="0: one that is free")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="this machine alone, unless told otherwise (0.0.0.0: all who can reach it)",
    )
    serve.add_argument(
        "--sample",
        action="store_true",
        help="sampled actions for clients that do not say; else the most likely ones",
    )
    serve.add_argument(
        "--connections", type=int, default=64, metavar="N", help="at one time, at most"
    )
    serve.add_argument(
        "--suite",
        metavar="ENV",
        help="the env or LIBERO suite whose robot a published policy is read for",
    )
    add_overrides(serve, "config overrides, e.g. device=cpu policy=pi05")


def run_serve(arguments: argparse.Namespace) -> None:
    from vla_rl.checks import preflight
    from vla_rl.config.serving import ServeOptions, require_wire

    names = ("host", "port", "sample", "connections")
    options = ServeOptions(**{name: getattr(arguments, name) for name in names})
    require_wire("vla-rl serve")
    config = config_of_checkpoint(arguments.checkpoint, arguments.suite, arguments.overrides)
    preflight.check_start(config, arguments.checkpoint)
    from vla_rl.run.serve import serve

    serve(config, arguments.checkpoint, options, lambda text: print(text, flush=True))
