"""Distillation of a policy into a faster student: on the teacher's own states, judged on held-out
episodes.

The teacher acts in its env on training initial states; the student learns on the observations met
there, where the teacher answers as often as wanted. Then both meet the same held-out episodes. What
a student is and what it learns by is the policies' own business
(`vla_rl.interfaces.Policy.make_student`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.imitation import learning_rate_factor
from vla_rl.algorithms.optim import (
    GuardedStep,
    even_split,
    load_optimizer_state,
    make_adamw,
    optimizer_state,
)
from vla_rl.assembly.env_and_policy import open_env, open_policy, select_tasks
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.checkpoint import load_training_state, load_weights, save_checkpoint
from vla_rl.config import RunConfig
from vla_rl.config.episodes import DistillConfig
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.frames import OnDisk
from vla_rl.data.trajectories import load_rollouts, save_rollouts
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError
from vla_rl.evaluation.action_error import action_errors, verdict
from vla_rl.evaluation.evaluate import evaluate
from vla_rl.evaluation.outcome import EvaluationResult, compare, comparison_text
from vla_rl.files import nearest_folder
from vla_rl.lock import RunLock
from vla_rl.monitoring.metrics import write_json
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.rollout.episodes import roll_out
from vla_rl.types import Observation, TaskSpec

_RECORDED = 4096  # states of a recording that a student learns on, at most


def distill(
    config: RunConfig, checkpoint: Path, settings: DistillConfig, folder: Path
) -> dict[str, Any]:
    """Make, train, save (to ``folder``) and judge a student of ``checkpoint``; returns a JSON-ready
    record.

    Where that run's env is a recording, its states stand in for the teacher's own, and action
    errors judge. Until all is done, the work so far lies in ``<folder>.partial``; the same call
    goes on from it. ``config`` is that of the run the checkpoint comes from: its env, tasks and
    evaluation. Raises ConfigError for a policy that cannot teach.
    """
    device, partial = pick_device(config.device), folder.with_name(f"{folder.name}.partial")
    with contextlib.closing(open_env(config)) as env, Progress() as progress:
        teacher = open_policy(config, checkpoint, env.embodiment).to(device)
        if "distillation" not in teacher.can:
            raise ConfigError(
                f"{checkpoint} holds a {type(teacher).__name__}, which makes no faster student (it "
                "has no make_student): give a checkpoint of a policy whose actions are denoised"
            )
        student: Any = teacher.make_student(settings.steps, settings.method)
        tasks = select_tasks(env.tasks, config.tasks)
        record: dict[str, Any] = {"checkpoint": str(checkpoint), **dataclasses.asdict(settings)}
        recorded = (
            recorded_states(config, env, teacher, folder.parent)
            if isinstance(env, RecordedEnv)
            else None
        )
        if settings.updates:
            with RunLock(partial):
                resume_or_clear(partial, checkpoint, settings, progress)
                if recorded is not None:
                    observations = recorded[0].evenly(_RECORDED)[0]
                else:
                    engine = RolloutEngine(env, teacher, config.rollout)
                    observations = collect_observations(
                        engine, tasks, settings, partial / "rollouts", progress
                    )
                record["observations"] = len(observations)
                record |= train_student(
                    student, teacher, observations, settings, partial / "student", progress
                )
        student.eval()
        save_checkpoint(folder, student)
        if recorded is not None:
            record |= judge_recorded(*recorded, teacher, student, device, progress)
        elif settings.evaluate_episodes:
            plan = dataclasses.replace(
                config.evaluate,
                episodes_per_task=max(1, -(-settings.evaluate_episodes // len(tasks))),
                video_episodes=0,
            )

            def judge(policy: Any, name: str) -> EvaluationResult:
                with progress.task(f"evaluate {name}", len(tasks) * plan.episodes_per_task) as bar:
                    return evaluate(
                        RolloutEngine(env, policy, config.rollout), tasks, plan, progress=bar.update
                    )

            before, after = judge(teacher, "teacher"), judge(student, "student")
            comparison = compare(before, after)
            progress.say(comparison_text(comparison, "teacher", "student"))
            progress.say(
                f"one decision alone: teacher {before.latency_s * 1e3:.1f} ms, student "
                f"{after.latency_s * 1e3:.1f} ms "
                f"({before.latency_s / max(after.latency_s, 1e-9):.1f} times less)"
            )
            record |= {
                "teacher": before.to_dict(),
                "student": after.to_dict(),
                "comparison": comparison.to_dict(),
            }
    shutil.rmtree(partial, ignore_errors=True)
    return record


def recorded_states(
    config: RunConfig, env: RecordedEnv, teacher: Any, folder: Path
) -> tuple[DemonstrationDataset, DemonstrationDataset | None]:
    """The recording that stands in for the teacher's own episodes, and what of it SFT kept out."""
    tasks = [
        task.task_id
        for task in select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
    ]
    disk = OnDisk(nearest_folder(folder), config.sft.ram_bytes)
    shown = env.recording.demonstrations(teacher.chunk_length, tasks, config.sft.failures, disk)
    return shown.split(config.sft.validation_episodes, 0.2, config.seed)


def judge_recorded(
    train: DemonstrationDataset,
    held_out: DemonstrationDataset | None,
    teacher: Any,
    student: Any,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """Action errors of both on the episodes that SFT kept out (none: nothing), for the record."""
    if held_out is None:
        return {}
    found = {}
    for name, policy in {"teacher": teacher, "student": student}.items():
        figures = action_errors(policy, held_out, train.actions, device=device)
        progress.say(f"{name}, {verdict(figures)}")
        found[name] = {key: value for key, value in figures.items() if key != "traces"}
    return found


def collect_observations(
    engine: RolloutEngine,
    tasks: list[TaskSpec],
    settings: DistillConfig,
    folder: Path,
    progress: Progress,
) -> Observation:
    """What the teacher sees on ``settings.episodes`` training episodes in which it samples its
    actions.

    The rollouts are kept in ``folder``; what is there is taken.
    """
    if (folder / "state.json").is_file():
        trajectories = load_rollouts(folder)
    else:
        with progress.task("teacher's states", settings.episodes) as bar:
            trajectories, _ = roll_out(
                engine, tasks, settings.episodes, settings.seed, bar.update, "distill"
            )
        save_rollouts(folder, trajectories)
    return Observation.cat([t.observations.without_privileged() for t in trajectories])


def train_student(
    student: Any,
    teacher: Any,
    observations: Observation,
    settings: DistillConfig,
    folder: Path,
    progress: Progress,
    checkpoint_every: int = 100,
) -> dict[str, float]:
    """Train what requires a gradient in ``student``; returns the mean of the last tenth of its
    metrics.

    Student and training state are written to ``folder`` at intervals; what is there is resumed.
    """
    device = next(iter(student.parameters())).device
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = make_adamw([(parameters, settings.learning_rate)], [0.9, 0.95], 0.0)
    guard = GuardedStep(10, settings.grad_clip)
    generator = torch.Generator().manual_seed(settings.seed)
    history: list[dict[str, float]] = []
    batches: list[Tensor] = []
    if (folder / "training_state").exists():
        load_weights(folder, student)
        state = load_training_state(folder)
        load_optimizer_state(optimizer, state["optimizer"])
        guard.load_state_dict(state["guard"])
        generator.set_state(state["generator"])
        history, batches = state["history"], state["batches"]
        student.load_distillation_state(state["student"])
    teacher.eval()
    with progress.task("distil", settings.updates, start=len(history)) as bar:
        for update in range(len(history), settings.updates):
            if not batches:
                batches = list(even_split(len(observations), settings.batch_size, generator))
            factor = learning_rate_factor(update, settings.warmup_updates, settings.updates, 0.02)
            optimizer.param_groups[0]["lr"] = settings.learning_rate * factor
            loss, metrics = student.distillation_loss(
                observations[batches.pop()].to(device), teacher, generator, settings.noises
            )
            loss.backward()
            guard.step(optimizer, loss.detach())
            student.after_update()
            history.append(metrics)
            if (update + 1) % 10 == 0 or update + 1 == settings.updates:
                bar.update(update + 1, **metrics)
            if (update + 1) % checkpoint_every == 0 or update + 1 == settings.updates:
                state = {
                    "optimizer": optimizer_state(optimizer),
                    "guard": guard.state_dict(),
                    "generator": generator.get_state(),
                    "history": history,
                    "batches": batches,
                    "student": student.distillation_state(),
                }
                save_checkpoint(folder, student, state, keep_last_good=False)
    last = history[-max(1, len(history) // 10) :]
    return {name: sum(m[name] for m in last) / len(last) for name in last[0]}


def resume_or_clear(
    partial: Path, checkpoint: Path, settings: DistillConfig, progress: Progress
) -> None:
    """Keep the unfinished work in ``partial`` where it is of this teacher and these settings;
    else remove it."""
    plan = {k: v for k, v in dataclasses.asdict(settings).items() if k != "evaluate_episodes"}
    plan |= {
        "checkpoint": str(checkpoint),
        "written": max(p.stat().st_mtime_ns for p in checkpoint.iterdir()),
    }
    path = partial / "plan.json"
    try:
        same = path.is_file() and json.loads(path.read_text()) == plan
    except (OSError, ValueError):  # cut short: what it belongs to is not known
        same = False
    if same:
        progress.say(f"going on from {partial}")
        return
    for name in ("rollouts", "student"):
        shutil.rmtree(partial / name, ignore_errors=True)
    write_json(path, plan)
