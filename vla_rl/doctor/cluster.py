"""``vla-rl cluster check``: what a run asks of a cluster, tried before it is begun.

Ray is started or joined as the run would. Every node says what it is made of and whether it sees
the run's folder; then the run's own actors start, decide once in as few episodes as can be learned
from, add up numbers over the ranks, and make one update. Nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_rl import build
from vla_rl.assembly.context import Run, start_checkpoint
from vla_rl.assembly.folder import made_start
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.checkpoint import save_checkpoint
from vla_rl.checks.cluster import check_room
from vla_rl.checks.options import check_run
from vla_rl.cluster import worker_context
from vla_rl.cluster.collector import RayCollector
from vla_rl.cluster.learner import GroupLearner
from vla_rl.cluster.placement import ROLES
from vla_rl.cluster.session import alive, amount, ray_session, require_ray
from vla_rl.config import RunConfig
from vla_rl.config.cluster import MODES
from vla_rl.doctor.machine import FAIL, MISSING, OK, Check
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.interfaces import Policy
from vla_rl.learning.episode_queue import learned_weights
from vla_rl.monitoring.progress import Progress
from vla_rl.options import AlgorithmOptions, PolicyOptions, methods, view
from vla_rl.types import EmbodimentSpec, EpisodeSpec, RolloutResult, Trajectory

LIMIT_S = 120.0
_SHM = Path("/dev/shm")
_PROBE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}


# --------------------------------------------------------------------------------------- a node
@dataclass(frozen=True)
class Probe:
    """What a node is asked. ``token`` is the content that the driver wrote to ``file``."""

    place: worker_context.WorkerContext
    file: str
    token: str

    def answer(self) -> dict[str, Any]:
        """Where this process runs, with what, and what it sees; ``renderer`` is what is wrong
        with the run's env there (empty: nothing)."""
        try:
            shared = Path(self.file).read_text() == self.token and Path(self.place.folder).is_dir()
        except OSError:
            shared = False
        shm = shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0
        wrong = self._renderer() if shared else ""
        return worker_context.hello() | {"shared": shared, "renderer": wrong, "shm": shm}

    def _renderer(self) -> str:
        try:
            config = self.place.enter().config
            if methods(config.env).check_machine is not None:
                build.attribute("sim.calls:check_machine")(config.env, config.slots.python)
        except UserError as error:
            return str(error)
        return ""


def checked_nodes(
    nodes: Sequence[Mapping[str, Any]], answers: Mapping[str, Any], folder: Path, drawing: int = 0
) -> Iterator[Check]:
    """Of every node (as Ray tells of it) what it is made of, its shared memory, the run's folder
    and what draws. ``answers``: node id → that of its `Probe`, or why there is none; ``drawing``:
    on how many of them the env must run (0: on all)."""
    draw = sum(not isinstance(found, str) and not found["renderer"] for found in answers.values())
    dark = MISSING if 0 < drawing <= draw else FAIL
    for node in nodes:
        found = answers[node["NodeID"]]
        name = f"node {node['NodeManagerHostname']}"
        if isinstance(found, str):
            yield Check(
                name,
                FAIL,
                f"an actor could not start there: {found}",
                "install vla-rl there as here, and start Ray there again",
            )
            continue
        made = {k: found["versions"].get(k, "none") for k in ("python", "torch", "ray", "vla-rl")}
        detail = ", ".join(f"{k} {v}" for k, v in made.items())
        try:
            worker_context.require_same_code(found)
        except UserError as error:
            detail, _, fix = str(error).partition(". ")  # (what is wrong, and the remedy)
            yield Check(name, FAIL, detail, fix)
        else:
            yield Check(name, OK, f"{detail}; {amount(node)}")
        if not found["shared"]:
            yield Check(
                name,
                FAIL,
                f"it does not see what this machine wrote to {folder}",
                "mount the same folder at the same place on all nodes, or set output_dir to one",
            )
        if found["renderer"]:
            yield Check(name, dark, found["renderer"], "vla-rl doctor, on that node")
        store = _store(node)
        if found["shm"] < store:
            yield Check(
                name,
                FAIL,
                f"/dev/shm has {_size(found['shm'])} for an object store of {_size(store)}, which "
                "Ray therefore keeps on the disk",
                f"docker run --shm-size={math.ceil(1.1 * store / 2**30)}g (Kubernetes: an emptyDir "
                "of medium Memory at /dev/shm)",
            )


def _store(node: Mapping[str, Any]) -> int:
    """The bytes of its object store."""
    return int(node["Resources"].get("object_store_memory", 0))


def _asked(
    ray: Any, nodes: Sequence[Mapping[str, Any]], probe: Probe, seconds: float
) -> dict[str, Any]:
    """Node id → its answer, or why it gave none within ``seconds``."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    calls = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ask = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_answer)
        calls[node["NodeID"]] = ask.remote(probe)
    deadline, found = time.monotonic() + seconds, {}
    for name, call in calls.items():
        try:
            found[name] = ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            found[name] = f"no answer within {seconds:.0f} s"
        except ray.exceptions.RayError as error:
            found[name] = first_line(error)
    return found


def _answer(probe: Probe) -> dict[str, Any]:
    return probe.answer()


# ------------------------------------------------------------------------------------- the smallest
def smallest(config: RunConfig, folder: Path, seconds: float) -> RunConfig:
    """The run with one slot in each rollout actor, in ``folder``, without rollouts ahead; `hasty`
    for ``seconds``."""
    c, one = config.cluster, config.slots
    cluster = dataclasses.replace(
        c, mode="sync", max_staleness=MODES["sync"], max_late=0, max_failures=1
    )
    slots = dataclasses.replace(one, workers=min(1, one.workers), slots_per_worker=1)
    small = dataclasses.replace(
        config, output_dir=str(folder), name="check", slots=slots, cluster=cluster
    )
    return hasty(small, seconds)


def hasty(config: RunConfig, seconds: float) -> RunConfig:
    """The run, which waits no longer than ``seconds`` for any actor."""
    c = config.cluster
    start, hang = min(c.start_timeout, seconds), min(c.hang_timeout, seconds)
    cluster = dataclasses.replace(c, start_timeout=start, hang_timeout=hang)
    return dataclasses.replace(config, cluster=cluster)


def few_episodes(config: RunConfig, task: str) -> list[EpisodeSpec]:
    """As few as make a batch: whole groups, one episode at least for each rollout actor and each
    rank, two at least."""
    c, size = config.cluster, max(1, config.rl.group_size)
    groups = math.ceil(max(2, c.rollouts, c.learners) / size)
    return [
        EpisodeSpec(task, i // size, seed=i, group_id=i // size, rollout_id=f"check-{i}")
        for i in range(groups * size)
    ]


def iteration_bytes(config: RunConfig, per_decision: float, horizon: int, weights: int) -> int:
    """At most what an iteration keeps in the object store: every episode to its time limit, those
    of iterations that run ahead, and the weights of two versions."""
    steps = config.rollout.replan_steps or view(config.policy, PolicyOptions).chunk_length or 1
    decisions = math.ceil(horizon / steps) + 1  # (the last picture is of none)
    episodes = config.rl.episodes_per_iteration * (1 + config.cluster.ahead)
    return round(episodes * decisions * per_decision) + 2 * weights


def _begun(run: Run, own: RunConfig) -> str:
    """A checkpoint for the check to start from: the run's own start, or a new policy where it
    has none yet."""
    made = Path(own.checkpoint) if own.checkpoint else made_start(own, own.run_dir)
    if made is None:
        return str(start_checkpoint(run).absolute())
    if own.checkpoint or made.exists():
        return str(made.absolute())
    embodiment: EmbodimentSpec = run.env.embodiment
    torch.manual_seed(own.seed)
    policy = Policy.class_of(build.implementation("policy", own.policy_type)).from_statistics(
        own.policy,
        embodiment,
        _spread(embodiment.action_low, embodiment.action_high),
        _spread([-1.0] * embodiment.proprio_dim, [1.0] * embodiment.proprio_dim),
    )
    save_checkpoint(run.dir / "start", policy, keep_last_good=False)
    return str((run.dir / "start").absolute())


def _spread(low: Sequence[float], high: Sequence[float]) -> dict[str, list[float]]:
    """Statistics of numbers that are spread evenly."""
    low, high = list(low), list(high)
    mean = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    std = [(b - a) / 12**0.5 for a, b in zip(low, high, strict=True)]
    return {"low": low, "high": high, "mean": mean, "std": std, "q01": low, "q99": high}


# -------------------------------------------------------------------------------------- the checks
def check_run_on_cluster(config: RunConfig, limit_s: float = LIMIT_S) -> Iterator[Check]:
    """One finding after the other; what stands on a failed one is left out. Raises `ConfigError`
    where the run asks for no cluster."""
    if config.cluster_type != "ray":
        raise ConfigError(
            "vla-rl cluster check tries a run on a cluster, and this one has cluster=local: add "
            "cluster=ray, and cluster.address=HOST:PORT where one is running"
        )
    require_ray()
    check_run(config)
    yield from _Looked(config, limit_s).all()


class _Looked:
    """A check under way."""

    def __init__(self, config: RunConfig, limit_s: float) -> None:
        self._config, self._limit = config, limit_s
        self._deadline = time.monotonic() + limit_s
        self._broken = False

    @property
    def _left(self) -> float:
        return max(5.0, self._deadline - time.monotonic())

    def all(self) -> Iterator[Check]:
        with contextlib.ExitStack() as stack:
            started = time.perf_counter()
            try:
                ray = stack.enter_context(ray_session(self._config.cluster))
            except UserError as error:
                yield self._failed("ray", error)
                return
            address, nodes = self._config.cluster.address, alive(ray)
            where = "started here" if address == "local" else f"joined at {address}"
            seconds = time.perf_counter() - started
            yield Check("ray", OK, f"{where} in {seconds:.0f} s, {_nodes(len(nodes))}")
            place = Path(self._config.output_dir)
            place.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".cluster-check-", dir=place.absolute()))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            yield from self._nodes(ray, nodes, folder)
            if not self._broken and "rl" in self._config.phases:
                yield from self._run(ray, folder)
            elif not self._broken:
                yield Check("update", MISSING, "not tried: the run has no phase rl")

    def _nodes(self, ray: Any, nodes: list[dict[str, Any]], folder: Path) -> Iterator[Check]:
        token, file = secrets.token_hex(16), folder / "token"
        file.write_text(token)
        c = self._config
        probe = Probe(worker_context.WorkerContext.of(c, 1), str(file), token)
        answers = _asked(ray, nodes, probe, self._left)
        bad = 0
        for check in checked_nodes(nodes, answers, folder.parent, c.cluster.env_nodes):
            bad += check.status == FAIL
            # (an object store on the disk is slow, and works)
            self._broken |= check.status == FAIL and "/dev/shm" not in check.detail
            yield check
        if not bad:
            yield Check("folder", OK, f"seen by {_nodes(len(nodes))}: {folder.parent}")
        if c.device.startswith("cuda") and not any(amount(node).gpus for node in nodes):
            self._broken = True
            fix = "start Ray with --num-gpus where it does not find them, or set device=cpu"
            yield Check("gpu", FAIL, f"device={c.device}, and no node has a GPU for Ray", fix)

    def _run(self, ray: Any, folder: Path) -> Iterator[Check]:
        small = smallest(self._config, folder, self._left)
        with contextlib.ExitStack() as stack:
            run = Run(small, None, Progress(io.StringIO()), {}, stack)  # type: ignore[arg-type]
            try:
                check_room(self._config)
            except UserError as error:
                yield self._failed("room", error)
                return
            try:
                run.config = dataclasses.replace(small, checkpoint=_begun(run, self._config))
                policy = trained_policy(run)
            except UserError as error:
                yield self._failed("policy", error)
                return
            try:
                collector = RayCollector(run, policy, decisions=1)
            except UserError as error:
                yield self._failed("actors", error)
                return
            stack.callback(collector.close)
            yield Check("actors", OK, _seats(run))
            results: list[RolloutResult] = []
            yield self._tried("rollout", lambda: _rolled_out(run, collector, results))
            if results:
                yield self._store(ray, run, policy, results[0])
                yield from self._update(run, policy, results[0].trajectories)

    def _store(self, ray: Any, run: Run, policy: Any, result: RolloutResult) -> Check:
        c = self._config
        pictures = sum(len(t) + 1 for t in result.trajectories)
        per_decision = result.stats["cluster/bytes_episodes"] / pictures
        weights = sum(x.numel() * x.element_size() for x in learned_weights(policy).values())
        horizon = max(task.horizon for task in run.train_tasks)
        need = iteration_bytes(c, per_decision, horizon, weights)
        has = sum(map(_store, alive(ray)))
        detail = (
            f"an iteration takes up to {_size(need)} ({_size(per_decision)} a decision), and the "
            f"nodes keep {_size(has)}"
        )
        if need <= has:
            return Check("object store", OK, detail)
        mib = math.ceil(1.2 * need / 2**20)
        fix = (
            f"cluster.object_store_mib={mib}"
            if c.cluster.address == "local"
            else f"ray start --object-store-memory, {mib << 20} bytes over all nodes"
        )
        return Check("object store", FAIL, f"{detail}; the rest goes to the disk", fix)

    def _update(self, run: Run, policy: Any, episodes: list[Trajectory]) -> Iterator[Check]:
        ranks = run.config.cluster.learners
        run.config = hasty(run.config, self._left)
        with contextlib.ExitStack() as stack:
            learner: Any = None
            if ranks:
                try:
                    learner = GroupLearner(run.seats, run, policy)
                except UserError as error:
                    yield self._failed("ranks", error)
                    return
                stack.callback(learner.close)
            if ranks > 1:
                yield self._tried("all-reduce", lambda: _exchanged(run, policy, learner, ranks))
            yield self._tried(
                "update", lambda: _learned(learner or learner_of(run, policy), episodes)
            )

    def _tried(self, name: str, action: Callable[[], str]) -> Check:
        started = time.perf_counter()
        try:
            detail = action()
        except (UserError, RuntimeError) as error:  # (torch has one kind for all that fails)
            return self._failed(name, error)
        return Check(name, OK, f"{detail} ({time.perf_counter() - started:.1f} s)")

    def _failed(self, name: str, error: Exception) -> Check:
        self._broken = True
        slow = "_timeout" in str(error) and time.monotonic() > self._deadline - 5.0
        fix = f"give the check more time, such as --limit {5 * self._limit:.0f}" if slow else ""
        return Check(name, FAIL, str(error), fix)


def _rolled_out(run: Run, collector: RayCollector, results: list[RolloutResult]) -> str:
    plan = few_episodes(run.config, run.train_tasks[0].task_id)
    collector.publish(0)
    results.append(collector.collect(plan))
    return f"{len(plan)} episodes of one decision each"


def _seats(run: Run) -> str:
    """Who is where."""
    c = run.seats.config
    parts = [
        f"{n} {role}{f' with {gpus:g} GPU each' if (gpus := run.seats.gpus(role)) else ''}"
        for role, (_, option) in ROLES.items()
        if (n := getattr(c, option))
    ]
    return f"{', '.join(parts)} (cluster.placement={c.placement})"


def _exchanged(run: Run, policy: Any, learner: GroupLearner, ranks: int) -> str:
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    size = _PROBE_BYTES[backend]
    seconds = learner.exchange(size)
    # what every link carries in a ring (as nccl-tests count it)
    speed = 2 * (ranks - 1) / ranks * size / seconds
    gradients = sum(4 * p.numel() for p in policy.parameters() if p.requires_grad)
    return (
        f"{ranks} ranks over {backend}: {_size(speed)}/s, so that the gradients of an update "
        f"({_size(gradients)}) take {gradients / size * seconds:.2g} s"
    )


def _learned(learner: Any, episodes: list[Trajectory]) -> str:
    """One update, of rewards that teach something."""
    rewards = [torch.full((len(t),), float(i % 2)) for i, t in enumerate(episodes)]
    flat = torch.cat(rewards)
    names = view(learner.config, AlgorithmOptions).reward_names
    learner.learn(episodes, rewards, dict.fromkeys(names, flat) if names else flat)
    return f"{len(flat)} decisions learned from"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
