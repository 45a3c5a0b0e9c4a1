"""The phase of online RL: what the loop is made of."""

from __future__ import annotations

from typing import Any

from vla_rl import build
from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.interfaces import AlgorithmContext
from vla_rl.learning.learners import learner_for
from vla_rl.learning.online import OnlineRL
from vla_rl.learning.plan import UNLIMITED
from vla_rl.rewards.sources import demonstration_trajectories
from vla_rl.run.context import Run, evaluate_held_out, keep_best, split_demonstrations, start_checkpoint
from vla_rl.run.opening import seeded
from vla_rl.run.reward_phases import rl_guard, rl_reward
from vla_rl.types import Trajectory


def _shown(run: Run, policy: Any) -> list[Trajectory]:
    """The demonstrations in the policy's own chunks, for a replay; none where the run has no dataset."""
    if not run.has_dataset:
        return []
    return demonstration_trajectories(split_demonstrations(run)[0], stride=policy.chunk_length)


def _critic(run: Run) -> Any:
    c = run.config
    critic = build.implementation("critic", c.critic_type)(run.env.privileged_dim, seeded(c.critic, c.seed))
    return None if critic is None else critic.to(run.device)


def phase_rl(run: Run) -> dict[str, Any]:
    c = run.config
    start = start_checkpoint(run)
    policy = run.acting(start)
    if c.actor_type != "none":
        policy = build.implementation("actor", c.actor_type).from_base(c.actor, policy)
    algorithm = build.implementation("algorithm", c.algorithm_type).from_context(
        seeded(c.algorithm, c.seed), policy, AlgorithmContext(lambda: _critic(run), lambda: run.acting(start))
    )
    init_states = range(c.rl.init_states) if c.rl.init_states else [UNLIMITED]
    items = [(task.task_id, init) for task in run.train_tasks for init in init_states]

    def held_out_check(iteration: int) -> dict[str, float]:
        result = evaluate_held_out(run, policy, f"iteration {iteration}", video_episodes=0)
        keep_best(run, policy, iteration, result)
        return {"eval/success": result.success_rate}

    reward = rl_reward(run, policy)
    guard, on_finding = rl_guard(run, policy, reward)
    loop = OnlineRL(
        c.rl,
        run.collector(policy),
        learner_for(algorithm, run.dir / "replay", c.seed, lambda: _shown(run, policy), policy.embodiment),
        reward,
        Curriculum(c.curriculum, items),
        run.train_tasks,
        c.seed,
        evaluate=held_out_check,
        guard=guard,
        on_finding=on_finding,
    )
    counters = loop.run(run.dir / "checkpoints" / "rl", run.logger, run.progress)
    return {
        "episodes": counters.episodes, "control_steps": counters.control_steps, "iterations": counters.iteration,
        "seconds": counters.seconds,
    }  # fmt: skip
