"""What ``vla-rl reward score|fit|quality`` and the phase ``reward`` of a run do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl import build
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.trajectories import Source, demonstration_trajectories
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.video import Clip, grid, have_video, write_mp4
from vla_rl.files import write_whole
from vla_rl.interfaces import RewardModel
from vla_rl.monitoring.metrics import write_json
from vla_rl.options import RewardClass, view
from vla_rl.rewards.build import RewardContext, build_reward, demonstration_filter, save_reward
from vla_rl.rewards.handle import is_fitted
from vla_rl.rewards.quality import Quality, RewardCheckConfig, judge, write_quality
from vla_rl.rewards.scorer import CoEvolvingReward
from vla_rl.types import Trajectory

Progress = Callable[[int, float], None]


# ------------------------------------------------------------------------------- the phase of a run
def needs_judging(kind: str, config: Any) -> bool:
    """Whether a reward is a learned opinion (trained here or before) rather than the task's own
    success."""
    if kind == "combined":
        parts = [config.part(name, options) for name, options in config.parts.items()]
        return any(needs_judging(part_kind, part_config) for part_kind, part_config, _ in parts)
    return bool(view(build.implementation("reward", kind), RewardClass).judge_first)


def split_held_out(
    trajectories: Sequence[Trajectory], share: float, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
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
    """Train a learned reward that is not trained yet on demonstrations and rollouts, and judge it
    on rollouts it has not seen (all of them where nothing was trained). Returns the judgement and
    the figures of the fit."""
    figures: dict[str, float] = {}
    held = list(rollouts)
    if reward.learned and not is_fitted(reward):
        train, held = split_held_out(rollouts, check.held_out_share, seed)
        figures = reward.fit([*demonstrations, *train], progress)
    if not held:
        raise UserError(
            f"reward {name!r} has no rollouts left to be judged on: raise reward_check.episodes "
            f"({check.episodes})"
        )
    return judge(reward, held, name, check), figures


def mark_worth(dataset: DemonstrationDataset, reward: RewardModel, *, stride: int = 4) -> float:
    """Have only those control steps of ``dataset`` drawn that ``reward`` finds worth imitating,
    judged ``stride`` control steps at a time; returns their share. Raises `DatasetError` where none
    is."""
    worth = torch.ones(len(dataset), dtype=torch.bool)
    trajectories = demonstration_trajectories(dataset, stride=stride)
    for t, keep in zip(trajectories, reward.keep_masks(trajectories), strict=True):
        e = dataset.episodes[t.episode.group_id]
        steps = keep.cpu().repeat_interleave(stride)
        # no decision begins at the last
        worth[e.start : e.start + e.length] = torch.cat([steps, steps[-1:]])[: e.length]
    dataset.worth = worth
    if not dataset.drawing.count:
        raise DatasetError(
            "sft.filter finds no step of these demonstrations worth imitating: raise "
            "its drop_threshold"
        )
    return float(worth.float().mean())


def leave_out(
    dataset: DemonstrationDataset, folder: str, say: Callable[[str], None]
) -> dict[str, float]:
    """``sft.filter``: mark what the reward in ``folder`` finds worth imitating; its share, by
    name ("": nothing is done)."""
    if not folder:
        return {}
    share = mark_worth(dataset, demonstration_filter(folder))
    say(f"sft.filter: {share:.0%} of {len(dataset)} control steps are worth imitating")
    return {"worth_imitating": share}


def enforce(quality: Quality, check: RewardCheckConfig, page: Path) -> None:
    """Raise `UserError` for a bad verdict, unless ``check.on_bad`` is warn."""
    if quality.verdict == "bad" and check.on_bad == "stop":
        raise UserError(
            f"the reward {quality.reward!r} is not good enough to train on: "
            f"{'; '.join(quality.reasons)}. Figures and plots: {page}. Give it more or better data "
            "(reward_check.episodes, reward_check.demonstrations, reward.updates), take another "
            "reward, or train on it anyway with reward_check.on_bad=warn"
        )


def co_evolving(reward: Any, check: RewardCheckConfig, seeds: Sequence[Trajectory]) -> Any:
    """The reward, refitted during RL where ``check.refit_every`` says so. Raises `ConfigError` for
    one that is not learned."""
    if not check.refit_every:
        return reward
    if not reward.learned:
        raise ConfigError(
            f"reward_check.refit_every={check.refit_every} refits a learned reward, and "
            f"{type(reward).__name__} is none: set it to 0, or choose reward=pairwise, process, "
            "classifier, value_progress or preference"
        )
    return CoEvolvingReward(
        reward,
        lambda model, trajectories: (
            judge(model, trajectories, check=check).figures.auc if trajectories else float("nan")
        ),
        every=check.refit_every,
        buffer=check.buffer_episodes,
        tolerance=check.guard_tolerance,
        seed_trajectories=seeds,
    )


# ------------------------------------------------------------------------------------- the commands
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
    if "progress" in RewardModel.of(reward).can:
        curves = reward.progress(trajectories)
    return [
        Scored(
            t.rollout_id,
            t.episode.task_id,
            t.success,
            float(r.sum()),
            r.tolist(),
            None if c is None else c.tolist(),
        )
        for t, r, c in zip(trajectories, rewards, curves)
    ]


def run_score(
    kind: str,
    config: Any,
    source: Source,
    out: Path,
    *,
    videos: int = 8,
    preferences: Path | None = None,
) -> None:
    """Score a source; writes ``scores.json``, ``reward_quality.html`` (curves),
    ``progress.mp4``; prints a table."""
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
                lines.append(
                    f"{task:<24} {'success' if outcome else 'failure':<8} {len(rows):>5} "
                    f"{mean:>9.3f} {end}"
                )
    return "\n".join(lines)


def write_preferences(scored: Sequence[Scored], path: Path, margin: float = 0.05) -> int:
    """Comparisons of neighbouring trajectories of one task by their progress at the end, as JSON
    lines for ``reward=preference``; pairs closer than ``margin`` are left out. Returns how many."""
    lines = []
    for task in dict.fromkeys(s.task for s in scored):
        rows = [
            s
            for s in scored
            if s.task == task and s.progress is not None and s.progress[-1] == s.progress[-1]
        ]
        ends = [(float(s.progress[-1]), s.rollout_id) for s in rows if s.progress is not None]
        for a, b in zip(ends, [*ends[1:], *ends[:1]]):
            if abs(a[0] - b[0]) > margin:
                (_, better), (_, worse) = (a, b) if a[0] > b[0] else (b, a)
                lines.append(json.dumps({"preferred": better, "other": worse}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def progress_clips(
    trajectories: Sequence[Trajectory], scored: Sequence[Scored], hz: float = 4.0
) -> list[Clip]:
    """Clips of the first camera with a bar at the bottom whose length is the progress."""
    by_id = {s.rollout_id: s for s in scored}
    clips = []
    for t in trajectories:
        camera = next(iter(t.observations.images))
        frames = (
            torch.cat([t.observations.images[camera], t.final_observation.images[camera]])
            .numpy()
            .copy()
        )
        s = by_id[t.rollout_id]
        height = max(3, frames.shape[1] // 16)
        for frame, value in zip(frames, s.progress or []):
            frame[-height:] = 30
            if value == value:
                frame[-height:, : round(value * frame.shape[1])] = (60, 190, 120)
        clips.append(Clip(frames, hz, t.success, f"{s.task}: reward {s.reward:.2f}"))
    return clips


def run_fit(
    kind: str,
    config: Any,
    sources: Sequence[Source],
    out: Path,
    check: RewardCheckConfig,
    *,
    seed: int,
    progress: Progress,
) -> Quality | None:
    """Train a reward on sources and save it to ``out``, judged on the rollouts held out (None:
    there are none)."""
    reward = build_reward(
        kind,
        config,
        RewardContext(
            embodiment=next((s.embodiment for s in sources if s.embodiment), None),
            stride=check.stride,
        ),
    )
    if not reward.learned:
        raise UserError(
            f"reward={kind} has nothing to train. Choose pairwise, process, classifier, "
            "value_progress or preference"
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


def run_quality(
    kind: str, config: Any, source: Source, out: Path, check: RewardCheckConfig
) -> Quality:
    """Judge a reward on a source; prints the table, writes JSON and a page with plots."""
    reward = build_reward(
        kind, config, RewardContext(embodiment=source.embodiment, stride=check.stride)
    )
    quality = judge(reward, source.trajectories, kind, check)
    page = write_quality(quality, out)
    print(f"{kind}: {source.what}\n{quality.text()}\nwrote {page}")
    return quality
