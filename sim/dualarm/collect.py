"""Scripted demonstrations: noise goes into what is executed, the label stays clean (DART, Laskey et
al. 2017).

``python -m sim.dualarm.collect`` measures how often the experts succeed, and prints a table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.dualarm.kinematics import JOINTS
from sim.dualarm.settings import CONTROLS, DualArmConfig
from sim.dualarm.simulator import MAX_STEP, DualArmSimulator
from sim.dualarm.tasks import TASKS
from sim.recording import expert_figures, record_demonstration
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: DualArmSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is drawn at every control step.

    ``noise_std`` is the std of the Gaussian added to what each joint is told, as a share of the
    most that it may move in a control step (`sim.dualarm.simulator.MAX_STEP`); grippers get none.
    ``rng`` draws it (default: from the episode's seed). ``speed`` scales the expert's motion. The
    result is `sim.recording.record_demonstration`'s.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    spread = noise_std * MAX_STEP * np.tile([*[1.0] * JOINTS, 0.0], 2)
    observation = simulator.start(slot, episode)
    expert = simulator.demonstrator(slot, speed)

    def act() -> np.ndarray:
        return simulator.action(slot, expert.act(simulator.state(slot)))

    def disturb(label: np.ndarray) -> np.ndarray:
        return label + spread * rng.standard_normal(len(label))

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )


def measure_expert(
    task: str,
    episodes: int,
    noise: float,
    *,
    control: str = "joint_delta",
    split: str = "train",
    speed: float = 1.0,
) -> tuple[int, float, int]:
    """Successes, mean and largest control steps of a success, over initial states 0, 1, 2 ... of
    ``split``."""
    simulator = DualArmSimulator(DualArmConfig(tasks=[task], control=control, observe="state"))
    specs = [EpisodeSpec(task, i, split=split, seed=i) for i in range(episodes)]
    runs = [collect_episode(simulator, spec, noise_std=noise, speed=speed) for spec in specs]
    simulator.close()
    return expert_figures(runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table of the experts' successes per task and noise."""
    parser = argparse.ArgumentParser(prog="python -m sim.dualarm.collect", description=main.__doc__)
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK"
    )
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.3])
    parser.add_argument("--control", default="joint_delta", choices=CONTROLS)
    parser.add_argument("--split", default="train", choices=["train", "held_out"])
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args(arguments)
    print("| task | noise | success | mean control steps | longest |\n|---|---|---|---|---|")
    for noise in options.noise:
        for task in options.tasks:
            successes, mean, longest = measure_expert(
                task,
                options.episodes,
                noise,
                control=options.control,
                split=options.split,
                speed=options.speed,
            )
            print(
                f"| {task} | {noise:g} | {successes} of {options.episodes} | {mean:.1f} | "
                f"{longest} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
