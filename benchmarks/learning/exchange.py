"""What episodes cost on their way from where they were rolled out to the ranks that learn from
them: bytes that each rank receives and holds, and the driver's memory and CPU seconds per GB.

Two ways on the same episodes, each role a process of its own (actors of Ray): "parts", as runs with
``cluster.learners`` do it (`vla_rl.cluster.payload`), and "whole", as they did before: the driver
takes every episode and gives all of them to every rank. No network is trained.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import table
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.payload import (
    Payload,
    fetched,
    handed_out,
    light_state,
    light_trajectories,
    owners,
    places,
    split,
)
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.types import EpisodeSpec, Held, Observation, RolloutBatch, Trajectory

GB = 1e9


def episode(number: int, decisions: int, cameras: int, pixels: int) -> Trajectory:
    """Random images and a replay of 56 tokens a decision, as OpenVLA keeps it."""
    generator = torch.Generator().manual_seed(number)

    def seen(rows: int) -> Observation:
        shape = (rows, pixels, pixels, 3)
        images = {
            f"camera{i}": torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            for i in range(cameras)
        }
        return Observation(images, torch.rand(rows, 8, generator=generator), ("do it",) * rows)

    valid = torch.ones(decisions, 8, dtype=torch.bool)
    return Trajectory(
        episode=EpisodeSpec("task", number, seed=number),
        observations=seen(decisions),
        final_observation=seen(1),
        actions=torch.rand(decisions, 8, 7, generator=generator),
        valid=valid,
        rewards=torch.zeros(decisions, 8),
        behavior_log_prob=torch.rand(decisions, 8, 7, generator=generator),
        replay={"tokens": torch.randint(256, (decisions, 56), generator=generator)},
        terminated=True,
        truncated=False,
        success=number % 2 == 0,
    )


class _Role:
    """A process that says what it spent: CPU seconds, and MB above what it had at first."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: Any = None

    def _spent(self, work: Any) -> dict[str, float]:
        base, cpu, started = _peak(), time.process_time(), time.perf_counter()
        more = work()
        spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - started}
        return spent | {"peak_mb": _peak() - base} | more


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


class Maker(_Role):
    """A rollout actor whose episodes are there already."""

    def make(self, count: int, decisions: int, cameras: int, pixels: int, objects: int) -> Any:
        done = [episode(i, decisions, cameras, pixels) for i in range(count)]
        if objects == 0:
            return packed({"episodes": [trajectory_state(t) for t in done]})
        chosen = split([len(t) for t in done], objects)
        parts = [[t for t, at in zip(done, chosen) if at == i] for i in range(objects)]
        light = packed(light_state([t for part in parts for t in part]))
        return (light, [len(part) for part in parts], *map(handed_out, parts))


class Rank(_Role):
    def parts(self, data: np.ndarray, episodes: Any, index: int) -> dict[str, float]:
        """Fetches what is its own."""
        import ray

        def work() -> dict[str, float]:
            told = unpacked(data)
            light = light_trajectories(told)
            mine = [i for i, rank in enumerate(told["owner"].tolist()) if rank == index]
            found = [ray.get(episodes[i][0])[episodes[i][1]] for i in mine]
            received = data.nbytes + sum(x.nbytes for x in found)
            batch = RolloutBatch.from_trajectories(light)
            whole = (fetched(found.pop(0)) for _ in mine)
            self._kept = (batch, held := Held.of(told["owner"], batch.lengths, index, whole))
            return {"received": float(received), "held": float(_bytes(batch) + _bytes(held))}

        return self._spent(work)

    def whole(self, data: np.ndarray) -> dict[str, float]:
        """Unpacks all, and keeps what the update was given and what it is made of."""

        def work() -> dict[str, float]:
            told = [trajectory_from_state(state) for state in unpacked(data)["episodes"]]
            self._kept = (told, batch := RolloutBatch.from_trajectories(told))
            kept = _bytes(batch) + sum(_bytes(t) for t in told)
            return {"received": float(data.nbytes), "held": float(kept)}

        return self._spent(work)


class Driver(_Role):
    """What the driver does between the actors and the ranks."""

    def parts(self, maker: Any, sizes: tuple[int, ...], ranks: list[Any]) -> dict[str, Any]:
        import ray

        count = len(ranks)
        light, counts, *held = maker.make.options(num_returns=2 + count).remote(*sizes, count)
        counts = ray.get(counts)  # (made by now: only what follows is the driver's)
        answers: list[dict[str, float]] = []

        def work() -> dict[str, float]:
            where = [(held[i], place) for i, many in enumerate(counts) for place in range(many)]
            told = [
                dataclasses.replace(t, payload=Payload(ray, t.rollout_id, reference, place))
                for t, (reference, place) in zip(
                    light_trajectories(unpacked(ray.get(light), held=True)), where, strict=True
                )
            ]
            owner = torch.tensor(owners(told, count))
            data = ray.put(packed({**light_state(told), "owner": owner}))
            calls = [rank.parts.remote(data, places(told), i) for i, rank in enumerate(ranks)]
            answers.extend(ray.get(calls))
            return {}

        return {"driver": self._spent(work), "ranks": answers}

    def whole(self, maker: Any, sizes: tuple[int, ...], ranks: list[Any]) -> dict[str, Any]:
        import ray

        made = maker.make.remote(*sizes, 0)
        ray.wait([made])
        answers: list[dict[str, float]] = []

        def work() -> dict[str, float]:
            told = [trajectory_from_state(s) for s in unpacked(ray.get(made))["episodes"]]
            data = ray.put(packed({"episodes": [trajectory_state(t) for t in told]}))
            answers.extend(ray.get([rank.whole.remote(data) for rank in ranks]))
            return {}

        return {"driver": self._spent(work), "ranks": answers}


def _bytes(x: Any) -> int:
    """Of all tensors in it."""
    if isinstance(x, torch.Tensor):
        return x.nbytes
    if isinstance(x, dict):
        return sum(map(_bytes, x.values()))
    if isinstance(x, Observation | RolloutBatch | Held | Trajectory):
        return sum(map(_bytes, vars(x).values()))
    return 0


def measure(
    episodes: int, decisions: int, size: int, ranks: list[int], ways: list[str]
) -> dict[str, Any]:
    """Each way with each number of ranks, on the same episodes."""
    from vla_rl.cluster.session import ray_session
    from vla_rl.config.cluster import RayConfig

    sizes = (episodes, decisions, 2, size)
    batch = episodes * (decisions + 1) * 2 * 3 * size**2
    rows: list[dict[str, Any]] = []
    with ray_session(RayConfig(object_store_mib=max(512, 6 * batch >> 20))) as ray:
        for count in ranks:
            for way in ways:
                one = ray.remote(num_cpus=0)
                maker, driver = one(Maker).remote(), one(Driver).remote()
                workers = [one(Rank).remote() for _ in range(count)]
                found = ray.get(getattr(driver, way).remote(maker, sizes, workers))
                rows.append({"way": way, "ranks": count, **_figures(found, batch)})
                for actor in (maker, driver, *workers):
                    ray.kill(actor)
    return {"episodes": episodes, "decisions": decisions, "pixels": size, "batch": batch} | {
        "rows": rows
    }


def _figures(found: dict[str, Any], batch: int) -> dict[str, float]:
    """The largest of the ranks, as shares of the batch; the driver's for each GB of it."""
    most = {name: max(r[name] for r in found["ranks"]) for name in found["ranks"][0]}
    driver = found["driver"]
    return {
        "received": most["received"] / batch,
        "held": most["held"] / batch,
        "rank_cpu_s": most["cpu_s"],
        "rank_peak": most["peak_mb"] * 2**20 / batch,
        "driver_cpu_s_per_gb": driver["cpu_s"] / (batch / GB),
        "driver_gb_per_gb": driver["peak_mb"] * 2**20 / batch,
        "seconds": driver["wall_s"],
    }


def text(document: dict[str, Any]) -> str:
    rows = [
        (
            str(r["ranks"]),
            r["way"],
            f"{r['received']:.2f}",
            f"{r['held']:.2f}",
            f"{r['rank_peak']:.2f}",
            f"{r['rank_cpu_s']:.2f}",
            f"{r['driver_gb_per_gb']:.3f}",
            f"{r['driver_cpu_s_per_gb']:.2f}",
        )
        for r in document["rows"]
    ]
    head = (
        "ranks",
        "way",
        "rank received",
        "held",
        "peak",
        "CPU s",
        "driver GB/GB",
        "driver CPU s/GB",
    )
    return (
        f"{document['episodes']} episodes of {document['decisions']} decisions, two cameras of "
        f"{document['pixels']} px: {document['batch'] / GB:.2f} GB of images; a rank's figures are "
        f"shares of that\n{table([head, *rows])}"
    )
