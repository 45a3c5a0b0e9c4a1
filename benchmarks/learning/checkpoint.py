"""What a checkpoint of all that learner ranks hold costs (weights and Adam's moments, FSDP2 over
gloo, actors of Ray): memory of the driver and of a rank, seconds until rollouts go on, seconds until
it is on the disk; and what a recovery from it costs.

Two ways of runs with ``cluster.learners``, each by the product's own code on the same random model:
"parts" (`vla_rl.spread`) and "whole" (``cluster.checkpoints``). A model's decision is timed before
it: 256 tokens through all its layers on one thread. The machine is one, so files are read back from
its page cache.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measuring import table, timed
from benchmarks.policy.inputs import bench_embodiment
from vla_rl.algorithms.optim import load_optimizer_state, optimizer_state
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cluster.learner import GroupLearner
from vla_rl.cluster.packing import packed, packed_weights, unpacked, unpacked_weights
from vla_rl.cluster.rank_actor import RankActor
from vla_rl.cluster.rank_group import GROUPS
from vla_rl.config.cluster import RayConfig
from vla_rl.devices import free_memory_bytes
from vla_rl.errors import UserError
from vla_rl.learning.episode_queue import take_weights
from vla_rl.ranks import Ranks, shard

GB = 1e9
_WIDTH = 1024
_TOKENS = 256
_LIMIT = 600.0


class Model(nn.Module):
    """Random weights, in blocks as of a transformer's feed-forward part."""

    policy_type, embodiment = "random", bench_embodiment()

    def __init__(self, blocks: int, dtype: str = "float32", device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        own: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(_WIDTH, 4 * _WIDTH, **own),
                nn.GELU(),
                nn.Linear(4 * _WIDTH, _WIDTH, **own),
            )
            for _ in range(blocks)
        )

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def config_dict(self) -> dict[str, Any]:
        return {"blocks": len(self.layers)}

    def extra_files(self) -> dict[str, str]:
        return {}


class _Adam:
    """What learns, reduced to its state: moments of the weights' own dtype."""

    def __init__(self, policy: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(policy.parameters(), 1e-4, (0.9, 0.95))

    def step(self) -> None:
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            p.grad = torch.full_like(p, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": optimizer_state(self.optimizer)}

    def load_state_dict(self, state: Any) -> None:
        load_optimizer_state(self.optimizer, state["optimizer"])


class Rank(RankActor):
    """A learner rank whose updates are not measured."""

    def __init__(self, index: int, size: int, blocks: int, dtype: str) -> None:
        torch.set_num_threads(1)
        self._index, self._size, self._model = index, size, (blocks, dtype)

    def open(self, address: str) -> None:
        limit = timedelta(seconds=_LIMIT)
        dist.init_process_group(
            "gloo", init_method=address, rank=self._index, world_size=self._size, timeout=limit
        )
        self._ranks = Ranks.present()
        self._build(None)

    def mark(self) -> float:
        return _forget_peak()

    def peak(self) -> float:
        return _peak()

    def _build(self, run: Any) -> None:
        self._policy = shard(Model(*self._model), self._ranks)
        self._learner = _Adam(self._policy)
        self._update()

    def _update(self) -> None:
        self._learner.step()

    def _parts(self) -> dict[str, Any]:
        return {"algorithm": self._learner.state_dict()}

    def _of_parts(self, stored: dict[str, Any]) -> Any:
        return stored["algorithm"]


class Group(GroupLearner):
    """The driver's side of it, on ranks that are there."""

    def __init__(self, ray: Any, actors: list[Any], policy: Any, config: RayConfig) -> None:
        self._ray, self._actors, self._policy, self._hello = ray, actors, policy, []
        self._state, self._folder, self._saving = None, "", None
        self._made = self._kept = self._failures = self.restarts = 0
        self._run = SimpleNamespace(  # type: ignore[assignment]
            config=SimpleNamespace(cluster=config), progress=SimpleNamespace(say=print)
        )

    def opened(self) -> None:
        address = self._all("hello")[0]["address"]
        self._all("open", address)


class Driver:
    """The process that leads a run; ``way``: of ``cluster.checkpoints``."""

    def __init__(self, way: str, ranks: int, blocks: int, dtype: str, folder: str) -> None:
        import ray

        torch.set_num_threads(1)
        self._policy, self._folder, self._way = Model(blocks, dtype), Path(folder), way
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": GROUPS}
        one: Any = ray.remote(**options)(Rank)
        self._actors = [one.remote(i, ranks, blocks, dtype) for i in range(ranks)]
        config = RayConfig(learners=ranks, checkpoints=way, hang_timeout=_LIMIT)
        self._group = Group(ray, self._actors, self._policy, config)
        self._group.opened()
        self._ray = ray

    def decision(self) -> float:
        """Seconds that the model takes for one (the fastest of three). Where the ranks write, the
        driver's own weights are given up after it: nobody reads them, and the room is needed."""
        dtype, seconds = next(self._policy.parameters()).dtype, []
        x = torch.randn(_TOKENS, _WIDTH, dtype=dtype)
        with torch.no_grad():
            for _ in range(3):
                started = time.perf_counter()
                self._policy(x)
                seconds.append(time.perf_counter() - started)
        if self._way == "parts":
            self._policy = self._policy.to("meta")
        return min(seconds)

    def save(self) -> dict[str, float]:
        def work() -> dict[str, float]:
            started = time.perf_counter()
            state = {"algorithm": self._group.state_dict()}
            save_checkpoint(self._folder, self._policy, state)  # type: ignore[arg-type]
            pause = time.perf_counter() - started
            self._group.settle()
            return {"pause_s": pause, "written_s": time.perf_counter() - started}

        return self._measured(work)

    def recover(self) -> dict[str, float]:
        """The ranks go on from it."""

        def work() -> dict[str, float]:
            started = time.perf_counter()
            self._group._surely(self._group._load)
            return {"recovered_s": time.perf_counter() - started}

        return self._measured(work)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _measured(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Figures of ``work``, with what driver and ranks had in memory at most, above what they
        had before (GB)."""
        before = self._ray.get([actor.mark.remote() for actor in self._actors])
        own = _forget_peak()
        found = work()
        after = self._ray.get([actor.peak.remote() for actor in self._actors])
        found |= {"driver_gb": _peak() - own, "driver_before_gb": own}
        return found | {"rank_gb": max(b - a for a, b in zip(before, after))}


def _forget_peak() -> float:
    """Begin to watch this process's memory; what it has now (GB)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / GB if found else 0.0


def measure(millions: int, ranks: int, ways: list[str], dtype: str) -> dict[str, Any]:
    """Each way once, on a model of so many million parameters. Raises `UserError` where that does
    not fit into this machine's memory."""
    from vla_rl.cluster.session import ray_session

    blocks = max(1, round(millions * 1e6 / (8 * _WIDTH**2 + 5 * _WIDTH)))
    parameters = sum(p.numel() for p in Model(blocks, dtype, "meta").parameters())
    _require_memory(parameters * getattr(torch, dtype).itemsize, ways)
    rows: list[dict[str, Any]] = []
    # "whole" puts weights and moments there
    store = int(16 * parameters) >> 20 if "whole" in ways else 0
    with ray_session(RayConfig(object_store_mib=max(256, store))) as ray:
        for way in ways:
            folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
            try:
                driver = ray.remote(num_cpus=0)(Driver).remote(
                    way, ranks, blocks, dtype, str(folder / "rl")
                )
                decision = ray.get(driver.decision.remote())
                save, recovery = (ray.get(getattr(driver, x).remote()) for x in ("save", "recover"))
                size = sum(f.stat().st_size for f in (folder / "rl").rglob("*") if f.is_file())
                row = {"way": way, "decision_s": decision, "bytes": size, "save": save}
                rows.append(row | {"recovery": recovery})
                ray.get(driver.close.remote())
                ray.kill(driver)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    told = {"parameters": parameters, "dtype": dtype, "ranks": ranks}
    return {**told, "rows": rows, "publish": _publish()}


def _require_memory(weights: int, ways: list[str]) -> None:
    """Raise `UserError` unless there is room for the ranks' weights with two moments and a copy of
    these; where the driver writes, for its own weights and three more."""
    needed = weights * (3 + (3 * 4 + 1 if "whole" in ways else 3)) + 2 * 10**9
    if 0 < (free := free_memory_bytes()) < needed:
        raise UserError(
            f"this takes {needed / GB:.1f} GB of memory, and {free / GB:.1f} GB are free: fewer "
            "--millions, --dtype bfloat16, or --ways parts"
        )


def _publish() -> dict[str, float]:
    """CPU seconds per GB of weights on their way from the main rank to an actor (the fastest of
    five times)."""
    policy = Model(3)
    own = {name: x.detach() for name, x in policy.state_dict().items()}
    told = packed({"weights": own})
    sent, checksum = packed_weights(1, own)
    steps: dict[str, Callable[[], Any]] = {
        "main rank packs": lambda: packed({"weights": own}),
        "driver takes": lambda: take_weights(policy, unpacked(told, held=True)["weights"]),
        "driver packs": lambda: packed_weights(1, own),
        "actor takes": lambda: take_weights(policy, unpacked_weights(sent, checksum)[1]),
    }
    took = {name: min(timed(step).cpu for _ in range(5)) for name, step in steps.items()}
    return {name: seconds / (told.nbytes / GB) for name, seconds in took.items()}


def text(document: dict[str, Any]) -> str:
    head = ["way", "on disk GB", "pause s", "written s", "driver +GB", "rank +GB"]
    head += ["recovered s", "driver +GB", "rank +GB", "a decision s"]
    rows = [
        (
            r["way"],
            f"{r['bytes'] / GB:.2f}",
            f"{r['save']['pause_s']:.2f}",
            f"{r['save']['written_s']:.2f}",
            f"{r['save']['driver_gb']:.2f}",
            f"{r['save']['rank_gb']:.2f}",
            f"{r['recovery']['recovered_s']:.2f}",
            f"{r['recovery']['driver_gb']:.2f}",
            f"{r['recovery']['rank_gb']:.2f}",
            f"{r['decision_s']:.2f}",
        )
        for r in document["rows"]
    ]
    return (
        f"{document['parameters'] / 1e9:.3f} B {document['dtype']} parameters with Adam on {document['ranks']} "
        f"ranks; memory above what each process has anyway\n{table([head, *rows])}\n"
        "weights to the actors, CPU s per GB: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in document["publish"].items())
    )
