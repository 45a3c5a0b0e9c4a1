"""``cluster.placement``: which actors share a device, which have their own, and what of the nodes
that takes.

All of it is arithmetic over the numbers of actors and the nodes' resources; `seats.py` has Ray do
it. A device is a GPU where the cluster has some and ``device`` is not cpu, else a CPU. Ray keeps
bundles of resources, in groups with a strategy:

    colocated       PACK; a bundle is a device, which a learner rank shares with the actors that act: they take turns
    disaggregated   PACK, one group for the ranks and one for the others; a bundle for each actor
    hybrid          STRICT_SPREAD; a bundle is what is taken of a node: `cluster.env_nodes` nodes for the rollout actors,
                    others for ranks, inference and rewards, each of which has a device of its own
    free            no bundles: each actor reserves what it says, and Ray spreads them; on GPUs, a model that says nothing
                    reserves its part of them (`_shared`), or all of them would be on the first GPU of their node
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.cluster.model import Outcome, Setup, fastest, simulate, splits
from vla_rl.cluster.times import Measured, measured, setup_of, slowest
from vla_rl.config import RunConfig
from vla_rl.config.cluster import RayConfig
from vla_rl.errors import UserError

# Role → how its actors are called, and the option with their number. Those of their resources are
# ROLE_cpus and ROLE_gpus.
ROLES = {
    "learner": ("learner ranks", "learners"),
    "inference": ("inference actors", "inference"),
    "reward": ("reward workers", "reward_workers"),
    "rollout": ("rollout actors", "rollouts"),
}
_GRAIN = 10_000  # parts of a device that Ray tells apart


@dataclass(frozen=True)
class Amount:
    """Of a node, a bundle or an actor."""

    cpus: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cpus + other.cpus, self.gpus + other.gpus)

    def within(self, room: Amount) -> bool:
        return self.cpus <= room.cpus + 1e-6 and self.gpus <= room.gpus + 1e-6

    def __str__(self) -> str:
        parts = [
            f"{x:g} {name}{'' if x == 1 else 's'}"
            for x, name in ((self.cpus, "CPU"), (self.gpus, "GPU"))
            if x
        ]
        return " and ".join(parts) or "no CPU"


@dataclass(frozen=True)
class _Seat:
    """What an actor reserves, and of which bundle of which group (None: of any node)."""

    amount: Amount
    group: int | None = None
    bundle: int = 0


@dataclass(frozen=True)
class Group:
    """Bundles that Ray reserves together; ``strategy`` is one of Ray's."""

    strategy: str
    bundles: tuple[Amount, ...]


@dataclass(frozen=True)
class _Arrangement:
    groups: tuple[Group, ...]
    seats: Mapping[str, tuple[_Seat, ...]]  # role → of each actor


def on_gpus(config: RunConfig, nodes: Sequence[Amount]) -> bool:
    """Whether models are on GPUs."""
    return config.device != "cpu" and any(node.gpus >= 1 for node in nodes)


def arranged(config: RunConfig, nodes: Sequence[Amount]) -> _Arrangement:
    """The seats of a run's actors. Raises `UserError` where the ``nodes`` have no room for them."""
    c: RayConfig = config.cluster
    each = _asked(c, max(1, config.slots.workers), on_gpus(config, nodes))
    if c.placement == "free" and config.device in ("auto", "cuda") and on_gpus(config, nodes):
        each = _shared(c, each, nodes)
    make = {
        "free": _free,
        "colocated": _colocated,
        "disaggregated": _disaggregated,
        "hybrid": _hybrid,
    }[c.placement]
    found = make(c, each, nodes)
    if found is None:
        raise UserError(_too_small(c, each, nodes))
    return found


def _count(c: RayConfig, role: str) -> int:
    return getattr(c, ROLES[role][1])


def _asked(c: RayConfig, cores: int, gpus: bool) -> dict[str, Amount]:
    """Role → what one actor asks for: what is said, else a device for each that has a model and
    ``cores`` CPUs (the simulator's processes) for each that has episodes."""
    found = {}
    for role in ROLES:
        said = Amount(getattr(c, f"{role}_cpus"), getattr(c, f"{role}_gpus"))
        if c.placement == "free":
            found[role] = said  # (`_shared` adds to it)
            continue
        model = gpus and (
            role in ("learner", "inference") or (role == "rollout" and not c.inference)
        )
        usual = Amount(cores if role == "rollout" else 0.0 if model else 1.0, 1.0 if model else 0.0)
        found[role] = Amount(said.cpus or usual.cpus, said.gpus or usual.gpus)
    return found


def _free(c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]) -> _Arrangement | None:
    amounts = [each[role] for role in ROLES for _ in range(_count(c, role))]
    seats = {role: (_Seat(each[role]),) * _count(c, role) for role in ROLES}
    return None if _packed(amounts, nodes) is None else _Arrangement((), seats)


def _shared(c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]) -> dict[str, Amount]:
    """``each`` of ``free``, where models that reserve no GPU get one: a whole one for each rank,
    since ranks are a group of processes with a GPU each; the actors that act divide what is left
    evenly, as many on each GPU as that takes. With one rank and one GPU all share it."""
    devices = math.floor(sum(node.gpus for node in nodes) + 1e-6)
    silent = [
        role
        for role in ("inference" if c.inference else "rollout", "learner")
        if not each[role].gpus
    ]
    said = sum(each[role].gpus * _count(c, role) for role in ROLES)
    left, found = math.floor(devices - said + 1e-6), dict(each)
    if "learner" in silent and c.learners and (c.learners > 1 or left > 1):
        silent.remove("learner")
        found["learner"], left = Amount(each["learner"].cpus, 1.0), left - c.learners
    if models := sum(_count(c, role) for role in silent):
        # (one that is not there)
        part = math.floor(_GRAIN / math.ceil(models / left)) / _GRAIN if left > 0 else 1.0
        found |= {role: Amount(each[role].cpus, part) for role in silent if _count(c, role)}
    return found


def _colocated(
    c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]
) -> _Arrangement | None:
    """Rank i with the servers i, i + ranks, …, with the rollout actors that these act for, and with
    its part of the reward workers. Who has the device shares it evenly; on CPUs that is
    everyone."""
    places = {
        "learner": [*range(c.learners)],
        "inference": [i % c.learners for i in range(c.inference)],
        "reward": [i % c.learners for i in range(c.reward_workers)],
        "rollout": [
            (i % c.inference if c.inference else i) % c.learners for i in range(c.rollouts)
        ],
    }
    gpus = bool(each["learner"].gpus)
    sharers = Counter(
        b for role, where in places.items() for b in where if each[role].gpus or not gpus
    )
    present = [
        [role for role, where in places.items() for x in where if x == b] for b in range(c.learners)
    ]
    cpus = [  # without GPUs the CPUs are the device
        sum(each[role].cpus for role in roles) if gpus else max(each[role].cpus for role in roles)
        for roles in present
    ]

    def amount(role: str, b: int) -> Amount:
        part = math.floor(_GRAIN * (1.0 if gpus else cpus[b]) / sharers[b]) / _GRAIN
        return Amount(each[role].cpus, part if each[role].gpus else 0.0) if gpus else Amount(part)

    bundles = tuple(Amount(x, float(gpus)) for x in cpus)
    seats = {
        role: tuple(_Seat(amount(role, b), 0, b) for b in where) for role, where in places.items()
    }
    return (
        None if _packed(bundles, nodes) is None else _Arrangement((Group("PACK", bundles),), seats)
    )


def _disaggregated(
    c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]
) -> _Arrangement | None:
    bundles: tuple[list[Amount], list[Amount]] = [], []
    seats: dict[str, list[_Seat]] = {role: [] for role in ROLES}
    for role in ROLES:
        group = 0 if role == "learner" else 1
        for _ in range(_count(c, role)):
            seats[role].append(_Seat(each[role], group, len(bundles[group])))
            bundles[group].append(each[role])
    if _packed([*bundles[0], *bundles[1]], nodes) is None:
        return None
    return _Arrangement(
        tuple(Group("PACK", tuple(b)) for b in bundles), {r: tuple(s) for r, s in seats.items()}
    )


def _hybrid(
    c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]
) -> _Arrangement | None:
    models = [
        (role, i) for role in ("learner", "inference", "reward") for i in range(_count(c, role))
    ]
    where = _packed([each[role] for role, _ in models], nodes)
    if where is None:
        return None
    bundle = {node: i for i, node in enumerate(dict.fromkeys(where))}
    taken = [Amount()] * len(bundle)
    seats: dict[str, list[_Seat]] = {role: [] for role in ROLES}
    for (role, _), node in zip(models, where, strict=True):
        taken[bundle[node]] += each[role]
        seats[role].append(_Seat(each[role], 0, bundle[node]))
    for i in range(c.rollouts):
        seats["rollout"].append(_Seat(each["rollout"], 0, len(taken) + i % c.env_nodes))
    simulating = [
        sum((each["rollout"] for _ in range(i, c.rollouts, c.env_nodes)), Amount())
        for i in range(c.env_nodes)
    ]
    left = [node for i, node in enumerate(nodes) if i not in bundle]
    if sum(simulating[0].within(node) for node in left) < c.env_nodes:  # (the first has the most)
        return None
    return _Arrangement(
        (Group("STRICT_SPREAD", (*taken, *simulating)),), {r: tuple(s) for r, s in seats.items()}
    )


def _packed(amounts: Sequence[Amount], nodes: Sequence[Amount]) -> list[int] | None:
    """The node of each, largest first onto the largest where it fits; None where there is no
    room."""
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].gpus, -nodes[i].cpus))
    rooms = [_Room(node) for node in nodes]
    found = [-1] * len(amounts)
    for k in sorted(range(len(amounts)), key=lambda k: (-amounts[k].gpus, -amounts[k].cpus)):
        place = next((i for i in order if rooms[i].take(amounts[k])), None)
        if place is None:
            return None
        found[k] = place
    return found


class _Room:
    """What is left of a node. A part of a GPU is of one GPU, and whole ones are free ones, as
    Ray has it."""

    def __init__(self, node: Amount) -> None:
        self._cpus, self._gpus = node.cpus, [1.0] * math.floor(node.gpus + 1e-6)

    def take(self, amount: Amount) -> bool:
        """Whether ``amount`` was there, and is taken."""
        whole, part = math.floor(amount.gpus + 1e-6), amount.gpus % 1.0
        part = 0.0 if min(part, 1.0 - part) < 1e-6 else part
        left = sorted(self._gpus)  # a part goes where least is left
        empty = [gpu for gpu in left if gpu > 1.0 - 1e-6][:whole]
        for gpu in empty:
            left.remove(gpu)
        shared = next((gpu for gpu in left if gpu + 1e-6 >= part), None)
        if amount.cpus > self._cpus + 1e-6 or len(empty) < whole or (part and shared is None):
            return False
        if part and shared is not None:
            left.remove(shared)
            left.append(shared - part)
        self._cpus, self._gpus = self._cpus - amount.cpus, left + [0.0] * whole
        return True


def _counted(n: int, plural: str) -> str:
    return f"{n} {plural.removesuffix('s') if n == 1 else plural}"


def _too_small(c: RayConfig, each: Mapping[str, Amount], nodes: Sequence[Amount]) -> str:
    wants = [
        f"{_counted(n, name)} (cluster.{option})"
        + (f" with {each[role]} each" if each[role] != Amount() else "")
        for role, (name, option) in ROLES.items()
        if (n := _count(c, role))
    ]
    has = ", ".join(f"{n} with {amount}" for amount, n in Counter(map(str, nodes)).items())
    how = {
        "colocated": "; each rank shares its device with those that act",
        "hybrid": f"; the rollout actors on {_counted(c.env_nodes, 'nodes')} of their own "
        "(cluster.env_nodes)",
    }.get(c.placement, "")
    reserved = ", ".join(
        f"cluster.{role}_{kind}"
        for role in ROLES
        for kind in ("cpus", "gpus")
        if _count(c, role) and getattr(each[role], kind)
    )
    return (
        f"the cluster is too small for cluster.placement={c.placement}: {', '.join(wants)}{how}. "
        f"Its nodes: {has}. Use fewer of them, reserve less ({reserved}), or add nodes"
    )


# ---------------------------------------------------------------------------------------- automatic
@dataclass(frozen=True)
class Choice:
    """A placement with numbers of actors, and what the model expects of it."""

    cluster: RayConfig
    outcome: Outcome

    @property
    def name(self) -> str:
        c = self.cluster
        counts = [
            _counted(_count(c, role), ROLES[role][0])
            for role in ROLES
            if role != "reward" and _count(c, role)
        ]
        where = f" on {_counted(c.env_nodes, 'nodes')}" if c.env_nodes else ""
        return f"{c.placement} ({', '.join(counts)}{where})"


def choices(config: RunConfig, times: Measured, nodes: Sequence[Amount]) -> list[Choice]:
    """For each placement that fits, the split of the devices with most episodes a second; the
    fastest first. Those that take turns are left out where rollouts run ahead, and ``hybrid`` where
    no node is without GPUs."""
    gpus = on_gpus(config, nodes)
    devices = int(sum(math.floor(node.gpus if gpus else node.cpus) for node in nodes))
    base = setup_of(config)
    found = []
    if not base.ahead and (c := _fitting(config, nodes, "colocated", devices, devices)):
        found.append(
            Choice(
                c,
                simulate(
                    times.times, dataclasses.replace(base, rollouts=devices, learners=devices)
                ),
            )
        )

    def split(placement: str, simulators: int = 0, env_nodes: int = 0) -> None:
        fit: dict[Setup, RayConfig] = {}
        for learners in splits(devices):
            act = devices - learners
            share = simulators / act if simulators and act else 1  # of a server, in actors
            setup = dataclasses.replace(
                base,
                rollouts=act,
                learners=learners,
                slots=max(1, round(base.slots * share)),
                cores=max(1, round(base.cores * share)),
                inline=base.inline and not simulators,
            )
            if c := _fitting(config, nodes, placement, learners, act, simulators, env_nodes):
                fit[setup] = c
        if fit:
            setup, outcome = fastest(times.times, [*fit])
            found.append(Choice(fit[setup], outcome))

    split("disaggregated")
    need = config.cluster.rollout_cpus or max(1, config.slots.workers)
    rooms = [
        int((node.cpus + 1e-6) / need)
        for node in nodes
        if not node.gpus and node.cpus + 1e-6 >= need
    ]
    if gpus and rooms:
        split("hybrid", len(rooms) * min(rooms), len(rooms))
    return sorted(found, key=lambda choice: -choice.outcome.episodes_per_second)


def _fitting(
    config: RunConfig,
    nodes: Sequence[Amount],
    placement: str,
    learners: int,
    act: int,
    simulators: int = 0,
    env_nodes: int = 0,
) -> RayConfig | None:
    """The cluster with these numbers; None where that is not possible."""
    if learners < 1 or act < 1 or 0 < simulators < act:
        return None
    c = dataclasses.replace(
        config.cluster,
        placement=placement,
        learners=learners,
        rollouts=simulators or act,
        env_nodes=env_nodes,
        inference=act if simulators else 0,
        times="",
    )
    try:
        arranged(dataclasses.replace(config, cluster=c), nodes)
    except UserError:
        return None
    return c


def resolved(config: RunConfig, nodes: Sequence[Amount]) -> tuple[RayConfig, str]:
    """The options with numbers where ``cluster.placement`` is auto, and why it is these. Raises
    `UserError` where the cluster has no room, or nothing was measured."""
    c: RayConfig = config.cluster
    if c.placement != "auto":
        return c, ""
    require_times(config)
    found = choices(config, measured(Path(c.times), config), nodes)
    if not found:
        raise UserError(
            "the cluster is too small for cluster.placement=auto: its nodes, "
            f"{', '.join(map(str, nodes))}, have no room for a learner rank and a rollout actor "
            f"with {c.rollout_cpus or max(1, config.slots.workers):g} CPUs (cluster.rollout_cpus, "
            "else slots.workers). Add nodes, reserve less, or use cluster.placement=free"
        )
    best = found[0]
    why = (
        f"{best.name}: {best.outcome.episodes_per_second:.3g} episodes/s expected from the times "
        f"of {c.times}, busiest {slowest(best.outcome)}"
    )
    others = [f"{choice.name} {choice.outcome.episodes_per_second:.3g}" for choice in found[1:]]
    return best.cluster, why + (
        f"; others: {'; '.join(others)}" if others else "; nothing else fits"
    )


def require_times(config: RunConfig) -> None:
    """Raise `UserError` where ``cluster.placement=auto`` is to choose by no measured times."""
    if not config.cluster.times:
        raise UserError(
            "cluster.placement=auto chooses by measured service times: measure them with a short "
            "run of the same words, 'vla-rl train ... cluster=ray cluster.placement=free "
            "name=times rl.iterations=8', and add cluster.times=outputs/times (a run's folder, or "
            "a JSON file as of 'vla-rl cluster plan --times')"
        )
