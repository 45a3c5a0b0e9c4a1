"""Evaluation: success on fixed initial states, with intervals; two results compare pairwise,
episode by episode.

Episode i of a task is initial state i of the split (training never sees the held-out split), with
the split's instructions in turn. The outcome depends on that and on the policy alone, so two
policies, or one policy before and after training, meet exactly the same episodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.config.episodes import EvaluateConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation.clips import make_clips
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult, jerk_unit, outcome
from vla_rl.evaluation.video import Clip, have_video
from vla_rl.interfaces import Collector, EpisodesDone
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.specs import FAILURE_KINDS
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec, Trajectory

_PORTION_BYTES = 2**30


def evaluation_episodes(
    tasks: Sequence[TaskSpec], config: EvaluateConfig, states: range | None = None
) -> list[EpisodeSpec]:
    """The fixed episodes of an evaluation: initial states 0, 1, 2 … of the split, or ``states``,
    tasks and instructions in turn."""
    episodes: list[EpisodeSpec] = []
    for i in states or range(config.episodes_per_task):
        for task in tasks:
            texts = task.held_out_instructions if config.split == "held_out" else task.instructions
            seed = stable_seed("evaluate", config.seed, task.task_id, i)
            episodes.append(
                EpisodeSpec(
                    task_id=task.task_id,
                    init_state_id=i,
                    split=config.split,
                    seed=seed,
                    group_id=len(episodes),
                    instruction_index=i % max(1, len(texts)),
                    rollout_id=f"evaluate-{config.split}-{config.seed}-{task.task_id}-{i}",
                )
            )
    return episodes


def evaluate(
    engine: RolloutEngine,
    tasks: Sequence[TaskSpec],
    config: EvaluateConfig | None = None,
    *,
    progress: EpisodesDone | None = None,
    episodes: Sequence[EpisodeSpec] | None = None,
    collector: Collector | None = None,
) -> EvaluationResult:
    """Run ``config.episodes_per_task`` episodes of every task, or the given ``episodes`` of them,
    and say how they went. They run in ``collector`` (a cluster, whose actors have the policy by
    now; None: in the engine); pictures and latency are the engine's all the same.

    ``progress`` gets (episodes finished, all episodes, successes). Episodes run in portions whose
    images fit in 1 GiB, each task by task.

    Raises:
        ConfigError: no task is given.
    """
    config = config or EvaluateConfig()
    if not tasks:
        raise ConfigError("there is no task to evaluate on; name at least one")
    env, spec = engine.env, engine.env.embodiment
    episodes = evaluation_episodes(tasks, config) if episodes is None else episodes
    portion = _portion(engine, tasks)
    outcomes: list[EpisodeOutcome] = []
    clips: list[Clip] = []
    failure_clips: dict[str, Clip] = {}
    totals: dict[str, float] = {}
    first: Trajectory | None = None
    started = time.perf_counter()
    for start in range(0, len(episodes), portion):
        finished, won = len(outcomes), sum(o.success for o in outcomes)

        def report(
            done: int, _: int, successes: int, finished: int = finished, won: int = won
        ) -> None:
            if progress is not None:
                progress(finished + done, len(episodes), won + successes)

        asked = episodes[start : start + portion]
        # task by task: a simulator whose scenes take much memory has one or two of them at a time
        turns = sorted(range(len(asked)), key=lambda i: asked[i].task_id)
        result = (collector or engine).collect(
            [asked[i] for i in turns], deterministic=config.deterministic, progress=report
        )
        by_place = dict(zip(turns, result.trajectories, strict=True))
        trajectories = [by_place[i] for i in range(len(asked))]
        first = first or trajectories[0]
        outcomes += [outcome(t, spec) for t in trajectories]
        for name in (
            "decisions",
            "control_steps",
            "policy_seconds",
            "wait_seconds",
            "seconds",
            "retries",
        ):
            totals[name] = totals.get(name, 0.0) + float(result.stats.get(name, 0.0))
        if config.video_episodes and spec.cameras and have_video():
            shown = trajectories[: config.video_episodes - len(clips)]
            fresh = [t for t in _first_failures(trajectories) if t.failure not in failure_clips]
            chosen = {id(t): t for t in [*shown, *fresh]}  # each is replayed once
            made = dict(zip(chosen, make_clips(env, [t.whole() for t in chosen.values()])))
            clips += [made[id(t)] for t in shown]
            failure_clips |= {t.failure: made[id(t)] for t in fresh}
    seconds = time.perf_counter() - started
    decisions = max(1.0, totals["decisions"])
    assert first is not None
    return EvaluationResult(
        outcomes=outcomes,
        split=config.split,
        seed=config.seed,
        deterministic=config.deterministic,
        control_hz=spec.control_hz,
        jerk_unit=jerk_unit(spec),
        seconds=seconds,
        seconds_per_decision=totals["policy_seconds"] / decisions,
        latency_s=_latency(engine, first, config.deterministic),
        engine=totals,
        clips=clips,
        failure_clips={
            kind: failure_clips[kind] for kind in FAILURE_KINDS if kind in failure_clips
        },
    )


def _first_failures(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The first episode of each kind of failure."""
    return list({t.failure: t for t in reversed(trajectories) if t.failure}.values())


def _portion(engine: RolloutEngine, tasks: Sequence[TaskSpec]) -> int:
    executed = engine.config.replan_steps or engine.policy.chunk_length
    decisions = math.ceil(max(task.horizon for task in tasks) / executed) + 1
    image_bytes = sum(c.height * c.width * 3 for c in engine.env.embodiment.cameras)
    return max(engine.env.num_slots, _PORTION_BYTES // max(1, decisions * image_bytes))


def _latency(
    engine: RolloutEngine, trajectory: Trajectory, deterministic: bool, repeats: int = 5
) -> float:
    """Median seconds of a decision for one observation alone (after a first, uncounted one)."""
    observation = trajectory.whole().observations[:1].without_privileged()
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            started = time.perf_counter()
            engine.policy.act(
                observation, deterministic=deterministic, seeds=[0]
            ).chunk.actions.cpu()
            times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))
