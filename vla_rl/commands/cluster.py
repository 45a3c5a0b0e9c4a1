"""``vla-rl cluster``: what a cluster would bring, and what one does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.commands.shared import Add, add_overrides, write_result
from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    from vla_rl.config import RunConfig


def add(command: Add) -> None:
    """``vla-rl cluster plan``, ``check`` and ``status``."""
    cluster = command("cluster", None, "rollouts on several machines (cluster=ray)")
    kinds = cluster.add_subparsers(title="what to do", metavar="WHAT", required=True)

    plan = kinds.add_parser(
        "plan", help="predict throughput and the best split, from measured service times"
    )
    plan.set_defaults(function=run_plan)
    plan.add_argument(
        "--times",
        type=Path,
        metavar="PATH",
        help="a run folder or a JSON file; default: the run named",
    )
    plan.add_argument(
        "--gpus", type=int, nargs="+", default=[8, 64, 512], metavar="N", help="default: 8 64 512"
    )
    plan.add_argument(
        "--staleness", type=int, default=1, metavar="N", help="cluster.max_staleness (default 1)"
    )
    plan.add_argument(
        "--mtbf",
        type=float,
        default=0.0,
        metavar="HOURS",
        help="mean time between failures of one GPU",
    )
    plan.add_argument(
        "--memory", action="store_true", help="bytes of each role and link, and what breaks first"
    )
    plan.add_argument(
        "--node",
        type=float,
        nargs=5,
        default=[8, 80, 1000, 12.5, 2],
        metavar=("GPUS", "GPU_GB", "HOST_GB", "LINK", "DISK"),
        help="of --memory: what a node has; GB/s of its link and disk (default 8 80 1000 12.5 2)",
    )
    plan.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="of --memory: compare bytes with those of another run, for its setup",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add_overrides(plan, "the run, e.g. run=quickstart")

    check = kinds.add_parser(
        "check", help="before a long run: try its nodes, actors, links and one update"
    )
    check.set_defaults(function=run_check)
    check.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="wait so long for nodes and actors in all (default 120)",
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    add_overrides(check, "the run, e.g. run=quickstart cluster=ray cluster.learners=2")

    status = kinds.add_parser("status", help="who does what in a run with cluster=ray")
    status.set_defaults(function=run_status)
    status.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        help="a run, or a folder of runs (outputs)",
    )


def run_plan(arguments: argparse.Namespace) -> None:
    from vla_rl.cluster.times import cluster_plan, measured, plan_text, setup_of
    from vla_rl.config import compose

    if min(arguments.gpus) < 2 or max(arguments.gpus) > 2**20:
        raise ConfigError(
            f"--gpus {' '.join(map(str, arguments.gpus))}: give 2 or more, up to {2**20}"
        )
    if not 0 <= arguments.staleness <= 64 or arguments.mtbf < 0:
        raise ConfigError(
            f"--staleness {arguments.staleness}, --mtbf {arguments.mtbf:g}: give 0 to "
            "64, and 0 or more hours"
        )
    config = compose(arguments.overrides)
    found = measured(arguments.times or config.run_dir, config)
    weighed = _weighed(arguments, found.sizes, config)
    # (without words there is the run's own setup alone)
    asked = setup_of(config) if arguments.overrides else None
    plan = cluster_plan(
        found, arguments.gpus, staleness=arguments.staleness, mtbf_hours=arguments.mtbf, asked=asked
    )
    print(plan_text(plan))
    if weighed is not None:
        plan["memory"] = _memory(arguments, plan, *weighed)
    write_result(arguments.json, plan)


def _weighed(arguments: argparse.Namespace, said: Any, config: RunConfig) -> Any:
    """What `memory_plan` needs besides a plan: bytes, a node, and how checkpoints are written; None
    where nobody asks."""
    if not arguments.memory and not arguments.against:
        return None
    from vla_rl.cluster.memory import GB, Node, sizes_of

    if min(arguments.node) <= 0 or arguments.node[0] % 1:
        raise ConfigError(
            f"--node {arguments.node}: give a whole number of GPUs, and sizes above 0"
        )
    gpus, *sizes = arguments.node
    whole = config.cluster_type == "ray" and config.cluster.checkpoints == "whole"
    found = sizes_of(arguments.times or config.run_dir, said)
    return found, Node(int(gpus), *(size * GB for size in sizes)), whole


def _memory(
    arguments: argparse.Namespace, plan: dict[str, Any], sizes: Any, node: Any, whole: bool
) -> dict[str, Any]:
    """Prints the bytes of a plan."""
    from vla_rl.cluster.memory import against, against_text, memory_plan, memory_text
    from vla_rl.cluster.times import setup_of
    from vla_rl.config import load

    document = memory_plan(plan, sizes, node, whole)
    print("", memory_text(document), sep="\n")
    if arguments.against:
        setup = setup_of(load(arguments.against / "config.yaml"))
        document["against"] = against(sizes, setup, arguments.against)
        print("", against_text(document["against"], arguments.against), sep="\n")
    return document


def run_check(arguments: argparse.Namespace) -> int:
    from vla_rl.config import compose
    from vla_rl.doctor.cluster import check_run_on_cluster
    from vla_rl.doctor.machine import FAIL, listed

    if not 10 <= arguments.limit <= 86400:
        raise ConfigError(f"--limit {arguments.limit:g}: give 10 to 86400 seconds")
    found = []
    for check in check_run_on_cluster(compose(arguments.overrides), arguments.limit):
        found.append(check)
        print("\n".join(listed([check], width=12)), flush=True)
    broken = list(dict.fromkeys(check.name for check in found if check.status == FAIL))
    print(f"not in order: {', '.join(broken)}" if broken else "this cluster can do this run")
    write_result(arguments.json, [vars(check) for check in found])
    return int(bool(broken))


def run_status(arguments: argparse.Namespace) -> None:
    from vla_rl.cluster.status import find_status, status_text
    from vla_rl.reporting.cluster import at_work
    from vla_rl.reporting.runs import load_run

    path = find_status(arguments.run)
    print(status_text(path))
    if shares := at_work(load_run(path.parent)):
        print(f"of the iterations' time: {shares}")
