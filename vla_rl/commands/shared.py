"""What commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vla_rl.paths import is_address

Add = Callable[[str, Any, str], argparse.ArgumentParser]
"""(name, function, text) → the parser of a new command."""


class Names(argparse.Action):
    """Names that stand apart, or are joined by commas: ``--tasks a b``, ``--tasks a,b``."""

    def __call__(
        self,
        parser: Any,
        namespace: Any,
        values: str | Sequence[Any] | None,
        option_string: Any = None,
    ) -> None:
        setattr(
            namespace,
            self.dest,
            [name for value in values or () for name in value.split(",") if name],
        )


def place(text: str) -> Path | str:
    """The folder of a checkpoint; or as a text the address of who serves a policy, or an override
    that stands in its place."""
    served = is_address(text) or ("=" in text and not Path(text).exists())
    return text if served else Path(text)


def add_overrides(sub: argparse.ArgumentParser, text: str, metavar: str = "key=value") -> None:
    """The overrides of a config, and where else its files may lie."""
    sub.add_argument("overrides", nargs="*", metavar=metavar, help=text)
    sub.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="your own configs besides ours: DIR/run/NAME.yaml, DIR/algorithm/...",
    )


def write_result(path: Path | None, document: Any) -> None:
    if path is not None:
        from vla_rl.monitoring.metrics import write_json

        write_json(path, document)
        print(f"wrote {path}")
