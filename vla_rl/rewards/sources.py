"""Trajectories to train and judge reward models on: from demonstrations, from a run, or from rollouts saved earlier.

A source is a folder: a LeRobotDataset v3 (``meta/info.json``), rollouts that `save_rollouts` wrote (``state.json``), or a
run (``config.yaml``), whose policy is rolled out once; those rollouts are kept in ``<run>/rollouts``, and made anew where
the checkpoint or the config is another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.data.demonstrations import DemonstrationDataset, DemonstrationEpisode
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.recording import load_whoever
from vla_rl.errors import UserError
from vla_rl.optional import FilteringReward
from vla_rl.splits import stable_seed
from vla_rl.storage import load_state, save_state
from vla_rl.types import EmbodimentSpec, EpisodeSpec, Observation, TaskSpec, Trajectory

ROLLOUTS = "rollouts"


# ------------------------------------------------------------------------------------------------------- demonstrations
def trajectories_of_dataset(
    path: str | Path, embodiment: EmbodimentSpec | None = None, *, stride: int = 4, limit: int = 0, seed: int = 0
) -> list[Trajectory]:
    """Demonstrations of a LeRobotDataset v3 folder as trajectories (`demonstration_trajectories`); of those beyond ``limit``
    no picture is decoded."""
    dataset = load_demonstrations(path, embodiment, choose=functools.partial(_draw, limit=limit, seed=seed))
    return demonstration_trajectories(dataset, stride=stride)


def _draw(
    episodes: Sequence[DemonstrationEpisode], _: torch.Tensor | None = None, *, limit: int, seed: int
) -> list[torch.Tensor | None]:
    """``limit`` (0: all) of the episodes at random, as a reader of datasets chooses."""
    kept = set(range(len(episodes)))
    if limit and limit < len(episodes):
        generator = torch.Generator().manual_seed(seed)
        kept = set(torch.randperm(len(episodes), generator=generator)[:limit].tolist())
    return [torch.ones(e.length, dtype=torch.bool) if i in kept else None for i, e in enumerate(episodes)]


def demonstration_trajectories(
    dataset: DemonstrationDataset, *, stride: int = 4, limit: int = 0, seed: int = 0
) -> list[Trajectory]:
    """One trajectory per episode with a decision every ``stride`` control steps, whose chunk is the actions until the next:
    what was sent, within the robot's bounds, and as ``proposed`` the labels, where the dataset has both; else the labels.

    The last recorded frame stands for the final observation (a dataset holds none after the last action). Episodes of other
    tools have no success flag: they count as successes, and their instruction as the task. ``limit`` (0: all) draws that
    many episodes. Demonstrations of a single frame are left out.
    """
    return list(each_trajectory(dataset, stride=stride, limit=limit, seed=seed))


def each_trajectory(
    dataset: DemonstrationDataset, *, stride: int = 4, limit: int = 0, seed: int = 0
) -> Iterator[Trajectory]:
    """`demonstration_trajectories`, one after the other: of pictures on the disk no more than one episode's are there."""
    order = [i for i, mask in enumerate(_draw(dataset.episodes, limit=limit, seed=seed)) if mask is not None]
    sent = dataset.actions if dataset.sent is None else dataset.as_sent().actions
    for i in order:
        e = dataset.episodes[i]
        if e.length < 2:
            continue
        rows = torch.arange(e.start, e.start + e.length - 1, stride)
        steps = rows[:, None] + torch.arange(stride)
        valid = steps < e.start + e.length
        steps = steps.clamp(max=e.start + e.length - 1)
        success = True if e.success is None else bool(e.success)
        rewards = torch.zeros(valid.shape)
        if success:
            rewards[-1, int(valid[-1].sum()) - 1] = 1.0
        spec = EpisodeSpec(
            task_id=e.task_id or e.instruction,
            init_state_id=-1 if e.init_state_id is None else e.init_state_id,
            group_id=i,
            rollout_id=f"demonstration-{i}",
        )
        yield Trajectory(
            episode=spec,
            observations=_rows(dataset, rows, e.instruction),
            final_observation=_rows(dataset, torch.tensor([e.start + e.length - 1]), e.instruction),
            actions=sent[steps],
            valid=valid,
            rewards=rewards,
            behavior_log_prob=torch.zeros(len(rows)),
            replay={},
            terminated=success,
            truncated=not success,
            success=success,
            is_human=valid,
            proposed=None if dataset.sent is None else dataset.actions[steps],
        )


def mark_worth(dataset: DemonstrationDataset, reward: FilteringReward, *, stride: int = 4) -> float:
    """Have only those control steps of ``dataset`` drawn that ``reward`` finds worth imitating, judged ``stride`` control
    steps at a time; returns their share. Raises `DatasetError` where none is."""
    worth = torch.ones(len(dataset), dtype=torch.bool)
    trajectories = demonstration_trajectories(dataset, stride=stride)
    for t, keep in zip(trajectories, reward.keep_masks(trajectories), strict=True):
        e = dataset.episodes[t.episode.group_id]
        steps = keep.cpu().repeat_interleave(stride)
        worth[e.start : e.start + e.length] = torch.cat([steps, steps[-1:]])[: e.length]  # no decision begins at the last
    if not worth.any():
        raise DatasetError("sft.filter finds no step of these demonstrations worth imitating: raise its drop_threshold")
    dataset.worth = worth
    return float(worth.float().mean())


def _rows(dataset: DemonstrationDataset, rows: torch.Tensor, instruction: str) -> Observation:
    return Observation(
        images={name: frames[rows] for name, frames in dataset.images.items()},
        proprio=dataset.proprio[rows],
        instruction=(instruction,) * len(rows),
    )


# ------------------------------------------------------------------------------------------------------------- rollouts
def rollout_episodes(tasks: Sequence[TaskSpec], episodes: int, seed: int, name: str = "reward") -> list[EpisodeSpec]:
    """Episodes on initial states of the train split, spread over the tasks; their ids are unique per name and seed."""
    out = []
    for i in range(episodes):
        task = tasks[i % len(tasks)]
        state = stable_seed(name, seed, i) % 1_000_000
        text = stable_seed(name, "text", seed, i) % max(1, len(task.instructions))
        rollout_id = f"{name}-{seed}-{i}"
        out.append(EpisodeSpec(task.task_id, state, "train", stable_seed(name, "seed", seed, i), i, text, rollout_id))
    return out


def save_rollouts(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories (observations, outcomes; not what only the learner needs) to ``folder``."""
    slim = [dataclasses.replace(t, replay={}, value=None, behavior_log_prob=torch.zeros(len(t))) for t in trajectories]
    save_state(folder, {"trajectories": [trajectory_state(t) for t in slim]})


def load_rollouts(folder: Path) -> list[Trajectory]:
    """Inverse of `save_rollouts`."""
    return [trajectory_from_state(t) for t in load_state(folder)["trajectories"]]


def roll_out(
    engine: Any, tasks: Sequence[TaskSpec], episodes: int, seed: int, progress: Any = None, name: str = "reward"
) -> tuple[list[Trajectory], int]:
    """(trajectories, control steps) of sampled actions on training initial states."""
    result = engine.collect(rollout_episodes(tasks, episodes, seed, name), progress=progress)
    return result.trajectories, int(result.stats["control_steps"])


# --------------------------------------------------------------------------------------------------------------- source
@dataclasses.dataclass(frozen=True)
class Source:
    """Trajectories of a folder, the robot they are of, and the config of the run they come from (None: no run)."""

    trajectories: list[Trajectory]
    embodiment: EmbodimentSpec | None
    run: Any
    what: str


def load_source(
    folder: str | Path,
    *,
    stride: int = 4,
    limit: int = 0,
    episodes: int = 64,
    checkpoint: str = "",
    overrides: Sequence[str] = (),
) -> Source:
    """Read a source (see the module). For a run, ``checkpoint`` names which of its checkpoints acts ("": rl, else sft).

    Raises `UserError` for a folder that is none of the three.
    """
    folder = Path(folder)
    if (folder / "meta" / "info.json").is_file():
        dataset = load_whoever(folder, functools.partial(_draw, limit=limit, seed=0))
        trajectories = demonstration_trajectories(dataset, stride=stride)
        what = "\n".join([f"{len(trajectories)} demonstrations of {folder}", *(f"warning: {n}" for n in dataset.notes)])
        return Source(trajectories, dataset.embodiment, None, what)
    if (folder / "state.json").is_file():
        trajectories = load_rollouts(folder)
        return Source(trajectories, None, None, f"{len(trajectories)} rollouts of {folder}")
    if (folder / "config.yaml").is_file():
        return _of_run(folder, episodes, checkpoint, overrides)
    raise UserError(
        f"{folder} is neither a dataset (no meta/info.json), nor a run (no config.yaml), nor rollouts (no state.json). Name "
        f"a folder that 'vla-rl collect', 'vla-rl train' or 'vla-rl reward score --save-rollouts' wrote."
    )


def _fingerprint(config: Any, checkpoint: Path) -> str:
    """Of what rollouts depend on: what is simulated, how the policy acts, and the checkpoint's files (size and time)."""
    from vla_rl import config as configs

    tree = configs.to_tree(config)
    acts = {k: tree[k] for k in ("env", "tasks", "held_out_tasks", "policy_changes", "rollout", "seed")}
    files = [p for p in sorted(checkpoint.glob("*")) if p.is_file()]
    states = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    text = json.dumps([acts, str(checkpoint.resolve()), states], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _of_run(folder: Path, episodes: int, checkpoint: str, overrides: Sequence[str]) -> Source:
    from vla_rl import config as configs
    from vla_rl.assembly import env_and_policy as opening
    from vla_rl.devices import pick_device
    from vla_rl.monitoring.progress import Progress
    from vla_rl.rollout.engine import RolloutEngine

    config = configs.override(configs.load(folder / "config.yaml"), list(overrides))
    names = [checkpoint] if checkpoint else ["rl", "sft"]
    found = next((folder / "checkpoints" / n for n in names if (folder / "checkpoints" / n).is_dir()), None)
    if found is None and config.checkpoint and not checkpoint:
        found = Path(config.checkpoint)
    if found is None:
        raise UserError(
            f"{folder} holds no checkpoint {' or '.join(names)} to roll out: finish its phase sft, or name another "
            "checkpoint"
        )
    kept = folder / ROLLOUTS / f"{found.name}-{episodes}-{_fingerprint(config, found)}"
    if (kept / "state.json").is_file():
        trajectories = load_rollouts(kept)
        return Source(trajectories, None, config, f"{len(trajectories)} rollouts kept in {kept}")
    with contextlib.closing(opening.open_env(config)) as env, Progress() as progress:
        policy = opening.acting_policy(config, found, env.embodiment)
        policy.to(pick_device(config.device))
        tasks = opening.select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        with progress.task("rollouts", episodes) as bar:
            engine = RolloutEngine(env, policy, config.rollout)
            trajectories, _ = roll_out(engine, tasks, episodes, config.seed, bar.update)
        embodiment = env.embodiment
    save_rollouts(kept, trajectories)
    return Source(trajectories, embodiment, config, f"{episodes} rollouts of {found}, kept in {kept}")
