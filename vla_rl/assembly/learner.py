"""What a run trains: the policy, and the algorithm on it with what feeds it."""

from __future__ import annotations

from typing import Any

from vla_rl import build
from vla_rl.assembly.context import Run, imitated, rl_start, start_checkpoint
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.prior_data import given
from vla_rl.checkpoint import load_weights
from vla_rl.config import learned_algorithm
from vla_rl.interfaces import Algorithm, AlgorithmContext, Policy
from vla_rl.learning.learners import Learner, learner_for


def trained_policy(run: Run) -> Any:
    """The start, with the actor on top of it that is trained where the run has one."""
    c = run.config
    start = rl_start(run)
    policy = run.acting(start)
    if c.actor_type != "none":
        policy = build.implementation("actor", c.actor_type).from_base(c.actor, policy)
        Policy.of(policy).refer_to(start)
    return policy


def learner_of(run: Run, policy: Any) -> Learner:
    """The run's algorithm on ``policy``, and what feeds it."""
    c, start = run.config, rl_start(run)
    kind = Algorithm.class_of(build.implementation("algorithm", c.algorithm_type))
    algorithm = kind.from_context(seeded(learned_algorithm(c), c.seed), policy, _offered(run))
    # what the offline rounds trained beside the policy goes on, and is not made anew
    if start != start_checkpoint(run):
        load_weights(start, policy)
    return learner_for(
        algorithm,
        run.dir / "replay",
        c.seed,
        lambda: given(run, policy),
        policy.embodiment,
        c.replay.ram_bytes,
    )


def _offered(run: Run) -> AlgorithmContext:
    """What the run's algorithm may make its parts from."""
    return AlgorithmContext(
        lambda: _critic(run),
        lambda: run.acting(rl_start(run)),
        lambda policy: imitated(run, policy)[0] if run.has_dataset else None,
    )


def _critic(run: Run) -> Any:
    c = run.config
    critic = build.implementation("critic", c.critic_type)(
        run.env.privileged_dim, seeded(c.critic, c.seed)
    )
    return None if critic is None else critic.to(run.device)
