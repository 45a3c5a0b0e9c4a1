"""``vla-rl advise RUN``: is the start of a run one that RL can learn from, and what to change if
not?

`read_figures` gathers what the run left (its evaluation after SFT, metrics, demonstrations),
`roll_out_groups` measures what only episodes tell, and `start_checks.checks` judges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vla_rl.advice.start_checks import (
    BAD,
    GOOD,
    GROUP,
    WATCH,
    Check,
    Figures,
    Rate,
    checks,
    chunk_spread,
    overall,
)
from vla_rl.advice.suggestions import advice, image_figures
from vla_rl.assembly.folder import made_start
from vla_rl.checks.rewards import is_sparse
from vla_rl.config import RunConfig
from vla_rl.data.lerobot_reader import episode_lengths
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.learning.groups import success_rate
from vla_rl.learning.guard import Guard
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.options import AlgorithmFigures, EnvOptions, view
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec


# ------------------------------------------------------------------------------ what a run has left
def read_figures(config: RunConfig, folder: Path) -> Figures:
    """What the run left in its folder."""
    figures = Figures(group_size=config.rl.group_size, image=image_figures(config, folder))
    result = _result(folder / "eval_sft.json")
    trained = {
        k: v
        for k, v in result.get("tasks", {}).items()
        if k not in result.get("held_out_tasks", [])
    }
    figures.tasks = {name: Rate(s["successes"], s["episodes"]) for name, s in trained.items()}
    figures.deterministic = bool(result.get("deterministic", True))
    for task in trained.values():
        for kind, count in (task.get("failures") or {}).items():
            figures.failures[kind] = figures.failures.get(kind, 0) + int(count)
    if not figures.failures:
        figures.failures = {
            k: int(v) for k, v in (result.get("total", {}).get("failures") or {}).items()
        }
    figures.demonstrations = _demonstrations(config, folder)
    figures.limits = _limits(config, result, list(trained or figures.demonstrations))
    records = read_metrics(folder / METRICS_FILE)
    figures.losses = [
        r["validation/loss"]
        for r in records
        if r["phase"] == "sft" and r.get("validation/loss") is not None
    ]
    sampled = _result(folder / "sampled_sft.json").get("total")
    if sampled:
        figures.sampled = Rate(sampled["successes"], sampled["episodes"])
        figures.sampled_by = "the same episodes"
    _read_rl(
        figures,
        config,
        folder,
        [r for r in records if r["phase"] == "rl" and "rollout/success" in r],
    )
    return figures


def _read_rl(
    figures: Figures, config: RunConfig, folder: Path, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Success of the start in RL's own episodes (until the policy's first update), and what the
    guard says."""
    movement = view(config.algorithm, AlgorithmFigures).movement
    guard = Guard(config.rl, movement, is_sparse(config), advice(config, folder))
    before, start, changed = 0, Rate(0, 0), False
    for row in rows:
        episodes, before = int(row["episodes"]) - before, int(row["episodes"])
        if not changed:
            whole = episodes - int(row.get("rollout/led") or 0)
            start = Rate(
                start.successes + round(row["rollout/success"] * whole), start.episodes + whole
            )
            changed = not row.get(movement.critic_alone)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        guard.look(int(row["step"]), episodes, numbers)
    if start.episodes and figures.sampled is None:
        figures.sampled, figures.sampled_by = start, "RL's first episodes"
    if config.rl.guard_iterations and len(guard.rows) >= config.rl.guard_iterations:
        figures.guard = guard.finding.text if guard.finding else ""


def _limits(config: RunConfig, result: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, int]:
    """The time limit of each task; without ``env.horizon`` that of its episodes that failed,
    which is when time was up."""
    horizon = view(config.env, EnvOptions).horizon
    if horizon:
        return dict.fromkeys(tasks, int(horizon))
    limits: dict[str, int] = {}
    for o in result.get("outcomes", []):
        if o["task_id"] in tasks and not o["success"]:
            limits[o["task_id"]] = max(limits.get(o["task_id"], 0), int(o["control_steps"]))
    return limits


def _demonstrations(config: RunConfig, folder: Path) -> dict[str, list[int]]:
    """Lengths of the successful demonstrations that the start was trained on, as far as they are
    at hand."""
    places = [folder / "dataset", *map(Path, config.datasets)]
    if config.checkpoint:
        places.append(Path(config.checkpoint).parent.parent / "dataset")
    return next((found for place in places if (found := episode_lengths(place))), {})


def _result(path: Path) -> dict[str, Any]:
    """An evaluation's figures, counted from its episodes; empty where there is none. `UserError`
    for a damaged file."""
    return EvaluationResult.load(path).to_dict() if path.exists() else {}


# ----------------------------------------------------------------------------------------- rollouts
def group_episodes(
    tasks: Sequence[TaskSpec], episodes: int, size: int, seed: int
) -> list[EpisodeSpec]:
    """Groups of ``size`` episodes from one initial state of the train split each, tasks in turn;
    at least ``episodes``."""
    out = []
    for group in range(-(-episodes // size)):
        task, state = tasks[group % len(tasks)], stable_seed("advise", seed, group) % 1_000_000
        text = group // len(tasks) % max(1, len(task.instructions))
        for member in range(size):
            name = f"advise-{seed}-{group}-{member}"
            out.append(
                EpisodeSpec(task.task_id, state, "train", stable_seed(name), group, text, name)
            )
    return out


def roll_out_groups(figures: Figures, config: RunConfig, checkpoint: Path, episodes: int) -> None:
    """Roll out the start with sampled actions; fills ``sampled``, ``mixed``, ``spread`` and
    ``group_size``."""
    from vla_rl.assembly import env_and_policy as opening
    from vla_rl.devices import pick_device
    from vla_rl.monitoring.progress import Progress
    from vla_rl.rollout.engine import RolloutEngine

    size = config.rl.group_size if config.rl.group_size > 1 else GROUP
    with contextlib.closing(opening.open_env(config)) as env, Progress() as progress:
        policy = opening.acting_policy(config, checkpoint, env.embodiment).to(
            pick_device(config.device)
        )
        tasks = opening.select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        specs = group_episodes(tasks, episodes, size, config.seed)
        with progress.task("rollouts", len(specs)) as bar:
            engine = RolloutEngine(env, policy, config.rollout)
            rolled = engine.collect(specs, progress=bar.update).trajectories
    groups = [rolled[i : i + size] for i in range(0, len(rolled), size)]
    figures.sampled, figures.sampled_by = (
        Rate(sum(t.success for t in rolled), len(rolled)),
        "the rollouts just made",
    )
    figures.mixed = Rate(sum(0 < success_rate(group) < 1 for group in groups), len(groups))
    figures.spread = chunk_spread(groups, env.embodiment)
    figures.group_size = size


def start_of(config: RunConfig, folder: Path) -> Path | None:
    """The checkpoint that RL starts from, if it is there."""
    own = made_start(config, folder) or folder / "checkpoints" / "published"
    start = Path(config.checkpoint) if config.checkpoint else own
    return start if start.is_dir() else None


# -------------------------------------------------------------------------------------- the command
def advise(folder: Path, *, rollouts: int = 0, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Judge the start of a run; prints the checks, returns them JSON-ready.

    ``overrides`` change the run's config first (``env.horizon=90``: what if). Raises `UserError`
    for a folder that holds no start.
    """
    from vla_rl import config as configs

    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder} is no run: it has no config.yaml. Name a folder that 'vla-rl train' wrote"
        )
    config = configs.override(configs.load(folder / "config.yaml"), list(overrides))
    checkpoint = start_of(config, folder)
    figures = read_figures(config, folder)
    if checkpoint is None and not figures.tasks:
        raise UserError(
            f"{folder} holds no start to judge, neither checkpoints/sft nor eval_sft.json: finish "
            "its phases sft and eval_sft"
        )
    if rollouts < 0 or (rollouts and checkpoint is None):
        raise UserError(
            f"--rollouts {rollouts} needs a number above 0 and the checkpoint that RL "
            f"starts from in {folder}"
        )
    if rollouts and checkpoint is not None:
        roll_out_groups(figures, config, checkpoint, rollouts)
    found = checks(figures, config, folder)
    missing = list(_missing(figures))
    print(render(found, missing))
    return {
        "run": str(folder),
        "verdict": overall(found),
        "checks": [asdict(c) for c in found],
        "not_measured": missing,
    }


def _missing(figures: Figures) -> Iterator[str]:
    if figures.success is None:
        yield "held-out success: run the phase eval_sft"
    if not figures.image:
        yield "image use: sft.validation_episodes keeps demonstrations out to measure it on"
    if not figures.demonstrations or not figures.limits:
        yield (
            "time limit against demonstrations: needs the run's dataset, and env.horizon or an "
            "episode that failed"
        )
    if figures.mixed is None:
        yield (
            "groups with both outcomes, exploration"
            + ("" if figures.sampled else ", sampled success")
            + ": --rollouts 64"
        )


SUMMARY = {
    GOOD: "RL can learn from this start.",
    WATCH: "RL can learn from this start; what is marked “watch” slows it down, or bends what it "
    "learns.",
    BAD: "RL would learn little from this start: mend what is marked “bad” first.",
}


def render(found: Sequence[Check], missing: Sequence[str] = ()) -> str:
    """The checks as text: a line each, its remedy below."""
    lines = []
    for c in found:
        lines.append(f"{c.verdict:<6} {c.name}: {c.text} [good: {c.bounds}]")
        if c.remedy:
            lines.append(f"       → {c.remedy}")
    lines += [f"–      not measured: {text}" for text in missing]
    return "\n".join([*lines, SUMMARY[overall(found)]])
