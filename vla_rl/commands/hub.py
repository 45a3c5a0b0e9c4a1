"""``vla-rl hub``: fetch what a hub has, and push a checkpoint to it. No other command reaches for
one."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.shared import Add


def add(command: Add) -> None:
    """``vla-rl hub fetch`` and ``push``."""
    hub = command("hub", None, "checkpoints and datasets on a hub")
    kinds = hub.add_subparsers(title="what to do", metavar="WHAT", required=True)

    fetch = kinds.add_parser(
        "fetch", help="into the cache, where user/name then stands for the folder"
    )
    fetch.set_defaults(function=run_fetch)
    fetch.add_argument("name", help="user/name, or user/name@revision")
    fetch.add_argument("--dataset", action="store_true", help="it is a dataset, not a policy")

    push = kinds.add_parser("push", help="a checkpoint and its card, in one commit")
    push.set_defaults(function=run_push)
    push.add_argument("checkpoint", type=Path, help="the folder of the policy")
    push.add_argument("name", help="user/name")
    push.add_argument(
        "--license",
        required=True,
        metavar="WORD",
        help="of the weights, by the hub's word: apache-2.0, mit, gemma, other ...",
    )
    push.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="of vla-rl eval --json, for the card (default: what the checkpoint's run measured)",
    )
    push.add_argument("--private", action="store_true", help="of a new repository: for you alone")
    push.add_argument("--dry-run", action="store_true", help="print files and card; send nothing")


def run_fetch(arguments: argparse.Namespace) -> None:
    from vla_rl.hub import DATASET, MODEL, fetch

    print(fetch(arguments.name, DATASET if arguments.dataset else MODEL))


def run_push(arguments: argparse.Namespace) -> None:
    from vla_rl.run.publish import package, push

    a = arguments
    parcel = package(a.checkpoint, a.name, a.results, a.license)
    if a.dry_run:
        print(f"{parcel.name}: README.md, {', '.join(parcel.files)}\n\n{parcel.card}")
        return
    print(f"pushed {push(parcel, a.private)}")


REACHES = (run_fetch, run_push)
