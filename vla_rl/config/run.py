"""The options of a run itself: collection, simulator slots, the online loop, where its metrics
go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_rl.errors import ConfigError

MOST_SLOTS = 4096  # per worker
RAM_BYTES = 2 << 30  # of a replay
WANDB_MODES = ("auto", "online", "offline", "off")


@dataclass
class CollectConfig:
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
    episodes_per_task: int = 100
    action_noise: float = 0.3
    speed: float = 1.0
    horizon: int = 0
    # processes that demonstrate
    workers: int = 2
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
    oversample: float = 1.0
    # that policy samples its actions instead of taking the likeliest
    sample: bool = False
    # share of the time limit in which the policy beneath that of collect.policy acts first; 0:
    # never
    base_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.base_share <= 1.0:
            raise ConfigError(
                f"collect.base_share={self.base_share} is a share of the time limit: "
                "give 0 (never) to 1"
            )
        if self.base_share and not self.policy:
            raise ConfigError(
                f"collect.base_share={self.base_share} lets the policy beneath that of "
                "collect.policy act first: name its checkpoint with collect.policy=FOLDER"
            )
        if self.oversample < 1.0:
            raise ConfigError(
                f"collect.oversample={self.oversample} must be 1 or more: successes "
                "per one that is kept"
            )
        if (
            self.episodes_per_task < 1
            or self.workers < 1
            or self.action_noise < 0
            or self.horizon < 0
        ):
            raise ConfigError(
                "collect needs episodes_per_task >= 1, workers >= 1, action_noise >= 0 and horizon "
                f">= 0, got {self.episodes_per_task}, {self.workers}, {self.action_noise}, "
                f"{self.horizon}"
            )
        if not 0.0 < self.speed <= 1.0:
            raise ConfigError(
                f"collect.speed is the share of the expert's own speed, in (0, 1], got {self.speed}"
            )


@dataclass
class SlotsConfig:
    """Where the env's slots live. ``workers`` = 0 runs the simulator in the main process
    (deterministic order).

    ``python`` is the executable of the workers (empty: this one), for a simulator whose packages do
    not go with these.
    """

    workers: int = 2
    # episodes that run at a time in each worker
    slots_per_worker: int = 8
    # seconds without an answer after which a worker is replaced
    hang_timeout: float = 120.0
    # replacements of a worker before the run ends
    max_restarts: int = 5
    python: str = ""

    def __post_init__(self) -> None:
        if self.python and self.workers == 0:
            raise ConfigError(
                f"slots.python={self.python} is what worker processes run under, and "
                "slots.workers=0 starts none: set slots.workers, or leave slots.python empty"
            )
        if self.workers < 0 or self.slots_per_worker < 1:
            raise ConfigError(
                f"slots needs workers >= 0 and slots_per_worker >= 1, got {self.workers} and "
                f"{self.slots_per_worker}"
            )
        if self.slots_per_worker > MOST_SLOTS:
            raise ConfigError(
                f"slots.slots_per_worker={self.slots_per_worker} are more episodes at a time than "
                f"memory holds: give at most {MOST_SLOTS}"
            )
        if not self.hang_timeout > 0 or self.max_restarts < 0:
            raise ConfigError(
                "slots needs hang_timeout > 0 (seconds) and max_restarts >= 0, got "
                f"{self.hang_timeout} and {self.max_restarts}"
            )


@dataclass
class ReplayConfig:
    """The replay of algorithms that have one: ``ram_bytes`` of it are kept in RAM, small columns
    first; the rest is read from the run's folder. ``offline``: folders of other runs (or their
    replays), whose episodes are there before the first of this one; of each batch
    ``algorithm.offline_share`` are theirs."""

    ram_bytes: int = RAM_BYTES
    offline: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.ram_bytes < 0:
            raise ConfigError(
                f"replay.ram_bytes is {self.ram_bytes}, it must be 0 (all from the "
                "disk) or more bytes"
            )


@dataclass
class ConcurrentConfig:
    """An actor and a learner in two processes (``rl.rhythm=concurrent``).

    Weights are published every ``publish_every`` updates, and whenever nothing is left to learn;
    the actor takes the newest before every ``swap_every`` episodes (0: once an iteration), so that
    each episode has one version. While more than ``max_ahead`` updates are owed the actor waits (0:
    it never does). The learner's process has ``threads`` torch threads and a priority lower by
    ``nice``; one that dies is started again, at most ``restarts`` times, and so is one that makes
    no update in ``hang_seconds`` (0: it may take any time).
    """

    # updates between two publications of the weights
    publish_every: int = 50
    # episodes after which the actor takes the newest weights; 0: once an iteration
    swap_every: int = 0
    max_ahead: int = 0
    # torch threads of the learner's process
    threads: int = 1
    # how much lower its priority is, 0 to 19
    nice: int = 5
    # times that it is started again after it died
    restarts: int = 3
    # seconds without an update after which it is started again; 0: any time
    hang_seconds: float = 600.0

    def __post_init__(self) -> None:
        least_of = {
            "publish_every": 1,
            "swap_every": 0,
            "max_ahead": 0,
            "threads": 1,
            "restarts": 0,
            "hang_seconds": 0,
        }
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"rl.concurrent.{name}={getattr(self, name)} must be {least} or more"
                )
        if not 0 <= self.nice <= 19:
            raise ConfigError(
                f"rl.concurrent.nice={self.nice} must be from 0 (as the actor) to 19 "
                "(only what is left over)"
            )


RESTART_SOURCES = DEMONSTRATIONS, SUCCESSES, FAILURES = "demonstrations", "successes", "failures"


@dataclass
class RestartsConfig:
    """Episodes that begin in the middle of another one (`vla_rl.learning.restarts`): ``share`` of
    each iteration's episodes (or groups), in a state along the ``sources`` demonstrations,
    successes and failures (of the policy's own), of which the newest ``episodes`` of each task are
    kept; at most ``latest`` of the time limit is over by then."""

    # share of an iteration's episodes (or groups) that begin in the middle of another; 0: none
    share: float = 0.0
    # demonstrations, successes, failures: what they begin in
    sources: list[str] = field(default_factory=lambda: [DEMONSTRATIONS])
    # newest episodes of each task that are kept for it
    episodes: int = 64
    # share of the time limit that may be over by then
    latest: float = 0.5

    def __post_init__(self) -> None:
        if not self.sources or not {*self.sources} <= {*RESTART_SOURCES}:
            raise ConfigError(
                f"rl.restarts.sources={list(self.sources)}: name one or more of "
                f"{', '.join(RESTART_SOURCES)}"
            )
        if not (0.0 <= self.share <= 1.0 and 0.0 < self.latest < 1.0 and self.episodes >= 1):
            raise ConfigError(
                "rl.restarts needs 0 <= share <= 1, 0 < latest < 1 (of the time limit) and "
                f"episodes >= 1, got {self.share}, {self.latest} and {self.episodes}"
            )

    @property
    def used(self) -> list[str]:
        """The sources that episodes begin from; none where no episode begins in the middle."""
        return self.sources if self.share else []


@dataclass
class RLConfig:
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
    iterations: int = 20
    episodes_per_iteration: int = 64
    # episodes of one task and initial state that are compared with each other
    group_size: int = 1
    init_states: int = 0
    # held-out evaluation every so many iterations; 0: never
    eval_every: int = 0
    checkpoint_every: int = 1
    keep_checkpoints: int = 0
    keep_best: bool = True
    # learn only from groups with a success rate from success_low to success_high
    dynamic_sampling: bool = False
    dynamic_sampling_by: str = "success"  # success | reward
    # least success rate of such a group
    success_low: float = 0.1
    # largest one
    success_high: float = 0.9
    # rollouts at most to fill an iteration with such groups
    max_sampling_rounds: int = 10
    # iterations for which surplus groups are kept
    max_staleness: int = 4
    guard: str = "warn"  # off | warn | stop
    # first iterations, after the critic's warm-up, that the guard looks at; 0: none
    guard_iterations: int = 5
    # success rate that the 95 % upper bound must reach there
    guard_success: float = 0.03
    fallback: str = "none"  # none | progress
    fallback_reward: dict[str, Any] = field(default_factory=dict)
    rhythm: str = "alternate"  # alternate | concurrent
    concurrent: ConcurrentConfig = field(default_factory=ConcurrentConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)

    def __post_init__(self) -> None:
        self._check_guard()
        if self.rhythm not in ("alternate", "concurrent"):
            raise ConfigError(f"rl.rhythm is {self.rhythm!r}, choose one of alternate, concurrent")
        if self.rhythm == "concurrent" and self.dynamic_sampling:
            raise ConfigError(
                "rl.rhythm=concurrent learns from every episode, and rl.dynamic_sampling=true "
                "chooses among those of an iteration: leave one of them out"
            )
        if self.dynamic_sampling_by not in ("success", "reward"):
            raise ConfigError(
                f"rl.dynamic_sampling_by is {self.dynamic_sampling_by!r}, choose one "
                "of success, reward"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ConfigError(
                "rl.dynamic_sampling compares group members: set rl.group_size >= 2, "
                f"got {self.group_size}"
            )
        if (
            not 0.0 <= self.success_low <= self.success_high <= 1.0
            or self.max_sampling_rounds < 1
            or self.max_staleness < 0
        ):
            raise ConfigError(
                "rl needs 0 <= success_low <= success_high <= 1, max_sampling_rounds >= 1 and "
                f"max_staleness >= 0, got {self.success_low}, {self.success_high}, "
                f"{self.max_sampling_rounds} and {self.max_staleness}"
            )
        if self.episodes_per_iteration < 1:
            raise ConfigError(
                f"rl.episodes_per_iteration={self.episodes_per_iteration} must be 1 or more"
            )
        if self.group_size < 1 or self.episodes_per_iteration % self.group_size:
            raise ConfigError(
                f"rl.episodes_per_iteration ({self.episodes_per_iteration}) must be a multiple of "
                f"rl.group_size ({self.group_size})"
            )
        if self.keep_checkpoints < 0:
            raise ConfigError(
                f"rl.keep_checkpoints={self.keep_checkpoints} must be 0 (none) or more"
            )
        if (
            self.iterations < 0
            or self.checkpoint_every < 1
            or self.eval_every < 0
            or self.init_states < 0
        ):
            raise ConfigError(
                "rl.iterations, rl.eval_every (0: never) and rl.init_states (0: unlimited) must be "
                f">= 0 and rl.checkpoint_every >= 1, got {self.iterations}, {self.eval_every}, "
                f"{self.init_states} and {self.checkpoint_every}"
            )

    def _check_guard(self) -> None:
        if self.guard == "False":  # YAML reads a bare off as false
            self.guard = "off"
        for name, choices in (
            ("guard", ("off", "warn", "stop")),
            ("fallback", ("none", "progress")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"rl.{name} is {getattr(self, name)!r}, choose one of {', '.join(choices)}"
                )
        if self.guard_iterations < 0 or not 0.0 < self.guard_success <= 1.0:
            raise ConfigError(
                "rl needs guard_iterations >= 0 and 0 < guard_success <= 1, got "
                f"{self.guard_iterations} and {self.guard_success}"
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
class WandbConfig:
    """Weights & Biases. ``mode`` auto: online where the user is logged in, else offline; off: not
    at all. ``wandb=false``, ``wandb=true`` and ``wandb=offline`` set it too. ``name`` (empty: the
    run's own)."""

    mode: str = "auto"  # auto | online | offline | off
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
        if self.mode not in WANDB_MODES:
            choices = ", ".join(WANDB_MODES)
            raise ConfigError(
                f"wandb.mode is {self.mode!r}, choose one of {choices} (or wandb=true, wandb=false)"
            )
