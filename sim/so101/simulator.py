"""An SO-101 at its table as a `vla_rl.interfaces.Simulator`: joints in, joints and two pictures out,
named and counted as lerobot's `SOFollower` does, so that a policy that learned here opens on the
real arm.

The scene is compiled once per process and shared by all slots; a slot owns its `MjData`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.gl import ensure_backend
from sim.slots import (
    checked_actions,
    chunk_result,
    instruction,
    lasting,
    running,
    task_named,
    time_limit,
)
from sim.so101.joints import CONTROL_HZ, HIGH, LOW, embodiment
from sim.so101.tasks import PRIVILEGED_DIM, TASKS, Task, place_cube
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import require_packages
from vla_rl.specs import CameraSpec, EpisodeSpec, SlotObservation, SlotStep

if TYPE_CHECKING:
    from sim.so101.demonstrator import Expert
    from sim.so101.world import Judge, World

CAMERAS = ("front", "wrist")


@dataclass
class SO101Config(Bounded, place="env"):
    """The simulated SO-101: which tasks, what is seen, how fast its joints may go.

    A joint's goal goes towards what an action says by at most ``joint_speed``: that of the first
    limits of a real arm's kit, so that what was learned is no faster than these. ``horizon`` 0 keeps
    each task's own.
    """

    # ids of the tasks that may be asked for
    tasks: list[str] = several(["lift_cube"], choices=tuple(TASKS), least=1, once=True)
    # names of the cameras to render
    cameras: list[str] = several(list(CAMERAS), choices=CAMERAS, least=1, once=True)
    # pixels per side
    camera_size: int = bound(84, ge=16, le=2048)
    # degrees a second, and of the gripper percent
    joint_speed: float = bound(60.0, gt=0, le=400)
    # control steps that end an episode; 0: each task's own
    horizon: int = bound(0, ge=0)

    def check_machine(self) -> None:
        """Raise `MissingPackage` or `MissingDependency` where this env cannot run here; imports
        no simulator."""
        from sim.so101.model import model_file

        model_file()
        require_packages("mujoco", extra="sim", purpose="The simulated SO-101")
        ensure_backend()

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        limit = time_limit(self.horizon)
        return f"{self.camera_size} px, joints up to {self.joint_speed:g} deg/s, {limit}"


class SO101Simulator:
    """See the module's text. The scene is compiled when the first episode starts."""

    def __init__(self, config: SO101Config) -> None:
        self.config = config
        self._task = {name: TASKS[name] for name in config.tasks}
        self.tasks = lasting((task.spec for task in self._task.values()), config.horizon)
        self._horizon = {t.task_id: t.horizon for t in self.tasks}
        size = config.camera_size
        self.embodiment = embodiment(tuple(CameraSpec(name, size, size) for name in config.cameras))
        self.privileged_dim = PRIVILEGED_DIM
        self._most = config.joint_speed / CONTROL_HZ
        self._slots: dict[int, _Slot] = {}
        self._scenes: list[Any] = []  # the one, once it is compiled
        self._free = weakref.finalize(self, _free, self._scenes)

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Put ``slot`` into the episode's initial state. `ConfigError` for a task that is not
        configured."""
        task = task_named(self._task, episode.task_id)
        s = self._slots.get(slot)
        world = self._made() if s is None else s.world
        world.begin(place_cube(episode.init_state_id, episode.split))
        self._slots[slot] = _Slot(task, episode, world)
        return self.observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h 6] (degrees, percent) until they are over or the episode ends; observe
        once."""
        s = running(self._slots, slot)
        actions = np.clip(checked_actions(slot, actions, len(LOW)), LOW, HIGH)
        rewards = np.zeros(len(actions), dtype=np.float32)
        executed, horizon = 0, self._horizon[s.task.spec.task_id]
        for row in actions:
            before = s.world.goal[5]
            s.world.control_step(row, self._most, 1.0 / CONTROL_HZ)
            s.elapsed += 1
            executed += 1
            s.judge.tracker.update(opening=bool(s.world.goal[5] > before))
            s.success = s.judge.success()
            if s.success:
                rewards[executed - 1] = 1.0
            if s.success or s.elapsed >= horizon:
                break
        truncated = not s.success and s.elapsed >= horizon
        s.over = s.success or truncated
        failure = s.judge.tracker.verdict() if truncated else ""
        return chunk_result(self.observe(slot), rewards, executed, s.success, truncated, failure)

    def close(self) -> None:
        """Free scene, slots and GL context. May be called again."""
        self._slots.clear()
        self._free()

    # ------------------------------------------------------------------------------------ beyond it
    def observe(self, slot: int) -> SlotObservation:
        """What the slot shows now; renders every configured camera."""
        s = running(self._slots, slot, over=True)
        scene, config = s.world.scene, self.config
        return SlotObservation(
            images=scene.render(s.world.data, config.cameras, config.camera_size),
            proprio=s.world.told().astype(np.float32),
            instruction=instruction(s.task.spec, s.episode),
            privileged=s.judge.privileged(1.0 - s.elapsed / self._horizon[s.task.spec.task_id]),
        )

    def world(self, slot: int) -> World:
        """Where the episode of ``slot`` takes place."""
        return running(self._slots, slot, over=True).world

    def judge(self, slot: int, task_id: str) -> Judge:
        """Whether ``task_id`` is done there, from now on."""
        from sim.so101.world import Judge

        return Judge(self._task[task_id], self.world(slot))

    def demonstrator(self, slot: int, speed: float = 1.0) -> Expert:
        """A fresh scripted expert for the episode that just started in ``slot``."""
        from sim.so101.demonstrator import Expert

        s = running(self._slots, slot)
        return Expert(s.task, s.world, speed * self._most)

    def _made(self) -> World:
        ensure_backend()  # before mujoco is imported
        from sim.so101.world import Scene, World

        if not self._scenes:
            if not self._free.alive:
                raise ValueError("this simulator is closed: make a new one")
            self._scenes.append(Scene())
        return World(self._scenes[0])


def _free(scenes: list[Any]) -> None:
    while scenes:
        scenes.pop().close()


class _Slot:
    """One slot's episode: its world, who watches it and how far it is."""

    def __init__(self, task: Task, episode: EpisodeSpec, world: World) -> None:
        from sim.so101.world import Judge

        self.task, self.episode, self.world = task, episode, world
        self.judge: Judge = Judge(task, world)
        self.elapsed = 0
        self.success = self.over = False
