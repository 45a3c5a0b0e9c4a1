"""The learner ranks of a run as actors of Ray: started together, called alike, and all started anew
where one is lost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from vla_rl.assembly.context import Run
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.cluster.allocation import Allocation
from vla_rl.cluster.packing import packed
from vla_rl.cluster.pulse import Pulse, now
from vla_rl.cluster.rank_actor import RankActor, RankJob
from vla_rl.cluster.session import alive_nodes, cause_of, log_tail, put
from vla_rl.cluster.worker_context import WorkerContext, require_same_code
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.spread import Spread, Unfinished

_BEAT_S = 2.0
GROUPS = {"alive": 1, "writing": 1}  # threads of a rank besides that of its updates

T = TypeVar("T")


class RankGroup:
    """The ranks of ``seats``. ``policy`` is the driver's own, which learning changes. Raises
    `UserError` where they cannot be started."""

    actor: ClassVar[type[RankActor]]
    again: ClassVar[str]  # where all of them begin when one was lost

    def __init__(self, seats: Allocation, run: Run, policy: Any) -> None:
        self._ray, self._seats, self._run, self._policy = seats.ray, seats, run, policy
        self._state: dict[str, Any] | None = None  # of what learns, at the last checkpoint
        self._actors: list[Any] = []
        self._hello: list[dict[str, Any]] = []
        self._folder = ""  # the last checkpoint that ranks wrote
        self._made = self._kept = 0  # updates, and those that this checkpoint has
        self._saving: _Saving | None = None
        self._failures = self.restarts = 0
        self._nodes = alive_nodes(self._ray)
        c = seats.config
        # (a part, that no other rank has)
        own = c.placement == "colocated" or seats.options("learner", 0)["num_gpus"] >= 1
        if c.learners > 1 and not own and run.device.type == "cuda":
            raise ConfigError(
                f"cluster.learners={c.learners} with cluster.learner_gpus={c.learner_gpus:g}: "
                "ranks need a GPU each. Set cluster.learner_gpus=1, or device=cpu"
            )
        try:
            self._begin()
        except RankLost as lost:
            self._restart(lost)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [hello["pid"] for hello in self._hello]

    @property
    def _in_parts(self) -> bool:
        """Whether the ranks write the checkpoints."""
        return self._run.config.cluster.writes_parts

    def close(self) -> None:
        """End the ranks, once a checkpoint that they write is written."""
        try:
            self._join()
        except UserError as error:
            self._run.progress.say(f"the last checkpoint could not be written: {error}")
        self._abandon()
        self._end()

    def _end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._hello = [], []

    def exchange(self, size: int) -> float:
        """Seconds in which the slowest rank has the sum of ``size`` bytes over all of them."""
        return max(self._surely(lambda: self._all("exchange", size)))

    def _surely(self, action: Callable[[], T]) -> T:
        """``action``, again and again where a rank is lost meanwhile."""
        while True:
            try:
                return action()
            except RankLost as lost:
                self._restart(lost)

    def _begin(self) -> None:
        """Start all ranks, and have them build what they learn with."""
        c, env = self._run.config, self._run.env
        size = c.cluster.learners
        job = RankJob(
            WorkerContext.of(c, size),
            None if isinstance(env, RecordedEnv) else env.embodiment.to_dict(),
            tuple(env.tasks),
            env.privileged_dim,
            0,
            size,
            c.cluster.learner_mode,
            c.cluster.hang_timeout,
        )
        self._actors = [
            self._ray.remote(**self._seats.options("learner", i), concurrency_groups=GROUPS)(
                self.actor
            ).remote(dataclasses.replace(job, index=i))
            for i in range(size)
        ]
        self._hello = self._all("hello", limit=c.cluster.start_timeout)
        for i, hello in enumerate(self._hello):
            self._seats.sits("learner", i, self._ray.put(hello))
        for hello in self._hello:
            require_same_code(hello)
        if self._in_parts:
            self._require_shared_folder()
        self._all("open", self._hello[0]["address"], limit=c.cluster.start_timeout)

    def _require_shared_folder(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self._run.dir, prefix=".seen-") as file:
            seen = self._all("sees", os.path.abspath(file.name))
        if not all(seen):
            hello = self._hello[seen.index(False)]
            raise UserError(
                f"cluster.checkpoints=parts: learner rank {seen.index(False)} on {hello['host']} "
                f"does not see the run's folder {self._run.dir.absolute()}, or may not write there, "
                "and each rank writes its part of a checkpoint itself. Set output_dir to a folder "
                "that all nodes share, or cluster.checkpoints=whole"
            )

    def _load(self) -> None:
        """All ranks go on from the last checkpoint that they wrote, with the driver's weights in
        place of its own if these are newer ones; without such a checkpoint, from the driver's
        weights and the state that it has, if there is one."""
        weights = state = None
        if self._made > self._kept or not self._folder:
            weights = self._put(packed({"weights": learned_weights(self._policy)}))
        if not self._folder and self._state is not None:
            state = self._put(packed({"state": self._state}))
        self._all("load", self._folder, weights, state, limit=math.inf)

    def _restart(self, lost: RankLost) -> None:
        """All ranks anew; what they had not written of a checkpoint they write now. Raises
        `UserError` after too many failures in a row."""
        self._join()
        while True:
            before, self._nodes = self._nodes, alive_nodes(self._ray)
            # A lost node takes a rank along, and then the one that Ray put there before it knew:
            # that is one failure.
            counted = self._failures > 0 and not before <= self._nodes
            self._failures += 0 if counted else 1
            self.restarts += 1
            most = self._run.config.cluster.max_failures
            if self._failures >= most:
                tail = (
                    log_tail(self._ray, self._hello[lost.index]["pid"])
                    if lost.index < len(self._hello)
                    else ""
                )
                raise UserError(
                    f"learner ranks failed {self._failures} times in a row "
                    f"(cluster.max_failures={most}). The last one: {lost}"
                    + (f"\nWhat it wrote at last:\n  {tail}" if tail else "")
                )
            self._run.progress.say(
                f"learner rank {lost.index} is lost ({first_line(lost)}); all {len(self._actors)} "
                f"start again, {self.again}"
            )
            self._end()
            try:
                self._begin()
                self._load()
                if self._saving is not None:
                    self._snapshot()
                    self._write(self._saving.unfinished)
                return
            except RankLost as again:
                lost = again

    # ---------------------------------------------------------------------------------- checkpoints
    def settle(self) -> None:
        """Wait until the checkpoint that is being written is there. Where a rank is lost meanwhile,
        it is written once more."""
        while self._saving is not None:
            self._join()
            if self._saving is not None and (lost := self._saving.lost) is not None:
                self._restart(lost)

    def _parts(self) -> Spread:
        """What stands for the ranks' part of a training state."""
        self.settle()
        return Spread(json.loads(self._surely(self._snapshot)), self._save)

    def _save(self, unfinished: Unfinished) -> None:
        self._write(unfinished)

    def _snapshot(self) -> str:
        return self._all("snapshot")[0]

    def _write(self, unfinished: Unfinished) -> None:
        """Have the last snapshot written, while other things go on."""
        folder, save = str(unfinished.folder.absolute()), unfinished.save

        def written() -> list[Any]:
            return self._all("write", folder, save, limit=math.inf, group="writing")

        self._saving = _Saving(unfinished, written, self._made)
        self._saving.start()

    def _join(self) -> None:
        """Wait for who writes a checkpoint; one that was not written because a rank is lost stays
        to be written, unless more was learned since."""
        if (saving := self._saving) is None:
            return
        saving.join()
        if saving.error is not None:
            self._saving = None
            saving.unfinished.abandon()
            raise saving.error
        if saving.lost is None:
            self._folder, self._kept = str(saving.unfinished.path.absolute()), saving.made
            self._state = self._saving = None
        elif saving.made != self._made:
            self._abandon()

    def _abandon(self) -> None:
        if (saving := self._saving) is not None:
            self._saving = None
            saving.unfinished.abandon()
            self._run.progress.say(
                f"{saving.unfinished.path}: a checkpoint was not written, as a learner rank was "
                "lost; the one before stays"
            )

    def _put(self, data: Any) -> Any:
        return put(self._ray, data)

    def _all(self, method: str, *given: Any, limit: float = 0.0, group: str = "") -> list[Any]:
        """What every rank answers, in a thread of its own where ``group`` names one. Raises
        `RankLost` for one that died or hangs, and what a rank raised."""
        hang = self._run.config.cluster.hang_timeout
        limit = limit or hang
        asked = [getattr(actor, method) for actor in self._actors]
        asked = [one.options(concurrency_group=group) for one in asked] if group else asked
        calls = [one.remote(*given) for one in asked]
        answers: dict[int, Any] = {}
        deadline = now() + limit
        pulse = Pulse(self._ray, self._actors, hang) if math.isinf(limit) else None
        while len(answers) < len(calls):
            open_calls = {call: i for i, call in enumerate(calls) if i not in answers}
            ready, _ = self._ray.wait(list(open_calls), num_returns=1, timeout=_BEAT_S)
            if not ready:
                silent = None if pulse is None else pulse.silent(open_calls.values())
                if silent is not None:
                    why = (
                        f"it gave no sign of life for {hang:g} s (cluster.hang_timeout) in {method}"
                    )
                    raise RankLost(silent, why)
                if now() >= deadline:
                    why = f"{method} did not end within {limit:g} s{self._seats.because()}"
                    raise RankLost(min(open_calls.values()), why)
                continue
            index = open_calls[ready[0]]
            try:
                answers[index] = self._ray.get(ready[0])
            except self._ray.exceptions.RayError as error:
                cause = cause_of(self._ray, error)
                if cause is error:
                    raise RankLost(index, f"{type(error).__name__}: {first_line(error)}") from None
                dead = self._dead()  # a rank that waited for one that died says so first
                raise RankLost(
                    index if dead is None else dead, f"{type(cause).__name__}: {cause}"
                ) from None
        return [answers[i] for i in range(len(calls))]

    def _dead(self) -> int | None:
        """The first rank that does not answer for being dead."""
        for i, hello in enumerate(self._hello):
            if hello["host"] == os.uname().nodename and not os.path.exists(f"/proc/{hello['pid']}"):
                return i
        return None


class _Saving(threading.Thread):
    """Waits until ranks have written their parts of a checkpoint, and puts it in its place.
    ``made``: updates that it has. ``lost``, ``error``: why it is not there, once the thread has
    ended."""

    def __init__(self, unfinished: Unfinished, written: Callable[[], list[Any]], made: int) -> None:
        super().__init__(daemon=True)
        self.unfinished, self.made = unfinished, made
        self.lost: RankLost | None = None
        self.error: Exception | None = None
        self._written = written

    def run(self) -> None:
        try:
            self.unfinished.finish(self._written())
        except RankLost as lost:
            self.lost = lost
        except Exception as error:
            self.error = error


class RankLost(Exception):
    """A rank died, hangs, or raised what no user can mend."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index
