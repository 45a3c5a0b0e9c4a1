"""The options of a run itself: collection, simulator slots, the online loop, where its metrics
go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError

MOST_SLOTS = 4096  # per worker
RAM_BYTES = 2 << 30  # of a replay
WANDB_MODES = ("auto", "online", "offline", "off")


@dataclass
class CollectConfig(Bounded, place="collect"):
    """Scripted demonstrations. ``action_noise`` is the std of the Gaussian added to the executed
    action, as a share of the action range's half-width; the recorded label stays clean, so
    demonstrations show recoveries (DART). ``speed`` scales the expert's motion: people demonstrate
    more slowly than a robot can move. ``horizon`` control steps end a demonstration (0: the env's
    own limit); slow ones need more than the task allows a policy. Of a published dataset
    (``dataset=/path``) ``episodes_per_task`` are read at most, without control steps that do
    nothing unless ``keep_noops``.

    ``policy``: a checkpoint that demonstrates in the expert's place; of ``oversample`` times as
    many successes the smoothest are kept, and it takes its most likely actions unless
    ``sample``."""

    # demonstrations of each task; of a published dataset at most so many
    episodes_per_task: int = bound(100, ge=1)
    action_noise: float = bound(0.3, ge=0)
    speed: float = bound(1.0, gt=0, le=1, hint="a share of the expert's own")
    horizon: int = bound(0, ge=0)
    # processes that demonstrate
    workers: int = bound(2, ge=1)
    # keep successful demonstrations alone, and repeat those that fail
    only_success: bool = True
    # pictures as H.264 instead of PNG
    video: bool = False
    # keep control steps of a published dataset that do nothing
    keep_noops: bool = False
    # a checkpoint, or the address of who serves one (ws://HOST:PORT), that demonstrates in the
    # expert's place; empty: the expert does
    policy: str = ""
    # successes per one that is kept, the smoothest first; 1: all are kept
    oversample: float = bound(1.0, ge=1, hint="successes per one that is kept")
    # that policy samples its actions instead of taking the likeliest
    sample: bool = False
    # std of the noise on what that policy's actions are executed with, as a share of the half-range,
    # so for relative actions; grippers are left alone and the labels stay clean
    policy_noise: float = bound(0.0, ge=0)
    # share of the time limit in which the policy beneath that of collect.policy acts first; 0:
    # never
    base_share: float = bound(0.0, ge=0, le=1, hint="a share of the time limit; 0: never")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_share and not self.policy:
            raise ConfigError(
                f"collect.base_share={self.base_share} lets the policy beneath that of "
                "collect.policy act first: name its checkpoint with collect.policy=FOLDER"
            )
        if self.policy_noise and not self.policy:
            raise ConfigError(
                f"collect.policy_noise={self.policy_noise} disturbs what collect.policy does: name "
                "its checkpoint with collect.policy=FOLDER (collect.action_noise is the experts')"
            )


@dataclass
class SlotsConfig(Bounded, place="slots"):
    """Where the env's slots live. ``workers`` = 0 runs the simulator in the main process
    (deterministic order).

    ``python`` is the executable of the workers (empty: this one), for a simulator whose packages do
    not go with these.
    """

    workers: int = bound(2, ge=0)
    # episodes that run at a time in each worker
    slots_per_worker: int = bound(8, ge=1, le=MOST_SLOTS)
    # seconds without an answer after which a worker is replaced
    hang_timeout: float = bound(120.0, gt=0)
    # replacements of a worker before the run ends
    max_restarts: int = bound(5, ge=0)
    python: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.python and self.workers == 0:
            raise ConfigError(
                f"slots.python={self.python} is what worker processes run under, and "
                "slots.workers=0 starts none: set slots.workers, or leave slots.python empty"
            )


@dataclass
class ReplayConfig(Bounded, place="replay"):
    """The replay of algorithms that have one: ``ram_bytes`` of it are kept in RAM, small columns
    first; the rest is read from the run's folder. ``offline``: folders of other runs (or their
    replays), whose episodes are there before the first of this one; of each batch
    ``algorithm.offline_share`` are theirs."""

    ram_bytes: int = bound(RAM_BYTES, ge=0, hint="0: all is read from the disk")
    offline: list[str] = field(default_factory=list)


@dataclass
class ConcurrentConfig(Bounded, place="rl.concurrent"):
    """An actor and a learner in two processes (``rl.rhythm=concurrent``).

    Weights are published every ``publish_every`` updates, and whenever nothing is left to learn;
    the actor takes the newest before every ``swap_every`` episodes (0: once an iteration), so that
    each episode has one version. While more than ``max_ahead`` updates are owed the actor waits (0:
    it never does). The learner's process has ``threads`` torch threads and a priority lower by
    ``nice``; one that dies is started again, at most ``restarts`` times, and so is one that makes
    no update in ``hang_seconds`` (0: it may take any time).
    """

    # updates between two publications of the weights
    publish_every: int = bound(50, ge=1)
    # episodes after which the actor takes the newest weights; 0: once an iteration
    swap_every: int = bound(0, ge=0)
    max_ahead: int = bound(0, ge=0)
    # torch threads of the learner's process
    threads: int = bound(1, ge=1)
    # how much lower its priority is
    nice: int = bound(5, ge=0, le=19, hint="0: as the actor; 19: only what is left over")
    # times that it is started again after it died
    restarts: int = bound(3, ge=0)
    # seconds without an update after which it is started again; 0: any time
    hang_seconds: float = bound(600.0, ge=0)


RESTART_SOURCES = DEMONSTRATIONS, SUCCESSES, FAILURES = "demonstrations", "successes", "failures"


@dataclass
class RestartsConfig(Bounded, place="rl.restarts"):
    """Episodes that begin in the middle of another one (`vla_rl.learning.restarts`): ``share`` of
    each iteration's episodes (or groups), in a state along the ``sources`` demonstrations,
    successes and failures (of the policy's own), of which the newest ``episodes`` of each task are
    kept; at most ``latest`` of the time limit is over by then."""

    # share of an iteration's episodes (or groups) that begin in the middle of another; 0: none
    share: float = bound(0.0, ge=0, le=1)
    # demonstrations, successes, failures: what they begin in
    sources: list[str] = several([DEMONSTRATIONS], choices=RESTART_SOURCES, least=1)
    # newest episodes of each task that are kept for it
    episodes: int = bound(64, ge=1)
    # share of the time limit that may be over by then
    latest: float = bound(0.5, gt=0, lt=1)

    @property
    def used(self) -> list[str]:
        """The sources that episodes begin from; none where no episode begins in the middle."""
        return self.sources if self.share else []


@dataclass
class RLConfig(Bounded, place="rl"):
    """The online loop. ``episodes_per_iteration`` counts episodes, group members included.

    ``init_states`` is the number of training initial states per task (0: unlimited, every episode
    or group a new one). ``dynamic_sampling`` learns from groups with a success rate in
    [``success_low``, ``success_high``] alone: it rolls out up to ``max_sampling_rounds`` times to
    fill an iteration, and keeps surplus groups for later iterations, at most ``max_staleness`` of
    them on. ``dynamic_sampling_by`` "reward" keeps groups whose rewards differ instead: for a
    shaped reward, which tells the failures of a group apart.

    ``checkpoints/rl`` is written every ``checkpoint_every`` iterations. ``keep_checkpoints`` of
    these stay as ``checkpoints/rl_<iteration>`` too (0: none), the older ones go. ``keep_best``
    keeps the policy of the best held-out evaluation as ``checkpoints/best``. Both hold weights
    alone.

    ``guard`` off, warn or stop: what the run does where its first ``guard_iterations`` (0: off)
    after the critic's warm-up bring almost no success (95 % upper bound below ``guard_success``) or
    do not move the policy. ``fallback`` "progress": without success it then goes on with a progress
    reward learned from the demonstrations, with the keys ``fallback_reward`` of ``reward=process``.

    ``rhythm`` alternate: collect an iteration, then learn from it. concurrent: a learner in a
    process of its own learns from a replay meanwhile (``concurrent``).
    """

    # rounds of rolling out and learning
    iterations: int = bound(20, ge=0)
    episodes_per_iteration: int = bound(64, ge=1)
    # episodes of one task and initial state that are compared with each other
    group_size: int = bound(1, ge=1)
    init_states: int = bound(0, ge=0)
    # held-out evaluation every so many iterations; 0: never
    eval_every: int = bound(0, ge=0)
    checkpoint_every: int = bound(1, ge=1)
    keep_checkpoints: int = bound(0, ge=0)
    keep_best: bool = True
    # learn only from groups with a success rate from success_low to success_high
    dynamic_sampling: bool = False
    # what has to differ within a group
    dynamic_sampling_by: str = bound("success", choices=("success", "reward"))
    # least success rate of such a group
    success_low: float = bound(0.1, ge=0, le=1)
    # largest one
    success_high: float = bound(0.9, ge=0, le=1)
    # rollouts at most to fill an iteration with such groups
    max_sampling_rounds: int = bound(10, ge=1)
    # iterations for which surplus groups are kept
    max_staleness: int = bound(4, ge=0)
    # what the run does where its first iterations teach nothing
    guard: str = bound("warn", choices=("off", "warn", "stop"))
    # first iterations, after the critic's warm-up, that the guard looks at; 0: none
    guard_iterations: int = bound(5, ge=0)
    # success rate that the 95 % upper bound must reach there
    guard_success: float = bound(0.03, gt=0, le=1)
    # the reward that it goes on with there
    fallback: str = bound("none", choices=("none", "progress"))
    fallback_reward: dict[str, Any] = field(default_factory=dict)
    # whether episodes and updates take turns
    rhythm: str = bound("alternate", choices=("alternate", "concurrent"))
    concurrent: ConcurrentConfig = field(default_factory=ConcurrentConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)

    def __post_init__(self) -> None:
        if self.guard == "False":  # YAML reads a bare off as false
            self.guard = "off"
        super().__post_init__()
        if self.rhythm == "concurrent" and self.dynamic_sampling:
            raise ConfigError(
                "rl.rhythm=concurrent learns from every episode, and rl.dynamic_sampling=true "
                "chooses among those of an iteration: leave one of them out"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ConfigError(
                "rl.dynamic_sampling=true compares group members: set rl.group_size >= 2, "
                f"got {self.group_size}"
            )
        if self.success_low > self.success_high:
            raise ConfigError(
                f"rl.success_low={self.success_low} must be at most "
                f"rl.success_high={self.success_high}"
            )
        if self.episodes_per_iteration % self.group_size:
            raise ConfigError(
                f"rl.episodes_per_iteration={self.episodes_per_iteration} must be a multiple of "
                f"rl.group_size={self.group_size}"
            )
        if self.fallback == "none" and self.fallback_reward:
            raise ConfigError(
                f"rl.fallback_reward={self.fallback_reward} says how to learn a reward that "
                "rl.fallback=none never uses: set rl.fallback=progress, or leave it out"
            )
        if self.fallback != "none" and (self.guard == "off" or not self.guard_iterations):
            raise ConfigError(
                f"rl.fallback={self.fallback} waits for what the guard finds, and the guard is "
                "off: set rl.guard=warn and rl.guard_iterations=5"
            )


@dataclass
class WandbConfig(Bounded, place="wandb"):
    """Weights & Biases. ``mode`` auto: online where the user is logged in, else offline; off: not
    at all. ``wandb=false``, ``wandb=true`` and ``wandb=offline`` set it too. ``name`` (empty: the
    run's own)."""

    # auto: online where the user is logged in, else offline
    mode: str = bound("auto", choices=WANDB_MODES, hint="or wandb=true, wandb=false")
    # the project that runs are logged to
    project: str = "vla-rl"
    # the user or team that owns it; empty: the account's own
    entity: str = ""
    name: str = ""
    # labels of the run
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # YAML reads a bare off as false
        self.mode = {"True": "auto", "False": "off"}.get(self.mode, self.mode)
        super().__post_init__()
