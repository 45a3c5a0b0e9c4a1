"""`vla-rl bench sim`: robosuite's plain gym stepping and this suite's simulator, on the same
actions, in one run.

Both step the same compiled scenes (`sim.tabletop.scene`) with the same look, from the same states
and with the same actions (those of the scripted experts under noise). The plain side is robosuite's
own `reset` and `step` with its camera observations at every control step; ours renders once per
chunk. Pixels are compared at every decision.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measuring import Stopwatch, memory_mb, table
from benchmarks.simulator.pool import measure_pool
from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec

NOISE = 0.2  # of the range, in the executed actions
ROUNDS = 3  # the fastest counts
PATIENCE = 60.0  # seconds of stepping after which no further round begins
_RESETS = 20
_MAX_STATES = 100_000


def measure(
    suite: str = "tabletop",
    tasks: Sequence[str] = ("lift_cube",),
    chunk: int = 8,
    workers: Sequence[int] = (1, 2),
    steps: int = 160,
    look: str = "light",
    camera_size: int = 84,
) -> dict[str, Any]:
    """``steps`` control steps per task and measurement; ``workers`` lists the sizes of the process
    pool to measure (empty: none). Times are milliseconds per control step, memory is MB (10^6
    bytes).
    """
    if chunk < 1 or steps < 1 or not tasks:
        raise ConfigError(
            f"bench needs chunk >= 1, steps >= 1 and a task, got {chunk}, {steps} and {list(tasks)}"
        )
    config = TabletopConfig(tasks=list(tasks), look=look, camera_size=camera_size)
    simulator = TabletopSimulator(config)
    episodes = [episode for task in tasks for episode in record(simulator, task, steps)]
    envs = open_plain(simulator, episodes)
    ours = functools.partial(run_ours, simulator, episodes, chunk)
    plain = functools.partial(run_plain, simulator, envs, episodes)
    rounds: list[list[Timing]] = []
    began = time.perf_counter()
    # in turns: the machine's load meets both
    while len(rounds) < ROUNDS and time.perf_counter() - began <= PATIENCE:
        rounds.append([run(watched=watched) for run in (ours, plain) for watched in (False, True)])
    columns = list(zip(*rounds))
    pixels = compare(simulator, envs, episodes, chunk)
    ours_figures = figures(*columns[:2]) | ours_resets(simulator, episodes)
    plain_figures = figures(*columns[2:]) | plain_resets(simulator, envs)
    for env in envs.values():
        env.close()
    document: dict[str, Any] = {
        "suite": suite,
        "tasks": list(tasks),
        "chunk": chunk,
        "steps": sum(len(a) for _, a in episodes),
        "look": look,
        "camera_size": camera_size,
        "cameras": list(config.cameras),
        "gl": os.environ.get("MUJOCO_GL", ""),
        "cpus": os.cpu_count(),
        "rounds": ROUNDS,
        "plain": plain_figures,
        "simulator": ours_figures,
        "pixels": pixels,
        "pool": {
            str(n): measure_pool(functools.partial(TabletopSimulator, config), episodes, chunk, n)
            for n in workers
        },
    }
    simulator.close()
    return document | {"ratios": ratios(document)}


def record(
    simulator: TabletopSimulator, task: str, steps: int
) -> Iterator[tuple[EpisodeSpec, np.ndarray]]:
    """Episodes of ``task`` with the actions [t a] that an expert under noise takes, ``steps``
    control steps in all."""
    taken = 0
    half_range = np.array(simulator.embodiment.action_high)
    for init_state_id in range(_MAX_STATES):
        episode = EpisodeSpec(task, init_state_id)
        rng = np.random.default_rng(init_state_id)
        expert, actions, ended = simulator.demonstrator(task), [], False
        simulator.start(0, episode)
        while not ended and taken < steps:
            noise = NOISE * half_range * rng.standard_normal(len(half_range))
            noise[-1] = 0.0
            actions.append(
                np.clip(expert.act(simulator.state(0)) + noise, -half_range, half_range).astype(
                    np.float32
                )
            )
            result = simulator.step(0, actions[-1][None])
            ended = result.terminated or result.truncated
            taken += 1
        yield episode, np.stack(actions)
        if taken >= steps:
            return


@dataclass
class Timing:
    """One run over all episodes: its seconds and control steps, and the seconds of its parts
    where it was watched."""

    seconds: float
    steps: int
    parts: dict[str, float]


def figures(untouched: Sequence[Timing], watched: Sequence[Timing]) -> dict[str, float]:
    """Of the fastest of several runs, untouched and watched."""
    best, seen = (min(runs, key=lambda timing: timing.seconds) for runs in (untouched, watched))
    physics, rendering = seen.parts["physics"], seen.parts["rendering"]
    parts = {
        "physics": physics,
        "control": seen.seconds - physics - rendering,
        "rendering": rendering,
    }
    own = {
        "steps_per_second": best.steps / best.seconds,
        "ms_per_step": 1e3 * best.seconds / best.steps,
    }
    return own | {f"ms_{name}": 1e3 * seconds / seen.steps for name, seconds in parts.items()}


def run_ours(
    simulator: TabletopSimulator, episodes: Sequence, chunk: int, watched: bool = False
) -> Timing:
    """Step all episodes in slot 0 of this process's simulator; resets are not counted."""
    watch, scenes = Stopwatch(), list(simulator.scenes())
    if watched:
        for scene in scenes:
            scene.controller.step1 = watch.wrap("physics", scene.controller.step1)
            scene.controller.step2 = watch.wrap("physics", scene.controller.step2)
    seconds, count = 0.0, 0
    for episode, actions in episodes:
        simulator.start(0, episode)
        simulator.timed = watch.wrap if watched else None
        start = time.perf_counter()
        for i in range(0, len(actions), chunk):
            count += simulator.step(0, actions[i : i + chunk]).executed
        seconds += time.perf_counter() - start
        simulator.timed = None
    for scene in scenes:
        scene.controller.untimed()
    return Timing(seconds, count, watch.seconds)


def ours_resets(simulator: TabletopSimulator, episodes: Sequence) -> dict[str, float]:
    """Resets, and the memory of further slots."""
    fresh, cached = _reset_times(simulator, episodes)
    return {
        "ms_reset": 1e3 * fresh,
        "ms_reset_cached": 1e3 * cached,
        "mb_per_slot": _slot_memory(simulator, episodes),
    }


def _reset_times(simulator: TabletopSimulator, episodes: Sequence) -> tuple[float, float]:
    """Mean seconds of `start` for initial states never seen before, and for cached ones (one
    picture each included)."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        for i in range(_RESETS):
            task = episodes[i % len(episodes)][0].task_id
            simulator.start(0, EpisodeSpec(task, _MAX_STATES + i))
        times.append((time.perf_counter() - start) / _RESETS)
    return times[0], times[1]


def _slot_memory(simulator: TabletopSimulator, episodes: Sequence, slots: int = 8) -> float:
    """MB that each further slot takes, with one chunk run in it for every task."""
    tasks = sorted({episode.task_id for episode, _ in episodes})
    before = memory_mb()
    for slot in range(1, slots + 1):
        for task in tasks:
            episode, actions = next(e for e in episodes if e[0].task_id == task)
            simulator.start(slot, episode)
            simulator.step(slot, actions[:8])
    return (memory_mb() - before) / slots


def _plain_options(simulator: TabletopSimulator) -> dict[str, Any]:
    config = simulator.config
    return {
        "has_offscreen_renderer": True,
        "use_camera_obs": True,
        "camera_names": list(config.cameras),
        "camera_heights": config.camera_size,
        "camera_widths": config.camera_size,
        "look": config.look,
        "look_size": config.camera_size,
    }


def open_plain(simulator: TabletopSimulator, episodes: Sequence) -> dict[str, Any]:
    """A plain robosuite environment per scene that the episodes need, with camera observations."""
    from sim.tabletop import scene as scenes

    names = sorted({simulator.scene_of(episode.task_id) for episode, _ in episodes})
    envs = {
        name: scenes.make_env(name, simulator.config.controller, **_plain_options(simulator))
        for name in names
    }
    for env in envs.values():
        env.reset()
    return envs


def run_plain(
    simulator: TabletopSimulator, envs: dict[str, Any], episodes: Sequence, watched: bool = False
) -> Timing:
    """Step all episodes with robosuite's own `step`; resets are not counted."""
    watch, saved = Stopwatch(), []
    if watched:
        for env in envs.values():
            for name, part in (
                ("step", "physics"),
                ("forward", "physics"),
                ("render", "rendering"),
            ):
                saved.append((env.sim, name))
                setattr(env.sim, name, watch.wrap(part, getattr(env.sim, name)))
    seconds, count = 0.0, 0
    parts: dict[str, float] = {}
    for episode, actions in episodes:
        env = envs[simulator.scene_of(episode.task_id)]
        same_start(simulator, env, episode)
        scaled = actions.astype(np.float64) / np.array(simulator.embodiment.action_high)
        watch.seconds.clear()
        start = time.perf_counter()
        for row in scaled:
            env.step(row)
        seconds += time.perf_counter() - start
        count += len(actions)
        for part, spent in watch.seconds.items():
            parts[part] = parts.get(part, 0.0) + spent
    for holder, name in saved:
        delattr(holder, name)  # the class's own method shows again
    return Timing(seconds, count, parts)


def plain_resets(simulator: TabletopSimulator, envs: dict[str, Any]) -> dict[str, float]:
    """What another environment of the first scene takes, and how long robosuite's default (hard)
    reset of it lasts."""
    from sim.tabletop import scene as scenes

    before = memory_mb()
    options = _plain_options(simulator) | {"hard_reset": True}
    another = scenes.make_env(next(iter(envs)), simulator.config.controller, **options)
    another.step(np.zeros(another.action_dim))
    megabytes = memory_mb() - before
    start = time.perf_counter()
    another.reset()
    reset = time.perf_counter() - start
    another.close()
    return {"ms_reset": 1e3 * reset, "mb_per_slot": megabytes}


def same_start(simulator: TabletopSimulator, env: Any, episode: EpisodeSpec) -> None:
    """Start the episode in slot 0 and put a plain environment into the very same state."""
    import mujoco

    simulator.start(0, episode)
    snapshot = simulator.initial_state(episode)
    model, data = env.sim.model._model, env.sim.data._data
    env.done, env.timestep, env.cur_time = False, 0, 0.0
    mujoco.mj_resetData(model, data)
    mujoco.mj_setState(model, data, snapshot.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)
    robot = env.robots[0]
    robot.controller.update(force=True)
    robot.controller.goal_ori = snapshot.control.goal_rotation.copy()
    robot.gripper.current_action = snapshot.control.gripper.copy()


def compare(
    simulator: TabletopSimulator, envs: dict[str, Any], episodes: Sequence, chunk: int
) -> dict[str, float]:
    """Pixels of both sides after every chunk (robosuite's own `sim.render`), and joint states
    after every chunk."""
    decisions = same = 0
    worst_pixel, worst_position = 0, 0.0
    size, half_range = simulator.config.camera_size, np.array(simulator.embodiment.action_high)
    for episode, actions in episodes:
        env = envs[simulator.scene_of(episode.task_id)]
        same_start(simulator, env, episode)
        for i in range(0, len(actions), chunk):
            observation = simulator.step(0, actions[i : i + chunk]).observation
            for row in actions[i : i + chunk].astype(np.float64) / half_range:
                env.step(row)
            pictures = {
                c: env.sim.render(size, size, camera_name=c)[::-1] for c in observation.images
            }
            difference = max(
                int(np.abs(pictures[c].astype(int) - observation.images[c]).max())
                for c in observation.images
            )
            decisions += 1
            same += difference == 0
            worst_pixel = max(worst_pixel, difference)
            qpos = simulator.physics(0).qpos
            worst_position = max(
                worst_position, float(np.abs(qpos - env.sim.data._data.qpos).max())
            )
    return {
        "decisions": decisions,
        "identical": same,
        "largest_pixel_difference": worst_pixel,
        "largest_qpos_difference": worst_position,
    }


def ratios(document: dict[str, Any]) -> dict[str, float]:
    """How many times faster, or smaller, than robosuite's plain stepping."""
    plain, ours = document["plain"], document["simulator"]
    result = {
        "steps_per_second": ours["steps_per_second"] / plain["steps_per_second"],
        "reset": plain["ms_reset"] / ours["ms_reset"],
        "memory_per_slot": plain["mb_per_slot"] / max(ours["mb_per_slot"], 0.1),
    }
    for workers, pool in document["pool"].items():
        result[f"steps_per_second_pool_{workers}"] = (
            pool["steps_per_second"] / plain["steps_per_second"]
        )
    return result


def text(document: Mapping[str, Any]) -> str:
    plain, ours, pools, times = (
        document["plain"],
        document["simulator"],
        document["pool"],
        document["ratios"],
    )
    columns = {"robosuite": plain, "simulator": ours} | {
        f"pool x{n}": pool for n, pool in pools.items()
    }
    keys = {
        "control steps/s": "steps_per_second",
        "ms per control step": "ms_per_step",
        "  physics": "ms_physics",
        "  control": "ms_control",
        "  rendering": "ms_rendering",
        "  transport": "ms_transport",
        "ms per reset": "ms_reset",
        "MB per further slot": "mb_per_slot",
    }
    rows = [("", *columns)]
    for label, key in keys.items():
        rows.append(
            (label, *(f"{column[key]:.2f}" if key in column else "" for column in columns.values()))
        )
    speed = [1.0, times["steps_per_second"], *(times[f"steps_per_second_pool_{n}"] for n in pools)]
    rows.append(("times robosuite", *(f"{value:.2f}" for value in speed)))
    pixels = document["pixels"]
    return (
        f"{', '.join(document['tasks'])} · chunk {document['chunk']} · {document['look']} look · "
        f"{len(document['cameras'])} cameras of {document['camera_size']} px · {document['cpus']} "
        f"CPUs\n{table(rows)}\npixels identical at {pixels['identical']} of {pixels['decisions']} "
        f"decisions (largest difference {pixels['largest_pixel_difference']} of 255, of joint "
        f"states {pixels['largest_qpos_difference']:.1e})"
    )
