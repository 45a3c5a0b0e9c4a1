"""The embedded robosuite suite as a `vla_rl.interfaces.Simulator`: chunk stepping, one render per
decision.

Every scene is compiled once per process and shared by all slots; a slot owns an `MjData` and a
controller state. Images are RGB, upright (first row is the top). As after robosuite's own `step`,
what is seen after a control step is the kinematic state of its last sub-step before integration (2
ms old).
"""

from __future__ import annotations

import atexit
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.failures import FailureTracker
from sim.gl import ensure_backend, free_context, make_context
from sim.slots import (
    checked_actions,
    chunk_result,
    in_words,
    instruction,
    lasting,
    running,
    task_named,
    time_limit,
)
from sim.tabletop.demonstrator import Demonstrator, make_demonstrator
from sim.tabletop.tasks import PRIVILEGED_DIM, SCENES, TASKS, Task, place_objects
from vla_rl import splits
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import require_packages
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    Instead,
    Mirror,
    SlotObservation,
    SlotStep,
)

if TYPE_CHECKING:
    import mujoco

CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "sideview", "birdview")
_CONTROLLERS = ("osc_position", "osc_pose")
_LOOKS = ("light", "full")
_CACHED_STATES = 4096


@dataclass
class TabletopConfig(Bounded, place="env"):
    """The embedded suite: which tasks, how the arm is controlled, what the cameras show.

    ``horizon`` 0 keeps each task's own; ``action_noise`` is the std (share of the range) of noise
    that the simulator itself adds to every executed action, from the episode's seed; an episode
    succeeds after ``success_hold`` successful control steps in a row.
    """

    # ids of the tasks that may be asked for
    tasks: list[str] = several(["lift_cube"], choices=tuple(TASKS), least=1, once=True)
    # motions of the hand without or with its rotation
    controller: str = bound("osc_position", choices=_CONTROLLERS)
    # robosuite's names of the cameras to render
    cameras: list[str] = several(
        ["agentview", "robot0_eye_in_hand"], choices=CAMERAS, least=1, once=True
    )
    # pixels per side
    camera_size: int = bound(84, ge=16, le=2048)
    # a cheap picture, or robosuite's own
    look: str = bound("light", choices=_LOOKS)
    # control steps that end an episode; 0: each task's own
    horizon: int = bound(0, ge=0)
    # std of noise on every executed action, as a share of the range
    action_noise: float = bound(0.0, ge=0)
    # successful control steps in a row that make a success
    success_hold: int = bound(1, ge=1)

    def check_machine(self) -> None:
        """Raise `MissingPackage` or `MissingDependency` where this env cannot run here; imports
        no simulator."""
        require_packages("mujoco", "robosuite", extra="sim", purpose="The tabletop suite")
        ensure_backend()

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        limit = time_limit(self.horizon)
        return f"{self.look} look at {self.camera_size} px, {self.controller} control, {limit}"


class TabletopSimulator:
    """See the module's text. Scenes are compiled when their first episode starts."""

    tells_instead = True

    def __init__(self, config: TabletopConfig) -> None:
        from sim.tabletop import backend

        self.config = config
        self._task = {name: TASKS[name] for name in config.tasks}
        self.tasks = lasting((task.spec for task in self._task.values()), config.horizon)
        self._horizon = {t.task_id: t.horizon for t in self.tasks}
        self.embodiment = _embodiment(config)
        self._half_range = np.array(self.embodiment.action_high)
        self.privileged_dim = PRIVILEGED_DIM
        self._backend = backend
        self._scenes: dict[str, backend.CompiledScene] = {}
        self._slots: dict[int, _Slot] = {}
        self._cache: OrderedDict[tuple[str, str, int], Any] = OrderedDict()
        self._gl: list[Any] = []  # the process's one context, once a scene needs it
        self._free = weakref.finalize(self, _free_scenes, self._scenes, self._gl)
        self._free.atexit = False  # see _scene
        # a benchmark's stopwatch around rendering
        self.timed: Callable[[str, Callable], Callable] | None = None

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Put ``slot`` into the episode's settled initial state. `ConfigError` for a task that
        is not configured."""
        task = task_named(self._task, episode.task_id)
        scene = self._scene(task.scene)
        s = self._slots.setdefault(slot, _Slot())
        s.begin(task, episode, scene, [t for t in self._task.values() if t.scene == task.scene])
        scene.restore(s.data(scene), s.control, self.initial_state(episode))
        s.tracker = scene.judge.tracker(task, s.data(scene))
        return self.observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h a] (physical units) until they are over or the episode ends;
        observe once."""
        s = running(self._slots, slot)
        actions = checked_actions(slot, actions, len(self._half_range))
        scaled = np.clip(actions / self._half_range, -1.0, 1.0)
        rewards = np.zeros(len(actions), dtype=np.float32)
        horizon = self._horizon[s.task.task_id]
        executed, data, instead = 0, s.data(s.scene), None
        for row in scaled:
            if self.config.action_noise:
                row = np.clip(
                    row + self.config.action_noise * s.noise.standard_normal(len(row)), -1.0, 1.0
                )
            s.scene.controller.control_step(data, s.control, row)
            s.elapsed += 1
            executed += 1
            s.tracker.update(opening=row[-1] < 0.0)
            solved = s.solved(self.config.success_hold)
            if s.task.task_id in solved:
                s.success = True
                rewards[executed - 1] = 1.0
            instead = instead or self._instead(s, solved)
            if s.success or s.elapsed >= horizon:
                break
        truncated = not s.success and s.elapsed >= horizon
        s.over = s.success or truncated
        failure = s.tracker.verdict() if truncated else ""
        return chunk_result(
            self.observe(slot), rewards, executed, s.success, truncated, failure, instead
        )

    def close(self) -> None:
        """Free compiled scenes, slots and GL contexts. May be called again."""
        self._slots.clear()
        self._cache.clear()
        self._free()

    # ------------------------------------------------------------------------------------ beyond it
    def observe(self, slot: int) -> SlotObservation:
        """What the slot shows now; renders every configured camera."""
        s = running(self._slots, slot, over=True)
        data = s.data(s.scene)
        render = s.scene.render if self.timed is None else self.timed("rendering", s.scene.render)
        images = render(data, self.config.cameras)
        fraction = 1.0 - s.elapsed / self._horizon[s.task.task_id]
        return SlotObservation(
            images=images,
            proprio=s.scene.proprio(data),
            instruction=instruction(s.task.spec, s.episode),
            privileged=s.scene.judge.privileged(s.task, data, fraction),
        )

    def demonstrator(self, task_id: str) -> Demonstrator:
        """A fresh scripted expert for one episode of ``task_id``; feed it `state` of the slot at
        every control step."""
        return make_demonstrator(self._task[task_id], self.embodiment.action_dim)

    def state(self, slot: int) -> Any:
        """Positions that the scripted experts read (`sim.tabletop.backend.SceneView`)."""
        s = running(self._slots, slot, over=True)
        return s.scene.view(s.data(s.scene))

    def _instead(self, s: _Slot, solved: Iterable[str]) -> Instead | None:
        """The first of ``solved`` that the episode was not about, within that one's time."""
        for task_id in solved:
            if task_id != s.task.task_id and s.elapsed <= self._horizon[task_id]:
                return in_words(self.tasks, task_id, s.episode)
        return None

    def _scene(self, name: str) -> Any:
        if name not in self._scenes:
            if not self._free.alive:
                raise ValueError("this simulator is closed: make a new one")
            config = self.config
            if not self._gl:
                self._gl.append(make_context(config.camera_size))
                # now, so that it runs before mujoco shuts the display down
                atexit.register(self._free)
            self._scenes[name] = self._backend.CompiledScene(
                SCENES[name], config.controller, config.look, config.camera_size, self._gl[0]
            )
        return self._scenes[name]

    def initial_state(self, episode: EpisodeSpec) -> Any:
        """The settled `sim.tabletop.backend.Snapshot` that an episode starts from; the latest
        ones are kept."""
        key = (episode.task_id, episode.split, episode.init_state_id)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        task = self._task[episode.task_id]
        poses = place_objects(task, episode.init_state_id, episode.split)
        state = self._cache[key] = self._scene(task.scene).settle(poses)
        while len(self._cache) > _CACHED_STATES:
            self._cache.popitem(last=False)
        return state

    def scenes(self) -> Iterable[Any]:
        """The scenes compiled so far."""
        return self._scenes.values()

    def scene_of(self, task_id: str) -> str:
        """Name of a task's scene."""
        return self._task[task_id].scene

    def physics(self, slot: int) -> mujoco.MjData:
        """The slot's MuJoCo state."""
        s = running(self._slots, slot, over=True)
        return s.data(s.scene)


def _free_scenes(scenes: dict[str, Any], contexts: list[Any]) -> None:
    for scene in scenes.values():
        scene.close()
    scenes.clear()
    while contexts:
        free_context(contexts.pop())


class _Slot:
    """One slot: its MjData per scene, controller state and episode counters."""

    def __init__(self) -> None:
        self._data: dict[str, mujoco.MjData] = {}
        self.control: Any = None
        self.tracker: FailureTracker  # once the scene is put into the episode's state

    def begin(self, task: Task, episode: EpisodeSpec, scene: Any, tasks: Iterable[Task]) -> None:
        """``tasks``: all that the scene is used for."""
        self.task, self.episode, self.scene = task, episode, scene
        self.control = scene.new_control_state()
        self.elapsed = 0
        self._held = dict.fromkeys(tasks, 0)  # successful control steps in a row
        self.success = self.over = False
        self.noise = np.random.Generator(
            np.random.PCG64(splits.stable_seed("action_noise", episode.seed))
        )

    def solved(self, hold: int) -> list[str]:
        """Ids of the scene's tasks that have been solved for ``hold`` control steps in a row;
        call it once after each."""
        data = self.data(self.scene)
        for task, steps in self._held.items():
            self._held[task] = steps + 1 if self.scene.judge.success(task, data) else 0
        return [task.task_id for task, steps in self._held.items() if steps >= hold]

    def data(self, scene: Any) -> mujoco.MjData:
        if scene.name not in self._data:
            self._data[scene.name] = scene.new_data()
        return self._data[scene.name]


def _embodiment(config: TabletopConfig) -> EmbodimentSpec:
    pose = config.controller == "osc_pose"
    turns = ("drx", "dry", "drz") if pose else ()
    quaternion = ("eef_qx", "eef_qy", "eef_qz", "eef_qw") if pose else ()
    high = (0.05,) * 3 + (0.5,) * len(turns) + (1.0,)
    return EmbodimentSpec(
        name=f"robosuite_panda_{config.controller}",
        action_names=("dx", "dy", "dz", *turns, "gripper"),
        action_units=("m",) * 3 + ("rad",) * len(turns) + ("command",),
        action_low=tuple(-v for v in high),
        action_high=high,
        frame="world",
        rotation="axis_angle_delta" if pose else "none",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=tuple(
            CameraSpec(name, config.camera_size, config.camera_size) for name in config.cameras
        ),
        proprio_names=("eef_x", "eef_y", "eef_z", "gripper_open", *quaternion),
        mirror=None
        if any(SCENES[TASKS[name].scene].zone for name in config.tasks)
        else _mirror(pose),
    )


def _mirror(pose: bool) -> Mirror:
    """At the plane y = 0. A turn is a pseudovector: its part about y stays. The frame of the hand's
    quaternion lies at 45 degrees to the fingers, so that the hand's own mirror exchanges its x and
    y axes."""
    quaternion = (("eef_qx", "eef_qy"), ("eef_qz", "eef_qw")) if pose else ()
    return Mirror(negated=("dy", "eef_y", *(("drx", "drz") if pose else ())), exchanged=quaternion)
