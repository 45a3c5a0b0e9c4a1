"""The phases of a run. Each is a function of the `Run` and leaves its result in the run's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import ROWS
from vla_rl.asked import DescribesConditions, DescribesStarts
from vla_rl.config import RunConfig
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.collect_policy import collect_with_policy
from vla_rl.data.demonstrations import DatasetSampler
from vla_rl.evaluation.clips import write_failure_videos, write_videos
from vla_rl.interfaces import LikelihoodPolicy
from vla_rl.learning.sft import train_sft
from vla_rl.reporting import words
from vla_rl.run.context import Run, evaluate_held_out, keep_best, split_demonstrations, start_checkpoint
from vla_rl.run.offline_phase import make_student, phase_offline
from vla_rl.run.opening import seeded
from vla_rl.run.reward_phases import phase_reward
from vla_rl.run.rl_phase import phase_rl


def phase_collect(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint or c.dataset:
        return {"skipped": "a checkpoint or dataset was given"}
    tasks = [t.task_id for t in run.train_tasks]
    # those that SFT keeps out of training come on top
    collect = dataclasses.replace(c.collect, episodes_per_task=c.collect.episodes_per_task + c.sft.validation_episodes)
    with run.progress.task("collect", len(tasks) * collect.episodes_per_task) as bar:
        if collect.policy:
            policy = run.acting(Path(collect.policy))
            return collect_with_policy(
                run.env, policy, run.train_tasks, collect, seed=c.seed, folder=run.dir / "dataset", progress=bar.update
            )
        return collect_demonstrations(
            c.env_type, c.env, tasks, collect, seed=c.seed, folder=run.dir / "dataset", progress=bar.update,
            python=c.slots.python,
        )  # fmt: skip


def phase_sft(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint:
        return {"skipped": "a checkpoint was given"}
    dataset, validation = split_demonstrations(run, c.sft.base_part)
    torch.manual_seed(c.seed)
    policy = build.implementation("policy", c.policy_type).from_statistics(
        c.policy, run.env.embodiment, dataset.action_stats, dataset.proprio_stats
    )
    policy.to(run.device).train()
    sampler = DatasetSampler(dataset, c.sft.batch_size, seed=c.seed)
    counters = train_sft(
        Imitation(seeded(c.sft, c.seed), policy, sampler),
        folder=run.dir / "checkpoints" / "sft",
        logger=run.logger,
        progress=run.progress,
        validation=None if validation is None else validation.evenly(ROWS),
    )
    return {"updates": counters.iteration, "seconds": counters.seconds}


def phase_eval(run: Run, name: str, checkpoint: Path) -> dict[str, Any]:
    c = run.config
    policy = run.acting(checkpoint)
    result = evaluate_held_out(run, policy, name)
    result.save(run.dir / f"eval_{name}.json")
    video = run.dir / "videos" / f"{name}.mp4"
    write_videos(result, video, control_hz=run.env.embodiment.control_hz)
    write_failure_videos(result, video)
    iteration = c.rl.iterations if name in ("rl", "student") else 0
    step = 1 if name == "offline" else iteration
    run.logger.log("eval", step, {f"eval_{name}/success": result.success_rate})
    for path in sorted(video.parent.glob(f"{name}*.mp4")):
        run.logger.video("eval", step, path)
    run.progress.say(result.table())
    best = keep_best(run, policy, iteration, result) if name != "student" else {}
    if best and name == "rl":
        run.progress.say(f"best: {words.best(best)}; kept as {run.dir / 'checkpoints' / 'best'}")
    record: dict[str, Any] = {"episodes": result.episodes, "control_steps": result.control_steps}
    if isinstance(c.env, DescribesStarts):  # a benchmark says whether they are its own
        record["initial_states"] = c.env.initial_states(result.split)
    if isinstance(c.env, DescribesConditions):
        record["conditions"] = c.env.describe()
        run.progress.say(f"conditions: {record['conditions']}")
    if name == "sft" and c.evaluate.deterministic and _samples_too(c, policy):
        sampled = evaluate_held_out(run, policy, f"{name} (sampled)", deterministic=False, video_episodes=0)
        sampled.save(run.dir / f"sampled_{name}.json")
        run.logger.log("eval", 0, {f"eval_{name}_sampled/success": sampled.success_rate})
        low, high = sampled.interval
        run.progress.say(
            f"the same episodes with sampled actions, from which RL starts: {sampled.success_rate:.1%} "
            f"(95 % interval {low:.1%} to {high:.1%}), deterministic: {result.success_rate:.1%}"
        )
        record["success"], record["sampled_success"] = result.success_rate, sampled.success_rate
    return record


def _samples_too(config: RunConfig, policy: Any) -> bool:
    if config.evaluate.sampled_too is None:
        return isinstance(policy, LikelihoodPolicy) and "denoising_step" in policy.log_prob_axes
    return config.evaluate.sampled_too


def phase_eval_sft(run: Run) -> dict[str, Any]:
    return phase_eval(run, "sft", start_checkpoint(run))


def phase_eval_rl(run: Run) -> dict[str, Any]:
    return phase_eval(run, "rl", run.dir / "checkpoints" / "rl")


def phase_eval_offline(run: Run) -> dict[str, Any]:
    return phase_eval(run, "offline", run.dir / "checkpoints" / "offline")


def phase_eval_student(run: Run) -> dict[str, Any]:
    if not make_student(run):
        return {"skipped": "no student learned beside RL (policy.student_steps=0)"}
    return phase_eval(run, "student", run.dir / "checkpoints" / "student")


def phase_report(run: Run) -> dict[str, Any]:
    """The report is written once all figures are in, by `run_pipeline`."""
    return {}


PHASE_FUNCTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "collect": phase_collect,
    "sft": phase_sft,
    "eval_sft": phase_eval_sft,
    "reward": phase_reward,
    "offline": phase_offline,
    "eval_offline": phase_eval_offline,
    "rl": phase_rl,
    "eval_rl": phase_eval_rl,
    "eval_student": phase_eval_student,
    "report": phase_report,
}
DESCRIPTIONS = {
    "collect": "demonstrations into a LeRobotDataset",
    "sft": "supervised fine-tuning on the demonstrations",
    "eval_sft": "success of the starting policy on held-out initial states",
    "reward": "training and judging the reward, where it is a learned one",
    "offline": "offline rounds: critics and a model from the data, candidates past a gate, new episodes",
    "eval_offline": "success of what the offline rounds left, on the same held-out initial states",
    "rl": "online RL",
    "eval_rl": "success of the tuned policy on the same held-out initial states",
    "eval_student": "success of the student that learned beside RL, on the same held-out initial states",
    "report": "writing report.html and summary.json",
}
