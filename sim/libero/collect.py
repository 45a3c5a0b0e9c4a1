"""Scripted demonstrations on LIBERO: noise goes into what is executed, the label stays clean (DART,
Laskey et al. 2017).

``python -m sim.libero.collect --suite libero_object`` measures how often the experts succeed, and
prints a table; with ``--perturb layout:3`` on perturbed scenes, which shows whether they can still
be solved.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.libero.demonstrator import make_demonstrator
from sim.libero.perturb import PerturbedLibero
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from sim.libero.tasks import SUITES
from sim.recording import expert_figures, record_demonstration
from sim.slots import running
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EpisodeSpec, SlotObservation


def collect_episode(
    simulator: LiberoSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with a scripted expert; every camera is rendered at every control step.

    ``noise_std`` is the std of the Gaussian added to the executed translation, as a share of its
    half-range (rotations would drift, since LIBERO's are relative to the present orientation);
    ``rng`` draws it (default: from the episode's seed). ``speed`` scales the expert's motion (not
    the gripper). Row t of each array is what was seen at control step t, and the clean label for
    it. Returns ``images`` {camera: uint8 [T H W 3]}, ``proprio`` float32 [T 8], ``actions`` float32
    [T 7] (LIBERO's commands), ``instruction``, ``success``, ``task_id``, ``init_state_id``.
    `ConfigError` for absolute control, and for a task whose goal is not pick-and-place.
    """
    if simulator.config.control_mode != "relative":
        raise ConfigError(
            f"env.control_mode={simulator.config.control_mode!r}: the scripted experts give "
            "relative commands, use relative"
        )
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    observation = simulator.start(slot, episode)
    expert = make_demonstrator(simulator.state(slot))

    def act() -> np.ndarray:
        label = np.clip(expert.act(simulator.state(slot)), -1.0, 1.0)
        label[:6] *= speed
        return label

    def disturb(label: np.ndarray) -> np.ndarray:
        executed = label.copy()
        executed[:3] += noise_std * rng.standard_normal(3)
        return executed

    return record_demonstration(
        episode, observation, act, disturb, functools.partial(simulator.step, slot)
    )


class Blind(PerturbedLibero):
    """Steps without drawing: for measuring experts, which look at no picture."""

    def observe(self, slot: int) -> SlotObservation:
        """No images and no privileged state."""
        s = running(self._slots, slot, over=True)
        return SlotObservation({}, s.scene.proprio(s.seen), self.instruction_of(s.episode))


def measure_expert(
    simulator: LiberoSimulator,
    task_id: str,
    episodes: int,
    noise: float,
    *,
    speed: float = 1.0,
    split: str = "train",
    perturbation: str = "",
) -> tuple[int, float, int]:
    """(successes, mean and largest control steps of a success) over initial states 0, 1, 2 … of
    ``split``."""
    specs = [
        EpisodeSpec(task_id, i, split=split, seed=i, perturbation=perturbation)
        for i in range(episodes)
    ]
    runs = [collect_episode(simulator, spec, noise_std=noise, speed=speed) for spec in specs]
    return expert_figures(runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table of the experts' successes per task and noise."""
    parser = argparse.ArgumentParser(prog="python -m sim.libero.collect", description=main.__doc__)
    parser.add_argument("--suite", default="libero_object", choices=SUITES)
    parser.add_argument(
        "--tasks",
        nargs="*",
        default=[],
        metavar="TASK",
        help="numbers or names; none: the whole suite",
    )
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--speed", type=float, default=1.0, help="share of the expert's own speed")
    parser.add_argument(
        "--horizon",
        type=int,
        default=0,
        help="control steps an episode may last; 0: the suite's own",
    )
    parser.add_argument(
        "--split",
        default="train",
        choices=["train", "held_out"],
        help="sampled or official initial states",
    )
    parser.add_argument("--controller", default="fast", choices=["exact", "fast"])
    parser.add_argument(
        "--perturb",
        default="",
        metavar="NAME:LEVEL",
        help="for instance layout:3; see docs/how_to/robustness.md",
    )
    options = parser.parse_args(arguments)
    config = LiberoConfig(
        suite=options.suite,
        tasks=options.tasks,
        look="light",
        controller=options.controller,
        cameras=["agentview"],
        camera_size=16,
        built_scenes=1,
        horizon=options.horizon,
    )
    simulator = Blind(config)
    print(
        "| task | instruction | noise | success | mean control steps | longest "
        "|\n|---|---|---|---|---|---|"
    )
    for task in simulator.tasks:
        for noise in options.noise:
            start = f"| {task.task_id} | {task.instructions[0]} | {noise:g} |"
            try:
                successes, mean, longest = measure_expert(
                    simulator,
                    task.task_id,
                    options.episodes,
                    noise,
                    speed=options.speed,
                    split=options.split,
                    perturbation=options.perturb,
                )
            except UserError as error:
                print(f"{start} none: {str(error).split('. ')[0]} | | |", flush=True)
                break
            print(
                f"{start} {successes} of {options.episodes} | {mean:.1f} | {longest} |", flush=True
            )
    simulator.close()


if __name__ == "__main__":
    main()
