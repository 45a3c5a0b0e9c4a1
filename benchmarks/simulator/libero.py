"""`vla-rl bench sim --suite libero_...`: LIBERO as others step it, and this simulator, on the same
actions.

Baselines: "lerobot", its `LiberoEnv` with both cameras at the same size; and "rebuilding", the way
of SimpleVLA-RL and RLinf, which render both cameras at 256 px at every control step and build the
scene anew at every training reset. Ours runs the same actions chunk by chunk, at chunks of 1 and 4
too, for pictures at decisions are what it saves. Like is compared with like: several workers with
as many processes of lerobot's, a task's first episode with building its environment, later ones
with a reset of an environment that was kept. Physics and pixels are compared at every decision of
one episode in which the hand presses on things, the first one of a new lerobot environment.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.measuring import Stopwatch, memory_mb, timed
from benchmarks.simulator import libero_table
from benchmarks.simulator.libero_table import BOTH, VARIANTS, ratios
from benchmarks.simulator.pool import measure_pool
from sim.libero import package
from sim.libero.plain import PlainEnv, bind_context
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator
from vla_rl.errors import ConfigError, MissingPackage
from vla_rl.specs import EpisodeSpec

SIZE = 128  # pixels of ours and of lerobot's, LIBERO's own default
REBUILDING_SIZE = 256
EPISODE = 80  # control steps
ROUNDS = 2  # in turns; the fastest counts
RESETS = 8
SLOTS = 4  # whose memory is measured
CHUNKS = (1, 4)  # shown beside the one that is asked for
LEROBOT_DRAWS = 3  # of openings before lerobot's first episode, see LiberoConfig.opening_draws
# added to the actions where physics is compared
PRESSING = np.array([0.0, 0.0, -0.25, 0.0, 0.0, 0.0, 0.0], np.float32)


@dataclass(frozen=True)
class Recorded:
    """An episode from an official initial state, and actions [t 7] to run in it."""

    episode: EpisodeSpec
    actions: np.ndarray


def measure(
    suite: str = "libero_spatial",
    tasks: Sequence[str] = ("0",),
    chunk: int = 8,
    workers: Sequence[int] = (1, 2, 4),
    steps: int = 160,
    camera_size: int = SIZE,
    rounds: int = ROUNDS,
    look: str | None = None,
) -> dict[str, Any]:
    """Both looks are measured: raises `ConfigError` for a ``look``.

    ``steps`` control steps per task and measurement; ``workers``: sizes of the process pool to
    measure (empty: none). Times are milliseconds per control step unless they are per reset; memory
    is MB (10^6 bytes).
    """
    if look is not None:
        raise ConfigError(
            f"--look {look}: the libero benchmark measures both looks; leave the option out"
        )
    if chunk < 1 or steps < 1 or rounds < 1 or not tasks:
        raise ConfigError(
            f"bench needs chunk, steps and rounds >= 1 and a task, got {chunk}, {steps}, {rounds}, "
            f"{list(tasks)}"
        )
    options: dict[str, Any] = {"suite": suite, "tasks": list(tasks), "camera_size": camera_size}
    options["opening_draws"] = LEROBOT_DRAWS
    simulators = {
        name: LiberoSimulator(LiberoConfig(**options | changes))
        for name, changes in VARIANTS.items()
    }
    exact = simulators["exact"]
    episodes = [item for task in exact.tasks for item in record(task.task_id, steps)]
    lerobot = {task.task_id: LerobotEnv(exact, task.task_id, camera_size) for task in exact.tasks}
    rebuilding = {task.task_id: RebuildingEnv(exact.task(task.task_id)) for task in exact.tasks}
    chunks = sorted({*CHUNKS, chunk})
    baselines: dict[str, dict[str, Any]] = {"lerobot": lerobot, "rebuilding": rebuilding}
    calls: dict[Any, Callable[[], float]] = {
        n: functools.partial(run_plain, e, episodes) for n, e in baselines.items()
    }
    for name, simulator in simulators.items():
        calls |= {
            (name, length): functools.partial(run_ours, simulator, episodes, length)
            for length in chunks
        }
    seconds = [{key: call() for key, call in calls.items()} for _ in range(rounds)]  # in turns
    agreement = compare(exact, simulators["light, fast control"], episodes[0], chunk)
    count = sum(len(item.actions) for item in episodes)
    ms = {key: 1e3 * min(each[key] for each in seconds) / count for key in calls}
    document: dict[str, Any] = {
        "suite": suite,
        "tasks": [task.task_id for task in exact.tasks],
        "chunk": chunk,
        "steps": count,
        "camera_size": camera_size,
        "rebuilding_camera_size": REBUILDING_SIZE,
        "gl": os.environ.get("MUJOCO_GL", ""),
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "ms_per_step": {name: ms[name] for name in ("lerobot", "rebuilding")}
        | {name: ms[name, chunk] for name in VARIANTS},
        "ms_per_step_by_chunk": {
            name: {str(length): ms[name, length] for length in chunks} for name in VARIANTS
        },
        "control": control_cost(exact, simulators["light, fast control"], lerobot, episodes),
        "limit": {
            name: limit(simulator, episodes, chunk) for name, simulator in simulators.items()
        },
        "ms_reset": resets(exact, simulators["light, fast control"], lerobot, rebuilding, episodes),
        "ms_task_change": task_change(exact, camera_size),
        "mb_per_slot": slot_memory(exact, lerobot, episodes, camera_size),
        "agreement": agreement,
    }
    opened: list[LerobotEnv | RebuildingEnv | LiberoSimulator]
    opened = [*lerobot.values(), *rebuilding.values(), *simulators.values()]
    for each in opened:
        each.close()
    replays = [(item.episode, item.actions) for item in episodes]
    factory = functools.partial(LiberoSimulator, LiberoConfig(**options))
    document["pool"] = {str(n): measure_pool(factory, replays, chunk, n, rounds=1) for n in workers}
    document["ms_per_step_lerobot_processes"] = {
        str(n): lerobot_processes(n, options, episodes[0]) for n in workers
    }
    return document | {"ratios": ratios(document)}


text = libero_table.text


def record(task_id: str, steps: int) -> list[Recorded]:
    """Episodes of ``task_id`` with hand-like random motions, ``steps`` control steps in all."""
    result = []
    for number, start in enumerate(range(0, steps, EPISODE)):
        rng = np.random.default_rng(number)
        noise = rng.normal(size=(min(EPISODE, steps - start), 7))
        for step in range(1, len(noise)):
            noise[step] = 0.85 * noise[step - 1] + 0.5 * noise[step]
        actions = np.clip(noise, -1.0, 1.0).astype(np.float32)
        result.append(Recorded(EpisodeSpec(task_id, number, split="held_out"), actions))
    return result


# ---------------------------------------------------------------------------------------- baselines
class LerobotEnv:
    """lerobot's `LiberoEnv` with both cameras."""

    def __init__(self, simulator: LiberoSimulator, task_id: str, size: int) -> None:
        package.load(simulator.config.assets)
        try:
            with package.quiet():
                from lerobot.envs.libero import LiberoEnv, _get_suite
        except ImportError as error:
            raise MissingPackage(
                error.name or "lerobot", "libero", "The benchmark's baseline"
            ) from error
        suite, _, index = task_id.partition("/")
        with package.quiet():
            self.env = LiberoEnv(
                _get_suite(suite),
                int(index),
                suite,
                obs_type="pixels_agent_pos",
                observation_width=size,
                observation_height=size,
                num_steps_wait=simulator.config.settle_steps,
            )
        self.plain = self.env._env

    def reset(self, number: int) -> dict[str, Any]:
        bind_context(self.plain)
        self.env.init_state_id = number
        with package.quiet():
            observation, _ = self.env.reset(seed=0)
        bind_context(self.plain)
        return observation

    def step(self, action: np.ndarray) -> Any:
        return self.env.step(action)

    @property
    def data(self) -> Any:
        return self.plain.sim.data._data

    def close(self) -> None:
        bind_context(self.plain)
        self.env.close()


class RebuildingEnv:
    """LIBERO's environment at 256 px; each reset closes it and builds another one."""

    def __init__(self, task: Any) -> None:
        self._task, self._env = task, PlainEnv(task, REBUILDING_SIZE)

    def reset(self, number: int, rebuild: bool = False) -> Any:
        if rebuild:
            self._env.close()
            self._env = PlainEnv(self._task, REBUILDING_SIZE)
        return self._env.reset(0, number)

    def step(self, action: np.ndarray) -> Any:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


# ------------------------------------------------------------------------------------- measurements
def run_plain(envs: dict[str, Any], episodes: Sequence[Recorded]) -> float:
    """Seconds of all control steps; resets are not counted."""
    seconds = 0.0
    for item in episodes:
        env = envs[item.episode.task_id]
        env.reset(item.episode.init_state_id)
        seconds += _seconds(_steps, env, item)
    return seconds


def run_ours(simulator: LiberoSimulator, episodes: Sequence[Recorded], chunk: int) -> float:
    """Seconds of all control steps in slot 0; resets are not counted."""
    seconds = 0.0
    for item in episodes:
        simulator.start(0, item.episode)
        seconds += _seconds(_chunks, simulator, 0, item.actions, chunk)
    return seconds


def _steps(env: Any, item: Recorded) -> None:
    for action in item.actions:
        env.step(action)


def _chunks(simulator: LiberoSimulator, slot: int, actions: np.ndarray, chunk: int) -> None:
    for at in range(0, len(actions), chunk):
        if simulator.step(slot, actions[at : at + chunk]).terminated:
            return


def control_cost(
    exact: LiberoSimulator,
    fast: LiberoSimulator,
    lerobot: dict[str, LerobotEnv],
    episodes: Sequence[Recorded],
) -> dict[str, float]:
    """Milliseconds per control step without any picture: robosuite's own `step` (its cameras
    blind), and ours."""
    item = episodes[0]
    env = lerobot[item.episode.task_id]
    env.reset(item.episode.init_state_id)
    for name, observable in env.plain.env._observables.items():
        if name.endswith("_image"):
            observable._sensor = _Blind()
    result = {"robosuite": _seconds(_steps, env.plain, item)}
    for name, simulator in (("exact", exact), ("fast", fast)):
        simulator.start(0, item.episode)
        result[name] = _seconds(_unseen, simulator, item.actions)
    result["mj_step"] = _physics(exact, item)
    return {f"ms_{name}": 1e3 * seconds / len(item.actions) for name, seconds in result.items()}


class _Blind:
    """A camera of robosuite's that sees nothing."""

    __modality__ = "image"
    picture = np.zeros((1, 1, 3), dtype=np.uint8)

    def __call__(self, _: Any) -> np.ndarray:
        return self.picture


def _unseen(simulator: LiberoSimulator, actions: np.ndarray) -> None:
    """What `step` does, goal check included, without looking at the end."""
    s = simulator.slot(0)
    s.scene.world.apply(s.snapshot.edits)
    doubled: np.ndarray = actions.astype(np.float64)
    for row in range(len(doubled)):
        s.advance(doubled[row])


def _physics(simulator: LiberoSimulator, item: Recorded) -> float:
    """Seconds inside MuJoCo's stepping while the episode runs."""
    simulator.start(0, item.episode)
    return _stepping(simulator, lambda: _unseen(simulator, item.actions))


def _stepping(simulator: LiberoSimulator, run: Callable[[], Any]) -> float:
    """Seconds inside MuJoCo's stepping of slot 0's scene during ``run``."""
    watch = Stopwatch()
    controller = simulator.slot(0).scene.controller
    controller.step1 = watch.wrap("physics", controller.step1)
    controller.step2 = watch.wrap("physics", controller.step2)
    run()
    controller.untimed()
    return watch.seconds["physics"]


def limit(simulator: LiberoSimulator, episodes: Sequence[Recorded], chunk: int) -> dict[str, float]:
    """Milliseconds per control step of physics and of one look per decision, and nothing else."""
    item = episodes[0]
    physics = _physics(simulator, item) / len(item.actions)
    return {"ms_physics": 1e3 * physics, "ms_look": 1e3 * _look(simulator) / chunk}


def _look(simulator: LiberoSimulator, looks: int = 5) -> float:
    """Seconds of one look at slot 0 with every camera."""
    s = simulator.slot(0)
    return (
        _seconds(
            lambda: [
                s.scene.world.render(s.seen.qpos, s.snapshot.edits, True) for _ in range(looks)
            ]
        )
        / looks
    )


def resets(
    exact: LiberoSimulator,
    light: LiberoSimulator,
    lerobot: dict[str, LerobotEnv],
    rebuilding: dict[str, RebuildingEnv],
    episodes: Sequence[Recorded],
) -> dict[str, float]:
    """Milliseconds (median) to another initial state of the same task with its first picture;
    "cached": one used before.

    "limit": MuJoCo's stepping while things settle and the picture, and nothing else. "light": with
    fast control.
    """
    task = episodes[0].episode.task_id
    begin = 20  # states that the episodes have not used
    specs = [EpisodeSpec(task, n, split="held_out") for n in range(begin, begin + RESETS)]

    def median(start: Callable[[Any], Any], items: Sequence[Any]) -> float:
        return 1e3 * float(np.median([_seconds(start, item) for item in items]))

    result = {
        "lerobot": median(lerobot[task].reset, range(begin, begin + RESETS // 2)),
        "rebuilding": 1e3 * _seconds(rebuilding[task].reset, begin, True),
    }
    for name, simulator in (("ours", exact), ("light", light)):
        result[name] = median(functools.partial(simulator.start, 0), specs)
        result[f"{name} cached"] = median(functools.partial(simulator.start, 0), specs)
    look = 1e3 * _look(exact)
    unseen = EpisodeSpec(task, begin + RESETS, split="held_out")
    return result | {"limit": look + 1e3 * _stepping(exact, lambda: exact.start(0, unseen))}


def task_change(exact: LiberoSimulator, size: int) -> dict[str, float]:
    """Milliseconds to another task, first picture included.

    "builds": to a task that was never met, which both build; the others: to one met before, of
    whose environment lerobot keeps one and resets it, to another initial state or ("cached") to one
    used before.
    """
    suite = exact.config.suite
    simulator = LiberoSimulator(
        LiberoConfig(suite=suite, tasks=["0", "1"], camera_size=size, assets=exact.config.assets)
    )
    names = [task.task_id for task in simulator.tasks]
    first = {
        name: _seconds(simulator.start, 0, EpisodeSpec(name, 0, split="held_out")) for name in names
    }
    fresh, cached = (
        [
            _seconds(simulator.start, 0, EpisodeSpec(name, n, split="held_out"))
            for n in (1, 2)
            for name in names
        ]
        for _ in range(2)
    )
    simulator.close()
    start = time.perf_counter()
    env = LerobotEnv(exact, names[1], size)
    env.reset(0)
    theirs = time.perf_counter() - start
    again = [_seconds(env.reset, n) for n in (1, 2)]
    env.close()
    return {
        "lerobot builds": 1e3 * theirs,
        "ours builds": 1e3 * max(first.values()),
        "lerobot": 1e3 * float(np.median(again)),
        "ours": 1e3 * float(np.median(fresh)),
        "ours cached": 1e3 * float(np.median(cached)),
    }


def lerobot_processes(count: int, options: dict[str, Any], item: Recorded) -> float:
    """Milliseconds per control step of ``count`` processes together, each with a lerobot
    environment; resets not counted."""
    context, conns, processes = get_context("spawn"), [], []
    for _ in range(count):
        conn, theirs = context.Pipe()
        processes.append(
            context.Process(target=_step_lerobot, args=(theirs, options, item), daemon=True)
        )
        processes[-1].start()
        theirs.close()  # so that a process which dies ends the wait for it
        conns.append(conn)
    for conn in conns:
        conn.recv()
    for conn in conns:
        conn.send(None)
    seconds = [conn.recv() for conn in conns]
    for process in processes:
        process.join()
    return 1e3 / sum(len(item.actions) / each for each in seconds)


def _step_lerobot(conn: Any, options: dict[str, Any], item: Recorded) -> None:
    """In a process: get ready, wait for the others, and send the seconds of all control steps."""
    env = LerobotEnv(
        LiberoSimulator(LiberoConfig(**options)), item.episode.task_id, options["camera_size"]
    )
    env.reset(item.episode.init_state_id)
    conn.send("ready")
    conn.recv()
    conn.send(_seconds(_steps, env, item))
    env.close()


def slot_memory(
    exact: LiberoSimulator, lerobot: dict[str, LerobotEnv], episodes: Sequence[Recorded], size: int
) -> dict[str, float]:
    """MB that each further slot of the same task takes after some steps; lerobot's: another
    environment."""
    item = episodes[0]
    before = memory_mb()
    for slot in range(1, SLOTS + 1):
        exact.start(slot, item.episode)
        exact.step(slot, item.actions[:16])
    ours = (memory_mb() - before) / SLOTS
    before = memory_mb()
    another = LerobotEnv(exact, item.episode.task_id, size)
    another.reset(0)
    another.step(item.actions[0])
    theirs = memory_mb() - before
    another.close()
    return {"lerobot": theirs, "ours": ours}


def compare(
    exact: LiberoSimulator, fast: LiberoSimulator, item: Recorded, chunk: int
) -> dict[str, float]:
    """Joint states and pixels at every decision: exact against a new lerobot environment's, fast
    against exact."""
    env = LerobotEnv(exact, item.episode.task_id, exact.config.camera_size)
    actions = np.clip(item.actions + PRESSING, -1.0, 1.0)
    observed = env.reset(item.episode.init_state_id)
    started = [simulator.start(0, item.episode) for simulator in (exact, fast)]
    images, decisions, identical, worst, drift = started[0].images, 0, 0, 0.0, 0.0
    for at in range(0, len(actions) + chunk, chunk):
        same = all(
            np.array_equal(images[camera], observed["pixels"][name][::-1, ::-1])
            for camera, name in zip(BOTH, ("image", "image2"))
        )
        decisions, identical = decisions + 1, identical + same
        worst = max(worst, float(np.abs(exact.slot(0).data.qpos - env.data.qpos).max()))
        drift = max(drift, float(np.abs(exact.slot(0).data.qpos - fast.slot(0).data.qpos).max()))
        if at >= len(actions):
            break
        for action in actions[at : at + chunk]:
            observed = env.step(action)[0]
        step = exact.step(0, actions[at : at + chunk])
        fast.step(0, actions[at : at + chunk])
        images = step.observation.images
        if step.terminated:
            break
    env.close()
    return {
        "decisions": decisions,
        "identical": identical,
        "largest_qpos_difference": worst,
        "largest_qpos_difference_of_fast_control": drift,
    }


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    return timed(function, *arguments).wall
