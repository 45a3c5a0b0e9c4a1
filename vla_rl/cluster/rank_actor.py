"""One rank of a group that learns together, inside an actor of Ray."""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vla_rl.assembly.context import Run
from vla_rl.checkpoint import load_training_state, load_weights
from vla_rl.cluster import worker_context
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.ranks import Ranks, gathered, gathered_state, load_full_state, mesh_of
from vla_rl.spread import Snapshot, SpreadState
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
    # that is to be written; what changes weights or state waits until it is copied
    _kept: Snapshot | None = None

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

    def load(
        self, folder: str, weights: np.ndarray | None = None, state: np.ndarray | None = None
    ) -> None:
        """Go on from the checkpoint ``folder`` ("": none), of which each rank reads its own part,
        but from these weights and this state where they are given."""
        self._copied()
        if weights is not None:
            own = self._policy.state_dict()
            load_full_state(self._policy, {**own, **unpacked(weights, held=True)["weights"]})
        elif folder:
            load_weights(folder, self._policy)
        if state is not None:
            self._learner.load_state_dict(unpacked(state)["state"])
        elif folder:
            stored, mesh = load_training_state(folder), mesh_of(self._policy)
            parts = {key: x.on(mesh) for key, x in stored.items() if isinstance(x, SpreadState)}
            self._learner.load_state_dict(self._of_parts(stored | parts))

    def update(self, *given: Any) -> Any:
        """`_update`, once the last `snapshot` does not need what it changes any more."""
        self._copied()
        return self._update(*given)

    def snapshot(self) -> str | None:
        """Keep a copy of what this rank has of weights and state, until `write` or the next one; it
        is made while episodes go on, and only what changes them waits for it. The main one tells how
        the state is built, as JSON."""
        self._copied()
        self._kept = None  # (a copy at a time)
        self._kept = Snapshot(self._policy, self._parts(), self._ranks)
        return json.dumps(self._kept.structure) if self._ranks.is_main else None

    def _copied(self) -> None:
        if (kept := self._kept) is not None:
            kept.copied()

    def write(self, folder: str, save: str) -> list[dict[str, Any]]:
        """Write the last `snapshot` as a part of a checkpoint (`Unfinished.finish` takes what is
        returned), from a thread of its own: an update may go on meanwhile."""
        kept = self._kept
        assert kept is not None
        try:
            return kept.write(Path(folder), save)
        finally:
            if self._kept is kept:
                self._kept = None

    def sees(self, file: str) -> bool:
        """Whether a file of the driver's is here as well, and its folder can be written."""
        return os.path.isfile(file) and os.access(os.path.dirname(file), os.W_OK)

    def state(self) -> np.ndarray | None:
        """What is needed to go on, whole, of the main rank. Collective."""
        state = gathered_state(self._learner.state_dict())
        return packed(state) if self._ranks.is_main else None

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
    def _update(self, *given: Any, **named: Any) -> Any:
        """Learn."""

    @abstractmethod
    def _build(self, run: Run) -> None:
        """Make ``_policy`` and ``_learner`` from the run."""

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """The state of what learns, by the keys that a checkpoint has for it."""

    @abstractmethod
    def _of_parts(self, stored: dict[str, Any]) -> Any:
        """What the learner's `load_state_dict` takes, of a checkpoint's."""
