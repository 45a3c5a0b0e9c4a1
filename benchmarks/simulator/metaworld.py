"""MetaWorld's scripted policies through env=gym against the package's own loop, episode by
episode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.measuring import say, table
from vla_rl import build
from vla_rl import config as configs
from vla_rl.errors import MissingPackage
from vla_rl.specs import EpisodeSpec


def measure(overrides: Sequence[str], episodes: int) -> dict[str, Any]:
    """Both run the held-out initial states 0, 1, 2 … of each task, which are its env's seeds 1, 3,
    5 …; the package's loop in that order, ours in the reverse one, in an env that ran others."""
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise MissingPackage("metaworld", "metaworld", "vla-rl bench metaworld") from error
    tasks = f"env.tasks=[{','.join(ALL_V3_ENVIRONMENTS)}]"
    given = ["run=gym", "env=metaworld", "env.observe=state", tasks, *overrides]
    env: Any = configs.compose(given).env
    simulator = build.implementation("env", "gym")(env)
    collect = build.attribute(build.env_entry("gym").collect)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its policies say that their actions are clipped
        for task in simulator.tasks:
            own = list(own_loop(env.options, task.task_id, task.horizon, episodes))
            ours = [
                collect(simulator, EpisodeSpec(task.task_id, i, "held_out"))
                for i in reversed(range(episodes))
            ][::-1]
            rows.append(row := compared(task.task_id, own, ours))
            say(", ".join(f"{key} {value}" for key, value in row.items()))
    simulator.close()
    differ = [row["task"] for row in rows if row["equal"] != episodes]
    return {
        "episodes": episodes,
        "rows": rows,
        "problems": [f"{', '.join(differ)}: not the package's own episodes"] if differ else [],
    }


def own_loop(
    options: dict[str, Any], task: str, horizon: int, episodes: int
) -> Iterator[tuple[np.ndarray, bool]]:
    """(what was seen before each action [t d], success) of each episode, as the package's users run
    its policies: until success or the time limit."""
    import gymnasium
    from metaworld.policies import ENV_POLICY_MAP

    env: Any = gymnasium.make("Meta-World/MT1", env_name=task, **options)
    policies: Any = ENV_POLICY_MAP
    policy = policies[task]()
    for i in range(episodes):
        env.unwrapped.seed(2 * i + 1)  # its reset ignores seeds
        seen, shown = env.reset()[0], []
        for _ in range(horizon):
            shown.append(seen.copy())  # some policies write into what they are given
            seen, _, terminated, truncated, info = env.step(policy.get_action(seen))
            if info["success"] or terminated or truncated:
                break
        yield np.array(shown, dtype=np.float32), bool(info["success"])
    env.close()


def compared(
    task: str, own: Sequence[tuple[np.ndarray, bool]], ours: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """``equal`` episodes ended alike, and showed the same numbers before each action."""
    return {
        "task": task,
        "own": sum(success for _, success in own),
        "ours": sum(bool(run["success"]) for run in ours),
        "equal": sum(
            success == run["success"] and np.array_equal(shown, run["proprio"])
            for (shown, success), run in zip(own, ours, strict=True)
        ),
        "control_steps": sum(len(shown) for shown, _ in own),
    }


def text(document: dict[str, Any]) -> str:
    rows, n = document["rows"], document["episodes"]
    own, ours, equal = (sum(row[key] for row in rows) for key in ("own", "ours", "equal"))
    lines = [
        (row["task"], str(row["own"]), str(row["ours"]), f"{row['equal']} of {n}") for row in rows
    ]
    total = (f"all {len(rows)}", str(own), str(ours), f"{equal} of {n * len(rows)}")
    return table([("task", "own loop", "env=gym", "equal episodes"), *lines, total])
