"""What components provide, one file a kind: what each must have, and all that it may offer besides.

A component subclasses the base of its kind, or is any object with methods of the same names, which
the core gives the base's answers (`Offering.of`). No component imports another. What is read of
their configs and classes stands in `vla_rl.options`.
"""

from vla_rl.interfaces.actor import ActorPolicy
from vla_rl.interfaces.algorithm import (
    Algorithm,
    AlgorithmContext,
    Critic,
    Draw,
    OnPolicy,
    Replayed,
)
from vla_rl.interfaces.offering import Offering
from vla_rl.interfaces.policy import Policy, RememberingPolicy
from vla_rl.interfaces.reward import RewardModel
from vla_rl.interfaces.worlds import Collector, Env, EpisodesDone, Simulator

__all__ = [
    "ActorPolicy",
    "Algorithm",
    "AlgorithmContext",
    "Collector",
    "Critic",
    "Draw",
    "Env",
    "EpisodesDone",
    "Offering",
    "OnPolicy",
    "Policy",
    "RememberingPolicy",
    "Replayed",
    "RewardModel",
    "Simulator",
]
