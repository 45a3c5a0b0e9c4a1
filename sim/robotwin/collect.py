"""RoboTwin's scripted experts: demonstrations at the rate of its own data, and whether a seed
can be solved."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sim.calls import Calls, check_machine
from sim.robotwin.branches import close
from sim.robotwin.seeds import SeedFile, candidates, take
from sim.robotwin.settings import RoboTwinConfig
from sim.robotwin.simulator import SAVE_EVERY, RoboTwinSimulator
from vla_rl.errors import UserError
from vla_rl.specs import EpisodeSpec


def collect_episode(
    simulator: RoboTwinSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    speed: float = 1.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """One demonstration of RoboTwin's expert: a frame each `SAVE_EVERY` physics steps, whose action
    is the next frame's commanded state, as in the data that RoboTwin publishes. Its motion is
    planned beforehand, so there is no noise and no other speed.
    """
    if noise_std or speed != 1.0:
        raise UserError(
            "RoboTwin's expert follows a plan: it cannot act under noise or at another speed. Set "
            f"collect.action_noise=0 and collect.speed=1 (they are {noise_std:g} and {speed:g})"
        )
    if simulator.config.control != "qpos":
        raise UserError(
            "RoboTwin's expert demonstrates joint targets: set env.control=qpos (it is ee)"
        )
    first = simulator.start(slot, episode)
    task, config = simulator.task(slot), simulator.config
    images: dict[str, list[np.ndarray]] = {name: [] for name in config.cameras}
    states: list[np.ndarray] = []

    def frame(*_: Any) -> None:
        task.cameras.update_picture()
        pictures = task.cameras.get_rgb()
        for name, kept in images.items():
            kept.append(np.ascontiguousarray(pictures[name]["rgb"]))
        states.append(simulator.proprio(task))

    task._take_picture, task.save_freq, task.save_data = frame, SAVE_EVERY, True
    solved = _plays(task)
    commanded = np.stack(states)
    return {
        "images": {name: np.stack(kept[:-1]) for name, kept in images.items()},
        "proprio": commanded[:-1],
        "actions": commanded[1:],
        "instruction": first.instruction,
        "success": solved,
        "task_id": episode.task_id,
        "init_state_id": episode.init_state_id,
    }


def _plays(task: Any) -> bool:
    """Let the expert act; whether its plans were found and the task is done."""
    with contextlib.redirect_stdout(io.StringIO()):
        task.play_once()
    return bool(task.plan_success and task.check_success())


def fingerprint(simulator: RoboTwinSimulator, task: str) -> str:
    return simulator.checkout.fingerprint(task)


def find_seeds(
    config: RoboTwinConfig,
    wanted: dict[str, int],
    file: Path,
    *,
    workers: int = 1,
    python: str = "",
) -> Iterator[str]:
    """Find ``wanted`` {split: number} solved seeds of the config's one task and write them into
    ``file``; yields a line a split.

    Seeds are tried in order, up to fifty times as many as are wanted. The file is written after
    each split.
    """
    (name,) = config.tasks
    check_machine(config, python)
    seeds = SeedFile.read(file) if file.exists() else SeedFile(file, {})
    died = (
        "a process that tried seeds of RoboTwin died (out of memory?). Run again with --workers 1"
    )
    with Calls(
        functools.partial(RoboTwinSimulator, config), workers, died=died, python=python
    ) as calls:
        mark = calls.one(fingerprint, name)
        entry = {"fingerprint": mark, "solved": {}, "failed": {}}
        for split, number in wanted.items():
            asked = ((name, seed, split) for seed in candidates(config.seed_list, split, number))
            tried = (tuple(answer) for answer in calls.ordered(solve, asked))
            solved, failed = take(name, split, number, tried)
            entry["solved"][split], entry["failed"][split] = solved, failed
            seeds.tasks[name] = entry
            seeds.write()
            share = len(solved) / (len(solved) + len(failed))
            yield f"{name} {split}: {len(solved)} seeds solved, {share:.0%} of those tried; {file}"


def robot_of(config: RoboTwinConfig, python: str = "") -> dict[str, Any]:
    """The embodiment (`EmbodimentSpec.to_dict`) that an env of ``config`` has, of a process that
    opens it."""
    check_machine(config, python)
    died = "the process that opened RoboTwin died"
    with Calls(functools.partial(RoboTwinSimulator, config), died=died, python=python) as calls:
        return calls.one(_robot)


def _robot(simulator: RoboTwinSimulator, _: None) -> dict[str, Any]:
    return simulator.embodiment.to_dict()


def solve(simulator: RoboTwinSimulator, asked: tuple[str, int, str]) -> tuple[int, str]:
    """(seed, why the expert does not solve it); the text is empty where it does."""
    name, seed, split = asked
    try:
        task, _ = simulator.set_up(name, seed, split)
    except UserError:
        return seed, "unstable"
    try:
        return seed, "" if _plays(task) else "no success" if task.plan_success else "no plan"
    except (
        Exception
    ) as error:  # RoboTwin's experts stop with whatever goes wrong when no grasp can be planned
        return seed, f"{type(error).__name__}: {error}"
    finally:
        close(task)
