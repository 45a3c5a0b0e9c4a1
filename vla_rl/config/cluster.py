"""The options of the cluster: where rollouts happen, how many of them, and how far they may run
ahead of the learner."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.bounds import Bounded, bound
from vla_rl.errors import ConfigError

# How many versions old an episode may be as it is learned from, where `RayConfig.max_staleness`
# does not say.
MODES = {"sync": 0, "pipelined": 1, "async": 2}
LEARNER_MODES = ("sharded", "replicated")
CHECKPOINTS = ("parts", "whole")
CORRECTIONS = ("truncate", "mask", "none")
SENT = ("float32", "bfloat16")
EVALUATORS = ("rollouts", "driver")
PLACEMENTS = ("free", "colocated", "disaggregated", "hybrid", "auto")
# the other options say how and where to compute
WHAT_A_CLUSTER_LEARNS_FROM = ("mode", "max_staleness", "max_late")


@dataclass
class LocalConfig:
    """Everything in this process and the simulator's own workers."""

    # sync: the only one without a cluster
    mode: str = "sync"
    # of cluster=ray; null here
    max_staleness: int | None = None
    # of cluster=ray; 0 here
    max_late: int = 0

    def __post_init__(self) -> None:
        if self.mode != "sync" or self.max_staleness or self.max_late:
            raise ConfigError(
                f"cluster.mode={self.mode} with cluster.max_staleness={self.max_staleness or 0} "
                "lets rollouts run ahead of the learner, which takes processes of their own: add "
                "cluster=ray, or leave both out"
            )

    @property
    def ahead(self) -> int:
        return 0


@dataclass
class RayConfig(Bounded, place="cluster"):
    """Rollouts in actors of Ray, each with the env, the engine and the policy that a local run has.

    ``address`` "local" starts Ray on this machine for this run; "auto" or HOST:PORT joins a
    cluster. ``rollouts`` actors share an iteration's episodes; each reserves ``rollout_cpus`` and
    ``rollout_gpus`` (0: nothing; for Ray these are numbers to plan with, not limits) and has
    ``threads`` torch threads (0: its part of the run's own).

    ``inference`` actors hold the policy and act for the rollout actors, which then need none (0:
    each acts itself).

    ``reward_workers`` actors score episodes as they end (0: the driver does).

    ``learners`` ranks, actors as well, make each update of SFT and RL together (0: the driver
    learns), with their weights spread ("sharded": FSDP2) or whole ("replicated").

    ``placement`` says which actors share a device (`placement.py`): ``free`` none, each is where
    Ray finds what it reserves; ``colocated`` a rank and those that act, which take turns;
    ``disaggregated`` each has its own; ``hybrid`` these are on other nodes than the rollout actors,
    which are on ``env_nodes`` nodes, at least one on each; ``auto`` chooses one of them and the
    numbers by the service times of ``times``, a run's folder or a file.

    ``mode`` sync: rollouts wait for the learner. pipelined, async: they overlap, and no episode
    starts that could be more than ``max_staleness`` versions old when it is learned from (None: 0,
    1 and 2 in the three modes). What older policies chose is then weighed by ``correction``, as
    PPO's ``algorithm.behavior_weight`` says it, where that is none. A checkpoint keeps the episodes
    that wait to be learned from, unless ``save_ready`` is false: then they run again after a
    resume. ``max_late`` above 0 cuts batches off: slow episodes go on, and are learned from up to
    so many iterations later.

    ``sent`` bfloat16: actors act with weights rounded to that, half the bytes of float32 ones; the
    learner keeps its own.

    Held-out episodes run in the rollout actors, too (``evaluate``), but where these run ahead of
    the learner; the driver evaluates then.

    An actor gets ``start_timeout`` seconds to be ready, and one that decides nothing for
    ``hang_timeout`` seconds is taken for dead. Dead ones are replaced and their episodes run again;
    after ``max_failures`` in a row, without an episode in between, the run ends.
    ``object_store_mib`` is what a Ray that is started here keeps of objects in memory; the rest
    goes to disk. ``trusted_network`` joins a cluster that asks for no token.
    """

    # whether rollouts wait for the learner
    mode: str = bound("sync", choices=tuple(MODES))
    max_staleness: int | None = bound(None, ge=0)
    max_late: int = bound(0, ge=0)
    correction: str = bound("truncate", choices=CORRECTIONS)
    save_ready: bool = True
    # what weights are sent as
    sent: str = bound("float32", choices=SENT)
    # where held-out episodes run
    evaluate: str = bound("rollouts", choices=EVALUATORS)
    address: str = "local"
    # which actors share a device
    placement: str = bound("free", choices=PLACEMENTS)
    # nodes of the rollout actors under placement=hybrid, at least one actor on each
    env_nodes: int = bound(0, ge=0)
    # a run's folder or a file with the service times that placement=auto plans with
    times: str = ""
    # rollout actors
    rollouts: int = bound(1, ge=1)
    # CPUs that each rollout actor reserves
    rollout_cpus: float = bound(0.0, ge=0)
    # GPUs that each rollout actor reserves
    rollout_gpus: float = bound(0.0, ge=0)
    inference: int = bound(0, ge=0)
    # CPUs that each inference actor reserves
    inference_cpus: float = bound(0.0, ge=0)
    # GPUs that each inference actor reserves
    inference_gpus: float = bound(0.0, ge=0)
    reward_workers: int = bound(0, ge=0)
    # CPUs that each reward worker reserves
    reward_cpus: float = bound(0.0, ge=0)
    # GPUs that each reward worker reserves
    reward_gpus: float = bound(0.0, ge=0)
    learners: int = bound(0, ge=0)
    # weights spread over the ranks, or whole on each
    learner_mode: str = bound("sharded", choices=LEARNER_MODES)
    # whether ranks write their parts of a checkpoint, or the driver all of it
    checkpoints: str = bound("parts", choices=CHECKPOINTS)
    # CPUs that each rank reserves
    learner_cpus: float = bound(0.0, ge=0)
    # GPUs that each rank reserves
    learner_gpus: float = bound(0.0, ge=0)
    threads: int = bound(0, ge=0)
    # seconds until an actor must be ready
    start_timeout: float = bound(300.0, gt=0)
    # seconds without a decision after which an actor counts as dead
    hang_timeout: float = bound(300.0, gt=0)
    max_failures: int = bound(3, ge=1)
    # MiB of objects that a Ray started here keeps in memory
    object_store_mib: int = bound(256, ge=75)
    # start Ray's web page of a Ray that is started here
    dashboard: bool = False
    trusted_network: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "async" and self.max_staleness not in (None, MODES[self.mode]):
            raise ConfigError(
                f"cluster.max_staleness={self.max_staleness}: cluster.mode={self.mode} is "
                f"staleness {MODES[self.mode]}. Use cluster.mode=async to choose it"
            )
        if self.max_late and self.max_late >= self.ahead:
            raise ConfigError(
                f"cluster.max_late={self.max_late} needs episodes to spare, which start before "
                "their iteration: use cluster.mode=async with "
                f"cluster.max_staleness={self.max_late + 1} or more"
            )
        for part in ("rollout", "inference", "learner", "reward"):
            gpus = getattr(self, f"{part}_gpus")
            if gpus > 1 and gpus % 1:
                raise ConfigError(
                    f"cluster.{part}_gpus={gpus:g}: an actor has whole GPUs, or a part of one"
                )
        self._check_placement()
        if self.inference > self.rollouts:
            raise ConfigError(
                f"cluster.inference={self.inference} actors would act for "
                f"cluster.rollouts={self.rollouts}: use at most as many"
            )
        host, colon, port = self.address.rpartition(":")
        if self.address not in ("local", "auto") and not (host and colon and port.isdigit()):
            raise ConfigError(
                f"cluster.address={self.address!r} must be local (start Ray here), auto (join the "
                "one on this machine) or HOST:PORT (of the head node, such as 10.0.0.1:6379)"
            )

    def _check_placement(self) -> None:
        given = f"cluster.placement={self.placement}"
        if self.placement == "auto":
            numbers = {"rollouts": 1, "inference": 0, "learners": 0, "env_nodes": 0}
            if said := [name for name, own in numbers.items() if getattr(self, name) != own]:
                raise ConfigError(
                    f"{given} chooses the numbers of actors: leave cluster.{said[0]} "
                    "out, or name a placement"
                )
        elif self.placement != "free" and not self.learners:
            raise ConfigError(
                f"{given} says where learner ranks are: add cluster.learners=1 or more, or use free"
            )
        if self.placement in ("auto", "colocated"):
            shares = [
                f"cluster.{name}_gpus" for name in ("rollout", "inference", "reward", "learner")
            ]
            if said := [name for name in shares if getattr(self, name.partition(".")[2])]:
                raise ConfigError(
                    f"{given} gives each rank a GPU and divides it among those that "
                    f"take turns: leave {', '.join(said)} out"
                )
        if self.placement == "colocated" and self.mode != "sync":
            raise ConfigError(
                f"{given} has learning and acting take turns on each device, and "
                f"cluster.mode={self.mode} has them overlap: use cluster.mode=sync, "
                "or cluster.placement=disaggregated"
            )
        if self.placement == "hybrid":
            if not (self.env_nodes and self.inference):
                raise ConfigError(
                    f"{given} has rollout actors on nodes of their own, without "
                    "models: say on how many with cluster.env_nodes, and how many "
                    "actors act for them with cluster.inference"
                )
            self.rollouts = max(self.rollouts, self.env_nodes)
        elif self.env_nodes:
            raise ConfigError(
                f"cluster.env_nodes={self.env_nodes} goes with cluster.placement=hybrid"
            )
        if self.times and self.placement != "auto":
            raise ConfigError(f"cluster.times={self.times} goes with cluster.placement=auto")

    @property
    def ahead(self) -> int:
        """How many versions old a decision may be as it is learned from."""
        return MODES[self.mode] if self.max_staleness is None else self.max_staleness

    @property
    def has_ranks(self) -> bool:
        """Whether learner ranks make the updates."""
        return bool(self.learners) or self.placement == "auto"

    @property
    def writes_parts(self) -> bool:
        """Whether each rank writes its own part of a checkpoint (with one, or where each has all,
        there are none)."""
        return self.learners > 1 and self.learner_mode == "sharded" and self.checkpoints == "parts"
