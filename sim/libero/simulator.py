"""LIBERO's task suites as a `vla_rl.interfaces.Simulator`: the benchmark's physics and pixels, one
render per decision.

For those who build on it (demonstrators, perturbations, data readers):
- `LiberoSimulator(LiberoConfig(suite="libero_object", tasks=["0", "3"]))`, then `start` and `step`;
  task ids are ``libero_object/3``. Actions are LIBERO's own commands in [-1, 1] (1 is 0.05 m or 0.5
  rad per control step, gripper -1 opens and +1 closes); proprio is hand position, rotation vector
  and both finger joints, as the published evaluations read it; images are turned by 180 degrees
  unless ``rotate_images`` is off.
- `state(slot)` is a `LiberoView` for scripted experts: positions, rotations and joints by name, the
  parsed goal and which of its parts hold, finger contacts. `task(task_id)` gives the
  `sim.libero.tasks.Task` with its BDDL `Problem`.
- `initial_state(episode)` is the settled `Snapshot` an episode starts from. To perturb a scene,
  subclass the simulator and override `edit_initial_state`: return a copy with other ``edits``
  (fields of the MuJoCo model: camera poses, lights, colours) or another ``physics``; the edits are
  in force whenever that slot is stepped or drawn. `instruction_of` and `picture_of` are the places
  for language and sensor perturbations.
- `scene(task_id)` is the `sim.libero.backend.TaskScene`: the compiled model, LIBERO's own
  environment and its queries.

Episodes of the split "held_out" start from the 50 official initial states of their task
(``init_state_id`` modulo 50), those of "train" from states sampled in the task's own placement
regions (``init_states`` changes that). The outcome depends on the episode alone: fixtures, which
LIBERO places at random at each reset, follow from ``scene_seed`` for official states (one scene for
all episodes of a task, or with ``fixtures`` one each) and from the sampled state's own seed
otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.libero.init_states import read_init_states
from sim.libero.scenes import Scenes
from sim.libero.settings import LiberoConfig
from sim.libero.tasks import (
    GOAL_DIM,
    HAND_DIM,
    MAX_GOALS,
    MAX_OBJECTS,
    OBJECT_DIM,
    Goal,
    Task,
    find_tasks,
    instead_of,
)
from sim.slots import checked_actions, chunk_result, running, task_named
from vla_rl import splits
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    Instead,
    SlotObservation,
    SlotStep,
    TaskSpec,
)

if TYPE_CHECKING:
    import mujoco

    from sim.libero.backend import Snapshot, TaskScene
_CACHED_STATES = 4096
_ATTEMPTS = 20  # at a sampled state that does not fulfil the goal already
# see sim.libero.backend.TaskScene.privileged
_PRIVILEGED = HAND_DIM + OBJECT_DIM * MAX_OBJECTS + GOAL_DIM * MAX_GOALS


class LiberoView:
    """Live state of one slot for scripted experts: m, rad, world frame."""

    def __init__(self, scene: TaskScene, wrapped: Any) -> None:
        self.scene, self.problem, self._wrapped = scene, scene.problem, wrapped
        self.data: mujoco.MjData = wrapped._data

    @property
    def eef_position(self) -> np.ndarray:
        """Of the point between the finger pads [3]."""
        return self.data.site_xpos[self.scene.controller.site].copy()

    @property
    def eef_rotation(self) -> np.ndarray:
        """Rotation matrix [3, 3] of that point."""
        return self.data.site_xmat[self.scene.controller.site].reshape(3, 3).copy()

    @property
    def gripper_open(self) -> float:
        """0 closed ... 1 open."""
        return self.scene.gripper_open(self.data)

    def position(self, name: str) -> np.ndarray:
        """Of an object, a fixture or a region of the BDDL file [3]."""
        return self.scene.position(self.data, name)

    def rotation(self, name: str) -> np.ndarray:
        """Rotation matrix [3, 3] of an object, a fixture or a region."""
        return self.scene.rotation(self.data, name)

    def joint(self, name: str) -> float:
        """Of a drawer, door or knob, by the name of its fixture or region."""
        return self.scene.joint(self.data, name)

    def touches(self, name: str) -> tuple[bool, bool]:
        """Whether the left and the right finger touch an object."""
        return self.scene.touches(self.data, name)

    def holds(self) -> list[bool]:
        """Which parts of ``problem.goal`` hold."""
        return self.scene.holds(self._wrapped)


class LiberoSimulator:
    """See the module's text. A task's scene is compiled when its first episode starts."""

    Config = LiberoConfig
    tells_instead = True

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        self._tasks = {
            task.task_id: task for task in find_tasks(config.suite, config.tasks, config.files)
        }
        self.tasks = tuple(
            TaskSpec(t.task_id, (t.instruction,), (t.instruction,), config.horizon or t.horizon)
            for t in self._tasks.values()
        )
        self._horizon = {task.task_id: task.horizon for task in self.tasks}
        self.embodiment = _embodiment(config)
        self._low, self._high = (
            np.array(self.embodiment.action_low),
            np.array(self.embodiment.action_high),
        )
        self.privileged_dim = _PRIVILEGED + len(self.tasks)
        self._slots: dict[int, _Slot] = {}
        self.scenes = Scenes(config, self.embodiment.cameras, self._slots)
        self._cache: OrderedDict[tuple[str, str, int], Snapshot] = OrderedDict()

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Put ``slot`` into the episode's settled initial state. `ConfigError` for a task that
        is not configured."""
        scene = self.scene(episode.task_id)
        snapshot = self.edit_initial_state(episode, scene, self.initial_state(episode))
        s = self._slots.get(slot) or _Slot()
        others = instead_of(scene.task, self._tasks.values())
        s.begin(episode, scene, snapshot, self._horizon[episode.task_id], others)
        self._slots[slot] = s
        self.scenes.drop()  # the slot may have left the last use of one
        return self.observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h 7] until they are over or the episode ends; observe once."""
        s = running(self._slots, slot)
        actions = checked_actions(slot, actions, len(self._low))
        actions = np.clip(actions, self._low, self._high)
        rewards = np.zeros(len(actions), dtype=np.float32)
        executed, scene = 0, s.scene
        scene.world.apply(s.snapshot.edits)
        with scene.posture(_posture(scene.task)):
            for row in actions:
                s.advance(row)
                executed += 1
                rewards[executed - 1] = float(s.success)
                if s.success or s.elapsed >= s.horizon:
                    break
        if scene.blew_up(s.data):
            s.over = True
            raise FloatingPointError(
                f"the physics of {s.episode.task_id}, initial state {s.episode.init_state_id} "
                f"({s.episode.split}), became unstable within control steps "
                f"{s.elapsed - executed + 1} to {s.elapsed}"
            )
        truncated = not s.success and s.elapsed >= s.horizon
        s.over = s.success or truncated
        failure = s.tracker.verdict() if truncated and s.tracker is not None else ""
        return chunk_result(
            self.observe(slot), rewards, executed, s.success, truncated, failure, self._instead(s)
        )

    def close(self) -> None:
        """Free compiled scenes, slots and GL contexts. May be called again."""
        self._slots.clear()
        self._cache.clear()
        self.scenes.close()

    def _instead(self, s: _Slot) -> Instead | None:
        """The first other task whose goal holds as a decision ends, within that one's time."""
        for goal, task_id in s.others.items():
            if s.elapsed <= self._horizon[task_id] and s.scene.achieves(s.wrapped, goal):
                asked = dataclasses.replace(s.episode, task_id=task_id)
                return Instead(task_id, self.instruction_of(asked))
        return None

    # ----------------------------------------------------------------------------- where to hook in
    def edit_initial_state(
        self, episode: EpisodeSpec, scene: TaskScene, snapshot: Snapshot
    ) -> Snapshot:
        """What the episode really starts from; a subclass may return a changed copy."""
        return snapshot

    def instruction_of(self, episode: EpisodeSpec) -> str:
        """What the policy is told."""
        return self._tasks[episode.task_id].instruction

    def picture_of(self, slot: int, images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the policy sees of the rendered ``images``."""
        return images

    # ------------------------------------------------------------------------------------ beyond it
    def observe(self, slot: int) -> SlotObservation:
        """What the slot shows now; renders every configured camera."""
        s = running(self._slots, slot, over=True)
        edits = s.scene.picture_edits(s.snapshot, s.seen.lit)
        images = s.scene.world.render(s.seen.qpos, edits, self.config.rotate_images)
        state = s.scene.privileged(s.wrapped, 1.0 - s.elapsed / s.horizon)
        one_hot = np.array([task == s.episode.task_id for task in self._tasks], dtype=np.float32)
        return SlotObservation(
            images=self.picture_of(slot, images),
            proprio=s.scene.proprio(s.seen),
            instruction=self.instruction_of(s.episode),
            privileged=np.concatenate([state, one_hot]),
        )

    def state(self, slot: int) -> LiberoView:
        """What scripted experts read."""
        s = running(self._slots, slot, over=True)
        return LiberoView(s.scene, s.wrapped)

    def task(self, task_id: str) -> Task:
        """A configured task. `ConfigError` for another one."""
        return task_named(self._tasks, task_id)

    def initial_state(self, episode: EpisodeSpec) -> Snapshot:
        """The settled snapshot that an episode starts from; the latest ones are kept."""
        number = episode.init_state_id
        if self.config.is_official(episode.split):
            states = _official_states(str(self.task(episode.task_id).init_file))
            key = (episode.task_id, "official", number % len(states))
        else:
            states, key = None, (episode.task_id, episode.split, number)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        scene = self.scene(episode.task_id)
        begin = _sampled if states is None else official_state
        with scene.posture(_posture(scene.task)):
            snapshot = begin(self.config, scene, episode)
        if scene.task.change is not None:
            from sim.libero.perturb_scene import plus_view

            scene.world.apply(snapshot.edits)  # the model may hold another slot's camera
            edits = plus_view(scene.model, "agentview", scene.task.change.view)
            snapshot = dataclasses.replace(snapshot, edits={**snapshot.edits, **edits})
        self._cache[key] = snapshot
        while len(self._cache) > _CACHED_STATES:
            self._cache.popitem(last=False)
        return snapshot

    def scene(self, task_id: str) -> TaskScene:
        """The task's compiled scene; built at first use, the least recently used ones are
        dropped."""
        return self.scenes.of(self.task(task_id))

    def slot(self, slot: int) -> _Slot:
        """What a slot runs, or ran last."""
        return running(self._slots, slot, over=True)


def official_state(config: LiberoConfig, scene: TaskScene, episode: EpisodeSpec) -> Snapshot:
    """One of the benchmark's own, settled."""
    states = _official_states(str(scene.task.init_file))
    number = episode.init_state_id % len(states)
    seed = config.scene_seed + (number if config.fixtures == "numbered" else 0)
    resets = number + 1 if config.fixtures == "loop" else 1
    return scene.settled(seed=seed, state=states[number], steps=config.settle_steps, resets=resets)


def _sampled(config: LiberoConfig, scene: TaskScene, episode: EpisodeSpec) -> Snapshot:
    for attempt in range(_ATTEMPTS):
        seed = (
            splits.stable_seed(
                "libero", episode.task_id, episode.split, episode.init_state_id, attempt
            )
            % 2**32
        )
        snapshot = scene.settled(
            seed=seed,
            state=None,
            steps=config.settle_steps,
            arm_noise=config.arm_noise,
        )
        if not snapshot.success:
            break
    return snapshot


def _posture(task: Task) -> np.ndarray | None:
    """Where resets put the arm of a task, if it has a place of its own."""
    own = task.change and task.change.posture
    return None if own is None else np.array(own)


@functools.lru_cache(maxsize=256)
def _official_states(path: str) -> np.ndarray:
    return read_init_states(path)


class _Slot:
    """One slot: its MjData per world, controller state and episode counters."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}

    def begin(
        self,
        episode: EpisodeSpec,
        scene: TaskScene,
        snapshot: Snapshot,
        horizon: int,
        others: Mapping[Goal, str],
    ) -> None:
        self.episode, self.scene, self.snapshot, self.horizon = episode, scene, snapshot, horizon
        if scene.key not in self._wrapped:
            self._wrapped[scene.key] = scene.new_data()
        self.wrapped = self._wrapped[scene.key]
        self.data: mujoco.MjData = self.wrapped._data
        self.control, self.clock, self.seen = snapshot.copy_working_state()
        self.lit = snapshot.lit
        scene.restore(self.wrapped, snapshot)
        self.tracker = scene.tracker(self.wrapped)
        # goals of other tasks that do not hold already
        self.others = {g: t for g, t in others.items() if not scene.achieves(self.wrapped, g)}
        self.elapsed, self.success, self.over = 0, False, False

    def advance(self, action: np.ndarray) -> None:
        """One control step under ``action`` [7]; the world must have the slot's edits in force."""
        scene = self.scene
        self.seen.lit = self.lit
        scene.controller.advance(self.data, self.control, action, self.clock, self.seen)
        self.lit = scene.lit(self.wrapped)
        self.success = scene.success(self.wrapped)
        if self.tracker is not None:
            self.tracker.update(opening=action[6] < 0.0)
        self.elapsed += 1

    def forget(self, key: str) -> None:
        """Drop the state that belongs to a world which is gone."""
        self._wrapped.pop(key, None)


def _embodiment(config: LiberoConfig) -> EmbodimentSpec:
    absolute = config.control_mode == "absolute"
    names = (
        ("x", "y", "z", "rx", "ry", "rz") if absolute else ("dx", "dy", "dz", "drx", "dry", "drz")
    )
    high = (3.0,) * 3 + (float(2 * np.pi),) * 3 + (1.0,) if absolute else (1.0,) * 7
    return EmbodimentSpec(
        name=f"libero_panda_osc_{config.control_mode}",
        action_names=(*names, "gripper"),
        action_units=(("m",) * 3 + ("rad",) * 3 if absolute else ("0.05 m",) * 3 + ("0.5 rad",) * 3)
        + ("command",),
        action_low=tuple(-v for v in high),
        action_high=high,
        frame="world",
        rotation="axis_angle" if absolute else "axis_angle_delta",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=tuple(
            CameraSpec(name, config.camera_size, config.camera_size) for name in config.cameras
        ),
        proprio_names=(
            "eef_x",
            "eef_y",
            "eef_z",
            "eef_rx",
            "eef_ry",
            "eef_rz",
            "finger_left",
            "finger_right",
        ),
    )
