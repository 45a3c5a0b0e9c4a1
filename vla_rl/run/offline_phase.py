"""The phase of offline rounds: what they are made of; and the student that learned beside."""

from __future__ import annotations

from typing import Any

import torch

from vla_rl import build
from vla_rl.algorithms.offline_chain import OfflineChain
from vla_rl.assembly.context import Run, evaluate_held_out, start_checkpoint
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.prior_data import given
from vla_rl.checkpoint import save_checkpoint
from vla_rl.learning.learners import ReplayLearner
from vla_rl.learning.offline import OfflineRounds
from vla_rl.options import PolicyOptions, config_of, view
from vla_rl.run.reward_phases import rl_reward


def phase_offline(run: Run) -> dict[str, Any]:
    c = run.config
    policy = run.acting(start_checkpoint(run))
    torch.manual_seed(c.seed)
    actor = build.implementation("actor", "own").from_base(
        build.config_class("actor", "own")(), policy
    )
    chain = OfflineChain(c.offline, seeded(c.algorithm, c.seed), policy, actor, c.seed)

    def held_out(number: int) -> dict[str, float]:
        result = evaluate_held_out(run, policy, f"round {number}", video_episodes=0)
        return result.metrics() | {"eval/episodes": float(result.episodes)}

    rounds = OfflineRounds(
        c.offline,
        chain,
        ReplayLearner(
            chain.iql,
            run.dir / "replay",
            c.seed,
            lambda: given(run, policy),
            policy.embodiment,
            c.replay.ram_bytes,
        ),
        run.engine(policy),
        rl_reward(run, policy),
        run.train_tasks,
        c.seed,
        evaluate=held_out,
    )
    return rounds.run(run.dir / "checkpoints" / "offline", run.logger, run.progress)


def make_student(run: Run) -> Any:
    """The student that learned beside RL, which is saved as ``checkpoints/student`` too; None
    where there is none."""
    policy = run.acting(run.dir / "checkpoints" / "rl")
    steps = view(config_of(policy), PolicyOptions).student_steps
    if not steps or "distillation" not in policy.can:
        return None
    student: Any = policy.make_student(steps, "same_noise")
    save_checkpoint(
        run.dir / "checkpoints" / "student", student.to(run.device).eval(), keep_last_good=False
    )
    return student
