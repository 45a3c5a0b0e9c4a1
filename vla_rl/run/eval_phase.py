"""The phases that judge a policy on held-out episodes, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.assembly.context import (
    Run,
    evaluate_held_out,
    evaluating,
    keep_best,
    rl_start,
    start_checkpoint,
)
from vla_rl.config import RunConfig
from vla_rl.display import words
from vla_rl.evaluation.clips import write_failure_videos, write_videos
from vla_rl.evaluation.conditions import conditions_of, lines
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.files import read_json
from vla_rl.monitoring.metrics import BEST_FILE, TEST, TEST_BEST
from vla_rl.run.offline_phase import make_student


def eval_sft(run: Run) -> dict[str, Any]:
    """The start; also with sampled actions where ``evaluate.sampled_too`` says so."""
    policy = run.acting(start_checkpoint(run))
    result, record = _judged(run, "sft", policy, 0)
    keep_best(run, policy, 0, result)
    if run.config.evaluate.deterministic and _samples_too(run.config, policy):
        record |= _sampled(run, policy, result)
    return record


def eval_offline(run: Run) -> dict[str, Any]:
    policy = run.acting(run.dir / "checkpoints" / "offline")
    result, record = _judged(run, "offline", policy, 1)
    keep_best(run, policy, 0, result)
    return record


def eval_rl(run: Run) -> dict[str, Any]:
    policy, iterations = run.acting(run.dir / "checkpoints" / "rl"), run.config.rl.iterations
    result, record = _judged(run, "rl", policy, iterations)
    if best := keep_best(run, policy, iterations, result):
        run.progress.say(f"best: {words.best(best)}; kept as {run.dir / 'checkpoints' / 'best'}")
    return record


def eval_student(run: Run) -> dict[str, Any]:
    student = make_student(run)
    if student is None:
        return {"skipped": "no student learned beside RL (policy.student_steps=0)"}
    return _judged(run, "student", student, run.config.rl.iterations)[1]


def eval_test(run: Run) -> dict[str, Any]:
    """The last policy, and the one that held-out episodes chose, on states that chose nothing."""
    trained, best = run.dir / "checkpoints" / "rl", run.dir / BEST_FILE
    met = [_tested(run, TEST, trained if trained.exists() else rl_start(run))]
    if best.exists():
        note = read_json(best, "remove it, and there is no best policy")
        if note["iteration"] == run.config.rl.iterations:  # it is the last one
            met[0].save(run.dir / f"eval_{TEST_BEST}.json")
        else:
            met.append(_tested(run, TEST_BEST, best.with_suffix("")))
    return {
        "episodes": sum(result.episodes for result in met),
        "control_steps": sum(result.control_steps for result in met),
    }


def _tested(run: Run, name: str, checkpoint: Path) -> EvaluationResult:
    """What the policy of ``checkpoint`` did on the test set, kept under ``name``."""
    policy = run.acting(checkpoint)
    with evaluating(run, policy) as collector:
        result = evaluate_held_out(run, policy, words.tested(name), collector, test=True)
    result.save(run.dir / f"eval_{name}.json")
    run.logger.log("eval", run.config.rl.iterations, {f"eval_{name}/success": result.success_rate})
    run.progress.say(f"{words.tested(name)}:\n{result.table()}")
    return result


def report(run: Run) -> dict[str, Any]:
    """The report is written once all figures are in, by `run_pipeline`."""
    return {}


def _judged(run: Run, name: str, policy: Any, step: int) -> tuple[EvaluationResult, dict[str, Any]]:
    """(what the policy did on the held-out episodes, the phase's record); figures and clips are
    kept under ``name``."""
    with evaluating(run, policy) as collector:
        result = evaluate_held_out(run, policy, name, collector)
    result.save(run.dir / f"eval_{name}.json")
    video = run.dir / "videos" / f"{name}.mp4"
    write_videos(result, video, control_hz=run.env.embodiment.control_hz)
    write_failure_videos(result, video)
    run.logger.log("eval", step, {f"eval_{name}/success": result.success_rate})
    for path in sorted(video.parent.glob(f"{name}*.mp4")):
        run.logger.video("eval", step, path)
    run.progress.say(result.table())
    record: dict[str, Any] = {"episodes": result.episodes, "control_steps": result.control_steps}
    record |= (found := conditions_of(run.config, result.split))
    for line in lines(found):
        run.progress.say(line)
    return result, record


def _samples_too(config: RunConfig, policy: Any) -> bool:
    if config.evaluate.sampled_too is None:
        return "likelihood" in policy.can and "denoising_step" in policy.log_prob_axes
    return config.evaluate.sampled_too


def _sampled(run: Run, policy: Any, result: EvaluationResult) -> dict[str, float]:
    """The start with sampled actions beside ``result``, for the record: the policy that RL
    starts from."""
    with evaluating(run, policy) as collector:
        sampled = evaluate_held_out(
            run, policy, "sft (sampled)", collector, deterministic=False, video_episodes=0
        )
    sampled.save(run.dir / "sampled_sft.json")
    run.logger.log("eval", 0, {"eval_sft_sampled/success": sampled.success_rate})
    low, high = sampled.interval
    run.progress.say(
        f"the same episodes with sampled actions, from which RL starts: {sampled.success_rate:.1%} "
        f"(95 % interval {low:.1%} to {high:.1%}), deterministic: {result.success_rate:.1%}"
    )
    return {"success": result.success_rate, "sampled_success": sampled.success_rate}
