"""The reward of a run: made, trained and judged, guarded and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vla_rl.advice.suggestions import advice
from vla_rl.assembly.context import REWARD_FOLDER, Run, start_checkpoint
from vla_rl.assembly.env_and_policy import seeded
from vla_rl.assembly.reward import (
    reward_context,
    reward_demonstrations,
    start_reward,
    trained_reward,
)
from vla_rl.checks.rewards import fallback_config, is_sparse
from vla_rl.data.trajectories import ROLLOUTS, load_rollouts, save_rollouts
from vla_rl.learning.guard import NO_SUCCESS, Finding, Guard
from vla_rl.monitoring.metrics import write_json
from vla_rl.options import AlgorithmFigures, view
from vla_rl.rewards.build import build_reward, fit_updates, save_reward
from vla_rl.rewards.quality import Quality, write_quality
from vla_rl.rewards.scorer import SwitchingReward
from vla_rl.rewards.tools import co_evolving, enforce, fit_and_judge, needs_judging
from vla_rl.rollout.episodes import roll_out


def phase_reward(run: Run) -> dict[str, Any]:
    """Train a learned reward on demonstrations and rollouts of the starting policy, judge it on
    rollouts it has not seen, and stop where it is not good enough. Other rewards need nothing of
    the kind."""
    c = run.config
    if not needs_judging(c.reward_type, c.reward):
        return {"skipped": f"reward {c.reward_type} is not learned"}
    policy = run.acting(start_checkpoint(run))
    quality, episodes, steps = _train_reward(
        run, policy, start_reward(run, policy), c.reward_type, c.reward, "start"
    )
    return {"episodes": episodes, "control_steps": steps, "verdict": quality.verdict}


def _train_reward(
    run: Run, policy: Any, reward: Any, kind: str, config: Any, rollouts_name: str
) -> tuple[Quality, int, int]:
    """Train and judge a reward on demonstrations and new rollouts of the policy as it is:
    (judgement, episodes, control steps). Raises `UserError` where it is not good enough
    (``reward_check.on_bad``)."""
    check, seed = run.config.reward_check, run.config.seed
    with run.progress.task("rollouts", check.episodes) as bar:
        rollouts, steps = roll_out(
            run.engine(policy), run.train_tasks, check.episodes, seed, bar.update
        )
    save_rollouts(run.dir / ROLLOUTS / rollouts_name, rollouts)
    updates = fit_updates(config)
    with run.progress.task("fit", updates) as bar:
        quality, figures = fit_and_judge(
            reward,
            reward_demonstrations(run),
            rollouts,
            check,
            kind,
            seed,
            lambda done, loss: bar.update(min(done, updates), loss=loss),
        )
    page = write_quality(quality, run.dir)
    if reward.learned:
        save_reward(run.dir / REWARD_FOLDER, kind, config, reward, figures)
    run.progress.say(quality.text())
    enforce(quality, check, page)
    return quality, len(rollouts), steps


def rl_reward(run: Run, policy: Any) -> Any:
    """The reward of the phase rl: as phase reward trained it, refitted on the way where the
    config says so."""
    c = run.config
    reward = trained_reward(run, policy)
    seeds = []
    if c.reward_check.refit_every:
        kept = run.dir / ROLLOUTS / "start"
        seeds = [*reward_demonstrations(run), *(load_rollouts(kept) if kept.is_dir() else [])]
    reward = _elsewhere(run, co_evolving(reward, c.reward_check, seeds))
    return (
        reward
        if c.rl.fallback == "none"
        else SwitchingReward(reward, lambda: fallback_reward(run, policy))
    )


def _elsewhere(run: Run, reward: Any) -> Any:
    """The reward in actors of its own, where the run has some."""
    c = run.config
    if c.cluster_type != "ray" or not c.cluster.reward_workers:
        return reward
    from vla_rl.cluster.scoring import RemoteReward

    return RemoteReward(run.seats, run, reward)


def fallback_reward(run: Run, policy: Any) -> Any:
    """The progress reward of ``rl.fallback``, not trained yet."""
    config = seeded(fallback_config(run.config), run.config.seed)
    return build_reward("process", config, reward_context(run, policy))


def rl_guard(
    run: Run, policy: Any, reward: Any
) -> tuple[Guard | None, Callable[[Finding], tuple[int, int]]]:
    """The guard of RL (None: off), and what the run does with what it finds."""
    c = run.config

    def on_finding(found: Finding) -> tuple[int, int]:
        run.phases.setdefault("rl", {})["guard"] = found.text
        # at once: the report of a run that is killed shows it too
        write_json(run.dir / "phases.json", run.phases)
        run.progress.say(f"warning: {found.text}")
        if found.kind != NO_SUCCESS or not isinstance(reward, SwitchingReward):
            return 0, 0
        progress = fallback_reward(run, policy)
        _, episodes, steps = _train_reward(
            run, policy, progress, "process", fallback_config(c), "fallback"
        )
        reward.switch(progress)
        return episodes, steps

    if c.rl.guard == "off" or not c.rl.guard_iterations:
        return None, on_finding
    return Guard(
        c.rl, view(c.algorithm, AlgorithmFigures).movement, is_sparse(c), advice(c, run.dir)
    ), on_finding
