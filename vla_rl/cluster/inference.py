"""``cluster.inference``: the policy in actors of its own, servers, each of which acts for several
rollout actors at once.

A rollout actor then has a `RemotePolicy` where else its policy is, so that it needs no weights and
no GPU. A server takes all requests that wait when it is free as one batch. What a decision is
depends on its observation, seed and weights alone, so one that is asked for again, as its server
was lost, is the same. With one rollout actor for each server, and ``rollout.serve_fraction`` 1,
batches are those of a local run, and decisions too, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vla_rl.assembly.learner import trained_policy
from vla_rl.cluster import worker_context
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.packing import packed, unpacked, unpacked_weights
from vla_rl.cluster.pulse import Pulse, now
from vla_rl.data.codec import observation_from_state, observation_state
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.interfaces import Policy
from vla_rl.learning.episode_queue import take_weights
from vla_rl.serving.batches import Batches
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyOutput


@dataclass(frozen=True)
class ServerJob:
    """What a server is to do. ``prepared``: the algorithm prepares its policy for RL."""

    place: worker_context.WorkerContext
    embodiment: dict[str, Any]
    prepared: bool


class InferenceActor:
    """The policy, which answers requests from one thread; others take them in, and orders."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job
        self._weights: tuple[int, dict[str, torch.Tensor]] | None = None
        self._version: int | None = None
        self._busy = 0.0
        self._shape: dict[str, Any] = {}
        self._batches = Batches(self._act, ready=self._ready)
        self._taking, self._opening = threading.Lock(), threading.Lock()

    def hello(self) -> dict[str, Any]:
        """Where it runs and with what."""
        return worker_context.hello()

    def open(self) -> dict[str, Any]:
        """Open the policy, unless it is, and say what an engine must know of it. Raises `UserError`
        for what the run's user can mend."""
        with self._opening:
            if not self._shape:
                self._policy = self._opened()
                self._shape = {
                    "embodiment": self._policy.embodiment.to_dict(),
                    "chunk_length": self._policy.chunk_length,
                }
            return self._shape

    def _opened(self) -> Policy:
        policy = trained_policy(self._job.place.enter(self._job.embodiment))
        if "memory" in policy.can:
            raise ConfigError(
                f"cluster.inference: {type(policy).__name__} remembers earlier decisions of an "
                "episode, which stay where the episode is: use cluster.inference=0"
            )
        if self._job.prepared:
            policy.prepare_for_rl()
        return policy

    def beat(self) -> None:
        """A sign of life (`Pulse`)."""

    def watch(self) -> None:
        """Returns never: who waits for it hears when this process ends."""
        threading.Event().wait()

    def weights(self, data: np.ndarray, checksum: int) -> float:
        """Act with these from the next batch on; returns the seconds in which it acted since it
        started."""
        pending = unpacked_weights(data, checksum)
        with self._taking:
            self._weights = pending
        self._batches.wake()
        return self._busy

    def act(self, data: np.ndarray) -> np.ndarray:
        """Waits for weights, and for its turn; returns a packed `PolicyOutput` and the version
        that acted."""
        self.open()  # (whoever asks first: Ray orders no calls of different callers)
        asked = unpacked(data)
        answer = self._batches.ask(
            observation_from_state(asked["observation"]), asked["deterministic"], asked["seeds"]
        ).result()
        return packed({"version": answer.told, "rows": answer.rows})

    def _ready(self) -> bool:
        return self._weights is not None or self._version is not None

    def _act(
        self, observation: Observation, deterministic: bool, seeds: list[int]
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        """Rows of a decision, and the version of the weights that made it."""
        started = time.perf_counter()
        try:
            with self._taking:
                pending, self._weights = self._weights, None
            if pending is not None:
                self._version = pending[0]
                take_weights(self._policy, pending[1])
            with torch.inference_mode():
                out = self._policy.act(observation, deterministic=deterministic, seeds=seeds)
            rows = {
                "actions": out.chunk.actions,
                "valid": out.chunk.valid,
                "behavior_log_prob": out.behavior_log_prob,
                **({} if out.value is None else {"value": out.value}),
                **{f"replay/{k}": x for k, x in out.replay.items()},
            }
            return {name: x.cpu() for name, x in rows.items()}, self._version
        finally:
            self._busy += time.perf_counter() - started


class RemotePolicy(Policy):
    """A `Policy` that asks ``server``, and tells ``acted`` which version has answered, before
    the answer is used."""

    def __init__(self, ray: Any, server: Any, acted: Any, patience: float) -> None:
        self._ray, self._server, self._acted, self._patience = ray, server, acted, patience
        self._changed = threading.Condition()

    def open(self) -> RemotePolicy:
        """Ask what an engine must know of the policy."""
        shape = self._asked(lambda server: server.open.remote())
        self.embodiment = EmbodimentSpec.from_dict(shape["embodiment"])
        self.chunk_length: int = shape["chunk_length"]
        return self

    def serve_by(self, server: Any) -> None:
        """Ask another one from now on, also for what is being asked."""
        with self._changed:
            self._server = server
            self._changed.notify_all()

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        data = packed(
            {
                "observation": observation_state(observation),
                "deterministic": deterministic,
                "seeds": list(seeds or ()),
            }
        )
        found = unpacked(
            self._asked(lambda server: server.act.options(concurrency_group="acts").remote(data))
        )
        rows = found["rows"]
        self._acted(found["version"])
        return PolicyOutput(
            chunk=ActionChunk(rows["actions"], rows["valid"]),
            behavior_log_prob=rows["behavior_log_prob"],
            replay={
                name.partition("/")[2]: x for name, x in rows.items() if name.startswith("replay/")
            },
            value=rows.get("value"),
        )

    def _asked(self, call: Callable[[Any], Any]) -> Any:
        """What the server answers, or another one where it is lost."""
        while True:
            server = self._server
            try:
                return worker_context.heard(self._ray, call(server))
            except self._ray.exceptions.RayActorError as error:
                self._await_other(server, error)

    def _await_other(self, lost: Any, error: Exception) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._server is not lost, self._patience):
                raise TimeoutError(
                    f"no other server came within {self._patience:g} s: {error}"
                ) from error


@dataclass
class _Server:
    handle: Any
    watched: Any  # the reference that is an error once it is lost
    failures: int = 0  # in this place since weights were taken
    busy: float = 0.0  # seconds in which it acted, as it said last


class Servers:
    """The inference actors of ``seats`` as the driver sees them. Number i acts for the rollout
    actors i, i + inference, …"""

    def __init__(self, seats: Allocation, job: ServerJob, say: Any) -> None:
        self._ray, self._config, self._seats, self._job, self._say = (
            seats.ray,
            seats.config,
            seats,
            job,
            say,
        )
        self._weights: tuple[Any, int] | None = None
        self.losses: list[str] = []
        self._servers = [self._started(place) for place in range(seats.config.inference)]
        limits = seats.config.hang_timeout, seats.config.start_timeout
        self._pulse = Pulse(self._ray, [server.handle for server in self._servers], *limits)

    def of(self, number: int) -> Any:
        """The handle of the one that acts for rollout actor ``number``."""
        return self._servers[number % len(self._servers)].handle

    def publish(self, reference: Any, checksum: int) -> float:
        """Have all act with these weights; they do when it returns, but for those that are lost.
        Returns the seconds in which they acted since the last time, their mean."""
        self._weights = reference, checksum
        sent = {
            s.handle.weights.options(concurrency_group="orders").remote(reference, checksum): s
            for s in self._servers
        }
        done, _ = self._ray.wait(
            list(sent), num_returns=len(sent), timeout=self._config.start_timeout
        )
        acted = 0.0
        for answer in done:
            server = sent[answer]
            try:
                busy = worker_context.heard(self._ray, answer)
            except self._ray.exceptions.RayActorError:  # `look` sees to it
                continue
            acted, server.busy, server.failures = acted + busy - server.busy, busy, 0
        return acted / len(self._servers)

    def look(self, clients: Sequence[Any]) -> int:
        """Replace those that are lost or stand still; returns how many. Raises `UserError` after
        too many losses in a row in one place."""
        lost, _ = self._ray.wait(
            [s.watched for s in self._servers], num_returns=len(self._servers), timeout=0
        )
        limit, count = self._config.hang_timeout, 0
        for i, server in enumerate(self._servers):
            why = "its process ended" if server.watched in lost else ""
            if not why and self._pulse.silence(i) > limit:
                why = f"it gave no sign of life for {limit:g} s (cluster.hang_timeout)"
            if why:
                self.replace(i, why, clients)
                count += 1
        return count

    def silence(self, number: int) -> float:
        """Seconds since the one that acts for rollout actor ``number`` gave a sign of life."""
        return self._pulse.silence(number % len(self._servers))

    def replace(self, number: int, why: str, clients: Sequence[Any]) -> None:
        """Another server in the place of the one that acts for rollout actor ``number``, as it is
        lost or hangs; of the ``clients`` (with ``number``, ``handle`` and ``alive``) those that it
        acts for are told, and get the time for a decision of the new one."""
        place = number % len(self._servers)
        old = self._servers[place]
        failures = old.failures + 1
        if failures >= self._config.max_failures:
            raise UserError(
                f"inference actor {place} failed {failures} times in a row (cluster.max_failures="
                f"{self._config.max_failures}): {why}"
            )
        self.losses.append(
            f"inference actor {place} is lost ({first_line(UserError(why))}) and replaced"
        )
        self._say(self.losses[-1])
        self._ray.kill(old.handle)
        new = self._servers[place] = self._started(place)
        new.failures = failures
        self._pulse.instead(place, new.handle)
        if self._weights is not None:
            new.handle.weights.options(concurrency_group="orders").remote(*self._weights)
        for client in clients:
            if client.number % len(self._servers) == place:
                client.alive = now()
                client.handle.serve_by.options(concurrency_group="servers").remote(new.handle)

    def close(self) -> None:
        for server in self._servers:
            self._ray.kill(server.handle)

    def _started(self, place: int) -> _Server:
        clients = -(-self._config.rollouts // self._config.inference)
        make = self._ray.remote(
            **self._seats.options("inference", place),
            concurrency_groups={"orders": 1, "watch": 1, "alive": 1, "acts": clients + 1},
        )(InferenceActor)
        handle = make.remote(self._job)
        self._seats.sits(
            "inference", place, handle.hello.options(concurrency_group="orders").remote()
        )
        handle.open.remote()  # (whom it serves asks again, and hears what is wrong)
        return _Server(handle, handle.watch.options(concurrency_group="watch").remote())
