"""What a cluster holds and moves: bytes of each role and link, seconds of a checkpoint, and what
breaks first, for the setups of `times.cluster_plan`. Bytes are those of tensors: what a process has
of its own (half a GB of libraries), activations and what FSDP2 sends in an update are not counted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.cluster.model import Setup
from vla_rl.errors import UserError
from vla_rl.files import (
    STATE_STEM,
    TRAINING_STATE,
    WEIGHTS_STEM,
    existing_checkpoint,
    is_spread,
    weight_files,
)
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.shards import Shards, TensorFile

GB = 1e9
_ALGORITHM = "/algorithm/"  # begins the names of what ranks go on from
# Copies of what is packed: as it is made or taken apart, there are the tensors, the bytes of them,
# and both behind each other.
_PACKED = 3
_WRITE = 1 * GB  # and that it hashes and writes at most (sha256 on one core)


@dataclass(frozen=True)
class Sizes:
    """Bytes: of the policy's ``weights``; of what training changes, as it is ``sent``; of the
    ``state`` that ranks spread and of the ``rest`` of it, which each has; of an ``episode``, and of
    what the driver knows of one (``light``)."""

    weights: float
    sent: float
    state: float
    episode: float
    light: float
    rest: float = 0.0


@dataclass(frozen=True)
class Node:
    """``gpus`` of a node, bytes of memory of each (``gpu``) and of the ``host``, bytes a second of
    its ``link`` and ``disk``."""

    gpus: int = 8
    gpu: float = 80 * GB
    host: float = 1000 * GB
    link: float = 12.5 * GB
    disk: float = 2 * GB


def sizes_of(source: Path, said: Mapping[str, float]) -> Sizes:
    """Of a run with ``cluster=ray`` and learner ranks: its last checkpoint and its metrics; of a
    file of service times, what it ``said``. Raises `UserError`."""
    if not source.is_dir():
        if missing := [name for name, size in said.items() if not size]:
            raise UserError(f"--memory: {source} does not say {missing[0]}_bytes")
        return Sizes(**said)
    return _of_run(source)


def _of_run(folder: Path) -> Sizes:
    rows = [row for row in read_metrics(folder / METRICS_FILE) if row["phase"] == "rl"]
    if not rows or not rows[-1].get("cluster/bytes_rank"):
        raise UserError(
            f"--memory: {folder} does not say what its episodes and weights weigh. Give a run with "
            "cluster=ray cluster.learners=1 or more, or a file with weights_bytes, sent_bytes, "
            "state_bytes, episode_bytes and light_bytes"
        )
    count = rows[-1]["episodes"] - (rows[0]["episodes"] if len(rows) > 1 else 0)
    counted = rows[1:] or rows

    def mean(name: str, of: float) -> float:
        return sum(row.get(f"cluster/{name}") or 0.0 for row in counted) / of

    checkpoint = existing_checkpoint(folder / "checkpoints" / "rl")
    state, rest = _state(checkpoint)
    return Sizes(
        weights=_weights(checkpoint),
        sent=mean("bytes_published", len(counted)),
        state=state,
        episode=mean("bytes_episodes", count),
        light=mean("bytes_in", count),
        rest=rest,
    )


def _weights(checkpoint: Path) -> float:
    files = (TensorFile(checkpoint / name) for name in weight_files(checkpoint))
    return float(sum(kept.nbytes for file in files for kept in file.tensors.values()))


def _state(checkpoint: Path) -> tuple[float, float]:
    """What ranks spread of the training state, and the rest. (An ordinary checkpoint does not say
    it: large tensors are taken for spread ones.)"""
    folder = checkpoint / TRAINING_STATE
    if is_spread(folder, STATE_STEM):
        tensors = Shards(folder, STATE_STEM).tensors
        spread = sum(kept.nbytes for kept in tensors.values() if kept.spread)
        return float(spread), float(sum(kept.nbytes for kept in tensors.values()) - spread)
    own = TensorFile(folder / f"{STATE_STEM}.safetensors").tensors
    learned = {name: kept for name, kept in own.items() if name.startswith(_ALGORITHM)}
    spread = sum(
        kept.nbytes for name, kept in learned.items() if "/exp_avg" in name or "/master" in name
    )
    return float(spread), float(sum(kept.nbytes for kept in learned.values()) - spread)


# ------------------------------------------------------------------------------------ the arithmetic
@dataclass(frozen=True)
class Load:
    """Bytes that each role has at most, and of an iteration's links; seconds of a checkpoint."""

    rank_gpu: float  # weights, gradients and state of a rank
    rank_host: float  # its rows of the batch; the copy that a checkpoint is written from
    main_host: float  # the main rank's besides: weights on their way to the driver
    actor_gpu: float  # an acting copy of the weights
    store: float  # of a node: episodes under way, two versions of the weights
    driver: float
    rank_in: float  # episodes to the rank that learns from them
    driver_in: float  # what it knows of episodes, and a version of the weights
    driver_out: float  # that version to each node, and what ranks are told of episodes
    rank_disk: float  # a checkpoint's part
    pause: float  # seconds until episodes go on (ranks copy their parts beside those)
    written: float  # and until the checkpoint is there


def load(sizes: Sizes, setup: Setup, node: Node, whole: bool = False) -> Load:
    """Of a setup in which each rank and each actor has a GPU; ``whole``: `RayConfig.checkpoints`."""
    ranks, s = setup.learners, sizes
    learning, acting = (math.ceil(n / node.gpus) for n in (ranks, setup.rollouts))
    told = setup.batch * s.light
    kept = (s.weights + s.state) / ranks
    beside = min(ranks, node.gpus)
    rate = min(_WRITE, node.disk / beside)
    all_of_it = s.weights + s.state + s.rest
    return Load(
        rank_gpu=kept + s.sent / ranks + s.rest,
        rank_host=setup.batch * s.episode / ranks + _PACKED * told + (0.0 if whole else kept),
        main_host=_PACKED * s.sent + (_PACKED * (s.state + s.rest) if whole else 0.0),
        actor_gpu=s.weights,
        store=setup.batch * (1 + setup.ahead) * s.episode / acting + 2 * s.sent,
        driver=s.weights
        + _PACKED * (s.sent + told * (1 + setup.ahead))
        + (_PACKED * (s.state + s.rest) if whole else 0.0),
        rank_in=told + setup.batch * s.episode / ranks,
        driver_in=told + s.sent,
        driver_out=acting * s.sent + learning * told,
        rank_disk=all_of_it if whole else kept + s.rest,
        pause=all_of_it / _WRITE if whole else 0.0,
        written=all_of_it / min(_WRITE, node.disk) if whole else (kept + s.rest) / rate,
    )


def shares(
    found: Load, setup: Setup, node: Node, seconds: float, driver: float
) -> dict[str, float]:
    """How much of what there is each thing takes: of memory, or of an iteration's ``seconds``, of
    which the ``driver`` works this share. Above 1 it does not go."""
    ranks, actors = min(setup.learners, node.gpus), min(setup.rollouts, node.gpus)
    hosts = ranks * found.rank_host + found.main_host
    return {
        "memory of a learning GPU": found.rank_gpu / node.gpu,
        "memory of an acting GPU": found.actor_gpu / node.gpu,
        "host memory of a learning node": hosts / node.host,
        "host memory of an acting node": (found.store + actors * GB) / node.host,
        "memory of the driver": found.driver / node.host,
        "time of the driver": driver,
        "link of the driver": (found.driver_in + found.driver_out) / node.link / seconds,
        "link of a learning node": ranks * found.rank_in / node.link / seconds,
        "writing a checkpoint each iteration": found.written / seconds,
    }


# ------------------------------------------------------------------------------------------ the plan
def memory_plan(
    plan: Mapping[str, Any], sizes: Sizes, node: Node, whole: bool = False
) -> dict[str, Any]:
    """JSON-ready: for each number of GPUs of a `cluster_plan`."""
    rows = []
    for row in plan["rows"]:
        batch = plan["asked"]["batch"] * row["gpus"]
        setup = dataclasses.replace(
            Setup(**plan["asked"]),
            rollouts=row["act"],
            learners=row["learn"],
            batch=batch,
            ahead=plan["staleness"],
        )
        found = load(sizes, setup, node, whole)
        taken = shares(found, setup, node, row["ahead"]["seconds"], row["ahead"]["driver"])
        first = max(taken, key=lambda name: taken[name])
        rows.append(
            {"gpus": row["gpus"], "load": dataclasses.asdict(found), "shares": taken}
            | {"first": first, "act": row["act"], "learn": row["learn"]}
        )
    return {
        "sizes": dataclasses.asdict(sizes),
        "node": dataclasses.asdict(node),
        "checkpoints": "whole" if whole else "parts",
        "rows": rows,
    }


def memory_text(found: Mapping[str, Any]) -> str:
    """Its table, in GB."""
    s = found["sizes"]
    lines = [
        f"bytes: weights {_gb(s['weights'])}, sent each version {_gb(s['sent'])}, state of the ranks "
        f"{_gb(s['state'] + s['rest'])}, an episode {_gb(s['episode'])} of which the driver knows "
        f"{_gb(s['light'])} GB (cluster.checkpoints={found['checkpoints']})",
        "",
        f"{'GPUs':>5}  {'act+learn':>10}  {'rank':>7} {'its host':>8} {'store':>7} {'driver':>7}  "
        f"{'to rank':>7} {'driver in':>9} {'out':>7}  {'part':>7} {'pause':>6} {'written':>7}  "
        "takes most",
        f"{'':>5}  {'':>10}  {'GB':>7} {'GB':>8} {'GB':>7} {'GB':>7}  {'GB':>7} {'GB':>9} {'GB':>7}  "
        f"{'GB':>7} {'s':>6} {'s':>7}",
    ]
    for row in found["rows"]:
        x = row["load"]
        share = row["shares"][row["first"]]
        end = f"{row['first']}: {share:.0%}" + (" (breaks)" if share > 1 else "")
        lines.append(
            f"{row['gpus']:>5}  {row['act']:>4} + {row['learn']:<3}  {_gb(x['rank_gpu']):>7} "
            f"{_gb(x['rank_host']):>8} {_gb(x['store']):>7} {_gb(x['driver']):>7}  "
            f"{_gb(x['rank_in']):>7} {_gb(x['driver_in']):>9} {_gb(x['driver_out']):>7}  "
            f"{_gb(x['rank_disk']):>7} {x['pause']:>6.2g} {x['written']:>7.2g}  {end}"
        )
    return "\n".join(lines)


def _gb(count: float) -> str:
    return f"{count / GB:.3g}"


# ------------------------------------------------------------------------------- against another run
def against(sizes: Sizes, setup: Setup, folder: Path) -> dict[str, tuple[float, float]]:
    """What `load` says of a run's own ``setup``, and what that run measured: bytes of an iteration
    and of a checkpoint."""
    rows = [row for row in read_metrics(folder / METRICS_FILE) if row["phase"] == "rl"]
    rows = rows[1:] or rows

    def seen(name: str) -> float:
        return statistics.mean(row.get(f"cluster/{name}") or 0.0 for row in rows)

    found = load(sizes, setup, Node())
    checkpoint = existing_checkpoint(folder / "checkpoints" / "rl")
    told = setup.batch * sizes.light
    pairs = {
        "to the rank that gets most": (found.rank_in, seen("bytes_rank")),
        "of episodes to the driver": (told, seen("bytes_in")),
        "of episodes that are done": (setup.batch * sizes.episode, seen("bytes_episodes")),
        "of weights to the actors": (setup.rollouts * sizes.sent, seen("bytes_out")),
    }
    if is_spread(checkpoint / TRAINING_STATE, STATE_STEM):
        folders = ((checkpoint, WEIGHTS_STEM), (checkpoint / TRAINING_STATE, STATE_STEM))
        largest = [
            max(file.stat().st_size for file in place.glob(f"{stem}-*-of-*.safetensors"))
            for place, stem in folders
        ]
        pairs["of a checkpoint's largest part"] = (found.rank_disk, float(sum(largest)))
    return pairs


def against_text(pairs: Mapping[str, Sequence[float]], folder: Path) -> str:
    lines = [f"bytes predicted for {folder}, and measured there:"]
    for name, (predicted, seen) in pairs.items():
        off = f"{predicted / seen - 1:+.1%}" if seen else "not measured"
        lines.append(f"  {name:<32} {predicted:>14,.0f} {seen:>14,.0f}  {off}")
    return "\n".join(lines)
