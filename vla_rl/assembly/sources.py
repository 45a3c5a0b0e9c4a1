"""Trajectories that a user names by a folder, for reward models: of a dataset, of saved rollouts,
or of a run.

A source is a LeRobotDataset v3 (``meta/info.json``), rollouts that `save_rollouts` wrote
(``state.json``), or a run (``config.yaml``), whose policy is rolled out once; those rollouts are
kept in ``<run>/rollouts``, and made anew where the checkpoint or the config is another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from vla_rl import config as configs
from vla_rl.assembly.env_and_policy import acting_policy, open_env, select_tasks
from vla_rl.config import RunConfig
from vla_rl.data.trajectories import (
    ROLLOUTS,
    Source,
    dataset_source,
    load_rollouts,
    rollouts_source,
    save_rollouts,
)
from vla_rl.devices import pick_device
from vla_rl.errors import UserError
from vla_rl.monitoring.progress import Progress
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.rollout.episodes import roll_out


def load_source(
    folder: str | Path,
    *,
    stride: int = 4,
    limit: int = 0,
    episodes: int = 64,
    checkpoint: str = "",
    overrides: Sequence[str] = (),
    to_learn_from: bool = False,
) -> Source:
    """Read a source (see the module). For a run, ``checkpoint`` names which of its checkpoints acts
    ("": rl, else sft). ``to_learn_from``: of a dataset only what its run does not keep out.

    Raises `UserError` for a folder that is none of the three.
    """
    folder = Path(folder)
    if (folder / "meta" / "info.json").is_file():
        return dataset_source(folder, stride=stride, limit=limit, to_learn_from=to_learn_from)
    if (folder / "state.json").is_file():
        return rollouts_source(folder)
    if (folder / "config.yaml").is_file():
        return _of_run(folder, episodes, checkpoint, overrides)
    raise UserError(
        f"{folder} is neither a dataset (no meta/info.json), nor a run (no config.yaml), nor "
        "rollouts (no state.json). Name a folder that 'vla-rl collect', 'vla-rl train' or 'vla-rl "
        "reward score --save-rollouts' wrote."
    )


def _fingerprint(config: RunConfig, checkpoint: Path) -> str:
    """Of what rollouts depend on: what is simulated, how the policy acts, and the checkpoint's
    files (size and time)."""
    tree = configs.to_tree(config)
    acts = {
        k: tree[k] for k in ("env", "tasks", "held_out_tasks", "policy_changes", "rollout", "seed")
    }
    files = [p for p in sorted(checkpoint.glob("*")) if p.is_file()]
    states = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    text = json.dumps([acts, str(checkpoint.resolve()), states], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _of_run(folder: Path, episodes: int, checkpoint: str, overrides: Sequence[str]) -> Source:
    config = configs.override(configs.load(folder / "config.yaml"), list(overrides))
    names = [checkpoint] if checkpoint else ["rl", "sft"]
    found = next(
        (folder / "checkpoints" / n for n in names if (folder / "checkpoints" / n).is_dir()), None
    )
    if found is None and config.checkpoint and not checkpoint:
        found = Path(config.checkpoint)
    if found is None:
        raise UserError(
            f"{folder} holds no checkpoint {' or '.join(names)} to roll out: finish its phase sft, "
            "or name another checkpoint"
        )
    kept = folder / ROLLOUTS / f"{found.name}-{episodes}-{_fingerprint(config, found)}"
    if (kept / "state.json").is_file():
        trajectories = load_rollouts(kept)
        return Source(trajectories, None, config, f"{len(trajectories)} rollouts kept in {kept}")
    with contextlib.closing(open_env(config)) as env, Progress() as progress:
        policy = acting_policy(config, found, env.embodiment)
        policy.to(pick_device(config.device))
        tasks = select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        with progress.task("rollouts", episodes) as bar:
            engine = RolloutEngine(env, policy, config.rollout)
            trajectories, _ = roll_out(engine, tasks, episodes, config.seed, bar.update)
        embodiment = env.embodiment
    save_rollouts(kept, trajectories)
    return Source(
        trajectories, embodiment, config, f"{episodes} rollouts of {found}, kept in {kept}"
    )
