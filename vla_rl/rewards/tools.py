"""What ``vla-rl reward score|fit|quality``, ``vla-rl bench reward`` and the phase ``reward`` of a run do."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl import build
from vla_rl.asked import RewardClass, RewardOptions, asked
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.video import Clip, grid, have_video, write_mp4
from vla_rl.files import write_whole
from vla_rl.interfaces import ProgressReward
from vla_rl.reporting.metrics import METRICS_FILE, read_metrics, write_json
from vla_rl.rewards.build import RewardContext, build_reward, demonstration_filter, save_reward
from vla_rl.rewards.handle import is_fitted, is_learned
from vla_rl.rewards.quality import Quality, RewardCheckConfig, judge, write_quality
from vla_rl.rewards.scorer import CoEvolvingReward
from vla_rl.rewards.sources import Source, mark_worth
from vla_rl.types import EpisodeSpec, Observation, Trajectory

Progress = Callable[[int, float], None]
BENCHED = ("success", "srpo", "pairwise", "process", "classifier", "value_progress")


# ---------------------------------------------------------------------------------------------------- the phase of a run
def needs_judging(kind: str, config: Any) -> bool:
    """Whether a reward is a learned opinion (trained here or before) rather than the task's own success."""
    if kind == "combined":
        parts = [config.part(name, options) for name, options in config.parts.items()]
        return any(needs_judging(part_kind, part_config) for part_kind, part_config, _ in parts)
    return bool(asked(build.implementation("reward", kind), RewardClass).judge_first)


def split_held_out(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(to train on, held out), successes and failures in the same proportion in both."""
    train: list[Trajectory] = []
    held: list[Trajectory] = []
    generator = torch.Generator().manual_seed(seed)
    for outcome in (True, False):
        group = [t for t in trajectories if t.success == outcome]
        order = torch.randperm(len(group), generator=generator).tolist()
        count = max(1, round(share * len(group))) if len(group) > 1 else 0
        held += [group[i] for i in order[:count]]
        train += [group[i] for i in order[count:]]
    return train, held


def fit_and_judge(
    reward: Any,
    demonstrations: Sequence[Trajectory],
    rollouts: Sequence[Trajectory],
    check: RewardCheckConfig,
    name: str,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Quality, dict[str, float]]:
    """Train a learned reward that is not trained yet on demonstrations and rollouts, and judge it on rollouts it has not
    seen (all of them where nothing was trained). Returns the judgement and the figures of the fit."""
    figures: dict[str, float] = {}
    held = list(rollouts)
    if is_learned(reward) and not is_fitted(reward):
        train, held = split_held_out(rollouts, check.held_out_share, seed)
        figures = reward.fit([*demonstrations, *train], progress)
    if not held:
        raise UserError(
            f"reward {name!r} has no rollouts left to be judged on: raise reward_check.episodes ({check.episodes})"
        )
    return judge(reward, held, name, check), figures


def leave_out(dataset: DemonstrationDataset, folder: str, say: Callable[[str], None]) -> dict[str, float]:
    """``sft.filter``: mark what the reward in ``folder`` finds worth imitating; its share, by name ("": nothing is done)."""
    if not folder:
        return {}
    share = mark_worth(dataset, demonstration_filter(folder))
    say(f"sft.filter: {share:.0%} of {len(dataset)} control steps are worth imitating")
    return {"worth_imitating": share}


def enforce(quality: Quality, check: RewardCheckConfig, page: Path) -> None:
    """Raise `UserError` for a bad verdict, unless ``check.on_bad`` is warn."""
    if quality.verdict == "bad" and check.on_bad == "stop":
        raise UserError(
            f"the reward {quality.reward!r} is not good enough to train on: {'; '.join(quality.reasons)}. Figures and "
            f"plots: {page}. Give it more or better data (reward_check.episodes, reward_check.demonstrations, "
            f"reward.updates), take another reward, or train on it anyway with reward_check.on_bad=warn"
        )


def co_evolving(reward: Any, check: RewardCheckConfig, seeds: Sequence[Trajectory]) -> Any:
    """The reward, refitted during RL where ``check.refit_every`` says so. Raises `ConfigError` for one that is not
    learned."""
    if not check.refit_every:
        return reward
    if not is_learned(reward):
        raise ConfigError(
            f"reward_check.refit_every={check.refit_every} refits a learned reward, and {type(reward).__name__} is none: "
            f"set it to 0, or choose reward=pairwise, process, classifier, value_progress or preference"
        )
    return CoEvolvingReward(
        reward,
        lambda model, trajectories: judge(model, trajectories, check=check).figures.auc if trajectories else float("nan"),
        every=check.refit_every,
        buffer=check.buffer_episodes,
        tolerance=check.guard_tolerance,
        seed_trajectories=seeds,
    )


# ---------------------------------------------------------------------------------------------------------- the commands
@dataclass(frozen=True)
class Scored:
    """One trajectory's scores, JSON-ready."""

    rollout_id: str
    task: str
    success: bool
    reward: float
    rewards: list[float]
    progress: list[float] | None


def score_trajectories(reward: Any, trajectories: Sequence[Trajectory]) -> list[Scored]:
    """Rewards and, where the model estimates it, progress."""
    rewards = [r.sum(1) if r.ndim == 2 else r for r in reward.score(trajectories)]
    curves: Sequence[Tensor | None] = [None] * len(rewards)
    if isinstance(reward, ProgressReward):
        curves = reward.progress(trajectories)
    return [
        Scored(t.rollout_id, t.episode.task_id, t.success, float(r.sum()), r.tolist(), None if c is None else c.tolist())
        for t, r, c in zip(trajectories, rewards, curves)
    ]


def run_score(
    kind: str, config: Any, source: Source, out: Path, *, videos: int = 8, preferences: Path | None = None
) -> None:
    """Score a source; writes ``scores.json``, ``reward_quality.html`` (curves), ``progress.mp4``; prints a table."""
    reward = build_reward(kind, config, RewardContext(embodiment=source.embodiment))
    scored = score_trajectories(reward, source.trajectories)
    print(f"{kind}: {source.what}")
    print(score_table(scored))
    write_json(out / "scores.json", [vars(s) for s in scored])
    print(f"wrote {out / 'scores.json'}")
    if scored and scored[0].progress is not None:
        print(f"wrote {write_quality(judge(reward, source.trajectories, kind), out)}")
        if have_video() and videos:
            clips = progress_clips(source.trajectories[:videos], scored)
            print(f"wrote {write_mp4(out / 'progress.mp4', *grid(clips))}")
    if preferences is not None:
        print(f"wrote {write_preferences(scored, preferences)} comparisons to {preferences}")


def score_table(scored: Sequence[Scored]) -> str:
    """Means per task and outcome as plain text."""
    lines = [f"{'task':<24} {'outcome':<8} {'n':>5} {'reward':>9} {'progress at the end':>20}"]
    for task in dict.fromkeys(s.task for s in scored):
        for outcome in (True, False):
            rows = [s for s in scored if s.task == task and s.success == outcome]
            if rows:
                ends = [s.progress[-1] for s in rows if s.progress is not None]
                end = f"{np.mean(ends):>20.3f}" if ends else f"{'–':>20}"
                mean = np.mean([s.reward for s in rows])
                lines.append(f"{task:<24} {'success' if outcome else 'failure':<8} {len(rows):>5} {mean:>9.3f} {end}")
    return "\n".join(lines)


def write_preferences(scored: Sequence[Scored], path: Path, margin: float = 0.05) -> int:
    """Comparisons of neighbouring trajectories of one task by their progress at the end, as JSON lines for
    ``reward=preference``; pairs closer than ``margin`` are left out. Returns how many."""
    lines = []
    for task in dict.fromkeys(s.task for s in scored):
        rows = [s for s in scored if s.task == task and s.progress is not None and s.progress[-1] == s.progress[-1]]
        ends = [(float(s.progress[-1]), s.rollout_id) for s in rows if s.progress is not None]
        for a, b in zip(ends, [*ends[1:], *ends[:1]]):
            if abs(a[0] - b[0]) > margin:
                (_, better), (_, worse) = (a, b) if a[0] > b[0] else (b, a)
                lines.append(json.dumps({"preferred": better, "other": worse}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def progress_clips(trajectories: Sequence[Trajectory], scored: Sequence[Scored], hz: float = 4.0) -> list[Clip]:
    """Clips of the first camera with a bar at the bottom whose length is the progress."""
    by_id = {s.rollout_id: s for s in scored}
    clips = []
    for t in trajectories:
        camera = next(iter(t.observations.images))
        frames = torch.cat([t.observations.images[camera], t.final_observation.images[camera]]).numpy().copy()
        s = by_id[t.rollout_id]
        height = max(3, frames.shape[1] // 16)
        for frame, value in zip(frames, s.progress or []):
            frame[-height:] = 30
            if value == value:
                frame[-height:, : round(value * frame.shape[1])] = (60, 190, 120)
        clips.append(Clip(frames, hz, t.success, f"{s.task}: reward {s.reward:.2f}"))
    return clips


def run_fit(
    kind: str, config: Any, sources: Sequence[Source], out: Path, check: RewardCheckConfig, *, seed: int, progress: Progress
) -> Quality | None:
    """Train a reward on sources and save it to ``out``, judged on the rollouts held out (None: there are none)."""
    reward = build_reward(kind, config, RewardContext(embodiment=next((s.embodiment for s in sources if s.embodiment), None),
                                                      stride=check.stride))  # fmt: skip
    if not is_learned(reward):
        raise UserError(
            f"reward={kind} has nothing to train. Choose pairwise, process, classifier, value_progress or preference"
        )
    trajectories = [t for s in sources for t in s.trajectories]
    rollouts = [t for s in sources if s.run is not None for t in s.trajectories]
    others = [t for s in sources if s.run is None for t in s.trajectories]
    quality = None
    if rollouts:
        train, held = split_held_out(rollouts, check.held_out_share, seed)
        figures = reward.fit([*others, *train], progress)
        quality = judge(reward, held, kind, check)
        write_quality(quality, out)
    else:
        figures = reward.fit(trajectories, progress)
    save_reward(out, kind, config, reward, figures)
    return quality


def run_quality(kind: str, config: Any, source: Source, out: Path, check: RewardCheckConfig) -> Quality:
    """Judge a reward on a source; prints the table, writes JSON and a page with plots."""
    reward = build_reward(kind, config, RewardContext(embodiment=source.embodiment, stride=check.stride))
    quality = judge(reward, source.trajectories, kind, check)
    page = write_quality(quality, out)
    print(f"{kind}: {source.what}\n{quality.text()}\nwrote {page}")
    return quality


# --------------------------------------------------------------------------------------------------------------- bench
def synthetic_trajectories(count: int, decisions: int, size: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories of noise, half of them successes, with one camera of ``size`` pixels."""
    generator = torch.Generator().manual_seed(seed)

    def observation(n: int) -> Observation:
        images = torch.randint(0, 256, (n, size, size, 3), generator=generator, dtype=torch.uint8)
        return Observation({"camera": images}, torch.rand(n, 4, generator=generator), ("move the thing",) * n)

    return [
        Trajectory(
            episode=EpisodeSpec("bench", i, group_id=i, rollout_id=f"bench-{seed}-{i}"),
            observations=observation(decisions),
            final_observation=observation(1),
            actions=torch.zeros(decisions, 8, 7),
            valid=torch.ones(decisions, 8, dtype=torch.bool),
            rewards=torch.zeros(decisions, 8),
            behavior_log_prob=torch.zeros(decisions),
            replay={},
            terminated=i % 2 == 0,
            truncated=i % 2 == 1,
            success=i % 2 == 0,
        )
        for i in range(count)
    ]


def bench_reward(
    kinds: Sequence[tuple[str, Any]], *, episodes: int = 64, decisions: int = 6, size: int = 84, repeats: int = 3,
    run: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Frames/s of scoring ``episodes`` trajectories (best of ``repeats``; embeddings not cached), and, of a ``run``, the
    share of its iterations that waited for scores. Prints a table; returns a JSON-ready dict."""
    result: dict[str, Any] = {"episodes": episodes, "frames": episodes * (decisions + 1), "pixels": size, "rewards": {}}
    iteration = None
    if run is not None:
        result["run"] = scoring_share(run)
        iteration = result["run"]["iteration_seconds"]
    for kind, config in kinds:
        options = asked(config, RewardOptions)
        if options.updates is not None:  # what it learns of noise does not matter, how fast it scores does
            config = dataclasses.replace(config, updates=1)
        if options.milestones is not None:  # the synthetic robot's dimensions have no names
            named = dataclasses.replace(options.milestones, gripper=[3], position=[0, 1, 2])
            config = dataclasses.replace(config, milestones=named)
        reward = build_reward(kind, config)
        if is_learned(reward) and not is_fitted(reward):
            reward.fit(synthetic_trajectories(8, decisions, size, seed=1))
        seconds = []
        for i in range(repeats):
            trajectories = synthetic_trajectories(episodes, decisions, size, seed=100 + i)
            started = time.perf_counter()
            reward.score(trajectories)
            seconds.append(time.perf_counter() - started)
        best = min(seconds)
        row = {"seconds": best, "frames_per_second": result["frames"] / best}
        row["share_of_iteration"] = None if iteration is None else best / (best + iteration)
        result["rewards"][kind] = row
        share = "" if iteration is None else f", {row['share_of_iteration']:.1%} of an iteration of {run}, if not overlapped"
        print(f"{kind:<16} {best * 1e3:>9.1f} ms for {episodes} episodes, {row['frames_per_second']:>9.0f} frames/s{share}")
    if run is not None:
        r = result["run"]
        print(f"{run}: {r['share']:.1%} of an iteration ({r['iteration_seconds']:.1f} s) waited for scores, "
              f"{r['overlapped_seconds']:.2f} s were scored meanwhile")  # fmt: skip
    return result


def scoring_share(run: Path) -> dict[str, float]:
    """Mean seconds of a run's iterations (rollout, scoring, update), and the share of scoring, from its metrics."""
    rows = [r for r in read_metrics(run / METRICS_FILE) if r["phase"] == "rl" and r.get("time/reward") is not None]
    if not rows:
        raise UserError(f"{run} has no iterations of RL in its {METRICS_FILE}: name a run whose phase rl has begun")
    mean = {k: float(np.mean([r.get(k) or 0.0 for r in rows])) for k in ("time/reward", "time/update", "engine/seconds")}
    overlapped = float(np.mean([r.get("time/reward_overlapped") or 0.0 for r in rows]))
    total = sum(mean.values())
    return {"iteration_seconds": total, "share": mean["time/reward"] / total, "overlapped_seconds": overlapped}
