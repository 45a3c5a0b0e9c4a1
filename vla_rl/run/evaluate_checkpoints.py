"""Checkpoints on held-out tasks: one, or two compared, and under perturbations."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.assembly.env_and_policy import open_env, open_policy, select_tasks
from vla_rl.config import RunConfig
from vla_rl.config.episodes import EvaluateConfig
from vla_rl.devices import pick_device
from vla_rl.evaluation.clips import write_failure_videos, write_videos
from vla_rl.evaluation.evaluate import evaluate
from vla_rl.evaluation.outcome import compare, comparison_text
from vla_rl.evaluation.robustness import choose, compare_robustness, run_robustness
from vla_rl.monitoring.progress import Progress
from vla_rl.options import EnvClass, view
from vla_rl.rollout.engine import RolloutEngine


def evaluate_checkpoints(
    config: RunConfig,
    paths: Sequence[Path | str],
    *,
    episodes: int | None = None,
    per_task: int | None = None,
    video: Path | None = None,
    perturb: Sequence[str] = (),
    levels: Sequence[int] = (),
    held_out_tasks: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate one policy, by its checkpoint or address, or two on the same episodes with a paired
    comparison; prints tables, returns JSON.

    ``episodes`` are spread over the tasks, unless ``per_task`` says how many each gets; without
    both, as the config says. ``perturb`` names perturbations under which they run again (see
    `robustness.choose`). ``held_out_tasks`` are those that training left out. ``video``: of the
    first checkpoint's episodes, also where the config asks for none.
    """
    declared = view(build.implementation("env", config.env_type), EnvClass).perturbations
    chosen = choose(declared, perturb, levels, config.env_type) if perturb else {}
    with contextlib.closing(open_env(config)) as env, Progress() as progress:
        tasks = select_tasks(env.tasks, config.tasks)
        settings = dataclasses.replace(
            config.evaluate,
            episodes_per_task=per_task
            or (
                config.evaluate.episodes_per_task
                if episodes is None
                else max(1, -(-episodes // len(tasks)))
            ),
            video_episodes=0
            if video is None
            else config.evaluate.video_episodes or EvaluateConfig.video_episodes,
        )
        episodes_in_all = len(tasks) * settings.episodes_per_task
        results, robust = [], []
        for path in paths:
            policy = open_policy(config, path, env.embodiment).to(pick_device(config.device))
            with progress.task("evaluate", episodes_in_all) as bar:
                engine = RolloutEngine(env, policy, config.rollout)
                results.append(evaluate(engine, tasks, settings, progress=bar.update))
            results[-1].held_out_tasks = [
                t.task_id
                for t in tasks
                if {t.task_id, t.task_id.rpartition("/")[2]} & set(held_out_tasks)
            ]
            progress.say(f"{path}\n{results[-1].table()}")
            if chosen:

                def bars(name: str) -> Any:
                    return progress.task(f"evaluate {name}", episodes_in_all)

                robust.append(
                    run_robustness(engine, tasks, settings, declared, chosen, results[-1], bars)
                )
                progress.say(f"{path}\n{robust[-1].table()}")
        if video is not None:
            write_videos(results[0], video)
            write_failure_videos(results[0], video)
            for name, result in robust[0].factors.items() if robust else ():
                write_videos(result, video.with_name(f"{video.stem}_{name}{video.suffix}"))
        perturbed = [r.to_dict() for r in robust]
        if len(results) == 1:
            return results[0].to_dict() | ({"robustness": perturbed[0]} if perturbed else {})
        comparison = compare(*results)
        progress.say(comparison_text(comparison, str(paths[0]), str(paths[1])))
        document = {"results": [r.to_dict() for r in results], "comparison": comparison.to_dict()}
        if robust:
            table, figures = compare_robustness(*robust)
            progress.say(table)
            document |= {"robustness": perturbed, "robustness_comparison": figures}
        return document
