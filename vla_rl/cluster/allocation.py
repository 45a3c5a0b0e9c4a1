"""Ray and where on it the actors of a run are: the bundles of `placement.py`, kept for the time of
the run.

Ray moves the bundles of a node that is lost to one that has room, or keeps them until there is one,
and with them the actors that take the place of the lost ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from vla_rl.assembly.context import Run
from vla_rl.cluster.placement import ROLES, Amount, arranged, resolved
from vla_rl.cluster.session import alive_nodes, nodes_of
from vla_rl.cluster.worker_context import heard
from vla_rl.config import RunConfig
from vla_rl.config.cluster import RayConfig
from vla_rl.errors import UserError

_NUMBERS = ("placement", "env_nodes", *(option for _, option in ROLES.values()))


@contextlib.contextmanager
def allocated(ray: Any, run: Run) -> Iterator[Allocation]:
    """The seats of a run's actors, ``run.seats`` as well; where ``cluster.placement`` is auto, the
    run has the numbers that were chosen from here on. Raises `UserError` where the cluster has no
    room."""
    nodes = nodes_of(ray)
    cluster, why = resolved(run.config, nodes)
    run.config = dataclasses.replace(run.config, cluster=cluster)
    run.seats = Allocation(ray, run.config, nodes, why)
    try:
        for role, (name, _) in ROLES.items():
            if (
                (given := run.seats.gpus(role))
                and not getattr(cluster, f"{role}_gpus")
                and cluster.placement == "free"
            ):
                run.progress.say(f"{name} reserve {given:g} of a GPU each (cluster.{role}_gpus)")
        if cluster.placement != "free":
            run.progress.say(f"placement: {why or cluster.placement}")
            run.seats.take()
        yield run.seats
    finally:
        run.seats.leave()


class Allocation:
    """``ray`` is connected, ``config`` are the cluster's options, with numbers."""

    def __init__(self, ray: Any, config: RunConfig, nodes: list[Amount], why: str = "") -> None:
        self.ray = ray
        self.config: RayConfig = config.cluster
        self.why = why
        self._arrangement = arranged(config, nodes)
        self._groups: list[Any] = []
        self._greetings: dict[tuple[str, int], Any] = {}

    def take(self) -> None:
        """Have Ray keep the bundles. Raises `UserError` where others have what they need."""
        from ray.util.placement_group import placement_group

        deadline = time.monotonic() + self.config.start_timeout
        for group in self._arrangement.groups:
            bundles = [
                {k: v for k, v in (("CPU", b.cpus), ("GPU", b.gpus)) if v} for b in group.bundles
            ]
            self._groups.append(placement_group(bundles, strategy=group.strategy))
            if not self._groups[-1].wait(max(1.0, deadline - time.monotonic())):
                free = self.ray.available_resources()
                raise UserError(
                    f"cluster.placement={self.config.placement} got no room within "
                    f"{self.config.start_timeout:g} s (cluster.start_timeout): the cluster is "
                    "large enough, but others have some of it; free are "
                    f"{Amount(free.get('CPU', 0.0), free.get('GPU', 0.0))}. Wait for them, or ask "
                    "for less"
                )

    def leave(self) -> None:
        """Give the bundles back; actors that are in them end."""
        from ray.util.placement_group import remove_placement_group

        while self._groups:
            remove_placement_group(self._groups.pop())

    def gpus(self, role: str) -> float:
        """What the first actor of ``role`` reserves; 0 where there is none."""
        return next((seat.amount.gpus for seat in self._arrangement.seats[role]), 0.0)

    def options(self, role: str, number: int) -> dict[str, Any]:
        """For ``ray.remote``: what actor ``number`` of ``role`` reserves, and where."""
        seat = self._arrangement.seats[role][number]
        strategy: Any = "SPREAD" if role != "learner" else "DEFAULT"
        if seat.group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            strategy = PlacementGroupSchedulingStrategy(
                self._groups[seat.group], placement_group_bundle_index=seat.bundle
            )
        return {
            "max_restarts": 0,
            "num_cpus": seat.amount.cpus,
            "num_gpus": seat.amount.gpus,
            "scheduling_strategy": strategy,
        }

    def sits(self, role: str, number: int, greeting: Any) -> Any:
        """``greeting`` is the reference to what the actor says of itself; returned as it is."""
        self._greetings[role, number] = greeting
        return greeting

    def hello(self, role: str, number: int) -> dict[str, Any]:
        """What it said; {} where it did not get to it."""
        greeting = self._greetings[role, number]
        try:
            return heard(self.ray, greeting, 0)
        except Exception:  # not yet, or it died before
            return {}

    def pid(self, role: str, number: int) -> int:
        """Its process id (0: not known yet)."""
        return self.hello(role, number).get("pid", 0)

    def missing(self) -> str:
        """What the placement waits for since a node is lost; empty where all has its place."""
        from ray.util.placement_group import placement_group_table

        for group, own in zip(self._groups, self._arrangement.groups, strict=True):
            table = placement_group_table(group)
            if table["state"] != "CREATED":
                alive = alive_nodes(self.ray)
                lost = [
                    b
                    for i, b in enumerate(own.bundles)
                    if table["bundles_to_node_id"].get(i) not in alive
                ]
                needs = " and for one with ".join(map(str, lost or own.bundles[:1]))
                return (
                    f"a node is lost, and cluster.placement={self.config.placement} waits for one "
                    f"with {needs} to "
                    f"spare{' and none of its actors' if own.strategy == 'STRICT_SPREAD' else ''}: "
                    "add a node"
                )
        return ""

    def because(self) -> str:
        """`missing`, as the end of a sentence about an actor that does not come."""
        return f"; {missing}" if (missing := self.missing()) else ""

    def describe(self) -> dict[str, Any]:
        """Who is where, and why, JSON-ready."""
        where = []
        for role, number in sorted(self._greetings):
            hello = self.hello(role, number)
            where.append(
                {
                    "role": role,
                    "number": number,
                    "host": hello.get("host", "?"),
                    "node": hello.get("node", ""),
                    "pid": hello.get("pid", 0),
                }
            )
        numbers = {name: getattr(self.config, name) for name in _NUMBERS}
        return {
            "seats": where,
            "placement": {"why": self.why, "waits": self.missing(), "numbers": numbers},
        }
