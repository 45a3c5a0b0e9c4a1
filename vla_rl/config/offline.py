"""Options of the offline rounds (torch-free, see `vla_rl.config.algorithms`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.bounds import Bounded, bound, several
from vla_rl.config.replay_algorithms import CriticsConfig
from vla_rl.errors import ConfigError

STARTS = ("any", "first")


@dataclass
class DynamicsConfig(Bounded, place="offline.dynamics"):
    """An ensemble of ``count`` networks of widths ``hidden`` that predicts what follows a decision;
    the ``elites`` with the least error on ``held_out`` of the decisions imagine. Wide frames are
    read as ``components`` principal components.

    ``updates`` of ``batch_size`` decisions; it is made anew each round.
    """

    # networks of the ensemble
    count: int = bound(7, ge=1)
    # networks with the least held-out error, which imagine
    elites: int = bound(5, ge=1)
    # widths of the layers
    hidden: list[int] = several([1024, 1024, 512, 512], ge=1, least=1)
    components: int = bound(64, ge=1)
    # updates, anew in each round
    updates: int = bound(5000, ge=1)
    # decisions of one update
    batch_size: int = bound(256, ge=1)
    # of AdamW
    learning_rate: float = bound(1e-3, gt=0)
    # share of the decisions that the error is measured on
    held_out: float = bound(0.1, gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elites > self.count:
            raise ConfigError(
                f"offline.dynamics.elites={self.elites} is out of range: it must be 1 to "
                f"offline.dynamics.count={self.count}"
            )


@dataclass
class OfflineConfig(Bounded, place="offline"):
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

    rounds: int = bound(0, ge=0)
    # episodes of the policy as it begins, before the first round
    start_episodes: int = bound(0, ge=0)
    # episodes of the policy after each round; 0: none, what was recorded is all (``env=dataset``)
    episodes: int = bound(100, ge=0)
    critics: CriticsConfig = field(default_factory=CriticsConfig)
    # updates of the critics in a round
    critic_updates: int = bound(20000, ge=0)
    # decisions of one of their updates
    batch_size: int = bound(256, ge=1)
    # of the values that V learns (0.5: the mean)
    expectile: float = bound(0.7, gt=0, lt=1)
    # discount per control step
    gamma: float = bound(0.99, ge=0, le=1)
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)
    # updates of the policy's supervised loss in a round; 0: none
    imitation_updates: int = bound(0, ge=0)
    # rows of one of these
    imitation_batch: int = bound(64, ge=1)
    # at their start; it falls to 0
    imitation_learning_rate: float = bound(5e-4, gt=0)
    candidates: int = bound(100, ge=1)
    # decisions drawn from the data for each candidate
    states: int = bound(25600, ge=1)
    # passes over them
    epochs: int = bound(1, ge=1)
    # decisions of one update
    minibatch_size: int = bound(512, ge=1)
    # of the policy on a candidate's states
    learning_rate: float = bound(1e-5, gt=0)
    # clip range of the ratio, which falls to 0 over the phase
    clip: float = bound(0.25, gt=0)
    # largest norm of the policy's gradient
    grad_clip: float = bound(0.5, gt=0)
    # a candidate that does not improve the estimate goes back; false: all stay
    gate: bool = True
    min_gain: float = bound(0.05, ge=0)
    # decisions that the gate's estimate looks ahead in the learned model
    horizon: int = bound(5, ge=1)
    # states that it starts from
    gate_states: int = bound(512, ge=1)
    # which states these are
    starts: str = bound("any", choices=STARTS)
    evaluate: bool = True
