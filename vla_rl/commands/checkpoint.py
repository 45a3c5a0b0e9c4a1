"""``vla-rl checkpoint``: other forms of a checkpoint that the ranks of a cluster wrote in parts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from vla_rl.commands.shared import Add
from vla_rl.errors import ConfigError

_MOST_RANKS = 2**16


def add(command: Add) -> None:
    """``vla-rl checkpoint merge`` and ``reshard``."""
    checkpoint = command(
        "checkpoint", None, "other forms of a checkpoint that several ranks wrote in parts"
    )
    kinds = checkpoint.add_subparsers(title="what to do", metavar="WHAT", required=True)

    merge = kinds.add_parser("merge", help="make the ordinary checkpoint of it")
    merge.set_defaults(function=run_merge)
    merge.add_argument("checkpoint", type=Path, help="the folder of the checkpoint")

    reshard = kinds.add_parser("reshard", help="cut it for another number of ranks")
    reshard.set_defaults(function=run_reshard)
    reshard.add_argument("checkpoint", type=Path, help="the folder of the checkpoint")
    reshard.add_argument("ranks", type=int, metavar="N", help="how many ranks")

    for kind in (merge, reshard):
        kind.add_argument(
            "--out", type=Path, metavar="FOLDER", help="to create (default: in its place)"
        )


def run_merge(arguments: argparse.Namespace) -> None:
    from vla_rl.spread import merge

    with _undisturbed(arguments) as (source, out):
        merge(source, out)
    print(f"wrote {out}, an ordinary checkpoint")


def run_reshard(arguments: argparse.Namespace) -> None:
    from vla_rl.spread import reshard

    if not 1 <= arguments.ranks <= _MOST_RANKS:
        raise ConfigError(f"{arguments.ranks} ranks: give 1 to {_MOST_RANKS}")
    with _undisturbed(arguments) as (source, out):
        reshard(source, arguments.ranks, out)
    print(f"wrote {out}, in parts for {arguments.ranks} ranks")


@contextlib.contextmanager
def _undisturbed(arguments: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """The checkpoint and where its other form goes, while no run writes there."""
    from vla_rl.files import existing_checkpoint
    from vla_rl.lock import RunLock

    source = existing_checkpoint(arguments.checkpoint)
    run = source.absolute().parent.parent
    own = (run / "config.yaml").is_file()
    with RunLock(run, remedy="Wait for that run to end") if own else contextlib.nullcontext():
        yield source, arguments.out or source
