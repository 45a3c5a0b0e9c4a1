"""The compiled scenes of a process: built when first asked for, kept while there is room."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sim.gl import free_context, make_context
from sim.libero.settings import LiberoConfig
from sim.libero.tasks import Task
from vla_rl.devices import free_memory_bytes, release_memory
from vla_rl.specs import CameraSpec

if TYPE_CHECKING:
    from sim.libero.backend import TaskScene

# bytes that have to be free before a scene is built: its textures are there several times meanwhile
_ROOM = {"exact": 2 << 30, "light": 1 << 30}
_SHORT_OF_MEMORY = (
    "LIBERO: memory is short, so a scene that had been dropped is built again, which takes seconds; "
    "this will go on. Fewer processes (slots.workers), fewer tasks or env.look=light need less."
)


class _InScene(Protocol):
    """A slot: it is in a scene, and lets go of what it has of a world that is gone."""

    scene: TaskScene

    def forget(self, key: str) -> None: ...


class Scenes:
    """Of tasks, which may share a world. A scene that one of ``slots`` is in is never dropped."""

    def __init__(
        self, config: LiberoConfig, cameras: Sequence[CameraSpec], slots: Mapping[int, _InScene]
    ) -> None:
        self.config, self.cameras = config, tuple(cameras)
        self.built: OrderedDict[str, TaskScene] = OrderedDict()  # the least recently used first
        self.worlds: dict[str, Any] = {}
        self._slots = slots
        self._dropped: set[str] = set()  # tasks whose scene went for want of memory
        self._said = False
        self._gl: list[Any] = []  # the process's one context, once a scene needs it
        self._free = weakref.finalize(self, _free_worlds, self.worlds, self._gl)
        self._free.atexit = False  # see _build

    def of(self, task: Task) -> TaskScene:
        """The task's scene. ValueError once they are closed."""
        if task.task_id in self.built:
            self.built.move_to_end(task.task_id)
            return self.built[task.task_id]
        if not self._free.alive:
            raise ValueError("this simulator is closed: make a new one")
        self.make_room()
        if task.task_id in self._dropped and not self._said:
            self._said = True
            print(_SHORT_OF_MEMORY, file=sys.stderr, flush=True)
        scene = self.built[task.task_id] = self._build(task)
        self.drop()
        return scene

    def drop(self) -> None:
        """Keep to ``built_scenes``: drop scenes that no slot is in."""
        busy = {s.scene.task.task_id for s in self._slots.values()}
        for task_id in list(self.built)[:-1]:
            if len(self.built) <= self.config.built_scenes:
                break
            if task_id not in busy:
                self._drop([task_id])

    def make_room(self) -> None:
        """Drop worlds that no slot is in while the machine has too little memory for one more."""
        busy = {s.scene.key for s in self._slots.values()}
        used = dict.fromkeys(scene.key for scene in self.built.values())  # the oldest first
        idle = [key for key in used if key not in busy]
        while idle and 0 < free_memory_bytes() < _ROOM[self.config.look]:
            key = idle.pop(0)
            tasks = [task for task, scene in self.built.items() if scene.key == key]
            self._drop(tasks)
            self._dropped |= set(tasks)
            release_memory()

    def close(self) -> None:
        """Free scenes and GL context. May be called again."""
        self.built.clear()
        self._free()

    def _build(self, task: Task) -> TaskScene:
        from sim.libero.backend import TaskScene
        from sim.libero.look import Look

        config = self.config
        if not self._gl:
            self._gl.append(make_context(config.camera_size))
            atexit.register(self._free)  # now, so that it runs before mujoco shuts the display down
        return TaskScene(
            task,
            self.worlds,
            look=Look(config.look),
            cameras=self.cameras,
            gl=self._gl[0],
            exact=config.controller == "exact",
            absolute=config.control_mode == "absolute",
            assets=config.assets,
            opening_draws=config.opening_draws,
        )

    def _drop(self, tasks: Iterable[str]) -> None:
        """Scenes, and their worlds where no other one is left of those."""
        for task_id in tasks:
            key = self.built.pop(task_id).key
            if all(scene.key != key for scene in self.built.values()):
                self.worlds.pop(key).close()
                for s in self._slots.values():
                    s.forget(key)


def _free_worlds(worlds: dict[str, Any], contexts: list[Any]) -> None:
    for world in worlds.values():
        world.close()
    worlds.clear()
    while contexts:
        free_context(contexts.pop())
