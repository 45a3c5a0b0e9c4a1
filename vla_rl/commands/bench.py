"""``vla-rl bench``: measurements against a baseline, in one run. They are a package of their
own, `benchmarks`."""

from __future__ import annotations

import argparse

from vla_rl import build
from vla_rl.commands.shared import Add
from vla_rl.errors import ConfigError


def add(command: Add) -> None:
    """``vla-rl bench sim``, ``learn`` and the others, as `benchmarks.kinds` lists them."""
    bench = command("bench", None, "measure against a baseline, in one run")
    try:
        add_kinds = build.attribute("benchmarks.kinds:add")
    except (
        ConfigError
    ) as error:  # a user's own package of that name: only this command cannot do with it
        told = error

        def refuse(_: argparse.Namespace) -> None:
            raise told

        bench.set_defaults(function=refuse)
        bench.add_argument("words", nargs=argparse.REMAINDER)
        return
    add_kinds(bench.add_subparsers(title="benchmarks", metavar="KIND", required=True))
