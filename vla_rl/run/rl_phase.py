"""The phase of online RL: what the loop is made of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from vla_rl import build
from vla_rl import config as configs
from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.assembly.context import (
    LEARNER_FOLDER,
    Run,
    evaluate_held_out,
    imitated,
    keep_best,
    rl_start,
    split_demonstrations,
    start_checkpoint,
)
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.prior_data import given
from vla_rl.checkpoint import load_weights
from vla_rl.config.run import DEMONSTRATIONS
from vla_rl.interfaces import AlgorithmContext, Collector
from vla_rl.learning.concurrent import ConcurrentLearner, SwappingCollector
from vla_rl.learning.learner_process import LearnerProcess
from vla_rl.learning.learners import Learner, learner_for
from vla_rl.learning.online import OnlineRL
from vla_rl.learning.plan import UNLIMITED
from vla_rl.learning.restarts import Restarts
from vla_rl.optional import ClosingCollector, ReferringActor
from vla_rl.run.reward_phases import rl_guard, rl_reward


def _critic(run: Run) -> Any:
    c = run.config
    critic = build.implementation("critic", c.critic_type)(run.env.privileged_dim, seeded(c.critic, c.seed))
    return None if critic is None else critic.to(run.device)


def _offered(run: Run) -> AlgorithmContext:
    """What the run's algorithm may make its parts from."""
    return AlgorithmContext(
        lambda: _critic(run),
        lambda: run.acting(rl_start(run)),
        lambda policy: imitated(run, policy)[0] if run.has_dataset else None,
    )


def trained_policy(run: Run) -> Any:
    """The start, with the actor on top of it that is trained where the run has one."""
    c = run.config
    start = rl_start(run)
    policy = run.acting(start)
    if c.actor_type != "none":
        policy = build.implementation("actor", c.actor_type).from_base(c.actor, policy)
        if isinstance(policy, ReferringActor):
            policy.refer_to(start)
    return policy


def learner_of(run: Run, policy: Any) -> Learner:
    """The run's algorithm on ``policy``, and what feeds it."""
    c, start = run.config, rl_start(run)
    algorithm = build.implementation("algorithm", c.algorithm_type).from_context(
        seeded(c.algorithm, c.seed), policy, _offered(run)
    )
    if start != start_checkpoint(run):  # what the offline rounds trained beside the policy goes on, and is not made anew
        load_weights(start, policy)
    return learner_for(
        algorithm, run.dir / "replay", c.seed, lambda: given(run, policy), policy.embodiment, c.replay.ram_bytes
    )


@contextlib.contextmanager
def _learning(run: Run, policy: Any) -> Iterator[tuple[Learner, Collector]]:
    """Who learns and who collects, in this process or in others, which end with the block."""
    with contextlib.ExitStack() as stack:
        collector = run.collector(policy)
        if isinstance(collector, ClosingCollector):
            stack.callback(collector.close)
        with _learner(run, policy, collector) as both:
            yield both


@contextlib.contextmanager
def _learner(run: Run, policy: Any, collector: Collector) -> Iterator[tuple[Learner, Collector]]:
    c = run.config
    if c.cluster_type == "ray" and c.cluster.learners:
        with contextlib.closing(build.attribute("vla_rl.cluster.learner:GroupLearner")(run.seats, run, policy)) as learner:
            yield learner, collector
        return
    if c.rl.rhythm == "alternate":
        yield learner_of(run, policy), collector
        return
    own = c.rl.concurrent
    job = {
        "config": configs.to_tree(c),
        "embodiment": run.env.embodiment.to_dict(),
        "tasks": [dataclasses.asdict(task) for task in run.env.tasks],
    }
    process = LearnerProcess(
        run.dir / LEARNER_FOLDER, job, c.algorithm.updates_per_decision, own.restarts, run.progress.say, own.hang_seconds
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - own.threads))  # the others are the learner's
    try:
        yield ConcurrentLearner(process, c.algorithm, own.max_ahead), SwappingCollector(collector, process, own.swap_every)
    finally:
        process.stop()
        torch.set_num_threads(threads)


def _restarts(run: Run) -> Restarts:
    c = run.config.rl.restarts
    asks = DEMONSTRATIONS in c.used and run.has_dataset
    return Restarts(c, run.train_tasks, split_demonstrations(run)[0] if asks else None)


def phase_rl(run: Run) -> dict[str, Any]:
    c = run.config
    policy = trained_policy(run)
    init_states = range(c.rl.init_states) if c.rl.init_states else [UNLIMITED]
    items = [(task.task_id, init) for task in run.train_tasks for init in init_states]

    def held_out_check(iteration: int) -> dict[str, float]:
        result = evaluate_held_out(run, policy, f"iteration {iteration}", video_episodes=0)
        keep_best(run, policy, iteration, result)
        return result.metrics()

    with _learning(run, policy) as (learner, collector):
        reward = rl_reward(run, policy)
        guard, on_finding = rl_guard(run, policy, reward)
        loop = OnlineRL(
            c.rl, collector, learner, reward, Curriculum(c.curriculum, items), run.train_tasks, c.seed,
            evaluate=held_out_check, guard=guard, on_finding=on_finding, restarts=_restarts(run),
        )  # fmt: skip
        counters = loop.run(run.dir / "checkpoints" / "rl", run.logger, run.progress)
    return {
        "episodes": counters.episodes, "control_steps": counters.control_steps, "iterations": counters.iteration,
        "seconds": counters.seconds,
    }  # fmt: skip
