"""The phase of online RL: what the loop is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.assembly.context import (
    Run,
    evaluate_held_out,
    keep_best,
    rl_start,
    split_demonstrations,
    start_checkpoint,
)
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.assembly.learner_main import job_of, learner_process
from vla_rl.config import learned_algorithm
from vla_rl.config.run import DEMONSTRATIONS
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.interfaces import Collector
from vla_rl.learning.concurrent import ConcurrentLearner, SwappingCollector
from vla_rl.learning.learners import Learner
from vla_rl.learning.online import OnlineRL
from vla_rl.learning.plan import UNLIMITED
from vla_rl.learning.restarts import Restarts
from vla_rl.run.reward_phases import rl_guard, rl_reward


@contextlib.contextmanager
def _learning(run: Run, policy: Any) -> Iterator[tuple[Learner, Collector]]:
    """Who learns and who collects, in this process or in others, which end with the block."""
    with contextlib.ExitStack() as stack:
        collector = Collector.of(run.collector(policy))
        stack.callback(collector.close)
        with _learner(run, policy, collector) as both:
            yield both


@contextlib.contextmanager
def _learner(run: Run, policy: Any, collector: Collector) -> Iterator[tuple[Learner, Collector]]:
    c = run.config
    if (learned := learned_algorithm(c)) is not c.algorithm:
        run.progress.say(
            f"rollouts run up to {c.cluster.ahead} versions ahead of the learner: what older "
            "policies chose is learned from as with "
            f"algorithm.behavior_weight={learned.behavior_weight} (cluster.correction)"
        )
    if c.cluster_type == "ray" and c.cluster.learners:
        from vla_rl.cluster.learner import GroupLearner

        with contextlib.closing(GroupLearner(run.seats, run, policy)) as learner:
            yield learner, collector
        return
    if c.rl.rhythm == "alternate":
        yield learner_of(run, policy), collector
        return
    own = c.rl.concurrent
    process = learner_process(c, job_of(c, run.env.embodiment, run.env.tasks), run.progress.say)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - own.threads))  # the others are the learner's
    try:
        yield (
            ConcurrentLearner(process, c.algorithm, own.max_ahead),
            SwappingCollector(collector, process, own.swap_every),
        )
    finally:
        process.stop()
        torch.set_num_threads(threads)


def _restarts(run: Run) -> Restarts:
    c = run.config.rl.restarts
    asks = DEMONSTRATIONS in c.used and run.has_dataset
    return Restarts(c, run.train_tasks, split_demonstrations(run)[0] if asks else None)


def _start_judged(run: Run) -> dict[str, float] | None:
    """What held-out episodes said of the start in a phase of this run; none where an actor goes on
    top of it."""
    name = "sft" if rl_start(run) == start_checkpoint(run) else "offline"
    if run.config.actor_type != "none" or not run.phases.get(f"eval_{name}", {}).get("complete"):
        return None
    return EvaluationResult.load(run.dir / f"eval_{name}.json").metrics()


def phase_rl(run: Run) -> dict[str, Any]:
    c = run.config
    policy = trained_policy(run)
    init_states = range(c.rl.init_states) if c.rl.init_states else [UNLIMITED]
    items = [(task.task_id, init) for task in run.train_tasks for init in init_states]

    with _learning(run, policy) as (learner, collector):
        # (episodes that run ahead leave no room for others)
        remote = (
            c.cluster_type == "ray" and c.cluster.evaluate == "rollouts" and not c.cluster.ahead
        )

        def held_out_check(iteration: int) -> dict[str, float]:
            collector.publish(iteration)
            label, place = f"iteration {iteration}", collector if remote else None
            result = evaluate_held_out(run, policy, label, place, video_episodes=0)
            keep_best(run, policy, iteration, result)
            return result.metrics()

        reward = rl_reward(run, policy)
        guard, on_finding = rl_guard(run, policy, reward)
        loop = OnlineRL(
            c.rl,
            collector,
            learner,
            reward,
            Curriculum(c.curriculum, items),
            run.train_tasks,
            c.seed,
            evaluate=held_out_check,
            start=_start_judged(run),
            guard=guard,
            on_finding=on_finding,
            restarts=_restarts(run),
        )
        counters = loop.run(run.dir / "checkpoints" / "rl", run.logger, run.progress)
    return {
        "episodes": counters.episodes,
        "control_steps": counters.control_steps,
        "iterations": counters.iteration,
        "seconds": counters.seconds,
    }
