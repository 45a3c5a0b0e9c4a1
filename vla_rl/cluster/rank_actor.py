"""One rank of a group that learns together, inside an actor of Ray."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vla_rl.assembly.context import Run
from vla_rl.cluster import worker_context
from vla_rl.cluster.packing import unpacked
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.ranks import Ranks, gathered, load_full_state
from vla_rl.types import TaskSpec


@dataclass(frozen=True)
class RankJob:
    """What a rank is to do. ``timeout`` seconds the ranks wait for each other, ``mode`` is that
    of `ranks.shard`. ``embodiment`` None: of a recording, which each rank opens itself."""

    place: worker_context.WorkerContext
    embodiment: dict[str, Any] | None
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int
    index: int
    size: int
    mode: str
    timeout: float


class RankActor(ABC):
    """Rank ``job.index``. Every rank must be called alike: inside, they wait for each other."""

    _policy: Any
    _learner: Any  # with the state_dict of a local run's

    def __init__(self, job: RankJob) -> None:
        self._job = job

    def beat(self) -> None:  # noqa: B027 - to return is all it does
        """A sign of life, from a thread of its own: it comes while an update goes on, and not from
        a process that stands still."""

    def hello(self) -> dict[str, Any]:
        """Where it runs and with what; the main rank's address is where the others meet it."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        host = ray.util.get_node_ip_address()
        return worker_context.hello() | {"address": f"tcp://{host}:{port}"}

    def open(self, address: str) -> None:
        """Meet the other ranks at ``address`` and build what learns. Raises `UserError` for what
        the user can mend."""
        job = self._job
        run = job.place.enter(job.embodiment, job.tasks, job.privileged_dim)
        backend = "nccl" if run.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=address,
            rank=job.index,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout),
        )
        self._ranks = Ranks.present()
        torch.manual_seed(run.config.seed)
        self._build(run)

    def load(self, data: np.ndarray) -> None:
        """Go on from weights, and from a state if there is one."""
        found = unpacked(data)
        load_full_state(self._policy, {**self._policy.state_dict(), **found["weights"]})
        if found["state"] is not None:
            self._learner.load_state_dict(found["state"])

    def _weights(self) -> dict[str, torch.Tensor]:
        """Those that training changes, whole on the main rank. Collective."""
        return {name: gathered(x.detach()) for name, x in learned_weights(self._policy).items()}

    def exchange(self, size: int) -> float:
        """Seconds in which the ranks add up ``size`` bytes of each (the fastest of three times)."""
        x, seconds = torch.ones(size // 4), []
        x = x.cuda() if dist.get_backend() == "nccl" else x
        for _ in range(4):  # (the first one meets)
            started = time.perf_counter()
            assert float(self._ranks.sum(x)[0]) == self._ranks.size
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    @abstractmethod
    def _build(self, run: Run) -> None:
        """Make ``_policy`` and ``_learner`` from the run."""
