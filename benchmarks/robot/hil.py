"""``vla-rl bench hil``: ways to learn from a person on an arm, side by side, in virtual time with a
scripted operator.

Every method starts from one policy with the same demonstrations, and is judged on the same held-out
starts, without help. ``bc`` has no episodes of its own: it imitates the human data of ``hil_serl``,
demonstrations and corrections, in as many updates as that made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning import curves
from benchmarks.learning.curves import reached
from benchmarks.measuring import say
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.assembly.learner_main import job_of, run_of
from vla_rl.data.replay import DEMONSTRATIONS, INTERVENTIONS, Replay
from vla_rl.display.words import text_table
from vla_rl.errors import ConfigError
from vla_rl.files import check_checkpoint
from vla_rl.monitoring.machine import versions
from vla_rl.monitoring.metrics import METRICS_FILE, MetricsLogger, read_metrics
from vla_rl.robot.episode_feed import RECENT
from vla_rl.robot.learning import Judge, Learning, compose, learn

CLONED, SOURCE = "bc", "hil_serl"
METHODS = {
    "hil_serl": ["run=hil_serl", "operator=stuck"],
    "hil_dagger": ["run=hil_dagger", "operator=stuck"],
    "hil_residual": ["run=hil_residual", "operator=stuck"],
    "residual_alone": ["run=hil_residual"],
    CLONED: ["run=hil_dagger"],
}


def measure(
    overrides: Sequence[str],
    start: Path,
    methods: str,
    episodes: int,
    every: int,
    judge: int,
    out: Path,
    figure: Path | None = None,
) -> dict[str, Any]:
    """Run each of ``methods`` (one that was interrupted goes on) for ``episodes``, judged on
    ``judge`` held-out ones ``every`` so many.

    Raises `ConfigError` for a method that there is not, or one whose data come from one that was
    left out.
    """
    names = [name for name in methods.split(",") if name]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ConfigError(
            f"--methods has {unknown[0] if unknown else 'none'!r}: choose among "
            f"{', '.join(METHODS)}"
        )
    if CLONED in names and SOURCE not in names and not (out / SOURCE / METRICS_FILE).exists():
        raise ConfigError(
            f"--methods has {CLONED}, which imitates the human data of {SOURCE}: name that too"
        )
    rows = []
    for name in sorted(names, key=lambda name: name == CLONED):
        watched = "operator=stuck" in METHODS[name]
        chosen = [
            *METHODS[name],
            *(o for o in overrides if watched or not o.startswith("operator")),
        ]
        learning = compose(
            str(start),
            out / name,
            chosen,
            episodes=episodes,
            console=False,
            lockstep=True,
            evaluate=judge,
            every=every,
        )
        say(f"{name}:")
        if name == CLONED:
            _clone(learning, out / SOURCE)
        else:
            learn(learning, say)
        rows.append(read_method(name, out / (SOURCE if name == CLONED else name), out / name))
    if figure is not None:
        write_figure(figure, rows)
    return {
        "bench": "hil",
        "start": str(start),
        "overrides": list(overrides),
        "episodes": episodes,
        "every": every,
        "judged": judge,
        "methods": rows,
        "versions": versions(),
    }


def text(document: Mapping[str, Any]) -> str:
    return table(document["methods"])


def _clone(learning: Learning, source: Path) -> None:
    """Train a new actor on what people did in ``source``, and judge it."""
    if any(row["phase"] == "judged" for row in read_metrics(learning.folder / METRICS_FILE)):
        return
    last = [row for row in read_metrics(source / METRICS_FILE) if row["phase"] == "robot"][-1]
    updates = int(last["learner/updates"])
    torch.manual_seed(learning.config.seed)
    spec = check_checkpoint(Path(learning.session.checkpoint))
    run = run_of(learning.config, job_of(learning.config, spec, []))
    policy = trained_policy(run)
    algorithm: Any = learner_of(run, policy)
    replay, generator = (
        Replay(source / "replay", episodes=None),
        torch.Generator().manual_seed(learning.config.seed),
    )
    say(
        f"{updates} updates on {replay.count(DEMONSTRATIONS)} and {replay.count(INTERVENTIONS)} "
        "decisions of people"
    )
    for _ in range(updates):
        algorithm.algorithm.update(partial(replay.draw, generator=generator))
    with MetricsLogger(learning.folder) as logger:
        figures = Judge(learning, policy, run.device)(learning.evaluate)
        logger.log("judged", int(last["robot/episodes"]), figures)


# ------------------------------------------------------------------------------------------ reading
def read_method(name: str, episodes: Path, judged: Path) -> dict[str, Any]:
    """What a method came to: held-out success over the minutes of the arm, and how much a person
    did, at first and at last.

    ``episodes`` is the run whose episodes it learned from, ``judged`` its own.
    """
    robot = [
        row
        for row in read_metrics(episodes / METRICS_FILE)
        if row["phase"] == "robot" and row.get("robot/episodes")
    ]
    minutes = {0: 0.0} | {
        int(row["robot/episodes"]): float(row["robot/robot_minutes"]) for row in robot
    }
    curve = [
        {
            "episodes": int(row["step"]),
            "minutes": minutes[int(row["step"])],
            "success": float(row["eval/success"]),
            "cycle_seconds": float(row["eval/cycle_seconds"]),
        }
        for row in read_metrics(judged / METRICS_FILE)
        if row["phase"] == "judged"
    ]
    kept = [row for row in robot if "robot/control_steps" in row]
    helped = [
        {"episodes": int(row["robot/episodes"]), "share": float(row["robot/recent_interventions"])}
        for row in kept
    ]
    return {
        "method": name,
        "curve": curve,
        "helped": [] if name == CLONED else helped,
        "first_interventions": _share(kept[:RECENT]),
        "last_interventions": _share(kept[-RECENT:]),
        "human_steps": sum(int(row["robot/human_steps"]) for row in kept),
    }


def _share(rows: Sequence[Mapping[str, Any]]) -> float:
    steps = sum(float(row["robot/control_steps"]) for row in rows)
    return sum(float(row["robot/human_steps"]) for row in rows) / max(steps, 1.0)


def table(rows: Sequence[Mapping[str, Any]], level: float = 0.95) -> str:
    lines = [
        (
            "method",
            "start",
            "end",
            "arm's minutes",
            f"minutes to {level:.0%}",
            "a person's steps, at first → at last",
        )
    ]
    for row in rows:
        curve, at = row["curve"], reached([point["success"] for point in row["curve"]], level)
        lines.append(
            (
                row["method"],
                f"{curve[0]['success']:.0%}" if len(curve) > 1 else "–",
                f"{curve[-1]['success']:.0%}",
                f"{curve[-1]['minutes']:.0f}",
                "not reached" if at is None else f"{curve[at]['minutes']:.0f}",
                f"{row['first_interventions']:.0%} → {row['last_interventions']:.0%}",
            )
        )
    return text_table(lines)


def write_figure(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One page: success over the arm's minutes, a person's share over episodes, and the table."""
    names = [row["method"] for row in rows]
    success = [
        curves.curve(row["method"], row["curve"], "minutes", i) for i, row in enumerate(rows)
    ]
    helped = [
        curves.curve(row["method"], row["helped"], "episodes", i, "share")
        for i, row in enumerate(rows)
    ]
    charts = (
        ("Success on held-out starts, without help", "minutes of the arm", success),
        (f"A person's share of the control steps, last {RECENT} episodes", "episodes", helped),
    )
    curves.write_page(path, "hil", "Learning from a person on the arm", names, charts, table(rows))
