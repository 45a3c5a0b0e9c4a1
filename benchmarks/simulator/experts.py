"""How often an env's scripted experts succeed, by task and by the noise that is put on what they
do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import table
from vla_rl import build
from vla_rl import config as configs
from vla_rl.errors import UserError
from vla_rl.specs import EpisodeSpec


def measure(
    overrides: Sequence[str],
    episodes: int,
    noise: Sequence[float],
    speed: float,
    split: str,
    perturb: str | None,
) -> dict[str, Any]:
    """Over initial states 0, 1, 2 … of ``split``. A task whose expert refuses it has the reason in
    place of figures."""
    config = configs.compose(list(overrides) or ["run=quickstart"])
    env: Any = config.env
    simulator = build.implementation("env", config.env_type)(env)
    collect = build.attribute(build.env_entry(config.env_type).collect)
    rows: list[dict[str, Any]] = []
    try:
        for task in simulator.tasks:
            for amount in noise:
                row = {"task": task.task_id, "noise": amount, "episodes": episodes}
                try:
                    runs = [
                        collect(
                            simulator,
                            EpisodeSpec(task.task_id, i, split, seed=i, perturbation=perturb or ""),
                            noise_std=amount,
                            **({} if speed == 1.0 else {"speed": speed}),
                        )
                        for i in range(episodes)
                    ]
                except UserError as error:
                    rows.append(row | {"none": str(error).split(". ")[0]})
                    break
                rows.append(row | figures(runs))
    finally:
        simulator.close()
    return {"env": config.env_type, "split": split, "speed": speed, "rows": rows}


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of `sim.recording.record_demonstration`'s ``runs``: how many succeeded, and those' mean and
    largest number of control steps."""
    lengths = [len(run["actions"]) for run in runs if run["success"]] or [0]
    wins = sum(bool(run["success"]) for run in runs)
    return {"successes": wins, "mean": sum(lengths) / len(lengths), "longest": max(lengths)}


def text(document: dict[str, Any]) -> str:
    rows = [
        (
            row["task"],
            f"{row['noise']:g}",
            *(
                (row["none"], "", "")
                if "none" in row
                else (
                    f"{row['successes']} of {row['episodes']}",
                    f"{row['mean']:.1f}",
                    str(row["longest"]),
                )
            ),
        )
        for row in document["rows"]
    ]
    return table([("task", "noise", "success", "mean control steps", "longest"), *rows])
