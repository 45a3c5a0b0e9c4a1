"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et
al. 2017).

``python -m sim.tabletop.collect`` measures how often the experts succeed, and prints a table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.recording import expert_figures, record_demonstration
from sim.tabletop.demonstrator import Demonstrator
from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from sim.tabletop.tasks import TASKS
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: TabletopSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
    demonstrator: Demonstrator | None = None,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is rendered at every control step.

    ``noise_std`` is the std of the Gaussian added to all executed action dimensions but the
    gripper, as a share of the action's half-range; ``rng`` draws it (default: from the episode's
    seed). ``speed`` scales the expert's motion (not the gripper). Row t of each array is what was
    seen at control step t, and the clean label for it. Returns ``images`` {camera: uint8 [T H W
    3]}, ``proprio`` float32 [T p], ``actions`` float32 [T a] (physical units), ``instruction``,
    ``success``, ``task_id``, ``init_state_id``.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    expert = simulator.demonstrator(episode.task_id) if demonstrator is None else demonstrator
    half_range = np.array(simulator.embodiment.action_high)
    spread = noise_std * half_range
    spread[-1] = 0.0
    observation = simulator.start(slot, episode)

    def act() -> np.ndarray:
        label = np.clip(expert.act(simulator.state(slot)), -half_range, half_range)
        label[:-1] *= speed
        return label

    def disturb(label: np.ndarray) -> np.ndarray:
        return label + spread * rng.standard_normal(len(label))

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )


def measure_experts(
    tasks: Sequence[str],
    episodes: int,
    noise: float,
    *,
    controller: str = "osc_position",
    split: str = "train",
) -> dict[str, tuple[int, float, int]]:
    """{task: (successes, mean and largest control steps of a success)} over initial states 0, 1,
    2 ... of ``split``."""
    config = TabletopConfig(
        tasks=list(tasks), controller=controller, cameras=["agentview"], camera_size=16
    )
    simulator, result = TabletopSimulator(config), {}
    for task in tasks:
        specs = [EpisodeSpec(task, i, split=split, seed=i) for i in range(episodes)]
        runs = [collect_episode(simulator, spec, noise_std=noise) for spec in specs]
        result[task] = expert_figures(runs)
    simulator.close()
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table of the experts' successes per task and noise."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.tabletop.collect", description=main.__doc__
    )
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK"
    )
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.3])
    parser.add_argument(
        "--controller", default="osc_position", choices=["osc_position", "osc_pose"]
    )
    options = parser.parse_args(arguments)
    print("| task | noise | success | mean control steps | longest |\n|---|---|---|---|---|")
    for noise in options.noise:
        figures = measure_experts(
            options.tasks, options.episodes, noise, controller=options.controller
        )
        for task, (successes, mean, longest) in figures.items():
            print(
                f"| {task} | {noise:g} | {successes} of {options.episodes} | {mean:.1f} | "
                f"{longest} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
