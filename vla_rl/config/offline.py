"""Options of the offline rounds (torch-free, see `vla_rl.config.algorithms`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.config.ranges import require_above_zero, require_choice, require_range
from vla_rl.config.replay_algorithms import CriticsConfig
from vla_rl.errors import ConfigError

STARTS = ("any", "first")


@dataclass
class DynamicsConfig:
    """An ensemble of ``count`` networks of widths ``hidden`` that predicts what follows a decision;
    the ``elites`` with the least error on ``held_out`` of the decisions imagine. Wide frames are
    read as ``components`` principal components.

    ``updates`` of ``batch_size`` decisions; it is made anew each round.
    """

    # networks of the ensemble
    count: int = 7
    # networks with the least held-out error, which imagine
    elites: int = 5
    # widths of the layers
    hidden: list[int] = field(default_factory=lambda: [1024, 1024, 512, 512])
    components: int = 64
    # updates, anew in each round
    updates: int = 5000
    # decisions of one update
    batch_size: int = 256
    # of AdamW
    learning_rate: float = 1e-3
    # share of the decisions that the error is measured on
    held_out: float = 0.1

    def __post_init__(self) -> None:
        own = "offline.dynamics"
        for name in ("count", "components", "updates", "batch_size"):
            require_range(own, name, getattr(self, name), 1)
        require_range(own, "elites", self.elites, 1, self.count)
        require_above_zero(own, "learning_rate", self.learning_rate)
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(
                f"{own}.held_out={self.held_out!r} is out of range; use a value between 0 and 1"
            )
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(
                f"{own}.hidden={list(self.hidden)!r} needs at least one width, each 1 or more"
            )


@dataclass
class OfflineConfig:
    """The phase ``offline``: ``rounds`` of learning from the data so far (0: the phase has nothing
    to do).

    Data: demonstrations, ``start_episodes`` of the policy as it begins, and ``episodes`` of it
    after each round. Critics: ``critic_updates`` of IQL a round on batches of ``batch_size``,
    ``expectile``, ``gamma`` per control step.

    Imitation: before its candidates a round makes ``imitation_updates`` of the policy's supervised
    loss (0: none), ``imitation_batch`` rows each, on demonstrations and on what was solved so far;
    the rate falls from ``imitation_learning_rate`` to 0.

    Policy: a round makes ``candidates`` in turn. For each the policy decides on ``states`` drawn
    from the data; PPO on the denoising chain raises what the critics prefer, ``epochs`` in
    minibatches of ``minibatch_size``, with a clip range of ``clip`` that falls linearly to 0 over
    the phase. Its other options are the run's ``algorithm``.

    Gate: a candidate stays if its estimate exceeds that of the policy before by ``min_gain`` times
    its size, else weights and optimiser go back (``gate=false``: all stay). The estimate is the
    mean Q of ``horizon`` decisions that both take from ``gate_states`` (``starts``: any, or the
    first of episodes) in the learned model.

    ``evaluate``: held-out episodes after each round.
    """

    rounds: int = 0
    # episodes of the policy as it begins, before the first round
    start_episodes: int = 0
    # episodes of the policy after each round; 0: none, what was recorded is all (``env=dataset``)
    episodes: int = 100
    critics: CriticsConfig = field(default_factory=CriticsConfig)
    # updates of the critics in a round
    critic_updates: int = 20000
    # decisions of one of their updates
    batch_size: int = 256
    # of the values that V learns (0.5: the mean)
    expectile: float = 0.7
    # discount per control step
    gamma: float = 0.99
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)
    # updates of the policy's supervised loss in a round; 0: none
    imitation_updates: int = 0
    # rows of one of these
    imitation_batch: int = 64
    # at their start; it falls to 0
    imitation_learning_rate: float = 5e-4
    candidates: int = 100
    # decisions drawn from the data for each candidate
    states: int = 25600
    # passes over them
    epochs: int = 1
    # decisions of one update
    minibatch_size: int = 512
    # of the policy on a candidate's states
    learning_rate: float = 1e-5
    # clip range of the ratio, which falls to 0 over the phase
    clip: float = 0.25
    # largest norm of the policy's gradient
    grad_clip: float = 0.5
    # a candidate that does not improve the estimate goes back; false: all stay
    gate: bool = True
    min_gain: float = 0.05
    # decisions that the gate's estimate looks ahead in the learned model
    horizon: int = 5
    # states that it starts from
    gate_states: int = 512
    # any | first: which states these are
    starts: str = "any"
    evaluate: bool = True

    def __post_init__(self) -> None:
        own = "offline"
        for name in (
            "rounds",
            "start_episodes",
            "episodes",
            "min_gain",
            "critic_updates",
            "imitation_updates",
        ):
            require_range(own, name, getattr(self, name), 0)
        for name in (
            "batch_size",
            "candidates",
            "states",
            "epochs",
            "minibatch_size",
            "horizon",
            "gate_states",
            "imitation_batch",
        ):
            require_range(own, name, getattr(self, name), 1)
        for name in ("learning_rate", "imitation_learning_rate", "clip", "grad_clip"):
            require_above_zero(own, name, getattr(self, name))
        require_range(own, "gamma", self.gamma, 0.0, 1.0)
        if not 0.0 < self.expectile < 1.0:
            raise ConfigError(
                f"{own}.expectile={self.expectile!r} is out of range; use a value between 0 and 1"
            )
        require_choice(own, "starts", self.starts, STARTS)
